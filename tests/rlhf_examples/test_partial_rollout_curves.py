"""GRPO learns as much by partial rollouts as by whole ones: sums, three seeds each."""

import json
from statistics import fmean, stdev

import pytest

from rlhf_examples.common.run_log import read_metrics
from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import LOGS, run_in_this_rank

SEEDS = (0, 1, 2)
SUMS = {"data_path": ["synthetic:arithmetic@train"], "eval_data_path": ["synthetic:arithmetic@test"], **LOGS}
SFT = {
    **SUMS,
    "hidden_size": 128,
    "only_completions": True,
    "per_device_train_batch_size": 64,
    "max_steps": 150,
    "learning_rate": 3e-3,
    "eval_rows": 64,
}
GRPO = {
    **SUMS,
    "reward": "rlhf_examples.rewards:exact_match",
    "num_iterations": 30,
    "per_device_generation_batch_size": 16,
    "num_generations": 8,
    "per_device_training_batch_size": 64,
    "num_mini_batches": 2,
    "max_answer_seq_len": 4,
    "actor_learning_rate": 4e-4,
    "importance_sampling_correction": True,
    "eval_rows": 128,
}
LAST = 5  # iterations whose rewards are averaged


def final_reward(pool: RankPool, directory, **changes) -> float:
    """The mean reward of a run's last iterations."""
    pool.run(run_in_this_rank, "grpo", {**GRPO, "output_dir": str(directory), **changes}, timeout_s=900)
    rewards = [row["reward"] for row in read_metrics(directory) if "reward" in row]
    return fmean(rewards[-LAST:])


@pytest.mark.slow
def test_final_rewards_of_partial_and_whole_rollouts_are_within_the_noise_of_seeds(tmp_path):
    pool, finals = RankPool(1), {True: [], False: []}
    try:
        pool.run(run_in_this_rank, "sft", {**SFT, "output_dir": str(tmp_path / "sft")}, timeout_s=900)
        for seed in SEEDS:
            for partial, rewards in finals.items():
                of_run = {"actor_model_name_or_path": str(tmp_path / "sft" / "model"), "seed": seed}
                rewards.append(final_reward(pool, tmp_path / f"{partial}{seed}", partial_rollout=partial, **of_run))
    finally:
        pool.close()
    print(json.dumps({"partial" if partial else "whole": rewards for partial, rewards in finals.items()}))
    # Two standard errors of the difference of means of three seeds, and at least 0.02, the noise of 640 completions.
    error = sum(stdev(rewards) ** 2 / len(SEEDS) for rewards in finals.values()) ** 0.5
    assert abs(fmean(finals[True]) - fmean(finals[False])) < max(2 * error, 0.02), finals
