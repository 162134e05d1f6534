"""Count the files, functions and record types of `hybrid` that a plain rollout passes through.

    python -m benchmarks.overhead --trip
    python -m benchmarks.overhead --trip --verbose

The rollout has two prompts, one greedy and one sampled call, on one rank with the CPU decoder, after a first call of
each that is not counted. Lambdas and comprehensions count as part of their functions; a resumed generator counts as one
more call.
"""

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hybrid

ROOT = Path(hybrid.__file__).parent
STAGES, LAYERS = (0, 3), (4, 16)
PROMPTS, NEW_TOKENS = 2, 8


@dataclasses.dataclass
class CallPath:
    """Calls of `hybrid` while a function ran.

    functions: calls by (file, qualified name), in the order of the first calls; files are relative to `hybrid/`.
    records: instances created by the name of their dataclass or named tuple, in the order of the first ones.
    """

    functions: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    records: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def files(self) -> dict[str, Counter[str]]:
        """The calls by function for each file, files and functions in the order of their first calls."""
        files: dict[str, Counter[str]] = {}
        for (file, function), calls in self.functions.items():
            files.setdefault(file, Counter())[function] = calls
        return files

    @property
    def calls(self) -> int:
        """The number of calls."""
        return self.functions.total()

    def lines(self, verbose: bool) -> Iterator[str]:
        """The report: totals, and with `verbose` the names with their calls, by file."""
        yield f"{len(self.files)} files, {len(self.functions)} functions, {len(self.records)} record types"
        if not verbose:
            return
        yield "record types: " + ", ".join(f"{name} ×{number}" for name, number in self.records.items())
        for file, functions in self.files.items():
            yield f"{file}: {len(functions)} functions, {functions.total()} calls"
            yield from (f"    {calls:6} {function}" for function, calls in functions.items())


def record_constructors() -> dict[int, str]:
    """The names of all dataclasses and named tuples that loaded modules of `hybrid` define, by the ids of their
    constructors' code: the code of classes with the same fields is equal."""
    constructors = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "hybrid":
            continue
        for record in vars(module).values():
            if not isinstance(record, type) or record.__module__ != module_name:
                continue
            name = f"{record.__name__} ({module_name.removeprefix('hybrid.')})"
            if dataclasses.is_dataclass(record) and hasattr(record.__init__, "__code__"):
                constructors[id(record.__init__.__code__)] = name
            elif issubclass(record, tuple) and hasattr(record, "_make"):
                constructors |= {id(make.__code__): name for make in (record.__new__, record._make.__func__)}
    return constructors


def count_calls(work: Callable[[], Any]) -> CallPath:
    """The calls of `hybrid` while `work` runs in this thread."""
    path, records, prefix = CallPath(), record_constructors(), str(ROOT) + os.sep

    def profiler(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if id(code) in records:
            path.records[records[id(code)]] += 1
        elif code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            path.functions[code.co_filename.removeprefix(prefix), code.co_qualname] += 1

    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(None)
    return path


def rollouts(engine: hybrid.HybridEngine) -> Callable[[], None]:
    """A plain rollout of two prompts, once greedy and once sampled."""
    ids = torch.arange(1, 1 + PROMPTS * 6).reshape(PROMPTS, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    sizes = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    requests = [hybrid.SamplingParams(temperature=temperature, seed=0, **sizes) for temperature in (0.0, 1.0)]

    def run() -> None:
        for request in requests:
            engine.rollout(ids, mask, request)

    return run


def report(make_engine: Callable[[int, int], hybrid.HybridEngine], verbose: bool) -> Iterator[str]:
    """The lines of the report.  make_engine: an engine of (ZeRO stage, layers)."""
    whole = CallPath()
    for stage in STAGES:
        calls = {}
        for layers in LAYERS:
            engine = make_engine(stage, layers)
            engine.eval()
            run = rollouts(engine)
            run()
            path = count_calls(run)
            engine.destroy()
            calls[layers] = path.calls / 2
            if layers == LAYERS[0]:
                whole.functions += path.functions
                whole.records += path.records
                yield f"ZeRO-{stage}: {next(path.lines(False))}"
        in_words = ", ".join(f"{number:.0f} with {layers} layers" for layers, number in calls.items())
        few, many = calls.values()
        yield f"ZeRO-{stage}: calls per request: {in_words} ({(many - few) / (LAYERS[1] - LAYERS[0]):.1f} per layer)"
    total, *names = whole.lines(verbose)
    yield f"a plain rollout, both stages: {total}"
    yield from names
