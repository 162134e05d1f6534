"""Falcon: multi-query or grouped-query attention, ALiBi or rope, and three arrangements of norms and residuals."""

from torch import nn
from transformers import PretrainedConfig

from hybrid.models.family import Family, Packed, alibi_slopes, grouped


def num_kv_heads(model: nn.Module) -> int:
    """The number of key heads: `num_kv_heads` in the new architecture; else 1 with multi_query, or all heads."""
    config = model.config
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def alibi(model: nn.Module) -> tuple[float, ...] | None:
    """ALiBi's slopes times the attention scale, as Falcon adds the bias before scaling; None without ALiBi."""
    config = model.config
    if not config.alibi:
        return None
    return tuple(slope * config.head_dim**-0.5 for slope in alibi_slopes(config.num_attention_heads))


def misses_a_norm(config: PretrainedConfig) -> bool:
    """Whether the settings make the model's own forward use a norm that it does not have (transformers 5.23)."""
    if config.new_decoder_architecture:
        return not config.parallel_attn
    return config.parallel_attn and config.num_ln_in_parallel_attn == 2


ALWAYS = {
    "q k v": Packed("self_attention.query_key_value", grouped),
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}

FALCON = Family(
    name="falcon",
    layers="transformer.h",
    outer={"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"},
    layer=(
        {**ALWAYS, "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        {**ALWAYS, "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        {**ALWAYS, "attention_norm": "input_layernorm"},
    ),
    activation="activation",
    spec={
        "norm": "layer",
        "num_kv_heads": num_kv_heads,
        "parallel": lambda model: model.config.parallel_attn,
        "alibi": alibi,
        "alibi_bfloat16": lambda model: model.config.alibi,
    },
    rotary="transformer.rotary_emb",
    rotaries=lambda config: ["" if config.alibi else "rope"] * config.num_hidden_layers,
    declares=("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "alibi"),
    understands=("alibi", "parallel_attn"),
    refuses={"this mixture of new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn": misses_a_norm},
)
