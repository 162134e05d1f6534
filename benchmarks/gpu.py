"""Prefill, decode and the switch to inference on a GPU, as shares of that device's measured rates.

    make gpu                                                   # the tests on the device, then this
    python -m benchmarks.gpu --minutes 10
    python -m benchmarks.gpu --shapes 7B --batches 64 --prompts 512 --contenders hybrid hybrid-eager hf-static
    python -m benchmarks.gpu --device cpu --shapes micro --batches 2 --prompts 8 --new_tokens 4     # a dry run

Weights are random, made on the device, in bfloat16. Contenders take turns in one process, each with `--rounds` rounds
after a run that compiles; sampling is plain, at temperature 1. Prefill is a rollout of one token; a decode step is the
time of the further ones, a token. Clocks are read after the device has been synchronized.

    hybrid              this engine's rollouts, ZeRO-3, weights gathered before; decode steps as CUDA graphs
    hybrid-eager        the same without graphs
    hybrid-flashinfer   as hybrid, with FlashInfer's attention in prefill: only if it is installed
    hybrid-flashinfer-eager   as hybrid-eager, with FlashInfer's attention in prefill and decode steps
    hf-static           Hugging Face's generate, static cache, torch.compile (reduce-overhead)
    vllm                vLLM with random weights in a process of its own: only if it is installed

Every case is measured in a process of its own with a time limit. If it crashes, hangs or raises, the contender that ran
gets a row with the reason, and the others are measured without it. Results are written after each case, to a JSON file
and a table named after the hardware; what it has for the same code is not measured again, failures included unless
`--retry` is given. What did not fit into `--minutes` is listed, and the next call goes on with it.
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.cases import DTYPES, SHAPES, Case
from benchmarks.machine import slug

ROOT = Path(__file__).resolve().parents[1]
CASE_PROCESS = [sys.executable, "-m", "benchmarks.gpu_case"]
CONTENDERS = ("hybrid", "hybrid-flashinfer", "hf-static", "vllm")  # those that are available are measured
# The last three are faults, for a test.
MORE_CONTENDERS = ("hybrid-eager", "hybrid-flashinfer-eager", "crash", "hang", "out-of-memory")
BATCHES, PROMPTS = (1, 16, 64, 256), (32, 512)
# The most telling cases first.
SHAPE_ORDER = ("1.5B", "7B", "0.5B")
SIZE_ORDER = ((64, 512), (1, 32), (256, 32), (16, 512), (64, 32), (256, 512), (16, 32), (1, 512))  # batch and prompt
START_S = 15.0  # a case takes longer than this to start, so none is started with less left
# The blocks of settings by which this engine's attention runs FlashInfer's kernels.
FLASHINFER: dict[str, dict[str, Any]] = {"rollout": {"attention_backend": "flashinfer"}}
RESERVE = 2 * 2**30  # bytes that a process uses besides tensors: CUDA's context, libraries' workspaces, graphs
COPIES = {"hf-static": 1, "vllm": 1}  # of the weights; this engine holds its ZeRO-3 partition and the snapshot: 2
REASON_CHARS = 160
GRACE_S = 2.0


@dataclass(frozen=True)
class Work:
    """What a process measures.  kind: "rollout", or "switch", whose case gives the shape alone."""

    kind: str
    case: Case
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its rows."""
        return self.case.name if self.kind == "rollout" else f"{self.case.shape} {self.case.dtype} switch"

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

    @classmethod
    def read(cls, path: Path, code: str) -> "Report":
        """The report at `path`, or an empty one."""
        known = json.loads(path.read_text()) if path.is_file() else {}
        return cls(path, code, {}, known.get("runs", []), known.get("rows", []))

    def own_rows(self) -> list[dict[str, Any]]:
        """The rows of this code."""
        return [row for row in self.rows if row["code"] == self.code]

    def missing(self, work: Work) -> list[str]:
        """The contenders of `work` that have no row."""
        known = {row["contender"] for row in self.own_rows() if row["case"] == work.name}
        return [name for name in work.contenders if name not in known]

    def add(self, work: Work, contender: str, figures: dict[str, Any]) -> None:
        """Add a row and print it."""
        row = {"code": self.code, "case": work.name, "kind": work.kind, "contender": contender, "rows": work.case.rows}
        self.rows.append({**row, **figures, "rates": {name: self.runs[-1][name] for name in RATES}})
        print(f"{work.name}, {contender}: {figures.get('error') or 'measured'}", flush=True)

    def write(self) -> None:
        """Write the JSON file, and its tables to a file of the same name."""
        content = {"runs": self.runs, "rows": self.rows, "not_measured": self.not_measured}
        results.write(self.path, {**self.about, **content})
        self.path.with_suffix(".md").write_text(tables(self) + "\n")


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
    report.about = results.begin("gpu", args, arguments, gpu=rates["hardware"])
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report.runs.append({**rates, "code": report.code, "commit": results.commit(), "started": started})
    works = planned(args)
    if args.retry:
        report.rows = [row for row in report.rows if row["code"] != report.code or "error" not in row]
    for work in works:
        for group in groups(work, report, rates["memory"]):
            measure(work, group, report, args, deadline)
            report.write()
    report.not_measured = [f"{work.name}, {name}" for work in works for name in report.missing(work)]
    report.write()
    print(f"\n{tables(report)}\n\nwritten to {report.path} and {report.path.with_suffix('.md').name}")
    draw(report)
    return report


def planned(args: argparse.Namespace) -> list[Work]:
    """Everything to measure, the most telling first: a large batch of every shape, the switches, then the rest."""
    shapes = sorted(args.shapes, key=lambda shape: SHAPE_ORDER.index(shape) if shape in SHAPE_ORDER else -1)
    sizes = [(batch, prompt) for batch in args.batches for prompt in args.prompts]
    sizes.sort(key=lambda size: SIZE_ORDER.index(size) if size in SIZE_ORDER else -1)
    contenders = tuple(args.contenders)
    rollouts = [
        Work("rollout", Case(shape, "bf16", batch, prompt_len=prompt, new_tokens=args.new_tokens), contenders)
        for batch, prompt in sizes
        for shape in shapes
    ]
    switches = [Work("switch", Case(shape, "bf16", 1), ("hybrid",)) for shape in shapes]
    return [*rollouts[: len(shapes)], *switches, *rollouts[len(shapes) :]]


def available() -> list[str]:
    """The contenders that can run here."""
    needs = {"vllm": has("vllm"), "hybrid-flashinfer": has("flashinfer")}
    return [name for name in CONTENDERS if needs.get(name, True)]


def has(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def groups(work: Work, report: Report, memory: int) -> Iterator[list[str]]:
    """The contenders to measure, those together that fit into `memory` bytes together, else each alone; one that does
    not fit alone gets a row with the reason."""
    fitting = []
    for name in report.missing(work):
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
        limit = min(args.case_seconds, left)
        memory = report.runs[-1]["memory"]
        request = {
            "kind": work.kind,
            "device": args.device,
            "case": asdict(work.case),
            "contenders": group,
            "rounds": args.rounds,
            "flashinfer": FLASHINFER,
            "vllm_share": min(work.needs("vllm") / memory, 0.9),
        }
        outcome = run_process(request, args, limit, log=work.name)
        for figures in outcome.results:
            report.add(work, figures.pop("contender"), {**figures, "in_turns_with": group})
        group = [name for name in group if name in report.missing(work)]
        if outcome.timed_out and limit < args.case_seconds:
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
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*CASE_PROCESS, json.dumps(work), str(events)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(args.device),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_session(process)
    return outcome_of(events, output, process.returncode, limit_s if timed_out else None)


def end_session(process: subprocess.Popen) -> None:
    """End a process and those that it started. It has a moment to release its locks: one that is killed while it builds
    one of DeepSpeed's operators leaves a lock for which every later process waits."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome_of(events: Path, output: Path, code: int, limit_s: float | None) -> Outcome:
    """What the events and the output of a process say.  limit_s: the time limit that ended it, or None."""
    lines = events.read_text().splitlines() if events.is_file() else []
    read = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut off
    results = [event["result"] for event in read if "result" in event]
    running = next((event["begin"] for event in reversed(read) if "begin" in event), None)
    raised = next((event["error"] for event in read if "error" in event), "")
    text = output.read_text(errors="replace")
    if limit_s is not None:  # what follows says where it was when it was ended
        text = text.partition("Traceback (most recent call last)")[0]
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    last = f"; its last line: {printed[-1]}" if printed else ""
    error = raised
    if limit_s is not None:
        error = f"did not end within {limit_s:.0f} s{last}"
    elif code < 0 and not raised and not results:
        error = f"killed by {signal.Signals(-code).name}{last}"
    elif code and not raised and not results:
        error = f"ended with code {code}{last}"
    return Outcome(results, running, error[:REASON_CHARS], limit_s is not None)


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


# Tables


def tables(report: Report) -> str:
    """Markdown: the device's rates, a table of rollouts, one of switches, and what was not measured."""
    run, rows = report.runs[-1], report.own_rows()
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"{run['hardware']}: copies {run['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written), multiplies "
        f"{run['gemm_flops_per_s'] / 1e12:.3g} TFLOP/s in bfloat16; {versions}; commit {run['commit'] or 'unknown'}, "
        f"code {report.code}",
        "",
        "| case | contender | prefill ms (min–max) | of GEMM | step ms (min–max) | of copy | tokens/s | note |",
        "|---|---|---|---|---|---|---|---|",
        *(rollout_line(row) for row in rows if row["kind"] == "rollout"),
        "",
        "| case | switch ms (min–max) | gather ms | merge ms | snapshot GiB | of copy | note |",
        "|---|---|---|---|---|---|---|",
        *(switch_line(row) for row in rows if row["kind"] == "switch"),
    ]
    if report.not_measured:
        lines += ["", "Not measured, call again: " + "; ".join(report.not_measured) + "."]
    return "\n".join(lines)


def rollout_line(row: dict[str, Any]) -> str:
    """A row of the table of rollouts. The shares: operations of the prompts over those that the GEMM rate allows in the
    time; bytes that a step must read over those that a copy moves in the time."""
    head = f"| {row['case']} | {row['contender']} |"
    if "error" in row:
        return f"{head} – | – | – | – | – | {cell(row['error'])} |"
    prefill, step = statistics.median(row["prefill_s"]), statistics.median(row["step_s"])
    of_gemm = shown(row["prefill_flops"] / row["rates"]["gemm_flops_per_s"], prefill)
    of_copy = shown(row["step_bytes"] / row["rates"]["copy_bytes_per_s"], step)
    speed = f"{row['rows'] / step:.0f}" if step > 0 else "–"
    return (
        f"{head} {spread(row['prefill_s'])} | {of_gemm} | {spread(row['step_s'])} | {of_copy} | {speed} "
        f"| {cell(row['note'])} |"
    )


def switch_line(row: dict[str, Any]) -> str:
    """A row of the table of switches. The share: reading and writing the snapshot once, over a copy in the time."""
    if "error" in row:
        return f"| {row['case']} | – | – | – | – | – | {cell(row['error'])} |"
    gather, merge = (f"{statistics.median(row[name]) * 1e3:.1f}" for name in ("gather_s", "merge_s"))
    needed_s = 2 * row["snapshot_bytes"] / row["rates"]["copy_bytes_per_s"]
    return (
        f"| {row['case']} | {spread(row['switch_s'])} | {gather} | {merge} | {row['snapshot_bytes'] / 2**30:.2f} "
        f"| {shown(needed_s, statistics.median(row['switch_s']))} | {cell(row['note'])} |"
    )


def spread(seconds: list[float]) -> str:
    """Median, minimum and maximum in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.2f} ({min(seconds) * 1e3:.2f}–{max(seconds) * 1e3:.2f})"


def shown(needed_s: float, measured_s: float) -> str:
    """The share of the time that was needed; a dash for a difference of two clocks that noise made negative."""
    return f"{needed_s / measured_s:.0%}" if measured_s > 0 else "–"


def cell(text: str) -> str:
    """Text inside a cell of a Markdown table."""
    return " ".join(text.replace("|", "/").split())


def draw(report: Report) -> None:
    """Draw tokens per second by case as a PNG, if matplotlib is installed."""
    rows = [row for row in report.own_rows() if row["kind"] == "rollout" and "error" not in row]
    if not has("matplotlib"):
        print("no plot: matplotlib is not installed")
    elif rows:
        from benchmarks.gpu_plot import draw_shares

        path = report.path.with_suffix(".png")
        draw_shares(rows, report.runs[-1]["hardware"], path)
        print(f"drawn in {path}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="of all cases of this call")
    parser.add_argument("--case_seconds", type=float, default=150, help="time limit of a case's process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPE_ORDER))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="tokens")
    parser.add_argument("--new_tokens", type=int, default=64, help="at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, *MORE_CONTENDERS), help="default: available")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="of the JSON, tables and plot")
    parser.add_argument("--retry", action="store_true", help="measure again what failed before")
    args = parser.parse_args(arguments)
    if args.new_tokens < 2:
        parser.error(f"--new_tokens {args.new_tokens} given; a decode step needs at least 2")
    args.contenders = args.contenders or available()
    args.directory = args.directory.absolute()
    return args


if __name__ == "__main__":
    main()
