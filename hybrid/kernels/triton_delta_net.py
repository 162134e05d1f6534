"""Gated delta nets and Kimi delta attention in Triton: between the projections a decode step is one launch.

They round where `torch_delta_net` does. A prefill has launches for the convolution, for the ring of its latest inputs,
for the rule, and for the gated norm. The rule's programs divide a head's values, hold their part of its matrix in
registers, and go through the new tokens of one sequence: from token to token, or by chunks.

By chunks (arXiv:2412.06464, section 3.3), of keys k, values v, betas b and the decay Γ_ij from token j to token i: what
the tokens of a chunk write, one row each, is N = T (V - e^g K S) where S is the state before the chunk, e^g the decay
since its beginning, and T = (I + A)^-1 diag(b), A_ij = b_i Γ_ij k_i·k_j for j < i. They read e^g Q S + (Γ ∘ Q K^T) N. T
depends on no state, so that a launch before computes it for all chunks at once; the matrices W and U that FLA stores,
four times as large at 128 keys and values, are not needed.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.triton_recurrent import (
    CHUNK,
    DECODE_CELLS,
    SCAN_CELLS,
    KernelLayer,
    convolve_step,
    decays_between,
    new_tokens,
    product,
    rounded,
    sigmoid,
    softplus,
    state_of,
    warps_of,
)

CHUNK_VALUES = 16  # of a program that goes by chunks: the fewest rows of a product


def delta_net(mixer: GatedDeltaNet, x: torch.Tensor, layer: KernelLayer) -> torch.Tensor:
    """`mixer.mixed` for x [tokens, hidden]."""
    linear = layer.linear
    qkv, z = mixer.projected(x, layer)
    b, a = linear("delta_ba", x).chunk(2, dim=-1)
    sizes = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
    eps = mixer.norm_eps or layer.eps
    return linear("delta_o", delta_rule(qkv, z, b, a, layer, *sizes, mixer.beta_scale, eps, by_key=False))


def kimi_delta(mixer: KimiDeltaAttention, x: torch.Tensor, layer: KernelLayer) -> torch.Tensor:
    """`mixer.mixed` for x [tokens, hidden]."""
    linear = layer.linear
    b, forget, z = linear("delta_ba", x).split([mixer.heads, mixer.head_dim, mixer.head_dim], dim=-1)
    qkv, forget, z = linear("delta_conv_in", x), linear("delta_forget_b", forget), linear("delta_z_b", z)
    sizes = mixer.heads, mixer.heads, mixer.head_dim, mixer.head_dim
    return linear("delta_o", delta_rule(qkv, z, b, forget, layer, *sizes, 1.0, layer.eps, by_key=True))


def delta_rule(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    layer: KernelLayer,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    beta_scale: float,
    eps: float,
    by_key: bool,
) -> torch.Tensor:
    """Return the mixer's output before its projection, [tokens, value_heads · value_dim], and update the states.

    qkv [tokens, channels], z [tokens, value_heads · value_dim], b [tokens, value_heads], a [tokens, value_heads]: the
    products of the layer's input; tokens may be strided.
    by_key: a has a decay for each element of a key, [tokens, value_heads · key_dim], and the norm's gate is a sigmoid.
    """
    weights, tables = layer.weights, layer.tables
    conv, bias = weights["conv.weight"], weights.get("conv.bias")
    vectors = [weights[f"{role}.weight"] for role in ("dt_bias", "a_log", "delta_norm")]
    require_contiguous(qkv.device, qkv.dtype, *vectors)
    assert all(part.stride(1) == 1 for part in (qkv, z, b, a)), "the products of a token must be contiguous"
    if not tables.decoding:
        qkv = layer.convolved(qkv)
    out = torch.empty(len(qkv), value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    if tables.chunks is not None and not by_key:
        rule_by_chunks(qkv, b, a, layer, tables.chunks, out, sizes, beta_scale)
    else:
        block_k, block_v = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
        block_v = min(block_v, max((DECODE_CELLS if tables.decoding else SCAN_CELLS) // block_k, 1))
        blocks = {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": warps_of(block_k * block_v)}
        features = {"BY_KEY": by_key, **sizes, **blocks}
        products, strides = (qkv, b, a, *vectors[:2]), (qkv.stride(0), b.stride(0), a.stride(0))
        sequences = layer.addresses, tables.slots, tables.positions
        if tables.decoding:
            conv_bias, taps = conv if bias is None else bias, {"WIDTH": len(conv), "HAS_BIAS": bias is not None}
            inputs = *products, z, conv, conv_bias, vectors[2], *sequences, out, *strides, z.stride(0)
            _delta_step_kernel[(len(tables.slots), value_heads)](
                *inputs, *conv.stride(), beta_scale, eps, **taps, **features
            )
            return out
        inputs = *products, *sequences, tables.cu_seqlens, out, *strides, beta_scale
        _delta_scan_kernel[(len(tables.slots), value_heads, triton.cdiv(value_dim, block_v))](*inputs, **features)
    norm = {"VALUE_HEADS": value_heads, "VALUE_DIM": value_dim, "BY_KEY": by_key}
    block = triton.next_power_of_2(value_dim)
    _gated_norm_kernel[len(out), value_heads](out, z, vectors[2], z.stride(0), eps, BLOCK=block, num_warps=1, **norm)
    return out


def rule_by_chunks(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    layer: KernelLayer,
    chunks: torch.Tensor,
    out: torch.Tensor,
    sizes: dict[str, int],
    beta_scale: float,
) -> None:
    """Write what the tokens of a prefill read to `out`, and update the states.

    qkv, b, a: as `delta_rule`'s, after the convolution.  chunks: of `chunks_of`.
    sizes: of the heads, by their names in the kernels.
    """
    weights, tables = layer.weights, layer.tables
    number, heads = len(chunks), sizes["VALUE_HEADS"]
    wide = partial(torch.empty, dtype=torch.float32, device=qkv.device)
    solved = wide(number, heads, 2, CHUNK, CHUNK), wide(number, heads, 3, CHUNK)
    sizes = {**sizes, "BLOCK_K": max(triton.next_power_of_2(sizes["KEY_DIM"]), 16), "CHUNK": CHUNK}
    value_dim = sizes.pop("VALUE_DIM")
    gates, strides = (weights["dt_bias.weight"], weights["a_log.weight"]), (qkv.stride(0), b.stride(0), a.stride(0))
    _delta_solve_kernel[(number, heads)](
        qkv, b, a, *gates, tables.cu_seqlens, chunks, *solved, *strides, beta_scale, **sizes
    )
    sequences = layer.addresses, tables.slots, tables.positions, tables.cu_seqlens
    blocks = {"VALUE_DIM": value_dim, "BLOCK_V": CHUNK_VALUES, "num_stages": 2}
    _delta_chunk_kernel[(len(tables.slots), heads, triton.cdiv(value_dim, CHUNK_VALUES))](
        qkv, *sequences, *solved, out, qkv.stride(0), **sizes, **blocks
    )


@triton.jit
def _unit(x):
    """x [elements] divided by its norm, float32."""
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _beta(b, beta_scale):
    """Return the betas of the products `b`, any shape, float32."""
    return rounded(rounded(sigmoid(b.to(tl.float32)), b.dtype) * beta_scale, b.dtype)


@triton.jit
def _inverse_norms(x):
    """Return 1 / |row| of a matrix, float32 [rows]."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _gates(
    b,
    a,
    dt_bias,
    a_log,
    token,
    b_stride,
    a_stride,
    beta_scale,
    head,
    key,
    KEY_DIM: tl.constexpr,
    BY_KEY: tl.constexpr,
):
    """Return a token's decay, float32 [keys, 1] if BY_KEY, else a number; and its beta."""
    beta = _beta(tl.load(b + token * b_stride + head), beta_scale)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BY_KEY:
        element, is_key = head * KEY_DIM + key, key < KEY_DIM
        step = tl.load(a + token * a_stride + element, mask=is_key, other=0.0).to(tl.float32)
        step += tl.load(dt_bias + element, mask=is_key, other=0.0).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        decay = tl.exp(-rate * step)[:, None]
    else:
        step = tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        decay = tl.exp(-rate * softplus(step))
    return decay, beta


@triton.jit
def _rule(state, q, k, v, decay, beta):
    """Return a part of a head's matrix after a token, [keys, values], and what the token reads of it, float32 [values].

    q, k [keys], scaled; v [values].
    """
    state *= decay
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * delta[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def _gated_norm(read, squares, gate, weight, eps, dtype: tl.constexpr, VALUE_DIM: tl.constexpr, BY_KEY: tl.constexpr):
    """Return the gated norm of values that a head reads.  squares: their sum over all values.  float32 all."""
    read = read / tl.sqrt(squares / VALUE_DIM + eps)
    if BY_KEY:
        return weight * read * sigmoid(gate)
    return rounded(weight * rounded(read, dtype), dtype) * (gate * sigmoid(gate))


@triton.jit
def _gated_norm_kernel(
    x,
    z,
    norm,
    z_stride,
    eps,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and head: x [tokens, VALUE_HEADS · VALUE_DIM], in place."""
    dtype: tl.constexpr = x.dtype.element_ty
    token, head, value = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_value, at = value < VALUE_DIM, x + (token * VALUE_HEADS + head) * VALUE_DIM + value
    read = tl.load(at, mask=is_value, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(norm + value, mask=is_value, other=0.0).to(tl.float32)
    normed = _gated_norm(read, tl.sum(read * read, 0), gate, weight, eps, dtype, VALUE_DIM, BY_KEY)
    tl.store(at, normed.to(dtype), mask=is_value)


@triton.jit
def _delta_step_kernel(
    qkv,
    b,
    a,
    dt_bias,
    a_log,
    z,
    conv,
    conv_bias,
    norm,
    addresses,
    slots,
    positions,
    out,
    qkv_stride,
    b_stride,
    a_stride,
    z_stride,
    tap_stride,
    channel_stride,
    beta_scale,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per sequence, of one token, and value head: convolution, rule and gated norm, BLOCK_V values at a
    time."""
    dtype: tl.constexpr = z.dtype.element_ty
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    row, head, key = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_K)
    token, is_key = row.to(tl.int64), key < KEY_DIM
    matrices, is_kept = state_of(addresses, slots, row, 0, VALUE_HEADS * KEY_DIM * VALUE_DIM)
    latest, _ = state_of(addresses, slots, row, 1, WIDTH * CHANNELS)
    taps = conv, conv_bias, tap_stride, channel_stride
    position = tl.where(is_kept, tl.load(positions + row), -1)
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    q = convolve_step(qkv, qkv_stride, latest, row, position, q_at, is_key, *taps, CHANNELS, WIDTH, HAS_BIAS)
    k = convolve_step(qkv, qkv_stride, latest, row, position, KEYS + q_at, is_key, *taps, CHANNELS, WIDTH, HAS_BIAS)
    q, k = _unit(q) * KEY_DIM**-0.5, _unit(k)
    decay, beta = _gates(b, a, dt_bias, a_log, token, b_stride, a_stride, beta_scale, head, key, KEY_DIM, BY_KEY)
    out += (token * VALUE_HEADS + head) * VALUE_DIM
    squares = 0.0
    for start in range(0, VALUE_DIM, BLOCK_V):
        value = start + tl.arange(0, BLOCK_V)
        is_value = value < VALUE_DIM
        v_at = 2 * KEYS + head * VALUE_DIM + value
        v = convolve_step(qkv, qkv_stride, latest, row, position, v_at, is_value, *taps, CHANNELS, WIDTH, HAS_BIAS)
        cell = matrices + (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
        is_cell = is_key[:, None] & is_value[None, :]
        state = tl.load(cell, mask=is_cell & (position > 0), other=0.0)
        state, read = _rule(state, q, k, v, decay, beta)
        tl.store(cell, state, mask=is_cell & is_kept)
        read = read.to(dtype)
        tl.store(out + value, read, mask=is_value)
        squares += tl.sum(read.to(tl.float32) * read.to(tl.float32), 0)
    tl.debug_barrier()  # the loads below may be in other threads than the stores above
    for start in range(0, VALUE_DIM, BLOCK_V):
        value = start + tl.arange(0, BLOCK_V)
        is_value = value < VALUE_DIM
        read = tl.load(out + value, mask=is_value, other=0.0).to(tl.float32)
        gate = tl.load(z + token * z_stride + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
        weight = tl.load(norm + value, mask=is_value, other=0.0).to(tl.float32)
        normed = _gated_norm(read, squares, gate, weight, eps, dtype, VALUE_DIM, BY_KEY)
        tl.store(out + value, normed.to(dtype), mask=is_value)


@triton.jit
def _delta_scan_kernel(
    qkv,
    b,
    a,
    dt_bias,
    a_log,
    addresses,
    slots,
    positions,
    cu_seqlens,
    out,
    qkv_stride,
    b_stride,
    a_stride,
    beta_scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per sequence, value head and BLOCK_V of its values, for all new tokens: the rule alone.

    qkv [tokens, channels]: after the convolution.  Writes out [tokens, VALUE_HEADS · VALUE_DIM].
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    sequence = new_tokens(addresses, slots, positions, cu_seqlens, row, VALUE_HEADS * KEY_DIM * VALUE_DIM)
    first, end, matrices, is_kept, position = sequence
    cell = matrices + (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    state = tl.load(cell, mask=is_cell & (position > 0), other=0.0)
    token = first.to(tl.int64)
    for _ in range(first, end):
        inputs = qkv + token * qkv_stride
        q = tl.load(inputs + q_at, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(inputs + KEYS + q_at, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(inputs + 2 * KEYS + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
        decay, beta = _gates(b, a, dt_bias, a_log, token, b_stride, a_stride, beta_scale, head, key, KEY_DIM, BY_KEY)
        state, read = _rule(state, _unit(q) * KEY_DIM**-0.5, _unit(k), v, decay, beta)
        at = (token * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(out + at, read.to(out.dtype.element_ty), mask=is_value)
        token += 1
    tl.store(cell, state, mask=is_cell & is_kept)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular matrix a, float32 [CHUNK, CHUNK], by forward substitution.

    (I - a)(I + a²)(I + a⁴)… would take fewer steps, but its powers grow like binomials where keys repeat, and cancel.
    """
    at = tl.arange(0, CHUNK)
    inverse = tl.where(at[:, None] == at[None, :], 1.0, tl.zeros_like(a))
    for i in range(1, CHUNK):
        is_row = (at == i)[:, None]
        factors = tl.sum(tl.where(is_row, a, 0.0), 0)  # of the rows before
        inverse = tl.where(is_row, inverse - tl.sum(factors[:, None] * inverse, 0)[None, :], inverse)
    return inverse


@triton.jit
def _delta_solve_kernel(
    qkv,
    b,
    a,
    dt_bias,
    a_log,
    cu_seqlens,
    chunks,
    solved,
    factors,
    qkv_stride,
    b_stride,
    a_stride,
    beta_scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per chunk and value head: computes the rule's matrices and factors that depend on no state.

    chunks: of `chunks_of`.  qkv [tokens, channels]: after the convolution.
    Writes the matrices T and Γ ∘ Q K^T, transposed, to solved, float32 [chunks, VALUE_HEADS, 2, CHUNK, CHUNK]; and
    factors, float32 [chunks, VALUE_HEADS, 3, CHUNK]: the log of the decay since the chunk's beginning, 1 / |key|, and
    what queries are scaled by.
    """
    chunk, head, at, key = tl.program_id(0), tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row = tl.load(chunks + chunk)
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    start = first + (chunk - first // CHUNK - row) * CHUNK
    if start < end:
        live, token = start + at < end, (start + at).to(tl.int64)
        q_at = token[:, None] * qkv_stride + (head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key)[None, :]
        is_key = live[:, None] & (key < KEY_DIM)[None, :]
        q = tl.load(qkv + q_at, mask=is_key, other=0.0)
        k = tl.load(qkv + KEY_HEADS * KEY_DIM + q_at, mask=is_key, other=0.0)
        q_factor, k_factor = _inverse_norms(q) * KEY_DIM**-0.5, _inverse_norms(k)
        beta = _beta(tl.load(b + token * b_stride + head, mask=live, other=0.0), beta_scale)
        step = tl.load(a + token * a_stride + head, mask=live, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(dt_bias + head).to(tl.float32))
        since = tl.cumsum(tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * step, 0.0), 0)
        decays = tl.trans(decays_between(since, CHUNK))
        products = tl.dot(k, tl.trans(k)) * (beta * k_factor)[:, None] * k_factor[None, :] * decays
        inverse = _inverse(tl.where(at[:, None] > at[None, :], products, 0.0), CHUNK)
        cell = chunk.to(tl.int64) * VALUE_HEADS + head
        solved_at = solved + cell * 2 * CHUNK * CHUNK + at[None, :] * CHUNK + at[:, None]
        tl.store(solved_at, inverse * beta[None, :])
        tl.store(solved_at + CHUNK * CHUNK, tl.dot(q, tl.trans(k)) * k_factor[None, :] * decays)
        factors_at = factors + cell * 3 * CHUNK + at
        tl.store(factors_at, since)
        tl.store(factors_at + CHUNK, k_factor)
        tl.store(factors_at + 2 * CHUNK, q_factor)


@triton.jit
def _delta_chunk_kernel(
    qkv,
    addresses,
    slots,
    positions,
    cu_seqlens,
    solved,
    factors,
    out,
    qkv_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per sequence, value head and BLOCK_V of its values, for all new tokens: the rule, by chunks.

    qkv [tokens, channels]: after the convolution.  solved, factors: of `_delta_solve_kernel`.
    Writes out [tokens, VALUE_HEADS · VALUE_DIM].
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, CHUNK)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    sequence = new_tokens(addresses, slots, positions, cu_seqlens, row, VALUE_HEADS * KEY_DIM * VALUE_DIM)
    first, end, matrices, is_kept, position = sequence
    state_at = matrices + (head * KEY_DIM + key[None, :]) * VALUE_DIM + value[:, None]
    is_cell = is_value[:, None] & is_key[None, :]
    state = tl.load(state_at, mask=is_cell & (position > 0), other=0.0)  # transposed: [values, keys]
    cell = (first // CHUNK + row).to(tl.int64) * VALUE_HEADS + head
    for start in range(first, end, CHUNK):
        live, token = start + at < end, (start + at).to(tl.int64)
        chunk_factors = factors + cell * 3 * CHUNK + at
        since, k_factor = tl.load(chunk_factors), tl.load(chunk_factors + CHUNK)
        q_factor, whole = tl.load(chunk_factors + 2 * CHUNK), tl.load(factors + (cell * 3 + 1) * CHUNK - 1)
        k_at = token[:, None] * qkv_stride + (KEYS + q_at)[None, :]
        k = tl.load(qkv + k_at, mask=live[:, None] & is_key[None, :], other=0.0)
        is_live_value = is_value[:, None] & live[None, :]
        v_at = token[None, :] * qkv_stride + (2 * KEYS + head * VALUE_DIM + value)[:, None]
        v = tl.load(qkv + v_at, mask=is_live_value, other=0.0).to(tl.float32)
        known = product(state, tl.trans(k)) * (tl.exp(since) * k_factor)[None, :]
        solved_at = solved + cell * 2 * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
        new = tl.dot(v - known, tl.load(solved_at))
        transposed_q_at = token[None, :] * qkv_stride + q_at[:, None]
        q = tl.load(qkv + transposed_q_at, mask=is_key[:, None] & live[None, :], other=0.0)
        read = product(state, q) * tl.exp(since)[None, :] + tl.dot(new, tl.load(solved_at + CHUNK * CHUNK))
        out_at = (token[None, :] * VALUE_HEADS + head) * VALUE_DIM + value[:, None]
        tl.store(out + out_at, (read * q_factor[None, :]).to(out.dtype.element_ty), mask=is_live_value)
        state = tl.exp(whole) * state + product(new * (k_factor * tl.exp(whole - since))[None, :], k)
        cell += VALUE_HEADS
    tl.store(state_at, state, mask=is_cell & is_kept)
