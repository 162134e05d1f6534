"""Sampling: the counter-based uniform against plain integers, the inverse CDF against its distribution."""

import pytest
import torch

from hybrid.decoding.sampling import entropy, inverse_cdf, selective_log_softmax, stream_keys, uniform

MASK = 2**64 - 1


def splitmix_finalizer(x: int) -> int:
    """Steele, Lea, Flood 2014, in unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected_uniform(seed: int, row: int, sample: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix_finalizer((seed + golden) & MASK)
    key = splitmix_finalizer(key ^ splitmix_finalizer((row + golden) & MASK))
    key = splitmix_finalizer(key ^ splitmix_finalizer((sample + golden) & MASK))
    bits = splitmix_finalizer((key + golden * (position + 1)) & MASK)
    return (bits >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, -5, 123456789])
def test_uniform_is_the_published_function(seed):
    rows, samples = torch.tensor([0, 1, 2**40 + 3]), torch.tensor([0, 7, 1])
    keys = stream_keys(seed, rows, samples)
    for position in (0, 1, 511):
        ours = uniform(keys, position).tolist()
        assert ours == [
            expected_uniform(seed, r, s, position) for r, s in zip(rows.tolist(), samples.tolist(), strict=True)
        ]


def test_uniform_is_uniform_and_its_streams_do_not_correlate():
    keys = stream_keys(3, torch.arange(2000), torch.zeros(2000, dtype=torch.long))
    draws = torch.stack([uniform(keys, position) for position in range(50)], dim=1)  # [rows, positions]
    histogram = torch.histc(draws.float(), bins=20, min=0, max=1) / draws.numel()
    # 100,000 draws: a bin's share has a standard deviation of 0.0007.
    assert (histogram - 0.05).abs().max() < 0.004
    for a, b in ((draws[:, 0], draws[:, 1]), (draws[:-1, 0], draws[1:, 0])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.1  # 2000 pairs: standard deviation 0.022


def test_inverse_cdf_has_the_distribution_of_the_softmax():
    torch.manual_seed(0)
    scores = torch.randn(1, 30) * 2
    scores[0, 5:9] = -torch.inf
    u = (torch.arange(200_000) + 0.5) / 200_000
    tokens = inverse_cdf(scores.expand(len(u), -1), u)
    shares = torch.bincount(tokens, minlength=30) / len(u)
    torch.testing.assert_close(shares, torch.softmax(scores[0], 0), atol=2e-5, rtol=0)


def test_a_token_without_probability_is_never_chosen():
    scores = torch.full((4, 9), -torch.inf)
    scores[:, 4] = 0.0
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-24], dtype=torch.float64)
    assert inverse_cdf(scores, edges).tolist() == [4] * 4


def test_a_row_does_not_depend_on_the_batch_around_it():
    torch.manual_seed(0)
    scores = torch.randn(64, 500)
    rows = torch.arange(64)
    draw = lambda chosen: inverse_cdf(scores[chosen], uniform(stream_keys(9, rows[chosen], rows[chosen] * 0), 4))  # noqa: E731
    together, backwards = draw(rows), draw(rows.flip(0)).flip(0)
    alone = torch.cat([draw(row.view(1)) for row in rows])
    assert torch.equal(together, backwards)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_against_float64(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 40) * 4).to(dtype)
    ids = torch.randint(0, 40, (3, 5))
    exact = torch.log_softmax(logits.double(), dim=-1)
    # float32 sums of 40 terms
    torch.testing.assert_close(
        selective_log_softmax(logits, ids).double(), exact.gather(-1, ids[..., None])[..., 0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(entropy(logits).double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=1e-5)
