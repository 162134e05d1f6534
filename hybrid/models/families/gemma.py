"""Gemma 2 and 3: norms before and after attention and MLP with weights 1 + w, scaled embeddings, windows by layer type.

Gemma 2 has soft caps. Gemma 3 has norms on the heads of queries and keys, and a rope table for each layer type.
"""

from dataclasses import replace

import torch
from torch import nn

from hybrid.models.families.qwen import QWEN2, QWEN3
from hybrid.models.family import key


def embedding_multiplier(model: nn.Module) -> float:
    """√hidden, rounded to the embedding's dtype as in the model."""
    dtype = model.get_input_embeddings().weight.dtype
    return torch.tensor(model.config.hidden_size**0.5).to(dtype).item()


NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
UNDERSTOOD = (
    *QWEN2.understands,
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
SPEC = {
    "norm_offset": 1.0,
    "norm_float32": True,
    "embedding_multiplier": embedding_multiplier,
    "attention_scale": lambda model: model.config.query_pre_attn_scalar**-0.5,
    "logits_softcap": key("final_logit_softcapping", 0.0),
}
NOT_CAUSAL = {"use_bidirectional_attention": lambda config: bool(getattr(config, "use_bidirectional_attention", False))}

GEMMA2 = replace(
    QWEN2,
    name="gemma2",
    layer=({**QWEN2.layer[0], **NORMS},),
    activation="hidden_activation",
    own_embedding=True,
    spec={**SPEC, "attention_softcap": key("attn_logit_softcapping", 0.0)},
    declares=(*QWEN2.declares, "query_pre_attn_scalar"),
    understands=UNDERSTOOD,
    refuses=NOT_CAUSAL,
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    layer=({**QWEN3.layer[0], **NORMS},),
    rotaries=lambda config: list(config.layer_types),
    spec={**SPEC, "qk_norm": "head"},  # nothing reads its attn_logit_softcapping (transformers 5.23)
)
