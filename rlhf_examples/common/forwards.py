"""Forwards of training engines and frozen models: logprobs, entropies and values of given tokens.

B rows of T columns, padded on either side or both; `width`: the number of completion columns, which are the last ones.
"""

from typing import Any

import torch

import hybrid
from rlhf_examples.common.batches import per_token_logps_and_entropies
from rlhf_examples.common.losses import entropy_from_logits


def token_logps(
    policy: hybrid.HybridEngine,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    width: int,
    temperature: float = 1.0,
    logit_chunk: int = 0,
    padding_free: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the completion tokens; differentiable.

    sequences, mask [B, T]; returns two tensors, float32 [B, width], 0 where masked.
    logit_chunk: tokens whose logits exist at once; 0: all.  padding_free: run the forward on packed rows, without
        padding.
    Both need a model that `require_exact` accepts.
    """
    if logit_chunk:
        targets_mask = torch.zeros_like(mask)
        targets_mask[:, -width:] = 1
        settings: dict[str, Any] = {"temperature": temperature, "chunk_size": logit_chunk, "padding_free": padding_free}
        logps, entropies = per_token_logps_and_entropies(policy, sequences, mask, targets_mask, **settings)
        return logps[:, -width:], entropies[:, -width:]
    kept, targets = mask[:, -width:].bool(), sequences[:, -width:]
    logits = hybrid.padded_forward(policy.module, policy)(sequences, mask).logits[:, -width - 1 : -1] / temperature
    logps = hybrid.selective_log_softmax(logits, targets)
    return torch.where(kept, logps, 0.0), torch.where(kept, entropy_from_logits(logits), 0.0)


def token_values(
    critic: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, padding_free: bool = False
) -> torch.Tensor:
    """The value of the state before each completion token.  sequences, mask [B, T]; returns float32 [B, width].

    padding_free: run the forward on packed rows, without padding.
    """
    logits = critic(input_ids=sequences, attention_mask=mask, padding_free=padding_free).logits
    return logits[:, -width - 1 : -1, 0].float()


@torch.no_grad()
def frozen_logps(
    reference: hybrid.InferenceEngine | hybrid.HybridEngine,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    width: int,
    temperature: float,
    batch_size: int,
) -> torch.Tensor:
    """The reference's logprobs of the completion tokens, `batch_size` rows per forward.  float32 [B, width]"""
    if isinstance(reference, hybrid.HybridEngine):
        return reference.score(sequences, mask, temperature=temperature).per_token_logps[:, -width:]
    forward, logps = hybrid.padded_forward(reference.module, reference), []
    for ids, ids_mask in zip(sequences.split(batch_size), mask.split(batch_size), strict=True):
        logits = forward(ids, ids_mask).logits[:, -width - 1 : -1] / temperature
        logps.append(hybrid.selective_log_softmax(logits, ids[:, -width:]))
    return torch.cat(logps)


@torch.no_grad()
def frozen_values(
    model: hybrid.InferenceEngine | hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """A reward model's or critic's value of every token, `batch_size` rows per forward.  float32 [B, T]"""
    parts = zip(sequences.split(batch_size), mask.split(batch_size), strict=True)
    return torch.cat([model(input_ids=ids, attention_mask=ids_mask).logits[..., 0].float() for ids, ids_mask in parts])


@torch.no_grad()
def token_logps_row_by_row(
    policy: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, temperature: float
) -> torch.Tensor:
    """`token_logps` at another batch shape: each row in its own forward, without padding; no gradients.

    sequences, mask [B, T]; returns float32 [B, width], 0 after a completion's end. Every rank must pass equally many
    rows.
    """
    alone = torch.zeros(len(sequences), width, device=sequences.device)
    for logps, row, kept in zip(alone, sequences, mask.bool(), strict=True):
        length, ids = int(kept[-width:].sum()), row[kept][None]
        logps[:length] = token_logps(policy, ids, torch.ones_like(ids), length, temperature)[0][0]
    return alone
