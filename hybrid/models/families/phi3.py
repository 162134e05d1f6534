"""Phi-3: Mistral with queries, keys and values in one matrix, and gate and up in another."""

from dataclasses import replace

from hybrid.models.families.mistral import MISTRAL
from hybrid.models.family import Fused, halves, stacked

PHI3 = replace(
    MISTRAL,
    name="phi3",
    layer=(
        {
            "attention_norm": "input_layernorm",
            "q k v": Fused("self_attn.qkv_proj", stacked),
            "o": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "gate up": Fused("mlp.gate_up_proj", halves),
            "down": "mlp.down_proj",
        },
    ),
)
