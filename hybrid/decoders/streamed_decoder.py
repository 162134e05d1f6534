"""Streaming: a decoder whose weights are gathered layer by layer as it runs, by all ranks together."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from hybrid.decoders.batch import PackedBatch, PagedKV
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.shared_decoder import SharedDecoder
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.parallel import any_rank
from hybrid.weights.lora import Adapted
from hybrid.weights.streaming import WeightStream

# The segments before and after the layers, and the roles whose weights they read.
BEFORE, AFTER = "before the layers", "after the layers"
ENDS = {
    BEFORE: ("embedding", "embedding_norm", "project_in", "positions"),
    AFTER: ("final_norm", "project_out", "head"),
}
Segment = int | str  # a layer's index, BEFORE or AFTER
Owner = nn.Parameter | Adapted


class LayerwiseDecoder:
    """A decoder that runs segment by segment. Its functions are collectives: all ranks call the same ones in the same
    order.

    make: makes the decoder of a layout.  owner: gives the parameter or adapted module that holds a ParamRef's weight.
    adapters: whether adapters are merged into the weights.
    """

    def __init__(
        self,
        layout: DecoderLayout,
        make: Callable[[DecoderLayout], CpuDecoder | TorchDecoder],
        stream: WeightStream,
        owner: Callable[[ParamRef], Owner | None],
        adapters: bool,
    ):
        # All layers use the same positions' rope tables: compute them once.
        rotary = {key: CachedRope(table) for key, table in layout.rotary.items()}
        self.inner = make(replace(layout, rotary=rotary))
        self.spec, self.layout, self.dtype = layout.spec, self.inner.layout, self.inner.dtype
        self.stream, self.owner, self.adapters = stream, owner, adapters
        self.kv, self.reserve = self.inner.kv, self.inner.reserve
        self.context_block = self.inner.context_block

    @property
    def device(self) -> torch.device:
        """The device of the weights and activations."""
        return self.inner.device

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As TorchDecoder's."""
        return self.run([BEFORE], {BEFORE: lambda _: self.inner.embed(ids, positions)})

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """As TorchDecoder's."""
        span = range(first, last)
        return self.run(span, {index: self.layer(index, batch, kv) for index in span}, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As TorchDecoder's."""
        return self.run([AFTER], {AFTER: self.inner.logits}, hidden)

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """As TorchDecoder's."""
        return self.layers(self.embed(batch.ids, batch.positions), batch, kv, 0, len(self.spec.layers))

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """As TorchDecoder's."""
        return self.logits(self.forward(batch, kv))

    def layer(self, index: int, batch: PackedBatch, kv: PagedKV) -> Callable[[torch.Tensor], torch.Tensor]:
        """A layer, as a function of its input."""
        return lambda hidden: self.inner.layers(hidden, batch, kv, index, index + 1)

    def run(
        self,
        segments: Collection[Segment],
        work: dict[Segment, Callable],
        x: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run `work`, segment by segment, on `x`; returns the last result. A segment's weights are gathered while it
        runs.

        Every rank gathers the weights of all `segments`, with or without work, and also after its own work has raised.
        """
        gathering = self.stream.gathered_in_order([self._owners(segment) for segment in segments], self.adapters)
        try:
            for segment, _ in zip(segments, gathering, strict=False):  # `gathering` is exhausted below
                if segment in work:
                    self._bind(segment)
                    x = work[segment](x)
        finally:
            self.inner.unbind()
            for _ in gathering:
                pass
        return x

    def _bind(self, segment: Segment) -> None:
        self.inner.unbind()
        self.inner.bind_part(ENDS.get(segment, ()), [] if segment in ENDS else [segment])

    def _owners(self, segment: Segment) -> list[Owner]:
        if segment in ENDS:
            roles = ENDS[segment]
            refs = [ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in roles]
        else:
            refs = self.layout.layers[segment].values()
        return [owner for owner in dict.fromkeys(map(self.owner, refs)) if owner is not None]


class StreamedDecoder(SharedDecoder):
    """Runs a LayerwiseDecoder for ranks with batches of their own: a forward gathers the weights once for all of them.

    group: the ranks that the weights are partitioned over.
    """

    def __init__(self, layerwise: LayerwiseDecoder, group: dist.ProcessGroup):
        super().__init__(layerwise)
        self.group, self.kv = group, layerwise.kv

    def bind(self) -> None:
        """Does nothing: the weights are read at every forward."""

    def nbytes(self) -> int:
        """Bytes of weight copies that are kept: none."""
        return 0

    def _exchange(
        self,
        batch: PackedBatch | None = None,
        kv: PagedKV | None = None,
        rows: torch.Tensor | None = None,
        wants_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        model, layers, work = self.lockstep, range(len(self.spec.layers)), {}
        if batch is not None:
            work[BEFORE] = lambda _: model.inner.embed(batch.ids, batch.positions)
            work |= {index: model.layer(index, batch, kv) for index in layers}
        if wants_logits or rows is not None:
            work[AFTER] = model.inner.logits
        forward, logits = any_rank([BEFORE in work, AFTER in work], self.device, self.group)
        if not forward and not logits:
            return None
        output = model.run([BEFORE, *layers] * forward + [AFTER] * logits, work, rows)
        return output, output  # the last thing that this rank wants


class CachedRope:
    """A rope table that keeps its latest result."""

    def __init__(self, table: Callable):
        self.table = table
        self.key: tuple[torch.Tensor, torch.dtype] | None = None

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayout.rotary`'s tables: cos and sin."""
        if self.key is None or self.key[1] != dtype or not torch.equal(self.key[0], positions):
            self.cos_sin, self.key = self.table(positions, dtype), (positions, dtype)
        return self.cos_sin
