"""GRPO's advantages and its loss by a run's settings."""

import torch

from rlhf_examples.common.advantages import (
    gdpo_advantages,
    group_advantages,
    grpo_passk_advantages,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.choices import LOSS_SETTINGS
from rlhf_examples.common.losses import Loss
from rlhf_examples.common.policy_losses import grpo_loss
from rlhf_examples.common.ranks import over_ranks
from rlhf_examples.common.rollouts import Experience


def advantages_of(
    rewards: torch.Tensor,
    token_rewards: torch.Tensor | None,
    mask: torch.Tensor,
    args: GRPOArguments,
    baselines: torch.Tensor | None = None,
    each: tuple[torch.Tensor, list[float]] | None = None,
) -> torch.Tensor:
    """The advantages by the run's settings, float32 [rows] or [rows, completion]. Every rank takes part.

    rewards [rows]; token_rewards, mask [rows, completion]: the same at the tokens, and the KL with `use_kl_in_reward`.
    baselines [prompts]: rewards of greedy completions. each: every reward's scores [rows, rewards], and their weights.
    """
    number = args.num_generations
    if each is not None:
        return gdpo_advantages(*each, number, over_ranks)
    if args.use_kl_in_reward and token_rewards is not None:
        rewards = torch.where(rewards.isnan(), torch.nan, token_rewards.sum(dim=1))
    match args.advantages:
        case "rloo":
            return rloo_advantages(rewards, number)
        case "opo":
            return opo_advantages(rewards, mask.sum(dim=1), number)
        case "grpo_passk":
            return grpo_passk_advantages(rewards, number, args.scale_rewards)
        case "remax":
            assert baselines is not None, "of greedy completions"
            return remax_advantages(rewards, baselines, number)
        case "reinforce_plus_plus":
            assert token_rewards is not None, "computed for it"
            scored = mask * ~rewards.isnan()[:, None]
            return reinforce_plus_plus_advantages(token_rewards, scored, args.gamma, over_ranks)
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline_advantages(rewards, mask, number, over_ranks)
    return group_advantages(rewards, number, args.scale_rewards, over_ranks)


def surrogate_settings(args: GRPOArguments) -> dict[str, float | None]:
    """The settings of the loss type's surrogate, by name."""
    settings = {name: getattr(args, name) for name in LOSS_SETTINGS[args.loss_type]}
    return settings | {name: settings[name] or None for name in ("epsilon_high", "delta") if name in settings}


def policy_loss(
    logps: torch.Tensor,
    entropies: torch.Tensor | None,
    rows: Experience,
    denominator: float,
    args: GRPOArguments,
    generator: torch.Generator | None = None,
) -> Loss:
    """The loss of rows by the run's settings.  logps, entropies: float32 [rows, completion], of the policy.  generator:
    for clip_cov.
    """
    return grpo_loss(
        logps,
        rows.old_logps,
        rows.advantages,
        rows.mask,
        denominator=denominator,
        beta=0.0 if args.use_kl_in_reward else args.beta,
        ref_logps=rows.ref_logps,
        use_bias_correction_kl=args.use_bias_correction_kl,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        weights=rows.weights,
        entropies=entropies,
        generator=generator,
        **surrogate_settings(args),
    )
