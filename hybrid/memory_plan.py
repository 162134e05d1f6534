"""Plans memory: bytes on a rank of each way to hold weights for a rollout, and the choice where settings are "auto"."""

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
from hybrid.generation.block_pool import blocks_for
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
    """A way to hold weights: whole on every rank, sliced over `tp_size` ranks, or streamed layer by layer."""

    tp_size: int = 1
    streaming: bool = False

    def __str__(self) -> str:
        if self.streaming:
            return "streaming"
        return "pinned" if self.tp_size == 1 else f"tensor parallel {self.tp_size}"


@dataclass(frozen=True)
class Need:
    """Peak memory of a rollout in one mode, by kind, in bytes on one rank.

    parameters: held by training in every mode.
    gather: temporaries of gathering and merging, in addition to the snapshot.
    snapshot: inference's copies of weights.
    containers: further copies that decoders make (transposed, joined, float32).
    kv: KV cache of all sequences that are decoded at once.
    logits: float32, of one decode step or of the tokens scored at once.
    activations: of the largest forward, without its logits.
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
        """Peak bytes that inference adds to training's own memory."""
        return self.gather + self.snapshot + self.containers + self.kv + self.logits + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that each mode of this engine needs, the fastest mode first. `str()` gives a table in MiB.

    in_use: the mode that the engine runs in.  limit: bytes that inference may add; None: no limit.
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
    """The modes that an engine could run in: makes a mode's snapshot and decoder, plans its memory, chooses one.

    stage: of ZeRO.  phase, count: as in StreamedSnapshot.  own_hooks: as in FusedModel.
    Raises ValueError, with the memory plan, if a setting is "auto" and no allowed mode fits; NotImplementedError for
    adapters that cannot be merged.
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
        self.native_reasons = NativeReasons()  # shared by all decoders that the engine makes
        self.limit = rollout.memory_limit
        self.version = WeightVersion()
        self.read()
        self.in_use = self._chosen()

    def read(self) -> None:
        """Read the model: at construction, and after its modules, adapters or parameters were replaced.

        Raises NotImplementedError, with the module's name, for an adapter that cannot be merged; then nothing changes.
        """
        self.structure, self.adapted = read_structure(self.model), read_adapters(self.model)
        unmerged = self.rollout.lora == "unmerged"
        layers_per_group = self.settings.tp_gather_partition_size
        # The first arguments of every kind of snapshot.
        self.kept = (self.model, self.structure, self.adapted, layers_per_group, unmerged, self.version)
        self.version.adapters = active_adapters(self.adapted)
        self.layout: DecoderLayout | None = None
        with suppress(UnsupportedModel):
            self.layout = read_decoder(self.model)

    def weights(self, mode: Mode, group: InferenceGroup) -> tuple[Snapshot, FusedModel]:
        """A mode's snapshot and decoder. Without a decoder for the model, the snapshot is of whole weights."""
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
        """Matrices that the mode's decoder reads as one (q, k, v; gate, up). None for the CPU kernels, which read each
        matrix in its own place."""
        first = next(self.model.parameters())
        on_cpu_kernels = kernels_of(first.device) == "CPU kernels" and first.dtype in (torch.float32, torch.bfloat16)
        reads_parts = mode.tp_size == 1 and on_cpu_kernels
        if self.layout is None or self.native_by_choice or reads_parts:
            return []
        return joined_refs(self.layout)

    def fused(self, snapshot: Snapshot, fallback_reason: str = "", group: InferenceGroup | None = None) -> FusedModel:
        """The decoder over a snapshot.  fallback_reason: why the model's own layers must run; "" to use the decoder."""
        max_capture_size = self.rollout.max_num_seqs if self.settings.enable_cuda_graph else 0
        layers = [part.module for part in self.structure.layers]
        fused = FusedModel(
            self.model, layers, snapshot, max_capture_size, group, self.own_hooks, self.layout, self.native_reasons
        )
        fused.fallback_reason = fallback_reason or fused.fallback_reason
        fused.warns = fused.warns and not self.native_by_choice
        return fused

    @property
    def native_by_choice(self) -> bool:
        """Whether the settings ask for the model's own layers."""
        return self.rollout.containers == "native"

    def plan(self, rows: int, tokens: int) -> MemoryPlan:
        """The plan for `rows` sequences of `tokens` tokens each, all decoded at once."""
        needs = {mode: self._planned(mode)(rows, tokens) for mode in self._possible()}
        return MemoryPlan(needs, self.in_use, self.limit)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether the mode in use can hold `rows` sequences of `tokens` tokens at once."""
        return self.limit is None or self._planned(self.in_use)(rows, tokens).total <= self.limit

    def kv_limit(self) -> int | None:
        """Bytes that the memory limit leaves for the KV cache in the mode in use; None: there is no limit."""
        if self.limit is None:
            return None
        return max(self.limit - self._planned(self.in_use)(0, 0).total, 0)

    def _possible(self) -> list[Mode]:
        """The modes that model, world size and ZeRO stage allow, the fastest first."""
        slices = [Mode(tp_size=size) for size in self._sizes()[1:] if world_size() % size == 0]
        return [Mode(), *slices, *[Mode(streaming=True)] * (self.stage == 3)]

    def _sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the decoder's heads, or those of the model's own modules."""
        if self.layout is not None:
            return sizes_that_fit(self.layout.spec.num_heads, self.layout.spec.num_kv_heads)
        try:
            heads = [sizes_that_fit(one.heads, one.kv_heads) for one in read_tp_plan(self.model).attentions]
        except UnsupportedModel:
            return [1]
        return sorted(set.intersection(*map(set, heads))) if heads else [1]

    def _chosen(self) -> Mode:
        """The mode of the settings. For "auto", the fastest allowed mode in which `max_num_seqs` sequences of
        `max_out_tokens` tokens fit at once; if there is none, the mode in which the most fit. "auto" is a collective.

        Raises ValueError, with the memory plan, if not one sequence fits in an allowed mode.
        """
        size, pinned = self.settings.inference_tp_size, self.settings.pin_parameters
        if "auto" not in (size, pinned):
            return Mode(tp_size=size) if pinned else Mode(streaming=True)
        allowed = [mode for mode in self._possible() if mode.streaming is not pinned]
        allowed = [mode for mode in allowed if size == "auto" or mode.tp_size == size]
        if self.limit is None:
            self.limit = lowest(free_bytes(), self.device)
        num_seqs = {mode: lowest(self._num_seqs_that_fit(mode), self.device) for mode in allowed}
        self.in_use = chosen = max(allowed, key=num_seqs.get)
        tokens = self.settings.max_out_tokens
        if not num_seqs[chosen]:
            raise ValueError(
                f"hybrid_engine: nothing that inference_tp_size={size!r} and pin_parameters={pinned!r} allow fits for "
                f"a sequence of max_out_tokens={tokens}; allow more, or raise rollout.memory_limit\n"
                f"{self.plan(1, tokens)}"
            )
        log_dist(
            f"hybrid: weights are held {chosen}: {num_seqs[chosen]} of max_num_seqs={self.rollout.max_num_seqs} "
            f"sequences of max_out_tokens={tokens} fit at once in {in_mib(self.limit)} MiB",
            ranks=[0],
        )
        return chosen

    def _num_seqs_that_fit(self, mode: Mode) -> int:
        """How many sequences of `max_out_tokens` tokens fit at once, up to `max_num_seqs`."""
        need = self._planned(mode)
        counts = range(self.rollout.max_num_seqs, 0, -1)
        return next((n for n in counts if need(n, self.settings.max_out_tokens).total <= self.limit), 0)

    def _planned(self, mode: Mode) -> Callable[[int, int], Need]:
        """A function of (rows, tokens): what a mode needs for `rows` sequences of `tokens` tokens at once."""
        group = InferenceGroup(mode.tp_size, connected=False)
        snapshot, fused = self.weights(mode, group)
        if mode.tp_size > 1 and fused.fallback_reason:
            with suppress(UnsupportedModel):
                slices = planned_slices(read_tp_plan(self.model), Shard(group.size, group.index))
                snapshot = LentSlices(*self.kept, slices=slices)
        kept, beside = snapshot.planned()
        decoder = fused.planned()
        copies = 0 if decoder is None else decoder.nbytes()
        if mode.streaming:  # one layer's copies at a time
            copies, beside = 0, beside + copies // max(len(fused.layers), 1)
        at_rest = sum(map(bytes_at_rest, self.model.parameters()))
        vocabulary = getattr(text_config(self.model), "vocab_size", 0)

        def need(rows: int, tokens: int) -> Need:
            kv = kv_bytes(fused, self.rollout.kv_step, rows, tokens) if rows else 0
            kv = min(kv, self.rollout.kv_cache_bytes or kv)
            logits = logit_rows(decoder, max(rows, 1), tokens) * vocabulary * 4
            if decoder is None:
                # The head's logits are made after the layers' temporaries are freed.
                activations = max(native_activation_bytes(self.model, rows * tokens) - logits, 0)
            else:
                ranks = 1 if mode.tp_size == 1 else mode.tp_size  # a forward has the tokens of all ranks of the group
                checked = sum(checked_lengths(decoder, self.model))
                at_once = max(ranks * min(rows * tokens, PREFILL_TOKENS), checked)
                activations = decoder.activation_bytes(at_once)
            return Need(at_rest, beside, kept, copies, kv, logits, activations)

        return need


def logit_rows(decoder: object, rows: int, tokens: int) -> int:
    """Rows of logits that exist at once, temporaries counted: in a decode step (`rows` sequences) or in scoring.

    The CPU kernels sample and score without a copy; torch's operations make temporaries of the same size.
    """
    in_torch = not isinstance(decoder, CpuDecoder)
    return max((5 if in_torch else 3) * rows, (5 if in_torch else 1) * min(rows * tokens, LOGIT_ROWS))


def native_activation_bytes(model: nn.Module, tokens: int) -> int:
    """Approximate activation bytes of the model's own layers over `tokens` tokens: four times the hidden size (the
    residual stream, its norm, the attention output, a float32 copy) and three times the MLP's inner size."""
    config = text_config(model)
    hidden, inner = (getattr(config, name, 0) or 0 for name in ("hidden_size", "intermediate_size"))
    return tokens * (4 * hidden + 3 * (inner or 4 * hidden)) * next(model.parameters()).element_size()


def kv_bytes(fused: FusedModel, step: int, rows: int, tokens: int) -> int:
    """Bytes of the KV cache, fused (blocks) or native, for `rows` sequences of `tokens` tokens.

    step: tokens by which the cache grows.
    """
    if not fused.fallback_reason:
        steps = blocks_for(step)
        return -(-(1 + rows * blocks_for(tokens)) // steps) * steps * fused.block_bytes()
    config = text_config(fused.model)
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = getattr(config, "num_hidden_layers", 0)
    itemsize = next(fused.model.parameters()).element_size()
    return 2 * layers * kv_heads * head_dim * rows * (-(-tokens // step) * step) * itemsize


def text_config(model: nn.Module) -> object:
    """The Hugging Face configuration of the part that generates, or None."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def bytes_at_rest(param: torch.Tensor) -> int:
    """Bytes that this rank holds of a parameter outside inference: its partition, or all of it."""
    return param.ds_tensor.nbytes if is_partitioned(param) and param.numel() == 0 else param.nbytes


def free_bytes() -> int:
    """Free bytes of this rank's device. On CPU, the host's free memory divided by the ranks on the host.

    On a GPU, memory that torch's allocator has reserved but does not use counts as free.
    """
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    if accelerator.device_name() == "cpu":
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return free + accelerator.memory_reserved() - accelerator.memory_allocated()


def layer_by_layer(reason: str) -> str:
    """The reason text for a model whose own layers are gathered as they run."""
    return f"weights are gathered layer by layer ({reason})"


def in_mib(nbytes: int) -> str:
    """Bytes as text, in MiB with one decimal."""
    return f"{nbytes / 2**20:.1f}"
