"""However weights or adapters are changed, the next rollout uses the current ones."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed import zero
from torch import nn

import hybrid
from tests.engines import CollectiveCount, engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin, with_peft

IDS, MASK = prompts(2, 5, padded=True)
NEW_TOKENS = 6


class Stop(RuntimeError):
    """Raised by a test before, during or after the optimizer's update."""


def stop(*args, **kwargs) -> None:
    raise Stop


def gathered(params, modifier_rank: int | None = None):
    """`GatheredParameters` for partitioned parameters; a null context for others."""
    params = list(params)
    return zero.GatheredParameters(params, modifier_rank) if any(hasattr(p, "ds_id") for p in params) else nullcontext()


def require_current(engine: hybrid.HybridEngine, what: str) -> None:
    """Tokens and logits equal those of Hugging Face's (and PEFT's) own forward with the current weights."""
    with gathered(engine.module.parameters()):
        engine.train()  # DeepSpeed's hooks and the model's own forwards
        reference = unhooked_copy(engine.module)
    expected = reference.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(engine.generate(IDS, attention_mask=MASK, max_new_tokens=NEW_TOKENS), expected), what
    full_mask = torch.cat([MASK, torch.ones_like(expected[:, MASK.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = reference(input_ids=expected, attention_mask=full_mask).logits
    engine.eval()
    actual = engine(input_ids=expected, attention_mask=full_mask, use_cache=False).logits
    engine.train()
    torch.testing.assert_close(
        actual[full_mask.bool()], logits[full_mask.bool()], atol=2e-4, rtol=1e-4, msg=lambda m: f"{what}: {m}"
    )


def unhooked_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode, without DeepSpeed's hooks."""
    clone = copy.deepcopy(model)
    for module in clone.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return clone.eval()


def check_step_that_raises(stage: int, adapter: str, folder: str) -> None:
    """An update that was applied makes a new weight version, also if the step raised during or after it."""
    engine = engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(stage, gradient_accumulation_steps=2))
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)

    def raises(ranks: tuple[int, ...]) -> None:
        version = engine.weight_version
        train_step(engine)
        assert engine.weight_version == version, "an accumulating step made a new version"
        ids = prompts(2, 9, padded=False, seed=dist.get_rank())[0]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        with pytest.raises(Stop) if dist.get_rank() in ranks else nullcontext():
            engine.step()
        assert engine.weight_version == version + 1
        engine.micro_steps = 0  # DeepSpeed does not count a step that raised
        require_current(engine, f"raised on {ranks}")

    engine.lr_scheduler = type("Scheduler", (), {"step": stop})()  # raises after the update
    raises((0, 1))
    engine.lr_scheduler = engine.lr_scheduler if dist.get_rank() == 0 else None
    raises((0,))
    engine.lr_scheduler = None
    hook = engine.basic_optimizer.register_step_post_hook(stop)  # raises during the update
    raises((0, 1))
    hook.remove()
    if stage in (0, 3):  # stages whose step runs no collective after the hook, where the other rank would hang
        optimizer = engine.basic_optimizer
        if dist.get_rank() == 1:  # raises before the update, which the other rank applies
            hook = optimizer.register_step_pre_hook(stop)
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
        raises((1,))


@pytest.mark.parametrize(
    ("stage", "adapter"), slow_but([(3, "peft")], [(0, "peft"), (2, "peft"), (3, "none"), (3, "peft")])
)
def test_rollouts_use_the_weights_of_a_step_that_applied_and_then_raised(ranks, stage, adapter, tmp_path):
    ranks.run(check_step_that_raises, stage, adapter, str(tmp_path))


def check_optimizers_own_step(stage: int) -> None:
    """`optimizer.step()`, called without the engine, makes a new version."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(stage))
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    ids = prompts(2, 9, padded=False, seed=dist.get_rank())[0]
    version = engine.weight_version
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.optimizer.step()
    assert engine.weight_version > version
    require_current(engine, "optimizer.step()")


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_rollouts_use_the_weights_of_optimizer_step(ranks, stage):
    ranks.run(check_optimizers_own_step, stage)


class WithScale(nn.Module):
    """A layer with an additional scalar, of which the second rank holds no partition."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) * self.scale


def double(params) -> None:
    """Write through `.data`, which does not increment torch's version counter."""
    for param in params:
        param.data.mul_(2.0)


def write_on_rank_0(params, write: Callable = double) -> None:
    params = list(params)
    partitioned = any(hasattr(param, "ds_id") for param in params)
    with gathered(params, modifier_rank=0):
        if dist.get_rank() == 0 or not partitioned:
            write(params)


def check_written(stage: int, adapter: str, blocks: dict) -> None:
    model = ADAPTERS[adapter](tiny_model("llama"))
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    layer.mlp.down_proj = WithScale(layer.mlp.down_proj)
    reference = engine_of(twin(model), settings(stage))
    engine = engine_of(model, settings(stage, **blocks))
    params = dict(engine.module.named_parameters())
    norm, scale = (next(param for name, param in params.items() if end in name) for end in ("norm.weight", "scale"))

    def sync(alpha: float) -> None:
        """TRL's reference sync (1.16): parameters of two models in one `GatheredParameters` block."""
        both = list(reference.module.parameters()) + list(engine.module.parameters())

        def mix(params) -> None:
            half = len(params) // 2
            for target, source in zip(params[half:], params[:half], strict=True):
                target.data.mul_(1.0 - alpha).add_(source.data, alpha=alpha)

        write_on_rank_0(both, mix)

    writes = {
        "a norm": lambda: write_on_rank_0([norm]),
        "a scalar that one rank has no partition of": lambda: write_on_rank_0([scale]),
        "everything": lambda: write_on_rank_0(params.values(), lambda params: [p.data.mul_(0.9) for p in params]),
        "a reference's sync": lambda: sync(0.6),
    }
    if stage < 3:
        row = params[next(name for name in params if name.endswith("embed_tokens.weight"))]
        writes["a row, by torch"] = lambda: torch.no_grad()(lambda: row[int(IDS[0, 1])].mul_(3.0))()
        state = {name: value * 1.1 for name, value in engine.module.state_dict().items()}
        writes["load_state_dict"] = lambda: engine.module.load_state_dict(state)
    require_current(engine, "at first")
    for what, write in writes.items():
        version = engine.weight_version
        write()
        require_current(engine, what)
        assert engine.weight_version > version, what
    version = engine.weight_version
    with gathered(params.values()), CollectiveCount() as collectives:
        assert engine.weight_version == version
    with CollectiveCount() as collectives, engine.inference():
        assert engine.weight_version == version, "reading made a new version"
    assert collectives.count == 0 or engine.in_step


@pytest.mark.parametrize(
    ("stage", "adapter", "blocks"),
    [
        pytest.param(2, "none", {}, marks=pytest.mark.slow),
        (3, "peft", {}),
        pytest.param(0, "peft", {}, marks=pytest.mark.slow),
        pytest.param(3, "none", {}, marks=pytest.mark.slow),
        pytest.param(3, "peft", {"hybrid_engine": {"inference_tp_size": 2}}, marks=pytest.mark.slow),
    ],
)
def test_rollouts_use_weights_written_outside_the_engine(ranks, stage, adapter, blocks):
    ranks.run(check_written, stage, adapter, blocks)


def lora(**changes) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 9, "init_lora_weights": False, "target_modules": ["q_proj"], **changes}
    )


def add_second(model: nn.Module, folder: str) -> None:
    torch.manual_seed(5)
    model.add_adapter("second", lora(target_modules=["q_proj", "down_proj", "lm_head"]))
    model.set_adapter("second")


def replace_second(model: nn.Module, folder: str) -> None:
    torch.manual_seed(6)
    model.delete_adapter("second")
    model.add_adapter("second", lora(r=5))
    model.set_adapter("second")


def change_factor(model: nn.Module, folder: str) -> None:
    torch.manual_seed(7)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn.q_proj"))
    layer.lora_A["second"] = nn.Linear(32, 5, bias=False)


def delete_second(model: nn.Module, folder: str) -> None:
    model.set_adapter("default")
    model.delete_adapter("second")


def load_third(model: nn.Module, folder: str) -> None:
    model.load_adapter(folder, "third")
    model.set_adapter("third")


def unload(model: nn.Module, folder: str) -> None:
    model.base_model.unload()


def add_to_the_plain_model(model: nn.Module, folder: str) -> None:
    torch.manual_seed(8)
    peft.inject_adapter_in_model(lora(target_modules=["v_proj", "up_proj"]), model.base_model.model, "fourth")


OPERATIONS = (
    add_second,
    replace_second,
    change_factor,
    delete_second,
    load_third,
    unload,
    add_to_the_plain_model,
)


def check_adapters_change(stage: int, blocks: dict, in_eval: bool, folder: str) -> None:
    """After adapters are added, removed or changed, tokens and logits equal PEFT's after the same operations."""
    if dist.get_rank() == 0:
        torch.manual_seed(9)
        peft.get_peft_model(tiny_model("llama"), lora(target_modules=["k_proj", "gate_proj"])).save_pretrained(folder)
    dist.barrier()
    model = with_peft(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, settings(stage, **blocks))
    request = {"attention_mask": MASK, "max_new_tokens": NEW_TOKENS}
    versions = []
    for operation in (lambda *args: None, *OPERATIONS):
        name = getattr(operation, "__name__", "")
        engine.eval() if in_eval else engine.train()
        for module in (engine.module, reference):
            operation(module, folder)
        reference.eval()
        version = engine.weight_version
        expected = reference.generate(input_ids=IDS, do_sample=False, **request)
        assert torch.equal(engine.generate(IDS, **request), expected), name
        with torch.no_grad():
            logits = reference(input_ids=expected).logits
        engine.eval()
        actual = engine.module(input_ids=expected, use_cache=False).logits
        torch.testing.assert_close(actual, logits, atol=2e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        versions.append(version)
        assert engine.weight_version == version, name
        with CollectiveCount() as collectives:
            engine.generate(IDS, **request)
        assert collectives.count == 0 or engine.in_step, name
    assert versions == sorted(set(versions)), "an operation made no new version"


@pytest.mark.parametrize(
    ("stage", "blocks", "in_eval"),
    [
        pytest.param(0, {}, True, marks=pytest.mark.slow),
        pytest.param(3, {}, True, marks=pytest.mark.slow),
        (3, {}, False),
        pytest.param(3, {"rollout": {"lora": "unmerged"}}, True, marks=pytest.mark.slow),
        pytest.param(3, {"hybrid_engine": {"pin_parameters": False}}, False, marks=pytest.mark.slow),
        pytest.param(3, {"hybrid_engine": {"inference_tp_size": 2}}, True, marks=pytest.mark.slow),
    ],
)
def test_rollouts_use_adapters_added_removed_or_changed(ranks, stage, blocks, in_eval, tmp_path):
    ranks.run(check_adapters_change, stage, blocks, in_eval, str(tmp_path))


BIASED = {"lora_bias": {"lora_bias": True}, "lora_only": {"bias": "lora_only"}, "all": {"bias": "all"}}


def check_adapter_without_bias(bias: str, mode: str, inference_tp_size: int) -> None:
    """From an adapter with a bias to adapters without one and back: tokens and logits are PEFT's after each switch and
    step. `second` adapts modules of the first and others."""
    model = with_peft(tiny_model("opt"), target_modules=["fc1", "fc2", "q_proj", "v_proj"], **BIASED[bias])
    model.add_adapter("second", lora(target_modules=["fc1", "q_proj", "k_proj"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name and name.endswith("bias"):
                param.normal_()
    model.set_adapter("default")
    blocks = {"hybrid_engine": {"inference_tp_size": inference_tp_size}, "rollout": {"lora": mode}}
    engine = engine_of(model, settings(3, **blocks))
    require_current(engine, "at first")
    for step in range(2):
        biases = [param.clone() for param in trained_biases(model)]
        assert biases, "no bias is trained"
        train_step(engine, step)
        assert any(not torch.equal(*pair) for pair in zip(biases, trained_biases(model), strict=True))
        for active in (["second"], ["default"], ["second", "default"], ["second"], ["default"]):
            model.base_model.set_adapter(active)
            require_current(engine, f"{active} after step {step}")
        with model.disable_adapter():
            require_current(engine, f"no adapter after step {step}")


def trained_biases(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of the biases that require gradients."""
    return [
        param.ds_tensor for name, param in model.named_parameters() if name.endswith("bias") and param.requires_grad
    ]


@pytest.mark.parametrize(
    ("bias", "mode", "inference_tp_size"),
    slow_but(
        [("lora_bias", "merged", 1), ("lora_bias", "unmerged", 1), ("lora_only", "unmerged", 1)],
        itertools.product(BIASED, ["merged", "unmerged"], [1, 2]),
    ),
)
def test_no_bias_stays_of_an_adapter_that_is_not_active(ranks, bias, mode, inference_tp_size):
    ranks.run(check_adapter_without_bias, bias, mode, inference_tp_size)


def check_unmergeable() -> None:
    """With an adapter that cannot be merged the model's own modules run, until it is removed."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(3, rollout={"containers": "fused"}))
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    wrapped = engine.module.base_model.model.model.layers[0].self_attn
    own = wrapped.q_proj
    wrapped.q_proj = peft.get_peft_model(
        tiny_model("llama"), peft.LoHaConfig(target_modules=["q_proj"], r=2)
    ).get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    assert {row["container"] for row in engine.coverage()} == {"native"}
    wrapped.q_proj = own
    require_current(engine, "as it was")
    assert {row["container"] for row in engine.coverage()} == {"fused"}
    train_step(engine)


@pytest.mark.slow
def test_adding_an_adapter_that_cannot_be_merged_runs_natively(ranks):
    ranks.run(check_unmergeable)
