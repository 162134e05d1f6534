"""Seconds by phase of an iteration, the summary line of DeepSpeed's hybrid engine, and the time of each forward."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybrid.runtime.parallel import SharedCounter, rank

# gather: all-gathers of partitioned weights.  merge: adapters into weights.  prefill, decode: forwards over prompts and
# over new tokens.  environment: nothing can decode until an environment answers.  wait: for other ranks, where ranks
# decode together.  release: freeing memory, and offloading and reloading training states.  train: forward, backward and
# step in train mode.
PHASES = ("gather", "merge", "prefill", "decode", "environment", "wait", "release", "train")
ROLLOUT_PHASES = ("gather", "merge", "prefill", "decode", "environment", "wait")

Phase = Callable[[str], AbstractContextManager]  # times its block under one of PHASES


@dataclass
class Iteration:
    """Seconds by phase, generated tokens and gathered bytes of one iteration: from one `eval()` to the next."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0
    prefilled_tokens: int = 0
    cached_scored_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    saved_steps: float = 0.0
    gathered_bytes: int = 0
    group_refresh_s: float = 0.0  # the most `Profiler.refresh_s` of the ranks of a group


class Profiler:
    """Times the phases of an engine's iterations.

    name: the engine's, equal on every rank.
    synchronize: waits for the device; called at the end of a phase, so that its time includes the device's work.
    """

    def __init__(self, name: str, synchronize: Callable[[], None]):
        self.samples = SharedCounter(f"hybrid/{name}/samples")
        self.synchronize = synchronize
        self.finished_s: list[float] = []  # elapsed seconds of each finished iteration
        self.finished_samples = 0
        self.evals = 0
        self.inner_s: list[float] = []  # for each open phase: seconds of the phases nested in it
        self.now = Iteration()
        self.trained_s = 0.0  # in phase train, of all iterations
        self.counted: dict[Profiler, float] = {}  # of other engines: their trained_s at the start of this iteration

    def count_training_of(self, other: "Profiler") -> None:
        """Count another engine's training as this one's, from now on."""
        self.counted[other] = other.trained_s

    def train_s(self) -> float:
        """Return the seconds of training in the current iteration, of this engine and of the counted ones."""
        others = sum(other.trained_s - before for other, before in self.counted.items())
        return self.now.seconds["train"] + others

    @contextmanager
    def phase(self, name: str, wait_for_device: bool = True) -> Iterator[None]:
        """Add the block's seconds to phase `name`, without those of phases nested in it."""
        assert name in PHASES, f"{name!r} is no phase; the phases are {PHASES}"
        start = time.perf_counter()
        self.inner_s.append(0.0)
        try:
            yield
        finally:
            if wait_for_device:
                self.synchronize()
            elapsed_s = time.perf_counter() - start
            own_s = elapsed_s - self.inner_s.pop()
            self.now.seconds[name] += own_s
            self.trained_s += own_s if name == "train" else 0.0
            if self.inner_s:
                self.inner_s[-1] += elapsed_s

    def generated(self, samples: int, tokens: int) -> None:
        """Add `samples` sequences and `tokens` new tokens of this rank."""
        self.samples.add(samples)
        self.now.tokens += tokens

    def prefilled(self, computed: int, cached: int, scored: int) -> None:
        """Add tokens of prompts that were computed, and that were found in the KV cache; and tokens of scored sequences
        that were found."""
        self.now.prefilled_tokens += computed
        self.now.cached_tokens += cached
        self.now.cached_scored_tokens += scored

    def speculated(self, drafted: int, accepted: int, saved_steps: float) -> None:
        """Add tokens that were drafted and accepted, and the decode steps that this saved."""
        self.now.drafted_tokens += drafted
        self.now.accepted_tokens += accepted
        self.now.saved_steps += saved_steps

    def gathered(self, nbytes: int) -> None:
        """Add bytes that this rank has gathered."""
        self.now.gathered_bytes += nbytes

    def refresh_s(self) -> float:
        """Return the seconds of gathering and merging weights in the current iteration, on this rank."""
        return self.now.seconds["gather"] + self.now.seconds["merge"]

    def group_refreshed(self, seconds: Iterable[float]) -> None:
        """Record the `refresh_s` of every rank of this rank's group."""
        self.now.group_refresh_s = max(seconds)

    def stats(self) -> dict[str, float]:
        """Return this rank's statistics of the current iteration: `<phase>_s` and `elapsed_s` in seconds, `tokens`,
        `prefilled_tokens` and `cached_tokens` of prompts, `cached_scored_tokens`, `drafted_tokens`, `accepted_tokens`
        and `saved_steps` of speculation, `tokens_per_s` of prefill, decode and wait together, `gathered_bytes`; and
        `refresh_s`, of gather and merge, the most of the ranks that share weights as of their latest request."""
        seconds = {f"{name}_s": self.now.seconds[name] for name in PHASES}
        generating_s = self.now.seconds["prefill"] + self.now.seconds["decode"] + self.now.seconds["wait"]
        return {
            **seconds,
            "train_s": self.train_s(),
            "refresh_s": max(self.refresh_s(), self.now.group_refresh_s),
            "elapsed_s": time.perf_counter() - self.now.started,
            "tokens": self.now.tokens,
            "prefilled_tokens": self.now.prefilled_tokens,
            "cached_tokens": self.now.cached_tokens,
            "cached_scored_tokens": self.now.cached_scored_tokens,
            "drafted_tokens": self.now.drafted_tokens,
            "accepted_tokens": self.now.accepted_tokens,
            "saved_steps": self.now.saved_steps,
            "tokens_per_s": self.now.tokens / generating_s if generating_s > 0 else 0.0,
            "gathered_bytes": self.now.gathered_bytes,
        }

    def timings(self) -> dict[str, float]:
        """Return the seconds of each phase that a rollout may have, and its tokens, in the current iteration."""
        return {**{f"{name}_s": self.now.seconds[name] for name in ROLLOUT_PHASES}, "tokens": self.now.tokens}

    def next_iteration(self) -> None:
        """Start a new iteration; from the second call on, rank 0 prints the finished one in DeepSpeed's format.

        Called by `eval()`. Does nothing if no phase has run since the last call.
        """
        if self.evals and not any(self.now.seconds.values()):
            return
        self.evals += 1
        latency, samples = time.perf_counter() - self.now.started, self.samples.since_last()
        if self.evals > 1:
            self.finished_s.append(latency)
            self.finished_samples += samples
            if rank() == 0:
                print(self._line(latency, samples), flush=True)
        self.now = Iteration()
        self.counted = {other: other.trained_s for other in self.counted}

    def _line(self, latency_s: float, samples: int) -> str:
        seconds = self.now.seconds
        gather_s = seconds["gather"] + seconds["merge"]
        generate_s = seconds["prefill"] + seconds["decode"] + seconds["wait"] + seconds["release"]
        train_s = self.train_s()
        others_s = latency_s - gather_s - generate_s - train_s

        def share(part_s: float) -> str:
            return f"({part_s / latency_s * 100:.2f}%)"

        return (
            f"|E2E latency={latency_s:.2f}s "
            f"|Gather latency={gather_s:.2f}s {share(gather_s)} "
            f"|Generate time={generate_s:.2f}s {share(generate_s)} "
            f"|Training time={train_s:.2f}s {share(train_s)} "
            f"|Others={others_s:.2f} {share(others_s)} "
            f"|CurSamplesPerSec={samples / latency_s:.2f} "
            f"|AvgSamplesPerSec={self.finished_samples / sum(self.finished_s):.2f}"
        )


class ModelTimes:
    """Milliseconds of every forward of a model, kept until `taken` is called.

    synchronize: waits for the device.  make_event: makes a timing event of the device; None if it has none.
    """

    def __init__(self, synchronize: Callable[[], None], make_event: Callable | None):
        self.synchronize, self.make_event = synchronize, make_event
        self.enabled = self.use_events = False
        self.open: list = []  # start times of the forwards that are running
        self.times: list[float | tuple] = []  # milliseconds, or a pair of events

    def enable(self, use_events: bool) -> None:
        """Time forwards from now on."""
        self.enabled, self.use_events = True, use_events and self.make_event is not None

    def _now(self) -> Any:
        if self.use_events and self.make_event is not None:
            event = self.make_event()
            event.record()
            return event
        self.synchronize()
        return time.perf_counter()

    def begin(self, *_: Any) -> None:
        """Start timing a forward; also usable as a module hook."""
        self.open.append(self._now())

    def end(self, *_: Any) -> None:
        """End the forward that started last; also usable as a module hook."""
        start, end = self.open.pop(), self._now()
        self.times.append((start, end) if self.use_events else (end - start) * 1e3)

    @contextmanager
    def forward(self, continues: bool = False) -> Iterator[None]:
        """Time the block as a forward; with `continues`, add its time to the previous forward."""
        before = self.taken() if continues and self.times else []
        self.begin()
        try:
            yield
        finally:
            self.end()
        if before:
            self.times = [*before[:-1], before[-1] + self.taken()[0]]

    def taken(self) -> list[float]:
        """Return the milliseconds of each forward since the last call."""
        assert self.enabled, "model profiling is not enabled"
        if self.use_events and self.make_event is not None:
            self.synchronize()
        times = [entry[0].elapsed_time(entry[1]) if isinstance(entry, tuple) else entry for entry in self.times]
        self.times = []
        return times
