"""The losses against plain Python loops in float64, for any padding and split over ranks."""

import json
import math
import re
import statistics

import pytest
import torch

from rlhf_examples.common.advantages import (
    advantages_and_returns,
    group_advantages,
    group_std,
    masked_whiten,
    rloo_advantages,
    shaped_rewards,
    soft_overlong_punishment,
)
from rlhf_examples.common.choices import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES
from rlhf_examples.common.controllers import AdaptiveKLController, FixedKLController
from rlhf_examples.common.losses import (
    Loss,
    entropy_bonus,
    language_model_loss,
    last_token_values,
    mean_metrics,
    mixed_loss,
    pairwise_reward_loss,
    tokenwise_pairwise_reward_loss,
    value_loss,
)
from rlhf_examples.common.policy_losses import (
    POLICY_LOSSES,
    clipped_surrogate,
    grpo_loss,
    importance_sampling_weights,
    kl_k3,
    loss_denominator,
    policy_loss,
)
from rlhf_examples.common.preference_losses import dpo_loss

ROWS, WIDTH = 5, 7
LENGTHS = [7, 1, 4, 3, 6]


def example(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    names = ("logps", "old_logps", "ref_logps", "values", "old_values", "returns", "advantages", "rewards")
    tensors = {name: torch.randn(ROWS, WIDTH, dtype=dtype) for name in names}
    tensors["old_logps"] = tensors["logps"] + 0.3 * torch.randn(ROWS, WIDTH, dtype=dtype)
    return {**tensors, "mask": mask, "scores": torch.randn(ROWS, dtype=dtype)}


def cells(x: dict) -> list[tuple[int, int]]:
    """(row, column) of unmasked tokens."""
    return [(b, t) for b in range(ROWS) for t in range(LENGTHS[b])]


def test_shaped_rewards_match_a_loop():
    x = example()
    actual = shaped_rewards(x["scores"], x["logps"], x["ref_logps"], x["mask"], 0.3)
    for b in range(ROWS):
        for t in range(WIDTH):
            expected = 0.0
            if t < LENGTHS[b]:
                expected = -0.3 * (x["logps"][b, t].item() - x["ref_logps"][b, t].item())
                expected += x["scores"][b].item() if t == LENGTHS[b] - 1 else 0.0
            assert actual[b, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_matches_the_papers_sum(gamma, lam):
    x = example()
    advantages, returns = advantages_and_returns(x["rewards"], x["values"], x["mask"], gamma, lam)
    for b in range(ROWS):
        n = LENGTHS[b]
        value = [x["values"][b, t].item() for t in range(n)] + [0.0]
        delta = [x["rewards"][b, t].item() + gamma * value[t + 1] - value[t] for t in range(n)]
        for t in range(WIDTH):
            # arXiv:1506.02438, eq. 16: the discounted sum of the later residuals, not a recursion.
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) if t < n else 0.0
            assert advantages[b, t].item() == pytest.approx(expected, abs=1e-12)
            assert returns[b, t].item() == pytest.approx(expected + value[t] if t < n else 0.0, abs=1e-12)


def test_policy_loss_and_gradient_match_a_loop():
    x = example()
    logps = x["logps"].requires_grad_()
    actual = policy_loss(logps, x["old_logps"], x["advantages"], x["mask"], 0.2, 11.0)
    actual.loss.backward()
    total, kl, clipped, ratios, squares = 0.0, 0.0, 0, 0.0, 0.0
    gradient = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for b, t in cells(x):
        log_ratio = logps[b, t].item() - x["old_logps"][b, t].item()
        ratio, advantage = math.exp(log_ratio), x["advantages"][b, t].item()
        plain, bounded = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
        total += max(plain, bounded)
        kl += 0.5 * log_ratio**2
        clipped += bounded > plain
        ratios += ratio
        squares += ratio**2
        gradient[b, t] = plain / 11.0 if plain >= bounded else 0.0
    assert clipped > 2, "the example clips nothing"
    assert actual.loss.item() == pytest.approx(total / 11.0, rel=1e-12)
    expected = {"loss": total, "approxkl": kl, "clipfrac": clipped, "ratio": ratios, "squared_ratio": squares}
    assert {name: value.item() for name, value in actual.sums.items()} == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(logps.grad, gradient, atol=1e-12, rtol=1e-12)


def test_importance_sampling_weights_match_a_loop():
    x = example()
    sampling = x["old_logps"] + 0.8 * torch.randn(ROWS, WIDTH, dtype=torch.float64)
    sampling[x["mask"] == 0] = math.nan
    weights = importance_sampling_weights(x["old_logps"], sampling, x["mask"], 2.0)
    capped = 0
    for b, t in cells(x):
        ratio = math.exp(x["old_logps"][b, t].item() - sampling[b, t].item())
        capped += ratio > 2.0
        assert weights[b, t].item() == pytest.approx(min(ratio, 2.0), rel=1e-12)
    assert 1 < capped < len(cells(x)) - 1, "the example is capped everywhere or nowhere"
    assert (weights[x["mask"] == 0] == 1).all()


def test_weights_multiply_each_tokens_clipped_loss_and_gradient():
    """Metrics of the ratio do not change; weights of 1 give the unweighted loss bit for bit."""
    x = example()
    weights = torch.rand(ROWS, WIDTH, dtype=torch.float64) * 2
    logps = x["logps"].requires_grad_()
    request = (logps, x["old_logps"], x["advantages"], x["mask"], 0.2, 11.0)
    weighted, plain = policy_loss(*request, weights), policy_loss(*request)
    (gradient,) = torch.autograd.grad(weighted.loss, logps)
    (plain_gradient,) = torch.autograd.grad(plain.loss, logps)
    total = 0.0
    for b, t in cells(x):
        ratio, advantage = math.exp(logps[b, t].item() - x["old_logps"][b, t].item()), x["advantages"][b, t].item()
        total += weights[b, t].item() * max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    assert weighted.loss.item() == pytest.approx(total / 11.0, rel=1e-12)
    torch.testing.assert_close(gradient, weights * plain_gradient, atol=1e-14, rtol=1e-12)
    assert {**weighted.sums, "loss": 0} == {**plain.sums, "loss": 0}
    assert torch.equal(policy_loss(*request, torch.ones_like(weights)).loss, plain.loss)


def test_value_loss_and_gradient_match_a_loop():
    x = example()
    values = x["values"].requires_grad_()
    actual = value_loss(values, x["old_values"], x["returns"], x["mask"], 0.4, 3.0)
    actual.loss.backward()
    total, clipped = 0.0, 0
    gradient = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for b, t in cells(x):
        value, old, target = (x[name][b, t].item() for name in ("values", "old_values", "returns"))
        bounded = old + min(max(value - old, -0.4), 0.4)
        plain_error, bounded_error = (value - target) ** 2, (bounded - target) ** 2
        total += 0.5 * max(plain_error, bounded_error)
        clipped += bounded_error > plain_error
        gradient[b, t] = (value - target) / 3.0 if plain_error >= bounded_error or abs(value - old) < 0.4 else 0.0
    assert clipped > 2
    assert actual.loss.item() == pytest.approx(total / 3.0, rel=1e-12)
    assert actual.sums["clipfrac"].item() == clipped
    torch.testing.assert_close(values.grad, gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_matches_the_formula(shift_mean):
    x = example()
    actual = masked_whiten(x["values"], x["mask"], shift_mean)
    kept = [x["values"][b, t].item() for b, t in cells(x)]
    mean = sum(kept) / len(kept)
    variance = sum((value - mean) ** 2 for value in kept) / len(kept)
    for b, t in cells(x):
        expected = (x["values"][b, t].item() - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
        assert actual[b, t].item() == pytest.approx(expected, abs=1e-12)
    assert (actual[x["mask"] == 0] == 0).all()


def test_whitening_does_not_depend_on_the_split_over_ranks():
    x = example()
    expected = masked_whiten(x["values"], x["mask"])
    parts = [slice(0, 2), slice(2, ROWS)]
    rounds = []  # each rank's inputs to all_reduce: first counts and sums, then squares

    def rank(part, answers):
        calls = iter(answers)

        def over_ranks(sums):
            rounds[-1].append(sums)
            return next(calls, sums)

        rounds.append([])
        return masked_whiten(x["values"][part], x["mask"][part], over_ranks=over_ranks)

    for part in parts:
        rank(part, [])
    first = rounds[0][0] + rounds[1][0]
    rounds.clear()
    for part in parts:
        rank(part, [first])
    second = rounds[0][1] + rounds[1][1]
    split = torch.cat([rank(part, [first, second]) for part in parts])
    torch.testing.assert_close(split, expected, atol=1e-12, rtol=1e-12)


def test_losses_do_not_depend_on_padding():
    x, wide = example(), example()
    for name, tensor in x.items():
        if tensor.dim() == 2:
            filler = torch.zeros if name == "mask" else lambda *size: torch.full(size, float("nan"))
            wide[name] = torch.cat([tensor, filler(ROWS, 3).to(tensor.dtype)], dim=1)
            if name != "mask":
                wide[name][:, :WIDTH][x["mask"] == 0] = float("nan")
    for inputs in (x, wide):
        advantages, returns = advantages_and_returns(inputs["rewards"], inputs["values"], inputs["mask"], 1.0, 0.95)
        inputs["results"] = [
            advantages[:, :WIDTH],
            returns[:, :WIDTH],
            masked_whiten(inputs["values"], inputs["mask"])[:, :WIDTH],
            shaped_rewards(inputs["scores"], inputs["logps"], inputs["ref_logps"], inputs["mask"], 0.1)[:, :WIDTH],
            policy_loss(inputs["logps"], inputs["old_logps"], inputs["advantages"], inputs["mask"], 0.2, 2.0).loss,
            value_loss(inputs["values"], inputs["old_values"], inputs["returns"], inputs["mask"], 0.2, 2.0).loss,
        ]
    for narrow, padded in zip(x["results"], wide["results"], strict=True):
        torch.testing.assert_close(padded, narrow, atol=1e-12, rtol=1e-12)


PAIRS = 6


def nll(difference: float) -> float:
    """-log σ(difference)."""
    return math.log1p(math.exp(-difference))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("with_margin", [False, True])
def test_pairwise_reward_loss_and_gradient_match_a_loop(with_margin):
    torch.manual_seed(1)
    chosen, rejected, margin = torch.randn(3, PAIRS, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    for filler in (chosen, rejected, margin):
        filler[2] = math.nan
    chosen.requires_grad_()
    actual = pairwise_reward_loss(chosen, rejected, denominator=2.5, margin=margin if with_margin else None, mask=mask)
    (gradient,) = torch.autograd.grad(actual.loss, chosen)
    kept = [pair for pair in range(PAIRS) if mask[pair]]
    difference = {pair: chosen[pair].item() - rejected[pair].item() for pair in kept}
    needed = {pair: difference[pair] - (margin[pair].item() if with_margin else 0.0) for pair in kept}
    total = sum(nll(needed[pair]) for pair in kept)
    assert actual.loss.item() == pytest.approx(total / 2.5, rel=1e-12)
    for pair in range(PAIRS):
        expected = -sigmoid(-needed[pair]) / 2.5 if pair in kept else 0.0
        assert gradient[pair].item() == pytest.approx(expected, abs=1e-14)
    accuracy = sum(difference[pair] > 0 for pair in kept)
    assert 0 < accuracy < len(kept)
    means = {"accuracy": accuracy / 5, "loss": total / 5, "margin": sum(difference.values()) / 5}
    assert mean_metrics([actual]) == pytest.approx(means, rel=1e-12)


def test_tokenwise_reward_loss_and_gradient_match_deepspeed_chats_loop():
    """DeepSpeed-Chat's loop over pairs, with ends at the sequences' ends; 0 is its padding id."""
    pairs = [
        ([5, 0, 7, 1, 2], [5, 0, 7, 3, 3, 2]),  # the padding id before the first difference
        ([5, 6, 7], [5, 6, 7, 0, 0]),  # one continues, with the padding id, after the other has ended
        ([4, 4, 8, 8, 8, 8, 8], [4, 4, 9]),
        ([3, 5, 6], [4, 5, 6]),  # different from the first token on
        ([5, 6, 7, 0], [5, 6, 7, 0]),  # no difference
    ]
    x, width = {}, 8
    torch.manual_seed(2)
    for number, kind in enumerate(("chosen", "rejected")):
        rows = [pair[number] for pair in pairs]
        x[f"{kind}_ids"] = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        x[f"{kind}_mask"] = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        x[f"{kind}_values"] = torch.randn(len(pairs), width, dtype=torch.float64)
    gradient = torch.zeros(len(pairs), width, dtype=torch.float64)
    total, correct, margins = 0.0, 0, 0.0
    for b, (chosen, rejected) in enumerate(pairs):
        end = max(len(chosen), len(rejected))
        first = next((t for t in range(end) if chosen[t : t + 1] != rejected[t : t + 1]), end)
        for t in range(first, end):
            difference = x["chosen_values"][b, t].item() - x["rejected_values"][b, t].item()
            total += nll(difference) / (end - first)
            gradient[b, t] = -sigmoid(-difference) / (end - first) / 3.0
        if first < end:
            scores = [x[f"{kind}_values"][b, x[f"{kind}_mask"][b].sum() - 1].item() for kind in ("chosen", "rejected")]
            correct, margins = correct + (scores[0] > scores[1]), margins + scores[0] - scores[1]
        x["chosen_values"][b, end:] = x["rejected_values"][b, end:] = math.nan
    x["chosen_values"].requires_grad_()
    actual = tokenwise_pairwise_reward_loss(**x, denominator=3.0)
    actual.loss.backward()
    assert actual.loss.item() == pytest.approx(total / 3.0, rel=1e-12)
    torch.testing.assert_close(x["chosen_values"].grad, gradient, atol=1e-14, rtol=1e-12)
    assert 0 < correct < 4
    means = {"loss": total / 4, "accuracy": correct / 4, "margin": margins / 4}
    assert mean_metrics([actual]) == pytest.approx(means, rel=1e-12)
    # Two different columns of left padding change nothing.
    wide = {name: torch.cat([torch.full((len(pairs), 2), number), x[name]], dim=1) for number, name in enumerate(x)}
    for kind in ("chosen", "rejected"):
        wide[f"{kind}_mask"][:, :2] = 0
    torch.testing.assert_close(tokenwise_pairwise_reward_loss(**wide, denominator=3.0).loss, actual.loss)


def test_last_token_values_are_at_the_last_unmasked_token():
    values = torch.arange(15.0, dtype=torch.float64).view(3, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
    last = last_token_values(values, mask)
    assert last.tolist() == [2.0, 0.0, 14.0]
    (last * torch.tensor([3.0, 5.0, 7.0])).sum().backward()
    expected = torch.zeros(3, 5, dtype=torch.float64)
    expected[0, 2], expected[2, 4] = 3.0, 7.0
    assert torch.equal(values.grad, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_loss_and_gradient_match_a_loop(smoothing):
    torch.manual_seed(3)
    logps = torch.randn(4, PAIRS, dtype=torch.float64) * 5
    mask = torch.tensor([1, 1, 1, 1, 0, 1])
    logps[:, 4] = math.nan
    chosen, rejected, ref_chosen, ref_rejected = logps
    chosen.requires_grad_(), rejected.requires_grad_()
    actual = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta=0.3, denominator=4.0, label_smoothing=smoothing, mask=mask
    )
    gradients = torch.autograd.grad(actual.loss, (chosen, rejected))
    total, rewards = 0.0, []
    for pair in range(PAIRS):
        slope = 0.0
        if mask[pair]:
            better = 0.3 * (chosen[pair].item() - ref_chosen[pair].item())
            worse = 0.3 * (rejected[pair].item() - ref_rejected[pair].item())
            total += (1 - smoothing) * nll(better - worse) + smoothing * nll(worse - better)
            slope = -(1 - smoothing) * sigmoid(worse - better) + smoothing * sigmoid(better - worse)
            rewards.append((better, worse))
        for gradient, sign in zip(gradients, (1, -1), strict=True):
            assert gradient[pair].item() == pytest.approx(sign * 0.3 * slope / 4.0, abs=1e-14)
    assert actual.loss.item() == pytest.approx(total / 4.0, rel=1e-12)
    accuracy = sum(better > worse for better, worse in rewards) / 5
    assert 0 < accuracy < 1
    means = {
        "loss": total / 5,
        "rewards/chosen": sum(better for better, _ in rewards) / 5,
        "rewards/rejected": sum(worse for _, worse in rewards) / 5,
        "rewards/accuracies": accuracy,
        "rewards/margins": sum(better - worse for better, worse in rewards) / 5,
    }
    assert mean_metrics([actual]) == pytest.approx(means, rel=1e-12)


def test_half_precision_is_summed_in_float32():
    """In bfloat16, differences of scores near 20 would be multiples of 1/8."""
    chosen, rejected = torch.tensor([20.125, 19.0]).bfloat16(), torch.tensor([20.0, 19.0625]).bfloat16()
    expected = sum(nll(c - r) for c, r in zip(chosen.double().tolist(), rejected.double().tolist(), strict=True))
    actual = pairwise_reward_loss(chosen, rejected, denominator=1.0)
    assert actual.loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_adaptive_controller_matches_ziegler_et_al():
    controller = AdaptiveKLController(0.15, target=6.0, horizon=10_000)
    value = 0.15
    for kl, completions in ((6.0, 256), (9.0, 256), (6.3, 512), (100.0, 256), (5.4, 256), (-1.0, 1024)):
        error = min(max((kl - 6.0) / 6.0, -0.2), 0.2)  # eq. of section 2.2, with its K the completions over the horizon
        value = value + value * error * completions / 10_000
        controller.update(kl, completions)
        assert controller.value == pytest.approx(value, rel=1e-12)
    resumed = AdaptiveKLController(0.15, target=6.0, horizon=10_000)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    for instance in (controller, resumed):
        instance.update(7.0, 64)
    assert resumed.value == controller.value != value
    with pytest.raises(ValueError, match="NaN"):
        controller.update(math.nan, 1)
    for wrong in ({"target": 0, "horizon": 1}, {"target": 1, "horizon": -1}):
        with pytest.raises(ValueError, match="above 0"):
            AdaptiveKLController(0.1, **wrong)


def test_the_fixed_controller_keeps_its_value():
    controller = FixedKLController(0.1)
    controller.update(100.0, 256)
    assert controller.value == 0.1
    other = FixedKLController(0.2)
    other.load_state_dict(controller.state_dict())
    assert other.value == 0.1


def test_mixed_loss_adds_entropy_and_pretraining():
    x = example()
    logps, entropies, text = (x[name].clone().requires_grad_() for name in ("logps", "values", "returns"))
    policy = policy_loss(logps, x["old_logps"], x["advantages"], x["mask"], 0.2, 11.0)
    entropy = entropy_bonus(entropies, x["mask"], 7.0)
    ptx = language_model_loss(text, x["mask"], 5.0)
    mixed = mixed_loss(policy, entropy=entropy, entropy_coef=0.3, ptx=ptx, unsup_coef=2.0)
    total = sum(entropies[b, t].item() for b, t in cells(x))
    supervised = -sum(text[b, t].item() for b, t in cells(x))
    assert mixed.loss.item() == pytest.approx(policy.loss.item() - 0.3 * total / 7 + 2 * supervised / 5, rel=1e-12)
    gradients = torch.autograd.grad(mixed.loss, (entropies, text))
    for gradient, slope in zip(gradients, (-0.3 / 7, -2 / 5), strict=True):
        torch.testing.assert_close(gradient, slope * x["mask"].double(), atol=1e-15, rtol=1e-12)
    figures = mean_metrics([mixed])
    count = len(cells(x))
    assert figures["entropy"] == pytest.approx(total / count) and figures["ptx/loss"] == pytest.approx(
        supervised / count
    )
    assert {name: figures[name] for name in policy.sums} == mean_metrics([policy])
    assert mixed_loss(policy).loss is policy.loss


# A dropped sample is a row without tokens.
GRPO_LENGTHS = [7, 0, 4, 3, 1, 6]
GRPO_ROWS = len(GRPO_LENGTHS)


def grpo_example(filler: float = math.nan) -> dict[str, torch.Tensor]:
    """Like `example`, with a dropped row, and `filler` in masked values and the dropped row's advantage."""
    torch.manual_seed(5)
    mask = (torch.arange(WIDTH) < torch.tensor(GRPO_LENGTHS)[:, None]).long()
    x = {name: torch.randn(GRPO_ROWS, WIDTH, dtype=torch.float64) for name in ("logps", "entropies", "values")}
    x["old_logps"] = x["logps"] + 0.4 * torch.randn(GRPO_ROWS, WIDTH, dtype=torch.float64)
    x["ref_logps"] = x["logps"] + 0.5 * torch.randn(GRPO_ROWS, WIDTH, dtype=torch.float64)
    x["weights"] = 2 * torch.rand(GRPO_ROWS, WIDTH, dtype=torch.float64)
    for tensor in x.values():
        tensor[mask == 0] = filler
    advantages = torch.tensor([1.3, filler, -0.7, 0.9, -1.1, -0.4], dtype=torch.float64)
    return {**x, "mask": mask, "advantages": advantages}


CLIPPED = [name for name, surrogate in POLICY_LOSSES.items() if surrogate is clipped_surrogate]
GRPO_OPTIONS = [
    {},
    {"epsilon_high": 0.28},
    {"epsilon": 0.1, "delta": 1.3},
    {"beta": 0.04},
    {"beta": 0.04, "use_bias_correction_kl": False},
    {"beta": 0.1, "epsilon_high": 0.5, "weighted": True},
]


def trl_grpo(x: dict, rows, loss_type: str, level: str, max_length: int, options: dict) -> tuple:
    """TRL 1.16's GRPOTrainer._compute_loss of one micro batch on one rank, token by token; the loss and the metrics.

    Rows without tokens count in its means over rows. Only torch scalars are used, so that torch gives the gradient.
    """
    epsilon, beta, delta = options.get("epsilon", 0.2), options.get("beta", 0.0), options.get("delta")
    epsilon_high = options.get("epsilon_high") or epsilon
    rows_loss, tokens_loss, tokens, clipped, ratios, kls, entropy = [], 0.0, 0, [0, 0], 0, 0.0, 0.0
    for b in rows:
        length, advantage, row_loss = GRPO_LENGTHS[b], x["advantages"][b], 0.0
        logs = [x["logps"][b, t] - x["old_logps"][b, t] for t in range(length)]
        if level == "sequence":
            logs = [sum(logs) / max(length, 1)] * length
            ratios += 1
        for t in range(length):
            ratio = torch.exp(logs[t])
            kl = 0.0
            if beta:
                away = x["ref_logps"][b, t] - x["logps"][b, t]
                kl = torch.exp(away) - away - 1
                kl = kl * ratio if options.get("use_bias_correction_kl", True) else kl
            first = ratio if delta is None else torch.clamp(ratio, max=delta)
            second = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high)
            loss = -torch.min(first * advantage, second * advantage)
            loss = loss * x["weights"][b, t] if options.get("weighted") else loss
            loss = loss + beta * kl
            row_loss, tokens = row_loss + loss, tokens + 1
            if level == "token" or t == 0:
                clipped[0] += bool(first < 1 - epsilon) and bool(advantage < 0)
                clipped[1] += bool(first > 1 + epsilon_high) and bool(advantage > 0)
            kls, entropy = kls + float(kl.detach() if beta else kl), entropy + x["entropies"][b, t].item()
        rows_loss.append(row_loss / max(length, 1))
        tokens_loss = tokens_loss + row_loss
    total = {
        "grpo": sum(rows_loss) / len(rows_loss),
        "bnpo": tokens_loss / max(tokens, 1),
        "dapo": tokens_loss / max(tokens, 1),
        "dr_grpo": tokens_loss / (len(rows_loss) * max_length),
        "luspo": tokens_loss / len(rows_loss),
    }[loss_type]
    ratios = ratios if level == "sequence" else tokens
    metrics = {
        "clip_ratio/low_mean": clipped[0] / ratios,
        "clip_ratio/high_mean": clipped[1] / ratios,
        "clip_ratio/region_mean": sum(clipped) / ratios,
        "entropy": entropy / tokens,
        "loss": total.item(),
        **({"kl": kls / tokens} if beta else {}),
    }
    return total, metrics


def grpo_loss_of(x: dict, rows: list[int], denominator: float, loss_type: str, level: str, options: dict) -> Loss:
    """`grpo_loss` of some rows, as wide as their longest."""
    width = max(GRPO_LENGTHS[b] for b in rows)
    part = {name: tensor[rows, :width] if tensor.dim() == 2 else tensor[rows] for name, tensor in x.items()}
    keywords = {name: value for name, value in options.items() if name != "weighted"}
    if options.get("weighted"):
        keywords["weights"] = part["weights"]
    if options.get("beta"):
        keywords["ref_logps"] = part["ref_logps"]
    return grpo_loss(
        part["logps"],
        part["old_logps"],
        part["advantages"],
        part["mask"],
        denominator=denominator,
        loss_type=loss_type,
        importance_sampling_level=level,
        entropies=part["entropies"],
        **keywords,
    )


@pytest.mark.parametrize("options", GRPO_OPTIONS, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
def test_grpo_loss_matches_trl(loss_type, level, options):
    x = grpo_example()
    x["logps"].requires_grad_()
    rows = list(range(GRPO_ROWS))
    denominator = loss_denominator(
        loss_type, sequences=GRPO_ROWS, tokens=sum(GRPO_LENGTHS), max_completion_length=9, micro_batches=1
    )
    actual = grpo_loss_of(x, rows, denominator, loss_type, level, options)
    (gradient,) = torch.autograd.grad(actual.loss, x["logps"])
    expected_loss, metrics = trl_grpo(x, rows, loss_type, level, 9, options)
    (expected,) = torch.autograd.grad(expected_loss, x["logps"])
    assert actual.loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-11)
    assert (gradient[x["mask"] == 0] == 0).all() and gradient.abs().max() > 1e-3
    assert mean_metrics([actual]) == pytest.approx(metrics, rel=1e-12)
    if level == "token":
        assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0, "nothing was clipped"


SPLITS = [  # the rows of each micro batch of each rank: ranks · accumulation steps lists
    [[0, 1, 2, 3, 4, 5]],
    [[0, 1, 2], [3, 4, 5]],
    [[5, 2], [1], [0], [4, 3]],
    [[1], [0, 2, 3, 4], [5]],
    [[3], [1], [4], [0], [5], [2]],
]


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CLIPPED)
def test_grpo_loss_does_not_depend_on_ranks_and_micro_batches(loss_type, level, split):
    """DeepSpeed's gradient is the mean over ranks and accumulation steps, as is this loss; one part has no token."""

    def total_of(parts: list[list[int]]) -> tuple:
        x = grpo_example()
        x["logps"].requires_grad_()
        counts = {"sequences": GRPO_ROWS, "tokens": sum(GRPO_LENGTHS), "max_completion_length": 9}
        denominator = loss_denominator(loss_type, **counts, micro_batches=len(parts))
        options = {"beta": 0.1, "weighted": True}
        losses = [grpo_loss_of(x, rows, denominator, loss_type, level, options) for rows in parts]
        total = sum(loss.loss for loss in losses) / len(parts)
        (gradient,) = torch.autograd.grad(total, x["logps"])
        return total, gradient, mean_metrics(losses)

    total, gradient, figures = total_of(split)
    expected_total, expected_gradient, expected_figures = total_of(SPLITS[0])
    assert total.item() == pytest.approx(expected_total.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-14, rtol=1e-12)
    assert figures == pytest.approx(expected_figures, rel=1e-12)
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-12), "the metric is not the loss of the whole step"


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_ppo_losses_do_not_depend_on_ranks_and_micro_batches(split):
    """Means over tokens (policy, value, entropy and pretraining loss, mixed) and over pairs."""

    def total_of(parts: list[list[int]]) -> tuple:
        x = grpo_example()
        names = ("logps", "values", "entropies", "old_logps")
        leaves = [x[name].requires_grad_() for name in names]
        tokens, pairs = sum(GRPO_LENGTHS) / len(parts), GRPO_ROWS / len(parts)
        total = 0.0
        for rows in parts:
            logps, values, entropies, text, mask = (x[name][rows] for name in (*names, "mask"))
            advantages = x["ref_logps"][rows]
            policy = policy_loss(logps, text.detach(), advantages, mask, 0.2, tokens, x["weights"][rows])
            value = value_loss(values, advantages, x["weights"][rows], mask, 0.2, tokens)
            entropy, ptx = entropy_bonus(entropies, mask, tokens), language_model_loss(text, mask, tokens)
            mixed = mixed_loss(policy, entropy=entropy, entropy_coef=0.1, ptx=ptx, unsup_coef=0.5)
            pair = torch.where(mask.bool(), text, 0.0), torch.where(mask.bool(), logps, 0.0)
            scores = last_token_values(pair[0], mask), last_token_values(pair[1], mask)
            pairs_loss = pairwise_reward_loss(*scores, denominator=pairs).loss
            preference = dpo_loss(*scores, scores[1].detach(), scores[0].detach(), beta=0.2, denominator=pairs).loss
            total = total + mixed.loss + value.loss + pairs_loss + preference
        total = total / len(parts)
        return total, torch.autograd.grad(total, leaves)

    (total, gradients), (expected, expected_gradients) = total_of(split), total_of(SPLITS[0])
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    for actual, gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, gradient, atol=1e-14, rtol=1e-12)


def test_metrics_are_means_over_ranks():
    """Sums and counts of all ranks are reduced in one call."""
    x = grpo_example()
    parts = [grpo_loss_of(x, rows, 1.0, "dapo", "token", {}) for rows in ([0, 3], [1], [2, 4, 5])]
    calls = []

    def over_ranks(totals):
        calls.append(totals)
        return totals + other

    other = 0.0
    mean_metrics(parts[:1], over_ranks)
    other = calls[0]
    assert mean_metrics(parts[1:], over_ranks) == pytest.approx(mean_metrics(parts), rel=1e-12)
    assert len(calls) == 2


def test_a_step_of_dropped_samples_only_has_zero_loss():
    """Also if every rank drops all samples: no division by 0, and zero gradients."""
    x = grpo_example()
    x["mask"] = torch.zeros_like(x["mask"])
    for loss_type in LOSS_TYPES:
        denominator = loss_denominator(loss_type, sequences=0, tokens=0, max_completion_length=9, micro_batches=4)
        for level in ("token", "sequence"):
            for width in (0, WIDTH):
                logps = x["logps"][:, :width].clone().requires_grad_()
                inputs = (logps, x["old_logps"][:, :width], x["advantages"], x["mask"][:, :width])
                kl = {"beta": 0.1, "ref_logps": x["ref_logps"][:, :width], "generator": torch.Generator()}
                actual = grpo_loss(
                    *inputs, denominator=denominator, loss_type=loss_type, importance_sampling_level=level, **kl
                )
                actual.loss.backward()
                assert actual.loss.item() == 0 and (logps.grad == 0).all()
                assert mean_metrics([actual])["kl"] == 0
    nothing = torch.full((2, WIDTH), math.nan, dtype=torch.float64)
    mask, scores = torch.zeros(2, WIDTH, dtype=torch.long), torch.tensor([1.0, math.nan], dtype=torch.float64)
    assert (shaped_rewards(scores, nothing, nothing, mask, 0.1) == 0).all()
    assert shaped_rewards(scores, nothing[:, :0], nothing[:, :0], mask[:, :0], 0.1).shape == (2, 0)
    assert (masked_whiten(nothing, mask) == 0).all() and (masked_whiten(nothing, mask, shift_mean=False) == 0).all()
    values = nothing.clone().requires_grad_()
    value_loss(values, nothing, nothing, mask, 0.2, 1.0).loss.backward()
    policy_loss(values, nothing, nothing, mask, 0.2, 1.0).loss.backward()
    assert (values.grad == 0).all()


def test_a_dropped_row_does_not_change_others():
    """A dropped row gets no reward, and other rows' rewards, advantages and losses are as without it."""
    x = grpo_example()
    scores = torch.arange(1.0, GRPO_ROWS + 1, dtype=torch.float64)
    kept = [b for b in range(GRPO_ROWS) if GRPO_LENGTHS[b]]
    rewards = shaped_rewards(scores, x["logps"], x["ref_logps"], x["mask"], 0.1)
    assert (rewards[1] == 0).all()
    without = shaped_rewards(scores[kept], x["logps"][kept], x["ref_logps"][kept], x["mask"][kept], 0.1)
    assert torch.equal(rewards[kept], without)
    for row, length in enumerate(GRPO_LENGTHS):
        expected = scores[row].item() if length else 0.0
        kl = sum(-0.1 * (x["logps"][row, t] - x["ref_logps"][row, t]).item() for t in range(length))
        assert rewards[row].sum().item() == pytest.approx(expected + kl, rel=1e-12)
    torch.testing.assert_close(
        masked_whiten(x["values"], x["mask"])[kept], masked_whiten(x["values"][kept], x["mask"][kept])
    )


REWARDS = [0.5, 2.0, 2.0, 3.5, 1.0, 1.0, 1.0, 1.0, math.nan, 0.0, 4.0, 5.0, math.nan, math.nan, 2.0, math.nan]


def scale_of(rewards: list[float], group: list[float], scale_rewards: str) -> float:
    """The divisor of TRL's advantages."""
    if scale_rewards == "none":
        return 1.0
    kept = [reward for reward in (group if scale_rewards == "group" else rewards) if not math.isnan(reward)]
    return statistics.stdev(kept) + 1e-4 if len(kept) > 1 else math.inf


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_group_advantages_match_the_formula(scale_rewards):
    """Groups of four: ordinary, all equal, one unscored, only one scored."""
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 4, scale_rewards)
    for start in range(0, len(REWARDS), 4):
        group = REWARDS[start : start + 4]
        kept = [reward for reward in group if not math.isnan(reward)]
        for reward, advantage in zip(group, advantages[start : start + 4].tolist(), strict=True):
            expected = 0.0
            if not math.isnan(reward):
                expected = (reward - sum(kept) / len(kept)) / scale_of(REWARDS, group, scale_rewards)
            assert advantage == pytest.approx(expected, abs=1e-12)
    std = group_std(torch.tensor(REWARDS, dtype=torch.float64), 4)
    assert std[:3].tolist() == pytest.approx([statistics.stdev(REWARDS[:4]), 0.0, statistics.stdev([0.0, 4.0, 5.0])])
    assert std[3].isnan()


def test_batch_scaling_does_not_depend_on_the_split_over_ranks():
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    parts = [rewards[:4], rewards[4:]]
    sums = []

    def rank(part, answers):
        """A rank's advantages if the sums over ranks are `answers`; records its own sums."""
        local_sums, calls = [], iter(answers)
        sums.append(local_sums)

        def over_ranks(values):
            local_sums.append(values)
            return next(calls, values)

        return group_advantages(part, 4, "batch", over_ranks)

    answers = []
    for number in range(2):
        sums.clear()
        for part in parts:
            rank(part, answers)
        answers.append(sums[0][number] + sums[1][number])
    split = torch.cat([rank(part, answers) for part in parts])
    torch.testing.assert_close(split, group_advantages(rewards, 4, "batch"), atol=1e-12, rtol=1e-12)


def test_rloo_advantages_match_the_formula():
    advantages = rloo_advantages(torch.tensor(REWARDS, dtype=torch.float64), 4).tolist()
    for number, (reward, advantage) in enumerate(zip(REWARDS, advantages, strict=True)):
        start = number - number % 4
        other_rewards = [REWARDS[other] for other in range(start, start + 4) if other != number]
        other_rewards = [other for other in other_rewards if not math.isnan(other)]
        defined = bool(other_rewards) and not math.isnan(reward)
        assert advantage == pytest.approx(
            reward - sum(other_rewards) / len(other_rewards) if defined else 0.0, abs=1e-12
        )


def test_the_only_score_of_a_group_has_no_advantage():
    rewards = torch.tensor([3.0, 4.0])
    for scale_rewards in ("group", "batch", "none"):
        assert group_advantages(rewards, 1, scale_rewards).tolist() == [0.0, 0.0]
    assert rloo_advantages(rewards, 1).tolist() == [0.0, 0.0]


def test_kl_k3_is_nonnegative_and_estimates_the_kl():
    """The mean under the policy is the KL, here of two distributions over five tokens."""
    torch.manual_seed(6)
    logps, ref_logps = torch.log_softmax(torch.randn(2, 5, dtype=torch.float64), dim=-1)
    estimates = kl_k3(logps, ref_logps)
    for estimate, policy, reference in zip(estimates.tolist(), logps.tolist(), ref_logps.tolist(), strict=True):
        ratio = math.exp(reference - policy)
        assert estimate == pytest.approx(ratio - math.log(ratio) - 1, rel=1e-12) and estimate >= 0
    expected = sum(math.exp(p) * (p - q) for p, q in zip(logps.tolist(), ref_logps.tolist(), strict=True))
    assert (logps.exp() * estimates).sum().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_importance_sampling_modes_match_trl(mode):
    """TRL 1.16's four modes, between 0.6 and 1.5; a row without tokens has no ratio."""
    x = grpo_example()
    sampling = x["old_logps"] + 0.4 * torch.randn(GRPO_ROWS, WIDTH, dtype=torch.float64)
    weights = importance_sampling_weights(x["old_logps"], sampling, x["mask"], 1.5, mode, floor=0.6)
    inside = 0
    for b in range(GRPO_ROWS):
        ratios = [math.exp((x["old_logps"] - sampling)[b, t].item()) for t in range(GRPO_LENGTHS[b])]
        for t in range(GRPO_LENGTHS[b]):
            ratio = math.prod(ratios) if mode.startswith("sequence") else ratios[t]
            inside += 0.6 <= ratio <= 1.5
            held = min(max(ratio, 0.6), 1.5)
            expected = held if mode.endswith("truncate") or held == ratio else 0.0
            assert weights[b, t].item() == pytest.approx(expected, rel=1e-12)
    assert 0 < inside < sum(GRPO_LENGTHS)
    assert (weights[x["mask"] == 0] == 1).all()


def test_invalid_options_raise():
    logps, mask = torch.zeros(2, 3), torch.ones(2, 3)
    invalid_calls = {
        "loss_type: 'ppo' given; allowed: grpo, dr_grpo, dapo, bnpo": lambda: grpo_loss(
            logps, logps, torch.zeros(2), mask, denominator=1.0, loss_type="ppo"
        ),
        "importance_sampling_level: 'row' given; allowed: token, sequence": lambda: grpo_loss(
            logps, logps, torch.zeros(2), mask, denominator=1.0, importance_sampling_level="row"
        ),
        "beta: 0.1 given without ref_logps": lambda: grpo_loss(
            logps, logps, torch.zeros(2), mask, denominator=1.0, beta=0.1
        ),
        "loss_type: 'x' given": lambda: loss_denominator(
            "x", sequences=1, tokens=1, max_completion_length=1, micro_batches=1
        ),
        "scale_rewards: 'std' given; allowed: group, batch, none": lambda: group_advantages(torch.zeros(4), 2, "std"),
        "rewards: 5 given; the number must be a multiple of num_generations, 2": lambda: rloo_advantages(
            torch.zeros(5), 2
        ),
        "mode: 'cut' given; allowed: token_truncate": lambda: importance_sampling_weights(
            logps, logps, mask, 2.0, "cut"
        ),
    }
    for message, call in invalid_calls.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("cache", [1, 4, 10])
def test_soft_overlong_punishment_matches_trl(cache):
    trl_rewards = pytest.importorskip("trl.rewards", reason="trl is compared with where it is installed")
    lengths = [0, 1, 5, 6, 7, 8, 9, 10]
    expected = trl_rewards.get_soft_overlong_punishment(10, cache)([[1] * length for length in lengths])
    actual = soft_overlong_punishment(torch.tensor(lengths), 10, cache)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32))
    assert actual.min() == -1 and actual.max() == 0
