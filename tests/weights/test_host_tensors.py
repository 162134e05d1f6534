"""Tensors moved to the host and back: the same objects over the same shared memory; what others share stays."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid.weights import host_tensors
from hybrid.weights.host_tensors import HostTensors, tensors_in

CPU = torch.device("cpu")


def flat_and_views() -> tuple[torch.Tensor, list[nn.Parameter]]:
    """A flat buffer and parameters that are views of it, as ZeRO makes them."""
    flat = torch.arange(12.0)
    params = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    for index, param in enumerate(params):
        param.data = flat.narrow(0, 6 * index, 6).view(2, 3)
    return flat, params


def storages_of(tensors: list[torch.Tensor]) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def test_views_stay_views_and_the_device_memory_is_freed():
    flat, params = flat_and_views()
    strided = torch.randn(4, 6).t()[1:]  # a view of a tensor that nothing else refers to
    content = strided.clone()
    before, held = storages_of([flat, strided]), HostTensors(CPU)
    assert held.move(tensors_in([flat, *params, strided])) == 0
    assert all(ref.expired() for ref in before)
    assert held.nbytes() == flat.nbytes + 4 * 6 * 4
    flat[0] = 7.0  # on the host too they share memory, and what is written there is kept
    assert params[0][0, 0] == 7.0
    on_host = storages_of([flat, strided])
    held.move_back()
    assert held.nbytes() == 0 and all(ref.expired() for ref in on_host)
    with torch.no_grad():
        params[1] += 1
    assert flat.tolist() == [7.0, *range(1, 6), *range(7, 13)]
    assert torch.equal(strided, content) and strided.stride() == (1, 6)


def test_memory_that_other_tensors_share_stays():
    flat, params = flat_and_views()
    others = flat[3:5]
    address, held = flat.data_ptr(), HostTensors(CPU)
    assert held.move([flat, *params]) == flat.nbytes
    assert flat.data_ptr() == address and held.nbytes() == 0
    del others
    assert held.move([flat, *params]) == 0
    held.move_back()


def test_a_graph_that_waits_for_its_backward_gives_the_same_gradients():
    layer, held = nn.Linear(3, 3), HostTensors(CPU)
    loss = layer(layer(torch.ones(2, 3))).square().sum()  # keeps a transposed view of the weight
    expected = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    assert held.move(tensors_in(layer)) == layer.weight.nbytes
    held.move_back()
    loss.backward()
    assert all(map(torch.equal, [layer.weight.grad, layer.bias.grad], expected))


def test_version_counters_and_hooks_stay():
    layer, held, calls = nn.Linear(3, 3), HostTensors(CPU), []
    layer.weight.register_post_accumulate_grad_hook(lambda param: calls.append(param is layer.weight))
    versions = [param._version for param in layer.parameters()]
    held.move(tensors_in(layer))
    held.move_back()
    assert versions == [param._version for param in layer.parameters()]
    layer(torch.ones(2, 3)).sum().backward()
    assert calls == [True]


def test_a_tensor_with_other_memory_keeps_it():
    param, held = nn.Parameter(torch.ones(3)), HostTensors(CPU)
    held.move([param])
    param.data = replaced = torch.zeros(3)
    held.move_back()
    assert param.data_ptr() == replaced.data_ptr()


def test_scratch_memory_keeps_no_content():
    buffer, weight, held = torch.ones(1000), torch.ones(10), HostTensors(CPU)
    with patch.object(host_tensors, "moved_storage", wraps=host_tensors.moved_storage) as moved:
        held.move([buffer, weight], scratch=[buffer])
        assert held.nbytes() == weight.nbytes
        held.move_back()
    assert [call.args[2] for call in moved.call_args_list] == [True, False, False, True]
    assert buffer.shape == (1000,) and torch.equal(weight, torch.ones(10))


class Full(MemoryError):
    """Stands for a host or a device without free memory."""


def failing_at(number: int):
    """`moved_storage`, which fails at its call `number`, counted from 0."""
    own, calls = host_tensors.moved_storage, []

    def moved_storage(*args) -> torch.UntypedStorage:
        calls.append(args)
        if len(calls) == number + 1:
            raise Full
        return own(*args)

    return patch.object(host_tensors, "moved_storage", moved_storage)


@pytest.mark.parametrize("number", range(3))
def test_a_failed_move_is_undone(number):
    tensors, held = [torch.full((4,), float(index)) for index in range(3)], HostTensors(CPU)
    with failing_at(number), pytest.raises(Full):
        held.move(tensors)
    assert held.nbytes() == 0 and not held.moved
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("number", range(3))
def test_a_failed_return_goes_on_where_it_stopped(number):
    tensors, held = [torch.full((4,), float(index)) for index in range(3)], HostTensors(CPU)
    held.move(tensors)
    with failing_at(number), pytest.raises(Full):
        held.move_back()
    assert held.nbytes() == (3 - number) * 16
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]
    held.move_back()
    assert held.nbytes() == 0
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]


def test_tensors_of_a_model_and_its_optimizer_are_found():
    layer = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    layer.weight.ds_tensor = nested = torch.ones(2)
    states = [value for state in optimizer.state.values() for value in state.values()]
    expected = [*layer.parameters(), *layer.buffers(), layer.weight.grad, layer.bias.grad, nested, *states]
    assert {id(tensor) for tensor in tensors_in(layer, optimizer)} == set(map(id, expected))


def test_only_tensors_of_the_device_are_moved():
    held = HostTensors(torch.device("meta"))
    assert held.move([torch.ones(3)]) == 0 and not held.moved
