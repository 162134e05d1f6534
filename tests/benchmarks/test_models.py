"""The table of models: small configurations by name, the page, and a few types examined again (slow)."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks import models, models_page
from benchmarks.results import ROOT
from benchmarks.small_configs import FIRST_SPECIAL, VOCABULARY, Layers, made_small, small_config, small_value

AGAIN = ["llama", "gpt2", "qwen3_moe", "mamba", "llava"]  # fused, a mixture, native, with a vision tower
MEASURED = {"difference", "tensor_parallel_difference", "rollout_nats", "score_nats"}
COMMAND = "python -m benchmarks.models"


def test_a_small_model_runs_and_has_every_kind_of_layer():
    for name, layers in {"llama": 2, "gemma3_text": 2, "gpt_oss": 2, "deepseek_v3": 2, "qwen3_5_text": 2}.items():
        config = small_config(name)
        assert config.num_hidden_layers == layers and config.hidden_size == 64 and config.vocab_size == VOCABULARY
        kinds = getattr(CONFIG_MAPPING[name](), "layer_types", None) or []
        assert set(config.layer_types or ()) == set(kinds) if kinds else True
        model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
        ids = torch.arange(3, 3 + models.TOKENS)[None]
        with torch.no_grad():
            assert model(ids).logits.shape == (1, models.TOKENS, VOCABULARY)


def test_a_configuration_inside_a_configuration_is_made_small_and_shares_special_tokens():
    config = small_config("llava")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.text_config.num_hidden_layers == config.vision_config.num_hidden_layers == 2
    assert FIRST_SPECIAL <= config.image_token_index < VOCABULARY
    specials: dict[int, int] = {}
    first, other, again = (
        small_value("image_token_id", token, Layers(0, []), specials) for token in (9000, 9001, 9000)
    )
    assert first == again != other and min(first, other) >= FIRST_SPECIAL


def test_the_first_layer_of_each_kind_is_chosen():
    kinds = ["linear", "linear", "full", "linear", "linear", "full"]
    assert Layers.of({"num_hidden_layers": 6}).chosen == [0, 1]
    layers = Layers.of({"num_hidden_layers": 6, "layer_types": kinds})
    assert layers.chosen == [0, 2] and layers.part("layer_types", kinds) == ["linear", "full"]
    layers = Layers.of({"num_hidden_layers": 6, "layer_types": kinds, "mlp_only_layers": [2]})
    assert layers.chosen == [0, 2, 5] and layers.part("mlp_only_layers", [2]) == [1]
    assert layers.part("multipliers", [1.0, 0.5, 2.0]) == [1.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    {
        ("--only", "llama", "lama"): "--only: lama given; types are transformers' model_type",
        ("--page", "--to", "/no/such/page.md"): "/no/such/page.md: there is no such directory",
    }.items(),
)
def test_what_is_wrong_is_said_before_anything_runs(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["models.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        models.parse()
    assert message in capsys.readouterr().err


def test_settings_that_an_override_names_replace_the_others():
    config = made_small(CONFIG_MAPPING["llama"](), {}, {"num_key_value_heads": 1, "attention_bias": True})
    assert config.num_key_value_heads == 1 and config.attention_bias and config.num_attention_heads == 4


REFUSED = "only fused decoders verify drafts; leave it out"
WHY = (
    "the Hugging Face module itself, over the snapshot's weights: NewForCausalLM fits no supported family; the nearest "
)
WHY += "is llama: no model.layers.0.mlp.gate_proj; no model.norm (hybrid/models/README.md shows how a family is added)"
ROWS = [
    {
        "type": "qwen3",
        "class": "Qwen3ForCausalLM",
        "runs": "fused",
        "reason": "a decoder of the qwen3 family, on CPU kernels",
        "difference": 2e-7,
        "logps": {"model": "", "packed": "", "exact": ""},
        "int8": "",
        "speculation": "",
        "router_replay": "New has no routers of experts that transformers declares",
        "unmerged_lora": "",
        "tensor_parallel": "fused",
    },
    {
        "type": "new",
        "class": "NewForCausalLM",
        "runs": "native",
        "reason": WHY,
        "logps": {"model": "", "packed": "", "exact": "no decoder"},
        "int8": REFUSED,
        "speculation": REFUSED,
        "router_replay": "",
        "unmerged_lora": "adapters unmerged in 2 of 4 modules",
        "tensor_parallel": "weights are whole on every rank (no tp_plan)",
    },
    {"type": "gemma3", "class": "Gemma3ForConditionalGeneration", "runs": "not built", "reason": "Error: a | b"},
]


def test_the_page_has_a_row_for_each_model():
    about = {"versions": {"transformers": "5.0"}, "classes": [[row["type"], row["class"]] for row in ROWS]}
    text = models_page.page({**about, "models": ROWS})
    assert "**3 classes: 1 fused, 1 native, 0 forwards alone, 1 not built.**" in text
    lines = text.splitlines()
    assert "| qwen3 | qwen3 | 2e-07 | yes | yes | fused | yes | – | packed, exact |" in lines
    assert "| new | llama: no mlp.gate\\_proj; no model.norm | whole | 2 of 4 | yes | packed |" in lines
    assert "| gemma3 (vision) | Error: a / b |" in lines
    assert "2 more have not been examined, from new on" in models_page.page({**about, "models": ROWS[:1]})
    assert "{{" not in text and text.index("## Fused") < text.index("## Native") < text.index("## Not built")


def test_the_share_of_recipes_counts_a_family_once(tmp_path, monkeypatch):
    table = tmp_path / "recipes.tsv"
    table.write_text("# a comment\n6\tllama\n3\tqwen2 qwen2_moe\n1\tmamba\n")
    monkeypatch.setattr(models_page, "RECIPES", table)
    text = models_page.recipes_covered({"llama", "qwen2"})
    assert "10 times: **60%**" in text and "90% those" in text and "qwen2_moe (3); mamba (1)" in text


def stored() -> dict:
    """The checked-in answers; skips for another transformers."""
    result = json.loads(models.ANSWERS.read_text())
    if result["versions"]["transformers"] != transformers.__version__:
        pytest.skip(f"docs/models.md is of transformers {result['versions']['transformers']}; run `{COMMAND}`")
    return result


def test_the_checked_in_page_is_what_the_answers_give():
    assert models_page.PAGE.read_text() == models_page.page(json.loads(models.ANSWERS.read_text()))


def test_every_type_is_in_the_table():
    rows = [(row["type"], row["class"]) for row in stored()["models"]]
    assert rows == [(case.model_type, case.class_name) for case in models.cases()], f"run `{COMMAND}`"


@pytest.mark.slow
def test_a_few_types_give_the_checked_in_answers(tmp_path):
    expected = {row["class"]: row for row in stored()["models"] if row["type"] in AGAIN}
    answers, page = tmp_path / "models.json", tmp_path / "models.md"
    command = [sys.executable, "-m", "benchmarks.models", "--only", *AGAIN, "--answers", answers, "--to", page]
    subprocess.run(command, check=True, cwd=ROOT, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = {row["class"]: row for row in json.loads(answers.read_text())["models"]}
    for name, row in expected.items():
        assert without_figures(rows[name]) == without_figures(row), f"{name}: run `{COMMAND}`"
        assert all(rows[name].get(figure, 0.0) < 1e-5 for figure in MEASURED)
    assert page.read_text().count("\n| ") >= len(AGAIN)


def without_figures(row: dict) -> dict:
    """A row without what differs by machine."""
    return {name: value for name, value in row.items() if name not in MEASURED}
