"""`engine.values`: values with gradients, packed and padded, against the classifier's own forward over single rows."""

import copy
import itertools

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybrid.training.packed_forwards import target_tokens
from hybrid.training.values import ValueForwards
from rlhf_examples.common.models import LoRA, ValueModel
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, RECURRENT, compute_scans_in_float64, tiny_model, twin
from tests.training.grouped_rows import grouped_rows
from tests.training.test_logps import RELEASE_AT_ONCE, UNCLIPPED, WITHOUT_PACKING, Mixing

FAMILIES = sorted({"llama", "gpt2", "qwen2", "qwen3", "gemma2", "opt", "bloom", "falcon", "mixtral"} & {*ALL_FAMILIES})
FAMILIES.append("qwen3_5_text")  # recurrent


def classifier(family: str, kind=AutoModelForSequenceClassification) -> nn.Module:
    """A tiny classifier with one label and a head that is not zero."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_model(family).config)
    config.num_labels, config.pad_token_id = 1, 0
    for dropout in ("classifier_dropout", "attention_dropout", "hidden_dropout"):
        if hasattr(config, dropout) or dropout == "classifier_dropout":
            setattr(config, dropout, 0.0)
    model = kind.from_config(config)
    model.config._experts_implementation = "eager"  # torch's grouped product has no float64 (2.13)
    return model


def plain_values(model: nn.Module, ids, mask, width: int) -> torch.Tensor:
    """The value before each completion token by the base model's forward of each row alone, without padding."""
    values = torch.zeros(ids.shape, dtype=torch.float64)
    for row in range(len(ids)):
        kept = mask[row].bool()
        hidden = model.base_model(input_ids=ids[row][kept][None], use_cache=False).last_hidden_state
        of_row = model.score(hidden)[0, :-1, 0].double()
        values = values.index_put((torch.tensor(row), kept.nonzero()[1:, 0]), of_row)
    return values[:, -width:]


def weighted(values: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """A loss in which every completion token has a different weight."""
    return (torch.linspace(-1, 1, completion_mask.numel()).view(completion_mask.shape) * completion_mask * values).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_match_single_rows(family, monkeypatch):
    """Packed where the family's attention allows it, else by the model's own forward, with the reason."""
    if family in RECURRENT:
        compute_scans_in_float64(monkeypatch)
    # Eager attention in float64 is NaN for left-padded rows (transformers 5.23).
    dtype, limit = (torch.float32, 1e-4) if family in WITHOUT_PACKING else (torch.float64, 1e-5)
    model = classifier(family).to(dtype).train()
    expected_model = copy.deepcopy(model)
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    for module in (ValueModel(model), model):
        forwards = ValueForwards(module, module)
        forwards.min_shared = 1
        assert (forwards.packed_reason() == "") == (family not in WITHOUT_PACKING)
        if family in WITHOUT_PACKING:
            with pytest.warns(UserWarning, match="'packed' runs as 'model'.* does not go through transformers'"):
                actual = forwards.values(rows, "packed")
        else:
            actual = forwards.values(rows, "packed")
        model.zero_grad()
        expected_model.zero_grad()
        expected = plain_values(expected_model, ids, mask, 14)
        torch.testing.assert_close(actual.double() * completion_mask, expected * completion_mask, atol=1e-5, rtol=0)
        assert not actual[completion_mask == 0].any() and actual.any()
        weighted(actual, completion_mask).backward()
        weighted(expected, completion_mask).backward()
        parameters = dict(model.named_parameters())
        for name, parameter in expected_model.named_parameters():
            error = (parameters[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-4)
            assert error < limit, f"{name}: {error:.2g}"


def test_a_token_classifier_has_values():
    model = classifier("llama", AutoModelForTokenClassification).train()
    model.dropout.p = 0.0
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    values = ValueForwards(model, model).values(rows, "packed")
    expected = plain_values(model, ids, mask, 14).float() * completion_mask
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_a_zero_head_is_compared_by_its_input():
    """A new value head returns 0 for everything; a layer that mixes rows is found all the same."""
    model = classifier("llama").eval()
    nn.init.zeros_(model.score.weight)
    assert ValueForwards(model, model).packed_reason() == ""
    model.model.layers[1] = Mixing(model.model.layers[1], 1e-2)
    reason = ValueForwards(model, model).packed_reason()
    assert "hidden states differ from the model's own" in reason or "with another row's tokens" in reason


def test_modules_without_a_value_head_are_refused():
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no value head: a linear `score`"):
        ValueForwards(model, model).values(rows, "packed")
    two = AutoModelForSequenceClassification.from_config(model.config)
    with pytest.raises(ValueError, match="has 2 labels; a value head has 1"):
        ValueForwards(two, two).values(rows, "packed")


def check_gradients(lora: bool, stage: int, checkpointing: bool) -> None:
    """Gradients after engine.backward equal those of single rows; rank 1 has no completion token in step 1."""
    model = classifier("llama")
    model = ValueModel(LoRA(4, 8, "all-linear").apply(model, "SEQ_CLS") if lora else model)
    plain = twin(model)
    engine = engine_of(model, settings(stage, **(RELEASE_AT_ONCE if stage == 3 else UNCLIPPED)))
    if checkpointing:
        engine.module.classifier.gradient_checkpointing_enable({"use_reentrant": False})
    engine.train()
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    parameters = dict(engine.module.named_parameters())
    for step in range(2):
        ids, mask, completion_mask = grouped_rows(10 * step + dist.get_rank())
        if (dist.get_rank(), step) == (1, 1):
            mask[:, -14:], completion_mask = 0, torch.zeros_like(completion_mask)
        engine.backward(weighted(engine.values(ids, mask, completion_mask), completion_mask))
        grads = {name: deepspeed.utils.safe_get_full_grad(parameters[name]) for name in trained}
        engine.step()
        plain.zero_grad()
        inner = plain.classifier.get_base_model() if lora else plain.classifier
        for rank in range(2):
            ids, mask, completion_mask = grouped_rows(10 * step + rank)
            if (rank, step) != (1, 1):
                (weighted(plain_values(inner, ids, mask, 14), completion_mask) / 2).backward()
        expected = dict(plain.named_parameters())
        for name in trained:
            scale = expected[name].grad.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(grads[name] / scale, expected[name].grad / scale, atol=2e-5, rtol=0)
        for name, parameter in expected.items():
            with deepspeed.zero.GatheredParameters([parameters[name]]):
                parameter.data.copy_(parameters[name].data)
    with pytest.raises(ValueError, match="forward: 'exact' given; it must be one of 'model', 'packed'"):
        engine.values(ids, mask, forward="exact")
    engine.eval()
    with pytest.raises(RuntimeError, match=r"values: the engine is in eval mode; call train\(\) first"):
        engine.values(ids, mask)


@pytest.mark.parametrize(
    ("lora", "stage", "checkpointing"),
    slow_but([(True, 3, False), (False, 3, True)], list(itertools.product((False, True), (0, 2, 3), (False, True)))),
)
def test_gradients_under_zero(ranks, lora, stage, checkpointing):
    ranks.run(check_gradients, lora, stage, checkpointing)
