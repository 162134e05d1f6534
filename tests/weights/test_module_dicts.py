"""A model's hooks and training modes are changed in one pass, and restored."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hybrid.weights import module_dicts
from hybrid.weights.module_dicts import EngineHooks, ModuleTree
from tests.tiny_models import tiny_model, with_peft


class Calls(list):
    """Names of hooks, in the order in which they ran."""

    def hook(self, module: nn.Module, name: str, pre: bool = False):
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        return register(lambda *args: self.append(name))

    def of(self, module: nn.Module) -> list[str]:
        self.clear()
        module(torch.zeros(1, 2))
        return list(self)


def hooks_of(model: nn.Module, handles: list) -> EngineHooks:
    return EngineHooks(model.modules, lambda: handles)


def test_engine_hooks_are_off_inside_and_restored_in_order():
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Calls()
    engine_hooks = [calls.hook(model[0], "a"), calls.hook(model[0], "b", pre=True), calls.hook(model, "c")]
    other = calls.hook(model[1], "other")
    interleaved = [calls.hook(model[1], "ours, behind")]
    last = calls.hook(model[1], "last")
    before = calls.of(model)
    engine = hooks_of(model, [*engine_hooks, *interleaved])
    tables = [module._forward_hooks for module in model.modules()]
    for _ in range(3):
        with engine.off():
            assert calls.of(model) == ["other", "last"]
            with engine.off():
                assert calls.of(model) == ["other", "last"]
            assert calls.of(model) == ["other", "last"]
        assert calls.of(model) == before
        assert all(module._forward_hooks is table for module, table in zip(model.modules(), tables, strict=True))
    with pytest.raises(KeyError), engine.off():
        raise KeyError
    assert calls.of(model) == before
    other.remove()
    last.remove()
    with engine.off():
        assert calls.of(model) == []
    # A hook added to a table that had only engine hooks is kept by the next block.
    more = calls.hook(model[0], "more")
    with engine.off():
        assert calls.of(model) == ["more"]
    more.remove()
    for handle in (*engine_hooks, *interleaved):
        handle.remove()
    with engine.off():
        pass
    assert calls.of(model) == []


def test_hooks_added_inside_can_be_removed_at_any_time():
    model, calls = nn.Linear(2, 2), Calls()
    engine_hooks = [calls.hook(model, "ours"), calls.hook(model, "ours too")]
    engine = hooks_of(model, engine_hooks)
    with engine.off():
        added, removed = calls.hook(model, "come"), calls.hook(model, "gone")
        assert calls.of(model) == ["come", "gone"]
        removed.remove()
    assert calls.of(model) == ["ours", "ours too", "come"]
    with engine.off():
        assert calls.of(model) == ["come"]
    added.remove()
    assert calls.of(model) == ["ours", "ours too"]
    engine_hooks[0].remove()
    assert calls.of(model) == ["ours too"]
    with engine.off():
        assert calls.of(model) == []
    assert calls.of(model) == ["ours too"]
    engine_hooks[1].remove()
    assert calls.of(model) == []


def test_training_modes_are_restored():
    model = with_peft(tiny_model("llama")).train()
    frozen = model.base_model.model.model.layers[1].mlp
    frozen.eval()
    tree = ModuleTree(model)
    modes = [module.training for module in model.modules()]
    for _ in range(2):
        with pytest.raises(KeyError), tree.evaluating():
            assert not any(module.training for module in model.modules())
            raise KeyError
        assert [module.training for module in model.modules()] == modes
    model.add_module("late", nn.Dropout())
    frozen.gate_proj = nn.Linear(2, 2)
    assert tree.changed()
    assert not tree.changed()
    with tree.evaluating():
        assert tree.modules == list(model.modules())
        assert not model.late.training
        assert not frozen.gate_proj.training
    assert model.late.training


class RecordingTrain(nn.Module):
    """A module whose `train` does more than set a flag."""

    requested_mode = None

    def train(self, mode: bool = True) -> nn.Module:
        self.requested_mode = mode
        return super().train(mode)


def test_an_overridden_train_is_called():
    model = nn.Sequential(nn.Linear(2, 2), RecordingTrain()).train()
    with ModuleTree(model).evaluating():
        assert model[1].requested_mode is False
        assert not model[0].training


def test_modules_are_listed_only_once(monkeypatch):
    """The cost of a window in Python does not grow with the model."""
    model, calls = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))), Calls()
    handles = [calls.hook(module, "ours", pre) for module in model for pre in (True, False)]
    looked = []
    engine, tree = EngineHooks(lambda: looked.append(1) or model.modules(), lambda: handles), ModuleTree(model)
    monkeypatch.setattr(module_dicts, "unhooked", lambda few: (few and pytest.fail("one by one")) or nullcontext())
    monkeypatch.setattr(nn.Module, "train", lambda *_: pytest.fail("a walk over the modules"))
    for _ in range(3):
        with tree.evaluating(), engine.off():
            assert calls.of(model) == []
    assert looked == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.add_module("last", nn.ReLU()),
        lambda model: delattr(model, "2"),
        lambda model: setattr(model[0], "bias", nn.Parameter(torch.zeros(2))),
        lambda model: model[0].register_parameter("bias", None),
        lambda model: model[1].register_parameter("late", nn.Parameter(torch.zeros(2))),
        lambda model: model._modules.update({"0": nn.Linear(2, 2)}),
    ],
)
def test_changed_modules_and_parameters_are_detected(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    tree = ModuleTree(model)
    assert not tree.changed()
    change(model)
    assert tree.changed()
    assert not tree.changed()
