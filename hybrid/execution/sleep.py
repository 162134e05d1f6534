"""Sleep of an engine: what it holds leaves the device for a while, on all ranks together, and comes back."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from hybrid.runtime.parallel import lost_rank_reported
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.host_tensors import HostTensors

LEVELS = (1, 2)
MISSING = {
    1: "the memory that inference needs is freed",
    2: "weights and training states are in host memory",
}


class Sleep:
    """The sleep of an engine: its level, and the tensors that are in host memory.

    level: 0 if it is awake.

    free: frees what inference holds and can make again.
    tensors: gives what level 2 moves, and which of these have no content to keep.
    refusal: gives the error of a call that comes at the wrong time; None if it may go on.
    exchange: gives every rank's value: a collective of the ranks that sleep together.
    moving: opens a context in which tensors are moved.
    """

    def __init__(
        self,
        device: torch.device,
        free: Callable[[], None],
        tensors: Callable[[], tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]],
        refusal: Callable[[str], Exception | None],
        exchange: Callable[[Any], list[Any]],
        moving: Callable[[], AbstractContextManager],
    ):
        self.free, self.tensors, self.refusal, self.exchange, self.moving = free, tensors, refusal, exchange, moving
        self.level, self.host = 0, HostTensors(device)

    def begin(self, level: int) -> None:
        """Sleep at `level`, or deeper if the engine does so already. If it fails on any rank, no rank's state changes.

        Raises ValueError for another level than 1 and 2; what `refusal` gives; RuntimeError if the ranks' calls differ
        or another rank's has failed. On every rank, before anything has changed.
        """
        call = f"sleep({level!r})"
        invalid = None
        if type(level) is not int or level not in LEVELS:
            invalid = ValueError(f"sleep: level={level!r} given; it must be 1 or 2, wake() ends sleep")
        self._agree(call, invalid or self.refusal(call))
        if level <= self.level:
            return
        try:
            self._agree(call, error_of(partial(self._leave_device, level)))
        except BaseException:
            self._return_to_device()
            raise
        self.level = level

    def end(self) -> None:
        """Wake up; does nothing if the engine is awake. If it fails on any rank, all sleep on, and may call again.

        Raises as `begin` does.
        """
        self._agree("wake()", self.refusal("wake()"))
        if self.level:
            self._agree("wake()", error_of(self._return_to_device))
            self.level = 0

    def require_awake(self, call: str, level: int = 1) -> None:
        """Raise RuntimeError if the engine sleeps at `level`, the first at which `call` cannot run, or deeper."""
        if self.level >= level:
            raise RuntimeError(
                f"{call} while the engine sleeps at level {self.level}: {MISSING[level]}; call engine.wake() first"
            )

    def _leave_device(self, level: int) -> None:
        self.free()
        if level == 2:
            get_accelerator().synchronize()  # all streams are done with what moves
            with self.moving():
                shared = self.host.move(*self.tensors())
            if shared:
                logger.warning(
                    f"hybrid: sleep(2) leaves {shared} bytes on the device, since tensors outside of the engine share "
                    "them: a forward that waits for its backward, or views of weights that somebody keeps"
                )
        get_accelerator().empty_cache()

    def _return_to_device(self) -> None:
        with self.moving():
            self.host.move_back()

    @waiting_to("sleep or wake up")
    def _agree(self, call: str, error: Exception | None) -> None:
        """Raise `error` if there is one; RuntimeError if another rank has one, or makes another call. A collective."""
        with lost_rank_reported(f"waiting for the others' {call}"):
            ranks = list(enumerate(self.exchange((call, "" if error is None else str(error)))))
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, (_, text) in ranks if text]:
            raise RuntimeError(f"{call} failed on another rank, and is undone ({'; '.join(failed)})")
        if len({call for _, (call, _) in ranks}) > 1:
            calls = "; ".join(f"rank {rank} calls {call}" for rank, (call, _) in ranks)
            raise RuntimeError(f"ranks make different calls: {calls}. Call sleep() and wake() on every rank")


def error_of(work: Callable[[], None]) -> Exception | None:
    """Run `work` and return its exception, so that ranks can exchange errors before any of them raises."""
    try:
        work()
    except Exception as error:
        return error
    return None
