"""Ranks: who shares noise, and the few things that ranks tell each other. Knows nothing of models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# Data-parallel ranks number their prompt rows from `rank * ROWS_PER_RANK`, so that they never share noise.
ROWS_PER_RANK = 1 << 40


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_row_ids(rows: int, who: int | None = None) -> torch.Tensor:
    """Row numbers for `rows` prompts of this rank, or of group `who`, that no other uses.  int64 [rows]"""
    return torch.arange(rows) + (rank() if who is None else who) * ROWS_PER_RANK


def all_ranks(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `flag` holds on every rank, or on every one of `group`. A collective of these."""
    if world_size() == 1:
        return flag
    unmet = torch.tensor(0 if flag else 1, device=device)
    dist.all_reduce(unmet, group=group)
    return unmet.item() == 0


def lowest(number: int, device: torch.device) -> int:
    """The lowest of all ranks' numbers. A collective."""
    if world_size() == 1:
        return number
    found = torch.tensor(number, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)


def any_rank(flags: list[bool], device: torch.device, group: dist.ProcessGroup | None = None) -> list[bool]:
    """For each flag, whether any rank of the group has it. A collective."""
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, group=group)
    return [count > 0 for count in found.tolist()]


def all_objects(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's thing, pickled, by rank of the group. A collective. What cannot be pickled raises before anybody
    waits."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, thing, group=group)
    return found


class LostRankError(RuntimeError):
    """A rank that this one works with has ended, or does not answer any more."""


# What gloo and NCCL say where a peer's process is gone, or has not answered in time (torch 2.13).
LOST_RANK_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "ncclRemoteError",
    "communicator was aborted",
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended, or does not answer."""
    text = str(error).partition("\n")[0]
    said = isinstance(error, RuntimeError) and any(message in text for message in LOST_RANK_MESSAGES)
    return said or isinstance(error, LostRankError)


@contextmanager
def lost_rank_reported(doing: str) -> Iterator[None]:
    """Raise LostRankError where a collective in the block fails because another rank has ended.  doing: what for."""
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
    """Another rank's part of a forward has failed."""


class Guard:
    """Forwards of which every rank of a group computes a part, so that one that fails on one rank ends on all.

    is_on: whether ranks look before each collective within a forward if all are well: it costs a small one more.
    failed_here: whether the last forward failed on this rank and not on all.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.device, self.group = device, group
        self.is_on = self.failed_here = False

    def require_all_well(self) -> None:
        """Raise ForwardInterrupted where another rank's part has failed. Before each collective of a forward."""
        if self.is_on and any_rank([False], self.device, self.group)[0]:
            raise ForwardInterrupted

    def run(self, forward: Callable[[], Any]) -> Any:
        """What the forward gives. Where it fails on one rank, all raise: its error, or RuntimeError with what it is."""
        self.failed_here = False
        if not self.is_on:
            return forward()
        try:
            output = forward()
            self.require_all_well()
        except ForwardInterrupted:
            errors = all_objects("", self.group)
            failed = "; ".join(f"rank {index}: {error}" for index, error in enumerate(errors) if error)
            raise RuntimeError(f"a forward that ranks run together failed on another one ({failed})") from None
        except Exception as error:
            any_rank([True], self.device, self.group)
            self.failed_here = "" in all_objects(f"{type(error).__name__}: {error}", self.group)
            raise
        return output


class InferenceGroup:
    """Consecutive ranks that share one copy of the weights during inference, and what they tell each other.

    size: ranks in a group; it divides the world size, and with 1 every rank is by itself.  index: this rank's place
    in its group.  number: the group's place among the groups.
    connected: false for a group that is only planned, whose ranks tell each other nothing. Building a connected one is
        a collective of all ranks, unless `group` is there already.
    tensor: this rank's neighbours who share heads and matrices: `tensor_size` of the group; the whole group, unless
        experts are shared out in it too.
    """

    def __init__(
        self,
        size: int,
        connected: bool = True,
        group: dist.ProcessGroup | None = None,
        tensor_size: int | None = None,
    ):
        self.size, self.index, self.number, self.group = size, rank() % size, rank() // size, group
        if group is not None:
            self.index, self.number = dist.get_rank(group), dist.get_global_rank(group, 0)
        firsts = range(0, world_size(), size) if size > 1 and connected and group is None else ()
        for first in firsts:  # every rank takes part in making every group
            members = list(range(first, first + size))
            made = dist.new_group(members)
            self.group = made if rank() in members else self.group
        self.tensor = self if tensor_size in (None, size) else InferenceGroup(tensor_size, connected)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in place of this rank's."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, in place of the others'."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, which are of one shape.  [size, ...]"""
        if self.size == 1:
            return tensor[None]
        found = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(found.unbind()), tensor.contiguous(), group=self.group)
        return found

    def gather_objects(self, thing: Any) -> list[Any]:
        """As `all_objects`, of this group."""
        return all_objects(thing, self.group)

    def gather_rows(self, rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Every rank's [count, ...], of which this rank has its own."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return [found[:count] for found, count in zip(self.gather(padded), counts, strict=True)]


def engine_name() -> str:
    """A name for the engine under construction that is the same on every rank and unused by any other engine.

    Ranks build their engines in the same order, so each counts its own.
    """
    return str(_get_default_store().add(f"hybrid/engines/rank{rank()}", 1)) if world_size() > 1 else "0"


def first_to(what: str) -> bool:
    """Whether this rank comes to `what` before all others; when it comes again, it is their next coming that counts."""
    if world_size() == 1:
        return True
    store = _get_default_store()
    turn = store.add(f"hybrid/{what}/rank{rank()}", 1)
    return store.add(f"hybrid/{what}/turn{turn}", 1) == 1


class SharedCounter:
    """A number that every rank adds to and rank 0 reads, without a collective: nobody waits for anybody.

    It lives in torch.distributed's key-value store. What a rank has not yet added is counted by the next reading.
    """

    def __init__(self, name: str):
        self.name = name
        self.local = 0
        self.seen = 0

    def add(self, amount: int) -> None:
        """Count `amount` more."""
        self.local += amount
        if world_size() > 1 and amount:
            _get_default_store().add(self.name, amount)

    def since_last(self) -> int:
        """What all ranks have counted since the last call."""
        total = _get_default_store().add(self.name, 0) if world_size() > 1 else self.local
        new, self.seen = total - self.seen, total
        return new
