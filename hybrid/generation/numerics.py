"""How far sampler and trainer are apart over the same tokens, under the names that trainers log."""

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
    """What logprobs of the same tokens by two forwards say of each other, in float64, over the unmasked ones.

    sampling_logps, training_logps, mask: [rows, tokens]; what is masked may hold anything.
    over_ranks: combines a float64 tensor over all ranks by an operation, SUM or MAX, so that the split over ranks
        changes nothing. Called twice, also on a rank without tokens.
    name: before the slash of every metric.

    sampling_logp_difference/mean, /max: of |sampling - training|, TRL's names (GRPOTrainer).
    ratio_outside: the share of tokens whose exp(training - sampling) leaves RATIO_BAND.
    gen_kl_error: KL(sampling ‖ training) by the k3 estimator, the mean of exp(d) - d - 1 with d = training - sampling
        (NeMo-RL, ClippedPGLossFn in nemo_rl/algorithms; Schulman, "Approximating KL divergence", 2020).
    Without any token on any rank, all are 0.
    """
    kept = mask.bool()
    log_ratio = training_logps.double()[kept] - sampling_logps.double()[kept]  # [tokens that are kept]
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
