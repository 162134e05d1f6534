"""Marks the collectives that a thread is in, and what for, so that another thread can log long waits."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from torch.distributed import ProcessGroup

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Wait:
    """A collective that a thread is in.

    key: differs for each collective.  purpose: what the thread does there.  group: its ranks; None: all ranks.
    late: the ranks that have not arrived, where they are known.
    """

    key: object
    purpose: str
    group: ProcessGroup | None = None
    late: tuple[int, ...] = ()


# By the identifier of the thread, which uses one engine at a time.
PURPOSES: dict[int, str] = {}
WAITS: dict[int, Wait] = {}
KEYS = count()


@contextmanager
def waiting_to(purpose: str) -> Iterator[None]:
    """Name the purpose of the collectives inside the block, or inside the decorated function: "refresh weights"."""
    with marked(PURPOSES, purpose):
        yield


def collective(name: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Mark the block as a collective of `group`; None: of all ranks.  name: its purpose, if `waiting_to` gives none."""
    purpose = PURPOSES.get(threading.get_ident(), f"run {name}")
    return marked(WAITS, Wait(next(KEYS), purpose, group))


@contextmanager
def marked(marks: dict[int, Mark], mark: Mark) -> Iterator[None]:
    """Inside the block `mark` is the mark of this thread."""
    thread = threading.get_ident()
    outer = marks.get(thread)
    marks[thread] = mark
    try:
        yield
    finally:
        if outer is None:
            del marks[thread]
        else:
            marks[thread] = outer
