"""The decoder on the CPU kernels: one call for all layers; weights are read where the snapshot holds them."""

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import BLOCK_SIZE, PREFILL_TOKENS, LayerActivations, PackedBatch, PagedKV
from hybrid.decoders.torch_decoder import Copies, WholeDecoder, merged, no_lora_deltas
from hybrid.kernels import cpu_library as kernels
from hybrid.kernels.cpu_library import address
from hybrid.kernels.host_group import HostGroup
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.torch_mamba2 import Mamba2
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.models.spec import (
    ATTENTION,
    HYBRID,
    JOINED,
    LATENT_ATTENTION,
    NO_MIXER,
    XIELU,
    DecoderLayout,
    DecoderSpec,
    ParamRef,
    UnsupportedModel,
)
from hybrid.runtime.huge_pages import collapse
from hybrid.sampling.state import SamplingState
from hybrid.sampling.vocabulary import VocabularySlice
from hybrid.weights.int8 import dequantized, scale_of
from hybrid.weights.lora import LowRank

# The values of DecoderSpec's fields that are words, in the order of records.h's enums.
ENUMS = {
    "norm": ("rms", "layer"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped"),
    "qk_norm": ("", "head", "row"),
}
SCORES = ("softmax", "softmax_chosen", "sigmoid", "sparsemixer", "sigmoid_chosen")  # of Router, in records.h's order
# In records.h's order.
RECURRENT = GatedDeltaNet, Mamba2, ShortConv, KimiDeltaAttention
MIXERS = (NO_MIXER, ATTENTION, LATENT_ATTENTION, *(mixer.kind for mixer in RECURRENT), HYBRID)
VECTORS = ("sinks", "correction", "expert_scale", "router_scale", "layer_scalar")  # roles of Layer that are float32
NUMBERS = (ctypes.c_int64, ctypes.c_double)


class CpuDecoder(WholeDecoder):
    """The decoder of a DecoderLayout, computed by the library of `kernels.cpu_library`.

    dtype: of the matrices, float32 or bfloat16. Activations are float32, rounded to `dtype` where Hugging Face rounds.
    workspace: shared with decoders that never run at the same time.

    group: ranks that have slices of the weights: heads, matrices and vocabulary are sliced over `group.tensor`, experts
        over all of it. `layout` then has this rank's heads, and `weights` gives slices. Its functions are collectives:
        every rank calls them with the same tokens, and gets the same hidden states, and the logits of its `vocabulary`.

    A weight is read in place if its role's tensor is a contiguous part of what `weights` gives; others, such as
    transposed ones, are copied. Weights may be int8 if `reads_int8` accepts them.
    Raises UnsupportedModel for a dtype, or a mixture of dtypes, that the kernels do not support.
    """

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        library: ctypes.CDLL,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
        workspace: "Workspace | None" = None,
        group: HostGroup | None = None,
    ):
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModel(f"the CPU kernels compute float32 and bfloat16, not {dtype}")
        super().__init__(layout, weights, dtype, lora_deltas, copies)
        self.library, self.device, self.group = library, torch.device("cpu"), group
        if group is not None and group.tensor.size > 1:
            self.vocabulary = VocabularySlice(group.tensor, self.spec.vocab_size)
        self.workspace = Workspace() if workspace is None else workspace
        self.rope: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by rotary key: cos, sin [positions, dim / 2]
        self.lent: weakref.ref[PagedKV] | None = None  # the blocks whose addresses the layers' records hold
        self.collapsed: set[int] = set()  # addresses of the weights that lie in huge pages, if the system gave them
        self.alibi = torch.tensor(self.spec.alibi) if self.spec.alibi else None
        self.layer_records = (kernels.Layer * len(self.spec.layers))()
        self.record = self._record()
        self.pointer = ctypes.addressof(self.record)  # as the kernels' functions take it

    def _record(self) -> ctypes.Structure:
        """Return the Decoder record, without weights: every number of the spec under its name."""
        record = kernels.Decoder(bfloat16=self.dtype == torch.bfloat16, layers=ctypes.addressof(self.layer_records))
        for name, kind, *_ in record._fields_:
            if kind in NUMBERS and hasattr(self.spec, name):
                value = getattr(self.spec, name)
                setattr(record, name, ENUMS[name].index(value) if name in ENUMS else value)
            elif kind.__name__ == type(self.spec.recurrent).__name__:
                setattr(record, name, kind(**vars(self.spec.recurrent)))
        router = self.spec.router
        record.router = kernels.Router(**{**vars(router), "scores": SCORES.index(router.scores)})
        record.embedding_size = self.spec.embedding_size or self.spec.hidden_size
        record.num_layers = len(self.spec.layers)
        record.local_experts, record.num_moe_layers = self.spec.num_experts, len(self.moe_layer)
        if self.vocabulary is not None:
            record.group = ctypes.addressof(self.vocabulary.group.record)
            record.vocab_size, record.whole_vocabulary = self.vocabulary.width, self.vocabulary.size
            record.first_token, record.local_tokens = self.vocabulary.first, self.vocabulary.count
        if self.group is not None:
            record.expert_group = ctypes.addressof(self.group.record)
            shards, index = (n // self.group.tensor.size for n in (self.group.size, self.group.index))
            record.local_experts = -(-self.spec.num_experts // shards)
            record.first_expert = index * record.local_experts
        record.alibi = None if self.alibi is None else address(self.alibi, torch.float32)
        return record

    def bind(self) -> None:
        """Store the addresses of all weights in the records. Raises UnsupportedModel for a mixture of dtypes."""
        self.rope, self.lent = {}, None
        self.unbind()
        super().bind()

    def bind_part(self, outer: Collection[str], layers: Iterable[int]) -> None:
        """Bind as `bind` does, but only the outer weights of the roles `outer`, and for the layers with indices
        `layers`."""
        refs = {name: ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in outer}
        if "embedding.weight" in refs:
            embedding = self._matrix(refs["embedding.weight"])
            self.record.embedding = self._keep(embedding, self.dtype)
            self.record.embedding_rows = self.record.local_rows = len(embedding)
            if self.vocabulary is not None:
                self.record.first_row = self.vocabulary.group.index * len(embedding)
                self.record.embedding_rows = self.vocabulary.group.size * len(embedding)
        if "positions.weight" in refs:
            self.record.positions = self._keep(self._matrix(refs["positions.weight"]), self.dtype)
        if "per_layer_embedding.weight" in refs:
            table = self._matrix(refs["per_layer_embedding.weight"])
            self.record.per_layer_embedding, self.record.per_layer_rows = self._keep(table, self.dtype), len(table)
        self._bind_record(self.record, refs, outer, self.spec)
        for index in layers:
            layer, roles, spec = self.layer_records[index], self.layout.layers[index], self.layer_specs[index]
            layer.num_kv_heads, layer.head_dim = spec.num_kv_heads, spec.head_dim
            layer.reads_other_kv = spec.layers[index].kv_layer is not None
            layer.window, layer.moe_layer = self.spec.layers[index].window, self.moe_layer.get(index, 0)
            layer.mixer = MIXERS.index(self.spec.layers[index].mixer)
            layer.xielu = self._xielu_slopes(roles)
            missing = () if self.spec.layers[index].qk_norm else ("q_norm", "k_norm")
            self._bind_record(layer, roles, [name for name, *_ in layer._fields_ if name not in missing], spec)
            for role in VECTORS:
                setattr(layer, role, self._vector(roles.get(f"{role}.weight")))
            if "kv_b.weight" in roles:
                layer.latent_up, layer.key_up = self._latent_matrices(roles["kv_b.weight"])
            inner = (layer.down.inputs, layer.experts_down.inputs, layer.shared_down.inputs)
            self.record.intermediate_size = max(self.record.intermediate_size, *inner)

    def unbind(self) -> None:
        """Release the weights; bind again before anything runs."""
        self.tensors: list[torch.Tensor] = []  # keeps alive what the records point to
        self.lora_records: list[ctypes.Array] = []  # keeps alive the LoRA records that the linears point to

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks, their content undefined.

        keys: [blocks, kv_heads, elements of a key rounded up to an even number, BLOCK_SIZE].  values: [blocks,
            kv_heads, BLOCK_SIZE, elements of a value rounded up to whole vectors]. Both in the decoder's dtype;
            attention.h has the order of a head's elements.
        """
        lanes, sizes = self.library.lanes(), self.cached_sizes
        keys = [(heads, key_dim + key_dim % 2, BLOCK_SIZE) for heads, key_dim, _ in sizes]
        values = [(heads, BLOCK_SIZE, -(-value_dim // lanes) * lanes) for heads, _, value_dim in sizes]
        return self._paged_kv(num_blocks, keys, values)

    def write_kv(self, batch: PackedBatch, kv: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._lend(kv)
        record, work = self._batch_record(batch), self._work(len(batch.ids), 1)
        keys, values = keys.float().contiguous(), values.float().contiguous()
        pointers = [address(tensor, torch.float32) for tensor in (keys, values, work)]
        self.library.write_kv(self.pointer, ctypes.addressof(record), layer, *pointers)

    @property
    def state_lanes(self) -> int:
        """As WholeDecoder's: whole vectors."""
        return self.library.lanes()

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in one forward. Products in AMX tiles are so fast that activations must stay in the caches."""
        return 512 if self.record.bfloat16 and self.library.multiplies_in_tiles() else PREFILL_TOKENS

    def reserve(self, tokens: int) -> None:
        """Extend the rope tables to `tokens` positions."""
        for key, table in self.layout.rotary.items():
            if key in self.rope and len(self.rope[key][0]) >= tokens:
                continue
            assert tokens <= (self.spec.max_positions or tokens), "more positions would rescale the others"
            cos, sin = table(torch.arange(tokens), self.dtype)
            self.rope[key] = cos.contiguous(), sin.contiguous()
            for record, layer in zip(self.layer_records, self.spec.layers, strict=True):
                if layer.rotary == key:
                    record.cos, record.sin = (address(part, torch.float32) for part in self.rope[key])
                    record.rotary_dim = 2 * cos.shape[1]

    def forward(self, batch: PackedBatch, kv: PagedKV, activations: LayerActivations | None = None) -> torch.Tensor:
        """Return the last layer's output for every token, float32 [tokens, hidden]. Writes the new tokens' keys and
        values to `kv`, and the layers' inputs to `activations`.

        Raises IndexError for token ids outside the embedding.
        """
        hidden = torch.empty(len(batch.ids), self.spec.hidden_size)
        return self._run(hidden, batch, kv, -1, len(self.spec.layers), activations)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input, float32 [tokens, hidden].  ids: int64 [tokens].  positions: int32
        [tokens]."""
        nothing = torch.zeros(0, dtype=torch.int32)
        batch = PackedBatch(ids, positions, nothing, nothing, nothing.view(0, 0))
        return self._run(torch.empty(len(ids), self.spec.hidden_size), batch, None, -1, 0)

    def layers(
        self,
        hidden: torch.Tensor,
        batch: PackedBatch,
        kv: PagedKV,
        first: int,
        last: int,
        activations: LayerActivations | None = None,
    ) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over `hidden` [tokens, hidden]; returns a new tensor, float32.
        Writes these layers' inputs to `activations`."""
        return self._run(hidden.float().clone(), batch, kv, first, last, activations)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output [n, hidden], rounded as the model rounds them.  float32 [n,
        vocab], or [n, width] of `vocabulary`."""
        self.most_logits = max(self.most_logits, len(hidden))
        out = torch.empty(len(hidden), self.record.vocab_size)
        threads = torch.get_num_threads()
        work = self._work(len(hidden), threads)
        hidden = hidden.float().contiguous()
        pointers = [address(tensor, torch.float32) for tensor in (hidden, out, work)]
        self.library.logits(self.pointer, pointers[0], len(hidden), *pointers[1:], threads)
        return out

    @property
    def samples_in_kernel(self) -> bool:
        """Whether `decode_steps` can run: ranks with slices of the vocabulary must exchange through shared memory."""
        return self.vocabulary is None or self.vocabulary.group.shares_memory

    def decode_steps(
        self, batch: PackedBatch, kv: PagedKV, sampling: SamplingState, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode and sample up to `steps` tokens for each sequence, and stop after a step that draws a stop token.

        batch: one new token for each sequence; its block tables have room for `steps` tokens.
        Gives tokens, int64 [steps done, sequences], and logprobs, float32 [4, steps done, sequences].
        """
        self._lend(kv)
        self.most_tokens, self.most_logits = (
            max(most, len(batch.ids)) for most in (self.most_tokens, self.most_logits)
        )
        threads, hidden = torch.get_num_threads(), torch.empty(len(batch.ids), self.spec.hidden_size)
        logits = torch.empty(len(batch.ids), self.record.vocab_size)
        record, work = self._batch_record(batch), self._work(len(batch.ids), threads)
        samples, drawn = sampling.record(steps)
        done = self.library.decode_steps(
            self.pointer,
            ctypes.addressof(record),
            len(self.spec.layers),
            ctypes.addressof(samples),
            address(sampling.stop_token_ids, torch.int64),
            len(sampling.stop_token_ids),
            steps,
            *(address(tensor, torch.float32) for tensor in (hidden, logits, work)),
            threads,
        )
        self._require_done(done < 0, batch.ids)
        return drawn.tokens[:done], drawn.per_token()[:, :done]

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes that a forward over `tokens` tokens takes: the workspace, which is kept, and the hidden
        states."""
        floats = self.library.work_floats(self.pointer, tokens, torch.get_num_threads())
        return 4 * (floats + tokens * self.spec.hidden_size)

    def _run(
        self,
        hidden: torch.Tensor,
        batch: PackedBatch,
        kv: PagedKV | None,
        first: int,
        last: int,
        activations: LayerActivations | None = None,
    ) -> torch.Tensor:
        if kv is not None:
            self._lend(kv)
            assert not self.spec.is_recurrent or batch.state_slots is not None, "sequences have states"
        threads, record = torch.get_num_threads(), self._batch_record(batch)
        if activations is not None:
            self._lend_activations(record, activations, len(batch.ids))
        self.most_tokens = max(self.most_tokens, len(batch.ids))
        work = self._work(len(batch.ids), threads)
        pointers = [address(tensor, torch.float32) for tensor in (hidden, work)]
        unknown = self.library.forward(self.pointer, ctypes.addressof(record), first, last, *pointers, threads)
        self._require_done(unknown, batch.ids)
        return hidden

    def _batch_record(self, batch: PackedBatch) -> ctypes.Structure:
        runs_layers = len(batch.cu_seqlens) > 0
        assert not (runs_layers and self.mixed_adapters) or batch.adapters is not None, "tokens name adapters"
        return kernels.Batch(
            tokens=len(batch.ids),
            sequences=len(batch.lengths),
            table_width=batch.block_tables.shape[1],
            ids=address(batch.ids, torch.int64),
            positions=address(batch.positions, torch.int32),
            cu_seqlens=address(batch.cu_seqlens, torch.int32),
            block_tables=address(batch.block_tables, torch.int32),
            state_slots=None if batch.state_slots is None else address(batch.state_slots, torch.int32),
            adapters=None if batch.adapters is None else address(batch.adapters, torch.int32),
        )

    def _lend_activations(self, record: ctypes.Structure, activations: LayerActivations, tokens: int) -> None:
        """Store the addresses of this memory in a batch's record."""
        layer_inputs, router_indices, rows = activations.layer_inputs, activations.router_indices, activations.rows
        count = layer_inputs.shape[1]
        assert layer_inputs.shape == (len(self.spec.layers) + 1, count, self.spec.hidden_size), layer_inputs.shape
        assert rows.shape == (tokens,), f"{len(rows)} rows for {tokens} tokens"
        assert not tokens or 0 <= int(rows.min()) <= int(rows.max()) < count, f"rows outside of {count}"
        record.layer_inputs, record.layer_input_rows = address(layer_inputs, self.dtype), count
        record.activation_rows = address(rows, torch.int64)
        if router_indices is not None:
            shape = count, len(self.moe_layer), self.spec.experts_per_token
            assert router_indices.shape == shape, f"{tuple(router_indices.shape)} given, {shape} is written"
            record.router_indices = address(router_indices, torch.int16)

    def _require_done(self, unknown: bool, ids: torch.Tensor) -> None:
        """Raise if ranks could not exchange; IndexError if `ids` has unknown ones."""
        if self.group is not None:
            self.group.check()
            self.group.tensor.check()
        if unknown:
            given = f"{int(ids.min())} to {int(ids.max())}"
            raise IndexError(
                f"token ids {given} given; the embedding has rows for 0 to {self.record.embedding_rows - 1}"
            )

    def _work(self, tokens: int, threads: int) -> torch.Tensor:
        return self.workspace.of(self.library.work_floats(self.pointer, tokens, threads))

    def _lend(self, kv: PagedKV) -> None:
        """Store the addresses of these blocks in the layers' records."""
        if self.lent is not None and self.lent() is kv:
            return
        for index, (record, layer) in enumerate(zip(self.layer_records, self.spec.layers, strict=True)):
            source = index if layer.kv_layer is None else layer.kv_layer
            record.keys, record.values = (address(part[source], self.dtype) for part in (kv.keys, kv.values))
        for index, states in kv.states.items():
            record = self.layer_records[index]
            *matrices, record.latest = (address(tensor, torch.float32) for tensor in states)
            record.state = next(iter(matrices), None)
        experts = kv.router_indices
        self.record.router_indices = None if experts is None else address(experts, torch.int16)
        hidden = kv.hidden_states
        self.record.hidden_states = None if hidden is None else address(hidden, self.dtype)
        self.lent = weakref.ref(kv)

    # ------------------------------------------------------------- weights

    def _bind_record(
        self, record: ctypes.Structure, refs: dict[str, ParamRef], names: Collection[str], spec: DecoderSpec
    ) -> None:
        """Set the norms and matrices of a Decoder or Layer record that are in `names`: roles, or names of JOINED.

        spec: the layer's, or the decoder's.
        """
        lora_offset = 0
        for name, kind, *_ in record._fields_:
            if kind is kernels.Norm and name in names:
                setattr(record, name, self._norm(refs, name, spec))
            elif kind is kernels.Linear and name in names:
                linear, lora_offset = self._linear(refs, JOINED.get(name, (name,)), lora_offset)
                setattr(record, name, linear)
        self.record.lora_ranks = max(self.record.lora_ranks, lora_offset)

    def _linear(
        self, refs: dict[str, ParamRef], roles: tuple[str, ...], lora_offset: int
    ) -> tuple[ctypes.Structure, int]:
        """Return the record of the roles' matrices, stacked by rows; empty if the model has none of them. Their
        unmerged LoRA deltas use the buffer of A·x from `lora_offset` on; the end of that part is returned too.
        """
        record, deltas, first = kernels.Linear(), [], 0
        for role in roles:
            ref, part = refs.get(f"{role}.weight"), record.parts
            if ref is None:
                continue
            dtype = self._dtype_of(f"{role}.weight")
            weight = self._matrix(ref, dtype).flatten(0, -2)  # experts' rows stacked
            if weight.dtype == torch.int8:
                dtype, scale = torch.int8, scale_of(ref).flatten(0, -2)
                record.scale[part] = self._keep(scale.float().contiguous(), torch.float32)
                record.groups = scale.shape[1]
            record.weight[part], record.rows[part], record.inputs = self._keep(weight, dtype), *weight.shape
            record.bias[part] = self._vector(refs.get(f"{role}.bias"))
            record.parts = part + 1
            for a, b, factor, adapter in self.lora_deltas(ref):
                factors, sizes = (self._factor(a, dtype), self._factor(b, dtype)), (len(a), first, len(b))
                deltas.append(kernels.LoraDelta(*factors, *sizes, lora_offset, self.number_of(adapter), factor))
                lora_offset += len(a)
            first += len(weight)
        if deltas:
            self.lora_records.append((kernels.LoraDelta * len(deltas))(*deltas))
            record.lora_deltas, record.num_lora_deltas = ctypes.addressof(self.lora_records[-1]), len(deltas)
        return record, lora_offset

    @torch.no_grad()
    def _latent_matrices(self, ref: ParamRef) -> tuple[ctypes.Structure, ctypes.Structure]:
        """Return the records `latent_up` and `key_up` of a layer, of its `kv_b`. The first is read in place, unless it
        has unmerged adapters or is int8; the second is a copy, which is refreshed."""
        spec, source = self.spec, self._matrix(ref)
        weight = dequantized(source, scale_of(ref)).to(self.dtype) if source.dtype == torch.int8 else source
        deltas = self.lora_deltas(ref)
        weight = merged(weight, deltas)
        by_head = weight.unflatten(0, (spec.num_heads, -1))[:, : spec.head_dim - spec.rotary_dim]
        key = ref, weight.dtype, source.data_ptr(), bool(deltas)
        keys = self._refreshed(("key_up", *key), by_head.transpose(1, 2).flatten(0, 1))
        if weight is not source:
            weight = self._refreshed(("latent_up", *key), weight)
        return self._whole(weight), self._whole(keys)

    def _refreshed(self, key: tuple, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of `tensor` at `key` of the copies: a new one, or that of an earlier bind, refreshed."""
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = tensor.contiguous()
        else:
            copy.copy_(tensor)
        return copy

    def _whole(self, matrix: torch.Tensor) -> ctypes.Structure:
        """Return the record of one matrix [rows, inputs], without bias."""
        record = kernels.Linear(parts=1, inputs=matrix.shape[1], groups=1)
        record.weight[0], record.rows[0] = self._keep(matrix, self.dtype), len(matrix)
        return record

    def _norm(self, refs: dict[str, ParamRef], role: str, spec: DecoderSpec) -> ctypes.Structure:
        if role in spec.unweighted_norms:
            return kernels.Norm(self._keep(torch.ones(self.norm_size(role, spec)), torch.float32), None)
        return kernels.Norm(*(self._vector(refs.get(f"{role}.{name}")) for name in ("weight", "bias")))

    def _xielu_slopes(self, refs: dict[str, ParamRef]) -> int | None:
        """Return the address of xIELU's slopes, float32 [2]; None for other activations."""
        if self.spec.activation != "xielu":
            return None
        positive, negative = (self.weights(refs[f"{role}.weight"]).detach().to(self.dtype) for role in XIELU)
        slopes = torch.cat((F.softplus(positive), 0.5 + F.softplus(negative)))
        return self._keep(slopes.float(), torch.float32)

    def _matrix(self, ref: ParamRef, wanted: torch.dtype | None = None) -> torch.Tensor:
        """Return a role's matrix in the decoder's dtype or int8, contiguous; copied only if it is not so in the
        snapshot.  wanted: another dtype, to which it is converted unless it is int8.

        Raises UnsupportedModel for another dtype.
        """
        dtype = self.weights(ref).dtype
        if wanted not in (None, self.dtype) and dtype != torch.int8:
            return self._contiguous(ref, wanted)
        if dtype not in (self.dtype, torch.int8):
            raise UnsupportedModel(f"a matrix is {dtype} where the embedding is {self.dtype}")
        return self._contiguous(ref, dtype)

    def _vector(self, ref: ParamRef | None) -> int | None:
        """Return the address of a bias or a norm's weight in float32; None if it does not exist."""
        if ref is None or self.weights(ref) is None:
            return None
        return self._keep(self._contiguous(ref, torch.float32), torch.float32)

    def _contiguous(self, ref: ParamRef, dtype: torch.dtype) -> torch.Tensor:
        """Return a ParamRef's tensor, contiguous and in `dtype`: in place if possible, else a copy, which is
        refreshed."""
        source = self.weights(ref).detach()
        selected = source if ref.select is None or self.group is not None else ref.select(source)
        lies_there = selected.untyped_storage()._cdata == source.untyped_storage()._cdata
        if lies_there and selected.is_contiguous() and selected.dtype == dtype:
            return selected
        return self._refreshed((dtype, ref, source.data_ptr()), selected.to(dtype))

    def _factor(self, factor: torch.Tensor, dtype: torch.dtype) -> int:
        """Return the address of a LoRA factor.  dtype: of its matrix."""
        factor = factor.detach()
        if dtype != self.dtype and dtype == torch.float32:  # of a router in float32
            return self._keep(factor.float().contiguous(), dtype)
        if factor.dtype != self.dtype:
            raise UnsupportedModel(f"a matrix is {factor.dtype} where the embedding is {self.dtype}")
        if not factor.is_contiguous():
            key = (factor.data_ptr(), factor.shape)
            factor = self.copies[key] = factor.contiguous()
        return self._keep(factor, self.dtype)

    def _keep(self, tensor: torch.Tensor, dtype: torch.dtype) -> int:
        self.tensors.append(tensor)
        if tensor.is_meta:  # a memory plan's decoder, which never runs
            return 0
        if tensor.data_ptr() not in self.collapsed:
            self.collapsed.add(tensor.data_ptr())
            collapse(tensor)
        return address(tensor, dtype)


class Workspace:
    """The buffer that a forward computes in, shared by decoders that never run at the same time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def of(self, floats: int) -> torch.Tensor:
        """Return a buffer of at least `floats` float32, its content undefined."""
        if len(self.memory) < floats:
            self.memory = torch.empty(0)  # free the old buffer first
            self.memory = torch.empty(floats)
        return self.memory


def reads_int8(weights: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the kernels can read these int8 weights, given as (weight, scale): if a row has several scales, the
    inputs that share one must be a multiple of the kernels' block of inputs.
    """
    block = 2 * kernels.cpu_library().lanes()
    groups = ((weight, scale.shape[-1]) for weight, scale in weights)
    return all(count == 1 or weight.shape[-1] // count % block == 0 for weight, count in groups)
