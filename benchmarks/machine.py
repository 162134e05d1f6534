"""The machine that a benchmark runs on: its name in tables and in file names, its instructions and its load."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")  # that decide the rates
# Of file names, the first that the CPU has: its flag in /proc/cpuinfo, and the name.
LEVELS = (("amx_bf16", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"))
FAMILIES = ("epyc", "xeon", "ryzen", "threadripper", "core", "neoverse", "graviton")


def machine(gpu: str | None = None, ranks: int = 0, threads: int = 0) -> dict[str, Any]:
    """The machine as every result has it; to be called once threads are set and ranks have joined.

    Of a benchmark that runs in other processes: gpu, the device's name, None for torch's device; ranks, and threads of
    each, 0 for this process's.
    load: the load average of the last minute, now; `results.write` adds that at the end.
    """
    if gpu is None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "name": slug(gpu) if gpu else cpu_name(processor(), cpuinfo("flags").split()),
        "cpu": processor(),
        "gpu": gpu,
        "instructions": instructions(),
        "cores": cores(),
        "threads": threads or torch.get_num_threads(),
        "ranks": ranks or (dist.get_world_size() if dist.is_initialized() else 1),
        "load": [os.getloadavg()[0]],
    }


def cpu_name(model: str, flags: list[str]) -> str:
    """The name of a CPU in file names, such as "epyc-avx512"."""
    family = next((name for name in FAMILIES if name in model.lower()), slug(model))
    return "-".join([family, *next(([name] for flag, name in LEVELS if flag in flags), [])])


def slug(text: str) -> str:
    """`text` as a part of a file name."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """The name of the hardware in titles."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' * (threads > 1)}, {capability}"


def processor() -> str:
    """The CPU's name."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Which of INSTRUCTIONS the CPU has."""
    flags = cpuinfo("flags").split()
    return " ".join(name for name in INSTRUCTIONS if name in flags)


def cpuinfo(field: str) -> str:
    """A field of the first CPU in Linux's /proc/cpuinfo; "" elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
