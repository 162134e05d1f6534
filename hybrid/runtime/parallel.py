"""Ranks and groups: row ids that key the sampling RNG, small collectives, detection of lost ranks. Knows no models."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _set_pg_timeout

from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.waiting import collective, waiting_to

# Data-parallel ranks number their prompt rows from `rank * ROWS_PER_RANK`, so that no two rows share a sampling key.
ROWS_PER_RANK = 1 << 40


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_row_ids(rows: int, number: int | None = None) -> torch.Tensor:
    """Return row ids for `rows` prompts of this rank, or of group `number`, unique over all ranks.  int64 [rows]"""
    return torch.arange(rows) + (rank() if number is None else number) * ROWS_PER_RANK


def min_over_ranks(number: int, device: torch.device) -> int:
    """Return the minimum of `number` over all ranks. A collective."""
    minimum = torch.tensor(number, device=device)
    if world_size() > 1:
        with collective("min_over_ranks", None):
            dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return int(minimum)


@waiting_to("plan memory")
def agreed(number: int) -> int:
    """Return the minimum of all ranks' numbers. A collective."""
    return min_over_ranks(number, torch.device(get_accelerator().current_device_name()))


def any_rank(flags: list[bool], device: torch.device, group: dist.ProcessGroup | None = None) -> list[bool]:
    """For each flag, whether it is true on any rank of `group` (None: of the world). A collective of these ranks."""
    if world_size() == 1:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32, device=device)
    with collective("any_rank", group):
        dist.all_reduce(counts, group=group)
        return [count > 0 for count in counts.tolist()]


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, in the order of the group's ranks. A collective.

    An object that cannot be pickled raises before this rank enters the collective.
    """
    values = [None] * dist.get_world_size(group)
    with collective("all_gather_objects", group):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the `value` of the group's first rank. A collective."""
    values = [value]
    with collective("broadcast_object", group):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def timeout_s(group: dist.ProcessGroup | None) -> float:
    """Return the seconds after which a collective of `group` fails, if a rank does not join it (torch 2.13 shows it in
    private attributes alone)."""
    group = _get_default_group() if group is None else group
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()


def limit_waits(groups: Iterable[dist.ProcessGroup | None], limit_s: float) -> None:
    """Let every collective of these groups fail after `limit_s` seconds, if a rank does not join it."""
    for group in dict.fromkeys(_get_default_group() if group is None else group for group in groups):
        _set_pg_timeout(timedelta(seconds=limit_s), group)


class LostRankError(RuntimeError):
    """Another rank of a collective has exited or no longer answers."""


class RankFailedError(RuntimeError):
    """Another rank has raised an error, or was interrupted, in a computation that ranks run together."""


def stop_others(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise RankFailedError if this rank has no error: it names those of the group that have one. A collective, for
    ranks that know that one of them has an error."""
    errors = all_gather_objects("" if error is None else described(error), group)
    if error is None:
        raise stopped(errors, group)


def raise_together(error: BaseException | None, group: dist.ProcessGroup | None) -> NoReturn:
    """`stop_others`, and raise this rank's own error."""
    stop_others(error, group)
    assert error is not None, "no rank of the group has an error"
    raise error


def described(error: BaseException) -> str:
    """Return an error's type and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def stopped(errors: Iterable[str], group: dist.ProcessGroup | None) -> RankFailedError:
    """Return the error of a rank whose call ends because other ranks have stopped.

    errors: the text of the error of each rank of the group; "": it has none.
    """
    numbered = zip(dist.get_process_group_ranks(group), errors, strict=True)
    failed = ", ".join(f"rank {number} ({error})" for number, error in numbered if error)
    return RankFailedError(f"rank {rank()}: the call has been stopped, because {failed} stopped; they compute together")


# Error messages of gloo and NCCL if a peer's process has exited or timed out (torch 2.13).
LOST_RANK_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "ncclRemoteError",
    "communicator was aborted",
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error means that a collective failed because another rank has exited or timed out."""
    text = str(error).partition("\n")[0]
    matches = isinstance(error, RuntimeError) and any(message in text for message in LOST_RANK_MESSAGES)
    return matches or isinstance(error, LostRankError)


@contextmanager
def lost_rank_reported(doing: str) -> Iterator[None]:
    """Inside the block, raise LostRankError if a collective fails because another rank has exited or timed out.

    doing: what this rank was doing, for the error message.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostRankError) or not is_lost_rank(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise LostRankError(
            f"rank {rank()}: another rank has ended, or does not answer, while this one was {doing}. Its own output "
            f"says why; nothing can be generated or trained without it: start the run again ({first_line})"
        ) from error


class ForwardInterrupted(RuntimeError):
    """Another rank's part of a joint forward has failed."""


class Guard:
    """Runs forwards that all ranks of a group compute together, and ends a forward on all of them if it fails on one.

    is_on: whether ranks exchange a failure flag before each collective of a forward; costs one small all-reduce each.
    failed_here: whether the last forward failed on this rank but not on every rank.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.device, self.group = device, group
        self.is_on = self.failed_here = False

    def check_other_ranks(self) -> None:
        """Raise ForwardInterrupted if another rank's part has failed. Call it before each collective of a forward."""
        if self.is_on and any_rank([False], self.device, self.group)[0]:
            raise ForwardInterrupted

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return the forward's output. If `is_on` and it fails on a rank, that rank raises its own error and the other
        ranks raise RuntimeError with its text."""
        self.failed_here = False
        if not self.is_on:
            return forward()
        try:
            output = forward()
            self.check_other_ranks()
        except ForwardInterrupted:
            errors = all_gather_objects("", self.group)
            failed = "; ".join(f"rank {index}: {error}" for index, error in enumerate(errors) if error)
            raise RuntimeError(f"a forward that ranks run together failed on another rank ({failed})") from None
        except BaseException as error:  # also Ctrl-C: where ranks stop together, another one has an Exception
            if INTERRUPTS.forced:
                raise
            any_rank([True], self.device, self.group)
            self.failed_here = "" in all_gather_objects(f"{type(error).__name__}: {error}", self.group)
            raise
        return output


class InferenceGroup:
    """Ranks that share one copy of the weights during inference, and their collectives.

    size: ranks in a group, consecutive unless `group` is given; it divides the world size. 1: each rank is alone.
    index: this rank's index in its group.  number: the group's index among the groups.
    connected: false for a group that is only planned and has no process group. Building a connected group is a
        collective of all ranks, unless `group` is given.
    tensor: the tensor-parallel subgroup: `tensor_size` consecutive ranks that slice heads and matrices; the whole
        group, unless experts are divided over it too.
    """

    def __init__(
        self,
        size: int,
        connected: bool = True,
        group: dist.ProcessGroup | None = None,
        tensor_size: int | None = None,
    ):
        self.size, self.index, self.number, self.group = size, rank() % size, rank() // size, group
        self.is_own = connected and group is None and size > 1  # this group has made the process group
        if group is not None:
            self.index, self.number = dist.get_rank(group), dist.get_global_rank(group, 0)
        firsts = range(0, world_size(), size) if size > 1 and connected and group is None else ()
        for first in firsts:  # new_group is a collective of all ranks, for every group
            members = list(range(first, first + size))
            new_group = dist.new_group(members)
            self.group = new_group if rank() in members else self.group
        self.tensor = self if tensor_size in (None, size) else InferenceGroup(tensor_size, connected)

    def close(self) -> None:
        """Give back the process groups that this group has made, once no rank computes with the others."""
        if self.is_own and self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None
        if self.tensor is not self:
            self.tensor.close()

    rounds = 0  # exchanges so far, where a group counts them
    shares_memory = False  # whether the CPU kernels can exchange with the group's ranks
    record: Any = None  # the group as the CPU kernels know it, a ctypes structure; None where they do not

    def begin_call(self, rounds: Iterable[int]) -> None:
        """Start a computation of all ranks.  rounds: `rounds` of every rank. Does nothing over torch.distributed."""

    def fail(self) -> None:
        """Tell the ranks that wait for this one that it has raised an error; over torch.distributed they time out."""

    def late_ranks(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of the exchange that this rank has arrived at, and the ranks of the world that it waits for
        there. Known where ranks share memory, else (0, ())."""
        return 0, ()

    def check(self) -> None:
        """Raise if the last exchange of the CPU kernels failed; does nothing over torch.distributed."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes, in place, the sum over the group. Returns `tensor`."""
        if self.size > 1:
            with collective("sum", self.group):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast: `tensor` becomes, in place, that of the group's first rank. Returns `tensor`."""
        if self.size > 1:
            with collective("share", self.group):
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather of tensors that have one shape on every rank.  [size, ...]"""
        if self.size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.size, *tensor.shape)
        with collective("gather", self.group):
            dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=self.group)
        return gathered

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """All-to-all: rank r gets every rank's parts[r].  parts: [size, ...], of one shape on every rank. Returns
        [size, ...], by sender."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with collective("exchange", self.group):
            dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def gather_rows(self, rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """All-gather of tensors [count, ...] whose row counts differ by rank. A collective.

        rows: this rank's.  counts: rows of each rank.  Returns one tensor [count, ...] per rank.
        """
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return [gathered[:count] for gathered, count in zip(self.gather(padded), counts, strict=True)]


def engine_name() -> str:
    """Return a name for the engine under construction, equal on every rank. With several ranks it differs from every
    other engine's; with one it is "0", because no key is shared.

    Ranks build their engines in the same order, so the name is a per-rank count of engines.
    """
    return str(_get_default_store().add(f"hybrid/engines/rank{rank()}", 1)) if world_size() > 1 else "0"


def first_to(what: str) -> bool:
    """Whether this rank is the first to call this for `what`. A rank's n-th call is compared with the others' n-th."""
    if world_size() == 1:
        return True
    store = _get_default_store()
    turn = store.add(f"hybrid/{what}/rank{rank()}", 1)
    return store.add(f"hybrid/{what}/turn{turn}", 1) == 1


class SharedCounter:
    """A counter that every rank adds to and any rank reads, without a collective: no rank waits for another.

    It lives in torch.distributed's key-value store. A rank's additions after a read appear in the next read.
    """

    def __init__(self, name: str):
        self.name = name
        self.local = 0
        self.seen = 0

    def add(self, amount: int) -> None:
        """Add `amount`."""
        self.local += amount
        if world_size() > 1 and amount:
            _get_default_store().add(self.name, amount)

    def since_last(self) -> int:
        """Return the sum of all ranks' additions since this rank's last call."""
        total = _get_default_store().add(self.name, 0) if world_size() > 1 else self.local
        new, self.seen = total - self.seen, total
        return new
