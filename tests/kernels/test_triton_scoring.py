"""Logprobs and entropies in Triton equal float64's, and the sampler's own logprobs.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one, compiled, on the device.
"""

import threading

import pytest
import torch

from hybrid.kernels.host_group import HostGroup
from hybrid.sampling import sampler
from hybrid.sampling.sampler import NOT_TRUNCATED, masked_logits, score_tokens, scores_of_sums

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.scoring import score_packed
from hybrid.kernels import triton_scoring
from hybrid.kernels.triton_sampling import CHUNK
from hybrid.kernels.triton_scoring import score, score_sums
from hybrid.sampling.vocabulary import VocabularySlice
from tests.decoders.test_cuda_decoder import cuda_decoder
from tests.host_groups import host_groups, on_every_rank
from tests.invalid_logits import with_invalid_rows
from tests.kernels.test_triton import DEVICE
from tests.kernels.test_triton_sampling import draw, keys_of
from tests.marks import slow_but
from tests.sampling.test_vocabulary_parallel import sliced
from tests.sampling_params import params_of
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
ROWS, WIDE = 14, 2 * CHUNK + 77
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of 128 tokens; on a device its approximate exp2


def logits_of(vocabulary: int) -> torch.Tensor:
    """Rows of different spread; half of them rounded as bfloat16 heads round, so that many logits are equal."""
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    logits *= torch.linspace(0.2, 6, ROWS)[:, None]
    logits[1::2] = (logits[1::2] * 4).round() / 4
    logits[5, ::3] = -torch.inf
    logits[6, : vocabulary // 2] += 1e4
    return logits.to(DEVICE)


def targets_of(vocabulary: int) -> torch.Tensor:
    """The first token, the last one and others."""
    targets = torch.randint(vocabulary, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets[:2] = torch.tensor([0, vocabulary - 1])
    return targets.to(DEVICE)


def exact_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64."""
    logps = (logits.double() / temperature).log_softmax(-1)
    return logps.gather(1, targets[:, None])[:, 0], torch.special.entr(logps.exp()).sum(-1)


def require_close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, **TOLERANCE)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", slow_but([1, 97, WIDE], [1, 97, CHUNK, WIDE, 151936]))
def test_scores_match_float64(vocabulary, temperature):
    logits, targets = logits_of(vocabulary), targets_of(vocabulary)
    logits[5, targets[5]] = 0.5
    require_close(score(logits, targets, temperature), exact_scores(logits, targets, temperature))
    assert [len(part) for part in score(logits[:0], targets[:0], temperature)] == [0, 0]


def test_a_target_without_mass_has_a_logprob_of_minus_infinity():
    logits, targets = logits_of(WIDE), targets_of(WIDE)
    targets[5] = 3
    logps, entropies = score(logits, targets, 1.0)
    assert logps[5] == -torch.inf and entropies.isfinite().all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_under_a_mask_are_of_the_tokens_that_it_keeps(temperature):
    """Edges among equal logits, the target itself as the edge, and rows without a mask."""
    logits, targets = logits_of(WIDE), targets_of(WIDE)
    logits[5, targets[5]] = 0.5
    order = logits.argsort(dim=-1, descending=True)
    edges = order.gather(1, (torch.arange(ROWS, device=DEVICE) * 3)[:, None])[:, 0]
    edges[3], edges[4], edges[5], edges[8] = NOT_TRUNCATED, targets[4], targets[5], order[8, -1]
    masked = masked_logits(logits, targets, edges)
    kept = (masked > -torch.inf).sum(dim=-1)
    assert kept.min() == 1 and kept.max() == WIDE and len(kept.unique()) > 6
    actual = score(logits, targets, temperature, edges)
    require_close(actual, exact_scores(masked, targets, temperature))
    assert actual[0][4] == actual[1][4] == 0, "a token that was the only one"


@pytest.mark.parametrize("masked", [False, True])
def test_rows_without_a_softmax_are_nan(masked):
    logits, invalid = with_invalid_rows(logits_of(WIDE).cpu())
    logits, targets = logits.to(DEVICE), torch.full((ROWS,), WIDE // 3, device=DEVICE)  # where a row has its +inf
    logits[5] = torch.nan
    edges = logits.nan_to_num(-torch.inf).argmax(dim=-1)
    edges[edges == targets] = 0
    logps, entropies = score(logits, targets, 0.7, edges if masked else None)
    for row in range(ROWS):
        assert (row in invalid) == bool(logps[row].isnan()) == bool(entropies[row].isnan()), row


def test_a_row_is_identical_in_every_batch():
    """Also where rows are a part of wider ones."""
    logits, targets = logits_of(WIDE), targets_of(WIDE)
    order = torch.tensor([3, 0, 6], device=DEVICE)
    wide = torch.cat([logits[order], torch.full((3, 5), 99.0, device=DEVICE)], dim=1)[:, :WIDE]
    for all_rows, part in zip(score(logits, targets, 0.7), score(wide, targets[order], 0.7), strict=True):
        assert torch.equal(all_rows[order], part)


@pytest.mark.parametrize("vocabulary", [97, WIDE])
def test_a_logprob_is_the_samplers_own(vocabulary):
    """To the bit in the interpreter; a compiler may contract products and sums of the two kernels otherwise."""
    logits = logits_of(vocabulary)
    tokens, _, old, *_ = draw(logits, keys_of(ROWS), torch.arange(ROWS, device=DEVICE), params_of(0.7))
    logps, _ = score(logits, tokens, 0.7)
    assert torch.equal(logps, old) if DEVICE == "cpu" else torch.allclose(logps, old, **TOLERANCE)


@pytest.mark.parametrize("vocabulary", [4, WIDE])
@pytest.mark.parametrize("slices", [1, 3])
def test_slices_of_the_vocabulary_give_the_scores_of_all_of_it(vocabulary, slices):
    """The last slice is narrower, or has no token at all; its columns after the vocabulary are not read."""
    logits, targets = logits_of(vocabulary), targets_of(vocabulary)
    logits[5, targets[5]] = 0.5
    width = -(-vocabulary // slices)
    padded = torch.cat([logits, torch.full((ROWS, slices * width - vocabulary), torch.nan, device=DEVICE)], dim=1)
    counts = [min(max(vocabulary - index * width, 0), width) for index in range(slices)]
    sums = [
        score_sums(padded[:, index * width : (index + 1) * width], targets, 0.7, index * width, count)
        for index, count in enumerate(counts)
    ]
    require_close(scores_of_sums(torch.stack(sums)), exact_scores(logits, targets, 0.7))


@pytest.mark.skipif(DEVICE == "cuda", reason="ranks in threads exchange host memory")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_slices_have_the_scores_of_whole_logits(size, monkeypatch):
    """`score_tokens` of ranks whose decoders have a slice each, under a sampling mask too."""
    monkeypatch.setattr(sampler, "runs_triton", lambda logits: True)
    monkeypatch.setattr(HostGroup, "shares_memory", False)
    run, one_at_a_time = triton_scoring.launched, threading.Lock()  # the interpreter's grid is global

    def locked(*args):
        with one_at_a_time:
            return run(*args)

    monkeypatch.setattr(triton_scoring, "launched", locked)
    logits, targets = logits_of(WIDE), targets_of(WIDE)
    logits[5, targets[5]] = 0.5
    edges = logits.argsort(dim=-1, descending=True)[:, 20]
    for mask, of in ((None, logits), (edges, masked_logits(logits, targets, edges))):

        def scores(group: HostGroup, mask: torch.Tensor | None = mask) -> tuple[torch.Tensor, torch.Tensor]:
            own = VocabularySlice(group, WIDE)
            return score_tokens(sliced(logits, own), targets, 0.7, own, mask)

        for actual in on_every_rank(host_groups(size), scores):
            require_close(actual, exact_scores(of, targets, 0.7))


@pytest.mark.slow
def test_scores_of_a_decoder_are_read_once(monkeypatch):
    """`score_tokens` of a GPU's logits runs both kernels once for some tokens, and no operation of torch's."""
    launches = []
    monkeypatch.setattr(sampler, "runs_triton", lambda logits: True)
    run = triton_scoring.launched
    monkeypatch.setattr(triton_scoring, "launched", lambda *args: launches.append(len(args[0])) or run(*args))
    decoder = cuda_decoder(tiny_model("qwen3"))
    sequences = torch.randint(3, 90, (3, 2 * BLOCK_SIZE), generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def scores() -> list[torch.Tensor]:
        pool = BlockPool(BLOCK_SIZE)
        pool.begin_call(decoder.kv)
        scores = score_packed(decoder, pool, sequences, torch.ones_like(sequences), 0.8, 3)
        return scores.tensors()

    ours = scores()
    assert sum(launches) == 3 * (2 * BLOCK_SIZE - 1)
    monkeypatch.setattr(sampler, "runs_triton", lambda logits: False)
    for actual, expected in zip(ours, scores(), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_whole_logits_of_a_gpu_go_to_the_kernels(monkeypatch):
    monkeypatch.setattr(sampler, "runs_triton", lambda logits: True)
    logits, targets = logits_of(97), targets_of(97)
    strided = torch.stack([logits, logits], dim=-1)[..., 0]
    edges = torch.full_like(targets, 7)
    for mask in (None, edges):
        for actual, expected in zip(
            score_tokens(strided, targets, 0.7, None, mask), score(logits, targets, 0.7, mask), strict=True
        ):
            assert torch.equal(actual, expected)
