"""Qwen2 and Qwen3: Llama, with a window in some layers; Qwen3 has norms on the heads of queries and keys."""

from dataclasses import replace

from hybrid.models.families.llama import LLAMA
from hybrid.models.family import windows_by_type

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    windows=windows_by_type,
    declares=("sliding_window", "layer_types"),
    understands=("sliding_window", "layer_types"),
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    layer=({**LLAMA.layer[0], "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},),
    spec={"qk_norm": "head"},
)
