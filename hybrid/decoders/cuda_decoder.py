"""The decoder on Triton kernels: no synchronisation with the device; a decode step can be a CUDA graph.

It computes and rounds as TorchDecoder does. Requires triton, which torch's CUDA builds include. Attention outside of
graphs may be another backend's.
"""

import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from hybrid.decoders.attention_choice import attention_settings
from hybrid.decoders.batch import BLOCK_SIZE, LayerActivations, PackedBatch, PagedKV
from hybrid.decoders.decode_state import MAX_STEPS, DecodeState
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.decoders.torch_decoder import Copies, Tensors, TorchDecoder, no_lora_deltas
from hybrid.decoders.tp_decoder import ShardedDecoder
from hybrid.kernels import require_contiguous
from hybrid.kernels.attention_backend import AttentionBackend, AttentionSettings, LayerBlocks
from hybrid.kernels.cuda_graph import LEAK, CaptureError, Graphs, Run, capture_sizes
from hybrid.kernels.flashinfer_attention import FlashInferAttention
from hybrid.kernels.kv_addresses import LayerKV, kv_addresses, state_addresses
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.torch_mamba2 import Mamba2
from hybrid.kernels.torch_ops import Record
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.kernels.triton_attention import WIDEST_TILE, TritonAttention
from hybrid.kernels.triton_decode import decode_slot_mapping
from hybrid.kernels.triton_delta_net import delta_net, kimi_delta
from hybrid.kernels.triton_experts import mixture, record_experts
from hybrid.kernels.triton_fused import (
    QKNorm,
    activated,
    add_norm,
    gated_by_sigmoid,
    keep_hidden_states,
    rope_and_write,
)
from hybrid.kernels.triton_int8 import int8_linear
from hybrid.kernels.triton_latent import latent_and_rope
from hybrid.kernels.triton_linear import invariant_linear
from hybrid.kernels.triton_mamba2 import mamba2
from hybrid.kernels.triton_recurrent import KernelLayer, StateTables, chunks_of, short_conv
from hybrid.models.spec import NO_MIXER, XIELU, DecoderLayout, DecoderSpec, ParamRef
from hybrid.sampling.state import SamplingState
from hybrid.weights.lora import LowRank


@dataclass(frozen=True)
class Step:
    """State that the layers of one forward share.

    batch: the new tokens.  decoding: whether it has one token for each sequence.
    graphed: whether it runs in a CUDA graph.
    slot_mapping: int64 [tokens]: the cache position of each new token's key and value.
    query_scale: factor of each token's queries, [tokens, 1, 1]; None: 1.
    activations: where the layers' inputs are kept; None: nowhere. Never in a graph, which would keep it.
    states: the sequences, as the recurrent layers take them; None without any.
    per_layer_inputs: [tokens, layers, per_layer_input_size]; None without any.
    """

    batch: PackedBatch
    decoding: bool
    slot_mapping: torch.Tensor
    query_scale: torch.Tensor | None = None
    graphed: bool = False
    activations: LayerActivations | None = None
    states: StateTables | None = None
    per_layer_inputs: torch.Tensor | None = None


@dataclass(frozen=True)
class ResidualUpdate:
    """An output that is still to be added to the residual stream.

    output: of attention or MLP, [tokens, hidden].
    post_norm: None, or the weight of the norm that the output goes through first, [hidden].
    """

    output: torch.Tensor
    post_norm: torch.Tensor | None = None


MIN_TOKENS = 1024  # of a sequence that room is made for, so that graphs are seldom captured again
DRAW_KINDS = 4  # of sampling settings whose graphs are kept: those of training, of evaluation, and others


# How a layer of each kind of mixer runs: `RecurrentMixer.mixed` in kernels.
RECURRENT: dict[type, Callable[..., torch.Tensor]] = {
    GatedDeltaNet: delta_net,
    KimiDeltaAttention: kimi_delta,
    Mamba2: mamba2,
    ShortConv: short_conv,
}


def one_token_each(batch: PackedBatch) -> PackedBatch:
    """Return the same tokens as sequences of one new token each, which share the blocks of their sequence."""
    count = len(batch.ids)
    counts = batch.cu_seqlens.diff()
    return PackedBatch(
        ids=batch.ids,
        positions=batch.positions,
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=batch.ids.device),
        lengths=batch.positions + 1,
        block_tables=batch.block_tables.repeat_interleave(counts, dim=0, output_size=count),
        adapters=batch.adapters,
    )


def rounded_up(tokens: int) -> int:
    """Return the tokens of a sequence that tables are made for: a power of two."""
    return max(MIN_TOKENS, 1 << (tokens - 1).bit_length())


class CudaDecoder(TorchDecoder):
    """TorchDecoder's functions on Triton kernels, and a loop of decode steps that samples on the device.

    max_capture_size: decode steps of at most so many sequences are replayed from CUDA graphs; 0: no graphs. A graph is
        captured when its batch size first occurs, and kept as long as weights and tables keep their addresses.
    capture: as in Graphs.
    flashinfer: whether FlashInfer computes the attention of prefill, and of decode steps that are not graphs. Its plan
        of each forward waits for the device.
    batch_invariant: whether a token's logits have the same bits in any batch, in prefill and in decode steps. Recurrent
        layers then go from token to token in prefill too. Not for latent attention, FlashInfer, and slices of ranks.
    """

    # A longer context has more than two tiles, which attention divides if the batch leaves multiprocessors idle.
    context_block = 2 * WIDEST_TILE
    samples_in_kernel = continues_past_ends = latest_is_ring = True

    @property
    def samples_with_penalties(self) -> bool:
        """Whether sampling applies the repetition penalty and min_new_tokens: with logits of the whole vocabulary."""
        return self.vocabulary is None

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        max_capture_size: int = 0,
        capture: Callable[[Run], Run] | None = None,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
        flashinfer: bool = False,
        batch_invariant: bool = False,
    ):
        super().__init__(layout, weights, dtype, lora_deltas, copies)
        varies = flashinfer or self.spec.latent_dim or self.group is not None
        assert not (batch_invariant and varies), "its kernels choose their sums by the batch"
        self.batch_invariant = batch_invariant
        self.make_attention: Callable[[AttentionSettings, torch.device], AttentionBackend]
        self.triton_attention = partial(TritonAttention, batch_invariant=batch_invariant)
        self.make_attention = FlashInferAttention if flashinfer else self.triton_attention
        # By the number of a layer's key heads and their elements; the second is of decode steps that are graphs.
        self.attention: dict[tuple[int, int], AttentionBackend] = {}
        self.graphed_attention: dict[tuple[int, int], TritonAttention] = {}
        self.max_capture_size, self.capture_sizes = max_capture_size, capture_sizes(max_capture_size)
        # For each size a graph of the layers, and one of the draw for each of the latest kinds of sampling settings.
        self.graphs = Graphs((1 + DRAW_KINDS) * len(self.capture_sizes), capture)
        self.eager_reason = ""  # why steps that could be graphs are not
        self.positions = 0  # positions in the rope tables and ALiBi's bias
        self.rope: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by rotary key: cos, sin [positions, dim / 2]
        self.bias: torch.Tensor | None = None  # ALiBi's, [heads, positions]
        self.state: DecodeState | None = None
        self.addresses: tuple = ()  # of the weights and LoRA factors, and LoRA's scales and numbers
        self.kv_table: torch.Tensor | None = None  # int64 [layers, 2]: addresses of the blocks that kernels read
        self.state_table: torch.Tensor | None = None  # int64 [layers, 2]: of the matrices and the rings of their states
        self.experts_address: torch.Tensor | None = None  # int64 [1]: of these blocks' `router_indices`
        self.hidden_address: torch.Tensor | None = None  # int64 [1]: of their `hidden_states`
        self.factors: torch.Tensor | None = None  # `Mamba2.factors`
        self.lent: weakref.ref[PagedKV] | None = None  # the blocks whose addresses the tables hold

    def bind(self) -> None:
        """As TorchDecoder's. Graphs are kept if no weight has moved and no LoRA scale has changed."""
        super().bind()
        blocks = (self.outer, *self.blocks)
        deltas = [delta for block in blocks for deltas in block.lora_deltas.values() for delta in deltas]
        tensors = [tensor for block in blocks for tensor in block.values()]
        tensors += [factor for delta in deltas for factor in (delta.a, delta.b)]
        addresses = (
            *(tensor.data_ptr() for tensor in tensors),
            *((delta.scale, delta.adapter) for delta in deltas),
        )
        if addresses != self.addresses:
            self.graphs.reset()
        self.addresses = addresses

    def reserve(self, tokens: int) -> None:
        """Build rope tables and ALiBi's bias for up to `tokens` tokens, rounded up to a power of two, so that few calls
        find them too short. If they grow, graphs are dropped."""
        if tokens <= self.positions:
            return
        self.positions = rounded_up(tokens)
        # Positions beyond max_positions do not exist; computing one would rescale the others (longrope, dynamic).
        positions = torch.arange(min(self.positions, self.spec.max_positions or self.positions), device=self.device)
        for key in self.layout.rotary:
            cos, sin = self._rope(key, positions)
            self.rope[key] = cos.contiguous(), sin.contiguous()
        bias = self._alibi_bias(self.positions)
        self.bias = None if bias is None else bias.contiguous()
        self._drop_state()

    def _drop_state(self) -> None:
        self.state = None
        self.graphs.reset()

    def layers(
        self,
        hidden: torch.Tensor,
        batch: PackedBatch,
        kv: PagedKV,
        first: int,
        last: int,
        activations: LayerActivations | None = None,
    ) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over hidden [tokens, hidden]. Writes keys and values to `kv`, and
        these layers' inputs to `activations`."""
        return self._layers(hidden, self._step(batch, activations=activations), kv, range(first, last))

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after one new token for each sequence, float32 [sequences, vocabulary]. In float32 they are
        valid until the next call.

        Replayed from a graph for at most `max_capture_size` sequences.
        """
        if len(batch.ids) > self.max_capture_size:
            return self.eager_decode(batch, kv)
        size = self._load(batch, kv)
        self._run(("decode", size), size, partial(self._decode_step, size))
        return self.state.logits[: len(batch.ids)].float()

    def decode_steps(
        self, batch: PackedBatch, kv: PagedKV, sampling: SamplingState, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode and sample `steps` tokens for each sequence, without waiting for the device.

        batch: one new token for each sequence; its block tables have room for the tokens that `draws.limits` allow, up
            to `steps`.
        Gives tokens, int64 [steps, sequences], and logprobs, float32 [4, steps, sequences], valid until the next call:
        after a sequence's stop token or limit, padding and 0.
        """
        assert steps <= MAX_STEPS, f"{steps} steps, and room for the tokens of {MAX_STEPS}"
        count, size = len(batch.ids), self._load(batch, kv)
        self.state.load_draws(sampling)
        # A graph reads one tensor of stop tokens for each number of them.
        draw_key = "draw", size, sampling.graph_key, len(sampling.stop_token_ids)
        decode, draw = partial(self._decode_step, size), partial(self.state.draw, sampling, size)
        for _ in range(steps):
            self._run(("decode", size), size, decode)
            self._run(draw_key, size, draw)
        return self.state.tokens[:steps, :count], self.state.logps[:, :steps, :count]

    def verify(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after every token of a batch, float32 [tokens, vocabulary]; valid until the next call.

        Runs as a decode step in which each token is a sequence of its own, over its sequence's blocks: a layer writes
        all keys and values before its attention reads them. So it is a graph, by the kernels of other steps. Recurrent
        layers read a sequence's tokens one after the other, as prefill does.
        """
        if self.spec.is_recurrent:
            return self.logits(self.forward(batch, kv))
        return self.decode(one_token_each(batch), kv)

    def _load(self, batch: PackedBatch, kv: PagedKV) -> int:
        """Copy this batch, over these blocks, into the state. Gives the batch's size with padding."""
        count = len(batch.ids)
        assert count == len(batch.lengths), f"a decode step of {count} tokens for {len(batch.lengths)} sequences"
        self.reserve(batch.block_tables.shape[1] * BLOCK_SIZE)
        size = self._captured_size(count)
        if self.state is None or self.state.capacity < size:
            self._drop_state()
            sizes = self._capacity(size), self.positions, self._num_logits
            self.state = DecodeState(*sizes, self.dtype, self.device)
        self.read_blocks_of(kv)
        self.state.load(batch, size)
        return size

    def _captured_size(self, count: int) -> int:
        """Return the size of the captured graph for a step of `count` sequences, padding included."""
        return next((size for size in self.capture_sizes if size >= count), count)

    def _capacity(self, size: int) -> int:
        """Return the sequences of a state for a step of `size`: of the largest step that has a graph, so that the
        self-check, small rollouts and large ones share a state and its graphs."""
        return max([size, *self.capture_sizes[-1:]])

    def loop_bytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes that the decode loop of `sequences` sequences of up to `tokens` tokens adds: the state,
        FlashInfer's workspaces, and the memory pool of the graphs, which keeps a step's activations and logits. Not
        measured on a device yet."""
        size = self._captured_size(sequences)
        capacity = self._capacity(size)
        sizes = capacity, rounded_up(tokens), self._num_logits
        state = DecodeState(*sizes, self.dtype, torch.device("meta")).nbytes
        pool = self.activation_bytes(size) + size * self._num_logits * self.dtype.itemsize
        return state + self._attention_bytes + pool * (size <= self.max_capture_size)

    @property
    def _attention_bytes(self) -> int:
        """Bytes that FlashInfer's wrappers keep; the workspace of our kernels is small."""
        if self.make_attention is not FlashInferAttention:
            return 0
        return FlashInferAttention.workspace_bytes(attention_settings(self.spec, self.dtype))

    @property
    def _num_logits(self) -> int:
        """Logits of a row."""
        return self.spec.vocab_size if self.vocabulary is None else self.vocabulary.width

    def _run(self, key: Hashable, size: int, step: Run) -> None:
        """Run a step over the state's first `size` sequences: from the graph of `key` if its size has graphs. Where a
        step cannot be captured, this and all later ones run without graphs, which is warned about."""
        if size <= self.max_capture_size and key not in self.graphs:
            try:
                with self.state.padding(size):
                    self.graphs.add(key, step)
            except CaptureError as error:
                self.max_capture_size, self.capture_sizes = 0, []
                self.graphs.reset()
                self.eager_reason = f"a decode step cannot be captured: {error}"
                warnings.warn(
                    f"decode steps run without CUDA graphs, which is slower: {self.eager_reason} (free memory if it is "
                    f"short of it; enable_cuda_graph=false does not try; {LEAK})",
                    stacklevel=2,
                )
        if size <= self.max_capture_size:
            self.graphs.replay(key)
        else:
            step()

    def _decode_step(self, size: int) -> None:
        """Run the decode step of the state's first `size` sequences."""
        batch, state = self.state.batch(size), self.state
        step = self._step(batch, decoding=True, graphed=size <= self.max_capture_size)
        hidden = self._layers(self.embed(batch.ids, batch.positions), step, self.lent(), range(len(self.blocks)))
        state.logits[:size].copy_(self.model_logits(hidden))

    def eager_decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the decode step without a graph."""
        hidden = self.embed(batch.ids, batch.positions)
        return self.logits(self.decode_layers(hidden, batch, kv, 0, len(self.blocks)))

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """`layers` for one new token of each sequence, as `decode` runs them."""
        return self._layers(hidden, self._step(batch, decoding=True), kv, range(first, last))

    def _step(
        self,
        batch: PackedBatch,
        decoding: bool = False,
        graphed: bool = False,
        activations: LayerActivations | None = None,
    ) -> Step:
        """Return the state that the layers of this forward share."""
        self.token_adapters = batch.adapters
        self.reserve(batch.block_tables.shape[1] * BLOCK_SIZE)
        query_scale = self._query_scale(batch.positions)
        inputs = self._per_layer_inputs(batch) if self.spec.per_layer_input_size else None
        if decoding:
            slot_mapping = decode_slot_mapping(batch.positions, batch.block_tables, BLOCK_SIZE)
            states = self._state_tables(batch, None) if self.spec.is_recurrent else None
            return Step(batch, True, slot_mapping, query_scale, graphed, states=states, per_layer_inputs=inputs)
        tokens = torch.arange(len(batch.ids), dtype=torch.int32, device=batch.ids.device)
        owner, positions = torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True), batch.positions.long()
        blocks = batch.block_tables[owner, positions // BLOCK_SIZE].long()
        slot_mapping = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        states = self._state_tables(batch, owner) if self.spec.is_recurrent else None
        return Step(
            batch,
            False,
            slot_mapping,
            query_scale,
            activations=activations,
            states=states,
            per_layer_inputs=inputs,
        )

    def _state_tables(self, batch: PackedBatch, owners: torch.Tensor | None) -> StateTables:
        """Return the tables of recurrent layers.  owners: int64 [tokens], each token's sequence; None in a decode step.

        If the decoder is batch invariant, decode steps run the kernels of prefills, which go from token to token.
        """
        assert batch.state_slots is not None, "sequences of a recurrent model have states"
        if owners is None and self.batch_invariant:
            owners = batch.cu_seqlens[:-1].long()
        by_chunks = owners is not None and not self.batch_invariant and self.dtype == torch.bfloat16
        chunks = chunks_of(batch.cu_seqlens, len(batch.ids)) if by_chunks else None
        return StateTables(batch.state_slots, batch.positions, batch.cu_seqlens, owners, chunks)

    def _layers(self, hidden: torch.Tensor, step: Step, kv: PagedKV, span: range) -> torch.Tensor:
        """Run the layers of `span`. What a layer adds to the residual stream, the next layer's norm kernel adds."""
        self.read_blocks_of(kv)
        if not step.graphed:
            for attention in self.attention.values():
                attention.plan(step.batch, step.decoding)
        pending = None
        for index in span:
            hidden, pending = self._layer(index, hidden, pending, step, kv)
        hidden = self._added_and_normed(Tensors(), "", hidden, pending)[1]
        if step.activations is not None and span.stop == len(self.blocks):
            step.activations.write_input(span.stop, hidden)
        if kv.hidden_states is not None and span.stop == len(self.blocks):
            # A graph would keep the tensor; the address in the table is that of the current blocks.
            keep_hidden_states(hidden, step.slot_mapping, self.hidden_address)
        return hidden

    def read_blocks_of(self, kv: PagedKV) -> None:
        """Let kernels, also those in graphs, read and write these blocks. Costs nothing if they already do."""
        if self.lent is not None and self.lent() is kv:
            return
        if self.kv_table is None:
            tables = torch.zeros(2, len(kv.keys), 2, dtype=torch.int64, device=self.device)
            self.kv_table, self.state_table = tables
            if isinstance(self.spec.recurrent, Mamba2):
                self.factors = self.spec.recurrent.factors(self.dtype, self.device)
            self.experts_address, self.hidden_address = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
            for spec in self.layer_specs:
                if (sizes := (spec.num_kv_heads, spec.head_dim)) not in self.attention:
                    arguments = attention_settings(spec, self.dtype), self.device
                    self.attention[sizes] = self.make_attention(*arguments)
                    self.graphed_attention[sizes] = self.triton_attention(*arguments)
        self.kv_table.copy_(kv_addresses(kv.keys, kv.values))
        if kv.states:
            self.state_table.copy_(state_addresses(kv.states, len(kv.keys)))
        if kv.router_indices is not None:
            require_contiguous(self.device, torch.int16, kv.router_indices)
            self.experts_address.fill_(kv.router_indices.data_ptr())
        if kv.hidden_states is not None:
            require_contiguous(self.device, self.dtype, kv.hidden_states)
            self.hidden_address.fill_(kv.hidden_states.data_ptr())
        self.lent = weakref.ref(kv)

    def _layer(
        self, index: int, hidden: torch.Tensor, pending: ResidualUpdate | None, step: Step, kv: PagedKV
    ) -> tuple[torch.Tensor, ResidualUpdate | None]:
        """Run a layer. Takes and gives the residual stream [tokens, hidden] and what is still to be added to it."""
        block, layer = self.blocks[index], self.spec.layers[index]
        norm = "mlp_norm" if layer.mixer == NO_MIXER else "attention_norm"
        x, hidden = self._added_and_normed(block, norm, hidden, pending)
        if step.activations is not None:
            step.activations.write_input(index, hidden)
        # This class has a Step of its own, and methods that take it.
        record = self._record(index, step, kv)  # type: ignore[arg-type]
        if layer.mixer == NO_MIXER:
            return hidden, self._pending(block, "mlp_post_norm", self._mlp(index, x, record))
        attended = self._mixer(layer.mixer)(index, x, step, kv)  # type: ignore[arg-type]
        if not layer.feed_forward:
            return hidden, self._pending(block, "attention_post_norm", attended)
        if self.spec.parallel:
            attended = self._norm(block, "attention_post_norm", attended)
            x = self._norm(block, "mlp_norm", hidden) if "mlp_norm.weight" in block else x
            output = self._norm(block, "mlp_post_norm", self._mlp(index, x, record))
            if self.spec.attention_first:
                return hidden + attended, ResidualUpdate(output)
            return hidden, ResidualUpdate(output + attended)
        added = self._pending(block, "attention_post_norm", attended)
        x, hidden = self._added_and_normed(block, "mlp_norm", hidden, added)
        output = self._feed_forward_output(index, x, hidden, record)
        return self._with_per_layer_inputs(index, hidden, self._pending(block, "mlp_post_norm", output), step)

    def _with_per_layer_inputs(
        self, index: int, hidden: torch.Tensor, pending: ResidualUpdate | None, step: Step
    ) -> tuple[torch.Tensor, ResidualUpdate | None]:
        """Add the per-layer inputs to the residual stream, and scale it, if the model does (Gemma 4)."""
        block = self.blocks[index]
        if step.per_layer_inputs is not None:
            hidden = self._added_and_normed(Tensors(), "", hidden, pending)[1]
            gate = self._activated(block, self._linear(block, "per_layer_input_gate", hidden))
            output = self._linear(block, "per_layer_projection", gate * step.per_layer_inputs[:, index])
            pending = self._pending(block, "per_layer_post_norm", output)
        if "layer_scalar.weight" in block:
            hidden = self._added_and_normed(Tensors(), "", hidden, pending)[1] * block["layer_scalar.weight"]
            pending = None
        return hidden, pending

    def _pending(self, block: Tensors, role: str, output: torch.Tensor) -> ResidualUpdate:
        """Return an output, to be normed by `role` if there is such a norm."""
        if f"{role}.bias" in block:
            return ResidualUpdate(self._norm(block, role, output))
        return ResidualUpdate(output, block.get(f"{role}.weight"))

    def _norms_in_rope(self) -> bool:
        """Whether the kernel of rope norms queries and keys too."""
        return self.spec.qk_norm != ""

    def _rows_normed(self, block: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (q, k) if self._norms_in_rope() else super()._rows_normed(block, q, k)

    def _gated_output(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_by_sigmoid(attended, gate)

    def _attended(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        step: Step,
        kv: PagedKV,
    ) -> torch.Tensor:
        spec, layer, batch, block = self.layer_specs[index], self.spec.layers[index], step.batch, self.blocks[index]
        source = index if layer.kv_layer is None else layer.kv_layer
        addresses = LayerKV(self.kv_table[source], self.dtype, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        blocks = LayerBlocks(kv.keys[source], kv.values[source], addresses)
        v = v if v is None else self._norm(block, "v_norm", v)
        cos, sin = self.rope[layer.rotary] if layer.rotary else (None, None)
        qk_norm = None
        if self._norms_in_rope() and layer.qk_norm:
            assert spec.norm == "rms", "queries and keys are normed by RMS norms"
            weight_q = block["q_norm.weight"]
            weight_k = weight_q if k is None else block["k_norm.weight"]
            qk_norm = QKNorm(
                weight_q, weight_k, spec.norm_eps, spec.norm_offset, spec.norm_float32, after_rope=spec.qk_norm_last
            )
        q = rope_and_write(
            q, k, v, cos, sin, batch.positions, step.slot_mapping, addresses, spec.rotary_interleaved, qk_norm
        )
        q = self._scaled(index, q, step.query_scale)
        # A graph would keep the tensors in `blocks`; ours reads addresses, and so stays valid when blocks move.
        attention = self._attention_of(spec, step)
        sinks = block.get("sinks.weight")
        return attention.attend(step.decoding, q, blocks, batch, layer.window, self.bias, sinks)

    def _attention_of(self, spec: DecoderSpec, step: Step) -> AttentionBackend:
        """Return the attention of a layer.  spec: with its heads."""
        return (self.graphed_attention if step.graphed else self.attention)[spec.num_kv_heads, spec.head_dim]

    def _recurrent(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, mixer = self.blocks[index], self.spec.recurrent
        # A graph would keep `kv.states`; the addresses in the table are those of the current ones.
        states = self.state_table[index], step.states
        eps, linear = self.spec.norm_eps, partial(self._linear, block)
        layer = KernelLayer(linear, block, *states, eps, self.factors, self._summed)
        return RECURRENT[type(mixer)](mixer, x, layer)

    def _latent_attention(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, spec, layer, batch = self.blocks[index], self.spec, self.spec.layers[index], step.batch
        addresses = LayerKV(self.kv_table[index], self.dtype, BLOCK_SIZE, 1, spec.latent_dim + spec.rotary_dim)
        queries = self._latent_normed(block, "q_a_norm", self._linear(block, "q_a", x)) if spec.query_rank else x
        q = self._linear(block, "q_b", queries).unflatten(-1, (-1, spec.head_dim))
        tables = *(self.rope[layer.rotary] if layer.rotary else (None, None)), batch.positions, step.slot_mapping
        norm = block["kv_a_norm.weight"], *tables, addresses, spec.latent_norm_eps, spec.norm_offset, spec.norm_float32
        q_rope = latent_and_rope(self._linear(block, "kv_a", x), q, *norm, spec.rotary_interleaved)
        unrotated = spec.head_dim - spec.rotary_dim
        key_up, value_up = self._latent_up(block).split([unrotated, spec.value_dim], dim=1)
        q = torch.bmm(q[..., :unrotated].transpose(0, 1), key_up).transpose(0, 1)
        if step.query_scale is not None:
            q, q_rope = q * step.query_scale, q_rope * step.query_scale
        blocks = LayerBlocks(kv.keys[index], kv.values[index], addresses)
        read = self._attention_of(spec, step).attend(step.decoding, q, blocks, batch, layer.window, None, None, q_rope)
        values = x.new_empty(*read.shape[:2], spec.value_dim)
        # Written by rows, so that no copy follows.
        torch.bmm(read.transpose(0, 1), value_up.transpose(1, 2), out=values.transpose(0, 1))
        return self._linear(block, "o", values.flatten(1))

    def _latent_normed(self, block: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        spec, weight = self.spec, block[f"{role}.weight"]
        return add_norm(x, None, weight, None, spec.latent_norm_eps, spec.norm_offset, spec.norm_float32)[0]

    def _write_experts(
        self, router_indices: torch.Tensor, slot_mapping: torch.Tensor, layer: int, chosen: torch.Tensor
    ) -> None:
        # A graph would keep `router_indices`; the address in the table is that of the current blocks.
        record_experts(chosen, slot_mapping, self.experts_address, layer, len(self.moe_layer))

    def _activated(self, block: Tensors, x: torch.Tensor) -> torch.Tensor:
        parameters = [block[f"{role}.weight"] for role in XIELU] if self.spec.activation == "xielu" else None
        return activated(x, self._activation, parameters=parameters)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.spec.gate_multiplier != 1.0:
            return super()._gated(gate_up)
        return activated(gate_up, self._activation, True, self.spec.swiglu_alpha, self.spec.swiglu_limit)

    def _mixture(
        self, block: Tensors, x: torch.Tensor, record: Record | None, router_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights, chosen = self._routed(block, x if router_input is None else router_input, record)
        is_latent = bool(self.spec.latent_size)
        x = self._linear(block, "latent_in", x) if is_latent else x
        x, weights = self._weighted(x, weights)
        names = [f"{role}.{kind}" for kind in ("weight", "bias") for role in ("experts_gate_up", "experts_down")]
        gate_up, down, gate_up_bias, down_bias = map(block.get, names)
        first_expert = None if len(gate_up) == self.spec.num_experts else self.first_expert
        activation = self._gated if self.spec.gated else partial(self._activated, block)
        matrices = gate_up, down, gate_up_bias, down_bias
        output = mixture(x, weights, chosen, *matrices, activation, first_expert, self.batch_invariant)
        output = self._experts_summed(output)
        return self._linear(block, "latent_out", output) if is_latent else output

    def _matmul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return (invariant_linear if self.batch_invariant else F.linear)(x, weight, bias)

    @property
    def _activation(self) -> str:
        """The activation, as its kernel names it."""
        return "gelu_new" if self.spec.activation_stepwise else self.spec.activation

    def _added_and_normed(
        self, tensors: Tensors, role: str, hidden: torch.Tensor, pending: ResidualUpdate | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream with `pending` added: normed by `role` if there is such a norm, and not normed."""
        if pending is None:
            return self._norm(tensors, role, hidden), hidden
        multiplier = self.spec.residual_multiplier
        return self._fused_norm(
            tensors, role, pending.output, hidden, multiplier=multiplier, post_weight=pending.post_norm
        )

    def _norm(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] normed by `role`; unchanged if there is no such norm."""
        if f"{role}.weight" not in tensors:
            return x
        return self._fused_norm(tensors, role, x.flatten(0, -2))[0].view(x.shape)

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


class Int8CudaDecoder(Int8Decoder, CudaDecoder):
    """CudaDecoder over int8 weights: they are dequantized as they are multiplied. Experts are not supported."""

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if scale is None:
            return super()._product(x, weight, scale, bias)
        return int8_linear(x, weight, scale, bias)


class ShardedCudaDecoder(ShardedDecoder, CudaDecoder):
    """CudaDecoder over a rank's slices of the weights, as ShardedDecoder; a graph contains the sums over the ranks."""

    def _norms_in_rope(self) -> bool:
        """Return norms over all heads of a token are sums over the ranks."""
        return self.spec.qk_norm == "head"
