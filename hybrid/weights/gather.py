"""Partitioned parameters made whole for a moment, to be read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from hybrid.weights.host_memory import HostMemory

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


def is_partitioned(param: torch.Tensor) -> bool:
    """Whether ZeRO-3 owns this parameter (it may be whole at the moment all the same)."""
    return hasattr(param, "ds_id")


def whole_shape(param: torch.Tensor) -> torch.Size:
    """The parameter's shape when it is whole."""
    return param.ds_shape if is_partitioned(param) else param.shape


def whole_bytes(param: torch.Tensor) -> int:
    """The parameter's size in bytes when it is whole."""
    return whole_shape(param).numel() * param.element_size()


def missing(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `params` that this rank holds only a part of now.

    What the caller has gathered, or what ZeRO-3 keeps whole (persistent parameters), is used as it is: DeepSpeed
    refuses to gather a parameter twice (0.19.8).
    """
    return [param for param in params if is_partitioned(param) and param.ds_status != ZeroParamStatus.AVAILABLE]


@contextmanager
def gathered(params: Iterable[torch.Tensor]) -> Iterator[int]:
    """Inside the block every one of `params` is whole, to be read and not written. Gives the bytes gathered.

    A collective, unless nothing is missing; every rank must come with the same parameters.
    """
    absent = missing(params)
    with zero.GatheredParameters(absent, enabled=bool(absent)):
        yield sum(whole_bytes(param) for param in absent)


def has_plain_shard(param: torch.Tensor) -> bool:
    """Whether this rank's part of a partitioned parameter is just the part: not quantized, not on an NVMe drive, and
    not laid out in MiCS's groups of groups (deepspeed 0.19.8)."""
    shard = param.ds_tensor
    stored = shard.final_location != OffloadDeviceEnum.nvme and not hasattr(shard, "ds_quant_scale")
    return stored and not hasattr(param, "comm")


def storage_for(param: torch.Tensor, host: HostMemory | None = None) -> torch.Tensor:
    """Memory for the whole of a partitioned parameter.  [numel]

    host: where ranks share it; a collective then.
    """
    dtype = param.ds_tensor.dtype
    if host:
        return host.empty(param.ds_numel, dtype)
    return torch.empty(param.ds_numel, dtype=dtype, device=get_accelerator().current_device_name())


def whole_in(storage: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The parameter's shape over the memory that `storage_for` gave for it."""
    return storage.view(whole_shape(param))


def staging_bytes(param: torch.Tensor) -> int:
    """Bytes that a `Fetch` of a partitioned parameter takes beside its storage: an all-gather writes the padding behind
    the last part too, which has no place there. Over gloo no padding is sent."""
    padded = param.ds_tensor.ds_numel * dist.get_world_size(param.ds_process_group)
    is_exact = padded == param.ds_numel or dist.get_backend(param.ds_process_group) == "gloo"
    return 0 if is_exact else padded * param.ds_tensor.element_size()


class Fetch:
    """Partitioned parameters on their way into memory of ours: each part goes where it belongs, and nowhere else.

    storage: for each parameter, memory for the whole of it, as of `storage_for`. Parameters keep their own storage and
    status.
    host: where `storage` lies, if ranks share it: each writes its own parts, and nobody sends anything.
    A collective, unless all are whole; every rank must come with the same parameters. Nothing is there before `wait`.
    """

    def __init__(self, storage: dict[torch.Tensor, torch.Tensor], host: HostMemory | None = None):
        self.storage, self.host = storage, host
        absent = set(missing(storage))
        direct = {param for param in absent if has_plain_shard(param)}
        self.others = [param for param in storage if param not in direct]
        self.nbytes = sum(map(whole_bytes, absent))
        self.staged: dict[torch.Tensor, torch.Tensor] = {}  # all-gathers that write more than the storage holds
        self.works: list[dist.Work] = []
        for param in storage:
            if param in direct and host:
                own_part(param, storage[param]).copy_(own_shard(param))
            elif param in direct:
                self.works += self._bring(param)

    @property
    def staging_nbytes(self) -> int:
        """Bytes taken beside `storage` until `wait` returns."""
        return sum(staging.nbytes for staging in self.staged.values())

    def wait(self) -> None:
        """Every parameter is whole in its storage from here on."""
        for work in self.works:
            work.wait()
        for param, staging in self.staged.items():
            self.storage[param].copy_(staging[: param.ds_numel])
        self.works, self.staged = [], {}
        if self.host:
            self.host.settle()
        with gathered(self.others):
            for param in self.others:
                whole_in(self.storage[param], param).copy_(param)

    def _bring(self, param: torch.Tensor) -> list[dist.Work]:
        """Starts what brings a parameter's parts together.

        Over gloo each rank sends its part to every other: the same bytes as all_gather's, which copies every part twice
        more, or a broadcast's, which waits for a thread; they took 2-3 and 1.5-2.5 times as long.
        """
        storage, group = self.storage[param], param.ds_process_group
        if dist.get_backend(group) != "gloo":
            target = storage
            if nbytes := staging_bytes(param):
                target = self.staged[param] = storage.new_empty(nbytes // storage.element_size())
            return [all_gather(target, param.ds_tensor.data.to(target.device), group=group, async_op=True)]
        parts = parts_of(param, storage)
        own = parts[dist.get_rank(group)].copy_(own_shard(param))
        others = [rank for rank in range(len(parts)) if rank != dist.get_rank(group)]
        return [
            *(dist.isend(own, group=group, group_dst=rank) for rank in others if len(own)),
            *(dist.irecv(parts[rank], group=group, group_src=rank) for rank in others if len(parts[rank])),
        ]


def parts_of(param: torch.Tensor, storage: torch.Tensor) -> list[torch.Tensor]:
    """Where each rank's part lies in the memory of the whole, without the padding; the last ones may be empty."""
    size, count = param.ds_tensor.ds_numel, dist.get_world_size(param.ds_process_group)
    return [storage[rank * size : (rank + 1) * size] for rank in range(count)]


def own_part(param: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """Where this rank's part lies in the memory of the whole."""
    return parts_of(param, storage)[dist.get_rank(param.ds_process_group)]


def own_shard(param: torch.Tensor) -> torch.Tensor:
    """This rank's part, without the padding."""
    size, rank = param.ds_tensor.ds_numel, dist.get_rank(param.ds_process_group)
    return param.ds_tensor.data[: max(min(size, param.ds_numel - rank * size), 0)]
