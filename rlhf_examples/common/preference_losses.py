"""The losses of policies that learn from pairs of completions as pure functions: masks, shapes and denominators as in
`losses.py`.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from rlhf_examples.common.losses import Loss, masked_sum, pairs_loss, upcast


def dpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    *,
    beta: float,
    denominator: float,
    label_smoothing: float = 0.0,
    mask: torch.Tensor | None = None,
) -> Loss:
    """Direct preference optimization (arXiv:2305.18290, eq. 7), summed over pairs and divided by `denominator`.

    The four logps [B]: of whole completions. label_smoothing: the probability that a pair's labels are swapped
    (conservative DPO: Mitchell, "A note on DPO with noisy preferences and relationship to IPO", 2023). mask [B]: the
    pairs that count; None: all. Metrics, by pair: loss, rewards/chosen, rewards/rejected, rewards/accuracies,
    rewards/margins, TRL's names (DPOTrainer).
    """
    kept = torch.ones_like(chosen_logps, dtype=torch.bool) if mask is None else mask.bool()
    chosen = beta * torch.where(kept, chosen_logps - ref_chosen_logps, 0.0)
    rejected = beta * torch.where(kept, rejected_logps - ref_rejected_logps, 0.0)
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return pairs_loss(masked_sum(losses, kept), denominator, kept, reward_metrics(chosen, rejected))


def kto_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    kl: torch.Tensor,
    *,
    beta: float,
    denominator: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: torch.Tensor | None = None,
) -> Loss:
    """KTO (arXiv:2402.01306, eq. 7; TRL's KTOTrainer): a pair's chosen completion is desirable, its rejected one
    undesirable. The mean of the two losses, summed over pairs and divided by `denominator`.

    The four logps [B]: of whole completions. kl: the reference point, a number of at least 0: the mean log ratio of
    policy and reference of completions of other prompts, without gradient. mask [B] and the metrics as in `dpo_loss`,
    with kl.
    """
    kept = torch.ones_like(chosen_logps, dtype=torch.bool) if mask is None else mask.bool()
    chosen = torch.where(kept, chosen_logps - ref_chosen_logps, 0.0)
    rejected = torch.where(kept, rejected_logps - ref_rejected_logps, 0.0)
    losses = desirable_weight * (1 - torch.sigmoid(beta * (chosen - kl)))
    losses = losses + undesirable_weight * (1 - torch.sigmoid(beta * (kl - rejected)))
    metrics = {**reward_metrics(beta * chosen, beta * rejected), "kl": kl.expand_as(chosen)}
    return pairs_loss(masked_sum(losses / 2, kept), denominator, kept, metrics)


def orpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    *,
    beta: float,
    denominator: float,
    mask: torch.Tensor | None = None,
) -> Loss:
    """ORPO (arXiv:2403.07691, eq. 6 and 7): -logp of the chosen completion - beta · log σ(log odds ratio), summed over
    pairs and divided by `denominator`. There is no reference.

    chosen_logps, rejected_logps [B]: means over a completion's tokens. mask [B] as in `dpo_loss`. Metrics, by pair,
    with TRL's names (ORPOTrainer, whose nll_loss is also over the prompt): those of `dpo_loss`, nll_loss,
    log_odds_chosen, log_odds_ratio.
    """
    kept = torch.ones_like(chosen_logps, dtype=torch.bool) if mask is None else mask.bool()
    # A masked pair gets a logprob below 0: log(1 - p) of p = 1 has no gradient.
    chosen, rejected = (torch.where(kept, upcast(logps), -1.0) for logps in (chosen_logps, rejected_logps))
    log_odds = chosen - rejected - (log_1m_exp(chosen) - log_1m_exp(rejected))
    log_ratio = logsigmoid(log_odds)
    metrics = {
        **reward_metrics(beta * chosen, beta * rejected),
        "nll_loss": -chosen,
        "log_odds_chosen": log_odds,
        "log_odds_ratio": log_ratio,
    }
    return pairs_loss(masked_sum(-chosen - beta * log_ratio, kept), denominator, kept, metrics)


def log_1m_exp(logps: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(logps)) for logps below 0, exact near 0 and far below it (Mächler, "Accurately computing log(1 -
    exp(-|a|))", 2012).
    """
    near = logps > -math.log(2)
    small, large = torch.where(near, logps, -1.0), torch.where(near, -1.0, logps)
    return torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics of implicit rewards [B], with TRL's names."""
    metrics = {"chosen": chosen, "rejected": rejected, "accuracies": chosen > rejected, "margins": chosen - rejected}
    return {f"rewards/{name}": values for name, values in metrics.items()}
