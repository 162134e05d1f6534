"""Calls in threads that nobody has to wait for: a function of a user may never return."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_THREADS = 32  # of the functions that a coroutine calls in threads


class DaemonThreads(ThreadPoolExecutor):
    """An executor of at most `limit` calls at once, each in a daemon thread.

    The end of its `with` block, an event loop that closes and the interpreter's exit do not wait for calls that run.
    """

    def __init__(self, limit: int):
        super().__init__(limit)
        self._free = threading.Semaphore(limit)

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Start a call, once fewer than `limit` run, unless its future is cancelled before."""
        future: Future = Future()

        def call() -> None:
            with self._free:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:  # raised by the future
                    future.set_exception(error)
                else:
                    future.set_result(result)

        threading.Thread(target=call, daemon=True).start()
        return future


@contextmanager
def running(work: Coroutine) -> Iterator[Future]:
    """Run a coroutine in an event loop of its own, in a daemon thread, and give its future.

    The end of the block cancels a coroutine that still runs, and waits neither for it nor for threads that it started.
    """
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads(MAX_THREADS))
    threading.Thread(target=run_until_stopped, args=(loop,), daemon=True).start()
    try:
        yield asyncio.run_coroutine_threadsafe(work, loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; then cancel its tasks and close it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
