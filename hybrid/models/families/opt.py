"""OPT: learned positions from row 2 on, layer norms, and projections if the embedding is narrower."""

from hybrid.models.family import Family, key

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
