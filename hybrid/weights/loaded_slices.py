"""A rank's slices of weights that do not change: read once, one tensor at a time, and nowhere else afterwards."""

from contextlib import AbstractContextManager

from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.architectures.spec import Reading
from hybrid.architectures.structure import Structure
from hybrid.profiling import Phase
from hybrid.weights.loading import Read, give, stored_tensors, whole_as_they_run
from hybrid.weights.sliced_snapshot import SlicedSnapshot
from hybrid.weights.tensor_parallel import Shard, slices_of


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
            give(param, whole.new_empty(0))

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Nothing to do: there are no newer weights."""
        return 0

    def whole(self, read: Read) -> AbstractContextManager[list[RemovableHandle]]:
        """As `whole_as_they_run`, of the whole model."""
        return whole_as_they_run(self.outer_and_layers, self.param_names, read)
