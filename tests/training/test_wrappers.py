"""A policy and a value model in a wrapper without `generate`: the policy generates through the engine.

TRL's PPO trainer (until 1.12) trains such a wrapper, and calls `wrapper.policy.generate`.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from torch import nn
from transformers import AutoModelForSequenceClassification

from hybrid import SamplingParams
from hybrid.models.structure import can_generate, generating_part
from tests.engines import engine_of, settings, storage_digest
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin


class PolicyAndValue(nn.Module):
    """As TRL's PolicyAndValueWrapper."""

    def __init__(self, policy: nn.Module, value_model: nn.Module):
        super().__init__()
        self.policy, self.value_model = policy, value_model

    def forward(self, **kwargs):
        return self.policy(**kwargs).logits, self.value_model.score(self.value_model.model(**kwargs)[0])


def wrapped(adapter: str) -> PolicyAndValue:
    """A tiny policy and a tiny value model; both train."""
    policy = ADAPTERS[adapter](tiny_model("llama"))
    torch.manual_seed(5)
    config = tiny_model("qwen2").config
    config.num_labels, config.pad_token_id = 1, 0
    return PolicyAndValue(policy, AutoModelForSequenceClassification.from_config(config))


def step(engine, seed: int) -> float:
    ids = prompts(2, 9, padded=False, seed=10 * seed + dist.get_rank())[0]
    logits, values = engine(input_ids=ids)
    loss = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).mean().neg() + values.square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def check_wrapper(adapter: str, stage: int, block: dict) -> None:
    model = wrapped(adapter)
    reference, other = twin(model), twin(model)
    engine = engine_of(model, settings(stage, hybrid_engine={"enabled": True, **block}))
    undisturbed = engine_of(other, settings(stage))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 5 + 3 * rank, "do_sample": False}
    for update in range(2):
        policy = engine.module.policy
        expected = reference.policy.generate(ids, **request)
        before = storage_digest(engine)
        assert torch.equal(policy.generate(ids, **request), expected)
        assert torch.equal(engine.generate(ids, **request), expected)
        assert engine.stats()["tokens"] > 0
        with engine.inference():
            batch = engine.rollout(ids, mask, SamplingParams(max_new_tokens=5, temperature=0.0))
            scores = engine.score(batch.sequences, batch.attention_mask)
            logits, values = engine(input_ids=ids)
        assert torch.equal(batch.sequences[:, : ids.shape[1]], ids) and scores.per_token_logps.isfinite().all()
        with torch.no_grad():
            expected_logits, expected_values = reference(input_ids=ids)
        # float32 sums in another order
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, expected_values, atol=1e-4, rtol=1e-4)
        assert not logits.requires_grad and not values.requires_grad
        assert storage_digest(engine) == before
        engine.train()
        assert step(engine, update) == step(undisturbed, update)
        assert storage_digest(engine) == storage_digest(undisturbed), "generation changed the training"
        own = list(engine.module.parameters())
        with torch.no_grad(), GatheredParameters(own, enabled=stage == 3):
            for copied, parameter in zip(reference.parameters(), own, strict=True):
                copied.copy_(parameter)
    assert engine.weight_version == 2


@pytest.mark.parametrize(
    ("adapter", "stage", "block"),
    [
        pytest.param("none", 3, {}, marks=pytest.mark.slow),
        ("peft", 3, {}),
        pytest.param("none", 0, {}, marks=pytest.mark.slow),
        pytest.param("none", 3, {"pin_parameters": False}, marks=pytest.mark.slow),
        pytest.param("none", 3, {"inference_tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["whole", "adapters", "stage 0", "streaming", "tensor parallel"],
)
def test_a_wrapped_policy_generates_through_the_engine(ranks, adapter, stage, block):
    ranks.run(check_wrapper, adapter, stage, block)


def check_what_is_copied() -> None:
    model = wrapped("none")
    nbytes = sum(param.nbytes for param in model.policy.parameters())
    engine = engine_of(model, settings(3))
    with engine.inference():
        assert engine.stats()["snapshot_bytes"] == nbytes, "the value model is in the snapshot"
    assert [name for name, _ in engine.named_children()] == ["module"], "the policy is in the engine twice"
    assert engine.state_dict().keys() == {f"module.{name}" for name in model.state_dict()}
    assert {line["container"] for line in engine.coverage()} == {settings()["rollout"]["containers"]}


def test_only_the_policy_is_gathered(ranks):
    ranks.run(check_what_is_copied)


def check_gathered_around() -> None:
    """As TRL does by default: everything is gathered and DeepSpeed's hooks are removed around `generate`."""
    utils = pytest.importorskip("trl.models.utils", reason="TRL is not installed: pip install trl")
    model = wrapped("none")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    with GatheredParameters(engine.parameters()), contextlib.ExitStack() as stack:
        utils.remove_hooks(engine)
        stack.callback(utils.add_hooks, engine)
        tokens = engine.module.policy.generate(ids, **request)
        scored = engine.module.policy.generate(ids, **request, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(tokens, reference.policy.generate(ids, **request))
    assert torch.equal(scored.sequences, tokens) and len(scored.scores) == tokens.shape[1] - ids.shape[1]
    assert engine.stats()["gathered_bytes"] == 0
    step(engine, 0)


def test_generate_inside_gathered_parameters_gathers_nothing(ranks):
    ranks.run(check_gathered_around)


def check_classifiers_head() -> None:
    model = wrapped("none").value_model
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    hidden = engine.model(ids, attention_mask=mask).last_hidden_state
    with torch.no_grad():
        expected = reference.score(reference.model(ids, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(engine.score(hidden), expected, atol=1e-5, rtol=1e-5)  # float32 sums


def test_a_classifiers_head_is_reached_through_the_engine(ranks):
    """As `get_reward` of TRL's PPO trainer does; DeepSpeed's engine forwards attributes that it lacks to the module."""
    ranks.run(check_classifiers_head)


def test_generating_part_finds_the_policy():
    policy = tiny_model("llama")
    assert generating_part(policy) is policy
    with_adapter = ADAPTERS["peft"](tiny_model("llama"))
    assert generating_part(PolicyAndValue(with_adapter, nn.Linear(1, 1))) is with_adapter
    two = nn.ModuleList([policy, tiny_model("llama")])
    assert generating_part(two) is two, "one of two policies was picked"
    none = nn.Linear(1, 1)
    assert generating_part(none) is none


def test_a_classifier_with_an_adapter_does_not_generate():
    """PEFT's wrapper has a `generate` that its classifier lacks: a value model around it is one part, whose own forward
    runs in a window without the training engine's hooks."""
    config = tiny_model("llama").config
    config.num_labels = 1
    adapted = ADAPTERS["peft"](AutoModelForSequenceClassification.from_config(config))
    assert hasattr(adapted, "generate")
    wrapper = nn.ModuleDict({"classifier": adapted})
    assert generating_part(wrapper) is wrapper
    assert not can_generate(adapted)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


class Forwarding(nn.Module):
    """A wrapper with a forward of its own and the inner module's attributes, without a training flag of its own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        del self.__dict__["training"]

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


WRAPPERS = {"compiled": compiled, "in place": compiled_in_place, "forwarding": Forwarding, "parallel": nn.DataParallel}


def check_transparent_wrapper(name: str, stage: int, adapter: str) -> None:
    model = ADAPTERS[adapter](tiny_model("llama"))
    plain, reference = twin(model).train(), twin(model)
    engine, undisturbed = engine_of(WRAPPERS[name](model), settings(stage)), engine_of(plain, settings(stage))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    flags = [module.training for module in engine.module.modules()]
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    scores = [each.score(ids, mask).per_token_logps for each in (engine, undisturbed)]
    assert torch.equal(*scores)
    assert [module.training for module in engine.module.modules()] == flags
    logits = []
    for each in (engine, undisturbed):
        each.eval()
        logits.append([each(ids, attention_mask=mask, use_cache=cached).logits for cached in (False, True)])
        each.train()
    assert all(map(torch.equal, *logits))
    assert step_loss(engine) == step_loss(undisturbed)
    trained = zip(engine.module.parameters(), undisturbed.module.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in trained)


def step_loss(engine) -> float:
    ids = prompts(2, 9, padded=False, seed=10 + dist.get_rank())[0]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_without_a_state_of_its_own_is_transparent(ranks, name):
    ranks.run(check_transparent_wrapper, name, 0, "none")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("compiled", 1), ("compiled", 2), ("in place", 2)])
def test_compiled_models_with_adapters(ranks, name, stage):
    ranks.run(check_transparent_wrapper, name, stage, "peft")
