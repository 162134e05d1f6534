"""The step of latent attention between its projections in Triton: norm of the latent, RoPE, and the write to the cache.

Attention itself is that of `triton_attention`, over one key for all heads.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.kv_addresses import ALIGNMENT, LayerKV
from hybrid.kernels.triton_fused import HEAD_BLOCK, norm_of_row, rope_sum

ALIGNED = tl.constexpr(ALIGNMENT)  # bytes


@triton.jit
def _latent_kernel(
    kv,
    q,
    weight,
    cos,
    sin,
    positions,
    slot_mapping,
    q_rope,
    kv_addresses,
    kv_stride,
    q_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLOAT32_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program per token for its latent and key, and one for each BLOCK_H heads of its queries."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = q + token * q_stride + HEAD_DIM - ROPE, q_rope + token * (HEADS * ROPE)
    first, heads = (block - 1) * BLOCK_H, block * 0 + HEADS
    if block == 0:
        keys = tl.multiple_of(tl.load(kv_addresses).to(q.dtype), ALIGNED)
        cached = keys + tl.load(slot_mapping + token) * (LATENT + ROPE)
        new, element = kv + token * kv_stride, tl.arange(0, BLOCK_L)
        is_latent = element < LATENT
        latent = tl.load(new + element, mask=is_latent, other=0.0)
        dtype: tl.constexpr = kv.dtype.element_ty
        latent = norm_of_row(
            latent.to(tl.float32),
            weight,
            weight,
            element,
            is_latent,
            LATENT,
            eps,
            offset,
            dtype,
            False,
            False,
            FLOAT32_WEIGHT,
        )
        tl.store(cached + element, latent.to(dtype), mask=is_latent)
        source, target = new + LATENT, cached + LATENT
        first, heads = block * 0, block * 0 + 1
    head, column = first + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_R)[None, :]
    live = (head < heads) & (column < ROPE)
    source += head * HEAD_DIM
    x = tl.load(source + column, mask=live, other=0.0)
    if HAS_ROPE:
        half: tl.constexpr = ROPE // 2
        if INTERLEAVED:
            before, partner, angle = column % 2 == 0, column ^ 1, column // 2
        else:
            before = column < half
            partner, angle = tl.where(before, column + half, column - half), column % half
        entry = tl.load(positions + token).to(tl.int64) * half + angle
        partner_x = tl.load(source + partner, mask=live, other=0.0)
        x = rope_sum(x, partner_x, before, cos + entry, sin + entry, column < ROPE)
    tl.store(target + head * ROPE + column, x, mask=live)


def latent_and_rope(
    kv: torch.Tensor,
    q: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: LayerKV,
    eps: float,
    offset: float = 0.0,
    float32_weight: bool = False,
    interleaved: bool = False,
) -> torch.Tensor:
    """Write the normed latent of each token, and its key after RoPE, to the cache.  Returns the last elements of q, as
    many as the key has, after RoPE, [tokens, heads, rope_dim], contiguous.

    kv [tokens, latent_dim + rope_dim], q [tokens, heads, head_dim]: tokens may be strided.  weight [latent_dim]: of the
    norm, with `eps`, `offset` and `float32_weight` as in `add_norm`.
    cos, sin, positions, slot_mapping, interleaved: as in `rope_and_write`.  cache: of one head, in q's dtype.
    """
    (tokens, heads, head_dim), latent_dim = q.shape, len(weight)
    rope_dim = kv.shape[1] - latent_dim
    require_contiguous(q.device, q.dtype, weight)
    require_contiguous(q.device, torch.int64, cache.addresses, slot_mapping)
    require_contiguous(q.device, positions.dtype, positions)
    if cos is not None:
        require_contiguous(q.device, cos.dtype, cos, sin)
        assert 2 * cos.shape[1] == rope_dim, "RoPE is of the whole key that heads share"
    assert kv.dtype == cache.dtype == q.dtype, f"queries are {q.dtype}, latents {kv.dtype}, the cache {cache.dtype}"
    assert (cache.kv_heads, cache.head_dim) == (1, kv.shape[1]), "the cache is of one head, of a latent and a key"
    assert kv.stride(1) == 1 and q.stride()[1:] == (head_dim, 1), "the heads of a token must be contiguous"
    q_rope = torch.empty(tokens, heads, rope_dim, dtype=q.dtype, device=q.device)
    tables = (positions, positions) if cos is None else (cos, sin)
    tensors = kv, q, weight, *tables, positions, slot_mapping, q_rope, cache.addresses
    sizes = {"HEADS": heads, "HEAD_DIM": head_dim, "LATENT": latent_dim, "ROPE": rope_dim}
    features = {"HAS_ROPE": cos is not None, "INTERLEAVED": interleaved, "FLOAT32_WEIGHT": float32_weight}
    blocks = {
        "BLOCK_H": HEAD_BLOCK,
        "BLOCK_L": triton.next_power_of_2(latent_dim),
        "BLOCK_R": triton.next_power_of_2(rope_dim),
    }
    grid = tokens, 1 + triton.cdiv(heads, HEAD_BLOCK)
    _latent_kernel[grid](*tensors, kv.stride(0), q.stride(0), eps, offset, **sizes, **features, **blocks)
    return q_rope
