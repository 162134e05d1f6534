"""Rewards that are computed while completions decode: the same numbers as after the rollout, earlier."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rlhf_examples.common import overlapped_rewards
from rlhf_examples.common.overlapped_rewards import OverlappedRewards
from rlhf_examples.common.run_log import read_metrics
from rlhf_examples.common.scorers import Rewards, Scorer
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank

SLOW = "tests.rlhf_examples.common.test_overlapped_rewards:slow_words"
PAUSE_S = 0.02  # of a call, besides what it computes


def slow_words(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Distinct words relative to the mean of the call's completions of the same prompt; takes a while."""
    time.sleep(PAUSE_S)
    counts = [len(set(completion.split())) for completion in completions]
    of_prompt = [[own for own, other in zip(counts, prompts, strict=True) if other == text] for text in prompts]
    return [own / 4 - sum(others) / len(others) / 8 for own, others in zip(counts, of_prompt, strict=True)]


class Part:
    """The rows of a batch that are done."""

    def __init__(self, rows: list[int]):
        self.row_index = torch.tensor(rows, dtype=torch.int64)

    def select_rows(self, indices: list[int]) -> "Part":
        return Part(self.row_index[indices].tolist())


def overlapped(monkeypatch, reward, prompts: int, **options) -> OverlappedRewards:
    """Rewards of two completions each; a completion's text is its number."""
    monkeypatch.setattr(
        overlapped_rewards, "decode_completions", lambda _, part: list(map(str, part.row_index.tolist()))
    )
    columns = ['{"answer": 7}', *["{}"] * (prompts - 1)]
    rows = [{"prompt": str(number), "columns": columns[number]} for number in range(prompts) for _ in range(2)]
    return OverlappedRewards(Rewards([Scorer("number", reward)], [1.0]), SimpleNamespace(), rows, 2, **options)


def test_a_call_has_whole_groups_and_the_scores_the_order_of_the_rollout(monkeypatch, alone):
    calls, threads = [], set()

    def number(prompts, completions, answer, **columns):
        calls.append(list(zip(prompts, completions, answer, strict=True)))
        threads.add(threading.current_thread())
        time.sleep(PAUSE_S)
        return [float(text) for text in completions]

    rewards = overlapped(monkeypatch, number, prompts=3)
    rewards.on_rows(Part([4]))
    rewards.on_rows(Part([1]))
    assert not calls, "a part of a group was scored"
    rewards.on_rows(Part([5]))
    while not rewards.seconds:
        time.sleep(0.001)
    scores = rewards.scores_by_name(Part([0, 1, 2, 3, 4, 5]))
    assert scores["number"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert calls == [
        [("2", "4", None), ("2", "5", None)],
        [("0", "0", 7), ("0", "1", 7), ("1", "2", None), ("1", "3", None)],
    ]
    assert threads and threading.main_thread() not in threads and rewards.overlapped_s > 0
    assert overlapped(monkeypatch, number, prompts=3, overlaps=False).on_rows is None


def test_what_a_reward_raises_comes_with_the_scores(monkeypatch, alone):
    def number(prompts, completions, **columns):
        raise ArithmeticError(completions)

    rewards = overlapped(monkeypatch, number, prompts=1)
    rewards.on_rows(Part([0, 1]))
    with pytest.raises(ArithmeticError, match="'0', '1'"):
        rewards.scores_by_name(Part([0, 1]))


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_run_logs_the_same_numbers_with_and_without_overlap(script, ranks, small, tmp_path):
    """Two ranks under ZeRO-3; PPO with a reward model next to the function."""
    of_script = {"grpo": {"reward": [SLOW]}, "ppo": {"reward": [SLOW, str(small / "reward_model")]}}[script]
    settings = {**models_of(script, small), **of_script, "num_iterations": 2, "max_answer_seq_len": 24}
    runs = {}
    for overlaps in (True, False):
        directory = tmp_path / str(overlaps)
        changes = {"overlap_rewards": overlaps, "output_dir": str(directory)}
        ranks.run(run_in_this_rank, script, {**settings, **changes})
        runs[overlaps] = logged(directory)
        hidden = [row["time/reward_overlapped_s"] for row in read_metrics(directory) if "time/rollout_s" in row]
        assert (min(hidden) > 0) == overlaps
    assert runs[True] == runs[False]
