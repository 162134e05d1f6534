"""Locks a run's directories, so that no second run writes there at the same time."""

import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from typing import TextIO

from rlhf_examples.common.files import LOCK

_held: dict[Path, TextIO] = {}  # open until the process ends, however it ends: then the kernel frees the locks


def lock_directory(directory: str) -> None:
    """Create an output directory and lock it until this process ends.

    Raises ValueError if it cannot be written, or if another process has locked it.
    """
    path = Path(directory).resolve() / LOCK
    if path in _held:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise ValueError(
            f"output_dir: {directory!r} given; it cannot be written ({error.strerror}); give another directory"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"output_dir: {directory!r} given; another run writes there ({file.read().strip()}); wait until it ends, "
            "end it, or give another directory"
        ) from None
    except OSError as error:  # some network file systems have no locks
        warnings.warn(f"{directory}: no lock ({error.strerror}); start no second run there", stacklevel=2)
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
    file.flush()
    _held[path] = file
