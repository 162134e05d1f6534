"""GRPO by partial rollouts: completions that were stopped go on under the next weights, and none is lost."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from rlhf_examples.common.actor import Actor, load_rewards
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.groups import rewards_differ
from rlhf_examples.common.models import load_tokenizer
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.partial_rollouts import Group, PartialRollouts, plain
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples
from rlhf_examples.grpo import EMBEDDED, grpo_iteration
from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import TINY, logged, models_of, run_in_this_rank

SOME_DIFFER = "tests.rlhf_examples.common.test_dynamic_sampling:some_differ"
PARTIAL = {
    "partial_rollout": True,
    "importance_sampling_correction": True,
    "per_device_generation_batch_size": 2,
    "over_sampling_batch_size": 4,
    "max_answer_seq_len": 40,
    "stop_token_ids": list(range(20, 26)),  # so that lengths differ
    "num_mini_batches": 1,
}


class Checked(PartialRollouts):
    """Partial rollouts that compare logprobs with `score` while the weights are those that sampled."""

    def next_groups(self, policy, *others):
        groups, metrics = super().next_groups(policy, *others)
        self.used.update(group_prompts := [row["prompt"] for row in groups.prompts[::4]])
        assert len(group_prompts) == 2 and len(groups.prompts) == 8
        batch = groups.batch
        own = batch.weight_versions == batch.weight_version
        self.compare(policy, batch.sequences, batch.attention_mask, batch.old_per_token_logps, own)
        stale = (batch.completion_mask.bool() & ~own).sum(dim=1).tolist()
        for row, count in enumerate(stale):
            self.check_begun(batch, row, count)
        self.mixed += sum(0 < count < int(mask.sum()) for count, mask in zip(stale, batch.completion_mask, strict=True))
        if (left := self.unfinished) is not None:
            mask = torch.cat([left.prompt_mask, left.completion_mask], dim=1)
            own = (left.weight_versions == batch.weight_version) & left.completion_mask.bool()
            sequences = torch.cat([left.prompt_ids, left.completion_ids], dim=1)
            self.compare(policy, sequences, mask, left.logps[1], own)
            for row, length in enumerate(left.completion_mask.sum(dim=1).tolist()):
                key = self.key(left, row, length)
                self.stopped[key] = left.logps[:, row, :length].clone()
        return groups, metrics

    @staticmethod
    def key(rows, row: int, length: int) -> tuple:
        """A row's prompt and the first tokens of its completion."""
        prompt = rows.prompt_ids[row][rows.prompt_mask[row].bool()].tolist()
        return (tuple(prompt), tuple(rows.completion_ids[row, :length].tolist()))

    @staticmethod
    def compare(policy, sequences, mask, logps, own) -> None:
        """Tokens of the present weights have their logprobs: 1e-4, as cached and whole forwards round differently."""
        if not len(sequences):
            return
        scored = policy.score(sequences, mask).per_token_logps[:, -logps.shape[1] :]
        torch.testing.assert_close(logps[own], scored[own], atol=1e-4, rtol=1e-4)

    def check_begun(self, batch, row: int, count: int) -> None:
        """The first `count` tokens, of older weights, still have the logprobs that they were stopped with."""
        if not count:
            return
        done = [batch.sampling_per_token_logps, batch.old_per_token_logps, batch.raw_per_token_logps]
        length = int(batch.completion_mask[row].sum())
        if count == length and self.key(batch, row, count) not in self.stopped:
            return  # done, in a group that was not
        torch.testing.assert_close(
            torch.stack(done)[:, row, :count], self.stopped[self.key(batch, row, count)], rtol=0, atol=0
        )


def check_iterations(directory, changes: dict) -> None:
    settings = {**TINY["grpo"], **models_of("grpo", directory), **PARTIAL, "num_iterations": 8, **changes}
    args = arguments_of(GRPOArguments, settings)
    tokenizer = load_tokenizer(args.actor_model_name_or_path)
    examples, _ = load_examples("grpo", EMBEDDED, "prompt", args.max_prompt_seq_len, tokenizer, args)
    actor, prompts = Actor.load(args, 8, needs_reference=False), RowStream(examples, args.seed)
    rewards, partial = load_rewards(args.reward, [], args), Checked()
    partial.used, partial.stopped, partial.mixed = Counter(), {}, 0
    dropped, stale_tokens, rollouts = 0, [], []
    rollout = actor.policy.rollout

    def counted(*args, **kwargs):
        rollouts.append(kwargs["stop_after"])
        return rollout(*args, **kwargs)

    actor.policy.rollout = counted
    for iteration in range(1, 9):
        actor.policy.eval()
        metrics = grpo_iteration(actor, rewards, tokenizer, prompts, iteration, args, partial)
        dropped += metrics.get("dynamic_sampling/groups_dropped", 0)
        stale_tokens.append(metrics["partial_rollout/stale_tokens"])
        if args.dynamic_sampling and not metrics["dynamic_sampling/groups_without_spread"]:
            assert rewards_differ(rewards.last_scores[rewards.name], 4).all()
        assert metrics["loss"] == metrics["loss"], "not finite"
    if args.dynamic_sampling:
        assert any(stop.accept_group for stop in rollouts), "no call replaced groups while others decoded"
        assert dropped > len(rollouts) - 8, "a dropped group cost a call each time"
    assert stale_tokens[0] == 0 and max(stale_tokens) > 0, "no completion went on under other weights"
    assert partial.mixed and partial.stopped, "no completion has tokens of two weights"
    left = [group.prompt["prompt"] for group in [*partial.open.values(), *partial.ready]]
    assert len(partial.numbers) == sum(4 - len(group) for group in partial.open.values())
    every_rank = gather_objects((partial.used, Counter(left)))
    begun = Counter(row["prompt"] for row in RowStream(examples, args.seed).next(prompts.taken))
    seen = sum((used + rest for used, rest in every_rank), Counter())
    assert not seen - begun, "a prompt was used twice"
    assert sum((begun - seen).values()) == dropped, "a prompt was lost"
    actor.destroy()


@pytest.mark.parametrize("changes", [{}, {"dynamic_sampling": True, "reward": SOME_DIFFER}], ids=["all", "dynamic"])
def test_stopped_completions_go_on_and_nothing_is_lost(ranks, small, changes):
    ranks.run(check_iterations, small, changes)


def test_a_resumed_run_goes_on_with_unfinished_completions(ranks, small, tmp_path):
    settings = {**models_of("grpo", small), **PARTIAL, "num_iterations": 4, "save_every": 2, "eval_every": 2}
    expected_dir, resumed_dir = tmp_path / "whole", tmp_path / "resumed"
    ranks.run(run_in_this_rank, "grpo", {**settings, "output_dir": str(expected_dir)})
    ranks.run(run_in_this_rank, "grpo", {**settings, "num_iterations": 2, "output_dir": str(resumed_dir)})
    ranks.run(run_in_this_rank, "grpo", {**settings, "resume": True, "output_dir": str(resumed_dir)})
    whole = logged(expected_dir)
    assert any(row.get("partial_rollout/stale_tokens", 0) > 0 for row in whole[2:])
    assert logged(resumed_dir) == whole


@pytest.mark.slow
def test_another_number_of_ranks_begins_unfinished_prompts_again(ranks, small, tmp_path):
    settings = {**models_of("grpo", small), **PARTIAL, "save_every": 1, "output_dir": str(tmp_path / "run")}
    ranks.run(run_in_this_rank, "grpo", {**settings, "num_iterations": 2})
    single = RankPool(1)
    try:
        single.run(run_in_this_rank, "grpo", {**settings, "num_iterations": 3, "resume": True})
    finally:
        single.close()
    assert [row["iteration"] for row in logged(tmp_path / "run") if "loss" in row] == [1, 2, 3]


def test_prompts_of_other_ranks_are_dealt_out(alone):
    rows = [{"prompt": str(number)} for number in range(5)]
    states = [
        {"open": {3: plain(Group(rows[0])), 4: plain(Group(rows[1]))}, "ready": [plain(Group(rows[2]))], "restart": []},
        {"open": {}, "ready": [plain(Group(rows[3]))], "restart": [rows[4]]},
    ]
    partial = PartialRollouts(open={1: Group(rows[0])}, numbers=[1, 1])
    partial.load_state_dicts(states)
    assert Counter(row["prompt"] for row in partial.restart) == Counter("01234")
    assert not partial.open and not partial.numbers and dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"importance_sampling_correction": False}, "true given with importance_sampling_correction: false.*use true"),
        ({"enable_hybrid_engine": False}, "true given with enable_hybrid_engine: false; it needs the fused decoder"),
        ({"over_sampling_batch_size": 1}, "1 given; it must be at least per_device_generation_batch_size, 2"),
        ({"partial_rollout": False}, "over_sampling_batch_size: 4 given with partial_rollout: false"),
        ({"dynamic_sampling": True, "offload_reference_model": True}, "leave one of the three out"),
    ],
)
def test_settings_that_do_not_go_together_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        arguments_of(GRPOArguments, {**PARTIAL, **changes})


def test_half_as_many_prompts_again_are_in_flight_by_default():
    settings = {**PARTIAL, "per_device_generation_batch_size": 3, "over_sampling_batch_size": 0}
    assert arguments_of(GRPOArguments, settings).over_sampling_batch_size == 5
