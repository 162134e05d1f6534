"""A whole decoder in torch operations, on any device: the reference, and the fallback where no faster kernels run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import BLOCK_SIZE, PREFILL_TOKENS, KVWeights, LayerActivations, PackedBatch, PagedKV
from hybrid.kernels import torch_ops
from hybrid.kernels.recurrent import MixerLayer, StateRows, state_rows
from hybrid.kernels.router import routed
from hybrid.models.spec import (
    ATTENTION,
    HYBRID,
    JOINED,
    LATENT_ATTENTION,
    LAYER_ROLES,
    NO_MIXER,
    OUTER_ROLES,
    DecoderLayout,
    DecoderSpec,
    ParamRef,
)
from hybrid.runtime.huge_pages import request_huge_pages
from hybrid.runtime.parallel import InferenceGroup
from hybrid.sampling.vocabulary import VocabularySlice
from hybrid.weights.joined import joined_view
from hybrid.weights.lora import LowRank, merge_low_rank

ALL_TOKENS = -1  # a LoRA delta is of all tokens

# Copies of weights, by their sources. A model's decoders, with and without adapters, share the copies that both read; a
# copy that neither reads is freed.
Copies = MutableMapping[tuple, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Values that the layers of one forward share.

    slot_mapping: int64 [tokens]: the cache position of each new token's key and value.
    groups: the sequences, as `torch_ops.paged_attention` takes them.
    rope: cos and sin for each key of `DecoderLayout.rotary`, [tokens, rotary_dim / 2].
    bias: ALiBi's, [heads, positions]; None without ALiBi.
    query_scale: factor of each token's queries, [tokens, 1, 1]; None: 1.
    activations: where the layers' inputs are kept; None: nowhere.
    states: the sequences, as the recurrent layers take them.
    per_layer_inputs: [tokens, layers, per_layer_input_size]; None without any.
    """

    slot_mapping: torch.Tensor
    groups: tuple[torch_ops.Group, ...]
    rope: dict[str, tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None
    query_scale: torch.Tensor | None = None
    activations: LayerActivations | None = None
    states: tuple[StateRows, ...] = ()
    per_layer_inputs: torch.Tensor | None = None


@dataclass(frozen=True)
class LoraDelta:
    """An unmerged LoRA delta, scale · b (a x), of columns `first` on of a product.  a: [r, in].  b: [columns, r].

    adapter: the number of its adapter among `WholeDecoder.mixed_adapters`; ALL_TOKENS: it is of all tokens.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first: int
    adapter: int


class Tensors(dict[str, torch.Tensor]):
    """A layer's tensors by role; joined ones replace their parts.  lora_deltas: the unmerged ones of each product."""

    def __init__(
        self, lora_deltas: dict[str, list[LoraDelta]] | None = None, tensors: Mapping[str, torch.Tensor] | None = None
    ):
        super().__init__(tensors or {})
        self.lora_deltas = lora_deltas or {}


def merged(weight: torch.Tensor, deltas: list[LowRank]) -> torch.Tensor:
    """Return a weight [out, in] with its unmerged LoRA deltas, as a new tensor; `weight` if there are none."""
    if not deltas:
        return weight
    into = torch.empty_like(weight)
    merge_low_rank(weight, deltas, into)
    return into


def slot_mapping(batch: PackedBatch) -> torch.Tensor:
    """Return the cache position of each token of a batch, int64 [tokens]."""
    positions, counts = batch.positions.long(), batch.cu_seqlens.diff().long()
    owner = torch.arange(len(counts), device=positions.device).repeat_interleave(counts)
    return batch.block_tables[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE


def no_lora_deltas(ref: ParamRef) -> list[LowRank]:
    """Return the `lora_deltas` of weights without unmerged adapters."""
    return []


class WholeDecoder(ABC):
    """A decoder of `layout` in `dtype`. Call `bind` first, and the functions under `torch.no_grad()`.

    weights: gives a ParamRef's whole tensor, before its `select`; None for a bias that does not exist.
    lora_deltas: gives the unmerged LoRA factors of a weight; b has the rows of the ParamRef.
    copies: weight copies shared with the model's other decoders; the decoders that read a copy keep it alive.
    """

    device: torch.device  # of the weights and activations
    prefill_tokens = PREFILL_TOKENS  # prompt tokens in one forward
    context_block = BLOCK_SIZE  # cached tokens that attention reads at a time
    vocabulary: VocabularySlice | None = None  # what `logits` and `decode` give logits of; None: the whole vocabulary
    group: InferenceGroup | None = None  # ranks that run it together, on the same tokens; None: this rank alone
    mixed_adapters: tuple[str, ...] = ()  # of which each token has one, by `PackedBatch.adapters`; set before `bind`
    kv_weights: KVWeights | None = None  # what it is bound to; None: unknown, so that no keys and values are reused
    samples_in_kernel = False  # whether it has `decode_steps`
    samples_with_penalties = False  # whether sampling applies the repetition penalty and min_new_tokens
    continues_past_ends = False  # whether `decode_steps` goes on after a sequence has ended, and leaves it as it is
    records_experts = False  # whether forwards write `PagedKV.router_indices`
    keeps_hidden_states = False  # whether forwards write `PagedKV.hidden_states`
    state_lanes = 1  # `RecurrentMixer.state_shapes` are padded to a multiple of it
    latest_is_ring = False  # whether a convolution keeps one input more, that of position p in row p % rows

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
    ):
        self.layout, self.spec, self.weights, self.dtype = layout, layout.spec, weights, dtype
        self.layer_specs = [layout.spec.of_layer(index) for index in range(len(layout.spec.layers))]
        # By layer: heads, elements of a key, and of a value in the cache. Read here once: every call allocates blocks.
        self.cached_sizes = [(spec.num_kv_heads, *spec.cached_dims) for spec in self.layer_specs]
        self.lora_deltas = lora_deltas
        self.copies: Copies = WeakValueDictionary() if copies is None else copies
        self.most_tokens = self.most_logits = 0  # the most of any forward so far
        # By the index of a layer with experts: its number among these.
        self.moe_layer = {index: number for number, index in enumerate(self.spec.moe_layers)}
        self.unbind()

    def number_of(self, adapter: str) -> int:
        """Return `LoraDelta.adapter` of an adapter's deltas."""
        return self.mixed_adapters.index(adapter) if self.mixed_adapters else ALL_TOKENS

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
    def write_kv(self, batch: PackedBatch, kv: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the keys and values of a batch's tokens to a layer's blocks, as another forward has computed them.

        keys, values: [tokens, kv_heads, head_dim], keys after rope.
        """

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Prepare for sequences of up to `tokens` tokens."""

    @abstractmethod
    def forward(self, batch: PackedBatch, kv: PagedKV, activations: LayerActivations | None = None) -> torch.Tensor:
        """Return the last layer's output for every token, [tokens, hidden]. Writes the new tokens' keys and values to
        `kv`, and the layers' inputs to `activations`."""

    @abstractmethod
    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input, [tokens, hidden].  ids: int64 [tokens].  positions: integers [tokens]."""

    @abstractmethod
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

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output [n, hidden].  float32 [n, vocabulary]"""

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes that a forward over `tokens` tokens takes, estimated."""

    def bind(self) -> None:
        """Read all weights, on first use or again. Copies are refreshed in place and keep their addresses."""
        self.bind_part(OUTER_ROLES, range(len(self.spec.layers)))

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after one new token for each sequence.  float32 [sequences, vocab]"""
        return self.logits(self.forward(batch, kv))

    def verify(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after every token of a batch, as `decode` gives them.  float32 [tokens, vocab]"""
        return self.logits(self.forward(batch, kv))

    def norm_size(self, role: str, spec: DecoderSpec) -> int:
        """Return the number of elements that a norm without parameters is over.  spec: of its layer."""
        return spec.head_dim if role in ("q_norm", "k_norm", "v_norm") else spec.hidden_size

    def _dtype_of(self, role: str) -> torch.dtype:
        """Return the dtype that a role's tensor is read in."""
        in_float32 = role == "correction.weight" or (role == "router.weight" and self.spec.router.float32)
        return torch.float32 if in_float32 else self.dtype

    def states(self, num_slots: int) -> dict[int, tuple[torch.Tensor, ...]]:
        """Allocate `PagedKV.states`, their content undefined."""
        mixer = self.spec.recurrent
        *matrices, (kept, channels) = mixer.state_shapes(self.state_lanes)
        shapes = [(num_slots, *shape) for shape in (*matrices, (kept + self.latest_is_ring, channels))]
        return {
            index: tuple(torch.empty(shape, dtype=torch.float32, device=self.device) for shape in shapes)
            for index, layer in enumerate(self.spec.layers)
            if layer.mixer in (mixer.kind, HYBRID)
        }

    def _paged_kv(self, num_blocks: int, keys: Sequence[tuple], values: Sequence[tuple]) -> PagedKV:
        """Allocate blocks, their content undefined.  keys, values: the shapes of a block's in each layer; none are
        allocated for layers that do not cache tokens."""
        empty, cached = partial(torch.empty, device=self.device), (ATTENTION, LATENT_ATTENTION, HYBRID)
        caches = [layer.mixer in cached and layer.kv_layer is None for layer in self.spec.layers]
        key_blocks, value_blocks = (
            [empty((num_blocks, *shape) if has else (num_blocks, 0), dtype=self.dtype) for shape, has in pairs]
            for pairs in (zip(shapes, caches, strict=True) for shapes in (keys, values))
        )
        if num_blocks > 1:  # a call allocates one block, for its shapes
            for blocks in (*key_blocks, *value_blocks):
                request_huge_pages(blocks)
        experts = num_blocks, BLOCK_SIZE, len(self.moe_layer), self.spec.experts_per_token
        hidden = num_blocks, BLOCK_SIZE, self.spec.hidden_size
        return PagedKV(
            key_blocks,
            value_blocks,
            empty(experts, dtype=torch.int16) if self.records_experts else None,
            empty(hidden, dtype=self.dtype) if self.keeps_hidden_states else None,
        )

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """`layers` for one new token of each sequence, as `decode` runs them."""
        return self.layers(hidden, batch, kv, first, last)

    def loop_bytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes that the decode loop of `sequences` sequences of up to `tokens` tokens needs in addition to
        activations and logits: none here."""
        return 0

    def nbytes(self) -> int:
        """Return the bytes of weight copies, those shared with other decoders included."""
        return sum(copy.nbytes for copy in self.copies.values())

    def peak_activation_bytes(self) -> int:
        """Return the bytes of activations in the largest forward so far, plus those of the most logits."""
        activations = self.activation_bytes(self.most_tokens) if self.most_tokens else 0
        width = self.spec.vocab_size if self.vocabulary is None else self.vocabulary.width
        return activations + self.most_logits * width * 4


class TorchDecoder(WholeDecoder):
    """In torch operations. Tensors of the right dtype, joined ones if adjacent, are read in place; others copied."""

    outer: Tensors
    blocks: list[Tensors]
    first_expert = 0  # index of the first expert whose weights this rank has
    widest = 0  # the most elements per token that a layer holds at once
    token_adapters: torch.Tensor | None = None  # `PackedBatch.adapters` of the forward that runs

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The MLP's activation, of one argument."""
        return torch_ops.gelu_new if self.spec.activation_stepwise else torch_ops.ACTIVATIONS[self.spec.activation]

    @torch.no_grad()
    def bind_part(self, outer: Collection[str], layers: Iterable[int]) -> None:
        """Read the outer weights of the roles `outer`, and those of the layers with indices `layers`."""
        refs = {name: ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in outer}
        bound = self._bound(refs)
        bound |= self._ones(outer, self.spec)
        kept = {role: deltas for role, deltas in self.outer.lora_deltas.items() if role not in outer}
        self.outer = Tensors(kept | bound.lora_deltas, {**self.outer, **bound})
        for index in layers:
            self.blocks[index] = self._bound(self.layout.layers[index])
            missing = () if self.spec.layers[index].qk_norm else ("q_norm", "k_norm")
            self.blocks[index] |= self._ones(
                [role for role in LAYER_ROLES if role not in missing], self.layer_specs[index]
            )
            self.widest = max(self.widest, self._width(self.blocks[index]))

    def _ones(self, roles: Collection[str], spec: DecoderSpec) -> dict[str, torch.Tensor]:
        """Return the weights, of ones, of those of `roles` that are norms without parameters.  spec: of their layer."""
        weights = {}
        for role in spec.unweighted_norms:
            if role in roles:
                ones = torch.ones(self.norm_size(role, spec), dtype=self.dtype, device=self.device)
                weights[f"{role}.weight"] = self.copies.setdefault((self.dtype, "ones", len(ones)), ones)
        return weights

    def unbind(self) -> None:
        """Release the weights; bind again before anything runs."""
        self.outer, self.blocks = Tensors(), [Tensors() for _ in self.spec.layers]

    def _bound(self, refs: Mapping[str, ParamRef]) -> Tensors:
        """Return the tensors of these ParamRefs by role; joined ones replace their parts."""
        tensors = {role: self._read(ref) for role, ref in refs.items()}
        tensors = {role: tensor for role, tensor in tensors.items() if tensor is not None}
        bound = Tensors(self._lora_deltas(refs, {role: len(tensor) for role, tensor in tensors.items()}))
        for name, roles in JOINED.items():
            if f"{roles[0]}.weight" not in tensors:
                continue
            roles = tuple(role for role in roles if f"{role}.weight" in tensors)  # a layer may have queries alone
            weights = [tensors.pop(f"{role}.weight") for role in roles]
            biases = [tensors.pop(f"{role}.bias", None) for role in roles]
            bound[f"{name}.weight"] = self._joined([refs[f"{role}.weight"] for role in roles], weights)
            if any(bias is not None for bias in biases):
                pairs = zip(biases, weights, strict=True)
                biases = [weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs]
                bound[f"{name}.bias"] = self._joined([refs.get(f"{role}.bias") for role in roles], biases)
        for role, tensor in tensors.items():
            bound[role] = self._joined([refs[role]], [tensor], self._dtype_of(role))
        return bound

    def _lora_deltas(self, refs: Mapping[str, ParamRef], rows: Mapping[str, int]) -> dict[str, list[LoraDelta]]:
        """Return the unmerged LoRA deltas of these ParamRefs' products.  rows: of each role's tensor."""
        deltas: dict[str, list[LoraDelta]] = {}
        joined = {role: name for name, roles in JOINED.items() for role in roles if f"{roles[0]}.weight" in rows}
        for key, ref in refs.items():
            role, _, kind = key.partition(".")
            if kind != "weight":
                continue
            name = joined.get(role, role)
            before = JOINED[name][: JOINED[name].index(role)] if name != role else ()
            first = sum(rows.get(f"{part}.weight", 0) for part in before)
            for index, (a, b, scale, adapter) in enumerate(self.lora_deltas(ref)):
                a, b = self._factor((ref, index, "a"), a), self._factor((ref, index, "b"), b)
                deltas.setdefault(name, []).append(LoraDelta(a, b, scale, first, self.number_of(adapter)))
        return deltas

    def _factor(self, key: tuple, factor: torch.Tensor) -> torch.Tensor:
        """Return a LoRA factor in the decoder's dtype: in place, or a copy, which is refreshed and keeps its
        address."""
        if factor.dtype == self.dtype:
            return factor
        key = (self.dtype, *key)
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = torch.empty_like(factor, dtype=self.dtype)
        return copy.copy_(factor)

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        """Return the role's tensor, [out, in]."""
        whole = self.weights(ref)
        return whole if whole is None or ref.select is None else ref.select(whole)

    def _joined(
        self, refs: Sequence[ParamRef | None], pieces: list[torch.Tensor], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return these ParamRefs' tensors stacked by rows, in `dtype`, by default the decoder's: in place if they lie
        adjacent in their sources' memory, else a copy, which is refreshed."""
        dtype = dtype or self.dtype
        in_place = joined_view(pieces) if pieces[0].dtype == dtype else None
        if in_place is not None and self._selects_a_view(refs[0]):
            return in_place
        sources = (None if ref is None else self.weights(ref) for ref in refs)
        addresses = (0 if source is None else source.data_ptr() for source in sources)
        key = (dtype, *zip(refs, addresses, strict=True))
        sizes = [len(piece) for piece in pieces]
        buffer = self.copies.get(key)
        if buffer is None:
            shape = (sum(sizes), *pieces[0].shape[1:])
            buffer = self.copies[key] = torch.empty(shape, dtype=dtype, device=pieces[0].device)
        for part, piece in zip(buffer.split(sizes), pieces, strict=True):
            part.copy_(piece)
        return buffer

    def _selects_a_view(self, ref: ParamRef | None) -> bool:
        """Whether a ParamRef's part of its whole tensor lies in that tensor's memory."""
        if ref is None or ref.select is None or (whole := self.weights(ref)) is None:
            return True
        whole = torch.empty_like(whole, device="meta")
        return ref.select(whole).untyped_storage()._cdata == whole.untyped_storage()._cdata

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks: keys and values [blocks, BLOCK_SIZE, kv_heads, head_dim] for each layer. In latent attention
        a key begins with the value, so that there are no values."""
        positions, sizes = 0 if self.spec.latent_dim else BLOCK_SIZE, self.cached_sizes
        keys = [(BLOCK_SIZE, heads, key_dim) for heads, key_dim, _ in sizes]
        return self._paged_kv(num_blocks, keys, [(positions, heads, value_dim) for heads, _, value_dim in sizes])

    def write_kv(self, batch: PackedBatch, kv: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots = slot_mapping(batch)
        for cache, new in ((kv.keys[layer], keys), (kv.values[layer], values)):
            cache.view(-1, *new.shape[1:])[slots] = new.to(cache.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the weights, also before they are gathered."""
        return self.weights(self.layout.outer["embedding.weight"]).device

    def _width(self, block: Tensors) -> int:
        """Return the most elements per token that a layer holds at once.

        These are the residual stream, before and after its norm and in float32, with either the MLP's products, or the
        queries, keys and values before and after rope.
        """
        spec, experts = self.spec, max(self.spec.experts_per_token, 1)
        up, inner = (
            next((block[f"{role}.weight"].shape[dim] for role in roles if f"{role}.weight" in block), 0)
            for roles, dim in ((("gate_up", "up", "experts_gate_up"), -2), (("down", "experts_down"), -1))
        )
        shared = block["shared_down.weight"].shape[-1] if "shared_down.weight" in block else 0
        heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        if spec.latent_dim:  # queries before and after they are absorbed, and what they read of latents
            heads = spec.num_heads * (2 * spec.head_dim + sum(spec.cached_dims) + spec.value_dim)
        recurrent = 0 if spec.recurrent is None else spec.recurrent.width
        heads += 2 * spec.per_layer_input_size * len(spec.layers)  # these inputs, before and after their norm
        return 4 * spec.hidden_size + max(experts * (up + 2 * inner) + 4 * shared, 2 * heads, recurrent)

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes that a forward over `tokens` tokens takes, estimated; attention in torch operations takes
        more."""
        return tokens * self.widest * self.dtype.itemsize

    def reserve(self, tokens: int) -> None:
        """Do nothing: rope tables are computed at every forward."""

    def forward(self, batch: PackedBatch, kv: PagedKV, activations: LayerActivations | None = None) -> torch.Tensor:
        """Return the last layer's output for every token, [tokens, hidden]. Writes the new tokens' keys and values to
        `kv`, and the layers' inputs to `activations`."""
        return self.layers(self.embed(batch.ids, batch.positions), batch, kv, 0, len(self.blocks), activations)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input, [tokens, hidden].  ids: int64 [tokens].  positions: integers [tokens]."""
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
        """Return the rows of the embedding, [tokens, embedding_size]."""
        return F.embedding(ids, self.outer["embedding.weight"])

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
        step = self._step(batch, {layer.rotary for layer in self.spec.layers[first:last]} - {""}, activations)
        if self.spec.per_layer_input_size:
            step = replace(step, per_layer_inputs=self._per_layer_inputs(batch))
        for index in range(first, last):
            if activations is not None:
                activations.write_input(index, hidden)
            hidden = self._layer(index, hidden, step, kv)
        if activations is not None and last == len(self.blocks):
            activations.write_input(last, hidden)
        if kv.hidden_states is not None and last == len(self.blocks):
            kv.hidden_states.flatten(0, 1)[step.slot_mapping] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output [n, hidden].  float32 [n, vocabulary]"""
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
        """Return the head's output.  [n, vocabulary]"""
        return self._linear(self.outer, "head", hidden)

    def _step(self, batch: PackedBatch, keys: set[str], activations: LayerActivations | None = None) -> Step:
        """Return the values that the layers of this forward share."""
        self.token_adapters = batch.adapters
        groups = torch_ops.sequence_groups(batch.cu_seqlens, batch.lengths, batch.block_tables, BLOCK_SIZE)
        positions = batch.positions.long()
        rope = {key: self._rope(key, positions) for key in keys}
        longest = max(group.slot_mapping.shape[1] for group in groups)
        states: tuple[StateRows, ...] = ()
        if self.spec.is_recurrent:
            assert batch.state_slots is not None, "sequences of a recurrent model have states"
            states = state_rows(batch.cu_seqlens, batch.positions, batch.state_slots)
        bias, query_scale = self._alibi_bias(longest), self._query_scale(positions)
        return Step(slot_mapping(batch), groups, rope, bias, query_scale, activations, states)

    def _per_layer_inputs(self, batch: PackedBatch) -> torch.Tensor:
        """Return `Step.per_layer_inputs`, as Gemma 4's model computes them (transformers 5.23)."""
        spec, size = self.spec, self.spec.per_layer_input_size
        embedded = self.embed(batch.ids, batch.positions)
        projected = self._linear(self.outer, "per_layer_model_projection", embedded) * spec.hidden_size**-0.5
        projected = self._norm(self.outer, "per_layer_projection_norm", projected.unflatten(-1, (-1, size)))
        of_tokens = F.embedding(batch.ids, self.outer["per_layer_embedding.weight"]).unflatten(-1, (-1, size))
        return (projected + of_tokens * torch.tensor(size**0.5).to(self.dtype).item()) * 2**-0.5

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of the queries at `positions` [tokens], [tokens, 1, 1]; None if all are 1."""
        spec = self.spec
        if not spec.query_scale_positions:
            return None
        steps = torch.floor((positions + spec.query_scale_unrotated) / spec.query_scale_positions)
        scale = 1 + spec.query_scale_beta * torch.log(1 + steps)
        return (scale if spec.query_scale_unrotated else scale.to(self.dtype))[:, None, None]

    def _scaled(self, index: int, q: torch.Tensor, query_scale: torch.Tensor | None) -> torch.Tensor:
        """Return a layer's queries [tokens, heads, head_dim], scaled by their positions if they are."""
        if query_scale is None or (self.spec.query_scale_unrotated and self.spec.layers[index].rotary):
            return q
        return (q * query_scale).to(q.dtype)

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
        block, layer = self.blocks[index], self.spec.layers[index]
        if layer.mixer == NO_MIXER:
            return self._feed_forward(index, hidden, step, kv)
        x = self._norm(block, "attention_norm", hidden)
        attended = self._norm(block, "attention_post_norm", self._mixer(layer.mixer)(index, x, step, kv))
        if self.spec.parallel:
            x = self._norm(block, "mlp_norm", hidden) if "mlp_norm.weight" in block else x
            output = self._norm(block, "mlp_post_norm", self._mlp(index, x, self._record(index, step, kv)))
            return hidden + attended + output if self.spec.attention_first else output + attended + hidden
        hidden = self._added(hidden, attended)
        hidden = self._feed_forward(index, hidden, step, kv) if layer.feed_forward else hidden
        if step.per_layer_inputs is not None:
            gate = self.activation(self._linear(block, "per_layer_input_gate", hidden))
            output = self._linear(block, "per_layer_projection", gate * step.per_layer_inputs[:, index])
            hidden = hidden + self._norm(block, "per_layer_post_norm", output)
        return hidden * block["layer_scalar.weight"] if "layer_scalar.weight" in block else hidden

    def _mixer(self, kind: str) -> Callable[[int, torch.Tensor, Step, PagedKV], torch.Tensor]:
        """Return what computes a layer's mixer.  kind: as `LayerSpec.mixer`, not NO_MIXER."""
        mixers = {ATTENTION: self._attention, LATENT_ATTENTION: self._latent_attention, HYBRID: self._hybrid}
        return mixers.get(kind, self._recurrent)

    def _feed_forward(self, index: int, hidden: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        """Return `hidden` with the output of its MLP or mixture added."""
        block = self.blocks[index]
        x, record = self._norm(block, "mlp_norm", hidden), self._record(index, step, kv)
        output = self._feed_forward_output(index, x, hidden, record)
        return self._added(hidden, self._norm(block, "mlp_post_norm", output))

    def _feed_forward_output(
        self, index: int, x: torch.Tensor, hidden: torch.Tensor, record: torch_ops.Record | None
    ) -> torch.Tensor:
        """Return the output of a layer's MLP or mixture, before its norm.  x: `hidden` after `mlp_norm`."""
        block = self.blocks[index]
        if "experts_norm.weight" not in block:
            return self._mlp(index, x, record)
        # The MLP and the experts are parallel.
        dense = self._norm(block, "shared_post_norm", self._shared_experts(block, x))
        mixed = self._mixture(
            block, self._norm(block, "experts_norm", hidden), record, self._router_input(block, hidden)
        )
        return dense + self._norm(block, "experts_post_norm", mixed)

    def _router_input(self, block: Tensors, hidden: torch.Tensor) -> torch.Tensor:
        """Return the router's input where it reads the residual stream."""
        return self._norm(block, "router_norm", hidden) * block["router_scale.weight"] * self.spec.hidden_size**-0.5

    def _attention(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, spec = self.blocks[index], self.layer_specs[index]
        if spec.layers[index].kv_layer is not None:
            q = self._linear(block, "qkv", x).unflatten(-1, (-1, spec.head_dim))
            return self._linear(block, "o", self._attended(index, q, None, None, step, kv).flatten(1))
        queries, value_dim = spec.num_heads * (1 + spec.output_gate) * spec.head_dim, spec.cached_dims[1]
        widths = queries, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * value_dim
        qkv = self._linear(block, "qkv", x)
        if spec.qkv_clip:
            qkv = qkv.clamp(-spec.qkv_clip, spec.qkv_clip)
        q, k, v = qkv.split(widths, dim=-1)
        v = v if spec.value_multiplier == 1.0 else v * spec.value_multiplier
        k = k if spec.key_multiplier == 1.0 else k * spec.key_multiplier
        gate: torch.Tensor | None = None
        q, k = (rows.unflatten(-1, (-1, spec.head_dim)) for rows in (q, k))
        v = v.unflatten(-1, (-1, value_dim))
        if spec.output_gate:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        q, k = self._rows_normed(block, q, k)
        attended = self._attended(index, q, k, v, step, kv)
        if spec.gate_dim:
            gate = self._linear(block, "attention_gate", x).unflatten(-1, (-1, spec.gate_dim))
        return self._linear(block, "o", (attended if gate is None else self._gated_output(attended, gate)).flatten(1))

    def _gated_output(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return attention's output [tokens, heads, size] by its gate [tokens, heads, size or 1]."""
        return attended * gate.sigmoid()

    def _latent_attention(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        """Return the output of latent attention, [tokens, hidden]. Writes latents to `kv`.

        Prefill and decode have one formula: key and value matrices are absorbed into queries and outputs, so that
        attention is over the latents themselves, as over one head's keys and values.
        """
        block, spec = self.blocks[index], self.spec
        latent_dim, rope_dim, keys = spec.latent_dim, spec.rotary_dim, kv.keys[index]
        queries = self._latent_normed(block, "q_a_norm", self._linear(block, "q_a", x)) if spec.query_rank else x
        q = self._linear(block, "q_b", queries).unflatten(-1, (spec.num_heads, -1))
        latent, shared_key = self._linear(block, "kv_a", x).split([latent_dim, rope_dim], dim=-1)
        latent = self._latent_normed(block, "kv_a_norm", latent)
        q, q_rope = q.split([spec.head_dim - rope_dim, rope_dim], dim=-1)
        shared_key = shared_key.unsqueeze(1)
        if rotary := spec.layers[index].rotary:
            rope = *step.rope[rotary], spec.rotary_interleaved
            q_rope, shared_key = (torch_ops.rotated(part, *rope) for part in (q_rope, shared_key))
        if step.query_scale is not None:
            q, q_rope = q * step.query_scale, q_rope * step.query_scale
        keys.view(-1, 1, keys.shape[-1])[step.slot_mapping] = torch.cat((latent.unsqueeze(1), shared_key), dim=-1)
        key_up, value_up = self._latent_up(block).split([spec.head_dim - rope_dim, spec.value_dim], dim=1)
        q = torch.cat((torch.einsum("thk,hkl->thl", q, key_up), q_rope), dim=-1)
        scale = spec.attention_scale
        read = torch_ops.paged_attention(q, keys, keys[..., :latent_dim], step.groups, scale)
        return self._linear(block, "o", torch.einsum("thl,hvl->thv", read, value_up).flatten(1))

    def _latent_normed(self, block: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        return torch_ops.rms_norm(x, block[f"{role}.weight"], spec.latent_norm_eps, spec.norm_offset, spec.norm_float32)

    def _latent_up(self, block: Tensors) -> torch.Tensor:
        """Return each head's key and value matrix with its unmerged adapters, [heads, key + value, latent_dim]."""
        deltas = [LowRank(delta.a, delta.b, delta.scale) for delta in block.lora_deltas.get("kv_b", ())]
        return merged(self._kv_b(block), deltas).unflatten(0, (self.spec.num_heads, -1))

    def _kv_b(self, block: Tensors) -> torch.Tensor:
        return block["kv_b.weight"]

    def _recurrent(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        states = kv.states[index], step.states
        layer = MixerLayer(partial(self._linear, block), block, *states, spec.norm_eps, self._summed)
        return spec.recurrent.mixed(x, layer)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor's sum over the ranks that have slices of a mixer: x, of whole mixers."""
        return x

    def _hybrid(self, index: int, x: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        """Return the sum of a recurrent mixer's output and an attention's."""
        spec, mixed = self.spec, self._recurrent(index, x, step, kv)
        attended = self._attention(index, x * spec.attention_in_multiplier, step, kv)
        return mixed + attended * spec.attention_out_multiplier

    def _rows_normed(self, block: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [tokens, heads, head_dim] after the norms over all heads of a token, if the model has these."""
        if self.spec.qk_norm != "row":
            return q, k
        rows = {"q_norm": q, "k_norm": k}
        q, k = (self._row_normed(block, role, x.flatten(1)).view_as(x) for role, x in rows.items())
        return q, k

    def _row_normed(self, block: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        return self._norm(block, role, x)

    def _attended(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        step: Step,
        kv: PagedKV,
    ) -> torch.Tensor:
        """Return the attention's output before its projection, after the norm of each head and rope. Writes keys and
        values to `kv`.  q, k, v, output: [tokens, heads, head_dim]; k and v None: those of another layer are read.
        """
        block, spec, layer = self.blocks[index], self.spec, self.spec.layers[index]
        q = self._scaled(index, self._normed_and_rotated(index, "q_norm", q, step), step.query_scale)
        source = index if layer.kv_layer is None else layer.kv_layer
        keys, values = kv.keys[source], kv.values[source]
        if k is not None and v is not None:
            k = self._normed_and_rotated(index, "k_norm", k, step)
            keys.view(-1, *k.shape[1:])[step.slot_mapping] = k
            values.view(-1, *v.shape[1:])[step.slot_mapping] = self._norm(block, "v_norm", v)
        eager = spec.alibi is not None and not spec.alibi_bfloat16  # BLOOM rounds attention scores
        features = spec.attention_scale, spec.attention_softcap, layer.window, step.bias, eager
        return torch_ops.paged_attention(q, keys, values, step.groups, *features, block.get("sinks.weight"))

    def _normed_and_rotated(self, index: int, norm: str, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return queries or keys after the norm of each head, and after rope, in the model's order."""
        block, spec, layer = self.blocks[index], self.spec, self.spec.layers[index]
        if spec.qk_norm == "head" and not spec.qk_norm_last:
            x = self._norm(block, norm, x)
        if layer.rotary:
            x = torch_ops.rotated(x, *step.rope[layer.rotary], spec.rotary_interleaved)
        return self._norm(block, norm, x) if spec.qk_norm_last else x

    def _record(self, index: int, step: Step, kv: PagedKV) -> torch_ops.Record | None:
        """Return a function that records the experts that a layer's router chooses; None if they are not recorded."""
        in_activations = step.activations is not None and step.activations.router_indices is not None
        if index not in self.moe_layer or not (in_activations or kv.router_indices is not None):
            return None
        return partial(self._record_experts, self.moe_layer[index], step, kv)

    def _record_experts(self, layer: int, step: Step, kv: PagedKV, chosen: torch.Tensor) -> None:
        if kv.router_indices is not None:
            self._write_experts(kv.router_indices, step.slot_mapping, layer, chosen)
        if step.activations is not None:
            step.activations.write_experts(layer, chosen)

    def _write_experts(
        self, router_indices: torch.Tensor, slot_mapping: torch.Tensor, layer: int, chosen: torch.Tensor
    ) -> None:
        router_indices.flatten(0, 1)[slot_mapping, layer] = chosen.to(torch.int16)

    def _mlp(self, index: int, x: torch.Tensor, record: torch_ops.Record | None) -> torch.Tensor:
        block, spec = self.blocks[index], self.spec
        if spec.layers[index].experts:
            output = self._mixture(block, x, record)
            return output + self._shared_experts(block, x) if "shared_down.weight" in block else output
        return self._dense(block, x)

    def _dense(self, block: Tensors, x: torch.Tensor, prefix: str = "") -> torch.Tensor:
        """Return the output of an MLP with or without a gate.  prefix: of its roles."""
        if self.spec.gated:
            activated = self._gated(self._linear(block, f"{prefix}gate_up", x))
        else:
            activated = self._activated(block, self._linear(block, f"{prefix}up", x))
        output = self._linear(block, f"{prefix}down", activated)
        return output if self.spec.mlp_multiplier == 1.0 else output * self.spec.mlp_multiplier

    def _activated(self, block: Tensors, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of an MLP without a gate."""
        if self.spec.activation == "xielu":
            return torch_ops.xielu(x, block["xielu_positive.weight"], block["xielu_negative.weight"])
        return self.activation(x)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the gated activation of gate and up side by side: [tokens, 2 · inner] to [tokens, inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.spec.activation == "swiglu_clamped":
            return torch_ops.swiglu_clamped(gate, up, self.spec.swiglu_alpha, self.spec.swiglu_limit)
        gate = gate if self.spec.gate_multiplier == 1.0 else gate * self.spec.gate_multiplier
        return self.activation(gate) * up

    def _routed(
        self, block: Tensors, x: torch.Tensor, record: torch_ops.Record | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and indices of each token's experts, [tokens, experts_per_token]."""
        spec = self.spec
        logits = self._linear(block, "router", x.float() if spec.router.float32 else x)
        biases = block.get("correction.weight"), block.get("expert_scale.weight")
        weights, chosen = routed(logits, spec.router, spec.experts_per_token, x.dtype, *biases)
        if record is not None:
            record(chosen)
        return weights, chosen

    def _weighted(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of experts, and the factors of their outputs.  weights: of each token's experts."""
        return (x * weights, torch.ones_like(weights)) if self.spec.router.scales_inputs else (x, weights)

    def _mixture(
        self,
        block: Tensors,
        x: torch.Tensor,
        record: torch_ops.Record | None,
        router_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of a mixture of experts, [tokens, hidden].  router_input: None: x."""
        local_experts = range(self.first_expert, self.first_expert + len(block["experts_down.weight"]))

        def matrix(role: str, expert: int) -> torch.Tensor:
            return self._expert(block, role, expert - self.first_expert)

        def bias(role: str, expert: int) -> torch.Tensor:
            biases = block.get(f"{role}.bias")  # with slices, only one rank has those of `experts_down`
            return x.new_zeros(1) if biases is None else biases[expert - self.first_expert, :, 0]

        has_bias, activated = "experts_gate_up.bias" in block, self._gated if self.spec.gated else self.activation
        weights, chosen = self._routed(block, x if router_input is None else router_input, record)
        is_latent = bool(self.spec.latent_size)
        x = self._linear(block, "latent_in", x) if is_latent else x
        x, weights = self._weighted(x, weights)
        output = torch_ops.mixture(x, weights, chosen, local_experts, matrix, bias if has_bias else None, activated)
        output = self._experts_summed(output)
        return self._linear(block, "latent_out", output) if is_latent else output

    def _experts_summed(self, output: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs over the ranks that have parts of them: the output of all experts."""
        return output

    def _shared_experts(self, block: Tensors, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the experts that all tokens share, [tokens, hidden]."""
        output = self._shared_mlp(block, x)
        if "shared_router.weight" in block:
            output = torch.sigmoid(self._linear(block, "shared_router", x)) * output
        return output

    def _shared_mlp(self, block: Tensors, x: torch.Tensor) -> torch.Tensor:
        """`_shared_experts` before the sigmoid gate."""
        return self._dense(block, x, "shared_")

    def _expert(self, block: Tensors, role: str, expert: int) -> torch.Tensor:
        """Return the matrix of an expert, by its index among this rank's.  [out, in]"""
        return block[f"{role}.weight"][expert]

    def _added(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the residual stream with `output` added, scaled by the model's residual multiplier."""
        multiplier = self.spec.residual_multiplier
        hidden = hidden.float() if self.spec.residual_float32 else hidden
        return hidden + (output if multiplier == 1.0 else output * multiplier)

    def _norm(self, tensors: dict[str, torch.Tensor], role: str, x: torch.Tensor) -> torch.Tensor:
        """x normed by `role`; unchanged if there is no such norm."""
        weight, spec = tensors.get(f"{role}.weight"), self.spec
        if weight is None:
            return x
        if spec.residual_float32 and role != "final_norm":
            x = x.to(self.dtype)
        if spec.norm == "layer":
            weight = weight + spec.norm_offset if spec.norm_offset else weight
            return F.layer_norm(x, weight.shape, weight, tensors.get(f"{role}.bias"), spec.norm_eps)
        return torch_ops.rms_norm(x, weight, spec.norm_eps, spec.norm_offset, spec.norm_float32).to(self.dtype)

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        out = self._matmul(x, tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
        for delta in tensors.lora_deltas.get(role, ()):  # rounded where PEFT's forward rounds (0.21)
            columns = out[:, delta.first : delta.first + len(delta.b)]
            added = self._matmul(self._matmul(x.to(delta.a.dtype), delta.a), delta.b) * delta.scale
            columns += added if delta.adapter == ALL_TOKENS else added.where(self._has_adapter(delta.adapter), 0)
        return out

    def _has_adapter(self, number: int) -> torch.Tensor:
        """Return which of the running forward's tokens have the adapter of this number, bool [tokens, 1]."""
        assert self.token_adapters is not None, "a batch names the adapters of its tokens"
        return (self.token_adapters == number).unsqueeze(1)

    def _matmul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)
