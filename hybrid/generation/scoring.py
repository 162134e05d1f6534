"""Logprobs of given sequences: by a fused decoder, or by a model's own forward over rows of similar length."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import Chunk, hidden_states, prefill_chunks
from hybrid.generation.sampler import score_tokens
from hybrid.inputs import as_ids, as_mask
from hybrid.models.modules import hugging_face_model

LOGIT_ROWS = 256  # tokens whose logits are in memory at once
FORWARD_TOKENS = 4096  # tokens of a model's own forward, padding included; a longer row gets its own forward
WHOLE_LOGIT_TOKENS = 1024  # the same, for forwards that compute the logits of all their tokens


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
        blocks, begins = known_blocks(block_pool, real)
        for own, ids in zip(blocks, real, strict=True):
            own += block_pool.allocate(blocks_for(len(ids)) - len(own))
        computed = hidden_states(decoder, block_pool, [ids[:-1] for ids in real], blocks, begins)
        for chunks, hidden in itertools.chain(kept_hidden_states(block_pool, blocks, begins), computed):
            # Every token's logits score the next token: its index in `hidden`, the target, and the output's index.
            sources, targets, row_of, column_of = [], [], [], []
            for chunk in chunks:
                ids, row = real[chunk.sequence], rows[chunk.sequence]
                positions = torch.arange(chunk.begin, chunk.stop)
                sources.append(chunk.row + positions - chunk.begin)
                targets.append(ids[positions + 1])
                row_of.append(torch.full_like(positions, row))
                column_of.append(first[row] + positions)
            parts = (
                torch.cat(part).to(decoder.device).split(LOGIT_ROWS) for part in (sources, targets, row_of, column_of)
            )
            for source, target, row, column in zip(*parts, strict=True):
                if len(source):
                    # Without a name for the logits, so that they are freed before the next ones are computed.
                    scores = score_tokens(decoder.logits(hidden[source]), target, temperature, decoder.vocabulary)
                    logps[row, column], entropies[row, column] = scores
        for own in blocks:
            block_pool.free(own)
    return Scores(logps, entropies)


def known_blocks(block_pool: BlockPool, sequences: list[torch.Tensor]) -> tuple[list[list[int]], list[int]]:
    """The cached blocks that sequences, int64 [n] each, begin with, with a reference to each, and of how many tokens
    they have the last layer's output. Without it, blocks are written again, with the values that they have."""
    if block_pool.kv.hidden_states is None:
        return [block_pool.same_blocks(ids) for ids in sequences], [0] * len(sequences)
    known = [block_pool.reuse(ids, is_prompt=False) for ids in sequences]
    return [own for own, _ in known], [begin for _, begin in known]


def kept_hidden_states(
    block_pool: BlockPool, blocks: list[list[int]], counts: list[int]
) -> Iterator[tuple[list[Chunk], torch.Tensor]]:
    """The last layer's output of the first `counts` tokens of each sequence, in its blocks, as `hidden_states` gives
    it."""
    for chunks in prefill_chunks([0] * len(counts), counts):
        slots = [
            torch.tensor(blocks[chunk.sequence])[(positions := torch.arange(chunk.begin, chunk.stop)) // BLOCK_SIZE]
            * BLOCK_SIZE
            + positions % BLOCK_SIZE
            for chunk in chunks
        ]
        kept = block_pool.kv.hidden_states.flatten(0, 1)
        yield chunks, kept[torch.cat(slots).to(kept.device)]


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

    def forward(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        ids, mask = as_ids(ids), as_mask(mask)
        more = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if takes_positions else {}
        return call(input_ids=ids, attention_mask=mask, use_cache=False, **more)

    return forward


# By the model's own forward


@dataclass(frozen=True)
class PaddedBatch:
    """The rows of one forward, padded on the right.

    ids, mask: int64 [rows, width].  row: int64 [rows], each row's index in the input.  first: int64 [rows], the input
        column of each row's first token.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    first: torch.Tensor


def score_natively(
    model: nn.Module,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_per_forward: int,
    in_parts: bool = True,
) -> Scores:
    """Scores of `sequences` by the model's own forward, at most `rows_per_forward` rows and FORWARD_TOKENS tokens at
    once.

    sequences, attention_mask: int64 [rows, tokens], at least one row.
    in_parts: False if each forward is a collective.

    If `in_parts` and the model takes `logits_to_keep`, logits exist for LOGIT_ROWS tokens at a time: the head runs for
    each part, the decoder under it once. Otherwise a forward computes the logits of all its tokens, and has at most
    WHOLE_LOGIT_TOKENS.
    """
    in_parts = in_parts and takes_few_logits(model)
    lengths = [last - first for first, last in zip(*spans(attention_mask), strict=True)]
    most_tokens = FORWARD_TOKENS if in_parts else WHOLE_LOGIT_TOKENS
    logps = torch.zeros(len(sequences), sequences.shape[1] - 1, device=sequences.device)
    entropies = torch.zeros_like(logps)
    for together in similar(lengths, rows_per_forward, most_tokens):
        batch = padded(sequences, attention_mask, together)
        for columns, logits in logits_of(model, batch, in_parts):
            scored = (batch.mask[:, columns] * batch.mask[:, columns + 1]).bool()
            rows, kept_columns = scored.nonzero(as_tuple=True)
            at = columns[kept_columns]
            scores = score_tokens(logits[rows, kept_columns].float(), batch.ids[rows, at + 1], temperature)
            column = batch.first[rows] + at
            logps[batch.row[rows], column], entropies[batch.row[rows], column] = scores
    return Scores(logps, entropies)


def logits_of(model: nn.Module, batch: PaddedBatch, in_parts: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields columns of a batch, int64 [columns], and the logits after them [rows, columns, vocab], for at most
    LOGIT_ROWS tokens at a time.

    in_parts: run the head once for each part of the columns; else run the model once.
    """
    rows, width = batch.ids.shape
    columns = torch.arange(width - 1, device=batch.ids.device).split(max(1, LOGIT_ROWS // rows))
    if in_parts:
        # The decoder under the head runs in the first forward only. The model's own forward computes the logits each
        # time, so scaling and soft caps around the head apply.
        outputs: dict[nn.Module, Any] = {}
        with ExitStack() as stack:
            for decoder in decoders(hugging_face_model(model)):
                stack.enter_context(forward_once(decoder, outputs))
            for part in columns:
                call = functools.partial(model, logits_to_keep=part)
                logits = padded_forward(model, call)(batch.ids, batch.mask).logits
                if not outputs:  # no decoder where Hugging Face's models have it: it would run for each part
                    break
                yield part, logits
            else:
                return
    logits = padded_forward(model)(batch.ids, batch.mask).logits
    for part in columns:
        yield part, logits[:, part]


def takes_few_logits(model: nn.Module) -> bool:
    """Whether the model's forward can compute the logits of selected tokens alone, by `logits_to_keep`."""
    owner = hugging_face_model(model)
    return "logits_to_keep" in inspect.signature(owner.forward).parameters and bool(decoders(owner))


def decoders(model: nn.Module) -> list[nn.Module]:
    """Modules that a Hugging Face model may call for hidden states: its base model, or the decoder in that (OPT)."""
    candidates = [getattr(model, "base_model", model)]
    if hasattr(model, "get_decoder"):
        candidates.append(model.get_decoder())
    return [module for module in dict.fromkeys(candidates) if isinstance(module, nn.Module) and module is not model]


@contextmanager
def forward_once(module: nn.Module, outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Inside the block, the module's forward runs at its first call only; `outputs` keeps and gives its output."""
    own, before = module.forward, {name: value for name, value in module.__dict__.items() if name == "forward"}

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if module not in outputs:
            outputs[module] = own(*args, **kwargs)
        return outputs[module]

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        module.__dict__.update(before)


def spans(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """The first unmasked column of each row, and the column after the last one.  mask [rows, tokens]"""
    first = mask.argmax(dim=1)
    last = mask.shape[1] - mask.flip(1).argmax(dim=1)
    return first.tolist(), last.tolist()


def similar(lengths: list[int], most_rows: int, most_tokens: int) -> list[list[int]]:
    """Batches of rows, longest first, of at most `most_rows` rows and `most_tokens` tokens with padding, but at least
    one row."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        last = batches[-1] if batches else []
        if last and len(last) < most_rows and (len(last) + 1) * lengths[last[0]] <= most_tokens:
            last.append(row)
        else:
            batches.append([row])
    return batches


def padded(sequences: torch.Tensor, mask: torch.Tensor, rows: list[int]) -> PaddedBatch:
    """A batch of some rows, without columns that are padding in all of them; at least two columns wide."""
    first, last = spans(mask[rows])
    width = max(2, *(end - begin for begin, end in zip(first, last, strict=True)))
    ids, kept = (tensor.new_zeros(len(rows), width) for tensor in (sequences, mask))
    for index, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
        ids[index, : end - begin], kept[index, : end - begin] = sequences[row, begin:end], mask[row, begin:end]
    return PaddedBatch(ids, kept, torch.tensor(rows, device=ids.device), torch.tensor(first, device=ids.device))
