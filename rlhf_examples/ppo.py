"""PPO on a HybridEngine: rollouts, rewards and updates in one process for each rank.

torchrun --nproc_per_node=2 -m rlhf_examples.ppo configs/demo.yaml          a small model, made on the spot
torchrun --nproc_per_node=8 -m rlhf_examples.ppo configs/demo.yaml --model my-model --dtype bfloat16 --lora_r 16
"""

import itertools
import json
import logging
import random
import time
import warnings
from collections import Counter
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples import checkpoint
from rlhf_examples.arguments import PPOArguments, parse_arguments
from rlhf_examples.data import encode_prompts, load_prompts, prompt_order
from rlhf_examples.losses import policy_loss, value_loss
from rlhf_examples.models import Models, export, load_tokenizer
from rlhf_examples.rewards import load_reward
from rlhf_examples.rollouts import (
    Experience,
    collect,
    decode_completions,
    over_ranks,
    sampling,
    token_logps,
    token_logps_alone,
    token_values,
)
from rlhf_examples.run_log import RunLog
from rlhf_examples.sft import supervised_model

NUM_SAMPLES = 4  # prompts whose completions are shown before and after


def main() -> None:
    """A run from its arguments to the exported policy."""
    args = parse_arguments()
    start_ranks(args.seed)
    embedded = not args.model
    if embedded:
        args.model = str(supervised_model(args))
    tokenizer, reward = load_tokenizer(args.tokenizer or args.model), load_reward(args.reward)
    prompts = load_prompts(args.prompts, embedded)
    models = Models.load(args)

    output_dir = Path(args.output_dir)
    done = checkpoint.load_latest(models, output_dir / "checkpoints") if args.resume else 0
    shown = prompts[:: len(prompts) // NUM_SAMPLES][:NUM_SAMPLES]
    before = first_samples(models, tokenizer, shown, args, output_dir / "before.json", resumed=done > 0)
    log = RunLog(output_dir, done, args.num_iterations, args.print_every)
    order = prompt_order(len(prompts), args.seed)
    batch = args.per_device_rollout_batch_size * dist.get_world_size()
    order = itertools.islice(order, done * batch, None)

    for iteration in range(done + 1, args.num_iterations + 1):
        texts = [prompts[number] for number in itertools.islice(order, batch)][dist.get_rank() :: dist.get_world_size()]
        with log.room_for_output():
            models.policy.eval()  # prints DeepSpeed's line about the iteration before
        log.add(iteration, ppo_iteration(models, tokenizer, reward, texts, iteration, args))
        if args.save_every and iteration % args.save_every == 0:
            checkpoint.save(models, output_dir / "checkpoints", iteration, args.keep_last)

    log.show_samples(shown, before, samples(models, tokenizer, shown, args))
    export(models.policy, tokenizer, output_dir / "policy")
    log.close()
    dist.barrier()
    dist.destroy_process_group()


def ppo_iteration(
    models: Models, tokenizer: PreTrainedTokenizerBase, reward, texts: list[str], iteration: int, args: PPOArguments
) -> dict[str, float]:
    """Roll out `texts`, judge, learn; gives the metrics. The policy comes in eval mode and leaves in train mode."""
    start = time.perf_counter()
    experience, metrics = collect(models, tokenizer, reward, texts, iteration, args)
    models.policy.train()
    metrics |= update(models, experience, iteration, args)
    stats = models.policy.stats()
    phases = ("gather_s", "merge_s", "prefill_s", "decode_s", "wait_s", "release_s", "train_s", "tokens_per_s")
    return {
        **metrics,
        "episode": iteration * len(texts) * dist.get_world_size(),
        "lr": args.learning_rate,
        **{f"time/{name}": stats[name] for name in phases},
        "time/iteration_s": time.perf_counter() - start,
        "memory/peak_bytes": stats["peak_bytes"],
    }


def update(models: Models, experience: Experience, iteration: int, args: PPOArguments) -> dict[str, float]:
    """PPO's epochs over the experience; gives the metrics of all ranks, means over tokens of every pass.

    A loss is a mean over the tokens of all ranks. DeepSpeed averages gradients over ranks and accumulated backwards,
    so a micro batch's sum is divided by tokens / (ranks · accumulation): padding and the split over ranks change
    nothing.
    """
    width, world_size = experience.mask.shape[1], dist.get_world_size()
    batches = mini_batches(len(experience.mask), iteration, args)
    checked = experience.take(batches[0][: args.numerics_control_rows])
    alone = token_logps_alone(models.policy, checked.sequences, checked.attention_mask, width, args.temperature)
    sums, first_logps = Counter(), []
    for number, mini_rows in enumerate(batches):
        tokens = over_ranks(experience.mask[mini_rows].sum()).item()
        denominator = tokens / (world_size * args.gradient_accumulation_steps)
        sums["tokens"] += tokens
        for micro_rows in mini_rows.split(args.per_device_train_batch_size):
            e = experience.take(micro_rows)
            logps = token_logps(models.policy, e.sequences, e.attention_mask, width, args.temperature)
            policy = policy_loss(logps, e.old_logps, e.advantages, e.mask, args.cliprange, denominator, e.weights)
            models.policy.backward(policy.loss)
            models.policy.step()
            values = token_values(models.critic, e.sequences, e.attention_mask, width)
            value = value_loss(values, e.old_values, e.returns, e.mask, args.cliprange_value, denominator)
            models.critic.backward(value.loss)
            models.critic.step()
            sums.update({f"policy/{name}": figure.item() for name, figure in policy.sums.items()})
            sums.update({f"value/{name}": figure.item() for name, figure in value.sums.items()})
            if number == 0:
                first_logps.append(logps.detach())

    names = sorted(name for name in sums if name != "tokens")
    device = experience.mask.device  # NCCL reduces what is on the device alone
    totals = over_ranks(torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device))
    mean = dict(zip(names, (totals / sums["tokens"]).tolist(), strict=True))
    return {
        "loss/policy_avg": mean["policy/loss"],
        "loss/value_avg": mean["value/loss"],
        "policy/approxkl_avg": mean["policy/approxkl"],
        "policy/clipfrac_avg": mean["policy/clipfrac"],
        "val/clipfrac_avg": mean["value/clipfrac"],
        "val/ratio": mean["policy/ratio"],
        "val/ratio_var": mean["policy/squared_ratio"] - mean["policy/ratio"] ** 2,
        **numerics(experience.take(batches[0]), torch.cat(first_logps), alone),
    }


def mini_batches(rows: int, iteration: int, args: PPOArguments) -> list[torch.Tensor]:
    """The row numbers of every optimizer step, pass after pass: a pure function of seed and iteration."""
    batches = []
    for epoch in range(args.num_ppo_epochs):
        generator = torch.Generator().manual_seed((args.seed * 1009 + iteration) * 1009 + epoch)
        batches += torch.randperm(rows, generator=generator).split(args.mini_batch_rows)
    return batches


def numerics(first: Experience, logps: torch.Tensor, alone: torch.Tensor) -> dict[str, float]:
    """How far the sampler is from the trainer, and, as a control, the trainer from itself at another batch shape.

    first: the first mini batch. logps [rows, completion]: of its training forwards, by the weights that sampled it.
    alone [control rows, completion]: the same of its first rows, each in a forward alone.
    """
    rows = len(alone)
    error = ((logps - first.old_logps).exp() - 1).abs() * first.mask
    metrics = {"val/first_ratio_error": over_ranks(error.max(), dist.ReduceOp.MAX).item()}
    metrics |= hybrid.sampling_metrics(first.sampling_logps, logps, first.mask, over_ranks)
    if rows:
        metrics |= hybrid.sampling_metrics(alone, logps[:rows], first.mask[:rows], over_ranks, name="control")
    return metrics


def samples(models: Models, tokenizer: PreTrainedTokenizerBase, prompts: list[str], args: PPOArguments) -> list[str]:
    """What the policy makes of `prompts` now, with the same noise each time. Every rank takes part."""
    ids, mask = (tensor.to(models.policy.device) for tensor in encode_prompts(tokenizer, prompts))
    batch = models.policy.rollout(ids, mask, sampling(args, args.seed), row_ids=torch.arange(len(prompts)))
    return decode_completions(tokenizer, batch)


def first_samples(
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    args: PPOArguments,
    path: Path,
    resumed: bool,
) -> list[str]:
    """The samples from before the first update; a resumed run reads those that its beginning wrote."""
    if resumed and path.is_file():
        return json.loads(path.read_text())
    texts = samples(models, tokenizer, prompts, args)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(path, json.dumps(texts))
    return texts


def start_ranks(seed: int) -> None:
    """Begin torch.distributed as the launcher says, quietly, with every generator seeded."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's calls of renamed torch collectives
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


if __name__ == "__main__":
    main()
