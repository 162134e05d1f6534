"""The ranks of a benchmark: how they start, print and read the clock together."""

import logging
import os
import socket
import time
import warnings

import deepspeed
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

import hybrid


def start_ranks() -> None:
    """Join the ranks of a launcher, without the libraries' warnings; without a launcher this process is the only
    rank."""
    quiet()
    if "RANK" not in os.environ:
        single_rank_environment()
    backend = get_accelerator().communication_backend_name()
    hybrid.init_distributed(dist_backend=backend, verbose=False, remove_locks=True)


def quiet() -> None:
    """Turn off the libraries' warnings, which would appear between the tables."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    deepspeed.utils.logger.setLevel(logging.WARNING)


def single_rank_environment() -> None:
    """Set a launcher's environment variables for this process as the only rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def free_port() -> int:
    """A port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def print_on_rank_0(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def now() -> float:
    """The time after every rank and its device have reached this call."""
    get_accelerator().synchronize()
    dist.barrier()
    return time.perf_counter()
