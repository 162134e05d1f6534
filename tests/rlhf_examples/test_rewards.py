"""The reward functions, and errors of loading and calling them."""

import math

import numpy as np
import pytest
import torch

from rlhf_examples.rewards import (
    as_numbers,
    cheerful,
    exact_match,
    format_reward,
    joyful_story,
    load_reward,
    number_match,
)


def test_the_stories_reward_prefers_cheerful_texts_without_repetition():
    good, bad, plain, mad = cheerful(
        [""] * 4,
        [
            "anna laughed and danced with joy . the sun was warm and anna felt happy .",
            "anna cried and felt very sad . it was a lonely and gloomy day .",
            "anna put the ball on the table .",
            "laughed and danced laughed and danced laughed and danced laughed and danced",
        ],
    )
    assert good > plain > bad
    assert good > mad
    happy, gloomy = joyful_story([""] * 2, ["They smiled. Tom was happy and had fun!", "Tom was sad. He cried."])
    assert happy == 3.0 and gloomy == -2.0
    assert joyful_story([""], [""]) == [0.0]


def test_exact_match():
    completions, answer = ["7", " 7 ", "17", "7 7", ""], ["7"] * 5
    assert exact_match([""] * 5, completions, answer=answer, source=["a"] * 5) == [1, 1, 0, 0, 0]
    assert exact_match([""], ["7"], answer=[7]) == [1], "a number in JSON"


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("It is 72.", "3 * 24 = 72\n#### 72", 1),
        ("#### 72", "#### 72.0", 1),
        ("#### 72 apples, not 73", "#### 73", 1),
        ("73, no: #### 72", "#### 73", 0),
        ("that makes $1,234,567.", "#### 1234567", 1),
        ("1,2", "2", 1),
        ("-5", "5", 0),
        ("10-5", "5", 1),
        ("0.10", "0.1", 1),
        ("9" * 400, "8" * 400, 0),
        ("none", "#### 1", 0),
        ("", "no number", 0),
    ],
)
def test_number_match_compares_the_last_number(completion, answer, expected):
    assert number_match([""], [completion], answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>", 1),
        (" <think></think><answer></answer> ", 1),
        ("<think>a</think>", 0),
        ("<answer>7</answer><think>a</think>", 0),
        ("<think>a</think><answer>7</answer> and more", 0),
        ("<think>a<think>b</think><answer>7</answer>", 0),
        ("<think>a</think>b</think><answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
    ],
)
def test_the_format_reward_is_0_or_1(completion, expected):
    assert format_reward([""], [completion]) == [expected]


@pytest.mark.parametrize("reward", [exact_match, number_match])
def test_a_missing_answer_column_raises(reward):
    for columns in ({}, {"answer": ["7", None]}, {"solution": ["7", "8"]}):
        with pytest.raises(ValueError, match="needs the column 'answer', which some records lack"):
            reward(["", ""], ["7", "8"], **columns)


def test_an_unknown_reward_raises():
    for name in ("rlhf_examples.rewards:nothing", "rlhf_examples.rewards:HAPPY", "no.such.module:f", "nothing", ""):
        with pytest.raises(
            ValueError, match="it must be module:function, the address of a reward server, or the directory or hub"
        ):
            load_reward(name)
    assert load_reward("rlhf_examples.rewards:cheerful") is cheerful


@pytest.mark.parametrize(
    "values",
    [[1, None, True, math.inf], (1.0, math.nan, 1.0, -math.inf), torch.tensor([1.0, math.nan, 1.0, math.inf])],
)
def test_missing_scores_become_nan(values):
    scores = as_numbers(values, "f", 4)
    assert scores[0] == scores[2] == 1.0 and math.isnan(scores[1]) and math.isnan(scores[3])


def test_scores_of_numpy_and_torch_are_accepted():
    for values in (np.array([1, 2]), torch.tensor([1, 2]), [np.float32(1), torch.tensor(2.0)]):
        assert as_numbers(values, "f", 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "it returned a list of 1"),
        ([1.0, 2.0, 3.0], "it returned a list of 3"),
        (1.0, "it returned a float"),
        (None, "it returned a NoneType"),
        ({"a": 1, "b": 2}, "it returned a dict of 2"),
        ([1.0, "2"], "it contains '2', a str"),
        ([[1.0], [2.0]], r"it contains \[1.0\], a list"),
        (np.ones((2, 1)), r"it contains \[1.0\], a list"),
    ],
)
def test_results_that_are_no_list_of_scores_raise(values, message):
    with pytest.raises(ValueError, match=f"reward: mine must return a list of 2 numbers, .*; {message}"):
        as_numbers(values, "mine", 2)
