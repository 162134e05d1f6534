"""The environments that ship: rewards of good and bad play, demonstrations as the template writes them."""

import pytest

from hybrid.environments.chat_template import encode_text
from rlhf_examples.environments import ENVIRONMENTS, GUESSES, SECRETS, environment_tokenizer, user
from tests.scripted_rollouts import roll_out

TOKENIZER = environment_tokenizer()


def play(name: str, records: list, turns: list[list[str]]):
    """The rows of played records, and their episodes."""
    episodes = ENVIRONMENTS[name].make(TOKENIZER).episodes(records)
    rows = roll_out(
        episodes, [[0]] * len(records), lambda row, turn: encode_text(TOKENIZER, turns[row][turn] + " </s>")
    )
    assert [row.finish_reason for row in rows] == ["done"] * len(records)
    return rows, episodes


def test_sums_with_a_calculator():
    records = ENVIRONMENTS["calculator"].records("test", size=20)
    turns = []
    for record in records:
        a, b, c = record["numbers"]
        turns.append([f"add {a} {b}", f"add {a + b} {c}", str(a + b + c)])
    rows, episodes = play("calculator", records, turns)
    assert episodes.rewards() == [1.0] * 20
    assert [row.rewards for row in rows] == [[None, None, 1.0]] * 20
    for completion, record in zip(episodes.completions, records, strict=True):
        assert [int(message["content"]) for message in completion[1::2]] == [
            sum(record["numbers"][:2]), record["answer"]
        ]  # fmt: skip
    _, episodes = play("calculator", records, [[str(record["answer"] + 1)] for record in records])
    assert episodes.rewards() == [0.0] * 20
    _, episodes = play("calculator", records, [["add 1"]] * 20)  # no call: an answer, and a wrong one
    assert episodes.rewards() == [0.0] * 20


def test_halving_wins_every_guessing_game():
    records = [{"prompt": user("guess"), "secret": secret} for secret in range(1, SECRETS + 1)]
    turns = {1: "4 2 1", 2: "4 2", 3: "4 2 3", 4: "4", 5: "4 6 5", 6: "4 6", 7: "4 6 7"}
    rows, episodes = play("guessing", records, [turns[record["secret"]].split() for record in records])
    assert episodes.rewards() == [1.0] * SECRETS and max(len(row.rewards) for row in rows) == GUESSES
    _, episodes = play("guessing", records, [["4", "higher", "add 1 2"] for _ in records])
    assert episodes.rewards() == [0.0] * 3 + [1.0] + [0.0] * 3
    assert [message["content"] for message in episodes.completions[0] if message["role"] == "user"] == [
        "lower", "no", "no"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_demonstrations_are_played_as_they_are_written(name):
    """The oracle is the template over the demonstrated conversation."""
    records = ENVIRONMENTS[name].records("train", seed=3, size=60)
    demonstrations = ENVIRONMENTS[name].demonstrations(seed=3, size=60)
    turns = [
        [
            TOKENIZER.apply_chat_template([message], tokenize=False).removeprefix("<assistant> ").removesuffix(" </s> ")
            for message in one["messages"]
            if message["role"] == "assistant"
        ]
        for one in demonstrations
    ]
    rows, episodes = play(name, records, turns)
    for row, one in zip(rows, demonstrations, strict=True):
        whole = encode_text(TOKENIZER, TOKENIZER.apply_chat_template(one["messages"], tokenize=False))
        assert row.training[0].ids == whole and TOKENIZER.unk_token_id not in whole and len(whole) < 30
    assert 0.05 < sum(episodes.rewards()) / 60 < 0.35  # what a supervised policy plays like


def test_no_sum_is_in_both_splits():
    train, test = (
        {tuple(record["numbers"]) for record in ENVIRONMENTS["calculator"].records(split)}
        for split in ("train", "test")
    )
    assert len(test) > 50 and not train & test
    assert ENVIRONMENTS["guessing"].records("test") == ENVIRONMENTS["guessing"].records("test")
