"""The losses of PPO, GRPO and its variants as pure functions: masks, shapes and denominators as in `losses.py`.

GRPO and its variants differ in the surrogate, a function of POLICY_LOSSES, and in the mean over tokens and rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rlhf_examples.common.choices import (
    IMPORTANCE_SAMPLING_LEVELS,
    IMPORTANCE_SAMPLING_MODES,
    LOSS_TYPES,
    require_choice,
)
from rlhf_examples.common.losses import Loss, masked_sum

# Loss types that are a mean over rows; luspo is one of the rows' sums, the others of the rows' means over tokens.
OVER_ROWS = ("grpo", "sapo", "gmpo", "luspo")


def loss_denominator(
    loss_type: str, *, sequences: int, tokens: int, max_completion_length: int, micro_batches: int
) -> float:
    """The denominator of a micro batch's `grpo_loss`, or, with "dapo", of any loss that is a mean over tokens.

    sequences, tokens: of the optimizer step on all ranks, which consists of `micro_batches` = ranks · accumulated
        backwards. A fully masked sequence counts as a sequence, as in TRL, but its tokens do not count. The denominator
        of none is that of one.
    OVER_ROWS: sequences. dr_grpo: sequences · max_completion_length. The others: tokens.
    bnpo differs from TRL's, which divides by each micro batch's own tokens, so that the gradient depends on the micro
    batch size; here the batch is the optimizer step. TRL's dapo counts the tokens of the whole generation, over however
    many optimizer steps it is learned: for that, pass the sequences, tokens and micro batches of the generation.
    Raises ValueError for another loss_type.
    """
    require_choice("loss_type", loss_type, LOSS_TYPES)
    number = sequences if loss_type in OVER_ROWS else tokens
    number = sequences * max_completion_length if loss_type == "dr_grpo" else number
    return max(number, 1) / micro_batches


def kl_k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """A non-negative estimate of KL(policy ‖ reference) at each token: r - log r - 1, with r the reference's
    probability over the policy's (k3 of Schulman, "Approximating KL divergence", 2020; GRPO's eq. 4).  All [B,
    T].
    """
    log_ratio = ref_logps - logps
    return log_ratio.exp() - log_ratio - 1


def importance_sampling_weights(
    old_logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
    mode: str = "token_truncate",
    floor: float = 0.0,
) -> torch.Tensor:
    """exp(old_logps - sampling_logps), bounded by `floor` and `cap`, for each token; 1 where masked.  All [B, T].

    The importance sampling weight of a token is its probability under the trainer's policy over that under the
    sampler's (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    https://fengyao.notion.site/off-policy-rl).
    mode: TRL's `vllm_importance_sampling_mode` (GRPOTrainer 1.16; cap and floor are its clip_max and clip_min).
    token_*: a ratio for each token. sequence_*: the product of a row's ratios, at each of its tokens. *_truncate: a
    ratio outside the bounds becomes the bound: truncated importance sampling, TIS. *_mask: it becomes 0, which removes
    the token or row from the loss. token_mask is IcePop (Ling team, "Every step evolves", arXiv:2510.18855; verl's
    rollout_is: token with two thresholds), sequence_mask is MIS (Liu et al., "When speed kills stability",
    https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda).
    Raises ValueError for another mode.
    """
    require_choice("mode", mode, IMPORTANCE_SAMPLING_MODES)
    kept = mask.bool()
    log_ratio = torch.where(kept, old_logps - sampling_logps, 0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        weights = ratio.clamp(floor, cap)
    else:
        weights = torch.where((ratio < floor) | (ratio > cap), 0.0, ratio)
    return torch.where(kept, weights, 1.0)


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
    `importance_sampling_weights`. Metrics, by token: loss, approxkl (k2: half the squared log ratio), clipfrac, ratio,
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
    sums["loss"] = total.detach()
    return Loss(total / denominator, sums, dict.fromkeys(sums, mask.sum()))


@dataclass(frozen=True)
class PolicyRows:
    """The rows of a micro batch as surrogates read them.

    logps, old_logps, log_ratio, weights: [B, T], 0 where masked. mask: bool [B, T]. length [B, 1]: tokens.
    ratio: [B, T], or [B, 1] if `by_sequence`. advantages: [B, T], or [B, 1] for one a row.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    length: torch.Tensor
    by_sequence: bool = False
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class Surrogate:
    """The terms of a policy's loss before they are summed, and their metrics.

    per_token: [B, T], or [B, 1] for one a row; `weights` included. metrics: by name, as `per_token`. by_row: whether
        the metrics have a value for each row.
    """

    per_token: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    by_row: bool = False


def clipped_surrogate(
    rows: PolicyRows, *, epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None
) -> Surrogate:
    """PPO's and GRPO's: -min(ratio · A, clip(ratio) · A) (arXiv:1707.06347, eq. 7; arXiv:2402.03300, eq. 3).

    epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; None: both are epsilon. The higher
        upper bound is "clip higher" of DAPO (arXiv:2503.14476, eq. 10).
    delta: upper bound of the unclipped ratio (INTELLECT-2, arXiv:2505.07291).
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    bounded = rows.ratio if delta is None else rows.ratio.clamp(max=delta)
    surrogate = -torch.minimum(bounded * rows.advantages, rows.ratio.clamp(low, high) * rows.advantages)
    is_low, is_high = (bounded < low) & (rows.advantages < 0), (bounded > high) & (rows.advantages > 0)
    metrics = {"low_mean": is_low, "high_mean": is_high, "region_mean": is_low | is_high}
    named = {f"clip_ratio/{name}": values for name, values in metrics.items()}
    return Surrogate(surrogate * rows.weights, named, by_row=rows.by_sequence)


def by_sign(positive: torch.Tensor, value: float, other: float, like: torch.Tensor) -> torch.Tensor:
    """`value` where `positive`, else `other`, in the dtype of `like`."""
    return torch.where(positive, like.new_tensor(value), like.new_tensor(other))


def cispo_surrogate(rows: PolicyRows, *, epsilon_high: float = 5.0) -> Surrogate:
    """CISPO: -sg(min(ratio, epsilon_high)) · A · logp (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, without a lower
    bound; epsilon_high is ScaleRL's ε_max, arXiv:2510.13786; TRL's loss_type cispo).
    """
    clipped = (rows.ratio > epsilon_high) & (rows.advantages > 0)
    surrogate = -rows.ratio.clamp(max=epsilon_high).detach() * rows.advantages * rows.logps
    return Surrogate(surrogate * rows.weights, {"cispo_clip_ratio": clipped}, by_row=rows.by_sequence)


def sapo_surrogate(
    rows: PolicyRows, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> Surrogate:
    """SAPO: -4 / τ · σ(τ · (ratio - 1)) · A, with a temperature τ for positive advantages and one for the others
    (arXiv:2511.20347; TRL's and verl's sapo).
    """
    temperature = by_sign(rows.advantages > 0, sapo_temperature_pos, sapo_temperature_neg, rows.ratio)
    gate = torch.sigmoid(temperature * (rows.ratio - 1)) * 4 / temperature
    return Surrogate(-gate * rows.advantages * rows.weights)


def vespo_surrogate(
    rows: PolicyRows,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Surrogate:
    """VESPO: -sg(φ(w)) · A · logp, with φ(w) = w^k · exp(λ · (1 - w)) and w the probability of the whole row over that
    under the sampler (arXiv:2602.10693; TRL's get_gamma_weights, with its bounds of logarithms).

    w includes the importance sampling weights, which multiply nothing else.
    """
    with torch.no_grad():
        lowest = math.log(1e-8)
        of_sampler = torch.where(rows.mask, rows.weights, 1.0).log().clamp(lowest, 20.0)
        log_ratio = rows.log_ratio.clamp(-20.0, 20.0)
        log_w = (log_ratio.sum(1, keepdim=True) + of_sampler.sum(1, keepdim=True)).clamp(lowest, 20.0)
        positive = rows.advantages >= 0
        k = by_sign(positive, vespo_k_pos, vespo_k_neg, log_w)
        decay = by_sign(positive, vespo_lambda_pos, vespo_lambda_neg, log_w).clamp(min=1e-4)
        phi = (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    by_row = rows.advantages.shape[1] == 1
    return Surrogate(-phi * rows.advantages * rows.logps, {"vespo/phi_seq_mean": phi}, by_row)


def gmpo_surrogate(rows: PolicyRows, *, epsilon: float = 0.4, epsilon_high: float | None = None) -> Surrogate:
    """GMPO: -A · the geometric mean of a row's clipped ratios, one for each row (arXiv:2507.20673, whose clip range is
    exp(±0.4); TRL's experimental GMPOTrainer; verl's geo_mean).

    epsilon, epsilon_high: of the logarithm of the ratio. Only what raises the objective is clipped. Weights enter as
    their geometric mean, as in verl. A row's advantage is the mean over its tokens.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    bounded = rows.log_ratio.clamp(-epsilon, high)
    positive = rows.advantages > 0
    clipped = torch.where(positive, torch.minimum(rows.log_ratio, bounded), torch.maximum(rows.log_ratio, bounded))
    mean_log = torch.where(rows.mask, clipped, 0.0).sum(1, keepdim=True) / rows.length
    weight = ((torch.where(rows.mask, rows.weights, 1.0) + 1e-10).log().sum(1, keepdim=True) / rows.length).exp()
    advantage = torch.where(rows.mask, rows.advantages, 0.0).sum(1, keepdim=True) / rows.length
    is_low, is_high = (rows.log_ratio < -epsilon) & (rows.advantages < 0), (rows.log_ratio > high) & positive
    metrics = {"low_mean": is_low, "high_mean": is_high, "region_mean": is_low | is_high}
    named = {f"clip_ratio/{name}": values for name, values in metrics.items()}
    return Surrogate(-advantage * mean_log.exp() * weight, named)


def dppo_surrogate(
    rows: PolicyRows, divergence: torch.Tensor, low: float, high: float, clip_ratio_c: float
) -> Surrogate:
    """-sg(min(ratio, clip_ratio_c)) · A · logp, without the tokens that have left the trust region in A's direction:
    their probability rose, their divergence is above `high` and A is positive; or it fell, the divergence is above
    `low` and A is not positive (arXiv:2602.04879, eq. 12, and its section 5.4 on clip_ratio_c; verl's dppo_tv and
    dppo_kl).

    divergence [B, T]: of the old policy and the policy, without gradient.
    """
    outside = torch.where(
        rows.advantages > 0,
        (divergence > high) & (rows.log_ratio > 0),
        (divergence > low) & (rows.log_ratio < 0),
    )
    truncated = rows.log_ratio.clamp(-20.0, 20.0).exp().clamp(max=clip_ratio_c).detach()
    surrogate = torch.where(outside, 0.0, -truncated * rows.advantages * rows.logps)
    return Surrogate(surrogate * rows.weights, {"clip_ratio/region_mean": outside})


def dppo_tv_surrogate(
    rows: PolicyRows, *, epsilon: float = 0.2, epsilon_high: float | None = None, clip_ratio_c: float = 20.0
) -> Surrogate:
    """DPPO whose divergence is the total variation of "this token or another": |p - p_old| (arXiv:2602.04879).

    epsilon, epsilon_high: the `low` and `high` of `dppo_surrogate`.
    """
    divergence = (rows.logps.detach().exp() - rows.old_logps.exp()).abs()
    return dppo_surrogate(rows, divergence, epsilon, epsilon if epsilon_high is None else epsilon_high, clip_ratio_c)


def dppo_kl_surrogate(
    rows: PolicyRows, *, epsilon: float = 0.2, epsilon_high: float | None = None, clip_ratio_c: float = 20.0
) -> Surrogate:
    """DPPO whose divergence is KL(old ‖ policy) of "this token or another" (arXiv:2602.04879).

    epsilon, epsilon_high: the `low` and `high` of `dppo_surrogate`.
    """
    logps = rows.logps.detach()
    p, old = logps.exp(), rows.old_logps.exp()
    of_others = (1 - old) * ((1 - old + 1e-8) / (1 - p + 1e-8)).log()
    divergence = old * (rows.old_logps - logps) + of_others
    return dppo_surrogate(rows, divergence, epsilon, epsilon if epsilon_high is None else epsilon_high, clip_ratio_c)


def covariances(rows: PolicyRows) -> torch.Tensor:
    """(A - mean A) · (logp - mean logp) of each token, with means over the tokens of the micro batch
    (arXiv:2505.22617, section 4.2).  Returns [B, T], without gradient; -inf where masked.
    """
    count = rows.mask.sum().clamp(min=1)
    advantages = torch.where(rows.mask, rows.advantages, 0.0)
    logps = rows.logps.detach()
    product = (advantages - advantages.sum() / count) * (logps - logps.sum() / count)
    return torch.where(rows.mask, product, -torch.inf)


def clip_cov_surrogate(
    rows: PolicyRows,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Surrogate:
    """Clip-Cov: the clipped surrogate without some tokens of a high covariance, which would lower the entropy most
    (arXiv:2505.22617, section 4.2; verl's clip_cov).

    clip_cov_ratio: tokens left out, as a share of the micro batch's; at least one. clip_cov_lb, clip_cov_ub: they are
        drawn from the unclipped tokens whose covariance lies between these, by `rows.generator`.
    """
    assert rows.generator is not None, "clip_cov draws tokens"
    plain = clipped_surrogate(rows, epsilon=epsilon, epsilon_high=epsilon_high)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    clips = -rows.advantages * rows.ratio.clamp(low, high) > -rows.advantages * rows.ratio
    covariance = covariances(rows)
    is_candidate = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & rows.mask & ~clips
    candidates = is_candidate.flatten().nonzero()[:, 0]
    limit = max(int(clip_cov_ratio * int(rows.mask.sum())), 1)
    drawn = torch.randperm(len(candidates), generator=rows.generator)[:limit].to(candidates.device)
    left_out = torch.zeros_like(rows.mask).flatten().index_fill(0, candidates[drawn], True).view_as(rows.mask)
    metrics = {**plain.metrics, "clip_cov/region_mean": left_out}
    return Surrogate(torch.where(left_out, 0.0, plain.per_token), metrics)


def kl_cov_surrogate(rows: PolicyRows, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0) -> Surrogate:
    """KL-Cov: -ratio · A, plus ppo_kl_coef · |log ratio| at the tokens of the highest covariance (arXiv:2505.22617,
    section 4.2; verl's kl_cov).

    kl_cov_ratio: these tokens as a share of the micro batch's; at least one.
    """
    tokens = int(rows.mask.sum())
    highest = covariances(rows).flatten().topk(min(max(int(tokens * kl_cov_ratio), 1), tokens)).indices
    penalized = torch.zeros_like(rows.mask).flatten().index_fill(0, highest, True).view_as(rows.mask)
    surrogate = -rows.advantages * rows.ratio + torch.where(penalized, ppo_kl_coef * rows.log_ratio.abs(), 0.0)
    return Surrogate(surrogate * rows.weights, {"kl_cov/region_mean": penalized})


# The surrogate of each loss type; its keyword arguments are settings of the same names.
POLICY_LOSSES: dict[str, Callable[..., Surrogate]] = {
    "grpo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "luspo": clipped_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "vespo": vespo_surrogate,
    "gmpo": gmpo_surrogate,
    "dppo_tv": dppo_tv_surrogate,
    "dppo_kl": dppo_kl_surrogate,
    "clip_cov": clip_cov_surrogate,
    "kl_cov": kl_cov_surrogate,
}


def importance_ratio(log_ratio: torch.Tensor, logps: torch.Tensor, length: torch.Tensor, level: str) -> torch.Tensor:
    """The ratio of policy and old policy.  log_ratio, logps [B, T], 0 where masked; length [B, 1].

    level: token: of each token, [B, T]. sequence: of a row, exp of its mean log ratio, [B, 1] (GSPO, arXiv:2507.18071,
        eq. 7). sequence_token: that value at each token, with the gradient of the token's own logp, [B, T] (GSPO-token,
        eq. 14), for advantages that differ between a row's tokens.
    """
    if level == "token":
        return log_ratio.exp()
    mean = log_ratio.sum(dim=1, keepdim=True) / length
    return mean.exp() if level == "sequence" else (mean.detach() + logps - logps.detach()).exp()


def grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    denominator: float,
    beta: float = 0.0,
    ref_logps: torch.Tensor | None = None,
    use_bias_correction_kl: bool = True,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    weights: torch.Tensor | float = 1.0,
    entropies: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    **settings: float | None,
) -> Loss:
    """GRPO's loss (arXiv:2402.03300, eq. 3) and its variants as in TRL 1.16 (GRPOTrainer._compute_loss) and verl, for a
    micro batch.

    logps, old_logps, mask, ref_logps, entropies [B, T]; advantages [B] or [B, T].
    denominator: from `loss_denominator` for the same loss_type.
    beta: weight of `kl_k3` to the reference, which needs ref_logps. use_bias_correction_kl: multiply it by the ratio,
        so that its gradient is the KL's (DeepSeek-V3.2, arXiv:2512.02556).
    loss_type: the surrogate in POLICY_LOSSES. grpo, sapo, gmpo: a mean over each sequence's tokens, then over
        sequences; luspo: a sum over each sequence's tokens, a mean over sequences (arXiv:2602.05261); the others: a
        sum over tokens.
    importance_sampling_level: as in `importance_ratio`.
    weights [B, T]: factors of the surrogate, such as `importance_sampling_weights`.
    generator: for clip_cov. settings: of the surrogate, such as epsilon.
    Metrics, with TRL's names: loss, a mean over micro batches; kl and entropy, if given, by token; clip_ratio/low_mean
    and the like by token or, at the sequence level, by row.
    Raises ValueError for another loss_type or level, or for a beta without ref_logps.
    """
    require_choice("loss_type", loss_type, LOSS_TYPES)
    require_choice("importance_sampling_level", importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
    if beta and ref_logps is None:
        raise ValueError(f"beta: {beta} given without ref_logps; give the reference's logprobs, or a beta of 0")
    kept = mask.bool()
    length = kept.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    log_ratio, kept_logps = torch.where(kept, logps - old_logps, 0.0), torch.where(kept, logps, 0.0)
    ratio = importance_ratio(log_ratio, kept_logps, length, importance_sampling_level)  # [B, T] or [B, 1]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else torch.where(kept, advantages, 0.0)
    rows = PolicyRows(
        kept_logps,
        torch.where(kept, old_logps, 0.0),
        log_ratio,
        ratio,
        advantages,
        torch.where(kept, weights, 0.0),
        kept,
        length,
        importance_sampling_level == "sequence",
        generator,
    )
    surrogate = POLICY_LOSSES[loss_type](rows, **settings)
    per_token = surrogate.per_token

    counted = torch.ones_like(length, dtype=torch.bool) if surrogate.by_row else kept
    sums = {name: torch.where(counted, values.detach(), 0).sum() for name, values in surrogate.metrics.items()}
    counts: dict[str, torch.Tensor | int] = dict.fromkeys(sums, counted.sum())
    if beta:
        assert ref_logps is not None, "beta needs the reference's logprobs"
        kl = kl_k3(kept_logps, torch.where(kept, ref_logps, 0.0))
        kl = kl * ratio if use_bias_correction_kl else kl
        per_token = per_token + beta * kl
        sums["kl"], counts["kl"] = masked_sum(kl.detach(), kept), kept.sum()
    if entropies is not None:
        sums["entropy"], counts["entropy"] = masked_sum(entropies.detach(), kept), kept.sum()

    total = masked_sum(per_token / length if loss_type in OVER_ROWS and loss_type != "luspo" else per_token, kept)
    sums["loss"], counts["loss"] = total.detach() / denominator, 1
    return Loss(total / denominator, sums, counts)
