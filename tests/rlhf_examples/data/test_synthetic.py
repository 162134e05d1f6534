"""The synthetic sets and their gold score."""

import re
from statistics import mean

import pytest

from rlhf_examples.data.synthetic import (
    SETS,
    SIZES,
    arithmetic,
    gold_score,
    preference_pairs,
    preferences,
    stories,
    synthetic_tokenizer,
)

HAPPY = "anna laughed and danced with joy . it was a wonderful day full of fun ."
END = " that was the end ."


@pytest.mark.parametrize("name", SETS)
def test_a_set_depends_only_on_split_and_seed(name):
    make = SETS[name]
    first = make("train", 4, 50)
    assert len(first) == 50 and first == make("train", 4, 50) != make("test", 4, 50)
    if name != "openings":  # a complete enumeration
        assert first != make("train", 5, 50)
        assert len(make("train")) == SIZES["train"]
    if name not in ("openings", "arithmetic"):
        assert len(make("test")) == SIZES["test"]


@pytest.mark.parametrize("name", SETS)
def test_the_test_split_shares_no_prompt_with_the_train_split(name):
    train, test = ({record["prompt"] for record in SETS[name](split)} for split in ("train", "test"))
    assert train and test and not train & test


@pytest.mark.parametrize("name", [name for name in SETS if name != "openings"])
def test_the_tokenizer_knows_every_word(name):
    tokenizer = synthetic_tokenizer()
    for record in SETS[name]("train", size=300):
        for text in record.values():
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text.strip()


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (HAPPY + END, 1.0),
        (f"  {HAPPY}   that  was the end .\n", 1.0),
        ("the boat was broken and lost . anna cried and felt very sad ." + END, 0.0),
        ("anna put the boat on the table . later it rained for an hour ." + END, 0.5),
        ("it was a wonderful day full of fun . later it rained for an hour ." + END, 0.75),
        (HAPPY, 0.5),  # no ending
        (HAPPY + " that was", 1 / 3),  # two of three sentences, no ending
        (HAPPY + END + " anna", 0.25),  # two of four, and continues after the ending
        ("it was a wonderful day full of fun . " * 4 + END, 0.25),  # one of four is new
        ("the sun was along the felt happy ." + END, 0.0),  # no sentence of any mood
        ("happy joy fun laughed smiled wonderful", 0.0),
        (END, 0.0),
        ("", 0.0),
        ("...", 0.0),
    ],
)
def test_gold_scores_of_stories(completion, expected):
    assert gold_score(["x"], [completion]) == [pytest.approx(expected)]


def test_gold_scores_of_the_corpus_average_one_half():
    texts = [record["completion"] for record in stories("train")]
    scores = gold_score(texts, texts)
    assert mean(scores) == pytest.approx(0.5, abs=0.03)  # three equally frequent moods, 4096 stories: 5 sigma
    assert set(scores) == {0.0, 0.5, 1.0}


@pytest.mark.parametrize("label_noise", [0.0, 0.05, 0.5])
def test_pairs_follow_the_gold_score_except_for_label_noise(label_noise):
    pairs = preferences("train", label_noise=label_noise)
    chosen, rejected = (gold_score([], [pair[name] for pair in pairs]) for name in ("chosen", "rejected"))
    wrong = mean(a < b for a, b in zip(chosen, rejected, strict=True))
    assert wrong == pytest.approx(label_noise, abs=5 * (label_noise * (1 - label_noise) / len(pairs)) ** 0.5)
    assert all(a != b for a, b in zip(chosen, rejected, strict=True))
    clean = preferences("test", label_noise=label_noise)
    for pair in clean:
        assert gold_score([], [pair["chosen"]]) > gold_score([], [pair["rejected"]])


def test_pairs_contain_a_policys_typical_errors():
    texts = [pair[name] for pair in preferences("train") for name in ("chosen", "rejected")]
    sentences = [re.findall(r"[^.]+\.", text) for text in texts]
    assert 0.1 < mean(not text.endswith("the end .") for text in texts) < 0.4
    assert 0.1 < mean(len(set(sentences_of_text)) < len(sentences_of_text) for sentences_of_text in sentences) < 0.5


def test_pairs_choose_the_better_completion_and_drop_ties():
    pairs = preference_pairs(
        ["p", "q", "r"], ["aa", "b", "c"], ["a", "bbb", "d"], lambda prompts, completions: list(map(len, completions))
    )
    assert pairs == [
        {"prompt": "p", "chosen": "aa", "rejected": "a"},
        {"prompt": "q", "chosen": "bbb", "rejected": "b"},
    ]


def numbers_of(record: dict[str, str]) -> list[int]:
    return [*map(int, re.fullmatch(r"(\d) \+ (\d) \+ (\d) \+ (\d) \+ (\d) =", record["prompt"]).groups())]


def test_sums_are_correct_and_supervised_answers_rarely():
    records = arithmetic("train")
    for record in records:
        answer = int(record["answer"])
        assert answer == sum(numbers_of(record))
        assert int(record["completion"]) in (answer, answer + 1)
    right = mean(record["completion"] == record["answer"] for record in records)
    assert right == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / len(records)) ** 0.5)
    assert all(record["completion"] == record["answer"] for record in arithmetic("train", wrong=0.0))


def test_held_out_sums_are_disjoint_from_training():
    train, test = ([tuple(sorted(numbers_of(record))) for record in arithmetic(split)] for split in ("train", "test"))
    assert len(test) == len(set(test)) == 213, "held-out sums repeat"
    assert not set(train) & set(test)
    assert len(set(train)) == 249, "few training sums are memorised"


def test_unscored_completions_are_in_no_pair():
    scores = {"good": 1.0, "bad": 0.0, "unknown": float("nan")}
    completions = ["good", "unknown", "bad", "unknown"], ["unknown", "bad", "good", "unknown"]
    pairs = preference_pairs(
        ["a", "b", "c", "d"], *completions, lambda prompts, texts: [scores[text] for text in texts]
    )
    assert pairs == [{"prompt": "c", "chosen": "good", "rejected": "bad"}]
