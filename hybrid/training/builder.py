"""Builds what an engine runs on: snapshots and decoders, by its model's ModelInfo and its settings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.decoders.fallback import FallbackReasons
from hybrid.decoders.fused_model import FusedModel
from hybrid.decoders.selection import CPU_KERNELS, kernels_for
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import ParamRef, UnsupportedModel
from hybrid.runtime.parallel import InferenceGroup, world_size
from hybrid.runtime.profiling import Phase
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.joined import joined_refs
from hybrid.weights.model_weights import WeightVersion, read_weights
from hybrid.weights.slices import Shard, decoder_sizes, planned_slices, sizes_that_fit, slices_of
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.streaming import WeightStream


@dataclass(frozen=True)
class Mode:
    """A way to hold weights: whole on every rank, sliced over `tp_size` ranks, or streamed layer by layer.

    int8: an int8 copy in addition, for decoding.
    keeps_base: the base of merged adapters in addition, for calls without adapters.
    """

    tp_size: int = 1
    streaming: bool = False
    int8: bool = False
    keeps_base: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether a rank has no whole copy in the model's dtype, so that ranks run inference together."""
        return self.tp_size > 1 or self.streaming

    def __str__(self) -> str:
        if self.int8:
            return "int8"
        if self.streaming:
            return "streaming"
        if self.keeps_base:
            return "pinned, base kept"
        return "pinned" if self.tp_size == 1 else f"tensor parallel {self.tp_size}"


class Builder:
    """Builds snapshots and decoders for the modes that an engine could run in.

    stage: of ZeRO.  phase, count: as in WeightStream.  own_hooks: as in FusedModel.
    Attributes: `may_keep_base` is whether the mode that keeps the base of merged adapters may be chosen: only if
        `memory_limit` says how much memory inference may add.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: HybridEngineConfig,
        rollout: RolloutConfig,
        stage: int,
        phase: Phase,
        count: Callable[[int], None],
        own_hooks: Callable[[], Iterable[RemovableHandle]],
    ):
        self.settings, self.rollout, self.stage = settings, rollout, stage
        self.phase, self.count, self.own_hooks = phase, count, own_hooks
        self.may_keep_base = rollout.memory_limit is not None
        self.fallback_reasons = FallbackReasons()  # shared by all decoders that the engine makes
        self.version = WeightVersion()
        self.read(model)

    def read(self, model: nn.Module) -> None:
        """Read the model: at construction, and after its modules, adapters or parameters were replaced."""
        info = ModelInfo(model)
        # With an int8 copy, which merges adapters, whole weights compute as the trainer does: unmerged.
        unmerged = self.rollout.lora == "unmerged" or self.int8
        self.weights = read_weights(info, self.settings.tp_gather_partition_size, unmerged, self.version)
        self.info = info

    @property
    def native_by_choice(self) -> bool:
        """Whether the settings ask for the model's own layers."""
        return self.rollout.containers == "native"

    @property
    def int8(self) -> bool:
        """Whether the settings ask for decoding over int8 weights."""
        return self.rollout.weight_dtype == "int8"

    def modes(self) -> list[Mode]:
        """Return the modes that model, world size and ZeRO stage allow, the fastest first."""
        if self.int8:
            return [self.int8_mode()]
        sizes = [size for size in self._tp_sizes() if size > 1 and world_size() % size == 0]
        pinned = [Mode(keeps_base=True), Mode()] if self._merges_partitioned() else [Mode()]
        return [*pinned, *(Mode(tp_size=size) for size in sizes), *[Mode(streaming=True)] * (self.stage == 3)]

    def _merges_partitioned(self) -> bool:
        """Whether adapters are merged into partitioned weights. At ZeRO 0 to 2 the base is read in place."""
        weights = self.weights
        merges = (not weights.unmerged or not layer.can_run_unmerged() for layer in weights.adapted)
        return self.stage == 3 and any(merges)

    def _tp_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the decoder's heads and mixers, or the heads of the model's own modules."""
        if self.info.layout is not None:
            return decoder_sizes(self.info.layout.spec)
        attentions = () if self.info.tp_plan is None else self.info.tp_plan.attentions
        sizes = [set(sizes_that_fit(attention.heads, attention.kv_heads)) for attention in attentions]
        return sorted(set.intersection(*sizes)) if sizes else [1]

    def int8_mode(self) -> Mode:
        """Return the mode with an int8 copy: under ZeRO-3 whole weights are streamed, else they are the model's own."""
        return Mode(streaming=self.stage == 3, int8=True)

    def make_int8(self) -> FusedModel | None:
        """Return the decoder over an int8 copy; None if the settings do not ask for one."""
        if not self.int8:
            return None
        return self.fused(Int8Copy(self.weights, self.settings.tp_gather_partition_size, self._joined()))

    def make(self, mode: Mode, group: InferenceGroup) -> FusedModel:
        """Return a mode's decoder, over its snapshot in the model's dtype. Without a decoder for the model, the
        snapshot is of whole weights."""
        layout, native = self.info.layout, "rollout.containers=native" * self.native_by_choice
        if mode.streaming:
            stream = WeightStream(self.weights, self.phase, self.count)
            fused = self.fused(stream.snapshot, native, stream=stream)
            if fused.fallback_reason:
                fused.fallback_reason = layer_by_layer(fused.fallback_reason)
            return fused
        slices = None
        if mode.tp_size > 1 and layout is not None and not native:
            slices = slices_of(layout, Shard(group.size, group.index))
        snapshot = Snapshot(
            self.weights,
            slices,
            decoder_only=slices is not None,
            joined=self._joined(),
            keeps_base=mode.keeps_base,
        )
        return self.fused(snapshot, native, group if mode.tp_size > 1 else None)

    def planned(self, mode: Mode) -> tuple[tuple[int, int], FusedModel, FusedModel | None]:
        """For memory plans, what a mode would run on: the planned bytes of its weights, kept and temporary; its
        decoder; and with an int8 copy the decoder of requests that do not decode, else None."""
        group = InferenceGroup(mode.tp_size, connected=False)
        fused = self.make(mode, group)
        if mode.int8 and (int8 := self.make_int8()) is not None:
            kept, temporary = int8.snapshot.planned()
            whole, streamed = (fused.stream or fused.snapshot).planned()
            return (kept + whole, max(temporary, streamed)), int8, fused
        if mode.tp_size > 1 and fused.fallback_reason and self.info.tp_plan is not None:
            return self.module_slices(group).planned(), fused, None
        return (fused.stream or fused.snapshot).planned(), fused, None

    def module_slices(self, group: InferenceGroup) -> Snapshot:
        """Return the snapshot for the model's own modules in tensor parallel. Raises UnsupportedModel without a
        `tp_plan`."""
        if self.info.tp_plan is None:
            raise UnsupportedModel(self.info.reasons["tp_plan"])
        slices = planned_slices(self.info.tp_plan, Shard(group.size, group.index))
        return Snapshot(self.weights, slices, keeps_base=False)

    def layer_by_layer(self, reason: str) -> FusedModel:
        """No decoder, for `reason`, and a snapshot that copies nothing: weights are gathered as the model's layers
        run."""
        return self.fused(Snapshot(replace(self.weights, groups=())), layer_by_layer(reason))

    def fused(
        self,
        snapshot: Snapshot | Int8Copy,
        fallback_reason: str = "",
        group: InferenceGroup | None = None,
        stream: WeightStream | None = None,
    ) -> FusedModel:
        """Return the decoder over a snapshot.  fallback_reason: why the model's own layers must run; "" to use the
        decoder."""
        max_capture_size = self.rollout.max_num_seqs if self.settings.enable_cuda_graph else 0
        return FusedModel(
            self.info,
            snapshot,
            max_capture_size,
            group,
            self.own_hooks,
            self.fallback_reasons,
            fallback_reason,
            warns=not self.native_by_choice,
            stream=stream,
            attention_backend=self.rollout.attention_backend,
            records_experts=self.rollout.return_router_indices,
            keeps_hidden_states=self.rollout.cache_hidden_states,
            trusts_forwards=self.rollout.trust_forward,
            batch_invariant=self.rollout.batch_invariant,
        )

    def _joined(self) -> list[tuple[ParamRef, ...]]:
        """Return matrices that the decoder reads as one (q, k, v; gate, up). None for the CPU kernels, which read each
        matrix in its own place."""
        reads_parts = kernels_for(next(self.info.model.parameters())) == CPU_KERNELS
        if self.info.layout is None or self.native_by_choice or reads_parts:
            return []
        return joined_refs(self.info.layout)


def layer_by_layer(reason: str) -> str:
    """Return the reason text for a model whose own layers are gathered as they run."""
    return f"weights are gathered layer by layer ({reason})"
