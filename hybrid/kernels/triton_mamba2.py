"""Mamba 2 mixers in Triton: between the projections a decode step is two launches, of which the second is the norm.

A program holds a part of a head's matrix in registers and goes through the new tokens of one sequence: from token to
token, or by chunks (arXiv:2405.21060, section 6). It rounds where `torch_mamba2` does. A prefill has launches for the
convolution and for the ring of its latest inputs too.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.torch_mamba2 import Mamba2
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

CHUNK_CELLS = 4096  # of a head's matrix in a program that goes by chunks


def mamba2(mixer: Mamba2, x: torch.Tensor, layer: KernelLayer) -> torch.Tensor:
    """`mixer.mixed` for x [tokens, hidden]."""
    projected = layer.linear("mamba_in", x if mixer.in_multiplier == 1.0 else x * mixer.in_multiplier)
    if layer.factors is not None:
        projected = projected * layer.factors
    z, channels, steps = projected.split([mixer.inner, mixer.channels, mixer.heads], dim=-1)
    output = layer.linear("mamba_o", scanned(mixer, z, channels, steps, layer))
    return output if mixer.out_multiplier == 1.0 else output * mixer.out_multiplier


def scanned(
    mixer: Mamba2, z: torch.Tensor, channels: torch.Tensor, steps: torch.Tensor, layer: KernelLayer
) -> torch.Tensor:
    """Return the mixer's output before its projection, [tokens, inner], and update the states.

    z [tokens, inner], channels [tokens, channels], steps [tokens, heads]: parts of the layer's input after its
    projection, with one stride.
    """
    weights, tables, dtype = layer.weights, layer.tables, z.dtype
    conv, bias, norm = weights["conv.weight"], weights.get("conv.bias"), weights.get("mamba_norm.weight")
    vectors = [weights[f"{role}.weight"] for role in ("dt_bias", "a_log", "skip")]
    require_contiguous(z.device, dtype, *vectors)
    stride = z.stride(0)
    assert all(part.stride() == (stride, 1) for part in (z, channels, steps)), "the parts are of one matrix"
    if not tables.decoding:
        channels = layer.convolved(channels)
    block_n, block_p = triton.next_power_of_2(mixer.state_size), triton.next_power_of_2(mixer.head_dim)
    if tables.chunks is not None:
        block_n, block_p = max(block_n, 16), max(block_p, 16)  # the least of a product
        block_p = max(min(block_p, CHUNK_CELLS // block_n), 16)
    else:
        block_p = min(block_p, max((DECODE_CELLS if tables.decoding else SCAN_CELLS) // block_n, 1))
    out = torch.empty(len(z), mixer.inner, dtype=dtype if norm is None else torch.float32, device=z.device)
    grid = len(tables.slots), mixer.heads, triton.cdiv(mixer.head_dim, block_p)
    sequences = layer.addresses, tables.slots, tables.positions, tables.cu_seqlens
    limits = mixer.min_step, mixer.max_step
    constants = {
        "HEADS": mixer.heads,
        "HEAD_DIM": mixer.head_dim,
        "GROUPS": mixer.groups,
        "STATE_SIZE": mixer.state_size,
        "HAS_NORM": norm is not None,
        "BLOCK_N": block_n,
        "BLOCK_P": block_p,
    }
    if tables.chunks is not None:
        inputs = z, channels, steps, *vectors, *sequences, out, stride, channels.stride(0), *limits
        _mamba_chunk_kernel[grid](*inputs, **constants, CHUNK=CHUNK, num_warps=max(block_n // 32, 1), num_stages=2)
    else:
        taps = conv, conv if bias is None else bias
        strides = stride, channels.stride(0), *conv.stride()
        constants |= {"WIDTH": len(conv), "HAS_BIAS": bias is not None, "DECODING": tables.decoding}
        inputs = z, channels, steps, *taps, *vectors, *sequences, out, *strides, *limits
        _mamba_kernel[grid](*inputs, **constants, num_warps=warps_of(block_n * block_p))
    if norm is None:
        return out
    require_contiguous(z.device, dtype, norm)
    squares = None
    if mixer.group_ranks > 1:  # the only group's elements are on several ranks
        squares = layer.summed(torch.linalg.vector_norm(out, dim=-1).square())
    normed, size = torch.empty(len(z), mixer.inner, dtype=dtype, device=z.device), mixer.inner // mixer.groups
    block = triton.next_power_of_2(size)
    _group_norm_kernel[(len(z), mixer.groups)](
        out,
        norm,
        normed,
        out if squares is None else squares,
        size * mixer.group_ranks,
        layer.eps,
        SIZE=size,
        HAS_SQUARES=squares is not None,
        BLOCK=block,
        num_warps=8 if block > 4096 else 4,
    )
    return normed


@triton.jit
def _group_norm_kernel(
    x, norm, out, squares, count, eps, SIZE: tl.constexpr, HAS_SQUARES: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per token and group of SIZE elements: the RMS norm of x float32, rounded once.

    HAS_SQUARES: of one group, of which `squares` [tokens] has the sum of the squares of all `count` elements, those of
    other ranks included.
    """
    group, element = tl.program_id(1), tl.arange(0, BLOCK)
    live = element < SIZE
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group) * SIZE + element
    values = tl.load(x + at, mask=live, other=0.0)
    total = tl.load(squares + tl.program_id(0)) if HAS_SQUARES else tl.sum(values * values, 0)
    values = values / tl.sqrt(total / count + eps)
    weight = tl.load(norm + group * SIZE + element, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, (weight * values).to(out.dtype.element_ty), mask=live)


@triton.jit
def _time_step(steps, step_bias, min_step, max_step):
    """Return the time steps of the products `steps`, any shape, float32.  step_bias: float32."""
    step = rounded(steps.to(tl.float32) + step_bias, steps.dtype)
    step = rounded(softplus(step), steps.dtype)
    return rounded(tl.minimum(tl.maximum(step, min_step), max_step), steps.dtype)


@triton.jit
def _gated(read, z, HAS_NORM: tl.constexpr):
    """Return what is read, float32, times silu of its gate z; HAS_NORM: a norm follows, which alone rounds."""
    gate = z.to(tl.float32)
    gate = gate * sigmoid(gate)
    if HAS_NORM:
        return read * gate
    return rounded(read, z.dtype) * rounded(gate, z.dtype)


@triton.jit
def _mamba_kernel(
    z,
    channels,
    steps,
    conv,
    conv_bias,
    dt_bias,
    a_log,
    skip,
    addresses,
    slots,
    positions,
    cu_seqlens,
    out,
    stride,
    channels_stride,
    tap_stride,
    channel_stride,
    min_step,
    max_step,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DECODING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program per sequence, head and BLOCK_P of its elements: writes out [tokens, HEADS · HEAD_DIM] after the gate.

    DECODING: of one token, and `channels` is before the convolution.  HAS_NORM: a norm follows; out is not rounded.
    """
    INNER: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE_SIZE
    row, head = tl.program_id(0), tl.program_id(1)
    entry, element = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_entry, is_element = entry < STATE_SIZE, element < HEAD_DIM
    x_at = head * HEAD_DIM + element
    b_at = INNER + head // (HEADS // GROUPS) * STATE_SIZE + entry
    c_at = b_at + GROUPS * STATE_SIZE
    sequence = new_tokens(addresses, slots, positions, cu_seqlens, row, HEADS * STATE_SIZE * HEAD_DIM)
    first, end, matrices, is_kept, position = sequence
    cell = matrices + (head * STATE_SIZE + entry[:, None]) * HEAD_DIM + element[None, :]
    is_cell = is_entry[:, None] & is_element[None, :]
    state = tl.load(cell, mask=is_cell & (position > 0), other=0.0)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    step_bias, direct = tl.load(dt_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    token = first.to(tl.int64)
    for _ in range(first, end):
        if DECODING:
            latest, _ = state_of(addresses, slots, row, 1, WIDTH * CHANNELS)
            taps = conv, conv_bias, tap_stride, channel_stride
            x = convolve_step(
                channels, stride, latest, row, position, x_at, is_element, *taps, CHANNELS, WIDTH, HAS_BIAS
            )
            b = convolve_step(channels, stride, latest, row, position, b_at, is_entry, *taps, CHANNELS, WIDTH, HAS_BIAS)
            c = convolve_step(channels, stride, latest, row, position, c_at, is_entry, *taps, CHANNELS, WIDTH, HAS_BIAS)
        else:
            inputs = channels + token * channels_stride
            x = tl.load(inputs + x_at, mask=is_element, other=0.0).to(tl.float32)
            b = tl.load(inputs + b_at, mask=is_entry, other=0.0).to(tl.float32)
            c = tl.load(inputs + c_at, mask=is_entry, other=0.0).to(tl.float32)
        step = _time_step(tl.load(steps + token * stride + head), step_bias, min_step, max_step)
        state = state * tl.exp(-rate * step) + b[:, None] * (x * step)[None, :]
        read = tl.sum(state * c[:, None], 0) + direct * x
        read = _gated(read, tl.load(z + token * stride + x_at, mask=is_element, other=0.0), HAS_NORM)
        tl.store(out + token * INNER + x_at, read.to(out.dtype.element_ty), mask=is_element)
        token += 1
    tl.store(cell, state, mask=is_cell & is_kept)


@triton.jit
def _mamba_chunk_kernel(
    z,
    channels,
    steps,
    dt_bias,
    a_log,
    skip,
    addresses,
    slots,
    positions,
    cu_seqlens,
    out,
    stride,
    channels_stride,
    min_step,
    max_step,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As `_mamba_kernel` for all new tokens of a sequence, by chunks.  channels: after the convolution."""
    INNER: tl.constexpr = HEADS * HEAD_DIM
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, CHUNK)
    entry, element = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_entry, is_element = entry < STATE_SIZE, element < HEAD_DIM
    x_at = head * HEAD_DIM + element
    b_at = INNER + head // (HEADS // GROUPS) * STATE_SIZE + entry
    sequence = new_tokens(addresses, slots, positions, cu_seqlens, row, HEADS * STATE_SIZE * HEAD_DIM)
    first, end, matrices, is_kept, position = sequence
    cell = matrices + (head * STATE_SIZE + entry[None, :]) * HEAD_DIM + element[:, None]
    is_cell = is_element[:, None] & is_entry[None, :]
    state = tl.load(cell, mask=is_cell & (position > 0), other=0.0)  # transposed: [elements, entries]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    step_bias, direct = tl.load(dt_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    for start in range(first, end, CHUNK):
        live, token = start + at < end, (start + at).to(tl.int64)
        is_live_element = is_element[:, None] & live[None, :]
        x = tl.load(channels + token[None, :] * channels_stride + x_at[:, None], mask=is_live_element, other=0.0)
        x = x.to(tl.float32)
        transposed_c_at = token[None, :] * channels_stride + (b_at + GROUPS * STATE_SIZE)[:, None]
        b = channels + token[:, None] * channels_stride + b_at[None, :]
        b = tl.load(b, mask=live[:, None] & is_entry[None, :], other=0.0)
        c = tl.load(channels + transposed_c_at, mask=is_entry[:, None] & live[None, :], other=0.0)
        step = tl.load(steps + token * stride + head, mask=live, other=0.0)
        step = tl.where(live, _time_step(step, step_bias, min_step, max_step), 0.0)
        since, whole, written = tl.cumsum(-rate * step, 0), tl.sum(-rate * step, 0), x * step[None, :]
        scores = tl.dot(b, c) * decays_between(since, CHUNK)
        read = product(state, c) * tl.exp(since)[None, :] + tl.dot(written, scores) + direct * x
        gate = tl.load(z + token[None, :] * stride + x_at[:, None], mask=is_live_element, other=0.0)
        read = _gated(read, gate, HAS_NORM).to(out.dtype.element_ty)
        tl.store(out + token[None, :] * INNER + x_at[:, None], read, mask=is_live_element)
        state = tl.exp(whole) * state + product(written * tl.exp(whole - since)[None, :], b)
    tl.store(cell, state, mask=is_cell & is_kept)
