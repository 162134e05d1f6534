"""An event loop in a thread of its own, for functions of users that wait: tools, environments."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundLoop:
    """Runs coroutines in one daemon thread, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def submit(self, work: Coroutine) -> concurrent.futures.Future:
        """Start `work` and give its future."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="hybrid environments", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine) -> Any:
        """The result of `work`; the calling thread waits for it."""
        return self.submit(work).result()


BACKGROUND = BackgroundLoop()  # the one of this process: clients with a connection belong to the loop that opened it


async def call(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function of a user: a coroutine function in this loop, any other in a thread of its own.

    Raises what the function raises; RuntimeError for SystemExit and KeyboardInterrupt, which would end the loop.
    """
    is_async = inspect.iscoroutinefunction(function)
    try:
        result = function(*args, **kwargs) if is_async else await in_thread(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def in_thread(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """The result of `function`, called in a daemon thread.

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

    threading.Thread(target=work, daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result
