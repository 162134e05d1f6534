"""A rank's slices of weights that do not change, read once, one tensor at a time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hybrid.inference.loader import ReadTensor, set_data, state_tensors
from hybrid.models.model_info import ModelInfo
from hybrid.parallel import InferenceGroup
from hybrid.profiling import Phase
from hybrid.weights.sliced_snapshot import SlicedSnapshot
from hybrid.weights.slices import Shard, Slice, slices_of


class LoadedSlices(SlicedSnapshot):
    """A rank's slices of a model's weights.

    read: gives a full tensor by name.
    group: the ranks that together have all slices: tensor-parallel within `group.tensor`, expert-parallel across.
    The model's own parameters stay the same objects but are emptied, as under ZeRO-3.
    """

    def __init__(self, info: ModelInfo, group: InferenceGroup, read: ReadTensor):
        ranks = group.tensor.size
        self.group = group
        self.of_ranks = [
            slices_of(info.layout, Shard(ranks, index % ranks), Shard(group.size // ranks, index // ranks))
            for index in range(group.size)
        ]
        super().__init__(info.model, info.structure, [], 1, slices=self.of_ranks[group.index])
        self.shapes: dict[torch.Tensor, torch.Size] = {}  # full shapes of the emptied parameters
        for name, param in state_tensors(info.model).items():
            if param not in self.cuts:
                continue
            tensor = read(name)
            self._cut(param, tensor)
            self.peak_bytes = max(self.peak_bytes, self.nbytes() + tensor.nbytes)
            self.shapes[param] = tensor.shape
            set_data(param, tensor.new_empty(0))

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """0: the weights never change."""
        return 0

    @contextmanager
    def whole(self, params: Iterable[nn.Parameter]) -> Iterator[int]:
        """Inside the block `params` hold their full tensors, gathered from all ranks' slices. Yields the bytes
        gathered. A collective of the group."""
        emptied = [param for param in params if param in self.shapes]
        try:
            for param in emptied:
                set_data(param, self._gathered(param))
            yield sum(param.nbytes for param in emptied)
        finally:
            for param in emptied:
                set_data(param, param.new_empty(0))

    def _gathered(self, param: nn.Parameter) -> torch.Tensor:
        """The full tensor of a parameter. Elements that are in no slice, which no decoder reads, are 0."""
        positions = [self._positions(param, index) for index in range(self.group.size)]
        own = [part.flatten() for part in self.parts[param].values() if part is not None]
        mine = torch.cat(own) if own else param.new_empty(0)
        whole = param.new_zeros(self.shapes[param])
        parts = self.group.gather_rows(mine, [len(position) for position in positions])
        for position, part in zip(positions, parts, strict=True):
            real = position > 0  # not padding
            whole.view(-1)[position[real].long() - 1] = part[real]
        return whole

    def _positions(self, param: nn.Parameter, index: int) -> torch.Tensor:
        """The position in the full tensor, counted from 1, of each value of a rank's slices; 0: padding.  int [values]

        Computed by slicing a tensor of positions in the same way as the weights.
        """
        shape = self.shapes[param]
        table = torch.arange(1, shape.numel() + 1, dtype=torch.int32 if shape.numel() < 2**31 - 1 else torch.int64)
        table = table.view(shape).to(param.device)
        cuts: dict[tuple, Slice] = {cut.key: self.of_ranks[index][cut.ref] for cut in self.cuts[param]}
        parts = [cuts[key].of(table) for key in self.parts[param]]
        kept = [part.flatten() for part in parts if part is not None]
        return torch.cat(kept) if kept else table.new_empty(0)
