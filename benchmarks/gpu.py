"""Prefill, decode, the switch to inference and GRPO steps on a GPU, as shares of that device's measured rates.

    make gpu                                                   # the tests on the device, then this
    python -m benchmarks.gpu --minutes 8 --out DIRECTORY
    python -m benchmarks.gpu --shapes 7B --batches 64 --prompts 512 --contenders hybrid hybrid-eager hf-static
    python -m benchmarks.gpu --device cpu --shapes micro --batches 2 --prompts 8 --new_tokens 4     # a dry run

Weights are random, made on the device, in bfloat16. This engine's contenders take turns in one process, each with
`--rounds` rounds after a run that compiles; the others follow once these have all cases. Sampling is plain, at
temperature 1. Prefill is a rollout of one token; a decode step is the time of the further ones, a token. Clocks are
read after the device has been synchronized.

    hybrid              this engine's rollouts, ZeRO-3, weights gathered before; decode steps as CUDA graphs
    hybrid-eager        the same without graphs
    hybrid-flashinfer   as hybrid, with FlashInfer's attention in prefill: only if it is installed
    hybrid-flashinfer-eager   as hybrid-eager, with FlashInfer's attention in prefill and decode steps
    hf-static           Hugging Face's generate, static cache, torch.compile (reduce-overhead)
    vllm                vLLM with random weights in a process of its own: only if it is installed

A GRPO step is that of `benchmarks.real_size`, with LoRA and checkpointing: seconds of its phases, and inference's peak
memory against its plan. The first case of each shape is profiled once: launches and microseconds of its decode step's
kernels, and how many CUDA graphs there are.

Every case is measured in a process of its own with a time limit. If it crashes, hangs or raises, the contender that ran
gets a row with the reason, and the others are measured without it. Results are written after each case: a JSON file,
tables and a picture named after the hardware, with copies in `--out`. What the file has for the same code is not
measured again, failures included unless `--retry` is given. What did not fit into `--minutes` is listed, and the next
call goes on with it.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.cases import DTYPES, SHAPES, Case
from benchmarks.machine import slug
from benchmarks.processes import has_package, run_limited
from benchmarks.results import ROOT, parser

CASE_PROCESS = [sys.executable, "-m", "benchmarks.gpu_case"]
CONTENDERS = ("hybrid", "hybrid-flashinfer", "hf-static", "vllm")  # the available ones are measured
# The last three are faults, for a test.
MORE_CONTENDERS = ("hybrid-eager", "hybrid-flashinfer-eager", "crash", "hang", "out-of-memory")
LATER = ("hf-static", "vllm")  # a second pass: they compile, or start a server, in every case
BATCHES, PROMPTS = (1, 16, 64, 256), (32, 512)
# The most informative cases first.
SHAPE_ORDER = ("1.5B", "7B", "0.5B")
SIZE_ORDER = ((64, 512), (1, 32), (256, 32), (16, 512), (64, 32), (256, 512), (16, 32), (1, 512))  # batch and prompt
START_S = 15.0  # a case takes longer than this to start, so none is started with less left
# The blocks of settings by which this engine's attention runs FlashInfer's kernels.
FLASHINFER: dict[str, dict[str, Any]] = {"rollout": {"attention_backend": "flashinfer"}}
RESERVE = 2 * 2**30  # bytes that a process uses besides tensors: CUDA's context, libraries' workspaces, graphs
COPIES = {"hf-static": 1, "vllm": 1}  # of the weights; this engine holds its ZeRO-3 partition and the snapshot: 2
REASON_CHARS = 160
GRACE_S = 2.0
GRPO_SHAPES = ("0.5B", "1.5B", "micro")
GRPO_GROUP, GRPO_MICRO_BATCH = 8, 8


@dataclass(frozen=True)
class Work:
    """The measurement of a process.  kind: "rollout"; "profile", of a rollout's decode steps; "switch", whose case
    gives the shape alone; or "grpo", a step of training."""

    kind: str
    case: Case
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its rows."""
        of_shape, of_case = f"{self.case.shape} {self.case.dtype} switch", f"{self.case.name} {self.kind}"
        return {"rollout": self.case.name, "profile": of_case, "switch": of_shape, "grpo": of_case}[self.kind]

    def needs(self, contender: str) -> int:
        """Bytes on the device for a contender: weights, KV cache, activations of the prompts and logits."""
        sizes = SHAPES[self.case.shape]
        width = DTYPES[self.case.dtype].itemsize
        held = COPIES.get(contender, 2) * parameters(self.case.shape) * width
        if self.kind == "switch":
            return held + RESERVE
        head_dim = sizes["hidden"] // sizes["heads"]
        tokens = self.case.rows * (self.case.prompt_len + self.case.new_tokens)
        cache = 2 * tokens * sizes["layers"] * sizes["kv_heads"] * head_dim * width
        activations = self.case.rows * self.case.prompt_len * (3 * sizes["mlp"] + 4 * sizes["hidden"]) * width
        if self.kind == "grpo":  # of the micro-batch's training forward: logits, their gradients and temporaries
            activations += 4 * 4 * GRPO_MICRO_BATCH * self.case.new_tokens * sizes["vocab"]
        return held + cache + activations + 3 * 4 * self.case.rows * sizes["vocab"] + RESERVE


def parameters(shape: str) -> int:
    """The number of parameters of a key of SHAPES."""
    sizes = SHAPES[shape]
    hidden, head_dim = sizes["hidden"], sizes["hidden"] // sizes["heads"]
    attention = 2 * hidden * hidden + 2 * hidden * sizes["kv_heads"] * head_dim
    layer = attention + 3 * hidden * sizes["mlp"] + 2 * hidden
    return sizes["layers"] * layer + 2 * sizes["vocab"] * hidden + hidden


@dataclass
class Report:
    """The JSON file.  rows: figures of a contender in a case, or the reason why there are none, in the order in which
    they were measured; `runs`: the device's rates and the versions of every call; `about`: what every result has, of
    the last call."""

    path: Path
    code: str
    about: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)
    out: Path | None = None  # a directory that gets a copy of each file

    @classmethod
    def read(cls, path: Path, code: str) -> "Report":
        """The report at `path`, or an empty one."""
        known = json.loads(path.read_text()) if path.is_file() else {}
        return cls(path, code, {}, known.get("runs", []), known.get("rows", []))

    @property
    def content(self) -> dict[str, Any]:
        """The figures of the file."""
        return {"runs": self.runs, "rows": self.rows, "not_measured": self.not_measured}

    def current_rows(self) -> list[dict[str, Any]]:
        """The rows of this code."""
        return [row for row in self.rows if row["code"] == self.code]

    def missing(self, work: Work) -> list[str]:
        """The contenders of `work` that have no row."""
        known = {row["contender"] for row in self.current_rows() if row["case"] == work.name}
        return [name for name in work.contenders if name not in known]

    def add(self, work: Work, contender: str, figures: dict[str, Any]) -> None:
        """Add a row and print it."""
        row = {"code": self.code, "case": work.name, "kind": work.kind, "contender": contender, "rows": work.case.rows}
        self.rows.append({**row, **figures, "rates": {name: self.runs[-1][name] for name in RATES}})
        print(f"{work.name}, {contender}: {figures.get('error') or 'measured'}", flush=True)

    def write(self) -> None:
        """Write the JSON file, and its tables and a picture to files of the same name."""
        results.write(self.path, {**self.about, **self.content})
        self.path.with_suffix(".md").write_text("\n".join(tables.gpu(self.content)) + "\n")
        paths = [self.path, self.path.with_suffix(".md"), *self.draw()]
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            for path in paths:
                shutil.copy(path, self.out)

    def draw(self) -> list[Path]:
        """Draw the shares of the device's rates, if matplotlib is here; returns the picture's path."""
        path = self.path.with_suffix(".png")
        if not has_package("matplotlib"):
            return []
        try:
            from benchmarks import plot

            figure = plot.gpu(self.content)
            if not figure.panels:
                return []
            figure.draw(path)
        except Exception as error:  # a library that does not fit the machine's others costs the picture alone
            print(f"no picture: {error!r}", flush=True)
            return []
        return [path]


RATES = ("copy_bytes_per_s", "gemm_flops_per_s")


def main(arguments: list[str] | None = None) -> Report:
    """Measure what the report lacks, and print its tables."""
    deadline = time.monotonic()
    args = parse(arguments)
    deadline += 60 * args.minutes
    device = run_process({"kind": "device", "device": args.device}, args, args.case_seconds)
    if device.error:
        raise SystemExit(f"benchmarks.gpu: the device was not measured: {device.error}")
    (rates,) = device.results
    report = Report.read(args.directory / f"gpu-{slug(rates['hardware'])}.json", code_digest())
    report.out = args.out
    report.about = results.begin("gpu", args, arguments, gpu=rates["hardware"])
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report.runs.append({**rates, "code": report.code, "commit": results.commit(), "started": started})
    works = planned(args)
    if args.retry:
        report.rows = [row for row in report.rows if row["code"] != report.code or "error" not in row]
    for is_later, work in itertools.product((False, True), works):
        for group in groups(work, report, rates["memory"], is_later):
            measure(work, group, report, args, deadline)
            report.write()
    report.not_measured = [f"{work.name}, {name}" for work in works for name in report.missing(work)]
    report.write()
    print("", *tables.gpu(report.content), sep="\n")
    print(f"\nwritten to {report.path} and {report.path.with_suffix('.md').name}")
    return report


def planned(args: argparse.Namespace) -> list[Work]:
    """Everything to measure, the most informative first: a large batch of every shape, the profiles of these, the
    switches, one row and the largest batch, GRPO steps, then the rest."""
    shapes = sorted(args.shapes, key=lambda shape: SHAPE_ORDER.index(shape) if shape in SHAPE_ORDER else -1)
    sizes = [(batch, prompt) for batch in args.batches for prompt in args.prompts]
    sizes.sort(key=lambda size: SIZE_ORDER.index(size) if size in SIZE_ORDER else -1)
    contenders = tuple(args.contenders)
    rollouts = [
        Work("rollout", Case(shape, "bf16", batch, prompt_len=prompt, new_tokens=args.new_tokens), contenders)
        for batch, prompt in sizes
        for shape in shapes
    ]
    first, others = rollouts[: len(shapes)], rollouts[len(shapes) :]
    profiles = [Work("profile", work.case, ("hybrid",)) for work in first]
    switches = [Work("switch", Case(shape, "bf16", 1), ("hybrid",)) for shape in shapes]
    rows, prompt = max(args.batches), max(args.prompts)
    group = GRPO_GROUP if rows % GRPO_GROUP == 0 else rows
    steps = [
        Work("grpo", Case(shape, "bf16", rows // group, group, prompt, 4 * args.new_tokens), ("hybrid",))
        for shape in shapes
        if shape in GRPO_SHAPES
    ]
    sooner = others[: 2 * len(shapes)]
    return [*first, *profiles, *switches, *sooner, *steps, *others[len(sooner) :]]


def available() -> list[str]:
    """The contenders that can run here."""
    needs = {"vllm": has_package("vllm"), "hybrid-flashinfer": has_package("flashinfer")}
    return [name for name in CONTENDERS if needs.get(name, True)]


def groups(work: Work, report: Report, memory: int, is_later: bool) -> Iterator[list[str]]:
    """The contenders to measure in the first or the later pass, those together that fit into `memory` bytes together,
    else each alone; one that does not fit alone gets a row with the reason."""
    fitting = []
    for name in (name for name in report.missing(work) if (name in LATER) == is_later):
        if work.needs(name) > memory:
            needs, free = work.needs(name) / 2**30, memory / 2**30
            report.add(work, name, {"error": f"needs {needs:.0f} GiB, {free:.0f} GiB are free"})
        else:
            fitting.append(name)
    if not fitting:
        report.write()
    elif sum(work.needs(name) for name in fitting) <= memory:
        yield fitting
    else:
        yield from ([name] for name in fitting)


def measure(work: Work, group: list[str], report: Report, args: argparse.Namespace, deadline: float) -> None:
    """Measure contenders in turns; without the one that failed, again. Rows that the time left does not allow stay
    missing."""
    while group:
        left = deadline - time.monotonic()
        if left < START_S:
            return
        case_seconds = args.later_seconds if group[0] in LATER else args.case_seconds
        limit = min(case_seconds, left)
        memory = report.runs[-1]["memory"]
        request = {
            "kind": work.kind,
            "device": args.device,
            "case": asdict(work.case),
            "contenders": group,
            "rounds": args.rounds,
            "flashinfer": FLASHINFER,
            "micro_batch": min(GRPO_MICRO_BATCH, work.case.rows),
            "vllm_share": min(work.needs("vllm") / memory, 0.9),
        }
        outcome = run_process(request, args, limit, log=work.name)
        for figures in outcome.results:
            report.add(work, figures.pop("contender"), {**figures, "in_turns_with": group})
        group = [name for name in group if name in report.missing(work)]
        if outcome.timed_out and limit < case_seconds:
            return  # the minutes are over, not the case's time
        # Before the first contender was built all of them have failed.
        for name in [outcome.running] if outcome.running in group else group:
            report.add(work, name, {"error": outcome.error or "the process ended without a result"})
            group = [other for other in group if other != name]


@dataclass(frozen=True)
class Outcome:
    """The end of a process.  running: the contender that ran last.  error: "" if it went well."""

    results: list[dict[str, Any]]
    running: str | None
    error: str
    timed_out: bool = False


def run_process(work: dict[str, Any], args: argparse.Namespace, limit_s: float, log: str = "device") -> Outcome:
    """Run a process on `work` for at most `limit_s` seconds; everything that it started ends with it."""
    stem = args.directory / "gpu-logs" / re.sub(r"[^\w.]+", "-", log)
    stem.parent.mkdir(parents=True, exist_ok=True)
    events, output = stem.with_name(f"{stem.name}.jsonl"), stem.with_name(f"{stem.name}.log")
    events.unlink(missing_ok=True)
    code = run_limited(
        [*CASE_PROCESS, json.dumps(work), str(events)], output, limit_s, environment(args.device), GRACE_S
    )
    return outcome_of(events, output, code, limit_s)


def outcome_of(events: Path, output: Path, code: int | None, limit_s: float) -> Outcome:
    """The end of a process, from its events and its output.  code: None if it ran longer than `limit_s`."""
    lines = events.read_text().splitlines() if events.is_file() else []
    read = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut off
    results = [event["result"] for event in read if "result" in event]
    running = next((event["begin"] for event in reversed(read) if "begin" in event), None)
    error = next((event["error"] for event in read if "error" in event), "")
    text = output.read_text(errors="replace")
    if code is None:  # the traceback shows where it was when it was ended
        text = text.partition("Traceback (most recent call last)")[0]
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    last = f"; its last line: {printed[-1]}" if printed else ""
    if code is None:
        error = f"did not end within {limit_s:.0f} s{last}"
    elif code and not error:
        error = f"killed by {signal.Signals(-code).name}{last}" if code < 0 else f"ended with code {code}{last}"
    return Outcome(results, running, error[:REASON_CHARS], code is None)


def environment(device: str) -> dict[str, str]:
    """Environment variables of the processes: DeepSpeed's accelerator is that of `device`."""
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return variables | ({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def code_digest() -> str:
    """A digest of the sources that the figures depend on, also of changes that are in no commit."""
    paths = [path for folder in ("hybrid", "benchmarks") for path in (ROOT / folder).rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in {".py", ".cpp", ".h", ".inc"}):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    flags = parser(__doc__, output=False, rounds=3)
    flags.add_argument("--minutes", type=float, default=8, help="of all cases of this call")
    flags.add_argument("--case_seconds", type=float, default=150, help="time limit of a case's process")
    flags.add_argument("--later_seconds", type=float, default=90, help=f"the same of {', '.join(LATER)}")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPE_ORDER))
    flags.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    flags.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="tokens")
    flags.add_argument("--new_tokens", type=int, default=64, help="at least 2")
    flags.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, *MORE_CONTENDERS), help="default: available")
    flags.add_argument("--directory", type=Path, default=Path("runs"), help="of the JSON and the tables")
    flags.add_argument("--out", type=Path, help="gets copies of these files and of a picture after every case")
    flags.add_argument("--retry", action="store_true", help="measure again what failed before")
    args = flags.parse_args(arguments)
    if args.new_tokens < 2:
        flags.error(f"--new_tokens {args.new_tokens} given; a decode step needs at least 2")
    args.contenders = args.contenders or available()
    args.directory = args.directory.absolute()
    return args


if __name__ == "__main__":
    main()
