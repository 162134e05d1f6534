"""Merging LoRA: the plain module with merged weights gives the adapted module's outputs."""

import copy
import itertools

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybrid.config import HybridEngineConfig, RolloutConfig, check_settings
from hybrid.models.model_info import ModelInfo
from hybrid.models.modules import ignored_adapters
from hybrid.training.invalid_settings import invalid_for_model
from hybrid.weights.lora import merged_weight, read_adapters
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import SIZES, ChatLoRA, prompts, tiny_model, with_peft

SETTINGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "all biases": {"bias": "all"},
    "lora bias": {"lora_bias": True, "target_modules": ["fc1", "fc2", "q_proj", "v_proj"]},
    "rank pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora embedding": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def shake(model: nn.Module) -> nn.Module:
    """Perturb every adapter parameter, so that no initial value hides a mistake."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits_when_merged(model: nn.Module) -> torch.Tensor:
    """Logits of the model with every adapted module replaced by its plain one with merged weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for adapter in read_adapters(model):
            base = {name: param.detach() for name, param in adapter.sources.items()}
            weights = {**base, **(adapter.merged(base) if adapter.state() else {})}
            for name, tensor in weights.items():
                adapter.plain._parameters[name] = nn.Parameter(tensor.to(torch.float32))
            adapter.parent._modules[adapter.child] = adapter.plain
        return model(prompts(2, 7, padded=False)[0]).logits


def assert_merge_equals(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        expected = model(prompts(2, 7, padded=False)[0]).logits
    # The same sums in another order, of logits that span tens.
    torch.testing.assert_close(logits_when_merged(model), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_merged_weights_match_the_adapted_model(name):
    family = "opt" if name == "lora bias" else "llama"  # a family with biases
    base = tiny_model(family)
    model = shake(with_peft(copy.deepcopy(base), **SETTINGS[name]))
    assert_merge_equals(model)
    ids = prompts(2, 7, padded=False)[0]
    assert (model.eval()(ids).logits - base(ids).logits).abs().max() > 1e-2, "the adapter does nothing"


@pytest.mark.parametrize("dora", [False, True])
def test_fan_in_fan_out_merges(dora):
    assert_merge_equals(shake(with_peft(tiny_model("gpt2"), use_dora=dora, fan_in_fan_out=True)))


def test_lora_on_a_scaled_embedding_merges():
    assert_merge_equals(shake(with_peft(tiny_model("gemma3_text"), target_modules=["embed_tokens", "v_proj"])))


ERNIE = {
    **SIZES,
    "moe_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 1,
}


def check_router_with_parameters_inside() -> None:
    """LoRA on a router's weight, whose module has a child with a parameter of its own: a snapshot copies it too."""
    model = with_peft(tiny_model("ernie4_5_moe", sizes=ERNIE), task_type="CAUSAL_LM").eval()
    assert any("gate.base_layer.moe_statics" in name for name, _ in model.named_parameters())
    reference = copy.deepcopy(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 7, padded=False, seed=dist.get_rank())
    expected = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False), expected)
    scores = engine.score(expected, torch.ones_like(expected))
    with torch.no_grad():
        logps = reference(expected).logits.log_softmax(-1)[:, :-1].gather(2, expected[:, 1:, None])[..., 0]
    torch.testing.assert_close(scores.per_token_logps, logps, atol=2e-4, rtol=1e-4)  # float32 sums in another order


def test_lora_on_a_router_with_parameters_inside(ranks):
    ranks.run(check_router_with_parameters_inside)


def test_lora_on_expert_parameters_merges():
    model = tiny_model("mixtral")
    names = [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert names, "the experts' parameters were renamed"
    parameters = sorted({".".join(name.split(".")[-2:]) for name in names})
    adapted = shake(with_peft(model, target_modules=["q_proj"], target_parameters=parameters))
    kinds = {type(adapter).__name__ for adapter in read_adapters(adapted)}
    assert kinds == {"PeftLinear", "PeftExperts"}
    assert_merge_equals(adapted)


@pytest.mark.parametrize("dora", slow_but([True], [False, True]))
def test_several_active_adapters_merge(dora):
    model = with_peft(tiny_model("llama"), use_dora=dora)
    for name, rank in (("second", 2), ("third", 6)):
        lora = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, use_dora=dora)
        model.add_adapter(name, lora)
    shake(model)
    outputs = []
    for active in (["default"], ["second"], ["default", "third"], ["third", "second", "default"]):
        model.base_model.set_adapter(active)
        assert_merge_equals(model)
        outputs.append(logits_when_merged(model))
    assert all((a - b).abs().max() > 1e-2 for a, b in itertools.pairwise(outputs))
    with model.disable_adapter():
        assert_merge_equals(model)
        assert all(adapter.state() == () for adapter in read_adapters(model))


def test_an_adapter_merged_by_the_user_is_not_merged_twice():
    model = shake(with_peft(tiny_model("llama")))
    model.merge_adapter()
    assert_merge_equals(model)


def test_deepspeed_chats_lora_merges():
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": ChatLoRA(nn.Linear(6, 4))})
    (adapter,) = read_adapters(model)
    x = torch.randn(3, 6)
    weights = adapter.merged({name: param.detach() for name, param in adapter.sources.items()})
    torch.testing.assert_close(nn.functional.linear(x, weights["weight"], model["layer"].bias), model["layer"](x))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]), r"layers\.0\.self_attn\.v_proj.*cannot be"),
        (peft.LoHaConfig(target_modules=["q_proj"], r=2), r"layers\.0\.self_attn\.q_proj.*cannot be merged"),
        (
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
            r"layers\.0\.self_attn\.q_proj.*ALoraLinearVariant",
        ),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING and cannot be merged"),
    ],
)
def test_adapters_that_cannot_be_merged_raise(config, message):
    with pytest.raises(NotImplementedError, match=message):
        read_adapters(peft.get_peft_model(tiny_model("llama"), config))


def test_merging_rounds_to_bf16_once():
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    a, b = torch.randn(4, 32).bfloat16(), torch.randn(64, 4).bfloat16()
    exact = weight.double() + 0.5 * (b.double() @ a.double())
    actual = merged_weight(weight, a, b, 0.5).bfloat16()
    assert torch.equal(actual, exact.bfloat16())


def test_adapters_that_the_model_ignores_are_refused():
    """Mamba's mixers read the weight of `dt_proj`: its adapter changes nothing in a forward, and a merge would."""
    settings = HybridEngineConfig(), RolloutConfig()
    model = with_peft(tiny_model("mamba", sizes={**SIZES, "state_size": 4}), target_modules=["dt_proj"]).eval()
    ids, _ = prompts(2, 5, padded=False)
    with torch.no_grad(), model.disable_adapter():
        expected = model(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert [name.rpartition(".")[2] for name in ignored_adapters(model)] == ["dt_proj"] * 3
    with pytest.raises(
        ValueError, match=r"target_modules: .*dt_proj.*MambaForCausalLM reads the weights.*exclude_modules"
    ):
        check_settings(invalid_for_model(ModelInfo(model), *settings))
    others = with_peft(tiny_model("mamba", sizes={**SIZES, "state_size": 4}), target_modules=["x_proj"])
    assert not ignored_adapters(others) and not ignored_adapters(with_peft(tiny_model("llama")))
    check_settings(invalid_for_model(ModelInfo(others), *settings))
