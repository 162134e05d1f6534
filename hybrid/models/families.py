"""The known families, each a row with the rules for reading its models. `FAMILIES` has their order."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid.kernels.router import Router
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.torch_mamba2 import Mamba2
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.models.family import (
    Family,
    Packed,
    Table,
    alibi_slopes,
    by_layer_type,
    complex_table,
    delta_by_key_head,
    expert_biases,
    grouped,
    half_table,
    halves,
    halves_by_key_head,
    interleaved_biases,
    interleaved_experts,
    key,
    negated_table,
    over_channels,
    paired_table,
    rope_end,
    rope_table,
    same_window,
    stacked,
    transposed_experts,
    windows_by_type,
)
from hybrid.models.spec import OtherFamily


def without(roles: Mapping, *left_out: str) -> dict:
    """`roles` without those that are named."""
    return {role: path for role, path in roles.items() if role not in left_out}


# Llama: the layout that most decoders are variants of.
LLAMA = Family(
    name="llama",
    layers="model.layers",
    outer={"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    layer=(
        {
            "attention_norm": "input_layernorm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
    ),
    rotary="model.rotary_emb",
)

# Parts of many families: norms on queries and keys, and a mixture of experts as the MLP.
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
NORMED = {**LLAMA.layer[0], **HEAD_NORMS}
EXPERTS = {
    "router": "mlp.gate",
    "experts_gate_up": "mlp.experts:gate_up_proj",
    "experts_down": "mlp.experts:down_proj",
}


def with_experts(layer: Mapping, *more: Mapping) -> dict:
    """Return `layer` with a mixture of experts as the MLP, and further roles."""
    roles = {**without(layer, "gate", "up", "down"), **EXPERTS}
    for part in more:
        roles |= part
    return roles


def experts(router: Any, number: str = "num_local_experts", per_token: str = "num_experts_per_tok") -> dict:
    """Return the fields of DecoderSpec that a mixture has.  number, per_token: names of settings."""
    return {"num_experts": key(number), "experts_per_token": key(per_token), "router": router}


# One sliding window for every layer.
MISTRAL = replace(
    LLAMA, name="mistral", windows=same_window, declares=("sliding_window",), understands=("sliding_window",)
)

# Queries, keys and values in one matrix, and gate and up in another.
PHI3 = replace(
    MISTRAL,
    name="phi3",
    layer=(
        {
            "attention_norm": "input_layernorm",
            "q k v": Packed("self_attn.qkv_proj", stacked),
            "o": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "gate up": Packed("mlp.gate_up_proj", halves),
            "down": "mlp.down_proj",
        },
    ),
)

# Factors on the embedding, the attention scores, the residual stream and the logits.
FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
GRANITE = replace(
    LLAMA,
    name="granite",
    spec={field: key(name) for field, name in FACTORS.items()},
    declares=tuple(FACTORS.values()),
    understands=tuple(FACTORS.values()),
)

# HyperCLOVA X: Granite with perhaps norms after attention and MLP, and logits times their factor.
HYPERCLOVAX = replace(
    GRANITE,
    name="hyperclovax",
    layer=(  # the norms may be identities
        LLAMA.layer[0],
        {**LLAMA.layer[0], "attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"},
    ),
    spec={**GRANITE.spec, "logits_divisor": lambda model: 1 / model.config.logits_scaling},
    declares=(*GRANITE.declares, "use_post_norm"),
)

# Norms after attention and MLP, none before them; query and key norms over all heads together.
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    layer=(
        {
            **without(LLAMA.layer[0], "attention_norm", "mlp_norm"),
            **HEAD_NORMS,
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    spec={"qk_norm": "row", "norm_float32": True},
)

# Norms after attention and MLP too, whose gate and up are one matrix.
GLM = replace(
    LLAMA, name="glm", layer=({**without(LLAMA.layer[0], "gate", "up"), "gate up": Packed("mlp.gate_up_proj", halves)},)
)
GLM4 = replace(
    GLM,
    name="glm4",
    layer=(
        {
            **GLM.layer[0],
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
    ),
)

# GLM-4 whose rope table has each angle twice in a row: text of GLM-4.1V and 4.6V.
GLM4V = replace(GLM4, name="glm4v", spec={"rotary_interleaved": True}, table=paired_table)

# Queries scaled by their position.


def query_scale(name: str) -> Callable[[nn.Module], float]:
    """Return a function that returns a model's parameter `name` of rope, of which its attention scales the queries."""

    def parameter(model: nn.Module) -> float:
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        if "get_llama_4_attn_scale" not in inspect.unwrap(type(attention).forward).__globals__:
            raise OtherFamily(f"{type(attention).__name__} does not scale its queries by position")
        return model.config.rope_parameters[name]

    return parameter


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    positions=lambda config: rope_end(config, ("llama_4_scaling_beta",)),
    spec={
        "query_scale_beta": query_scale("llama_4_scaling_beta"),
        "query_scale_positions": query_scale("original_max_position_embeddings"),
    },
)


def has_alpha(config: PretrainedConfig) -> bool:
    """Whether rope's base is multiplied by a power of `alpha`, which Hunyuan calls dynamic; its tables are fixed."""
    return config.rope_parameters["rope_type"] == "dynamic" and bool(config.rope_parameters.get("alpha"))


# Norms on the heads of queries and keys, after rope.
HUNYUAN = replace(
    LLAMA,
    name="hunyuan",
    layer=({**LLAMA.layer[0], "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},),
    spec={"qk_norm": "head", "qk_norm_last": True},
    positions=lambda config: 0 if has_alpha(config) else rope_end(config, ("alpha",)),
)

# Layer norms without parameters; queries, keys and values may be clamped.
OLMO = replace(
    LLAMA,
    name="olmo",
    spec={"norm": "layer", "norm_eps": 1e-5, "qkv_clip": key("clip_qkv", 0.0)},
    declares=("clip_qkv",),
    understands=("clip_qkv",),
)

# Layer norms, and rope on part of a head; attention and MLP may be parallel behind one norm.
STABLELM = replace(
    LLAMA,
    name="stablelm",
    layer=(LLAMA.layer[0], without(LLAMA.layer[0], "mlp_norm")),
    spec={"norm": "layer", "parallel": key("use_parallel_residual"), "attention_first": True},
    declares=("use_parallel_residual", "qk_layernorm"),
    understands=("use_parallel_residual",),
)

# Layer norms, and an MLP without a gate.
STARCODER2 = replace(
    MISTRAL,
    name="starcoder2",
    layer=({**without(LLAMA.layer[0], "gate"), "up": "mlp.c_fc", "down": "mlp.c_proj"},),
    spec={"norm": "layer"},
)

# Attention and an MLP without a gate, parallel behind one layer norm; an LM head with a bias.
PHI = replace(
    LLAMA,
    name="phi",
    outer={**LLAMA.outer, "final_norm": "model.final_layernorm"},
    layer=(
        {
            **without(LLAMA.layer[0], "gate", "mlp_norm"),
            "o": "self_attn.dense",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
    ),
    spec={"norm": "layer", "parallel": True},
    declares=("qk_layernorm",),
)

# An MLP without a gate: with RMS norms, with layer norms, and with layer norms whose weights are 1 + w.
ARCEE = replace(LLAMA, name="arcee", layer=(without(LLAMA.layer[0], "gate"),))
JAIS2 = replace(ARCEE, name="jais2", spec={"norm": "layer"})
NEMOTRON = replace(ARCEE, name="nemotron", spec={"norm": "layer", "norm_offset": 1.0})

# Norms without parameters, also behind the embedding, and after rope, which turns the other way.
NANOCHAT = replace(
    LLAMA,
    name="nanochat",
    outer={**LLAMA.outer, "embedding_norm": "model.norm"},
    layer=(
        {
            **without(LLAMA.layer[0], "gate"),
            **HEAD_NORMS,
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
    ),
    spec={"qk_norm": "head", "qk_norm_last": True, "logits_softcap": key("final_logit_softcapping", 0.0)},
    table=negated_table,
    understands=("final_logit_softcapping",),
)

# Norms on the heads of queries and keys, and an activation with two parameters a layer.
APERTUS = replace(
    LLAMA,
    name="apertus",
    layer=(
        {
            **without(LLAMA.layer[0], "gate"),
            "attention_norm": "attention_layernorm",
            "mlp_norm": "feedforward_layernorm",
            **HEAD_NORMS,
            "xielu_positive": "mlp.act_fn:alpha_p",
            "xielu_negative": "mlp.act_fn:alpha_n",
        },
    ),
    activation="",
    spec={"qk_norm": "head", "activation": "xielu"},
)

# Attention and MLP parallel behind one layer norm, rope on neighbouring elements, logits times a factor.
COHERE = replace(
    LLAMA,
    name="cohere",
    layer=(without(LLAMA.layer[0], "mlp_norm"),),
    spec={
        "norm": "layer",
        "parallel": True,
        "attention_first": True,
        "logits_divisor": lambda model: 1 / (model.config.logit_scale or 1.0),
        "rotary_interleaved": True,
        "rotary_float32": True,
    },
    table=paired_table,
    declares=("logit_scale", "use_qk_norm"),
    understands=("logit_scale",),
)

# A window in some layers.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    windows=windows_by_type,
    declares=("sliding_window", "layer_types"),
    understands=("sliding_window", "layer_types"),
)

# Rope in the layers with a window alone.
COHERE2 = replace(
    COHERE,
    name="cohere2",
    windows=windows_by_type,
    rotaries=lambda config: ["rope" if window else "" for window in windows_by_type(config)],
    declares=("logit_scale", *QWEN2.declares),
    understands=("logit_scale", *QWEN2.understands),
)

# OLMo 2 with a window in some layers, and a rope table for each layer type.
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    windows=windows_by_type,
    rotaries=lambda config: list(config.layer_types),
    declares=QWEN2.declares,
    understands=QWEN2.understands,
)

# Norms after attention and MLP, and of the heads of queries and keys; with windows, rope in the layers with one alone.
EXAONE4 = replace(
    OLMO3,
    name="exaone4",
    rotaries=lambda config: [
        "rope" if window or config.sliding_window is None else "" for window in windows_by_type(config)
    ],
    spec={"qk_norm": "head"},
    declares=(*QWEN2.declares, "sliding_window_pattern"),
)

# Also norms on the heads of queries and keys.
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    layer=(NORMED,),
    spec={"qk_norm": "head"},
)

# Without windows: the text of Qwen3-VL.
QWEN3_VL = replace(LLAMA, name="qwen3_vl", layer=QWEN3.layer, spec=QWEN3.spec)


# Gated attention in some layers, gated delta nets in the others. Norms' weights are 1 + w, but for those of
# delta nets.


def rope_in_attention(config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer: rope in those with attention."""
    return by_layer_type(config, {"full_attention": "rope", "linear_attention": "", "conv": ""})


SILU_ALONE = {"hidden_act other than silu": lambda config: config.hidden_act not in ("silu", "swish")}
SOME_ATTENTION = {"layer_types without full_attention": lambda config: "full_attention" not in config.layer_types}
QWEN3_5 = replace(
    LLAMA,
    name="qwen3_5",
    layer=(
        QWEN3.layer[0],
        {
            **without(LLAMA.layer[0], "q", "k", "v", "o"),
            "delta_qkv": "linear_attn.in_proj_qkv",
            "delta_z": "linear_attn.in_proj_z",
            "delta_b": "linear_attn.in_proj_b",
            "delta_a": "linear_attn.in_proj_a",
            "conv": Packed("linear_attn.conv1d", over_channels),
            "dt_bias": "linear_attn:dt_bias",
            "a_log": "linear_attn:A_log",
            "delta_norm": "linear_attn.norm",
            "delta_o": "linear_attn.out_proj",
        },
    ),
    rotaries=rope_in_attention,
    spec={
        "qk_norm": "head",
        "norm_offset": 1.0,
        "norm_float32": True,
        "output_gate": True,
        "recurrent": lambda model: GatedDeltaNet(
            key_heads=model.config.linear_num_key_heads,
            value_heads=model.config.linear_num_value_heads,
            key_dim=model.config.linear_key_head_dim,
            value_dim=model.config.linear_value_head_dim,
            conv_width=model.config.linear_conv_kernel_dim,
        ),
    },
    declares=("layer_types", "linear_num_key_heads"),
    understands=("layer_types",),
    refuses={**SILU_ALONE, **SOME_ATTENTION},
)


def smollm3_rotaries(config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer. In `no_rope_layers`, contrary to its name, 1 means a layer with rope."""
    return ["rope" if has_rope else "" for has_rope in config.no_rope_layers[: config.num_hidden_layers]]


# Qwen2, with some layers without rope (NoPE).
SMOLLM3 = replace(
    QWEN2,
    name="smollm3",
    rotaries=smollm3_rotaries,
    declares=(*QWEN2.declares, "no_rope_layers", "use_sliding_window"),
    understands=(*QWEN2.understands, "no_rope_layers"),
    refuses={
        "layer_types with sliding layers, and use_sliding_window=False,": lambda config: (
            not config.use_sliding_window and "sliding_attention" in config.layer_types
        )
    },
)

# Gemma: norm weights are 1 + w, and embeddings are scaled. Gemma 2 and 3 have norms before and after attention and MLP,
# and windows by layer type; Gemma 2 soft caps, Gemma 3 norms on the heads of queries and keys, and a rope table for
# each layer type.


def rounded_to(model: nn.Module, factor: float) -> float:
    """Return a factor of the embedding, rounded to the embedding's dtype as in the model."""
    return torch.tensor(factor).to(model.get_input_embeddings().weight.dtype).item()


GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA_SPEC = {
    "norm_offset": 1.0,
    "norm_float32": True,
    "embedding_multiplier": lambda model: rounded_to(model, model.config.hidden_size**0.5),
    "attention_scale": lambda model: model.config.query_pre_attn_scalar**-0.5,
    "logits_softcap": key("final_logit_softcapping", 0.0),
}
BIDIRECTIONAL = {
    "use_bidirectional_attention": lambda config: bool(getattr(config, "use_bidirectional_attention", False))
}
GEMMA = replace(
    LLAMA,
    name="gemma",
    own_embedding=True,
    spec={name: GEMMA_SPEC[name] for name in ("norm_offset", "norm_float32", "embedding_multiplier")},
    understands=("use_bidirectional_attention",),
    refuses=BIDIRECTIONAL,
)
GEMMA2 = replace(
    QWEN2,
    name="gemma2",
    layer=({**QWEN2.layer[0], **GEMMA_NORMS},),
    activation="hidden_activation",
    own_embedding=True,
    spec={**GEMMA_SPEC, "attention_softcap": key("attn_logit_softcapping", 0.0)},
    declares=(*QWEN2.declares, "query_pre_attn_scalar"),
    understands=(
        *QWEN2.understands,
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ),
    refuses=BIDIRECTIONAL,
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    layer=({**QWEN3.layer[0], **GEMMA_NORMS},),
    rotaries=lambda config: list(config.layer_types),
    spec={**GEMMA_SPEC, "qk_norm": "head"},  # nothing reads its attn_logit_softcapping (transformers 5.23)
)

# Gemma 4: norms with weights w; heads of other sizes in the layers without a window, which may have one projection for
# keys and values; upper layers that read the keys and values of lower ones; per-layer inputs; a mixture parallel to the
# MLP.


def gemma4_kv_layers(config: PretrainedConfig) -> list[int | None]:
    """`LayerSpec.kv_layer` of every layer. Sharing layers read the last layer of their type with its own cache."""
    own = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(config.layer_types[:own])}
    return [None] * own + [last[kind] for kind in config.layer_types[own:]]


def if_mixed(name: str) -> Callable[[nn.Module], int]:
    """Return a function that returns a model's setting `name` if it has experts; else 0."""
    return lambda model: getattr(model.config, name) if getattr(model.config, "enable_moe_block", False) else 0


GEMMA4_LAYER = {**QWEN3.layer[0], **GEMMA_NORMS, "v_norm": "self_attn.v_norm", "layer_scalar": ":layer_scalar"}
GEMMA4_ATTENTION = (
    GEMMA4_LAYER,
    {**GEMMA4_LAYER, "v": "self_attn.k_proj"},
    without(GEMMA4_LAYER, "k", "v", "k_norm", "v_norm"),
)
GEMMA4_INPUTS = {
    "per_layer_input_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
    "per_layer_post_norm": "post_per_layer_input_norm",
}
GEMMA4_EXPERTS = {
    **{f"shared_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "shared_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_gate_up": "experts:gate_up_proj",
    "experts_down": "experts:down_proj",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "router_norm": "router.norm",
    "router": "router.proj",
    "router_scale": "router:scale",
    "expert_scale": "router:per_expert_scale",
}
GEMMA4 = replace(
    GEMMA3,
    name="gemma4",
    outer={
        **LLAMA.outer,
        "per_layer_embedding": "model.embed_tokens_per_layer",
        "per_layer_model_projection": "model.per_layer_model_projection",
        "per_layer_projection_norm": "model.per_layer_projection_norm",
    },
    optional=("per_layer_embedding", "per_layer_model_projection", "per_layer_projection_norm"),
    layer=tuple(
        {**layer, **inputs}
        for attention in GEMMA4_ATTENTION
        for layer in ({**without(attention, "gate", "up", "down"), **GEMMA4_EXPERTS}, attention)
        for inputs in (GEMMA4_INPUTS, {})
    ),
    spec={
        "qk_norm": "head",
        "attention_scale": 1.0,
        "norm_float32": True,
        "embedding_multiplier": GEMMA_SPEC["embedding_multiplier"],
        "logits_softcap": GEMMA_SPEC["logits_softcap"],
        "per_layer_input_size": key("hidden_size_per_layer_input", 0),
        "num_experts": if_mixed("num_experts"),
        "experts_per_token": if_mixed("top_k_experts"),
        "router": Router(normalize=True, float32_weights=True),
    },
    varies=("head_dim", "num_key_value_heads"),
    head_sizes=lambda config: [(layer.num_key_value_heads, layer.head_dim) for layer in config.per_layer_config],
    kv_layers=gemma4_kv_layers,
    declares=("sliding_window", "layer_types", "num_kv_shared_layers"),
    understands=(*GEMMA2.understands, "num_experts"),
    refuses={
        "use_bidirectional_attention='all'": lambda config: (
            getattr(config, "use_bidirectional_attention", None) == "all"
        )
    },
)

# Mixtral and Qwen3-MoE: Mistral and Qwen3 with a mixture of experts as the MLP, in all or some layers.
MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    layer=(with_experts(MISTRAL.layer[0]),),
    spec=experts(Router(normalize=True, float32_weights=True)),
    declares=("sliding_window", "num_local_experts"),
    understands=("sliding_window", "num_local_experts", "num_experts"),  # num_experts: the config's alias
)

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    layer=(with_experts(NORMED), NORMED),
    windows=same_window,
    spec={
        **QWEN3.spec,
        **experts(lambda model: Router(normalize=model.config.norm_topk_prob), "num_experts"),
    },
    declares=("sliding_window", "norm_topk_prob", "decoder_sparse_step"),
    understands=("sliding_window", "num_experts", "num_local_experts"),
)

# Mellum: windows and a rope table by layer type.
MELLUM = replace(
    QWEN3_MOE,
    name="mellum",
    windows=windows_by_type,
    rotaries=lambda config: list(config.layer_types),
    declares=(*QWEN2.declares, "norm_topk_prob", "mlp_layer_types", "num_mtp_layers"),
    understands=(*QWEN2.understands, "num_experts", "num_local_experts"),
)

# The mixtures of Qwen3-VL: no windows, and weights that always sum to 1.
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    windows=None,
    spec={**QWEN3_MOE.spec, "router": Router(normalize=True)},
    declares=("decoder_sparse_step",),
    understands=("num_experts", "num_local_experts"),
)

# GPT-OSS: sinks, biases everywhere, experts [in, out] whose gate and up are interleaved, a clamped activation.
GPT_OSS = replace(
    QWEN2,
    name="gpt_oss",
    layer=(
        {
            **without(QWEN2.layer[0], "gate", "up", "down"),
            "sinks": "self_attn:sinks",
            "router": "mlp.router",
            "experts_gate_up": Packed("mlp.experts:gate_up_proj", interleaved_experts),
            "experts_gate_up.bias": Packed("mlp.experts:gate_up_proj_bias", interleaved_biases),
            "experts_down": Packed("mlp.experts:down_proj", transposed_experts),
            "experts_down.bias": Packed("mlp.experts:down_proj_bias", expert_biases),
        },
    ),
    activation="",
    spec={
        "norm_float32": True,
        "activation": "swiglu_clamped",
        "swiglu_alpha": key("swiglu_alpha"),
        "swiglu_limit": key("swiglu_limit"),
        **experts(Router("softmax_chosen")),
    },
    table=half_table,
    declares=(*QWEN2.declares, "swiglu_alpha", "swiglu_limit", "num_local_experts"),
    understands=(*QWEN2.understands, "num_local_experts", "num_experts"),
)

# Shared experts in addition to the routed ones, and a correction bias for the choice of experts.
SHARED = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
CORRECTION = {"correction": "mlp.gate:e_score_correction_bias"}


def grouped_router(model: nn.Module) -> Router:
    """Return DeepSeek V3's router: sigmoid scores, and groups of experts."""
    config = model.config
    return Router(
        "sigmoid",
        float32=True,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        min_total=1e-20,
        scale=config.routed_scaling_factor,
        float32_weights=True,
    )


# GLM-4-MoE and Solar-Open: sigmoid scores, a correction bias, groups, shared experts, first layers without experts.
# dots.1 has windows too; EXAONE-MoE also no rope in the layers without a window.
GLM4_MOE = replace(
    LLAMA,
    name="glm4_moe",
    layer=(
        *(with_experts(layer, CORRECTION, SHARED) for layer in (NORMED, LLAMA.layer[0])),
        *(NORMED, LLAMA.layer[0]),
    ),
    spec={
        "qk_norm": lambda model: "head" if hasattr(model.model.layers[0].self_attn, "q_norm") else "",
        **experts(grouped_router),
    },
    declares=("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "n_routed_experts"),
    understands=(
        *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_local_experts", "use_qk_norm"),
    ),
)
DOTS1 = replace(
    GLM4_MOE,
    name="dots1",
    windows=windows_by_type,
    declares=(*GLM4_MOE.declares, *QWEN2.declares),
    understands=(*GLM4_MOE.understands, *QWEN2.understands),
)


def exaone_rotaries(config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer: rope in those with a window; in all if `sliding_window` is None."""
    full = "rope" if config.sliding_window is None else ""
    return [full if kind == "full_attention" else "rope" for kind in config.layer_types]


EXAONE_MOE = replace(
    DOTS1,
    name="exaone_moe",
    rotaries=exaone_rotaries,
    spec={**DOTS1.spec, "num_experts": key("num_experts")},
    declares=(*QWEN2.declares, "sliding_window_pattern", "n_group", "topk_group", "routed_scaling_factor"),
    understands=(*QWEN2.understands, "first_k_dense_replace", "num_experts", "num_shared_experts"),
)

# Hunyuan 3: sigmoid scores and a correction bias without groups.
HY_V3 = replace(
    GLM4_MOE,
    name="hy_v3",
    layer=(with_experts(NORMED, {"correction": "mlp:e_score_correction_bias"}, SHARED), NORMED),
    spec={
        **GLM4_MOE.spec,
        "router": lambda model: Router(
            "sigmoid",
            float32=True,
            normalize=True,
            min_total=1e-20,
            scale=model.config.router_scaling_factor,
            float32_weights=True,
        ),
    },
    declares=("router_scaling_factor", "enable_moe_fp32_combine"),
    understands=("num_experts", "num_local_experts", "num_shared_experts"),
)

# AFMoE: the same, and norms after attention and MLP too, gates of the attention's output, windows, and rope in the
# layers with one alone.
AFMOE_LAYER = {
    **NORMED,
    "attention_gate": "self_attn.gate_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
AFMOE = replace(
    HY_V3,
    name="afmoe",
    layer=(
        with_experts(AFMOE_LAYER, {"router": "mlp.router.gate", "correction": "mlp:expert_bias"}, SHARED),
        AFMOE_LAYER,
    ),
    windows=windows_by_type,
    rotaries=lambda config: ["rope" if kind == "sliding_attention" else "" for kind in config.layer_types],
    spec={
        "qk_norm": "head",
        "gate_dim": key("head_dim"),
        "embedding_multiplier": lambda model: model.config.hidden_size**0.5 if model.config.mup_enabled else 1.0,
        **experts(
            lambda model: Router(
                "sigmoid", normalize=True, epsilon=1e-20, scale=model.config.route_scale, float32_weights=True
            ),
            "num_experts",
        ),
    },
    declares=(*QWEN2.declares, "route_scale", "mup_enabled", "num_dense_layers"),
    understands=(*QWEN2.understands, "num_experts", "num_shared_experts"),
    refuses={"num_shared_experts=0": lambda config: not config.num_shared_experts},
)

# MiMo-V2: sinks and twice as many key heads in the layers with windows, values narrower than keys and scaled, and a
# rope table for each layer type.
MIMO_LAYERS = ({**LLAMA.layer[0], "sinks": "self_attn:sinks"}, LLAMA.layer[0])
MIMO_V2 = replace(
    GLM4_MOE,
    name="mimo_v2_flash",
    layer=(*(with_experts(layer, CORRECTION) for layer in MIMO_LAYERS), *MIMO_LAYERS),
    windows=windows_by_type,
    rotaries=lambda config: list(config.layer_types),
    head_sizes=lambda config: [
        (config.num_key_value_heads * (1 + (kind == "sliding_attention")), config.head_dim)
        for kind in config.layer_types
    ],
    spec={
        **experts(grouped_router),
        "value_dim": key("v_head_dim"),
        "value_multiplier": key("attention_value_scale", 1.0),
    },
    declares=(*GLM4_MOE.declares, *QWEN2.declares, "v_head_dim", "attention_value_scale", "mlp_layer_types"),
    understands=(*QWEN2.understands, "n_routed_experts", "num_local_experts"),
)

# MiniMax-M2: the same without shared experts, and norms over all heads of a token.
MINIMAX_M2 = replace(
    GLM4_MOE,
    name="minimax_m2",
    layer=(with_experts(NORMED, {"correction": "mlp:e_score_correction_bias"}),),
    spec={
        **GLM4_MOE.spec,
        "qk_norm": "row",
        "router": Router("sigmoid", normalize=True, float32_weights=True),
    },
    declares=("router_jitter_noise", "num_local_experts"),
    understands=("num_experts", "num_local_experts"),
)

# Hunyuan-MoE: Hunyuan's attention, and softmax scores; a router in float32, as it is made, reads float32.


def hunyuan_router(model: nn.Module) -> Router:
    """Return Hunyuan-MoE's router. Its logits and weights have the dtype of its matrix."""
    gate: Any = model.get_submodule("model.layers.0.mlp.gate.wg")
    in_float32 = gate.weight.dtype == torch.float32
    return Router(float32=in_float32, normalize=True, float32_weights=in_float32)


HUNYUAN_MOE = replace(
    HUNYUAN,
    name="hunyuan_v1_moe",
    layer=(
        with_experts(
            HUNYUAN.layer[0],
            {"router": "mlp.gate.wg"},
            {role: path.replace("shared_experts", "shared_mlp") for role, path in SHARED.items()},
        ),
    ),
    spec={
        **HUNYUAN.spec,
        **experts(hunyuan_router, "num_experts", "moe_topk"),
    },
    declares=("moe_topk", "num_experts"),
    understands=("num_experts", "num_local_experts"),
    refuses={"moe_topk by layer": lambda config: not isinstance(config.moe_topk, int)},
)

# ERNIE-4.5-MoE: softmax scores with a correction bias, in float32.
ERNIE_CORRECTION = {
    "correction": Packed("mlp.gate.moe_statics:e_score_correction_bias", lambda spec: (lambda bias: bias.view(-1),))
}
ERNIE_MOE = replace(
    LLAMA,
    name="ernie4_5_moe",
    layer=(
        with_experts(LLAMA.layer[0], ERNIE_CORRECTION, SHARED),
        with_experts(LLAMA.layer[0], ERNIE_CORRECTION),
        LLAMA.layer[0],
    ),
    spec=experts(
        lambda model: Router(float32=True, normalize=True, min_total=model.config.moe_norm_min), "num_experts"
    ),
    declares=("moe_norm_min", "moe_num_experts"),
    understands=("num_experts",),
)

# Qwen2-MoE: shared experts with a sigmoid gate.
SHARED_EXPERT = {
    **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
}
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    layer=(with_experts(QWEN2.layer[0], SHARED_EXPERT), QWEN2.layer[0]),
    spec=experts(QWEN3_MOE.spec["router"], "num_experts"),
    declares=(*QWEN2.declares, "norm_topk_prob", "decoder_sparse_step", "shared_expert_intermediate_size"),
    understands=(*QWEN2.understands, "num_experts"),
)

# Qwen3.5-MoE; and Qwen3-Next, whose delta nets have their projections by key head.
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    layer=tuple(with_experts(layer, SHARED_EXPERT) for layer in QWEN3_5.layer),
    spec={
        **QWEN3_5.spec,
        **experts(Router(normalize=True), "num_experts"),
    },
    declares=(*QWEN3_5.declares, "shared_expert_intermediate_size"),
    understands=(*QWEN3_5.understands, "num_experts"),
)
NEXT_DELTA_NET = {
    **without(QWEN3_5.layer[1], "delta_qkv", "delta_z", "delta_b", "delta_a"),
    "delta_qkv delta_z": Packed("linear_attn.in_proj_qkvz", delta_by_key_head),
    "delta_b delta_a": Packed("linear_attn.in_proj_ba", halves_by_key_head),
}
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="qwen3_next",
    layer=(
        *(with_experts(layer, SHARED_EXPERT) for layer in (QWEN3_5.layer[0], NEXT_DELTA_NET)),
        *(QWEN3_5.layer[0], NEXT_DELTA_NET),
    ),
    spec={**QWEN3_5_MOE.spec, "router": lambda model: Router(normalize=model.config.norm_topk_prob)},
    declares=(*QWEN3_5_MOE.declares, "norm_topk_prob", "decoder_sparse_step"),
)

# OLMo-hybrid: OLMo 2's attention, with or without rope, in some layers, and in the others gated delta nets whose
# matrices are separate, behind norms as Llama's.
OLMO_DELTA_NET = {
    **without(LLAMA.layer[0], "q", "k", "v", "o"),
    **{f"delta_{part}": f"linear_attn.{part}_proj" for part in ("q", "k", "v", "b", "a", "o")},
    "delta_z": "linear_attn.g_proj",
    "delta_norm": "linear_attn.o_norm",
    **{role: QWEN3_5.layer[1][role] for role in ("conv", "dt_bias", "a_log")},
}


def olmo_delta_net(model: nn.Module) -> GatedDeltaNet:
    """`DecoderSpec.recurrent` of OLMo-hybrid. The epsilon of its norm is no setting."""
    net: Any = model.get_submodule(f"model.layers.{model.config.layer_types.index('linear_attention')}.linear_attn")
    return replace(
        QWEN3_5.spec["recurrent"](model),
        beta_scale=2.0 if model.config.linear_allow_neg_eigval else 1.0,
        norm_eps=net.o_norm.variance_epsilon,
    )


OLMO_HYBRID_ROPE = replace(
    OLMO2,
    name="olmo_hybrid",
    layer=(OLMO2.layer[0], OLMO_DELTA_NET),
    rotaries=rope_in_attention,
    spec={"qk_norm": "row", "recurrent": olmo_delta_net},
    declares=("layer_types", "linear_allow_neg_eigval"),
    understands=("layer_types",),
    refuses={**SILU_ALONE, **SOME_ATTENTION},
)
OLMO_HYBRID = replace(OLMO_HYBRID_ROPE, rotary="", rotaries=None)

# OLMoE: norms over all heads of a token.
OLMOE = replace(
    LLAMA,
    name="olmoe",
    layer=(with_experts(NORMED),),
    spec={**QWEN2_MOE.spec, "qk_norm": "row"},
    declares=("norm_topk_prob", "clip_qkv"),
    understands=("num_experts", "num_local_experts"),
)

# GraniteMoE and GraniteMoE-Shared: Granite's factors, with a softmax over the chosen experts.
GRANITE_EXPERTS = {role: path.replace("mlp.", "block_sparse_moe.") for role, path in EXPERTS.items()}
GRANITE_EXPERTS["router"] = "block_sparse_moe.router"
GRANITE_LAYER = with_experts(LLAMA.layer[0], GRANITE_EXPERTS)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    layer=(
        {
            **GRANITE_LAYER,
            "shared_gate shared_up": Packed("shared_mlp.input_linear", halves),
            "shared_down": "shared_mlp.output_linear",
        },
        GRANITE_LAYER,
    ),
    spec={
        **GRANITE.spec,
        **experts(Router("softmax_chosen")),
    },
    declares=(*GRANITE.declares, "num_local_experts"),
    understands=(*GRANITE.understands, "num_local_experts"),
)

# Granite with windows: sinks, and a rope table for each theta; layers with theta 0 have no rope.


def rotaries_by_theta(config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer: the index of its theta's table."""
    thetas = sorted({theta for theta in config.layer_rope_theta if theta})
    of_layers = config.layer_rope_theta[: config.num_hidden_layers]
    return [str(thetas.index(theta)) if theta else "" for theta in of_layers]


SINKS = {"sinks": "self_attn:sinks"}
GRANITE_SWA = replace(
    GRANITE,
    name="granite_swa",
    layer=({**LLAMA.layer[0], **SINKS},),
    windows=windows_by_type,
    rotaries=rotaries_by_theta,
    rotary="model.rotary_embs",
    table=lambda tables, key: rope_table(tables.get_submodule(key), "rope"),
    declares=(*GRANITE.declares, *QWEN2.declares, "layer_rope_theta"),
    understands=(*GRANITE.understands, *QWEN2.understands),
)
GRANITE_MOE_SWA = replace(
    GRANITE_SWA,
    name="granitemoe_swa",
    layer=tuple({**layer, **SINKS} for layer in GRANITE_MOE.layer),
    spec=GRANITE_MOE.spec,
    declares=(*GRANITE_SWA.declares, "num_local_experts"),
    understands=(*GRANITE_SWA.understands, "num_local_experts"),
)

# Mamba 2 mixers in some layers. Nemotron-H: a layer is a mixer, attention without rope, an MLP without a gate or a
# mixture of MLPs without a gate, behind one norm.


def mamba2(at: str) -> dict:
    """Return the roles of a Mamba 2 mixer, the module `at` of a layer."""
    return {
        "mamba_in": f"{at}.in_proj",
        "conv": Packed(f"{at}.conv1d", over_channels),
        "dt_bias": f"{at}:dt_bias",
        "a_log": f"{at}:A_log",
        "skip": f"{at}:D",
        "mamba_norm": f"{at}.norm",
        "mamba_o": f"{at}.out_proj",
    }


NEMOTRON_H_EXPERTS = {
    "mlp_norm": "norm",
    "router": "mixer.gate",
    "correction": "mixer.gate:e_score_correction_bias",
    "experts_gate_up": "mixer.experts:up_proj",
    "experts_down": "mixer.experts:down_proj",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
}
NEMOTRON_H = Family(
    name="nemotron_h",
    layers="model.layers",
    outer={"embedding": "model.embeddings", "final_norm": "model.norm_f", "head": "lm_head"},
    layer=(
        {"attention_norm": "norm", **mamba2("mixer")},
        {"attention_norm": "norm", **{role: f"mixer.{role}_proj" for role in ("q", "k", "v", "o")}},
        {"mlp_norm": "norm", "up": "mixer.up_proj", "down": "mixer.down_proj"},
        NEMOTRON_H_EXPERTS,  # before the other, whose projections are identities in models without them
        {**NEMOTRON_H_EXPERTS, "latent_in": "mixer.fc1_latent_proj", "latent_out": "mixer.fc2_latent_proj"},
    ),
    activation="mlp_hidden_act",
    spec={
        "gated": False,
        "recurrent": lambda model: Mamba2(
            heads=model.config.mamba_num_heads,
            head_dim=model.config.mamba_head_dim,
            groups=model.config.n_groups,
            state_size=model.config.ssm_state_size,
            conv_width=model.config.conv_kernel,
            min_step=model.config.time_step_min,  # `time_step_limit` is not read (transformers 5.23)
        ),
        **experts(grouped_router, "n_routed_experts"),
        "latent_size": key("moe_latent_size", 0),
    },
    declares=("mamba_num_heads", "time_step_min", "moe_latent_size", "use_conv_bias", "n_routed_experts"),
    understands=("layer_types", "n_routed_experts", "n_shared_experts", "num_local_experts"),
    refuses={
        "mamba_hidden_act other than silu": lambda config: config.mamba_hidden_act not in ("silu", "swish"),
        **SOME_ATTENTION,
    },
)

# Mamba 2 mixers alone, without keys and values.


def mamba2_sizes(*names: str) -> Callable[[nn.Module], Mamba2]:
    """Return a function that returns a model's Mamba 2 mixer.

    names: settings with the number and size of heads, the groups, and the sizes of states and convolution.
    """

    def mixer(model: nn.Module) -> Mamba2:
        config: Any = model.config
        return Mamba2(*(getattr(config, name) for name in names), *config.time_step_limit)

    return mixer


MAMBA_2 = Family(
    name="mamba2",
    layers="backbone.layers",
    outer={"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"},
    layer=({"attention_norm": "norm", **mamba2("mixer")},),
    activation="",
    spec={
        "recurrent": mamba2_sizes("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
        "residual_float32": key("residual_in_fp32"),
    },
    declares=("num_heads", "state_size", "time_step_limit", "residual_in_fp32"),
    understands=("layer_types",),
    refuses=SILU_ALONE,
)

# Bamba; and Granite 4's hybrids, whose shared experts are the MLP of models without others, with or without rope.
MAMBA2_SPEC = {
    "recurrent": mamba2_sizes("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
}
MAMBA2_SETTINGS = ("mamba_n_heads", "time_step_limit", "mamba_conv_bias", "mamba_proj_bias")
BAMBA = replace(
    LLAMA,
    name="bamba",
    outer={**LLAMA.outer, "final_norm": "model.final_layernorm"},
    layer=tuple(
        {
            **layer,
            "mlp_norm": "pre_ff_layernorm",
            **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
        }
        for layer in (LLAMA.layer[0], {**without(LLAMA.layer[0], "q", "k", "v", "o"), **mamba2("mamba")})
    ),
    rotaries=rope_in_attention,
    spec=MAMBA2_SPEC,
    declares=(*MAMBA2_SETTINGS, "attn_layer_indices"),
    understands=("layer_types",),
    refuses={**SILU_ALONE, **SOME_ATTENTION},
)
GRANITE_DENSE = {
    **without(LLAMA.layer[0], "gate", "up"),
    "gate up": Packed("shared_mlp.input_linear", halves),
    "down": "shared_mlp.output_linear",
}
GRANITE_HYBRID_ROPE = replace(
    GRANITE_MOE,
    name="granitemoehybrid",
    layer=tuple(
        layer
        for with_attention in (GRANITE_MOE.layer[0], GRANITE_DENSE)
        for layer in (with_attention, {**without(with_attention, "q", "k", "v", "o"), **mamba2("mamba")})
    ),
    rotaries=rope_in_attention,
    spec={**GRANITE_MOE.spec, **MAMBA2_SPEC},
    declares=(*GRANITE_MOE.declares, *MAMBA2_SETTINGS, "position_embedding_type", "shared_intermediate_size"),
    understands=(*GRANITE_MOE.understands, "layer_types"),
    refuses={**SILU_ALONE, **SOME_ATTENTION},
)
GRANITE_HYBRID = replace(GRANITE_HYBRID_ROPE, rotary="", rotaries=None)

# Falcon-H1: attention and a Mamba 2 mixer in every layer, of the same input, and factors everywhere.


def falcon_h1_mixer(model: nn.Module) -> Mamba2:
    """`DecoderSpec.recurrent` of Falcon-H1."""
    return replace(
        MAMBA2_SPEC["recurrent"](model),
        in_multiplier=model.config.ssm_in_multiplier,
        out_multiplier=model.config.ssm_out_multiplier,
        multipliers=tuple(model.config.ssm_multipliers),
    )


FALCON_H1_LAYER = {
    **LLAMA.layer[0],
    "mlp_norm": "pre_ff_layernorm",
    **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
    **without(mamba2("mamba"), "mamba_norm"),
}
FALCON_H1 = replace(
    BAMBA,
    name="falcon_h1",
    layer=(FALCON_H1_LAYER, {**FALCON_H1_LAYER, "mamba_norm": "mamba.norm"}),  # the norm may be an identity
    rotaries=None,
    spec={
        "recurrent": falcon_h1_mixer,
        **{name: key(name) for name in ("embedding_multiplier", "key_multiplier")},
        **{f"attention_{part}_multiplier": key(f"attention_{part}_multiplier") for part in ("in", "out")},
        "gate_multiplier": lambda model: model.config.mlp_multipliers[0],
        "mlp_multiplier": lambda model: model.config.mlp_multipliers[1],
        "logits_divisor": lambda model: 1 / model.config.lm_head_multiplier,
    },
    declares=(*MAMBA2_SETTINGS, "ssm_multipliers", "mlp_multipliers", "key_multiplier", "mamba_rms_norm"),
    understands=("layer_types", "embedding_multiplier", "lm_head_multiplier"),
    refuses={
        **SILU_ALONE,
        "mamba_norm_before_gate=True": lambda config: config.mamba_rms_norm and config.mamba_norm_before_gate,
    },
)

# LFM2: gated short convolutions in some layers, and norms on the heads of queries and keys in the others.


def short_conv(model: nn.Module) -> ShortConv | None:
    """`DecoderSpec.recurrent` of LFM2; None if all layers have attention."""
    if "conv" not in model.config.layer_types:
        return None
    return ShortConv(channels=model.config.hidden_size, conv_width=model.config.conv_L_cache)


LFM2_PARTS = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
LFM2 = replace(
    LLAMA,
    name="lfm2",
    outer={**LLAMA.outer, "final_norm": "model.embedding_norm"},
    layer=(
        {
            **LFM2_PARTS,
            **{role: f"self_attn.{role}_proj" for role in ("q", "k", "v")},
            "o": "self_attn.out_proj",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
        },
        {
            **LFM2_PARTS,
            "conv_in": "conv.in_proj",
            "conv": Packed("conv.conv", over_channels),
            "conv_o": "conv.out_proj",
        },
    ),
    activation="",
    rotaries=rope_in_attention,
    spec={"qk_norm": "head", "recurrent": short_conv},
    declares=("layer_types", "conv_L_cache"),
    understands=("layer_types",),
    refuses=SOME_ATTENTION,
)


# LFM3: LFM2 with windows in some layers, a rope table for each layer type, and perhaps gates of each head's output and
# norms after mixer and MLP.


LFM3_NORMS = {"attention_post_norm": "post_operator_norm", "mlp_post_norm": "post_ffn_norm"}
LFM3_LAYERS = (
    {**LFM2.layer[0], **HEAD_NORMS, "o": "self_attn.o_proj", "attention_gate": "self_attn.g_proj"},
    {**LFM2.layer[0], **HEAD_NORMS, "o": "self_attn.o_proj"},
    LFM2.layer[1],
)
LFM3 = replace(
    LFM2,
    name="lfm3",
    layer=(*LFM3_LAYERS, *({**layer, **LFM3_NORMS} for layer in LFM3_LAYERS)),  # the norms may be identities
    windows=lambda config: [
        config.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in config.layer_types
    ],
    rotaries=lambda config: ["" if kind == "conv" else kind for kind in config.layer_types],
    spec={**LFM2.spec, "gate_dim": lambda model: int(model.config.use_attention_gate)},
    declares=(*LFM2.declares, "use_sandwich_norm", "use_attention_gate", "sliding_window"),
    understands=(*LFM2.understands, "sliding_window"),
    refuses={},
)


# LFM2-MoE: sigmoid scores, rounded at every step, with or without a correction bias; first layers without experts.


def lfm2_router(model: nn.Module) -> Router:
    """Return LFM2-MoE's router. Its correction is a buffer, which a cast of the model rounds, and its sum with scores
    too."""
    corrections = (buffer for name, buffer in model.named_buffers() if name.endswith("feed_forward.expert_bias"))
    return Router(
        "sigmoid",
        normalize=model.config.norm_topk_prob,
        epsilon=1e-6,
        scale=model.config.routed_scaling_factor,
        stepwise=True,
        float32_choice=any(correction.dtype == torch.float32 for correction in corrections),
    )


LFM2_EXPERTS = {role: path.replace("mlp.", "feed_forward.") for role, path in EXPERTS.items()}
LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    layer=(
        *(with_experts(layer, LFM2_EXPERTS, {"correction": "feed_forward:expert_bias"}) for layer in LFM2.layer),
        *(with_experts(layer, LFM2_EXPERTS) for layer in LFM2.layer),
        *LFM2.layer,
    ),
    rotary="model.pos_emb",
    spec={
        **LFM2.spec,
        **experts(lfm2_router, "num_experts"),
    },
    declares=(*LFM2.declares, "num_dense_layers", "use_expert_bias"),
    understands=(*LFM2.understands, "num_experts"),
)

# Llama 4: in the layers with rope, norms without parameters on the heads of queries and keys, after it; in those
# without, queries scaled by their position. A token has one expert, whose input is scaled, and a shared one.


LLAMA4_EXPERTS = {
    "router": "feed_forward.router",
    "experts_gate_up": Packed("feed_forward.experts:gate_up_proj", transposed_experts),
    "experts_down": Packed("feed_forward.experts:down_proj", transposed_experts),
    **{f"shared_{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
LLAMA4_DENSE = {**LLAMA.layer[0], **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}}
LLAMA4_NORMS = {"q_norm": "self_attn.qk_norm", "k_norm": "self_attn.qk_norm"}
LLAMA4 = replace(
    LLAMA,
    name="llama4",
    layer=tuple(
        layer
        for norms in (LLAMA4_NORMS, {})
        for layer in ({**with_experts(LLAMA4_DENSE, norms), **LLAMA4_EXPERTS}, {**LLAMA4_DENSE, **norms})
    ),
    rotaries=smollm3_rotaries,
    windows=lambda config: by_layer_type(
        config, {"full_attention": 0, "chunked_attention": -(config.attention_chunk_size or 0)}
    ),
    spec={
        "qk_norm": lambda model: "head" if model.config.use_qk_norm and any(model.config.no_rope_layers) else "",
        "qk_norm_last": True,
        "rotary_interleaved": True,
        "query_scale_unrotated": True,
        "query_scale_beta": key("attn_scale"),
        "query_scale_positions": lambda model: model.config.floor_scale if model.config.attn_temperature_tuning else 0,
        **experts(Router("sigmoid_chosen", scales_inputs=True)),
    },
    table=complex_table,
    declares=("attention_chunk_size", "no_rope_layers", "attn_temperature_tuning", "floor_scale", "moe_layers"),
    understands=("attention_chunk_size", "layer_types", "no_rope_layers", "num_local_experts", "use_qk_norm"),
    refuses={"num_experts_per_tok other than 1": lambda config: config.num_experts_per_tok != 1},
)

# PhiMoE: Mistral's attention, layer norms, two experts by SparseMixer.
PHIMOE = replace(
    MISTRAL,
    name="phimoe",
    layer=(with_experts(MISTRAL.layer[0], {"router": "mlp.router"}),),
    spec={
        "norm": "layer",
        **experts(lambda model: Router("sparsemixer", jitter=model.config.router_jitter_noise)),
    },
    declares=("sliding_window", "router_jitter_noise", "input_jitter_noise"),
    understands=("sliding_window", "num_local_experts", "num_experts"),
    refuses={"num_experts_per_tok other than 2": lambda config: config.num_experts_per_tok != 2},
)

# Latent attention: keys and values are made of a latent, and queries of another one or of the layer's input.


LATENT_LAYER = {
    **without(LLAMA.layer[0], "q", "k", "v"),
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
}
LATENT_QUERIES = {"q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj"}
YOUTU = replace(
    LLAMA,
    name="youtu",
    layer=({**LATENT_LAYER, **LATENT_QUERIES}, {**LATENT_LAYER, "q_b": "self_attn.q_proj"}),
    spec={
        "num_kv_heads": 1,
        "head_dim": key("qk_head_dim"),
        "value_dim": key("v_head_dim"),
        "latent_dim": key("kv_lora_rank"),
        "query_rank": key("q_lora_rank", 0),
        "attention_scale": lambda model: model.get_submodule("model.layers.0.self_attn").scaling,  # with YaRN's factor
        "rotary_interleaved": key("rope_interleave", False),
    },
    table=rope_table,
    declares=("kv_lora_rank", "q_lora_rank", "v_head_dim", "rope_interleave"),
    understands=("kv_lora_rank",),
)

# DeepSeek V3, Moonlight, Kimi K2, GLM-4.7-Flash: with experts.
DEEPSEEK_V3 = replace(
    YOUTU,
    name="deepseek_v3",
    layer=(*(with_experts(layer, CORRECTION, SHARED) for layer in YOUTU.layer), *YOUTU.layer),
    spec={**YOUTU.spec, **experts(grouped_router)},
    declares=(*YOUTU.declares, *GLM4_MOE.declares),
    understands=(*YOUTU.understands, *GLM4_MOE.understands),
)

# A.X-K1: a norm after the experts.
AXK1 = replace(
    DEEPSEEK_V3,
    name="axk1",
    layer=(
        {**with_experts(YOUTU.layer[0], CORRECTION, SHARED), "mlp_post_norm": "mlp.post_mlp_layernorm"},
        YOUTU.layer[0],
    ),
)

# Mistral 4: softmax scores in the model's dtype, and queries scaled by their position.
MISTRAL4 = replace(
    DEEPSEEK_V3,
    name="mistral4",
    layer=(*(with_experts(layer, SHARED) for layer in YOUTU.layer), *YOUTU.layer),
    positions=MINISTRAL3.positions,
    spec={
        **DEEPSEEK_V3.spec,
        **MINISTRAL3.spec,
        "router": lambda model: replace(grouped_router(model), scores="softmax", float32=False, float32_weights=False),
    },
)


# Kimi-Linear: latent attention without rope in some layers, Kimi delta attention in the others, with experts.
KIMI_DELTA = {
    **without(LLAMA.layer[0], "q", "k", "v", "o"),
    **{f"delta_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "b", "o")},
    "delta_forget_a": "self_attn.forget_gate.f_a_proj",
    "delta_forget_b": "self_attn.forget_gate.f_b_proj",
    "delta_z_a": "self_attn.g_a_proj",
    "delta_z_b": "self_attn.g_b_proj",
    "delta_norm": "self_attn.o_norm",
    "conv": Packed("self_attn.conv1d", over_channels),
    "dt_bias": "self_attn.forget_gate:dt_bias",
    "a_log": Packed("self_attn.forget_gate:A_log", lambda spec: (lambda logs: logs.flatten(),)),
}
KIMI_LAYERS = (*YOUTU.layer, KIMI_DELTA)
KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    name="kimi_linear",
    layer=(*(with_experts(layer, CORRECTION, SHARED) for layer in KIMI_LAYERS), *KIMI_LAYERS),
    rotary="",
    table=None,
    spec={
        **DEEPSEEK_V3.spec,
        "attention_scale": lambda model: model.config.qk_head_dim**-0.5,
        "rotary_dim": key("qk_rope_head_dim"),
        "rotary_interleaved": False,
        "recurrent": lambda model: KimiDeltaAttention(
            heads=model.config.linear_num_heads,
            head_dim=model.config.linear_head_dim,
            conv_width=model.config.linear_conv_kernel_dim,
        ),
    },
    declares=("kv_lora_rank", "q_lora_rank", "v_head_dim", "linear_num_heads", "mlp_layer_types", "layer_types"),
    understands=(
        *YOUTU.understands,
        *("layer_types", "num_experts", "num_local_experts", "n_shared_experts", "num_shared_experts"),
    ),
    refuses={**SILU_ALONE, **SOME_ATTENTION},
)


# DeepSeek V2: softmax scores; groups, if any, are chosen by their best expert; rope in complex numbers.


def greedy_router(model: nn.Module) -> Router:
    """Return DeepSeek V2's router."""
    config = model.config
    groups, top_groups = (config.n_group, config.topk_group) if config.topk_method != "greedy" else (1, 1)
    return Router(
        "softmax",
        float32=True,
        groups=groups,
        top_groups=top_groups,
        group_best=1,
        scale=config.routed_scaling_factor,
        float32_weights=True,
    )


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    layer=MISTRAL4.layer,
    spec={
        **DEEPSEEK_V3.spec,
        "num_experts": key("n_routed_experts"),
        "router": greedy_router,
        "rotary_interleaved": True,
    },
    table=complex_table,
    declares=("kv_lora_rank", "q_lora_rank", "v_head_dim", "topk_method", "n_group", "routed_scaling_factor"),
    understands=(*DEEPSEEK_V3.understands, "num_experts"),
    refuses={
        "topk_method other than greedy and group_limited_greedy": lambda config: (
            config.topk_method not in ("greedy", "group_limited_greedy")
        )
    },
)

# MiniCPM3: rope on halves; factors on the embedding, the residual stream and the final norm's output.
MINICPM3 = replace(
    YOUTU,
    name="minicpm3",
    own_embedding=True,
    spec={
        **YOUTU.spec,
        "rotary_interleaved": False,
        "embedding_multiplier": lambda model: rounded_to(model, model.config.scale_emb),
        "residual_multiplier": lambda model: model.config.scale_depth / model.config.num_hidden_layers**0.5,
        "logits_divisor": key("logits_scaling"),
    },
    declares=("kv_lora_rank", "q_lora_rank", "v_head_dim", "scale_emb", "scale_depth", "dim_model_base"),
    understands=(*YOUTU.understands, "scale_depth", "logits_scaling"),
)

# GPT-2: learned positions, layer norms, and Conv1D, whose weights are [in, out].
GPT2 = Family(
    name="gpt2",
    layers="transformer.h",
    outer={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer=(
        {
            "attention_norm": "ln_1",
            "q k v": Packed("attn.c_attn", stacked),
            "o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
    ),
    activation="activation_function",
    spec={
        "norm": "layer",
        "attention_scale": lambda model: (
            (model.config.hidden_size // model.config.num_attention_heads) ** -0.5
            if model.config.scale_attn_weights
            else 1.0
        ),
    },
    positions=lambda config: config.max_position_embeddings,
    declares=("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    refuses={
        "add_cross_attention=True": lambda config: config.add_cross_attention,
        "scale_attn_by_inverse_layer_idx=True": lambda config: config.scale_attn_by_inverse_layer_idx,
    },
)

# OPT: learned positions from row 2 on, layer norms, and projections if the embedding is narrower.
OPT = Family(
    name="opt",
    layers="model.decoder.layers",
    outer={
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "final_norm": "model.decoder.final_layer_norm",
        "project_out": "model.decoder.project_out",
        "head": "lm_head",
    },
    optional=("project_in", "final_norm", "project_out"),
    layer=(
        {
            "attention_norm": "self_attn_layer_norm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.out_proj",
            "mlp_norm": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        },
    ),
    activation="activation_function",
    spec={"norm": "layer", "embedding_size": key("word_embed_proj_dim"), "position_offset": 2},
    positions=lambda config: config.max_position_embeddings,
    declares=("do_layer_norm_before", "layer_norm_elementwise_affine", "word_embed_proj_dim"),
    refuses={
        "do_layer_norm_before=False (norms behind the residual)": lambda config: not config.do_layer_norm_before,
        "layer_norm_elementwise_affine=False": lambda config: not config.layer_norm_elementwise_affine,
    },
)

# GPT-NeoX: queries, keys and values interleaved by head, rope on part of a head, parallel attention and MLP.
GPT_NEOX = Family(
    name="gpt_neox",
    layers="gpt_neox.layers",
    outer={"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "lm_head"},
    layer=(
        {
            "attention_norm": "input_layernorm",
            "q k v": Packed("attention.query_key_value", grouped),
            "o": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
    ),
    rotary="gpt_neox.rotary_emb",
    spec={"norm": "layer", "parallel": key("use_parallel_residual")},
    declares=("use_parallel_residual",),
    understands=("use_parallel_residual",),
)


# GPT-J: attention and MLP in parallel behind one norm, rope on neighbouring elements, an LM head with a bias.


def sincos_table(module: nn.Module, _key: str) -> Table:
    """Return the rotary tables from an attention module's buffer [positions, rotary_dim], which has sines, then
    cosines."""

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rows = module.embed_positions.to(positions.device)[positions.long()]
        sin, cos = rows.to(dtype).float().chunk(2, dim=-1)
        return cos, sin

    return table


GPTJ = Family(
    name="gptj",
    layers="transformer.h",
    outer={"embedding": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"},
    layer=(
        {
            "attention_norm": "ln_1",
            "q": "attn.q_proj",
            "k": "attn.k_proj",
            "v": "attn.v_proj",
            "o": "attn.out_proj",
            "up": "mlp.fc_in",
            "down": "mlp.fc_out",
        },
    ),
    activation="activation_function",
    spec={"norm": "layer", "parallel": True, "rotary_interleaved": True},
    rotary="transformer.h.0.attn",
    table=sincos_table,
    positions=lambda config: config.max_position_embeddings,
    declares=("rotary_dim",),
)

# BLOOM: ALiBi, a norm on the embedding, queries, keys and values interleaved by head.
BLOOM = Family(
    name="bloom",
    layers="transformer.h",
    outer={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer=(
        {
            "attention_norm": "input_layernorm",
            "q k v": Packed("self_attention.query_key_value", grouped),
            "o": "self_attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
    ),
    activation="",
    spec={
        "norm": "layer",
        "activation": "gelu_tanh",  # fixed: BLOOM has no setting for it
        "alibi": lambda model: alibi_slopes(model.config.num_attention_heads),
    },
    declares=("apply_residual_connection_post_layernorm", "slow_but_exact", "pretraining_tp"),
    refuses={
        "apply_residual_connection_post_layernorm=True": lambda config: config.apply_residual_connection_post_layernorm,
        "slow_but_exact=True with pretraining_tp > 1": lambda config: (
            config.slow_but_exact and config.pretraining_tp > 1
        ),
    },
)

# Falcon: multi-query or grouped-query attention, ALiBi or rope, and three arrangements of norms and residuals.


def falcon_kv_heads(model: nn.Module) -> int:
    """Return the number of key heads: `num_kv_heads` in the new architecture; else 1 with multi_query, or all heads."""
    config = model.config
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def falcon_alibi(model: nn.Module) -> tuple[float, ...] | None:
    """ALiBi's slopes times the attention scale, as Falcon adds the bias before scaling; None without ALiBi."""
    config = model.config
    if not config.alibi:
        return None
    return tuple(slope * config.head_dim**-0.5 for slope in alibi_slopes(config.num_attention_heads))


def falcon_misses_a_norm(config: PretrainedConfig) -> bool:
    """Whether the settings make the model's own forward use a norm that it does not have (transformers 5.23)."""
    if config.new_decoder_architecture:
        return not config.parallel_attn
    return config.parallel_attn and config.num_ln_in_parallel_attn == 2


FALCON = Family(
    name="falcon",
    layers="transformer.h",
    outer={"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"},
    layer=(
        {**BLOOM.layer[0], "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        BLOOM.layer[0],
        without(BLOOM.layer[0], "mlp_norm"),
    ),
    activation="activation",
    spec={
        "norm": "layer",
        "num_kv_heads": falcon_kv_heads,
        "parallel": lambda model: model.config.parallel_attn,
        "alibi": falcon_alibi,
        "alibi_bfloat16": lambda model: model.config.alibi,
    },
    rotary="transformer.rotary_emb",
    rotaries=lambda config: ["" if config.alibi else "rope"] * config.num_hidden_layers,
    declares=("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "alibi"),
    understands=("alibi", "parallel_attn"),
    refuses={
        "this mixture of new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn": falcon_misses_a_norm
    },
)

# Each comes before the families that it is a variant of: the first that fits is used.
FAMILIES = (
    *(GPT_OSS, EXAONE_MOE, DOTS1, GLM4_MOE, HY_V3, MINIMAX_M2, ERNIE_MOE, QWEN2_MOE, OLMOE, GRANITE_MOE, PHIMOE),
    *(AFMOE, HUNYUAN_MOE, LLAMA4, MIMO_V2, MELLUM, HYPERCLOVAX, GRANITE_MOE_SWA, GRANITE_SWA),
    *(QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5, NEMOTRON_H, GRANITE_HYBRID_ROPE, GRANITE_HYBRID, FALCON_H1, BAMBA),
    *(MAMBA_2, LFM2_MOE, LFM3, LFM2, OLMO_HYBRID_ROPE, OLMO_HYBRID),
    *(KIMI_LINEAR, AXK1, DEEPSEEK_V3, DEEPSEEK_V2, MISTRAL4, YOUTU, MINICPM3),
    *(GEMMA4, GEMMA3, GEMMA2, GEMMA, QWEN3_MOE, QWEN3_VL_MOE, MIXTRAL, QWEN3, QWEN3_VL),
    *(SMOLLM3, QWEN2, MINISTRAL3, MISTRAL, GRANITE),
    *(EXAONE4, OLMO3, OLMO2, OLMO, HUNYUAN, COHERE2, COHERE, STARCODER2, STABLELM, PHI, GLM4, GLM4V, GLM),
    *(ARCEE, JAIS2, NEMOTRON, NANOCHAT, APERTUS, LLAMA, PHI3),
    *(GPT2, OPT, GPT_NEOX, GPTJ, BLOOM, FALCON),
)
