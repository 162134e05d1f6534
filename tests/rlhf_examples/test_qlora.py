"""`--load_in_4bit` and `--load_in_8bit`: the policy's base is quantized, its adapter learns, and it rolls out fused."""

import math

import pytest
from transformers import AutoModelForCausalLM

from rlhf_examples.common.arguments import GRPOArguments, RewardModelArguments, SFTArguments
from tests.marks import slow_but
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
CASES = [("grpo", 4, 3), ("grpo", 8, 2), ("grpo", 4, 2), ("ppo", 4, 3), ("sft", 4, 3), ("dpo", 4, 1)]


@pytest.mark.parametrize(("script", "bits", "zero_stage"), slow_but([("grpo", 4, 3)], CASES))
def test_a_quantized_policy_learns_by_its_adapter(ranks, small, tmp_path, script, bits, zero_stage):
    role = "actor_" if script in ("grpo", "ppo") else ""
    settings = {
        **models_of(script, small),
        f"load_in_{bits}bit": True,
        **({"use_bnb_nested_quant": True} if bits == 4 else {}),
        f"{role}zero_stage": zero_stage,
        f"{role}lora_dim": 2,
        "output_dir": str(tmp_path),
        **({"num_iterations": 2} if role else {"max_steps": 2}),
    }
    ranks.run(run_in_this_rank, script, settings)
    rows = [row for row in logged(tmp_path) if "grad_norm" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        if script == "grpo":
            assert row["val/first_ratio_error"] < 1e-4  # training's function is the sampler's
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # whole, dequantized
    assert not hasattr(exported.config, "quantization_config")


@pytest.mark.slow
def test_a_run_with_a_quantized_policy_resumes(ranks, small, tmp_path):
    settings = {**models_of("grpo", small), "load_in_4bit": True, "actor_lora_dim": 2, "actor_zero_stage": 3}
    settings |= {"save_every": 1, "num_iterations": 2}
    ranks.run(run_in_this_rank, "grpo", {**settings, "num_iterations": 3, "output_dir": str(tmp_path / "whole")})
    ranks.run(run_in_this_rank, "grpo", {**settings, "output_dir": str(tmp_path / "parts")})
    resumed = {**settings, "num_iterations": 3, "output_dir": str(tmp_path / "parts"), "resume": True}
    ranks.run(run_in_this_rank, "grpo", resumed)
    whole, parts = (
        [row["loss"] for row in logged(tmp_path / name) if "grad_norm" in row] for name in ("whole", "parts")
    )
    assert len(whole) == 3 and parts[-1] == whole[-1]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (GRPOArguments, {"load_in_4bit": True}, "with actor_lora_dim: 0"),
        (SFTArguments, {"load_in_4bit": True, "load_in_8bit": True, "lora_dim": 2}, "give one of them"),
        (SFTArguments, {"load_in_4bit": True, "lora_dim": 2}, "without model_name_or_path"),
        (SFTArguments, {"use_bnb_nested_quant": True}, "without load_in_4bit"),
        (GRPOArguments, {"load_in_8bit": True, "actor_lora_dim": 2, "actor_zero_stage": 3}, "0, 1 or 2, or load"),
        (RewardModelArguments, {"load_in_4bit": True, "lora_dim": 2}, "for a reward model"),
        (SFTArguments, {"load_in_4bit": True, "lora_dim": 2, "torch_compile": True}, "with torch_compile: true"),
    ],
)
def test_contradicting_settings_are_refused(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        arguments(**settings)
