"""Restoring a model if changing it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybrid.inference.loader import give


@contextmanager
def as_it_was_on_failure(model: nn.Module, with_values: bool) -> Iterator[None]:
    """If the block raises, the model gets its modules, attributes and hooks back, and the exception is raised again.

    with_values: also its tensors, which stay in memory until the block ends.
    """
    states = [(module, state_of(module)) for module in model.modules()]
    own = (*model.parameters(), *model.buffers()) if with_values else ()
    tensors = [(tensor, tensor.detach(), tensor.requires_grad) for tensor in own]
    try:
        yield
    except BaseException:
        for module, state in states:
            module.__dict__.clear()
            module.__dict__.update({name: copied(value) for name, value in state.items()})
        for tensor, before, learns in tensors:
            give(tensor, before)
            tensor.requires_grad_(learns)
        raise


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of its dictionaries (parameters, children, hooks)."""
    return {name: copied(value) for name, value in module.__dict__.items()}


def copied(value: Any) -> Any:
    """A copy of `value` if it is a dictionary, else `value`."""
    return value.copy() if isinstance(value, dict) else value
