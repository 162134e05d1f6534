"""Logs which ranks this one waits for, when a collective of the engine takes long.

Collectives mark themselves (`hybrid/runtime/waiting.py`), and a thread looks at the marks once a second. A waiting rank
publishes its purpose in torch.distributed's key-value store; a rank that has published nothing counts as missing.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch.distributed as dist
from deepspeed.utils import logger
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from hybrid.runtime import at_exit
from hybrid.runtime.call_lock import CallLock
from hybrid.runtime.messages import shortened
from hybrid.runtime.parallel import InferenceGroup, rank, world_size
from hybrid.runtime.waiting import WAITS, Wait

POLL_INTERVAL_S = 1.0
NAMED_RANKS = 8  # in a message
DECODING = "decode together"  # exchanges inside the CPU kernels


class RankWaits:
    """Logs a warning when the thread that uses an engine has waited `report_after_s` seconds in one collective, and
    again whenever that time has doubled. Of the ranks that wait, the first one logs.

    Args:
        name: the engine's, equal on every rank.
        report_after_s: None, or a world of one rank: nothing is logged.
        lock: the engine's; the thread that holds it uses the engine.
    """

    def __init__(self, name: str, report_after_s: float | None, lock: CallLock):
        self.closed = threading.Event()
        if report_after_s is None or world_size() == 1:
            return
        self.report_after_s, self.lock = report_after_s, lock
        self.groups: Callable[[], Callable[[], Iterable[InferenceGroup]] | None] = lambda: None
        self.builder: int | None = threading.get_ident()  # the thread that builds the engine
        self.published = PrefixStore(f"hybrid/{name}/waits", _get_default_store())  # each waiting rank's purpose
        self.purpose = ""  # as published
        self.wait: Wait | None = None
        self.since = self.report_at_s = 0.0
        self.thread = threading.Thread(target=watch_waits, args=(weakref.ref(self), self.closed), daemon=True)
        self.thread.start()
        at_exit.OWNERS.add(self)

    def built(self, groups: Callable[[], Iterable[InferenceGroup]]) -> None:
        """Note that the engine is built: from now on its user is the thread that holds the lock.

        Args:
            groups: a bound method that returns the groups whose ranks decode together; held weakly.
        """
        self.builder, self.groups = None, weakref.WeakMethod(groups)

    def stop(self) -> None:
        """Ask the thread that looks to end."""
        self.closed.set()

    def look(self) -> None:
        """Look at the engine's thread: publish its wait, and log it when that is due."""
        user, now = self.builder or self.lock.owner_ident, time.monotonic()
        wait = None if user is None else WAITS.get(user) or self._wait_in_kernels()
        if wait is None or self.wait is None or wait.key != self.wait.key:
            self._publish("")
            self.since, self.report_at_s = now, self.report_after_s
        elif not wait.late:  # else the ranks of the group see it in their memory
            self._publish(wait.purpose)
        self.wait = wait
        if wait is not None and now - self.since >= self.report_at_s:
            self.report_at_s *= 2
            missing = self._missing(wait)
            if missing is not None:
                logger.warning(waiting_message(wait.purpose, now - self.since, missing))

    def _wait_in_kernels(self) -> Wait | None:
        """Return the exchange inside the CPU kernels that has not ended because other ranks are late."""
        method = self.groups()
        for whole in () if method is None else method():
            for group in (whole, whole.tensor):
                exchange, late = group.late_ranks()
                if late:
                    return Wait((id(group), exchange), DECODING, late=late)
        return None

    def _publish(self, purpose: str) -> None:
        if purpose != self.purpose:
            self.published.set(str(rank()), purpose)
            self.purpose = purpose

    def _missing(self, wait: Wait) -> dict[int, str] | None:
        """Return the ranks that have not come, and what each waits to do; "": nothing. None: another rank reports."""
        if wait.late:
            return dict.fromkeys(wait.late, "")
        missing = {}
        for number in dist.get_process_group_ranks(wait.group or dist.group.WORLD):
            purpose = self.published.get(str(number)).decode() if self.published.check([str(number)]) else ""
            if number != rank() and purpose != wait.purpose:
                missing[number] = purpose
            elif number < rank():
                return None
        return missing


def watch_waits(reference: "weakref.ref[RankWaits]", closed: threading.Event) -> None:
    """Let a RankWaits look once a second, until it is closed or gone, or its process group is."""
    while not closed.wait(POLL_INTERVAL_S):
        waits = reference()
        if waits is None or not dist.is_initialized():
            return
        try:
            waits.look()
        except RuntimeError:  # the store's process has ended; what waits for it raises an error of its own
            return
        del waits


def waiting_message(purpose: str, elapsed_s: float, missing: dict[int, str]) -> str:
    """Return the text of a log line.

    Args:
        missing: ranks that have not come, and what each waits to do instead; "": nothing.
    """
    if not missing:
        return f"hybrid: all ranks have joined the collective to {purpose}; it has taken {elapsed_s:.0f} s"
    ranks = f"rank{'s' * (len(missing) > 1)} {shortened(missing, NAMED_RANKS)}"
    text = f"hybrid: waiting for {ranks} to {purpose} ({elapsed_s:.0f} s)"
    others = [f"rank {number} waits to {other}" for number, other in missing.items() if other][:NAMED_RANKS]
    return f"{text}; {'; '.join(others)}: every rank must make the same calls in the same order" if others else text
