"""Paged attention in Triton, for prefill and for decode steps.

Both kernels read only blocks with live tokens, never repeat a KV head for the query heads that share it, and sum in
float32. Grids depend on shapes, not on values on the device, so that a decode step can be captured in a CUDA graph.
torch's own `varlen_attn` (2.13) takes block tables too, but only with blocks of at least 256 tokens, in float16 and
bfloat16, and without soft caps and ALiBi.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.triton_fused import tanh

# Cached tokens that one program of a decode step reads. Fixed, so that the order of a sequence's sums depends only on
# its own length, not on its batch.
SPLIT = 256
# Arguments that differ from batch to batch and must not cause a recompilation.
VARYING = ("sequences", "splits", "table_stride", "bias_stride")
UNBOUNDED = 2**30  # the window of a query that sees all earlier tokens
# The score of a masked key. Finite, so that a query whose first tiles are fully masked gets no NaN; the weights of
# these tiles become 0 at the first key that it sees.
MASKED = tl.constexpr(-1.0e30)


@triton.jit
def _scores(q, k, bias, scale, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
    """Scores before masking, float32 [queries, tokens].

    q [queries, dims], k [tokens, dims]; bias: added to the scaled scores, [queries or 1, tokens].
    ROUNDED: every step is rounded to q's dtype.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_BIAS:
        scores = _rounded(scores * scale + bias.to(tl.float32), q, ROUNDED)
    else:
        scores = _rounded(_rounded(scores, q, ROUNDED) * scale, q, ROUNDED)
    if SOFTCAP > 0:
        scores = _rounded(scores / SOFTCAP, q, ROUNDED)
        scores = _rounded(_rounded(tanh(scores), q, ROUNDED) * SOFTCAP, q, ROUNDED)
    return scores


@triton.jit
def _rounded(x, like, ROUNDED: tl.constexpr):
    """x float32; if ROUNDED, rounded to the dtype of `like`, and float32 again."""
    if ROUNDED:
        x = x.to(like.dtype).to(tl.float32)
    return x


@triton.jit
def _block_rows(table, tokens, live, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Element offsets of the tokens' keys or values in the KV cache.  int64 [tokens]

    table: the sequence's block table.  tokens: positions.
    """
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    return ((blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def _softmax_step(scores, v, best, total, out):
    """One step of an online softmax: the new (best, total, out) after a tile.

    scores float32 [queries, tokens], v [tokens, dims]; best (running maximum) and total (running sum of weights)
    float32 [queries]; out (weighted sum of values, not divided yet) float32 [queries, dims].
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - new_best[:, None])
    shrink = tl.exp(best - new_best)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total * shrink + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=VARYING)
def _decode_kernel(
    q,
    keys,
    values,
    lengths,
    block_tables,
    bias,
    parts,
    log_totals,
    scale,
    window,
    q_stride,
    table_stride,
    bias_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program per sequence, KV head and split of SPLIT cached tokens, for all query heads of the KV head.

    Writes the split's attention output to parts [sequences, heads, splits, head_dim] and the log-sum-exp of its scores
    to log_totals float32 [sequences, heads, splits]. A split outside the window or the sequence writes nothing.
    """
    row, kv_head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + row)
    begin = tl.maximum(split * SPLIT, length - window)
    end = tl.minimum(split * SPLIT + SPLIT, length)
    if begin < end:
        group_head = tl.arange(0, BLOCK_G)
        head = kv_head * GROUP + group_head
        dims = tl.arange(0, BLOCK_D)
        is_head, is_dim = group_head < GROUP, dims < HEAD_DIM
        query_offsets = row.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(q + query_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)
        best = tl.full((BLOCK_G,), MASKED, tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        for start in range(begin // TILE * TILE, end, TILE):
            tokens = start + tl.arange(0, TILE)
            live = (tokens >= begin) & (tokens < end)
            block_rows = _block_rows(table, tokens, live, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            offsets, mask = block_rows[:, None] + dims[None, :], live[:, None] & is_dim[None, :]
            k = tl.load(keys + offsets, mask=mask, other=0.0)
            key_bias = 0.0
            if HAS_BIAS:
                bias_at = bias + head[:, None] * bias_stride + tokens[None, :]
                key_bias = tl.load(bias_at, mask=is_head[:, None] & live[None, :], other=0.0)
            scores = _scores(query, k, key_bias, scale, SOFTCAP, HAS_BIAS, ROUNDED)
            v = tl.load(values + offsets, mask=mask, other=0.0)
            best, total, out = _softmax_step(tl.where(live[None, :], scores, MASKED), v, best, total, out)
        part = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
        part_out = parts + part[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_out, out / total[:, None], mask=is_head[:, None] & is_dim[None, :])
        tl.store(log_totals + part, best + tl.log(total), mask=is_head)


@triton.jit(do_not_specialize=VARYING)
def _join_kernel(
    parts, log_totals, lengths, out, window, splits, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program per sequence and head: combines its splits in order into out [sequences, heads, head_dim]."""
    row, head = tl.program_id(0), tl.program_id(1)
    cell = row.to(tl.int64) * tl.num_programs(1) + head
    length = tl.load(lengths + row)
    dims = tl.arange(0, BLOCK_D)
    best, total = tl.full((), MASKED, tl.float32), tl.full((), 0.0, tl.float32)
    sum_out = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(tl.maximum(length - window, 0) // SPLIT, tl.cdiv(length, SPLIT)):
        log_total = tl.load(log_totals + cell * splits + split)
        part = tl.load(parts + (cell * splits + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        new_best = tl.maximum(best, log_total)
        shrink, weight = tl.exp(best - new_best), tl.exp(log_total - new_best)
        sum_out, total, best = sum_out * shrink + part * weight, total * shrink + weight, new_best
    tl.store(out + cell * HEAD_DIM + dims, sum_out / total, mask=dims < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
) -> torch.Tensor:
    """Attention of the last token of each sequence, whose key and value are in the cache already.

    q [sequences, heads, head_dim]: heads are contiguous, sequences may be strided.
    keys, values [blocks, BLOCK_SIZE, kv_heads, head_dim], q's dtype, contiguous.
    lengths int32 [sequences]: tokens in the cache, at least 1.  block_tables int32 [sequences, max_blocks].
    softcap, window: 0 is off. A query sees itself and the `window - 1` tokens before it.
    bias: None, or [heads, positions], added to the scaled scores, for every position of `block_tables` (ALiBi).
    rounded: scores are rounded to q's dtype step by step, as in Hugging Face's "eager" attention.
    Gives [sequences, heads, head_dim] in q's dtype.
    """
    require_contiguous(q.device, torch.int32, lengths, *block_tables[:1])
    constants = _constants(q, keys, values, bias, softcap, rounded)
    sequences, heads, head_dim = q.shape
    out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    splits = triton.cdiv(block_tables.shape[1] * keys.shape[1], SPLIT)
    parts, window = out, window or UNBOUNDED
    if splits > 1:
        parts = torch.empty((sequences, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    log_totals = torch.empty((sequences, heads, splits), dtype=torch.float32, device=q.device)
    tensors = (q, keys, values, lengths, block_tables, log_totals if bias is None else bias, parts, log_totals)
    block_g = max(16, triton.next_power_of_2(constants["GROUP"]))  # tl.dot's minimum
    grid = (sequences, keys.shape[2], splits)
    _decode_kernel[grid](
        *tensors, scale, window, *_strides(q, block_tables, bias), SPLIT=SPLIT, BLOCK_G=block_g, **constants
    )
    if splits > 1:
        sizes = {"HEAD_DIM": head_dim, "SPLIT": SPLIT, "BLOCK_D": constants["BLOCK_D"]}
        _join_kernel[(sequences, heads)](parts, log_totals, lengths, out, window, splits, **sizes)
    return out


def _strides(q: torch.Tensor, block_tables: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int, int]:
    """Elements from a row to the next one; 0 without a bias."""
    return q.stride(0), block_tables.stride(0), 0 if bias is None else bias.stride(0)


def _constants(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, softcap: float, rounded: bool
) -> dict[str, int | float]:
    """Compile-time constants of both kernels.  Shapes as in `prefill_attention`. Asserts dtypes, devices and strides.

    TILE (cached tokens per loop step) and num_warps: the widest tile that compiles for sm_80 and sm_90 without register
    spills. float32 does not use tensor cores (TF32 is less precise), and its products need more registers.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    require_contiguous(q.device, q.dtype, keys, values)
    assert bias is None or (bias.device == q.device and bias.stride(1) == 1), "the bias of a head must be contiguous"
    assert q.stride()[1:] == (head_dim, 1), "the heads of a token must be contiguous"
    tile, num_warps = (16, 8) if q.dtype.itemsize == 4 else (64, 4) if head_dim <= 128 else (32, 8)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # tl.dot's minimum
        "SOFTCAP": softcap,
        "HAS_BIAS": bias is not None,
        "ROUNDED": rounded,
        "TILE": tile,
        "num_warps": num_warps,
    }


@triton.jit
def owner_of_block(cu_seqlens, owners, block, SIZE: tl.constexpr):
    """The owner whose items program `block` processes. Owner i has the items cu_seqlens[i] to cu_seqlens[i + 1].

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
    keys,
    values,
    cu_seqlens,
    lengths,
    block_tables,
    bias,
    out,
    sequences,
    scale,
    window,
    q_stride,
    table_stride,
    bias_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program per query head and up to BLOCK_Q new tokens of one sequence; writes out [tokens, heads, head_dim]."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = owner_of_block(cu_seqlens, sequences, block, BLOCK_Q)
    first = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - first
    length = tl.load(lengths + row)
    index = (block - first // BLOCK_Q - row) * BLOCK_Q
    if index < count:
        query = index + tl.arange(0, BLOCK_Q)
        position = length - count + query
        dims = tl.arange(0, BLOCK_D)
        is_query, is_dim = query < count, dims < HEAD_DIM
        query_mask = is_query[:, None] & is_dim[None, :]
        token = (first + query).to(tl.int64)[:, None]
        query_rows = tl.load(q + token * q_stride + head * HEAD_DIM + dims[None, :], mask=query_mask, other=0.0)
        best = tl.full((BLOCK_Q,), MASKED, tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        sum_out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        begin = tl.maximum(length - count + index - window + 1, 0) // TILE * TILE
        end = tl.minimum(length - count + index + BLOCK_Q, length)
        table = block_tables + row.to(tl.int64) * table_stride
        for start in range(begin, end, TILE):
            tokens = start + tl.arange(0, TILE)
            live = tokens < end
            block_rows = _block_rows(table, tokens, live, head // GROUP, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            offsets, mask = block_rows[:, None] + dims[None, :], live[:, None] & is_dim[None, :]
            k = tl.load(keys + offsets, mask=mask, other=0.0)
            key_bias = 0.0
            if HAS_BIAS:
                key_bias = tl.load(bias + head * bias_stride + tokens, mask=live, other=0.0)[None, :]
            scores = _scores(query_rows, k, key_bias, scale, SOFTCAP, HAS_BIAS, ROUNDED)
            v = tl.load(values + offsets, mask=mask, other=0.0)
            distance = position[:, None] - tokens[None, :]
            visible = (distance >= 0) & (distance < window) & live[None, :]
            best, total, sum_out = _softmax_step(tl.where(visible, scores, MASKED), v, best, total, sum_out)
        row_out = out + (token * (KV_HEADS * GROUP) + head) * HEAD_DIM + dims[None, :]
        tl.store(row_out, sum_out / total[:, None], mask=query_mask)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens, the last ones of it in the cache, with or without a prefix.

    q [tokens, heads, head_dim]: packed without padding; heads are contiguous, tokens may be strided.
    cu_seqlens int32 [sequences + 1]: start of each sequence's new tokens in q, and the end.
    lengths int32 [sequences]: tokens in the cache, the new ones included.
    All other arguments as in `decode_attention`.  Gives [tokens, heads, head_dim] in q's dtype.
    """
    require_contiguous(q.device, torch.int32, cu_seqlens, lengths, *block_tables[:1])
    constants = _constants(q, keys, values, bias, softcap, rounded)
    (tokens, heads, head_dim), sequences = q.shape, len(lengths)
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    block = 64 if q.dtype.itemsize == 2 else 32
    tensors = (q, keys, values, cu_seqlens, lengths, block_tables, lengths if bias is None else bias, out)
    window, strides = window or UNBOUNDED, _strides(q, block_tables, bias)
    grid = (tokens // block + sequences, heads)
    _prefill_kernel[grid](*tensors, sequences, scale, window, *strides, BLOCK_Q=block, **constants)
    return out
