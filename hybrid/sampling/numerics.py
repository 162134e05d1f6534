"""Metrics of the difference between sampling and training logprobs, under the names that trainers log."""

from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

RATIO_BAND = (0.9, 1.1)


def sampling_metrics(
    sampling_logps: torch.Tensor,
    training_logps: torch.Tensor,
    mask: torch.Tensor,
    over_ranks: Callable[[torch.Tensor, ReduceOp.RedOpType], torch.Tensor] = lambda values, op: values,
    name: str = "sampling",
) -> dict[str, float]:
    """Return metrics of the difference between two forwards' logprobs of the same tokens, in float64, over the unmasked
    tokens.

    Args:
        sampling_logps: [rows, tokens]; masked entries may hold anything.
        training_logps: of the same shape.
        mask: of the same shape, 1 for tokens that count.
        over_ranks: reduces a float64 tensor over all ranks by SUM or MAX, so that the result does not depend on how
            rows are split over ranks. Called twice, also on a rank without tokens.
        name: prefix of every metric's name.

    Returns:
        Metrics under `name/`, all 0 if no rank has a token:
        `sampling_logp_difference/mean` and `/max`, of |sampling - training|, TRL's names (GRPOTrainer);
        `ratio_outside`, the share of tokens whose exp(training - sampling) is outside RATIO_BAND;
        `gen_kl_error`, KL(sampling ‖ training) by the k3 estimator, the mean of exp(d) - d - 1 with
        d = training - sampling (NeMo-RL, ClippedPGLossFn in nemo_rl/algorithms; Schulman, "Approximating KL
        divergence", 2020).
    """
    kept = mask.bool()
    log_ratio = training_logps.double()[kept] - sampling_logps.double()[kept]  # [unmasked tokens]
    ratio, (low, high) = log_ratio.exp(), RATIO_BAND
    sums = torch.stack(
        [
            kept.sum().double(),
            log_ratio.abs().sum(),
            ((ratio < low) | (ratio > high)).sum().double(),
            (log_ratio.expm1() - log_ratio).sum(),
        ]
    )
    largest = torch.cat([log_ratio.abs(), log_ratio.new_zeros(1)]).max()
    tokens, difference, outside, kl = over_ranks(sums, ReduceOp.SUM).tolist()
    return {
        f"{name}/sampling_logp_difference/mean": difference / max(tokens, 1),
        f"{name}/sampling_logp_difference/max": over_ranks(largest, ReduceOp.MAX).item(),
        f"{name}/ratio_outside": outside / max(tokens, 1),
        f"{name}/gen_kl_error": kl / max(tokens, 1),
    }
