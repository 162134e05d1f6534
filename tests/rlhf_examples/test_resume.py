"""A run killed by SIGKILL and resumed equals an uninterrupted one: five points of PPO and of other scripts."""

import pytest

from tests.rank_pool import RankFailure, pool_of
from tests.rlhf_examples.scripts import POINTS, logged, models_of, run_in_this_rank, run_until

mortal_ranks = pool_of(2)  # a separate pool, whose ranks are killed


@pytest.fixture(scope="module")
def undisturbed(mortal_ranks, small, tmp_path_factory):
    """Metrics of an uninterrupted run of each script, cached."""
    metrics_by_run = {}

    def of(script: str, **changes) -> list[dict[str, float]]:
        key = script + repr(changes)
        if key not in metrics_by_run:
            directory = tmp_path_factory.mktemp("whole")
            mortal_ranks.run(run_in_this_rank, script, {**settings_of(script, small, directory), **changes})
            metrics_by_run[key] = logged(directory)
        return metrics_by_run[key]

    return of


def settings_of(script: str, small, directory) -> dict:
    return {**models_of(script, small), "output_dir": str(directory), "save_every": 1, "keep_last": 1}


def require_the_same_after(point: str, script: str, mortal_ranks, small, undisturbed, directory, **changes) -> None:
    settings = {**settings_of(script, small, directory), **changes}
    with pytest.raises(RankFailure, match="died with exit code -9"):
        mortal_ranks.run(run_until, script, settings, point)
    survived = logged(directory)
    mortal_ranks.run(run_in_this_rank, script, {**settings, "resume": True})
    expected = undisturbed(script, **changes)
    assert 0 < len(survived) < len(expected), "the run was not interrupted"
    assert logged(directory) == expected


PPO = {"adap_kl_ctrl": True, "kl_target": 0.01, "kl_horizon": 20, "enable_ema": True}


@pytest.mark.slow
def test_ppo_killed_while_saving_resumes(mortal_ranks, small, undisturbed, tmp_path):
    require_the_same_after("while saving", "ppo", mortal_ranks, small, undisturbed, tmp_path, **PPO)
    coefs = [row["objective/kl_coef"] for row in logged(tmp_path)]
    assert len(set(coefs)) == len(coefs), "the KL coefficient never changed: the test is vacuous"


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in POINTS if point != "while saving"])
def test_ppo_killed_at_any_point_resumes(point, mortal_ranks, small, undisturbed, tmp_path):
    require_the_same_after(point, "ppo", mortal_ranks, small, undisturbed, tmp_path, **PPO)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "point", "changes"),
    [
        ("grpo", "update", {"actor_lora_dim": 4}),
        ("grpo", "update", {"training_forward": "exact"}),
        ("grpo", "after saving", {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 20.0}),
        ("agent", "update", {}),
        ("ppo", "rollout", {"actor_lora_dim": 4, "critic_lora_dim": 4, "importance_sampling_correction": True}),
        ("ppo", "after saving", {"unsupervised_data_path": ["synthetic:stories"], "unsup_coef": 0.5}),
        ("sft", "before saving", {"enable_ema": True}),
        ("reward_model", "after saving", {}),
        ("dpo", "while saving", {"lora_dim": 4}),
    ],
)
def test_other_scripts_killed_at_any_point_resume(script, point, changes, mortal_ranks, small, undisturbed, tmp_path):
    require_the_same_after(point, script, mortal_ranks, small, undisturbed, tmp_path, **changes)
