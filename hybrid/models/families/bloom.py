"""BLOOM: ALiBi, a norm on the embedding, queries, keys and values interleaved by head."""

from hybrid.models.family import Family, Packed, alibi_slopes, grouped

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
