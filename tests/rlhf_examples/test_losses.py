"""PPO's arithmetic against plain Python loops in float64; padding and the split over ranks change nothing."""

import math

import pytest
import torch

from rlhf_examples.losses import (
    advantages_and_returns,
    importance_sampling_weights,
    masked_whiten,
    policy_loss,
    shaped_rewards,
    value_loss,
)

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
    """Unmasked places."""
    return [(b, t) for b in range(ROWS) for t in range(LENGTHS[b])]


def test_shaped_rewards():
    x = example()
    ours = shaped_rewards(x["scores"], x["logps"], x["ref_logps"], x["mask"], 0.3)
    for b in range(ROWS):
        for t in range(WIDTH):
            expected = 0.0
            if t < LENGTHS[b]:
                expected = -0.3 * (x["logps"][b, t].item() - x["ref_logps"][b, t].item())
                expected += x["scores"][b].item() if t == LENGTHS[b] - 1 else 0.0
            assert ours[b, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_advantages_are_the_sums_of_the_paper(gamma, lam):
    x = example()
    advantages, returns = advantages_and_returns(x["rewards"], x["values"], x["mask"], gamma, lam)
    for b in range(ROWS):
        n = LENGTHS[b]
        value = [x["values"][b, t].item() for t in range(n)] + [0.0]
        delta = [x["rewards"][b, t].item() + gamma * value[t + 1] - value[t] for t in range(n)]
        for t in range(WIDTH):
            # arXiv:1506.02438, eq. 16: the discounted sum of the residuals ahead, not a recursion.
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) if t < n else 0.0
            assert advantages[b, t].item() == pytest.approx(expected, abs=1e-12)
            assert returns[b, t].item() == pytest.approx(expected + value[t] if t < n else 0.0, abs=1e-12)


def test_policy_loss_and_its_gradient():
    x = example()
    logps = x["logps"].requires_grad_()
    ours = policy_loss(logps, x["old_logps"], x["advantages"], x["mask"], 0.2, 11.0)
    ours.loss.backward()
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
    assert ours.loss.item() == pytest.approx(total / 11.0, rel=1e-12)
    expected = {"loss": total, "approxkl": kl, "clipfrac": clipped, "ratio": ratios, "squared_ratio": squares}
    assert {name: value.item() for name, value in ours.sums.items()} == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(logps.grad, gradient, atol=1e-12, rtol=1e-12)


def test_importance_sampling_weights():
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


def test_weights_multiply_each_tokens_clipped_loss_and_its_gradient():
    """And leave the figures about the ratio alone; weights of 1 are the loss without any, bit for bit."""
    x = example()
    weights = torch.rand(ROWS, WIDTH, dtype=torch.float64) * 2
    logps = x["logps"].requires_grad_()
    request = (logps, x["old_logps"], x["advantages"], x["mask"], 0.2, 11.0)
    ours, plain = policy_loss(*request, weights), policy_loss(*request)
    (gradient,) = torch.autograd.grad(ours.loss, logps)
    (plain_gradient,) = torch.autograd.grad(plain.loss, logps)
    total = 0.0
    for b, t in cells(x):
        ratio, advantage = math.exp(logps[b, t].item() - x["old_logps"][b, t].item()), x["advantages"][b, t].item()
        total += weights[b, t].item() * max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    assert ours.loss.item() == pytest.approx(total / 11.0, rel=1e-12)
    torch.testing.assert_close(gradient, weights * plain_gradient, atol=1e-14, rtol=1e-12)
    assert {**ours.sums, "loss": 0} == {**plain.sums, "loss": 0}
    assert torch.equal(policy_loss(*request, torch.ones_like(weights)).loss, plain.loss)


def test_value_loss_and_its_gradient():
    x = example()
    values = x["values"].requires_grad_()
    ours = value_loss(values, x["old_values"], x["returns"], x["mask"], 0.4, 3.0)
    ours.loss.backward()
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
    assert ours.loss.item() == pytest.approx(total / 3.0, rel=1e-12)
    assert ours.sums["clipfrac"].item() == clipped
    torch.testing.assert_close(values.grad, gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening(shift_mean):
    x = example()
    ours = masked_whiten(x["values"], x["mask"], shift_mean)
    kept = [x["values"][b, t].item() for b, t in cells(x)]
    mean = sum(kept) / len(kept)
    variance = sum((value - mean) ** 2 for value in kept) / len(kept)
    for b, t in cells(x):
        expected = (x["values"][b, t].item() - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
        assert ours[b, t].item() == pytest.approx(expected, abs=1e-12)
    assert (ours[x["mask"] == 0] == 0).all()


def test_whitening_does_not_depend_on_the_split_over_ranks():
    x = example()
    whole = masked_whiten(x["values"], x["mask"])
    parts = [slice(0, 2), slice(2, ROWS)]
    rounds = []  # what each rank would give to all_reduce, first the counts and sums, then the squares

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
    torch.testing.assert_close(split, whole, atol=1e-12, rtol=1e-12)


def test_padding_and_what_is_in_it_change_nothing():
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
