"""Casts callers' arguments to what the engine expects: ids int64, masks int64 with 0 and 1, all on one device; numbers
to Python's, checked."""

from collections.abc import Callable
from typing import Any

import torch

MASKS = ("attention_mask", "decoder_attention_mask", "prompt_attention_mask")
IDS = ("inputs", "labels", "cache_position")  # and every name that ends in "_ids"


TINY = torch.finfo(torch.float32).tiny
# What a number that kernels divide by, or its inverse, may be: within float32's normal range.
DIVISOR = f"a number from {TINY:.3g} to {1 / TINY:.3g}"


def is_divisor(value: float) -> bool:
    """Whether a number and its inverse are in float32's normal range."""
    return TINY <= value <= 1 / TINY


def checked_number(name: str, value: Any, kind: type, holds: Callable[[Any], bool], allowed: str) -> Any:
    """Return the argument `name` as a Python number of `kind`, int or float. Scalars of numpy and tensors without
    dimensions count, bools do not.

    Raises ValueError, with what is allowed, for anything else, and unless `holds` is true of the number.
    """
    scalar = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    is_number = isinstance(scalar, int if kind is int else int | float) and not isinstance(scalar, bool)
    if not is_number or not holds(scalar):
        raise ValueError(f"{name}: {value!r} given; it must be {allowed}")
    return scalar


def checked_top_logprobs(value: Any, vocabulary: int) -> int:
    """Return the number of most probable tokens to return at each place. Raises ValueError as `checked_number`."""
    allowed = f"from 0 to the size of the model's vocabulary, {vocabulary}"
    return checked_number("top_logprobs", value, int, lambda k: 0 <= k <= vocabulary, allowed)


def checked_seed(seed: Any, name: str = "seed") -> int | None:
    """Return a seed as an int, or None. Raises ValueError for anything else."""
    return None if seed is None else checked_number(name, seed, int, lambda value: True, "an integer, or None")


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an integer dtype; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_ids(ids: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return the ids of any integer dtype as int64, on `device` if given. Any shape."""
    assert is_integer(ids), f"ids are integers, not {ids.dtype}"
    return ids.to(device=device, dtype=torch.int64)


def as_mask(mask: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a padding mask of any dtype and shape as int64, 1 where it is not 0, on `device` if given.

    int64, not bool: Hugging Face's models compute with it.
    """
    return (mask != 0).to(device=device, dtype=torch.int64)


def as_model_inputs(
    args: tuple, kwargs: dict[str, Any], device: torch.device | None = None
) -> tuple[tuple, dict[str, Any]]:
    """Return arguments of a model's `forward` or `generate`: ids and [rows, tokens] masks cast to int64, every tensor
    on `device`. Positional integer tensors [rows, tokens] count as ids; all other tensors keep their dtype."""

    def settled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name in MASKS and value.dim() == 2:
            return as_mask(value, device)
        if is_integer(value) and (name in IDS or name.endswith("_ids")):
            return as_ids(value, device)
        return value if device is None else value.to(device)

    settled_args = tuple(settled("inputs" if getattr(value, "ndim", 0) == 2 else "", value) for value in args)
    return settled_args, {name: settled(name, value) for name, value in kwargs.items()}


def require_in_vocabulary(ids: torch.Tensor, mask: torch.Tensor | None, vocabulary: int) -> None:
    """Raise IndexError unless all ids, integers [rows, tokens], where `mask` is not 0, are in [0, vocabulary)."""
    real = ids if mask is None else ids[mask.bool()]
    if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < vocabulary:
        raise IndexError(
            f"token ids from {int(real.min())} to {int(real.max())} given; the model's are 0 to {vocabulary - 1}"
        )
