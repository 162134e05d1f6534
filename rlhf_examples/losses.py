"""PPO's arithmetic as pure functions.

Masks are int64 or bool; a masked position contributes nothing, whatever is in it.
Shapes: B sequences of T completion tokens, right padded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Loss:
    """A loss to step on, and figures about it: sums over this rank's tokens, to be divided by the number of tokens
    of all ranks."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` [B, T] where `mask` [B, T] is set."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> torch.Tensor:
    """Values with variance 1, and mean 0 where `shift_mean`, over the unmasked ones.  values, mask [B, T]; [B, T].

    over_ranks: sums a tensor over all data-parallel ranks, so that the split over ranks changes nothing.
    The variance is the biased one; 1e-8 keeps equal values finite.
    """
    count, total = over_ranks(torch.stack([mask.sum().to(values.dtype), masked_sum(values, mask)]))
    mean = total / count
    variance = over_ranks(masked_sum((values - mean) ** 2, mask)) / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)


def shaped_rewards(
    scores: torch.Tensor, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """-kl_coef · (logp - ref_logp) at every token, and the score at the last (InstructGPT, arXiv:2203.02155).

    scores [B], logps, ref_logps, mask [B, T]; gives [B, T]. The KL estimate is k1 (Schulman, "Approximating KL
    divergence", 2020).
    """
    rewards = torch.where(mask.bool(), -kl_coef * (logps - ref_logps), 0.0)
    last = mask.sum(dim=1).long() - 1
    return rewards.scatter_add(1, last.unsqueeze(1), scores.to(rewards.dtype).unsqueeze(1))


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) and the value targets.

    rewards, values, mask [B, T]: the value at t is of the state before token t; after the last token it is 0.
    Gives advantages and returns, both [B, T], 0 where masked.
    """
    rewards, values = (torch.where(mask.bool(), tensor, 0.0) for tensor in (rewards, values))
    advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t].bool(), delta + gamma * lam * advantage, 0.0)
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)


def importance_sampling_weights(
    old_logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(exp(old_logps - sampling_logps), cap) for each token; 1 where masked.  All [B, T]; cap at least 1.

    Truncated importance sampling: what the trainer's policy gives a token over what the sampler's gave it (Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", https://fengyao.notion.site/off-policy-rl;
    TRL's GRPOTrainer, `vllm_importance_sampling_correction` by the token).
    """
    return torch.where(mask.bool(), old_logps - sampling_logps, 0.0).exp().clamp(max=cap)


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cliprange: float,
    denominator: float,
    weights: torch.Tensor | float = 1.0,
) -> Loss:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), summed over tokens and divided by `denominator`.

    logps, old_logps, advantages, mask [B, T]. weights [B, T]: factors of the clipped terms, such as
    `importance_sampling_weights`. Figures: approxkl (k2: half the squared log ratio), clipfrac, ratio,
    squared_ratio.
    """
    log_ratio = torch.where(mask.bool(), logps - old_logps, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    with torch.no_grad():
        sums = {
            "approxkl": masked_sum(0.5 * log_ratio**2, mask),
            "clipfrac": masked_sum((clipped > unclipped).to(ratio.dtype), mask),
            "ratio": masked_sum(ratio, mask),
            "squared_ratio": masked_sum(ratio**2, mask),
        }
    total = masked_sum(weights * torch.maximum(unclipped, clipped), mask)
    return Loss(total / denominator, {"loss": total.detach(), **sums})


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float,
    denominator: float,
) -> Loss:
    """Half the squared error, the worse of the value and the value clipped around the old one, summed over tokens and
    divided by `denominator`.  values, old_values, returns, mask [B, T]. Figure: clipfrac."""
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    total = masked_sum(0.5 * torch.maximum(error, clipped_error), mask)
    clipfrac = masked_sum((clipped_error > error).to(values.dtype), mask)
    return Loss(total / denominator, {"loss": total.detach(), "clipfrac": clipfrac.detach()})
