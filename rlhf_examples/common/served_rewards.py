"""Reward servers that a pipeline starts and ends: one of each on every host, each in its own process."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import httpx2

from rlhf_examples.common.arguments import RewardServerArguments
from rlhf_examples.common.daemon_threads import running
from rlhf_examples.common.http_client import fetch
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.rewards import SERVERS

POLL_S = 0.1  # between checks whether a server has started
START_TIMEOUT_S = 120.0  # limit for starting a server: a reward's imports may take long
STOP_TIMEOUT_S = 10.0  # limit for ending a server, after which it is killed; also for its first response


@contextmanager
def served_rewards(servers: dict[str, RewardServerArguments]) -> Iterator[None]:
    """Inside the block the reward servers run and `server:NAME` is a reward. Every rank takes part.

    servers: settings by name. The first rank of each host starts them; they end with the block, or with that rank's
        process, however it ends. Raises ValueError on every rank if a server does not start.
    """
    processes: list[subprocess.Popen] = []
    previous = os.environ.get(SERVERS)
    try:
        addresses, error = {}, ""
        if servers and os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                addresses = {name: start_server(name, args, processes) for name, args in servers.items()}
            except ValueError as start_error:
                error = str(start_error)
        from_ranks = gather_objects((socket.gethostname(), addresses, error)) if servers else []
        for _, _, error in from_ranks:
            if error:
                raise ValueError(error)
        addresses = {
            name: address
            for host, host_addresses, _ in from_ranks
            if host == socket.gethostname()
            for name, address in host_addresses.items()
        }
        os.environ[SERVERS] = json.dumps(addresses)
        yield
    finally:
        if previous is None:
            os.environ.pop(SERVERS, None)
        else:
            os.environ[SERVERS] = previous
        for process in processes:
            stop_server(process)


def start_server(name: str, args: RewardServerArguments, processes: list[subprocess.Popen]) -> str:
    """Start a server, append its process to `processes`, and return its address once it responds. Raises ValueError
    if it does not start.
    """
    with tempfile.TemporaryDirectory() as directory:
        address_file = Path(directory) / "address"
        flags = asdict(replace(args, parent_pid=os.getpid(), address_file=str(address_file)))
        command = [sys.executable, "-m", "rlhf_examples.reward_server"]
        command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        processes.append(process)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address_file.is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        address = address_file.read_text() if address_file.is_file() else ""
    failure = f"servers.{name}: the server for {args.reward!r} did not start"
    if not address:
        reason = "its process exited" if process.poll() is not None else f"no address after {START_TIMEOUT_S:.0f} s"
        raise ValueError(f"{failure} ({reason})")
    try:
        with running(fetch(address)) as response:
            response.result(STOP_TIMEOUT_S).raise_for_status()
    except FutureTimeoutError as error:
        raise ValueError(f"{failure} ({address}: no response after {STOP_TIMEOUT_S:.0f} s)") from error
    except httpx2.HTTPError as error:
        raise ValueError(f"{failure} ({address}: {error})") from error
    return address


def stop_server(process: subprocess.Popen) -> None:
    """Terminate a process, and kill it if it does not end in time."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
