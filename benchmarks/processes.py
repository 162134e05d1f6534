"""Runs commands: with a time limit, so that nothing that they started outlives them, and examples on ranks."""

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.results import ROOT


def run_limited(
    command: list[str], log: Path, limit_s: float, environment: dict[str, str], grace_s: float
) -> int | None:
    """The exit code of a command that runs from the repository's root, with its output in `log`.

    None if it did not end within `limit_s`. It then has `grace_s` to release its locks: a process that is killed while
    it builds one of DeepSpeed's operators leaves a lock for which every later process waits.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        return None
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_example(script: str, flags: list[str], ranks: int, log: Path) -> None:
    """Run a script of `rlhf_examples` on ranks with a thread each, with its output in `log`. Raises CalledProcessError
    if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "-m", script, *flags]
    environment = {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)


def has_package(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None
