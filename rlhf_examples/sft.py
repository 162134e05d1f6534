"""Supervised fine-tuning of the small model on the embedded corpus: what the demo's PPO begins from."""

from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from rlhf_examples.arguments import PPOArguments
from rlhf_examples.data import corpus, corpus_tokenizer, encode_stories
from rlhf_examples.models import export, small_model, trained

LAST_STEPS = 10  # whose mean loss is told


def supervised_model(args: PPOArguments) -> Path:
    """Train a small model on the embedded corpus; gives its directory. One that is there already is used again."""
    directory = Path(args.output_dir) / "sft"
    if args.resume and (directory / "config.json").is_file():
        return directory
    torch.manual_seed(args.seed)
    tokenizer = corpus_tokenizer()
    engine = trained(
        small_model(args, tokenizer), args, args.sft_learning_rate, {"micro": args.sft_batch_size, "accumulation": 1}
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stories = corpus(args.sft_steps * args.sft_batch_size * world_size, args.seed)[rank::world_size]
    losses = []
    for step in tqdm(range(args.sft_steps), desc="supervised", disable=rank > 0):
        batch = stories[step * args.sft_batch_size : (step + 1) * args.sft_batch_size]
        ids, mask = (tensor.to(engine.device) for tensor in encode_stories(tokenizer, batch))
        for group in engine.optimizer.param_groups:
            group["lr"] = args.sft_learning_rate * warmup_and_decay(step, args.sft_steps)
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        last = losses[-LAST_STEPS:]
        print(f"supervised loss: {losses[0]:.3f} at the start, {sum(last) / len(last):.3f} at the end (nats a token)")
    export(engine, tokenizer, directory)
    engine.destroy()
    return directory


def warmup_and_decay(step: int, steps: int) -> float:
    """The share of the learning rate at `step`: up over the first tenth, then down in a straight line."""
    warmup = max(steps // 10, 1)
    return min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
