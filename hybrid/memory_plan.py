"""The ways to hold weights for a rollout: what each takes on a rank, in bytes, before it moves; the choice."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.fallback import NativeReasons
from hybrid.decoders.fused_model import FusedModel, kernels_of
from hybrid.decoders.self_check import checked_lengths
from hybrid.generation.block_pool import pages_for
from hybrid.generation.model_runner import PREFILL_TOKENS
from hybrid.generation.scoring import LOGIT_ROWS
from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout, ParamRef, UnsupportedModel
from hybrid.models.structure import read_structure
from hybrid.models.tp_plan import read_tp_plan
from hybrid.parallel import InferenceGroup, lowest, world_size
from hybrid.profiling import Phase
from hybrid.weights.gather import is_partitioned
from hybrid.weights.joined import joined_refs
from hybrid.weights.lora import read_adapters
from hybrid.weights.sliced_snapshot import LentSlices, SlicedSnapshot
from hybrid.weights.slices import Shard, planned_slices, sizes_that_fit, slices_of
from hybrid.weights.snapshot import Snapshot, WeightVersion, active_adapters
from hybrid.weights.streaming import StreamedSnapshot


@dataclass(frozen=True)
class Mode:
    """A way to hold weights: whole on every rank, in slices on `tp_size` ranks, or streamed layer by layer."""

    tp_size: int = 1
    streaming: bool = False

    def __str__(self) -> str:
        if self.streaming:
            return "streaming"
        return "pinned" if self.tp_size == 1 else f"tensor parallel {self.tp_size}"


@dataclass(frozen=True)
class Need:
    """Bytes on one rank.

    parameters: at rest, which training holds whatever the mode.  gather: whole beside the snapshot while weights are
    brought together, and what merging computes with.  snapshot.  containers: copies that decoders hold.  kv: of all
    rows that decode at once.  logits: float32, of a step, or of the tokens that are scored at once.  activations: of
    the largest forward, beside its logits.
    """

    parameters: int
    gather: int
    snapshot: int
    containers: int
    kv: int
    logits: int
    activations: int

    @property
    def total(self) -> int:
        """What inference adds to training's own memory, at the worst moment."""
        return self.gather + self.snapshot + self.containers + self.kv + self.logits + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    """The needs of every mode that this engine could run in, the fastest first.

    in_use: the mode that the engine runs in.  limit: bytes that inference may add; None: no limit is set.
    """

    needs: dict[Mode, Need]
    in_use: Mode
    limit: int | None = None

    def __str__(self) -> str:
        names = [field.name for field in fields(Need)]
        lines = [["mode", *names, "inference", ""]]
        for mode, need in self.needs.items():
            marks = ["in use"] * (mode == self.in_use) + ["too much"] * (not self.fits(mode))
            lines.append([str(mode), *(in_mib(getattr(need, name)) for name in (*names, "total")), ", ".join(marks)])
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        cells = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        limit = "" if self.limit is None else f"; inference may add {in_mib(self.limit)}"
        return "\n".join([f"MiB on a rank{limit}", *(line.rstrip() for line in cells)])

    def fits(self, mode: Mode) -> bool:
        """Whether a mode's need is within the limit."""
        return self.limit is None or self.needs[mode].total <= self.limit


class Modes:
    """The modes of an engine: what holds the weights in each, what they need, and which one it runs in.

    stage: of ZeRO.  phase, count: as StreamedSnapshot's.  own_hooks: as FusedModel's.
    Raises ValueError, with a plan, where "auto" is to choose and nothing fits.
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
        self.model, self.settings, self.rollout, self.stage = model, settings, rollout, stage
        self.phase, self.count, self.own_hooks = phase, count, own_hooks
        self.device = torch.device(get_accelerator().current_device_name())
        self.native_reasons = NativeReasons()  # of every decoder that the engine has had
        self.limit = rollout.memory_limit
        self.version = WeightVersion()
        self.read()
        self.in_use = self._chosen()

    def read(self) -> None:
        """Read the model: as it is built, and when its modules, adapters or parameters are others.

        Raises NotImplementedError that names the module, where one has an adapter that cannot be merged; what was read
        before stays.
        """
        self.structure, self.adapted = read_structure(self.model), read_adapters(self.model)
        unmerged = self.rollout.lora == "unmerged"
        layers_per_group = self.settings.tp_gather_partition_size
        self.kept = (self.model, self.structure, self.adapted, layers_per_group, unmerged, self.version)  # by all
        self.version.adapters = active_adapters(self.adapted)
        self.layout: DecoderLayout | None = None
        with suppress(UnsupportedModel):
            self.layout = read_decoder(self.model)

    def weights(self, mode: Mode, group: InferenceGroup) -> tuple[Snapshot, FusedModel]:
        """The snapshot and the decoder of a mode; a snapshot of whole weights where the mode has no decoder."""
        native = "rollout.containers=native" * self.native_by_choice
        if native or self.layout is None or mode == Mode():
            snapshot = Snapshot(*self.kept, joined=self._joined(mode))
        elif mode.streaming:
            snapshot = StreamedSnapshot(*self.kept, phase=self.phase, count=self.count)
        else:
            slices = slices_of(self.layout, Shard(group.size, group.index))
            snapshot = SlicedSnapshot(*self.kept, slices=slices, joined=self._joined(mode))
        fused = self.fused(snapshot, native, group if mode.tp_size > 1 else None)
        if fused.fallback_reason and mode.streaming:
            fused.fallback_reason = layer_by_layer(fused.fallback_reason)
        return snapshot, fused

    def _joined(self, mode: Mode) -> list[tuple[ParamRef, ...]]:
        """What the decoder of a mode reads as one. The CPU kernels read matrices where they lie."""
        first = next(self.model.parameters())
        on_cpu_kernels = kernels_of(first.device) == "CPU kernels" and first.dtype in (torch.float32, torch.bfloat16)
        reads_parts = mode.tp_size == 1 and on_cpu_kernels
        if self.layout is None or self.native_by_choice or reads_parts:
            return []
        return joined_refs(self.layout)

    def fused(self, snapshot: Snapshot, fallback_reason: str = "", group: InferenceGroup | None = None) -> FusedModel:
        """The decoder over a snapshot.  why_not: words, where there is to be none."""
        graph_slots = self.rollout.max_slots if self.settings.enable_cuda_graph else 0
        layers = [part.module for part in self.structure.layers]
        fused = FusedModel(
            self.model, layers, snapshot, graph_slots, group, self.own_hooks, self.layout, self.native_reasons
        )
        fused.fallback_reason = fallback_reason or fused.fallback_reason
        fused.warns = fused.warns and not self.native_by_choice
        return fused

    @property
    def native_by_choice(self) -> bool:
        """Whether the settings ask for the model's own layers."""
        return self.rollout.containers == "native"

    def plan(self, rows: int, tokens: int) -> MemoryPlan:
        """For so many sequences, decoded at once, of so many tokens."""
        needs = {mode: self._planned(mode)(rows, tokens) for mode in self._possible()}
        return MemoryPlan(needs, self.in_use, self.limit)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether what is in use can hold so many sequences at once of so many tokens."""
        return self.limit is None or self._planned(self.in_use)(rows, tokens).total <= self.limit

    def kv_limit(self) -> int | None:
        """Bytes that the memory limit leaves for keys and values beside the weights in use; None: there is none."""
        if self.limit is None:
            return None
        return max(self.limit - self._planned(self.in_use)(0, 0).total, 0)

    def _possible(self) -> list[Mode]:
        """The fastest first."""
        slices = [Mode(tp_size=size) for size in self._sizes()[1:] if world_size() % size == 0]
        return [Mode(), *slices, *[Mode(streaming=True)] * (self.stage == 3)]

    def _sizes(self) -> list[int]:
        """Numbers of ranks that can share the decoder, or the model's own modules."""
        if self.layout is not None:
            return sizes_that_fit(self.layout.spec.num_heads, self.layout.spec.num_kv_heads)
        try:
            heads = [sizes_that_fit(one.heads, one.kv_heads) for one in read_tp_plan(self.model).attentions]
        except UnsupportedModel:
            return [1]
        return sorted(set.intersection(*map(set, heads))) if heads else [1]

    def _chosen(self) -> Mode:
        """What the settings say; where they say "auto", the fastest in which `max_slots` sequences of `max_out_tokens`
        fit at once. Where all do not fit in any, the one in which most do."""
        size, pinned = self.settings.inference_tp_size, self.settings.pin_parameters
        if "auto" not in (size, pinned):
            return Mode(tp_size=size) if pinned else Mode(streaming=True)
        allowed = [mode for mode in self._possible() if mode.streaming is not pinned]
        allowed = [mode for mode in allowed if size == "auto" or mode.tp_size == size]
        if self.limit is None:
            self.limit = lowest(free_bytes(), self.device)
        slots = {mode: lowest(self._slots(mode), self.device) for mode in allowed}
        self.in_use = chosen = max(allowed, key=slots.get)
        tokens = self.settings.max_out_tokens
        if not slots[chosen]:
            raise ValueError(
                f"hybrid_engine: nothing that inference_tp_size={size!r} and pin_parameters={pinned!r} allow fits for "
                f"a sequence of max_out_tokens={tokens}; allow more, or raise rollout.memory_limit\n"
                f"{self.plan(1, tokens)}"
            )
        log_dist(
            f"hybrid: weights are held {chosen}: {slots[chosen]} of max_slots={self.rollout.max_slots} sequences of "
            f"max_out_tokens={tokens} fit at once in {in_mib(self.limit)} MiB",
            ranks=[0],
        )
        return chosen

    def _slots(self, mode: Mode) -> int:
        """How many sequences of `max_out_tokens` fit at once, up to `max_slots`."""
        need = self._planned(mode)
        counts = range(self.rollout.max_slots, 0, -1)
        return next((n for n in counts if need(n, self.settings.max_out_tokens).total <= self.limit), 0)

    def _planned(self, mode: Mode) -> Callable[[int, int], Need]:
        """What a mode needs, for so many sequences at once of so many tokens."""
        group = InferenceGroup(mode.tp_size, connected=False)
        snapshot, fused = self.weights(mode, group)
        if mode.tp_size > 1 and fused.fallback_reason:
            with suppress(UnsupportedModel):
                slices = planned_slices(read_tp_plan(self.model), Shard(group.size, group.index))
                snapshot = LentSlices(*self.kept, slices=slices)
        kept, beside = snapshot.planned()
        decoder = fused.planned()
        copies = 0 if decoder is None else decoder.nbytes()
        if mode.streaming:  # a layer at a time has them
            copies, beside = 0, beside + copies // max(len(fused.layers), 1)
        at_rest = sum(map(bytes_at_rest, self.model.parameters()))
        vocabulary = getattr(text_config(self.model), "vocab_size", 0)

        def need(rows: int, tokens: int) -> Need:
            kv = kv_bytes(fused, self.rollout.kv_step, rows, tokens) if rows else 0
            kv = min(kv, self.rollout.kv_cache_bytes or kv)
            logits = logit_rows(decoder, max(rows, 1), tokens) * vocabulary * 4
            if decoder is None:
                # A head's logits come when the layers' products are gone.
                activations = max(native_activation_bytes(self.model, rows * tokens) - logits, 0)
            else:
                ranks = 1 if mode.tp_size == 1 else mode.tp_size  # whose tokens a forward has
                checked = sum(checked_lengths(decoder, self.model))
                at_once = max(ranks * min(rows * tokens, PREFILL_TOKENS), checked)
                activations = decoder.activation_bytes(at_once)
            return Need(at_rest, beside, kept, copies, kv, logits, activations)

        return need


def logit_rows(decoder: object, rows: int, tokens: int) -> int:
    """Tokens whose logits are there at once, copies counted: of a step (the prompts' and all rows'), or of scoring.

    The CPU kernels draw and score without a copy; in torch's operations there are temporaries of the same size.
    """
    in_torch = not isinstance(decoder, CpuDecoder)
    return max((5 if in_torch else 3) * rows, (5 if in_torch else 1) * min(rows * tokens, LOGIT_ROWS))


def native_activation_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes of a forward of the model's own layers over so many tokens, about: the residual stream, as it is, normed,
    attended and in float32; and the MLP's products."""
    config = text_config(model)
    hidden, inner = (getattr(config, name, 0) or 0 for name in ("hidden_size", "intermediate_size"))
    return tokens * (4 * hidden + 3 * (inner or 4 * hidden)) * next(model.parameters()).element_size()


def kv_bytes(fused: FusedModel, step: int, rows: int, tokens: int) -> int:
    """Of the pages, or of the cache that the model's own layers fill; both grow by `step` tokens."""
    if not fused.fallback_reason:
        steps = pages_for(step)
        return -(-(1 + rows * pages_for(tokens)) // steps) * steps * fused.page_bytes()
    config = text_config(fused.model)
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = getattr(config, "num_hidden_layers", 0)
    itemsize = next(fused.model.parameters()).element_size()
    return 2 * layers * kv_heads * head_dim * rows * (-(-tokens // step) * step) * itemsize


def text_config(model: nn.Module) -> object:
    """The Hugging Face configuration of what generates; None where there is none."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def bytes_at_rest(param: torch.Tensor) -> int:
    """What this rank holds of a parameter outside inference."""
    return param.ds_tensor.nbytes if is_partitioned(param) and param.numel() == 0 else param.nbytes


def free_bytes() -> int:
    """What this rank's device has free; a host's memory is shared by the ranks on it.

    On a device, what torch's allocator has reserved and does not use is free too.
    """
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    if accelerator.device_name() == "cpu":
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return free + accelerator.memory_reserved() - accelerator.memory_allocated()


def layer_by_layer(reason: str) -> str:
    """Words for a model whose own layers are gathered as they run."""
    return f"weights are gathered layer by layer ({reason})"


def in_mib(nbytes: int) -> str:
    """Bytes as MiB, for people."""
    return f"{nbytes / 2**20:.1f}"
