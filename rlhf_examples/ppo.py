"""PPO on a HybridEngine: rollouts, rewards and updates in one process per rank.

The models of `make demo`, on CPUs; a model of 7B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.ppo --data_path synthetic:stories --actor_model_name_or_path \\
    runs/demo/sft/model --critic_model_name_or_path runs/demo/reward_model/model
torchrun --nproc_per_node=8 -m rlhf_examples.ppo configs/8gpu_7b_lora.yaml
"""

from rlhf_examples.common.arguments import PPOArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.ppo", PPOArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor, Evaluation, load_rewards, warn_of_truncation
from rlhf_examples.common.advantages import advantages_and_returns, masked_whiten, shaped_rewards
from rlhf_examples.common.controllers import AdaptiveKLController, FixedKLController
from rlhf_examples.common.engines import Training, backward_and_step, make_value_engine
from rlhf_examples.common.forwards import frozen_values, token_logps, token_values
from rlhf_examples.common.losses import (
    Loss,
    entropy_bonus,
    explained_variance,
    masked_sum,
    mean_metrics,
    mixed_loss,
    value_loss,
)
from rlhf_examples.common.measures import Phases, TrainingFlops, scores_by_source
from rlhf_examples.common.models import load_value_model, require_model, tokenizer_of
from rlhf_examples.common.overlapped_rewards import OverlappedRewards, note_reward_models
from rlhf_examples.common.policy_losses import policy_loss
from rlhf_examples.common.pretraining import PretrainingTexts
from rlhf_examples.common.ranks import over_ranks, rank_share, sums_over_ranks
from rlhf_examples.common.rollout_log import log_rollout, numbered
from rlhf_examples.common.rollouts import (
    Experience,
    Numerics,
    Row,
    completion_metrics,
    forward_batch_size,
    kept_mask,
    loss_weights,
    optimizer_steps,
    rank_row_ids,
    roll_out,
    sampled_logps,
    sampling,
    sampling_seed,
    with_turn_end,
)
from rlhf_examples.common.run import Run
from rlhf_examples.common.scorers import Rewards, Scorer
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:stories"
BAR = {"score": "objective/scores", "kl": "objective/kl", "tokens/s": "time/tokens_per_s"}


def run(args: PPOArguments) -> Metrics:
    """Train and export a policy; returns the last metrics, and those of the evaluations before and after."""
    check(args)
    tokenizer = tokenizer_of(args, "actor_model_name_or_path")
    examples, held_out = load_examples("ppo", EMBEDDED, "prompt", args.max_prompt_seq_len, tokenizer, args)
    prompts, ptx, kl_ctl = RowStream(examples, args.seed), PretrainingTexts.load(tokenizer, args), kl_controller(args)
    with Run(args, "PPO", BAR, args.num_iterations) as run:
        models = Models.load(args)
        evaluation = Evaluation.load(models.actor.policy, tokenizer, held_out, [models.rewards], args)
        run.start(
            models.actor,
            tokenizer,
            evaluation,
            engines={"policy": models.actor.policy, "critic": models.critic},
            parts={"prompts": prompts, "kl_ctl": kl_ctl, "ptx": ptx},
        )
        note_reward_models(run.log, models.rewards, args.overlap_rewards and bool(args.reward))
        for iteration in run.iterations():
            with run.log.engine_output():
                models.actor.policy.eval()  # prints DeepSpeed's line about the previous iteration
            batch = rank_share(prompts.next(args.per_device_generation_batch_size * dist.get_world_size()))
            run.add(iteration, ppo_iteration(models, tokenizer, batch, ptx, kl_ctl, iteration, args))
    models.destroy()
    return run.metrics


def check(args: PPOArguments) -> None:
    """Raises ValueError if a critic or reward that a setting names does not exist, or if there is no reward."""
    args.require_inputs()
    if args.critic_model_name_or_path:
        require_model("critic_model_name_or_path", args.critic_model_name_or_path, args.attn_implementation)
    Scorer.check(*args.reward, *args.eval_reward)


@dataclass
class Models:
    """The engines of a run.  critic_flops: floating-point operations of training the critic."""

    actor: Actor
    critic: hybrid.HybridEngine
    rewards: Rewards
    critic_flops: TrainingFlops

    @classmethod
    def load(cls, args: PPOArguments) -> "Models":
        """Load the policy with its reference, the critic (initialized from the reward model) and the rewards."""
        warn_of_truncation(args)
        reward_model = args.critic_model_name_or_path
        total_steps = args.num_iterations * args.ppo_epochs * args.num_mini_batches
        actor = Actor.load(args, total_steps, needs_reference=True)
        training = Training.from_args(args, "critic_", args.per_device_training_batch_size, total_steps)
        critic = load_value_model(
            reward_model or args.actor_model_name_or_path,
            training.config(args),
            training.lora,
            training.gradient_checkpointing,
            disable_dropout=args.disable_dropout,
            attn_implementation=args.attn_implementation,
        )
        rewards = load_rewards(args.reward or [reward_model], args.reward_weights, args, args.offload_reference_model)
        critic = make_value_engine(critic, args, training)
        actor.policy.count_training_of(critic)
        return cls(actor, critic, rewards, TrainingFlops.of(critic.module))

    def destroy(self) -> None:
        """Destroy the engines."""
        self.actor.destroy()
        self.critic.destroy()
        self.rewards.destroy()


def ppo_iteration(
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Row],
    ptx: PretrainingTexts | None,
    kl_ctl: FixedKLController,
    iteration: int,
    args: PPOArguments,
) -> Metrics:
    """One iteration: roll out this rank's prompts, score them, update policy and critic; returns metrics.

    Expects the policy in eval mode and leaves it in train mode.
    """
    phases, policy = Phases(), models.actor.policy
    with policy.inference():
        params = with_turn_end(sampling(args, sampling_seed(args.seed, iteration)), tokenizer)
        rewards = OverlappedRewards(models.rewards, tokenizer, prompts, overlaps=args.overlap_rewards)
        row_ids = rank_row_ids(len(prompts))
        batch = roll_out(policy, tokenizer, prompts, row_ids, params, on_rows=rewards.on_rows)
        log_rollout(batch, numbered(row_ids), params, iteration, args)
        phases.end("rollout")
        logps = models.actor.window_logps(batch, phases)
    old_logps, ref_logps = models.actor.training_logps(batch, *logps, phases)
    assert ref_logps is not None, "PPO's reward has the KL to the reference"
    experience, metrics = make_experience(models, rewards, batch, old_logps, ref_logps, kl_ctl.value, args, phases)
    experience = experience.all_gather()
    phases.end("advantages")
    policy.train()
    models.critic.train()
    metrics |= update(models, ptx, experience, iteration, args)
    phases.end("train")
    lengths = experience.attention_mask.sum(dim=1)
    flops = models.actor.flops(lengths) + models.critic_flops(lengths)
    flops *= metrics["policy/optimizer_steps"] / args.num_mini_batches
    metrics["objective/kl_coef"] = kl_ctl.value  # of these rewards: before the controller's update
    kl_ctl.update(metrics["objective/kl"], len(experience.mask))
    return {
        **metrics,
        "episode": iteration * len(experience.mask),
        **models.actor.iteration_metrics(batch, phases, flops),
    }


def make_experience(
    models: Models,
    rewards: OverlappedRewards,
    batch: hybrid.RolloutBatch,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor,
    kl_coef: float,
    args: PPOArguments,
    phases: Phases,
) -> tuple[Experience, Metrics]:
    """Score this rank's completions and compute their values and advantages; returns the experience, and metrics of
    all ranks.

    rewards: those of `batch`.  old_logps, ref_logps float32 [rows, completion].
    phases: the timer of the iteration; ends `values` and `rewards`.
    A completion that could not be scored is masked out of the loss.
    """
    completion_mask, width = batch.completion_mask, batch.completion_mask.shape[1]
    with models.critic.inference():
        rows = forward_batch_size(args, batch.sequences.shape[1])
        values = frozen_values(models.critic, batch.sequences, batch.attention_mask, rows)[:, -width - 1 : -1]
    phases.end("values")
    raw_scores = rewards.scores_by_name(batch)[models.rewards.name]
    phases.end("rewards")
    learned = ~raw_scores.isnan()
    mask = completion_mask * learned[:, None]
    has_eos = torch.tensor([reason == "stop" for reason in batch.finish_reason], device=values.device)
    scores = raw_scores.clamp(-args.clip_reward, args.clip_reward) - args.missing_eos_penalty * ~has_eos
    token_rewards = shaped_rewards(scores, old_logps, ref_logps, mask, kl_coef)
    if args.whiten_rewards:
        token_rewards = masked_whiten(token_rewards, mask, shift_mean=False, over_ranks=over_ranks)
    advantages, returns = advantages_and_returns(token_rewards, values, mask, args.gamma, args.lam)
    weights, weight_metrics = loss_weights(old_logps, batch.sampling_per_token_logps, completion_mask, args)
    experience = Experience(
        sequences=batch.sequences,
        attention_mask=batch.attention_mask,
        mask=mask,
        sampling_logps=sampled_logps(batch, args),
        old_logps=old_logps,
        weights=weights,
        advantages=masked_whiten(advantages, mask, over_ranks=over_ranks),
        old_values=values,
        returns=returns,
        sampling_mask=kept_mask(batch, args),
    )
    sums = sums_over_ranks(
        {
            "rows": len(mask),
            "learned": learned.sum(),
            "tokens": completion_mask.sum(),
            "kl": masked_sum(old_logps - ref_logps, completion_mask),
            "entropy": -masked_sum(old_logps, completion_mask),
            "scores": raw_scores.nansum(),
            "clipped_scores": scores.nansum(),
            "eos": has_eos.sum(),
            "ref_nll": -masked_sum(ref_logps, completion_mask),
        }
    )
    per_row = {name: value / sums["rows"] for name, value in sums.items()}
    per_scored = {name: sums[name] / max(sums["learned"], 1) for name in ("scores", "clipped_scores")}
    return experience, {
        "objective/kl": per_row["kl"],
        "objective/entropy": per_row["entropy"],
        "objective/scores": per_scored["scores"],
        "objective/non_score_reward": -kl_coef * per_row["kl"],
        "objective/rlhf_reward": per_scored["clipped_scores"] - kl_coef * per_row["kl"],
        "completions/learned": per_row["learned"],
        "val/num_eos_tokens": sums["eos"],
        "completions/ref_nll": sums["ref_nll"] / sums["tokens"],  # per token; rises when the text degenerates
        "val/var_explained": explained_variance(values, returns, mask, over_ranks),
        **models.rewards.metrics(),
        **rewards.metrics(),
        **scores_by_source(rewards.prompts, raw_scores, args.data_path),
        **completion_metrics(batch),
        **weight_metrics,
    }


def update(
    models: Models, ptx: PretrainingTexts | None, experience: Experience, iteration: int, args: PPOArguments
) -> Metrics:
    """PPO's epochs over the experience of all ranks; returns metrics of all ranks: means over the tokens of every pass.

    A loss is a mean over all ranks' tokens of the optimizer step; it depends neither on padding nor on the number of
    ranks.
    """
    actor, critic = models.actor, models.critic
    steps = optimizer_steps(experience, args.ppo_epochs, iteration, args)
    numerics = Numerics(actor.policy, experience, steps[0], args.numerics_control_rows, args)
    policy_losses, value_losses, grad_norms, critic_grad_norms, steps_taken = [], [], [], [], 0
    for step in steps:
        num_micro_batches = len(step.micro_batch_rows)
        denominator = step.denominator(tokens=int(experience.mask[step.rows].sum()))
        ptx_batches = ptx.next(step) if ptx else [None] * num_micro_batches
        for index, (batch, ptx_batch) in enumerate(zip(step.micro_batches(experience), ptx_batches, strict=True)):
            # A backward of its own: ZeRO reduces a parameter's gradient once in each.
            ptx_loss = ptx_batch.loss(actor.policy, args) if ptx_batch else None
            if ptx_loss is not None:
                actor.policy.set_gradient_accumulation_boundary(False)
                actor.policy.backward(args.unsup_coef * ptx_loss.loss / num_micro_batches)
                ptx_loss = replace(ptx_loss, loss=ptx_loss.loss.detach())
            loss, logps = actor_loss(actor.policy, batch, denominator, args)
            loss = mixed_loss(loss, ptx=ptx_loss, unsup_coef=args.unsup_coef)
            grad_norms += backward_and_step(actor.policy, loss.loss, index, num_micro_batches)
            policy_losses.append(loss)
            numerics.add(logps)
            loss = critic_loss(critic, batch, denominator, args)
            critic_grad_norms += backward_and_step(critic, loss.loss, index, num_micro_batches)
            value_losses.append(loss)
        actor.update_average()
        steps_taken += 1
        if args.early_stop_kl:
            step_metrics = mean_metrics(policy_losses[-num_micro_batches:], over_ranks)
            if step_metrics["approxkl"] > args.early_stop_kl:
                break

    policy, value = mean_metrics(policy_losses, over_ranks), mean_metrics(value_losses, over_ranks)
    return {
        "loss/policy_avg": policy["loss"],
        "loss/value_avg": value["loss"],
        "policy/approxkl_avg": policy["approxkl"],
        "policy/clipfrac_avg": policy["clipfrac"],
        "policy/optimizer_steps": steps_taken,
        "grad_norm": fmean(grad_norms),
        "val/grad_norm": fmean(critic_grad_norms),
        "val/clipfrac_avg": value["clipfrac"],
        "val/ratio": policy["ratio"],
        "val/ratio_var": policy["squared_ratio"] - policy["ratio"] ** 2,
        **{name: policy[name] for name in ("entropy", "ptx/loss") if name in policy},
        **numerics.metrics(),
    }


def actor_loss(
    policy: hybrid.HybridEngine, batch: Experience, denominator: float, args: PPOArguments
) -> tuple[Loss, torch.Tensor]:
    """The clipped policy loss of a micro batch minus the entropy bonus, and the policy's logprobs, float32 [rows,
    completion].
    """
    rows = batch.sequences, batch.attention_mask, batch.mask.shape[1]
    forward = args.temperature, args.training_forward
    logps, entropies = token_logps(
        policy, *rows, *forward, entropy=bool(args.entropy_coef), sampling_mask=batch.sampling_mask
    )
    loss = policy_loss(logps, batch.old_logps, batch.advantages, batch.mask, args.cliprange, denominator, batch.weights)
    if entropies is not None:
        bonus = entropy_bonus(entropies, batch.mask, denominator)
        loss = mixed_loss(loss, entropy=bonus, entropy_coef=args.entropy_coef)
    return loss, logps


def critic_loss(critic: hybrid.HybridEngine, batch: Experience, denominator: float, args: PPOArguments) -> Loss:
    """The clipped value loss of a micro batch."""
    width = batch.mask.shape[1]
    values = token_values(critic, batch.sequences, batch.attention_mask, width, args.training_forward)
    assert batch.old_values is not None and batch.returns is not None, "PPO's experience has both"
    return value_loss(values, batch.old_values, batch.returns, batch.mask, args.cliprange_value, denominator)


def kl_controller(args: PPOArguments) -> FixedKLController:
    """The controller of the KL coefficient: adaptive if `adap_kl_ctrl`, else fixed."""
    if args.adap_kl_ctrl:
        return AdaptiveKLController(args.kl_ctl, args.kl_target, args.kl_horizon)
    return FixedKLController(args.kl_ctl)
