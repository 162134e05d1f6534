"""Tiny random models of every family, and LoRA adapters on them."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

# transformers 5.23 names it as the text part of models with a vision tower alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
VOCABULARY = 97
END = 2

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
PLAIN_SIZES = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}

# Family → configuration; sizes are small, and sliding windows are shorter than the tests' sequences.
FAMILIES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "mistral": {**SIZES, "sliding_window": 6},
    "gemma3_text": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "phi3": {**SIZES, "pad_token_id": 0},
    "gpt2": {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {**PLAIN_SIZES, "dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 96},
    "gpt_neox": {**PLAIN_SIZES, "intermediate_size": 48, "max_position_embeddings": 96},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gptj": {**GPT2_SIZES, "rotary_dim": 4},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# Families similar to those above, which do not run in the whole test matrix.
MORE_FAMILIES = {
    "smollm3": {**SIZES, "no_rope_layers": [1, 0, 1]},
    "granite": {
        **SIZES,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "olmo2": SIZES,
    "gemma2": {
        **SIZES,
        "sliding_window": 6,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "falcon": {**PLAIN_SIZES, "multi_query": True, "new_decoder_architecture": False},
    "qwen3_moe": {
        **SIZES,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gpt_oss": {**SIZES, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# Families that are little more than a row of data: in the default suite their logits are compared, and what a row can
# get wrong; other tests of all families are slow for them.
ROPE = {"rope_theta": 10000.0}
# Latent attention: heads and latents of different sizes.
LATENT = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
ROW_FAMILIES = {
    "olmo3": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "exaone4": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "glm": {**SIZES, "attention_bias": True},
    "glm4": SIZES,
    "gemma": SIZES,
    "starcoder2": {**SIZES, "sliding_window": 6},
    "phi": SIZES,
    "ministral3": {
        **SIZES,
        "rope_parameters": {
            **ROPE,
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "stablelm": SIZES,
    "cohere": SIZES,
    "cohere2": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "hunyuan_v1_dense": SIZES,
    "olmo": SIZES,
    "helium": SIZES,
    "arcee": SIZES,
    "jais2": SIZES,
    "nemotron": {**SIZES, "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "nanochat": {**SIZES, "final_logit_softcapping": 3.0},
    "apertus": {**SIZES, "rope_parameters": {**ROPE, "rope_type": "default"}},
    "gemma4_text": {
        **SIZES,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 6,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "rms_norm_eps": 1e-2,  # random layers have small outputs, whose norms would enlarge float32's rounding
    },
    "hyperclovax": MORE_FAMILIES["granite"],
    "granite_swa": {
        **MORE_FAMILIES["granite"],
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "layer_rope_theta": [10000.0, 0, 500.0],
    },
    "youtu": {**LATENT, "initializer_range": 0.02},
    "minicpm3": {**LATENT, "dim_model_base": 8, "initializer_range": 0.02},
}
# Settings of Gemma 4's larger models: no per-layer inputs, no shared keys and values, one projection for both.
GEMMA4_31B = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
}
GEMMA4_26B = {
    **GEMMA4_31B,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
LATENT_FAMILIES = ("youtu", "minicpm3", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "axk1", "mistral4")
PER_LAYER_INPUTS = ("gemma4_text",)  # not streamed, without the exact forward
WITHOUT_TRITON = ("mimo_v2_flash",)
CROSSED = [*FAMILIES, *MORE_FAMILIES]  # tests of every family run these by default
ALL_FAMILIES = {**FAMILIES, **MORE_FAMILIES, **ROW_FAMILIES}

# Families with recurrent layers, whose sequences have states in addition to blocks.
RECURRENT = {
    "qwen3_5_text": {
        **SIZES,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
}

# Mixtures that differ from those above by settings that other families have too; the decoders' tests alone run them.
EXPERTS = {**SIZES, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
GROUPS = {**EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True}
LATENT_MIXTURE = {**LATENT, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 8}
MIXTURES = {
    "glm4_moe": {**GROUPS, "n_routed_experts": 8, "n_shared_experts": 2, "use_qk_norm": True},
    "solar_open": {**GROUPS, "n_routed_experts": 8, "n_shared_experts": 1},
    "dots1": {**GROUPS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "exaone_moe": {**GROUPS, "num_experts": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    "hy_v3": {**EXPERTS, "num_experts": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "afmoe": {
        **EXPERTS,
        "num_experts": 8,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.7,
        "sliding_window": 6,
        "global_attn_every_n_layers": 3,
        "mup_enabled": True,
    },
    "mellum": {
        **EXPERTS,
        "num_experts": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "granitemoe_swa": {
        **MORE_FAMILIES["granite"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "layer_rope_theta": [10000.0, 0, 500.0],
    },
    "llama4_text": {
        **SIZES,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 8,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 13,
        "floor_scale": 8,
    },
    "mimo_v2_flash": {
        **GROUPS,
        "num_key_value_heads": 1,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    },
    "hunyuan_v1_moe": {**SIZES, "intermediate_size": 24, "num_experts": 8, "moe_topk": 3},
    "minimax_m2": {**SIZES, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    "ernie4_5_moe": {
        **SIZES,
        "moe_intermediate_size": 24,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_end_index": 2,
    },
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "olmoe": {**SIZES, "num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": {**MORE_FAMILIES["granite"], "num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoeshared": {
        **MORE_FAMILIES["granite"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "phimoe": {**SIZES, "num_local_experts": 8, "router_jitter_noise": 0.3},
    "deepseek_v3": {
        **LATENT_MIXTURE,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        **LATENT_MIXTURE,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {**LATENT_MIXTURE, "routed_scaling_factor": 1.7, "n_shared_experts": 1},
    "axk1": {**LATENT_MIXTURE, "n_group": 4, "topk_group": 2},
    "mistral4": {
        **LATENT_MIXTURE,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            **ROPE,
            "rope_type": "yarn",
            "factor": 6.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
}

RECURRENT["qwen3_5_moe_text"] = {
    **RECURRENT["qwen3_5_text"],
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
RECURRENT["qwen3_next"] = {
    **RECURRENT["qwen3_5_moe_text"],
    "mlp_only_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
RECURRENT["olmo_hybrid"] = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default"},
}
# Kimi delta attention and latent attention.
RECURRENT["kimi_linear"] = {
    **LATENT,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "q_lora_rank": None,
    "num_experts": 8,
    "routed_scaling_factor": 1.7,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "initializer_range": 0.02,
}
# Mamba 2 mixers. A layer of Nemotron-H is a mixer, attention, an MLP or a mixture.
MAMBA = {"mamba_d_state": 10, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_expand": 2}
HYBRID_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
RECURRENT["nemotron_h"] = {
    **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "ssm_state_size": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
RECURRENT["bamba"] = {**SIZES, **MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2]}
RECURRENT["granitemoehybrid"] = {
    **{name: size for name, size in MORE_FAMILIES["granite"].items() if name != "head_dim"},
    **MAMBA,
    "num_hidden_layers": 4,
    "layer_types": HYBRID_LAYERS,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 40,
}
RECURRENT["falcon_h1"] = {
    **SIZES,
    **MAMBA,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.4],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.7, 1.2, 1.1, 0.8],
}
RECURRENT["mamba2"] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 10,
    "n_groups": 2,
    "chunk_size": 16,
    "residual_in_fp32": False,
    "initializer_range": 0.02,
}
# Short convolutions.
RECURRENT["lfm2"] = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_multiple_of": 20,
    "tie_word_embeddings": False,
}
RECURRENT["lfm3"] = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "sliding_window": 6,
    "tie_word_embeddings": False,
}
RECURRENT["lfm2_moe"] = {
    **RECURRENT["lfm2"],
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
}
OF_FAMILY = {**ALL_FAMILIES, **RECURRENT, **MIXTURES}

# Encoders and encoder-decoders: class and configuration.
ENCODER_SIZES = {**PLAIN_SIZES, "intermediate_size": 48, "max_position_embeddings": 96}
NON_DECODERS = {
    "bert": (AutoModelForMaskedLM, ENCODER_SIZES),
    "roberta": (AutoModelForMaskedLM, {**ENCODER_SIZES, "pad_token_id": 0}),
    "distilbert": (
        AutoModelForMaskedLM,
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 96},
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    ),
}


def tiny_non_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A random model of NON_DECODERS in eval mode, with random biases and norms too."""
    torch.manual_seed(seed)
    kind, sizes = NON_DECODERS[name]
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0, "decoder_start_token_id": 0}
    model = kind.from_config(AutoConfig.for_model(name, **{"vocab_size": VOCABULARY, **special, **sizes, **changes}))
    return with_larger_weights(model).to(dtype).eval()


def with_larger_weights(model: nn.Module) -> nn.Module:
    """`model` with larger weights: `from_config`'s 0.02 makes all logits nearly equal, and biases are 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("router.gate.weight"):  # AFMoE's are zeros
                parameter.normal_(std=0.06)
            else:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def in_float64(model: nn.Module) -> nn.Module:
    """`model` in float64, whose experts run one by one: torch's grouped product has no float64 (2.13)."""
    model.config._experts_implementation = "eager"
    return model.double()


def compute_scans_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make float32 mean float64, in which transformers' scans compute (5.23): in float32 their rounding alone is a
    hundredth of a time step's gradient."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, sizes: dict | None = None, **changes
) -> nn.Module:
    """A random model of `family` with random biases and norms too, so that omitting one changes the logits.

    sizes: the configuration of a family outside ALL_FAMILIES and MIXTURES.
    """
    torch.manual_seed(seed)
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    settings = {**special, "vocab_size": VOCABULARY, **(sizes or OF_FAMILY[family]), **changes}
    config = AutoConfig.for_model(family, **settings)
    return with_larger_weights(AutoModelForCausalLM.from_config(config)).to(dtype)


def with_peft(model: nn.Module, seed: int = 1, **settings) -> nn.Module:
    """`model` with a random PEFT LoRA on every linear layer except the head, and `out_proj` where PEFT refuses it."""
    torch.manual_seed(seed)
    targets = "all-linear"
    if model.config.model_type in ("nemotron_h", "mamba2", "falcon_h1"):
        targets = "in_proj q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    lora = {"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False, **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**lora))


class ChatLoRA(nn.Module):
    """A linear layer with LoRA in DeepSpeed-Chat's convention."""

    def __init__(self, linear: nn.Linear, rank: int = 4):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        rows, columns = linear.weight.shape
        self.lora_right_weight = nn.Parameter(torch.randn(columns, rank) * 0.2)
        self.lora_left_weight = nn.Parameter(torch.randn(rank, rows) * 0.2)
        self.lora_scaling = 1.5 / rank
        self.weight.requires_grad = False

    def forward(self, x):
        delta = (x @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        return nn.functional.linear(x, self.weight, self.bias) + delta


def with_chat_lora(model: nn.Module, seed: int = 1) -> nn.Module:
    """`model` with DeepSpeed-Chat's LoRA on every linear layer except the head; other parameters frozen."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, ChatLoRA(child))
    return model


ADAPTERS = {"none": lambda model: model, "peft": with_peft, "chat": with_chat_lora}


def prompts(rows: int, length: int, padded: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts and their mask, int64 [rows, length]; left padded by 0, 1, 2, … tokens where `padded`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : min(row, length - 1)] = 0
    return ids * mask, mask


def twin(model: nn.Module) -> nn.Module:
    """An unpartitioned copy in eval mode, as the Hugging Face reference."""
    return copy.deepcopy(model).eval()
