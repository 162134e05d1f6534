"""Logprobs of sequences by a model's own forward: rows of similar length together, logits of a few tokens at once."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.generation.sampling import score_tokens
from hybrid.generation.scoring import LOGIT_ROWS, Scores, padded_forward

FORWARD_TOKENS = 4096  # of one forward, padding included; a longer row is a forward of its own
WHOLE_LOGIT_TOKENS = 1024  # the same, where a forward gives the logits of all its tokens


@dataclass(frozen=True)
class ModelRunner:
    """Rows of one forward, padded on the right.

    ids, mask: int64 [rows, width].  row: int64 [rows], where they come from.  first: int64 [rows], the column there of
    each row's first token.
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
    """Scores of `sequences` by the model's own forward, at most `rows_per_forward` rows, FORWARD_TOKENS tokens at once.

    sequences, attention_mask int64 [rows, tokens], rows at least 1. Logits exist for LOGIT_ROWS tokens at a time, where
    the model takes `logits_to_keep`: the head runs for each part, the decoder under it once.
    in_parts: False where each forward is a collective: one gives the logits of all its tokens, fewer than otherwise.
    """
    in_parts = in_parts and takes_few_logits(model)
    lengths = [last - first for first, last in zip(*spans(attention_mask), strict=True)]
    most_tokens = FORWARD_TOKENS if in_parts else WHOLE_LOGIT_TOKENS
    logps = torch.zeros(len(sequences), sequences.shape[1] - 1, device=sequences.device)
    entropies = torch.zeros_like(logps)
    for together in similar(lengths, rows_per_forward, most_tokens):
        batch = padded(sequences, attention_mask, together)
        for columns, logits in logits_of(model, batch, in_parts):
            judged = (batch.mask[:, columns] * batch.mask[:, columns + 1]).bool()
            rows, kept_columns = judged.nonzero(as_tuple=True)
            at = columns[kept_columns]
            found = score_tokens(logits[rows, kept_columns].float(), batch.ids[rows, at + 1], temperature)
            column = batch.first[rows] + at
            logps[batch.row[rows], column], entropies[batch.row[rows], column] = found
    return Scores(logps, entropies)


def logits_of(model: nn.Module, batch: ModelRunner, in_parts: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Columns of a batch, and the logits behind them [rows, columns, vocab].

    in_parts: by a forward of the head for each part; else by one of the model.
    """
    columns = columns_of(batch)
    if in_parts:
        with decoder_once(model) as ran:
            for part in columns:
                call = functools.partial(model, logits_to_keep=part)
                logits = padded_forward(model, call)(batch.ids, batch.mask).logits
                if not ran:  # its decoder is not where Hugging Face's models have it, and would run for each part
                    break
                yield part, logits
            else:
                return
    logits = padded_forward(model)(batch.ids, batch.mask).logits
    for part in columns:
        yield part, logits[:, part]


def takes_few_logits(model: nn.Module) -> bool:
    """Whether a model's forward gives the logits of the tokens that `logits_to_keep` names."""
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(owner.forward).parameters and bool(decoders(owner))


def decoders(model: nn.Module) -> list[nn.Module]:
    """What a Hugging Face model may call to get hidden states: its base model, or the decoder in that (OPT)."""
    candidates = [getattr(model, "base_model", model)]
    if hasattr(model, "get_decoder"):
        candidates.append(model.get_decoder())
    return [module for module in dict.fromkeys(candidates) if isinstance(module, nn.Module) and module is not model]


@contextmanager
def decoder_once(model: nn.Module) -> Iterator[list]:
    """Inside the block the decoder under the model's head runs in the first forward alone; later ones get its output
    again. Gives a list that is empty until it has run.

    The model's own forward makes logits of it each time, whatever it does beside its head: scale, cap, cut off.
    """
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    ran: list = []
    with ExitStack() as stack:
        for decoder in decoders(owner):
            stack.enter_context(replaced_forward(decoder, once(decoder.forward, ran)))
        yield ran


def once(own: Callable, ran: list) -> Callable:
    """A forward that runs at its first call alone.  ran: filled then."""
    outputs: list = []

    @functools.wraps(own)
    def forward(*args, **kwargs):
        if not outputs:
            outputs.append(own(*args, **kwargs))
            ran.append(True)
        return outputs[0]

    return forward


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Inside the block the module's forward is another; afterwards it is what it was, the class's or its own."""
    before = {name: value for name, value in module.__dict__.items() if name == "forward"}
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        module.__dict__.update(before)


# Which rows and tokens together


def spans(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """The first column of each row's ones, and the column behind its last.  mask [rows, tokens]"""
    first = mask.argmax(dim=1)
    last = mask.shape[1] - mask.flip(1).argmax(dim=1)
    return first.tolist(), last.tolist()


def similar(lengths: list[int], most_rows: int, most_tokens: int) -> list[list[int]]:
    """Rows in batches, the longest first: `most_rows` at most, and `most_tokens` with padding, but one row at least."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        last = batches[-1] if batches else []
        if last and len(last) < most_rows and (len(last) + 1) * lengths[last[0]] <= most_tokens:
            last.append(row)
        else:
            batches.append([row])
    return batches


def padded(sequences: torch.Tensor, mask: torch.Tensor, rows: list[int]) -> ModelRunner:
    """Some rows, without the padding that none of them needs. At least two columns wide."""
    first, last = spans(mask[rows])
    width = max(2, *(end - begin for begin, end in zip(first, last, strict=True)))
    ids, kept = (tensor.new_zeros(len(rows), width) for tensor in (sequences, mask))
    for index, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
        ids[index, : end - begin], kept[index, : end - begin] = sequences[row, begin:end], mask[row, begin:end]
    return ModelRunner(ids, kept, torch.tensor(rows, device=ids.device), torch.tensor(first, device=ids.device))


def columns_of(batch: ModelRunner) -> tuple[torch.Tensor, ...]:
    """The columns whose logits score the next column's tokens, in parts of LOGIT_ROWS tokens."""
    rows, width = batch.ids.shape
    return torch.arange(width - 1, device=batch.ids.device).split(max(1, LOGIT_ROWS // rows))
