"""Mixtral and Qwen3-MoE: Mistral and Qwen3 with a mixture of experts as the MLP, in all or some layers."""

from dataclasses import replace

from hybrid.models.families.llama import MISTRAL
from hybrid.models.families.qwen import QWEN3
from hybrid.models.family import key, one_window

EXPERTS = {
    "router": "mlp.gate",
    "experts_gate_up": "mlp.experts:gate_up_proj",
    "experts_down": "mlp.experts:down_proj",
}
DENSE = ("gate", "up", "down")


def with_experts(roles: dict) -> dict:
    """A layer's roles, with experts in place of the dense MLP."""
    return {role: path for role, path in roles.items() if role not in DENSE} | EXPERTS


MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    layer=(with_experts(MISTRAL.layer[0]),),
    spec={
        "num_experts": key("num_local_experts"),
        "experts_per_token": key("num_experts_per_tok"),
        "normalize_experts": True,
        "experts_float32": True,
    },
    declares=("sliding_window", "num_local_experts"),
    understands=("sliding_window", "num_local_experts", "num_experts"),  # num_experts: the config's alias
)

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    layer=(with_experts(QWEN3.layer[0]), QWEN3.layer[0]),
    windows=one_window,
    spec={
        **QWEN3.spec,
        "num_experts": key("num_experts"),
        "experts_per_token": key("num_experts_per_tok"),
        "normalize_experts": key("norm_topk_prob"),
    },
    declares=("sliding_window", "norm_topk_prob", "decoder_sparse_step"),
    understands=("sliding_window", "num_experts", "num_local_experts"),
)
