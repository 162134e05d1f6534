"""Sampling: the counter-based uniform against plain integers, the inverse CDF against its distribution."""

import pytest
import torch

from hybrid.generation.request import split_warpers
from hybrid.sampling.params import warpers_of
from hybrid.sampling.sampler import (
    entropy,
    inverse_cdf,
    selective_log_softmax,
    stream_keys,
    uniform,
)
from tests.sampling_params import params_of
from tests.tiny_models import tiny_model

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
def test_uniform_matches_splitmix64(seed):
    rows, samples = torch.tensor([0, 1, 2**40 + 3]), torch.tensor([0, 7, 1])
    keys = stream_keys(seed, rows, samples)
    for position in (0, 1, 511):
        actual = uniform(keys, position).tolist()
        assert actual == [
            expected_uniform(seed, r, s, position) for r, s in zip(rows.tolist(), samples.tolist(), strict=True)
        ]


def test_uniform_is_uniform_and_streams_are_uncorrelated():
    keys = stream_keys(3, torch.arange(2000), torch.zeros(2000, dtype=torch.long))
    draws = torch.stack([uniform(keys, position) for position in range(50)], dim=1)  # [rows, positions]
    histogram = torch.histc(draws.float(), bins=20, min=0, max=1) / draws.numel()
    # 100,000 draws: a bin's share has a standard deviation of 0.0007.
    assert (histogram - 0.05).abs().max() < 0.004
    for a, b in ((draws[:, 0], draws[:, 1]), (draws[:-1, 0], draws[1:, 0])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.1  # 2000 pairs: standard deviation 0.022


def test_inverse_cdf_follows_the_softmax():
    torch.manual_seed(0)
    scores = torch.randn(1, 30) * 2
    scores[0, 5:9] = -torch.inf
    u = (torch.arange(200_000) + 0.5) / 200_000
    tokens = inverse_cdf(scores.expand(len(u), -1), u)
    shares = torch.bincount(tokens, minlength=30) / len(u)
    torch.testing.assert_close(shares, torch.softmax(scores[0], 0), atol=2e-5, rtol=0)


def test_tokens_of_probability_zero_are_never_sampled():
    scores = torch.full((4, 9), -torch.inf)
    scores[:, 4] = 0.0
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-24], dtype=torch.float64)
    assert inverse_cdf(scores, edges).tolist() == [4] * 4


def test_a_sampled_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    scores = torch.randn(64, 500)
    rows = torch.arange(64)
    draw = lambda chosen: inverse_cdf(scores[chosen], uniform(stream_keys(9, rows[chosen], rows[chosen] * 0), 4))  # noqa: E731
    together, backwards = draw(rows), draw(rows.flip(0)).flip(0)
    alone = torch.cat([draw(row.view(1)) for row in rows])
    assert torch.equal(together, backwards)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_match_float64(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 40) * 4).to(dtype)
    ids = torch.randint(0, 40, (3, 5))
    exact = torch.log_softmax(logits.double(), dim=-1)
    # float32 sums of 40 terms
    torch.testing.assert_close(
        selective_log_softmax(logits, ids).double(), exact.gather(-1, ids[..., None])[..., 0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(entropy(logits).double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=1e-5)


def test_tokens_of_probability_zero_add_nothing_to_the_entropy():
    """Processors set forbidden tokens to -inf; 0 · -inf would be NaN."""
    logits = torch.randn(3, 40)
    expected = entropy(logits[:, :25])
    logits[:, 25:] = -torch.inf
    torch.testing.assert_close(entropy(logits), expected)
    certain = torch.full((1, 40), -torch.inf)
    certain[0, 7] = 3.0
    assert entropy(certain).item() == 0
    assert selective_log_softmax(certain, torch.tensor([7])).item() == 0


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (params_of(), []),
        (params_of(temperature=0), []),
        (params_of(temperature=0.7), ["Temperature"]),
        (params_of(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1), ["Temperature", "TopK", "TopP", "MinP"]),
        (params_of(top_p=0.5), ["TopP"]),
    ],
)
def test_a_draw_converts_to_warpers_and_back(how, names):
    """Active settings in Hugging Face's order, read back as the same SamplingParams."""
    warpers = warpers_of(how)
    assert [type(warper).__name__.removesuffix("LogitsWarper") for warper in warpers] == names
    if how.temperature:
        assert split_warpers(warpers, True, 200) == ([], how)


def test_generate_arguments_are_read_as_a_draw():
    """The processors that Hugging Face's `generate` builds from its arguments."""
    model = tiny_model("llama")
    cases = {
        params_of(0.6, 11, 0.7, 0.2): {"temperature": 0.6, "top_k": 11, "top_p": 0.7, "min_p": 0.2},
        params_of(top_k=50): {},  # its default
        params_of(): {"top_k": 0},
        params_of(1.5, 0, 0.4): {"temperature": 1.5, "top_k": 0, "top_p": 0.4},
    }
    for how, settings in cases.items():
        draws = []

        def read(model, input_ids, logits_processor, *args, _draws=draws, **kwargs):
            _draws.append(split_warpers(logits_processor, True, 200))
            return input_ids

        model.generate(torch.tensor([[5, 6]]), do_sample=True, custom_generate=read, max_new_tokens=1, **settings)
        assert draws == [([], how)]
