"""Tokens per second of rollouts under ZeRO-3 and of Hugging Face's generate on the same prompts in the same process.

The policy of `make demo`, on CPUs; a model of 7B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.throughput --model_name_or_path runs/demo/ppo/model
torchrun --nproc_per_node=8 -m rlhf_examples.throughput --model_name_or_path my-model --dtype bfloat16
"""

from rlhf_examples.common.arguments import ThroughputArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.throughput", ThroughputArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import hybrid
from rlhf_examples.common.engines import deepspeed_config, load_rollout_engine
from rlhf_examples.common.models import load_exported, merged, tokenizer_of
from rlhf_examples.common.ranks import barrier, device, over_ranks, rank_share
from rlhf_examples.common.rollouts import sampling
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import collate_prompts
from rlhf_examples.data.held_out import load_prompts


def run(args: ThroughputArguments) -> Metrics:
    """Time both in alternation, `rounds` times after a warm-up round; returns medians, minima and maxima.

    Our engine holds the weights partitioned and gathers them anew for every rollout, as after an optimizer step.
    Hugging Face's model is whole on every rank. Counted are the tokens of all ranks up to the end token.
    """
    load = partial(load_exported, attn_implementation=args.attn_implementation)
    tokenizer = tokenizer_of(args, "model_name_or_path")
    examples = load_prompts(tokenizer, args, "test")
    count = args.per_device_generation_batch_size * dist.get_world_size()
    rows = rank_share(list(islice(examples.ordered(args.seed), count)))
    ids, mask = (tensor.to(device()) for tensor in collate_prompts(rows, tokenizer.pad_token_id).values())
    whole = load(args.model_name_or_path, deepspeed_config(args.dtype, zero_stage=0))
    whole = merged(whole).to(device()).eval()
    engine = load_rollout_engine(load, args.model_name_or_path, args.dtype, zero_stage=3)

    def hybrid_tokens(seed: int) -> int:
        engine.mark_weights_changed()
        return int(engine.rollout(ids, mask, sampling(args, seed)).completion_mask.sum())

    def hf_tokens(seed: int) -> int:
        torch.manual_seed(seed)
        return hf_generated_tokens(whole, ids, mask, sampling(args, seed))

    speeds: dict[str, list[float]] = {"tokens_per_second": [], "hf_tokens_per_second": []}
    for round_number in range(args.rounds + 1):
        for name, generate in zip(speeds, (hybrid_tokens, hf_tokens), strict=True):
            speed = tokens_per_second(generate, args.seed + round_number)
            speeds[name] += [speed] * (round_number > 0)
    engine.destroy()
    medians = {name: statistics.median(rates) for name, rates in speeds.items()}
    return medians | {f"{name}_{pick.__name__}": pick(rates) for name, rates in speeds.items() for pick in (min, max)}


def report(args: ThroughputArguments, result: Metrics) -> None:
    """Print the result."""
    print(json.dumps(result, indent=1))


def tokens_per_second(generate: Callable[[int], int], seed: int) -> float:
    """Tokens of all ranks per second, until the last rank is done."""
    barrier()
    start = time.perf_counter()
    tokens = torch.tensor(float(generate(seed)), device=device())
    seconds = torch.tensor(time.perf_counter() - start, device=device())
    return (over_ranks(tokens) / over_ranks(seconds, dist.ReduceOp.MAX)).item()


@torch.no_grad()
def hf_generated_tokens(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, params: hybrid.SamplingParams
) -> int:
    """The tokens that `generate` makes, up to each row's end token.  ids, mask int64 [rows, tokens], left padded."""
    config = params.generation_config(model, 1)
    completions = model.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :]
    ends = torch.tensor(config.eos_token_id or [], device=ids.device)
    before_end = torch.isin(completions, ends).long().cumsum(dim=1).roll(1, dims=1)
    before_end[:, 0] = 0
    return int((before_end == 0).sum())
