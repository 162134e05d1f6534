"""Llama, the layout that most decoders are variants of, and the variants that differ in little."""

from dataclasses import replace

from hybrid.models.family import Family, Packed, halves, key, one_window, stacked

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
    LLAMA, name="mistral", windows=one_window, declares=("sliding_window",), understands=("sliding_window",)
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
BEFORE = ("attention_norm", "mlp_norm")

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    layer=(
        {
            **{role: path for role, path in LLAMA.layer[0].items() if role not in BEFORE},
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    spec={"qk_norm": "row", "norm_float32": True},
)
