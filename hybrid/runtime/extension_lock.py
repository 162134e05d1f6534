"""Warns about a long wait for a lock in torch's extension directory, where torch (2.13) waits without a message."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from deepspeed.utils import logger
from torch.utils.file_baton import FileBaton

REPORT_AFTER_S = 5.0
POLL_INTERVAL_S = 0.5


@contextmanager
def extension_lock_reported(report_after_s: float = REPORT_AFTER_S) -> Iterator[None]:
    """Inside the block, log a warning once per lock file if this thread waits longer than `report_after_s` seconds for
    another process to build an extension. Only local rank 0 of a host logs.

    The process that builds one of DeepSpeed's operators holds a file named `lock`. A process that is killed while
    building leaves the file behind, and every process that needs the operator then waits forever.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=report_waits, args=(threading.get_ident(), done, report_after_s), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def report_waits(thread: int, done: threading.Event, report_after_s: float) -> None:
    """Until `done` is set, log each lock file that the thread with identifier `thread` waits for too long."""
    since: dict[str, float] = {}  # by lock file: when the wait was first seen
    reported: set[str] = set()
    while not done.wait(POLL_INTERVAL_S):
        path = lock_waited_for(thread)
        if path is None or path in reported:
            continue
        if time.monotonic() - since.setdefault(path, time.monotonic()) >= report_after_s:
            reported.add(path)
            cause = (
                "no process of this machine holds it, so the one that built this extension was killed. If no other "
                "machine that shares this directory compiles now"
                if is_abandoned(path)
                else "another process builds this extension. If that process hangs, end it"
            )
            logger.warning(
                f"waiting for {path}, {age_of(path)}: {cause}, remove the file and this one goes on: rm {path}"
            )


def lock_waited_for(thread: int) -> str | None:
    """Return path of the lock file that a thread waits for in torch's FileBaton now; None if it does not wait."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return frame.f_locals["self"].lock_file_path
        frame = frame.f_back
    return None


def is_abandoned(path: str) -> bool:
    """Whether no process of this machine that we may inspect has the lock file open. Its owner keeps it open
    (`FileBaton`, torch 2.13)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(opened.path == path for opened in process.open_files()):
                return False
    return True


def age_of(path: str) -> str:
    """Part of a message: the age of a file, or that it has been removed."""
    try:
        return f"which is {time.time() - os.path.getmtime(path):.0f} s old"
    except FileNotFoundError:
        return "which has just been removed"
