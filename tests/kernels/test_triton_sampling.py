"""Sampling in Triton equals Hugging Face's processors and an inverse CDF, both in float64.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one, compiled, on the device.
"""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from transformers.generation import logits_process as processes

from hybrid.sampling.params import RowParams, SamplingParams, warpers_of
from hybrid.sampling.sampler import sample_tokens, stream_keys, uniform
from tests.sampling_params import params_of

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
from hybrid.kernels import triton_sampling
from hybrid.kernels.triton_sampling import (
    CHUNK,
    SUB,
    TILE,
    SamplingFeatures,
    sample,
    sampling_features,
    values_of_rows,
)
from tests.invalid_logits import with_invalid_rows
from tests.kernels.test_triton import DEVICE, close
from tests.marks import slow_but

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
STOPS = (3, 8)
EVERYTHING = SamplingFeatures(True, True, True, True, True)
# float32's sums over a row leave the boundaries between tokens within 1e-6 of float64's.
BOUNDARY = 1e-6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def keys_of(count: int) -> torch.Tensor:
    return stream_keys(5, torch.arange(count), torch.zeros(count, dtype=torch.long)).to(DEVICE)


def seen_tokens(rows: int, vocab: int) -> torch.Tensor:
    """Every second token or so.  uint8 [rows, vocab]"""
    return (torch.rand(rows, vocab) < 0.5).to(DEVICE, torch.uint8)


def draw(logits, keys, positions, params: SamplingParams | list[SamplingParams], seen=None, features=None):
    """`sample`, with the features that `params`, of all rows or of each, need."""
    of_rows = RowParams.of(params, DEVICE)
    features = features or sampling_features(of_rows.table)
    values, stops = values_of_rows(of_rows.table, of_rows.index, len(keys), DEVICE), torch.tensor(STOPS, device=DEVICE)
    return sample(logits, keys, positions, values, features, seen, stops)


def before_temperature(metadata: SamplingParams, logits: torch.Tensor, seen, position: int) -> torch.Tensor:
    """Hugging Face's scores after repetition penalty and min_new_tokens.  logits [1, vocab], seen [vocab] or None"""
    prompt, steps = torch.zeros(1, 0, dtype=torch.long), processes.LogitsProcessorList()
    if metadata.repetition_penalty != 1:
        prompt = seen.cpu().nonzero().T
        steps.append(processes.RepetitionPenaltyLogitsProcessor(float(metadata.repetition_penalty)))
    if metadata.min_new_tokens:
        stops = torch.tensor(STOPS)
        steps.append(processes.MinNewTokensLengthLogitsProcessor(prompt.shape[1], metadata.min_new_tokens, stops))
    completion = prompt[:, :1].expand(1, position) if prompt.numel() else torch.zeros(1, position, dtype=torch.long)
    ids = torch.cat([prompt, completion], dim=1)
    return steps(ids, logits)


def truncated(metadata: SamplingParams, scores: torch.Tensor) -> torch.Tensor:
    """Hugging Face's scores after temperature and truncations.  scores [1, vocab]

    Its top-p sorts without stability, so that ties at the edge are kept at random. With a stable sort the higher of two
    equal tokens is the more probable, as on the CPU.
    """
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=True)):
        return warpers_of(metadata)(None, scores)


def check(logits, keys, positions, metadata: SamplingParams, seen=None, features=None) -> torch.Tensor:
    """A draw is where the cumulative softmax of Hugging Face's scores, in float64, passes u. Returns the tokens."""
    drawn = draw(logits, keys, positions, metadata, seen, features)
    temperature = metadata.temperature or 1.0
    for row, (token, sampling, old, raw, _) in enumerate(zip(*(part.cpu() for part in drawn), strict=True)):
        exact = logits[row : row + 1].cpu().double()
        position = int(positions[row])
        scores = before_temperature(metadata, exact, None if seen is None else seen[row], position)
        if metadata.temperature == 0:
            assert token == scores.argmax()
        else:
            scores = truncated(metadata, scores)
            u, kept = uniform(keys[row : row + 1].cpu(), position), scores[0].softmax(-1)
            assert kept[token] > 0, "a token without probability"
            assert kept[: token + 1].sum() > u - BOUNDARY
            assert kept[:token].sum() <= u + BOUNDARY
        close(sampling, scores.log_softmax(-1)[0, token])
        close(old, (exact / temperature).log_softmax(-1)[0, token])
        close(raw, exact.log_softmax(-1)[0, token])
    return drawn[0]


SETTINGS = {
    "plain": params_of(0.7),
    "top_k": params_of(1.3, top_k=4),
    "top_k over the subs": params_of(top_k=100),
    "top_p": params_of(0.8, top_p=0.8),
    "narrow top_p": params_of(top_p=0.05),
    "min_p": params_of(1.3, min_p=0.05),
    "top_k and top_p": params_of(0.9, top_k=20, top_p=0.7),
    "all truncations": params_of(1.2, top_k=30, top_p=0.95, min_p=0.02),
    "repetition_penalty": params_of(1.0, repetition_penalty=1.7),
    "reward of repetition": params_of(1.0, repetition_penalty=0.6),
    "min_new_tokens": params_of(0.5, min_new_tokens=3),
    "all": params_of(0.9, 30, 0.9, 0.02, 1.4, 3),
    "greedy": params_of(0.0),
    "greedy, processed": params_of(0.0, repetition_penalty=1.4, min_new_tokens=3),
}
VOCABULARIES = (11, CHUNK, 3 * CHUNK + 77)
QUICK = [
    (setting, 11) for setting in ("top_k", "top_p", "repetition_penalty", "reward of repetition", "greedy, processed")
]
QUICK += [("min_new_tokens", CHUNK), ("top_k over the subs", CHUNK)]
QUICK += [(setting, VOCABULARIES[2]) for setting in ("plain", "top_k and top_p", "min_p", "all")]


@pytest.mark.parametrize(
    ("setting", "vocab"),
    slow_but(QUICK, [*((setting, vocab) for setting in SETTINGS for vocab in VOCABULARIES), ("all", 151936)]),
)
def test_the_token_is_where_the_cumulative_softmax_of_hugging_faces_scores_passes_u(setting, vocab):
    """At positions below min_new_tokens and above; every third logit is -inf, as processors leave them."""
    logits = torch.randn(6, vocab) * 3
    logits[:, ::3] = -math.inf
    logits[:, 8] = logits.max() + 1  # a stop token
    positions = torch.tensor([0, 1, 2, 3, 4, 4095], device=DEVICE)
    tokens = check(logits.to(DEVICE), keys_of(6), positions, SETTINGS[setting], seen_tokens(6, vocab))
    if SETTINGS[setting].min_new_tokens:
        assert not (set(tokens[:3].tolist()) & set(STOPS))


@pytest.mark.parametrize(
    "setting",
    slow_but(
        ["top_k", "all truncations"],
        ["top_k", "top_k over the subs", "top_p", "narrow top_p", "min_p", "top_k and top_p", "all truncations"],
    ),
)
def test_ties_are_those_of_hugging_face(setting):
    """Logits of 12 values: top-k keeps the ties of the k-th; of the ties at top-p's edge the higher tokens are kept."""
    logits = (torch.randn(12, 300) * 2).round().to(DEVICE)
    check(logits, keys_of(12), torch.arange(12, device=DEVICE), SETTINGS[setting])


@pytest.mark.parametrize("vocab", slow_but([11, 3 * CHUNK + 77], [11, 3 * CHUNK + 77, 151936]))
def test_top_p_of_equal_logits_keeps_the_last_tokens(vocab):
    """The smallest number with 0.9 of the mass: u then selects by a division."""
    keys = keys_of(3)
    tokens, sampling, *_ = draw(
        torch.full((1, vocab), 7.25, device=DEVICE).expand(3, vocab),
        keys,
        torch.arange(3, device=DEVICE),
        params_of(top_p=0.9),
    )
    kept = math.ceil(0.9 * vocab)
    expected = vocab - kept + (uniform(keys.cpu(), torch.arange(3)) * kept).long()
    assert (tokens.cpu() - expected).abs().max() <= vocab * BOUNDARY
    close(sampling, torch.full((3,), -math.log(kept)))


@pytest.mark.parametrize(
    ("top_k", "top_p"), slow_but([(0, 0.9), (5000, 0.99)], [(0, 0.9), (5000, 0.99), (5000, 1.0), (0, 0.9999)])
)
def test_thresholds_among_more_logits_than_a_tile(top_k, top_p):
    """Flat rows, of both signs and of neighbouring floats, whose interval takes several passes to hold TILE keys."""
    assert 3 * CHUNK + 77 > TILE
    rows = torch.randn(3, 3 * CHUNK + 77) * torch.tensor([[1e-3], [1.0], [2e-7]])
    rows[2] += 1.0  # the three or four floats next to 1: thousands of ties
    check(rows.to(DEVICE), keys_of(3), torch.arange(3, device=DEVICE), params_of(1.0, top_k, top_p))


HUGE = {
    "massive": lambda row: row * 1e4,
    "one massive": lambda row: row.index_fill(0, torch.tensor([5]), 1e4),
    "one token": lambda row: torch.full_like(row, -math.inf).index_fill(0, torch.tensor([9]), -2.0),
    "least float": lambda row: row.masked_fill(torch.arange(len(row)) % 2 == 0, torch.finfo(torch.float32).min),
    "zeros of both signs": lambda row: row.sign() * 0.0,
}


@pytest.mark.parametrize("magnitude", HUGE)
def test_peaked_and_massive_rows(magnitude):
    row = HUGE[magnitude](torch.randn(300)).to(DEVICE)
    for metadata in (params_of(0.7, 20, 0.9, 0.01), params_of(top_p=1e-6)):
        check(row.expand(2, 300), keys_of(2), torch.arange(2, device=DEVICE), metadata)


def test_values_that_turn_features_off():
    """With all features compiled: top_k 0 or beyond the vocabulary, top_p 1, ..., temperature 0: one graph for all."""
    logits, keys, positions = torch.randn(3, 300).to(DEVICE), keys_of(3), torch.arange(3, device=DEVICE)
    seen = seen_tokens(3, 300)
    for metadata in (
        params_of(0.8),
        params_of(0.8, top_k=300),
        params_of(0.8, top_k=7),
        params_of(0.8, top_p=0.4),
        params_of(0.8, min_p=0.2),
        params_of(0.8, repetition_penalty=1.5),
        params_of(0.0, 7, 0.4, 0.2),
    ):
        everything = draw(logits, keys, positions, metadata, seen, EVERYTHING)
        for actual, expected in zip(everything, draw(logits, keys, positions, metadata, seen), strict=True):
            assert torch.equal(actual, expected) or DEVICE == "cuda"
            close(actual.float(), expected.float())


def test_launches_depend_on_shapes_alone(monkeypatch):
    """Two launches for every setting, and with one set of features the same grids and constants for every value."""
    launches = []

    class Recorded:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **constants: launches.append(
                (self.name, grid, constants, [arg for arg in args if isinstance(arg, int)])
            )

    for name in ("_sums_kernel", "_draw_kernel"):
        monkeypatch.setattr(triton_sampling, name, Recorded(name))
    logits, keys, seen = torch.randn(3, 300).to(DEVICE), keys_of(3), seen_tokens(3, 300)
    for metadata in SETTINGS.values():
        draw(logits, keys, torch.arange(3, device=DEVICE), metadata, seen, EVERYTHING)
    assert len(launches) == 2 * len(SETTINGS)
    assert all(launch == launches[index % 2] for index, launch in enumerate(launches))


def test_uniform_numbers_match_the_host():
    """With equal logits the token is floor(u * vocab), for keys with and without the highest bit."""
    vocab = 2048  # a power of two: the cumulative sums are exact
    keys = stream_keys(-3, torch.arange(32), torch.arange(32)).to(DEVICE)
    assert (keys < 0).any() and (keys > 0).any()
    positions = (torch.arange(32, device=DEVICE) * 37).int()
    tokens, *_ = draw(torch.zeros(1, vocab, device=DEVICE).expand(32, vocab), keys, positions, params_of())
    assert torch.equal(tokens, (uniform(keys, positions.long()) * vocab).long())


def test_temperature_zero_takes_the_first_of_equal_maxima():
    logits = torch.randn(4, CHUNK + 500).to(DEVICE)
    logits[0, [5, CHUNK + 3]] = 9.0
    logits[1, [CHUNK + 7, CHUNK + 9]] = 9.0
    keys = torch.arange(4, device=DEVICE)
    tokens, sampling, old, raw, _ = draw(logits, keys, keys, params_of(0.0))
    assert torch.equal(old, raw)
    assert tokens.tolist() == [5, CHUNK + 7, int(logits[2].argmax()), int(logits[3].argmax())]
    assert torch.equal(sampling, raw)
    close(raw, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_a_row_of_sampling_is_identical_in_every_batch(setting):
    """Bit for bit, also where rows are a part of wider ones."""
    logits, seen = torch.randn(6, 2 * CHUNK + 1).to(DEVICE), seen_tokens(6, 2 * CHUNK + 1)
    keys, positions = keys_of(6), torch.arange(6, device=DEVICE)
    order = torch.tensor([3, 0, 5], device=DEVICE)
    wide = torch.cat([logits[order], torch.full((3, SUB), 99.0, device=DEVICE)], dim=1)[:, : 2 * CHUNK + 1]
    metadata = SETTINGS[setting]
    all_rows = draw(logits, keys, positions, metadata, seen)
    part = draw(wide, keys[order], positions[order], metadata, seen[order].bool())
    for expected, actual in zip(all_rows, part, strict=True):
        assert torch.equal(expected[order], actual)


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_logits_of_16_bits_are_sampled_as_in_float32(setting):
    """Bit for bit: they are converted as they are read."""
    logits, seen = torch.randn(4, CHUNK + 11).to(DEVICE, torch.bfloat16), seen_tokens(4, CHUNK + 11)
    drawn = keys_of(4), torch.arange(4, device=DEVICE), SETTINGS[setting], seen
    for actual, expected in zip(draw(logits, *drawn), draw(logits.float(), *drawn), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_rows_of_different_settings_are_each_sampled_as_alone():
    """The kernels, compiled for the features of all rows, against those compiled for a row's own."""
    rows, vocab = len(SETTINGS), CHUNK + 1
    logits, seen = torch.randn(rows, vocab).to(DEVICE), seen_tokens(rows, vocab)
    keys, positions = keys_of(rows), torch.arange(rows, device=DEVICE) % 5
    together = draw(logits, keys, positions, list(SETTINGS.values()), seen)
    for row, params in enumerate(SETTINGS.values()):
        one = slice(row, row + 1)
        token, *logps = draw(logits[one], keys[one], positions[one], params, seen[one])
        assert torch.equal(together[0][one], token), params
        for actual, expected in zip(together[1:], logps, strict=True):
            torch.testing.assert_close(actual[one], expected, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("count", slow_but([24], [24, 400]))
def test_tokens_are_those_of_the_cpu(count):
    """All settings against `sample_tokens` on the CPU, which gets processed logits.

    Tokens differ where u * mass is within rounding of a boundary. The CPU sums in float64, we in float32 within 128
    tokens; weights differ by about 1e-6 each. With 30 tokens or fewer, as here, u lies so close to one of the
    boundaries once in more than 30,000 draws: we ask for no difference.
    """
    metadata = SETTINGS["all"]
    logits, seen = torch.randn(count, 700) * 3, seen_tokens(count, 700)
    keys, positions = keys_of(count), torch.arange(count, device=DEVICE)
    tokens, sampling, *_ = draw(logits.to(DEVICE), keys, positions, metadata, seen)
    processed = torch.cat(
        [before_temperature(metadata, row[None], seen[i], i) for i, row in enumerate(logits.unbind())]
    )
    truncations = params_of(metadata.temperature, metadata.top_k, metadata.top_p, metadata.min_p)
    expected = sample_tokens(processed, keys.cpu(), positions.cpu(), truncations)
    assert (tokens.cpu() != expected.tokens).sum() == 0
    close(sampling, expected.sampling_logps)


def test_features_and_values_of_settings():
    assert sampling_features(RowParams.of(params_of()).table) == SamplingFeatures()
    assert sampling_features(RowParams.of(SETTINGS["all"]).table) == EVERYTHING
    greedy = RowParams.of(params_of(0.0, 7, 0.5, 0.1, 1.2, 4))
    assert sampling_features(greedy.table) == SamplingFeatures(repetition_penalty=True, min_new_tokens=True)
    values = values_of_rows(RowParams.of(params_of(0.9, 30, 0.5, 0.25, 1.5, 3)).table, None, 1, DEVICE)[0]
    assert torch.equal(values.cpu(), torch.tensor([0.9, 30, 0.5, 0.25, 1.5, 3]))


def test_inputs_of_the_features_are_required():
    logits, keys = torch.randn(2, 50).to(DEVICE), keys_of(2)
    with pytest.raises(AssertionError, match="seen"):
        draw(logits, keys, keys, SETTINGS["repetition_penalty"])
    with pytest.raises(AssertionError, match="stop_token_ids"):
        values = values_of_rows(RowParams.of(SETTINGS["min_new_tokens"]).table, None, 2, DEVICE)
        sample(logits, keys, keys, values, EVERYTHING, seen_tokens(2, 50))


INVALID_WAYS = {
    "greedy": params_of(temperature=0),
    "cold": params_of(temperature=0.3),
    "top_k": params_of(top_k=40),
    "top_p": params_of(top_p=0.9),
    "min_p": params_of(min_p=0.05),
    "all": params_of(0.8, 40, 0.9, 0.02, repetition_penalty=1.2, min_new_tokens=2),
}


@pytest.mark.parametrize("way", INVALID_WAYS)
def test_rows_without_a_softmax_get_logprobs_of_nan(way):
    """Maxima leave out NaN, on a device and in the interpreter."""
    metadata, vocab = INVALID_WAYS[way], 3 * CHUNK + 77
    logits = torch.randn(15, vocab)
    logits[0, 1:] = -math.inf
    broken, invalid = with_invalid_rows(logits)
    seen = seen_tokens(15, vocab) if metadata.repetition_penalty != 1 else None
    positions = torch.full((15,), 5)
    tokens, *logps = draw(broken.to(DEVICE), keys_of(15), positions.to(DEVICE), metadata, seen)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert logps[0].isnan().nonzero().flatten().tolist() == invalid
    for of_model in logps[1:3]:
        assert of_model[invalid].isnan().all()
    expected = draw(logits.to(DEVICE), keys_of(15), positions.to(DEVICE), metadata, seen)
    valid = [row for row in range(15) if row not in invalid]
    for value, expected_value in zip((tokens, *logps), expected, strict=True):
        assert torch.equal(value[valid], expected_value[valid])
