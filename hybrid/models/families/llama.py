"""Llama: the layout that most decoders are variants of."""

from hybrid.models.family import Family

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
