"""Ranks of one host that compute together on GPUs: sums through memory that all of their devices have mapped.

A decode step has two or three sums a layer, of a few rows each, whose time is latency: torch's symmetric memory adds
them in one kernel over NVLink, also inside a CUDA graph. It has not run on a device yet; the code is tested with a
substitute.
"""

import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybrid.runtime.parallel import InferenceGroup, all_gather_objects

MAX_BYTES = 8 << 20  # that one sum takes; NCCL is as fast for more
SUMMED = (torch.bfloat16, torch.float32)  # dtypes that the multicast instructions add


class DeviceGroup(InferenceGroup):
    """An InferenceGroup of ranks that compute on GPUs. On one host they add through symmetric memory, and through
    torch.distributed otherwise.

    dtype: of the sums that go through symmetric memory.
    """

    tensor: "DeviceGroup"

    def __init__(self, group: InferenceGroup, dtype: torch.dtype, device: torch.device):
        self.size, self.index, self.number, self.group = group.size, group.index, group.number, group.group
        self.dtype, self.device = dtype, device
        self.tensor = self if group.tensor is group else DeviceGroup(group.tensor, dtype, device)
        self.buffer: torch.Tensor | None = None  # [MAX_BYTES / itemsize]: mapped by every rank's device
        self.has_multicast = self.is_open = False

    def begin_call(self, rounds: Iterable[int]) -> None:
        """Start a computation of all ranks. The first call is a collective."""
        for group in dict.fromkeys((self, self.tensor)):
            if not group.is_open:
                group._open()
                group.is_open = True

    def _open(self) -> None:
        """Map a buffer on every rank, if all of them can."""
        if self.size == 1 or self.dtype not in SUMMED:
            return
        ranks = all_gather_objects((maps_symmetric_memory(), socket.gethostname()), self.group)
        if len({*ranks}) == 1 and ranks[0][0]:
            self.buffer, self.has_multicast = mapped_buffer(MAX_BYTES, self.dtype, self.device, self.group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes, in place, the sum over the group, with the same bits on every rank. Returns
        `tensor`."""
        each = 16 * self.size  # bytes: every rank adds a part, by vectors of 16 bytes
        fits = tensor.dtype == self.dtype and tensor.nbytes <= MAX_BYTES and tensor.nbytes % each == 0
        if self.buffer is None or not fits or not tensor.is_contiguous():
            return super().sum(tensor)
        part = self.buffer[: tensor.numel()]
        part.copy_(tensor.view(-1))
        sum_in_place(part, self.group.group_name, self.has_multicast)
        tensor.view(-1).copy_(part)
        return tensor


def maps_symmetric_memory() -> bool:
    """Whether torch and this host's GPUs have symmetric memory: kernels, and access of each GPU to every other."""
    if not torch.cuda.is_available() or not hasattr(torch.ops.symm_mem, "two_shot_all_reduce_"):
        return False
    own, others = torch.cuda.current_device(), range(torch.cuda.device_count())
    return all(torch.cuda.can_device_access_peer(own, other) for other in others if other != own)


def mapped_buffer(
    nbytes: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[torch.Tensor, bool]:
    """Return the memory that the devices of all ranks of `group` have mapped, [nbytes / itemsize], and whether they
    can add by multicast. A collective."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # torch's CUDA builds

    buffer = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
    return buffer, symmetric_memory.rendezvous(buffer, group).multicast_ptr != 0


def sum_in_place(part: torch.Tensor, group_name: str, multicast: bool) -> None:
    """All-reduce of the beginning of a mapped buffer. Each element is added by one rank, so that all get the same bits;
    `one_shot_all_reduce`, where every rank adds all elements, does not promise that."""
    if multicast:
        torch.ops.symm_mem.multimem_all_reduce_(part, "sum", group_name)
    else:
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group_name)


def on_devices(group: InferenceGroup, dtype: torch.dtype, device: torch.device) -> InferenceGroup:
    """Return the group; a DeviceGroup if its ranks compute on GPUs."""
    if device.type != "cuda" or group.size == 1 or isinstance(group, DeviceGroup):
        return group
    return DeviceGroup(group, dtype, device)
