"""Rows packed for training: prefixes stored once, and what each token sees."""

import pytest
import torch

from hybrid.training.packed_attention import PackedAttention
from hybrid.training.packing import BLOCK, pack_rows
from tests.training.grouped_rows import grouped_rows

WINDOWS = [None, 1, 4, 7, 1000]


def visible(ids: torch.Tensor, mask: torch.Tensor, window: int | None) -> list[set[tuple[int, ...]]]:
    """For each packed token of rows packed without a minimum, the prefixes, as tuples of ids, that it sees: from the
    definition, row by row."""
    packed = pack_rows(ids, mask, mask.bool(), min_shared=1)
    seen: list[set] = [set() for _ in range(packed.num_tokens)]
    for row in range(len(ids)):
        places = [place for place in packed.index[row].tolist() if place >= 0]
        tokens = ids[row][mask[row].bool()].tolist()
        for position, place in enumerate(places):
            first = 0 if window is None else max(0, position - window + 1)
            seen[place] = {tuple(tokens[: key + 1]) for key in range(first, position + 1)}
    return seen


@pytest.mark.parametrize("window", WINDOWS)
def test_a_token_sees_its_own_prefix(window):
    ids, mask, _ = grouped_rows(0)
    packed = pack_rows(ids, mask, mask.bool(), min_shared=1)
    prefix_of = {}
    for row in range(len(ids)):
        tokens = ids[row][mask[row].bool()].tolist()
        for position, place in enumerate(place for place in packed.index[row].tolist() if place >= 0):
            prefix_of[place] = tuple(tokens[: position + 1])
            assert packed.input_ids[0, place] == tokens[position] and packed.position_ids[0, place] == position
    assert len(set(prefix_of.values())) == packed.num_tokens == len(prefix_of), "a prefix is stored twice, or never"
    expected = visible(ids, mask, window)
    whole = packed.mask(slice(0, packed.num_tokens), window)
    by_calls = torch.zeros_like(whole, dtype=torch.int64)
    for call in packed.attention_calls(window):
        queries, keys = call.queries.stop - call.queries.start, call.keys.stop - call.keys.start
        part = torch.ones(queries, keys, dtype=torch.int64)
        part = part.tril() if call.is_causal else part
        by_calls[call.queries, call.keys] += part if call.mask is None else part * call.mask
        assert call.hidden is None or torch.equal(call.hidden, ~call.mask.any(dim=1))
    assert torch.equal(by_calls, whole.long()), "the calls do not cover each pair once"
    for place, keys in enumerate(whole):
        assert {prefix_of[key] for key in keys.nonzero().flatten().tolist()} == expected[place]
    for tokens in packed.trees():
        assert whole[tokens].sum() == whole[tokens, tokens].sum(), "a tree sees another"


def test_prefixes_of_a_group_are_stored_once():
    """8 completions of 64 tokens of one prompt of 512: the prompt once, and no token that nothing follows."""
    prompt, completions = torch.randint(3, 97, (1, 512)), torch.randint(3, 97, (8, 64))
    completions[:, 0] = torch.arange(8)  # they differ from their first token on
    ids = torch.cat([prompt.expand(8, -1), completions], dim=1)
    packed = pack_rows(ids, torch.ones_like(ids), torch.ones_like(ids).bool())
    assert packed.num_tokens == 512 + 8 * 63
    assert len(packed.segments) == 9 and packed.segments[0].subtree_stop == packed.num_tokens


def test_a_short_prefix_is_not_stored_once():
    """A segment costs attention calls in every layer: below the minimum tokens are computed again."""
    ids = torch.randint(3, 97, (4, 30))
    ids[:, :10] = ids[0, :10]
    packed = pack_rows(ids, torch.ones_like(ids), torch.ones_like(ids).bool(), min_shared=11)
    assert packed.num_tokens == 4 * 29 and len(packed.segments) == 4
    assert pack_rows(ids, torch.ones_like(ids), torch.ones_like(ids).bool(), min_shared=10).num_tokens == 10 + 4 * 19


def test_rows_that_extend_a_row_share_it():
    """An agent's rows: each turn's row is the next one's prefix; a fork leaves in the middle of a turn."""
    first = torch.randint(3, 97, (40,))
    second, third = (
        torch.cat([first, torch.randint(3, 97, (30,))]),
        torch.cat([first[:25], torch.randint(3, 97, (30,))]),
    )
    rows = [first, second, third]
    ids = torch.zeros(3, 70, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    mask = (torch.arange(70) < torch.tensor([[40], [70], [55]])).long()
    packed = pack_rows(ids, mask, mask.bool())
    assert packed.num_tokens == 69 + 29, "the first row and the beginning of the third are in the second"
    assert packed.index[0, :39].tolist() == packed.index[1, :39].tolist()


def test_tokens_that_no_target_needs_are_left_out():
    ids, mask = torch.randint(3, 97, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
    targets = torch.zeros(3, 12, dtype=torch.bool)
    targets[0, 5], targets[1, 11] = True, True
    packed = pack_rows(ids, mask, targets)
    assert packed.num_tokens == 5 + 11 and (packed.index[2] == -1).all()
    nothing = pack_rows(ids, mask, torch.zeros_like(targets))
    assert nothing.num_tokens == 1 and (nothing.index == -1).all(), "a rank without targets runs the collectives"


def attention_of_each_token(query, key, value, mask, scale, sinks, softcap):
    """The formula, in float64, for all tokens at once.  [1, heads, tokens, dim]"""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : key.shape[2]] @ value


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_and_its_gradients_match_the_formula(window, with_sinks, softcap):
    """Fewer key-value heads than query heads, values narrower than keys, transposed views as a model gives them."""
    ids, mask, _ = grouped_rows(1)
    packed = pack_rows(ids, mask, mask.bool(), min_shared=1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, packed.num_tokens, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 8))]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, generator=generator).requires_grad_() if with_sinks else None
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    settings = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    output, _ = PackedAttention(packed)(torch.nn.Module(), query, key, value, None, **settings)
    seen = packed.mask(slice(0, packed.num_tokens), window)
    expected = attention_of_each_token(query, key, value, seen, 0.3, sinks, softcap).transpose(1, 2)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)
    weights = torch.randn(output.shape, generator=generator)
    leaves = [*tensors, *([sinks] if with_sinks else [])]
    actual_grads = torch.autograd.grad((output * weights).sum(), leaves)
    for actual, wanted in zip(actual_grads, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(actual, wanted, atol=5e-6, rtol=1e-5)


def test_long_segments_are_computed_in_blocks():
    """A window over a segment of several blocks, and over keys of the segment above that only some queries see."""
    ids = torch.randint(3, 97, (2, 3 * BLOCK))
    ids[1, : BLOCK + 40] = ids[0, : BLOCK + 40]
    mask = torch.ones_like(ids)
    packed = pack_rows(ids, mask, mask.bool())
    query, key, value = (torch.randn(1, 2, packed.num_tokens, 16) for _ in range(3))
    output, _ = PackedAttention(packed)(torch.nn.Module(), query, key, value, None, sliding_window=100)
    expected = attention_of_each_token(
        query, key, value, packed.mask(slice(0, packed.num_tokens), 100), 0.25, None, None
    )
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), atol=2e-6, rtol=0)
    assert max(call.mask.numel() for call in packed.attention_calls(100) if call.mask is not None) < 512 * 512


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": torch.zeros(1)}, "adds a mask or a bias"),
        ({"position_bias": torch.zeros(1)}, "adds a mask or a bias"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"tokens": 3}, "other tokens"),
    ],
)
def test_attention_of_another_kind_is_refused(change, reason):
    ids = torch.randint(3, 97, (1, 8))
    packed = pack_rows(ids, torch.ones_like(ids), torch.ones_like(ids).bool())
    tokens = change.pop("tokens", 7)
    query = torch.randn(1, 2, tokens, 8)
    arguments = {"attention_mask": None, **change}
    with pytest.raises(NotImplementedError, match=reason):
        PackedAttention(packed)(torch.nn.Module(), query, query, query, **arguments)
    reasons: list[str] = []
    output, _ = PackedAttention(packed, reasons)(torch.nn.Module(), query, query, query, **arguments)
    assert len(reasons) == 1 and reason in reasons[0] and not output.any()
