"""`init_inference`'s settings: DeepSpeed's keys, aliases, defaults and merging; invalid ones are named."""

import ast
import copy
import json
import re
import warnings
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.inference.config import DeepSpeedInferenceConfig, DeepSpeedMoEConfig, DeepSpeedTPConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hybrid
from hybrid import config as settings
from hybrid.config import FORWARDED, InferenceConfig, read_inference_config
from hybrid.inference.validation import validated
from hybrid.models.model_info import ModelInfo
from tests.tiny_models import NON_DECODERS, prompts, tiny_model, tiny_non_decoder, twin, with_peft

PACKAGE = Path(__file__).resolve().parents[2] / "hybrid"
PLAIN = {"dtype": torch.float32}


def names(kind: type[BaseModel]) -> dict[str, str | None]:
    """Fields of a block and their aliases, None where an alias only repeats the name."""
    return {name: None if field.alias == name else field.alias for name, field in kind.model_fields.items()}


def test_keys_aliases_and_defaults_match_deepspeed():
    expected = names(DeepSpeedInferenceConfig)
    forwarded = FORWARDED.keys() & expected.keys()
    aliases = {expected.pop(key) for key in forwarded} - {None}
    assert forwarded | aliases == FORWARDED.keys()
    actual = names(InferenceConfig)
    assert actual.pop("strict", "missing") is None  # of checkpoints; DeepSpeed's loader has it as an argument
    assert actual.pop("speculation", "missing") is None  # ours
    assert actual.pop("trust_forward", "missing") is None  # ours
    assert actual == expected
    assert names(settings.TensorParallelConfig) == names(DeepSpeedTPConfig)
    assert names(settings.MoEConfig) == names(DeepSpeedMoEConfig)
    blocks = {"dtype", "tensor_parallel", "moe", "quant", "checkpoint_config"}
    for kind, other in ((InferenceConfig, DeepSpeedInferenceConfig), (settings.MoEConfig, DeepSpeedMoEConfig)):
        for name, field in kind.model_fields.items():
            if name not in blocks and name not in ("strict", "speculation", "trust_forward", "enable_cuda_graph"):
                assert field.default == other.model_fields[name].default, name


class ConfigCaught(Exception):
    """Carries the configuration that DeepSpeed would build its engine with."""


def deepspeeds_config(monkeypatch, config, kwargs) -> DeepSpeedInferenceConfig | None:
    """DeepSpeed's merged configuration; None where it raises."""

    def raise_config(model, config):
        raise ConfigCaught(config)

    monkeypatch.setattr(deepspeed, "InferenceEngine", raise_config)
    try:
        deepspeed.init_inference(torch.nn.Module(), copy.deepcopy(config), **copy.deepcopy(kwargs))
    except ConfigCaught as error:
        return error.args[0]
    except (ValueError, AssertionError):
        return None


MERGED = {
    "nothing": (None, {}),
    "config only": ({"dtype": "fp16", "max_out_tokens": 7}, {}),
    "kwargs only": (None, {"dtype": torch.bfloat16, "kernel_inject": True}),
    "both": ({"dtype": "float"}, {"replace_with_kernel_inject": True}),
    "equal twice": ({"replace_with_kernel_inject": True}, {"replace_with_kernel_inject": True}),
    "different twice": ({"replace_with_kernel_inject": True}, {"replace_with_kernel_inject": False}),
    "aliases": ({"tp": {"tp_size": 2}, "max_tokens": 9}, {"min_tokens": 3, "tm": False}),
    "moe is a bool": ({"moe": True}, {}),
    "moe is a block": ({"moe": {"num_experts": [4], "type": "residual"}}, {}),
    "an old name": ({}, {"mp_size": 2}),
    "an old name and the new one": ({"tensor_parallel": {"tp_size": 4}}, {"mp_size": 2}),
    "old names of experts": ({}, {"ep_size": 2, "moe_experts": [8], "moe_type": "residual"}),
    "a dtype that there is not": ({"dtype": "float7"}, {}),
    "an unknown key": ({"tensor_paralel": {}}, {}),
    "no tokens": ({"max_out_tokens": 0}, {}),
    "auto": ({"max_out_tokens": "auto", "dtype": "bf16"}, {}),
    "auto in a block": ({"tp": {"tp_size": "auto"}, "moe": {"ep_size": "auto", "type": "residual"}}, {}),
    "an old name and auto": ({"tensor_parallel": {"tp_size": "auto"}}, {"mp_size": 2}),
    "auto and a value": ({"max_out_tokens": "auto"}, {"min_tokens": "auto", "kernel_inject": "auto"}),
    "DeepSpeed's blocks": (
        {"tp": DeepSpeedTPConfig(tp_size=2)},
        {"moe": DeepSpeedMoEConfig(num_experts=[4], type="residual")},
    ),
    "DeepSpeed's block twice": ({"tp": DeepSpeedTPConfig(tp_size=2)}, {"tp": DeepSpeedTPConfig(tp_size=2)}),
    "DeepSpeed's block and another": ({"tp": DeepSpeedTPConfig(tp_size=2)}, {"tp": DeepSpeedTPConfig(tp_size=4)}),
}
COMPARED = "replace_with_kernel_inject max_out_tokens min_out_tokens triangular_masking".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MERGED)
def test_config_and_kwargs_merge_as_in_deepspeed(monkeypatch, name):
    config, kwargs = MERGED[name]
    before = copy.deepcopy((config, kwargs))
    expected = deepspeeds_config(monkeypatch, config, kwargs)
    if expected is None:
        with pytest.raises(ValueError):
            read_inference_config(config, kwargs)
        return
    actual = read_inference_config(config, kwargs)
    assert (config, kwargs) == before, "the caller's dictionaries were changed"
    assert {key: getattr(actual, key) for key in COMPARED} == {key: getattr(expected, key) for key in COMPARED}
    assert getattr(torch, actual.dtype) == expected.dtype
    tensor_parallel = DeepSpeedTPConfig(**expected.tensor_parallel) if expected.tensor_parallel == {} else None
    assert actual.tensor_parallel.tp_size == (tensor_parallel or expected.tensor_parallel).tp_size
    moe = DeepSpeedMoEConfig() if expected.moe == {} else expected.moe
    assert (actual.moe.enabled, actual.moe.ep_size, actual.moe.moe_experts) == (
        moe.enabled,
        moe.ep_size,
        moe.moe_experts,
    )
    assert actual.moe.type == getattr(moe.type, "value", moe.type)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "config",
    [
        {"dtype": torch.bfloat16, "max_tokens": 9, "tm": False},
        {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2, "num_experts": [4]}},
        {"mp_size": 2, "moe_type": "residual", "moe_experts": [4]},
        {"moe": True, "zero": {"stage": 2}, "quant": {"weight": {"q_groups": 4}}},
        {"ckpt_config": {"base_dir": "there", "checkpoint_dir": "x.json"}, "return_tuple": False},
    ],
)
def test_deepspeeds_config_object_equals_the_dictionary(config):
    """The configuration as DeepSpeed's object, which forwards old names itself, and as a dictionary."""
    expected = read_inference_config(config, {}).model_dump()
    actual = read_inference_config(DeepSpeedInferenceConfig(**copy.deepcopy(config)), {}).model_dump()
    # DeepSpeed fills in more of its keys
    assert actual.pop("zero").get("stage", 0) == expected.pop("zero").get("stage", 0)
    assert actual == expected


def test_a_config_file_with_a_duplicate_key_raises_if_values_differ(tmp_path):
    """As DeepSpeed's reader of training configurations; Python's json would keep the last value silently."""
    path = tmp_path / "config.json"
    path.write_text('{"max_out_tokens": 9, "dtype": "fp32", "max_out_tokens": 9}')
    assert read_inference_config(path, {}).max_out_tokens == 9
    for text, message in (
        ('{"max_out_tokens": 9, "max_out_tokens": 8}', "max_out_tokens: given twice, as 9 and as 8"),
        ('{"tp": {"tp_size": 1, "tp_size": 2}}', "tp_size: given twice, as 1 and as 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            hybrid.init_inference(torch.nn.Module(), str(path))
    for content in (b"{", b"\xff\xfe\x00", b'"max_out_tokens"'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="config: .*(is not JSON|must be settings by name)"):
            hybrid.init_inference(torch.nn.Module(), str(path))


def test_deepspeeds_own_unit_test(tmp_path):
    """DeepSpeed's tests/unit/inference/test_inference_config.py with `hybrid.init_inference`."""
    engine = hybrid.init_inference(
        torch.nn.Module(), config={"replace_with_kernel_inject": True, **PLAIN}, replace_with_kernel_inject=True
    )
    assert engine._config.replace_with_kernel_inject
    with pytest.raises(ValueError):
        hybrid.init_inference(
            torch.nn.Module(), config={"replace_with_kernel_inject": True}, replace_with_kernel_inject=False
        )
    engine = hybrid.init_inference(torch.nn.Module(), config={"replace_with_kernel_inject": True}, **PLAIN)
    assert engine._config.replace_with_kernel_inject
    assert engine._config.dtype == torch.float32
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"replace_with_kernel_inject": True, "dtype": "torch.float32"}))
    assert hybrid.init_inference(torch.nn.Module(), config=str(path))._config.replace_with_kernel_inject


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        ({"kernel_injekt": True}, {}, "unknown key 'kernel_injekt'; the nearest known key is 'kernel_inject'"),
        ({"moe": {"ep_sise": 2}}, {}, "unknown key 'ep_sise'; the nearest known key is 'ep_size'"),
        ({"dtype": "fp8"}, {}, "dtype: 'fp8' given.*float32.*int8"),
        ({"tp": {"tp_size": 0}}, {}, "tensor_parallel.tp_size: 0 given"),
        ({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_size": 3}}, "tensor_parallel: given twice"),
        ({"tp": 2}, {}, "tensor_parallel: 2 given; it must be a dictionary"),
        (3, {}, "config: a int given; give the path of a DeepSpeed JSON file or a dict"),
        ("nowhere.json", {}, "no file at 'nowhere.json'"),
    ],
)
def test_invalid_keys_and_values_are_named(config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        hybrid.init_inference(torch.nn.Module(), config, **kwargs)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mp_size", 1, "mp_size is an old name; use tensor_parallel.tp_size"),
        ("moe_type", "standard", "moe_type is an old name; use moe.type"),
        ("replace_method", "other", "replace_method: 'other' given; it has no effect"),
        ("transposed_mode", True, "transposed_mode: True given; it has no effect"),
        ("triton_autotune", True, "triton_autotune: True given; it has no effect"),
        ("tp", {"tp_grain_size": 8}, "tensor_parallel.tp_grain_size: 8 given; it has no effect"),
        ("quant", {"qkv": {"enabled": True}}, "quant.qkv.*has no effect"),
        ("zero", {"stage": 2}, "zero: {'stage': 2} given; it has no effect"),
        ("zero", {"offload_param": {"device": "cpu"}}, "zero: .*offload_param.* given; it has no effect"),
    ],
)
def test_settings_without_an_effect_warn(key, value, message):
    with pytest.warns(match=message):
        hybrid.init_inference(torch.nn.Module(), **PLAIN, **{key: value})


def test_settings_with_an_effect_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybrid.init_inference(torch.nn.Module(), **PLAIN, kernel_inject=True, max_tokens=9, replace_method="auto")
        for nothing in ({"stage": 0}, {"stage": "auto"}, {}, DeepSpeedZeroConfig()):
            hybrid.init_inference(torch.nn.Module(), **PLAIN, zero=nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_without_a_device_warn_once_and_run():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = hybrid.init_inference(tiny_model("llama"), dtype=torch.float32, enable_cuda_graph=True)
    assert [str(w.message) for w in caught if "enable_cuda_graph" in str(w.message)] == [
        "enable_cuda_graph: true given; it has no effect without a CUDA device"
    ]
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"use_triton": True}, NotImplementedError, "use_triton: true given; it needs a CUDA device"),
        ({"zero": {"stage": 3}}, NotImplementedError, "zero.stage: 3 given; use hybrid.initialize"),
        ({"zero": {"stagee": 3}}, ValueError, "zero.stagee: 3 given"),
        ({"injection_policy_tuple": ("a",)}, ValueError, "give injection_policy"),
        (
            {"triangular_masking": False},
            NotImplementedError,
            "triangular_masking: false given; the model's attention is causal",
        ),
        ({"min_out_tokens": 9, "max_out_tokens": 9}, ValueError, "min_out_tokens: 9 given.*max_out_tokens=9"),
        ({"tp": {"tp_size": 3}}, ValueError, "3 given; it must divide the world size, 1"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="messages of a machine without a device")
def test_unavailable_settings_raise_before_the_model_changes(config, error, message):
    model = tiny_model("llama")
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(error, match=message):
        hybrid.init_inference(model, dtype=torch.bfloat16, **config)
    assert model.training
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_use_triton_needs_kernel_injection(monkeypatch):
    """With a device, use_triton raises only where the model's own layers would run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NotImplementedError, match="use_triton: true given; .*replace_with_kernel_inject=true"):
        hybrid.init_inference(tiny_model("llama"), use_triton=True, **PLAIN)
    config = read_inference_config({"use_triton": True, "kernel_inject": True, "tm": False, **PLAIN}, {})
    config = config.model_copy(update={"dtype": torch.float32})
    with pytest.raises(NotImplementedError, match="triangular_masking: false given"):  # which is checked last
        validated(ModelInfo(tiny_model("llama")), config, {})


def causal(name: str) -> torch.nn.Module:
    """Decoders outside our families, without a language-modelling head, or whose attention has no `is_causal`."""
    if name == "bert as a decoder":
        config = AutoConfig.for_model("bert", **NON_DECODERS["bert"][1], is_decoder=True)
        return AutoModelForCausalLM.from_config(config)
    if name == "t5":
        return tiny_non_decoder("t5")
    if name == "xglm":
        sizes = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 97}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", **sizes))
    kind = AutoModel if name == "llama without a head" else AutoModelForSequenceClassification
    return kind.from_config(tiny_model(name.split()[0]).config)


@pytest.mark.parametrize("name", ["bert as a decoder", "t5", "xglm", "llama without a head", "bloom that classifies"])
def test_triangular_masking_false_raises_for_decoders(name):
    with pytest.raises(NotImplementedError, match="triangular_masking: false given; the model's attention is causal"):
        hybrid.init_inference(causal(name), triangular_masking=False, **PLAIN)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_triangular_masking_false_is_accepted_for_encoders(name):
    model = tiny_non_decoder(name)
    ids, _ = prompts(2, 7, padded=False)
    actual = hybrid.init_inference(twin(model), triangular_masking=False, **PLAIN)(ids).logits
    changed_ids = ids.clone()
    changed_ids[:, -1] += 1
    with torch.no_grad():
        assert torch.equal(actual, model(ids).logits)
        assert not torch.equal(actual[:, 0], model(changed_ids).logits[:, 0]), (
            "the first token does not attend to the last"
        )


def test_triangular_masking_false_is_accepted_for_other_modules():
    hybrid.init_inference(torch.nn.Linear(2, 2), triangular_masking=False, **PLAIN)


def test_every_setting_is_read_and_documented():
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    attributes = {node.attr for node in ast.walk(ast.parse(code)) if hasattr(node, "attr")}
    paths = {path.rpartition(".")[2] for path in settings.WITHOUT_EFFECT}
    blocks = [InferenceConfig]
    blocks += [f.annotation for f in InferenceConfig.model_fields.values() if isinstance(f.annotation, type)]
    for block in (block for block in blocks if issubclass(block, settings.Block)):
        for name in block.model_fields:
            assert name in attributes | paths, f"{name} is accepted and never read"
            assert re.search(rf"^    ([\w, ]*, )?{name}[\w, ]*: ", block.__doc__, re.M), f"{name} is not explained"


def test_adapters_are_served_merged():
    model = with_peft(tiny_model("llama"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(ids).logits
    engine = hybrid.init_inference(model, kernel_inject=True, **PLAIN)
    torch.testing.assert_close(engine(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert engine.coverage()[0]["container"] == "fused"
