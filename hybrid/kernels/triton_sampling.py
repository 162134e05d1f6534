"""Sampling in Triton: one token per row by inverse CDF, in two passes over the vocabulary and without a sort.

The uniform number equals that of `hybrid/generation/sampler.py`, bit for bit. The cumulative sums are made of fixed
chunks, so that a token is a function of (key, step, row of logits) alone, on every device and in every batch. They
differ from torch's by float32 rounding: if u is that close to a boundary between two tokens, torch may draw the other.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous

CHUNK = 2048  # logits per program; fixed, because it determines the order of a row's sums
# splitmix64's constants (Steele, Lea, Flood 2014), as in `hybrid/generation/sampler.py`.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _uniform(key, step):
    """`uniform(keys, step)` of hybrid/generation/sampler.py.  key int64, step int32; gives float64 in [0, 1)."""
    one = tl.full((), 1, tl.uint64)
    bits = key.to(tl.uint64) + one * GOLDEN * (step.to(tl.int64) + 1).to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * (one * MIX_1)
    bits = (bits ^ (bits >> 27)) * (one * MIX_2)
    bits = bits ^ (bits >> 31)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _maxima_kernel(logits, maxima, logits_stride, vocab, CHUNK: tl.constexpr):
    """One program per row and chunk: the chunk's maximum.  maxima float32 [rows, chunks]"""
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    tl.store(maxima + row * tl.num_programs(1) + chunk, tl.max(x, 0))


@triton.jit
def _masses_kernel(
    logits, maxima, masses, temperature, min_p, logits_stride, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """One program per row and chunk: sums of exp(logit - row's maximum), to masses float32 [3, rows, chunks]: of the
    tokens that min-p keeps, at the row's temperature; of all tokens, at that temperature; of all, at temperature 1."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    chunk_ids = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(maxima + row * chunks + chunk_ids, mask=chunk_ids < chunks, other=float("-inf")), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf")) - best
    row_temperature = tl.load(temperature + row)
    scaled = tl.exp(x / tl.where(row_temperature == 0, 1.0, row_temperature))
    kept = tl.where(scaled >= tl.load(min_p + row), scaled, 0.0)
    cell, step = row * chunks + chunk, tl.num_programs(0) * chunks
    tl.store(masses + cell, tl.sum(kept, 0))
    tl.store(masses + step + cell, tl.sum(scaled, 0))
    tl.store(masses + 2 * step + cell, tl.sum(tl.exp(x), 0))


@triton.jit
def _first(candidates, index, fallback, SIZE: tl.constexpr):
    """The smallest `index` where `candidates`; if there is none, the largest where `fallback`, or 0."""
    first = tl.min(tl.where(candidates, index, SIZE), 0)
    last = tl.maximum(tl.max(tl.where(fallback, index, -1), 0), 0)
    return tl.where(first == SIZE, last, first)


@triton.jit
def _pick_kernel(
    logits,
    maxima,
    masses,
    keys,
    steps,
    temperature,
    min_p,
    tokens,
    sampling_logprobs,
    old_logprobs,
    raw_logprobs,
    logits_stride,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program per row: the chunk in which the cumulative mass exceeds u * total, then the token in that chunk.

    If rounding leaves no such chunk or token, the last one with any mass. A token without mass is never drawn.
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    chunk_ids = tl.arange(0, CHUNKS)
    is_chunk, cells = chunk_ids < chunks, row * chunks + chunk_ids
    chunk_best = tl.load(maxima + cells, mask=is_chunk, other=float("-inf"))
    best = tl.max(chunk_best, 0)
    mass = tl.load(masses + cells, mask=is_chunk, other=0.0).to(tl.float64)
    passed = tl.cumsum(mass, 0)
    target = _uniform(tl.load(keys + row), tl.load(steps + row)) * tl.max(passed, 0)
    drawn = _first((passed > target) & (mass > 0), chunk_ids, mass > 0, CHUNKS)
    row_temperature = tl.load(temperature + row)
    chunk = tl.where(row_temperature == 0, _first(chunk_best == best, chunk_ids, is_chunk, CHUNKS), drawn)
    rest = (target - tl.sum(tl.where(chunk_ids == chunk - 1, passed, 0.0), 0)).to(tl.float32)

    offsets = tl.arange(0, CHUNK)
    ids = chunk * CHUNK + offsets
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf")) - best
    divisor = tl.where(row_temperature == 0, 1.0, row_temperature)
    scaled = tl.exp(x / divisor)
    kept = tl.where(scaled >= tl.load(min_p + row), scaled, 0.0)
    drawn = _first((tl.cumsum(kept, 0) > rest) & (kept > 0), offsets, kept > 0, CHUNK)
    offset = tl.where(row_temperature == 0, _first(x == 0, offsets, ids < vocab, CHUNK), drawn)
    chosen = tl.sum(tl.where(offsets == offset, x, 0.0), 0)

    unmasked = masses + rows * chunks + cells
    sampling_total = tl.sum(tl.load(masses + cells, mask=is_chunk, other=0.0), 0)
    old_total = tl.sum(tl.load(unmasked, mask=is_chunk, other=0.0), 0)
    raw_total = tl.sum(tl.load(unmasked + rows * chunks, mask=is_chunk, other=0.0), 0)
    tl.store(tokens + row, (chunk * CHUNK + offset).to(tl.int64))
    tl.store(sampling_logprobs + row, chosen / divisor - tl.log(sampling_total))
    tl.store(old_logprobs + row, chosen / divisor - tl.log(old_total))
    tl.store(raw_logprobs + row, chosen - tl.log(raw_total))


def sample(
    logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row and its three logprobs: at the row's temperature among the tokens that min-p keeps; at that
    temperature among all tokens; at temperature 1 among all tokens.

    logits float32 [rows, vocab], rows may be strided; keys int64 [rows]: of `stream_keys`; steps int32 or int64 [rows]:
    index of the new token in its completion; temperature, min_p [rows]: on the device, so that a captured graph works
    for all values. Temperature 0 takes the highest logit, the first of equal ones, with all logprobs at temperature 1.
    Gives tokens int64 [rows] and three logprobs float32 [rows].
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are float32, their rows contiguous"
    assert not (steps.is_floating_point() or temperature.device != logits.device or min_p.device != logits.device)
    require_contiguous(logits.device, torch.int64, keys)
    require_contiguous(logits.device, steps.dtype, steps)
    (rows, vocab), temperature, min_p = logits.shape, temperature.float(), min_p.float()
    chunks = triton.cdiv(vocab, CHUNK)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    masses = torch.empty((3, rows, chunks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((3, rows), dtype=torch.float32, device=logits.device).unbind()
    _maxima_kernel[(rows, chunks)](logits, maxima, logits.stride(0), vocab, CHUNK=CHUNK)
    _masses_kernel[(rows, chunks)](logits, maxima, masses, temperature, min_p, logits.stride(0), vocab, **sizes)
    settings = (keys, steps, temperature, min_p, tokens, *logprobs)
    _pick_kernel[(rows,)](logits, maxima, masses, *settings, logits.stride(0), vocab, chunks, **sizes)
    return tokens, *logprobs
