"""GRPO on prompts with images: a vision-language model, groups of its answers, rewards.

A record has a text `prompt` and an `image`, a path from the folder of the records' file, or several `images`; its other
columns are for the reward functions: {"prompt": "How many?", "image": "cups.png", "answer": "3"}

On CPUs; a model of 7B on 8 GPUs, with a LoRA and the KL to the model without it:
torchrun --nproc_per_node=2 -m rlhf_examples.vision_grpo --actor_model_name_or_path my-small-model \\
    --data_path counts.jsonl --reward rlhf_examples.rewards:number_match --num_iterations 3
torchrun --nproc_per_node=8 -m rlhf_examples.vision_grpo --actor_model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct \\
    --data_path counts.jsonl --reward rlhf_examples.rewards:number_match --dtype bfloat16 \\
    --actor_lora_dim 64 --beta 0.01

Each rank learns from the completions that it sampled, so images stay where they were read.
"""

from rlhf_examples.common.arguments import VisionGRPOArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.vision_grpo", VisionGRPOArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import hybrid
from rlhf_examples.common.actor import Actor, load_rewards, warn_of_truncation
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.grpo_settings import policy_loss
from rlhf_examples.common.losses import mean_metrics
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.models import base_model_of, is_reward_model, require_model
from rlhf_examples.common.overlapped_rewards import OverlappedRewards
from rlhf_examples.common.policy_losses import loss_denominator
from rlhf_examples.common.ranks import is_main_process, over_ranks, rank_share, seed_everything, sums_over_ranks
from rlhf_examples.common.rollouts import Experience, rank_row_ids, roll_out, sampling, sampling_seed
from rlhf_examples.common.run_log import engine_output_in
from rlhf_examples.common.scorers import Rewards, Scorer
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.image_prompts import load_prompts, prompt_of
from rlhf_examples.grpo import make_experience


def run(args: VisionGRPOArguments) -> list[Metrics]:
    """Train and export a policy; rank 0 prints each iteration's metrics as JSON. Returns them."""
    seed_everything(args.seed)
    args.require_inputs()
    Scorer.check(*args.reward)
    for reward in filter(is_reward_model, args.reward):
        raise ValueError(f"reward: {reward!r} given, a model, which reads no images; give functions or servers")
    processor = load_processor(args)
    prompts, history = RowStream(load_prompts(processor, args), args.seed), []
    steps = args.num_iterations * args.num_grpo_iterations * args.num_mini_batches
    warn_of_truncation(args)
    actor = Actor.load(args, steps, needs_reference=args.beta > 0, kind=AutoModelForImageTextToText)
    rewards = load_rewards(args.reward, args.reward_weights, args)
    for iteration in range(args.num_iterations):
        history.append(train_iteration(actor, rewards, processor, prompts, iteration, args))
        if is_main_process():
            print(json.dumps({"iteration": iteration, **history[-1]}), flush=True)
    actor.export(processor, Path(args.output_dir))
    actor.destroy()
    return history


def load_processor(args: VisionGRPOArguments) -> Any:
    """The policy's processor, with a chat template and a padding token. Raises ValueError for a model that reads no
    images, and for one without a processor.
    """
    setting, name = "actor_model_name_or_path", args.actor_model_name_or_path
    require_model(setting, name, args.attn_implementation)
    config = AutoConfig.from_pretrained(base_model_of(name))
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        kind = f"{setting}: {name!r} given, of the type {config.model_type}, which reads no images"
        raise ValueError(f"{kind}; give a vision-language model, or run rlhf_examples.grpo")
    if args.tokenizer_name_or_path:
        setting, name = "tokenizer_name_or_path", args.tokenizer_name_or_path
    try:
        processor = AutoProcessor.from_pretrained(name)
        tokenizer, _ = processor.tokenizer, processor.image_processor
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        missing = f"{setting}: {name!r} has no processor of text and images"
        raise ValueError(f"{missing}; save the model's there, by processor.save_pretrained ({error})") from error
    if args.chat_template:
        processor.chat_template = tokenizer.chat_template = Path(args.chat_template).read_text()
    if processor.chat_template is None:
        raise ValueError("chat_template: none given, and the processor has none; give a file with a Jinja template")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def train_iteration(
    actor: Actor, rewards: Rewards, processor: Any, prompts: RowStream, iteration: int, args: VisionGRPOArguments
) -> Metrics:
    """Groups of completions of the next prompts, their rewards, and the update; returns metrics of all ranks, and this
    rank's seconds.
    """
    phases, policy, tokenizer = Phases(), actor.policy, processor.tokenizer
    records = rank_share(prompts.next(args.per_device_generation_batch_size * dist.get_world_size()))
    rows = [prompt_of(raw, processor, args) for raw in records]
    each = [row for row in rows for _ in range(args.num_generations)]
    overlapped = OverlappedRewards(rewards, tokenizer, each, args.num_generations, args.overlap_rewards)
    phases.end("images")
    with engine_output_in(Path(args.output_dir)):
        policy.eval()
    with policy.inference():
        params = sampling(args, sampling_seed(args.seed, iteration))
        row_ids = rank_row_ids(len(rows))
        batch = roll_out(policy, tokenizer, rows, row_ids, params, args.num_generations, overlapped.on_rows)
        phases.end("rollout")
        old_logps, ref_logps = actor.window_logps(batch, phases)
    scores = overlapped.scores_by_name(batch)[rewards.name]
    phases.end("rewards")
    assert old_logps is not None, "the window has them without importance_sampling_correction"
    experience, metrics = make_experience(batch, old_logps, ref_logps, scores, ~scores.isnan(), args)
    policy.train()
    metrics |= update(actor, batch, experience, iteration, args)
    phases.end("train")
    metrics |= {"lr": policy.get_lr()[0], **actor.tokens.add(batch.attention_mask.sum())}
    return {**metrics, **rewards.metrics(), **phases.metrics(), "time/iteration_s": phases.last - phases.start}


def update(
    actor: Actor, batch: hybrid.RolloutBatch, experience: Experience, iteration: int, args: VisionGRPOArguments
) -> Metrics:
    """Learn from this rank's completions; returns metrics of all ranks. Every rank has equally many completions, and so
    equally many forwards and backwards, which ZeRO needs.
    """
    losses, grad_norms, ranks, generator = [], [], dist.get_world_size(), torch.Generator()
    generator.manual_seed(sampling_seed(args.seed, iteration) * 1009 + dist.get_rank())
    for rows in torch.arange(len(batch.prompt_ids)).tensor_split(args.num_mini_batches) * args.num_grpo_iterations:
        micro_batches = rows.split(args.per_device_training_batch_size)
        denominator = loss_denominator(
            args.loss_type,
            sequences=len(rows) * ranks,
            tokens=int(sums_over_ranks({"tokens": experience.mask[rows].sum()})["tokens"]),
            max_completion_length=args.max_answer_seq_len,
            micro_batches=len(micro_batches) * ranks,
        )
        for index, part in enumerate(micro_batches):
            selected = batch.select_rows(part.tolist())  # with their images
            logps, entropies = actor.policy.logps(selected, temperature=args.temperature, entropy=True, forward="model")
            loss = policy_loss(logps, entropies, experience.select(part), denominator, args, generator)
            losses.append(loss)
            grad_norms += backward_and_step(actor.policy, loss.loss, index, len(micro_batches))
        actor.update_average()
    return {**mean_metrics(losses, over_ranks), "grad_norm": fmean(grad_norms)}
