"""The experts that a rollout's tokens were routed to: read from the KV blocks as rows end, and put in the batch's
shape.

A row's are those of its tokens in order, without padding, except for the last one, which no forward has run over.
"""

from collections.abc import Sequence

import torch

from hybrid.decoders.batch import BLOCK_SIZE, PagedKV
from hybrid.decoders.routers import NOT_ROUTED
from hybrid.generation.block_pool import blocks_for


class RoutedRows:
    """The experts of each row of a request, in host memory: for a real model they are hundreds of bytes per token.

    rows: by row, int16 [tokens, layers with experts, experts per token].
    """

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}

    def read(self, kv: PagedKV, rows: Sequence[int], blocks: Sequence[list[int]], lengths: Sequence[int]) -> None:
        """Read those of `rows`, which have ended, before their blocks are freed.

        blocks: of each row.  lengths: tokens of each row, its prompt included.
        """
        assert kv.router_indices is not None, "the decoder does not record the experts of tokens"
        counts = [length - 1 for length in lengths]
        used = [own[: blocks_for(count)] for own, count in zip(blocks, counts, strict=True)]
        index = torch.tensor([block for own in used for block in own], device=kv.router_indices.device)
        parts = kv.router_indices[index].flatten(0, 1).cpu().split([len(own) * BLOCK_SIZE for own in used])
        self.rows.update((row, part[:count]) for row, part, count in zip(rows, parts, counts, strict=True))

    def in_order(self, count: int) -> list[torch.Tensor] | None:
        """Those of the first `count` rows, of no tokens for rows that never ran; None if no row has run."""
        if not self.rows:
            return None
        nothing = next(iter(self.rows.values()))[:0]
        return [self.rows.get(row, nothing) for row in range(count)]


def rows_of_calls(calls: list[list[torch.Tensor]], prompt_mask: torch.Tensor) -> list[torch.Tensor]:
    """The experts of each row that the model's own forward decoded: all padded prompts in its first call, then a token
    of each row in each call.  calls: of `recorded_routing`.  prompt_mask: int64 [rows, prompt_len]."""
    rows = len(prompt_mask)
    by_layer = [torch.cat([call.view(rows, -1, call.shape[1]) for call in layer], dim=1) for layer in calls]
    tokens = torch.stack(by_layer, dim=2).cpu()  # [rows, tokens, layers, experts per token]
    padding = prompt_mask.shape[1] - prompt_mask.sum(dim=1)
    return [row[first:] for row, first in zip(tokens, padding.tolist(), strict=True)]


def padded_router_indices(
    rows: Sequence[torch.Tensor | None] | None, prompt_mask: torch.Tensor, lengths: torch.Tensor, width: int
) -> torch.Tensor | None:
    """`RolloutBatch.router_indices`: int16 [rows, prompt_len + width, layers with experts, experts per token], in host
    memory, NOT_ROUTED at padding and at each row's last token.

    rows: of each row; None, or of None: they were not recorded.
    lengths: int64 [rows], tokens of each completion.  width: of the completions.
    """
    if rows is None or any(own is None for own in rows):
        return None
    prompt_len = prompt_mask.shape[1]
    padded = rows[0].new_full((len(rows), prompt_len + width, *rows[0].shape[1:]), NOT_ROUTED)
    prompt_lengths = prompt_mask.sum(dim=1)
    ends = (prompt_lengths + lengths.to(prompt_lengths.device) - 1).tolist()
    for row, own, length, end in zip(padded, rows, prompt_lengths.tolist(), ends, strict=True):
        row[prompt_len - length :][:end] = own[:end]
    return padded
