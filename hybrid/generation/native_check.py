"""The self-check of native decoding: rows of a model's caches against the model's own prefill of the same tokens.

It runs once for a model without a fused decoder, before its first tokens, on the beginning of one of their prompts.
"""

import warnings

import torch
from torch import nn

from hybrid.generation.native_rows import NativeRows
from hybrid.generation.native_scheduler import NativeModel
from hybrid.models.model_inputs import NO_INPUTS, RowInputs
from hybrid.runtime.parallel import rank

CHECKED_TOKENS = 12  # of a prompt; a shorter prompt than MIN_TOKENS checks nothing
MIN_TOKENS = 4
# Largest difference of two forwards over the same tokens: the mean over the vocabulary of |Δ logprob|, weighted by the
# probability. float32 forwards differ by 1e-6, and 16-bit ones by 1e-2.
MAX_NATS = {torch.float32: 1e-3, torch.float64: 1e-3}
MAX_NATS_16_BIT = 0.08


def check_rows(model: NativeModel, prompt: torch.Tensor, model_inputs: RowInputs = NO_INPUTS) -> None:
    """Compare a decode step of a prompt's rows, int64 [n] on the host, with a prefill of all tokens: alone, padded on
    the left, joined and reordered. What differs is turned off in the model's traits. If a row alone differs, rank 0
    warns, and nothing else is compared.

    model_inputs: of the prompt, besides token ids, at most two tokens before its end; with them it is not cut.
    """
    long, traits = prompt if model_inputs else prompt[:CHECKED_TOKENS], model.traits
    short = long[:-1] if model_inputs else long[: len(long) // 2]

    def prefill(prompts: list[torch.Tensor]) -> tuple[NativeRows, torch.Tensor]:
        return model.prefill(prompts, [model_inputs] * len(prompts))

    whole = torch.cat([prefill([tokens])[1] for tokens in (long, short)])
    limit = largest_difference(model.model)
    last = torch.stack([long[-1:], short[-1:]]).to(model.device)

    alone, _ = prefill([long[:-1]])
    traits.selects = model.selects(alone)
    if (nats := difference(model.extend(alone, last[:1]), whole[:1])) > limit:
        if rank() == 0:
            warnings.warn(
                f"{type(model.model).__name__}: its own decode step differs from its own forward over the same tokens "
                f"by {nats:.2g} nats, so that rollouts and scores have different logprobs, with generate() of "
                "transformers too; report it to transformers, or update it",
                stacklevel=4,
            )
        return
    if traits.pads:
        together, _ = prefill([long[:-1], short[:-1]])
        traits.pads = difference(model.extend(together, last), whole) <= limit
    if not traits.pads and not traits.selects:
        both, _ = prefill([long[:-1], long[:-1]])
        stepped = model.extend(both, last[:1].expand(2, -1))
        traits.batches = difference(stepped, whole[:1].expand(2, -1)) <= limit
    if traits.selects:
        first, _ = prefill([(short if traits.pads else long)[:-1]])
        second, _ = prefill([long[:-1]])
        first.join([second])
        first.select([1, 0])
        expected = whole if traits.pads else whole[:1].expand(2, -1)
        stepped = model.extend(first, last if traits.pads else last[:1].expand(2, -1))
        traits.selects = difference(stepped, expected) <= limit


def largest_difference(model: nn.Module) -> float:
    """Return the largest difference of two forwards of a model that is taken for rounding, in nats."""
    return MAX_NATS.get(next(model.parameters()).dtype, MAX_NATS_16_BIT)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of a row's distribution, in nats.  Both [rows, vocab]."""
    before, after = expected.log_softmax(-1), logits.log_softmax(-1)
    return float((before.exp() * (after - before).abs()).nan_to_num(0.0).sum(-1).max())
