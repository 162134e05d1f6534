"""What a run shows: a progress bar, tables, JSONL, trackers, sample texts. On rank 0 alone."""

import io
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import pandas as pd
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from rlhf_examples.common.files import COMPLETIONS, METRICS, SAMPLES, SETTINGS, printable, write_atomically
from rlhf_examples.common.trackers import Histogram, Metrics, check_report_to, start_trackers


class RunLog:
    """The log of a run, or of a step of one, in `directory`.

    total: iterations of the whole run.  start: those that a resumed run has behind it; what was logged after them by
        the run that was killed is dropped.
    description: on the progress bar.  bar_metrics: what stands behind it, label → name of a metric.
    print_every: iterations between tables of all metrics; the first has one too. 0 prints none.
    report_to: trackers besides the JSONL, of `trackers.PACKAGES`.
    project, run_name: what Trackio and W&B know the run by; its name is the directory's where it has none.
    settings: of the run, kept as settings.json.

    Raises ValueError on every rank where a tracker is unknown or not installed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        total: int,
        start: int = 0,
        description: str = "",
        bar_metrics: dict[str, str] | None = None,
        print_every: int = 1,
        report_to: list[str] | tuple[str, ...] = ("tensorboard",),
        project: str = "rlhf",
        run_name: str = "",
        settings: dict | None = None,
    ):
        check_report_to(report_to)
        self.leads = not dist.is_initialized() or dist.get_rank() == 0
        self.directory, self.bar_metrics, self.print_every = Path(directory), bar_metrics or {}, print_every
        if not self.leads:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_metrics(self.directory) if row["iteration"] <= start] if start else []
        write_atomically(self.directory / METRICS, "".join(as_line(row) for row in rows))
        if settings is not None:
            write_atomically(self.directory / SETTINGS, json.dumps(without_nan(settings), indent=1, default=str))
        self.not_finite: set[str] = set()  # metrics that were warned about
        name = run_name or self.directory.name
        self.trackers = start_trackers(report_to, self.directory, start, project, name, settings or {})
        completions = self._kept_completions(start)
        self.evaluated = set(completions["iteration"])  # iterations whose completions are logged
        for tracker in self.trackers:
            for row in rows if tracker.replays else []:
                tracker.add(row["iteration"], {name: value for name, value in row.items() if name != "iteration"})
            for iteration, table in completions.groupby("iteration") if tracker.replays and start else []:
                tracker.add_table(iteration, "completions", table)
        progress = tqdm if sys.stderr.isatty() else ProgressLines
        self.bar = progress(total=total, initial=start, desc=description)
        self.console = Console(width=110)

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Log an iteration's metrics: numbers, tensors of one, histograms.

        What is not finite is null in the JSONL, with a warning the first time.
        """
        if not self.leads:
            return
        metrics = {name: v if isinstance(v, Histogram | int) else float(v) for name, v in metrics.items()}
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        self._warn_of_what_is_not_finite(iteration, numbers)
        with (self.directory / METRICS).open("a") as file:
            file.write(as_line({"iteration": iteration, **metrics}))
        for tracker in self.trackers:
            tracker.add(iteration, metrics)
        shown = {label: short(numbers[name]) for label, name in self.bar_metrics.items() if name in numbers}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        if self.print_every and (iteration == 1 or iteration % self.print_every == 0):
            self._print_table(iteration, numbers)

    def _warn_of_what_is_not_finite(self, iteration: int, numbers: dict[str, float]) -> None:
        found = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        told = ", ".join(f"{name} is {value}" for name, value in found.items() if name not in self.not_finite)
        self.not_finite |= found.keys()
        if told:
            with self.room_for_output():
                warnings.warn(f"iteration {iteration}: {told}; {METRICS} has null", stacklevel=3)

    @contextmanager
    def room_for_output(self) -> Iterator[None]:
        """Inside the block others may print: the progress bar is out of the way."""
        if self.leads:
            self.bar.clear()
        yield
        if self.leads:
            self.bar.refresh()

    def note(self, text: str) -> None:
        """Print a line."""
        if self.leads:
            with self.room_for_output():
                print(text, flush=True)

    @contextmanager
    def room_for_engine(self) -> Iterator[None]:
        """Inside the block DeepSpeed's engine prints its line of the iteration before; in a file it comes where that
        iteration has a line of progress."""
        hidden = self.leads and isinstance(self.bar, ProgressLines) and self.bar.printed != self.bar.done
        with self.room_for_output(), redirect_stdout(io.StringIO()) if hidden else nullcontext():
            yield

    def _print_table(self, iteration: int, numbers: dict[str, float]) -> None:
        table = Table("metric", "value", "metric", "value", title=f"iteration {iteration}")
        cells = [(Text(name), f"{value:.4g}") for name, value in numbers.items()]
        half = math.ceil(len(cells) / 2)
        for i in range(half):
            table.add_row(*cells[i], *(cells[half + i] if half + i < len(cells) else ("", "")))
        with self.room_for_output():
            self.console.print(table)

    def _kept_completions(self, start: int) -> pd.DataFrame:
        """What the run that goes on has kept of evaluations' completions; what came after is dropped."""
        path = self.directory / COMPLETIONS
        if not start:
            path.unlink(missing_ok=True)
        kept = read_completions(self.directory)
        if len(kept):
            kept = kept[kept["iteration"] <= start]
            write_atomically(path, as_lines(kept))
        return kept

    def add_completions(self, iteration: int, columns: dict[str, list], shown: int) -> None:
        """Log an evaluation's completions: all in completions.jsonl and at the trackers, a few in the terminal. What is
        logged of an iteration already stays.

        columns: prompt, completion, and scores by name; as long as each other.  shown: of these rows.
        """
        if not self.leads or iteration in self.evaluated:
            return
        self.evaluated.add(iteration)
        found = pd.DataFrame({"iteration": iteration, **columns})
        with (self.directory / COMPLETIONS).open("a") as file:
            file.write(as_lines(found))
        for tracker in self.trackers:
            tracker.add_table(iteration, "completions", found)
        if self.print_every and shown:
            columns = {name: values[:shown] for name, values in columns.items()}
            self._print_texts(f"completions of held-out prompts, iteration {iteration}", columns)

    def show_samples(
        self,
        prompts: list[str],
        before: list[str],
        after: list[str],
        rewards_before: list[float] | None = None,
        rewards_after: list[float] | None = None,
    ) -> None:
        """Print what the policy made of the same prompts before and after training, and keep it as samples.json.

        Each list has an entry for every prompt; rewards are kept and shown where they are given.
        """
        if not self.leads:
            return
        columns = {"prompt": prompts, "before": before, "after": after}
        columns |= {"reward_before": rewards_before} if rewards_before is not None else {}
        columns |= {"reward_after": rewards_after} if rewards_after is not None else {}
        samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        write_atomically(self.directory / SAMPLES, json.dumps(without_nan(samples), indent=1))
        self._print_texts("samples", columns)

    def _print_texts(self, title: str, columns: dict[str, list]) -> None:
        table = Table(*(name.replace("_", " ") for name in columns), title=title, show_lines=True)
        for row in zip(*columns.values(), strict=True):
            # As Text: a completion may hold what rich takes for markup.
            table.add_row(*(Text(printable(v) if isinstance(v, str) else short(v)) for v in row))
        with self.room_for_output():
            self.console.print(table)

    def close(self) -> None:
        """Finish the bar and the trackers."""
        if not self.leads:
            return
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
        self.console.print(f"metrics: {self.directory / METRICS}", soft_wrap=True)


class ProgressLines:
    """What tqdm's bar says, for a log that is no terminal: a line every few seconds, and one at the end."""

    def __init__(self, total: int, initial: int, desc: str, every_s: float = 10.0):
        self.total, self.initial, self.description, self.every_s = total, initial, desc, every_s
        self.done, self.values = initial, {}
        self.began = time.monotonic()
        self.printed_at, self.printed = self.began, None  # when there was a line last, and of which iteration

    def set_postfix(self, values: dict[str, str], refresh: bool = False) -> None:
        """What stands behind the progress."""
        self.values = values

    def update(self) -> None:
        """Count an iteration."""
        self.done += 1
        if self.printed is None or time.monotonic() - self.printed_at >= self.every_s:
            self._print()

    def clear(self) -> None:
        """A line is in nobody's way."""

    refresh = clear

    def close(self) -> None:
        """Say how far it came."""
        if self.done not in (self.printed, self.initial):
            self._print()

    def _print(self) -> None:
        now = time.monotonic()
        self.printed_at, self.printed = now, self.done
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        line = tqdm.format_meter(
            self.done,
            self.total,
            now - self.began,
            prefix=self.description,
            postfix=values,
            initial=self.initial,
            bar_format="{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )
        print(line, file=sys.stderr, flush=True)


def read_metrics(directory: Path) -> list[dict[str, "float | Histogram"]]:
    """The iterations that a run has logged; null is nan. A line that a kill cut short is left out.

    Raises ValueError for any other line that is not JSON.
    """
    return read_lines(Path(directory) / METRICS)


def read_completions(directory: Path) -> pd.DataFrame:
    """The completions of a run's evaluations: iteration, prompt, completion, scores. Lines are read as
    `read_metrics` reads them."""
    rows = read_lines(Path(directory) / COMPLETIONS)
    return pd.DataFrame(rows, columns=None if rows else ["iteration", "prompt", "completion"])


def read_lines(path: Path) -> list[dict]:
    """The rows that `as_line` wrote into a file; none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [from_line(line, f"{path}:{i}") for i, line in enumerate(lines, start=1) if line.endswith("\n")]


def as_lines(table: pd.DataFrame) -> str:
    """A line of JSON for each row."""
    return "".join(as_line(row) for row in table.to_dict("records"))


def as_line(row: dict) -> str:
    """A row of the log as a line of JSON: nan and infinities are null, histograms objects."""
    return json.dumps(without_nan(row), allow_nan=False) + "\n"


def from_line(line: str, where: str) -> dict:
    """The row that `as_line` wrote.  where: of the line, for the error."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); delete the line, or the file") from error
    return {name: value_of(value) for name, value in row.items()}


def value_of(value) -> "float | Histogram":
    """A metric from what JSON has of it."""
    if isinstance(value, dict):
        return Histogram(tuple(value["edges"]), tuple(value["counts"]))
    return math.nan if value is None else value


def without_nan(value):
    """`value`, of which JSON can say everything: None where a number is not finite."""
    if isinstance(value, Histogram):
        return {"edges": list(value.edges), "counts": list(value.counts)}
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short(value: float | None) -> str:
    """A number for people: three digits that count, or all before the point."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if 999.5 <= abs(value) < math.inf else f"{value + 0.0:.3g}"  # no -0
