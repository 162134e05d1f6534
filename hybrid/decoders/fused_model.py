"""The fused container: runs a whole decoder in the model's place, once the self-check has shown that they are equal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybrid.decoders.batch import is_packable
from hybrid.decoders.calls import Calls
from hybrid.decoders.containers import NativeContainer
from hybrid.decoders.cpu_decoder import CpuDecoder, Workspace, reads_int8
from hybrid.decoders.fallback import NO_WARNING, ForeignHooks, NativeReasons
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.decoders.self_check import own_blocks_batch, require_equal
from hybrid.decoders.streamed_decoder import Passes, StreamedDecoder
from hybrid.decoders.torch_decoder import Copies, TorchDecoder, no_lora_deltas
from hybrid.decoders.tp_decoder import Pool, ShardedDecoder, SharedDecoder
from hybrid.kernels import has_triton
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import DecoderLayout, ParamRef, UnsupportedModel
from hybrid.models.structure import Part
from hybrid.parallel import InferenceGroup
from hybrid.weights.gather import whole_shape
from hybrid.weights.int8 import int8_weights
from hybrid.weights.joined import JoinedBuffers
from hybrid.weights.lora import Adapted, LowRank
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.streaming import StreamedSnapshot

DECODER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WholeDecoder = CpuDecoder | TorchDecoder  # a CudaDecoder is a TorchDecoder
AnyDecoder = WholeDecoder | SharedDecoder | StreamedDecoder


@dataclass
class Bound:
    """A decoder, and the key of the weights that it is bound to: the snapshot's version and the tensors' addresses."""

    decoder: AnyDecoder
    key: tuple


class FusedModel:
    """The fused decoder of a model, made and checked on first use.

    info: of the model that the engine runs, which is not changed. A SlicedSnapshot's slices belong to its layout.
    max_capture_size: decode steps of up to so many rows are CUDA graphs; 0: no graphs.
    group: the ranks that share the decoder (inference tensor parallelism); the snapshot is then a SlicedSnapshot.
    own_hooks: gives the training engine's hooks, which do not prevent the fused decoder.
    reasons: records why requests ran natively.

    Attributes: `fallback_reason` is why there is no decoder, and what the user can do about it; "" if there is one, or
        may be. `warns` is whether a request that runs natively is warned about: only for models that generate.
    """

    def __init__(
        self,
        info: ModelInfo,
        snapshot: Snapshot,
        max_capture_size: int = 0,
        group: InferenceGroup | None = None,
        own_hooks: Callable[[], Iterable[RemovableHandle]] = list,
        reasons: NativeReasons | None = None,
    ):
        self.info, self.layout, self.snapshot, self.max_capture_size = info, info.layout, snapshot, max_capture_size
        self.group, self.own_hooks, self.pool = group, own_hooks, Pool()
        self.bound: dict[bool, Bound] = {}  # by whether adapters are used
        self.copies: Copies = WeakValueDictionary()  # weight copies, shared by these decoders
        self.workspace = Workspace()  # shared by CpuDecoders
        self.checked = False
        self.fallback_reason, self.warns = "", info.can_generate
        self.reasons = NativeReasons() if reasons is None else reasons
        self.modules, self.foreign_hooks = list(info.model.modules()), ForeignHooks(info.model, own_hooks)
        # The engine replaces no forward within the layers, so any change there is the user's.
        self.inner = [module for layer in info.layers for module in layer.modules() if module is not layer]
        self.checked_forwards: list[tuple] = []
        self.one_block: int | None = None  # bytes of a block, cached by `block_bytes`
        self.adapted = {one.wrapper: one for one in snapshot.adapted}
        try:
            self._require_layout()
            self._require_plain_wrappers()
            self._require_decoder_dtype()
        except UnsupportedModel as reason:
            self.fallback_reason = str(reason)

    @property
    def what(self) -> str:
        """A description of what runs in the model's place."""
        decoder = f"a decoder of the {self.layout.family} family"
        if self.group is not None:
            return f"{decoder}, sharded over {self.group.size} ranks"
        int8 = " over int8 weights" if self._int8_weights() else ""
        streamed = ", with weights gathered layer by layer" if self.streams else ""
        return f"{decoder}{int8}, on {self._kernels()}{streamed}"

    @property
    def streams(self) -> bool:
        """Whether weights are gathered as the decoder runs."""
        return isinstance(self.snapshot, StreamedSnapshot)

    @property
    def is_shared(self) -> bool:
        """Whether ranks run the decoder together."""
        return self.group is not None or self.streams

    def _require_layout(self) -> None:
        if self.layout is None:
            advice = "hybrid/models/README.md shows how a family is added"
            raise UnsupportedModel(f"{self.info.no_layout} ({advice}; {NO_WARNING})")

    def _require_plain_wrappers(self) -> None:
        for module in self.modules:
            if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
                raise UnsupportedModel(
                    f"a {type(module).__name__} changes a module as it runs (train the whole module, by PEFT's "
                    f"modules_to_save; {NO_WARNING})"
                )

    def _require_decoder_dtype(self) -> None:
        dtype = self._embedding().dtype
        if dtype not in DECODER_DTYPES:
            raise UnsupportedModel(
                f"its weights are {dtype}, and decoders compute in float32, bfloat16 and float16 (cast the model to "
                f"one of these; {NO_WARNING})"
            )

    def fallback_reason_now(self) -> str:
        """Why the model must run natively now, and what the user can do about it; "" if it need not."""
        if self.fallback_reason:
            return self.fallback_reason
        if hook := self.foreign_hooks.first():
            return f"hooks on the model's modules want to see them run: {hook} (remove them before inference)"
        if torch.is_autocast_enabled(self._device().type):
            return (
                "autocast chooses the dtype of every operation (generate outside of torch.autocast; in DeepSpeed's "
                "configuration take bf16 or fp16 instead of torch_autocast)"
            )
        return ""

    def note_native(self, reason: str = "") -> None:
        """Record that a request runs natively; a new reason is warned about.

        reason: the request's own reason, and what the user can do about it. A reason that holds for every request takes
            precedence.
        """
        standing = self.fallback_reason_now()
        self.reasons.note(standing or reason, self.warns)

    def has_foreign_hooks(self) -> bool:
        """Whether user code runs within the model's forwards, where it may raise."""
        return self.foreign_hooks.first() != ""

    def decoder(self, adapters: bool, tokens: int) -> AnyDecoder | None:
        """The decoder, bound to the current weights, for sequences of up to `tokens` tokens; None if the model must run
        natively, which is warned about.

        For a rank that runs the decoder by itself, inside an open window; `adapters` as the window has them. The first
        call runs the self-check. If a layer differs, the decoder is disabled for good.
        """
        if reason := self.fallback_reason_for(tokens):
            self.note_native(reason)
            return None
        if self.needs_check() and (reason := self.check(adapters)):
            self.refuse(reason)
            self.note_native()
            return None
        return self.bound_decoder(adapters)

    def fallback_reason_for(self, tokens: int) -> str:
        """Why the model must run natively now, for sequences of up to `tokens` tokens; "" if it need not.

        Beyond `DecoderSpec.max_positions` it must: the model's position tables end there, or depend on the sequence's
        length.
        """
        if reason := self.fallback_reason_now():
            return reason
        if 0 < self.layout.spec.max_positions < tokens:
            return (
                f"beyond {self.layout.spec.max_positions} tokens, its max_position_embeddings, the model's tables "
                "depend on a sequence's length (ask for shorter sequences)"
            )
        return ""

    def needs_check(self) -> bool:
        """Whether the decoder must be compared with the model's own layers before it runs: on first use, and after a
        forward within the layers has been replaced.
        """
        return not self.checked or self.checked_forwards != self._forwards()

    def check(self, adapters: bool) -> str:
        """Compare the decoder with the model's own layers; returns what differs, "" if nothing does.

        If ranks run the decoder together, it is a collective, and every rank runs it to its end.
        """
        try:
            decoder, forwards = self.bound_decoder(adapters), self._forwards()
            require_equal(getattr(decoder, "lockstep", decoder), self.info)
            self.checked, self.checked_forwards = True, forwards
        except UnsupportedModel as reason:
            return str(reason)
        return ""

    def refuse(self, reason: str) -> None:
        """Disable the decoder for good."""
        self.fallback_reason = f"{reason} (if nobody has changed the model's forwards, please report it; {NO_WARNING})"
        self.bound.clear()

    def _forwards(self) -> list[tuple]:
        """The current forward of every module within the layers."""
        return [(type(module).forward, module.__dict__.get("forward")) for module in self.inner]

    def bound_decoder(self, adapters: bool) -> AnyDecoder:
        """The decoder, bound to the current weights. Call it inside an open window, with `adapters` as the window
        has them.
        """
        with_adapters = adapters and any(one.state() for one in self.snapshot.adapted)
        key = (self.snapshot.number(), self._addresses(with_adapters))
        bound = self.bound.get(with_adapters)
        if bound is None:
            bound = self.bound[with_adapters] = Bound(self._make(with_adapters), ())
        if bound.key != key:
            bound.decoder.bind()
            bound.key = key
        return bound.decoder

    def _make(self, adapters: bool) -> AnyDecoder:
        def weights(ref: ParamRef) -> torch.Tensor | None:
            return self.tensor(ref, adapters)

        def lora_deltas(ref: ParamRef) -> list[LowRank]:
            return self.lora_deltas(ref, adapters)

        dtype = self._embedding().dtype
        if self.group is not None:
            sharded = ShardedDecoder(self.layout, weights, dtype, self.group, lora_deltas, self.copies)
            return SharedDecoder(sharded, self.pool)
        if not self.streams:
            return self._make_whole(self.layout, weights, dtype, lora_deltas, self.copies)
        passes = Passes(
            self.layout,
            lambda layout: self._make_whole(layout, weights, dtype, lora_deltas),
            self.snapshot,
            lambda ref: next((owner for owner in self._owner(ref) if owner is not None), None),
            adapters,
        )
        return StreamedDecoder(passes, self._embedding().ds_process_group)

    def _make_whole(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        lora_deltas: Callable[[ParamRef], list[LowRank]],
        copies: Copies | None = None,
    ) -> WholeDecoder:
        """A decoder over whole weights, on the fastest kernels available."""
        kernels = self._kernels()
        if kernels == "CPU kernels":
            return CpuDecoder(layout, weights, dtype, cpu_library(), lora_deltas, copies, self.workspace)
        if kernels == "Triton":
            from hybrid.decoders.cuda_decoder import CudaDecoder  # needs triton, which a CPU install lacks

            return CudaDecoder(layout, weights, dtype, self.max_capture_size, lora_deltas=lora_deltas, copies=copies)
        if self._int8_weights():
            return Int8Decoder(layout, weights, dtype)
        return TorchDecoder(layout, weights, dtype, lora_deltas, copies)

    def _int8_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for module in self.modules for pair in int8_weights(module)]

    def _kernels(self) -> str:
        """What a decoder over whole weights computes with, by the names of `kernels_of`."""
        kernels, int8 = kernels_of(self._device()), self._int8_weights()
        if kernels == "CPU kernels" and self._embedding().dtype in (torch.float32, torch.bfloat16):
            fits = reads_int8(int8)
        else:
            fits = kernels == "Triton" and not int8
        return kernels if fits else "torch's operations"

    def _device(self) -> torch.device:
        return self._embedding().device

    def _addresses(self, adapters: bool) -> tuple[int, ...]:
        """Addresses of the weights, which may move without a new version."""
        if self.streams:
            return ()
        refs = [ref for roles in (self.layout.outer, *self.layout.layers) for ref in roles.values()]
        tensors = [self.tensor(ref, adapters) for ref in refs]
        tensors += self.snapshot.unmerged_factors(adapters)
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def tensor(self, ref: ParamRef, adapters: bool) -> torch.Tensor | None:
        """The snapshot's tensor of a ParamRef, whole or this rank's slice; None if there is none."""
        return self.snapshot.at(ref, *self._owner(ref), adapters)

    def lora_deltas(self, ref: ParamRef, adapters: bool) -> list[LowRank]:
        """The snapshot's unmerged LoRA factors of a weight."""
        one, _ = self._owner(ref)
        return [] if one is None or ref.parameter != "weight" else self.snapshot.sides(ref, one, adapters)

    def _owner(self, ref: ParamRef) -> tuple[Adapted | None, nn.Parameter | None]:
        """The adapted module that a ParamRef is in, None without an adapter; and the model's own parameter."""
        module = ref.module
        if isinstance(module, ModulesToSaveWrapper):
            active = None if module.disable_adapters else next(iter(module.active_adapters), None)
            saved = module.modules_to_save
            module = saved[active] if active in saved else module.original_module  # noqa: SIM401 - a ModuleDict has no get
        one = self.adapted.get(module)
        return one, (module._parameters if one is None else one.sources).get(ref.parameter)

    def _embedding(self) -> nn.Parameter:
        """The model's own embedding weight, which may be partitioned. It does not need a snapshot."""
        return self._owner(self.layout.outer["embedding.weight"])[1]

    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache; 0 if there is no decoder."""
        if self.fallback_reason:
            return 0
        if self.one_block is None:
            ranks = 1 if self.group is None else self.group.size
            self.one_block = self._planned().kv(1).nbytes * ranks
        return self.one_block

    def planned(self) -> WholeDecoder | None:
        """The decoder with adapters over weights that take no memory, for memory plans; None if there is no decoder."""
        if self.fallback_reason:
            return None
        decoder = self._planned()
        decoder.bind()
        return decoder

    def peak_activation_bytes(self) -> int:
        """Bytes of activations in the largest forward so far, plus those of the most logits."""
        peaks = [0]
        for bound in self.bound.values():
            decoder = getattr(bound.decoder, "lockstep", bound.decoder)
            decoder = getattr(decoder, "inner", decoder)
            logits = decoder.most_logits * decoder.spec.vocab_size * 4
            peaks.append((decoder.activation_bytes(decoder.most_tokens) if decoder.most_tokens else 0) + logits)
        return max(peaks)

    def _planned(self) -> WholeDecoder:
        """A decoder over weights that take no memory, not yet bound."""
        dtype, blank = self._embedding().dtype, self._blank()
        if self.group is not None:
            return ShardedDecoder(self.layout, blank, dtype, self.group, no_lora_deltas)
        return self._make_whole(self.layout, blank, dtype, no_lora_deltas)

    def _blank(self) -> Callable[[ParamRef], torch.Tensor | None]:
        """Gives tensors on the meta device, laid out as the snapshot's will be."""
        meta, joined = torch.device("meta"), JoinedBuffers(set(self.snapshot.joined.sets.values()))

        def alone(ref: ParamRef) -> torch.Tensor | None:
            param = self._owner(ref)[1]
            if param is None:
                return None
            blank = torch.empty(whole_shape(param), dtype=param.dtype, device=meta)
            return blank if self.group is None else self.snapshot.slices[ref].of(blank)

        def blank(ref: ParamRef) -> torch.Tensor | None:
            return joined.part(ref, False, alone, meta) if self.snapshot.keeps_joined(ref) else alone(ref)

        return blank

    def nbytes(self) -> int:
        """Bytes of weight copies that decoders hold in addition to the snapshot."""
        if self.streams:
            return 0
        return sum(copy.nbytes for copy in self.copies.values())

    def release_blocks(self) -> None:
        """Free the blocks that the ranks of the group share."""
        self.pool.release()

    def release(self) -> None:
        """Free the decoders and their copies."""
        self.bound.clear()
        self.workspace = Workspace()


def kernels_of(device: torch.device) -> str:
    """What decoders compute with on a device: "CPU kernels", "Triton" or "torch's operations"."""
    if device.type == "cpu" and cpu_library() is not None:
        return "CPU kernels"
    return "Triton" if device.type == "cuda" and has_triton() else "torch's operations"


class FusedContainer(NativeContainer):
    """Replaces the whole model's forward: calls for logits alone run through the fused decoder, others through the
    model.
    """

    kind = "fused"

    def request(self, original: Callable, args: tuple, kwargs: dict):
        """Logits by the fused decoder if the call asks for nothing else; otherwise the model's own output."""
        more = wants_more_than_logits(self.part.module)
        call = None if more else plain_call(args, kwargs)
        by_default = more or kwargs.get("use_cache") is None
        is_news = call is None and by_default and plain_call(args, {**kwargs, "use_cache": False}) is not None
        why_native = (
            "a forward gives more than logits back, such as a cache (pass use_cache=False; leave "
            "output_hidden_states, output_attentions and output_router_logits of the model's configuration off)"
        )
        tokens = None if call is None else call[0].shape[1]
        with self.calls.request(tokens=tokens, why_native=why_native if is_news else "") as decoder:
            if decoder is None:
                return self.run(original, args, kwargs)
            return CausalLMOutputWithPast(logits=padded_logits(decoder, *call))


def parts_of(info: ModelInfo, inner: bool = False) -> list[Part]:
    """The whole model and each of its parts, once each.

    inner: include the Hugging Face model inside an adapted model, which `generate()` calls.
    """
    model, structure = info.model, info.structure
    parts = {part.module: part for part in (*structure.outer, *structure.layers) if part.module is not model}
    found = [Part("", model, "model"), *parts.values()]
    if inner and info.base is not model:
        name = next(name for name, module in model.named_modules() if module is info.base)
        found.append(Part(name, info.base, "model"))
    return found


def containers_of(parts: list[Part], calls: Calls) -> list[NativeContainer]:
    """A container for each of `parts_of`'s parts."""
    return [FusedContainer(parts[0], calls), *(NativeContainer(part, calls) for part in parts[1:])]


def coverage_of(containers: list[NativeContainer], fused: FusedModel, copied: bool = True) -> list[dict[str, str]]:
    """What runs where: for each container its part's `module` name, its `kind`, the `container` that runs, and `why`.

    containers: as installed, one of them a FusedContainer.  copied: whether anything runs on the snapshot.
    """
    why_native, last = fused.fallback_reason_now(), fused.reasons.last
    what = "" if why_native else f"{fused.what}; the latest request ran natively: {last}" if last else fused.what
    container = NativeContainer.kind if why_native else FusedContainer.kind
    rows = []
    for one in containers:
        words = f"{one.why}: {why_native}" if why_native else what
        adapters = fused.snapshot.words(one.part.module) if copied else ""
        words = f"{words}; {adapters}" if adapters else words
        rows.append({"module": one.part.name, "kind": one.part.kind, "container": container, "why": words})
    return rows


def wants_more_than_logits(model: nn.Module) -> bool:
    """Whether the model's configuration makes every forward return more than logits."""
    config = getattr(model, "config", None)
    return any(
        getattr(config, name, False) for name in ("output_hidden_states", "output_attentions", "output_router_logits")
    )


def plain_call(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids and mask, int64 [rows, tokens], of a call that asks for the logits of whole sequences without a cache; else
    None.

    Padding may be on either side of a sequence but not inside it; positions must count from its first token.
    """
    asked = {name: value for name, value in kwargs.items() if value is not None}
    ids = args[0] if len(args) == 1 else asked.pop("input_ids", None)
    mask, positions = asked.pop("attention_mask", None), asked.pop("position_ids", None)
    plain = asked.pop("use_cache", True) is False and asked.pop("return_dict", True) is True
    plain = plain and all(isinstance(value, int) and not value for value in asked.values())  # other options are off
    if not plain or len(args) > 1 or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    mask = torch.ones_like(ids) if mask is None else mask.long()
    if mask.shape != ids.shape or ids.numel() == 0:
        return None
    expected = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
    fits = ((mask.cumsum(dim=1) - 1 == expected) | (mask == 0)).all()
    return (ids, mask) if bool(fits) and is_packable(mask) else None


def padded_logits(decoder: AnyDecoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [rows, tokens, vocab] in the decoder's dtype, 0 at masked tokens.  ids: int64 [rows, tokens].  mask:
    the same shape.
    """
    real = mask.bool()
    batch = own_blocks_batch([row[kept] for row, kept in zip(ids, real, strict=True)], decoder.device)
    decoder.reserve(ids.shape[1])
    hidden = decoder.forward(batch, decoder.kv(1 + batch.block_tables.numel()))
    logits = decoder.logits(hidden)
    padded = torch.zeros(*ids.shape, logits.shape[1], dtype=decoder.dtype, device=decoder.device)
    padded[real] = logits.to(decoder.dtype)
    return padded
