"""GRPO and its variants on a HybridEngine: groups of completions, verifiable rewards, no critic.

Sums with the SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.grpo --actor_model_name_or_path runs/demo/sums/model \\
    --reward rlhf_examples.rewards:exact_match
torchrun --nproc_per_node=8 -m rlhf_examples.grpo --actor_model_name_or_path my-model --data_path problems.jsonl \\
    --reward my_rewards:correct --dtype bfloat16
"""

from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.grpo", GRPOArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor, Evaluation, load_rewards
from rlhf_examples.common.advantages import group_std, shaped_rewards, soft_overlong_punishment
from rlhf_examples.common.controllers import AdaptiveEntropyController
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.forwards import token_logps
from rlhf_examples.common.groups import dynamic_sampling_groups, next_groups, rewards_differ
from rlhf_examples.common.grpo_settings import advantages_of, policy_loss
from rlhf_examples.common.losses import entropy_bonus, masked_sum, mean_metrics, mixed_loss
from rlhf_examples.common.measures import Phases, scores_by_source
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.overlapped_rewards import note_reward_models
from rlhf_examples.common.partial_rollouts import PartialRollouts
from rlhf_examples.common.ranks import over_ranks, sums_over_ranks
from rlhf_examples.common.rollouts import (
    Experience,
    Numerics,
    Row,
    completion_metrics,
    decode_completions,
    loss_weights,
    optimizer_steps,
    rank_row_ids,
    roll_out,
    sampling,
    sampling_seed,
)
from rlhf_examples.common.run import Run
from rlhf_examples.common.scorers import Rewards, Scorer
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:arithmetic"
BAR = {"reward": "reward", "length": "completions/mean_length", "tokens/s": "time/tokens_per_s"}


def run(args: GRPOArguments) -> Metrics:
    """Train and export a policy; returns the last metrics, and those of the evaluations before and after."""
    tokenizer = tokenizer_of(args, "actor_model_name_or_path")
    args.require_inputs()
    Scorer.check(*args.reward, *args.eval_reward)
    examples, held_out = load_examples("grpo", EMBEDDED, "prompt", args.max_prompt_seq_len, tokenizer, args)
    prompts, partial = RowStream(examples, args.seed), PartialRollouts() if args.partial_rollout else None
    with Run(args, "GRPO", BAR, args.num_iterations) as run:
        actor = load_actor(args)
        rewards = load_rewards(args.reward, args.reward_weights, args, args.offload_reference_model)
        evaluation = Evaluation.load(actor.policy, tokenizer, held_out, [rewards], args)
        run.start(
            actor,
            tokenizer,
            evaluation,
            engines={"policy": actor.policy},
            parts={"prompts": prompts, "partial_rollouts": partial, "entropy": actor.entropy_controller},
        )
        note_reward_models(run.log, rewards, args.overlap_rewards)
        for iteration in run.iterations():
            with run.log.engine_output():
                actor.policy.eval()  # prints DeepSpeed's line about the previous iteration
            run.add(iteration, grpo_iteration(actor, rewards, tokenizer, prompts, iteration, args, partial))
    actor.destroy()
    rewards.destroy()
    return run.metrics


def load_actor(args: GRPOArguments, num_rollouts: int = 1) -> Actor:
    """The policy, its reference if there is a KL, and with `use_adaptive_entropy` a controller.  num_rollouts: of an
    iteration, each with an update.
    """
    total_steps = args.num_iterations * num_rollouts * args.num_grpo_iterations * args.num_mini_batches
    actor = Actor.load(args, total_steps, needs_reference=args.beta > 0)
    if args.use_adaptive_entropy:
        bounds = args.entropy_coef_min, args.entropy_coef_max
        actor.entropy_controller = AdaptiveEntropyController(
            args.entropy_coef, args.entropy_target, args.entropy_coef_delta, *bounds
        )
    return actor


def grpo_iteration(
    actor: Actor,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    prompts: RowStream,
    iteration: int,
    args: GRPOArguments,
    partial: PartialRollouts | None = None,
) -> Metrics:
    """One iteration: roll out groups of completions of the next prompts, score them, update the policy; returns
    metrics.

    partial: groups that earlier iterations have begun, for `partial_rollout`.
    Expects the policy in eval mode and leaves it in train mode.
    """
    phases, policy = Phases(), actor.policy
    sampling_metrics: Metrics = {}
    with policy.inference():
        if partial is not None:
            groups, sampling_metrics = partial.next_groups(policy, rewards, tokenizer, prompts, iteration, phases, args)
        elif args.dynamic_sampling:
            groups, sampling_metrics = dynamic_sampling_groups(
                policy, rewards, tokenizer, prompts, iteration, phases, args
            )
        else:
            next_prompts = prompts.next(args.per_device_generation_batch_size * dist.get_world_size())
            groups = next_groups(policy, tokenizer, next_prompts, 0, iteration, args, rewards)
        batch = groups.batch
        greedy = greedy_completions(policy, tokenizer, groups.prompts, iteration, args)
        phases.end("rollout")
        logps = actor.window_logps(batch, phases)
    logps = actor.training_logps(batch, *logps, phases)  # before the rewards, which it overlaps
    overlapped = groups.overlapped
    if overlapped is not None and not groups.scores:
        groups = replace(groups, scores=overlapped.scores_by_name(batch))
        sampling_metrics = overlapped.metrics()
    scores, baselines, each = groups.scores[rewards.name], None, None
    if greedy is not None:
        baselines = rewards(greedy, groups.prompts[:: args.num_generations], decode_completions(tokenizer, greedy))
        rewards.last_scores = groups.scores  # so that `Rewards.metrics` covers the sampled completions
    if args.multi_objective_aggregation == "normalize_then_sum":
        each = torch.stack([groups.scores[scorer.name] for scorer in rewards.scorers], dim=1), rewards.weights
    phases.end("rewards")
    learned = ~scores.isnan()
    if args.dynamic_sampling:  # before the length penalty: a group that differs in length alone teaches nothing
        learned &= rewards_differ(scores, args.num_generations).repeat_interleave(args.num_generations)
    if args.soft_punish_cache:
        lengths = batch.completion_mask.sum(dim=1)
        scores = scores + soft_overlong_punishment(lengths, args.max_answer_seq_len, args.soft_punish_cache)
    metrics = sampling_metrics | rewards.metrics() | scores_by_source(groups.prompts, scores, args.data_path)
    return metrics | learn(actor, batch, *logps, scores, learned, iteration, phases, args, baselines, each)


def greedy_completions(
    policy: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Row],
    iteration: int,
    args: GRPOArguments,
) -> hybrid.RolloutBatch | None:
    """The greedy completion of each prompt, for `advantages: remax`; else None.  prompts: one for each completion."""
    if args.advantages != "remax":
        return None
    of_groups = prompts[:: args.num_generations]
    params = replace(sampling(args, sampling_seed(args.seed, iteration)), temperature=0.0)
    return roll_out(policy, tokenizer, of_groups, rank_row_ids(len(of_groups)), params)


def learn(
    actor: Actor,
    batch: hybrid.RolloutBatch,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    scores: torch.Tensor,
    learned: torch.Tensor,
    iteration: int,
    phases: Phases,
    args: GRPOArguments,
    baselines: torch.Tensor | None = None,
    each: tuple[torch.Tensor, list[float]] | None = None,
) -> Metrics:
    """Update the policy on this rank's scored completions, padded to the widths of all ranks; returns metrics.

    old_logps, ref_logps: float32 [rows, completion].  scores, learned, baselines, each: as in `make_experience`.
    """
    policy = actor.policy
    experience, metrics = make_experience(batch, old_logps, ref_logps, scores, learned, args, baselines, each)
    experience = experience.all_gather(args.num_generations)
    phases.end("advantages")
    policy.train()
    metrics |= update(actor, experience, iteration, args)
    phases.end("train")
    flops = args.num_grpo_iterations * actor.flops(experience.attention_mask.sum(dim=1))
    return {
        **metrics,
        "episode": iteration * len(experience.mask),
        **actor.iteration_metrics(batch, phases, flops),
    }


def make_experience(
    batch: hybrid.RolloutBatch,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    learned: torch.Tensor,
    args: GRPOArguments,
    baselines: torch.Tensor | None = None,
    each: tuple[torch.Tensor, list[float]] | None = None,
) -> tuple[Experience, Metrics]:
    """Compute the advantages of this rank's scored completions; returns the experience, and metrics of all ranks.

    old_logps, ref_logps float32 [rows, completion]; rewards float32 [rows], NaN where a completion could not be scored.
    learned: bool [rows], False for completions that are masked out of the loss.
    baselines, each: as in `advantages_of`.
    """
    mask = batch.completion_mask
    token_rewards = None
    if args.use_kl_in_reward or args.advantages == "reinforce_plus_plus":
        kl_coef, scored = args.beta if args.use_kl_in_reward else 0.0, mask * ~rewards.isnan()[:, None]
        references = old_logps if ref_logps is None else ref_logps
        token_rewards = shaped_rewards(rewards, old_logps, references, scored, kl_coef)
    advantages = advantages_of(rewards, token_rewards, mask, args, baselines, each)
    has_eos = torch.tensor([reason == "stop" for reason in batch.finish_reason], device=mask.device)
    learned = learned & (has_eos | (not args.mask_truncated_completions))
    weights, weight_metrics = loss_weights(old_logps, batch.sampling_per_token_logps, mask, args)
    experience = Experience(
        sequences=batch.sequences,
        attention_mask=batch.attention_mask,
        mask=mask * learned[:, None],
        sampling_logps=batch.old_per_token_logps,
        old_logps=old_logps,
        weights=weights,
        advantages=advantages,
        ref_logps=ref_logps,
    )
    sums = sums_over_ranks(
        {
            "rows": len(rewards),
            "scored": (~rewards.isnan()).sum(),
            "rewards": rewards.nansum(),
            **group_statistics(rewards, args.num_generations),
            "entropy": -masked_sum(old_logps, mask),
            "learned": learned.sum(),
        }
    )
    return experience, {
        "reward": sums["rewards"] / max(sums["scored"], 1),
        "reward_std": sums["reward_std"] / max(sums["groups"], 1),
        "frac_reward_zero_std": sums["zero_std"] / max(sums["groups"], 1),
        "objective/entropy": sums["entropy"] / sums["rows"],
        "completions/learned": sums["learned"] / sums["rows"],
        **completion_metrics(batch),
        **weight_metrics,
    }


def group_statistics(rewards: torch.Tensor, num_generations: int) -> dict[str, torch.Tensor]:
    """Sums over this rank's groups with at least two scored completions: their number, their standard deviations, and
    the number of those whose scores are all equal.

    rewards float32 [rows], NaN where a completion could not be scored.
    """
    reward_std = group_std(rewards, num_generations)
    scored, equal = ~reward_std.isnan(), ~rewards_differ(rewards, num_generations)
    return {"groups": scored.sum(), "reward_std": reward_std.nansum(), "zero_std": (scored & equal).sum()}


def update(actor: Actor, experience: Experience, iteration: int, args: GRPOArguments) -> Metrics:
    """`num_grpo_iterations` passes over the experience of all ranks; returns metrics of all ranks."""
    steps = optimizer_steps(experience, args.num_grpo_iterations, iteration, args)
    numerics = Numerics(actor.policy, experience, steps[0], args.numerics_control_rows, args)
    losses, grad_norms, forward = [], [], (args.temperature, args.training_forward)
    controller, generator = actor.entropy_controller, torch.Generator()
    generator.manual_seed(sampling_seed(args.seed, iteration) * 1009 + dist.get_rank())
    for step in steps:
        entropy_coef = args.entropy_coef if controller is None else controller.value
        mask = experience.mask[step.rows]
        denominator = step.denominator(
            tokens=int(mask.sum()),
            sequences=len(mask),  # fully masked sequences count too, as in TRL
            loss_type=args.loss_type,
            max_length=args.max_answer_seq_len,
        )
        for index, batch in enumerate(step.micro_batches(experience)):
            width = batch.mask.shape[1]
            rows = batch.sequences, batch.attention_mask, width
            logps, entropies = token_logps(actor.policy, *rows, *forward, entropy=True)
            loss = policy_loss(logps, entropies, batch, denominator, args, generator)
            if entropy_coef:
                assert entropies is not None, "requested above"
                bonus = entropy_bonus(entropies, batch.mask, step.denominator(tokens=int(mask.sum())))
                loss = mixed_loss(loss, entropy=bonus, entropy_coef=entropy_coef)
            losses.append(loss)
            grad_norms += backward_and_step(actor.policy, loss.loss, index, len(step.micro_batch_rows))
            numerics.add(logps)
        if controller is not None:
            controller.update(mean_metrics(losses[-len(step.micro_batch_rows) :], over_ranks)["entropy"])
        actor.update_average()
    metrics = {**mean_metrics(losses, over_ranks), "grad_norm": fmean(grad_norms), **numerics.metrics()}
    return metrics if controller is None else {**metrics, "entropy_coef": controller.coef}
