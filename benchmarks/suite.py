"""Runs the whole suite once on this machine, one benchmark after the other, into benchmarks/results/.

    make bench-all                                   # then `make bench-page`
    python -m benchmarks.suite --list                # what would run, and the minutes that it takes on 2 CPU cores
    python -m benchmarks.suite --only rollout trl_step --retry
    python -m benchmarks.suite --minutes 60          # starts what is expected to end by then; call again for the rest

A run writes benchmarks/results/<run>-<machine>.json. One whose file has the commit of hybrid/ that is checked out is
skipped, unless `--retry` is given or hybrid/ has changes that are in no commit. A run that fails or takes five times
its minutes (at least fifteen) costs its own file: the one before stays, the next run starts, and the failed ones are
named at the end, with their logs in runs/bench/. What needs something that is not here (TRL, a model) is left out and
named; without vLLM's environment rollouts are measured without vLLM. The exit code is 1 if a run failed.
"""

import argparse
import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.processes import has_package, run_limited
from benchmarks.results import RESULTS, ROOT, commit, parser

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
STORIES = Path("../shared/models/stories260K")
LOGS = ROOT / "runs" / "bench"
PATIENCE = 5  # times the expected minutes, after which a run is ended
MIN_MINUTES = 15.0  # before that: a first run also compiles the kernels
GRACE_S = 40.0  # torchrun gives its ranks 30 s to end, then kills them


@dataclass(frozen=True)
class Run:
    """A row of the suite.

    name: of its file, before the machine's.  minutes: on 2 cores with AVX-512.  ranks: 0 for a program that is not
    started by torchrun.  threads: of each rank.
    needs: a package, or a path from the repository's root, without which it is left out.
    """

    name: str
    benchmark: str
    flags: str
    minutes: float
    ranks: int = 0
    threads: int = 1
    needs: str = ""

    def command(self, output: Path) -> list[str]:
        """The command line that measures it."""
        launch = ["-m", "torch.distributed.run", f"--nproc_per_node={self.ranks}"] * bool(self.ranks)
        flags = shlex.split(self.flags.format(stories=STORIES, vllm=vllm_contender()))
        return [sys.executable, *launch, "-m", f"benchmarks.{self.benchmark}", *flags, "--output", str(output)]

    @property
    def missing(self) -> str:
        """The requirement that this machine lacks, or ""."""
        present = (ROOT / self.needs).exists() if "/" in self.needs else not self.needs or has_package(self.needs)
        return "" if present else self.needs


SHORT_CASES = (
    '"120M bf16 b64" "120M bf16 b16" "120M bf16 b1" "120M bf16 8x8 prompt 512" "120M bf16 b64 natural 256" '
    '"120M f32 b64" "120M f32 b16" "10M bf16 b64" "10M bf16 b16"'
)
LONG_CASES = '"120M bf16 b1 prompt 8192" "120M bf16 b16 prompt 2048" "0.5B bf16 b16"'
WAYS_TO_HOLD_WEIGHTS = (
    '--sequences 32 --contenders pinned streaming "pinned, LoRA merged" "pinned, LoRA unmerged" '
    '"GatheredParameters(all) + Hugging Face" "ZeRO-3 that keeps all + Hugging Face" "plain ZeRO-3 Hugging Face"'
)
TENSOR_PARALLEL = (
    '--contenders pinned "tensor parallel" streaming "pinned, native" "tensor parallel, native" --sequences 16 '
    "--new_tokens 32 --rounds 3"
)
WAYS_TO_TRAIN = '--ways "all weights learn" "LoRA, merged" "LoRA, unmerged" "native, LoRA"'
ROLLOUTS = "--contenders hybrid hybrid-new-weights hf {vllm} --rounds 3"
TRL_CONTENDERS = '--contenders "TRL\'s default: gather all, Hugging Face" "hybrid.install()" rollout_func'
TRL_120M = "--steps 2 --rounds 3"
SERVERS = "--rounds 3 --contenders hybrid {vllm}"
INFERENCE = "--contenders fused int8 hf hf-compiled"
LARGE_TRAINING = "--sequences 8 --prompts 128 --rounds 1 --memory --contenders model packed exact"

# What `docs/benchmarks.md` shows, most informative first.
RUNS = (
    Run("rollout", "rollout", f"--cases {SHORT_CASES} {ROLLOUTS}", 25, 0, 2),
    Run("trl_step", "trl_step", f"--shape 10M --rounds 5 {TRL_CONTENDERS}", 5, 2, needs="trl"),
    Run("trl_step-120M", "trl_step", f"--shape 120M --sequences 8 {TRL_120M} {TRL_CONTENDERS}", 5, 2, needs="trl"),
    Run("modes-10M", "modes", f"--shape 10M --new_tokens 32 --rounds 5 {WAYS_TO_HOLD_WEIGHTS}", 3, 2),
    Run("modes-120M", "modes", f"--shape 120M --dtype bf16 --new_tokens 16 --rounds 2 {WAYS_TO_HOLD_WEIGHTS}", 8, 2),
    Run("rollout-long", "rollout", f"--cases {LONG_CASES} --contenders hybrid {{vllm}} --rounds 2", 10, 0, 2),
    Run("rollout-families", "rollout", f"--cases families {ROLLOUTS}", 10, 0, 2),
    Run("rollout-native", "rollout", "--cases native --contenders hybrid hf --rounds 3", 15, 0, 2),
    *(
        Run(f"tp-{shape}-{dtype}", "modes", f"--shape {shape} --dtype {dtype} {TENSOR_PARALLEL}", minutes, 2)
        for shape, minutes in (("10M", 1), ("120M", 3))
        for dtype in ("f32", "bf16")
    ),
    Run("tp-qwen3_5-f32", "modes", f"--shape qwen3_5 --dtype f32 {TENSOR_PARALLEL}", 2, 2),
    Run("training-qwen3_5", "training", "--shape qwen3_5 --rounds 3 --memory --groups 8 --prompts 512", 4, 2),
    Run("training-128", "training", "--rounds 3 --memory --groups 1 4 --prompts 128", 2, 2),
    Run("training-512", "training", "--rounds 3 --memory --groups 8 --prompts 512", 2, 2),
    Run("training-120M", "training", f"--shape 120M --groups 8 {LARGE_TRAINING}", 2, 2),
    Run("training-0.5B", "training", f"--shape 0.5B --lora 16 --groups 4 {LARGE_TRAINING}", 6, 2),
    *(
        Run(f"serving-{shape}", "serving", f"--shape {shape} {load} {SERVERS}", minutes, 0, 2)
        for shape, load, minutes in (
            ("120M", "--agents 40 --rates 1 8", 10),
            ("10M", "--agents 160 --rates 4 64", 8),
        )
    ),
    Run("overhead", "overhead", f"--turns 7 {WAYS_TO_TRAIN}", 5, 2),
    *(Run(f"real_size-{kind}", "real_size", f"--containers {kind}", 5, 2) for kind in ("fused", "native")),
    *(
        Run(f"inference-b{rows}", "inference", f"--rows {rows} {INFERENCE} --rounds {rounds}", minutes, 0, 2)
        for rows, rounds, minutes in ((1, 5, 3), (16, 3, 4), (64, 3, 7))
    ),
    Run("rollout_features-turns", "rollout_features", "turns", 3, 1),
    Run("rollout_features-turns-recurrent", "rollout_features", "turns --shape qwen3_5", 5, 1),
    Run("rollout_features-system", "rollout_features", "system --shape qwen3_5", 5, 1),
    Run("rollout_features-partial", "rollout_features", "partial", 2, 1),
    Run("speculation", "speculation", "--shape 7M", 4, 1),
    Run("speculation-recurrent", "speculation", "--shape qwen3_5", 4, 1),
    Run("demo_seeds", "demo_seeds", "", 24),
    Run("trl_sums", "trl_sums", "", 12, needs="trl"),
    Run("stories", "stories", "--model {stories}", 12, needs=f"{STORIES}/config.json"),
)


def vllm_contender() -> str:
    """vLLM, if its environment is here."""
    return "vllm" if VLLM.is_file() else ""


def main(arguments: list[str] | None = None) -> None:
    """Measure what has no result of this commit; raises SystemExit(1) if a run failed."""
    args = parse(arguments)
    runs = [run for run in RUNS if not args.only or run.name in args.only]
    machine_name, head = machine()["name"], commit()
    deadline = time.monotonic() + 60 * args.minutes
    failed, left_out = [], []
    for run in runs:
        output = args.directory / f"{run.name}-{machine_name}.json"
        if run.missing:
            left_out.append(f"{run.name} (needs {run.missing})")
        elif not args.retry and measured(output, head):
            print(f"{run.name}: already measured at {head}", flush=True)
        elif args.list:
            print(f"{run.name}: {run.minutes:g} minutes: {shlex.join(run.command(output)[1:])}")
        elif time.monotonic() + 60 * run.minutes > deadline:
            left_out.append(f"{run.name} (takes {run.minutes:g} minutes)")
        elif reason := measure(run, output):
            failed.append(f"{run.name} ({reason}; {LOGS / run.name}.log)")
    if not VLLM.is_file():
        print("without vLLM: `make .venv-vllm/.installed` installs it; then `--only rollout rollout-long --retry`")
    if left_out:
        print(f"not measured: {'; '.join(left_out)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def measured(path: Path, head: str) -> bool:
    """Whether the file has figures of the commit that is checked out, `head`, "" if it is not known."""
    known = head and not head.endswith("+")  # uncommitted changes may be others than before
    return bool(known) and path.is_file() and json.loads(path.read_text()).get("commit") == head


def measure(run: Run, output: Path) -> str:
    """Run it and put its file in place; returns the reason if there is none."""
    LOGS.mkdir(parents=True, exist_ok=True)
    written, log = LOGS / output.name, LOGS / f"{run.name}.log"
    written.unlink(missing_ok=True)
    variables = {"OMP_NUM_THREADS": str(run.threads), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    variables |= {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    start, limit_s = time.monotonic(), 60 * max(PATIENCE * run.minutes, MIN_MINUTES)
    print(f"{run.name}: about {run.minutes:g} minutes", end="", flush=True)
    code = run_limited(run.command(written), log, limit_s, {**os.environ, **variables}, GRACE_S)
    late = f"did not end within {limit_s / 60:.0f} minutes"
    reason = late if code is None else f"ended with code {code}" if code else ""
    reason = reason or ("" if written.is_file() else "wrote no result")
    print(f"; took {(time.monotonic() - start) / 60:.1f}{f'; {reason}' if reason else ''}", flush=True)
    if not reason:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(written.read_text())
    return reason


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    flags = parser(__doc__, output=False)
    names = [run.name for run in RUNS]
    flags.add_argument("--only", nargs="+", choices=names, metavar="RUN", help=f"some of: {', '.join(names)}")
    flags.add_argument("--minutes", type=float, default=math.inf, help="of all runs of this call; default: no limit")
    flags.add_argument("--retry", action="store_true", help="measure again what has a result of this commit")
    flags.add_argument("--list", action="store_true", help="print what would run")
    flags.add_argument("--directory", type=Path, default=RESULTS, help="of the results")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
