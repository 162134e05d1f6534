"""Transfers of partitioned weights in which each rank receives its slices only, in one all-to-all for many weights."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from hybrid.runtime.waiting import collective
from hybrid.weights.gather import group_of, own_shard
from hybrid.weights.slices import Slice


class ContiguousRanges(NamedTuple):
    """Runs of consecutive elements of a flat parameter, and where they lie in a rank's slice.

    Element j of run i is element `first + i·stride + j` of the parameter, and `target + i·target_stride +
    j·target_step` of the slice. Runs do not overlap: `width` <= `stride`.
    """

    count: int  # type: ignore[assignment]  # not tuple.count
    width: int
    first: int
    stride: int
    target: int
    target_stride: int
    target_step: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.width

    def numel_before(self, position: int) -> int:
        """Return the number of the elements that lie before `position` of the parameter."""
        run, offset = divmod(max(position - self.first, 0), self.stride)
        return min(run * self.width + min(offset, self.width), self.numel)

    def within(self, first: int, last: int) -> list["ContiguousRanges"]:
        """Return the elements that lie in [first, last) of the parameter: part of a run, whole runs, part of a run."""
        start, stop, pieces = self.numel_before(first), self.numel_before(last), []
        while start < stop:
            run, offset = divmod(start, self.width)
            count = 1 if offset else max((stop - start) // self.width, 1)
            piece = self._replace(
                count=count,
                width=min(self.width - offset, stop - start),
                first=self.first + run * self.stride + offset,
                target=self.target + run * self.target_stride + offset * self.target_step,
            )
            pieces.append(piece)
            start += piece.numel
        return pieces

    def of_shard(self, shard: torch.Tensor, first: int) -> torch.Tensor:
        """Return a view of the elements.  [count, width]  shard: elements of the parameter, from `first` on."""
        offset = shard.storage_offset() + self.first - first
        return shard.as_strided((self.count, self.width), (self.stride, 1), offset)

    def of_slice(self, part: torch.Tensor) -> torch.Tensor:
        """Return a view of the elements.  [count, width]  part: the slice, contiguous."""
        offset = part.storage_offset() + self.target
        return part.as_strided((self.count, self.width), (self.target_stride, self.target_step), offset)


def runs_between(source: torch.Tensor, target: torch.Tensor) -> ContiguousRanges | None:
    """Return the runs by which a view `source` of a flat parameter becomes `target`, a view of a slice. None if it is
    not made
    of runs at one distance: three dimensions that do not merge, or no two neighbours in memory."""
    dims: list[tuple[int, int, int]] = []  # size and both strides, as few as possible, in the parameter's order
    by_stride = sorted(zip(source.shape, source.stride(), target.stride(), strict=True), key=lambda dim: -dim[1])
    for size, stride, target_stride in by_stride:
        if dims and dims[-1][1:] == (size * stride, size * target_stride):
            dims[-1] = (dims[-1][0] * size, stride, target_stride)
        elif size > 1:
            dims.append((size, stride, target_stride))
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1, 1))
    if len(dims) == 1:
        dims.insert(0, (1, dims[0][0], 0))
    (count, stride, target_stride), (width, _, target_step) = dims[:2]
    if len(dims) > 2 or stride < width:
        return None
    first, to = int(source.storage_offset()), int(target.storage_offset())
    return ContiguousRanges(count, width, first, stride, to, target_stride, target_step)


def runs_of(part: Slice, shape: torch.Size) -> list[ContiguousRanges] | None:
    """Where the elements of a slice lie in a parameter of this shape; [] if another rank has all of it. None: they do
    not lie in runs at one distance, or `part.ref.select` makes a copy, as of rows interleaved by head."""
    whole = torch.empty(shape, device="meta")
    pairs = [(source, target) for source, target in part.views(whole) if source.numel()]
    if any(source.untyped_storage()._cdata != whole.untyped_storage()._cdata for source, _ in pairs):
        return None
    runs = [runs_between(source, target) for source, target in pairs]
    return None if None in runs else runs


Layout = list[
    list[list[ContiguousRanges]]
]  # of a parameter, by index in an inference group: the runs of each of its slices
Transfer = tuple[nn.Parameter, int, ContiguousRanges]  # a parameter, the number of a slice of it, and elements of both


def layout_of(shape: torch.Size, parts: list[Slice], size: int) -> Layout | None:
    """Return the layout of a parameter's slices on the `size` ranks of a group. None: it is to be gathered whole.

    Besides slices that are not made of runs, these are matrices that every rank keeps whole: they are gathered straight
    into their copies, without buffers.
    """
    if len(shape) > 1 and all(part.cut is None for part in parts):
        return None
    layout = [[runs_of(part.at(index), shape) for part in parts] for index in range(size)]
    return None if any(None in slices for slices in layout) else layout


def exchange_bytes(param: torch.Tensor, layout: Layout) -> int:
    """Return temporary bytes of this rank while a partitioned parameter is exchanged: what it sends and receives."""
    ranks, rank, numel = group_ranks(param), dist.get_rank(param.ds_process_group), param.ds_tensor.ds_numel
    in_shard = [
        sum(runs.numel_before((rank + 1) * numel) - runs.numel_before(rank * numel) for runs in chain(*slices))
        for slices in layout
    ]
    sent = sum(in_shard[rank % len(layout)] for rank in ranks)
    received = sum(runs.numel for runs in chain(*layout[ranks[rank] % len(layout)]))
    return (sent + received) * param.ds_tensor.element_size() + copied_bytes(param)


def group_ranks(param: torch.Tensor) -> list[int]:
    """Return the ranks that a parameter is partitioned over."""
    return dist.get_process_group_ranks(param.ds_process_group)


def exchanges_of(layouts: dict[nn.Parameter, Layout]) -> "list[SliceExchange]":
    """Exchanges of partitioned parameters, one for each process group and dtype."""
    kinds: dict[tuple, dict[nn.Parameter, Layout]] = {}
    for param, layout in layouts.items():
        kinds.setdefault((param.ds_process_group, param.ds_tensor.dtype), {})[param] = layout
    return [SliceExchange(alike) for alike in kinds.values()]


class SliceExchange:
    """An asynchronous all-to-all, in which each rank receives its slices of partitioned parameters from all shards.

    layouts: of parameters of one process group and dtype that are not gathered now; inference groups are consecutive
        ranks. Starts a collective of the process group, which `finish` ends: every rank must pass the same parameters.
    """

    def __init__(self, layouts: dict[nn.Parameter, Layout]):
        self.layouts = layouts
        first = next(iter(layouts))
        self.ranks, self.rank = group_ranks(first), dist.get_rank(first.ds_process_group)
        sent = [list(self._transfers(self.rank, peer)) for peer in range(len(self.ranks))]
        received = [list(self._transfers(peer, self.rank)) for peer in range(len(self.ranks))]
        send_sizes, sizes = ([sum(runs.numel for *_, runs in by) for by in each] for each in (sent, received))
        device = torch.device(get_accelerator().current_device_name())
        sending, self.received = first.ds_tensor.new_empty(sum(send_sizes), device=device), list(chain(*received))
        self.buffer = sending.new_empty(sum(sizes))
        shards = {param: own_shard(param).to(device) for param in layouts}
        self.nbytes = sending.nbytes + self.buffer.nbytes + sum(map(copied_bytes, layouts))
        for (param, _, runs), packed in packed_in(sending, list(chain(*sent))):
            packed.copy_(runs.of_shard(shards[param], self.rank * param.ds_tensor.ds_numel))
        group = first.ds_process_group
        self.work = dist.all_to_all_single(self.buffer, sending, sizes, send_sizes, group=group, async_op=True)

    def _transfers(self, sender: int, receiver: int) -> Iterator[Transfer]:
        """Yield the transfers from one rank to another, in order."""
        for param, layout in self.layouts.items():
            size = param.ds_tensor.ds_numel
            for number, slice_runs in enumerate(layout[self.ranks[receiver] % len(layout)]):
                for runs in slice_runs:
                    for piece in runs.within(sender * size, (sender + 1) * size):
                        yield param, number, piece

    def finish(self, slices: dict[nn.Parameter, list[torch.Tensor | None]]) -> int:
        """Wait, and copy the received data into the slices, which are contiguous; padding becomes 0. Returns its bytes.

        slices: of each parameter, in the order of its layout; None: another rank has all of it.
        """
        with collective("finish", group_of(self.layouts)):
            self.work.wait()
        for param, layout in self.layouts.items():
            for part, slice_runs in zip(slices[param], layout[self.ranks[self.rank] % len(layout)], strict=True):
                if part is not None and sum(runs.numel for runs in slice_runs) < part.numel():
                    part.zero_()
        for (param, number, runs), packed in packed_in(self.buffer, self.received):
            runs.of_slice(slices[param][number]).copy_(packed)
        return self.buffer.nbytes


def copied_bytes(param: torch.Tensor) -> int:
    """Return the bytes of a shard in host memory that is copied to the device to be sent: 0 if it is there."""
    is_offloaded = param.ds_tensor.device.type == "cpu" != get_accelerator().device_name()
    return param.ds_tensor.nbytes if is_offloaded else 0


def packed_in(buffer: torch.Tensor, transfers: list[Transfer]) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Each transfer, and its place in a flat buffer.  [count, width]"""
    pieces = buffer.split([runs.numel for *_, runs in transfers])
    for transfer, piece in zip(transfers, pieces, strict=True):
        yield transfer, piece.view(transfer[2].count, transfer[2].width)
