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
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every layer, in pages of PAGE tokens. The decoder that made them knows their layout."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
