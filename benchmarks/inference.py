"""Prefill and decode of `hybrid.init_inference` against Hugging Face's model, plain and compiled, on the same weights.

    OMP_NUM_THREADS=2 DS_ACCELERATOR=cpu python -m benchmarks.inference --shape 120M --rows 1

Contenders alternate. The table has medians, extremes and ratios to Hugging Face in the same dtype. Every contender's
first run, which compiles kernels, is not counted. Decoding is the time of a generation beyond its first token.
"""

import argparse
import copy
import gc
import itertools
import time
from collections.abc import Callable

import torch

import hybrid
from benchmarks import results, tables
from benchmarks.cases import DTYPES, SHAPES, make_model
from benchmarks.machine import hardware

TRIES = 5
CONTENDERS = ("fused", "native", "int8", "hf", "hf-compiled")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the timings as JSON if `--output` is given."""
    args = parse(arguments)
    about = results.begin("inference", args, arguments)
    model = make_model(args.shape, args.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    generators = {name: contender(name, model, args) for name in args.contenders}
    ids = torch.randint(3, model.config.vocab_size, (args.rows, args.prompt_len), device=model.device)
    result = {**about, "seconds": measure(generators, ids, args)}
    print(f"{args.shape} {args.dtype}, {args.rows} rows, prompt {args.prompt_len}, {args.new_tokens} new; {hardware()}")
    print("\n".join(tables.inference(result)))
    results.write(args.output, result)


def contender(name: str, model: torch.nn.Module, args: argparse.Namespace) -> Callable:
    """The `generate` of a contender, with a copy of the model."""
    model = copy.deepcopy(model)
    settings = {"dtype": DTYPES[args.dtype], "max_out_tokens": args.prompt_len + args.new_tokens}
    if name == "hf":
        return model.generate
    if name == "hf-compiled":
        model.forward = torch.compile(model.forward, dynamic=True)
        return model.generate
    settings |= {"replace_with_kernel_inject": name != "native"} | ({"dtype": torch.int8} if name == "int8" else {})
    return hybrid.init_inference(model, **settings).generate


FIRST_TOKENS = itertools.count(1)


@torch.no_grad()
def measure(generators: dict[str, Callable], ids: torch.Tensor, args: argparse.Namespace) -> dict[str, dict]:
    """For each contender and round: the seconds of prefill, and those of all tokens but the first."""
    seconds = {name: {"prefill": [], "decode": []} for name in generators}
    for round_number in range(args.rounds + 1):
        for name, generate in generators.items():
            prefill, decode = phases_of(generate, ids, args.new_tokens)
            if round_number:
                seconds[name]["prefill"].append(prefill)
                seconds[name]["decode"].append(decode)
    return seconds


def phases_of(generate: Callable, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill, and of all tokens but the first.

    Measured again where the first token alone took longer than all tokens: another process had the cores. Raises
    RuntimeError if it always did.
    """
    for _ in range(TRIES):
        first = seconds_of(generate, ids, 1)
        whole = seconds_of(generate, ids, new_tokens)
        if whole > first:
            return first, whole - first
    raise RuntimeError(
        f"1 token took longer than {new_tokens} tokens in each of {TRIES} tries; measure on an idle machine, or with "
        "more --new_tokens"
    )


def seconds_of(generate: Callable, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds of a greedy generation of `new_tokens` tokens. Prompts have new first tokens each time: nothing of them
    is in a cache."""
    gc.collect()
    ids = ids.clone()
    ids[:, 0] = next(FIRST_TOKENS) % 1000
    request = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    start = time.perf_counter()
    output = generate(ids, attention_mask=torch.ones_like(ids), **request)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert output.shape[1] == ids.shape[1] + new_tokens
    return seconds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = results.parser(__doc__, rows=1, prompt_len=128, new_tokens=64, rounds=5)
    parser.add_argument("--shape", choices=SHAPES, default="120M")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
