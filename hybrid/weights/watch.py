"""What others than the engine do to a model's weights.

Seen without a collective, and the same on every rank: of a partitioned parameter by the counter that torch keeps of
writes to this rank's partition, which DeepSpeed writes on all ranks where `GatheredParameters` has a `modifier_rank`;
of a whole one by that counter, its address, and a sample of its elements, as a write through `.data` is not counted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.weights.gather import is_partitioned

SAMPLED = 16  # elements of a parameter: a copy, a moving average or a merge changes nearly all of them


class WeightWatch:
    """Whether a model's weights are those that they were when last looked at."""

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
        """What is written in the block is known to the engine, or is nothing new."""
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
        """Leave nothing on the parameters."""
        while self.uneven:
            param = self.uneven.pop()
            param.partition = param.partition.own


class CountedPartition:
    """DeepSpeed's `param.partition`, which ends a `GatheredParameters`, with a count of those that wrote.

    For a parameter so small that some ranks' partitions are empty: there nothing is written, and nothing counted.
    """

    def __init__(self, own: Any):
        self.own, self.writes = own, 0

    def __call__(self, *args: Any, has_been_updated: bool = False, **kwargs: Any) -> None:
        self.writes += has_been_updated
        self.own(*args, has_been_updated=has_been_updated, **kwargs)


def has_empty_partitions(param: torch.Tensor) -> bool:
    """Whether a rank has nothing but padding of a partitioned parameter."""
    ranks = dist.get_world_size(param.ds_process_group)
    return (ranks - 1) * param.ds_tensor.ds_numel >= param.ds_numel


@torch.no_grad()
def sampled(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Up to SAMPLED elements of each parameter, as bytes: a tensor for each dtype and device."""
    found: dict[tuple, list[torch.Tensor]] = {}
    for param in params:
        stride = max(param.numel() // SAMPLED, 1)
        if param.is_contiguous():
            elements = param.as_strided((min(param.numel(), SAMPLED),), (stride,))
        else:
            elements = param.flatten()[::stride]
        found.setdefault((param.dtype, param.device), []).append(elements)
    return [torch.cat(elements).view(torch.uint8) for elements in found.values()]
