"""The reward `math_verify`: equal answers of different forms, and answers on which SymPy computes for ever."""

import pytest

from rlhf_examples import math_reward, rewards
from rlhf_examples.common.parsing import require_input
from rlhf_examples.math_reward import extracted


@pytest.fixture(scope="module")
def reward():
    """One process for the module: its imports take seconds."""
    return rewards.load_reward("math_verify")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{3}, no: \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}"),
        (r"\boxed {a}", r"\boxed{a}"),
        (r"\fboxed{7} #### 8", r"\boxed{7}"),
        (r"\boxed{\{1, 2\}}", r"\boxed{\{1, 2\}}"),
        (r"\boxed{3} and \boxed{4", r"\boxed{3}"),
        ("3 * 24 = 72\n#### 72\n\nDone.", "72"),
        ("#### 1 #### 2", "2"),
        ("####", ""),
        ("It is 72.", "It is 72."),
    ],
)
def test_the_answer_is_the_last_box_or_behind_the_last_marks(text, expected):
    assert extracted(text) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"It is \boxed{\frac{1}{2}}.", "0.5", 1),
        ("so\n#### 1,000", "2 * 500 = 1000\n#### 1000", 1),
        (r"\boxed{72}", "#### 72", 1),
        (r"The answer is $\frac12$.", r"\frac{1}{2}", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{(1, 2)}", "(2, 1)", 0),
        (r"\boxed{3}, no: \boxed{4}", "3", 0),
        (r"\boxed{7", "7", 0),
        ("seven", "7", 0),
        ("", "7", 0),
        (r"\boxed{7}", "", None),
    ],
)
def test_answers_are_compared_as_mathematics(reward, completion, answer, expected):
    assert reward([""], [completion], answer=[answer], source=["a"]) == [expected]


def test_an_answer_that_takes_too_long_is_0_and_the_next_one_is_compared():
    reward = math_reward.MathReward(cpu_s=0.5)
    completions = [r"\boxed{7}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7}"]
    assert reward([""] * 3, completions, answer=["7"] * 3) == [1, 0, 1]


def test_errors_name_the_package_and_the_column(reward, monkeypatch):
    with pytest.raises(ValueError, match="needs the column 'answer', which some records lack"):
        reward([""], ["7"])
    with pytest.raises(ValueError, match=r"'math_verify:a.yaml' given; math_verify has no settings"):
        rewards.load_reward("math_verify:a.yaml")
    monkeypatch.setattr(math_reward.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'math_verify' given, which is not installed; run: pip install math-verify"):
        rewards.load_reward("math_verify")
    assert rewards.reward_name("math_verify") == "math_verify" and rewards.reward_name("judge:a/b.yaml") == "judge"
    with pytest.raises(ValueError, match=r"reward: 'judge:none.yaml' given; there is no file 'none.yaml'"):
        require_input("reward", "reward", "judge:none.yaml")
