"""Training and held-out records of a script are disjoint and not empty."""

import json

import pytest

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.training import evaluate
from rlhf_examples.data.held_out import SHARE_OF_STEP, load_examples
from rlhf_examples.data.synthetic import synthetic_tokenizer

pytestmark = pytest.mark.usefixtures("alone")
FORMS = {"sft": "supervised", "reward_model": "preference", "dpo": "preference", "ppo": "prompt", "grpo": "prompt"}


@pytest.fixture
def records(tmp_path):
    """A file of 1200 records, which fit every step."""
    path = tmp_path / "records.jsonl"
    rows = ({"prompt": f"anna {i}", "chosen": "ben was happy .", "rejected": "the sun was warm ."} for i in range(1200))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def split_numbers(step: str, records, **settings) -> tuple[set[int], set[int], list]:
    """The numbers of a step's training records and of its held-out ones, and the held-out records."""
    cache = str(records.parent / "cache")
    args = SFTArguments(data_path=[str(records)], data_output_path=cache, eval_rows=10**6, **settings)
    examples, held_out = load_examples(step, "", FORMS[step], 0, synthetic_tokenizer(), args)
    return set(examples.rows["number"]), {row["number"] for row in held_out}, held_out


@pytest.mark.parametrize("step", ["reward_model", "ppo"])
@pytest.mark.parametrize("data_split", ["2,4,4", ""])
def test_a_fraction_of_every_share_is_held_out(step, data_split, records):
    """Shares and held-out records are drawn by independent hashes."""
    learned, evaluated, _ = split_numbers(step, records, data_split=data_split)
    of_step = 1200 * (0.4 if data_split else 1)
    assert not learned & evaluated
    # The count is binomial; 5 sigma.
    assert len(evaluated) == pytest.approx(0.05 * of_step, abs=5 * (0.05 * 0.95 * of_step) ** 0.5)
    assert len(learned | evaluated) == pytest.approx(of_step, abs=5 * (0.24 * 1200) ** 0.5)


def test_steps_have_disjoint_training_and_held_out_records(records):
    by_share = {}
    for step in ("reward_model", "dpo", "ppo", "grpo"):
        learned, evaluated, _ = split_numbers(step, records, data_split="2,4,4")
        by_share.setdefault(SHARE_OF_STEP[step], set()).update((frozenset(learned), frozenset(evaluated)))
    first, second = by_share[1], by_share[2]
    assert len(first) == len(second) == 2, "two steps with the same share differ"
    assert not frozenset.union(*first) & frozenset.union(*second)


def test_an_eval_fraction_of_0_holds_out_nothing(records):
    learned, evaluated, held_out = split_numbers("ppo", records, eval_fraction=0.0)
    assert len(learned) == 1200 and not evaluated
    assert evaluate(None, held_out, None, SFTArguments()) == {}


def test_an_eval_fraction_that_leaves_no_records_raises(records):
    with pytest.raises(ValueError, match="eval_fraction: 1 given, which leaves no records to train on"):
        SFTArguments(eval_fraction=1)
    with pytest.raises(ValueError, match="eval_fraction: 1e-09 of 1200 records leaves none for training or none"):
        split_numbers("ppo", records, eval_fraction=1e-9)
