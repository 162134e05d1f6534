"""Memory that the ranks of one host share: what each of them writes, all of them read."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hybrid.parallel import InferenceGroup


class HostMemory:
    """Memory on the CPU that every rank of `group` reads and writes. All functions are collectives of the group.

    Nothing has to be freed: the kernel does when the last tensor over it is gone, or the last process.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks = group, InferenceGroup(dist.get_world_size(group), group=group)

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup) -> "HostMemory | None":
        """The memory that the ranks of `group` share, if they run on CPUs of one host and see each other's files."""
        host = cls(group)
        homes = host.ranks.gather_objects(home())
        if homes[0] is None or len(set(homes)) > 1:
            return None
        return None if host._opened(1) is None else host

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the same memory on every rank.  [numel]"""
        memory = self._opened(numel * dtype.itemsize)
        assert memory is not None, "ranks that shared memory before cannot open each other's anymore"
        return memory.view(dtype)

    def settle(self) -> None:
        """What any rank has written before, every rank reads from here on; and nobody reads anymore what it read."""
        dist.barrier(group=self.group)

    def _opened(self, nbytes: int) -> torch.Tensor | None:
        """New memory, uint8 [nbytes]; None if a rank may not open it."""
        path, file = [None], None
        if dist.get_rank(self.group) == 0:
            file = os.memfd_create("hybrid")  # no limit of /dev/shm, and nothing left behind if we are killed
            os.ftruncate(file, nbytes)
            path = [f"/proc/{os.getpid()}/fd/{file}"]
        dist.broadcast_object_list(path, group=self.group, group_src=0)
        try:
            memory = torch.from_file(path[0], shared=True, size=nbytes, dtype=torch.uint8)
        except RuntimeError:  # not allowed to look into /proc of the first rank
            memory = None
        everybody = all(self.ranks.gather_objects(memory is not None))
        if file is not None:
            os.close(file)  # what is mapped stays
        return memory if everybody else None


def home() -> tuple | None:
    """Equal for processes that can open each other's files under /proc; None for one that has no such files, or
    computes elsewhere than on the CPU."""
    if get_accelerator().device_name() != "cpu" or not hasattr(os, "memfd_create"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return None
    return socket.gethostname(), boot.read_text(), namespace.stat().st_ino, os.getuid()
