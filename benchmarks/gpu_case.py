"""A process of `benchmarks.gpu`: measures one case, or the device's rates, and writes what happens to a file.

    python -m benchmarks.gpu_case '{"kind": "device", "device": "cuda"}' events.jsonl

The file has an event per line as JSON: {"begin": a contender's name} before that contender runs, {"result": figures}
for each contender once its last round is done, {"error": text} if an exception ends the process. `benchmarks.gpu` reads
it also after a crash or a time limit, and so knows which contender ran.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import CompileConfig, StaticCache

import hybrid
from benchmarks import real_size
from benchmarks.cases import Case, Request, make_model, make_request
from benchmarks.contenders import (
    Contender,
    Outcome,
    Setting,
    generate_arguments,
    hybrid_rollouts,
    outcome_of,
    zero3_engine,
)
from benchmarks.limits import matmul_rate, prefill_flops, read_rate, step_cost, timed
from benchmarks.machine import hardware
from benchmarks.ranks import quiet, single_rank_environment
from benchmarks.rollout import VLLM_DIRECTORY
from benchmarks.vllm_contender import VLLM, VLLMSettings

COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}  # beyond the caches of a GPU
GEMM_SIZE = {"cuda": 8192, "cpu": 256}  # rows, outputs and inputs
WARM_UP_SEED = 1000  # of prompts that no round has
KERNEL_ROWS = 20  # of a profile's table


class Events:
    """The file of events: one line each, complete as soon as it is written."""

    def __init__(self, path: Path):
        self.file = path.open("a", buffering=1)

    def write(self, **event: Any) -> None:
        """Add an event."""
        self.file.write(json.dumps(event) + "\n")


def main() -> None:
    """Measure what the first argument describes. Ends without waiting for libraries' threads and processes."""
    work, events = json.loads(sys.argv[1]), Events(Path(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by benchmarks.gpu"))  # so that `finally` releases locks
    code = 0
    try:
        quiet()
        KINDS[work["kind"]](work, events)
    except BaseException as error:
        traceback.print_exc()
        text = traceback.format_exception_only(error)[-1].strip() or repr(error)
        events.write(error=text.splitlines()[0])
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# The device


def device_rates(work: dict[str, Any], events: Events) -> None:
    """The device's name, free memory and rates: bytes per second of a copy (read and written ones), FLOP/s of a bf16
    GEMM."""
    if work["device"] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"no CUDA device for torch {torch.__version__}; on a CPU use --device cpu")
    device, size = torch.device(work["device"]), GEMM_SIZE[work["device"]]
    events.write(
        result={
            "hardware": hardware(),
            "memory": free_memory(),
            "copy_bytes_per_s": read_rate(COPY_BYTES[work["device"]], device),
            "gemm_flops_per_s": matmul_rate(size, size, size, torch.bfloat16, device),
            "versions": {package.__name__: package.__version__ for package in (torch, transformers, deepspeed)},
        }
    )


def free_memory() -> int:
    """Bytes that are free on the device; on a CPU all of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Prefill and decode


def rollouts(work: dict[str, Any], events: Events) -> None:
    """Seconds of prefill and of a decode step of each contender, in turns."""
    case = Case(**work["case"])
    join_alone()
    contenders = []
    for name in work["contenders"]:
        events.write(begin=name)
        contenders.append(CONTENDERS[name](name, case, work))
    measure(contenders, case, work["rounds"], events)
    for contender in contenders:
        contender.close()


def measure(contenders: list[Contender], case: Case, rounds: int, events: Events) -> None:
    """Write the figures of each contender once it has run its last round: `prefill_s`, the seconds of a rollout of one
    token, and `step_s`: those of the further tokens, a token. Each runs both once before, which compiles kernels and
    captures graphs."""
    once, model = replace(case, new_tokens=1), make_model(case.shape, case.dtype, "meta")
    costs = {"prefill_flops": prefill_flops(model, case), "step_bytes": step_cost(model, case)[0]}
    for contender in contenders:
        events.write(begin=contender.name)
        run_s(contender, case, WARM_UP_SEED)  # the longer one first: caches are then reserved for both
        run_s(contender, once, WARM_UP_SEED + 1)
    seconds = {contender.name: {"prefill_s": [], "step_s": []} for contender in contenders}
    for round_number in range(rounds):
        for contender in contenders:
            events.write(begin=contender.name)
            prefill_s = run_s(contender, once, 2 * round_number)
            whole_s = run_s(contender, case, 2 * round_number + 1)
            seconds[contender.name]["prefill_s"].append(prefill_s)
            seconds[contender.name]["step_s"].append((whole_s - prefill_s) / (case.new_tokens - 1))
            if round_number == rounds - 1:
                note = contender.note() or contender.about
                events.write(result={"contender": contender.name, **seconds[contender.name], **costs, "note": note})


def run_s(contender: Contender, case: Case, seed: int) -> float:
    """Seconds of a run, the device's work included. Raises AssertionError if completions have other lengths."""
    vocab_size = make_model(case.shape, case.dtype, "meta").config.vocab_size
    request = make_request(case, vocab_size, seed).on(get_accelerator().current_device_name())
    outcomes = []
    seconds = timed(lambda: outcomes.append(contender.run(request)), 1)
    assert outcomes[0].lengths == request.completion_lengths, f"{contender.name} generated {outcomes[0].lengths} tokens"
    return seconds


def join_alone() -> None:
    """Make a process group of this process, by NCCL on a GPU if a sum works with it, else by gloo."""
    single_rank_environment()
    device = get_accelerator().current_device_name()
    for backend in dict.fromkeys([get_accelerator().communication_backend_name(), "gloo"]):
        try:
            dist.init_process_group(backend)
            dist.all_reduce(torch.ones(1, device=device))
            return
        except (RuntimeError, ValueError) as error:
            print(f"{backend}: {error}", file=sys.stderr)
            if dist.is_initialized():
                dist.destroy_process_group()
    raise RuntimeError("neither NCCL nor gloo works for a group of one process")


def make_engine(shape: str, dtype: str, tokens: int, blocks: dict[str, dict[str, Any]]) -> hybrid.HybridEngine:
    """A ZeRO-3 engine that partitions everything, for sequences of `tokens` tokens.

    blocks: settings of the `hybrid_engine` and `rollout` blocks. Only the last norm is trained: gathering frozen
    weights takes as long, and 7B parameters then need no master weights and gradients.
    """
    model = make_model(shape, dtype, get_accelerator().current_device_name())
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    return zero3_engine(model, tokens, **blocks)


def engine_contender(name: str, case: Case, graphs: bool, **blocks: Any) -> Contender:
    """This engine's rollouts.  graphs: as in `rollout_engine`."""
    return rollouts_of(rollout_engine(case, graphs, **blocks), name, case)


def rollout_engine(case: Case, graphs: bool, **blocks: Any) -> hybrid.HybridEngine:
    """An engine for the rollouts of a case.  graphs: decode steps are CUDA graphs; there are none on a CPU."""
    block = {"hybrid_engine": {"enable_cuda_graph": graphs and torch.cuda.is_available()}, **blocks}
    return make_engine(case.shape, case.dtype, case.prompt_len + case.new_tokens, block)


def rollouts_of(engine: hybrid.HybridEngine, name: str, case: Case) -> Contender:
    """Rollouts of an engine whose weights are gathered before; the note says why it does not run as it should."""
    setting = Setting(engine.module, engine, case.rows, case.prompt_len + case.new_tokens, vllm_settings())
    run = hybrid_rollouts(name, setting, new_weights=False).run
    return Contender(name, run, note=lambda: engine.stats()["fallback_reason"] or engine.stats()["eager_reason"])


def hugging_face_static(name: str, case: Case) -> Contender:
    """Hugging Face's generate with a static cache, which is made once; on GPUs its decode steps are compiled
    (reduce-overhead: as CUDA graphs)."""
    model = make_model(case.shape, case.dtype, get_accelerator().current_device_name())
    cache = StaticCache(model.config, max_cache_len=case.prompt_len + case.new_tokens)
    compiling = {"compile_config": CompileConfig(fullgraph=False, mode="reduce-overhead")} if on_gpu() else {}

    def run(request: Request) -> Outcome:
        cache.reset()
        arguments = generate_arguments(request) | {"past_key_values": cache, **compiling}
        return outcome_of(model.generate(request.prompt_ids, **arguments), request)

    return Contender(name, run)


def on_gpu() -> bool:
    """Whether the device is a GPU."""
    return get_accelerator().device_name() == "cuda"


def vllm_settings() -> VLLMSettings:
    """vLLM of this environment."""
    return VLLMSettings(Path(sys.executable), VLLM_DIRECTORY.absolute(), torch.get_num_threads())


def vllm(name: str, case: Case, share: float) -> Contender:
    """vLLM in a process of its own, with random weights that it makes itself.  share: of the device's memory."""
    model = make_model(case.shape, case.dtype, "meta")
    options = {"load_format": "dummy", "gpu_memory_utilization": round(share, 3)}
    server = VLLM(vllm_settings(), model, case.rows, case.prompt_len + case.new_tokens, eager=False, **options)
    return Contender(name, lambda request: Outcome(server.run(request)), server.close, server.about)


# Faults that the benchmark's own test injects as contenders


def crash(request: Request) -> Outcome:
    """Ends this process as a fault in a kernel would."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("still alive")


def hang(request: Request) -> Outcome:
    """Never returns."""
    while True:
        time.sleep(60)


def out_of_memory(request: Request) -> Outcome:
    """Raises what torch raises when a device's memory is used up."""
    raise torch.OutOfMemoryError("CUDA out of memory (injected by a test)")


# By name: a function of the name, the case and the work that builds the contender.
CONTENDERS: dict[str, Callable[[str, Case, dict[str, Any]], Contender]] = {
    "hybrid": lambda name, case, work: engine_contender(name, case, graphs=True),
    "hybrid-eager": lambda name, case, work: engine_contender(name, case, graphs=False),
    "hybrid-flashinfer": lambda name, case, work: engine_contender(name, case, graphs=True, **work["flashinfer"]),
    "hybrid-flashinfer-eager": lambda name, case, work: engine_contender(
        name, case, graphs=False, **work["flashinfer"]
    ),
    "hf-static": lambda name, case, work: hugging_face_static(name, case),
    "vllm": lambda name, case, work: vllm(name, case, work["vllm_share"]),
    **{
        name: lambda name, case, work, fault=fault: Contender(name, fault)
        for name, fault in (("crash", crash), ("hang", hang), ("out-of-memory", out_of_memory))
    },
}


# The switch


def switch(work: dict[str, Any], events: Events) -> None:
    """Seconds of entering inference with stale weights, and those of gathering and merging by the engine's `stats`."""
    case = Case(**work["case"])
    join_alone()
    events.write(begin="hybrid")
    engine = make_engine(case.shape, case.dtype, case.prompt_len + case.new_tokens, {})
    figures: dict[str, list[float]] = {name: [] for name in ("switch_s", "gather_s", "merge_s", "gathered_bytes")}
    for round_number in range(work["rounds"] + 1):  # the first, which allocates the snapshot, is not counted
        engine.train()
        engine.mark_weights_changed()
        for name, value in enter(engine).items():
            figures[name] += [value] * (round_number > 0)
    stats = engine.stats()
    sizes = {"gathered_bytes": figures.pop("gathered_bytes")[-1], "snapshot_bytes": stats["snapshot_bytes"]}
    events.write(result={"contender": "hybrid", **figures, **sizes, "note": stats["fallback_reason"]})


def enter(engine: hybrid.HybridEngine) -> dict[str, float]:
    """Seconds until the weights are ready inside `inference()`; what the engine's `stats` add for it."""
    before = engine.stats()
    get_accelerator().synchronize()
    start = time.perf_counter()
    with engine.inference():
        get_accelerator().synchronize()
        switch_s = time.perf_counter() - start
        after = engine.stats()
    added = {name: after[name] - before[name] for name in ("gather_s", "merge_s", "gathered_bytes")}
    return {"switch_s": switch_s, **added}


# A GRPO step


def grpo_step(work: dict[str, Any], events: Events) -> None:
    """Seconds of the phases of a GRPO step, `rounds` times, and inference's planned and measured peak memory of the
    first one, which compiles and captures."""
    case = Case(**work["case"])
    join_alone()
    events.write(begin="hybrid")
    flags = {"shape": case.shape, "dtype": case.dtype, "sequences": case.rows, "num_generations": case.group}
    flags |= {"prompt_length": case.prompt_len, "new_tokens": case.new_tokens, "micro_batch": work["micro_batch"]}
    args = real_size.parse([text for name, value in flags.items() for text in (f"--{name}", str(value))])
    engine = real_size.make_engine(args)
    prompts = real_size.rank_prompts(args)
    first, *reports = (real_size.step(engine, prompts, args) for _ in range(work["rounds"] + 1))
    events.write(
        result={
            "contender": "hybrid",
            "rollout_s": [report.seconds["rollout"] for report in reports],
            "score_s": [report.seconds["score, policy"] + report.seconds["score, base"] for report in reports],
            "train_s": [report.seconds["train"] for report in reports],
            "tokens": first.tokens,
            "planned": first.planned,
            "measured": first.measured,
            "note": first.stats["fallback_reason"],
        }
    )


# The kernels of a decode step


def profile(work: dict[str, Any], events: Events) -> None:
    """Profile a decode step: the launches and microseconds of each kernel, sorted by time.

    The figures of a rollout of one token are subtracted from those of the whole rollout, and the rest is divided by the
    number of decode steps. On a CPU torch's operators are profiled.
    """
    case = Case(**work["case"])
    once, model = replace(case, new_tokens=1), make_model(case.shape, case.dtype, "meta")
    join_alone()
    events.write(begin="hybrid")
    engine = rollout_engine(case, graphs=True)
    contender, steps = rollouts_of(engine, "hybrid", case), case.new_tokens - 1
    for seed, each in enumerate((case, once)):
        run_s(contender, each, WARM_UP_SEED + seed)
    step_s = (run_s(contender, case, 0) - run_s(contender, once, 1)) / steps
    whole, first = (
        kernels_of(lambda each=each, seed=seed: run_s(contender, each, seed)) for seed, each in enumerate((case, once))
    )
    rows = [
        [name, (count - first.get(name, (0, 0))[0]) / steps, (micros - first.get(name, (0, 0))[1]) / steps]
        for name, (count, micros) in whole.items()
    ]
    rows.sort(key=lambda row: row[2], reverse=True)
    events.write(
        result={
            "contender": "hybrid",
            "kernels": rows[:KERNEL_ROWS],
            "kernels_s": sum(row[2] for row in rows) / 1e6,
            "launches": sum(row[1] for row in rows),
            "profiled_step_s": step_s,
            "step_bytes": step_cost(model, case)[0],
            "cuda_graphs": engine.stats()["cuda_graphs"],
            "note": contender.note(),
        }
    )


def kernels_of(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of each kernel in `run`, by name, copies and fills included."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu() else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    kind, clock = (DeviceType.CUDA, "self_device_time_total") if on_gpu() else (DeviceType.CPU, "self_cpu_time_total")
    averages = [average for average in profiler.key_averages() if average.device_type == kind]
    return {average.key: (average.count, getattr(average, clock)) for average in averages}


KINDS = {"device": device_rates, "rollout": rollouts, "switch": switch, "grpo": grpo_step, "profile": profile}


if __name__ == "__main__":
    main()
