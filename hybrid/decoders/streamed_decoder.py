"""Streaming: a decoder whose weights are gathered layer by layer as it runs, by all ranks together."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from hybrid.decoders.batch import PackedBatch, PagedKV
from hybrid.decoders.cpu_decoder import CpuDecoder
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


class Passes:
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
        rotary = {key: Remembered(table) for key, table in layout.rotary.items()}
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
        given: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run `work`, from segment to segment, on `given`; returns the last result. A segment's weights are gathered
        while it runs.

        Every rank gathers the weights of all `segments`, with or without work, and also after its own work has raised.
        """
        gathered = self.stream.gathered_in_order([self._owners(segment) for segment in segments], self.adapters)
        try:
            for segment, _ in zip(segments, gathered, strict=False):  # `gathered` is exhausted below
                if segment in work:
                    self._bind(segment)
                    given = work[segment](given)
        finally:
            self.inner.unbind()
            for _ in gathered:
                pass
        return given

    def _bind(self, segment: Segment) -> None:
        self.inner.unbind()
        self.inner.bind_part(ENDS.get(segment, ()), [] if segment in ENDS else [segment])

    def _owners(self, segment: Segment) -> list[Owner]:
        if segment in ENDS:
            roles = ENDS[segment]
            refs = [ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in roles]
        else:
            refs = self.layout.layers[segment].values()
        found = (self.owner(ref) for ref in refs)
        return list(dict.fromkeys(one for one in found if one is not None))


class StreamedDecoder:
    """Runs Passes for ranks with batches of their own: every forward waits for all ranks of the group, and gathers the
    weights once for all of them.

    To its callers it is a decoder of this rank's batch. `finish` runs dummy steps until every rank is done.
    group: the ranks that the weights are partitioned over.
    """

    def __init__(self, passes: Passes, group: dist.ProcessGroup):
        self.lockstep, self.group = passes, group
        self.spec, self.layout, self.dtype = passes.spec, passes.layout, passes.dtype
        self.kv, self.reserve = passes.kv, passes.reserve

    @property
    def device(self) -> torch.device:
        """The device of the weights and activations."""
        return self.lockstep.device

    def bind(self) -> None:
        """Does nothing: the weights are read at every pass."""

    def nbytes(self) -> int:
        """Bytes of weight copies that are kept: none."""
        return 0

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output for every token, [tokens, hidden]. Writes the new tokens' keys and values to `kv`."""
        return self._together(batch, kv)

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence.  float32 [sequences, vocab]"""
        return self._together(batch, kv, judged=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocab]"""
        return self._together(rows=hidden, judged=True)

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""
        while self._meet(False, False) != [False, False]:
            pass

    def _together(
        self,
        batch: PackedBatch | None = None,
        kv: PagedKV | None = None,
        rows: torch.Tensor | None = None,
        judged: bool = False,
    ) -> torch.Tensor:
        passes, work = self.lockstep, {}
        if batch is not None:
            work[BEFORE] = lambda _: passes.inner.embed(batch.ids, batch.positions)
            work |= {index: passes.layer(index, batch, kv) for index in range(len(self.spec.layers))}
        if judged:
            work[AFTER] = passes.inner.logits
        return self._meet(batch is not None, judged, work, rows)

    def _meet(self, forward: bool, judged: bool, work: dict | None = None, given: torch.Tensor | None = None):
        """An all-reduce of whether any rank wants a forward, and logits; then a pass over the segments that these
        need.

        Returns the result of this rank's work; without work, what any rank wanted.
        """
        wanted = any_rank([forward, judged], self.device, self.group)
        layers = range(len(self.spec.layers))
        segments = [BEFORE, *layers] * wanted[0] + [AFTER] * wanted[1]
        if segments:
            given = self.lockstep.run(segments, work or {}, given)
        return wanted if work is None else given


class Remembered:
    """A rope table that caches its latest result."""

    def __init__(self, table: Callable):
        self.table = table
        self.asked: tuple[torch.Tensor, torch.dtype] | None = None

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayout.rotary`'s tables: cos and sin."""
        if self.asked is None or self.asked[1] != dtype or not torch.equal(self.asked[0], positions):
            self.given, self.asked = self.table(positions, dtype), (positions, dtype)
        return self.given
