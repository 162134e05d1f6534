"""GRPO and PPO with `rollout_weight_dtype: int8`: the mismatch is logged and corrected, and the reference is exact."""

import math

import pytest

from tests.marks import slow_but
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank


@pytest.mark.parametrize(
    ("script", "zero_stage"), slow_but([("grpo", 3)], [("grpo", 3), ("grpo", 0), ("ppo", 3), ("ppo", 1)])
)
def test_int8_rollouts_are_corrected(ranks, small, tmp_path, script, zero_stage):
    settings = {
        **models_of(script, small),
        "rollout_weight_dtype": "int8",
        "importance_sampling_correction": True,
        "actor_zero_stage": zero_stage,
        "actor_lora_dim": 2,
        "num_iterations": 2,
        "output_dir": str(tmp_path),
        **({"beta": 0.1} if script == "grpo" else {}),
    }
    ranks.run(run_in_this_rank, script, settings)
    rows = [row for row in logged(tmp_path) if "grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert 1e-5 < row["sampling/sampling_logp_difference/mean"] < 0.5
        assert row["sampling/importance_sampling_ratio/min"] < 1 < row["sampling/importance_sampling_ratio/max"]
        # Old logprobs are the training forward's: the first ratio is 1 although the sampler is another policy.
        assert row["val/first_ratio_error"] < 1e-4
    # The adapter's product is 0 at first: policy and reference are one model, whatever sampled.
    assert abs(rows[0]["objective/kl" if script == "ppo" else "kl"]) < 1e-4
