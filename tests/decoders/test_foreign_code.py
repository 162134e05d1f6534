"""A forward that is not transformers' own runs natively, also one that the self-check cannot tell apart."""

import functools
from types import FunctionType, MethodType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import hybrid
from hybrid.decoders.foreign_code import ForeignForwards
from hybrid.models.model_info import ModelInfo
from tests.decoders.test_fused_model import IDS, REQUEST, SmallEngine
from tests.engines import engine_of, settings
from tests.tiny_models import ADAPTERS, ALL_FAMILIES, prompts, tiny_model, twin


def foreign(model: nn.Module) -> str:
    return ForeignForwards(ModelInfo(model)).first()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_families_forwards_are_known(adapter):
    found = {family: foreign(ADAPTERS[adapter](tiny_model(family))) for family in ALL_FAMILIES}
    assert found == dict.fromkeys(ALL_FAMILIES, "")


def test_known_wrappers_are_known():
    """accelerate's, torch's, gradient checkpointing's, and subclasses that change no forward."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    layer = model.model.layers[0]
    layer.forward = torch.no_grad()(layer.forward)
    accelerate.hooks.add_hook_to_module(model.model.layers[1], accelerate.hooks.ModelHook())
    model.forward = MethodType(accelerate.utils.convert_outputs_to_fp32(model.forward.__func__), model)
    assert foreign(model) == ""
    mine = type("Mine", (LlamaForCausalLM,), {"extra": 1})
    assert foreign(mine(model.config)) == ""


def patched(own, self, x):
    """An MLP's output, negated where a sequence is as long as REQUEST's prompts, which the self-check's are not."""
    return -own(self, x) if x.dim() == 3 and x.shape[1] == IDS.shape[1] else own(self, x)


def on_instance(mlp: nn.Module) -> None:
    mlp.forward = functools.partial(patched, type(mlp).forward, mlp)


def as_method(mlp: nn.Module) -> None:
    own = type(mlp).forward

    @functools.wraps(own)  # looks like the original
    def forward(self, x):
        return patched(own, self, x)

    mlp.forward = MethodType(forward, mlp)


def by_class(mlp: nn.Module) -> None:
    mlp.__class__ = type(
        "LlamaMLP", (type(mlp),), {"forward": lambda self, x: patched(modeling_llama.LlamaMLP.forward, self, x)}
    )


class Patch:
    """A callable object that looks like the original."""

    def __init__(self, mlp: nn.Module):
        functools.update_wrapper(self, type(mlp).forward)
        self.mlp = mlp

    def __call__(self, x):
        return patched(type(self.mlp).forward, self.mlp, x)


def as_object(mlp: nn.Module) -> None:
    object.__setattr__(mlp, "forward", Patch(mlp))


PATCHES = (on_instance, as_method, by_class, as_object)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_for_some_inputs_runs_natively_unless_it_is_trusted(patch):
    models = [tiny_model("llama").eval() for _ in range(3)]
    for model in models:
        patch(model.model.layers[1].mlp)
    engine, trusting, reference = SmallEngine(models[0]), SmallEngine(models[1], trusts_forwards=True), models[2]
    with pytest.warns(UserWarning, match=r"the forward of model\.layers\.1\.mlp is tests\.decoders\..*trust_forward"):
        actual = engine.generate(IDS, **REQUEST)
    assert torch.equal(actual, reference.generate(IDS, **REQUEST))
    assert engine.fused.fallback_reason_now()
    trusted = trusting.generate(IDS, **REQUEST)
    assert not trusting.fused.fallback_reason_now(), "the self-check sees the patch: the test is vacuous"
    assert not torch.equal(trusted, actual), "the patch changes nothing: the test is vacuous"


def test_a_patch_after_the_first_call_is_seen():
    engine = SmallEngine(tiny_model("llama"))
    engine.generate(IDS, **REQUEST)
    assert not engine.fused.fallback_reason_now()
    mlp = engine.model.model.layers[2].mlp
    on_instance(mlp)
    assert "model.layers.2.mlp is tests.decoders.test_foreign_code.patched" in engine.fused.fallback_reason_now()
    del mlp.forward
    assert not engine.fused.fallback_reason_now()


def test_a_patched_function_of_the_family_is_seen(monkeypatch):
    model = tiny_model("llama")
    watch = ForeignForwards(ModelInfo(model))
    assert watch.first() == ""
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", functools.wraps(own)(lambda *args, **kw: own(*args, **kw))
    )
    assert "modeling_llama.apply_rotary_pos_emb is tests.decoders.test_foreign_code" in watch.first()
    monkeypatch.undo()
    assert watch.first() == ""


def test_an_attention_function_of_the_user_is_seen():
    def mine(module, query, key, value, attention_mask, **kwargs):
        return modeling_llama.eager_attention_forward(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("mine", mine)
    model = tiny_model("llama")
    model.config._attn_implementation = "mine"
    assert "the attention function is tests.decoders.test_foreign_code" in foreign(model)


def test_remote_code_is_seen():
    """A class from the hub: its functions are in `transformers_modules`."""
    own = modeling_llama.LlamaMLP.forward
    code = FunctionType(
        own.__code__, {**own.__globals__, "__name__": "transformers_modules.org.name.modeling"}, "forward"
    )
    model = tiny_model("llama")
    model.model.layers[0].mlp.__class__ = type("RemoteMLP", (modeling_llama.LlamaMLP,), {"forward": code})
    assert "the forward of model.layers.0.mlp is transformers_modules.org.name.modeling.LlamaMLP.forward" in foreign(
        model
    )


class WithLoss(LlamaForCausalLM):
    """Overrides the forward of the whole model."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def check_setting() -> None:
    ids, mask = prompts(2, 6, padded=True)
    config = LlamaConfig.from_dict(tiny_model("llama").config.to_dict())
    torch.manual_seed(0)
    model = WithLoss(config)
    reference = twin(model)
    for trusts, container in ((False, "native"), (True, "fused")):
        rollout = {"containers": "fused", "trust_forward": trusts}
        engine = engine_of(twin(model).train(), settings(3, rollout=rollout))
        sampling = hybrid.SamplingParams(max_new_tokens=4, temperature=0)
        batch = engine.rollout(ids, mask, sampling)
        expected = reference.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert torch.equal(batch.sequences, expected)
        assert {row["container"] for row in engine.coverage()} == {container}
        assert ("WithLoss.forward" in engine.stats()["fallback_reason"]) != trusts
        engine.destroy()


def test_the_setting_trusts_a_subclass_of_the_user(ranks):
    ranks.run(check_setting)
