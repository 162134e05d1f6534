"""Shared parts of the Triton kernels of recurrent mixers: tables of states, and the causal convolution before a mixer.
A short convolution consists of that convolution alone.

States are read and written in place. A convolution's latest inputs are a ring: that of position p is entry p % width.
So the programs of a decode step, several of which read the same channels, write an entry that none of them reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.kv_addresses import ALIGNMENT
from hybrid.kernels.recurrent import Linear, sum_over_one_rank
from hybrid.kernels.torch_short_conv import ShortConv

CHANNEL_BLOCK = 1024  # channels per program of a convolution
# Elements of a head's matrix that a program holds at once. In prefills a warp holds a few columns, and sums without
# waiting for others.
DECODE_CELLS, SCAN_CELLS = 4096, 1024
THREAD_CELLS = 32  # registers of a thread that hold them: with more ptxas spills others (sm_90)
CHUNK = 32  # tokens of a sequence whose effects on each other are matrix products; with 64 ptxas spills (sm_80)
ALIGNED = tl.constexpr(ALIGNMENT)  # bytes


@dataclass(frozen=True)
class StateTables:
    """The sequences of a forward, and where their states are; on the device.

    slots: int32 [sequences], of the states; below 0: the sequence has none, and nothing is written (padding).
    positions: int32 [tokens].  cu_seqlens: int32 [sequences + 1].
    owners: int64 [tokens], each token's sequence; None in a decode step, which has one token for each sequence.
    chunks: of `chunks_of`, for bfloat16 (float16's range may not hold a state); None: the kernels go from token to
        token, and round alike however many there are.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    owners: torch.Tensor | None = None
    chunks: torch.Tensor | None = None

    @property
    def decoding(self) -> bool:
        """Whether it is a decode step."""
        return self.owners is None


@dataclass(frozen=True)
class KernelLayer:
    """A layer's weights and states, and the sequences of a forward, as `recurrent.MixerLayer` with addresses.

    addresses: int64 [2], on the device: of the heads' matrices, 0 without any, and of the convolution's latest inputs,
        both float32.  The caller keeps the states alive for as long as kernels read them.
    factors: `Mamba2.factors` of the weights' dtype.
    summed: as `recurrent.MixerLayer`'s.
    """

    linear: Linear
    weights: Mapping[str, torch.Tensor]
    addresses: torch.Tensor
    tables: StateTables
    eps: float
    factors: torch.Tensor | None = None
    summed: Callable[[torch.Tensor], torch.Tensor] = sum_over_one_rank

    def convolved(self, x: torch.Tensor, gated: bool = False, silu: bool = True) -> torch.Tensor:
        """Return the causal convolution of each channel of x [tokens, channels] in x's dtype, and keep each sequence's
        latest inputs.

        gated: x has for each channel a gate of the input, a gate of the output, and the input, [tokens, 3 · channels].
        silu: the result goes through it; rounded before.
        """
        weight, bias, tables = self.weights["conv.weight"], self.weights.get("conv.bias"), self.tables
        (width, channels), tokens = weight.shape, len(x)
        require_contiguous(x.device, x.dtype, *(() if bias is None else (bias,)))
        assert weight.dtype == x.dtype, f"the convolution's weight is {weight.dtype}, its input {x.dtype}"
        assert x.stride(1) == 1 and x.shape[1] == (3 if gated else 1) * channels, "channels of a token are contiguous"
        out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        blocks, constants = triton.cdiv(channels, CHANNEL_BLOCK), {"CHANNELS": channels, "WIDTH": width, "GATED": gated}
        at = self.addresses, tables.slots, tables.positions, tables.cu_seqlens
        owners = tables.cu_seqlens if tables.owners is None else tables.owners
        features = {"SILU": silu, "HAS_BIAS": bias is not None, "DECODING": tables.decoding}
        _conv_kernel[(tokens, blocks)](
            x,
            weight,
            weight if bias is None else bias,
            *at,
            owners,
            out,
            x.stride(0),
            *weight.stride(),
            **constants,
            **features,
            BLOCK=CHANNEL_BLOCK,
        )
        if not tables.decoding:
            _keep_inputs_kernel[(len(tables.slots), blocks)](x, *at, x.stride(0), **constants, BLOCK=CHANNEL_BLOCK)
        return out


def chunks_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the sequence of each chunk, int32 [tokens // CHUNK + sequences], without waiting for the device.

    Each sequence is cut into chunks of CHUNK tokens from its first one on. As their number is only known on the device,
    sequence s has its chunks from cu_seqlens[s] // CHUNK + s on, and those before the next one's may be empty.

    Args:
        cu_seqlens: int32 [sequences + 1].
        tokens: of all sequences.
    """
    sequences, device = len(cu_seqlens) - 1, cu_seqlens.device
    first = cu_seqlens[:-1] // CHUNK + torch.arange(sequences, dtype=torch.int32, device=device)
    chunks = torch.arange(tokens // CHUNK + sequences, dtype=torch.int32, device=device)
    return (torch.searchsorted(first, chunks, right=True) - 1).int()


def warps_of(cells: int) -> int:
    """Return the warps of a program that holds so many elements of a matrix."""
    return triton.cdiv(cells, 32 * THREAD_CELLS)


def short_conv(mixer: ShortConv, x: torch.Tensor, layer: KernelLayer) -> torch.Tensor:
    """`mixer.mixed` for x [tokens, hidden]."""
    return layer.linear("conv_o", layer.convolved(layer.linear("conv_in", x), gated=True, silu=False))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x float32, rounded to `dtype`, and float32 again."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def sigmoid(x):
    """x float32"""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """ln(1 + e^x), float32, exact for small results too: decays are near 1."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    # ln(1 + y) as y · ln(u) / (u - 1) with u = 1 + y rounded (Goldberg 1991, theorem 4)
    log1p = tl.where(total == 1.0, small, small * (tl.log(total) / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def state_of(addresses, slots, row, at: tl.constexpr, size: tl.constexpr):
    """Return the address of a sequence's state, of `size` elements, and whether there is one.  at: 0: the matrices, 1:
    the latest inputs."""
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.multiple_of(tl.load(addresses + at).to(tl.pointer_type(tl.float32)), ALIGNED)
    return state + tl.maximum(slot, 0) * size, slot >= 0


@triton.jit
def new_tokens(addresses, slots, positions, cu_seqlens, row, size: tl.constexpr):
    """Return a sequence's first new token and the one after its last, the address of its matrices, of `size` elements,
    whether they are to be written, and the first token's position: above 0 if there are matrices to read."""
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    matrices, is_kept = state_of(addresses, slots, row, 0, size)
    is_kept = is_kept & (first < end)
    return first, end, matrices, is_kept, tl.load(positions + first, mask=is_kept, other=-1)


@triton.jit
def decays_between(since, CHUNK: tl.constexpr):
    """Return the decay of what a chunk's token j writes until token i reads it, [j, i]: 0 for i before j.

    since: the log of the decay from the chunk's beginning to each token, float32 [CHUNK].
    """
    at, between = tl.arange(0, CHUNK), tl.exp(tl.minimum(since[None, :] - since[:, None], 0.0))
    return tl.where(at[:, None] <= at[None, :], between, 0.0)


@triton.jit
def product(a, b):
    """Return a b for a matrix b of 16 bits and a of float32, which enters as the sum of two of b's type."""
    high = a.to(b.dtype)
    return tl.dot(high, b) + tl.dot((a - high.to(tl.float32)).to(b.dtype), b)


@triton.jit
def _conv_input(x, x_stride, token, channel, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Return a convolution's inputs at a token, float32 [channels]; 0 where not `mask`."""
    at = x + token.to(tl.int64) * x_stride + channel
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        inputs = tl.load(at + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
        value = rounded(value * inputs, x.dtype.element_ty)
    return value


@triton.jit
def _convolve(
    x,
    x_stride,
    latest,
    token,
    first,
    position,
    channel,
    live,
    weight,
    bias,
    tap_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODING: tl.constexpr,
):
    """Return the convolution at a token, rounded, float32 [channels]; in a decode step write its input to the ring.

    first: the sequence's first token in x, [tokens, CHANNELS]; inputs before it are in the ring `latest`, [WIDTH,
    CHANNELS], if the sequence has any.  position: of the token; below 0: the sequence has no ring.
    weight: [WIDTH, CHANNELS], of any strides: it may be a view of a module's.
    """
    taps, value = weight + channel * channel_stride, _conv_input(x, x_stride, token, channel, live, CHANNELS, GATED)
    if DECODING:
        tl.store(latest + position % WIDTH * CHANNELS + channel, value, mask=live & (position >= 0))
    total = value * tl.load(taps + (WIDTH - 1) * tap_stride, mask=live, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        entry = latest + (position - back) % WIDTH * CHANNELS + channel
        is_new = token - back >= first
        value = tl.load(entry, mask=live & (position >= back) & (is_new == 0), other=0.0)
        if not DECODING:
            value += _conv_input(x, x_stride, token - back, channel, live & is_new, CHANNELS, GATED)
        total += value * tl.load(taps + (WIDTH - 1 - back) * tap_stride, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    return rounded(total, x.dtype.element_ty)


@triton.jit
def convolve_step(
    x,
    x_stride,
    latest,
    row,
    position,
    channel,
    live,
    weight,
    bias,
    tap_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return silu of the convolution at a decode step's token, rounded, float32 [channels], and write the token's input
    to the ring; programs that read the same channels write the same.  Arguments as `_convolve`'s."""
    taps = weight, bias, tap_stride, channel_stride
    total = _convolve(
        x, x_stride, latest, row, row, position, channel, live, *taps, CHANNELS, WIDTH, False, HAS_BIAS, True
    )
    return rounded(total * sigmoid(total), x.dtype.element_ty)


@triton.jit
def _conv_kernel(
    x,
    weight,
    bias,
    addresses,
    slots,
    positions,
    cu_seqlens,
    owners,
    out,
    x_stride,
    tap_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK channels; writes out [tokens, CHANNELS], and in a decode step the ring."""
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    row, first = token, token
    if not DECODING:
        row = tl.load(owners + token).to(tl.int32)
        first = tl.load(cu_seqlens + row)
    latest, is_kept = state_of(addresses, slots, row, 1, WIDTH * CHANNELS)
    position = tl.where(is_kept, tl.load(positions + token), -1)
    taps = weight, bias, tap_stride, channel_stride
    total = _convolve(
        x, x_stride, latest, token, first, position, channel, live, *taps, CHANNELS, WIDTH, GATED, HAS_BIAS, DECODING
    )
    if SILU:
        total = total * sigmoid(total)
    if GATED:
        gate = x + token.to(tl.int64) * x_stride + CHANNELS + channel
        total *= tl.load(gate, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, total.to(dtype), mask=live)


@triton.jit
def _keep_inputs_kernel(
    x,
    addresses,
    slots,
    positions,
    cu_seqlens,
    x_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence and BLOCK channels: writes the sequence's latest inputs of x to its ring."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    latest, is_kept = state_of(addresses, slots, row, 1, WIDTH * CHANNELS)
    for back in tl.static_range(WIDTH):
        token = end - 1 - back
        live = (channel < CHANNELS) & (token >= first) & is_kept
        position = tl.load(positions + token, mask=(token >= first) & is_kept, other=0)
        value = _conv_input(x, x_stride, token, channel, live, CHANNELS, GATED)
        tl.store(latest + position % WIDTH * CHANNELS + channel, value, mask=live)
