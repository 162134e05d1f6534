"""A rank's slices of weights that do not change, read once, one tensor at a time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from hybrid.inference.loader import ReadTensor, set_data, state_tensors
from hybrid.models.model_info import ModelInfo
from hybrid.parallel import InferenceGroup
from hybrid.weights.model_weights import read_weights
from hybrid.weights.slices import Shard, Slice, slices_of
from hybrid.weights.snapshot import Snapshot


class LoadedSlices:
    """A snapshot of a rank's slices of a model's weights, and the whole weights from all ranks' slices.

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
        weights = replace(read_weights(info, layers_per_group=1), groups=())  # they never change
        self.snapshot = snapshot = Snapshot(weights, self.of_ranks[group.index], decoder_only=True)
        self.shapes: dict[torch.Tensor, torch.Size] = {}  # full shapes of the emptied parameters
        for name, param in state_tensors(info.model).items():
            if param not in snapshot.kept:
                continue
            tensor = read(name)
            snapshot.keep(param, tensor)
            snapshot.peak_bytes = max(snapshot.peak_bytes, snapshot.nbytes() + tensor.nbytes)
            self.shapes[param] = tensor.shape
            set_data(param, tensor.new_empty(0))

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
        own = [part.flatten() for part in self.snapshot.parts[param].values() if part is not None]
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
        cuts: dict[tuple, Slice] = {cut.key: self.of_ranks[index][cut.ref] for cut in self.snapshot.kept[param]}
        parts = [cuts[key].of(table) for key in self.snapshot.parts[param]]
        kept = [part.flatten() for part in parts if part is not None]
        return torch.cat(kept) if kept else table.new_empty(0)
