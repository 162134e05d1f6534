"""Shared memory of the ranks on one host."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hybrid.parallel import all_gather_objects


class HostMemory:
    """CPU memory that every rank of `group` reads and writes. All methods are collectives of the group.

    The kernel frees the memory when the last tensor over it, or the last process, is gone.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup) -> "HostMemory | None":
        """Shared memory for the ranks of `group`; None unless they compute on the CPUs of one host and can open each
        other's files under /proc."""
        host = cls(group)
        keys = all_gather_objects(host_key(), group)
        if keys[0] is None or len(set(keys)) > 1:
            return None
        return None if host._opened(1) is None else host

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor over the same memory on every rank.  [numel], `dtype`"""
        memory = self._opened(numel * dtype.itemsize)
        assert memory is not None, "ranks that shared memory before cannot open each other's anymore"
        return memory.view(dtype)

    def barrier(self) -> None:
        """A barrier: afterwards all ranks see all earlier writes, and all earlier reads are done."""
        dist.barrier(group=self.group)

    def _opened(self, nbytes: int) -> torch.Tensor | None:
        """New shared memory, uint8 [nbytes]; None on all ranks if one of them may not open it."""
        path, file = [None], None
        if dist.get_rank(self.group) == 0:
            file = os.memfd_create("hybrid")  # not limited by /dev/shm's size; nothing is left behind if we are killed
            os.ftruncate(file, nbytes)
            path = [f"/proc/{os.getpid()}/fd/{file}"]
        dist.broadcast_object_list(path, group=self.group, group_src=0)
        try:
            memory = torch.from_file(path[0], shared=True, size=nbytes, dtype=torch.uint8)
        except RuntimeError:  # no permission to open the first rank's files under /proc
            memory = None
        is_open = all(all_gather_objects(memory is not None, self.group))
        if file is not None:
            os.close(file)  # mappings stay valid
        return memory if is_open else None


def host_key() -> tuple | None:
    """A key that is equal for processes that can open each other's files under /proc. None if this process has no
    memfd or /proc, or computes on an accelerator."""
    if get_accelerator().device_name() != "cpu" or not hasattr(os, "memfd_create"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return None
    return socket.gethostname(), boot.read_text(), namespace.stat().st_ino, os.getuid()
