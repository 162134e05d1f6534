"""Groups of ranks in threads of one process, which exchange through memory as ranks of one host do."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from hybrid.kernels.host_group import HostGroup, shared_bytes
from hybrid.runtime.parallel import InferenceGroup


def host_groups(size: int) -> list[HostGroup]:
    """A HostGroup for each of `size` ranks."""
    memory = torch.zeros(shared_bytes(size), dtype=torch.uint8)
    groups = []
    for index in range(size):
        planned = InferenceGroup(size, connected=False)
        planned.index = index
        group = HostGroup(planned)
        group.connect(memory, [os.getpid()] * size)
        groups.append(group)
    return groups


def on_every_rank(groups: list[HostGroup], function: Callable) -> list:
    """`function(group)` of each group, in a thread of its own; raises the first rank's error."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(function, group) for group in groups]
        return [future.result() for future in futures]
