"""The decoder on Triton kernels: no synchronisation with the device; a decode step can be one CUDA graph.

It computes and rounds as TorchDecoder does. Requires triton, which torch's CUDA builds include.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.decoders.torch_decoder import Copies, Tensors, TorchDecoder, no_lora_deltas
from hybrid.decoders.tp_decoder import ShardedDecoder
from hybrid.kernels.cuda_graph import GraphedStep, capture_on_device
from hybrid.kernels.kv_addresses import LayerKV, kv_addresses
from hybrid.kernels.triton_attention import (
    WIDEST_TILE,
    SplitWorkspace,
    decode_attention,
    prefill_attention,
    split_workspace,
)
from hybrid.kernels.triton_experts import mixture
from hybrid.kernels.triton_fused import QKNorm, activated, add_norm, rope_and_write
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.weights.lora import LowRank


@dataclass(frozen=True)
class Step:
    """What the layers of one forward share.

    batch: the new tokens.  decoding: whether it has one token for each sequence.
    slot_mapping: int64 [tokens]: the cache position of each new token's key and value.
    """

    batch: PackedBatch
    decoding: bool
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class Pending:
    """What is still to be added to the residual stream.

    output: of attention or MLP, [tokens, hidden].
    post_norm: None, or the weight of the norm that the output goes through first, [hidden].
    """

    output: torch.Tensor
    post_norm: torch.Tensor | None = None


class CudaDecoder(TorchDecoder):
    """TorchDecoder's functions on Triton kernels.

    max_capture_size: decode steps of at most so many sequences are replayed from CUDA graphs; 0: no graphs.
    capture: captures the graphs.

    BLOCK 0 OF THE CACHE IS RESERVED: the padding rows of a graph write there, so no sequence may have it.
    """

    # A longer context has more than two tiles, which attention divides if the batch leaves multiprocessors idle.
    context_block = 2 * WIDEST_TILE

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        max_capture_size: int = 0,
        capture: Callable = capture_on_device,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
    ):
        super().__init__(layout, weights, dtype, lora_deltas, copies)
        self.max_capture_size, self.capture = max_capture_size, capture
        self.positions = 0  # positions in the rope tables and ALiBi's bias
        self.rope: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by rotary key: cos, sin [positions, dim / 2]
        self.bias: torch.Tensor | None = None  # ALiBi's, [heads, positions]
        self.graphed: GraphedStep | None = None
        self.addresses: tuple[float, ...] = ()  # of the weights and LoRA factors, and LoRA's scales
        self.kv_table: torch.Tensor | None = None  # int64 [layers, 2]: addresses of the blocks that kernels read
        self.kv_table_of: tuple[int, ...] = ()  # these addresses, on the host
        self.workspace: SplitWorkspace | None = None  # of decode attention
        self.lent: PagedKV | None = None  # the blocks, while a graph is captured or replayed
        self.lent_addresses: tuple[int, ...] = ()  # of the blocks that the graphs read

    def bind(self) -> None:
        """As TorchDecoder's. Graphs are kept if no weight has moved and no LoRA scale has changed."""
        super().bind()
        blocks = (self.outer, *self.blocks)
        deltas = [delta for block in blocks for deltas in block.lora_deltas.values() for delta in deltas]
        tensors = [tensor for block in blocks for tensor in block.values()]
        tensors += [factor for delta in deltas for factor in (delta.a, delta.b)]
        addresses = (*(tensor.data_ptr() for tensor in tensors), *(delta.scale for delta in deltas))
        if addresses != self.addresses and self.graphed is not None:
            self.graphed.reset()
        self.addresses = addresses

    def reserve(self, tokens: int) -> None:
        """Build rope tables and ALiBi's bias for up to `tokens` tokens. Graphs are dropped if the tables grow."""
        blocks = -(-tokens // BLOCK_SIZE)
        if blocks * BLOCK_SIZE <= self.positions:
            return
        self.positions = blocks * BLOCK_SIZE
        self.graphed = None
        # Positions beyond max_positions do not exist; computing one would rescale the others (longrope, dynamic).
        positions = torch.arange(min(self.positions, self.spec.max_positions or self.positions), device=self.device)
        for key in self.layout.rotary:
            cos, sin = self._rope(key, positions)
            self.rope[key] = cos.contiguous(), sin.contiguous()
        bias = self._alibi_bias(self.positions)
        self.bias = None if bias is None else bias.contiguous()

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over hidden [tokens, hidden]. Writes keys and values to `kv`."""
        return self._layers(hidden, self._step(batch), kv, range(first, last))

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence, float32 [sequences, vocabulary]; valid until the next call.

        Replayed from a graph for at most `max_capture_size` sequences; captured again if the blocks have moved.
        """
        num_seqs = len(batch.ids)
        assert num_seqs == len(batch.lengths), f"a decode step of {num_seqs} tokens for {len(batch.lengths)} sequences"
        self.reserve(batch.block_tables.shape[1] * BLOCK_SIZE)
        if num_seqs > self.max_capture_size:
            return self.eager_decode(batch, kv)
        graphed = self._graphed()
        addresses = tuple(layer.data_ptr() for layer in (*kv.keys, *kv.values))
        if addresses != self.lent_addresses:
            graphed.reset()
        self.read_blocks_of(kv)
        self.lent, self.lent_addresses = kv, addresses
        try:
            (logits,) = graphed.replay({name: getattr(batch, name) for name in graphed.inputs})
        finally:
            self.lent = None
        return logits

    def _graphed(self) -> GraphedStep:
        """The graphs, with inputs for `max_capture_size` sequences of up to `positions` tokens."""
        if self.graphed is None:
            zeros = torch.zeros(self.max_capture_size, dtype=torch.int32, device=self.device)
            block_tables = zeros[:, None].repeat(1, self.positions // BLOCK_SIZE)
            blank = {"ids": zeros.long(), "positions": zeros, "lengths": zeros + 1, "block_tables": block_tables}
            self.graphed = GraphedStep(self._graphed_step, blank, capture=self.capture)
        return self.graphed

    def _graphed_step(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor]:
        """The function that a graph captures."""
        cu_seqlens = torch.arange(len(inputs["ids"]) + 1, dtype=torch.int32, device=inputs["ids"].device)
        return (self.eager_decode(PackedBatch(cu_seqlens=cu_seqlens, **inputs), self.lent),)

    def eager_decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The decode step without a graph."""
        hidden = self.embed(batch.ids, batch.positions)
        return self.logits(self.decode_layers(hidden, batch, kv, 0, len(self.blocks)))

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """`layers` for one new token of each sequence, as `decode` runs them."""
        return self._layers(hidden, self._step(batch, decoding=True), kv, range(first, last))

    def _step(self, batch: PackedBatch, decoding: bool = False) -> Step:
        """What the layers of this forward share."""
        self.reserve(batch.block_tables.shape[1] * BLOCK_SIZE)
        tokens = torch.arange(len(batch.ids), dtype=torch.int32, device=batch.ids.device)
        owner = tokens if decoding else torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True)
        positions = batch.positions.long()
        blocks = batch.block_tables[owner, positions // BLOCK_SIZE].long()
        return Step(batch, decoding, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)

    def _layers(self, hidden: torch.Tensor, step: Step, kv: PagedKV, span: range) -> torch.Tensor:
        """Run the layers of `span`. What a layer adds to the residual stream, the next layer's norm kernel adds."""
        self.read_blocks_of(kv)
        pending = None
        for index in span:
            hidden, pending = self._layer(index, hidden, pending, step, kv)
        return self._added_and_normed(Tensors(), "", hidden, pending)[1]

    def read_blocks_of(self, kv: PagedKV) -> None:
        """Let kernels, also those in graphs, read and write these blocks. Costs nothing if they have not moved."""
        addresses = tuple(layer.data_ptr() for layer in (*kv.keys, *kv.values))
        if addresses == self.kv_table_of:
            return
        if self.kv_table is None:
            self.kv_table = torch.zeros(len(kv.keys), 2, dtype=torch.int64, device=self.device)
            group = self.spec.num_heads // self.spec.num_kv_heads
            self.workspace = split_workspace(group, self.spec.head_dim, self.device)
        self.kv_table.copy_(kv_addresses(kv.keys, kv.values))
        self.kv_table_of = addresses

    def _layer_kv(self, index: int) -> LayerKV:
        """The layer's blocks as kernels read them."""
        return LayerKV(self.kv_table[index], self.dtype, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)

    def _layer(
        self, index: int, hidden: torch.Tensor, pending: Pending | None, step: Step, kv: PagedKV
    ) -> tuple[torch.Tensor, Pending]:
        """Run a layer. Takes and gives the residual stream [tokens, hidden] and what is still to be added to it."""
        block = self.blocks[index]
        x, hidden = self._added_and_normed(block, "attention_norm", hidden, pending)
        attended = self._attention(index, x, step, kv)
        if self.spec.parallel:
            attended = self._norm(block, "attention_post_norm", attended)
            x = self._norm(block, "mlp_norm", hidden) if "mlp_norm.weight" in block else x
            return hidden, Pending(self._norm(block, "mlp_post_norm", self._mlp(index, x)) + attended)
        attended = self._pending(block, "attention_post_norm", attended)
        x, hidden = self._added_and_normed(block, "mlp_norm", hidden, attended)
        return hidden, self._pending(block, "mlp_post_norm", self._mlp(index, x))

    def _pending(self, block: Tensors, role: str, output: torch.Tensor) -> Pending:
        """An output, to be normed by `role` if there is such a norm."""
        if f"{role}.bias" in block:
            return Pending(self._norm(block, role, output))
        return Pending(output, block.get(f"{role}.weight"))

    def _norms_in_rope(self) -> bool:
        """Whether the kernel of rope norms queries and keys too."""
        return self.spec.qk_norm != ""

    def _rows_normed(self, block: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k  # the kernel of `rope_and_write` norms them

    def _attended(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, kv: PagedKV
    ) -> torch.Tensor:
        spec, layer, batch = self.spec, self.spec.layers[index], step.batch
        blocks = self._layer_kv(index)
        cos, sin = self.rope[layer.rotary] if layer.rotary else (None, None)
        qk_norm = None
        if self._norms_in_rope():
            assert spec.norm == "rms", "queries and keys are normed by RMS norms"
            weights = (self.blocks[index][f"{role}.weight"] for role in ("q_norm", "k_norm"))
            qk_norm = QKNorm(*weights, spec.norm_eps, spec.norm_offset, spec.norm_float32)
        q = rope_and_write(
            q, k, v, cos, sin, batch.positions, step.slot_mapping, blocks, spec.rotary_interleaved, qk_norm
        )
        # Hugging Face's eager attention, which models with soft caps and BLOOM use, rounds the scores.
        rounded = spec.attention_softcap > 0 or (spec.alibi is not None and not spec.alibi_bfloat16)
        features = spec.attention_scale, spec.attention_softcap, layer.window, self.bias, rounded
        if step.decoding:
            return decode_attention(q, blocks, batch.lengths, batch.block_tables, self.workspace, *features)
        return prefill_attention(q, blocks, batch.cu_seqlens, batch.lengths, batch.block_tables, *features)

    def _mlp(self, index: int, x: torch.Tensor) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        if not spec.layers[index].experts:
            up = self._linear(block, "gate_up" if spec.gated else "up", x)
            return self._linear(block, "down", activated(up, self._activation, spec.gated))
        weights = (block[f"{role}.weight"] for role in ("router", "experts_gate_up", "experts_down"))
        settings = spec.experts_per_token, spec.normalize_experts, spec.experts_float32
        return mixture(x, *weights, *settings, lambda gate_up: activated(gate_up, self._activation, gated=True))

    @property
    def _activation(self) -> str:
        """The activation, as its kernel names it."""
        return "gelu_new" if self.spec.activation_stepwise else self.spec.activation

    def _added_and_normed(
        self, tensors: Tensors, role: str, hidden: torch.Tensor, pending: Pending | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with `pending` added: normed by `role` if there is such a norm, and not normed."""
        if pending is None:
            return self._norm(tensors, role, hidden), hidden
        more = {"multiplier": self.spec.residual_multiplier, "post_weight": pending.post_norm}
        return self._fused_norm(tensors, role, pending.output, hidden, **more)

    def _norm(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] normed by `role`; unchanged if there is no such norm."""
        return self._fused_norm(tensors, role, x)[0] if f"{role}.weight" in tensors else x

    def _fused_norm(
        self,
        tensors: Tensors,
        role: str,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        multiplier: float = 1.0,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + multiplier * x, with x normed by `post_weight` first: normed by `role`, and not normed."""
        weight, bias, spec = tensors.get(f"{role}.weight"), tensors.get(f"{role}.bias"), self.spec
        choices = spec.norm_eps, spec.norm_offset, spec.norm_float32, multiplier, spec.norm == "layer"
        return add_norm(x, residual, weight, bias, *choices, post_weight)


class ShardedCudaDecoder(ShardedDecoder, CudaDecoder):
    """CudaDecoder over a rank's slices of the weights, as ShardedDecoder; a graph contains the sums over the ranks."""

    def _norms_in_rope(self) -> bool:
        """Norms over all heads of a token are sums over the ranks."""
        return self.spec.qk_norm == "head"
