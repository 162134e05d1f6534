"""Streaming: a decoder whose weights are gathered layer by layer as it runs, by all ranks together."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hybrid.decoders.batch import PREFILL_TOKENS, KVWeights, LayerActivations, PackedBatch, PagedKV
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.models.spec import DecoderLayout, RopeTable
from hybrid.runtime.parallel import any_rank, stop_others
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.lora import AdaptedModule
from hybrid.weights.streaming import WeightStream

# The segments before and after the layers, and the roles whose weights they read.
BEFORE, AFTER = "before the layers", "after the layers"
ENDS = {
    BEFORE: ("embedding", "embedding_norm", "project_in", "positions"),
    AFTER: ("final_norm", "project_out", "head"),
}
Segment = int | str  # a layer's index, BEFORE or AFTER
DONE, IDLE = object(), object()


class StreamedDecoder:
    """Runs a decoder segment by segment, for ranks with batches of their own: a forward gathers the weights once for
    all of them. All ranks call the same functions in the same order.

    make: makes the decoder of a layout over `weights`.
    """

    vocabulary = group = None  # each rank has its own tokens
    mixed_adapters: tuple[str, ...] = ()  # all rows have the same adapters
    continues_past_ends = False
    kv_weights: KVWeights | None = None
    samples_in_kernel = samples_with_penalties = False
    prefill_tokens = PREFILL_TOKENS  # fewer would gather the layers more often

    def __init__(
        self,
        layout: DecoderLayout,
        weights: DecoderWeights,
        stream: WeightStream,
        make: Callable[[DecoderLayout, DecoderWeights], WholeDecoder],
    ):
        # All layers use the same positions' rope tables: compute them once.
        rotary: dict[str, RopeTable] = {key: CachedRope(table) for key, table in layout.rotary.items()}
        self.inner = inner = make(replace(layout, rotary=rotary), weights)
        self.spec, self.layout, self.dtype, self.reserve = inner.spec, inner.layout, inner.dtype, inner.reserve
        self.weights, self.stream, self.process_group = weights, stream, weights.embedding().ds_process_group
        self.kv, self.states, self.context_block = inner.kv, inner.states, inner.context_block
        self.keeps_hidden_states = inner.keeps_hidden_states

    @property
    def device(self) -> torch.device:
        """The device of the weights and activations."""
        return self.inner.device

    def bind(self) -> None:
        """Do nothing: the weights are read at every forward."""

    def forward(self, batch: PackedBatch, kv: PagedKV, activations: LayerActivations | None = None) -> torch.Tensor:
        """Return the last layer's output for this rank's tokens, [tokens, hidden]. Writes their keys and values to
        `kv`, and the layers' inputs to `activations`."""
        return self._exchange(batch, kv, activations=activations)

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after one new token for each of this rank's sequences.  float32 [sequences, vocab]"""
        return self._exchange(batch, kv, wants_logits=True)

    def verify(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Return the logits after every token of this rank's batch.  float32 [tokens, vocab]"""
        return self._exchange(batch, kv, wants_logits=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output [n, hidden].  float32 [n, vocab]"""
        return self._exchange(rows=hidden)

    def finish(self, interrupt: BaseException | None = None) -> None:
        """Run dummy steps until every rank is done; after an interrupt of this rank, stop the others."""
        while self._exchange(interrupt=interrupt) is not DONE:
            pass

    def join(self) -> bool:
        """Take part in a step of the other ranks without work; return whether one of them had any. Ranks that finish
        wait for this one, which may have work later."""
        return self._exchange(stays=True) is not IDLE

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As TorchDecoder's."""
        return self.run([BEFORE], {BEFORE: lambda _: self.inner.embed(ids, positions)})

    def run(
        self, segments: Collection[Segment], work: dict[Segment, Callable], x: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run `work` on `x`, segment by segment, while the segment's weights are gathered; returns the last result.

        Every rank gathers the weights of all `segments`, with or without work, and also after its own work has raised.
        """
        owners = [self._owners(segment) for segment in segments]
        gathering = self.stream.gathered_in_order(owners, self.weights.adapters)
        try:
            for segment, _ in zip(segments, gathering, strict=False):  # `gathering` is exhausted below
                if segment in work:
                    self.inner.unbind()
                    if isinstance(segment, str):
                        self.inner.bind_part(ENDS[segment], [])
                    else:
                        self.inner.bind_part((), [segment])
                    x = work[segment](x)
        finally:
            self.inner.unbind()
            for _ in gathering:
                pass
        return x

    def _owners(self, segment: Segment) -> list[nn.Parameter | AdaptedModule]:
        if isinstance(segment, str):
            roles = ENDS[segment]
            refs = [ref for name, ref in self.layout.outer.items() if name.partition(".")[0] in roles]
        else:
            refs = list(self.layout.layers[segment].values())
        owners = (param if adapted is None else adapted for adapted, param in map(self.weights.owner, refs))
        return [owner for owner in dict.fromkeys(owners) if owner is not None]

    @waiting_to("decode with streamed weights")
    def _exchange(
        self,
        batch: PackedBatch | None = None,
        kv: PagedKV | None = None,
        rows: torch.Tensor | None = None,
        wants_logits: bool = False,
        interrupt: BaseException | None = None,
        activations: LayerActivations | None = None,
        stays: bool = False,
    ) -> Any:
        """Return the hidden states or logits that this rank wants. A collective. If no rank wants anything: IDLE if one
        stays, else DONE. Raises RankFailedError if another rank was interrupted.

        batch, kv, activations: of a forward.  rows: hidden states to give logits of.  wants_logits: whether to give the
        batch's.  stays: whether this rank may want something later.
        """
        layers = range(len(self.spec.layers))
        work: dict[Segment, Callable] = {}
        if batch is not None:
            work[BEFORE] = lambda _: self.inner.embed(batch.ids, batch.positions)
            for index in layers:
                layer = partial(self.inner.layers, first=index, last=index + 1)
                work[index] = partial(layer, batch=batch, kv=kv, activations=activations)
        if wants_logits or rows is not None:
            work[AFTER] = self.inner.logits
        flags = [BEFORE in work, AFTER in work, interrupt is not None, stays]
        forward, logits, interrupted, stay = any_rank(flags, self.device, self.process_group)
        if not (forward or logits or stay):
            return DONE
        if interrupted:
            stop_others(interrupt, self.process_group)
            return None
        if not forward and not logits:
            return IDLE
        segments: list[Segment] = [BEFORE, *layers] * forward + [AFTER] * logits
        return self.run(segments, work, rows)


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
