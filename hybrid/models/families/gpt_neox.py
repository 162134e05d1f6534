"""GPT-NeoX: queries, keys and values interleaved by head, rope on part of a head, parallel attention and MLP."""

from hybrid.models.family import Family, Packed, grouped, key

GPT_NEOX = Family(
    name="gpt_neox",
    layers="gpt_neox.layers",
    outer={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    },
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
