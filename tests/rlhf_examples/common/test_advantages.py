"""Advantages by name against loops in float64, values of verl, and TRL's formula; from flags to advantages."""

import math
import statistics

import pytest
import torch

from rlhf_examples.common.advantages import (
    gdpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    shaped_rewards,
)
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.choices import AdvantageName
from rlhf_examples.common.grpo_settings import advantages_of
from rlhf_examples.common.parsing import parse_arguments
from tests.rlhf_examples.common.test_policy_losses import wave

NUMBER = 4
REWARDS = [0.5, 2.0, 2.0, 3.5, 1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 4.0, 5.0]
LENGTHS = [3, 5, 2, 4, 1, 6, 6, 2, 4, 4, 3, 5]
BASELINES = torch.tensor([1.5, 0.5, 2.0], dtype=torch.float64)
MASK = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
# With groups of which one, three and no completion could be scored.
HOLES = [math.nan, 2.0, 2.5, 3.5, math.nan, 1.0, math.nan, math.nan, *[math.nan] * 4]


def rewards_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def token_rewards() -> torch.Tensor:
    """The rewards at the last tokens, minus a KL at every token.  float64 [12, 6]"""
    kl = 0.1 * wave(5, 12, 6)
    return shaped_rewards(rewards_of(REWARDS), kl, torch.zeros_like(kl), MASK, 1.0)


# verl's compute_…_outcome_advantage of these rewards and lengths (0.10.0.dev, commit
# 1dda039b9c6311889a9c9a26040677e1254814f9): one advantage a row, and for reinforce_plus_plus a row's first.
VERL = {
    "rloo": [-2, 0, 0, 2, 0, 0, 0, 0, -4, -2.66666667, 2.66666667, 4],
    "opo": [-1.60714286, -0.107142857, -0.107142857, 1.39285714, 0, 0, 0, 0, -3.0625, -2.0625, 1.9375, 2.9375],
    "grpo_passk/True": [0, 0, 0, 1.22474387, 0, 0, 0, 0, 0, 0, 0, 0.339682995],
    "grpo_passk/False": [0, 0, 0, 1.5, 0, 0, 0, 0, 0, 0, 0, 1],
    "reinforce_plus_plus_baseline": [
        -0.924343687,
        -0.0330122745,
        -0.0330122745,
        0.858319138,
        -0.0330122745,
        -0.0330122745,
        -0.0330122745,
        -0.0330122745,
        -1.8156751,
        -1.22145416,
        1.15542961,
        1.74965055,
    ],
    "reinforce_plus_plus/1.0": [
        -0.817085748,
        0.305793939,
        0.0331493696,
        1.12496944,
        -0.414285045,
        -0.413226364,
        -0.308424939,
        -0.536454372,
        -1.39179905,
        -1.07560022,
        1.1899697,
        1.94710182,
    ],
    "reinforce_plus_plus/0.9": [
        -0.828135452,
        0.0601906771,
        0.0924643108,
        0.834779111,
        -0.303915927,
        -0.610746931,
        -0.452259087,
        -0.505398023,
        -1.29917182,
        -1.05081362,
        1.06933415,
        1.30985539,
    ],
    "remax": [-1, 0.5, 0.5, 2, 0.5, 0.5, 0.5, 0.5, -3, -2, 2, 3],
}
COMPUTED = {
    "rloo": lambda: rloo_advantages(rewards_of(REWARDS), NUMBER),
    "opo": lambda: opo_advantages(rewards_of(REWARDS), torch.tensor(LENGTHS), NUMBER),
    "grpo_passk/True": lambda: grpo_passk_advantages(rewards_of(REWARDS), NUMBER),
    "grpo_passk/False": lambda: grpo_passk_advantages(rewards_of(REWARDS), NUMBER, "none"),
    "remax": lambda: remax_advantages(rewards_of(REWARDS), BASELINES, NUMBER),
    "reinforce_plus_plus_baseline": lambda: reinforce_plus_plus_baseline_advantages(rewards_of(REWARDS), MASK, NUMBER)[
        :, 0
    ],
    "reinforce_plus_plus/1.0": lambda: reinforce_plus_plus_advantages(token_rewards(), MASK, 1.0)[:, 0],
    "reinforce_plus_plus/0.9": lambda: reinforce_plus_plus_advantages(token_rewards(), MASK, 0.9)[:, 0],
}


@pytest.mark.parametrize("case", VERL)
def test_advantages_are_those_of_verl(case):
    assert COMPUTED[case]().tolist() == pytest.approx(VERL[case], abs=1e-6)


def scored(group: list[float]) -> list[float]:
    return [reward for reward in group if not math.isnan(reward)]


@pytest.mark.parametrize("values", [REWARDS, HOLES], ids=["scored", "holes"])
def test_opo_and_passk_and_remax_match_loops(values):
    opo = opo_advantages(rewards_of(values), torch.tensor(LENGTHS), NUMBER)
    passk = {scale: grpo_passk_advantages(rewards_of(values), NUMBER, scale) for scale in ("group", "none")}
    remax = remax_advantages(rewards_of(values), BASELINES, NUMBER)
    for start in range(0, len(values), NUMBER):
        group, rows = values[start : start + NUMBER], range(start, start + NUMBER)
        kept = scored(group)
        tokens = [length for length, reward in zip(LENGTHS[start:], group, strict=False) if not math.isnan(reward)]
        best = sorted(kept, reverse=True)
        for row, reward in zip(rows, group, strict=True):
            expected = {"opo": 0.0, "group": 0.0, "none": 0.0, "remax": 0.0}
            if not math.isnan(reward):
                expected["remax"] = reward - BASELINES[start // NUMBER].item()
            if not math.isnan(reward) and len(kept) > 1:
                weighted = sum(length * r for length, r in zip(tokens, kept, strict=True)) / sum(tokens)
                expected["opo"] = reward - weighted
                if reward == best[0] != best[1]:
                    expected["none"] = best[0] - best[1]
                    expected["group"] = expected["none"] / (statistics.stdev(kept) + 1e-6)
            found = {"opo": opo, **passk, "remax": remax}
            assert {name: found[name][row].item() for name in found} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_matches_a_loop(gamma):
    """Tokens of an environment, inside a row, are no steps."""
    mask = MASK.clone()
    mask[1, 2] = mask[6, 1] = 0
    rewards = token_rewards()
    actual = reinforce_plus_plus_advantages(rewards, mask, gamma)
    returns = {}
    for b in range(12):
        cells = [t for t in range(6) if mask[b, t]]
        for place, t in enumerate(cells):
            returns[b, t] = sum(gamma**k * rewards[b, later].item() for k, later in enumerate(cells[place:]))
    mean, variance = statistics.mean(returns.values()), statistics.variance(returns.values())
    for b in range(12):
        for t in range(6):
            expected = (returns[b, t] - mean) / math.sqrt(variance + 1e-8) if mask[b, t] else 0.0
            assert actual[b, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("values", [REWARDS, HOLES], ids=["scored", "holes"])
def test_the_baseline_of_reinforce_plus_plus_matches_a_loop(values):
    """Completions without a score count neither in the group's mean nor among the tokens."""
    actual = reinforce_plus_plus_baseline_advantages(rewards_of(values), MASK, NUMBER)
    centered = {}
    for row, reward in enumerate(values):
        kept = scored(values[row - row % NUMBER :][:NUMBER])
        if not math.isnan(reward):
            centered[row] = reward - sum(kept) / len(kept)
    tokens = [centered[row] for row in centered for _ in range(LENGTHS[row])]
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    for row in range(12):
        expected = (centered[row] - mean) / math.sqrt(variance + 1e-8) if row in centered else 0.0
        assert actual[row, : LENGTHS[row]].tolist() == pytest.approx([expected] * LENGTHS[row], abs=1e-12)
        assert (actual[row, LENGTHS[row] :] == 0).all()


def trl_gdpo(columns: list[list[float]], weights: list[float]) -> list[float]:
    """TRL 1.16's multi_objective_aggregation normalize_then_sum (GRPOTrainer._generate_and_score_completions)."""
    totals = []
    for row in range(len(columns[0])):
        start = row - row % NUMBER
        terms = []
        for weight, column in zip(weights, columns, strict=True):
            kept = scored(column[start : start + NUMBER])
            if math.isnan(column[row]):
                continue
            deviation = statistics.stdev(kept) if len(kept) > 1 else math.inf
            terms.append(weight * (column[row] - sum(kept) / len(kept)) / (deviation + 1e-4))
        totals.append(sum(terms) if terms else math.nan)
    kept = scored(totals)
    return [
        0.0 if math.isnan(total) else (total - statistics.mean(kept)) / (statistics.stdev(kept) + 1e-4)
        for total in totals
    ]


def test_gdpo_matches_trls_formula():
    """One reward dominates the sum, one has holes; a completion that none scored gets no advantage."""
    second = [10 * reward for reward in wave(8, 12).tolist()]
    third = HOLES
    second[4] = math.nan
    first = [*REWARDS[:4], math.nan, *REWARDS[5:]]
    columns, weights = [first, second, third], [1.0, 0.5, 2.0]
    actual = gdpo_advantages(torch.stack([rewards_of(column) for column in columns], dim=1), weights, NUMBER)
    expected = trl_gdpo(columns, weights)
    assert (
        actual.tolist() == pytest.approx(expected, abs=1e-12) and expected[4] == 0 and min(map(abs, expected[:4])) > 0
    )


@pytest.mark.parametrize("split", [4, 8])
def test_whitened_advantages_do_not_depend_on_ranks(split):
    """Two ranks whose sums are added give what one gives."""
    second = torch.stack([rewards_of(REWARDS), wave(8, 12)], dim=1)
    estimators = {
        "reinforce_plus_plus": lambda rows, of: reinforce_plus_plus_advantages(
            token_rewards()[rows], MASK[rows], 0.9, of
        ),
        "baseline": lambda rows, of: reinforce_plus_plus_baseline_advantages(
            rewards_of(REWARDS)[rows], MASK[rows], NUMBER, of
        ),
        "gdpo": lambda rows, of: gdpo_advantages(second[rows], [1.0, 2.0], NUMBER, of),
    }
    parts = [slice(0, split), slice(split, 12)]
    for estimator in estimators.values():
        answers: list = []
        for number in range(2):
            local = []
            for part in parts:
                calls = iter(answers)
                recorded: list = []
                estimator(part, lambda sums, calls=calls, recorded=recorded: recorded.append(sums) or next(calls, sums))
                local.append(recorded[number])
            answers.append(sum(local))
        found = []
        for part in parts:
            calls = iter(answers)
            found.append(estimator(part, lambda sums, calls=calls: next(calls)))
        whole = estimator(slice(None), lambda sums: sums)
        torch.testing.assert_close(torch.cat(found), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", AdvantageName.__args__)
def test_every_name_has_its_advantages(alone, name):
    """By flags; a completion without a score gets none, and with use_kl_in_reward the KL lowers the reward."""
    args = parse_arguments(GRPOArguments, ["--advantages", name, "--num_generations", "4"])
    rewards = rewards_of([math.nan, *REWARDS[1:]]).float()
    zeros = torch.zeros(MASK.shape)
    plain = shaped_rewards(rewards, zeros, zeros, MASK * ~rewards.isnan()[:, None], 0.0)
    advantages = advantages_of(rewards, plain, MASK, args, BASELINES.float())
    assert advantages.isfinite().all() and (advantages[0] == 0).all() and advantages.abs().max() > 0.5
    assert advantages.dim() == (2 if name.startswith("reinforce") else 1)
    flags = ["--advantages", name, "--num_generations", "4", "--use_kl_in_reward", "true", "--beta", "0.5"]
    args = parse_arguments(GRPOArguments, flags)
    kl = wave(9, *MASK.shape).float()
    shaped = shaped_rewards(rewards, kl, zeros, MASK * ~rewards.isnan()[:, None], args.beta)
    with_kl = advantages_of(rewards, shaped, MASK, args, BASELINES.float())
    assert not torch.allclose(with_kl, advantages, atol=1e-2)
    if name == "remax":
        difference = (kl * MASK).sum(dim=1)[1:] * -args.beta
        torch.testing.assert_close((with_kl - advantages)[1:], difference, atol=1e-5, rtol=1e-5)
