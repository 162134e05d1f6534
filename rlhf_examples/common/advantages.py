"""Rewards of tokens and advantages as pure functions.

Masks are int64 or bool; masked positions contribute nothing, whatever their values. Shapes: N completions, the
`num_generations` of a prompt adjacent; B sequences of T tokens, right padded.
"""

from collections.abc import Callable

import torch

from rlhf_examples.common.choices import require_choice
from rlhf_examples.common.losses import identity, last_tokens, masked_sum


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
    unbiased: bool = False,
) -> torch.Tensor:
    """Values scaled to variance 1, and shifted to mean 0 if `shift_mean`, over the unmasked positions.  values, mask
    [B, T]; returns [B, T], 0 where masked.

    over_ranks: sums a tensor over all data-parallel ranks, so that the split over ranks changes nothing.
    unbiased: the variance is the unbiased one, as in verl. 1e-8 keeps equal values finite. Without a token on any rank
        the result is 0.
    """
    count, total = over_ranks(torch.stack([mask.sum().to(values.dtype), masked_sum(values, mask)]))
    mean = total / count
    divisor = (count - 1).clamp(min=1) if unbiased else count
    variance = over_ranks(masked_sum((values - mean) ** 2, mask)) / divisor
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)


def shaped_rewards(
    scores: torch.Tensor, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """-kl_coef · (logp - ref_logp) at every token, plus the score at the last token (InstructGPT, arXiv:2203.02155).

    scores [B], logps, ref_logps, mask [B, T]; returns [B, T]. The KL estimate is k1 (Schulman, "Approximating KL
    divergence", 2020). The score of a row without tokens is dropped.
    """
    rewards = torch.where(mask.bool(), -kl_coef * (logps - ref_logps), 0.0)
    return rewards + torch.where(last_tokens(mask), scores.to(rewards.dtype).unsqueeze(1), 0.0)


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) and the value targets.

    rewards, values, mask [B, T]: the value at t is that of the state before token t; after the last token it is 0.
    Returns advantages and returns, both [B, T], 0 where masked.
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


def soft_overlong_punishment(lengths: torch.Tensor, max_length: int, cache: int) -> torch.Tensor:
    """The length penalty added to completions' rewards (DAPO, arXiv:2503.14476, eq. 13): 0 up to `max_length - cache`
    tokens, falling linearly to -1 at `max_length`.

    lengths int64 [N], at most max_length; returns float32 [N].
    """
    return -((lengths - (max_length - cache)).clamp(min=0) / cache).float()


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> torch.Tensor:
    """GRPO: a reward minus the mean of its group, over a standard deviation (arXiv:2402.03300, section 4.1.2).

    rewards [N]: this rank's, the `num_generations` completions of a prompt adjacent; returns [N].
    scale_rewards: TRL's (GRPOTrainer 1.16). group: divide by the group's deviation. batch: by that of all rewards of
        all ranks (arXiv:2508.08221). none: by nothing (Dr. GRPO, arXiv:2503.20783). Deviations are unbiased, and 1e-4
        is added.
    over_ranks: sums a tensor over all ranks; called twice for batch, else not.
    A NaN reward (not scored) is left out of means and deviations, and its advantage is 0. Advantages are 0 if fewer
    than two rewards are left for the deviation.
    Raises ValueError for another scale_rewards, or if the number of rewards is no multiple of num_generations.
    """
    require_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    groups = in_groups(rewards, num_generations)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (group_std(rewards, num_generations).unsqueeze(1) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (mean_and_std(rewards, over_ranks)[1] + 1e-4)
    return advantages.nan_to_num(nan=0.0).flatten()


def group_std(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """The unbiased standard deviation of each group, NaNs left out; NaN if fewer than two rewards are left.

    rewards [N]; returns [N / num_generations]. TRL's `frac_reward_zero_std` is the share of groups for which it is 0.
    """
    groups = in_groups(rewards, num_generations)
    squares = (groups - groups.nanmean(dim=1, keepdim=True)) ** 2
    count = (~groups.isnan()).sum(dim=1)
    return torch.where(count > 1, squares.nansum(dim=1) / (count - 1), torch.nan).sqrt()


def rloo_advantages(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """RLOO: a reward minus the mean of the other rewards of its group (arXiv:2402.14740, eq. 7; TRL's RLOOTrainer
    1.16).

    rewards [N], the `num_generations` completions of a prompt adjacent; returns [N]. NaN as in `group_advantages`; a
    reward that is alone in its group gets advantage 0.
    Raises ValueError if the number of rewards is no multiple of num_generations.
    """
    groups = in_groups(rewards, num_generations)
    num_averaged = (~groups.isnan()).sum(dim=1, keepdim=True) - 1
    baselines = (groups.nansum(dim=1, keepdim=True) - groups) / num_averaged
    return torch.where(num_averaged > 0, groups - baselines, 0.0).nan_to_num(nan=0.0).flatten()


def mean_and_std(
    rewards: torch.Tensor, over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the unbiased standard deviation of the rewards of all ranks that are not NaN.  rewards [N]"""
    kept = ~rewards.isnan()
    count, total = over_ranks(torch.stack([kept.sum().to(rewards.dtype), masked_sum(rewards, kept)]))
    squares = over_ranks(masked_sum((rewards - total / count) ** 2, kept))
    return total / count, (squares / (count - 1)).sqrt()


def opo_advantages(rewards: torch.Tensor, lengths: torch.Tensor, num_generations: int) -> torch.Tensor:
    """OPO: a reward minus the mean of its group weighted by the completions' lengths, the baseline of least variance if
    the gradients of tokens are uncorrelated (arXiv:2505.23585; verl's opo).

    rewards, lengths in tokens [N]; returns [N]. NaN as in `group_advantages`.
    """
    groups = in_groups(rewards, num_generations)
    counted = in_groups(lengths, num_generations) * ~groups.isnan()
    baselines = (groups * counted).nansum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True)
    alone = (~groups.isnan()).sum(dim=1, keepdim=True) < 2
    return torch.where(alone, 0.0, groups - baselines).nan_to_num(nan=0.0).flatten()


def grpo_passk_advantages(rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group") -> torch.Tensor:
    """Pass@k: the best reward of a group minus the second best, for the best completion; 0 for the others
    (arXiv:2503.19595; verl's grpo_passk).

    rewards [N]; returns [N]. scale_rewards: group: divide by the group's unbiased deviation, to which 1e-6 is added;
    none: by nothing. NaN as in `group_advantages`. Raises ValueError for another scale_rewards.
    """
    require_choice("scale_rewards", scale_rewards, ("group", "none"))
    groups = in_groups(rewards, num_generations)
    values, places = groups.nan_to_num(nan=-torch.inf).topk(2, dim=1)
    gain = values[:, 0] - values[:, 1]
    gain = gain / (group_std(rewards, num_generations) + 1e-6) if scale_rewards == "group" else gain
    gain = torch.where(gain.isfinite(), gain, 0.0)  # fewer than two scored
    return torch.zeros_like(groups).scatter(1, places[:, :1], gain[:, None]).flatten()


def remax_advantages(rewards: torch.Tensor, baselines: torch.Tensor, num_generations: int) -> torch.Tensor:
    """ReMax: a reward minus that of the greedy completion of its prompt (arXiv:2310.10505; verl's remax).

    rewards [N], baselines [N / num_generations]; returns [N]; 0 where one of the two is NaN.
    """
    return (in_groups(rewards, num_generations) - baselines.unsqueeze(1)).nan_to_num(nan=0.0).flatten()


def reinforce_plus_plus_advantages(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> torch.Tensor:
    """REINFORCE++: the discounted sum of the rewards of a token and of those after it, whitened over the tokens of all
    ranks (arXiv:2501.03262; verl's reinforce_plus_plus).

    rewards [N, T]: of tokens, such as `shaped_rewards`. mask [N, T]; masked tokens are not counted as steps. Returns
    [N, T]. over_ranks: as in `masked_whiten`.
    """
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t].bool(), rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return masked_whiten(returns, mask, over_ranks=over_ranks, unbiased=True)


def reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    num_generations: int,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> torch.Tensor:
    """REINFORCE++-baseline: a reward minus the mean of its group, whitened over the tokens of all ranks
    (arXiv:2501.03262; verl's reinforce_plus_plus_baseline).

    rewards [N], mask [N, T]; returns [N, T]. NaN as in `group_advantages`. over_ranks: as in `masked_whiten`.
    """
    centered = group_advantages(rewards, num_generations, "none").unsqueeze(1).expand(mask.shape)
    scored = mask.bool() & ~rewards.isnan().unsqueeze(1)
    return masked_whiten(centered, scored, over_ranks=over_ranks, unbiased=True)


def gdpo_advantages(
    rewards: torch.Tensor,
    weights: list[float],
    num_generations: int,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> torch.Tensor:
    """GDPO, for several rewards: each is normalized within its group, and their weighted sum over all completions
    (arXiv:2601.05242; TRL's multi_objective_aggregation normalize_then_sum).

    rewards [N, rewards]; returns [N]. A NaN counts as the group's mean; the advantage of a completion that no reward
    scored is 0. Deviations are unbiased, and 1e-4 is added. over_ranks: sums a tensor over all ranks; called twice.
    """
    normalized = [group_advantages(column, num_generations) for column in rewards.unbind(dim=1)]
    total = sum(weight * column for weight, column in zip(weights, normalized, strict=True))
    total = torch.where(rewards.isnan().all(dim=1), torch.nan, total)
    mean, std = mean_and_std(total, over_ranks)
    return ((total - mean) / (std + 1e-4)).nan_to_num(nan=0.0)


def in_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Rewards [N] as [N / num_generations, num_generations].

    Raises ValueError if N is no multiple of num_generations.
    """
    if len(rewards) % num_generations:
        raise ValueError(
            f"rewards: {len(rewards)} given; the number must be a multiple of num_generations, {num_generations}"
        )
    return rewards.view(-1, num_generations)
