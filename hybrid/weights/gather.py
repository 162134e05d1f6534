"""Gathering ZeRO-3's partitioned parameters, to be read: in place, or into memory of our own."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from hybrid.kernels.host_memory import HostMemory
from hybrid.models.modules import whole_shape
from hybrid.models.quantized import dequantized, is_quantized, read_dtype
from hybrid.runtime.huge_pages import request_huge_pages
from hybrid.runtime.waiting import collective

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it

Param = TypeVar("Param", bound=torch.Tensor)


def is_partitioned(param: torch.Tensor) -> bool:
    """Whether ZeRO-3 partitions this parameter (it may be gathered at the moment)."""
    return hasattr(param, "ds_id")


def whole_bytes(param: torch.Tensor) -> int:
    """Return the size in bytes of a parameter that is read: not partitioned, and dequantized."""
    return whole_shape(param).numel() * read_dtype(param).itemsize


def missing(params: Iterable[Param]) -> list[Param]:
    """Those of `params` that are not gathered now.

    Parameters that the caller has gathered or that ZeRO-3 keeps gathered (persistent ones) are left out: DeepSpeed
    refuses to gather a parameter twice (0.19.8).
    """
    return [param for param in params if is_partitioned(param) and param.ds_status != ZeroParamStatus.AVAILABLE]


@contextmanager
def gathered(params: Iterable[torch.Tensor]) -> Iterator[int]:
    """Inside the block all of `params` are gathered, read-only. Yields the number of bytes gathered.

    A collective unless all are gathered already; every rank must pass the same parameters.
    """
    absent = missing(params)
    with ExitStack() as stack:
        with collective("gathered", group_of(absent)):
            stack.enter_context(zero.GatheredParameters(absent, enabled=bool(absent)))
        yield sum(whole_bytes(param) for param in absent)


def has_plain_shard(param: torch.Tensor) -> bool:
    """Whether this rank's shard of a partitioned parameter is plain data in memory: not quantized, not on NVMe, and not
    laid out by MiCS in nested groups (deepspeed 0.19.8)."""
    if is_quantized(param):
        return False
    shard = param.ds_tensor
    is_in_memory = shard.final_location != OffloadDeviceEnum.nvme and not hasattr(shard, "ds_quant_scale")
    return is_in_memory and not hasattr(param, "comm")


def storage_for(param: torch.Tensor, host: HostMemory | None = None) -> torch.Tensor:
    """Return uninitialized memory for a full partitioned parameter, in its dtype.  [numel]

    host: memory that the ranks of one host share; the call is then a collective. None: on this rank's device.
    """
    numel, dtype = whole_shape(param).numel(), copy_dtype(param)
    if host:
        return host.empty(numel, dtype)
    return request_huge_pages(torch.empty(numel, dtype=dtype, device=get_accelerator().current_device_name()))


def copy_dtype(param: Any) -> torch.dtype:
    """Return the dtype of a copy of a partitioned parameter."""
    return read_dtype(param) if is_quantized(param) else param.ds_tensor.dtype


def partition_groups(params: Iterable[torch.Tensor]) -> set[dist.ProcessGroup]:
    """Return the process groups that ZeRO-3 partitions these parameters over."""
    return {param.ds_process_group for param in params if is_partitioned(param)}


def group_of(params: Iterable[torch.Tensor]) -> dist.ProcessGroup | None:
    """Return the process group that partitions the first of some parameters; None, for all ranks, if there is none."""
    return getattr(next(iter(params), None), "ds_process_group", None)


def memory_of_hosts(params: Iterable[torch.Tensor]) -> HostMemory | None:
    """Return the memory of the ranks that partition these parameters, if they compute on the CPUs of one host. A
    collective."""
    groups = partition_groups(params)
    return HostMemory.shared_by(groups.pop()) if len(groups) == 1 else None


def whole_in(storage: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of `storage` [numel], as from `storage_for`, in the parameter's full shape."""
    return storage.view(whole_shape(param))


def staging_bytes(param: Any) -> int:
    """Return the bytes of staging memory for all-gathering a partitioned parameter: an all-gather also writes the
    padding
    behind the last shard, for which `storage` has no room. 0 without padding, and over gloo, where no padding is
    sent. Quantized parameters are gathered as they are."""
    if is_quantized(param):
        return param.ds_numel * param.ds_tensor.element_size()
    padded = param.ds_tensor.ds_numel * dist.get_world_size(param.ds_process_group)
    is_exact = padded == param.ds_numel or dist.get_backend(param.ds_process_group) == "gloo"
    return 0 if is_exact else padded * param.ds_tensor.element_size()


class AsyncAllGather:
    """An asynchronous all-gather of partitioned parameters straight into the caller's memory.

    storage: for each parameter, memory [numel] for the full tensor, as from `storage_for`. The parameters' own storage
        and status do not change.
    host: the shared memory that `storage` lies in, if any: each rank then writes its own shards, and nothing is sent.
    A collective unless all are gathered already; every rank must pass the same parameters. `storage` is complete when
    `wait` returns.
    """

    def __init__(self, storage: dict[nn.Parameter, torch.Tensor], host: HostMemory | None = None):
        self.storage, self.host = storage, host
        absent = set(missing(storage))
        direct = {param for param in absent if has_plain_shard(param)}
        self.through_deepspeed = [param for param in storage if param not in direct]
        self.nbytes = sum(map(whole_bytes, absent))
        self.staged: dict[nn.Parameter, torch.Tensor] = {}  # targets of all-gathers that write padding too
        self.works: list[dist.Work] = []
        for param in storage:
            if param in direct and host:
                own_part = parts_of(param, storage[param])[dist.get_rank(param.ds_process_group)]
                own_part.copy_(own_shard(param))
            elif param in direct:
                self.works += self._bring(param)

    @property
    def staging_nbytes(self) -> int:
        """Bytes held in addition to `storage` until `wait` returns."""
        return sum(staging.nbytes for staging in self.staged.values())

    def finish_transfers(self) -> None:
        """Wait until nothing is written to `storage` any more."""
        with collective("wait", group_of(self.storage)):
            for work in self.works:
                work.wait()
        self.works = []

    def wait(self) -> None:
        """Wait for the transfers: afterwards `storage` holds every full parameter."""
        self.finish_transfers()
        for param, staging in self.staged.items():
            self.storage[param].copy_(staging[: param.ds_numel])
        self.staged = {}
        if self.host:
            self.host.barrier()
        with gathered(self.through_deepspeed):
            for param in self.through_deepspeed:
                whole_in(self.storage[param], param).copy_(dequantized(param))

    def _bring(self, param: nn.Parameter) -> list[dist.Work]:
        """Start the all-gather of one parameter; the returned works are to be waited for.

        Over gloo each rank sends its shard to every other rank: the same bytes as all_gather, which copies every shard
        twice more, or as broadcasts, which wait for a thread; those took 2-3 and 1.5-2.5 times as long.
        """
        storage, group = self.storage[param], param.ds_process_group
        if dist.get_backend(group) != "gloo":
            target = storage
            if nbytes := staging_bytes(param):
                target = self.staged[param] = storage.new_empty(nbytes // storage.element_size())
            return [all_gather(target, param.ds_tensor.data.to(target.device), group=group, async_op=True)]
        parts = parts_of(param, storage)
        local = parts[dist.get_rank(group)].copy_(own_shard(param))
        peers = [rank for rank in range(len(parts)) if rank != dist.get_rank(group)]
        return [
            *(dist.isend(local, group=group, group_dst=rank) for rank in peers if len(local)),
            *(dist.irecv(parts[rank], group=group, group_src=rank) for rank in peers if len(parts[rank])),
        ]


def parts_of(param: torch.Tensor, storage: torch.Tensor) -> list[torch.Tensor]:
    """Return views of each rank's shard in `storage` [numel], without padding; those of the last ranks may be empty."""
    size, count = param.ds_tensor.ds_numel, dist.get_world_size(param.ds_process_group)
    return [storage[rank * size : (rank + 1) * size] for rank in range(count)]


def own_shard(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a partitioned parameter, without padding."""
    size, rank = param.ds_tensor.ds_numel, dist.get_rank(param.ds_process_group)
    return param.ds_tensor.data[: max(min(size, param.ds_numel - rank * size), 0)]
