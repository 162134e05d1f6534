"""Locks in torch's extension directory: warns about a long wait for one, where torch (2.13) waits without a message,
and removes those of killed builds."""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed
import psutil
from deepspeed.utils import logger
from torch.utils.cpp_extension import get_default_build_root
from torch.utils.file_baton import FileBaton

REPORT_AFTER_S = 5.0
POLL_INTERVAL_S = 0.5
RELEASE_S = 0.5  # a builder closes its lock file, and then removes it


def init_distributed(*args: Any, remove_locks: bool = False, **kwargs: Any) -> None:
    """Call `deepspeed.init_distributed`, which loads an operator and may wait for another process to build it.

    Logs a warning on local rank 0 if the wait is long. Without this, DeepSpeed waits in silence, and forever if the
    other process was killed.

    Args:
        args: of `deepspeed.init_distributed`.
        remove_locks: first remove lock files that no process of this machine holds; each removal is logged. For
            programs whose extension directory no other machine uses: nothing is removed where ranks run on several.
        kwargs: likewise.
    """
    if remove_locks and os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        remove_abandoned_locks()
    with extension_lock_reported():
        deepspeed.init_distributed(*args, **kwargs)


def abandoned_locks() -> list[Path]:
    """Return the lock files in torch's extension directory that no process of this machine holds."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return [path for path in sorted(root.rglob("lock")) if is_abandoned(str(path))]


def remove_abandoned_locks() -> None:
    """Remove lock files in torch's extension directory that killed builds have left, and log which.

    Processes may call it at the same time: one removes while the others wait, so that a lock which a process takes
    after the removal is not removed too.
    """
    if not (left := abandoned_locks()):
        return
    folder = os.open(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        time.sleep(RELEASE_S)
        for path in set(abandoned_locks()).intersection(left):
            logger.warning(f"removed {path}, {age_of(str(path))}: left by a build that was killed")
            path.unlink(missing_ok=True)
    finally:
        os.close(folder)


@contextmanager
def extension_lock_reported(report_after_s: float = REPORT_AFTER_S) -> Iterator[None]:
    """Inside the block, log a warning once per lock file if this thread waits longer than `report_after_s` seconds for
    another process to build an extension. Only local rank 0 of a host logs.

    The process that builds one of DeepSpeed's operators holds a file named `lock`. A process that is killed while
    building leaves the file behind, and every process that needs the operator then waits forever.
    """
    thread = threading.get_ident()
    name = f"extension lock of {thread}"
    if os.environ.get("LOCAL_RANK", "0") != "0" or any(other.name == name for other in threading.enumerate()):
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=report_waits, args=(thread, done, report_after_s), name=name, daemon=True)
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
                f"waiting for {path}, {age_of(path)}: {cause}, remove the file, and start this one again if it then "
                f"misses the extension: rm {path}"
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
