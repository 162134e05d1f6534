"""Measurements of a run: seconds of every phase, tokens seen, model FLOPs utilisation, scores by data set."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_examples.common.ranks import sums_over_ranks
from rlhf_examples.common.trackers import Metrics

# Dense bfloat16 FLOP/s of a device by a part of its name; the first match counts (NVIDIA's data sheets).
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}


class Phases:
    """Times the consecutive phases of an iteration on this rank, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = self.last = time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase: the time since the last phase ended is added to it."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time the block as a phase; the time before it is not counted."""
        self.last = time.perf_counter()
        yield
        self.end(phase)

    def metrics(self) -> Metrics:
        """The seconds as metrics named time/PHASE_s."""
        return {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}


@dataclass
class TokenCount:
    """Tokens of prompts and completions that a run has learned from, on all ranks; saved in checkpoints."""

    total: int = 0

    def add(self, tokens: int | Tensor) -> Metrics:
        """Count this rank's tokens; returns the run's total under TRL's name. Every rank takes part."""
        self.total += int(sums_over_ranks({"tokens": tokens})["tokens"])
        return {"num_tokens": self.total}

    def state_dict(self) -> dict[str, int]:
        """The state for a checkpoint."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.total = state["total"]


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of a forward and backward, without recomputation (PaLM, arXiv:2204.02311, appendix B).

    per_token: 6 for each weight of a matrix product, 4 for a frozen one, which needs no weight gradient.
    per_pair: for each pair of a query and a key token.
    """

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: nn.Module) -> "TrainingFlops":
        """model: a Hugging Face model, possibly with an adapter or in a value model, whole or partitioned."""
        base_model = model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "classifier", model)
        base_model = base_model.get_base_model() if hasattr(base_model, "get_base_model") else base_model
        head = getattr(base_model.get_output_embeddings(), "weight", None)
        embeddings = {module.weight for module in base_model.modules() if isinstance(module, nn.Embedding)}
        counted = [p for p in model.parameters() if p is head or p not in embeddings]  # a look-up costs no FLOPs
        config = base_model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum((6.0 if p.requires_grad else 4.0) * getattr(p, "ds_numel", p.numel()) for p in counted),
            12.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def __call__(self, lengths: Iterable[int] | Tensor) -> float:
        """The operations for sequences of the given lengths in tokens."""
        lengths = torch.as_tensor(list(lengths) if not isinstance(lengths, Tensor) else lengths).double()
        return float(self.per_token * lengths.sum() + self.per_pair * (lengths**2).sum())


def flops_metrics(flops: float, seconds: float, peak_tflops: float) -> Metrics:
    """TFLOP/s of a rank, and their share of the device's peak (MFU) if that is known.

    flops: of all ranks.  peak_tflops: of a device; 0: look the device up in PEAKS.
    """
    per_second = flops / max(torch.distributed.get_world_size(), 1) / seconds
    peak = peak_tflops * 1e12 or device_peak()
    return {"time/tflops_per_s": per_second / 1e12, **({"time/mfu": per_second / peak} if peak else {})}


def device_peak() -> float:
    """This device's FLOP/s in bfloat16; 0 if it is not in PEAKS."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)


def data_source(source: str, data_path: list[str]) -> str:
    """The entry of `data_path` that a record's `source` (a file, or a hub set's split) belongs to."""
    return max((name for name in data_path if source.startswith(name.partition("@")[0])), key=len, default=source)


def scores_by_source(rows: list[dict], scores: Tensor, data_path: list[str]) -> Metrics:
    """The mean score of each entry of `data_path`, if there are several; entries without a scored completion are left
    out.

    rows: this rank's prompts, one for each completion.  scores float32 [rows], NaN where not scored. Every rank takes
        part.
    """
    if len(data_path) < 2:
        return {}
    names = [data_source(row["source"], data_path) for row in rows]
    sums: dict[str, Any] = dict.fromkeys((f"{kind} {name}" for name in data_path for kind in ("sum", "count")), 0.0)
    for name, score in zip(names, scores.tolist(), strict=True):
        if not math.isnan(score):
            sums[f"sum {name}"] += score
            sums[f"count {name}"] += 1
    sums = sums_over_ranks(sums)
    return {
        f"rewards_by_source/{name}": sums[f"sum {name}"] / sums[f"count {name}"]
        for name in data_path
        if sums[f"count {name}"]
    }
