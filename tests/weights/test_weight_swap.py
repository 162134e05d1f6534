"""After a window, hooks, flags and the model's own parameters are restored."""

import pytest
import torch
from torch import nn

from hybrid.decoders.fused_model import FusedModel
from hybrid.execution.containers import NativeContainer
from hybrid.execution.executor import Executor
from hybrid.models.model_info import ModelInfo
from hybrid.models.structure import read_structure
from hybrid.runtime.profiling import Profiler
from hybrid.weights.model_weights import read_weights
from hybrid.weights.module_dicts import unhooked
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.weight_swap import InferenceWindow, disabled
from tests.tiny_models import prompts, tiny_model, with_chat_lora, with_peft


def test_unhooked_restores_hooks_in_order_and_keeps_others():
    module, calls = nn.Linear(2, 2), []

    def hook(name):
        return module.register_forward_hook(lambda *args: calls.append(name))

    first, engine_hook, middle, second_engine_hook, last = map(hook, ("first", "ours", "middle", "also ours", "last"))
    order = list(module._forward_hooks)
    with unhooked([engine_hook, second_engine_hook]):
        module(torch.zeros(1, 2))
        assert calls == ["first", "middle", "last"]
        middle.remove()
        new = hook("new")
    assert list(module._forward_hooks) == [key for key in order if key != middle.id] + [new.id]
    with unhooked([engine_hook]), unhooked([engine_hook, first, last]), unhooked([]):
        assert list(module._forward_hooks) == [second_engine_hook.id, new.id]
    assert list(module._forward_hooks) == [first.id, engine_hook.id, second_engine_hook.id, last.id, new.id]
    with pytest.raises(KeyError), unhooked([engine_hook]):
        raise KeyError
    assert engine_hook.id in module._forward_hooks


def test_disabling_adapters_keeps_requires_grad():
    model = with_peft(tiny_model("llama"), modules_to_save=["lm_head"])
    learns = [parameter.requires_grad for parameter in model.parameters()]
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    ids = prompts(2, 5, padded=False)[0]
    adapted = model(ids).logits
    with disabled(layers):
        assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits)
        assert [parameter.requires_grad for parameter in model.parameters()] == learns
    assert torch.equal(model(ids).logits, adapted)


def window_of(model: nn.Module) -> InferenceWindow:
    snapshot = Snapshot(read_weights(ModelInfo(model), layers_per_group=2))
    return InferenceWindow(model, snapshot, Profiler("", lambda: None), swaps=True, merges=True)


@pytest.mark.parametrize("make", [with_peft, with_chat_lora])
def test_a_window_restores_modules_and_parameters(make):
    model = make(tiny_model("llama")).eval()
    tree = [(name, id(module)) for name, module in model.named_modules()]
    parameters = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    ids = prompts(2, 5, padded=False)[0]
    expected, base = model(ids).logits.detach(), tiny_model("llama")(ids).logits
    window = window_of(model)
    with pytest.raises(RuntimeError, match="in the middle"), window.opened():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-3, rtol=1e-4)
        with window.opened(adapters=False):
            assert torch.equal(model(ids).logits, base)
            with window.opened():  # None: as in the outer window
                assert torch.equal(model(ids).logits, base)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-3, rtol=1e-4)
        assert [(name, id(module)) for name, module in model.named_modules()] == tree
        raise RuntimeError("in the middle")
    assert not window.is_open
    assert [(name, id(module)) for name, module in model.named_modules()] == tree
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == parameters
    assert torch.equal(model(ids).logits, expected)


def test_a_container_restores_a_forward_that_was_already_replaced():
    model = tiny_model("llama").eval()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate does
    replaced = model.forward
    part = next(iter(read_structure(model).layers))
    window = window_of(model)
    calls = Executor(window, FusedModel(ModelInfo(model), window.snapshot))
    container = NativeContainer(type(part)("", model, "model"), calls)
    container.install()
    assert model.forward is not replaced
    ids = prompts(1, 4, padded=False)[0]
    assert not model(ids).logits.requires_grad
    container.uninstall()
    container.uninstall()
    assert model.forward is replaced
    assert model(ids).logits.requires_grad
