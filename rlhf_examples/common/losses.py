"""Losses of reward models, critics and supervised training, and helpers of all losses, as pure functions.
Policies' losses are in `policy_losses.py` and `preference_losses.py`.

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


def pairs_loss(total: torch.Tensor, denominator: float, mask: torch.Tensor, metrics: dict[str, torch.Tensor]) -> Loss:
    """A Loss from a sum over pairs, with metrics [B] of the pairs in `mask` [B]."""
    sums = {name: masked_sum(values.detach().to(total.dtype), mask) for name, values in metrics.items()}
    sums["loss"] = total.detach()
    return Loss(total / denominator, sums, dict.fromkeys(sums, mask.sum()))


def upcast(values: torch.Tensor) -> torch.Tensor:
    """`values` in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
