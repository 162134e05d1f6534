"""The fused decoder of a model: bound to the snapshot's weights, and used once the self-check has passed."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hybrid.decoders.attention_choice import AttentionChoice, choose_attention
from hybrid.decoders.batch import KVWeights, state_bytes
from hybrid.decoders.cpu_decoder import CpuDecoder, Workspace
from hybrid.decoders.decoder_weights import DecoderWeights, MetaWeights
from hybrid.decoders.fallback import NO_WARNING, FallbackReasons, no_decoder_reason, no_triton_reason
from hybrid.decoders.foreign_code import ForeignForwards, UserHooks
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
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.named_adapters import Adapters
from hybrid.weights.slices import Shard, shard_spec
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.streaming import WeightStream

AnyDecoder = WholeDecoder | StreamedDecoder


@dataclass
class BoundDecoder:
    """A decoder, its weights, and when it was last bound to them: their key; the snapshot's `overwrites`, and whose
    adapters it had."""

    decoder: AnyDecoder
    weights: DecoderWeights
    key: tuple = ()
    source: tuple = ()


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
    trusts_forwards: whether forwards of unknown code are compared by the self-check alone.
    batch_invariant: as CudaDecoder's.
    Each engine sets a few of the fourteen arguments. The fields are these, and the state of binding and self-check.
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
        trusts_forwards: bool = False,
        batch_invariant: bool = False,
    ):
        self.info, self.snapshot = info, snapshot
        self.layout = snapshot.layout if isinstance(snapshot, Int8Copy) else info.layout
        self.stream, self.is_shared = stream, group is not None or stream is not None  # ranks run the decoder together
        self.bound: dict[bool, BoundDecoder] = {}  # by whether adapters are used
        self.copies: Copies = WeakValueDictionary()  # weight copies, shared by these decoders
        self.checked, self.warns = False, warns and info.can_generate
        self.reasons = FallbackReasons() if reasons is None else reasons
        self.foreign_hooks = UserHooks(info.model, own_hooks)
        self.foreign_forwards = ForeignForwards(info, trusts_forwards)
        self.checked_forwards = 0  # `ForeignForwards.replaced` at the last self-check
        self.cache_bytes: tuple[int, int] | None = None  # of a block and of a slot, once `bytes_in_cache` has read them
        self.blank = MetaWeights(self.layout, snapshot)
        if group is not None:
            param = next(info.model.parameters())
            group = on_devices(on_host(group, param.device), param.dtype, param.device)
        self.group = group
        self.max_capture_size, self.workspace = max_capture_size, Workspace()
        self.attention_backend, self.records_experts = attention_backend, records_experts
        self.batch_invariant = batch_invariant
        # Of a recurrent model no prefix is found whose hidden states could be read.
        self.keeps_hidden_states = keeps_hidden_states and not (self.layout and self.layout.spec.is_recurrent)
        self.remark = ""  # why it is not what the settings ask for, at the end of `description`
        self.rollouts: FusedModel | None = None  # what generates instead of it: over an int8 copy
        self.fallback_reason = fallback_reason or no_decoder_reason(info, self.blank.embedding)
        self.fallback_reason = self.fallback_reason or self._mixer_reason()
        self.fallback_reason = self.fallback_reason or self.foreign_forwards.first()

    def _mixer_reason(self) -> str:
        """Return why recurrent layers, latent attention or layers that differ cannot run fused; "" if they can, or if
        there are none."""
        spec, reason = self.layout.spec, ""
        if self.on_triton and (lack := no_triton_reason(spec, self.blank.embedding().dtype)):
            reason = lack
        elif spec.per_layer_input_size and self.stream is not None:
            reason = "per-layer inputs are made of weights outside the layers, which are not streamed with them"
        return reason and f"{reason} ({NO_WARNING})"

    @property
    def description(self) -> str:
        """A description of what runs in the model's place."""
        decoder, graphs = f"a decoder of the {self.layout.family} family", ""
        if self.on_triton:
            if self.has_graphs:
                graphs = ", decode steps as CUDA graphs"
            elif self.eager_reason:
                graphs = f", decode steps without CUDA graphs ({self.eager_reason})"
            graphs += f", {self.attention.describe(self.has_graphs)}"
        if self.group is not None:
            decoder += f", sharded over {self.group.size} ranks"
        else:
            int8 = self._int8_weights()
            decoder += " over int8 weights" * bool(int8) + f", on {kernels_for(self.blank.embedding(), int8)}"
            decoder += ", with weights gathered layer by layer" * (self.stream is not None)
        if self.layout.spec.is_recurrent:
            decoder += ", with a prefix cache of kept states (a block alone does not continue a recurrent state)"
        rollouts = "" if self.rollouts is None else f"; generate() and rollout(): {self.rollouts.description}"
        return decoder + graphs + self.remark + rollouts

    @property
    def on_triton(self) -> bool:
        """Whether the decoder is on Triton kernels."""
        return kernels_for(self.blank.embedding(), self._int8_weights()) == TRITON

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs, as far as they have been captured."""
        return self.on_triton and self.max_capture_size > 0 and self.stream is None and not self.eager_reason

    @property
    def eager_reason(self) -> str:
        """The reason for decode steps without CUDA graphs where the settings ask for them; "" if no capture failed."""
        reasons = (getattr(bound.decoder, "eager_reason", "") for bound in self.bound.values())
        return next(filter(None, reasons), "")

    @property
    def cuda_graphs(self) -> int:
        """The number of CUDA graphs from which decode steps are replayed."""
        return sum(len(getattr(bound.decoder, "graphs", ())) for bound in self.bound.values())

    @property
    def attention(self) -> AttentionChoice:
        """The kernels of the attention of a decoder on Triton kernels."""
        embedding = self.blank.embedding()
        return choose_attention(self.attention_backend, self.layout.spec, embedding.dtype, embedding.device)

    def fallback_reason_now(self, tokens: int = 0) -> str:
        """Return the reason why the model must run natively now, and the remedy; "" if it need not.

        tokens: of the longest sequence. Beyond `DecoderSpec.max_positions` its tables end or depend on the length.
        """
        if self.fallback_reason:
            return self.fallback_reason
        if hook := self.foreign_hooks.first():
            return f"hooks run only with the model's own modules: {hook} (remove them before inference)"
        if foreign := self.foreign_forwards.first():
            return foreign
        if torch.is_autocast_enabled(next(self.info.model.parameters()).device.type):
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

    def decoder(self, adapters: Adapters, tokens: int) -> AnyDecoder | None:
        """Return the decoder, bound to the current weights, for sequences of up to `tokens` tokens; None if the model
        must run natively, which is warned about.

        For a rank that runs the decoder by itself, inside an open window with `adapters`.
        The first call runs the self-check. If a layer differs, the decoder is disabled for good.
        """
        if reason := self.fallback_reason_now(tokens):
            self.note_fallback(reason)
            return None
        if self.needs_check() and (reason := self.check(bool(adapters), tokens)):
            self.refuse(reason)
            self.note_fallback()
            return None
        return self.bound_decoder(adapters)

    def can_mix_adapters(self) -> bool:
        """Whether rows of the adapters that are active now may be decoded in one batch, each row with one of them. All
        must run unmerged, and in products of the layers, since the head and the matrices that latent attention absorbs
        do not know which row they compute."""
        snapshot, weights = self.snapshot, self.snapshot.weights
        if isinstance(snapshot, Int8Copy) or self._int8_weights() or self.is_shared or weights.running:
            return False
        active = [adapted for adapted in snapshot.adapted if adapted.state()]
        if not active or not all(weights.is_unmerged(adapted, True) for adapted in active):
            return False
        wrappers = {adapted.wrapper for adapted in active}
        by_row = [ref for layer in self.layout.layers for role, ref in layer.items() if not role.startswith("kv_b.")]
        return wrappers <= {ref.module for ref in by_row}

    def needs_check(self) -> bool:
        """Whether the self-check must run: on first use, and after a forward within the layers has been replaced, as
        `fallback_reason_now` has seen."""
        return not self.checked or self.checked_forwards != self.foreign_forwards.replaced

    def check(self, adapters: bool, tokens: int = 0) -> str:
        """Compare the decoder with the model's own layers; returns what differs, "" if nothing does.

        If ranks run the decoder together, it is a collective, and every rank runs it to its end.

        tokens: of the longest sequence of the request, whose graphs are then those of the check.
        """
        try:
            decoder, forwards = self.bound_decoder(adapters), self.foreign_forwards.replaced
            decoder.reserve(tokens)
            with self.snapshot.rounded_modules(adapters) if isinstance(self.snapshot, Int8Copy) else nullcontext():
                require_equal(decoder, self.info)
            self.checked, self.checked_forwards = True, forwards
        except UnsupportedModel as reason:
            return str(reason)
        return ""

    def refuse(self, reason: str) -> None:
        """Disable the decoder for good."""
        self.fallback_reason = f"{reason} (if nobody has changed the model's forwards, please report it; {NO_WARNING})"
        self.bound.clear()

    def bound_decoder(self, adapters: Adapters) -> AnyDecoder:
        """Return the decoder, bound to the current weights. Expects an open window with `adapters`; of several each row
        names one."""
        mixed = adapters if isinstance(adapters, tuple) else ()
        with_adapters = bool(adapters) and any(adapted.state() for adapted in self.snapshot.adapted)
        if with_adapters not in self.bound:
            weights = DecoderWeights(self.layout, self.snapshot, with_adapters)
            self.bound[with_adapters] = BoundDecoder(self._decoder(weights), weights)
        bound = self.bound[with_adapters]
        state = self.snapshot.weights.state(with_adapters)
        bound.decoder.mixed_adapters = mixed
        key, source = bound.weights.key(), (self.snapshot.overwrites, state.adapters, mixed)
        if (bound.key, bound.source) != (key, source):
            bound.decoder.bind()
            bound.key, bound.source = key, source
        # Weights that have moved may be others.
        variant = type(self.snapshot).__name__, state.adapters, mixed, bound.key
        bound.decoder.kv_weights = KVWeights((state.loads, state.steps), variant)
        return bound.decoder

    def _decoder(self, weights: DecoderWeights) -> AnyDecoder:
        """Return the decoder over these weights, not yet bound."""
        if self.stream is not None:
            return StreamedDecoder(self.layout, weights, self.stream, self._whole_decoder)
        return self._own_decoder(weights, self.copies)

    def _own_decoder(self, weights: DecoderWeights, copies: Copies | None = None) -> WholeDecoder:
        """Return a decoder over whole weights, or over this rank's slices; not yet bound."""
        if self.group is None:
            return self._whole_decoder(self.layout, weights, copies)
        decoder = self._sharded_decoder(self.group, weights, copies)
        decoder.records_experts, decoder.keeps_hidden_states = self.records_experts, self.keeps_hidden_states
        return decoder

    def _sharded_decoder(
        self, group: InferenceGroup | HostGroup, weights: DecoderWeights, copies: Copies | None
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
        self, layout: DecoderLayout, weights: DecoderWeights, copies: Copies | None = None
    ) -> WholeDecoder:
        int8 = self._int8_weights()
        flashinfer = self.on_triton and self.attention.flashinfer
        choices = self.max_capture_size, self.workspace, copies, flashinfer, self.batch_invariant
        decoder = whole_decoder(layout, weights, int8, *choices)
        decoder.records_experts, decoder.keeps_hidden_states = self.records_experts, self.keeps_hidden_states
        return decoder

    def _int8_weights(self) -> Int8Weights:
        return int8_weights_of(self.snapshot.holders if isinstance(self.snapshot, Int8Copy) else self.info.model)

    def bytes_in_cache(self) -> tuple[int, int]:
        """Return the bytes on this rank of a block of the KV cache, at least 1, and of a sequence's recurrent states.

        The second is 0 if there are none; both are if there is no decoder.
        """
        if self.fallback_reason:
            return 0, 0
        if self.cache_bytes is None:
            decoder = self._own_decoder(self.blank)
            states = decoder.states(1) if self.layout.spec.is_recurrent else {}
            self.cache_bytes = decoder.kv(1).block_bytes, state_bytes(states)
        return self.cache_bytes

    def planned(self) -> WholeDecoder | None:
        """Return the decoder with adapters over weights that take no memory, for memory plans; None if there is no
        decoder."""
        if self.fallback_reason:
            return None
        decoder = self._own_decoder(self.blank)
        decoder.bind()
        return decoder

    def peak_activation_bytes(self) -> int:
        """Return the bytes of activations in the largest forward so far, plus those of the most logits."""
        decoders = (bound.decoder for bound in self.bound.values())
        whole = (decoder.inner if isinstance(decoder, StreamedDecoder) else decoder for decoder in decoders)
        return max((decoder.peak_activation_bytes() for decoder in whole), default=0)

    def nbytes(self) -> int:
        """Return the bytes of weight copies that decoders hold in addition to the snapshot."""
        return sum(copy.nbytes for copy in self.copies.values())

    def release(self) -> None:
        """Free the decoders and their copies."""
        self.bound.clear()
        self.workspace = Workspace()
