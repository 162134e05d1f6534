"""Evaluations: several completions per prompt, pass@k, greedy completions; equal on any number of ranks."""

import itertools
import json
import math
from pathlib import Path

import pytest

from rlhf_examples import pipeline
from rlhf_examples.common.actor import Evaluation, pass_at, standard_error
from rlhf_examples.common.arguments import EvaluateArguments, GRPOArguments, PipelineArguments
from rlhf_examples.common.engines import load_rollout_engine
from rlhf_examples.common.models import load_exported, load_tokenizer
from rlhf_examples.common.scorers import Rewards
from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import make_small_models

HERE = "tests.rlhf_examples.test_evaluation"
TEXTS = ["anna found", "ben", "in the garden", "the red ball", "a"]


def short_words(prompts, completions, **columns) -> list[float | None]:
    """1 if the first word is short; None for an empty completion."""
    return [float(len(text.split()[0]) < 5) if text.split() else None for text in completions]


@pytest.mark.parametrize(("passed", "count"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 3)])
def test_pass_at_k_matches_enumeration(passed, count):
    completions = [True] * passed + [False] * (count - passed)
    for k in range(1, count + 1):
        choices = list(itertools.combinations(completions, k))
        assert pass_at(k, completions) == pytest.approx(sum(map(any, choices)) / len(choices))


def long_words(prompts, completions, **columns) -> list[float]:
    """A different reward, which the test names `short_words`."""
    return [float(len(text)) for text in completions]


def check_names(directory: str) -> None:
    """Training and evaluation rewards with equal names keep separate scores."""
    tokenizer = load_tokenizer(f"{directory}/model")
    engine = load_rollout_engine(load_exported, f"{directory}/model", "float32", zero_stage=0)
    rewards, other_rewards = (
        Rewards.load([f"{HERE}:{name}"], "float32", rows=4) for name in ("short_words", "long_words")
    )
    other_rewards.scorers[0].name = "short_words"
    rows = [{"prompt": text, "columns": "{}", "prompt_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    evaluation = Evaluation(engine, tokenizer, rows, [rewards, other_rewards], GRPOArguments(max_answer_seq_len=4))
    metrics, texts, scores = evaluation()
    assert list(scores) == ["short_words", "eval_short_words"]
    assert scores["eval_short_words"] == [float(len(text)) for text in texts] != scores["short_words"]
    assert metrics["eval_eval_short_words"] == pytest.approx(sum(map(len, texts)) / len(texts))
    engine.destroy()


def test_rewards_with_equal_names_keep_separate_scores(ranks, tmp_path):
    make_small_models(Path(tmp_path))
    ranks.run(check_names, str(tmp_path))


def check_evaluation(directory: str) -> dict:
    """Evaluations of this rank, over the same prompts."""
    tokenizer = load_tokenizer(f"{directory}/model")
    engine = load_rollout_engine(load_exported, f"{directory}/model", "float32", zero_stage=3)
    rewards = Rewards.load([f"{HERE}:short_words"], "float32", rows=4)
    rows = [{"prompt": text, "columns": "{}", "prompt_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    args = GRPOArguments(max_answer_seq_len=4, seed=3)
    metrics, texts, scores = Evaluation(engine, tokenizer, rows, [rewards], args, 4, False, (1, 2, 4))()
    of_prompts = [scores["short_words"][first : first + 4] for first in range(0, 20, 4)]
    assert 0 < metrics["eval_short_words_stderr"] == standard_error(of_prompts)
    assert metrics["eval_short_words/pass@1"] == pytest.approx(sum(map(sum, of_prompts)) / 20)
    assert metrics["eval_short_words/pass@4"] == pytest.approx(sum(max(completions) for completions in of_prompts) / 5)
    assert len({*texts}) > 5, "completions of a prompt are equal"
    single = Evaluation(engine, tokenizer, rows, [rewards], args)()
    greedy, second_greedy = (
        Evaluation(engine, tokenizer, rows, [rewards], GRPOArguments(max_answer_seq_len=4, seed=seed), greedy=True)()
        for seed in (3, 4)
    )
    assert greedy == second_greedy
    assert greedy[1] != single[1]
    engine.destroy()
    return {"several": [metrics, texts, scores], "alone": single, "greedy": greedy}


def test_evaluation_does_not_depend_on_the_number_of_ranks(ranks, tmp_path):
    make_small_models(Path(tmp_path))
    first, second = ranks.run(check_evaluation, str(tmp_path))
    assert first == second
    assert len(first["several"][1]) == 20 and len(first["alone"][1]) == 5
    pool = RankPool(1, timeout_s=120)
    try:
        (single_rank,) = pool.run(check_evaluation, str(tmp_path))
    finally:
        pool.close()
    for name, (metrics, texts, scores) in first.items():
        assert list(single_rank[name][1:]) == [texts, scores]
        assert single_rank[name][0] == pytest.approx(metrics)


def test_invalid_evaluation_arguments_raise():
    for kind in (GRPOArguments, EvaluateArguments):
        assert kind(eval_num_generations=4, pass_at_k=[1, 4]).pass_at_k == [1, 4]
        with pytest.raises(ValueError, match="pass_at_k: 5 given with eval_num_generations: 4; it must be from"):
            kind(eval_num_generations=4, pass_at_k=[5])
    with pytest.raises(ValueError, match="eval_num_generations: 2 given with greedy decoding"):
        GRPOArguments(eval_num_generations=2, eval_greedy=True)
    with pytest.raises(ValueError, match="eval_num_generations: 2 given with greedy decoding"):
        EvaluateArguments(eval_num_generations=2, temperature=0.0)
    with pytest.raises(ValueError, match="zero_stage: 3 given with hf_generate: true, where transformers loads"):
        EvaluateArguments(hf_generate=True, zero_stage=3)
    assert math.isclose(GRPOArguments().pass_score, 1.0)


def test_the_standard_error_is_over_prompts():
    """Of prompts' means 0, 1, 2: a deviation of 1 over the root of 3, however many completions each has."""
    nan = math.nan
    assert standard_error([[0.0], [1.0], [2.0]]) == pytest.approx(3**-0.5)
    assert standard_error([[0.0] * 50, [0.5, 1.5] * 25, [2.0, nan] * 25, [nan] * 50]) == pytest.approx(3**-0.5)
    assert math.isnan(standard_error([[1.0, 0.0], [nan, nan]]))


def test_a_pipeline_that_has_logged_no_metrics_ends_with_its_summary(tmp_path, capsys):
    pipeline.report(PipelineArguments(output_dir=str(tmp_path)), {"score": 0.5})
    assert json.loads(capsys.readouterr().out) == {"score": 0.5}
