"""Settings: DeepSpeed's keys and defaults; unknown keys raise with the nearest one; callers' dicts do not change."""

import ast
import copy
import json
import re
from pathlib import Path

import pytest
from deepspeed.runtime.config import HybridEngineConfig as DeepSpeedBlock

from hybrid.config import BLOCKS, HybridEngineConfig, load_config, read_blocks, read_inference_config

PACKAGE = Path(__file__).resolve().parents[1] / "hybrid"


def test_hybrid_engine_block_has_deepspeeds_keys_and_defaults():
    actual = {name: field.default for name, field in HybridEngineConfig.model_fields.items()}
    expected = {name: field.default for name, field in DeepSpeedBlock.model_fields.items()}
    assert actual.pop("enabled") is True  # a HybridEngine is enabled by constructing it
    assert expected.pop("enabled") is False
    assert actual.pop("enable_cuda_graph") == "auto"
    assert expected.pop("enable_cuda_graph") is False
    assert actual == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hybrid_engine": {"max_out_token": 3}}, "unknown key 'max_out_token'.*'max_out_tokens'"),
        ({"rollout": {"kvstep": 3}}, "unknown key 'kvstep'.*'kv_step'"),
        ({"hybrid-engine": {}}, "unknown key 'hybrid-engine'.*'hybrid_engine'"),
        ({"rollouts": {}}, "unknown key 'rollouts'.*'rollout'"),
        ({"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens: 0 given.*greater than 0"),
        ({"hybrid_engine": {"pin_parameters": "perhaps"}}, "hybrid_engine.pin_parameters: 'perhaps' given"),
        ({"hybrid_engine": {"inference_tp_size": -1}}, "inference_tp_size: -1 given"),
        ({"rollout": [1]}, r"rollout: \[1\] given; it must be a dictionary"),
    ],
)
def test_invalid_settings_raise_with_the_key(config, message):
    with pytest.raises(ValueError, match=message):
        read_blocks(config)


def test_a_key_and_its_alias_must_agree():
    assert read_inference_config({"max_tokens": 3}, {}).max_out_tokens == 3
    assert read_inference_config({"max_tokens": 3, "max_out_tokens": 3}, {}).max_out_tokens == 3
    with pytest.raises(ValueError, match="max_out_tokens: given twice, as 3 and as 4"):
        read_inference_config({"max_tokens": 3, "max_out_tokens": 4}, {})


def test_config_dict_and_file_are_not_changed(tmp_path):
    config = {"zero_optimization": {"stage": 3}, "hybrid_engine": {"max_out_tokens": 7}}
    before = copy.deepcopy(config)
    loaded = load_config(config)
    loaded["zero_optimization"]["stage"] = 0
    assert config == before
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_config(str(path)) == load_config(path) == config
    assert read_blocks(loaded)[0].max_out_tokens == 7


def test_a_missing_or_invalid_config_file_raises(tmp_path):
    with pytest.raises(ValueError, match="no file at 'nowhere.json'"):
        load_config("nowhere.json")
    (tmp_path / "broken.json").write_text('{"a": ')
    with pytest.raises(ValueError, match="is not JSON"):
        load_config(tmp_path / "broken.json")
    (tmp_path / "deep.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        load_config(tmp_path / "deep.json")


def test_every_setting_is_read_somewhere():
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "config.py")
    attributes = {node.attr for node in ast.walk(ast.parse(code)) if hasattr(node, "attr")}
    for block in BLOCKS.values():
        for name in block.model_fields:
            assert name in attributes, f"{name} is accepted and never read"
            assert re.search(rf"^    {name}: ", block.__doc__, re.M), f"{name} is not explained"
