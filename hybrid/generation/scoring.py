"""Logprobs of given sequences."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import hidden_states
from hybrid.generation.sampler import score_tokens
from hybrid.inputs import as_ids, as_mask
from hybrid.models.modules import hugging_face_model

LOGIT_ROWS = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Scores:
    """A model's scores of given sequences, for each token but the first.  float32 [rows, tokens - 1] each.

    per_token_logps: the token's logprob at the requested temperature.
    entropies: in nats, of the distribution that the logprob is of.
    Both are 0 if the token is masked or has no token before it.
    """

    per_token_logps: torch.Tensor
    entropies: torch.Tensor


def score_packed(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_at_once: int,
) -> Scores:
    """Scores of `sequences` by a fused decoder, at most `rows_at_once` rows in the cache at once.

    sequences, attention_mask: int64 [rows, tokens], each row's ones adjacent. Logits exist for LOGIT_ROWS tokens at a
        time.
    """
    logps = torch.zeros(len(sequences), sequences.shape[1] - 1, device=decoder.device)
    entropies = torch.zeros_like(logps)
    first, length = attention_mask.argmax(dim=1).tolist(), attention_mask.sum(dim=1).tolist()
    decoder.reserve(max(length))
    runs = list(together(length, rows_at_once, block_pool.limit))
    block_pool.reserve_call(max(sum(blocks_for(length[row]) for row in rows) for rows in runs))
    for rows in runs:
        real = [sequences[row, first[row] : first[row] + length[row]] for row in rows]
        blocks = [block_pool.allocate(blocks_for(len(ids))) for ids in real]
        for chunks, hidden in hidden_states(decoder, block_pool, real, blocks):
            # Every token's logits score the next token: its index in `hidden`, the target, and the output's index.
            sources, targets, row_of, column_of = [], [], [], []
            for chunk in chunks:
                ids, row = real[chunk.sequence], rows[chunk.sequence]
                positions = torch.arange(chunk.begin, min(chunk.stop, len(ids) - 1))
                sources.append(chunk.row + positions - chunk.begin)
                targets.append(ids[positions + 1])
                row_of.append(torch.full_like(positions, row))
                column_of.append(first[row] + positions)
            parts = (
                torch.cat(part).to(decoder.device).split(LOGIT_ROWS) for part in (sources, targets, row_of, column_of)
            )
            for source, target, row, column in zip(*parts, strict=True):
                if len(source):
                    scores = score_tokens(decoder.logits(hidden[source]), target, temperature)
                    logps[row, column], entropies[row, column] = scores
        for own in blocks:
            block_pool.free(own)
    return Scores(logps, entropies)


def together(lengths: list[int], most: int, limit: int | None) -> Iterator[range]:
    """Split rows of the given lengths into runs of at most `most` rows and `limit` blocks, but at least one row."""
    start = blocks = 0
    for row, needed in enumerate(map(blocks_for, lengths)):
        if row > start and (row - start == most or (limit is not None and blocks + needed > limit)):
            yield range(start, row)
            start, blocks = row, 0
        blocks += needed
    yield range(start, len(lengths))


def padded_forward(model: nn.Module, call: Callable | None = None) -> Callable:
    """A forward that takes (ids, mask), [rows, tokens], for rows padded on the left, the right or both.

    model: the Hugging Face model.  call: what is called with the model's keyword arguments, such as an engine; None:
        the model.
    Positions start at each row's first real token, as they do in generation. A model without a `position_ids` argument
    is given none.
    """
    call = model if call is None else call
    owner = hugging_face_model(model)
    takes_positions = "position_ids" in inspect.signature(owner.forward).parameters

    def forward(ids: torch.Tensor, mask: torch.Tensor):
        ids, mask = as_ids(ids), as_mask(mask)
        more = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if takes_positions else {}
        return call(input_ids=ids, attention_mask=mask, use_cache=False, **more)

    return forward
