"""A whole decoder in torch operations, on any device: the reference, and the fallback where no faster kernels run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import BLOCK_SIZE, Draws, KVWeights, PackedBatch, PagedKV
from hybrid.decoders.drafts import Drafting, VerifiedTokens, verify_steps
from hybrid.decoders.vocabulary import VocabularySlice
from hybrid.kernels import torch_ops
from hybrid.models.spec import JOINED, OUTER_ROLES, DecoderLayout, ParamRef
from hybrid.parallel import InferenceGroup
from hybrid.weights.joined import joined_view
from hybrid.weights.lora import LowRank

# Copies of weights, by their sources. A model's decoders, with and without adapters, share the copies that both read; a
# copy that neither reads is freed.
Copies = MutableMapping[tuple, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What the layers of one forward share.

    slot_mapping: int64 [tokens]: the cache position of each new token's key and value.
    groups: the sequences, as `torch_ops.paged_attention` takes them.
    rope: cos and sin for each key of `DecoderLayout.rotary`, [tokens, rotary_dim / 2].
    bias: ALiBi's, [heads, positions]; None without ALiBi.
    """

    slot_mapping: torch.Tensor
    groups: tuple[torch_ops.Group, ...]
    rope: dict[str, tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LoraDelta:
    """An unmerged LoRA delta, scale · b (a x), of columns `first` on of a product.  a: [r, in].  b: [columns, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first: int


class Tensors(dict[str, torch.Tensor]):
    """A layer's tensors by role; joined ones replace their parts.  lora_deltas: the unmerged ones of each product."""

    def __init__(
        self, lora_deltas: dict[str, list[LoraDelta]] | None = None, tensors: Mapping[str, torch.Tensor] | None = None
    ):
        super().__init__(tensors or {})
        self.lora_deltas = lora_deltas or {}


def no_lora_deltas(ref: ParamRef) -> list[LowRank]:
    """The `lora_deltas` of weights without unmerged adapters."""
    return []


class WholeDecoder(ABC):
    """A decoder of `layout` in `dtype`. Call `bind` first, and the functions under `torch.no_grad()`.

    weights: gives a ParamRef's whole tensor, before its `select`; None for a bias that does not exist.
    lora_deltas: gives the unmerged LoRA factors of a weight; b has the rows of the ParamRef.
    copies: weight copies shared with the model's other decoders; the decoders that read a copy keep it alive.
    """

    device: torch.device  # of the weights and activations
    context_block = BLOCK_SIZE  # cached tokens that attention reads at a time
    vocabulary: VocabularySlice | None = None  # what `logits` and `decode` give logits of; None: the whole vocabulary
    group: InferenceGroup | None = None  # ranks that run it together, on the same tokens; None: this rank alone
    kv_weights: KVWeights | None = None  # what it is bound to; None: unknown, so that no keys and values are reused
    samples_in_kernel = False  # whether it has `decode_steps`
    samples_with_penalties = False  # whether sampling applies the repetition penalty and min_new_tokens
    continues_past_ends = False  # whether `decode_steps` goes on after a sequence has ended, and leaves it as it is
    records_experts = False  # whether forwards write `PagedKV.router_indices`
    keeps_hidden_states = False  # whether forwards write `PagedKV.hidden_states`

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
    ):
        self.layout, self.spec, self.weights, self.dtype = layout, layout.spec, weights, dtype
        self.lora_deltas = lora_deltas
        self.copies: Copies = WeakValueDictionary() if copies is None else copies
        self.most_tokens = self.most_logits = 0  # the most of any forward so far
        # By the index of a layer with experts: its number among these.
        self.moe_layer = {index: number for number, index in enumerate(self.spec.moe_layers)}
        self.unbind()

    @abstractmethod
    def bind_part(self, outer: Collection[str], layers: Iterable[int]) -> None:
        """Read the outer weights of the roles `outer`, and those of the layers with indices `layers`."""

    @abstractmethod
    def unbind(self) -> None:
        """Release the weights; bind again before anything runs."""

    @abstractmethod
    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Prepare for sequences of up to `tokens` tokens."""

    @abstractmethod
    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output for every token, [tokens, hidden]. Writes the new tokens' keys and values to `kv`."""

    @abstractmethod
    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first layer's input, [tokens, hidden].  ids: int64 [tokens].  positions: integers [tokens]."""

    @abstractmethod
    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over hidden [tokens, hidden]. Writes keys and values to `kv`."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocabulary]"""

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Bytes that a forward over `tokens` tokens takes, estimated."""

    def bind(self) -> None:
        """Read all weights, on first use or again. Copies are refreshed in place and keep their addresses."""
        self.bind_part(OUTER_ROLES, range(len(self.spec.layers)))

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence.  float32 [sequences, vocab]"""
        return self.logits(self.forward(batch, kv))

    def verify(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after every token of a batch, as `decode` gives them.  float32 [tokens, vocab]"""
        return self.logits(self.forward(batch, kv))

    def verify_steps(
        self, batch: PackedBatch, kv: PagedKV, draws: Draws, drafting: Drafting, steps: int
    ) -> VerifiedTokens:
        """As `hybrid.decoders.drafts.verify_steps`."""
        return verify_steps(self, batch, kv, draws, drafting, steps)

    def router_indices(self, num_blocks: int) -> torch.Tensor | None:
        """Memory for `PagedKV.router_indices`, its content undefined; None if experts are not recorded."""
        if not self.records_experts:
            return None
        shape = num_blocks, BLOCK_SIZE, len(self.moe_layer), self.spec.experts_per_token
        return torch.empty(shape, dtype=torch.int16, device=self.device)

    def hidden_states(self, num_blocks: int) -> torch.Tensor | None:
        """Memory for `PagedKV.hidden_states`, its content undefined; None if they are not kept."""
        if not self.keeps_hidden_states:
            return None
        return torch.empty(num_blocks, BLOCK_SIZE, self.spec.hidden_size, dtype=self.dtype, device=self.device)

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """`layers` for one new token of each sequence, as `decode` runs them."""
        return self.layers(hidden, batch, kv, first, last)

    def loop_bytes(self, sequences: int, tokens: int) -> int:
        """Bytes that the decode loop of so many sequences of up to `tokens` tokens needs in addition to activations and
        logits: none here."""
        return 0

    def nbytes(self) -> int:
        """Bytes of weight copies, those shared with other decoders included."""
        return sum(copy.nbytes for copy in self.copies.values())

    def peak_activation_bytes(self) -> int:
        """Bytes of activations in the largest forward so far, plus those of the most logits."""
        activations = self.activation_bytes(self.most_tokens) if self.most_tokens else 0
        return activations + self.most_logits * self.spec.vocab_size * 4


class TorchDecoder(WholeDecoder):
    """In torch operations. Tensors of the right dtype, joined ones if adjacent, are read in place; others copied."""

    outer: Tensors
    blocks: list[Tensors]
    first_expert = 0  # index of the first expert whose weights this rank has
    widest = 0  # the most elements per token that a layer holds at once

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The MLP's activation."""
        return torch_ops.gelu_new if self.spec.activation_stepwise else torch_ops.ACTIVATIONS[self.spec.activation]

    @torch.no_grad()
    def bind_part(self, outer: Collection[str], layers: Iterable[int]) -> None:
        """Read the outer weights of the roles `outer`, and those of the layers with indices `layers`."""
        refs = {name: ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in outer}
        bound = self._bound(refs)
        kept = {role: deltas for role, deltas in self.outer.lora_deltas.items() if role not in outer}
        self.outer = Tensors(kept | bound.lora_deltas, {**self.outer, **bound})
        for index in layers:
            self.blocks[index] = self._bound(self.layout.layers[index])
            self.widest = max(self.widest, self._width(self.blocks[index]))

    def unbind(self) -> None:
        """Release the weights; bind again before anything runs."""
        self.outer, self.blocks = Tensors(), [Tensors() for _ in self.spec.layers]

    def _bound(self, refs: Mapping[str, ParamRef]) -> Tensors:
        """The tensors of these ParamRefs by role; joined ones replace their parts."""
        tensors = {role: self._read(ref) for role, ref in refs.items()}
        tensors = {role: tensor for role, tensor in tensors.items() if tensor is not None}
        bound = Tensors(self._lora_deltas(refs, {role: len(tensor) for role, tensor in tensors.items()}))
        for name, roles in JOINED.items():
            if f"{roles[0]}.weight" not in tensors:
                continue
            weights = [tensors.pop(f"{role}.weight") for role in roles]
            biases = [tensors.pop(f"{role}.bias", None) for role in roles]
            bound[f"{name}.weight"] = self._joined([refs[f"{role}.weight"] for role in roles], weights)
            if any(bias is not None for bias in biases):
                pairs = zip(biases, weights, strict=True)
                biases = [weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs]
                bound[f"{name}.bias"] = self._joined([refs.get(f"{role}.bias") for role in roles], biases)
        for role, tensor in tensors.items():
            bound[role] = self._joined([refs[role]], [tensor])
        return bound

    def _lora_deltas(self, refs: Mapping[str, ParamRef], rows: Mapping[str, int]) -> dict[str, list[LoraDelta]]:
        """The unmerged LoRA deltas of these ParamRefs' products.  rows: of each role's tensor."""
        deltas: dict[str, list[LoraDelta]] = {}
        joined = {role: name for name, roles in JOINED.items() for role in roles if f"{roles[0]}.weight" in rows}
        for key, ref in refs.items():
            role, _, kind = key.partition(".")
            if kind != "weight":
                continue
            name = joined.get(role, role)
            before = JOINED[name][: JOINED[name].index(role)] if name != role else ()
            first = sum(rows[f"{part}.weight"] for part in before)
            for index, (a, b, scale) in enumerate(self.lora_deltas(ref)):
                a, b = self._factor((ref, index, "a"), a), self._factor((ref, index, "b"), b)
                deltas.setdefault(name, []).append(LoraDelta(a, b, scale, first))
        return deltas

    def _factor(self, key: tuple, factor: torch.Tensor) -> torch.Tensor:
        """A LoRA factor in the decoder's dtype: in place, or a copy, which is refreshed and keeps its address."""
        if factor.dtype == self.dtype:
            return factor
        key = (self.dtype, *key)
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = torch.empty_like(factor, dtype=self.dtype)
        return copy.copy_(factor)

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        """The role's tensor, [out, in]."""
        whole = self.weights(ref)
        return whole if whole is None or ref.select is None else ref.select(whole)

    def _joined(self, refs: Sequence[ParamRef | None], pieces: list[torch.Tensor]) -> torch.Tensor:
        """These ParamRefs' tensors stacked by rows: in place if adjacent in memory, else a copy, which is refreshed."""
        if pieces[0].dtype == self.dtype and (in_place := joined_view(pieces)) is not None:
            return in_place
        sources = (None if ref is None else self.weights(ref) for ref in refs)
        addresses = (0 if source is None else source.data_ptr() for source in sources)
        key = (self.dtype, *zip(refs, addresses, strict=True))
        sizes = [len(piece) for piece in pieces]
        buffer = self.copies.get(key)
        if buffer is None:
            shape = (sum(sizes), *pieces[0].shape[1:])
            buffer = self.copies[key] = torch.empty(shape, dtype=self.dtype, device=pieces[0].device)
        for part, piece in zip(buffer.split(sizes), pieces, strict=True):
            part.copy_(piece)
        return buffer

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks: keys and values [blocks, BLOCK_SIZE, kv_heads, head_dim] for each layer."""
        shape = (num_blocks, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        keys, values = (
            [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in self.blocks] for _ in range(2)
        )
        return PagedKV(keys, values, self.router_indices(num_blocks), self.hidden_states(num_blocks))

    @property
    def device(self) -> torch.device:
        """The device of the weights, also before they are gathered."""
        return self.weights(self.layout.outer["embedding.weight"]).device

    def _width(self, block: Tensors) -> int:
        """The most elements per token that a layer holds at once.

        These are the residual stream, before and after its norm and in float32, with either the MLP's products, or the
        queries, keys and values before and after rope.
        """
        spec, experts = self.spec, max(self.spec.experts_per_token, 1)
        up, inner = (
            next((block[f"{role}.weight"].shape[dim] for role in roles if f"{role}.weight" in block), 0)
            for roles, dim in ((("gate_up", "up", "experts_gate_up"), -2), (("down", "experts_down"), -1))
        )
        heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return 4 * spec.hidden_size + max(experts * (up + 2 * inner), 2 * heads)

    def activation_bytes(self, tokens: int) -> int:
        """Bytes that a forward over `tokens` tokens takes, estimated; attention in torch operations takes more."""
        return tokens * self.widest * self.dtype.itemsize

    def reserve(self, tokens: int) -> None:
        """Does nothing: rope tables are computed at every forward."""

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output for every token, [tokens, hidden]. Writes the new tokens' keys and values to `kv`."""
        return self.layers(self.embed(batch.ids, batch.positions), batch, kv, 0, len(self.blocks))

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first layer's input, [tokens, hidden].  ids: int64 [tokens].  positions: integers [tokens]."""
        self.most_tokens = max(self.most_tokens, len(ids))
        hidden = self._looked_up(ids)
        if self.spec.embedding_multiplier != 1.0:
            hidden = hidden * self.spec.embedding_multiplier
        hidden = self._norm(self.outer, "embedding_norm", hidden)
        if "project_in.weight" in self.outer:
            hidden = self._linear(self.outer, "project_in", hidden)
        if "positions.weight" in self.outer:
            hidden = hidden + F.embedding(positions.long() + self.spec.position_offset, self.outer["positions.weight"])
        return hidden

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [tokens, embedding_size]."""
        return F.embedding(ids, self.outer["embedding.weight"])

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over hidden [tokens, hidden]. Writes keys and values to `kv`."""
        step = self._step(batch, {layer.rotary for layer in self.spec.layers[first:last]} - {""})
        for index in range(first, last):
            hidden = self._layer(index, hidden, step, kv)
        if kv.hidden_states is not None and last == len(self.blocks):
            kv.hidden_states.flatten(0, 1)[step.slot_mapping] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocabulary]"""
        return self.model_logits(hidden).float()

    def model_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` in the model's dtype."""
        self.most_logits = max(self.most_logits, len(hidden))
        hidden = self._norm(self.outer, "final_norm", hidden)
        if "project_out.weight" in self.outer:
            hidden = self._linear(self.outer, "project_out", hidden)
        logits = self._head(hidden)
        if self.spec.logits_divisor != 1.0:
            logits = logits / self.spec.logits_divisor
        if self.spec.logits_softcap:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output.  [n, vocabulary]"""
        return self._linear(self.outer, "head", hidden)

    def _step(self, batch: PackedBatch, keys: set[str]) -> Step:
        """What the layers of this forward share."""
        groups = torch_ops.sequence_groups(batch.cu_seqlens, batch.lengths, batch.block_tables, BLOCK_SIZE)
        positions = batch.positions.long()
        counts = batch.cu_seqlens.diff().long()
        owner = torch.arange(len(counts), device=positions.device).repeat_interleave(counts)
        slot_mapping = batch.block_tables[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        rope = {key: self._rope(key, positions) for key in keys}
        longest = max(group.slot_mapping.shape[1] for group in groups)
        return Step(slot_mapping, groups, rope, self._alibi_bias(longest))

    def _rope(self, key: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [tokens, rotary_dim / 2] each, in the dtype that rope computes in.  positions: int64 [tokens]"""
        cos, sin = self.layout.rotary[key](positions, self.dtype)
        dtype = torch.float32 if self.spec.rotary_float32 else self.dtype
        return cos.to(dtype), sin.to(dtype)

    def _alibi_bias(self, positions: int) -> torch.Tensor | None:
        """ALiBi's bias, [heads, positions]; None without ALiBi."""
        if self.spec.alibi is None:
            return None
        slopes = torch.tensor(self.spec.alibi, device=self.device)
        product_scale = self.spec.attention_scale if self.spec.alibi_bfloat16 else 0.0
        return torch_ops.alibi_bias(slopes, positions, self.dtype, product_scale)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block = self.blocks[index]
        x = self._norm(block, "attention_norm", hidden)
        attended = self._norm(block, "attention_post_norm", self._attention(index, x, step, kv))
        record = self._record(index, step, kv)
        if self.spec.parallel:
            x = self._norm(block, "mlp_norm", hidden) if "mlp_norm.weight" in block else x
            return self._norm(block, "mlp_post_norm", self._mlp(index, x, record)) + attended + hidden
        hidden = self._added(hidden, attended)
        output = self._mlp(index, self._norm(block, "mlp_norm", hidden), record)
        return self._added(hidden, self._norm(block, "mlp_post_norm", output))

    def _attention(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = self._linear(block, "qkv", x).split(sizes, dim=-1)
        q, k = self._rows_normed(block, q, k)
        q, k, v = (rows.unflatten(-1, (-1, spec.head_dim)) for rows in (q, k, v))
        return self._linear(block, "o", self._attended(index, q, k, v, step, kv).flatten(1))

    def _rows_normed(self, block: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [tokens, size] after the norms over all heads of a token, if the model has these."""
        if self.spec.qk_norm != "row":
            return q, k
        return self._norm(block, "q_norm", q), self._norm(block, "k_norm", k)

    def _attended(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, kv: PagedKV
    ) -> torch.Tensor:
        """The attention's output before its projection, after the norm of each head and rope. Writes keys and values
        to `kv`.  q, k, v, output: [tokens, heads, head_dim]
        """
        block, spec, layer = self.blocks[index], self.spec, self.spec.layers[index]
        if spec.qk_norm == "head":
            q, k = self._norm(block, "q_norm", q), self._norm(block, "k_norm", k)
        if layer.rotary:
            q, k = (torch_ops.rotated(x, *step.rope[layer.rotary], spec.rotary_interleaved) for x in (q, k))
        keys, values = kv.keys[index], kv.values[index]
        keys.view(-1, *k.shape[1:])[step.slot_mapping] = k
        values.view(-1, *v.shape[1:])[step.slot_mapping] = v
        eager = spec.alibi is not None and not spec.alibi_bfloat16  # BLOOM rounds attention scores
        features = spec.attention_scale, spec.attention_softcap, layer.window, step.bias, eager
        return torch_ops.paged_attention(q, keys, values, step.groups, *features)

    def _record(self, index: int, step: Step, kv: PagedKV) -> torch_ops.Record | None:
        """Writes the experts that a layer's router chooses to `kv`; None if they are not recorded."""
        if kv.router_indices is None or index not in self.moe_layer:
            return None
        return partial(self._write_experts, kv.router_indices, step.slot_mapping, self.moe_layer[index])

    def _write_experts(
        self, router_indices: torch.Tensor, slot_mapping: torch.Tensor, layer: int, chosen: torch.Tensor
    ) -> None:
        router_indices.flatten(0, 1)[slot_mapping, layer] = chosen.to(torch.int16)

    def _mlp(self, index: int, x: torch.Tensor, record: torch_ops.Record | None) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        if spec.layers[index].experts:
            local_experts = range(self.first_expert, self.first_expert + len(block["experts_down.weight"]))
            settings = spec.experts_per_token, spec.normalize_experts, spec.experts_float32, self.activation

            def matrix(role: str, expert: int) -> torch.Tensor:
                return self._expert(block, role, expert - self.first_expert)

            return torch_ops.mixture(x, block["router.weight"], local_experts, matrix, *settings, record)
        if spec.gated:
            gate, up = self._linear(block, "gate_up", x).chunk(2, dim=-1)
            return self._linear(block, "down", self.activation(gate) * up)
        return self._linear(block, "down", self.activation(self._linear(block, "up", x)))

    def _expert(self, block: Tensors, role: str, expert: int) -> torch.Tensor:
        """The matrix of an expert, by its index among this rank's.  [out, in]"""
        return block[f"{role}.weight"][expert]

    def _added(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The residual stream with `output` added, scaled by the model's residual multiplier."""
        multiplier = self.spec.residual_multiplier
        return hidden + (output if multiplier == 1.0 else output * multiplier)

    def _norm(self, tensors: dict[str, torch.Tensor], role: str, x: torch.Tensor) -> torch.Tensor:
        """x normed by `role`; unchanged if there is no such norm."""
        weight, spec = tensors.get(f"{role}.weight"), self.spec
        if weight is None:
            return x
        if spec.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, tensors.get(f"{role}.bias"), spec.norm_eps)
        return torch_ops.rms_norm(x, weight, spec.norm_eps, spec.norm_offset, spec.norm_float32)

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
        for delta in tensors.lora_deltas.get(role, ()):  # rounded where PEFT's forward rounds (0.21)
            columns = out[:, delta.first : delta.first + len(delta.b)]
            columns += F.linear(F.linear(x, delta.a), delta.b) * delta.scale
        return out
