"""The reward `code`: 1 for a completion whose Python program passes the record's unit tests, else 0.

`--reward code`, or `--reward code:my_limits.yaml` with the settings of `CodeSettings`. The tests are the column
`tests`: Python text, or a list of texts, such as asserts. The program is the completion's last fenced block, or all of
it.

Each program runs in a process of its own with limits of time, memory, processes and file size, in a temporary
directory, without this process's environment, and, where Linux allows user namespaces, without a network. It runs as
this user and reads this user's files: the limits are for mistakes. Against attacks use a container, or a
SandboxFusion server (`url`).
"""

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rlhf_examples.common.http_client import fetch
from rlhf_examples.common.parsing import ScriptArguments, Within, arg, arguments_of, read_yaml
from rlhf_examples.rewards import Reward, checked_content, required

SANDBOX = Path(__file__).parent / "common" / "sandbox.py"
FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
FILE_BYTES = 16 << 20  # maximum size of a file that a program writes
REQUESTS = 32  # to a server at once


@dataclass
class CodeSettings(ScriptArguments):
    """The limits of the programs, or the server that runs them."""

    timeout_s: Annotated[float, Within(0.1)] = arg(10.0, "seconds of a program and its tests, with the start of Python")
    memory_mb: Annotated[int, Within(64)] = arg(1024, "maximum address space of a process, MiB")
    processes: Annotated[int, Within(1)] = arg(32, "maximum processes and threads of a program")
    workers: Annotated[int, Within(1)] = arg(2, "programs that run at once on a rank")
    url: str = arg("", "address of a SandboxFusion server, which runs the programs instead; empty: this machine")


def load(file: str = "") -> Reward:
    """The reward with the settings of a YAML file; empty: the defaults.

    Raises ValueError for wrong settings, or if no program can run on this machine. Warns on rank 0 if programs here
    are not cut off from the network.
    """
    settings = arguments_of(CodeSettings, read_yaml(Path(file)) if file else {})
    if settings.url:
        return partial(on_server, settings)
    problem = problem_of(settings)
    if problem and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"reward: code given, and programs are not cut off from the network here ({problem}); allow user "
            "namespaces, use a container without a network, or set the url of a SandboxFusion server",
            stacklevel=2,
        )
    return partial(on_this_machine, settings)


def problem_of(settings: CodeSettings) -> str:
    """Why programs on this machine are not cut off from the network; empty if they are.

    Raises ValueError if not even an empty program runs.
    """
    problem = run_program("", "", settings)
    if problem is None:
        raise ValueError(
            f"reward: code given, and an empty program failed or took longer than {settings.timeout_s} s with "
            f"memory_mb: {settings.memory_mb}; give more, or the url of a SandboxFusion server"
        )
    return problem


def on_this_machine(
    settings: CodeSettings, prompts: list[str], completions: list[str], /, tests: list | None = None, **columns: list
) -> list[float]:
    """1 for each completion whose program passes its tests, else 0; `settings.workers` run at once."""
    texts = map(test_text, required("tests", tests))

    def score(completion: str, text: str) -> float:
        return float(run_program(program_of(completion), text, settings) is not None)

    with ThreadPoolExecutor(settings.workers) as pool:
        return list(pool.map(score, completions, texts))


def program_of(completion: str) -> str:
    """The last fenced block of a completion; without one, all of it."""
    blocks = FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def test_text(tests: Any) -> str:
    """A record's tests as one text. Raises ValueError unless they are a text or a list of texts."""
    parts = [tests] if isinstance(tests, str) else tests
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"column tests: {tests!r} given; it must be Python text, or a list of such texts")
    return "\n".join(parts)


def run_program(program: str, tests: str, settings: CodeSettings) -> str | None:
    """Run a program and its tests in the sandbox; None if they fail, or are stopped by a limit.

    Returns why the program was not cut off from the network, empty if it was.
    """
    token = secrets.token_hex(16)  # a program that only exits does not know it
    job = {
        "solution": program,
        "tests": tests,
        "token": token,
        "cpu_s": int(settings.timeout_s) + 1,
        "memory_bytes": settings.memory_mb << 20,
        "file_bytes": FILE_BYTES,
        "processes": settings.processes,
    }
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as report,
    ):
        given.write(json.dumps(job).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(SANDBOX)],
            stdin=given,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.wait(settings.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # processes that the program has started, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report.seek(0)
        text = report.read(1024).decode(errors="replace")
    return text.removeprefix(token) if text.startswith(token) else None


async def on_server(
    settings: CodeSettings, prompts: list[str], completions: list[str], /, tests: list | None = None, **columns: list
) -> list[float | None]:
    """`on_this_machine`, by a server with SandboxFusion's `POST /run_code`; None where its sandbox failed."""
    free = asyncio.Semaphore(REQUESTS)

    async def score(completion: str, text: str) -> float | None:
        token = secrets.token_hex(16)
        code = f"{program_of(completion)}\n\n{text}\n\nprint({token!r})\n"
        body = {
            "code": code,
            "language": "python",
            "run_timeout": settings.timeout_s,
            "memory_limit_MB": settings.memory_mb,
        }
        address = f"{settings.url.rstrip('/')}/run_code"
        async with free:
            content = checked_content(address, await fetch(address, json.dumps(body).encode()))
        try:
            answer = json.loads(content)
            output = str((answer["run_result"] or {}).get("stdout"))
            return None if answer["status"] == "SandboxError" else float(token in output.splitlines())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{address} must return SandboxFusion's answer; it returned {content[:200]!r}") from error

    texts = map(test_text, required("tests", tests))
    return await asyncio.gather(*map(score, completions, texts))
