"""An event loop in a thread of its own, for functions of users that wait: tools, environments."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any


class BackgroundLoop:
    """Runs coroutines in one daemon thread, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def submit(self, work: Coroutine) -> concurrent.futures.Future:
        """Start `work` and give its future. What it calls knows this thread by `waiting_thread`."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="hybrid environments", daemon=True).start()
        context = copy_context()
        if waiting_thread.get() is None:
            context.run(waiting_thread.set, threading.current_thread())
        return context.run(asyncio.run_coroutine_threadsafe, work, self._loop)

    async def result(self, work: Coroutine) -> Any:
        """Return the result of `work`, which runs in this loop: directly if the caller does, else it is submitted."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def run(self, work: Coroutine) -> Any:
        """Return the result of `work`; the calling thread waits for it."""
        return self.submit(work).result()


# Whose call of `submit` the running code belongs to: the thread that may be waiting for it.
waiting_thread: ContextVar[threading.Thread | None] = ContextVar("waiting_thread", default=None)
BACKGROUND = BackgroundLoop()  # the one of this process: clients with a connection belong to the loop that opened it


async def call(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function of a user: a coroutine function in this loop, any other in a thread of its own.

    Raises what the function raises; RuntimeError for what is no Exception: it would end the loop, or pass for the end
    of this task.
    """
    is_async = inspect.iscoroutinefunction(function)
    try:
        result = function(*args, **kwargs) if is_async else await in_thread(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and (is_cancelled() or sys.version_info < (3, 11)):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def is_cancelled() -> bool:
    """Whether somebody cancels the running task. Python 3.10 does not tell: False."""
    return getattr(asyncio.current_task(), "cancelling", int)() > 0


async def in_thread(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of `function`, called in a daemon thread.

    Not in a pool: threads of a pool that never end use it up, and the interpreter waits for them when it exits.
    """
    loop = asyncio.get_running_loop()
    outcome = loop.create_future()

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:  # raised again by the caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed before a function that nobody waits for ended
            loop.call_soon_threadsafe(deliver, result, error)

    def deliver(result: Any, error: BaseException | None) -> None:
        if not outcome.done():  # the caller may have stopped waiting
            outcome.set_result((result, error))

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result
