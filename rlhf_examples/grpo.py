"""GRPO and its variants on a HybridEngine: groups of completions, verifiable rewards, no critic.

Sums with the SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.grpo --actor_model_name_or_path runs/demo/sums/model \\
    --reward rlhf_examples.rewards:exact_match
torchrun --nproc_per_node=8 -m rlhf_examples.grpo --actor_model_name_or_path my-model --data_path problems.jsonl \\
    --reward my_rewards:correct --dtype bfloat16
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor, Evaluation, load_rewards, start_log, time_metrics, train_iterations
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.files import CHECKPOINTS
from rlhf_examples.common.forwards import token_logps
from rlhf_examples.common.groups import dynamic_sampling_groups, next_groups, rewards_differ
from rlhf_examples.common.losses import (
    entropy_bonus,
    group_advantages,
    group_std,
    grpo_loss,
    masked_sum,
    mean_metrics,
    mixed_loss,
    rloo_advantages,
    soft_overlong_punishment,
)
from rlhf_examples.common.measures import Phases, flops_metrics, scores_by_source
from rlhf_examples.common.models import load_tokenizer, require_model
from rlhf_examples.common.overlapped_rewards import note_reward_models
from rlhf_examples.common.partial_rollouts import PartialRollouts
from rlhf_examples.common.ranks import over_ranks, seed_everything, sums_over_ranks
from rlhf_examples.common.rollouts import (
    Experience,
    Numerics,
    completion_metrics,
    loss_weights,
    optimizer_steps,
    training_logps,
)
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.scorers import Rewards, Scorer
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:arithmetic"
BAR = {"reward": "reward", "length": "completions/mean_length", "tokens/s": "time/tokens_per_s"}


def main() -> None:
    """Train with the arguments of the command line and export the policy."""
    run_command(GRPOArguments, run)


def run(args: GRPOArguments) -> Metrics:
    """Train and export a policy; returns the last metrics, and those of the evaluations before and after."""
    seed_everything(args.seed)
    directory = Path(args.output_dir)
    require_model("actor_model_name_or_path", args.actor_model_name_or_path, args.attn_implementation)
    if not args.reward:
        raise ValueError("reward: none given; give functions, addresses of servers, or reward models")
    Scorer.check(*args.reward, *args.eval_reward)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.actor_model_name_or_path, args.chat_template)
    examples, held_out = load_examples("grpo", EMBEDDED, "prompt", args.max_prompt_seq_len, tokenizer, args)
    begin_run(args)
    total_steps = args.num_iterations * args.num_grpo_iterations * args.num_mini_batches
    actor = Actor.load(args, total_steps, needs_reference=args.beta > 0)
    rewards = load_rewards(args.reward, args.reward_weights, args, args.offload_reference_model)

    prompts, best = RowStream(examples, args.seed), BestModel.from_args(args)
    partial = PartialRollouts() if args.partial_rollout else None
    parts = {"prompts": prompts, "best": best, "partial_rollouts": partial, **actor.checkpoint_parts()}
    checkpoints = Checkpoints(directory / CHECKPOINTS, {"policy": actor.policy}, parts, args.keep_last)
    done = checkpoints.load_latest() if args.resume else 0
    evaluation = Evaluation.load(actor.policy, tokenizer, held_out, rewards, args)
    before = evaluation.before_training(directory, resumed=done > 0)
    best.check(before["metrics"])
    log = start_log(args, "GRPO", BAR, args.num_iterations, done)
    note_reward_models(log, rewards, args.overlap_rewards)
    if not done:
        evaluation.evaluate_and_log(log, 0, before)

    def iterate(iteration: int) -> Metrics:
        return grpo_iteration(actor, rewards, tokenizer, prompts, iteration, args, partial)

    metrics, last = train_iterations(iterate, actor, evaluation, checkpoints, best, log, done, args)
    after = evaluation.after_training(log, before, last)
    actor.export(tokenizer, directory)
    log.close()
    actor.destroy()
    rewards.destroy()
    return {**metrics, **after}


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
        phases.end("rollout")
        logps = window_logps(actor, batch, phases, args)
    logps = with_training_logps(policy, batch, *logps, phases, args)  # before the rewards, which it overlaps
    overlapped = groups.overlapped
    if overlapped is not None and not groups.scores:
        groups = replace(groups, scores=overlapped.scores_by_name(batch))
        sampling_metrics = overlapped.metrics()
    scores = groups.scores[rewards.name]
    phases.end("rewards")
    learned = ~scores.isnan()
    if args.dynamic_sampling:  # before the length penalty: a group that differs in length alone teaches nothing
        learned &= rewards_differ(scores, args.num_generations).repeat_interleave(args.num_generations)
    if args.soft_punish_cache:
        lengths = batch.completion_mask.sum(dim=1)
        scores = scores + soft_overlong_punishment(lengths, args.max_answer_seq_len, args.soft_punish_cache)
    metrics = sampling_metrics | rewards.metrics() | scores_by_source(groups.prompts, scores, args.data_path)
    return metrics | learn(actor, batch, *logps, scores, learned, iteration, phases, args)


def window_logps(
    actor: Actor, batch: hybrid.RolloutBatch, phases: Phases, args: GRPOArguments
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What is computed in the window of the rollout: old logprobs (None with `importance_sampling_correction`) and the
    reference's (None without `beta`), float32 [rows, completion].
    """
    old_logps = None if args.importance_sampling_correction else actor.old_logps(batch)
    phases.end("old_logps")
    ref_logps = actor.reference_logps(batch) if args.beta else None
    phases.end("ref_logps")
    return old_logps, ref_logps


def with_training_logps(
    policy: hybrid.HybridEngine,
    batch: hybrid.RolloutBatch,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    phases: Phases,
    args: GRPOArguments,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logprobs of `window_logps`, with those of the training forward where it left the old ones out: `score` would
    give the sampler's own.
    """
    if old_logps is None:
        old_logps = training_logps(policy, batch, args)
        phases.end("old_logps")
    return old_logps, ref_logps


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
) -> Metrics:
    """Update the policy on this rank's scored completions, padded to the widths of all ranks; returns metrics.

    old_logps, ref_logps: float32 [rows, completion].  scores, learned: as in `make_experience`.
    """
    policy = actor.policy
    experience, metrics = make_experience(batch, old_logps, ref_logps, scores, learned, args)
    experience = experience.all_gather(args.num_generations)
    phases.end("advantages")
    policy.train()
    metrics |= update(actor, experience, iteration, args)
    phases.end("train")
    flops = args.num_grpo_iterations * actor.flops(experience.attention_mask.sum(dim=1))
    return {
        **metrics,
        "episode": iteration * len(experience.mask),
        "lr": policy.get_lr()[0],
        **actor.tokens.add(batch.attention_mask.sum()),
        **time_metrics(policy, batch, phases),
        **flops_metrics(flops, phases.seconds["train"], args.peak_tflops),
    }


def make_experience(
    batch: hybrid.RolloutBatch,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    learned: torch.Tensor,
    args: GRPOArguments,
) -> tuple[Experience, Metrics]:
    """Compute the advantages of this rank's scored completions; returns the experience, and metrics of all ranks.

    old_logps, ref_logps float32 [rows, completion]; rewards float32 [rows], NaN where a completion could not be scored.
    learned: bool [rows], False for completions that are masked out of the loss.
    """
    mask = batch.completion_mask
    if args.advantages == "rloo":
        advantages = rloo_advantages(rewards, args.num_generations)
    else:
        advantages = group_advantages(rewards, args.num_generations, args.scale_rewards, over_ranks)
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
    losses, grad_norms, forward = [], [], (args.temperature, args.logit_chunk, args.padding_free)
    for step in steps:
        mask = experience.mask[step.rows]
        denominator = step.denominator(
            tokens=int(mask.sum()),
            sequences=len(mask),  # fully masked sequences count too, as in TRL
            loss_type=args.loss_type,
            max_length=args.max_answer_seq_len,
        )
        for index, batch in enumerate(step.micro_batches(experience)):
            width = batch.mask.shape[1]
            logps, entropies = token_logps(actor.policy, batch.sequences, batch.attention_mask, width, *forward)
            loss = grpo_loss(
                logps,
                batch.old_logps,
                batch.advantages,
                batch.mask,
                denominator=denominator,
                epsilon=args.epsilon,
                epsilon_high=args.epsilon_high or None,
                delta=args.delta or None,
                beta=args.beta,
                ref_logps=batch.ref_logps,
                use_bias_correction_kl=args.use_bias_correction_kl,
                loss_type=args.loss_type,
                importance_sampling_level=args.importance_sampling_level,
                weights=batch.weights,
                entropies=entropies,
            )
            if args.entropy_coef:
                bonus = entropy_bonus(entropies, batch.mask, step.denominator(tokens=int(mask.sum())))
                loss = mixed_loss(loss, entropy=bonus, entropy_coef=args.entropy_coef)
            losses.append(loss)
            grad_norms += backward_and_step(actor.policy, loss.loss, index, len(step.micro_batch_rows))
            numerics.add(logps)
        actor.update_average()
    return {**mean_metrics(losses, over_ranks), "grad_norm": fmean(grad_norms), **numerics.metrics()}


if __name__ == "__main__":
    main()
