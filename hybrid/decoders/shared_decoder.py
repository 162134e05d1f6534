"""A decoder that ranks run together, each with batches of its own."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from hybrid.decoders.batch import PackedBatch


class SharedDecoder(ABC):
    """To its callers a decoder of this rank's batch. Every function that computes waits for all ranks of the group.

    inner: the decoder that computes.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self.spec, self.layout, self.dtype = inner.spec, inner.layout, inner.dtype
        self.reserve = inner.reserve

    @property
    def device(self) -> torch.device:
        """The device of the weights and activations."""
        return self.inner.device

    def bind(self) -> None:
        """Read the weights, on first use or again."""
        self.inner.bind()

    def forward(self, batch: PackedBatch, kv: Any) -> torch.Tensor:
        """The last layer's output for this rank's tokens, [tokens, hidden]. Writes their keys and values to `kv`."""
        return self._exchange(batch, kv)[0]

    def decode(self, batch: PackedBatch, kv: Any) -> torch.Tensor:
        """Logits after one new token for each of this rank's sequences.  float32 [sequences, vocab]"""
        return self._exchange(batch, kv, wants_logits=True)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocab]"""
        return self._exchange(rows=hidden)[1]

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""
        while self._exchange() is not None:
            pass

    @abstractmethod
    def _exchange(
        self,
        batch: PackedBatch | None = None,
        kv: Any = None,
        rows: torch.Tensor | None = None,
        wants_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A collective. Gives the hidden states and logits that this rank wants; None if no rank wants anything.

        batch, kv: of a forward.  rows: hidden states to give logits of.  wants_logits: whether to give the batch's.
        """
