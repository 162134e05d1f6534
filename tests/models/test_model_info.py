"""A model is read once: an engine's life takes one ModelInfo, and only hybrid/models reads models."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import hybrid
from hybrid.models import model_info
from hybrid.models.model_info import ModelInfo
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_peft

READERS = ("read_decoder", "read_structure", "read_tp_plan")


def count_readings(patch: pytest.MonkeyPatch) -> Counter:
    """Counts the calls of each reader from now on."""
    counts: Counter = Counter()
    for name in READERS:
        own = getattr(model_info, name)

        def read(model: nn.Module, name=name, own=own):
            counts[name] += 1
            return own(model)

        patch.setattr(model_info, name, read)
    return counts


def check_read_once(stage: int, adapted: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = count_readings(patch)
        model = tiny_model("llama")
        engine = engine_of(with_peft(model) if adapted else model, settings(stage))
        ids, mask = prompts(2, 6, padded=True)
        for seed in range(2):
            engine.eval()
            with engine.inference():
                batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3))
                sequences = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1)
                engine.score(sequences, torch.cat((batch.prompt_mask, batch.completion_mask), dim=1))
            engine.memory_plan(2, 6, 3)
            engine.coverage()
            engine.train()
            train_step(engine, seed)
        assert counts == {"read_decoder": 1, "read_structure": 1}
        replaced = engine.module.get_submodule("model.model.layers.1.mlp" if adapted else "model.layers.1.mlp")
        replaced.act_fn = nn.GELU()  # another module: everything is read again
        with engine.inference():
            engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3))
        assert counts == {"read_decoder": 2, "read_structure": 2}


@pytest.mark.parametrize(("stage", "adapted"), slow_but([(3, False)], [(3, False), (0, True)]))
def test_an_engine_reads_its_model_once(ranks, stage, adapted):
    ranks.run(check_read_once, stage, adapted)


def test_init_inference_reads_its_model_once(monkeypatch):
    counts = count_readings(monkeypatch)
    engine = hybrid.init_inference(tiny_model("llama"), dtype="float32", replace_with_kernel_inject=True)
    ids, mask = prompts(2, 6, padded=True)
    engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert counts == {"read_decoder": 1, "read_structure": 1}


def test_a_failed_reading_is_cached_with_its_reason(monkeypatch):
    counts = count_readings(monkeypatch)
    info = ModelInfo(nn.Linear(2, 2))
    for _ in range(2):
        assert info.layout is None
        assert info.tp_plan is None
    assert info.reasons["layout"] == "Linear has no Hugging Face configuration"
    assert info.reasons["tp_plan"] == "Linear has no tp_plan for a decoder"
    assert counts == {"read_decoder": 1, "read_tp_plan": 1}
    assert not info.can_generate
    assert info.layers == []


def test_only_the_models_package_reads_models():
    root = Path(hybrid.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name != "models":
            names = {name.id for name in ast.walk(ast.parse(path.read_text())) if isinstance(name, ast.Name)}
            assert names.isdisjoint(READERS), f"{path.relative_to(root)} reads a model itself; take its ModelInfo"


def test_model_info_matches_the_model():
    model = tiny_model("gpt2", dtype=torch.bfloat16)
    info = ModelInfo(with_peft(model))
    assert info.base is model
    assert info.config is info.text_config is model.config
    assert info.layers == list(model.transformer.h)
    assert info.can_generate
    assert not info.is_encoder_decoder
    assert info.layout.family == "gpt2"


def test_settings_that_vary_by_layer_are_a_reason():
    """As Gemma 4's and dots 3's: transformers (5.23) raises if one is read of the whole configuration."""
    model = tiny_model("llama")
    model.config.per_layer_config = {1: {"num_key_value_heads": 4}}
    info = ModelInfo(model)
    assert info.layout is None and info.reasons["layout"] == (
        "LlamaForCausalLM fits no supported family; the nearest is llama: num_key_value_heads vary by layer"
    )
    assert info.tp_plan is None and "vary by layer" in info.reasons["tp_plan"]
    assert info.size("num_key_value_heads") == 4 and info.size("num_attention_heads") == 4
