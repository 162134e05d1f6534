"""Seconds for one generate under ZeRO-3: this engine, everything gathered for Hugging Face's, plain ZeRO-3.

    make bench
    torchrun --nproc_per_node=2 -m benchmarks.generate --hidden_size 768 --num_hidden_layers 12

Contenders run in turns in one process group, on the same weights and prompts. `engine, first` follows a weight update
and so gathers; `engine, again` finds its snapshot fresh.
"""

import argparse
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

import hybrid


def main() -> None:
    """Measure, print a table."""
    args = parse()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=max(args.hidden_size // 192, 1),
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine = hybrid.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": args.dtype == "bfloat16"},
            "hybrid_engine": {"enabled": True, "max_out_tokens": 4096},
        },
    )[0]
    contenders = {
        "engine, first": changed_weights(engine, engine.generate),
        "engine, again": engine.generate,
        "GatheredParameters(all) + Hugging Face": gathered_hugging_face(engine),
        "plain ZeRO-3 Hugging Face": plain_hugging_face(engine),
    }
    ids = torch.randint(1, args.vocab_size, (args.sequences, args.prompt_length)).to(engine.device)
    request = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
    }
    seconds = measure(contenders, ids, request, args.rounds)
    if dist.get_rank() == 0:
        print(
            f"{size / 1e6:.0f}M parameters, {args.dtype}, {dist.get_world_size()} ranks on {machine()}; "
            f"{args.sequences} sequences a rank, {args.prompt_length} + {args.new_tokens} tokens; "
            f"{args.rounds} rounds in turns"
        )
        print_table(seconds)
    dist.barrier()
    dist.destroy_process_group()


def measure(contenders: dict[str, Callable], ids: torch.Tensor, request: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, all ranks' together; a first round is not counted.

    Raises AssertionError where two contenders do not give the same tokens.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        outputs = []
        for name, generate in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            outputs.append(generate(ids, **request))
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(output, outputs[0]) for output in outputs), "contenders disagree about the tokens"
    return seconds


def changed_weights(engine: hybrid.HybridEngine, generate: Callable) -> Callable:
    """`generate` after what a step would do to the snapshot."""

    def run(ids, **request):
        engine.mark_weights_changed()
        return generate(ids, **request)

    return run


def gathered_hugging_face(engine: hybrid.HybridEngine) -> Callable:
    """What TRL does: gather every parameter, take ZeRO's hooks off, let Hugging Face generate."""

    def run(ids, **request):
        offload = engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), eval_mode(engine.module):
            offload._remove_module_hooks()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                return engine.module.generate(ids, synced_gpus=False, **request)
            finally:
                offload.setup_zero_stage3_hooks()

    return run


def plain_hugging_face(engine: hybrid.HybridEngine) -> Callable:
    """Hugging Face's generate on the partitioned model: every parameter is gathered for every token."""

    def run(ids, **request):
        with eval_mode(engine.module):
            return engine.module.generate(ids, synced_gpus=True, **request)

    return run


@contextmanager
def eval_mode(module: torch.nn.Module):
    """Eval mode for the block."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def print_table(seconds: dict[str, list[float]]) -> None:
    """Medians, extremes, and the ratio of medians to the first contender's."""
    base = statistics.median(next(iter(seconds.values())))
    print("| contender | median s | min–max s | × engine, first |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {min(values):.2f}–{max(values):.2f} | {median / base:.2f} |")


def machine() -> str:
    """What the figures were measured on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread a rank"


def parse() -> argparse.Namespace:
    """The shape of the model and of the request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_hidden_layers", type=int, default=6)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt_length", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
