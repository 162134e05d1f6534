"""Qwen2: Llama, with a window in some layers. Qwen3: also norms on the heads of queries and keys. SmolLM3: Qwen2, with
some layers without rope (NoPE).
"""

from dataclasses import replace

from transformers import PretrainedConfig

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


def rotaries(config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer. In `no_rope_layers`, contrary to its name, 1 means a layer with rope."""
    return ["rope" if has_rope else "" for has_rope in config.no_rope_layers[: config.num_hidden_layers]]


SMOLLM3 = replace(
    QWEN2,
    name="smollm3",
    rotaries=rotaries,
    declares=(*QWEN2.declares, "no_rope_layers", "use_sliding_window"),
    understands=(*QWEN2.understands, "no_rope_layers"),
    refuses={
        "layer_types with sliding layers, and use_sliding_window=False,": lambda config: (
            not config.use_sliding_window and "sliding_attention" in config.layer_types
        )
    },
)
