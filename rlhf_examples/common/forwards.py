"""Forwards of training engines and frozen models: logprobs, entropies and values of given tokens.

B rows of T columns, padded on either side or both; `width`: the number of completion columns, which are the last ones.
"""

import torch

import hybrid


def token_logps(
    policy: hybrid.HybridEngine,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    width: int,
    temperature: float,
    forward: str,
    entropy: bool = False,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of the completion tokens, and with `entropy` entropies; differentiable.

    sequences, mask [B, T]; returns float32 [B, width], 0 where masked.  forward, sampling_mask: as in
    `HybridEngine.logps`.
    """
    learned = mask[:, -width:]
    return policy.logps(sequences, mask, learned, temperature, entropy, forward, sampling_mask=sampling_mask)


def token_values(
    critic: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, forward: str
) -> torch.Tensor:
    """The value of the state before each completion token; differentiable.

    sequences, mask [B, T]; returns float32 [B, width], 0 where masked.  forward: of the policy; values have no exact
    one, and are computed as packed then.
    """
    return critic.values(sequences, mask, mask[:, -width:], forward="packed" if forward == "exact" else forward)


def values_of_tokens(engine: hybrid.HybridEngine, ids: torch.Tensor, mask: torch.Tensor, forward: str) -> torch.Tensor:
    """The value after every token, as a reward model is trained; differentiable.  ids, mask [B, T]; returns [B, T].

    forward: as in `token_values`.
    """
    if forward == "model":
        return engine(input_ids=ids, attention_mask=mask).logits[..., 0]
    # A value is of the state before a token: one more token after each row, which no forward computes.
    none = mask.new_zeros(len(mask), 1)
    one_more = torch.cat([mask, none], dim=1) | torch.cat([none, mask], dim=1)
    return engine.values(torch.cat([ids, none], dim=1), one_more, mask)


@torch.no_grad()
def frozen_values(
    model: hybrid.InferenceEngine | hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """A reward model's or critic's value of every token, `batch_size` rows per forward.  float32 [B, T]"""
    parts = zip(sequences.split(batch_size), mask.split(batch_size), strict=True)
    return torch.cat([model(input_ids=ids, attention_mask=ids_mask).logits[..., 0].float() for ids, ids_mask in parts])
