"""Logs which ranks this one waits for, when a collective of the engine takes long.

A thread polls the stack of the engine's thread once a second, so that collectives themselves do nothing more. A waiting
rank publishes it in torch.distributed's key-value store; a rank that has published nothing counts as missing.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger
from torch.distributed.distributed_c10d import _get_default_store

from hybrid.call_lock import CallLock
from hybrid.decoders.calls import Calls, SharedCalls
from hybrid.decoders.collective_forwards import CollectiveForwards, LayerwiseForwards
from hybrid.decoders.group_work import GroupWork
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.tp_forwards import ModuleExchange
from hybrid.decoders.tp_modules import SharedModules
from hybrid.generation.environments import EnvironmentLoop
from hybrid.kernels.host_memory import HostMemory
from hybrid.memory_plan import agreed
from hybrid.messages import shortened
from hybrid.parallel import (
    InferenceGroup,
    all_gather_objects,
    any_rank,
    broadcast_object,
    min_over_ranks,
    rank,
    world_size,
)
from hybrid.sleep import Sleep
from hybrid.weights.export import save_pretrained
from hybrid.weights.gather import Fetch, gathered
from hybrid.weights.lend import Window
from hybrid.weights.slice_exchange import SliceExchange

POLL_INTERVAL_S = 1.0
NAMED_RANKS = 8  # in a message
Group = dist.ProcessGroup | None  # None: all ranks


def code_of(function: Callable) -> CodeType:
    """The code object that frames of `function` have, decorators removed."""
    return unwrap(function).__code__


# Functions in which a rank waits for others, and their process group by the names of the function's local variables:
# renaming `group`, `absent`, `storage` or `layouts` there needs a change here.
COLLECTIVES: dict[CodeType, Callable[[dict[str, Any]], Group]] = {
    code_of(min_over_ranks): lambda variables: None,
    code_of(any_rank): lambda variables: variables["group"],
    code_of(all_gather_objects): lambda variables: variables["group"],
    code_of(broadcast_object): lambda variables: variables["group"],
    code_of(InferenceGroup.sum): lambda variables: variables["self"].group,
    code_of(InferenceGroup.share): lambda variables: variables["self"].group,
    code_of(InferenceGroup.gather): lambda variables: variables["self"].group,
    code_of(InferenceGroup.exchange): lambda variables: variables["self"].group,
    code_of(HostMemory.barrier): lambda variables: variables["self"].group,
    code_of(Fetch.wait): lambda variables: group_of(variables["self"].storage),
    code_of(SliceExchange.finish): lambda variables: group_of(variables["self"].layouts),
    code_of(gathered): lambda variables: group_of(variables.get("absent", ())),  # unset as it starts
}

# What a rank waits to do: of the functions that it is in, the innermost that is here.
PURPOSES: dict[CodeType, str] = {
    code_of(Window.refresh): "refresh weights",
    code_of(Window.join_refresh): "refresh weights",
    code_of(Calls._refresh_int8): "refresh weights",
    code_of(SharedCalls._exchange): "begin the next call",
    code_of(SharedCalls._agreed_decoder): "check the decoder",
    code_of(SharedModules.require_same): "check the model's own layers",
    code_of(GroupWork.run): "exchange prompts",
    code_of(ModuleExchange._exchange): "exchange prompts",
    code_of(StreamedDecoder._exchange): "decode with streamed weights",
    code_of(CollectiveForwards._is_wanted): "run the model's own layers",
    code_of(LayerwiseForwards._gathered): "gather a layer",
    code_of(EnvironmentLoop.collect): "exchange steps of environments",
    code_of(Sleep._agree): "sleep or wake up",
    code_of(agreed): "plan memory",
    code_of(save_pretrained): "export the model",
}
DECODING = "decode together"  # sums inside the CPU kernels
SEEN = "hybrid: first seen"  # no function has a variable of this name


def group_of(params: Iterable[Any]) -> Group:
    """The process group that partitions the first of some parameters; all ranks if there is none."""
    return getattr(next(iter(params), None), "ds_process_group", None)


@dataclass(frozen=True)
class Wait:
    """A collective that a rank is in.

    key: equal as long as it is the same one: the time at which the collective was first seen, or the group's address
        and the number of the exchange.
    purpose: what the rank waits to do.  ranks: those that take part.
    late: those that have not arrived, where that is known without the store.
    """

    key: object
    purpose: str
    ranks: list[int]
    late: tuple[int, ...] = ()


def wait_in(frame: FrameType | None) -> Wait | None:
    """The collective that a thread is in, by its innermost frame; None: in none of COLLECTIVES.

    The frame is marked, so that it is known again: one that was kept would keep the tensors of all calls around it.
    """
    while frame is not None and frame.f_code not in COLLECTIVES:
        frame = frame.f_back
    if frame is None:
        return None
    ranks = dist.get_process_group_ranks(COLLECTIVES[frame.f_code](frame.f_locals) or dist.group.WORLD)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code not in PURPOSES:
        outer = outer.f_back
    purpose = f"run {frame.f_code.co_name}" if outer is None else PURPOSES[outer.f_code]
    return Wait(frame.f_locals.setdefault(SEEN, time.monotonic_ns()), purpose, ranks)


class RankWaits:
    """Logs a warning when the thread that uses an engine has waited `report_after_s` seconds in one collective, and
    again whenever that time has doubled. Of the ranks that wait, the first one logs.

    name: the engine's, equal on every rank.  report_after_s: None, or a world of one rank: nothing is logged.
    lock: the engine's; the thread that holds it uses the engine.
    groups: a bound method that gives the groups whose ranks decode together; held weakly.
    """

    def __init__(
        self,
        name: str,
        report_after_s: float | None,
        lock: CallLock,
        groups: Callable[[], Iterable[InferenceGroup]],
    ):
        self.closed = threading.Event()
        if report_after_s is None or world_size() == 1:
            return
        self.name, self.report_after_s, self.lock = name, report_after_s, lock
        self.groups = weakref.WeakMethod(groups)  # the engine's: it is freed as soon as nothing else refers to it
        self.builder: int | None = threading.get_ident()  # the thread that builds the engine
        self.store, self.rank = _get_default_store(), rank()
        self.wait: Wait | None = None
        self.since = self.report_at_s = 0.0
        self.published = ""
        watch = threading.Thread(target=watch_waits, args=(weakref.ref(self), self.closed), daemon=True)
        watch.start()

    def built(self) -> None:
        """The engine is built: from now on its user is the thread that holds the lock."""
        self.builder = None

    def close(self) -> None:
        """End the thread that looks."""
        self.closed.set()

    def look(self) -> None:
        """Poll the engine's thread: publish its wait, and log it when that is due."""
        user = self.builder or self.lock.owner_ident
        wait = None if user is None else wait_in(sys._current_frames().get(user)) or self._wait_of_kernels()
        now = time.monotonic()
        if wait is None or self.wait is None or wait.key != self.wait.key:
            self._publish("")
            self.since, self.report_at_s = now, self.report_after_s
        elif not wait.late:  # else the ranks of the group see it in their memory
            self._publish(wait.purpose)
        self.wait = wait
        if wait is not None and now - self.since >= self.report_at_s:
            self.report_at_s *= 2
            self._report(wait, now - self.since)

    def _wait_of_kernels(self) -> Wait | None:
        """The sum or gather inside the CPU kernels that has not ended because other ranks are late."""
        method = self.groups()
        groups = () if method is None else method()
        for group in dict.fromkeys(part for whole in groups for part in (whole, whole.tensor)):
            exchange, late = group.late_ranks()
            if late:
                return Wait((id(group), exchange), DECODING, list(late), late)
        return None

    def _publish(self, purpose: str) -> None:
        """Tell the other ranks what this one waits to do; "": nothing."""
        if purpose != self.published:
            self.store.set(self._key(self.rank), purpose)
            self.published = purpose

    def _key(self, number: int) -> str:
        return f"hybrid/{self.name}/waits/{number}"

    def _purpose(self, number: int) -> str:
        """What another rank waits to do; "": it does not wait."""
        key = self._key(number)
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _report(self, wait: Wait, elapsed_s: float) -> None:
        if wait.late:
            logger.warning(waiting_message(wait.purpose, elapsed_s, dict.fromkeys(wait.late, "")))
            return
        missing: dict[int, str] = {}
        for number in wait.ranks:
            purpose = wait.purpose if number == self.rank else self._purpose(number)
            if purpose != wait.purpose:
                missing[number] = purpose
            elif number < self.rank:
                return  # that rank reports
        logger.warning(waiting_message(wait.purpose, elapsed_s, missing))


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
    """The text of a log line.  missing: ranks that have not come, and what each waits to do instead; "": nothing."""
    if not missing:
        return f"hybrid: all ranks have joined the collective to {purpose}; it has taken {elapsed_s:.0f} s"
    elsewhere = {number: other for number, other in missing.items() if other}
    ranks = f"rank{'s' * (len(missing) > 1)} {shortened(missing, NAMED_RANKS)}"
    text = f"hybrid: waiting for {ranks} to {purpose} ({elapsed_s:.0f} s)"
    if elsewhere:
        others = "; ".join(f"rank {number} waits to {other}" for number, other in [*elsewhere.items()][:NAMED_RANKS])
        text += f"; {others}: every rank must make the same calls in the same order"
    return text
