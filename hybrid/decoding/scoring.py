"""Logprobs of sequences that are already there."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.decoding.sampling import entropy, selective_log_softmax


@dataclass(frozen=True)
class Scores:
    """What a model makes of given sequences, for each token but the first.  float32 [rows, tokens - 1] each.

    per_token_logps: logprob of the token at the temperature asked for.  entropies: in nats, of the distribution that
    the token was judged by.  Both 0 where the token is masked.
    """

    per_token_logps: torch.Tensor
    entropies: torch.Tensor


def score_sequences(
    forward: Callable, sequences: torch.Tensor, attention_mask: torch.Tensor, temperature: float, rows_per_forward: int
) -> Scores:
    """Scores of `sequences` by the model whose forward is given, `rows_per_forward` rows at a time.

    sequences, attention_mask int64 [rows, tokens], rows at least 1.
    """
    logps, entropies = [], []
    for ids, mask in zip(sequences.split(rows_per_forward), attention_mask.split(rows_per_forward), strict=True):
        logits = forward(ids, mask).logits[:, :-1] / temperature
        logps.append(selective_log_softmax(logits, ids[:, 1:]) * mask[:, 1:])
        entropies.append(entropy(logits) * mask[:, 1:])
    return Scores(torch.cat(logps), torch.cat(entropies))


def padded_forward(model: nn.Module, call: Callable | None = None) -> Callable:
    """A forward that takes (ids, mask), int64 [rows, tokens], for rows padded on the left, the right or both.

    model: the Hugging Face model; call: what is called with its keyword arguments, such as an engine around it; the
    model itself where None. Positions start at each row's first real token, as they do in generation; a model that
    reads them off the mask, or has none, is not given any.
    """
    call = model if call is None else call
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    takes_positions = "position_ids" in inspect.signature(owner.forward).parameters

    def forward(ids: torch.Tensor, mask: torch.Tensor):
        more = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if takes_positions else {}
        return call(input_ids=ids, attention_mask=mask, use_cache=False, **more)

    return forward
