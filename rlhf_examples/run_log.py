"""What a run shows: a progress bar, tables, JSONL, TensorBoard, curves, sample texts. On rank 0 alone."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

METRICS = "metrics.jsonl"
CURVES = (
    ("objective/scores", "score"),
    ("objective/kl", "KL to the reference [nats a sequence]"),
    ("completions/mean_length", "completion length [tokens]"),
    ("objective/entropy", "entropy [nats a sequence]"),
    ("loss/policy_avg", "policy loss"),
    ("loss/value_avg", "value loss"),
)


class RunLog:
    """The log of a run in `directory`.  start: iterations that a resumed run has behind it."""

    def __init__(self, directory: Path, start: int, total: int, print_every: int):
        self.leads = dist.get_rank() == 0
        self.directory, self.print_every = directory, print_every
        if not self.leads:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.rows = [row for row in read_metrics(directory) if row["iteration"] <= start] if start else []
        (directory / METRICS).write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)
        self.bar = tqdm(total=total, initial=start, desc="PPO")
        self.console = Console(width=110)

    def add(self, iteration: int, metrics: dict[str, float]) -> None:
        """Log an iteration's metrics."""
        if not self.leads:
            return
        self.rows.append({"iteration": iteration, **metrics})
        with (self.directory / METRICS).open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, iteration)
        self.bar.set_postfix(
            score=f"{metrics['objective/scores']:.2f}",
            kl=f"{metrics['objective/kl']:.2f}",
            tokens_s=f"{metrics['time/tokens_per_s']:.0f}",
        )
        self.bar.update()
        if iteration == 1 or iteration % self.print_every == 0:
            self._print_table(iteration, metrics)

    @contextmanager
    def room_for_output(self) -> Iterator[None]:
        """Inside the block others may print: the progress bar is out of the way."""
        if self.leads:
            self.bar.clear()
        yield
        if self.leads:
            self.bar.refresh()

    def _print_table(self, iteration: int, metrics: dict[str, float]) -> None:
        table = Table("metric", "value", "metric", "value", title=f"iteration {iteration}")
        cells = [(name, f"{value:.4g}") for name, value in metrics.items()]
        half = math.ceil(len(cells) / 2)
        for i in range(half):
            table.add_row(*cells[i], *(cells[half + i] if half + i < len(cells) else ("", "")))
        with self.room_for_output():
            self.console.print(table)

    def show_samples(self, prompts: list[str], before: list[str], after: list[str]) -> None:
        """Print what the policy made of the same prompts before and after training, and keep it as samples.json."""
        if not self.leads:
            return
        table = Table("prompt", "before", "after", title="samples", show_lines=True)
        for row in zip(prompts, before, after, strict=True):
            table.add_row(*row)
        self.console.print(table)
        samples = [{"prompt": p, "before": b, "after": a} for p, b, a in zip(prompts, before, after, strict=True)]
        (self.directory / "samples.json").write_text(json.dumps(samples, indent=1))

    def close(self) -> None:
        """Finish the files and draw the curves."""
        if not self.leads:
            return
        self.bar.close()
        self.board.close()
        draw_curves(self.rows, self.directory / "curves.png")
        self.console.print(f"metrics: {self.directory / METRICS}   curves: {self.directory / 'curves.png'}")


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The iterations that a run has logged; a line that a kill cut short is left out."""
    path = directory / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_curves(rows: list[dict[str, float]], path: Path) -> None:
    """Draw CURVES over the iterations into a PNG."""
    import matplotlib  # optional, and slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (name, label) in zip(axes.flat, CURVES, strict=True):
        axis.plot([row["iteration"] for row in rows], [row[name] for row in rows], marker=".", color="tab:blue")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
