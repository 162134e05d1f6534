"""Partitioned parameters made whole for a moment, to be read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


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
