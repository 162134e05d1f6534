"""Detecting writes to a model's weights by code other than the engine.

Without a collective, and with the same result on every rank. A partitioned parameter is checked by torch's version
counter of this rank's partition, which DeepSpeed writes on all ranks if `GatheredParameters` has a `modifier_rank`. A
whole parameter is checked by that counter, its address, and a sample of its elements, since a write through `.data` is
not counted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.weights.gather import is_partitioned

SAMPLED = 16  # elements per parameter: a copy, a moving average or a merge changes nearly all of them


class WeightWatch:
    """Detects whether a model's weights were written since the last check."""

    def __init__(self, model: nn.Module):
        params = list(model.parameters())
        self.whole = [param for param in params if not is_partitioned(param)]
        partitioned = [param for param in params if is_partitioned(param)]
        self.uneven = [param for param in partitioned if has_empty_partitions(param)]
        for param in self.uneven:
            if not isinstance(param.partition, CountedPartition):
                param.partition = CountedPartition(param.partition)
        self.even = [param for param in partitioned if not isinstance(param.partition, CountedPartition)]
        self.unreported = False
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
        self.marks = [
            *((param._version, param.data_ptr(), param.numel()) for param in self.whole),
            *(param.ds_tensor._version for param in self.even),
            *(param.partition.writes for param in self.uneven),
        ]
        self.samples = sampled(self.whole)

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


@torch.no_grad()
def sampled(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """About SAMPLED elements of each parameter, as bytes: one uint8 tensor per dtype and device."""
    by_kind: dict[tuple, list[torch.Tensor]] = {}
    for param in params:
        stride = max(param.numel() // SAMPLED, 1)
        if param.is_contiguous():
            elements = param.as_strided((min(param.numel(), SAMPLED),), (stride,))
        else:
            elements = param.flatten()[::stride]
        by_kind.setdefault((param.dtype, param.device), []).append(elements)
    return [torch.cat(elements).view(torch.uint8) for elements in by_kind.values()]
