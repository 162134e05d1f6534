"""Sampling in Triton: one token per row by inverse CDF, with every setting, in two launches and without a sort.

The first launch reads every logit once and keeps the maximum and the sums of each sub, SUB neighbouring tokens. The
second has one program per row. It needs those maxima and sums, and again only the subs that can hold a kept token:

- no truncation: the sub in which the cumulative mass passes u, then the token in it: 512 bytes of logits;
- min-p: the subs whose maximum is kept;
- top-k, top-p: a threshold on the score (`_threshold`). The subs' maxima alone give a lower bound of it, which leaves
  about k subs for top-k, and for top-p about as many as the nucleus has tokens. Passes over these with 8 pivots narrow
  the interval until it holds at most TILE scores, which a search by halving in registers then finishes.

Two launches for every setting and batch. Bytes read per row of 151936 float32 logits (608 kB), the logits' part of the
second launch counted in Triton's interpreter; logits of 16 bits take half:

    setting                            first launch   second launch
    plain, temperature, greedy         608 kB         14 kB of sums + 0.5 kB
    repetition penalty                 + 152 kB seen  24 kB of sums, a fourth more for each logit read
    min_new_tokens                     608 kB         24 kB of sums
    min-p 0.05 (23 to 166 kept)        608 kB         14 kB + 16 to 80 kB
    top-k 50                           608 kB         14 kB + 96 kB
    top-k 50, top-p 0.9                608 kB         14 kB + 144 to 168 kB
    top-p 0.9, 10 to 136 thousand kept 608 kB         14 kB + 2.4 to 3.6 MB: 4 to 6 passes over the row
    top-k 5000                         608 kB         14 kB + 3.6 MB: 6 passes
    top-p, all logits equal            608 kB         14 kB + 7.2 MB: 12 passes

For the sampling mask each truncated row is read once more: the subs that can hold a kept token.

One program per row and no grid of (row, chunk) programs for each step of the search: such a search takes 8 launches
for 32 bits at 15 pivots a pass, and each program first has to add up the sums of all chunks of its row. The subs that
matter are few in all but flat rows: one SM reads 26 kB of L2 in less time than a launch takes, and rows run side by
side. Only flat rows lose by it, at small batches: a pass over a whole row takes one SM 5.5 us at 110 GB/s, or more.

The uniform number equals that of `hybrid/sampling/sampler.py`, bit for bit. Sums are in a fixed order, float32 in a
sub or tile and float64 over these, without atomics: a token is a function of (key, position, settings, row of logits),
in every batch. They differ from torch's by float32 rounding: where u, or the edge of top-p or min-p, is that close to a
boundary between two tokens, torch may draw the other. Thresholds compare scores before their division by the
temperature, as the CPU kernels do.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous

SUB = 128  # logits of one maximum and one sum; fixed, because it determines the order of a row's sums
CHUNK = 2048  # logits per program of the first launch
TILE = 2048  # logits that a program of the second launch holds at once
TEMPERATURE, TOP_K_AT, TOP_P_AT, MIN_P_AT, PENALTY, MIN_NEW = (tl.constexpr(index) for index in range(6))  # of `values`
NUM_VALUES = tl.constexpr(6)
# Scores compare as int32 keys. NOTHING, of lanes without a token, is less than the key of -inf.
NOTHING = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
MAX_INT64 = tl.constexpr(2**63 - 1)
# splitmix64's constants (Steele, Lea, Flood 2014), as in `hybrid/sampling/sampler.py`.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingFeatures:
    """Which settings the kernels are compiled for: a part of a CUDA graph's key. Their values lie on the device, and a
    value that turns a feature off does so; temperature 0 is greedy with all features.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition_penalty: bool = False
    min_new_tokens: bool = False


def sampling_features(table: torch.Tensor) -> SamplingFeatures:
    """Return the features that some settings need; a greedy draw needs no truncation.

    table: float64 [settings, 6] in host memory: temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens.
    """
    rows = table.tolist()
    drawn = [truncations for temperature, *truncations, _, _ in rows if temperature > 0]
    return SamplingFeatures(
        top_k=any(top_k > 0 for top_k, _, _ in drawn),
        top_p=any(top_p < 1 for _, top_p, _ in drawn),
        min_p=any(min_p > 0 for _, _, min_p in drawn),
        repetition_penalty=any(row[4] != 1 for row in rows),
        min_new_tokens=any(row[5] > 0 for row in rows),
    )


def values_of_rows(
    table: torch.Tensor, index: torch.Tensor | None, rows: int, device: torch.device | str
) -> torch.Tensor:
    """Return `values` of `sample`, float32 [rows, 6] on `device`.

    The copy to the device does not wait; it cannot be captured in a graph.

    Args:
        table: as in `sampling_features`.
        index: int64 [rows] on the device, the entry of each row; None: all rows have the first one.
        rows: number of rows.
        device: of the values.
    """
    values = table.float()
    values = (values.pin_memory() if torch.device(device).type == "cuda" else values).to(device, non_blocking=True)
    return values.expand(rows, -1).contiguous() if index is None else values[index]


@triton.jit
def _uniform(key, position):
    """`uniform(keys, positions)` of hybrid/sampling/sampler.py.  key, position int64; returns float64 in [0, 1)."""
    one = tl.full((), 1, tl.uint64)
    bits = key.to(tl.uint64) + one * GOLDEN * (position + 1).to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * (one * MIX_1)
    bits = (bits ^ (bits >> 27)) * (one * MIX_2)
    bits = bits ^ (bits >> 31)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _key(scores):
    """int32 that compare as float32 `scores` do; 0 and -0 have the same."""
    bits = tl.where(scores == 0, 0, scores.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weights(keys, base, inverse):
    """exp((score - base) / T) of the scores with these keys; NaN for NOTHING.  inverse: 1 / T"""
    bits = tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return tl.exp((bits.to(tl.float32, bitcast=True) - base) * inverse)


@triton.jit
def _scores(x, ids, is_token, seen, penalty, stops, num_stops, PENALIZED: tl.constexpr, SHORT: tl.constexpr):
    """Return the scores after repetition penalty and min_new_tokens, as in Hugging Face, of logits x float32 of the
    tokens `ids`.

    seen: pointer to the row.  num_stops: stop tokens whose score is -inf; 0 from position min_new_tokens on.
    """
    if PENALIZED:
        is_seen = tl.load(seen + ids, mask=is_token, other=0) != 0
        x = tl.where(is_seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    if SHORT:
        for index in range(num_stops):
            x = tl.where(ids == tl.load(stops + index), float("-inf"), x)
    return x


@triton.jit
def _stops_of(values, position, num_stops, SHORT: tl.constexpr):
    """Return the number of stop tokens that are excluded at a position."""
    if SHORT:
        num_stops = tl.where(position < tl.load(values + MIN_NEW), num_stops, 0)
    return num_stops


@triton.jit
def _above(x, floor, inverse):
    """Return the sums over rows of exp((x - floor) / T).  x [n, m], floor [n]; a row of -inf gives 0."""
    floor = tl.where(floor == float("-inf"), 0.0, floor)
    return tl.sum(tl.exp((x - floor[:, None]) * inverse), 1)


@triton.jit(do_not_specialize=("num_stops",))  # differs from request to request
def _sums_kernel(
    logits,
    seen,
    stops,
    positions,
    values,
    maxima,
    sums,
    logits_stride,
    seen_stride,
    vocab,
    num_stops,
    CHUNK: tl.constexpr,
    SUB: tl.constexpr,
    PENALIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """One program per row and chunk: maxima of each sub, and sums relative to them.

    maxima float32 [1 or 2, rows, chunks * CHUNK / SUB]: of scores; of logits, where these differ.
    sums float32 [2 or 3, ...]: exp((score - maximum) / T); exp(logit - maximum); exp((logit - maximum) / T) likewise.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values += row * NUM_VALUES
    subs: tl.constexpr = CHUNK // SUB
    own_subs = chunk * subs + tl.arange(0, subs)
    ids = own_subs[:, None] * SUB + tl.arange(0, SUB)[None, :]
    is_token = ids < vocab
    x = tl.load(logits + row * logits_stride + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    temperature = tl.load(values + TEMPERATURE)
    inverse = 1.0 / tl.where(temperature == 0, 1.0, temperature)
    num_stops = _stops_of(values, tl.load(positions + row), num_stops, SHORT)
    penalty = tl.load(values + PENALTY)
    scores = _scores(x, ids, is_token, seen + row * seen_stride, penalty, stops, num_stops, PENALIZED, SHORT)

    size = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * subs
    cells = row * tl.num_programs(1) * subs + own_subs
    best = tl.max(scores, 1)
    tl.store(maxima + cells, best)
    tl.store(sums + cells, _above(scores, best, inverse))
    if PENALIZED or SHORT:
        best = tl.max(x, 1)
        tl.store(maxima + size + cells, best)
        tl.store(sums + 2 * size + cells, _above(x, best, inverse))
    tl.store(sums + size + cells, _above(x, best, 1.0))


@triton.jit
def _first(candidates, index, fallback, SIZE: tl.constexpr):
    """Return the smallest `index` where `candidates`; if there is none, the largest where `fallback`, or 0."""
    first = tl.min(tl.where(candidates, index, SIZE), 0)
    last = tl.maximum(tl.max(tl.where(fallback, index, -1), 0), 0)
    return tl.where(first == SIZE, last, first)


@triton.jit
def _activate(best_keys, lowest, active, SUBS: tl.constexpr):
    """Write the subs whose best key is at least `lowest`, ascending, to `active`; returns their number."""
    is_active = best_keys >= lowest.to(tl.int32)
    passed = tl.cumsum(is_active.to(tl.int32), 0)
    tl.debug_barrier()  # the list before has been read
    tl.store(active + passed - 1, tl.arange(0, SUBS), mask=is_active)
    tl.debug_barrier()  # this one is written
    return tl.max(passed, 0)


@triton.jit
def _keys_of(
    tile, row, active, count, SUB: tl.constexpr, TILE: tl.constexpr, PENALIZED: tl.constexpr, SHORT: tl.constexpr
):
    """Return keys int32 [TILE] of the scores of TILE / SUB active subs, of the list's `count` those from `tile` on;
    NOTHING where there is no token.  row: logits, seen, penalty, stops, num_stops, vocab
    """
    logits, seen, penalty, stops, num_stops, vocab = row
    lanes = tl.arange(0, TILE)
    slots = tile + lanes // SUB
    ids = tl.load(active + slots, mask=slots < count, other=0) * SUB + lanes % SUB
    is_token = (slots < count) & (ids < vocab)
    x = tl.load(logits + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    scores = _scores(x, ids, is_token, seen, penalty, stops, num_stops, PENALIZED, SHORT)
    return tl.where(is_token, _key(scores), NOTHING)


@triton.jit
def _search(keys, weights, target, low, high, ROUNDS: tl.constexpr):
    """Return the largest key t in [low, high] for which the weights of keys >= t add up to `target`, by halving the
    interval
    at most ROUNDS times: then a lower bound. `low` if there is none.  keys int32 [n]; low, high int64
    """
    rounds = 0
    while (low < high) & (rounds < ROUNDS):
        middle = low + ((high - low + 1) >> 1)
        reached = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0).to(tl.float64) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        rounds += 1
    return low


@triton.jit
def _threshold(
    target,
    low,
    best_keys,
    base,
    inverse,
    row,
    active,
    candidates,
    BY_MASS: tl.constexpr,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Return the largest key t >= low for which the tokens with keys >= t number `target`, or BY_MASS have weights
    exp((score - base) / T) that add up to it. `low` if there is none.  target float64, low int64

    best_keys int32 [SUBS]: of the subs' best tokens.
    """
    # A bound: where the best tokens of the subs reach the target without the others, all tokens do.
    best_weights = _weights(best_keys, base, inverse) if BY_MASS else tl.full((SUBS,), 1.0, tl.float32)
    high = tl.max(best_keys, 0).to(tl.int64)
    least = tl.min(tl.where(best_keys == NOTHING, high.to(tl.int32), best_keys), 0).to(tl.int64)
    reached = tl.sum(tl.where(best_keys == NOTHING, 0.0, best_weights), 0).to(tl.float64) >= target
    bound = _search(best_keys, best_weights, target, tl.where(reached, least, high), high, 16)
    low = tl.minimum(tl.where(reached, tl.maximum(low, bound), low), high)

    # Passes over the active subs with 8 pivots, `low` the first, until at most TILE keys lie in [low, high].
    parts = tl.arange(0, 8)
    count = _activate(best_keys, low, active, SUBS)
    inside = count * SUB  # at most
    above, above_mass = 0, tl.full((), 0.0, tl.float64)  # keys > high, and their weight
    while (inside > TILE) & (low < high):
        pivots = low + (((high - low + 1) * parts) >> 3)
        numbers, masses = tl.zeros((8,), tl.int32), tl.zeros((8,), tl.float64)  # of keys >= pivot
        for tile in range(0, count, TILE // SUB):
            keys = _keys_of(tile, row, active, count, SUB, TILE, PENALIZED, SHORT)
            is_over = keys[None, :] >= pivots.to(tl.int32)[:, None]
            numbers += tl.sum(is_over.to(tl.int32), 1)
            if BY_MASS:
                weights = _weights(keys, base, inverse)
                masses += tl.sum(tl.where(is_over, weights[None, :], 0.0), 1).to(tl.float64)
        if not BY_MASS:
            masses = numbers.to(tl.float64)
        last = tl.maximum(tl.sum((masses >= target).to(tl.int32), 0) - 1, 0)  # of the pivots that reach the target
        is_next = parts == last + 1
        has_next = last < 7
        above = tl.where(has_next, tl.sum(tl.where(is_next, numbers, 0), 0), above)
        above_mass = tl.where(has_next, tl.sum(tl.where(is_next, masses, 0.0), 0), above_mass)
        high = tl.where(has_next, tl.sum(tl.where(is_next, pivots, 0), 0) - 1, high)
        low = tl.sum(tl.where(parts == last, pivots, 0), 0)
        inside = tl.sum(tl.where(parts == last, numbers, 0), 0) - above
        count = _activate(best_keys, low, active, SUBS)

    # The keys of the interval, to `candidates`; none if the interval is one key.
    size = 0
    for tile in range(0, tl.where(low < high, count, 0), TILE // SUB):
        keys = _keys_of(tile, row, active, count, SUB, TILE, PENALIZED, SHORT)
        is_inside = (keys >= low.to(tl.int32)) & (keys <= high.to(tl.int32))
        passed = tl.cumsum(is_inside.to(tl.int32), 0)
        tl.store(candidates + size + passed - 1, keys, mask=is_inside)
        size += tl.max(passed, 0)
    tl.debug_barrier()  # they are written
    lanes = tl.arange(0, TILE)
    keys = tl.load(candidates + lanes, mask=lanes < size, other=NOTHING)
    tl.debug_barrier()  # and read
    weights = _weights(keys, base, inverse) if BY_MASS else tl.full((TILE,), 1.0, tl.float32)
    return _search(keys, weights, target - above_mass, low, high, 32)


@triton.jit
def _mass_from(
    lowest,
    best_keys,
    base,
    inverse,
    row,
    active,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Return the sum of exp((score - base) / T) over the keys >= lowest, float64."""
    count, mass = _activate(best_keys, lowest, active, SUBS), tl.full((), 0.0, tl.float64)
    for tile in range(0, count, TILE // SUB):
        keys = _keys_of(tile, row, active, count, SUB, TILE, PENALIZED, SHORT)
        weights = tl.where(keys >= lowest.to(tl.int32), _weights(keys, base, inverse), 0.0)
        mass += tl.sum(weights, 0).to(tl.float64)
    return mass


@triton.jit
def _least_kept(
    token,
    threshold,
    dropped_ties,
    min_p,
    base,
    inverse,
    row,
    active,
    count,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    PENALIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Return the least kept token of the active subs besides `token`, by key and then by id: key · 2^32 + id, int64;
    MAX_INT64 if there is none.

    Kept are the tokens above the threshold, and those at it without the first `dropped_ties`; of these min-p's.
    """
    least, ties = tl.full((), MAX_INT64, tl.int64), 0
    lanes = tl.arange(0, TILE)
    for tile in range(0, count, TILE // SUB):
        keys = _keys_of(tile, row, active, count, SUB, TILE, PENALIZED, SHORT)
        slots = tile + lanes // SUB
        ids = tl.load(active + slots, mask=slots < count, other=0) * SUB + lanes % SUB
        is_likely = (_weights(keys, base, inverse) >= min_p) & (keys > LOWEST)
        is_tie = (keys == threshold.to(tl.int32)) & is_likely
        order = ties + tl.cumsum(is_tie.to(tl.int32), 0)
        is_kept = (keys > threshold.to(tl.int32)) | (is_tie & (order > dropped_ties))
        codes = (keys.to(tl.int64) << 32) + ids
        codes = tl.where(is_kept & is_likely & (ids != token), codes, MAX_INT64)
        least = tl.minimum(least, tl.min(codes, 0))
        ties += tl.sum(is_tie.to(tl.int32), 0)
    return least


@triton.jit(do_not_specialize=("num_stops",))
def _draw_kernel(
    logits,
    seen,
    stops,
    keys,
    positions,
    values,
    maxima,
    sums,
    scratch,
    tokens,
    logprobs,
    logits_stride,
    seen_stride,
    vocab,
    num_stops,
    subs,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    PENALIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """One program per row: the threshold, the sub in which the cumulative mass exceeds u * total, the token in it.

    If rounding leaves no such sub or token, the last one with any mass. A token without mass is never drawn. A row
    without a softmax gets logprobs of NaN and any token.
    maxima, sums: of `_sums_kernel`, [.., rows, subs].  tokens int64 [rows].  logprobs float32 [4, rows]: sampling, old,
    raw, sampling mask.  scratch int32 [rows, TILE + 3 * SUBS]: candidates' keys; the list of active subs; of each
    active sub the mass above the threshold (float32) and the number of tokens at it.
    """
    index, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits, seen, values = logits + index * logits_stride, seen + index * seen_stride, values + index * NUM_VALUES
    temperature, penalty = tl.load(values + TEMPERATURE), tl.load(values + PENALTY)
    is_greedy = temperature == 0
    inverse = 1.0 / tl.where(is_greedy, 1.0, temperature)
    position = tl.load(positions + index).to(tl.int64)
    num_stops = _stops_of(values, position, num_stops, SHORT)
    sub_ids = tl.arange(0, SUBS)
    is_sub, cells, size = sub_ids * SUB < vocab, index * subs + sub_ids, rows.to(tl.int64) * subs
    sub_best = tl.load(maxima + cells, mask=is_sub, other=float("-inf"))
    best = tl.max(sub_best, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    sub_mass = tl.load(sums + cells, mask=is_sub, other=0.0) * tl.exp((sub_best - base) * inverse)
    full_mass = sub_mass
    full = tl.sum(full_mass.to(tl.float64), 0)  # NaN if a score is NaN or +inf, which maxima may hide

    # Kept are the tokens above the threshold, and of each sub the last `sub_ties` of those at it; of these min-p's.
    threshold, min_p = tl.full((), LOWEST, tl.int64), 0.0
    sub_ties = tl.zeros((SUBS,), tl.int32)
    dropped_ties = 0  # of all tokens at the threshold the first ones
    if TOP_K or TOP_P or MIN_P:
        row = (logits, seen, penalty, stops, num_stops, vocab)
        candidates = scratch + index * (TILE + 3 * SUBS)
        active, tie_cells = candidates + TILE, candidates + TILE + 2 * SUBS
        mass_cells = (candidates + TILE + SUBS).to(tl.pointer_type(tl.float32), bitcast=True)
        best_keys = tl.where(is_sub, _key(sub_best), NOTHING)
        total = full
        off = temperature < 0
        has_top_k, has_top_p, has_min_p = off, off, off
        if TOP_K:
            top_k = tl.load(values + TOP_K_AT)
            has_top_k = (top_k > 0) & (top_k < vocab) & (temperature > 0)
            if has_top_k:
                threshold = _threshold(
                    top_k.to(tl.float64),
                    threshold,
                    best_keys,
                    base,
                    inverse,
                    row,
                    active,
                    candidates,
                    False,
                    SUB,
                    SUBS,
                    TILE,
                    PENALIZED,
                    SHORT,
                )
        if TOP_P:
            top_p = tl.load(values + TOP_P_AT)
            has_top_p = (top_p < 1) & (temperature > 0)
            if has_top_p:
                if has_top_k:
                    total = _mass_from(
                        threshold, best_keys, base, inverse, row, active, SUB, SUBS, TILE, PENALIZED, SHORT
                    )
                # All tokens that are less probable than this are together less probable than 1 - top_p.
                least = (1 - top_p) * total.to(tl.float32) / (2.0 * vocab)
                least_key = _key(base + temperature * tl.log(least) - 1e-6 * tl.abs(base)).to(tl.int64)
                threshold = _threshold(
                    top_p * total,
                    tl.maximum(threshold, least_key),
                    best_keys,
                    base,
                    inverse,
                    row,
                    active,
                    candidates,
                    True,
                    SUB,
                    SUBS,
                    TILE,
                    PENALIZED,
                    SHORT,
                )
        lowest = threshold
        if MIN_P:
            min_p = tl.where(temperature > 0, tl.load(values + MIN_P_AT), 0.0)
            has_min_p = min_p > 0
            # A bound for whole subs, below min-p's by more than the rounding of exp and log.
            least_key = _key(base + temperature * tl.log(0.999 * min_p) - 1e-5 * tl.abs(base)).to(tl.int64)
            lowest = tl.where(has_min_p, tl.maximum(lowest, least_key), lowest)

        is_truncated = has_top_k | has_top_p | has_min_p
        lowest = tl.where(is_truncated, lowest, 0x7FFFFFFF)  # without truncation no sub is read
        count = _activate(best_keys, lowest, active, SUBS)
        for tile in range(0, count, TILE // SUB):
            tile_keys = _keys_of(tile, row, active, count, SUB, TILE, PENALIZED, SHORT)
            weights = _weights(tile_keys, base, inverse)
            masses = tl.where((tile_keys > threshold.to(tl.int32)) & (weights >= min_p), weights, 0.0)
            ties = ((tile_keys == threshold.to(tl.int32)) & (weights >= min_p)).to(tl.int32)
            slots = tile + tl.arange(0, TILE // SUB)
            own_subs = tl.load(active + slots, mask=slots < count, other=0)
            tl.store(mass_cells + own_subs, tl.sum(tl.reshape(masses, (TILE // SUB, SUB)), 1), mask=slots < count)
            tl.store(tie_cells + own_subs, tl.sum(tl.reshape(ties, (TILE // SUB, SUB)), 1), mask=slots < count)
        tl.debug_barrier()  # they are written
        is_active = best_keys >= lowest.to(tl.int32)
        masses = tl.load(mass_cells + sub_ids, mask=is_active, other=0.0)
        sub_ties = tl.load(tie_cells + sub_ids, mask=is_active, other=0)
        tie_weight = _weights(threshold.to(tl.int32), base, inverse)
        if TOP_P:
            # Of equal logits the higher token is the more probable: the edge of top-p keeps the last ones.
            number = tl.sum(sub_ties, 0)
            missing = tl.ceil((top_p * total - tl.sum(masses.to(tl.float64), 0)) / tie_weight)
            is_cut = has_top_p & (tie_weight > 0) & (missing < number)
            kept = tl.where(is_cut, tl.maximum(missing, 1.0), number).to(tl.int32)
            dropped_ties = number - kept
            after = number - tl.cumsum(sub_ties, 0)
            sub_ties = tl.minimum(tl.maximum(kept - after, 0), sub_ties)
        sub_mass = tl.where(is_truncated, masses + sub_ties * tie_weight, sub_mass)

    passed = tl.cumsum(sub_mass.to(tl.float64), 0)
    kept_mass = tl.max(passed, 0)
    target = _uniform(tl.load(keys + index), position) * kept_mass
    drawn = _first((passed > target) & (sub_mass > 0), sub_ids, sub_mass > 0, SUBS)
    sub = tl.where(is_greedy, _first((sub_best == best) & is_sub, sub_ids, is_sub, SUBS), drawn)
    rest = (target - tl.sum(tl.where(sub_ids == sub - 1, passed, 0.0), 0)).to(tl.float32)

    lanes = tl.arange(0, SUB)
    ids = sub * SUB + lanes
    is_token = ids < vocab
    x = tl.load(logits + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    scores = _scores(x, ids, is_token, seen, penalty, stops, num_stops, PENALIZED, SHORT)
    weights = tl.exp((scores - base) * inverse)
    if TOP_K or TOP_P or MIN_P:
        lane_keys = _key(scores)
        is_tie = is_token & (lane_keys == threshold.to(tl.int32))
        passed_ties = tl.cumsum(is_tie.to(tl.int32), 0)
        first_tie = tl.max(passed_ties, 0) - tl.sum(tl.where(sub_ids == sub, sub_ties, 0), 0)
        is_kept = (lane_keys > threshold.to(tl.int32)) | (is_tie & (passed_ties > first_tie))
        weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
    drawn = _first((tl.cumsum(weights, 0) > rest) & (weights > 0), lanes, weights > 0, SUB)
    lane = tl.where(is_greedy, _first((scores == best) & is_token, lanes, is_token, SUB), drawn)
    score = tl.sum(tl.where(lanes == lane, scores, 0.0), 0)

    raw = tl.load(sums + size + cells, mask=is_sub, other=0.0)
    token = sub * SUB + lane
    tl.store(tokens + index, token.to(tl.int64))
    sampling_mask = tl.full((), -1, tl.int64)
    if TOP_K or TOP_P or MIN_P:
        edge = _least_kept(
            token,
            threshold,
            dropped_ties,
            min_p,
            base,
            inverse,
            row,
            active,
            count,
            SUB,
            TILE,
            PENALIZED,
            SHORT,
        )
        edge = tl.where(edge == MAX_INT64, token.to(tl.int64), edge & 0xFFFFFFFF)
        sampling_mask = tl.where(is_truncated, edge, sampling_mask)
    tl.store(logprobs + 3 * rows + index, sampling_mask.to(tl.float32))
    sampled = (score - base) * inverse - tl.log(kept_mass.to(tl.float32))
    tl.store(logprobs + index, tl.where(full > 0, sampled, float("nan")))
    if PENALIZED or SHORT:
        sub_best = tl.load(maxima + size + cells, mask=is_sub, other=float("-inf"))
        base = tl.max(sub_best, 0)
        full_mass = tl.load(sums + 2 * size + cells, mask=is_sub, other=0.0) * tl.exp((sub_best - base) * inverse)
        score = tl.sum(tl.where(lanes == lane, x, 0.0), 0)
    old_mass = tl.sum(full_mass.to(tl.float64), 0).to(tl.float32)
    raw_mass = tl.sum((raw * tl.exp(sub_best - base)).to(tl.float64), 0).to(tl.float32)
    tl.store(logprobs + rows + index, (score - base) * inverse - tl.log(old_mass))
    tl.store(logprobs + 2 * rows + index, score - base - tl.log(raw_mass))


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    features: SamplingFeatures,
    seen: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """One token per row, its three logprobs and its sampling mask.

    Scores are the logits after repetition penalty and min_new_tokens; they are divided by the temperature T and
    truncated by top-k, top-p and min-p, in Hugging Face's order. The logprobs: under the distribution drawn from; under
    softmax(logits / T); under softmax(logits). T = 0 takes the highest score, the first of equal ones, without
    truncation; its logprobs are under softmax(scores), softmax(logits) and softmax(logits). A row whose scores have no
    softmax (NaN, +inf, or -inf alone) gets logprobs of NaN.

    logits [rows, vocab] of any floating type, computed with in float32; rows may be strided; they are not written.
    keys int64 [rows]: of `stream_keys`.  positions int32 or int64 [rows]: index of the new token in its completion.
    values float32 [rows, 6] on the device, of `values_of_rows`: temperature, top_k, top_p, min_p, repetition_penalty,
        min_new_tokens of each row. A captured graph works for all values of the same features.
    seen uint8 or bool [rows, vocab], rows may be strided: which tokens prompt and completion have; for the repetition
        penalty.
    stop_token_ids int64 [n]: these are not drawn at positions below min_new_tokens.
    Returns tokens int64 [rows], three logprobs float32 [rows] and the sampling mask, as SamplerOutput's.
    """
    assert logits.is_floating_point() and logits.stride(1) == 1, "logits are numbers, those of a row contiguous"
    assert positions.dtype in (torch.int32, torch.int64), "positions are int32 or int64"
    rows, vocab = logits.shape
    assert values.shape == (rows, 6), "values are six of each row: see values_of_rows"
    require_contiguous(logits.device, torch.int64, keys)
    require_contiguous(logits.device, positions.dtype, positions)
    require_contiguous(logits.device, torch.float32, values)
    assert len(keys) == len(positions) == rows, "a key and a position for each row"
    if features.repetition_penalty:
        assert seen is not None and seen.dtype in (torch.uint8, torch.bool), "the repetition penalty needs seen tokens"
        assert seen.shape == logits.shape and seen.stride(1) == 1 and seen.device == logits.device
        seen = seen.view(torch.uint8)
    if features.min_new_tokens:
        assert stop_token_ids is not None, "min_new_tokens needs stop_token_ids"
        require_contiguous(logits.device, torch.int64, stop_token_ids)
    seen = seen if features.repetition_penalty else None
    stops = stop_token_ids if features.min_new_tokens else None
    chunks = triton.cdiv(vocab, CHUNK)
    subs = chunks * (CHUNK // SUB)
    size = max(triton.next_power_of_2(triton.cdiv(vocab, SUB)), TILE // SUB)
    processed = {"PENALIZED": features.repetition_penalty, "SHORT": features.min_new_tokens}
    changes = any(processed.values())
    truncations = {"TOP_K": features.top_k, "TOP_P": features.top_p, "MIN_P": features.min_p}
    empty = partial(torch.empty, dtype=torch.float32, device=logits.device)
    maxima, sums = empty((1 + changes, rows, subs)), empty((2 + changes, rows, subs))
    scratch = empty((rows, TILE + 3 * size) if any(truncations.values()) else 1, dtype=torch.int32)
    tokens, logprobs = empty(rows, dtype=torch.int64), empty((4, rows))
    # A feature that is off has a pointer that is not read.
    inputs = (logits, keys if seen is None else seen, keys if stops is None else stops)
    sizes = (logits.stride(0), 0 if seen is None else seen.stride(0), vocab, 0 if stops is None else len(stops))
    _sums_kernel[(rows, chunks)](*inputs, positions, values, maxima, sums, *sizes, CHUNK=CHUNK, SUB=SUB, **processed)
    _draw_kernel[(rows,)](
        *(*inputs, keys, positions, values, maxima, sums, scratch, tokens, logprobs, *sizes, subs),
        **{"SUB": SUB, "SUBS": size, "TILE": TILE, **truncations, **processed},
        num_warps=8,
        maxnreg=255,  # else ptxas (triton 3.7.1) chooses 128 for sm_80 and spills
    )
    return tokens, *logprobs.unbind()
