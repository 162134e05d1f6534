"""Ranks of one host that compute together: sums and gathers through memory that all of them have mapped."""

import ctypes
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybrid.kernels.cpu_library import HOST, address, cpu_library
from hybrid.kernels.host_memory import ARRIVAL_BYTES, SUM_FAILED, HostMemory, connect, group_record, require_exchanged
from hybrid.runtime.parallel import InferenceGroup, all_gather_objects, timeout_s

CAPACITY = 1 << 16  # floats that a rank exchanges at a time
SumFunction = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


class HostGroup(InferenceGroup):
    """An InferenceGroup of ranks that compute on CPUs. On one host they exchange through shared memory, and through
    torch.distributed otherwise.

    record: the group as the CPU kernels know it.
    """

    tensor: "HostGroup"

    def __init__(self, group: InferenceGroup):
        self.size, self.index, self.number, self.group = group.size, group.index, group.number, group.group
        self.tensor = self if group.tensor is group else HostGroup(group.tensor)
        self.memory: torch.Tensor | None = None
        self.is_open = False
        self.error: Exception | None = None  # of a sum inside a call of the kernels
        self.sum_function = SumFunction(self._sum_for_kernels)
        self.record = group_record(self.size, self.index, CAPACITY)
        if self.group is not None:
            self.record.timeout_s = round(timeout_s(self.group))
        self.record.sum = ctypes.cast(self.sum_function, ctypes.c_void_p)

    @property
    def rounds(self) -> int:
        """Exchanges so far, of this group and its tensor-parallel part."""
        return max(self.record.round, self.tensor.record.round)

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks exchange through memory that all of them have mapped."""
        return self.memory is not None

    def begin_call(self, rounds: Iterable[int]) -> None:
        """Start a computation of all ranks, after whatever the last one ended with. The first call is a collective.

        rounds: `rounds` of every rank; they differ after an error.
        """
        groups, first = dict.fromkeys((self, self.tensor)), max(rounds)
        for group in groups:
            if not group.is_open:
                group._open()
            group.record.round = first
            group.record.call += 1
            group.record.status, group.error = 0, None

    def _open(self) -> None:
        """Share memory, if all ranks are on one host."""
        host = HostMemory.shared_by(self.group) if self.size > 1 else None
        if host is not None and self.size <= len(self.record.pids):
            pids = all_gather_objects(os.getpid(), self.group)
            self.connect(host.empty(shared_bytes(self.size), torch.uint8), pids)
        self.is_open = True

    def connect(self, memory: torch.Tensor, pids: list[int]) -> None:
        """Exchange through `memory`, uint8 [shared_bytes], zeros, from now on.  pids: process of each rank."""
        connect(self.record, memory, pids)
        self.memory, self.is_open = memory, True

    def fail(self) -> None:
        """Raise RankFailedError on the ranks that wait for this one, which has raised an error in the current call."""
        for group in dict.fromkeys((self, self.tensor)):
            if group.memory is not None:
                group.memory.view(torch.int64)[group.index * ARRIVAL_BYTES // 8 + 1] = group.record.call

    def late_ranks(self) -> tuple[int, tuple[int, ...]]:
        if self.memory is None or self.group is None or self.record.status:
            return 0, ()
        stride = ARRIVAL_BYTES // 8
        arrived = self.memory.view(torch.int64)[: self.size * stride : stride].tolist()
        ranks = zip(dist.get_process_group_ranks(self.group), arrived, strict=True)
        return arrived[self.index], tuple(rank for rank, count in ranks if count < arrived[self.index])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather of tensors that have one shape on every rank.  [size, ...]"""
        if self.memory is None or tensor.device != HOST:
            return super().gather(tensor)
        gathered, tensor = tensor.new_empty(self.size, *tensor.shape), tensor.contiguous()
        own, everyone = address(tensor, tensor.dtype), address(gathered, tensor.dtype)
        cpu_library().gather(ctypes.addressof(self.record), own, tensor.nbytes, everyone)
        self.check()
        return gathered

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """All-to-all: rank r gets every rank's parts[r], by sender.  [size, ...]"""
        if self.memory is None or parts.device != HOST:
            return super().exchange(parts)
        for rank, part in enumerate(parts):  # one part of every rank at a time
            gathered = self.gather(part)
            if rank == self.index:
                received = gathered
        return received

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes, in place, the sum over the group, added in float32. Returns `tensor`."""
        if self.memory is None or tensor.device != HOST or not tensor.is_floating_point():
            return super().sum(tensor)
        total = tensor.float().contiguous()
        cpu_library().sum(ctypes.addressof(self.record), address(total, torch.float32), total.numel())
        self.check()
        return tensor if total is tensor else tensor.copy_(total)

    def check(self) -> None:
        """Raise if the last exchange failed: LostRankError if a rank has ended, RankFailedError if one has failed."""
        require_exchanged(self.record)
        if self.record.status == SUM_FAILED:
            raise self.error

    def _sum_for_kernels(self, data: int, count: int) -> int:
        try:
            super().sum(torch.frombuffer((ctypes.c_float * count).from_address(data), dtype=torch.float32))
        except Exception as error:  # ctypes would print and drop it
            self.error = error
            return 1
        return 0


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that `size` ranks exchange through."""
    return size * (ARRIVAL_BYTES + 2 * 4 * CAPACITY)


def on_host(group: InferenceGroup, device: torch.device) -> InferenceGroup:
    """Return the group; a HostGroup if its ranks compute on CPUs and the CPU kernels are there."""
    if device != HOST or group.size == 1 or isinstance(group, HostGroup) or cpu_library() is None:
        return group
    return HostGroup(group)
