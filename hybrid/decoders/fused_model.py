"""The fused decoder of a model: bound to the snapshot's weights, and used once the self-check has passed."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hybrid.decoders.attention_choice import AttentionChoice, choose_attention
from hybrid.decoders.batch import KVWeights
from hybrid.decoders.bound_weights import BoundWeights, MetaWeights
from hybrid.decoders.cpu_decoder import CpuDecoder, Workspace
from hybrid.decoders.fallback import NO_WARNING, FallbackReasons, ForeignHooks, no_decoder_reason
from hybrid.decoders.selection import (
    CPU_KERNELS,
    TRITON,
    Int8Weights,
    int8_weights_of,
    kernels_for,
    whole_decoder,
)
from hybrid.decoders.self_check import require_equal
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import Copies, WholeDecoder
from hybrid.decoders.tp_decoder import ShardedDecoder
from hybrid.kernels.cpu_library import cpu_library
from hybrid.kernels.device_group import on_devices
from hybrid.kernels.host_group import HostGroup, on_host
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import DecoderLayout, UnsupportedModel
from hybrid.parallel import InferenceGroup
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.slices import Shard, shard_spec
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.streaming import WeightStream

AnyDecoder = WholeDecoder | StreamedDecoder


@dataclass
class Bound:
    """A decoder, its weights, and their key when it was last bound to them."""

    decoder: AnyDecoder
    weights: BoundWeights
    key: tuple = ()


class FusedModel:
    """The fused decoder of a model, made and checked on first use.

    info: of the model that the engine runs, which is not changed. A snapshot's slices belong to its layout.
    snapshot: the weights; an Int8Copy for a decoder over int8 weights, which is compared with the model's own modules
        over weights that are rounded in the same way.
    max_capture_size: decode steps of up to so many rows are CUDA graphs; 0: no graphs.
    group: the ranks that share the decoder (inference tensor parallelism); the snapshot is then of slices. Without
        these ranks' process group it is for plans alone.
    own_hooks: gives the training engine's hooks, which do not prevent the fused decoder.
    reasons: records why requests ran natively.
    stream: gathers the weights into the snapshot as the decoder runs; None: the snapshot is kept.
    fallback_reason: why there is no decoder, and what the user can do about it; "" if there is one, or may be.
    warns: whether a request that runs natively is warned about; never for models that do not generate.
    attention_backend: as RolloutConfig's.
    records_experts: whether forwards record the experts of each token, in `PagedKV.router_indices`.
    keeps_hidden_states: whether they keep the last layer's outputs, in `PagedKV.hidden_states`.
    """

    def __init__(
        self,
        info: ModelInfo,
        snapshot: Snapshot | Int8Copy,
        max_capture_size: int = 0,
        group: InferenceGroup | None = None,
        own_hooks: Callable[[], Iterable[RemovableHandle]] = list,
        reasons: FallbackReasons | None = None,
        fallback_reason: str = "",
        warns: bool = True,
        stream: WeightStream | None = None,
        attention_backend: str = "triton",
        records_experts: bool = False,
        keeps_hidden_states: bool = False,
    ):
        self.info, self.snapshot = info, snapshot
        self.layout = snapshot.layout if isinstance(snapshot, Int8Copy) else info.layout
        self.stream, self.is_shared = stream, group is not None or stream is not None  # ranks run the decoder together
        self.bound: dict[bool, Bound] = {}  # by whether adapters are used
        self.copies: Copies = WeakValueDictionary()  # weight copies, shared by these decoders
        self.checked, self.warns = False, warns and info.can_generate
        self.reasons = FallbackReasons() if reasons is None else reasons
        self.foreign_hooks = ForeignHooks(info.model, own_hooks)
        # The engine replaces no forward within the layers, so any change there is the user's.
        self.inner = [module for layer in info.layers for module in layer.modules() if module is not layer]
        self.checked_forwards: list[tuple] = []
        self.kv_block_bytes: int | None = None  # bytes of a block, cached by `block_bytes`
        self.blank = MetaWeights(self.layout, snapshot)
        if group is not None:
            param = next(info.model.parameters())
            group = on_devices(on_host(group, param.device), param.dtype, param.device)
        self.group = group
        self.max_capture_size, self.workspace = max_capture_size, Workspace()
        self.attention_backend, self.records_experts = attention_backend, records_experts
        self.keeps_hidden_states = keeps_hidden_states
        self.remark = ""  # why it is not what the settings ask for, at the end of `description`
        self.fallback_reason = fallback_reason or no_decoder_reason(info, self.blank.embedding)

    @property
    def description(self) -> str:
        """A description of what runs in the model's place."""
        decoder, graphs = f"a decoder of the {self.layout.family} family", ", decode steps as CUDA graphs"
        if self.on_triton:
            graphs = f"{graphs * self.has_graphs}, {self.attention.describe(self.has_graphs)}"
        if self.group is not None:
            return f"{decoder}, sharded over {self.group.size} ranks{graphs * self.on_triton}"
        int8 = self._int8_weights()
        decoder += " over int8 weights" * bool(int8) + f", on {kernels_for(self.blank.embedding(), int8)}"
        decoder += ", with weights gathered layer by layer" * (self.stream is not None)
        return decoder + graphs * self.on_triton + self.remark

    @property
    def on_triton(self) -> bool:
        """Whether the decoder is on Triton kernels."""
        return kernels_for(self.blank.embedding(), self._int8_weights()) == TRITON

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        return self.on_triton and self.max_capture_size > 0 and self.stream is None

    @property
    def attention(self) -> AttentionChoice:
        """The kernels of the attention of a decoder on Triton kernels."""
        embedding = self.blank.embedding()
        return choose_attention(self.attention_backend, self.layout.spec, embedding.dtype, embedding.device)

    def fallback_reason_now(self, tokens: int = 0) -> str:
        """Why the model must run natively now, and what the user can do about it; "" if it need not.

        tokens: of the longest sequence. Beyond `DecoderSpec.max_positions` its tables end or depend on the length.
        """
        if self.fallback_reason:
            return self.fallback_reason
        if hook := self.foreign_hooks.first():
            return f"hooks run only with the model's own modules: {hook} (remove them before inference)"
        if torch.is_autocast_enabled(self.blank.embedding().device.type):
            return (
                "autocast chooses the dtype of every operation (generate outside of torch.autocast; in DeepSpeed's "
                "configuration take bf16 or fp16 instead of torch_autocast)"
            )
        if 0 < self.layout.spec.max_positions < tokens:
            return (
                f"beyond {self.layout.spec.max_positions} tokens, its max_position_embeddings, the model's tables "
                "depend on a sequence's length (ask for shorter sequences)"
            )
        return ""

    def note_fallback(self, reason: str = "") -> None:
        """Record that a request runs natively; a new reason is warned about.

        reason: the request's own, and what the user can do about it. One that holds for every request takes precedence.
        """
        self.reasons.note(self.fallback_reason_now() or reason, self.warns)

    def decoder(self, adapters: bool, tokens: int) -> AnyDecoder | None:
        """The decoder, bound to the current weights, for sequences of up to `tokens` tokens; None if the model must run
        natively, which is warned about.

        For a rank that runs the decoder by itself, inside an open window; `adapters` as the window has them. The first
        call runs the self-check. If a layer differs, the decoder is disabled for good.
        """
        if reason := self.fallback_reason_now(tokens):
            self.note_fallback(reason)
            return None
        if self.needs_check() and (reason := self.check(adapters)):
            self.refuse(reason)
            self.note_fallback()
            return None
        return self.bound_decoder(adapters)

    def needs_check(self) -> bool:
        """Whether the self-check must run: on first use, and after a forward within the layers has been replaced."""
        return not self.checked or self.checked_forwards != self._forwards()

    def check(self, adapters: bool) -> str:
        """Compare the decoder with the model's own layers; returns what differs, "" if nothing does.

        If ranks run the decoder together, it is a collective, and every rank runs it to its end.
        """
        try:
            decoder, forwards = self.bound_decoder(adapters), self._forwards()
            with self._reference(adapters):
                require_equal(decoder, self.info)
            self.checked, self.checked_forwards = True, forwards
        except UnsupportedModel as reason:
            return str(reason)
        return ""

    def _reference(self, adapters: bool) -> AbstractContextManager:
        """Inside the block the model's own modules compute what the decoder must."""
        return self.snapshot.rounded_modules(adapters) if isinstance(self.snapshot, Int8Copy) else nullcontext()

    def refuse(self, reason: str) -> None:
        """Disable the decoder for good."""
        self.fallback_reason = f"{reason} (if nobody has changed the model's forwards, please report it; {NO_WARNING})"
        self.bound.clear()

    def _forwards(self) -> list[tuple]:
        """The current forward of every module within the layers."""
        return [(type(module).forward, module.__dict__.get("forward")) for module in self.inner]

    def bound_decoder(self, adapters: bool) -> AnyDecoder:
        """The decoder, bound to the current weights. Call it in an open window, with `adapters` as the window's."""
        with_adapters = adapters and any(adapted.state() for adapted in self.snapshot.adapted)
        if with_adapters not in self.bound:
            weights = BoundWeights(self.layout, self.snapshot, with_adapters)
            self.bound[with_adapters] = Bound(self._decoder(weights), weights)
        bound = self.bound[with_adapters]
        key = bound.weights.key()
        if bound.key != key:
            bound.decoder.bind()
            bound.key = key
        bound.decoder.kv_weights = self._kv_weights(with_adapters, bound)
        return bound.decoder

    def _kv_weights(self, adapters: bool, bound: Bound) -> KVWeights:
        """What the decoder computes keys and values with. Weights that have moved may be others."""
        state = self.snapshot.weights.state(adapters)
        return KVWeights((state.loads, state.steps), (type(self.snapshot).__name__, state.adapters, bound.key))

    def _decoder(self, weights: BoundWeights) -> AnyDecoder:
        """The decoder over these weights, not yet bound."""
        if self.stream is not None:
            return StreamedDecoder(self.layout, weights, self.stream, self._whole_decoder)
        return self._own_decoder(weights, self.copies)

    def _own_decoder(self, weights: BoundWeights, copies: Copies | None = None) -> WholeDecoder:
        """A decoder over whole weights, or over this rank's slices; not yet bound."""
        if self.group is None:
            return self._whole_decoder(self.layout, weights, copies)
        decoder = self._sharded_decoder(self.group, weights, copies)
        decoder.records_experts, decoder.keeps_hidden_states = self.records_experts, self.keeps_hidden_states
        return decoder

    def _sharded_decoder(
        self, group: InferenceGroup | HostGroup, weights: BoundWeights, copies: Copies | None
    ) -> WholeDecoder:
        embedding = weights.embedding()
        if kernels_for(embedding) == TRITON:
            from hybrid.decoders.cuda_decoder import ShardedCudaDecoder  # needs triton, which a CPU install lacks

            more = {"max_capture_size": group.size * self.max_capture_size, "flashinfer": self.attention.flashinfer}
            return ShardedCudaDecoder(self.layout, weights, group, copies=copies, **more)
        if not isinstance(group, HostGroup) or kernels_for(embedding) != CPU_KERNELS:
            return ShardedDecoder(self.layout, weights, group, copies=copies)
        layout = replace(self.layout, spec=shard_spec(self.layout.spec, Shard(group.tensor.size, group.tensor.index)))
        reads = layout, weights.tensor, embedding.dtype, cpu_library(), weights.lora_deltas
        return CpuDecoder(*reads, copies, self.workspace, group)

    def _whole_decoder(
        self, layout: DecoderLayout, weights: BoundWeights, copies: Copies | None = None
    ) -> WholeDecoder:
        int8 = self._int8_weights()
        flashinfer = self.on_triton and self.attention.flashinfer
        decoder = whole_decoder(layout, weights, int8, self.max_capture_size, self.workspace, copies, flashinfer)
        decoder.records_experts, decoder.keeps_hidden_states = self.records_experts, self.keeps_hidden_states
        return decoder

    def _int8_weights(self) -> Int8Weights:
        return int8_weights_of(self.snapshot.holders if isinstance(self.snapshot, Int8Copy) else self.info.model)

    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache on this rank; 0 if there is no decoder."""
        if self.fallback_reason:
            return 0
        if self.kv_block_bytes is None:
            self.kv_block_bytes = self._own_decoder(self.blank).kv(1).nbytes
        return self.kv_block_bytes

    def planned(self) -> WholeDecoder | None:
        """The decoder with adapters over weights that take no memory, for memory plans; None if there is no decoder."""
        if self.fallback_reason:
            return None
        decoder = self._own_decoder(self.blank)
        decoder.bind()
        return decoder

    def peak_activation_bytes(self) -> int:
        """Bytes of activations in the largest forward so far, plus those of the most logits."""
        decoders = (bound.decoder for bound in self.bound.values())
        whole = (decoder.inner if isinstance(decoder, StreamedDecoder) else decoder for decoder in decoders)
        return max((decoder.peak_activation_bytes() for decoder in whole), default=0)

    def nbytes(self) -> int:
        """Bytes of weight copies that decoders hold in addition to the snapshot."""
        return sum(copy.nbytes for copy in self.copies.values())

    def release(self) -> None:
        """Free the decoders and their copies."""
        self.bound.clear()
        self.workspace = Workspace()
