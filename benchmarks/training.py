"""The training forward and backward of a rollout's rows: padded, as TRL has it, packed and exact.

    torchrun --nproc_per_node=2 -m benchmarks.training
    torchrun --nproc_per_node=2 -m benchmarks.training --shape 120M --groups 8 --prompts 512 --completions 64

Each contender's logprobs of the same rows are differentiated, in turns, with gradient checkpointing. Seconds are of the
slower rank; `ratio` is of medians, to the padded forward; `tokens` is the ratio of computed tokens, which packing can
reach where time is proportional to tokens. Bytes are the peak of live tensors that one forward and backward create,
gradients not counted. `TRL` is TRL's own pass (1.16), whose fused head needs whole weights, and `pip install trl`.
"""

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import hybrid
from benchmarks import results, tables
from benchmarks.cases import SHAPES, make_model
from benchmarks.families import FUSED
from benchmarks.machine import hardware
from benchmarks.overhead import LiveBytes
from benchmarks.ranks import start_ranks

FIRST_TOKEN = 3


def main() -> None:
    """Measure and print the table."""
    args = parse()
    start_ranks()
    about = results.begin("training", args)
    engine = build(args)
    cases = [measured(engine, args, *shape) for shape in product(args.groups, args.prompts, args.completions)]
    if dist.get_rank() == 0:
        size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
        title = (
            f"{size / 1e6:.0f}M parameters, {args.dtype}, ZeRO-{args.stage}, {dist.get_world_size()} ranks on "
            f"{hardware()}; {args.sequences} sequences per rank; {args.rounds} rounds, contenders in turns"
        )
        result = {**about, "title": title, "shape": args.shape, "cases": cases}
        print(title, "", *tables.training(result), sep="\n")
        results.write(args.output, result)
    dist.barrier()
    dist.destroy_process_group()


def build(args: argparse.Namespace) -> hybrid.HybridEngine:
    """An engine in train mode over random weights, with gradient checkpointing."""
    model = make_model(args.shape, args.dtype, get_accelerator().current_device_name())
    if args.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=args.lora, target_modules="all-linear"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    config = {
        "train_micro_batch_size_per_gpu": args.sequences,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": not torch.cuda.is_available()}},
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 2_000_000,  # its buffer would be most of a small model's peak
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "hybrid_engine": {"enabled": True, "max_out_tokens": max(args.prompts) + max(args.completions)},
        "rollout": {"max_num_seqs": args.sequences},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=trained, config=config)[0]


def measured(
    engine: hybrid.HybridEngine, args: argparse.Namespace, group: int, prompt_len: int, completion_len: int
) -> dict[str, Any]:
    """The contenders' figures of one shape."""
    ids, mask, completion_mask = random_rows(args, group, prompt_len, completion_len)
    sampling = hybrid.SamplingParams(max_new_tokens=completion_len, min_new_tokens=completion_len, seed=1)
    batch = engine.rollout(ids[::group, :prompt_len], mask[::group, :prompt_len], sampling, num_generations=group)
    ids, old = torch.where(mask.bool(), batch.sequences, ids), batch.old_per_token_logps
    engine.train()
    contenders = {
        name: lambda name=name: engine.logps(ids, mask, completion_mask, forward=name).per_token_logps
        for name in ("model", "packed", "exact")
    }
    if args.stage < 3 and (trl := trl_pass(engine, ids, mask, completion_len)):
        contenders = {"model": contenders.pop("model"), "TRL": trl, **contenders}
    contenders = {name: call for name, call in contenders.items() if not args.contenders or name in args.contenders}
    # Each prompt once, and every token that another one follows.
    packed_tokens = len(ids) // group * prompt_len + int((completion_mask.sum(dim=1) - 1).sum())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    kl = {}
    for turn in range(args.rounds + 1):  # the first one warms up
        for name, call in contenders.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            logps = call()
            engine.backward((logps * completion_mask).sum() / completion_mask.sum())
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            engine.optimizer.zero_grad()
            if turn:
                times[name].append(tuple(spent.tolist()))
            kl[name] = float(((logps.detach() - old).abs() * completion_mask).sum() / completion_mask.sum())
    peaks = {
        name: peak_bytes(engine, call, completion_mask) if args.memory else None for name, call in contenders.items()
    }
    return {
        "group": group,
        "prompt_len": prompt_len,
        "completion_len": completion_len,
        "contenders": {
            {"model": "padded"}.get(name, name): {
                "seconds": [wall for wall, _ in times[name]],
                "cpu_seconds": [cpu for _, cpu in times[name]],
                "token_ratio": 1.0 if name in ("model", "TRL") else mask.numel() / packed_tokens,
                "peak_bytes": peaks[name],
                "kl": kl[name],
            }
            for name in contenders
        },
    }


def peak_bytes(engine: hybrid.HybridEngine, call: Callable, completion_mask: torch.Tensor) -> int:
    """Peak bytes of live tensors in one forward and backward."""
    with LiveBytes(engine.module) as live:
        engine.backward((call() * completion_mask).sum() / completion_mask.sum())
    engine.optimizer.zero_grad()
    return live.peak


def random_rows(
    args: argparse.Namespace, group: int, prompt_len: int, completion_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and mask of a rank's rows, int64 [rows, prompt_len + completion_len], and the completions' mask."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    prompts = torch.randint(FIRST_TOKEN, 500, (args.sequences // group, prompt_len), generator=generator)
    completions = torch.randint(FIRST_TOKEN, 500, (args.sequences, completion_len), generator=generator)
    lengths = torch.full((args.sequences,), completion_len)
    if args.natural:  # a mean of half the limit
        lengths = torch.randint(1, completion_len + 1, (args.sequences,), generator=generator)
    completion_mask = (torch.arange(completion_len) < lengths[:, None]).long()
    ids = torch.cat([prompts.repeat_interleave(group, dim=0), completions], dim=1)
    mask = torch.cat([torch.ones(args.sequences, prompt_len, dtype=torch.int64), completion_mask], dim=1)
    device = get_accelerator().current_device_name()
    return ids.to(device), mask.to(device), completion_mask.to(device)


def trl_pass(
    engine: hybrid.HybridEngine, ids: torch.Tensor, mask: torch.Tensor, completion_len: int
) -> Callable | None:
    """TRL's own logprobs of the completions, by its fused head (trl 1.16); None without TRL."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        return None
    model = engine.module.get_base_model() if hasattr(engine.module, "get_base_model") else engine.module
    if "forward" not in vars(model):
        add_fused_lm_head(model)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-completion_len] = -100

    def call() -> torch.Tensor:
        output = engine(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -completion_len:]

    return call


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = results.parser(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, *FUSED], default="10M")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO; 3: without TRL")
    parser.add_argument("--lora", type=int, default=0, help="rank of a LoRA; 0: all weights learn")
    parser.add_argument("--sequences", type=int, default=16, help="rows of a rank")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16], help="completions of a prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="tokens")
    parser.add_argument("--completions", type=int, nargs="+", default=[64], help="tokens")
    parser.add_argument("--natural", action="store_true", help="lengths from 1 to the limit; else all have the limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="also measure the peak of live tensors")
    parser.add_argument("--contenders", nargs="+", help="some of model, TRL, packed, exact")
    return parser.parse_args()


if __name__ == "__main__":
    main()
