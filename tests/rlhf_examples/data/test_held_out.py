"""What a script learns from, and what it is evaluated on: neither is empty, and they are apart."""

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


def found(step: str, records, **settings) -> tuple[set[int], set[int], list]:
    """The numbers of the records that a step learns from, and of those held out; and these."""
    cache = str(records.parent / "cache")
    args = SFTArguments(data_path=[str(records)], data_output_path=cache, eval_rows=10**6, **settings)
    examples, held_out = load_examples(step, "", FORMS[step], 0, synthetic_tokenizer(), args)
    return set(examples.rows["number"]), {row["number"] for row in held_out}, held_out


@pytest.mark.parametrize("step", ["reward_model", "ppo"])
@pytest.mark.parametrize("data_split", ["2,4,4", ""])
def test_a_share_of_every_share_is_held_out(step, data_split, records):
    """One hash drew both, so that what a step held out was where the last step's share lies."""
    learned, evaluated, _ = found(step, records, data_split=data_split)
    of_step = 1200 * (0.4 if data_split else 1)
    assert not learned & evaluated
    # The count is binomial; 5 sigma.
    assert len(evaluated) == pytest.approx(0.05 * of_step, abs=5 * (0.05 * 0.95 * of_step) ** 0.5)
    assert len(learned | evaluated) == pytest.approx(of_step, abs=5 * (0.24 * 1200) ** 0.5)


def test_the_steps_learn_from_and_are_evaluated_on_records_of_their_own(records):
    by_share = {}
    for step in ("reward_model", "dpo", "ppo", "grpo"):
        learned, evaluated, _ = found(step, records, data_split="2,4,4")
        by_share.setdefault(SHARE_OF_STEP[step], set()).update((frozenset(learned), frozenset(evaluated)))
    first, second = by_share[1], by_share[2]
    assert len(first) == len(second) == 2, "two steps of one share differ"
    assert not frozenset.union(*first) & frozenset.union(*second)


def test_nothing_need_be_held_out(records):
    learned, evaluated, held_out = found("ppo", records, eval_fraction=0.0)
    assert len(learned) == 1200 and not evaluated
    assert evaluate(None, held_out, None, SFTArguments()) == {}


def test_a_fraction_that_leaves_nothing_is_refused(records):
    with pytest.raises(ValueError, match="eval_fraction: 1 given, which leaves no records to train on"):
        SFTArguments(eval_fraction=1)
    with pytest.raises(ValueError, match="eval_fraction: 1e-09 of 1200 records leaves none for training or none"):
        found("ppo", records, eval_fraction=1e-9)
