"""Granite: Llama, with factors on the embedding, the attention scores, the residual stream and the logits."""

from dataclasses import replace

from hybrid.models.families.llama import LLAMA
from hybrid.models.family import key

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
