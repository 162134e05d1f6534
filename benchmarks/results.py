"""The JSON files of all benchmarks: what is the same in each of them, and how pages read them.

A file has `benchmark`, `command`, `date` (UTC), `commit` (the last one that changed hybrid/; "+" after it: with changes
that are in no commit), `machine` (see `benchmarks.machine`; `load` is the average at the start and at the end),
`versions`, `args`, and the figures of its benchmark: every measured time. Figures that were copied from a page say so
in `source`; where single times are lost, {"median", "min", "max"} stands for them. `note` says what has changed since.
"""

import argparse
import datetime
import fnmatch
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "trl", "accelerate", "triton")


# Writing


def parser(description: str | None, output: bool = True, **numbers: int) -> argparse.ArgumentParser:
    """A parser of a benchmark's flags, with the module's docstring as its description, line by line.

    output: with `--output`, the JSON file to write.  numbers: flags of whole numbers that need no help, with defaults.
    """
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        flags.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    if output:
        flags.add_argument("--output", type=Path, help="a JSON file for every time; default: none")
    return flags


def begin(
    benchmark: str, args: argparse.Namespace, arguments: list[str] | None = None, **processes: Any
) -> dict[str, Any]:
    """The fields of every result. To be called before measuring, once threads are set and ranks have joined.

    arguments: the command line; None: that of this process.  processes: for `machine`, if other processes measure.
    """
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings.pop("output", None)
    return {
        "benchmark": benchmark,
        "command": command(benchmark, sys.argv[1:] if arguments is None else arguments),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(**processes),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "args": settings,
    }


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result that `begin` began, on rank 0, with the load average at its end; nothing if `path` is None.

    A file is replaced whole, so that a killed process leaves the one before.
    """
    if path is None or (dist.is_initialized() and dist.get_rank()):
        return
    result["machine"]["load"] = [result["machine"]["load"][0], os.getloadavg()[0]]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)


def command(benchmark: str, arguments: list[str]) -> str:
    """The command that starts `benchmark` as it was started here, without `--output`."""
    kept = list(arguments)
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    launcher = (
        f"torchrun --nproc_per_node={os.environ['WORLD_SIZE']}" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [*([f"OMP_NUM_THREADS={threads}"] if threads else []), launcher, "-m", f"benchmarks.{benchmark}"]
    return " ".join([*words, shlex.join(kept)]).strip()


def commit(folder: str = "hybrid") -> str:
    """The last commit that changed `folder`, with "+" if it has changes that are in no commit; "" without git."""
    try:
        last, status = (
            subprocess.run(["git", *words, "--", folder], cwd=ROOT, capture_output=True, text=True).stdout.strip()
            for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
        )
    except FileNotFoundError:
        return ""
    return last + "+" * bool(status)


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Reading


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float] | dict[str, float] | float) -> "Spread":
        """That of measurements, of one, or of figures whose single ones are lost: {"median", "min", "max"}."""
        if isinstance(values, dict):
            return cls(values["median"], values["min"], values["max"])
        if isinstance(values, int | float):
            return cls(values, values, values)
        return cls(statistics.median(values), min(values), max(values))

    def per(self, amount: float) -> "Spread":
        """`amount` per second, of seconds."""
        return Spread(amount / self.median, amount / self.max, amount / self.min)

    def show(self, form: str = ".2f") -> str:
        """As in the tables: median (min–max); the median alone if nothing else was measured."""
        if self.min == self.max:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.min:{form}}–{self.max:{form}})"


def quotient(base: Any, measured: Any) -> float:
    """Return the median of `base` divided by that of `measured`."""
    return Spread.of(base).median / Spread.of(measured).median


class Figures(dict):
    """An object of a JSON file. A missing key raises KeyError with the file and the way to the key."""

    def __init__(self, content: dict[str, Any], where: str):
        super().__init__({key: figures(value, f"{where}: {key}") for key, value in content.items()})
        self.where = where

    def __missing__(self, key: str) -> None:
        raise KeyError(
            f"{self.where}: no {key!r}, only {', '.join(map(repr, self))}; measure it again, or correct the file"
        )


def figures(value: Any, where: str) -> Any:
    """`value` with every object in it as Figures."""
    if isinstance(value, dict):
        return Figures(value, where)
    if isinstance(value, list):
        return [figures(each, f"{where}[{index}]") for index, each in enumerate(value)]
    return value


@dataclass(frozen=True)
class Results:
    """The results of a folder, by run: a file is named <run>-<machine's name>.json. Newest first, earlier code last."""

    runs: dict[str, list[Figures]]

    @classmethod
    def read(cls, folder: Path = RESULTS) -> "Results":
        """Read the files. Raises ValueError for a file whose name does not end with its machine's."""
        runs: dict[str, list[Figures]] = {}
        for path in sorted(folder.glob("*.json")):
            result = Figures(json.loads(path.read_text()), path.name)
            name = result["machine"]["name"]
            if not path.stem.endswith(f"-{name}"):
                raise ValueError(f"{path}: measured on {name!r}; the file must be called <run>-{name}.json")
            runs.setdefault(path.stem.removesuffix(f"-{name}"), []).append(result)
        for results in runs.values():
            results.sort(key=lambda result: ("note" not in result, result["date"]), reverse=True)
        return cls(runs)

    def of(self, run: str) -> list[Figures]:
        """The results of a run, one for each machine."""
        return self.runs.get(run, [])

    def newest(self, pattern: str) -> list[Figures]:
        """The newest result of every run whose name matches a pattern such as "trl_step*"."""
        return [results[0] for run, results in sorted(self.runs.items()) if fnmatch.fnmatchcase(run, pattern)]

    def starting(self, prefix: str) -> dict[str, list[Figures]]:
        """The results of the runs whose names start with `prefix`, by machine, in the order of the runs."""
        by_machine: dict[str, list[Figures]] = {}
        for run in sorted(self.runs):
            for result in self.runs[run] if run.startswith(prefix) else []:
                by_machine.setdefault(result["machine"]["name"], []).append(result)
        return by_machine
