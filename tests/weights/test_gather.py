"""Gathering parameters into our own buffers equals GatheredParameters and leaves the model's partitions unchanged."""

import types

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from hybrid.kernels.host_memory import HostMemory
from hybrid.weights.gather import AsyncAllGather, storage_for, whole_bytes, whole_in
from tests.engines import LARGE, CollectiveCount, engine_of, settings, storage_digest
from tests.tiny_models import tiny_model


class Odd(nn.Module):
    """Parameters whose sizes two ranks cannot partition evenly."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(7, 3), (1,), (5,), (2, 3, 5), (64, 64)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((weight * x).sum() for weight in self.weights)


def check_fetch(threshold: int, dtype: torch.dtype) -> None:
    for model in (Odd(), tiny_model("llama")):
        engine = engine_of(model, settings(3, threshold, dtype))
        params = list(engine.module.parameters())
        if threshold == LARGE:
            engine(torch.ones(()) if isinstance(model, Odd) else torch.ones(1, 2, dtype=torch.int64))
        before, status = storage_digest(engine), [param.ds_status for param in params]
        storage = {param: storage_for(param) for param in params}
        assert [memory.nbytes for memory in storage.values()] == [whole_bytes(param) for param in params]
        with CollectiveCount() as collectives:
            fetch = AsyncAllGather(storage)
            fetch.wait()
        available = all(state == ZeroParamStatus.AVAILABLE for state in status)
        assert (collectives.count == 0) == available
        assert fetch.nbytes == (0 if available else sum(param.ds_numel * dtype.itemsize for param in params))
        assert [param.ds_status for param in params] == status
        assert storage_digest(engine) == before
        with deepspeed.zero.GatheredParameters(params):
            for param in params:
                assert torch.equal(whole_in(storage[param], param), param)
        # Parameters that the caller has gathered are read directly.
        with deepspeed.zero.GatheredParameters(params[:2]), CollectiveCount() as collectives:
            second_storage = {param: torch.zeros_like(memory) for param, memory in storage.items()}
            AsyncAllGather(second_storage).wait()
            dist.barrier()
        assert all(torch.equal(whole_in(second_storage[p], p), whole_in(storage[p], p)) for p in params)
        # Memory shared by ranks: partitions written by the other rank are visible.
        host = HostMemory.shared_by(params[0].ds_process_group)
        shared = {param: storage_for(param, host).fill_(0) for param in params}
        host.barrier()
        AsyncAllGather(shared, host).wait()
        assert all(torch.equal(whole_in(shared[p], p), whole_in(storage[p], p)) for p in params)
        assert storage_digest(engine) == before
        host.barrier()
        engine.destroy()


def test_a_fetch_equals_gathered_parameters(ranks):
    for threshold in (0, 50, LARGE):
        ranks.run(check_fetch, threshold, torch.float32)
    ranks.run(check_fetch, 0, torch.bfloat16)


class Partitioned:
    """Stands in for a ZeRO-3 parameter in an AsyncAllGather; counts how often it is hashed."""

    ds_id, ds_status, ds_shape, ds_process_group = 0, ZeroParamStatus.NOT_AVAILABLE, torch.Size([4]), None
    ds_tensor = types.SimpleNamespace(final_location=None)
    shape, dtype = torch.Size([0]), torch.float32
    looked_up = 0

    def __hash__(self) -> int:
        Partitioned.looked_up += 1
        return id(self)

    def element_size(self) -> int:
        return 4


def test_a_fetch_is_linear_in_its_parameters(monkeypatch):
    monkeypatch.setattr(AsyncAllGather, "_bring", lambda self, param: [])
    params = [Partitioned() for _ in range(500)]
    fetch = AsyncAllGather(dict.fromkeys(params))
    assert fetch.nbytes == 500 * 16
    assert fetch.through_deepspeed == []
    assert Partitioned.looked_up < 20 * 500
