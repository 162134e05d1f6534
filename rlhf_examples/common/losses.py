"""The losses and advantages of reward models, DPO, PPO and GRPO as pure functions, and the controllers of the KL
coefficient.

Masks are int64 or bool; masked positions contribute nothing, whatever their values, unless a docstring says so. A row
without tokens (a dropped sample) contributes nothing either.

Shapes: B sequences of T tokens, right padded.

denominator: what a micro batch's sum is divided by. DeepSpeed averages gradients over ranks and accumulated backwards,
    so it is the number of tokens (or pairs, or sequences) of the whole optimizer step on all ranks, divided by the
    number of its micro batches on all ranks (`loss_denominator`). So losses depend neither on padding nor on the number
    of ranks.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class Loss:
    """A loss for the backward, and metrics for the log.

    sums, counts: each metric's sum over this micro batch, and the number of tokens, pairs or the like that it sums
        over.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor | int] = field(default_factory=dict)


def identity(sums: torch.Tensor) -> torch.Tensor:
    """The default for `over_ranks`: a single rank."""
    return sums


def mean_metrics(
    losses: Iterable[Loss], over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity
) -> dict[str, float]:
    """The mean of every metric over all micro batches of all ranks; 0 if its count is 0.

    losses: at least one on each rank, all with the same metrics. over_ranks: sums a tensor over all ranks; called once.
    """
    losses = list(losses)
    names, device = sorted(losses[0].sums), losses[0].loss.device
    cells = [values[name] for loss in losses for values in (loss.sums, loss.counts) for name in names]
    table = torch.stack([torch.as_tensor(cell, dtype=torch.float64, device=device) for cell in cells])
    sums, counts = over_ranks(table.view(len(losses), 2, len(names)).sum(dim=0))
    return dict(zip(names, (sums / counts.clamp(min=1)).tolist(), strict=True))


def require_choice(name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError if `value` is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} given; allowed: {', '.join(map(str, allowed))}")


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` [B, T] where `mask` [B, T] is set."""
    return torch.where(mask.bool(), values, 0.0).sum()


def last_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Marks each row's last token; all False in a row without tokens.  mask [B, T]; returns bool [B, T]."""
    kept = mask.bool()
    return kept & (kept.cumsum(dim=1) == kept.sum(dim=1, keepdim=True))


def last_token_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The value at each row's last token; 0 in a row without tokens.  values, mask [B, T]; returns [B]."""
    return torch.where(last_tokens(mask), values, 0.0).sum(dim=1)


def pairwise_reward_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    denominator: float,
    margin: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> Loss:
    """-log σ(chosen - rejected - margin), summed over pairs and divided by `denominator` (Bradley-Terry; InstructGPT,
    arXiv:2203.02155, eq. 1; the margin is Llama 2's, arXiv:2307.09288, eq. 2; TRL's RewardTrainer).

    chosen, rejected, margin [B]: scores of whole sequences. mask [B]: the pairs that count; None: all.
    Metrics, by pair: loss, accuracy, margin.
    """
    kept = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask.bool()
    difference = torch.where(kept, upcast(chosen) - upcast(rejected), 0.0)
    required_margin = 0.0 if margin is None else torch.where(kept, margin, 0.0)
    total = masked_sum(-logsigmoid(difference - required_margin), kept)
    return pairs_loss(total, denominator, kept, {"accuracy": difference > 0, "margin": difference})


def tokenwise_pairwise_reward_loss(
    chosen_values: torch.Tensor,
    rejected_values: torch.Tensor,
    chosen_ids: torch.Tensor,
    rejected_ids: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_mask: torch.Tensor,
    denominator: float,
) -> Loss:
    """DeepSpeed-Chat's reward loss: for each pair the mean of -log σ(chosen - rejected) over the positions from the
    first difference to the end of the longer sequence; summed over pairs and divided by `denominator`.

    All tensors are [B, T], prompt and completion together. After the shorter sequence's end its values are, as in
    DeepSpeed-Chat, the model's outputs at padding, so the values must come from padded rows, not packed ones.
    Differences from dschat/utils/model/reward_model.py: a sequence ends where its mask ends, not at the first padding
    id, which cut a sequence before its end token if that is also the padding token, or in a prompt that contains one,
    and needed `num_padding_at_beginning` for OPT; after the shorter sequence's end the two differ, whatever the ids; a
    pair without any difference contributes nothing instead of a constant log 2; sequences may differ in the first
    token, which was an assertion error; half precision is always summed in float32.
    Metrics, by pair, of the scores at the last tokens: loss, accuracy, margin.
    """
    in_chosen, in_rejected = chosen_mask.bool(), rejected_mask.bool()
    in_either = in_chosen | in_rejected
    differs = in_either & ((chosen_ids != rejected_ids) | (in_chosen != in_rejected))
    window = in_either & (differs.cumsum(dim=1) > 0)  # [B, T]
    width = window.sum(dim=1)
    losses = torch.where(
        window, -logsigmoid(torch.where(window, upcast(chosen_values) - upcast(rejected_values), 0.0)), 0.0
    )
    total = (losses.sum(dim=1) / width.clamp(min=1)).sum()
    difference = last_token_values(upcast(chosen_values), in_chosen) - last_token_values(
        upcast(rejected_values), in_rejected
    )
    return pairs_loss(total, denominator, width > 0, {"accuracy": difference > 0, "margin": difference})


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
    metrics = {"chosen": chosen, "rejected": rejected, "accuracies": margin > 0, "margins": margin}
    named = {f"rewards/{name}": values for name, values in metrics.items()}
    return pairs_loss(masked_sum(losses, kept), denominator, kept, named)


def pairs_loss(total: torch.Tensor, denominator: float, mask: torch.Tensor, metrics: dict[str, torch.Tensor]) -> Loss:
    """A Loss from a sum over pairs, with metrics [B] of the pairs in `mask` [B]."""
    sums = {name: masked_sum(values.detach().to(total.dtype), mask) for name, values in metrics.items()}
    sums["loss"] = total.detach()
    return Loss(total / denominator, sums, dict.fromkeys(sums, mask.sum()))


def upcast(values: torch.Tensor) -> torch.Tensor:
    """`values` in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> torch.Tensor:
    """Values scaled to variance 1, and shifted to mean 0 if `shift_mean`, over the unmasked positions.  values, mask
    [B, T]; returns [B, T], 0 where masked.

    over_ranks: sums a tensor over all data-parallel ranks, so that the split over ranks changes nothing.
    The variance is the biased one; 1e-8 keeps equal values finite. Without a token on any rank the result is 0.
    """
    count, total = over_ranks(torch.stack([mask.sum().to(values.dtype), masked_sum(values, mask)]))
    mean = total / count
    variance = over_ranks(masked_sum((values - mean) ** 2, mask)) / count
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
    ratio outside the bounds becomes the bound. *_mask: it becomes 0, which removes the token or row from the loss.
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


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float,
    denominator: float,
) -> Loss:
    """Half the squared error, the larger of that of the value and that of the value clipped around the old one, summed
    over tokens and divided by `denominator`.

    values, old_values, returns, mask [B, T]. Metrics, by token: loss, clipfrac.
    """
    values = torch.where(mask.bool(), values, 0.0)
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    total = masked_sum(0.5 * torch.maximum(error, clipped_error), mask)
    clipfrac = masked_sum((clipped_error > error).to(values.dtype), mask)
    sums = {"loss": total.detach(), "clipfrac": clipfrac.detach()}
    return Loss(total / denominator, sums, dict.fromkeys(sums, mask.sum()))


def explained_variance(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = identity,
) -> float:
    """1 - Var(returns - values) / Var(returns) over the unmasked positions of all ranks: 1 for a perfect critic, 0 for
    one no better than a constant, negative for a worse one. NaN if all returns are equal.

    values, returns, mask [B, T].  over_ranks: sums a tensor over all ranks; called twice.
    """
    kept = mask.bool()
    returns, errors = returns[kept].double(), (returns - values)[kept].double()
    ones = torch.ones_like(returns)
    count, *totals = over_ranks(torch.stack([ones.sum(), returns.sum(), errors.sum()]))
    squares = [((tensor - total / count) ** 2).sum() for tensor, total in zip((returns, errors), totals, strict=True)]
    total, unexplained = over_ranks(torch.stack(squares)).tolist()
    return 1 - unexplained / total if total else math.nan


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of softmax(logits) in nats; differentiable.  logits [..., vocabulary]; returns [...].

    Half precision is summed in float32. A logit of -inf has probability 0 and contributes nothing.
    """
    return entropy_of(torch.log_softmax(upcast(logits), dim=-1))


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """The entropy in nats of distributions given as log probabilities.  log_probs [..., vocabulary]; returns [...]."""
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1)  # 0 · -inf is NaN


def entropy_bonus(entropies: torch.Tensor, mask: torch.Tensor, denominator: float) -> Loss:
    """The entropy, summed over tokens and divided by `denominator`; `mixed_loss` subtracts it (arXiv:1707.06347, eq. 9;
    TRL's `entropy_coef`).

    entropies, mask [B, T]. Metric, by token: entropy.
    """
    total = masked_sum(entropies, mask)
    return Loss(total / denominator, {"entropy": total.detach()}, {"entropy": mask.sum()})


def language_model_loss(logps: torch.Tensor, mask: torch.Tensor, denominator: float) -> Loss:
    """-logps, summed over tokens and divided by `denominator`: supervised training, and PPO's pretraining mixture.

    logps, mask [B, T]: logprobs of the labels at temperature 1. Metric, by token: loss.
    """
    total = -masked_sum(logps, mask)
    return Loss(total / denominator, {"loss": total.detach()}, {"loss": mask.sum()})


def mixed_loss(
    policy: Loss,
    *,
    entropy: Loss | None = None,
    entropy_coef: float = 0.0,
    ptx: Loss | None = None,
    unsup_coef: float = 0.0,
) -> Loss:
    """policy - entropy_coef · entropy + unsup_coef · ptx.

    entropy: from `entropy_bonus`. ptx: from `language_model_loss` on pretraining text (PPO-ptx: InstructGPT,
        arXiv:2203.02155, eq. 2, whose γ is DeepSpeed-Chat's `unsup_coef`). Metrics: the policy's, entropy, ptx/loss;
        `loss` stays the policy's own.
    """
    loss, sums, counts = policy.loss, dict(policy.sums), dict(policy.counts)
    if entropy is not None:
        loss = loss - entropy_coef * entropy.loss
        sums, counts = sums | entropy.sums, counts | entropy.counts
    if ptx is not None:
        loss = loss + unsup_coef * ptx.loss
        sums["ptx/loss"], counts["ptx/loss"] = ptx.sums["loss"], ptx.counts["loss"]
    return Loss(loss, sums, counts)


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Leaves the coefficient unchanged."""

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that grows while the KL is above `target` and shrinks while it is below (Ziegler et al.,
    arXiv:1909.08593, section 2.2, and their lm-human-preferences; TRL's names).

    target: KL of a completion in nats. horizon: completions over which the coefficient can change by a fifth.
    Raises ValueError for a target or horizon that is not positive.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        super().__init__(init_kl_coef)
        for name, value in {"target": target, "horizon": horizon}.items():
            if not value > 0:
                raise ValueError(f"{name}: {value!r} given; it must be above 0")
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update after `n_steps` completions of all ranks with mean KL `current`. Raises ValueError for NaN."""
        if math.isnan(current):
            raise ValueError(
                "kl: NaN, from the logprobs of the policy or the reference; the KL coefficient would become NaN too"
            )
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


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
        kept = ~rewards.isnan()
        count, total = over_ranks(torch.stack([kept.sum().to(rewards.dtype), masked_sum(rewards, kept)]))
        squares = over_ranks(masked_sum((rewards - total / count) ** 2, kept))
        advantages = advantages / ((squares / (count - 1)).sqrt() + 1e-4)
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


def in_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Rewards [N] as [N / num_generations, num_generations].

    Raises ValueError if N is no multiple of num_generations.
    """
    if len(rewards) % num_generations:
        raise ValueError(
            f"rewards: {len(rewards)} given; the number must be a multiple of num_generations, {num_generations}"
        )
    return rewards.view(-1, num_generations)


def kl_k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """A non-negative estimate of KL(policy ‖ reference) at each token: r - log r - 1, with r the reference's
    probability over the policy's (k3 of Schulman, "Approximating KL divergence", 2020; GRPO's eq. 4).  All [B,
    T].
    """
    log_ratio = ref_logps - logps
    return log_ratio.exp() - log_ratio - 1


def loss_denominator(
    loss_type: str, *, sequences: int, tokens: int, max_completion_length: int, micro_batches: int
) -> float:
    """The denominator of a micro batch's `grpo_loss`, or, with "dapo", of any loss that is a mean over tokens.

    sequences, tokens: of the optimizer step on all ranks, which consists of `micro_batches` = ranks · accumulated
        backwards. A fully masked sequence counts as a sequence, as in TRL, but its tokens do not count. The denominator
        of none is that of one.
    grpo: sequences. dr_grpo: sequences · max_completion_length. dapo, bnpo: tokens.
    bnpo differs from TRL's, which divides by each micro batch's own tokens, so that the gradient depends on the micro
    batch size; here the batch is the optimizer step. TRL's dapo counts the tokens of the whole generation, over however
    many optimizer steps it is learned: for that, pass the sequences, tokens and micro batches of the generation.
    Raises ValueError for another loss_type.
    """
    require_choice("loss_type", loss_type, LOSS_TYPES)
    number = {"grpo": sequences, "dr_grpo": sequences * max_completion_length}.get(loss_type, tokens)
    return max(number, 1) / micro_batches


def grpo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    denominator: float,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    ref_logps: torch.Tensor | None = None,
    use_bias_correction_kl: bool = True,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    weights: torch.Tensor | float = 1.0,
    entropies: torch.Tensor | None = None,
) -> Loss:
    """GRPO's loss (arXiv:2402.03300, eq. 3) as in TRL 1.16 (GRPOTrainer._compute_loss), for a micro batch.

    logps, old_logps, mask, ref_logps, entropies [B, T]; advantages [B].
    denominator: from `loss_denominator` for the same loss_type.
    epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; None: both are epsilon. The higher
        upper bound is "clip higher" of DAPO (arXiv:2503.14476).
    delta: upper bound of the unclipped ratio (INTELLECT-2, arXiv:2505.07291).
    beta: weight of `kl_k3` to the reference, which needs ref_logps. use_bias_correction_kl: multiply it by the ratio,
        so that its gradient is the KL's (DeepSeek-V3.2, arXiv:2512.02556).
    loss_type: grpo: a mean over each sequence's tokens, then over sequences; the others: a sum over tokens.
    importance_sampling_level: token, or sequence: one ratio for a sequence, exp of the mean log ratio of its tokens
        (GSPO, arXiv:2507.18071).
    weights [B, T]: factors of the clipped terms, such as `importance_sampling_weights`.
    Metrics, with TRL's names: loss, a mean over micro batches; kl and entropy, if given, by token; clip_ratio/low_mean,
    clip_ratio/high_mean, clip_ratio/region_mean by token or, at the sequence level, by row.
    Raises ValueError for another loss_type or level, or for a beta without ref_logps.
    """
    require_choice("loss_type", loss_type, LOSS_TYPES)
    require_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if beta and ref_logps is None:
        raise ValueError(f"beta: {beta} given without ref_logps; give the reference's logprobs, or a beta of 0")
    kept = mask.bool()
    length = kept.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    by_sequence = importance_sampling_level == "sequence"
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)

    log_ratio = torch.where(kept, logps - old_logps, 0.0)
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length if by_sequence else log_ratio).exp()  # [B, T] or [B, 1]
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    advantages = advantages.unsqueeze(1)
    surrogate = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    per_token = surrogate * torch.where(kept, weights, 0.0)  # [B, T]

    is_low, is_high = (bounded < low) & (advantages < 0), (bounded > high) & (advantages > 0)
    clip_masks = {"low_mean": is_low, "high_mean": is_high, "region_mean": is_low | is_high}
    counted = torch.ones_like(is_low) if by_sequence else kept
    sums = {f"clip_ratio/{name}": (clip_mask & counted).sum() for name, clip_mask in clip_masks.items()}
    counts: dict[str, torch.Tensor | int] = dict.fromkeys(sums, counted.sum())
    if beta:
        assert ref_logps is not None, "beta needs the reference's logprobs"
        kl = kl_k3(torch.where(kept, logps, 0.0), torch.where(kept, ref_logps, 0.0))
        kl = kl * ratio if use_bias_correction_kl else kl
        per_token = per_token + beta * kl
        sums["kl"], counts["kl"] = masked_sum(kl.detach(), kept), kept.sum()
    if entropies is not None:
        sums["entropy"], counts["entropy"] = masked_sum(entropies.detach(), kept), kept.sum()

    total = masked_sum(per_token / length if loss_type == "grpo" else per_token, kept)
    sums["loss"], counts["loss"] = total.detach() / denominator, 1
    return Loss(total / denominator, sums, counts)
