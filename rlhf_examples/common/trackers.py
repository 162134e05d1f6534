"""Sends a run's metrics to TensorBoard, Trackio and Weights & Biases, through accelerate's trackers."""

import html
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker

from rlhf_examples.common.choices import TRACKER_PACKAGES

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter  # optional

# Absolute differences of logprobs: from none, over rounding in float32 and bfloat16, to those of another policy.
LOGP_DIFFERENCE_EDGES = (0.0, *(10 ** (exponent / 2) for exponent in range(-16, 3)))


@dataclass(frozen=True)
class Histogram:
    """The number of values in each bin.  edges [bins + 1], ascending; counts [bins]."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        edges: tuple[float, ...],
        over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
    ) -> "Histogram":
        """Count `values` of any shape; values outside count in the first and last bin, NaN in none.

        over_ranks: sums a float64 tensor [bins] over all ranks; called also if this rank has no values.
        """
        bounds = torch.tensor(edges, dtype=torch.float64, device=values.device)
        kept = values.detach().double()[~values.isnan()].clamp(bounds[0], bounds[-1])
        bins = (torch.bucketize(kept, bounds, right=True) - 1).clamp(max=len(edges) - 2)
        counts = torch.bincount(bins, minlength=len(edges) - 1).double()
        return cls(tuple(edges), tuple(over_ranks(counts).tolist()))


Metrics = dict[str, Any]  # by name: a float, or a Histogram


class Tracker:
    """A run at one of accelerate's trackers.

    A resumed run continues TensorBoard's files, in which entries after `start` are hidden. At Trackio and Weights &
    Biases a resumed run is a new one that logs the kept iterations again: neither can remove entries.
    """

    def __init__(self, name: str, directory: Path, start: int, project: str, run_name: str, settings: dict):
        PartialState()  # some trackers start only with one (docs/upstream.md)
        self.name = name
        if name == "tensorboard":
            self.tracker = TensorBoardTracker("tensorboard", directory, purge_step=start + 1)
        else:
            where = {"dir": str(directory)} if name == "wandb" else {}
            run_name = f"{run_name}-from-{start + 1}" if start else run_name
            self.tracker = LOGGER_TYPE_TO_CLASS[name](project, name=run_name, config=settings, **where)
        self.replays = name != "tensorboard"  # the files hold the iterations before `start` already
        self.tracker.start()

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Log an iteration's metrics."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        histograms = {name: value for name, value in metrics.items() if isinstance(value, Histogram)}
        if self.name == "tensorboard":
            for name, value in histograms.items():
                add_histogram(self.tracker.writer, name, value, iteration)
        else:
            package = importlib.import_module(TRACKER_PACKAGES[self.name])
            for name, value in histograms.items():
                numbers[name] = package.Histogram(np_histogram=(list(value.counts), list(value.edges)))
        self.tracker.log(numbers, step=iteration)

    def add_table(self, iteration: int, name: str, table: pd.DataFrame) -> None:
        """Log a table; in TensorBoard as text."""
        if self.name == "tensorboard":
            self.tracker.log({name: markdown(table)}, step=iteration)
        elif self.name == "wandb":
            self.tracker.log_table(name, dataframe=table, step=iteration)
        else:
            package = importlib.import_module(TRACKER_PACKAGES[self.name])
            self.tracker.log({name: package.Table(dataframe=table)}, step=iteration)

    def close(self) -> None:
        """End the run at the tracker."""
        self.tracker.finish()


def add_histogram(writer: "SummaryWriter", name: str, histogram: Histogram, iteration: int) -> None:
    """Write the counts themselves to TensorBoard's files; its own `add_histogram` would count values."""
    middles = [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    weighted = list(zip(middles, histogram.counts, strict=True))
    writer.add_histogram_raw(
        name,
        min=histogram.edges[0],
        max=histogram.edges[-1],
        num=sum(histogram.counts),
        sum=sum(value * count for value, count in weighted),
        sum_squares=sum(value**2 * count for value, count in weighted),
        bucket_limits=histogram.edges[1:],
        bucket_counts=histogram.counts,
        global_step=iteration,
    )


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown; the cells' text is escaped."""

    def cell(value: object) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
        return text.replace("|", "&#124;").replace("\n", "<br>")

    rows = [list(table.columns), ["---"] * len(table.columns), *table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows)
