"""Environments of a rollout: their steps run in threads and coroutines while other rows decode."""

import concurrent.futures
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.utils import logger

from hybrid.background_loop import BACKGROUND, call
from hybrid.parallel import InferenceGroup, all_gather_objects
from hybrid.rollout import EnvironmentLimits, Observation

POLL_S = 0.02  # between two exchanges of ranks that wait for observations alone


class Stepped(NamedTuple):
    """What came of a row's call.  value: what the environment gave; None after an error.  error: its text, or "".
    seconds: that the call took."""

    row: int
    value: Any
    error: str
    seconds: float
    timed_out: bool = False


@dataclass
class Running:
    """A call that runs.  deadline: in seconds of `time.monotonic`; None: no limit."""

    row: int
    future: concurrent.futures.Future
    deadline: float | None


class EnvironmentCalls:
    """Calls of user code beside decoding: functions in threads of their own, coroutines in one event loop.

    A call that raises, or takes longer than `limits.step_timeout_s`, gives an error. A function cannot be stopped: its
    thread goes on, and what it gives is dropped.
    """

    def __init__(self, limits: EnvironmentLimits):
        self.limits = limits
        self.waiting: deque[tuple[int, Callable, tuple]] = deque()
        self.running: dict[int, Running] = {}  # by number of the call
        self.results: queue.SimpleQueue[tuple[int, Stepped]] = queue.SimpleQueue()
        self.count = 0

    def submit(self, row: int, function: Callable, *args: Any) -> None:
        """Call a function, plain or a coroutine's, for a row."""
        self.waiting.append((row, function, args))
        self._start()

    def _start(self) -> None:
        timeout = self.limits.step_timeout_s
        while self.waiting and len(self.running) < self.limits.max_concurrent_steps:
            (row, function, args), number = self.waiting.popleft(), self.count
            self.count += 1
            future = BACKGROUND.submit(self._call(number, row, function, args))
            self.running[number] = Running(row, future, None if timeout is None else time.monotonic() + timeout)

    async def _call(self, number: int, row: int, function: Callable, args: tuple) -> None:
        """Run a call to its end, in the background loop."""
        begin, value, error = time.monotonic(), None, ""
        try:
            value = await call(function, *args)
        except Exception as raised:  # the user's code ends its row, never the batch
            error = f"{type(raised).__name__}: {raised}"
            logger.warning("hybrid: an environment raised for row %d, which ends", row, exc_info=raised)
        self.results.put((number, Stepped(row, value, error, time.monotonic() - begin)))

    def collect(self, wait: float | None) -> list[Stepped]:
        """The calls that have ended since the last `collect`. If there is none, waits up to `wait` seconds for one;
        None: as long as it takes."""
        until, ended = None if wait is None else time.monotonic() + wait, self._ended()
        while not ended and self.running:
            deadlines = [running.deadline for running in self.running.values() if running.deadline is not None]
            moments = [moment for moment in (until, min(deadlines, default=None)) if moment is not None]
            pause = max(min(moments) - time.monotonic(), 0) if moments else None
            with suppress(queue.Empty):
                ended = self._taken(self.results.get(timeout=pause))
            ended += self._ended()
            if until is not None and time.monotonic() >= until:
                break
        return ended

    def _ended(self) -> list[Stepped]:
        """The calls that have ended by now, or run out of time."""
        ended, now = [], time.monotonic()
        while not self.results.empty():
            ended += self._taken(self.results.get())
        for number, running in list(self.running.items()):
            if running.deadline is not None and running.deadline <= now:
                running.future.cancel()
                seconds = self.limits.step_timeout_s
                ended.append(Stepped(running.row, None, f"no answer within {seconds} s", seconds, timed_out=True))
                del self.running[number]
        self._start()
        return ended

    def _taken(self, result: tuple[int, Stepped]) -> list[Stepped]:
        """A result, unless its call had run out of time."""
        number, stepped = result
        return [stepped] if self.running.pop(number, None) is not None else []

    def close(self) -> None:
        """Drop what still runs."""
        self.waiting.clear()
        for running in self.running.values():
            running.future.cancel()
        self.running.clear()


def as_observation(value: Any) -> Observation:
    """What `environment.step` gave, with its ids as lists. Raises TypeError for anything but an Observation."""
    if not isinstance(value, Observation):
        raise TypeError(
            f"environment.step gave {type(value).__name__}; it must give a hybrid.Observation(ids, reward, done)"
        )
    prompt = None if value.prompt_ids is None else id_list(value.prompt_ids)
    reward = None if value.reward is None else float(value.reward)
    return Observation(id_list(value.ids), reward, bool(value.done), prompt)


def id_list(ids: Any) -> list[int]:
    """Token ids, given as a tensor or a sequence, as a list."""
    if isinstance(ids, torch.Tensor):
        return ids.flatten().tolist()
    return [int(token) for token in ids]


def reset_rows(environment: Any, limits: EnvironmentLimits, prompts: list[torch.Tensor]) -> list[Stepped]:
    """Each row's prompt by `environment.reset`, int64 [n], or the error, by row.  prompts: int64 [n] each."""

    def as_prompt(prompt: torch.Tensor, value: Any) -> torch.Tensor:
        if value is None:
            return prompt
        if not len(ids := id_list(value)):
            raise ValueError("environment.reset gave no tokens; a prompt needs one, None keeps the given prompt")
        return torch.tensor(ids, dtype=torch.int64)

    async def reset(row: int, prompt: torch.Tensor) -> torch.Tensor:
        return as_prompt(prompt, await call(environment.reset, row, prompt))

    calls = EnvironmentCalls(limits)
    results: dict[int, Any] = {}
    try:
        for row, prompt in enumerate(prompts):
            calls.submit(row, reset, row, prompt)
        while len(results) < len(prompts):
            results.update((stepped.row, stepped) for stepped in calls.collect(None))
    finally:
        calls.close()
    return [results[row] for row in range(len(prompts))]


@dataclass
class EnvironmentLoop:
    """The environment of a request's rows, and which of them wait for it (`away`).

    environment: of this rank's rows `own`; other rows are those of other ranks in `group`, which step them.
    """

    limits: EnvironmentLimits
    environment: Any = None
    own: range = range(0)
    group: InferenceGroup | None = None
    away: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.calls = EnvironmentCalls(self.limits)

    def submit(self, row: int, completion_ids: torch.Tensor) -> None:
        """Step a row's environment after a turn of sampled tokens, int64 [n] on the host."""
        self.away.add(row)
        if row in self.own:
            self.calls.submit(row, self._step, row - self.own.start, completion_ids)

    async def _step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        return as_observation(await call(self.environment.step, row, completion_ids))

    def collect(self, waits: bool) -> list[Stepped]:
        """The steps that have ended, the same on every rank of the group. A collective of a group.

        waits: until at least one has ended.
        """
        stepped = self._of_all_ranks(waits) if self.group else self.calls.collect(None if waits else 0)
        self.away -= {step.row for step in stepped}
        return stepped

    def _of_all_ranks(self, waits: bool) -> list[Stepped]:
        while True:
            own = self.calls.collect(POLL_S if waits else 0)
            stepped = [step for steps in all_gather_objects(own, self.group.group) for step in steps]
            if stepped or not waits:
                return stepped

    def close(self) -> None:
        """Drop the steps that still run."""
        self.calls.close()
