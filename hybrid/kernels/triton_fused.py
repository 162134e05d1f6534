"""Elementwise steps of a layer, one Triton kernel each: residual add and norm, RoPE and KV write, gated activation.

They read and write each element once, sum in float32, and round to the model's dtype where Hugging Face's layers do.
Tests run them in Triton's interpreter and compile them for sm_80 to sm_100; `pytest -m gpu` runs them on a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.kv_addresses import ALIGNMENT, LayerKV

# gelu_new: gelu_tanh, rounded at every step
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_new", "relu", "relu2", "xielu")
CLAMPED = "swiglu_clamped"  # GPT-OSS's, of gate and up
ACTIVATION_BLOCK = 1024  # columns per program of the activation
HEAD_BLOCK = 8  # heads per program of `rope_and_write`
ALIGNED = tl.constexpr(ALIGNMENT)  # bytes


@triton.jit
def tanh(x):
    """tanh in float32 with one exponential, absolute error 1e-7. Triton's interpreter does not have libdevice's."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def norm_of_row(
    h,
    weight,
    bias,
    columns,
    live,
    width,
    eps,
    offset,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    FLOAT32_WEIGHT: tl.constexpr,
):
    """Return the norm of a row, float32 [columns]; not rounded to `dtype` yet.  h float32 [columns], 0 where not
    `live`"""
    if CENTERED:
        h = tl.where(live, h - tl.sum(h, 0) / width, 0.0)
    h = h / tl.sqrt(tl.sum(h * h, 0) / width + eps)
    if not FLOAT32_WEIGHT:
        h = h.to(dtype).to(tl.float32)
    w = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32) + offset
    if CENTERED:  # a layer norm's 1 + w is a tensor of the model's dtype
        w = w.to(dtype).to(tl.float32)
    h *= w
    if HAS_BIAS:
        h += tl.load(bias + columns, mask=live, other=0.0).to(tl.float32)
    return h


@triton.jit
def _add_norm_kernel(
    x,
    post_weight,
    residual,
    weight,
    bias,
    normed,
    total,
    x_stride,
    residual_stride,
    width,
    eps,
    offset,
    multiplier,
    HAS_POST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    FLOAT32_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; writes `normed` if HAS_NORM and `total` if HAS_RESIDUAL, [rows, width], contiguous."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < width
    h = tl.load(x + row * x_stride + columns, mask=live, other=0.0).to(tl.float32)
    if HAS_POST:
        h = norm_of_row(h, post_weight, bias, columns, live, width, eps, offset, dtype, False, CENTERED, FLOAT32_WEIGHT)
        h = h.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + columns, mask=live, other=0.0).to(tl.float32)
        h = ((h * multiplier).to(dtype).to(tl.float32) + added).to(dtype)
        tl.store(total + row * width + columns, h, mask=live)
        h = h.to(tl.float32)
    if HAS_NORM:
        h = norm_of_row(h, weight, bias, columns, live, width, eps, offset, dtype, HAS_BIAS, CENTERED, FLOAT32_WEIGHT)
        tl.store(normed + row * width + columns, h.to(dtype), mask=live)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    float32_weight: bool = False,
    multiplier: float = 1.0,
    centered: bool = False,
    post_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of residual + multiplier * x, and that sum, which is rounded to x's dtype before the norm.

    x, residual [rows, width], rows may be strided; weight [width] or None; bias [width] or None. Returns (normed, sum),
    [rows, width] in x's dtype; without a residual the sum is x itself, without a weight `normed` is the sum.
    offset: added to the weight (Gemma).  float32_weight: the weight is applied before rounding (Gemma, OLMo2), as in
    layer norms; otherwise after (Llama).  centered: layer norm.
    post_weight: None, or [width]: x is first normed with this weight and rounded (Gemma 2, OLMo2).
    """
    rows, width = x.shape
    inputs = [x] if residual is None else [x, residual]
    assert all((tensor.dtype, tensor.device) == (x.dtype, x.device) for tensor in inputs), "the sum is of one dtype"
    assert all(tensor.stride(1) == 1 for tensor in inputs), "rows must be contiguous"
    assert residual is not None or (weight is not None and post_weight is None), "without a residual there is one norm"
    vectors = [vector for vector in (weight, bias, post_weight) if vector is not None]
    for vector in vectors:
        require_contiguous(x.device, vector.dtype, vector)
    total = x if residual is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    normed = total if weight is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    weights = [x if vector is None else vector for vector in (post_weight, residual, weight, bias)]
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    features: dict[str, int] = {"HAS_POST": post_weight is not None, "HAS_RESIDUAL": residual is not None}
    features |= {"HAS_NORM": weight is not None, "HAS_BIAS": bias is not None, "CENTERED": centered}
    features |= {"FLOAT32_WEIGHT": float32_weight or centered, "num_warps": 4 if block <= 4096 else 8}
    _add_norm_kernel[(rows,)](
        x, *weights, normed, total, *strides, width, eps, offset, multiplier, **features, BLOCK=block
    )
    return normed, total


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """x float32, rounded to `dtype`, and float32 again."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _softplus(x):
    """ln(1 + e^x), float32."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _activation_kernel(
    x,
    positive,
    negative,
    out,
    x_stride,
    width,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and BLOCK columns of out [rows, width]."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        gate = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "gelu_new":
        cube = _rounded(_rounded(gate * gate, dtype) * gate, dtype)  # torch.pow(x, 3) rounds both products
        inner = _rounded(gate + _rounded(0.044715 * cube, dtype), dtype)
        factor = _rounded(1.0 + _rounded(tanh(_rounded(0.7978845608028654 * inner, dtype)), dtype), dtype)
        gate = _rounded(0.5 * gate, dtype) * factor
    elif ACTIVATION == "xielu":
        above = _rounded(_softplus(tl.load(positive).to(tl.float32)), dtype)
        below = _rounded(0.5 + _rounded(_softplus(tl.load(negative).to(tl.float32)), dtype), dtype)
        low = tl.minimum(gate, _rounded(gate * 0.0 - 1e-6, dtype))
        series = low * (1.0 + low * (0.5 + low * (1.0 / 6.0 + low * (1.0 / 24.0 + low / 120.0))))
        expm1 = _rounded(tl.where(low > -0.1, series, tl.exp(low) - 1.0), dtype)
        curved = _rounded(_rounded(expm1 - gate, dtype) * below, dtype)
        squared = _rounded(_rounded(above * gate, dtype) * gate, dtype)
        gate = tl.where(gate > 0.0, squared, curved) + _rounded(0.5 * gate, dtype)
    elif ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, limit)
        gate = gate * _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, dtype))), dtype)
    else:
        gate = tl.maximum(gate, 0.0)
        if ACTIVATION == "relu2":
            gate = gate * gate
    if GATED:
        up = tl.load(x + row * x_stride + width + columns, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu_clamped":
            up = _rounded(tl.minimum(tl.maximum(up, -limit), limit) + 1.0, dtype)
        gate = _rounded(gate, dtype) * up
    tl.store(out + row * width + columns, gate.to(dtype), mask=live)


def activated(
    x: torch.Tensor,
    activation: str,
    gated: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    parameters: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """act(x), or if `gated` act(gate) * up of x = (gate, up), with the activation rounded before the product.

    x [rows, width] or [rows, 2 * width], gate before up; rows may be strided. Returns [rows, width], same dtype.
    activation: one of ACTIVATIONS; or CLAMPED, gated, with its `alpha` and `limit`.  parameters: xIELU's two, [1] each.
    """
    known = (*ACTIVATIONS, *([CLAMPED] if gated else []))
    assert activation in known, f"activation {activation!r} is not one of {known}"
    assert x.stride(1) == 1, "rows must be contiguous"
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(ACTIVATION_BLOCK, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    positive, negative = (x, x) if parameters is None else parameters
    _activation_kernel[grid](
        x, positive, negative, out, x.stride(0), width, alpha, limit, ACTIVATION=activation, GATED=gated, BLOCK=block
    )
    return out


@triton.jit
def _sigmoid_gate_kernel(
    x,
    gate,
    out,
    gate_stride,
    gate_head_stride,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK elements of x [tokens, WIDTH].  SHARED: a head has one gate."""
    token, element = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, at = element < WIDTH, gate + token * gate_stride + element // HEAD_DIM * gate_head_stride
    if not SHARED:
        at += element % HEAD_DIM
    factor = tl.load(at, mask=live, other=0.0).to(tl.float32)
    factor = _rounded(1.0 / (1.0 + tl.exp(-factor)), x.dtype.element_ty)
    value = tl.load(x + token * WIDTH + element, mask=live, other=0.0).to(tl.float32) * factor
    tl.store(out + token * WIDTH + element, value.to(x.dtype.element_ty), mask=live)


def gated_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), with the sigmoid rounded.  x [tokens, heads, head_dim], contiguous; gate [tokens, heads,
    head_dim or 1]: tokens and heads may be strided."""
    tokens, heads, head_dim = x.shape
    require_contiguous(x.device, gate.dtype, x)
    assert gate.stride(2) == 1 and gate.shape[:2] == x.shape[:2], "each head has a gate, whose elements are contiguous"
    out, width, block = torch.empty_like(x), heads * head_dim, 1024
    constants = {"WIDTH": width, "HEAD_DIM": head_dim, "SHARED": gate.shape[2] == 1 < head_dim, "BLOCK": block}
    _sigmoid_gate_kernel[(tokens, triton.cdiv(width, block))](x, gate, out, *gate.stride()[:2], **constants)
    return out


@triton.jit
def _qk_normed(x, inverse_rms, weight, offset, live, FLOAT32_WEIGHT: tl.constexpr):
    """x * inverse_rms * (weight + offset) in x's dtype; unless FLOAT32_WEIGHT, also rounded before the weight.

    x [heads, columns], inverse_rms float32 [heads, 1], weight: pointers [1, columns], live [1, columns].
    """
    h = x.to(tl.float32) * inverse_rms
    if not FLOAT32_WEIGHT:
        h = h.to(x.dtype).to(tl.float32)
    return (h * (tl.load(weight, mask=live, other=0.0).to(tl.float32) + offset)).to(x.dtype)


@triton.jit
def rope_sum(x, partner_x, before, cos, sin, mask):
    """x * cos + rotate_half(x) * sin: products are rounded to the dtype of cos and sin, then their sum to x's.

    partner_x: the other element of each pair.  before: whether x is the first.  cos, sin: pointers, of `mask`.
    """
    dtype: tl.constexpr = cos.dtype.element_ty
    c = tl.load(cos, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    x_cos = (x.to(tl.float32) * c).to(dtype).to(tl.float32)
    partner_sin = (partner_x.to(tl.float32) * tl.where(before, -s, s)).to(dtype).to(tl.float32)
    return (x_cos + partner_sin).to(x.dtype)


@triton.jit
def _keep_kernel(hidden, slot_mapping, address, width, BLOCK: tl.constexpr):
    """One program per token and BLOCK columns."""
    token, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    kept = tl.load(address).to(tl.pointer_type(hidden.dtype.element_ty)) + tl.load(slot_mapping + token) * width
    tl.store(kept + columns, tl.load(hidden + token.to(tl.int64) * width + columns, mask=live), mask=live)


def keep_hidden_states(hidden: torch.Tensor, slot_mapping: torch.Tensor, address: torch.Tensor) -> None:
    """Copy the last layer's output of each token to its slot of `PagedKV.hidden_states`, without waiting.

    hidden [tokens, width].  slot_mapping: int64 [tokens], the cache position of each token.
    address: int64 [1], on the device: of the tensor [slots, width], of hidden's dtype, that is written. A CUDA graph
        reads it from here, and so stays valid when the blocks are allocated again.
    """
    require_contiguous(hidden.device, hidden.dtype, hidden)
    require_contiguous(hidden.device, torch.int64, slot_mapping, address)
    block, width = 1024, hidden.shape[1]
    _keep_kernel[(len(hidden), triton.cdiv(width, block))](hidden, slot_mapping, address, width, BLOCK=block)


@triton.jit
def _rope_and_write_kernel(
    q,
    k,
    v,
    q_norm,
    k_norm,
    cos,
    sin,
    rows,
    slot_mapping,
    q_out,
    kv_addresses,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    norm_eps,
    norm_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    FLOAT32_WEIGHT: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    """One program per token and BLOCK_H heads: first the blocks of q, then those of k, then those of v.

    WHOLE_ROW: the norm is of all heads of a token together; every program reads the row's other heads too.
    NORM_LAST: the norm, of each head, is after rope.
    """
    keys = tl.multiple_of(tl.load(kv_addresses).to(q.dtype), ALIGNED)
    values = tl.multiple_of(tl.load(kv_addresses + 1).to(q.dtype), ALIGNED)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    block_row = tl.load(slot_mapping + token) * (KV_HEADS * HEAD_DIM)
    source, target, norm = v + token * v_stride, values + block_row, k_norm
    first, heads, head_stride = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H, block * 0 + KV_HEADS, block * 0 + HEAD_DIM
    if block < Q_BLOCKS:
        source, target, norm = q + token * q_stride, q_out + token * (HEADS * HEAD_DIM), q_norm
        first, heads, head_stride = block * BLOCK_H, block * 0 + HEADS, block * 0 + q_head_stride
    elif block < Q_BLOCKS + KV_BLOCKS:
        source, target = k + token * k_stride, keys + block_row
        first = (block - Q_BLOCKS) * BLOCK_H
    head = first + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    live = (head < heads) & (column < HEAD_DIM)
    x = tl.load(source + head * head_stride + column, mask=live, other=0.0)
    if block < Q_BLOCKS + KV_BLOCKS:
        inverse_rms = 1.0
        if HAS_NORM and not NORM_LAST:
            if WHOLE_ROW:
                squares = tl.zeros((BLOCK_ROW,), tl.float32)
                for start in range(0, heads * HEAD_DIM, BLOCK_ROW):
                    element = start + tl.arange(0, BLOCK_ROW)
                    part = tl.load(source + element, mask=element < heads * HEAD_DIM, other=0.0).to(tl.float32)
                    squares += part * part
                inverse_rms = 1.0 / tl.sqrt(tl.sum(squares, 0) / (heads * HEAD_DIM) + norm_eps)
                weight, weight_live = norm + head * HEAD_DIM, live
            else:
                square = x.to(tl.float32) * x.to(tl.float32)
                inverse_rms = (1.0 / tl.sqrt(tl.sum(square, 1) / HEAD_DIM + norm_eps))[:, None]
                weight, weight_live = norm, column < HEAD_DIM
            x = _qk_normed(x, inverse_rms, weight + column, norm_offset, weight_live, FLOAT32_WEIGHT)
        if ROTARY > 0:
            half: tl.constexpr = ROTARY // 2
            is_rotary = column < ROTARY
            if INTERLEAVED:
                before, partner, angle = column % 2 == 0, column ^ 1, column // 2
            else:
                before = column < half
                partner, angle = tl.where(before, column + half, column - half), column % half
            partner_x = tl.load(source + head * head_stride + partner, mask=live & is_rotary, other=0.0)
            if HAS_NORM and not NORM_LAST:
                weight_live = weight_live & is_rotary
                weight += partner
                partner_x = _qk_normed(partner_x, inverse_rms, weight, norm_offset, weight_live, FLOAT32_WEIGHT)
            entry = tl.load(rows + token).to(tl.int64) * half + angle
            x = rope_sum(x, partner_x, before, cos + entry, sin + entry, is_rotary)
        if HAS_NORM and NORM_LAST:
            square = x.to(tl.float32) * x.to(tl.float32)
            inverse_rms = (1.0 / tl.sqrt(tl.sum(square, 1) / HEAD_DIM + norm_eps))[:, None]
            x = _qk_normed(x, inverse_rms, norm + column, norm_offset, column < HEAD_DIM, FLOAT32_WEIGHT)
    tl.store(target + head * HEAD_DIM + column, x, mask=live)


@dataclass(frozen=True)
class QKNorm:
    """RMS norm of q and k: of each head, or of all heads of a token together.

    q, k: weights, [head_dim] or, of all heads, [heads * head_dim] and [kv_heads * head_dim].
    eps, offset, float32_weight: as in `add_norm`.  after_rope: of each head, after RoPE; otherwise before it.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    offset: float = 0.0
    float32_weight: bool = False
    after_rope: bool = False


def rope_and_write(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: LayerKV,
    interleaved: bool = False,
    norm: QKNorm | None = None,
) -> torch.Tensor:
    """Norm and RoPE of q and k; writes k and v to the KV cache.  Returns the new q [tokens, heads, head_dim].

    q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim]: tokens may be strided, and q's heads, unless the
        norm is of all of them.  k and v None: q alone, of a layer that reads another one's keys and values.
    cos, sin [n, rotary_dim / 2]: in q's dtype to round every product to it, in float32 to round only the result; None:
        no RoPE.
    rows: integers [tokens], the row of cos and sin for each token.
    slot_mapping: int64 [tokens], block * BLOCK_SIZE + offset in the block, for each token's key and value.
    kv: the layer's keys and values, in q's dtype, written in place.
    interleaved: RoPE pairs are neighbours, not halves.  norm: of q and k; None: no norm.
    Returns q itself if there is neither RoPE nor norm, and the heads of a token are contiguous.
    """
    (tokens, heads, head_dim), kv_heads, writes = q.shape, kv.kv_heads, k is not None
    k, v = (k, v) if k is not None and v is not None else (q[:, :kv_heads], q[:, :kv_heads])
    require_contiguous(q.device, torch.int64, kv.addresses, slot_mapping)
    require_contiguous(q.device, rows.dtype, rows)
    if cos is not None:
        require_contiguous(q.device, cos.dtype, cos, sin)
    whole_row = False
    if norm is not None:
        require_contiguous(q.device, norm.q.dtype, norm.q, norm.k)
        whole_row = norm.q.numel() != head_dim or norm.k.numel() != head_dim
        sizes = (heads * head_dim, kv_heads * head_dim) if whole_row else (head_dim, head_dim)
        assert (norm.q.numel(), norm.k.numel()) == sizes, "the norms are of each head, or of all heads of a token"
        assert not (whole_row and norm.after_rope), "norms after rope are of each head"
    assert k.dtype == v.dtype == q.dtype, f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}"
    assert kv.dtype == q.dtype, f"queries are {q.dtype}, cached keys and values {kv.dtype}"
    assert kv.head_dim == head_dim and not (writes and k.shape[1] != kv_heads), "heads of keys and cached keys differ"
    assert q.stride(2) == 1 and all(x.stride()[1:] == (head_dim, 1) for x in (k, v)), "heads must be contiguous"
    assert not whole_row or q.stride(1) == head_dim, "the heads of a token must be contiguous"
    rotary = 0 if cos is None else 2 * cos.shape[1]
    changes = rotary > 0 or norm is not None or q.stride(1) != head_dim
    q_out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device) if changes else q
    q_blocks = triton.cdiv(heads, HEAD_BLOCK) if changes else 0
    kv_blocks = triton.cdiv(kv_heads, HEAD_BLOCK) if writes else 0
    if not q_blocks + kv_blocks:
        return q
    eps, offset, float32_weight = (0.0, 0.0, False) if norm is None else (norm.eps, norm.offset, norm.float32_weight)
    weights = (q, k) if norm is None else (norm.q, norm.k)
    tables = (rows, rows) if cos is None else (cos, sin)
    tensors = (q, k, v, *weights, *tables, rows, slot_mapping, q_out, kv.addresses)
    strides = (*q.stride()[:2], k.stride(0), v.stride(0))
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROTARY": rotary}
    constants |= {"Q_BLOCKS": q_blocks, "KV_BLOCKS": kv_blocks, "BLOCK_H": HEAD_BLOCK}
    features: dict[str, int] = {
        "INTERLEAVED": interleaved,
        "HAS_NORM": norm is not None,
        "FLOAT32_WEIGHT": float32_weight,
    }
    features |= {"WHOLE_ROW": whole_row, "BLOCK_ROW": 1024, "NORM_LAST": norm is not None and norm.after_rope}
    _rope_and_write_kernel[(tokens, q_blocks + 2 * kv_blocks)](
        *tensors, *strides, eps, offset, **constants, **features, BLOCK_D=triton.next_power_of_2(head_dim)
    )
    return q_out
