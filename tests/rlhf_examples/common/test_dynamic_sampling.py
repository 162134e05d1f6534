"""Dynamic sampling: groups of equal rewards are replaced by the next prompts, equally at any number of ranks and after
a resume."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hybrid
from rlhf_examples.common import groups as groups_of
from rlhf_examples.common import overlapped_rewards
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.groups import dynamic_sampling_groups, rewards_differ
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.scorers import Rewards, Scorer
from rlhf_examples.data.examples import Examples, RowStream, pad
from rlhf_examples.data.texts import SkippedRecords
from tests.rank_pool import RankPool, pool_of
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank
from tests.rlhf_examples.test_same_curves import ROUNDING, TOLERANCE

EACH, NAN = 2, math.nan
SOME_DIFFER = "tests.rlhf_examples.common.test_dynamic_sampling:some_differ"
DYNAMIC = {"dynamic_sampling": True, "max_num_gen_batches": 3, "reward": SOME_DIFFER}
SAMPLED, DROPPED, LEFT = (f"dynamic_sampling/groups_{name}" for name in ("sampled", "dropped", "without_spread"))


def some_differ(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The number of distinct words for some prompts, and 1 for every completion of the others."""
    return [
        len(set(completion.split())) / 4 if sum(map(ord, prompt)) % 3 == 0 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def equal_on_the_second_rank(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    return [float(number) * (dist.get_rank() == 0) for number in range(len(completions))]


def test_rewards_differ_by_group():
    rewards = torch.tensor([[1, 1, 1], [1, 2, 1], [NAN, 2, 2], [NAN, 2, 3], [NAN, NAN, 1], [NAN] * 3])
    assert rewards_differ(rewards.flatten(), 3).tolist() == [False, True, False, True, False, False]


def prompts_of(count: int) -> RowStream:
    return RowStream(
        Examples([{"prompt": str(number), "columns": "{}"} for number in range(count)], SkippedRecords()), seed=3
    )


def test_a_prompt_stream_resumes():
    stream, first = prompts_of(7), prompts_of(7)
    expected = stream.next(20)
    assert first.next(3) + first.next(0) + first.next(6) == expected[:9]
    resumed = prompts_of(7)
    resumed.load_state_dict(first.state_dict())
    assert resumed.next(11) == expected[9:]


def batch_of(rows: list[dict], width: int) -> hybrid.RolloutBatch:
    """Completions of `width` tokens; a prompt is its record's number n, repeated n times."""
    prompts = [[int(row["prompt"])] * (1 + int(row["prompt"])) for row in rows for _ in range(EACH)]
    ids, mask = pad(prompts, 0, left=True)
    ones, zeros = torch.ones(len(prompts), width), torch.zeros(len(prompts), width)
    logps = dict.fromkeys((f"{kind}_per_token_logps" for kind in ("sampling", "old", "raw")), zeros)
    completions = {"completion_ids": ones.long(), "completion_mask": ones.long()}
    timings, reasons = {"decode_s": 1.0}, ["stop"] * len(prompts)
    return hybrid.RolloutBatch(
        ids,
        mask,
        **completions,
        **logps,
        finish_reason=reasons,
        weight_version=0,
        timings=timings,
        row_index=torch.arange(len(prompts)),
    )


def sample(monkeypatch, hopeless: set[int], rounds: int):
    """Two groups of two on one rank; prompts in `hopeless` have equal rewards. Returns groups, metrics, rewards, and
    what was rolled out: (prompt, row id, seed)."""
    rolled_out = []

    def roll_out(policy, tokenizer, rows, numbers, params, each, on_rows):
        rolled_out.extend(
            zip([row["prompt"] for row in rows], numbers.tolist(), [params.seed] * len(rows), strict=True)
        )
        return batch_of(rows, width=1 + len(rolled_out) % 3)  # a different width each time

    def reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
        return [0.5 if int(prompt) in hopeless else float(i % EACH) for i, prompt in enumerate(prompts)]

    monkeypatch.setattr(groups_of, "roll_out", roll_out)
    monkeypatch.setattr(
        overlapped_rewards, "decode_completions", lambda tokenizer, batch: [""] * len(batch.completion_ids)
    )
    args = GRPOArguments(num_generations=EACH, per_device_generation_batch_size=2, max_num_gen_batches=rounds)
    rewards = Rewards([Scorer("reward", reward)], [1.0])
    tokenizer = SimpleNamespace(pad_token_id=0, chat_template=None)
    result = dynamic_sampling_groups(None, rewards, tokenizer, prompts_of(9), 5, Phases(), args)
    return *result, rolled_out, rewards


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts(alone, monkeypatch):
    order = [int(row["prompt"]) for row in prompts_of(9).next(5)]
    groups, metrics, drawn, rewards = sample(monkeypatch, {order[1], order[2]}, rounds=9)
    assert [row["prompt"] for row in groups.prompts] == [str(order[0])] * EACH + [str(order[3])] * EACH
    assert [int(prompt) for prompt, *_ in drawn] == order[:4], "more prompts were rolled out than groups were missing"
    assert [number for _, number, _ in drawn] == [0, 1, 2, 3], "row ids are reused"
    assert len({seed for *_, seed in drawn}) == 1
    assert metrics["dynamic_sampling/num_gen_batches"] == 3
    assert (metrics[SAMPLED], metrics[DROPPED], metrics[LEFT]) == (4, 2, 0)
    assert metrics["dynamic_sampling/reward"] == 0.5
    assert rewards.metrics()["rewards/reward/mean"] == 0.5 and rewards.metrics()["rewards/reward/max"] == 1
    for ids, mask, row in zip(groups.batch.prompt_ids, groups.batch.prompt_mask, groups.prompts, strict=True):
        assert ids[mask.bool()].tolist() == [int(row["prompt"])] * int(mask.sum()), "a row has another prompt"
    widths = {tensor.shape for tensor in (groups.batch.completion_ids, groups.batch.sampling_per_token_logps)}
    assert len(widths) == 1 and groups.batch.timings == {"decode_s": 3.0}


def test_after_the_last_round_equal_groups_fill_the_batch(alone, monkeypatch):
    order = [int(row["prompt"]) for row in prompts_of(9).next(4)]
    groups, metrics, *_ = sample(monkeypatch, set(order[1:]), rounds=2)
    assert [row["prompt"] for row in groups.prompts] == [str(order[0])] * EACH + [str(order[2])] * EACH
    assert (metrics[SAMPLED], metrics[DROPPED], metrics[LEFT]) == (3, 1, 1)
    groups, metrics, *_ = sample(monkeypatch, set(order), rounds=1)
    assert rewards_differ(groups.scores["reward"], EACH).tolist() == [False, False] and metrics[LEFT] == 2


one_rank = pool_of(1)


def run(pool: RankPool, small, directory, **changes) -> list[dict[str, float]]:
    each = 6 // pool.world_size
    settings = {**models_of("grpo", small), **DYNAMIC, "per_device_generation_batch_size": each, **changes}
    pool.run(run_in_this_rank, "grpo", {**settings, "output_dir": str(directory)})
    return logged(directory)


@pytest.mark.slow
def test_dynamic_sampling_is_equal_at_one_and_two_ranks_and_resumes(one_rank, ranks, small, tmp_path):
    two_ranks = run(ranks, small, tmp_path / "two")
    single_rank = run(one_rank, small, tmp_path / "one")
    assert len(two_ranks) == len(single_rank) == 4
    for row, expected in zip(two_ranks, single_rank, strict=True):
        for name, value in expected.items():
            if isinstance(value, float | int) and not name.startswith(ROUNDING):
                assert row[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
        assert row[SAMPLED] == 6 + row[DROPPED] and row["completions/learned"] == pytest.approx(1 - row[LEFT] / 6)
    assert sum(row[DROPPED] for row in two_ranks) > 4 and any(row[DROPPED] % 2 for row in two_ranks), (
        "no rank had to pad"
    )
    run(ranks, small, tmp_path / "again", num_iterations=2, save_every=1)
    resumed = run(ranks, small, tmp_path / "again", save_every=1, resume=True)
    for row in resumed[1:-1]:  # the first run evaluated after its last iteration
        for name in [name for name in row if name.startswith("eval_")]:
            del row[name]
    assert resumed == two_ranks


def test_ranks_agree_on_rounds_of_dynamic_sampling(ranks, small, tmp_path):
    reward = "tests.rlhf_examples.common.test_dynamic_sampling:equal_on_the_second_rank"
    (row, *_) = run(ranks, small, tmp_path, reward=reward, num_iterations=1, max_num_gen_batches=2)
    # Three of six groups differ, then two of three, all on the first rank.
    assert (row[SAMPLED], row[DROPPED], row[LEFT]) == (9, 3, 1)
    assert row["completions/learned"] == pytest.approx(5 / 6)


def test_an_iteration_of_equal_groups_changes_nothing(ranks, small, tmp_path):
    """All groups have equal rewards: no loss, no gradient, finite metrics."""
    reward = "rlhf_examples.rewards:exact_match"
    (row,) = run(ranks, small, tmp_path, reward=reward, num_iterations=1, max_num_gen_batches=1)
    assert row[LEFT] == 6 and row["completions/learned"] == 0 and row["grad_norm"] == 0 and row["loss"] == 0
