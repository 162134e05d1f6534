"""Logprobs and entropies of given tokens in Triton: every logit is read once, in two launches and without a copy.

The first launch keeps of each sub, SUB neighbouring tokens, the maximum, the mass and what the entropy needs; the
second has one program per row, which adds these up in float64. torch's operations take six to eight passes over the
logits and copies of them. Subs and sums are those of `triton_sampling`, so that a token's logprob is the sampler's own
of the same logits. A result is a function of its row, in every batch.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.triton_sampling import CHUNK, SUB


@triton.jit
def _score_sums_kernel(
    logits,
    targets,
    sampling_mask,
    maxima,
    sums,
    logits_stride,
    first,
    vocab,
    temperature,
    CHUNK: tl.constexpr,
    SUB: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One program per row and chunk: the maximum of each sub, and sums relative to it.

    maxima: float32 [rows, subs].  sums: float32 [2, rows, subs], of w = exp(d) and of w * d, with
        d = (logit - maximum) / T.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    subs: tl.constexpr = CHUNK // SUB
    own_subs = chunk * subs + tl.arange(0, subs)
    ids = own_subs[:, None] * SUB + tl.arange(0, SUB)[None, :]
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    if MASKED:  # as `masked_logits` of hybrid/sampling/sampler.py; logits of NaN and +inf stay
        edge, target = tl.load(sampling_mask + row), tl.load(targets + row) - first
        least = tl.load(logits + tl.maximum(edge, 0))
        least = tl.where(edge < 0, float("-inf"), tl.where(edge == target, float("inf"), least))
        is_kept = (x > least) | ((x == least) & (ids >= edge)) | (ids == target)
        x = tl.where((x < float("inf")) & ~is_kept, float("-inf"), x)
    best = tl.max(x, 1)
    differences = (x - tl.where(best == float("-inf"), 0.0, best)[:, None]) * (1.0 / temperature)
    weights = tl.exp(differences)
    size = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * subs
    cells = row * tl.num_programs(1) * subs + own_subs
    tl.store(maxima + cells, best)
    tl.store(sums + cells, tl.sum(weights, 1))
    tl.store(sums + size + cells, tl.sum(tl.where(weights > 0, weights * differences, 0.0), 1))


@triton.jit
def _score_kernel(
    logits,
    targets,
    maxima,
    sums,
    logps,
    entropies,
    row_sums,
    logits_stride,
    first,
    vocab,
    temperature,
    subs,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
):
    """One program per row: the sums of its subs, relative to the largest logit, and logprob and entropy from them.

    maxima, sums: of `_score_sums_kernel`.  row_sums: float64 [4, rows], as `score_sums` returns them.
    """
    index, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sub_ids, inverse = tl.arange(0, SUBS), 1.0 / temperature
    is_sub, cells = sub_ids * SUB < vocab, index * subs + sub_ids
    sub_best = tl.load(maxima + cells, mask=is_sub, other=float("-inf"))
    best = tl.max(sub_best, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    gaps = (sub_best - base) * inverse
    factors = tl.exp(gaps)
    masses = tl.load(sums + cells, mask=is_sub, other=0.0) * factors
    products = tl.load(sums + rows * subs + cells, mask=is_sub, other=0.0) * factors
    mass = tl.sum(masses.to(tl.float64), 0)  # NaN if a logit is NaN or +inf, which maxima may hide
    product = tl.sum((products + tl.where(factors > 0, masses * gaps, 0.0)).to(tl.float64), 0)
    target = tl.load(targets + index) - first
    is_local = (target >= 0) & (target < vocab)
    logit = tl.load(logits + index * logits_stride + target, mask=is_local, other=float("-inf"))
    log_mass = tl.log(mass.to(tl.float32))
    tl.store(logps + index, (logit - base) * inverse - log_mass)
    tl.store(entropies + index, log_mass - (product / mass).to(tl.float32))
    tl.store(row_sums + index, best.to(tl.float64) * inverse)
    tl.store(row_sums + rows + index, mass)
    tl.store(row_sums + 2 * rows + index, product)
    tl.store(row_sums + 3 * rows + index, logit.to(tl.float64) * inverse)


def score(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, sampling_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprob and entropy of each row's target, float32 [rows] each, as `score_tokens` does.

    Args:
        logits: float32 [rows, vocab]; rows may be strided.
        targets: int64 [rows].
        temperature: above 0.
        sampling_mask: int64 [rows], as `masked_logits` takes it; None: of the softmax over all tokens.
    """
    logps, entropies, _ = launched(logits, targets, temperature, sampling_mask, 0, logits.shape[1])
    return logps, entropies


def score_sums(logits: torch.Tensor, targets: torch.Tensor, temperature: float, first: int, count: int) -> torch.Tensor:
    """Return what a slice of the vocabulary adds to scores, float64 [4, rows]: with s = logit / temperature the largest
    s; the sums of w = exp(s - largest) and of w * (s - largest); s of the target, -inf where another slice has it.

    Args:
        logits: float32 [rows, width]; rows may be strided.
        targets: int64 [rows], of the whole vocabulary.
        temperature: above 0.
        first: the slice's first token.
        count: its number of tokens; further columns are not read.
    """
    return launched(logits, targets, temperature, None, first, count)[2]


def launched(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    sampling_mask: torch.Tensor | None,
    first: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run both kernels. Returns logprobs and entropies of the slice alone, and its sums."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are float32, their rows contiguous"
    rows, empty = len(logits), logits.new_empty
    require_contiguous(logits.device, torch.int64, targets)
    assert len(targets) == rows, "a target for each row"
    if sampling_mask is not None:
        require_contiguous(logits.device, torch.int64, sampling_mask)
        assert len(sampling_mask) == rows, "a sampling mask for each row"
    chunks = max(triton.cdiv(count, CHUNK), 1)
    subs = chunks * (CHUNK // SUB)
    maxima, sums, row_sums = empty((rows, subs)), empty((2, rows, subs)), empty((4, rows), dtype=torch.float64)
    logps, entropies = empty((2, rows)).unbind()
    if rows:
        sizes = logits.stride(0), first, count, temperature
        masked = targets if sampling_mask is None else sampling_mask  # without a mask a pointer that is not read
        _score_sums_kernel[(rows, chunks)](
            *(logits, targets, masked, maxima, sums, *sizes), CHUNK=CHUNK, SUB=SUB, MASKED=sampling_mask is not None
        )
        _score_kernel[(rows,)](
            *(logits, targets, maxima, sums, logps, entropies, row_sums, *sizes, subs),
            SUB=SUB,
            SUBS=triton.next_power_of_2(subs),
            num_warps=8,
        )
    return logps, entropies, row_sums
