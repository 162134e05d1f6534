"""A rank's slices of weights that do not change: read once, one tensor at a time, and nowhere else afterwards."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hybrid.inference.loader import Read, give, stored_tensors
from hybrid.models.spec import DecoderLayout
from hybrid.models.structure import Structure
from hybrid.parallel import InferenceGroup
from hybrid.profiling import Phase
from hybrid.weights.sliced_snapshot import SlicedSnapshot
from hybrid.weights.slices import Shard, Slice, slices_of


class LoadedSlices(SlicedSnapshot):
    """A rank's slices.  read: the whole of each.

    group: the ranks that have all slices together; its inner group shares heads and matrices, and the others experts.
    The model's own parameters are emptied: they stay the same objects, with nothing in them, as under ZeRO-3.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, layout: DecoderLayout, group: InferenceGroup, read: Read
    ):
        ranks = group.tensor.size
        self.group = group
        self.of_ranks = [
            slices_of(layout, Shard(ranks, index % ranks), Shard(group.size // ranks, index // ranks))
            for index in range(group.size)
        ]
        super().__init__(model, structure, [], 1, slices=self.of_ranks[group.index])
        self.shapes: dict[torch.Tensor, torch.Size] = {}  # of what has been emptied
        for name, param in stored_tensors(model).items():
            if param not in self.cuts:
                continue
            whole = read(name)
            self._cut(param, whole)
            self.peak_bytes = max(self.peak_bytes, self.nbytes() + whole.nbytes)
            self.shapes[param] = whole.shape
            give(param, whole.new_empty(0))

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Nothing to do: there are no newer weights."""
        return 0

    @contextmanager
    def whole(self, params: Iterable[nn.Parameter]) -> Iterator[int]:
        """Inside the block parameters are whole, put together from all ranks' slices; gives their bytes. A
        collective."""
        emptied = [param for param in params if param in self.shapes]
        try:
            for param in emptied:
                give(param, self._put_together(param))
            yield sum(param.nbytes for param in emptied)
        finally:
            for param in emptied:
                give(param, param.new_empty(0))

    def _put_together(self, param: nn.Parameter) -> torch.Tensor:
        """The whole of a parameter. What no slice has, no decoder reads: it is 0."""
        positions = [self._positions(param, index) for index in range(self.group.size)]
        own = [part.flatten() for part in self.parts[param].values() if part is not None]
        mine = torch.cat(own) if own else param.new_empty(0)
        whole = param.new_zeros(self.shapes[param])
        parts = self.group.gather_rows(mine, [len(position) for position in positions])
        for position, part in zip(positions, parts, strict=True):
            real = position > 0  # a slice that has ended is padded
            whole.view(-1)[position[real].long() - 1] = part[real]
        return whole

    def _positions(self, param: nn.Parameter, index: int) -> torch.Tensor:
        """Where in the whole, from 1, each value of a rank's slices lies; 0: nowhere.  int [values]

        Slices are cut of a table of positions as they are of weights.
        """
        shape = self.shapes[param]
        table = torch.arange(1, shape.numel() + 1, dtype=torch.int32 if shape.numel() < 2**31 - 1 else torch.int64)
        table = table.view(shape).to(param.device)
        cuts: dict[tuple, Slice] = {one.key: self.of_ranks[index][one.ref] for one in self.cuts[param]}
        parts = [cuts[key].of(table) for key in self.parts[param]]
        kept = [part.flatten() for part in parts if part is not None]
        return torch.cat(kept) if kept else table.new_empty(0)
