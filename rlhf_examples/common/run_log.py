"""The output of a run: progress bar, tables, JSONL, trackers, sample texts. On rank 0 only."""

import json
import math
import sys
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

import hybrid
from rlhf_examples.common.choices import check_report_to
from rlhf_examples.common.files import (
    COMPLETIONS,
    ENGINE_LOG,
    METRICS,
    SAMPLES,
    SETTINGS,
    append,
    printable,
    write_atomically,
)
from rlhf_examples.common.trackers import Histogram, Metrics, Tracker

EVERY_S = 10.0  # between lines of progress, without a terminal
Transcript = str | list[dict[str, str]]  # a text, or a conversation's turns, each with its "role" and "text"


class RunLog:
    """The log of a run, or of a step of one, in `directory`.

    total: iterations of the whole run.
    start: iterations that a resumed run has already done; later rows, logged before the run was killed, are dropped.
    description: shown on the progress bar.  bar_metrics: shown after it, label → name of a metric.
    print_every: iterations between tables of all metrics; the first iteration has one too; 0 prints none.
    report_to: trackers in addition to the JSONL, from `choices.TRACKER_PACKAGES`.
    project, run_name: the run's names at Trackio and W&B; run_name defaults to the directory's name.
    settings: of the run, saved as settings.json and sent to trackers, without secrets.
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
        self.description, self.held_out = description, ""
        self.directory, self.bar_metrics, self.print_every = Path(directory), bar_metrics or {}, print_every
        if not self.is_main_process:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_metrics(self.directory) if row["iteration"] <= start] if start else []
        write_atomically(self.directory / METRICS, "".join(to_json_line(row) for row in rows))
        settings = hybrid.redacted(settings)
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
        """Log an iteration's metrics: numbers, tensors with one element, histograms. Iteration 0 is before training.

        Values that are not finite become null in the JSONL, with a warning the first time.
        """
        if not self.is_main_process:
            return
        metrics = {name: v if isinstance(v, Histogram | int) else float(v) for name, v in metrics.items()}
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        self._warn_not_finite(iteration, numbers)
        append(self.directory / METRICS, to_json_line({"iteration": iteration, **metrics}))
        for tracker in self.trackers:
            tracker.add(iteration, metrics)
        shown = {label: format_number(numbers[name]) for label, name in self.bar_metrics.items() if name in numbers}
        self.bar.set_postfix(shown, refresh=False)
        if iteration:
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
        """Inside the block the engine prints DeepSpeed's line about the previous iteration, into a log file."""
        with engine_output_in(self.directory) if self.is_main_process else nullcontext():
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
        append(self.directory / COMPLETIONS, to_json_lines(table))
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

    def set_held_out(self, before: Metrics, after: Metrics) -> None:
        """Set the evaluations of held-out records before and after training, which `close` prints with their standard
        errors.
        """
        names = [name for name in after if not name.endswith("_stderr")]
        self.held_out = "; ".join(f"{name} {with_error(name, before)} → {with_error(name, after)}" for name in names)

    def close(self) -> None:
        """Close the progress bar and the trackers, and print the evaluations before and after training."""
        if not self.is_main_process:
            return
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
        self.console.print(f"metrics: {self.directory / METRICS}", soft_wrap=True)
        if self.held_out:
            self.console.print(Text(f"{self.description}, held out, before → after: {self.held_out}"), soft_wrap=True)


@contextmanager
def engine_output_in(directory: Path) -> Iterator[None]:
    """Inside the block what is printed goes to the directory's log file of the engine."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ENGINE_LOG).open("a") as file, redirect_stdout(file):
        yield


class ProgressLines(tqdm):
    """A progress bar as lines, for output that is no terminal: one every few seconds, and one at the end."""

    monitor_interval = 0  # no thread that redraws it

    def __init__(self, **options: Any):
        form = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        self.printed: int | None = None  # the iteration of the last line
        super().__init__(**options, delay=math.inf, bar_format=form)  # never drawn by tqdm itself
        self.printed_at = self._time()

    def update(self, n: float | None = 1) -> None:
        """Count an iteration."""
        self.n += n or 0
        if self.printed is None or self._time() - self.printed_at >= EVERY_S:
            self._print()

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to clear: lines do not interfere with other output."""

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to draw again."""

    def close(self) -> None:
        """Print the last iteration, unless it is printed already."""
        if self.n not in (self.printed, self.initial):
            self._print()
        self.disable = True

    def _print(self) -> None:
        self.printed_at, self.printed = self._time(), self.n
        print(self, file=sys.stderr, flush=True)


def plain_text(text: Transcript) -> str:
    """A text as it is; a conversation as a line for each turn, which begins with its role."""
    return text if isinstance(text, str) else "\n".join(f"{turn['role']}: {turn['text']}" for turn in text)


def with_plain_texts(table: pd.DataFrame) -> pd.DataFrame:
    """A table of completions with `plain_text` in the place of conversations."""
    return table.assign(completion=[plain_text(text) for text in table["completion"]])


def read_metrics(directory: Path) -> list[Metrics]:
    """The iterations that a run has logged; null becomes NaN. A line that a kill has truncated is left out.

    Raises ValueError for any other line that is not what `to_json_line` writes.
    """
    return read_lines(Path(directory) / METRICS)


def read_completions(directory: Path) -> pd.DataFrame:
    """The completions of a run's evaluations: iteration, prompt, completion, scores. Lines are read as in
    `read_metrics`.
    """
    rows = read_lines(Path(directory) / COMPLETIONS, ("prompt", "completion"))
    return pd.DataFrame(rows, columns=None if rows else ["iteration", "prompt", "completion"])


def read_lines(path: Path, texts: tuple[str, ...] = ()) -> list[dict]:
    """The rows that `to_json_line` wrote into a file; empty without a file.  texts: columns that are a Transcript.

    Raises ValueError for any other content.
    """
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [parse_json_line(line, f"{path}:{i}", texts) for i, line in enumerate(lines, start=1) if line.endswith("\n")]


def to_json_lines(table: pd.DataFrame) -> str:
    """The table as JSON lines, one for each row."""
    return "".join(to_json_line(row) for row in table.to_dict("records"))


def to_json_line(row: dict) -> str:
    """A row of the log as a line of JSON: NaN and infinities become null, histograms objects."""
    return json.dumps(to_json_value(row), allow_nan=False) + "\n"


def parse_json_line(line: str, where: str, texts: tuple[str, ...] = ()) -> dict:
    """The row in a line of `to_json_line`.  where: file and line, for the error.  texts: as in `read_lines`.

    Raises ValueError for any other line.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); delete this line or the file") from error
    iteration = row.get("iteration") if isinstance(row, dict) else None
    if type(iteration) is not int or not 0 <= iteration < 2**53:
        raise ValueError(f"{where} is no JSON object with an iteration, 0 or greater; delete this line or the file")
    row |= {name: from_json_value(value) for name, value in row.items() if name not in texts}
    texts_wrong = [name for name in texts if not isinstance(row.get(name), str | list)]
    others_wrong = [name for name in row if name not in texts and not isinstance(row[name], int | float | Histogram)]
    for name in (*texts_wrong, *others_wrong):
        allowed = "a text or a conversation" if name in texts else "a number, null or a histogram"
        given = str(row.get(name))[:80]
        raise ValueError(f"{where}: {name} is {given!r}; it must be {allowed}; delete this line or the file")
    return row


def from_json_value(value: Any) -> Any:
    """A metric from its JSON value: NaN for null and what is beyond float64; anything but a metric as it is."""
    if isinstance(value, dict) and value.keys() == {"edges", "counts"}:
        edges, counts = (each if isinstance(each, list) else [] for each in (value["edges"], value["counts"]))
        numbers = all(isinstance(number, int | float) and abs(number) < math.inf for number in edges + counts)
        return Histogram(tuple(edges), tuple(counts)) if numbers and len(edges) == len(counts) + 1 else value
    if value is None or (isinstance(value, int | float) and abs(value) > sys.float_info.max):
        return math.nan
    return value


def to_json_value(value: Any) -> Any:
    """`value` as JSON can express it: None for numbers that are not finite, objects for histograms."""
    if isinstance(value, Histogram):
        return {"edges": list(value.edges), "counts": list(value.counts)}
    if isinstance(value, dict):
        return {key: to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [to_json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_error(name: str, metrics: Metrics) -> str:
    """A metric for display, with its standard error if there is one."""
    error = metrics.get(f"{name}_stderr")
    return format_number(metrics.get(name)) + ("" if error is None else f" ± {format_number(error)}")


def format_number(value: float | None) -> str:
    """A number for display: three significant digits, or all digits before the point."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value + 0.0:.3g}"  # no -0
