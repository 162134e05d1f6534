"""Metrics of two forwards over the same tokens against plain Python and torch.distributions, for any split over
ranks."""

import math

import pytest
import torch
from torch.distributed import ReduceOp

from hybrid.sampling.numerics import sampling_metrics

ROWS, WIDTH = 6, 9
LENGTHS = [9, 1, 4, 0, 6, 2]


def example(std: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs by two forwards and the mask, [ROWS, WIDTH]; masked values are NaN or inf."""
    torch.manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    sampling = -torch.rand(ROWS, WIDTH) * 5
    training = sampling + std * torch.randn(ROWS, WIDTH)
    return sampling.masked_fill(mask == 0, math.nan), training.masked_fill(mask == 0, math.inf), mask


def test_metrics_match_their_formulas():
    sampling, training, mask = example()
    differences = [
        training[row, token].item() - sampling[row, token].item()
        for row in range(ROWS)
        for token in range(LENGTHS[row])
    ]
    count, ratios = len(differences), [math.exp(difference) for difference in differences]
    outside = sum(not 0.9 <= ratio <= 1.1 for ratio in ratios)
    assert 2 < outside < count - 2, "the example is vacuous"
    expected = {
        "sampling/sampling_logp_difference/mean": math.fsum(map(abs, differences)) / count,
        "sampling/sampling_logp_difference/max": max(map(abs, differences)),
        "sampling/ratio_outside": outside / count,
        "sampling/gen_kl_error": math.fsum(r - d - 1 for r, d in zip(ratios, differences, strict=True)) / count,
    }
    assert sampling_metrics(sampling, training, mask) == pytest.approx(expected, rel=1e-12)


def test_kl_error_estimates_the_kl_divergence():
    """For tokens sampled from one distribution and scored by another, against torch.distributions."""
    torch.manual_seed(0)
    logits = torch.randn(2, 50, dtype=torch.float64)
    sampler, trainer = (torch.distributions.Categorical(logits=row) for row in (logits[0], logits[0] + 0.3 * logits[1]))
    tokens = sampler.sample((1, 200_000))
    actual = sampling_metrics(sampler.log_prob(tokens), trainer.log_prob(tokens), torch.ones_like(tokens))
    exact = torch.distributions.kl_divergence(sampler, trainer).item()
    # The estimator's standard deviation is about the KL itself: 1 % is four standard errors of 200,000 draws.
    assert actual["sampling/gen_kl_error"] == pytest.approx(exact, rel=0.01)


def test_kl_error_keeps_differences_of_rounding():
    """exp(d) - d - 1 of d = 1e-6 is 5e-13, which is lost to rounding in float32, and in float64 without expm1."""
    sampling = torch.full((1, 4), -1.0, dtype=torch.float64)
    actual = sampling_metrics(sampling, sampling + 1e-6, torch.ones(1, 4))
    assert actual["sampling/gen_kl_error"] == pytest.approx(5e-13, rel=1e-5)


def test_equal_logprobs_give_zero_metrics():
    sampling, _, mask = example()
    for dtype in (torch.bfloat16, torch.float32):
        actual = sampling_metrics(sampling.to(dtype), sampling.to(dtype), mask, name="control")
        assert set(actual.values()) == {0.0}
        assert all(name.startswith("control/") for name in actual)


def test_metrics_without_tokens_are_zero():
    for shape in ((0, 5), (3, 0), (3, 5)):
        assert set(sampling_metrics(*torch.zeros(3, *shape)).values()) == {0.0}


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_metrics_do_not_depend_on_the_split_over_ranks(cut):
    """A rank may have no row at all; a mean of the ranks' means would differ."""
    parts = [[tensor[rows] for tensor in example()] for rows in (slice(0, cut), slice(cut, ROWS))]
    contributions = []  # for each rank: the tensors it passes to all_reduce, with the operation
    for part in parts:
        contributions.append([])
        sampling_metrics(*part, lambda values, op, own=contributions[-1]: own.append((values, op)) or values)
    operations = {ReduceOp.SUM: torch.sum, ReduceOp.MAX: torch.amax}
    expected = sampling_metrics(*example())
    for part in parts:
        answers = [
            operations[own_call[1]](torch.stack([own_call[0], other_call[0]]), dim=0)
            for own_call, other_call in zip(*contributions, strict=True)
        ]
        calls = iter(answers)
        actual = sampling_metrics(*part, lambda values, op, calls=calls: next(calls))
        assert actual == pytest.approx(expected, rel=1e-12)
