"""OLMo 2: norms after attention and MLP, none before them; query and key norms over all heads together."""

from dataclasses import replace

from hybrid.models.families.llama import LLAMA

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
