"""Paged attention in Triton, for prefill and for decode steps.

Both kernels read only blocks with live tokens, read the keys of a KV head once for all query heads that share it, and
sum in float32. Grids depend on shapes, not on values on the device, so that a decode step can be captured in a CUDA
graph. torch's own `varlen_attn` (2.13) takes block tables too, but only with blocks of at least 256 tokens, in float16
and bfloat16, and without soft caps and ALiBi.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.attention_backend import AttentionSettings, LayerBlocks, SequenceTables
from hybrid.kernels.kv_addresses import ALIGNMENT, LayerKV
from hybrid.kernels.triton_fused import tanh

MAX_SPLITS = 64  # of a sequence's context, in decode steps
MULTIPROCESSORS = 132  # of the device that decode steps are divided for: H100 and H200; others are within a factor of 2
WIDEST_TILE = 128  # the most cached tokens of a loop step, on any device
LATENT_HEADS = 32  # the most heads of a program in latent attention, of latents of 512 elements; in float32 half
# Arguments that differ from batch to batch and must not cause a recompilation.
VARYING = ("sequences", "table_stride", "bias_stride")
UNBOUNDED = 2**30  # the window of a query that sees all earlier tokens
# The score of a masked key. Finite, so that a query whose first tiles are fully masked gets no NaN; the weights of
# these tiles become 0 at the first key that it sees.
MASKED = tl.constexpr(-1.0e30)
ALIGNED = tl.constexpr(ALIGNMENT)  # bytes
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, bias, scale, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
    """Return the scores before masking times log2(e), so that the softmax is one of powers of 2.  float32 [queries,
    tokens]

    q [queries, dims], k [tokens, dims]; bias: added to the scaled scores, [queries or 1, tokens].
    ROUNDED: every step is rounded to q's dtype.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_BIAS:
        scores = _rounded(scores * scale + bias.to(tl.float32), q, ROUNDED)
    elif SOFTCAP > 0 or ROUNDED:
        scores = _rounded(_rounded(scores, q, ROUNDED) * scale, q, ROUNDED)
    else:
        return scores * (scale * LOG2_E)
    if SOFTCAP > 0:
        scores = _rounded(scores / SOFTCAP, q, ROUNDED)
        scores = _rounded(_rounded(tanh(scores), q, ROUNDED) * SOFTCAP, q, ROUNDED)
    return scores * LOG2_E


@triton.jit
def _rounded(x, like, ROUNDED: tl.constexpr):
    """x float32; if ROUNDED, rounded to the dtype of `like`, and float32 again."""
    if ROUNDED:
        x = x.to(like.dtype).to(tl.float32)
    return x


@triton.jit
def _first_seen(position, window):
    """Return the first position that a query at `position` sees; it may be negative.  window: as LayerSpec's."""
    return tl.where(window < 0, position // -window * -window, position - window + 1)


@triton.jit
def _blocks(table, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Return the blocks of these tokens; 0 from position `end` on.  int32 [tokens]  table: the sequence's block table.

    The kernels load them an iteration before those of keys and values, which the compiler pipelines: with this load in
    the same iteration it pipelines the blocks instead, and one tile of keys and values at a time is in flight (3.7).
    """
    return tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def _offsets(
    blocks,
    tokens,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Return element offsets of the tokens' keys or values in the KV cache.  int64 [tokens]

    blocks: of the tokens.  tokens: positions.
    """
    slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
    if not ROPE_DIM:
        slots = slots * KV_HEADS + kv_head
    return slots * (HEAD_DIM + ROPE_DIM)


@triton.jit
def _head_offsets(head, head_stride, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Return element offsets of heads in a token's queries, which are contiguous without ROPE_DIM."""
    if not ROPE_DIM:
        head_stride = HEAD_DIM
    return head.to(tl.int64) * head_stride


@triton.jit
def _rope_rows(rows, head, mask, ROPE_DIM: tl.constexpr, BLOCK_ROPE: tl.constexpr):
    """Return the rotated parts of queries in latent attention, [queries, BLOCK_ROPE]; without ROPE_DIM what is not
    read.  rows: pointers to their tokens."""
    dims = tl.arange(0, BLOCK_ROPE)
    if ROPE_DIM:
        live = mask[:, None] & (dims < ROPE_DIM)[None, :]
        dims = tl.load(rows + head[:, None] * ROPE_DIM + dims[None, :], mask=live, other=0.0)
    return dims


@triton.jit
def _rope_scores(query, keys, live, scale, ROPE_DIM: tl.constexpr, BLOCK_ROPE: tl.constexpr):
    """Return what the rotated parts of queries and keys add to `_scores`.  keys: pointers [tokens]"""
    dims = tl.arange(0, BLOCK_ROPE)
    k = tl.load(keys[:, None] + dims[None, :], mask=live[:, None] & (dims < ROPE_DIM)[None, :], other=0.0)
    return tl.dot(query, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)


@triton.jit
def _softmax_step(scores, v, best, total, out):
    """One step of an online softmax: the new (best, total, out) after a tile.

    scores float32 [queries, tokens], v [tokens, dims]; best (running maximum) and total (running sum of weights)
    float32 [queries]; out (weighted sum of values, not divided yet) float32 [queries, dims].
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new_best, total * shrink + tl.sum(weights, 1), out


@triton.jit
def _with_sink(total, best, sinks, mask):
    """Return the sums of a softmax's weights with those of the sinks.  total, best: of `_softmax_step`; sinks:
    pointers."""
    return total + tl.exp2(tl.load(sinks, mask=mask, other=0.0).to(tl.float32) * LOG2_E - best)


@triton.jit(do_not_specialize=VARYING)
def _decode_kernel(
    q,
    q_rope,
    kv_addresses,
    lengths,
    block_tables,
    bias,
    sinks,
    out,
    parts,
    log_totals,
    counters,
    scale,
    window,
    q_stride,
    q_head_stride,
    q_rope_stride,
    table_stride,
    bias_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program per sequence, KV head and split of the visible context, for all query heads of the KV head.

    The tiles that the query sees are divided by NUM_SPLITS; a split has at least one, so that the last splits of a
    short context are empty. Writes out [sequences, heads, head_dim]: directly if one split has everything; otherwise
    each program writes its split's output to parts [sequences, KV_HEADS, NUM_SPLITS, GROUP, HEAD_DIM] and the base-2
    logarithm of the sum of its weights to log_totals [sequences, KV_HEADS, NUM_SPLITS, GROUP], and the last one to
    finish joins them.

    ROPE_DIM: above 0 in latent attention: KV_HEADS blocks of GROUP heads share one cached key. Its HEAD_DIM first
    elements are its value too; the ROPE_DIM others are multiplied with q_rope [sequences, heads, ROPE_DIM].
    """
    keys = tl.multiple_of(tl.load(kv_addresses).to(q.dtype), ALIGNED)
    values = tl.multiple_of(tl.load(kv_addresses + 1).to(q.dtype), ALIGNED)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(_first_seen(length - 1, window), 0)
    first_tile = first // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    split_tiles = tl.cdiv(tiles, NUM_SPLITS)
    begin = (first_tile + split * split_tiles) * TILE
    end = tl.minimum(begin + split_tiles * TILE, length)
    if begin < end:
        group_head = tl.arange(0, ROWS)
        head = kv_head * GROUP + group_head
        dims = tl.arange(0, BLOCK_D)
        is_head, is_dim = group_head < GROUP, dims < HEAD_DIM
        is_output = is_head[:, None] & is_dim[None, :]
        query_offsets = row.to(tl.int64) * q_stride + _head_offsets(head, q_head_stride, HEAD_DIM, ROPE_DIM)[:, None]
        query_offsets += dims[None, :]
        query = tl.load(q + query_offsets, mask=is_output, other=0.0)
        query_rope = _rope_rows(q_rope + row.to(tl.int64) * q_rope_stride, head, is_head, ROPE_DIM, BLOCK_ROPE)
        best = tl.full((ROWS,), MASKED, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sum_out = tl.zeros((ROWS, BLOCK_D), tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        blocks = _blocks(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)
        for start in range(begin, end, TILE):
            tokens = start + tl.arange(0, TILE)
            live = (tokens >= first) & (tokens < end)
            token_offsets = _offsets(blocks, tokens, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM, ROPE_DIM)
            blocks = _blocks(table, tokens + TILE, end, BLOCK_SIZE)
            offsets, mask = token_offsets[:, None] + dims[None, :], live[:, None] & is_dim[None, :]
            k = tl.load(keys + offsets, mask=mask, other=0.0)
            key_bias = 0.0
            if HAS_BIAS:
                bias_at = bias + head[:, None] * bias_stride + tokens[None, :]
                key_bias = tl.load(bias_at, mask=is_head[:, None] & live[None, :], other=0.0)
            scores = _scores(query, k, key_bias, scale, SOFTCAP, HAS_BIAS, ROUNDED)
            if ROPE_DIM:
                rope_keys = keys + token_offsets + HEAD_DIM
                scores += _rope_scores(query_rope, rope_keys, live, scale, ROPE_DIM, BLOCK_ROPE)
                v = k
            else:
                v = tl.load(values + offsets, mask=mask, other=0.0)
            best, total, sum_out = _softmax_step(tl.where(live[None, :], scores, MASKED), v, best, total, sum_out)
        cell = row.to(tl.int64) * KV_HEADS + kv_head
        used_splits = tl.cdiv(tiles, split_tiles)
        if HAS_SINKS and (NUM_SPLITS == 1 or used_splits == 1):
            total = _with_sink(total, best, sinks + head, is_head)
        split_out = sum_out / total[:, None]
        if NUM_SPLITS == 1 or used_splits == 1:
            out_offsets = (cell * GROUP + group_head[:, None]) * HEAD_DIM + dims[None, :]
            tl.store(out + out_offsets, split_out, mask=is_output)
        else:
            part = (cell * NUM_SPLITS + split) * GROUP + group_head
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], split_out, mask=is_output)
            tl.store(log_totals + part, best + tl.log2(total), mask=is_head)
            # Memory order. The barrier puts the stores of all threads of this program before its atomic operation,
            # which one thread does. That operation releases them to the device, also those of the other threads:
            # release is cumulative over the barrier. The program that counts last acquires what the others released
            # before they counted. A second barrier, behind which Triton hands the count to all threads, extends this
            # to their loads.
            tl.debug_barrier()
            finished = tl.atomic_add(counters + cell, 1, sem="acq_rel", scope="gpu")
            if finished == used_splits - 1:
                _join(
                    out,
                    parts,
                    log_totals,
                    cell,
                    used_splits,
                    sinks + kv_head * GROUP,
                    GROUP,
                    HEAD_DIM,
                    NUM_SPLITS,
                    JOINED_ROWS,
                    BLOCK_D,
                    HAS_SINKS,
                )
                tl.store(counters + cell, 0)  # nobody counts any more; the next launch on this stream begins at 0


@triton.jit
def _join(
    out,
    parts,
    log_totals,
    cell,
    used_splits,
    sinks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add the parts of a sequence and KV head in the order of their splits, whichever order they were written in.

    cell: sequence * KV_HEADS + KV head.  sinks: of the KV head's query heads.
    """
    group_head, splits, dims = tl.arange(0, JOINED_ROWS), tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_D)
    is_head, is_dim = group_head < GROUP, dims < HEAD_DIM
    first = cell * NUM_SPLITS * GROUP + group_head
    is_part = is_head[:, None] & (splits < used_splits)[None, :]
    logs = tl.load(log_totals + first[:, None] + splits[None, :] * GROUP, mask=is_part, other=MASKED)
    best = tl.max(logs, 1)
    total = tl.sum(tl.exp2(logs - best[:, None]), 1)
    if HAS_SINKS:
        total = _with_sink(total, best, sinks + group_head, is_head)
    joined = tl.zeros((JOINED_ROWS, BLOCK_D), tl.float32)
    # Unrolled: the loads of several splits are in flight together.
    for split in tl.range(0, used_splits, loop_unroll_factor=8):
        part = first + split * GROUP
        weight = tl.exp2(tl.load(log_totals + part, mask=is_head, other=MASKED) - best)
        values = parts + part[:, None] * HEAD_DIM + dims[None, :]
        joined += weight[:, None] * tl.load(values, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    offsets = (cell * GROUP + group_head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out + offsets, joined / total[:, None], mask=is_head[:, None] & is_dim[None, :])


@dataclass(frozen=True)
class SplitWorkspace:
    """Memory through which the splits of a context are joined. Launches that share it must be on one stream.

    counters: int32 [sequences * kv_heads] or more: splits that have finished; 0 before and after every launch.
    parts: float32 [splits of all sequences and KV heads, group, head_dim] or more.  log_totals: float32, one for each
        row of `parts`.
    """

    counters: torch.Tensor
    parts: torch.Tensor
    log_totals: torch.Tensor


def split_workspace(group: int, head_dim: int, device: torch.device) -> SplitWorkspace:
    """Return the workspace for decode steps of any number of sequences.  group: query heads of a KV head.

    `num_splits` divides contexts only if there are fewer than MULTIPROCESSORS sequences and KV heads, into fewer than
    2 * MULTIPROCESSORS splits.
    """
    rows = 2 * MULTIPROCESSORS * group
    counters = torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device=device)
    return SplitWorkspace(counters, torch.empty(rows, head_dim, device=device), torch.empty(rows, device=device))


def num_splits(sequences: int, kv_heads: int, tiles: int) -> int:
    """Return the number of splits of each context: a power of two up to MAX_SPLITS. Depends on shapes only.

    As few as give every multiprocessor a program; at most one for each of the `tiles` that a block table can hold.
    """
    splits = 1
    while 2 * splits <= min(MAX_SPLITS, tiles) and sequences * kv_heads * splits < MULTIPROCESSORS:
        splits *= 2
    return splits


@dataclass(frozen=True)
class Tiling:
    """Launch parameters of an attention kernel.

    rows: (query, head) pairs of a program.  tokens: cached tokens of a loop step.
    num_stages: of the loop's pipeline: one fewer tile of keys and values is in flight.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def shared_kib(arch: int) -> int:
    """Return shared memory that a program may have on a device of compute capability `arch`, such as 90, in KiB."""
    return {80: 163, 87: 163, 86: 99, 89: 99, 120: 99, 121: 99}.get(arch, 227 if arch >= 90 else 64)


def architecture(device: torch.device) -> int:
    """Return the compute capability of a device, such as 90; 80 for Triton's interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def decode_tiling(dtype: torch.dtype, group: int, head_dim: int, arch: int) -> Tiling:
    """Return the tiling of decode steps: 72 to 104 KiB of keys and values in flight, without register spills.

    float32 does not use tensor cores (TF32 is less precise), and its products need more registers.
    """
    rows = max(16, triton.next_power_of_2(group))  # tl.dot's minimum
    small, latents = shared_kib(arch) <= 99, head_dim > 256
    if dtype.itemsize == 4:
        return Tiling(rows, 16, 8, 2 if small and latents else 3)
    if latents:
        return Tiling(rows, 16, 8, 2) if small else Tiling(rows, 32, 8, 3)
    tokens = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
    return Tiling(rows, tokens, 4 if rows <= 32 else 8, 4 if shared_kib(arch) > 163 else 3)


def prefill_tiling(dtype: torch.dtype, group: int, head_dim: int, arch: int, bias: bool, softcap: bool) -> Tiling:
    """Return the tiling of prefill: the largest that fits into registers and shared memory.

    bias: whether scores get a bias, of which every query head of a group has its own tile.  softcap: whether scores are
    capped, which takes registers.
    """
    large, small = shared_kib(arch) > 163, shared_kib(arch) <= 99
    bias_tiles = bias and group > 1
    if dtype.itemsize == 4:
        rows, tokens, num_stages = 16 if head_dim > 256 else 32, 16, 2 if small else 3
    elif head_dim > 256:  # of latents
        rows, tokens, num_stages = 32, 16 if small else 32, 2
    elif head_dim <= 64:
        rows, tokens, num_stages = 128, 128 if large and not (bias or softcap) else 64, 2 if bias_tiles else 3
    elif head_dim <= 128:
        rows, tokens, num_stages = 128, 64 if large else 32, 3
    else:
        rows, tokens, num_stages = 64, 32 if small or bias or softcap else 64, 2
    return Tiling(max(rows, triton.next_power_of_2(group)), tokens, 8, num_stages)


def decode_attention(
    q: torch.Tensor,
    kv: LayerKV,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    workspace: SplitWorkspace,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
    sinks: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    splits: int = 0,
    arch: int = 0,
) -> torch.Tensor:
    """Attention of the last token of each sequence, whose key and value are in the cache already. One launch.

    q [sequences, heads, head_dim]: heads are contiguous, sequences may be strided.
    kv: the layer's keys and values, in q's dtype.
    lengths int32 [sequences]: tokens in the cache, at least 1.  block_tables int32 [sequences, max_blocks].
    softcap, window: 0 is off. A query sees itself and the `window - 1` tokens before it; with a window below 0 those of
        its chunk of `-window` tokens.
    bias: None, or [heads, positions], added to the scaled scores, for every position of `block_tables` (ALiBi).
    rounded: scores are rounded to q's dtype step by step, as in Hugging Face's "eager" attention.
    sinks: None, or for each head the logit of a key without a value, [heads].
    q_rope: None, or in latent attention [sequences, heads, rope_dim], contiguous: q is of latents, its heads may be
        strided; `kv` has one head of head_dim + rope_dim elements, of which the first are the value too.
    splits: of each context, a power of two; 0: by `num_splits`.  arch: compute capability; 0: the device's.
    Returns [sequences, heads, head_dim] in q's dtype. A sequence's bits depend on its own context and on the number of
    splits only.
    """
    require_contiguous(q.device, torch.int32, lengths, *block_tables[:1])
    sequences, heads, head_dim = q.shape
    group = heads_of_program(heads, q.dtype) if q_rope is not None else heads // kv.kv_heads
    kv_heads = heads // group
    tiling = decode_tiling(q.dtype, group, head_dim, arch or architecture(q.device))
    tiles = triton.cdiv(block_tables.shape[1] * kv.block_size, tiling.tokens)
    splits = splits or num_splits(sequences, kv_heads, tiles)
    require_contiguous(q.device, torch.int32, workspace.counters)
    require_contiguous(q.device, torch.float32, workspace.parts, workspace.log_totals)
    if splits > 1:
        rows = sequences * heads * splits
        assert sequences * kv_heads <= len(workspace.counters), "the workspace is of fewer sequences"
        assert rows <= workspace.log_totals.numel() and rows * head_dim <= workspace.parts.numel(), "too many splits"
    out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    memory = (workspace.parts, workspace.log_totals, workspace.counters)
    extra = (lengths if tensor is None else tensor for tensor in (bias, sinks))
    tensors = (q, q if q_rope is None else q_rope, kv.addresses, lengths, block_tables, *extra, out, *memory)
    _decode_kernel[(sequences, kv_heads, splits)](
        *tensors,
        scale,
        window or UNBOUNDED,
        *_strides(q, q_rope, block_tables, bias),
        NUM_SPLITS=splits,
        JOINED_ROWS=triton.next_power_of_2(group),
        **_constants(q, kv, group, bias, softcap, rounded, tiling, sinks, q_rope),
    )
    return out


def heads_of_program(heads: int, dtype: torch.dtype) -> int:
    """Return the query heads of a program in latent attention, all of which read the same keys: a divisor of `heads`.
    More of them would need more registers."""
    most = LATENT_HEADS * 2 // dtype.itemsize
    return next(group for group in range(min(heads, most), 0, -1) if heads % group == 0)


def _strides(
    q: torch.Tensor, q_rope: torch.Tensor | None, block_tables: torch.Tensor, bias: torch.Tensor | None
) -> tuple[int, ...]:
    """Return elements from a row to the next one, and from a head of q to the next one; 0 without a tensor."""
    of_rope, of_bias = (0 if tensor is None else tensor.stride(0) for tensor in (q_rope, bias))
    return *q.stride()[:2], of_rope, block_tables.stride(0), of_bias


def _constants(
    q: torch.Tensor,
    kv: LayerKV,
    group: int,
    bias: torch.Tensor | None,
    softcap: float,
    rounded: bool,
    tiling: Tiling,
    sinks: torch.Tensor | None,
    q_rope: torch.Tensor | None,
) -> dict[str, int | float]:
    """Compile-time constants and launch options of both kernels. Asserts dtypes, devices and strides."""
    heads, head_dim = q.shape[1:]
    require_contiguous(q.device, torch.int64, kv.addresses)
    assert kv.dtype == q.dtype, f"queries are {q.dtype}, keys and values {kv.dtype}"
    rope_dim = 0 if q_rope is None else q_rope.shape[2]
    assert kv.head_dim == head_dim + rope_dim and heads % kv.kv_heads == 0, "heads of keys and queries differ"
    assert bias is None or (bias.device == q.device and bias.stride(1) == 1), "the bias of a head must be contiguous"
    assert q.stride(2) == 1, "the elements of a head must be contiguous"
    assert q_rope is not None or q.stride(1) == head_dim, "the heads of a token must be contiguous"
    if q_rope is not None:
        require_contiguous(q.device, q.dtype, q_rope)
        assert kv.kv_heads == 1 and not rounded and bias is None, "latent attention has one key, and no features"
    if sinks is not None:
        require_contiguous(q.device, sinks.dtype, sinks)
        assert len(sinks) == heads, f"{len(sinks)} sinks of {heads} heads"
    return {
        "KV_HEADS": heads // group,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_ROPE": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_SIZE": kv.block_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # tl.dot's minimum
        "SOFTCAP": softcap,
        "HAS_BIAS": bias is not None,
        "HAS_SINKS": sinks is not None,
        "ROUNDED": rounded,
        "TILE": tiling.tokens,
        "ROWS": tiling.rows,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


@triton.jit
def owner_of_block(cu_seqlens, owners, block, SIZE: tl.constexpr):
    """Return the owner whose items program `block` processes. Owner i has the items cu_seqlens[i] to cu_seqlens[i + 1].

    Owner i's blocks of SIZE items begin at block cu_seqlens[i] // SIZE + i, which leaves every owner enough of them. A
    block past its owner's items does nothing. The grid therefore needs items // SIZE + owners blocks, whatever values
    `cu_seqlens` has.
    """
    owner, after = block * 0, block * 0 + owners
    while owner + 1 < after:
        middle = (owner + after) // 2
        if tl.load(cu_seqlens + middle) // SIZE + middle <= block:
            owner = middle
        else:
            after = middle
    return owner


@triton.jit(do_not_specialize=VARYING)
def _prefill_kernel(
    q,
    q_rope,
    kv_addresses,
    cu_seqlens,
    lengths,
    block_tables,
    bias,
    sinks,
    out,
    sequences,
    scale,
    window,
    q_stride,
    q_head_stride,
    q_rope_stride,
    table_stride,
    bias_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program per KV head and ROWS // GROUP new tokens of one sequence, for all query heads of the KV head.

    Row r of its matrices is query head r % GROUP of the group, of new token r // GROUP. Writes out [tokens, heads,
    head_dim].  ROPE_DIM: as `_decode_kernel`'s.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    keys = tl.multiple_of(tl.load(kv_addresses).to(q.dtype), ALIGNED)
    values = tl.multiple_of(tl.load(kv_addresses + 1).to(q.dtype), ALIGNED)
    block, kv_head = tl.program_id(0), tl.program_id(1)
    row = owner_of_block(cu_seqlens, sequences, block, QUERIES)
    first = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - first
    length = tl.load(lengths + row)
    index = (block - first // QUERIES - row) * QUERIES
    if index < count:
        query = index + tl.arange(0, ROWS) // GROUP
        head = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
        position = length - count + query
        dims = tl.arange(0, BLOCK_D)
        is_query, is_dim = (query < count) & (tl.arange(0, ROWS) < QUERIES * GROUP), dims < HEAD_DIM
        query_mask = is_query[:, None] & is_dim[None, :]
        token = (first + query).to(tl.int64)[:, None]
        query_offsets = token * q_stride + _head_offsets(head, q_head_stride, HEAD_DIM, ROPE_DIM)[:, None]
        query_offsets += dims[None, :]
        query_rows = tl.load(q + query_offsets, mask=query_mask, other=0.0)
        query_rope = _rope_rows(q_rope + token * q_rope_stride, head, is_query, ROPE_DIM, BLOCK_ROPE)
        best = tl.full((ROWS,), MASKED, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sum_out = tl.zeros((ROWS, BLOCK_D), tl.float32)
        first_seen = _first_seen(position, window)
        begin = tl.maximum(_first_seen(length - count + index, window), 0) // TILE * TILE
        end = tl.minimum(length - count + index + QUERIES, length)
        table = block_tables + row.to(tl.int64) * table_stride
        blocks = _blocks(table, begin + tl.arange(0, TILE), end, BLOCK_SIZE)
        for start in range(begin, end, TILE):
            tokens = start + tl.arange(0, TILE)
            live = tokens < end
            token_offsets = _offsets(blocks, tokens, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM, ROPE_DIM)
            blocks = _blocks(table, tokens + TILE, end, BLOCK_SIZE)
            offsets, mask = token_offsets[:, None] + dims[None, :], live[:, None] & is_dim[None, :]
            k = tl.load(keys + offsets, mask=mask, other=0.0)
            key_bias = 0.0
            if HAS_BIAS and GROUP == 1:
                key_bias = tl.load(bias + kv_head * bias_stride + tokens, mask=live, other=0.0)[None, :]
            elif HAS_BIAS:
                key_bias = tl.load(bias + head[:, None] * bias_stride + tokens[None, :], mask=live[None, :], other=0.0)
            scores = _scores(query_rows, k, key_bias, scale, SOFTCAP, HAS_BIAS, ROUNDED)
            if ROPE_DIM:
                rope_keys = keys + token_offsets + HEAD_DIM
                scores += _rope_scores(query_rope, rope_keys, live, scale, ROPE_DIM, BLOCK_ROPE)
                v = k
            else:
                v = tl.load(values + offsets, mask=mask, other=0.0)
            visible = (tokens[None, :] <= position[:, None]) & (tokens[None, :] >= first_seen[:, None])
            best, total, sum_out = _softmax_step(tl.where(visible, scores, MASKED), v, best, total, sum_out)
        if HAS_SINKS:
            total = _with_sink(total, best, sinks + head, is_query)
        row_out = out + (token * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(row_out, sum_out / total[:, None], mask=query_mask)


def prefill_attention(
    q: torch.Tensor,
    kv: LayerKV,
    cu_seqlens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
    sinks: torch.Tensor | None = None,
    q_rope: torch.Tensor | None = None,
    arch: int = 0,
) -> torch.Tensor:
    """Return causal attention of each sequence's new tokens, the last ones of it in the cache, with or without a
    prefix.

    q [tokens, heads, head_dim]: packed without padding; heads are contiguous, tokens may be strided.
    cu_seqlens int32 [sequences + 1]: start of each sequence's new tokens in q, and the end.
    lengths int32 [sequences]: tokens in the cache, the new ones included.
    All other arguments as in `decode_attention`.  Returns [tokens, heads, head_dim] in q's dtype.
    """
    require_contiguous(q.device, torch.int32, cu_seqlens, lengths, *block_tables[:1])
    (tokens, heads, head_dim), sequences = q.shape, len(lengths)
    group = heads_of_program(heads, q.dtype) if q_rope is not None else heads // kv.kv_heads
    features = bias is not None, softcap > 0
    tiling = prefill_tiling(q.dtype, group, head_dim, arch or architecture(q.device), *features)
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    extra = (lengths if tensor is None else tensor for tensor in (bias, sinks))
    tensors = (q, q if q_rope is None else q_rope, kv.addresses, cu_seqlens, lengths, block_tables, *extra, out)
    window, strides = window or UNBOUNDED, _strides(q, q_rope, block_tables, bias)
    grid = (tokens // (tiling.rows // group) + sequences, heads // group)
    constants = _constants(q, kv, group, bias, softcap, rounded, tiling, sinks, q_rope)
    _prefill_kernel[grid](*tensors, sequences, scale, window, *strides, **constants)
    return out


class TritonAttention:
    """An AttentionBackend on the kernels of this file. It has every feature, needs no plan and runs in CUDA graphs.

    batch_invariant: decode steps run prefill's kernel, each with one new token of a sequence. It reads keys by tiles
        that begin at multiples of their size, in their order; a tile that a query does not see changes nothing. So a
        token's bits depend on its context alone. Contexts are not divided: few sequences leave multiprocessors idle.
    """

    def __init__(self, settings: AttentionSettings, device: torch.device, batch_invariant: bool = False):
        self.batch_invariant = batch_invariant
        self.settings, latent_dim = settings, settings.latent_dim
        group = settings.num_heads // max(settings.num_kv_heads, 1)  # a model may have no attention
        group = heads_of_program(settings.num_heads, settings.dtype) if latent_dim else group
        self.workspace = split_workspace(group, latent_dim or settings.head_dim, device)

    def plan(self, batch: SequenceTables, decoding: bool) -> None:
        """Nothing to prepare."""

    def attend(
        self,
        decoding: bool,
        q: torch.Tensor,
        kv: LayerBlocks,
        batch: SequenceTables,
        window: int,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        features = self.settings.scale, self.settings.softcap, window, bias, self.settings.rounded, sinks, q_rope
        if decoding and not self.batch_invariant:
            return decode_attention(q, kv.addresses, batch.lengths, batch.block_tables, self.workspace, *features)
        return prefill_attention(q, kv.addresses, batch.cu_seqlens, batch.lengths, batch.block_tables, *features)
