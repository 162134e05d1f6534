"""On-policy distillation: a student samples, and learns a teacher's distribution of each token that it sampled.

A smaller model from the SFT model of `make demo`, on CPUs; a model of 1B from one of 7B on 8 GPUs; a model from itself,
which reads a hint that the student does not see:
torchrun --nproc_per_node=2 -m rlhf_examples.distill --actor_model_name_or_path runs/small/model \\
    --teacher_model_name_or_path runs/demo/sft/model
torchrun --nproc_per_node=8 -m rlhf_examples.distill --actor_model_name_or_path my-1b --data_path prompts.jsonl \\
    --teacher_model_name_or_path my-7b --dtype bfloat16
torchrun --nproc_per_node=8 -m rlhf_examples.distill --actor_model_name_or_path my-1b --data_path hints.jsonl \\
    --self_teacher policy --teacher_prompt_column prompt_with_hint --dtype bfloat16
"""

from rlhf_examples.common.arguments import DistillArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.distill", DistillArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

from contextlib import nullcontext
from statistics import fmean

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_examples.common.actor import Actor, load_rewards
from rlhf_examples.common.distillation import distillation_loss
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.groups import next_groups
from rlhf_examples.common.losses import mean_metrics
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.ranks import over_ranks
from rlhf_examples.common.rollouts import Numerics, completion_metrics, optimizer_steps
from rlhf_examples.common.run import Run
from rlhf_examples.common.scorers import Scorer
from rlhf_examples.common.teachers import TaughtEvaluation, TaughtExperience, Teachers
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:stories"
BAR = {"loss": "loss", "held out": "eval_k1", "tokens/s": "time/tokens_per_s"}


def run(args: DistillArguments) -> Metrics:
    """Train and export the student; returns the last metrics, and those of the evaluations before and after."""
    tokenizer = tokenizer_of(args, "actor_model_name_or_path")
    args.require_inputs()
    Scorer.check(*args.reward, *args.eval_reward)
    Teachers.check(tokenizer, args)
    examples, held_out = load_examples("distill", EMBEDDED, "prompt", args.max_prompt_seq_len, tokenizer, args)
    prompts = RowStream(examples, args.seed)
    with Run(args, "distillation", BAR, args.num_iterations) as run:
        actor = Actor.load(args, args.num_iterations * args.num_mini_batches, needs_reference=False)
        teachers = Teachers.load(actor.policy, tokenizer, args)
        rewards = [load_rewards(args.reward, args.reward_weights, args)] if args.reward else []
        evaluation = TaughtEvaluation.load(actor.policy, tokenizer, held_out, rewards, args, teachers=teachers)
        run.start(actor, tokenizer, evaluation, engines={"policy": actor.policy}, parts={"prompts": prompts})
        for iteration in run.iterations():
            with run.log.engine_output():
                actor.policy.eval()  # prints DeepSpeed's line about the previous iteration
            run.add(iteration, distill_iteration(actor, teachers, tokenizer, prompts, iteration, args))
    actor.destroy()
    teachers.destroy()
    for reward in rewards:
        reward.destroy()
    return run.metrics


def distill_iteration(
    actor: Actor,
    teachers: Teachers,
    tokenizer: PreTrainedTokenizerBase,
    prompts: RowStream,
    iteration: int,
    args: DistillArguments,
) -> Metrics:
    """One iteration: roll out completions of the next prompts, ask the teachers, update the student; returns metrics.

    Expects the policy in eval mode and leaves it in train mode.
    """
    phases, policy = Phases(), actor.policy
    with policy.inference():
        next_prompts = prompts.next(args.per_device_generation_batch_size * dist.get_world_size())
        groups = next_groups(policy, tokenizer, next_prompts, 0, iteration, args)
        phases.end("rollout")
        with nullcontext() if args.compares_logits else teachers.awake():
            experience = teachers.experience(groups.batch, groups.prompts)
        phases.end("teacher")
    experience = experience.all_gather(args.num_generations)
    policy.train()
    with teachers.awake() if args.compares_logits else nullcontext():
        metrics = update(actor, teachers, experience, iteration, args)
    phases.end("train")
    flops = actor.flops(experience.attention_mask.sum(dim=1))
    return {
        **metrics,
        **completion_metrics(groups.batch),
        "episode": iteration * len(experience.mask),
        **actor.iteration_metrics(groups.batch, phases, flops),
    }


def update(
    actor: Actor, teachers: Teachers, experience: TaughtExperience, iteration: int, args: DistillArguments
) -> Metrics:
    """One pass over the experience of all ranks; returns metrics of all ranks."""
    steps = optimizer_steps(experience, 1, iteration, args)
    numerics = Numerics(actor.policy, experience, steps[0], args.numerics_control_rows, args)
    losses, grad_norms = [], []
    for step in steps:
        denominator = step.denominator(tokens=int(experience.mask[step.rows].sum()))
        for index, rows in enumerate(step.micro_batches(experience)):
            token_losses, logps = teachers.token_losses(rows)
            loss = distillation_loss(token_losses, logps, rows.teacher_logps, rows.mask, denominator)
            losses.append(loss)
            grad_norms += backward_and_step(actor.policy, loss.loss, index, len(step.micro_batch_rows))
            numerics.add(logps)
        actor.update_average()
    return {**mean_metrics(losses, over_ranks), "grad_norm": fmean(grad_norms), **numerics.metrics()}
