"""A rank's slices of weights that do not change: read once, one tensor at a time, and nowhere else afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.architectures.spec import Reading
from hybrid.architectures.structure import Structure
from hybrid.profiling import Phase
from hybrid.weights.loading import stored_tensors
from hybrid.weights.sliced_snapshot import SlicedSnapshot
from hybrid.weights.tensor_parallel import Shard, slices_of

Read = Callable[[str], torch.Tensor]  # by name in the model, a tensor as inference wants it, whole


class LoadedSlices(SlicedSnapshot):
    """A rank's slices.  read: the whole of each.

    The model's own parameters are emptied: they stay the same objects, with nothing in them, as under ZeRO-3.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, reading: Reading, shard: Shard, experts: Shard, read: Read
    ):
        super().__init__(model, structure, [], 1, slices=slices_of(reading, shard, experts))
        self.outer_and_layers = [part.module for part in (*structure.outer, *structure.layers)]
        self.param_names = {tensor: name for name, tensor in stored_tensors(model).items() if tensor in self.cuts}
        for param, name in self.param_names.items():
            whole = read(name)
            self._cut(param, whole)
            self.peak_bytes = max(self.peak_bytes, self.nbytes() + whole.nbytes)
            self._give(param, whole.new_empty(0))

    @staticmethod
    def _give(param: nn.Parameter, value: torch.Tensor) -> None:
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=False))

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Nothing to do: there are no newer weights."""
        return 0

    @contextmanager
    def whole(self, read: Read) -> Iterator[list[RemovableHandle]]:
        """Inside the block a part of the model has its weights, whole, while it runs: the model's own forward works.
        Gives the hooks that see to it."""

        def fill(module: nn.Module, args: tuple) -> None:
            for param in module.parameters():
                self._give(param, read(self.param_names[param]))

        def empty(module: nn.Module, args: tuple, output: object) -> None:
            for param in module.parameters():
                self._give(param, param.new_empty(0))

        handles = []
        try:
            for module in self.outer_and_layers:
                handles += [module.register_forward_pre_hook(fill), module.register_forward_hook(empty)]
            yield handles
        finally:
            for handle in handles:
                handle.remove()
