"""What a run measures of itself: seconds of every phase, tokens seen, and the share of a device's peak that is used."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf_examples.common.ranks import sums_over_ranks
from rlhf_examples.common.trackers import Metrics

# FLOP/s of a device in bfloat16 without sparsity, by a part of its name; the first that fits (NVIDIA's data sheets).
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}


class Phases:
    """Seconds of the phases of an iteration on this rank, one after the other."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.begun = self.last = time.perf_counter()

    def end(self, phase: str) -> None:
        """What has passed since the last phase ended belongs to this one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The block is a phase of its own; what lies before it belongs to none."""
        self.last = time.perf_counter()
        yield
        self.end(phase)

    def metrics(self) -> Metrics:
        """As time/PHASE_s."""
        return {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}


@dataclass
class TokenCount:
    """How many tokens of prompts and completions a run has learned from, on all ranks; a checkpoint holds it."""

    total: int = 0

    def add(self, own: int | Tensor) -> Metrics:
        """Count this rank's, and give the run's by TRL's name. Every rank takes part."""
        self.total += int(sums_over_ranks({"tokens": own})["tokens"])
        return {"num_tokens": self.total}

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.total = state["total"]


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of a forward and backward, without what is computed twice (PaLM, arXiv:2204.02311,
    appendix B).

    per_token: 6 for each weight that multiplies, 4 for a frozen one, which has no gradient.  per_pair: of a token and
    one that it may attend to.
    """

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: nn.Module) -> "TrainingFlops":
        """model: a Hugging Face model, under an adapter or in a value model too, whole or partitioned."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "classifier", model)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        head = getattr(inner.get_output_embeddings(), "weight", None)
        tables = {module.weight for module in inner.modules() if isinstance(module, nn.Embedding)}
        counted = [p for p in model.parameters() if p is head or p not in tables]  # a table is looked up
        config = inner.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum((6.0 if p.requires_grad else 4.0) * getattr(p, "ds_numel", p.numel()) for p in counted),
            12.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def __call__(self, lengths: Iterable[int] | Tensor) -> float:
        """Of sequences of so many tokens each."""
        lengths = torch.as_tensor(list(lengths) if not isinstance(lengths, Tensor) else lengths).double()
        return float(self.per_token * lengths.sum() + self.per_pair * (lengths**2).sum())


def flops_metrics(flops: float, seconds: float, peak_tflops: float) -> Metrics:
    """TFLOP/s of a rank, and its share of the peak (MFU) where that is known.

    flops: of all ranks.  peak_tflops: of a device; 0: what is known of this one.
    """
    per_second = flops / max(torch.distributed.get_world_size(), 1) / seconds
    peak = peak_tflops * 1e12 or device_peak()
    return {"time/tflops_per_s": per_second / 1e12, **({"time/mfu": per_second / peak} if peak else {})}


def device_peak() -> float:
    """This device's FLOP/s in bfloat16; 0 where nothing is known of it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)


def data_source(source: str, data_path: list[str]) -> str:
    """The set of `data_path` that a record's `source`, a file or a hub set's split, is of."""
    return max((name for name in data_path if source.startswith(name.partition("@")[0])), key=len, default=source)


def scores_by_source(rows: list[dict], scores: Tensor, data_path: list[str]) -> Metrics:
    """The mean score of each set, where several are mixed, of which a completion was scored.

    rows: prompts of the completions, of this rank.  scores [rows], NaN where there is none. Every rank takes part.
    """
    if len(data_path) < 2:
        return {}
    names = [data_source(row["source"], data_path) for row in rows]
    known = dict.fromkeys((f"{kind} {name}" for name in data_path for kind in ("sum", "count")), 0.0)
    for name, score in zip(names, scores.tolist(), strict=True):
        if not math.isnan(score):
            known[f"sum {name}"] += score
            known[f"count {name}"] += 1
    known = sums_over_ranks(known)
    return {
        f"rewards_by_source/{name}": known[f"sum {name}"] / known[f"count {name}"]
        for name in data_path
        if known[f"count {name}"]
    }
