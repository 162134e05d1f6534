"""The ranks of a run: starting and ending them, and collectives."""

import logging
import os
import random
import socket
import warnings
from collections.abc import Iterable

import datasets
import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

import hybrid


def start_ranks() -> None:
    """Initialize torch.distributed from the launcher's environment, with little output. A process without a launcher
    is rank 0 of 1.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's calls of renamed torch collectives
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ.update(environment)
    backend = get_accelerator().communication_backend_name()
    hybrid.init_distributed(dist_backend=backend, verbose=False, remove_locks=True)


def barrier() -> None:
    """A barrier over all ranks."""
    dist.barrier()


def end_ranks() -> None:
    """A barrier over all ranks, then destroy the process group."""
    barrier()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed every generator, with the same seed on every rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes."""
    return dist.get_rank() == 0


def device() -> torch.device:
    """This rank's device."""
    return torch.device(get_accelerator().current_device_name())


def over_ranks(values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """A tensor reduced over all ranks, by default summed; the input stays unchanged."""
    values = values.clone()
    dist.all_reduce(values, op=op)
    return values


def sums_over_ranks(sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sums by name, added over all ranks in float64; every rank must pass the same names."""
    names = sorted(sums)
    values = torch.tensor([float(sums[name]) for name in names], dtype=torch.float64, device=device())
    return dict(zip(names, over_ranks(values).tolist(), strict=True))


def gather_objects(value: object) -> list:
    """Every rank's value, in the order of ranks. Every rank takes part."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank_share(items: list) -> list:
    """This rank's items, dealt out round-robin."""
    return items[dist.get_rank() :: dist.get_world_size()]


def interleaved(parts: Iterable[list]) -> list:
    """The inverse of `rank_share`: the ranks' parts in the original order."""
    parts = list(parts)
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]
