"""Sampling and scoring from slices of the vocabulary equal those from all logits."""

import pytest
import torch
from torch.nn import functional as F

from hybrid.kernels.host_group import HostGroup
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import sample_tokens, score_tokens
from hybrid.sampling.vocabulary import VocabularySlice
from tests.host_groups import host_groups, on_every_rank
from tests.invalid_logits import with_invalid_rows
from tests.sampling_params import params_of

ROWS = 24
WAYS = {
    "greedy": params_of(temperature=0),
    "plain": params_of(),
    "cold": params_of(temperature=0.3),
    "top_k": params_of(temperature=0.8, top_k=20),
    "top_k of all": params_of(top_k=10**6),
    "top_p": params_of(temperature=1.2, top_p=0.9),
    "narrow top_p": params_of(top_p=0.05),
    "min_p": params_of(min_p=0.05),
    "all": params_of(temperature=0.9, top_k=50, top_p=0.8, min_p=0.02),
}
WAYS["by row"] = RowParams.of(
    [WAYS[way] for way in ("all", "greedy", "plain", "top_k", "top_p", "min_p")] * (ROWS // 6)
)


def logits_of(vocabulary: int) -> torch.Tensor:
    """Rows of different spread, with ties and tokens of probability 0."""
    logits = torch.randn(ROWS, vocabulary) * torch.linspace(0.1, 8, ROWS)[:, None]
    logits[3] = logits[3].round()
    logits[4] = 0.0
    logits[5, ::3] = -torch.inf
    logits[6, vocabulary // 2 :] = -torch.inf  # a rank has nothing
    logits[7, : vocabulary // 2] = -torch.inf
    return logits


def sliced(logits: torch.Tensor, vocabulary: VocabularySlice) -> torch.Tensor:
    """A rank's columns; those after the end of the vocabulary, as a decoder computes them from zero weights."""
    own = logits[:, vocabulary.first : vocabulary.first + vocabulary.count]
    return F.pad(own, (0, vocabulary.width - vocabulary.count)).contiguous()


@pytest.fixture(params=["kernels", "torch"])
def implementation(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(HostGroup, "shares_memory", False)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("size", "vocabulary"), [(2, 1000), (3, 1000), (2, 33000), (3, 4)])
@pytest.mark.parametrize("way", list(WAYS))
def test_draws_equal_those_from_whole_logits(way, size, vocabulary):
    metadata, logits = WAYS[way], logits_of(vocabulary)
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    expected = sample_tokens(logits, keys, positions, metadata)

    def draw(group):
        own = VocabularySlice(group, vocabulary)
        return sample_tokens(sliced(logits, own), keys, positions, metadata, own)

    for drawn in on_every_rank(host_groups(size), draw):
        assert torch.equal(drawn.tokens, expected.tokens)
        for name in ("sampling_logps", "old_logps", "raw_logps"):
            torch.testing.assert_close(getattr(drawn, name), getattr(expected, name), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("size", "vocabulary"), [(2, 1000), (3, 4)])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_slice_with_invalid_logits_gives_nan_on_every_rank(way, size, vocabulary):
    metadata, (logits, invalid) = WAYS[way], with_invalid_rows(logits_of(vocabulary))
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    expected = sample_tokens(logits, keys, positions, metadata)

    def draw(group):
        own = VocabularySlice(group, vocabulary)
        drawn = sample_tokens(sliced(logits, own), keys, positions, metadata, own)
        return drawn, score_tokens(sliced(logits, own), positions % vocabulary, 1.3, own)

    valid, tokens = [row for row in range(ROWS) if row not in invalid], []
    for drawn, scores in on_every_rank(host_groups(size), draw):
        for values in (*drawn.per_token()[:3], *scores):
            assert values.isnan().nonzero().flatten().tolist() == invalid
        assert torch.equal(drawn.tokens[valid], expected.tokens[valid])
        assert ((drawn.tokens >= 0) & (drawn.tokens < vocabulary)).all()
        tokens.append(drawn.tokens)
    assert all(torch.equal(tokens[0], own) for own in tokens)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("size", "vocabulary"), [(2, 1000), (3, 1001), (3, 4)])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_scores_equal_those_from_whole_logits(size, vocabulary, temperature):
    logits = logits_of(vocabulary)
    targets = torch.where(torch.arange(ROWS) == 6, 0, vocabulary - 1)
    expected = score_tokens(logits, targets, temperature)

    def score(group):
        own = VocabularySlice(group, vocabulary)
        return score_tokens(sliced(logits, own), targets, temperature, own)

    for scores in on_every_rank(host_groups(size), score):
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_whole_logits_are_the_slices_in_order():
    logits = logits_of(1001)

    def gather(group):
        own = VocabularySlice(group, 1001)
        return own.whole(sliced(logits, own))

    for whole in on_every_rank(host_groups(3), gather):
        assert torch.equal(whole, logits)


@pytest.mark.parametrize("count", [1, 5, 6])  # fewer than ranks, not a multiple of them, and one
def test_each_rank_gets_whole_logits_of_its_rows(count):
    logits = logits_of(1001)[:count]

    def exchanged(group):
        own = VocabularySlice(group, 1001)
        return own.divided(count, logits.device), *own.whole_of_own_rows(sliced(logits, own))

    for index, (rows, own_rows, whole) in enumerate(on_every_rank(host_groups(3), exchanged)):
        assert torch.equal(own_rows, rows[index]) and torch.equal(whole, logits[own_rows])
        assert rows.flatten()[:count].tolist() == list(range(count)) and rows.shape[1] == -(-count // 3)


def test_torch_s_truncated_draws_exchange_a_part_of_the_logits(monkeypatch):
    """Each rank gets the logits of its own rows: as many bytes as its slices; a gather takes `size` times those."""
    monkeypatch.setattr(HostGroup, "shares_memory", False)
    logits, received = torch.randn(ROWS, 64000), []
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    for name, of_ranks in (("exchange", 1), ("gather", 3)):
        own = getattr(HostGroup, name)

        def counted(group, tensor, own=own, of_ranks=of_ranks):
            received.append(tensor.nbytes * of_ranks)
            return own(group, tensor)

        monkeypatch.setattr(HostGroup, name, counted)

    def draw(group):
        own = VocabularySlice(group, 64000)
        return sample_tokens(sliced(logits, own), keys, positions, WAYS["all"], own)

    on_every_rank(host_groups(3), draw)
    assert ROWS * 64000 * 4 / 3 <= max(received) <= 1.01 * ROWS * 64000 * 4 / 3


@pytest.mark.parametrize("way", ["plain", "top_p", "all"])
def test_ranks_exchange_less_than_logits(way):
    """Sums and candidates of a large vocabulary: a few bytes a row for plain draws, a few tokens for truncated ones."""
    logits, sent = torch.randn(ROWS, 64000) * 6, []
    keys, positions = torch.randint(2**62, (ROWS,)), torch.arange(ROWS)
    groups = host_groups(2)

    def draw(group):
        own, before = VocabularySlice(group, 64000), group.record.round
        sample_tokens(sliced(logits, own), keys, positions, WAYS[way], own)
        sent.append(group.record.round - before)

    on_every_rank(groups, draw)
    whole = ROWS * 32000 * 4 / (4 * groups[0].record.capacity)  # rounds that the logits would take
    assert max(sent) <= (2 if way == "plain" else whole)
