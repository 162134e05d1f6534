"""The slice of the vocabulary that a rank of a group has logits of."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hybrid.runtime.parallel import InferenceGroup


@dataclass(frozen=True)
class VocabularySlice:
    """Tokens [first, first + width) of `size`; the last ranks' slices may end after the vocabulary.

    group: the ranks that have the other slices.
    """

    group: InferenceGroup
    size: int

    @property
    def width(self) -> int:
        """Columns of a rank's logits."""
        return -(-self.size // self.group.size)

    @property
    def first(self) -> int:
        """The first token of this rank's slice."""
        return self.group.index * self.width

    @property
    def count(self) -> int:
        """Tokens of this rank's slice."""
        return min(max(self.size - self.first, 0), self.width)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, [n, size], from every rank's [n, width]. A collective."""
        return self.group.gather(logits).permute(1, 0, 2).flatten(1)[:, : self.size]

    def divided(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the rows of `count` that each rank works on where each works on some of them, int64 [ranks, n]; the
        last row is repeated at the end."""
        ranks = self.group.size
        return torch.arange(-(-count // ranks) * ranks, device=device).clamp(max=count - 1).view(ranks, -1)

    def whole_of_own_rows(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of `divided`, int64 [n], and their logits of the whole vocabulary, [n, size]. A
        collective.

        logits: [count, width]. The result takes no more memory than they do.
        """
        rows = self.divided(len(logits), logits.device)
        return rows[self.group.index], self.group.exchange(logits[rows]).permute(1, 0, 2).flatten(1)[:, : self.size]


def whole_logits(logits: torch.Tensor, vocabulary: VocabularySlice | None) -> torch.Tensor:
    """Return a decoder's logits, [n, vocab], from what its `logits` and `decode` give. A collective if ranks have
    slices.

    vocabulary: the decoder's slice; None: it has logits of the whole vocabulary.
    """
    return logits if vocabulary is None else vocabulary.whole(logits)


def own_columns(logits: torch.Tensor, vocabulary: VocabularySlice) -> torch.Tensor:
    """Return this rank's logits [n, width] with those after the end of the vocabulary set to -inf."""
    if vocabulary.count == vocabulary.width:
        return logits
    return F.pad(logits[:, : vocabulary.count], (0, vocabulary.width - vocabulary.count), value=-torch.inf)
