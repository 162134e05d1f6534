"""Waiting for a lock in torch's extension directory, said aloud: torch waits there without a word (2.13)."""

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
LOOK_EVERY_S = 0.5


@contextmanager
def extension_lock_reported(report_after_s: float = REPORT_AFTER_S) -> Iterator[None]:
    """Log a warning, once for each file, where this thread waits longer than `report_after_s` inside the block for
    another process to build an extension. Of the ranks of a host the first one does.

    Whoever builds an operator of DeepSpeed's holds a file named `lock`; a process that is killed as it builds leaves it
    behind, and everybody who needs the operator waits for ever.
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
    """Look at what `thread`, by its identifier, waits for, until `done` is set; log what takes long."""
    since: dict[str, float] = {}  # when each lock was first seen waited for
    reported: set[str] = set()
    while not done.wait(LOOK_EVERY_S):
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
    """The lock file that a thread waits for in torch's FileBaton at this moment; None where it does not wait."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return frame.f_locals["self"].lock_file_path
        frame = frame.f_back
    return None


def is_abandoned(path: str) -> bool:
    """Whether no process of this machine, of those that we may look into, has a lock file open, as its owner has
    (`FileBaton`, torch 2.13)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(opened.path == path for opened in process.open_files()):
                return False
    return True


def age_of(path: str) -> str:
    """How long ago a file was made; that it is gone, where it is."""
    try:
        return f"which is {time.time() - os.path.getmtime(path):.0f} s old"
    except FileNotFoundError:
        return "which has just been removed"
