"""Values that settings and functions allow."""

import importlib.util
from collections.abc import Sequence
from typing import Literal, get_args

LossType = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "luspo",
    "cispo",
    "sapo",
    "vespo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]
PreferenceLossType = Literal["sigmoid", "kto", "orpo"]
AdvantageName = Literal[
    "group",
    "rloo",
    "opo",
    "remax",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
ImportanceSamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
TrainingForward = Literal["model", "packed", "exact"]  # those of `HybridEngine.logps`
Optimizer = Literal["adamw", "fused", "lion", "muon", "adamw8bit"]
LOSS_TYPES, IMPORTANCE_SAMPLING_MODES = get_args(LossType), get_args(ImportanceSamplingMode)
IMPORTANCE_SAMPLING_LEVELS = get_args(ImportanceSamplingLevel)
# The settings of each loss type's surrogate, and whether it takes a ratio per sequence.
CLIP_RANGE = ("epsilon", "epsilon_high")
LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "luspo"), (*CLIP_RANGE, "delta")),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "gmpo": CLIP_RANGE,
    "dppo_tv": (*CLIP_RANGE, "clip_ratio_c"),
    "dppo_kl": (*CLIP_RANGE, "clip_ratio_c"),
    "clip_cov": (*CLIP_RANGE, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
WITH_SEQUENCE_RATIOS = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo")
# The names that `report_to` allows, and the package that each needs; a package is imported only if it is used.
TRACKER_PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}

# Rewards that a name alone names, `NAME` or `NAME:settings.yaml`, and the module of each, whose `load` makes it.
NAMED_REWARDS = {
    "math_verify": "rlhf_examples.math_reward",
    "code": "rlhf_examples.code_reward",
    "judge": "rlhf_examples.judge_reward",
}


def named_reward(name: str) -> str:
    """The one of NAMED_REWARDS that a reward's name is, with or without settings; empty if it is none of them."""
    kind, colon, file = name.partition(":")
    return kind if kind in NAMED_REWARDS and (not colon or file.endswith((".yaml", ".yml"))) else ""


def require_choice(name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError if a value is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} given; allowed: {', '.join(map(str, allowed))}")


def check_report_to(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown tracker, or one whose package is not installed."""
    for name in names:
        require_choice("report_to", name, tuple(TRACKER_PACKAGES))
        if importlib.util.find_spec(TRACKER_PACKAGES[name]) is None:
            package = TRACKER_PACKAGES[name]
            raise ValueError(f"report_to: {name!r} given, which is not installed; run: pip install {package}")
