"""Ends threads of engines at the interpreter's exit: one that returns from C++ during it aborts the process.

Those of streams, servers and the watch over waiting ranks. Functions of users have threads that nothing can end.
"""

import atexit
import threading
import time
import weakref
from typing import Protocol

from deepspeed.utils import logger

EXIT_S = 10.0  # a thread that has not ended by then, such as in a user's function, does not delay the exit further


class BackgroundThread(Protocol):
    """The owner of a daemon thread.

    Attributes:
        thread: the thread, started.
    """

    thread: threading.Thread

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""


OWNERS: "weakref.WeakSet[BackgroundThread]" = weakref.WeakSet()


@atexit.register
def end_threads() -> None:
    """Ask all threads to end, and wait for them for at most `EXIT_S` seconds."""
    owners, deadline = list(OWNERS), time.monotonic() + EXIT_S
    for owner in owners:
        owner.stop()
    for owner in owners:
        owner.thread.join(max(0.0, deadline - time.monotonic()))
    if alive := [owner.thread.name for owner in owners if owner.thread.is_alive()]:
        logger.warning(f"hybrid: at the end of the program these threads still run: {', '.join(alive)}")
