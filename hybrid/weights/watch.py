"""Detecting writes to a model's weights by code other than the engine.

Without a collective, and with the same result on every rank. A partitioned parameter is checked by torch's version
counter of this rank's partition, which DeepSpeed writes on all ranks if `GatheredParameters` has a `modifier_rank`. A
whole parameter is checked by that counter, its address, and a sample of its elements, since a write through `.data` is
not counted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.weights.gather import is_partitioned

KIND, VERSION = attrgetter("shape", "dtype", "device"), attrgetter("_version")
PARTITION_VERSION, PARTITION_WRITES = attrgetter("ds_tensor._version"), attrgetter("partition.writes")
SAMPLED = 16  # elements per parameter: a copy, a moving average or a merge changes nearly all of them


class WeightWatch:
    """Detects whether parameters were written since the last check.

    Args:
        keeps_views: keep views of the sampled elements from check to check, which is faster. They keep the parameters'
            memory alive, so only the owner of that memory may set it.
    """

    def __init__(self, params: Iterable[nn.Parameter], keeps_views: bool = False):
        params, self.keeps_views = list(params), keeps_views
        self.whole = [param for param in params if not is_partitioned(param)]
        partitioned = [param for param in params if is_partitioned(param)]
        self.uneven = [param for param in partitioned if has_empty_partitions(param)]
        for param in self.uneven:
            if not isinstance(param.partition, CountedPartition):
                param.partition = CountedPartition(param.partition)
        self.even = [param for param in partitioned if not isinstance(param.partition, CountedPartition)]
        self.unreported = False
        self.where: tuple[list, list] | None = None  # shapes, dtypes and addresses of `whole`
        self.views: list[list[torch.Tensor]] = []  # of the sampled elements
        self._note()

    def written(self) -> bool:
        """Whether weights were written since the last call, other than in an `ignoring` block."""
        before, samples, unreported = self.marks, self.samples, self.unreported
        self._note()
        self.unreported = False
        return unreported or before != self.marks or not all(map(torch.equal, samples, self.samples))

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Inside the block writes are not reported: the engine knows of them, or they do not change values."""
        self.unreported = self.written()
        try:
            yield
        finally:
            self._note()

    def _note(self) -> None:
        where = list(map(KIND, self.whole)), list(map(torch.Tensor.data_ptr, self.whole))
        views = self.views if self.keeps_views and where == self.where else sampled(self.whole)
        self.where, self.views = where, views if self.keeps_views else []
        versions = map(VERSION, self.whole), map(PARTITION_VERSION, self.even), map(PARTITION_WRITES, self.uneven)
        self.marks = where, *map(list, versions)
        self.samples = [torch.cat(elements).view(torch.uint8) for elements in views]

    def close(self) -> None:
        """Take the counters off the parameters."""
        while self.uneven:
            param = self.uneven.pop()
            param.partition = param.partition.own


class CountedPartition:
    """Wraps DeepSpeed's `param.partition`, which `GatheredParameters` calls at its end, and counts the calls after a
    write.

    For parameters so small that some ranks' partitions are empty: torch's counter does not change on those ranks.
    """

    def __init__(self, own: Any):
        self.own, self.writes = own, 0

    def __call__(self, *args: Any, has_been_updated: bool = False, **kwargs: Any) -> None:
        self.writes += has_been_updated
        self.own(*args, has_been_updated=has_been_updated, **kwargs)


def has_empty_partitions(param: torch.Tensor) -> bool:
    """Whether some rank's partition of a parameter is only padding."""
    ranks = dist.get_world_size(param.ds_process_group)
    return (ranks - 1) * param.ds_tensor.ds_numel >= param.ds_numel


def sampled(params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return about SAMPLED elements of each parameter: a list for each dtype and device. They are views of contiguous
    parameters, and copies of others."""
    by_kind: dict[tuple, list[torch.Tensor]] = {}
    # Detached: views of the parameters themselves could not be read once an optimizer has written with gradients on.
    for param in map(torch.Tensor.detach, params):
        stride = max(param.numel() // SAMPLED, 1)
        if param.is_contiguous():
            elements = param.as_strided((min(param.numel(), SAMPLED),), (stride,))
        else:
            elements = param.flatten()[::stride]
        by_kind.setdefault((param.dtype, param.device), []).append(elements)
    return list(by_kind.values())
