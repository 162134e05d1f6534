"""Saving and copying write the training weights in every mode of the engine; copies share no storage with it."""

import copy
import io
import pickle
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin, with_peft

IDS, MASK = prompts(2, 5, padded=True)


@contextmanager
def as_trained(engine: hybrid.HybridEngine):
    """The engine after a step, in train mode."""
    yield


@contextmanager
def in_eval_mode(engine: hybrid.HybridEngine):
    """The engine in eval mode, after a rollout."""
    engine.eval()
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    yield
    engine.train()


@contextmanager
def in_a_window(engine: hybrid.HybridEngine):
    """Inside `inference()`, between two generations that must be equal."""
    with engine.inference():
        request = {"attention_mask": MASK, "max_new_tokens": 4}
        before = engine.generate(IDS, **request)
        yield
        assert torch.equal(engine.generate(IDS, **request), before)


@contextmanager
def in_a_base_window(engine: hybrid.HybridEngine):
    """Inside a window without adapters, within one with them."""
    with engine.inference(), engine.inference(adapters=False):
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
        yield


PLACES = {"train": as_trained, "eval": in_eval_mode, "window": in_a_window, "base window": in_a_base_window}


def tensors_of(content: object, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor inside a loaded object, by its path."""
    if isinstance(content, torch.Tensor):
        return {name: content}
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list | tuple):
        items = enumerate(content)
    else:
        items = vars(content).items() if hasattr(content, "__dict__") and not isinstance(content, type) else ()
    return {path: tensor for key, value in items for path, tensor in tensors_of(value, f"{name}/{key}").items()}


def saved(engine: hybrid.HybridEngine, folder: Path, stage: int, where: str) -> dict[str, torch.Tensor]:
    """Everything that DeepSpeed's save functions write or return, with the engine in one of PLACES."""
    folder = folder / where.replace(" ", "-")
    with PLACES[where](engine):
        engine.save_checkpoint(str(folder), tag="tag")
        engine.save_16bit_model(str(folder))
        state_dicts = {"module": engine.module_state_dict()}
        if stage == 3:
            state_dicts["whole"] = engine._zero3_consolidated_16bit_state_dict()
        state_dicts = copy.deepcopy(state_dicts)
    dist.barrier()
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.[pb][ti]*")}
    checkpoints = {name: torch.load(path, weights_only=False) for name, path in files.items()}
    assert len(checkpoints) >= 2
    if stage:
        checkpoints["fp32"] = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="tag")
    return tensors_of({**state_dicts, **checkpoints})


def require_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert list(actual) == list(expected), what
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor) and actual[name].dtype == tensor.dtype, f"{what}: {name}"


def check_saving(stage: int, adapter: str, blocks: dict, folder: str) -> None:
    """Every tensor of every file equals that of an engine that stays in train mode."""
    blocks = {**blocks, "zero_optimization": {**settings(stage)["zero_optimization"]}}
    blocks["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    config = settings(stage, dtype=torch.bfloat16, **blocks)
    unswitched, switched = (engine_of(ADAPTERS[adapter](tiny_model("llama")), config) for _ in range(2))
    for engine in (unswitched, switched):
        train_step(engine)
    expected = saved(unswitched, Path(folder) / "unswitched", stage, "train")
    assert adapter != "peft" or any("lora_A" in name for name in expected)
    version = switched.weight_version
    for where in PLACES if adapter == "peft" else ("eval", "window"):
        require_equal(saved(switched, Path(folder) / "ours", stage, where), expected, where)
        assert switched.weight_version == version
    switched.train()
    assert torch.equal(train_step(switched, 1), train_step(unswitched, 1))


@pytest.mark.parametrize(
    ("stage", "adapter", "blocks"),
    [
        pytest.param(0, "peft", {}, marks=pytest.mark.slow),
        pytest.param(1, "none", {}, marks=pytest.mark.slow),
        pytest.param(2, "peft", {"rollout": {"offload_states": True}}, marks=pytest.mark.slow),
        pytest.param(3, "none", {}, marks=pytest.mark.slow),
        (3, "peft", {}),
        pytest.param(3, "chat", {"rollout": {"lora": "unmerged"}}, marks=pytest.mark.slow),
        pytest.param(3, "peft", {"hybrid_engine": {"inference_tp_size": 2}}, marks=pytest.mark.slow),
        pytest.param(
            3,
            "peft",
            {"hybrid_engine": {"inference_tp_size": 2}, "rollout": {"containers": "native"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(3, "peft", {"hybrid_engine": {"pin_parameters": False}}, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_equal_those_of_an_engine_always_in_train_mode(ranks, stage, adapter, blocks, tmp_path):
    ranks.run(check_saving, stage, adapter, blocks, str(tmp_path))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK, use_cache=False).logits.clone()


def pickled(model: nn.Module) -> nn.Module:
    """A model after `torch.save` and `torch.load`."""
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def check_copies(stage: int, adapter: str) -> None:
    """Copies made in eval mode have the training weights and their own forwards, and do not change with the policy."""
    engine = engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(stage))
    train_step(engine)
    expected = copy.deepcopy(engine.module)
    engine.eval()
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    copies = {"a copy": copy.deepcopy(engine.module), "a copy of a copy": copy.deepcopy(copy.deepcopy(engine.module))}
    if stage == 0:  # beyond, DeepSpeed's own attributes of parameters cannot be pickled (0.19.8)
        copies["a pickle"] = pickled(engine.module)
    names = [name for name, _ in engine.module.named_modules()]
    layer = copy.deepcopy(engine.module.get_submodule(next(name for name in names if name.endswith("layers.1"))))
    assert layer.forward.__self__ is layer
    engine.train()
    for step in range(3):
        train_step(engine, step)
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    engine.eval()
    policy_modules = {id(module) for module in engine.module.modules()}
    for name, clone in copies.items():
        require_equal(dict(clone.named_parameters()), dict(expected.named_parameters()), name)
        assert policy_modules.isdisjoint(map(id, clone.modules())), name
        assert all(module.forward.__self__ is module for module in clone.modules()), name
        assert clone.generate.__self__ is clone, name
        if stage < 3:  # a copy of a partitioned model is empty, and DeepSpeed's hooks fail on it
            assert torch.equal(logits(clone), logits(expected)), name
            assert not torch.equal(logits(clone), engine(input_ids=IDS, attention_mask=MASK).logits), (
                "the policy did not train"
            )
            clone.train()
            clone(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize(
    ("stage", "adapter"), slow_but([(3, "peft")], [(0, "none"), (0, "peft"), (2, "peft"), (3, "peft")])
)
def test_a_copy_made_in_eval_mode_is_independent(ranks, stage, adapter):
    ranks.run(check_copies, stage, adapter)


def check_saving_in_a_window_raises(blocks: dict, adapters: bool | None, folder: str) -> None:
    """Saving or copying the snapshot's weights raises and changes nothing; after the window it works."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(3, **blocks))
    module = engine.module
    attention = module.base_model.model.model.layers[1].self_attn
    calls = {
        "state_dict": lambda: module.state_dict(),
        "state_dict of a part": lambda: attention.state_dict(),
        "the engine's state_dict": lambda: engine.state_dict(),
        "save_pretrained": lambda: module.save_pretrained(folder),
        "merged save_pretrained": lambda: module.base_model.model.save_pretrained(folder),
        "adapters": lambda: peft.get_peft_model_state_dict(module),
        "load_state_dict": lambda: attention.load_state_dict({}, strict=False),
        "deepcopy": lambda: copy.deepcopy(module),
        "deepcopy of a part": lambda: copy.deepcopy(attention),
    }
    if "hybrid_engine" not in blocks:  # a module with DeepSpeed's hooks cannot be pickled
        calls["pickle"] = lambda: pickle.dumps(attention)
    engine.eval()
    with engine.inference(adapters):
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=r"inside `with engine.inference\(\)`"):
                call()
                pytest.fail(name)
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    assert "lora_A" in "".join(peft.get_peft_model_state_dict(module))
    copy.deepcopy(attention)
    engine.train()
    train_step(engine)


@pytest.mark.parametrize(
    ("blocks", "adapters"),
    slow_but(
        [({}, None), ({"hybrid_engine": {"pin_parameters": False}}, False)],
        [
            ({}, None),
            ({}, False),
            ({"hybrid_engine": {"inference_tp_size": 2}, "rollout": {"containers": "native"}}, None),
            ({"hybrid_engine": {"pin_parameters": False}}, False),
        ],
    ),
)
def test_saving_or_copying_the_snapshot_raises(ranks, blocks, adapters, tmp_path):
    ranks.run(check_saving_in_a_window_raises, blocks, adapters, str(tmp_path))


def check_destroyed(stage: int, adapter: str, blocks: dict) -> None:
    """The model of a destroyed engine runs as before initialize; under ZeRO-3 while it is gathered."""
    model = ADAPTERS[adapter](tiny_model("llama"))
    reference = twin(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    engine = engine_of(model, settings(stage, **blocks))
    with engine.inference():
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
        with pytest.raises(
            RuntimeError, match=r"destroy\(\) inside `with engine.inference\(\)`: leave the block first"
        ):
            engine.destroy()
    engine.eval()
    engine.destroy()
    for name, module in model.named_modules():
        assert {"forward", "generate", "padding_idx"} & (set(vars(module)) - attributes[name]) == set(), name
    params = list(model.parameters())
    with GatheredParameters(params, enabled=stage == 3):
        assert torch.equal(logits(model), logits(reference))
        request = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(input_ids=IDS, **request), reference.generate(input_ids=IDS, **request))


@pytest.mark.parametrize(
    ("stage", "adapter", "containers"),
    slow_but([(3, "none", "native")], [(0, "peft", "native"), (2, "none", "fused"), (3, "none", "native")]),
)
def test_the_model_of_a_destroyed_engine_runs_without_it(ranks, stage, adapter, containers):
    blocks = {"hybrid_engine": {"inference_tp_size": 2}, "rollout": {"containers": containers}}
    ranks.run(check_destroyed, stage, adapter, blocks)
