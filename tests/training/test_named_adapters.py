"""Calls that name an adapter use it, whatever is active, and leave the model as it was."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from tests.engines import engine_of, settings, storage_digest
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin
from tests.training.test_changes_in_windows import MODES

GREEDY = hybrid.SamplingParams(max_new_tokens=4, temperature=0)
SAMPLED = hybrid.SamplingParams(max_new_tokens=6, temperature=1.0, seed=7)
# Of other ranks, scales and modules, a rank-stabilized one among them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "alice": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "bob": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"]},
    "ref": {"r": 2, "lora_alpha": 4, "use_rslora": True, "target_modules": ["v_proj", "gate_proj", "o_proj"]},
}


def with_adapters(model: nn.Module, **adapters: dict[str, Any]) -> peft.PeftModel:
    """The model with these adapters, random ones, in the weights' dtype; the first is active."""
    torch.manual_seed(5)
    named = {name: peft.LoraConfig(init_lora_weights=False, **given) for name, given in (adapters or ADAPTERS).items()}
    first, *others = named
    adapted = peft.get_peft_model(model, named[first], adapter_name=first)
    for name in others:
        adapted.add_adapter(name, named[name])
    return adapted


def flags_of(model: nn.Module) -> list[Any]:
    """All that a call must leave as it was: PEFT's flags and `requires_grad`."""
    tables = [
        (name, {key: value for key, value in vars(module).items() if "adapter" in key})
        for name, module in model.named_modules()
    ]
    return [repr(tables), [param.requires_grad for param in model.parameters()]]


def full_mask_of(sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of prompts with this mask, and of all tokens after them."""
    return torch.cat([mask, torch.ones_like(sequences[:, mask.shape[1] :])], dim=1)


@torch.no_grad()
def require_peft(engine: hybrid.HybridEngine, reference: peft.PeftModel, given: dict[str, Any], active: str) -> None:
    """Rollouts, scores and `generate` called with `given` are those of PEFT's own forward with `active` ("": none)."""
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    if active:
        reference.set_adapter(active)
    else:
        reference.base_model.disable_adapter_layers()
    expected = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    full_mask = full_mask_of(expected, mask)
    logps = reference(input_ids=expected, attention_mask=full_mask).logits.log_softmax(-1)[:, :-1]
    logps = logps.gather(2, expected[:, 1:, None]).squeeze(2)
    reference.base_model.enable_adapter_layers()
    assert torch.equal(engine.rollout(ids, mask, GREEDY, **given).sequences[:, : expected.shape[1]], expected), given
    scores = engine.score(expected, full_mask, **given).per_token_logps
    real = full_mask[:, 1:].bool() & full_mask[:, :-1].bool()
    torch.testing.assert_close(scores[real], logps[real], atol=2e-4, rtol=1e-4)
    tokens = engine.generate(ids, attention_mask=mask, max_new_tokens=4, **given)
    assert torch.equal(tokens, expected), given


def sampled(engine: hybrid.HybridEngine, **given: Any) -> list[torch.Tensor]:
    """Tokens, their logprobs and scores of a call."""
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    batch = engine.rollout(ids, mask, SAMPLED, num_generations=2, **given)
    per_row = {"adapter_names": [name for name in given["adapter_names"] for _ in range(2)]} if "adapter_names" in given else given
    scores = engine.score(batch.sequences, batch.attention_mask, **per_row)
    return [batch.completion_ids, batch.sampling_per_token_logps, scores.per_token_logps, scores.entropies]


def require_equal(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), what


def check_named(stage: int, blocks: dict[str, Any]) -> None:
    """A named adapter gives PEFT's tokens and logprobs, and those of our engine with it active, to the bit."""
    model = with_adapters(tiny_model("llama"))
    reference = twin(model)
    engine, other = (engine_of(each, settings(stage, **blocks)) for each in (model, with_adapters(tiny_model("llama"))))
    digest, flags, version = storage_digest(engine), flags_of(engine.module), engine.weight_version
    expected = {}
    for name in ADAPTERS:
        other.module.set_adapter(name)
        expected[name] = sampled(other)
        require_peft(engine, reference, {"adapter": name}, name)
        require_equal(sampled(engine, adapter=name), expected[name], name)
        require_peft(engine, reference, {}, "alice")
    assert len({str(tensors[1].tolist()) for tensors in expected.values()}) == len(expected)
    require_peft(engine, reference, {"adapter": "__base__"}, "")
    with engine.inference():
        require_peft(engine, reference, {"adapter": "bob"}, "bob")
        require_peft(engine, reference, {}, "alice")
        require_equal(sampled(engine, adapter="ref"), expected["ref"], "ref in a window")
        require_peft(engine, reference, {"adapters": False}, "")
        require_peft(engine, reference, {"adapter": "alice"}, "alice")
    with engine.inference(adapter="bob"):
        require_peft(engine, reference, {}, "bob")
        with engine.inference(adapters=True):
            require_peft(engine, reference, {}, "alice")
        require_peft(engine, reference, {"adapter": "ref"}, "ref")
        require_equal(sampled(engine), expected["bob"], "a window of bob")
    with engine.module.disable_adapter():
        require_equal(sampled(engine, adapter="bob"), expected["bob"], "disabled")
    assert flags_of(engine.module) == flags and storage_digest(engine) == digest
    assert engine.weight_version == version, "naming an adapter made a new version"
    for each in (engine, other):
        each.destroy()


CASES = [(stage, mode) for stage in (0, 2, 3) for mode in MODES if stage == 3 or "streaming" not in mode]
QUICK = [(0, "merged"), (3, "merged"), (3, "unmerged")]


@pytest.mark.parametrize(("stage", "mode"), slow_but(QUICK, CASES))
def test_a_named_adapter_is_used_whatever_is_active(ranks, stage, mode):
    ranks.run(check_named, stage, MODES[mode])
