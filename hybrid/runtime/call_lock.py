"""A fair, re-entrant lock: threads that share an engine call it one at a time, in the order in which they asked."""

import asyncio
import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from hybrid.runtime.background_loop import waiting_thread
from hybrid.runtime.interrupts import INTERRUPTS

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REPORT_AFTER_S = 60.0  # longer than most calls, short enough that a deadlock is reported soon


class CallLock:
    """A re-entrant lock that waiting threads get in the order in which they asked.

    `threading.RLock` is not fair (CPython 3.11): a thread that releases and takes it in a loop starves the rest.
    device: the engine's, which is the current one of the thread that holds the lock: a new thread begins on the first
        device of the process, and kernels are launched on the current one. None: of a lock without an engine.
    report_after_s: a thread that has waited this long warns once, and names the thread that holds the lock.
    Raises RuntimeError if an asyncio task asks for the lock while another task of the same thread holds it: the thread
    cannot wait for itself, and re-entering would mix the two calls. Also if it is released by another thread.
    """

    def __init__(self, report_after_s: float = REPORT_AFTER_S):
        self.report_after_s = report_after_s
        self.device: torch.device | None = None
        self.refusal = ""  # why no more calls are possible
        self.lent_refusal = ""  # why calls of other threads do not wait for the thread that the lock was handed to
        self._changed = threading.Condition()  # guards the attributes below
        self._owner: threading.Thread | None = None
        self._task: asyncio.Task | None = None
        self._depth = 0
        self._waiting: deque[threading.Thread] = deque()
        self._former_device: int | None = None  # of the thread that holds the lock; None: it has not changed
        # Owner, task, depth, former device.
        self._lenders: list[tuple[threading.Thread, asyncio.Task | None, int, int | None]] = []

    def __enter__(self) -> "CallLock":
        me, task = threading.current_thread(), current_task()

        def is_next() -> bool:
            return self._owner is me or (self._owner is None and self._waiting[0] is me)

        with self._changed:
            if self._owner is me:
                self._require_same_task(task)
                self._depth += 1
                return self
            if self.lent_refusal:
                raise RuntimeError(self.lent_refusal)
            if self._owner is not None and self._owner is waiting_thread.get():
                raise RuntimeError(
                    "an environment, a tool or a reward calls the engine whose rollout waits for it; give it another "
                    "model, or call the engine when the rollout has ended"
                )
            self._waiting.append(me)
            try:
                if not self._changed.wait_for(is_next, self.report_after_s):
                    self._report(me)
                    self._changed.wait_for(is_next)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()  # after an exception another thread may be next
            if self._owner is me:  # handed back
                self._depth += 1
            else:
                self._owner, self._task, self._depth = me, task, 1
                self._former_device = select_device(self.device)
        return self

    def __exit__(self, *exc: Any) -> None:
        me = threading.current_thread()
        with self._changed:
            if any(lender is me for lender, *_ in self._lenders):
                self._changed.wait_for(lambda: self._owner is me)
            if self._owner is not me:
                raise RuntimeError(
                    "`with engine.inference()` ends in another thread than it began in; open and close it in one thread"
                )
            self._depth -= 1
            if self._depth == 0:
                if self._former_device is not None:
                    get_accelerator().set_device(self._former_device)
                self._owner = self._task = self._former_device = None
                self._changed.notify_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside the block a call of the engine runs: it holds the lock, and Ctrl-C waits until nothing is half done.

        Raises RuntimeError if no more calls are possible.
        """
        with self, INTERRUPTS.held():
            if self.refusal:
                raise RuntimeError(self.refusal)
            try:
                yield
            except BaseException:
                if INTERRUPTS.forced:
                    self.refusal = (
                        "a second Ctrl-C has ended a call of this engine where weights may be half gathered: build the "
                        "engine again"
                    )
                raise

    @property
    def owner_ident(self) -> int | None:
        """Identifier of the thread that holds the lock now; None: no thread does."""
        owner = self._owner
        return None if owner is None else owner.ident

    def hand_over(self, thread: threading.Thread, refusal: str = "") -> None:
        """Give the lock, which this thread holds, to another one until that calls `hand_back`.

        refusal: the error of other threads' calls, this one's included, until then; "": they wait for it.
        """
        with self._changed:
            assert self._owner is threading.current_thread(), "a lock is handed over by the thread that holds it"
            if self._depth == 1 and self._former_device is not None:
                get_accelerator().set_device(self._former_device)
                self._former_device = None
            self._lenders.append((self._owner, self._task, self._depth, self._former_device))
            self._owner, self._task, self._depth, self.lent_refusal = thread, None, 1, refusal
            self._former_device = None

    def hand_back(self) -> None:
        """Give the lock back to the thread that handed it over; it then holds it once less."""
        with self._changed:
            assert self._owner is threading.current_thread() and self._depth == 1, "the lock is still in use"
            owner, task, depth, self._former_device = self._lenders.pop()
            self.lent_refusal = ""
            self._owner, self._task = (None, None) if depth == 1 else (owner, task)
            self._depth = depth - 1
            self._changed.notify_all()

    def _report(self, thread: threading.Thread) -> None:
        warnings.warn(
            f"thread {thread.name!r} has waited {self.report_after_s:.0f} s for an engine that thread "
            f"{getattr(self._owner, 'name', None)!r} uses: calls of one engine run one at a time, and `with "
            "engine.inference()` keeps other threads out until it ends",
            stacklevel=4,
        )

    def _require_same_task(self, task: asyncio.Task | None) -> None:
        if self._task is not None and task is not self._task:
            raise RuntimeError(
                "another asyncio task of this thread is within `with engine.inference()`, at an await; end the block "
                "before you await, or make each call in a thread of its own (asyncio.to_thread)"
            )


def select_device(device: torch.device | None) -> int | None:
    """Make `device` the calling thread's current one. Returns the index of its former one; None if nothing changes."""
    if device is None or device.type == "cpu" or device.index is None:
        return None
    former = get_accelerator().current_device()
    if former == device.index:
        return None
    get_accelerator().set_device(device.index)
    return former


def current_task() -> asyncio.Task | None:
    """Return the asyncio task that runs in this thread; None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def with_call_lock(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Return decorator: run a method as a call under the engine's CallLock, `self.call_lock`."""

    @functools.wraps(method)
    def locked(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.call_lock.call():
            return method(self, *args, **kwargs)

    return locked
