"""SmolLM3: Llama, with some layers without rope (NoPE), and windows by layer type."""

from dataclasses import replace

from transformers import PretrainedConfig

from hybrid.models.families.qwen import QWEN2


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
