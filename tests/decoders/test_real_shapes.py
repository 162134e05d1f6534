"""Families at the head sizes and counts of a released model, with few layers, and many with its vocabulary too.

Tiny models have four heads of eight elements; kernels divide real ones into other blocks.
"""

import pytest

from tests.decoders import test_cpu_decoder, test_torch_decoder
from tests.decoders.test_recurrent_mixers import DTYPES, require_as_exact
from tests.decoders.test_sharded_decoder import require_exact_slices
from tests.decoders.test_torch_decoder import Run, hugging_face, require_equal_in_rounding, sequences
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, tiny_model


def heads(count: int, kv_heads: int, head_dim: int, **more) -> dict:
    """Settings of a model with these heads."""
    sizes = {"num_attention_heads": count, "num_key_value_heads": kv_heads, "head_dim": head_dim, **more}
    return {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 1, **sizes}


def latents(count: int, rank: int, plain: int, rope: int, value: int, query_rank: int | None = None, **more) -> dict:
    """Settings of a model with latent attention: latents of `rank`, heads of `plain` and `rope` elements."""
    heads = {"num_attention_heads": count, "num_key_value_heads": count, "kv_lora_rank": rank}
    parts = {"q_lora_rank": query_rank, "qk_nope_head_dim": plain, "qk_rope_head_dim": rope, "v_head_dim": value}
    return {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 1, **heads, **parts, **more}


def experts(count: int, per_token: int, **more) -> dict:
    """Settings of a mixture, which the one layer is."""
    sizes = {"n_routed_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": 64}
    return {**sizes, "first_k_dense_replace": 0, **more}


NO_GROUPS = {"n_group": 1, "topk_group": 1}
GROUPS = {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}
NAMED_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}
ONE_LAYER = {"layer_types": ["sliding_attention"], "sliding_window": 20}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "sliding_window": 20,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SHARED = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCABULARY,
    "use_double_wide_mlp": True,
}
SHAPES = {
    "OLMo-3-7B": ("olmo3", heads(32, 32, 128, **ONE_LAYER)),
    "EXAONE-4.0-1.2B": ("exaone4", heads(32, 8, 64, **ONE_LAYER)),
    "GLM-4-9B-0414": ("glm4", heads(32, 2, 128, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "Gemma-7B": ("gemma", heads(16, 16, 256)),
    "Gemma-4-E2B": ("gemma4_text", heads(8, 1, 256, **{**GEMMA4, **GEMMA4_SHARED})),
    "Gemma-4-31B": ("gemma4_text", heads(32, 16, 256, attention_k_eq_v=True, num_global_key_value_heads=4, **GEMMA4)),
    "Gemma-4-26B-A4B": (
        "gemma4_text",
        heads(
            16,
            8,
            256,
            attention_k_eq_v=True,
            num_global_key_value_heads=2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=64,
            **GEMMA4,
        ),
    ),
    "StarCoder2-3B": ("starcoder2", heads(24, 2, 128, hidden_size=3072)),
    "Phi-2": ("phi", heads(32, 32, 80, hidden_size=2560)),
    "Ministral-3-3B": ("ministral3", heads(32, 8, 128)),
    "StableLM-2-1.6B": ("stablelm", heads(32, 32, 64, hidden_size=2048)),
    "Aya-23-8B": ("cohere", heads(32, 8, 128, hidden_size=4096)),
    "Command-R7B": ("cohere2", heads(32, 8, 128, hidden_size=4096, **ONE_LAYER)),
    "Hunyuan-0.5B": ("hunyuan_v1_dense", heads(16, 8, 128)),
    "AFM-4.5B": ("arcee", heads(20, 4, 128, hidden_size=640)),
    "Jais-2-8B": ("jais2", heads(26, 26, 128, hidden_size=624)),
    "Minitron-4B": ("nemotron", heads(24, 8, 128, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})),
    "nanochat-d20": ("nanochat", heads(10, 10, 128)),
    "Apertus-8B": ("apertus", heads(32, 8, 128, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})),
    "OLMo-1B": ("olmo", heads(16, 16, 128, hidden_size=2048)),
    "Moonlight-16B-A3B": ("deepseek_v3", latents(16, 512, 128, 64, 128, **experts(64, 6, **NO_GROUPS))),
    "DeepSeek-V3": ("deepseek_v3", latents(128, 512, 128, 64, 128, 1536, **experts(256, 8))),
    "DeepSeek-V2": ("deepseek_v2", latents(128, 512, 128, 64, 128, 1536, **experts(160, 6, **GROUPS))),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        latents(20, 512, 192, 64, 256, 768, **experts(64, 4), mlp_layer_types=["sparse"]),
    ),
    "Youtu-LLM-2B": ("youtu", latents(16, 512, 128, 64, 128, 1536, hidden_size=2048, initializer_range=0.02)),
    "MiniCPM3-4B": ("minicpm3", latents(40, 256, 64, 32, 64, 768, hidden_size=2560)),
    # With the vocabulary of the released model, where weights stay below about 1 GB.
    "Llama-3.2-1B": ("llama", heads(32, 8, 64, vocab_size=128256, tie_word_embeddings=True)),
    "Mistral-7B": ("mistral", heads(32, 8, 128, sliding_window=20, vocab_size=32000)),
    "Qwen2.5-0.5B": ("qwen2", heads(14, 2, 64, hidden_size=896, vocab_size=151936, tie_word_embeddings=True)),
    "Qwen3-0.6B": ("qwen3", heads(16, 8, 128, vocab_size=151936, tie_word_embeddings=True)),
    "Seed-OSS-36B": ("seed_oss", heads(80, 8, 128, vocab_size=155136)),
    "Gemma-2-2B": ("gemma2", heads(8, 4, 256, vocab_size=256000, **ONE_LAYER)),
    "Gemma-3-1B": ("gemma3_text", heads(4, 1, 256, vocab_size=262144, **ONE_LAYER)),
    "Phi-3-mini": ("phi3", heads(32, 32, 96, hidden_size=3072, vocab_size=32064)),
    "SmolLM3-3B": ("smollm3", heads(16, 4, 128, hidden_size=2048, vocab_size=128256, tie_word_embeddings=True)),
    "OLMo-2-7B": ("olmo2", heads(32, 32, 128, hidden_size=4096)),
    "GLM-4-9B-chat": ("glm", heads(32, 2, 128, vocab_size=151552)),
    "HyperCLOVA-X-SEED-14B": ("hyperclovax", heads(48, 8, 128, hidden_size=768, vocab_size=110592)),
    "Granite-3.3-2B": ("granite", heads(32, 8, 64, hidden_size=2048, vocab_size=49159, **GRANITE)),
    "Granite-SWA": ("granite_swa", heads(20, 4, 128, hidden_size=2560, vocab_size=100352, **ONE_LAYER, **GRANITE)),
    "Granite-3.1-1B-A400M": (
        "granitemoe",
        heads(16, 8, 64, hidden_size=1024, vocab_size=49155, num_local_experts=32, num_experts_per_tok=8, **GRANITE),
    ),
    "Qwen3-30B-A3B": ("qwen3_moe", heads(32, 4, 128, vocab_size=151936, norm_topk_prob=True, **NAMED_EXPERTS)),
    "Mixtral-8x7B": ("mixtral", heads(32, 8, 128, vocab_size=32000)),
    "OLMoE-1B-7B": (
        "olmoe",
        heads(
            16,
            16,
            128,
            hidden_size=2048,
            intermediate_size=64,
            vocab_size=50304,
            **{**NAMED_EXPERTS, "num_experts": 64},
        ),
    ),
    "Phi-3.5-MoE": (
        "phimoe",
        heads(32, 8, 128, vocab_size=32064, num_local_experts=16, num_experts_per_tok=2),
    ),
    "K-EXAONE-236B-A23B": (
        "exaone_moe",
        heads(64, 8, 128, vocab_size=153600, mlp_layer_types=["sparse"], **ONE_LAYER, **NAMED_EXPERTS),
    ),
    "Hunyuan-3": (
        "hy_v3",
        heads(64, 8, 128, vocab_size=120832, mlp_layer_types=["sparse"], **{**NAMED_EXPERTS, "num_experts": 192}),
    ),
    "Mellum-2": (
        "mellum",
        heads(32, 4, 128, vocab_size=98304, mlp_layer_types=["sparse"], **ONE_LAYER, **NAMED_EXPERTS),
    ),
    "Solar-Open-100B": ("solar_open", heads(64, 8, 128, vocab_size=196608, **experts(128, 8, **NO_GROUPS))),
    "A.X-K1": (
        "axk1",
        latents(64, 512, 128, 64, 128, 1536, vocab_size=163840, mlp_layer_types=["sparse"], **experts(192, 8)),
    ),
    "Mistral-Small-4": (
        "mistral4",
        latents(32, 256, 64, 64, 128, 1024, vocab_size=131072, **experts(128, 4, **NO_GROUPS)),
    ),
    "GPT-2": ("gpt2", {"n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": 50257}),
    "Pythia-1B": ("gpt_neox", heads(8, 8, 256, hidden_size=2048, vocab_size=50304)),
    "GPT-J-6B": ("gptj", {"n_embd": 4096, "n_head": 16, "n_layer": 1, "rotary_dim": 64}),
    "OPT-125M": ("opt", heads(12, 12, 64, hidden_size=768, word_embed_proj_dim=768, ffn_dim=768, vocab_size=50272)),
    "BLOOM-560M": ("bloom", {"hidden_size": 1024, "n_head": 16, "n_layer": 1, "vocab_size": 250880}),
    "Falcon-7B": (
        "falcon",
        {
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_hidden_layers": 1,
            "ffn_hidden_size": 512,
        },
    ),
}


@pytest.mark.parametrize("shape", slow_but(["GLM-4-9B-0414", "Phi-2", "Moonlight-16B-A3B"], SHAPES))
def test_logits_equal_hugging_face(shape):
    family, sizes = SHAPES[shape]
    model = tiny_model(family, sizes={**sizes, "max_position_embeddings": 128}).eval()
    expected = hugging_face(model)
    for run, tests in ((Run, test_torch_decoder), (test_cpu_decoder.CpuRun, test_cpu_decoder)):
        require_equal_in_rounding(run(tests.decoder_of(model), sequences()).every_logit(), expected, model)


NEMOTRON_3_NANO = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "layers_block_type": ["linear_attention", "full_attention", "moe"],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "routed_scaling_factor": 2.5,
    "vocab_size": 131072,
}
LFM2_SIZES = heads(
    32,
    8,
    64,
    hidden_size=2048,
    num_hidden_layers=2,
    layer_types=["conv", "full_attention"],
    conv_L_cache=3,
    block_auto_adjust_ff_dim=False,
)
DELTA_NETS = {  # with gated attention
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
LAYERS_OF_H = ["linear_attention", "mlp", "full_attention"]
RECURRENT_SHAPES = {
    "Qwen3.5": (
        "qwen3_5_text",
        heads(
            16,
            4,
            256,
            hidden_size=64,
            num_hidden_layers=2,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            layer_types=["linear_attention", "full_attention"],
            vocab_size=248320,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen3.5-35B-A3B": (
        "qwen3_5_moe_text",
        heads(
            16, 2, 256, vocab_size=248320, shared_expert_intermediate_size=64, **{**NAMED_EXPERTS, "num_experts": 256}
        )
        | DELTA_NETS,
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        heads(16, 2, 256, vocab_size=151936, shared_expert_intermediate_size=64, norm_topk_prob=True)
        | {**NAMED_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10, **DELTA_NETS},
    ),
    "Bamba-9B": (
        "bamba",
        heads(32, 8, 128, hidden_size=4096, num_hidden_layers=2)
        | {"intermediate_size": 64, "attn_layer_indices": [1], "mamba_n_heads": 128, "mamba_d_state": 256},
    ),
    "Codestral-Mamba-7B": ("mamba2", {"num_hidden_layers": 1}),
    "Nemotron-3-Nano-30B-A3B": ("nemotron_h", NEMOTRON_3_NANO),
    "Nemotron-H-8B": (
        "nemotron_h",
        {**NEMOTRON_3_NANO, "mamba_num_heads": 128, "num_key_value_heads": 8, "layers_block_type": LAYERS_OF_H},
    ),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        {
            "hidden_size": 1536,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "shared_intermediate_size": 128,
        },
    ),
    "OLMo-Hybrid-7B": (
        "olmo_hybrid",
        {
            "hidden_size": 3840,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 30,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        {
            **latents(32, 512, 128, 64, 128, hidden_size=512, num_hidden_layers=2),
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "sparse"],
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 2.446,
            "initializer_range": 0.02,
        },
    ),
    "LFM3-1.7B": (
        "lfm3",
        heads(
            16,
            4,
            128,
            hidden_size=2048,
            num_hidden_layers=3,
            layer_types=["conv", "sliding_attention", "full_attention"],
        ),
    ),
    "Falcon-H1-1.5B": (
        "falcon_h1",
        {
            **heads(8, 2, 128, hidden_size=2048, intermediate_size=64),
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.0390625,
            "key_multiplier": 0.3,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "attention_out_multiplier": 0.9375,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.23570226039551587,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        },
    ),
    "LFM2-1.2B": ("lfm2", LFM2_SIZES),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        {
            **LFM2_SIZES,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", slow_but(["Nemotron-3-Nano-30B-A3B"], RECURRENT_SHAPES))
def test_recurrent_models_are_as_exact_as_hugging_face(shape, dtype):
    family, sizes = RECURRENT_SHAPES[shape]
    require_as_exact(tiny_model(family, sizes=sizes, seed=1).to(dtype).eval(), (20, 7))


@pytest.mark.parametrize("shape", slow_but(["LFM2-1.2B"], RECURRENT_SHAPES))
def test_slices_of_recurrent_mixers_are_as_exact_as_whole_ones(shape):
    """At two ranks, in float32, against float64."""
    family, sizes = RECURRENT_SHAPES[shape]
    require_exact_slices(tiny_model(family, sizes={**sizes, "max_position_embeddings": 128}).eval(), (2,))
