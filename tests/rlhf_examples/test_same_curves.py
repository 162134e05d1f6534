"""The same run at one and two ranks, under ZeRO 0 and 3: the metrics of its first iterations are equal."""

import math

import pytest

from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import TINY, logged, models_of, run_here, small_directory

TOLERANCE = 1e-4  # sums over ranks and micro batches in another order, in float32
ALL_OF_A_RANK = (
    "per_device_train_batch_size",
    "per_device_generation_batch_size",
)


@pytest.fixture(scope="module")
def alone():
    """One rank."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_directory(tmp_path_factory.mktemp("small"))


def curves(pool: RankPool, script: str, zero_stage: int, small, directory, **changes) -> list[dict[str, float]]:
    """The first three iterations, with the same records in each whatever the number of ranks."""
    each = {name: TINY[script][name] * 2 // pool.world_size for name in ALL_OF_A_RANK if name in TINY[script]}
    stages = ("actor_zero_stage", "critic_zero_stage") if script == "ppo" else ("zero_stage",)
    stages = ("actor_zero_stage",) if script == "grpo" else stages
    steps = {"num_iterations": 3} if script in ("ppo", "grpo") else {"max_steps": 3}
    settings = {**models_of(script, small), **dict.fromkeys(stages, zero_stage), **each, **steps, **changes}
    pool.run(run_here, script, {**settings, "output_dir": str(directory)})
    return logged(directory)


def require_equal(found: list[dict], expected: list[dict], except_for: tuple[str, ...] = ()) -> None:
    assert len(found) == len(expected) == 3
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        if abs(other.get("rewards/margins", 1.0)) < TOLERANCE:  # DPO's first step: policy and reference are one model
            other = {name: value for name, value in other.items() if name != "rewards/accuracies"}
        for name, value in other.items():
            if isinstance(value, float | int) and not name.startswith(except_for):
                assert math.isclose(row[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, row[name], value)


# Of rounding itself: how far sampler and trainer are apart; and how many values are by a last bit further from their
# target than clipped ones.
ROUNDING = ("sampling/", "control/", "val/first_ratio_error", "val/clipfrac_avg")


def test_ppo_is_the_same_at_one_and_two_ranks(alone, ranks, small, tmp_path):
    one = curves(alone, "ppo", 0, small, tmp_path / "one")
    two = curves(ranks, "ppo", 3, small, tmp_path / "two")
    require_equal(two, one, ROUNDING)
    assert one[0]["completions/min_length"] < one[0]["completions/max_length"], "nothing is padded"
    assert abs(one[2]["objective/kl"]) > 1e-2, "nothing was learned"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "reward_model", "dpo", "ppo", "grpo"])
def test_every_script_is_the_same_anywhere(script, alone, ranks, small, tmp_path):
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
        ("ppo", {"max_tokens_per_batch": 60, "padding_free": True}),
        ("ppo", {"entropy_coef": 0.1, "unsupervised_data_path": ["synthetic:stories"], "unsup_coef": 1.0}),
        ("grpo", {"loss_type": "grpo", "beta": 0.1, "mask_truncated_completions": True}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "batch", "importance_sampling_level": "sequence"}),
        ("sft", {"padding_free": True, "gradient_accumulation_steps": 2}),
        ("reward_model", {"loss_form": "tokenwise"}),
    ],
)
def test_settings_that_change_batches_are_the_same_anywhere(script, changes, alone, ranks, small, tmp_path):
    one = curves(alone, script, 0, small, tmp_path / "one", **changes)
    two = curves(ranks, script, 3, small, tmp_path / "two", **changes)
    require_equal(two, one, ROUNDING)


def test_an_update_ends_early_on_kl(alone, small, tmp_path):
    (first, *_) = curves(alone, "ppo", 0, small, tmp_path / "early", early_stop_kl=1e-9, actor_learning_rate=1e-2)
    (whole, *_) = curves(alone, "ppo", 0, small, tmp_path / "whole", early_stop_kl=1e9, actor_learning_rate=1e-2)
    assert first["policy/optimizer_steps"] < whole["policy/optimizer_steps"] == 4
