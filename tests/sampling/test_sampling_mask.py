"""A sampling mask gives the tokens that truncation kept: each sampler against a loop in float64."""

import importlib.util
import math

import pytest
import torch

from hybrid.kernels.host_group import HostGroup
from hybrid.sampling.params import SamplingParams
from hybrid.sampling.sampler import (
    NOT_TRUNCATED,
    SamplerOutput,
    masked_logits,
    sample_tokens,
    sample_tokens_in_torch,
    score_tokens,
)
from hybrid.sampling.vocabulary import VocabularySlice
from tests.host_groups import host_groups, on_every_rank
from tests.sampling.test_vocabulary_parallel import sliced
from tests.sampling_params import params_of

ROWS, VOCABULARY = 24, 300
WAYS = {
    "top_k": params_of(0.8, top_k=20),
    "top_k 1": params_of(top_k=1),
    "top_p": params_of(1.2, top_p=0.9),
    "narrow top_p": params_of(top_p=0.05),
    "min_p": params_of(min_p=0.05),
    "all": params_of(0.9, 50, 0.83, 0.02),
}


def logits_of(vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Rows of different spread; half of them rounded as bfloat16 heads round, so that many logits are equal."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, vocabulary) * torch.linspace(0.2, 6, ROWS)[:, None]
    logits[1::2] = (logits[1::2] * 4).round() / 4
    logits[5, ::3] = -torch.inf
    return logits


def kept_tokens(logits: list[float], params: SamplingParams) -> set[int]:
    """The tokens that Hugging Face's warpers keep, by a loop; of equal logits the higher id counts as more probable."""
    finite = [token for token, logit in enumerate(logits) if logit > -math.inf]
    order = sorted(finite, key=lambda token: (logits[token], token), reverse=True)
    weight = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    if params.top_k:
        order = [token for token in order if logits[token] >= logits[order[min(params.top_k, len(order)) - 1]]]
    if params.top_p < 1:
        total, before, kept = sum(weight[token] for token in order), 0.0, []
        for token in order:
            if kept and before >= params.top_p * total:
                break
            kept.append(token)
            before += weight[token]
        order = kept
    return {token for token in order if weight[token] >= params.min_p}


def sample_sharded(size: int, logits, keys, positions, params) -> SamplerOutput:
    def draw(group):
        own = VocabularySlice(group, logits.shape[1])
        return sample_tokens(sliced(logits, own), keys, positions, params, own)

    drawn, *others = on_every_rank(host_groups(size), draw)
    for other in others:
        assert torch.equal(other.per_token(), drawn.per_token())
    return drawn


def sample_in_triton(logits, keys, positions, params) -> SamplerOutput:
    from hybrid.kernels.triton_sampling import sample, sampling_features, values_of_rows
    from hybrid.sampling.params import RowParams

    table = RowParams.of(params).table
    values = values_of_rows(table, None, len(keys), "cpu")
    return SamplerOutput(*sample(logits, keys, positions, values, sampling_features(table)))


@pytest.fixture(params=["torch", "kernels", "slices in kernels", "slices in torch", "triton"])
def sampler(request, monkeypatch):
    if request.param == "triton":
        if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
            pytest.skip("Triton's interpreter runs where triton is installed and no GPU is")
        return sample_in_triton
    if request.param == "slices in torch":
        monkeypatch.setattr(HostGroup, "shares_memory", False)
    by_slices = lambda *args: sample_sharded(3, *args)  # noqa: E731
    return {"torch": sample_tokens_in_torch, "kernels": sample_tokens}.get(request.param, by_slices)


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_gives_the_tokens_that_were_kept(way, sampler):
    """The set, ties included, and with it the normaliser of the sampler's own logprob."""
    params, logits = WAYS[way], logits_of()
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    drawn = sampler(logits, keys, positions, params)
    mask = drawn.sampling_mask.long()
    assert torch.equal(mask.float(), drawn.sampling_mask)
    masked = masked_logits(logits, drawn.tokens, mask)
    for row, token in enumerate(drawn.tokens.tolist()):
        kept = set((masked[row] > -torch.inf).nonzero().flatten().tolist())
        assert token in kept
        assert kept == kept_tokens(logits[row].double().tolist(), params), row
        assert (mask[row] == token) == (len(kept) == 1)
    logps = torch.log_softmax(masked.double() / params.temperature, dim=-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.sampling_logps.double(), logps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", [params_of(0.7), params_of(0)], ids=["plain", "greedy"])
def test_a_draw_that_was_not_truncated_has_no_mask(params, sampler):
    logits, keys = logits_of(), torch.randint(2**62, (ROWS,))
    drawn = sampler(logits, keys, torch.arange(ROWS), params)
    assert (drawn.sampling_mask == NOT_TRUNCATED).all()
    assert torch.equal(masked_logits(logits, drawn.tokens, drawn.sampling_mask.long()), logits)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_scores_under_a_mask_equal_the_samplers_logprobs_to_the_bit(way, size):
    """On CPUs, whole or from slices of the vocabulary; the entropy is that of the kept tokens."""
    params, logits = WAYS[way], logits_of(33_000 if way == "top_p" else VOCABULARY)
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    if size == 1:
        drawn = sample_tokens(logits, keys, positions, params)
        scored = [score_tokens(logits, drawn.tokens, params.temperature, None, drawn.sampling_mask.long())]
    else:
        drawn = sample_sharded(size, logits, keys, positions, params)

        def score(group):
            own = VocabularySlice(group, logits.shape[1])
            mask = drawn.sampling_mask.long()
            return score_tokens(sliced(logits, own), drawn.tokens, params.temperature, own, mask)

        scored = on_every_rank(host_groups(size), score)
    masked = masked_logits(logits, drawn.tokens, drawn.sampling_mask.long()).double() / params.temperature
    probabilities = masked.softmax(-1)
    expected = torch.distributions.Categorical(probs=probabilities).entropy()
    for logps, entropies in scored:
        assert torch.equal(logps, drawn.sampling_logps)
        torch.testing.assert_close(entropies.double(), expected, rtol=1e-5, atol=1e-5)


def test_later_logits_keep_the_sampled_token_and_those_above_the_edge():
    """Also where the sampled token has become the least probable of all."""
    logits, token = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
    kept = lambda later, edge: (masked_logits(later, token, torch.tensor([edge]))[0] > -torch.inf).tolist()  # noqa: E731
    assert kept(logits, 1) == [True, True, True, False]
    assert kept(logits * 7 + 3, 1) == [True, True, True, False]
    assert kept(torch.tensor([[4.0, 3.0, -9.0, 1.0]]), 1) == [True, True, True, False]
    assert kept(torch.tensor([[4.0, 3.0, -9.0, 1.0]]), 2) == [False, False, True, False]
    assert kept(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), 1) == [False, True, True, True]
