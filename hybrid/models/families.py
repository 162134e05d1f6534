"""The known families, each a row that says how its models are read. `FAMILIES` gives their order."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.family import (
    Family,
    Packed,
    Table,
    alibi_slopes,
    grouped,
    halves,
    key,
    same_window,
    stacked,
    windows_by_type,
)


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

# Norms after attention and MLP, none before them; query and key norms over all heads together.
OLMO2 = replace(
    LLAMA,
    name="olmo2",
    layer=(
        {
            **without(LLAMA.layer[0], "attention_norm", "mlp_norm"),
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    spec={"qk_norm": "row", "norm_float32": True},
)

# A window in some layers.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    windows=windows_by_type,
    declares=("sliding_window", "layer_types"),
    understands=("sliding_window", "layer_types"),
)

# Also norms on the heads of queries and keys.
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    layer=({**LLAMA.layer[0], "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},),
    spec={"qk_norm": "head"},
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

# Gemma 2 and 3: norms before and after attention and MLP with weights 1 + w, scaled embeddings, windows by layer type.
# Gemma 2 has soft caps. Gemma 3 has norms on the heads of queries and keys, and a rope table for each layer type.


def gemma_embedding_multiplier(model: nn.Module) -> float:
    """√hidden, rounded to the embedding's dtype as in the model."""
    dtype = model.get_input_embeddings().weight.dtype
    return torch.tensor(model.config.hidden_size**0.5).to(dtype).item()


GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA_SPEC = {
    "norm_offset": 1.0,
    "norm_float32": True,
    "embedding_multiplier": gemma_embedding_multiplier,
    "attention_scale": lambda model: model.config.query_pre_attn_scalar**-0.5,
    "logits_softcap": key("final_logit_softcapping", 0.0),
}
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
    refuses={"use_bidirectional_attention": lambda config: bool(getattr(config, "use_bidirectional_attention", False))},
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    layer=({**QWEN3.layer[0], **GEMMA_NORMS},),
    rotaries=lambda config: list(config.layer_types),
    spec={**GEMMA_SPEC, "qk_norm": "head"},  # nothing reads its attn_logit_softcapping (transformers 5.23)
)

# Mixtral and Qwen3-MoE: Mistral and Qwen3 with a mixture of experts as the MLP, in all or some layers.
EXPERTS = {
    "router": "mlp.gate",
    "experts_gate_up": "mlp.experts:gate_up_proj",
    "experts_down": "mlp.experts:down_proj",
}

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    layer=({**without(MISTRAL.layer[0], "gate", "up", "down"), **EXPERTS},),
    spec={
        "num_experts": key("num_local_experts"),
        "experts_per_token": key("num_experts_per_tok"),
        "normalize_experts": True,
        "experts_float32": True,
    },
    declares=("sliding_window", "num_local_experts"),
    understands=("sliding_window", "num_local_experts", "num_experts"),  # num_experts: the config's alias
)

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    layer=({**without(QWEN3.layer[0], "gate", "up", "down"), **EXPERTS}, QWEN3.layer[0]),
    windows=same_window,
    spec={
        **QWEN3.spec,
        "num_experts": key("num_experts"),
        "experts_per_token": key("num_experts_per_tok"),
        "normalize_experts": key("norm_topk_prob"),
    },
    declares=("sliding_window", "norm_topk_prob", "decoder_sparse_step"),
    understands=("sliding_window", "num_experts", "num_local_experts"),
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
    """The rotary tables from an attention module's buffer [positions, rotary_dim], which has sines, then cosines."""

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
    """The number of key heads: `num_kv_heads` in the new architecture; else 1 with multi_query, or all heads."""
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
    *(GEMMA3, GEMMA2, QWEN3_MOE, MIXTRAL, QWEN3, SMOLLM3, QWEN2, MISTRAL, GRANITE, OLMO2, LLAMA, PHI3),
    *(GPT2, OPT, GPT_NEOX, GPTJ, BLOOM, FALCON),
)
