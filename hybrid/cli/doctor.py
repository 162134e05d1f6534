"""Checks of a machine: what `hybrid doctor` prints. Each check is a function that yields `Finding`s."""

import importlib.metadata
import os
import platform
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version

from hybrid.kernels import has_fast_bfloat16, has_triton
from hybrid.kernels.cpu_library import FLAGS, built, compiler_command, opened
from hybrid.runtime.extension_lock import abandoned_locks, age_of
from hybrid.runtime.redaction import redacted

OK, WARNING, PROBLEM = "ok", "warning", "problem"
PACKAGE = "hybrid-engine"
OPTIONAL = ("trl", "triton", "flashinfer-python", "ray", "vllm")
# A macro that the compiler defines, and the instructions that the kernels then use.
MACROS = {
    "__AVX2__": "AVX2",
    "__AVX512F__": "AVX-512",
    "__AVX512BF16__": "bfloat16",
    "__AVX512VNNI__": "VNNI",
    "__AMX_BF16__": "AMX bfloat16",
    "__ARM_NEON": "NEON",
}
VARIABLES = re.compile(r"(DS_|NCCL_|GLOO_|OMP_|MASTER_|TORCH_|CUDA_|HF_|TRITON_|XDG_CACHE|RANK|WORLD_SIZE|LOCAL_RANK)")
SUM_OF_TWO = """
import sys, torch, torch.distributed as dist
rank, backend, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
value = torch.ones(1, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value.item() == 2, value
dist.destroy_process_group()
"""
KERNEL = """
import sys, torch
from hybrid.kernels.triton_fused import activated
x = torch.linspace(-4, 4, 64, device=sys.argv[1]).view(1, -1)
difference = (activated(x, "silu") - torch.nn.functional.silu(x)).abs().max().item()
assert difference < 1e-5, f"results are off by {difference:.2g}"
"""
KERNEL_TIMEOUT_S = 120
COLLECTIVE_TIMEOUT_S = 90
SHARED_MEMORY_BYTES = 1 << 30  # of /dev/shm; containers have 64 MiB unless told otherwise


@dataclass(frozen=True)
class Finding:
    """Something that a check found.

    status: OK, WARNING (works, but slower or only in part) or PROBLEM.  remedy: what to do; "" if there is nothing.
    """

    subject: str
    status: str
    detail: str
    remedy: str = ""


def findings() -> Iterator[Finding]:
    """Yield the findings of every check, in the order of the page."""
    for check in (versions, devices, gpu_kernels, cpu_kernels, training_dtype, collectives, build_locks, environment):
        yield from check()


def versions() -> Iterator[Finding]:
    """Python and the packages, against the ranges that this package declares."""
    yield Finding("python", OK, f"{platform.python_version()}, {sys.executable}")
    if installed_version(PACKAGE) is None:
        yield Finding(PACKAGE, PROBLEM, "runs from a directory and is not installed", "pip install -e .")
        return
    required = map(Requirement, importlib.metadata.requires(PACKAGE) or ())
    found = [version_of(requirement) for requirement in required if requirement.marker is None]
    yield from (finding for finding in found if finding.status != OK)
    fine = ", ".join(f"{finding.subject} {finding.detail}" for finding in found if finding.status == OK)
    yield Finding("packages", OK, f"{PACKAGE} {installed_version(PACKAGE)}, {fine}")
    extras = [f"{name} {installed}" for name in OPTIONAL if (installed := installed_version(name))]
    yield Finding("optional packages", OK, ", ".join(extras) or "none")


def version_of(requirement: Requirement) -> Finding:
    """Whether a required package is installed in a version that is allowed."""
    installed = installed_version(requirement.name)
    install = f"pip install '{requirement}'"
    if installed is None:
        return Finding(requirement.name, PROBLEM, "is not installed", install)
    if not requirement.specifier.contains(Version(installed), prereleases=True):
        return Finding(requirement.name, PROBLEM, f"{installed}; {requirement.specifier} is needed", install)
    return Finding(requirement.name, OK, installed)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Yield the processor, the GPUs, and which of them DeepSpeed uses."""
    from deepspeed.accelerator import get_accelerator  # decides by the environment on first use

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    memory = psutil.virtual_memory()
    yield Finding(
        "processor",
        OK,
        f"{processor_name()}, {cores} cores, {size_text(memory.available)} of {size_text(memory.total)} free",
    )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        memory = f"{size_text(free)} of {size_text(gpu.total_memory)} free"
        yield Finding(f"GPU {index}", OK, f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}")
    used = get_accelerator().device_name()
    if used == "cpu" and torch.cuda.is_available():
        yield Finding("device in use", WARNING, "cpu, although there is a GPU", "unset DS_ACCELERATOR")
    else:
        yield Finding("device in use", OK, used)


def processor_name() -> str:
    """Return the CPU's name."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.*)$", path.read_text(), re.M) if path.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()


def gpu_kernels() -> Iterator[Finding]:
    """Whether Triton compiles a kernel of the decoder for the GPU, and returns what torch returns."""
    if not torch.cuda.is_available():
        return
    if not has_triton():
        yield Finding("Triton", WARNING, "is not installed: decoding runs in torch's operations", "pip install triton")
        return
    yield triton_kernel("cuda")


def triton_kernel(device: str) -> Finding:
    """Whether a kernel that Triton compiles in another process returns what torch returns."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", KERNEL, device],
            capture_output=True,
            text=True,
            timeout=KERNEL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"compiled no kernel within {KERNEL_TIMEOUT_S} s"
        return Finding("Triton", PROBLEM, detail, "set TRITON_CACHE_DIR to a local, writable directory")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with {done.returncode}"]
        remedy = "install a C compiler and python3-dev, which Triton needs, and the Triton that torch depends on"
        return Finding("Triton", PROBLEM, f"runs no kernel: {last[0][:200]}", remedy)
    seconds = time.monotonic() - start
    return Finding("Triton", OK, f"{installed_version('triton')} compiles and runs a kernel ({seconds:.0f} s)")


def cpu_kernels() -> Iterator[Finding]:
    """Yield the compiler, and the C++ kernels, which are built if they are not yet. Without them torch's operations
    run."""
    try:
        command = compiler_command()
    except OSError as error:
        yield Finding("compiler", WARNING, str(error), "install one (apt install g++), or set CXX to its path")
        return
    first_line = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    yield Finding("compiler", OK, f"{shlex.join(command)}: {first_line.partition(chr(10))[0]}")
    start = time.monotonic()
    try:
        path = built(FLAGS)
        lanes = opened(path).lanes()
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        lines = [line for line in output if "error" in line] or output[-1:]
        detail = f"do not build, so that torch's operations run: {lines[0][:200]}"
        yield Finding("CPU kernels", WARNING, detail, "use GCC 12 or newer: CXX=g++-12")
        return
    seconds = time.monotonic() - start
    how = f"built in {seconds:.0f} s" if seconds > 2 else "built before"
    yield Finding("CPU kernels", OK, f"{instructions(command)}; {lanes} floats at once; {how}; kept in {path.parent}")


def training_dtype() -> Iterator[Finding]:
    """Yield the dtype to train in on this machine's CPU. Figures: `docs/jobs/why_is_it_slow.md`."""
    if torch.cuda.is_available():
        return
    fast = "train in bfloat16 (bf16.enabled; --dtype bfloat16): the CPU has instructions for it, 1.6 to 2 times as fast"
    slow = "train in float32 (--dtype float32): the CPU has no bfloat16 instructions, and takes up to 50 times as long"
    yield Finding("training dtype", OK, fast if has_fast_bfloat16(torch.device("cpu")) else slow)


def instructions(command: list[str]) -> str:
    """Return the instructions that kernels compiled with FLAGS use, by the compiler's macros."""
    dump = subprocess.run(
        [*command, *FLAGS, "-x", "c++", "-dM", "-E", os.devnull], capture_output=True, text=True, check=False
    ).stdout
    return ", ".join(name for macro, name in MACROS.items() if f"#define {macro} " in dump) or "no vector instructions"


def collectives() -> Iterator[Finding]:
    """Yield a sum over two processes: by gloo, and by NCCL where there are two GPUs."""
    yield sum_of_two("gloo")
    if torch.cuda.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        if torch.cuda.device_count() > 1:
            yield sum_of_two("nccl", f"NCCL {version}: ")
        else:
            yield Finding("nccl", OK, f"NCCL {version}; one GPU, nothing to sum")


def sum_of_two(backend: str, prefix: str = "") -> Finding:
    """Whether two processes of this machine sum a number by `backend`."""
    cpu = {"DS_ACCELERATOR": "cpu"} if backend == "gloo" else {}
    ranks = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SUM_OF_TWO, str(rank), backend, f"{folder}/store"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **ranks, **cpu},
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
        try:
            errors = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in processes]
        except subprocess.TimeoutExpired:
            errors = [f"no answer within {COLLECTIVE_TIMEOUT_S} s"]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    failed = [error for error, process in zip(errors, processes, strict=False) if process.returncode]
    if failed:
        last = failed[0].strip().splitlines()[-1:] or ["the process ended"]
        interface = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        return Finding(backend, PROBLEM, f"{prefix}two processes cannot sum: {last[0][:200]}", f"set {interface}=lo")
    return Finding(backend, OK, f"{prefix}two processes sum")


def build_locks() -> Iterator[Finding]:
    """Yield lock files in torch's extension directory that no process holds: who needs the extension waits forever."""
    left = abandoned_locks()
    for path in left:
        detail = f"left by a killed build, {age_of(str(path))}"
        yield Finding("lock", PROBLEM, detail, f"rm {shlex.quote(str(path))}")
    if not left:
        yield Finding("locks of builds", OK, "none is abandoned")


def environment() -> Iterator[Finding]:
    """Yield variables that change how ranks run, and the memory that they share."""
    variables = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)}
    set_here = [f"{name}={value}" for name, value in redacted(variables).items()]
    yield Finding("environment", OK, " ".join(set_here)[:300] or "none of the variables that matter is set")
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        yield Finding(
            "OMP_NUM_THREADS",
            WARNING,
            "is not set: several ranks of a CPU take all its threads each",
            "export OMP_NUM_THREADS=1 for several ranks; nothing for one",
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = psutil.disk_usage(str(shared)).total
        if size < SHARED_MEMORY_BYTES:
            detail = f"{size_text(size)}: ranks of a host share weights there"
            yield Finding("/dev/shm", WARNING, detail, "docker run --shm-size=16g, or --ipc=host")


def size_text(nbytes: int) -> str:
    """Return the bytes as text, with one decimal: in GiB, or in MiB below a tenth of one."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 / 10 else f"{nbytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.argv.insert(1, "doctor")
    runpy.run_module("hybrid", run_name="__main__", alter_sys=True)
