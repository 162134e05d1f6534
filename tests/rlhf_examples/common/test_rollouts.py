"""An iteration's experience: one gather of the policy per window, and each rank trains on its share of rows."""

from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlhf_examples import grpo
from rlhf_examples.common import rollouts
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import GRPOArguments, PPOArguments, RolloutArguments
from rlhf_examples.common.controllers import FixedKLController
from rlhf_examples.common.forwards import token_logps
from rlhf_examples.common.measures import Phases, TrainingFlops
from rlhf_examples.common.models import load_tokenizer
from rlhf_examples.common.overlapped_rewards import OverlappedRewards
from rlhf_examples.common.ranks import gather_objects, over_ranks
from rlhf_examples.common.rollouts import (
    Experience,
    decode_completions,
    gather_rows,
    loss_weights,
    optimizer_steps,
    rank_row_ids,
    roll_out,
    row_by_row_logps,
    sampling,
    sampling_seed,
    training_logps,
)
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.ppo import Models, make_experience, ppo_iteration
from tests.engines import CollectiveCount, engine_of, settings, storage_digest
from tests.marks import slow_but
from tests.rlhf_examples.scripts import number_of_words
from tests.tiny_models import prompts, tiny_model

REWARD = "tests.rlhf_examples.scripts:number_of_words"
TEXTS = ["anna found a red ball", "ben laughed", "the sun was warm and", "it was"]


def arguments(directory: Path, **changes) -> PPOArguments:
    """Arguments of a run with two optimizer steps per iteration."""
    few = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 2, "max_answer_seq_len": 6}
    few |= {"num_mini_batches": 2, "reward": [REWARD], "critic_model_name_or_path": str(directory / "reward_model")}
    return PPOArguments(actor_model_name_or_path=str(directory / "model"), **few, **changes)


def rows_of(tokenizer) -> list[dict]:
    return [{"prompt": text, "columns": "{}", "prompt_ids": tokenizer(text)["input_ids"]} for text in TEXTS]


def check_bytes(directory: Path, lora_dim: int, logprob_mode: str) -> None:
    """Bytes of the policy that a PPO iteration gathers outside training: each parameter once; with a LoRA the adapters
    for the rollout, and the base weights under them for the reference, which takes the merged weights' place."""
    args = arguments(directory, actor_lora_dim=lora_dim, logprob_mode=logprob_mode)
    models, tokenizer = Models.load(args), load_tokenizer(args.actor_model_name_or_path)
    policy = models.actor.policy
    sizes = {name: p.ds_numel * p.element_size() for name, p in policy.module.named_parameters()}
    adapters = sum(size for name, size in sizes.items() if "lora_" in name)
    under_adapters = sum(size for name, size in sizes.items() if "base_layer" in name)
    assert (adapters > 0) == (under_adapters > 0) == (lora_dim > 0)
    for iteration in (1, 2, 3):
        policy.eval()
        ppo_iteration(models, tokenizer, rows_of(tokenizer), None, FixedKLController(0.1), iteration, args)
        expected = under_adapters + (adapters if lora_dim and iteration > 1 else sum(sizes.values()))
        assert policy.stats()["gathered_bytes"] == expected


@pytest.mark.parametrize(
    ("lora_dim", "logprob_mode"),
    [
        pytest.param(0, "recompute", marks=pytest.mark.slow),
        pytest.param(4, "recompute", marks=pytest.mark.slow),
        (4, "sampling"),
    ],
)
def test_an_iteration_gathers_the_policy_once(ranks, small, lora_dim, logprob_mode):
    ranks.run(check_bytes, small, lora_dim, logprob_mode)


def check_unscored(directory: Path, zero_stage: int) -> None:
    """A completion without a score contributes nothing: the others train as without it."""
    reward = "tests.rlhf_examples.scripts:words_but_of_the_first"
    args = arguments(directory, actor_zero_stage=zero_stage, critic_zero_stage=zero_stage)
    models = Models.load(replace(args, reward=[reward], whiten_rewards=True))
    tokenizer, policy = load_tokenizer(args.actor_model_name_or_path), models.actor.policy
    rows, before = rows_of(tokenizer), storage_digest(policy)
    with policy.inference():
        batch = roll_out(policy, tokenizer, rows, rank_row_ids(4), sampling(args, 1))
        logps = models.actor.old_logps(batch), models.actor.reference_logps(batch)
    rewards = OverlappedRewards(models.rewards, tokenizer, rows)
    experience, metrics = make_experience(models, rewards, batch, *logps, 0.1, args, Phases())
    scores = number_of_words([""] * 4, decode_completions(tokenizer, batch))
    scored = sum(chain(*gather_objects(scores[1:]))) / (3 * dist.get_world_size())
    assert experience.mask[0].sum() == 0 and torch.equal(experience.mask[1:], batch.completion_mask[1:])
    learned = experience.mask.bool()
    assert experience.advantages.isfinite().all() and (experience.advantages[~learned] == 0).all()
    assert over_ranks(experience.advantages[learned].sum()) / over_ranks(learned.sum()) == pytest.approx(0, abs=1e-5)
    assert metrics["objective/scores"] == pytest.approx(scored) and metrics["completions/learned"] == 0.75
    policy.eval()
    metrics = ppo_iteration(models, tokenizer, rows, None, FixedKLController(0.1), 1, args)
    assert all(isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert storage_digest(policy) != before, "nothing was trained"
    for engine in (policy, models.critic):
        for parameter in engine.module.parameters():
            assert getattr(parameter, "ds_tensor", parameter).isfinite().all()


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_an_unscored_completion_is_dropped(ranks, small, zero_stage):
    ranks.run(check_unscored, small, zero_stage)


class DoublingKLController(FixedKLController):
    """A KL coefficient that every update doubles."""

    def update(self, current: float, n_steps: int) -> None:
        self.value *= 2


def check_kl_coef(directory: Path) -> None:
    args = arguments(directory, actor_lora_dim=2)
    models, tokenizer, controller = (
        Models.load(args),
        load_tokenizer(args.actor_model_name_or_path),
        DoublingKLController(0.1),
    )
    for iteration, used in ((1, 0.1), (2, 0.2)):
        models.actor.policy.eval()
        metrics = ppo_iteration(models, tokenizer, rows_of(tokenizer), None, controller, iteration, args)
        assert metrics["objective/kl_coef"] == used
        assert metrics["objective/non_score_reward"] == pytest.approx(-used * metrics["objective/kl"])


def test_the_logged_kl_coef_is_the_one_used(ranks, small):
    ranks.run(check_kl_coef, small)


def count_scores(directory: Path) -> None:
    """Old logprobs are computed once: by the trainer for importance sampling, else by the sampler; the reference's
    once."""
    for correction, lora_dim, expected in ((True, 0, 0), (False, 0, 1), (True, 4, 1), (False, 4, 2)):
        args = arguments(directory, actor_lora_dim=lora_dim, importance_sampling_correction=correction)
        args = replace(args, max_tokens_per_batch=40)
        models, tokenizer = Models.load(args), load_tokenizer(args.actor_model_name_or_path)
        policy, calls, widest = models.actor.policy, [], []
        score, critic_forward = policy.score, models.critic.module.forward

        def counting_score(*values, score=score, calls=calls, **settings):
            calls.append(settings)
            return score(*values, **settings)

        def measuring_forward(input_ids, critic_forward=critic_forward, widest=widest, **settings):
            widest.append(input_ids.numel())
            return critic_forward(input_ids=input_ids, **settings)

        policy.score, models.critic.module.forward = counting_score, measuring_forward
        ppo_iteration(models, tokenizer, rows_of(tokenizer), None, FixedKLController(0.1), 1, args)
        assert len(calls) == expected
        assert 0 < max(widest) <= 40, "the critic exceeds the token budget"


def test_logprobs_are_scored_once_and_the_critic_keeps_the_token_budget(ranks, small):
    ranks.run(count_scores, small)


def check_exact(directory: Path, correction: bool) -> None:
    """In the first step of every update the ratios are exactly 1: old logprobs are the rollout's, without a pass."""
    changes = {"importance_sampling_correction": correction, "training_forward": "exact"}
    args = arguments(directory, actor_lora_dim=4, actor_learning_rate=1e-2, **changes)
    models, tokenizer = Models.load(args), load_tokenizer(args.actor_model_name_or_path)
    policy, calls, kls = models.actor.policy, [], []
    score = policy.score
    policy.score = lambda *values, **settings: calls.append(settings["adapters"]) or score(*values, **settings)
    for iteration in (1, 2):
        policy.eval()
        metrics = ppo_iteration(models, tokenizer, rows_of(tokenizer), None, FixedKLController(0.1), iteration, args)
        assert calls == [False] * iteration, "only the reference is scored"
        assert metrics["sampling/gen_kl_error"] == metrics["val/first_ratio_error"] == 0.0
        assert metrics["sampling/sampling_logp_difference/max"] == metrics["control/gen_kl_error"] == 0.0
        if correction:
            assert metrics["sampling/importance_sampling_ratio/max"] == 1.0
        kls.append(metrics["objective/kl"])
    assert kls[0] == pytest.approx(0.0, abs=1e-4) and kls[1] != kls[0]  # of signed estimates, near 0 by chance
    learned = [p.ds_tensor for name, p in policy.module.named_parameters() if "lora_B" in name]
    assert learned and all(part.any() for part in learned), "nothing was learned"  # B starts at 0


@pytest.mark.parametrize("correction", slow_but([False], [False, True]))
def test_exact_updates_start_at_ratio_1_without_a_pass(ranks, small, correction):
    ranks.run(check_exact, small, correction)


def count_collectives(directory: Path, zero_stage: int, lora_dim: int) -> list[int]:
    """Collectives of rollout, old and reference logprobs and all scores, in two iterations with equal weights."""
    args = arguments(directory, actor_zero_stage=zero_stage, critic_zero_stage=zero_stage, actor_lora_dim=lora_dim)
    models, tokenizer = Models.load(args), load_tokenizer(args.actor_model_name_or_path)
    rows, policy, counts = rows_of(tokenizer), models.actor.policy, []
    for iteration in (1, 2):
        with CollectiveCount() as collecting:
            with policy.inference():
                batch = roll_out(policy, tokenizer, rows, rank_row_ids(4), sampling(args, iteration))
                logps = models.actor.old_logps(batch), models.actor.reference_logps(batch)
            rewards = OverlappedRewards(models.rewards, tokenizer, rows)
            experience, _ = make_experience(models, rewards, batch, *logps, 0.1, args, Phases())
            experience.all_gather()
        counts.append(collecting.count)
    return counts


@pytest.mark.parametrize("lora_dim", slow_but([4], [0, 4]))
def test_a_second_window_gathers_nothing(ranks, small, lora_dim):
    """Counted in torch.distributed: with gathered weights ZeRO-3 runs the collectives of ZeRO-0, which are
    reductions, and with a LoRA gathers the base weights for the reference."""
    first, second = ranks.run(count_collectives, small, 3, lora_dim)[0]
    reductions, again = ranks.run(count_collectives, small, 0, lora_dim)[0]
    assert reductions == again and first > second
    assert (second > reductions) == (lora_dim > 0), "a LoRA's base and merged weights take turns in one copy"


def check_rows_alone() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 9, padded=True, seed=dist.get_rank())
    lengths = torch.tensor([5, 1, 3, 4])
    mask[:, 4:] = (torch.arange(5) < lengths[:, None]).long()  # completions, right padded
    batch = token_logps(engine, ids, mask, 5, 0.7, "model")[0].detach()
    zeros = torch.zeros(4, 5)
    experience = Experience(ids, mask, mask[:, 4:], zeros, zeros, zeros, zeros)
    for forward in ("model", "packed", "exact"):
        args = RolloutArguments(temperature=0.7, training_forward=forward)
        row_by_row = row_by_row_logps(engine, experience, args)
        torch.testing.assert_close(row_by_row, batch, atol=1e-5, rtol=1e-5)  # sums in another order
        assert (row_by_row[mask[:, 4:] == 0] == 0).all()
        logps, entropies = token_logps(engine, ids, mask, 5, 0.7, forward, entropy=True)
        torch.testing.assert_close(logps.detach(), batch, atol=1e-5, rtol=1e-5)
        assert ((entropies == 0) == (mask[:, 4:] == 0)).all()
        assert forward != "exact" or torch.equal(row_by_row, logps.detach())


def test_row_by_row_logprobs_match_the_batch(ranks):
    ranks.run(check_rows_alone)


def check_order() -> None:
    rank = dist.get_rank()
    rows = torch.tensor([[10 * number + sample] for number in rank_row_ids(3).tolist() for sample in range(2)])
    assert gather_rows(rows, 2)[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    engine = engine_of(tiny_model("llama"), settings(0))
    prompts = [{"prompt_ids": list(range(3, 5 + rank))}, {"prompt_ids": [3]}]
    params = rollouts.hybrid.SamplingParams(max_new_tokens=3 + 2 * rank, seed=1)
    batch = roll_out(engine, synthetic_tokenizer(), prompts, rank_row_ids(2), params)
    assert batch.prompt_ids.shape == (2, 3) and batch.completion_ids.shape[1] == batch.completion_mask.shape[1] <= 5
    assert batch.prompt_mask.sum(dim=1).tolist() == [2 + rank, 1]
    widths = rollouts.over_ranks(torch.tensor([batch.completion_ids.shape[1]]))
    assert int(widths) == 2 * batch.completion_ids.shape[1], "ranks differ in width"


def test_all_gathered_rows_are_in_order_and_of_one_width(ranks):
    ranks.run(check_order)


def experience_of(lengths: list[int]) -> Experience:
    """Rows whose values are their row numbers; prompts of 3 tokens, the first of them padding in odd rows."""
    rows, width = len(lengths), max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    prompt = torch.ones(rows, 3, dtype=torch.int64)
    prompt[1::2, 0] = 0
    values = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    ids = torch.arange(rows * (3 + width)).view(rows, 3 + width)
    return Experience(ids, torch.cat([prompt, mask], dim=1), mask, values, values, values, torch.arange(rows))


def test_take_drops_common_padding():
    experience = experience_of([2, 5, 1, 3])
    part = experience.take(torch.tensor([1, 3]))
    assert part.sequences.tolist() == experience.sequences[[1, 3], 1:].tolist()
    assert part.mask.tolist() == experience.mask[[1, 3]].tolist() and part.advantages.tolist() == [1, 3]
    part = experience.take(torch.tensor([2, 0]))
    assert part.sequences.tolist() == experience.sequences[[2, 0], :5].tolist()
    assert part.old_logps.tolist() == experience.old_logps[[2, 0], :2].tolist() and part.returns is None


@pytest.mark.parametrize(
    ("rows", "size", "budget"), [(8, 2, 0), (8, 2, 20), (7, 1, 0), (7, 2, 0), (7, 2, 8), (2, 1, 0)]
)
def test_optimizer_steps_cover_all_rows_at_any_world_size(monkeypatch, rows, size, budget):
    """Also if rows do not divide evenly: some rank's last micro batch is then empty."""
    experience = experience_of([2, 5, 1, 3, 4, 4, 1, 2][:rows])
    args = RolloutArguments(per_device_training_batch_size=size, num_mini_batches=2, max_tokens_per_batch=budget)
    lengths, of_all = experience.attention_mask.sum(dim=1), []
    for world_size in (1, 2, 4):
        by_rank = []
        for rank in range(world_size):
            pretended = SimpleNamespace(get_rank=lambda r=rank: r, get_world_size=lambda w=world_size: w)
            monkeypatch.setattr(rollouts, "dist", pretended)
            by_rank.append(optimizer_steps(experience, 3, 7, args))
        of_all.append([step.rows.tolist() for step in by_rank[0]])
        for steps in zip(*by_rank, strict=True):
            batches = [list(step.micro_batches(experience)) for step in steps]
            learned = [e.advantages[e.mask.any(dim=1)] for e in chain(*batches)]  # advantages are row numbers
            assert sorted(chain(*(e.tolist() for e in learned))) == sorted(steps[0].rows.tolist()), (
                "a row is trained on twice, or never"
            )
            assert len({len(of_rank) for of_rank in batches}) == 1
            assert steps[0].min_rows == min(len(step.micro_batch_rows[0]) for step in steps)
            if budget:
                assert max(int(lengths[e.advantages].sum()) for e in chain(*batches)) <= budget
            else:
                assert max(len(e.mask) for e in chain(*batches)) <= size
    assert of_all[0] == of_all[1] == of_all[2]
    assert [len(step) for step in of_all[0]] == [-(-rows // 2), rows // 2] * 3
    assert rows == 2 or of_all[0][:2] != of_all[0][2:4]
    assert of_all[0] != [step.rows.tolist() for step in optimizer_steps(experience, 3, 8, args)]


def experience_of_groups(groups: torch.Tensor) -> Experience:
    """Rows with a prompt of 20 tokens for each group and 5 completion tokens; the advantages are `groups`."""
    rows, width = len(groups), 5
    ids = torch.cat([groups[:, None] + torch.arange(20), torch.randint(90, (rows, width))], dim=1)
    mask, zeros = torch.ones(rows, width, dtype=torch.int64), torch.zeros(rows, width)
    return Experience(ids, torch.ones_like(ids), mask, zeros, zeros, zeros, groups)


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_batch": 60}])
def test_groups_come_in_one_micro_batch(monkeypatch, settings):
    """Four groups of 4 with prompts of 20 tokens: each in one micro batch; a token budget counts its prompt once."""
    groups = torch.arange(4).repeat_interleave(4)
    experience = experience_of_groups(groups)
    args = RolloutArguments(per_device_training_batch_size=4, **settings)
    monkeypatch.setattr(rollouts, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    (step,) = optimizer_steps(experience, 1, 1, args)
    batches = [experience.take(step.rows[rows]).advantages.tolist() for rows in step.micro_batch_rows]
    assert sorted(chain(*batches)) == groups.tolist() and len(batches) == 4
    assert all(len(set(batch)) == 1 for batch in batches)
    (padded,) = optimizer_steps(experience, 1, 1, replace(args, training_forward="model"))
    assert len(padded.micro_batch_rows) == (4 if not settings else 8)


def test_groups_come_in_one_optimizer_step(monkeypatch):
    """Of 12 groups of 4 in 3 steps each; in 5 steps of 9 or 10 rows a group is cut by a border between two steps at
    most. Their order is of the seed."""
    monkeypatch.setattr(rollouts, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    groups = torch.arange(12).repeat_interleave(4)
    experience, orders = experience_of_groups(groups), set()
    for count, cut in ((3, 0), (5, 4)):
        args = RolloutArguments(per_device_training_batch_size=4, num_mini_batches=count)
        steps = [step.rows for step in optimizer_steps(experience, 1, 1, args)]
        assert sorted(torch.cat(steps).tolist()) == list(range(48))
        assert sum(len(groups[rows].unique()) for rows in steps) <= 12 + cut
        orders.add(tuple(groups[torch.cat(steps)].unique_consecutive().tolist()))
    assert len(orders) == 1 and orders != {tuple(range(12))}


def test_a_sequence_over_max_tokens_per_batch_raises(monkeypatch):
    monkeypatch.setattr(rollouts, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2))
    cases = {
        "max_tokens_per_batch: 6 given; a sequence has 7 tokens": {"max_tokens_per_batch": 6},
        "num_mini_batches: 5 given; an iteration has 4 completions": {"num_mini_batches": 5},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            optimizer_steps(experience_of([2, 5, 1, 3]), 1, 1, RolloutArguments(**changes))
    (step,) = optimizer_steps(experience_of([5, 5, 5]), 1, 1, RolloutArguments(max_tokens_per_batch=9))
    assert [len(places) for places in step.micro_batch_rows] == [1, 1]


def test_group_statistics_use_scored_completions_only():
    """A NaN excludes only its completion, not its group, from the sum and the number of groups."""
    nan = float("nan")
    rewards = torch.tensor([1.0, 3.0, nan, 0.1, 0.1, 0.1, 0.2, nan, nan, nan, 0.7, 0.7])
    statistics = {name: value.item() for name, value in grpo.group_statistics(rewards, 3).items()}
    assert statistics == {"groups": 3, "reward_std": pytest.approx(2**0.5), "zero_std": 2}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_loss_denominator_matches_trl(monkeypatch, loss_type):
    """Dropped rows count as sequences, but not their tokens (GRPOTrainer 1.16, `_compute_loss`)."""
    losses = []

    def zeros(policy, ids, mask, width, *_, **__):
        return [torch.zeros(len(ids), width)] * 2

    monkeypatch.setattr(grpo, "token_logps", zeros)
    monkeypatch.setattr(grpo, "Numerics", lambda *_: SimpleNamespace(add=lambda logps: None, metrics=dict))
    monkeypatch.setattr(
        grpo, "backward_and_step", lambda engine, loss, number, count: [losses.append(loss.item() / count) or 0.0]
    )
    e = experience_of([2, 3, 4])
    kept = torch.tensor([1, 1, 0])
    advantages = torch.tensor([1.0, 2.0, 5.0])
    zeros = torch.zeros(e.mask.shape)
    e = replace(e, mask=e.mask * kept[:, None], old_logps=zeros, weights=zeros + 1, advantages=advantages)
    args = GRPOArguments(loss_type=loss_type, per_device_training_batch_size=1, max_answer_seq_len=7)
    grpo.update(SimpleNamespace(policy=None, update_average=lambda: None, entropy_controller=None), e, 1, args)
    of_rows = {
        "grpo": -(1.0 + 2.0) / 3,  # each sequence's mean over its tokens, over all three
        "dr_grpo": -(2 * 1.0 + 3 * 2.0) / (3 * 7),
        "dapo": -(2 * 1.0 + 3 * 2.0) / 5,
    }
    assert sum(losses) == pytest.approx(of_rows[loss_type])


@pytest.mark.usefixtures("alone")
def test_runs_with_different_seeds_share_no_sampling_seed_or_order():
    draws = [sampling_seed(seed, draw) for seed in range(3) for draw in range(5000)]
    assert len(set(draws)) == len(draws)
    assert sampling_seed(0, 7) == 7
    experience, steps = experience_of([1] * 40), []
    for seed in range(3):
        steps += [optimizer_steps(experience, 1, n, RolloutArguments(seed=seed))[0] for n in (1, 1009, 1010, 2018)]
    orders = [tuple(step.rows.tolist()) for step in steps]
    assert len(set(orders)) == len(orders)


def check_truncated(directory: Path) -> None:
    """Old logprobs are the policy's in both modes; importance sampling divides by the sampling distribution's
    probability."""
    engine, tokenizer = engine_of(tiny_model("llama"), settings(3)), synthetic_tokenizer()
    args = RolloutArguments(
        actor_model_name_or_path=str(directory / "model"),
        reward=[REWARD],
        temperature=0.7,
        top_k=5,
        max_answer_seq_len=6,
        importance_sampling_correction=True,
        importance_sampling_clip_max=10.0,
    )
    batch = roll_out(engine, tokenizer, rows_of(tokenizer), rank_row_ids(4), sampling(args, seed=1))
    mask = batch.completion_mask
    flops = TrainingFlops.of(engine.module)
    recomputed, sampled = (
        Actor(engine, None, replace(args, importance_sampling_correction=False, logprob_mode=mode), flops).old_logps(
            batch
        )
        for mode in ("recompute", "sampling")
    )
    torch.testing.assert_close(sampled * mask, recomputed * mask, atol=1e-5, rtol=1e-5)
    trained = training_logps(engine, batch, args)
    weights, metrics = loss_weights(trained, batch.sampling_per_token_logps, mask, args)
    # Top-5 sampling keeps a part of the policy's mass, which is each token's weight.
    expected = (trained - batch.sampling_per_token_logps).double().exp()
    torch.testing.assert_close(weights[mask.bool()].double(), expected[mask.bool()], atol=1e-5, rtol=1e-5)
    assert (weights <= 1 + 1e-4).all()
    assert metrics["sampling/importance_sampling_ratio/mean"] < 0.99


def test_importance_sampling_accounts_for_truncated_sampling(ranks, small):
    ranks.run(check_truncated, small)
