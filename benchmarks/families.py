"""Shapes of other families than Llama: settings of Hugging Face's configurations.

FUSED have fused decoders, with the kinds of layers of the released models in their order; NATIVE run in the model's own
layers.
"""

from typing import Any

WIDE = {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1}

# Settings by shape; "type" is the model's.
FUSED: dict[str, dict[str, Any]] = {
    "qwen3_5": {  # of 11M parameters
        "type": "qwen3_5_text",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "Qwen3.5": {
        "type": "qwen3_5_text",
        **WIDE,
        **HEADS,
        "head_dim": 128,
        "intermediate_size": 1536,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "GPT-OSS": {
        "type": "gpt_oss",
        **WIDE,
        **HEADS,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    },
    "GLM-4-MoE": {
        "type": "glm4_moe",
        **WIDE,
        **HEADS,
        **EXPERTS,
        "head_dim": 128,
        "intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "DeepSeek-V3": {
        "type": "deepseek_v3",
        **WIDE,
        **EXPERTS,
        "intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",  # as released; vLLM asks it
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
NATIVE: dict[str, dict[str, Any]] = {
    "BitNet": {"type": "bitnet", **WIDE, **HEADS, "intermediate_size": 1536},
    "Cohere2-MoE": {
        "type": "cohere2_moe",
        **WIDE,
        **HEADS,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "DiffLlama": {"type": "diffllama", **WIDE, **HEADS, "intermediate_size": 1536},
    "Falcon-Mamba": {"type": "falcon_mamba", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8},
    "FlexOlmo": {
        "type": "flex_olmo",
        **WIDE,
        **HEADS,
        "intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 4,
    },
    "GPT-Neo": {
        "type": "gpt_neo",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_heads": 8,
        "num_layers": 8,
        "attention_types": [[["global", "local"], 4]],
    },
    "Jamba": {
        "type": "jamba",
        **WIDE,
        **HEADS,
        "intermediate_size": 512,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "Mamba": {"type": "mamba", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8},
    "MiniMax-01": {
        "type": "minimax",
        **WIDE,
        **HEADS,
        "head_dim": 64,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Zamba2": {
        "type": "zamba2",
        **WIDE,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "mamba_d_state": 64,
        "mamba_ngroups": 1,
        "n_mamba_heads": 16,
        "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"] * 2,
    },
}
FAMILIES = {**FUSED, **NATIVE}
