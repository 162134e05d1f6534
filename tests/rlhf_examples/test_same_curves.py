"""The same run at one and two ranks, under ZeRO 0 and 3: the metrics of its first iterations are equal."""

import math

import pytest

from tests.rank_pool import RankPool, pool_of
from tests.rlhf_examples.scripts import TINY, logged, models_of, run_in_this_rank

TOLERANCE = 1e-4  # sums over ranks and micro batches in another order, in float32
ALL_OF_A_RANK = (
    "per_device_train_batch_size",
    "per_device_generation_batch_size",
)


alone = pool_of(1)


def curves(pool: RankPool, script: str, zero_stage: int, small, directory, **changes) -> list[dict[str, float]]:
    """The first three iterations, with the same records in each for any number of ranks."""
    each = {name: TINY[script][name] * 2 // pool.world_size for name in ALL_OF_A_RANK if name in TINY[script]}
    stages = ("actor_zero_stage", "critic_zero_stage") if script == "ppo" else ("zero_stage",)
    stages = ("actor_zero_stage",) if script in ("grpo", "agent") else stages
    steps = {"num_iterations": 3} if script in ("ppo", "grpo", "agent") else {"max_steps": 3}
    settings = {**models_of(script, small), **dict.fromkeys(stages, zero_stage), **each, **steps, **changes}
    pool.run(run_in_this_rank, script, {**settings, "output_dir": str(directory)})
    return logged(directory)


def require_equal(actual: list[dict], expected: list[dict], except_for: tuple[str, ...] = ()) -> None:
    assert len(actual) == len(expected) == 3
    for row, expected_row in zip(actual, expected, strict=True):
        assert row.keys() == expected_row.keys()
        # DPO's first step: policy and reference are one model
        if abs(expected_row.get("rewards/margins", 1.0)) < TOLERANCE:
            expected_row = {name: value for name, value in expected_row.items() if name != "rewards/accuracies"}
        for name, value in expected_row.items():
            if isinstance(value, float | int) and not name.startswith(except_for):
                assert math.isclose(row[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, row[name], value)


# Metrics of rounding: the difference of sampler and trainer, and counts of values that a last bit decides.
ROUNDING = ("sampling/", "control/", "val/first_ratio_error", "val/clipfrac_avg")


def test_ppo_metrics_are_equal_at_one_and_two_ranks(alone, ranks, small, tmp_path):
    single_rank = curves(alone, "ppo", 0, small, tmp_path / "one")
    two_ranks = curves(ranks, "ppo", 3, small, tmp_path / "two")
    require_equal(two_ranks, single_rank, ROUNDING)
    assert single_rank[0]["completions/min_length"] < single_rank[0]["completions/max_length"], "nothing is padded"
    assert abs(single_rank[2]["objective/kl"]) > 1e-2, "nothing was learned"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "reward_model", "dpo", "ppo", "grpo", "agent"])
def test_metrics_of_every_script_do_not_depend_on_ranks_and_zero_stage(script, alone, ranks, small, tmp_path):
    runs = [
        curves(pool, script, stage, small, tmp_path / f"{pool.world_size}-{stage}")
        for pool in (alone, ranks)
        for stage in (0, 3)
    ]
    for run in runs[1:]:
        require_equal(run, runs[0], ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("ppo", {"max_tokens_per_batch": 60}),
        ("ppo", {"training_forward": "model"}),
        ("ppo", {"top_k": 5, "keep_sampling_mask": True, "entropy_coef": 0.1}),
        ("grpo", {"top_p": 0.8, "keep_sampling_mask": True, "beta": 0.1}),
        ("ppo", {"entropy_coef": 0.1, "unsupervised_data_path": ["synthetic:stories"], "unsup_coef": 1.0}),
        ("grpo", {"loss_type": "grpo", "beta": 0.1, "mask_truncated_completions": True}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "batch", "importance_sampling_level": "sequence"}),
        ("sft", {"gradient_accumulation_steps": 2}),
        ("grpo", {"training_forward": "exact", "beta": 0.1}),
        ("reward_model", {"loss_form": "tokenwise"}),
    ],
)
def test_metrics_with_batch_settings_do_not_depend_on_ranks_and_zero_stage(
    script, changes, alone, ranks, small, tmp_path
):
    single_rank = curves(alone, script, 0, small, tmp_path / "one", **changes)
    two_ranks = curves(ranks, script, 3, small, tmp_path / "two", **changes)
    require_equal(two_ranks, single_rank, ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "agent"])
def test_metrics_do_not_depend_on_how_many_ranks_share_a_sequence(script, alone, ranks, small, tmp_path):
    settings = {"beta": 0.1, "importance_sampling_correction": True}
    single_rank = curves(alone, script, 0, small, tmp_path / "one", **settings)
    two_ranks = curves(ranks, script, 3, small, tmp_path / "two", **settings, sequence_parallel_size=2)
    require_equal(two_ranks, single_rank, ROUNDING)


def test_early_stop_kl_ends_an_update(alone, small, tmp_path):
    (first, *_) = curves(alone, "ppo", 0, small, tmp_path / "early", early_stop_kl=1e-9, actor_learning_rate=1e-2)
    (full, *_) = curves(alone, "ppo", 0, small, tmp_path / "whole", early_stop_kl=1e9, actor_learning_rate=1e-2)
    assert first["policy/optimizer_steps"] < full["policy/optimizer_steps"] == 4
