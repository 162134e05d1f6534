"""Evaluations: several completions of a prompt, shares that pass, greedy ones; the same on any number of ranks."""

import itertools
import math
from pathlib import Path

import pytest

from rlhf_examples.actor import Evaluation, pass_at
from rlhf_examples.arguments import EvaluateArguments, GRPOArguments
from rlhf_examples.engines import frozen
from rlhf_examples.models import load_exported, load_tokenizer
from rlhf_examples.scorers import Rewards
from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import small_directory

HERE = "tests.rlhf_examples.test_evaluation"
TEXTS = ["anna found", "ben", "in the garden", "the red ball", "a"]


def short_words(prompts, completions, **columns) -> list[float | None]:
    """1 where the first word is short; None where there is none."""
    return [float(len(text.split()[0]) < 5) if text.split() else None for text in completions]


@pytest.mark.parametrize(("passed", "count"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 3)])
def test_pass_at_k_is_what_all_choices_give(passed, count):
    completions = [True] * passed + [False] * (count - passed)
    for k in range(1, count + 1):
        choices = list(itertools.combinations(completions, k))
        assert pass_at(k, completions) == pytest.approx(sum(map(any, choices)) / len(choices))


def check_evaluation(directory: str) -> dict:
    """What ranks find, of the same prompts."""
    tokenizer = load_tokenizer(f"{directory}/model")
    engine = frozen(load_exported, f"{directory}/model", "float32", zero_stage=3)
    rewards = Rewards.load([f"{HERE}:short_words"], "float32", rows=4)
    rows = [{"prompt": text, "columns": "{}", "prompt_ids": [1, *tokenizer(text)["input_ids"]]} for text in TEXTS]
    args = GRPOArguments(max_answer_seq_len=4, seed=3)
    metrics, texts, scores = Evaluation(engine, tokenizer, rows, [rewards], args, 4, False, (1, 2, 4))()
    of_prompts = [scores["short_words"][first : first + 4] for first in range(0, 20, 4)]
    assert metrics["eval_short_words/pass@1"] == pytest.approx(sum(map(sum, of_prompts)) / 20)
    assert metrics["eval_short_words/pass@4"] == pytest.approx(sum(max(of) for of in of_prompts) / 5)
    assert len({*texts}) > 5, "completions of a prompt are drawn apart"
    alone = Evaluation(engine, tokenizer, rows, [rewards], args)()
    greedy, again = (
        Evaluation(engine, tokenizer, rows, [rewards], GRPOArguments(max_answer_seq_len=4, seed=seed), greedy=True)()
        for seed in (3, 4)
    )
    assert greedy == again
    assert greedy[1] != alone[1]
    engine.destroy()
    return {"several": [metrics, texts, scores], "alone": alone, "greedy": greedy}


def test_evaluation_is_the_same_on_any_number_of_ranks(ranks, tmp_path):
    small_directory(Path(tmp_path))
    one, other = ranks.run(check_evaluation, str(tmp_path))
    assert one == other
    assert len(one["several"][1]) == 20 and len(one["alone"][1]) == 5
    pool = RankPool(1, timeout_s=120)
    try:
        (alone,) = pool.run(check_evaluation, str(tmp_path))
    finally:
        pool.close()
    for name, (metrics, texts, scores) in one.items():
        assert list(alone[name][1:]) == [texts, scores]
        assert alone[name][0] == pytest.approx(metrics)


def test_arguments_that_do_not_fit():
    for kind in (GRPOArguments, EvaluateArguments):
        assert kind(eval_num_generations=4, pass_at_k=[1, 4]).pass_at_k == [1, 4]
        with pytest.raises(ValueError, match="pass_at_k: 5 given with eval_num_generations: 4; it must be from"):
            kind(eval_num_generations=4, pass_at_k=[5])
    with pytest.raises(ValueError, match="eval_num_generations: 2 given with greedy completions"):
        GRPOArguments(eval_num_generations=2, eval_greedy=True)
    with pytest.raises(ValueError, match="eval_num_generations: 2 given with greedy completions"):
        EvaluateArguments(eval_num_generations=2, temperature=0.0)
    assert math.isclose(GRPOArguments().pass_score, 1.0)
