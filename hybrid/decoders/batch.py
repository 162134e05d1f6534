"""What a decoder's forward is given beside its weights: tokens without padding, and pages of keys and values."""

from dataclasses import dataclass

import torch

PAGE = 32  # tokens in a page of the KV cache


@dataclass(frozen=True)
class PackedBatch:
    """New tokens of several sequences, one sequence behind the other, without padding.

    ids: int64 [tokens].
    positions: int32 [tokens]: each token's index in its sequence, which is also its index in the cache.
    starts: int32 [sequences + 1]: where each sequence's tokens begin in `ids`, and the end.
    lengths: int32 [sequences]: tokens of each sequence in the cache once these are in it.
    tables: int32 [sequences, pages]: the cache pages of each sequence, in order; what is behind its last is undefined.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every layer, in pages of PAGE tokens. The decoder that made them knows their layout."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self.keys[0])

    @property
    def kind(self) -> object:
        """Equal for pages that can take each other's content: shape, dtype and device of every layer's."""
        return [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in (*self.keys, *self.values)]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def take_over(self, before: "PagedKV") -> None:
        """Give the first pages the content of all of `before`'s, which are fewer."""
        for own, other in zip((*self.keys, *self.values), (*before.keys, *before.values), strict=True):
            own[: before.pages].copy_(other)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Give pages the content of others."""
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]


def table_of(pages: list[list[int]], device: torch.device) -> torch.Tensor:
    """Page tables of sequences, as wide as the longest.  int32 [sequences, pages]"""
    width = max(map(len, pages))
    return torch.tensor([own + [0] * (width - len(own)) for own in pages], dtype=torch.int32, device=device)


def packed(pieces: list[torch.Tensor], begins: list[int], pages: list[list[int]], device: torch.device) -> PackedBatch:
    """A batch of pieces of sequences, each int64 [n], that begin at given positions of their sequences."""
    sizes = torch.tensor([len(piece) for piece in pieces])
    begin = torch.tensor(begins)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.arange(int(cu_seqlens[-1])) + (begin - cu_seqlens[:-1]).repeat_interleave(sizes)
    return PackedBatch(
        ids=torch.cat(pieces).to(device),
        positions=positions.int().to(device),
        cu_seqlens=cu_seqlens.int().to(device),
        lengths=(begin + sizes).int().to(device),
        block_tables=table_of(pages, device),
    )


def is_packable(attention_mask: torch.Tensor) -> bool:
    """Whether each row of a mask [rows, tokens] has its ones next to each other."""
    begins = attention_mask[:, :1].sum(dim=1) + (attention_mask.diff(dim=1) > 0).sum(dim=1)
    return bool((begins == 1).all())
