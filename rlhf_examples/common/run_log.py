"""The output of a run: progress bar, tables, JSONL, trackers, sample texts. On rank 0 only."""

import io
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from rlhf_examples.common.files import COMPLETIONS, METRICS, SAMPLES, SETTINGS, printable, write_atomically
from rlhf_examples.common.trackers import Histogram, Metrics, Tracker, check_report_to

Transcript = str | list[dict[str, str]]  # a text, or a conversation's turns, each with its "role" and "text"


class RunLog:
    """The log of a run, or of a step of one, in `directory`.

    total: iterations of the whole run.
    start: iterations that a resumed run has already done; later rows, logged before the run was killed, are dropped.
    description: shown on the progress bar.  bar_metrics: shown after it, label → name of a metric.
    print_every: iterations between tables of all metrics; the first iteration has one too; 0 prints none.
    report_to: trackers in addition to the JSONL, from `trackers.PACKAGES`.
    project, run_name: the run's names at Trackio and W&B; run_name defaults to the directory's name.
    settings: of the run, saved as settings.json.
    Raises ValueError on every rank if a tracker is unknown or not installed.
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
        self.is_main_process = not dist.is_initialized() or dist.get_rank() == 0
        self.directory, self.bar_metrics, self.print_every = Path(directory), bar_metrics or {}, print_every
        if not self.is_main_process:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_metrics(self.directory) if row["iteration"] <= start] if start else []
        write_atomically(self.directory / METRICS, "".join(to_json_line(row) for row in rows))
        if settings is not None:
            write_atomically(self.directory / SETTINGS, json.dumps(to_json_value(settings), indent=1, default=str))
        self.not_finite: set[str] = set()  # metrics with a warning so far
        options = (self.directory, start, project, run_name or self.directory.name, settings or {})
        self.trackers = [Tracker(tracker_name, *options) for tracker_name in report_to]
        completions = self._load_completions(start)
        self.evaluated = set(completions["iteration"])  # iterations whose completions are logged
        for tracker in self.trackers:
            for row in rows if tracker.replays else []:
                tracker.add(row["iteration"], {name: value for name, value in row.items() if name != "iteration"})
            for iteration, table in completions.groupby("iteration") if tracker.replays and start else []:
                tracker.add_table(iteration, "completions", with_plain_texts(table))
        progress = tqdm if sys.stderr.isatty() else ProgressLines
        self.bar = progress(total=total, initial=start, desc=description)
        self.console = Console(width=110)

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Log an iteration's metrics: numbers, tensors with one element, histograms.

        Values that are not finite become null in the JSONL, with a warning the first time.
        """
        if not self.is_main_process:
            return
        metrics = {name: v if isinstance(v, Histogram | int) else float(v) for name, v in metrics.items()}
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        self._warn_not_finite(iteration, numbers)
        with (self.directory / METRICS).open("a") as file:
            file.write(to_json_line({"iteration": iteration, **metrics}))
        for tracker in self.trackers:
            tracker.add(iteration, metrics)
        shown = {label: format_number(numbers[name]) for label, name in self.bar_metrics.items() if name in numbers}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        if self.print_every and (iteration == 1 or iteration % self.print_every == 0):
            self._print_table(iteration, numbers)

    def _warn_not_finite(self, iteration: int, numbers: dict[str, float]) -> None:
        not_finite = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        new = ", ".join(f"{name} is {value}" for name, value in not_finite.items() if name not in self.not_finite)
        self.not_finite |= not_finite.keys()
        if new:
            with self.bar_cleared():
                warnings.warn(f"iteration {iteration}: {new}; logged as null in {METRICS}", stacklevel=3)

    @contextmanager
    def bar_cleared(self) -> Iterator[None]:
        """Inside the block other code may print: the progress bar is cleared."""
        if self.is_main_process:
            self.bar.clear()
        yield
        if self.is_main_process:
            self.bar.refresh()

    def note(self, text: str) -> None:
        """Print a line."""
        if self.is_main_process:
            with self.bar_cleared():
                print(text, flush=True)

    @contextmanager
    def engine_output(self) -> Iterator[None]:
        """Inside the block DeepSpeed's engine prints its line about the previous iteration; in a log file only if
        that iteration has a progress line.
        """
        hidden = self.is_main_process and isinstance(self.bar, ProgressLines) and self.bar.printed != self.bar.done
        with self.bar_cleared(), redirect_stdout(io.StringIO()) if hidden else nullcontext():
            yield

    def _print_table(self, iteration: int, numbers: dict[str, float]) -> None:
        table = Table("metric", "value", "metric", "value", title=f"iteration {iteration}")
        cells = [(Text(name), f"{value:.4g}") for name, value in numbers.items()]
        half = math.ceil(len(cells) / 2)
        for i in range(half):
            table.add_row(*cells[i], *(cells[half + i] if half + i < len(cells) else ("", "")))
        with self.bar_cleared():
            self.console.print(table)

    def _load_completions(self, start: int) -> pd.DataFrame:
        """The logged completions of the iterations that a resumed run has done; later ones are dropped from the
        file.
        """
        path = self.directory / COMPLETIONS
        if not start:
            path.unlink(missing_ok=True)
        kept = read_completions(self.directory)
        if len(kept):
            kept = kept[kept["iteration"] <= start]
            write_atomically(path, to_json_lines(kept))
        return kept

    def add_completions(self, iteration: int, columns: dict[str, list], shown: int) -> None:
        """Log an evaluation's completions: all in completions.jsonl and at the trackers, `shown` of them in the
        terminal. An iteration that is already logged is skipped.

        columns: prompt, completion (a Transcript each), and scores by name, lists of equal length.
        """
        if not self.is_main_process or iteration in self.evaluated:
            return
        self.evaluated.add(iteration)
        table = pd.DataFrame({"iteration": iteration, **columns})
        with (self.directory / COMPLETIONS).open("a") as file:
            file.write(to_json_lines(table))
        for tracker in self.trackers:
            tracker.add_table(iteration, "completions", with_plain_texts(table))
        if self.print_every and shown:
            columns = {name: values[:shown] for name, values in columns.items()}
            self._print_texts(f"completions of held-out prompts, iteration {iteration}", columns)

    def show_samples(
        self,
        prompts: list[str],
        before: list[Transcript],
        after: list[Transcript],
        rewards_before: list[float] | None = None,
        rewards_after: list[float] | None = None,
    ) -> None:
        """Print the policy's completions of the same prompts before and after training, and save them as samples.json.

        Each list has an entry for every prompt; rewards are saved and shown if given.
        """
        if not self.is_main_process:
            return
        columns: dict[str, list] = {"prompt": prompts, "before": before, "after": after}
        columns |= {"reward_before": rewards_before} if rewards_before is not None else {}
        columns |= {"reward_after": rewards_after} if rewards_after is not None else {}
        samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        write_atomically(self.directory / SAMPLES, json.dumps(to_json_value(samples), indent=1))
        self._print_texts("samples", columns)

    def _print_texts(self, title: str, columns: dict[str, list]) -> None:
        table = Table(*(name.replace("_", " ") for name in columns), title=title, show_lines=True)
        for row in zip(*columns.values(), strict=True):
            # As Text, because rich would read "[...]" in a completion as markup.
            table.add_row(
                *(Text(printable(plain_text(v)) if isinstance(v, str | list) else format_number(v)) for v in row)
            )
        with self.bar_cleared():
            self.console.print(table)

    def close(self) -> None:
        """Close the progress bar and the trackers."""
        if not self.is_main_process:
            return
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
        self.console.print(f"metrics: {self.directory / METRICS}", soft_wrap=True)


class ProgressLines:
    """A progress bar as lines, for output that is no terminal: one every few seconds, and one at the end."""

    def __init__(self, total: int, initial: int, desc: str, every_s: float = 10.0):
        self.total, self.initial, self.description, self.every_s = total, initial, desc, every_s
        self.done = initial
        self.values: dict[str, str] = {}
        self.began = time.monotonic()
        self.printed_at = self.began  # time of the last line
        self.printed: int | None = None  # its iteration

    def set_postfix(self, values: dict[str, str], refresh: bool = False) -> None:
        """Set the values that are printed after the progress."""
        self.values = values

    def update(self) -> None:
        """Count an iteration."""
        self.done += 1
        if self.printed is None or time.monotonic() - self.printed_at >= self.every_s:
            self._print()

    def clear(self) -> None:
        """Nothing to clear: lines do not interfere with other output."""

    refresh = clear

    def close(self) -> None:
        """Print the last iteration, unless it is printed already."""
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


def plain_text(text: Transcript) -> str:
    """A text as it is; a conversation as a line for each turn, which begins with its role."""
    return text if isinstance(text, str) else "\n".join(f"{turn['role']}: {turn['text']}" for turn in text)


def with_plain_texts(table: pd.DataFrame) -> pd.DataFrame:
    """A table of completions with `plain_text` in the place of conversations."""
    return table.assign(completion=[plain_text(text) for text in table["completion"]])


def read_metrics(directory: Path) -> list[Metrics]:
    """The iterations that a run has logged; null becomes NaN. A line that a kill has truncated is left out.

    Raises ValueError for any other line that is not JSON.
    """
    return read_lines(Path(directory) / METRICS)


def read_completions(directory: Path) -> pd.DataFrame:
    """The completions of a run's evaluations: iteration, prompt, completion, scores. Lines are read as in
    `read_metrics`.
    """
    rows = read_lines(Path(directory) / COMPLETIONS)
    return pd.DataFrame(rows, columns=None if rows else ["iteration", "prompt", "completion"])


def read_lines(path: Path) -> list[dict]:
    """The rows that `to_json_line` wrote into a file; empty without a file. Raises ValueError for invalid JSON."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [parse_json_line(line, f"{path}:{i}") for i, line in enumerate(lines, start=1) if line.endswith("\n")]


def to_json_lines(table: pd.DataFrame) -> str:
    """The table as JSON lines, one for each row."""
    return "".join(to_json_line(row) for row in table.to_dict("records"))


def to_json_line(row: dict) -> str:
    """A row of the log as a line of JSON: NaN and infinities become null, histograms objects."""
    return json.dumps(to_json_value(row), allow_nan=False) + "\n"


def parse_json_line(line: str, where: str) -> dict:
    """The row in a line of `to_json_line`.  where: file and line, for the error. Raises ValueError for invalid JSON."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); delete this line or the file") from error
    return {name: from_json_value(value) for name, value in row.items()}


def from_json_value(value: Any) -> "float | Histogram":
    """A metric from its JSON value."""
    if isinstance(value, dict):
        return Histogram(tuple(value["edges"]), tuple(value["counts"]))
    return math.nan if value is None else value


def to_json_value(value: Any) -> Any:
    """`value` as JSON can express it: None for numbers that are not finite, objects for histograms."""
    if isinstance(value, Histogram):
        return {"edges": list(value.edges), "counts": list(value.counts)}
    if isinstance(value, dict):
        return {key: to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [to_json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_number(value: float | None) -> str:
    """A number for display: three significant digits, or all digits before the point."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if 999.5 <= abs(value) < math.inf else f"{value + 0.0:.3g}"  # no -0
