"""Shared memory of the ranks on one host, and their barrier."""

import ctypes
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hybrid.kernels import require_contiguous
from hybrid.kernels.cpu_library import HOST, RECORDS, cpu_library
from hybrid.runtime.parallel import (
    LostRankError,
    RankFailedError,
    all_gather_objects,
    broadcast_object,
    rank,
    timeout_s,
)
from hybrid.runtime.waiting import collective

ARRIVAL_BYTES = 64  # of an Arrival in group.h
TIMEOUT_S = 1800  # for a rank that runs but does not arrive, of a group without a process group
FAILED, ENDED, SILENT, SUM_FAILED = 1, 2, 3, 4  # GroupStatus in group.h


def group_record(size: int, index: int, capacity: int = 0) -> ctypes.Structure:
    """Return the record of a group of ranks that the kernels exchange in."""
    record = RECORDS["Group"](size=size, index=index, capacity=capacity, timeout_s=TIMEOUT_S)
    record.call = 1  # memory begins with no failed call: 0
    return record


def connect(record: ctypes.Structure, memory: torch.Tensor, pids: list[int]) -> None:
    """Let a group exchange through `memory`, uint8, zeros, mapped by all ranks.  pids: process of each rank."""
    require_contiguous(HOST, torch.uint8, memory)
    record.memory, record.pids[: len(pids)] = memory.data_ptr(), pids


def require_exchanged(record: ctypes.Structure) -> None:
    """Raise if the last exchange of a group failed: LostRankError if a rank has ended, RankFailedError if one has
    failed."""
    if record.status == FAILED:
        raise RankFailedError(
            f"rank {record.culprit} of the group raised an error in a forward that ranks run together"
        )
    if record.status in (ENDED, SILENT):
        what = "has ended" if record.status == ENDED else f"has not answered for {record.timeout_s} s"
        raise LostRankError(
            f"rank {rank()}: another rank has ended, or does not answer: rank {record.culprit} of its group {what}. "
            "Its own output says why; nothing can be generated or trained without it: start the run again"
        )


class HostMemory:
    """CPU memory that every rank of `group` reads and writes. All methods are collectives of the group.

    The kernel frees the memory when the last tensor over it, or the last process, is gone.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.record: ctypes.Structure | None = None  # of the barrier; None: that of the process group is used

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup) -> "HostMemory | None":
        """Return shared memory for the ranks of `group`; None unless they compute on the CPUs of one host and can open
        each other's files under /proc."""
        host = cls(group)
        keys = all_gather_objects(host_key(), group)
        if keys[0] is None or len(set(keys)) > 1:
            return None
        if host._opened(1) is None:
            return None
        if cpu_library() is not None:
            host._make_barrier()
        return host

    @staticmethod
    def is_possible() -> bool:
        """Whether this rank could share memory with others of its host. Not a collective."""
        return host_key() is not None

    def _make_barrier(self) -> None:
        size = dist.get_world_size(self.group)
        record = group_record(size, dist.get_rank(self.group))
        record.timeout_s = round(timeout_s(self.group))
        if size <= len(record.pids):
            self.arrivals = self.empty(size * ARRIVAL_BYTES, torch.uint8)
            connect(record, self.arrivals, all_gather_objects(os.getpid(), self.group))
            self.record = record

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor over the same memory on every rank.  [numel], `dtype`"""
        memory = self._opened(numel * dtype.itemsize)
        assert memory is not None, "ranks that shared memory before cannot open each other's anymore"
        return memory.view(dtype)

    def barrier(self) -> None:
        """Wait for all ranks: afterwards they see all earlier writes, and all earlier reads are done.

        Raises LostRankError if a rank has ended.
        """
        with collective("barrier", self.group):
            if self.record is None:
                dist.barrier(group=self.group)
                return
            cpu_library().barrier(ctypes.addressof(self.record))
        require_exchanged(self.record)

    def _opened(self, nbytes: int) -> torch.Tensor | None:
        """Return new shared memory, uint8 [nbytes]; None on all ranks if one of them may not open it."""
        path, file = None, None
        if dist.get_rank(self.group) == 0:
            file = os.memfd_create("hybrid")  # not limited by /dev/shm's size; nothing is left behind if we are killed
            os.ftruncate(file, nbytes)
            path = f"/proc/{os.getpid()}/fd/{file}"
        path = broadcast_object(path, self.group)
        try:
            memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except RuntimeError:  # no permission to open the first rank's files under /proc
            memory = None
        is_open = all(all_gather_objects(memory is not None, self.group))
        if file is not None:
            os.close(file)  # mappings stay valid
        return memory if is_open else None


def host_key() -> tuple | None:
    """Return a key that is equal for processes that can open each other's files under /proc. None if this process has
    no memfd or /proc, or computes on an accelerator."""
    if get_accelerator().device_name() != "cpu" or not hasattr(os, "memfd_create"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return None
    return socket.gethostname(), boot.read_text(), namespace.stat().st_ino, os.getuid()
