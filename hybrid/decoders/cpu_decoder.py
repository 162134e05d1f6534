"""The decoder on the CPU kernels: one call for all layers; weights are read where the snapshot holds them."""

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable

import torch

from hybrid.decoders.batch import BLOCK_SIZE, Draws, PackedBatch, PagedKV
from hybrid.decoders.drafts import DraftCounts, Drafting, VerifiedTokens, most_new_tokens
from hybrid.decoders.torch_decoder import Copies, WholeDecoder, no_lora_deltas
from hybrid.decoders.vocabulary import VocabularySlice
from hybrid.kernels import cpu_library as kernels
from hybrid.kernels.cpu_library import address
from hybrid.kernels.host_group import HostGroup
from hybrid.models.spec import JOINED, DecoderLayout, ParamRef, UnsupportedModel
from hybrid.weights.int8 import scale_of
from hybrid.weights.lora import LowRank

# The values of DecoderSpec's fields that are words, in the order of records.h's enums.
ENUMS = {"norm": ("rms", "layer"), "activation": ("silu", "gelu", "gelu_tanh", "relu"), "qk_norm": ("", "head", "row")}
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
        self.alibi = torch.tensor(self.spec.alibi) if self.spec.alibi else None
        self.layer_records = (kernels.Layer * len(self.spec.layers))()
        self.record = self._record()

    def _record(self) -> ctypes.Structure:
        """The Decoder record, without weights: every number of the spec under its name."""
        record = kernels.Decoder(bfloat16=self.dtype == torch.bfloat16, layers=ctypes.addressof(self.layer_records))
        for name, kind, *_ in record._fields_:
            if kind in NUMBERS and hasattr(self.spec, name):
                value = getattr(self.spec, name)
                setattr(record, name, ENUMS[name].index(value) if name in ENUMS else value)
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
        """The same for the outer weights of the roles `outer`, and for the layers with indices `layers`."""
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
        self._bind_record(self.record, refs, outer)
        for index in layers:
            layer, roles = self.layer_records[index], self.layout.layers[index]
            layer.window, layer.moe_layer = self.spec.layers[index].window, self.moe_layer.get(index, 0)
            self._bind_record(layer, roles, [name for name, *_ in layer._fields_])
            self.record.intermediate_size = max(
                self.record.intermediate_size, layer.down.inputs, layer.experts_down.inputs
            )

    def unbind(self) -> None:
        """Release the weights; bind again before anything runs."""
        self.tensors: list[torch.Tensor] = []  # keeps alive what the records point to
        self.lora_records: list[ctypes.Array] = []  # keeps alive the LoRA records that the linears point to

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks, their content undefined.

        keys: [blocks, kv_heads, head_dim rounded up to an even number, BLOCK_SIZE].  values: [blocks, kv_heads,
            BLOCK_SIZE, head_dim rounded up to whole vectors]. Both in the decoder's dtype; attention.h has the order of
            a head's elements.
        """
        spec, lanes = self.spec, self.library.lanes()
        padded = -(-spec.head_dim // lanes) * lanes
        shapes = (
            (num_blocks, spec.num_kv_heads, spec.head_dim + spec.head_dim % 2, BLOCK_SIZE),
            (num_blocks, spec.num_kv_heads, BLOCK_SIZE, padded),
        )
        keys, values = ([torch.empty(shape, dtype=self.dtype) for _ in spec.layers] for shape in shapes)
        return PagedKV(keys, values, self.router_indices(num_blocks), self.hidden_states(num_blocks))

    def reserve(self, tokens: int) -> None:
        """Extend the rope tables to `tokens` positions."""
        rounding = torch.float32 if self.spec.rotary_float32 else self.dtype
        for key, table in self.layout.rotary.items():
            if key in self.rope and len(self.rope[key][0]) >= tokens:
                continue
            assert tokens <= (self.spec.max_positions or tokens), "more positions would rescale the others"
            cos, sin = table(torch.arange(tokens), rounding)
            self.rope[key] = cos.contiguous(), sin.contiguous()
            for record, layer in zip(self.layer_records, self.spec.layers, strict=True):
                if layer.rotary == key:
                    record.cos, record.sin = (address(part, torch.float32) for part in self.rope[key])

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output for every token, float32 [tokens, hidden]. Writes the new tokens' keys and values to
        `kv`.

        Raises IndexError for token ids outside the embedding.
        """
        hidden = torch.empty(len(batch.ids), self.spec.hidden_size)
        return self._run(hidden, batch, kv, -1, len(self.spec.layers))

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first layer's input, float32 [tokens, hidden].  ids: int64 [tokens].  positions: int32 [tokens]."""
        nothing = torch.zeros(0, dtype=torch.int32)
        batch = PackedBatch(ids, positions, nothing, nothing, nothing.view(0, 0))
        return self._run(torch.empty(len(ids), self.spec.hidden_size), batch, None, -1, 0)

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive) over `hidden` [tokens, hidden]; returns a new tensor, float32."""
        return self._run(hidden.float().clone(), batch, kv, first, last)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden], rounded as the model rounds them.  float32 [n, vocab], or
        [n, width] of `vocabulary`."""
        self.most_logits = max(self.most_logits, len(hidden))
        out = torch.empty(len(hidden), self.record.vocab_size)
        threads = torch.get_num_threads()
        work = self._work(len(hidden), threads)
        hidden = hidden.float().contiguous()
        pointers = [address(tensor, torch.float32) for tensor in (hidden, out, work)]
        self.library.logits(self._self(), pointers[0], len(hidden), *pointers[1:], threads)
        return out

    @property
    def samples_in_kernel(self) -> bool:
        """Whether `decode_steps` can run: ranks with slices of the vocabulary must exchange through shared memory."""
        return self.vocabulary is None or self.vocabulary.group.shares_memory

    def decode_steps(
        self, batch: PackedBatch, kv: PagedKV, draws: Draws, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode and sample up to `steps` tokens for each sequence, and stop after a step that draws a stop token.

        batch: one new token for each sequence; its block tables have room for `steps` tokens.
        Gives tokens, int64 [steps done, sequences], and logprobs, float32 [3, steps done, sequences].
        """
        self._lend(kv)
        self.most_tokens, self.most_logits = (
            max(most, len(batch.ids)) for most in (self.most_tokens, self.most_logits)
        )
        threads, hidden = torch.get_num_threads(), torch.empty(len(batch.ids), self.spec.hidden_size)
        logits = torch.empty(len(batch.ids), self.record.vocab_size)
        record, work = self._batch_record(batch), self._work(len(batch.ids), threads)
        samples, drawn = draws.record(steps)
        done = self.library.decode_steps(
            self._self(),
            ctypes.addressof(record),
            len(self.spec.layers),
            ctypes.addressof(samples),
            address(draws.stop_token_ids, torch.int64),
            len(draws.stop_token_ids),
            steps,
            *(address(tensor, torch.float32) for tensor in (hidden, logits, work)),
            threads,
        )
        self._require_done(done < 0, batch.ids)
        return drawn.tokens[:done], drawn.logps()[:, :done]

    def verify_steps(
        self, batch: PackedBatch, kv: PagedKV, draws: Draws, drafting: Drafting, steps: int
    ) -> VerifiedTokens:
        """As `hybrid.decoders.drafts.verify_steps`, in one call where the kernels sample: tokens and logprobs are those
        of `decode_steps`, to the bit."""
        if not self.samples_in_kernel or draws.needs_tokens:
            return super().verify_steps(batch, kv, draws, drafting, steps)
        self._lend(kv)
        width, tokens = most_new_tokens(draws, drafting, steps)
        self.most_tokens, self.most_logits = (max(most, tokens) for most in (self.most_tokens, self.most_logits))
        threads, hidden = torch.get_num_threads(), torch.empty(tokens, self.spec.hidden_size)
        logits, work = torch.empty(tokens, self.record.vocab_size), self._work(tokens, threads)
        record, texts = self._batch_record(batch), drafting.record()
        samples, drawn = draws.record(width)
        by_row, by_step = torch.zeros(5, len(batch.ids)).long(), torch.zeros(2, steps).long()
        limits = draws.limits.contiguous()
        verified = kernels.Verified(*(address(tensor, torch.int64) for tensor in (*by_row, *by_step)))
        done = self.library.verify_steps(
            self._self(),
            ctypes.addressof(record),
            len(self.spec.layers),
            ctypes.addressof(samples),
            address(limits, torch.int64),
            address(draws.stop_token_ids, torch.int64),
            len(draws.stop_token_ids),
            ctypes.addressof(texts),
            ctypes.addressof(verified),
            steps,
            *(address(tensor, torch.float32) for tensor in (hidden, logits, work)),
            threads,
        )
        self._require_done(done < 0, batch.ids)
        counts = DraftCounts(*by_row.tolist())
        for own, count in zip(drafting.own, counts.tokens, strict=True):
            own.length += count
        seconds = [ns * 1e-9 for ns in by_step[1, :done].tolist()]
        return VerifiedTokens(drawn.tokens, drawn.logps(), counts, by_step[0, :done].tolist(), seconds)

    def activation_bytes(self, tokens: int) -> int:
        """Bytes that a forward over `tokens` tokens takes: the workspace, which is kept, and the hidden states."""
        floats = self.library.work_floats(self._self(), tokens, torch.get_num_threads())
        return 4 * (floats + tokens * self.spec.hidden_size)

    def _run(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV | None, first: int, last: int) -> torch.Tensor:
        if kv is not None:
            self._lend(kv)
        threads, record = torch.get_num_threads(), self._batch_record(batch)
        self.most_tokens = max(self.most_tokens, len(batch.ids))
        work = self._work(len(batch.ids), threads)
        pointers = [address(tensor, torch.float32) for tensor in (hidden, work)]
        unknown = self.library.forward(self._self(), ctypes.addressof(record), first, last, *pointers, threads)
        self._require_done(unknown, batch.ids)
        return hidden

    def _batch_record(self, batch: PackedBatch) -> ctypes.Structure:
        return kernels.Batch(
            tokens=len(batch.ids),
            sequences=len(batch.lengths),
            table_width=batch.block_tables.shape[1],
            ids=address(batch.ids, torch.int64),
            positions=address(batch.positions, torch.int32),
            cu_seqlens=address(batch.cu_seqlens, torch.int32),
            block_tables=address(batch.block_tables, torch.int32),
        )

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

    def _self(self) -> int:
        return ctypes.addressof(self.record)

    def _work(self, tokens: int, threads: int) -> torch.Tensor:
        return self.workspace.of(self.library.work_floats(self._self(), tokens, threads))

    def _lend(self, kv: PagedKV) -> None:
        """Store the addresses of these blocks in the layers' records."""
        if self.lent is not None and self.lent() is kv:
            return
        for record, keys, values in zip(self.layer_records, kv.keys, kv.values, strict=True):
            record.keys, record.values = address(keys, self.dtype), address(values, self.dtype)
        experts = kv.router_indices
        self.record.router_indices = None if experts is None else address(experts, torch.int16)
        hidden = kv.hidden_states
        self.record.hidden_states = None if hidden is None else address(hidden, self.dtype)
        self.lent = weakref.ref(kv)

    # ------------------------------------------------------------- weights

    def _bind_record(self, record: ctypes.Structure, refs: dict[str, ParamRef], names: Collection[str]) -> None:
        """Set the norms and matrices of a Decoder or Layer record that are in `names`: roles, or names of JOINED."""
        lora_offset = 0
        for name, kind, *_ in record._fields_:
            if kind is kernels.Norm and name in names:
                setattr(record, name, self._norm(refs, name))
            elif kind is kernels.Linear and name in names:
                linear, lora_offset = self._linear(refs, JOINED.get(name, (name,)), lora_offset)
                setattr(record, name, linear)
        self.record.lora_ranks = max(self.record.lora_ranks, lora_offset)

    def _linear(
        self, refs: dict[str, ParamRef], roles: tuple[str, ...], lora_offset: int
    ) -> tuple[ctypes.Structure, int]:
        """The record of the roles' matrices, stacked by rows; empty if the model has none of them. Their unmerged LoRA
        deltas use the buffer of A·x from `lora_offset` on; the end of that part is returned too.
        """
        record, deltas, first = kernels.Linear(), [], 0
        for role in roles:
            ref, part = refs.get(f"{role}.weight"), record.parts
            if ref is None:
                continue
            weight, dtype = self._matrix(ref).flatten(0, -2), self.dtype  # experts' rows stacked
            if weight.dtype == torch.int8:
                dtype, scale = torch.int8, scale_of(ref).flatten(0, -2)
                record.scale[part] = self._keep(scale.float().contiguous(), torch.float32)
                record.groups = scale.shape[1]
            record.weight[part], record.rows[part], record.inputs = self._keep(weight, dtype), *weight.shape
            record.bias[part] = self._vector(refs.get(f"{role}.bias"))
            record.parts = part + 1
            for a, b, factor in self.lora_deltas(ref):
                deltas.append(
                    kernels.LoraDelta(self._factor(a), self._factor(b), len(a), first, len(b), lora_offset, factor)
                )
                lora_offset += len(a)
            first += len(weight)
        if deltas:
            self.lora_records.append((kernels.LoraDelta * len(deltas))(*deltas))
            record.lora_deltas, record.num_lora_deltas = ctypes.addressof(self.lora_records[-1]), len(deltas)
        return record, lora_offset

    def _norm(self, refs: dict[str, ParamRef], role: str) -> ctypes.Structure:
        return kernels.Norm(*(self._vector(refs.get(f"{role}.{name}")) for name in ("weight", "bias")))

    def _matrix(self, ref: ParamRef) -> torch.Tensor:
        """A role's matrix in the decoder's dtype or int8, contiguous; copied only if it is not so in the snapshot.

        Raises UnsupportedModel for another dtype.
        """
        dtype = self.weights(ref).dtype
        if dtype not in (self.dtype, torch.int8):
            raise UnsupportedModel(f"a matrix is {dtype} where the embedding is {self.dtype}")
        return self._contiguous(ref, dtype)

    def _vector(self, ref: ParamRef | None) -> int | None:
        """The address of a bias or a norm's weight in float32; None if it does not exist."""
        if ref is None or self.weights(ref) is None:
            return None
        return self._keep(self._contiguous(ref, torch.float32), torch.float32)

    def _contiguous(self, ref: ParamRef, dtype: torch.dtype) -> torch.Tensor:
        """A ParamRef's tensor, contiguous and in `dtype`: in place if possible, else a copy, which is refreshed."""
        source = self.weights(ref).detach()
        selected = source if ref.select is None or self.group is not None else ref.select(source)
        lies_there = selected.untyped_storage()._cdata == source.untyped_storage()._cdata
        if lies_there and selected.is_contiguous() and selected.dtype == dtype:
            return selected
        key = (dtype, ref, source.data_ptr())
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = selected.to(dtype).contiguous()
        else:
            copy.copy_(selected)
        return copy

    def _factor(self, factor: torch.Tensor) -> int:
        factor = factor.detach()
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
        return address(tensor, dtype)


class Workspace:
    """The buffer that a forward computes in, shared by decoders that never run at the same time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def of(self, floats: int) -> torch.Tensor:
        """A buffer of at least `floats` float32, its content undefined."""
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
