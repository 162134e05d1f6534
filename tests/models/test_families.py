"""Models of every family are read completely, through any adapter; unsupported ones raise with the reason."""

import peft
import pytest
import torch
from torch import nn

from hybrid.models.families import COHERE
from hybrid.models.modules import parameter_at
from hybrid.models.reader import read_decoder
from hybrid.models.spec import LAYER_ROLES, OUTER_ROLES, DecoderLayout, ParamRef, UnsupportedModel
from tests.tiny_models import ADAPTERS, ALL_FAMILIES, SIZES, tiny_model, with_chat_lora, with_peft

# where the configuration's name is not the family's
NAMES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "hunyuan_v1_dense": "hunyuan", "helium": "llama"}


def refs(layout: DecoderLayout) -> list[ParamRef]:
    """Every ParamRef of a layout."""
    return [ref for roles in (layout.outer, *layout.layers) for ref in roles.values()]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_is_recognized(family, adapter):
    layout = read_decoder(ADAPTERS[adapter](tiny_model(family)))
    assert layout.family == NAMES.get(family, family)
    assert layout.spec == read_decoder(tiny_model(family)).spec
    assert {name.rpartition(".")[0] for roles in layout.layers for name in roles} <= set(LAYER_ROLES)
    assert {name.rpartition(".")[0] for name in layout.outer} <= set(OUTER_ROLES)
    assert layout.rotary.keys() == {layer.rotary for layer in layout.spec.layers} - {""}


def test_a_scale_of_logits_may_be_absent():
    """Cohere Compass has none by default (transformers 5.23)."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    model = tiny_model("cohere_compass_text", sizes={**SIZES, "rope_parameters": rope})
    assert model.config.logit_scale is None and COHERE.spec["logits_divisor"](model) == 1.0


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_element_has_one_role(family):
    """Elements are numbered, and the roles' tensors contain each number once."""
    model = tiny_model(family, tie_word_embeddings=False)
    elements: dict[nn.Parameter, list[torch.Tensor]] = {param: [] for param in model.parameters()}
    for ref in refs(read_decoder(model)):
        param = parameter_at(ref)
        if param is not None and param in elements:  # no buffer
            indices = torch.arange(param.numel()).view(param.shape)
            elements[param].append((indices if ref.select is None else ref.select(indices)).flatten())
    for param, pieces in elements.items():
        assert torch.equal(torch.cat(pieces).sort().values, torch.arange(param.numel()))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_selected_rows_are_views(family):
    for ref in refs(read_decoder(tiny_model(family))):
        param = parameter_at(ref)
        if param is not None and ref.select is not None:
            assert ref.select(param).untyped_storage().data_ptr() == param.untyped_storage().data_ptr()


def test_refs_name_the_adapters_wrapper():
    model = with_peft(tiny_model("llama"))
    layer = model.get_base_model().model.layers[1]
    roles = read_decoder(model).layers[1]
    assert roles["q.weight"].module is layer.self_attn.q_proj
    assert isinstance(roles["q.weight"].module, peft.tuners.lora.Linear)
    chat = with_chat_lora(tiny_model("gpt_neox"))
    fused = chat.gpt_neox.layers[0].attention.query_key_value
    assert read_decoder(chat).layers[0]["k.weight"].module is fused
    assert hasattr(fused, "lora_left_weight")


def test_a_bias_added_by_an_adapter_has_a_ref():
    roles = read_decoder(with_peft(tiny_model("llama"))).layers[0]
    for role in ("q", "k", "v", "o", "gate", "up", "down"):
        assert parameter_at(roles[f"{role}.bias"]) is None
    assert "attention_norm.bias" not in roles
    assert read_decoder(tiny_model("phi3")).layers[0]["v.bias"].select(torch.arange(64)).tolist() == [*range(48, 64)]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["v_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ],
    ids=["modules_to_save", "embeddings", "dora", "experts"],
)
def test_models_with_every_kind_of_adapter_are_read(settings):
    assert read_decoder(with_peft(tiny_model("mixtral"), **settings)).family == "mixtral"


def test_adapters_that_run_as_modules_have_a_reason():
    with pytest.raises(UnsupportedModel, match="a TrainableTokensWrapper changes a module as it runs"):
        read_decoder(with_peft(tiny_model("mixtral"), target_modules=["q_proj"], trainable_token_indices=[3, 4]))
    model = peft.get_peft_model(tiny_model("llama"), peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]))
    with pytest.raises(UnsupportedModel, match=r"v_proj: peft\.tuners\.ia3.*Linear, which cannot be merged"):
        read_decoder(model)


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"])
def test_weights_that_are_buffers_have_a_reason(path):
    model = tiny_model("llama")
    module = model.get_submodule(path)
    weight = module.weight.detach()
    del module.weight
    module.register_buffer("weight", weight)
    with pytest.raises(UnsupportedModel, match=f"{path}.weight is not a parameter"):
        read_decoder(model)


def test_partitioned_parameters_use_ds_shape():
    """Under ZeRO-3 a parameter's own shape is empty, and `ds_shape` is its full shape."""
    model = tiny_model("phi3")
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    assert read_decoder(model).spec == read_decoder(tiny_model("phi3")).spec
    model.model.layers[1].self_attn.qkv_proj.weight.ds_shape = torch.Size((72, 32))
    with pytest.raises(
        UnsupportedModel, match=r"phi3: layer 1 has a packed parameter of 2304 elements; its roles take 2048"
    ):
        read_decoder(model)


UNSUPPORTED = {
    "norms after": ("opt", {"do_layer_norm_before": False}, "opt: do_layer_norm_before=False"),
    "norms without weights": ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    "bloom's residual": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "bloom: apply_residual_connection_post_layernorm=True",
    ),
    "bloom by slices": ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "bloom: slow_but_exact=True"),
    "unknown activation": (
        "llama",
        {"hidden_act": "mish"},
        "config.hidden_act='mish' is not supported; supported are",
    ),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "nearest is gpt2: transformer.h.0.crossattention"),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "gpt2: scale_attn_by_inverse_layer_idx"),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "gemma3: use_bidirectional_attention"),
    "not causal": ("llama", {"is_causal": False}, "llama: config.is_causal=False"),
    "a window that llama ignores": ("llama", {"sliding_window": 4}, "sliding_window=4 is not supported"),
    "types that mistral ignores": (
        "mistral",
        {"layer_types": ["full_attention"] * 3},
        "layer_types=.* is not supported",
    ),
    "windows that smollm3 does not use": (
        "smollm3",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "smollm3: layer_types with sliding layers",
    ),
    "rope on more than a head": ("gptj", {"rotary_dim": 16}, "gptj: rotary_dim 16 is larger than head_dim 8"),
    "queries scaled by position": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
        r"rope_parameters has \['llama_4_scaling_beta'\]",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_settings_raise(case):
    family, changes, message = UNSUPPORTED[case]
    model = tiny_model(family)  # some of these settings cannot be built, or are validated away
    try:
        model = tiny_model(family, **changes)
    except (TypeError, ValueError):
        for name, value in changes.items():
            setattr(model.config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        read_decoder(model)


def test_a_parameter_without_a_role_raises():
    model = tiny_model("llama")
    model.score = nn.Linear(32, 1)
    with pytest.raises(UnsupportedModel, match=r"llama: score.weight, score.bias \(2 in all\) has no role"):
        read_decoder(model)
    model = tiny_model("llama")
    model.model.layers[2].mlp.extra = nn.Linear(4, 4)
    with pytest.raises(UnsupportedModel, match=r"nearest is llama: model.layers.2.mlp.extra.weight has no role"):
        read_decoder(model)
    with pytest.raises(UnsupportedModel, match="Linear has no Hugging Face configuration"):
        read_decoder(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("family", "setting", "value", "message"),
    [
        (
            "llama",
            "num_key_value_heads",
            4,
            r"llama: layer 0 k.weight is \[16, 32\], and by the configuration",
        ),
        ("llama", "vocab_size", 50, r"llama: embedding.weight is \[97, 32\], and by the configuration \[50, 32\]"),
        ("llama", "num_hidden_layers", 2, "llama: 3 layers, and the configuration says 2"),
        ("gpt2", "n_positions", 7, r"gpt2: positions.weight is \[96, 32\], and by the configuration \[7, 32\]"),
        ("phi3", "num_key_value_heads", 1, "packed parameter of 2048 elements; its roles take 1536"),
        ("bloom", "n_head", 3, r"bloom: layer 0 q.weight"),
        ("mixtral", "num_local_experts", 8, r"mixtral: layer 0 router.weight is \[4, 32\]"),
    ],
)
def test_sizes_that_contradict_the_config_raise(family, setting, value, message):
    model = tiny_model(family)
    setattr(model.config, setting, value)
    with pytest.raises(UnsupportedModel, match=message):
        read_decoder(model)


def test_norms_with_different_epsilons_raise():
    model = tiny_model("llama")
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    with pytest.raises(UnsupportedModel, match="epsilons"):
        read_decoder(model)


@pytest.mark.parametrize("family", ["diffllama", "vaultgemma", "bitnet", "gpt_bigcode"])
def test_models_that_only_resemble_a_family_raise(family):
    """A difference of two attentions, no norms after attention and MLP, norms inside of them, one key head."""
    with pytest.raises(UnsupportedModel):
        read_decoder(unlisted_model(family))


def unlisted_model(family: str) -> nn.Module:
    """A tiny model of a family that is not in tests/tiny_models.py."""
    return tiny_model(family, sizes={**SIZES, "n_embd": 32, "n_layer": 3, "n_head": 4})


def test_interleaved_rope_is_detected_from_the_models_code():
    """No setting of Helium's or ERNIE's says that their rope is interleaved; it is read from their own code."""
    assert read_decoder(unlisted_model("helium")).spec.rotary_interleaved
    assert read_decoder(unlisted_model("ernie4_5")).spec.rotary_interleaved
    assert not read_decoder(unlisted_model("seed_oss")).spec.rotary_interleaved


def rope(rope_type: str, **parameters) -> dict:
    """Settings of a rope scaling."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


def test_max_positions_end_where_rope_tables_would_change():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {**rope("longrope", **factors), "original_max_position_embeddings": 40}
    assert read_decoder(tiny_model("llama")).spec.max_positions == 0
    assert read_decoder(tiny_model("llama", **rope("linear", factor=2.0))).spec.max_positions == 0
    assert read_decoder(tiny_model("llama", **rope("dynamic", factor=2.0))).spec.max_positions == 96
    assert read_decoder(tiny_model("phi3", **longrope)).spec.max_positions == 40
    assert read_decoder(tiny_model("gptj")).spec.max_positions == 96
    assert read_decoder(tiny_model("opt")).spec.max_positions == 96


def test_rope_tables_do_not_depend_on_earlier_longer_calls():
    """Dynamic scaling keeps the frequencies of the longest call; the training forward may have made one."""
    model = tiny_model("llama", **rope("dynamic", factor=2.0))
    table = read_decoder(model).rotary["rope"]
    positions = torch.arange(96)
    cos, sin = table(positions, torch.float32)
    model.model.rotary_emb(torch.empty(0), torch.arange(200)[None])
    assert torch.equal(table(positions, torch.float32)[0], cos)
    assert torch.equal(read_decoder(model).rotary["rope"](positions, torch.float32)[1], sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_tables_match_the_models(dtype):
    scaling = rope("yarn", factor=6.0, original_max_position_embeddings=16)
    model = tiny_model("llama", **scaling)
    positions = torch.tensor([0, 5, 95])
    cos, sin = read_decoder(model).rotary["rope"](positions, dtype)
    expected = model.model.rotary_emb(torch.empty(0, dtype=dtype), positions[None])
    for actual, expected_table in zip((cos, sin), expected, strict=True):
        assert actual.dtype == torch.float32
        assert torch.equal(torch.cat((actual, actual), -1), expected_table[0].float())
    assert cos[0, 0] > 1.1  # yarn's attention factor, which plain tables do not have
