"""Memory shared by the ranks of one host; where it cannot be shared, all ranks fall back together."""

import os

import pytest
import torch
import torch.distributed as dist

from hybrid.kernels import host_memory
from hybrid.kernels.host_memory import HostMemory
from tests.engines import engine_of, require_same_rollouts, settings
from tests.marks import slow_but
from tests.tiny_models import tiny_model


def check_writing() -> None:
    rank, files = dist.get_rank(), len(os.listdir("/proc/self/fd"))
    host = HostMemory.shared_by(dist.group.WORLD)
    tensors = [host.empty(numel, dtype) for numel, dtype in ((5, torch.float32), (1 << 20, torch.bfloat16))]
    for tensor in tensors:
        tensor.chunk(2)[rank].fill_(rank + 1)
    host.barrier()
    for tensor in tensors:
        assert [part.unique().tolist() for part in tensor.chunk(2)] == [[1], [2]]
    host.barrier()
    assert len(os.listdir("/proc/self/fd")) == files  # no file stays open


def test_ranks_read_each_others_writes(ranks):
    ranks.run(check_writing)


def check_not_shared(how: str) -> None:
    """One rank is on another host, or cannot open the first one's file: no rank shares, and streaming gives the same
    bits."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if how == "another host":
                patch.setattr(host_memory, "host_key", lambda: ("elsewhere",))
            else:
                patch.setattr(torch, "from_file", raise_permission_error)
        assert HostMemory.shared_by(dist.group.WORLD) is None
        streamed = engine_of(tiny_model("llama"), settings(3, 0, hybrid_engine={"pin_parameters": False}))
        pinned = engine_of(tiny_model("llama"), settings(3, 0))
        require_same_rollouts(pinned, streamed, 37, False, tolerance=0)


def raise_permission_error(*_args, **_kwargs) -> None:
    """torch.from_file without permission to open the file."""
    raise RuntimeError("unable to open file: Permission denied (13)")


@pytest.mark.parametrize("how", slow_but(["another host"], ["another host", "no permission"]))
def test_streaming_without_shared_memory_is_bit_identical(ranks, how):
    ranks.run(check_not_shared, how)
