"""GPT-2: learned positions, layer norms, and Conv1D, whose weights are [in, out]."""

from hybrid.models.family import Family, Packed, stacked

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
