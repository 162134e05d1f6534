"""Environments of a rollout: their steps run in threads and coroutines while other rows decode."""

import concurrent.futures
import math
import operator
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.utils import logger

from hybrid.rollout import EnvironmentLimits, Observation
from hybrid.runtime.background_loop import BACKGROUND, call, is_cancelled
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import InferenceGroup, all_gather_objects, raise_together
from hybrid.runtime.waiting import waiting_to

POLL_S = 0.02  # between two exchanges of ranks that wait for observations alone
INTERRUPT_S = 0.1  # between two looks whether Ctrl-C is to end a wait


class StepResult(NamedTuple):
    """Result of one environment call.  value: what it returned; None after an error.  error: its text, or "".
    seconds: that the call took."""

    row: int
    value: Any
    error: str
    seconds: float
    timed_out: bool = False

    @property
    def reason(self) -> str:
        """The `finish_reason` of a row that ends by the error."""
        return "environment_timeout" if self.timed_out else "environment_error"


@dataclass
class PendingStep:
    """A call that runs.  deadline: in seconds of `time.monotonic`; None: no limit."""

    row: int
    future: concurrent.futures.Future
    deadline: float | None


class EnvironmentCalls:
    """Calls of user code while rows decode: functions in threads of their own, coroutines in one event loop.

    A call that raises, or takes longer than `limits.step_timeout_s`, gives an error. A function cannot be stopped: its
    thread goes on, and what it gives is dropped.
    """

    def __init__(self, limits: EnvironmentLimits):
        self.limits = limits
        self.waiting: deque[tuple[int, Callable, tuple]] = deque()
        self.running: dict[int, PendingStep] = {}  # by number of the call
        self.results: queue.SimpleQueue[tuple[int, StepResult]] = queue.SimpleQueue()
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
            self.running[number] = PendingStep(row, future, None if timeout is None else time.monotonic() + timeout)

    async def _call(self, number: int, row: int, function: Callable, args: tuple) -> None:
        """Run a call to its end, in the background loop."""
        begin, value, error = time.monotonic(), None, ""
        try:
            value = await call(function, *args)
        except BaseException as raised:  # the user's code ends its row, never the batch
            error = f"{type(raised).__name__}: {raised}"
            if not is_cancelled():  # by `close`, or out of time
                logger.warning("hybrid: an environment raised for row %d, which ends", row, exc_info=raised)
        self.results.put((number, StepResult(row, value, error, time.monotonic() - begin)))

    def collect(self, wait: float | None) -> list[StepResult]:
        """Return the calls that have ended since the last `collect`. If there is none, wait up to `wait` seconds
        for one; None: as long as it takes."""
        until, ended = None if wait is None else time.monotonic() + wait, self._ended()
        while not ended and self.running:
            deadlines = [running.deadline for running in self.running.values() if running.deadline is not None]
            moments = [moment for moment in (until, min(deadlines, default=None)) if moment is not None]
            pause = max(min(moments) - time.monotonic(), 0) if moments else None
            with suppress(queue.Empty):
                ended = self._taken(self.results.get(timeout=INTERRUPT_S if pause is None else min(pause, INTERRUPT_S)))
            INTERRUPTS.raise_pending()
            ended += self._ended()
            if until is not None and time.monotonic() >= until:
                break
        return ended

    def _ended(self) -> list[StepResult]:
        """Return the calls that have ended by now, or run out of time."""
        ended, now, timeout = [], time.monotonic(), self.limits.step_timeout_s
        while not self.results.empty():
            ended += self._taken(self.results.get())
        for number, running in list(self.running.items()):
            if timeout is not None and running.deadline is not None and running.deadline <= now:
                running.future.cancel()
                ended.append(StepResult(running.row, None, f"no answer within {timeout} s", timeout, timed_out=True))
                del self.running[number]
        self._start()
        return ended

    def _taken(self, result: tuple[int, StepResult]) -> list[StepResult]:
        """Return a result, unless its call had run out of time."""
        number, stepped = result
        return [stepped] if self.running.pop(number, None) is not None else []

    def close(self) -> None:
        """Drop what still runs."""
        self.waiting.clear()
        for running in self.running.values():
            running.future.cancel()
        self.running.clear()


def as_observation(value: Any) -> Observation:
    """Return an environment's Observation with its ids as lists. Raises TypeError for anything else."""
    if not isinstance(value, Observation):
        raise TypeError(
            f"environment.step gave {type(value).__name__}; it must give a hybrid.Observation(ids, reward, done)"
        )
    prompt = None if value.prompt_ids is None else id_list(value.prompt_ids)
    reward = None if value.reward is None else float(value.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"Observation.reward: {reward} given; it must be finite, or None")
    return Observation(id_list(value.ids), reward, bool(value.done), prompt)


def id_list(ids: Any) -> list[int]:
    """Return token ids, given as a tensor or a sequence, as a list. Raises TypeError for floats."""
    return [operator.index(token) for token in (ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids)]


def require_in_vocabulary(ids: list[int], call: str, vocab_size: int) -> None:
    """Raise ValueError unless the ids that a call of an environment gave are the model's.  vocab_size: 0: unknown."""
    if ids and vocab_size and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{call} gave token ids from {min(ids)} to {max(ids)}; the model's are 0 to {vocab_size - 1}")


def reset_rows(
    environment: Any, limits: EnvironmentLimits, prompts: list[torch.Tensor], vocab_size: int, longest: int
) -> list[StepResult]:
    """Each row's prompt by `environment.reset`, int64 [n], or the error, by row.

    prompts: int64 [n] each.  longest: the most tokens of a prompt.
    """

    def as_prompt(prompt: torch.Tensor, value: Any) -> torch.Tensor:
        if value is None:
            return prompt
        if not len(ids := id_list(value)):
            raise ValueError("environment.reset gave no tokens; a prompt needs one, None keeps the given prompt")
        if len(ids) > longest:
            raise ValueError(
                f"environment.reset gave a prompt of {len(ids)} tokens; at most {longest} fit: max_out_tokens minus "
                "max_new_tokens"
            )
        require_in_vocabulary(ids, "environment.reset", vocab_size)
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


class EndsAtOnce:
    """An environment whose rows have one turn."""

    def reset(self, row: int, prompt_ids: torch.Tensor) -> None:
        """Keep the prompt."""

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        """End the row."""
        return Observation(done=True)


@dataclass
class EnvironmentLoop:
    """The environment of a request's rows, and which of them wait for it (`pending`).

    vocab_size: of the model, whose token ids observations have.
    environment: of this rank's rows, `local_rows`; other rows are those of other ranks in `group`, which step them.
    """

    limits: EnvironmentLimits
    vocab_size: int
    environment: Any = None
    local_rows: range = range(0)
    group: InferenceGroup | None = None
    pending: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.calls = EnvironmentCalls(self.limits)

    def submit(self, row: int, completion_ids: torch.Tensor) -> None:
        """Step a row's environment after a turn of sampled tokens, int64 [n] on the host."""
        self.pending.add(row)
        if row in self.local_rows:
            self.calls.submit(row, self._step, row - self.local_rows.start, completion_ids)

    async def _step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        observation = as_observation(await call(self.environment.step, row, completion_ids))
        if observation.prompt_ids is not None and not observation.prompt_ids:
            raise ValueError("environment.step gave no prompt_ids; a history needs a token, None appends to it")
        for ids in (observation.ids, observation.prompt_ids or []):
            require_in_vocabulary(list(ids), "environment.step", self.vocab_size)
        return observation

    @waiting_to("exchange steps of environments")
    def collect(self, waits: bool) -> list[StepResult]:
        """Return the steps that have ended, the same on every rank of the group. A collective of a group.

        waits: until at least one has ended.
        """
        stepped = self._of_all_ranks(self.group, waits) if self.group else self.calls.collect(None if waits else 0)
        self.pending -= {step.row for step in stepped}
        return stepped

    def _of_all_ranks(self, group: InferenceGroup, waits: bool) -> list[StepResult]:
        while True:
            local, error = self.calls.collect(POLL_S if waits else 0), INTERRUPTS.taken()
            of_ranks, stops = zip(*all_gather_objects((local, error is not None), group.group), strict=True)
            if any(stops):
                raise_together(error, group.group)
            stepped = [step for steps in of_ranks for step in steps]
            if stepped or not waits:
                return stepped

    def close(self) -> None:
        """Drop the steps that still run."""
        self.calls.close()
