"""Ranks for tests: processes that stay alive between runs, and failures that name the rank and its traceback."""

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid.runtime.extension_lock import remove_abandoned_locks

COLLECTIVE_TIMEOUT_S = 120
START_TIMEOUT_S = 480  # the first start on a machine compiles an operator of DeepSpeed's
FORKED_FROM = "tests.rank_imports"  # what ranks import, imported once: a start then takes 0.1 s, not 6
DEATH_GRACE_S = 0.5  # for a dead process to be noticed after another rank has raised
TAIL_CHARS = 4000
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_context() -> Any:
    """Makes processes for ranks: forked from one that has imported what they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([FORKED_FROM])
    return context


def rank_environment(rank: int, world_size: int, port: int, device: str = "cpu") -> dict[str, str]:
    """Environment variables of a rank for torch.distributed and DeepSpeed.  device: "cpu" or "cuda"."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": device,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def serve(rank: int, world_size: int, port: int, pipe, output: str, device: str) -> None:
    """Main function of a rank: run functions received through `pipe`, send (ok, value or traceback), until None is
    received."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ranks die with the test session
    log = open(output, "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    os.environ.update(rank_environment(rank, world_size, port, device))
    import datetime
    import gc
    import logging
    import warnings

    import deepspeed
    import torch

    warnings.simplefilter("ignore", FutureWarning)  # torch's and transformers' fill the tails of a failure
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.WARNING)
    accelerator = deepspeed.accelerator.get_accelerator()
    assert accelerator.device_name() == device, f"a {accelerator.device_name()} rank; unset DS_ACCELERATOR"
    if device == "cuda":
        accelerator.set_device(rank)
    deepspeed.init_distributed(
        dist_backend="nccl" if device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        verbose=False,
    )
    pipe.send_bytes(pickle.dumps((True, None)))
    folder, variables = os.getcwd(), dict(os.environ)
    while (work := pickle.loads(pipe.recv_bytes())) is not None:
        module, name, args, kwargs = work
        try:
            answer = pickle.dumps((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        os.chdir(folder)  # what a test leaves behind must not reach the next one's processes
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        gc.collect()
        gc.freeze()  # DeepSpeed 0.19.8 never frees engines, and each garbage collection would traverse all of them
        pipe.send_bytes(answer)
    os._exit(0)  # no interpreter shutdown: torch.distributed would wait for the other ranks


class RankPool:
    """`world_size` ranks that run functions together.

    timeout_s: default of a run.  device: of each rank, "cpu" or "cuda" (its own GPU, collectives by NCCL).
    """

    def __init__(self, world_size: int, timeout_s: float = 240, device: str = "cpu"):
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.processes: list = []
        self.pipes: list = []
        self.failed_start: RankFailure | None = None
        self.outputs = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, function: Callable, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; returns the results by rank.

        `function` is a module-level function. Raises RankFailure with the traceback of the rank that failed first;
        the next run starts fresh ranks.
        """
        work = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        try:
            if not self.processes:
                self._start()
            for pipe in self.pipes:
                with contextlib.suppress(BrokenPipeError):  # died between runs: _results raises
                    pipe.send_bytes(work)
            return self._results(timeout_s or self.timeout_s, function.__qualname__)
        except BaseException:
            self.kill()  # also on pytest's timeout: the next run must not read results of this one
            raise

    def _start(self) -> None:
        if self.failed_start is not None:  # hundreds of tests must not each wait for a start that fails
            raise RankFailure("ranks did not start before, and are not started again") from self.failed_start
        remove_abandoned_locks()
        # CUDA cannot be used in a process forked from one that has asked for devices.
        context, port = mp.get_context("spawn") if self.device == "cuda" else rank_context(), free_port()
        for rank in range(self.world_size):
            parent_end, child_end = context.Pipe()
            arguments = (rank, self.world_size, port, child_end, self._output(rank), self.device)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self.processes.append(process)
            self.pipes.append(parent_end)
        try:
            self._results(START_TIMEOUT_S, "start")
        except RankFailure as failure:
            self.failed_start = failure
            raise

    def _output(self, rank: int) -> str:
        return f"{self.outputs.name}/rank{rank}.log"

    def _results(self, timeout_s: float, what: str) -> list[Any]:
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(values) < self.world_size:
            waiting = {self.pipes[rank]: rank for rank in range(self.world_size) if rank not in values}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(f"{what}: ranks {sorted(waiting.values())} did not finish in {timeout_s} s", stacks=True)
            failed = {}
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    ok, value = False, "closed its pipe but is alive"
                (values if ok else failed)[rank] = value
            if failed:
                self._fail("\n".join(f"{what}: rank {rank} {text}" for rank, text in self._causes(failed).items()))
        return [values[rank] for rank in range(self.world_size)]

    def _causes(self, failed: dict[int, str]) -> dict[int, str]:
        """What happened to each rank, deaths first: a dead rank's peers raise too, perhaps before its death is
        noticed."""
        ended = wait([process.sentinel for process in self.processes], timeout=DEATH_GRACE_S)
        for process in self.processes:
            if process.sentinel in ended:
                process.join(5)  # pipes close a moment before the exit code is available
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode is not None}
        died = {rank: f"died with exit code {code}" for rank, code in codes.items()}
        return died | {rank: text for rank, text in failed.items() if rank not in died}

    def _fail(self, text: str, stacks: bool = False) -> None:
        if stacks:
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1)  # for the stack dumps to be written
        tails = [
            f"--- output of rank {rank}, its end\n{Path(self._output(rank)).read_text()[-TAIL_CHARS:]}"
            for rank in range(self.world_size)
            if Path(self._output(rank)).exists()  # a rank may not have started
        ]
        raise RankFailure("\n".join([text, *tails]))

    def kill(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def close(self) -> None:
        """Kill the ranks and remove their output."""
        self.kill()
        self.outputs.cleanup()


def run_script(
    argv: list[str],
    world_size: int,
    timeout_s: float,
    env: dict[str, str] | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> subprocess.CompletedProcess:
    """`argv` (a module with `-m`, or a file, and its arguments) on ranks started by torch.distributed.run.

    Returns the process with its output: finished, or with every rank killed by SIGKILL once `kill_when()` is true.
    Raises RankFailure on a timeout, after killing every rank.
    """
    remove_abandoned_locks()
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}"]
    launch += [f"--master_port={free_port()}", *argv]
    cpu = {key: value for key, value in rank_environment(0, world_size, 0).items() if not key.endswith(RANK_KEYS)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            launch, env={**os.environ, **cpu, **(env or {})}, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline and not (kill_when and kill_when()):
                time.sleep(0.1)
            finished = process.poll() is not None
        finally:
            kill_tree(process)
        output.seek(0)
        text = output.read()
    if not finished and not (kill_when and kill_when()):
        raise RankFailure(f"{argv} did not finish in {timeout_s} s\n{text[-TAIL_CHARS:]}")
    return subprocess.CompletedProcess(launch, process.returncode, text)


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL a process and its descendants, which may have their own sessions."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


RANK_KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torch.distributed.run sets these itself


def pool_of(world_size: int) -> Any:
    """Return a fixture: a module's pool of `world_size` ranks, apart from the session's."""

    @pytest.fixture(scope="module")
    def ranks_of():
        pool = RankPool(world_size)
        yield pool
        pool.close()

    return ranks_of
