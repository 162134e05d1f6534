"""Weight-only int8 linear layers in Triton: weights are dequantized as they are multiplied.

int8 is exact in bfloat16 and float16, so tiles of weights are only converted; a scale multiplies the float32 sum of
its inputs. Decode steps, of up to 255 rows or so, are bound by the bytes of the weights: where tiles are fewer than a
GPU's multiprocessors the inputs are split over programs, so that all of a GPU reads, and the splits' sums are added in
their order, so results do not vary from run to run. Tests run the kernels in Triton's interpreter and compile them for
sm_80 to sm_100; no GPU has timed them.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous

FEW_ROWS = 16  # the least that tl.dot multiplies
MULTIPROCESSORS = 132  # an H100's: one program of 8 warps each, or two of 4
MIN_INPUTS = 256  # of a split; less work does not pay for adding its sum


@triton.jit(do_not_specialize=("rows",))  # differs from batch to batch
def _int8_linear_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_stride,
    weight_stride,
    group_size,
    blocks_per_group,
    blocks_per_split,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program per BLOCK rows, BLOCK_OUT columns and split of the inputs; writes out [splits, rows, outputs].

    Blocks of up to BLOCK_IN inputs are numbered through all groups, each within one group.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(2)
    total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    first = split * blocks_per_split
    for index in range(first, tl.minimum(first + blocks_per_split, GROUPS * blocks_per_group)):
        group = index // blocks_per_group
        within = (index - group * blocks_per_group) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        live, element = within < group_size, group * group_size + within
        a_mask = (row < rows)[:, None] & live[None, :]
        a = tl.load(x + row[:, None] * x_stride + element[None, :], mask=a_mask, other=0.0)
        b_mask = live[:, None] & (column < outputs)[None, :]
        b = tl.load(weight + column[None, :] * weight_stride + element[:, None], mask=b_mask, other=0)
        product = tl.dot(a, b.to(a.dtype), input_precision="ieee")
        if GROUPS > 1:
            product *= tl.load(scale + column * GROUPS + group, mask=column < outputs, other=0.0).to(tl.float32)[
                None, :
            ]
        total += product
    if GROUPS == 1:
        total *= tl.load(scale + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = (split * rows + row)[:, None] * outputs + column[None, :]
    tl.store(out + place, total, mask=(row < rows)[:, None] & (column < outputs)[None, :])


@triton.jit
def _sum_splits_kernel(sums, bias, out, size, outputs, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per BLOCK elements of out [rows, outputs]: the splits' sums [splits, size] in their order, and the
    bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    element = sums + place
    for _ in range(splits):
        total += tl.load(element, mask=live, other=0.0)
        element += size
    if HAS_BIAS:
        total += tl.load(bias + place % outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, total, mask=live)


def sum_splits(sums: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of the splits, in their order, and the bias to `out` [rows, outputs], and return it.  sums: float32
    [splits, rows, outputs]"""
    size, block = out.numel(), 1024
    _sum_splits_kernel[(triton.cdiv(size, block),)](
        sums, sums if bias is None else bias, out, size, out.shape[1], len(sums), bias is not None, BLOCK=block
    )
    return out


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (weight · scale)ᵀ + bias, summed in float32 and rounded once.  [rows, out] in x's dtype

    x: float [rows, in], rows may be strided; weight: int8 [out, in], rows may be strided; scale: [out, groups], each
    for in / groups inputs; bias: [out].
    """
    (rows, inputs), (outputs, groups) = x.shape, scale.shape
    assert weight.dtype == torch.int8 and weight.shape == (outputs, inputs), "weight is int8 [out, in]"
    assert weight.device == x.device and inputs % groups == 0, "groups divide the inputs"
    assert x.stride(1) == weight.stride(1) == 1, "rows must be contiguous"
    require_contiguous(x.device, scale.dtype, scale)
    if bias is not None:
        require_contiguous(x.device, bias.dtype, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    full = x.dtype.itemsize == 4
    few = rows <= FEW_ROWS
    block, block_out = (FEW_ROWS, 64) if few else (64, 64 if full else 128)
    block_in, num_warps = (32 if full else 128 if few else 64), (4 if few else 8)
    blocks_per_group = triton.cdiv(inputs // groups, block_in)
    grid = triton.cdiv(rows, block), triton.cdiv(outputs, block_out)
    programs = MULTIPROCESSORS * 8 // num_warps
    splits = max(min(programs // (grid[0] * grid[1]), inputs // MIN_INPUTS), 1)
    blocks_per_split = triton.cdiv(groups * blocks_per_group, splits)
    splits = triton.cdiv(groups * blocks_per_group, blocks_per_split)
    sums = out if splits == 1 else torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    has_bias = bias is not None
    tensors = x, weight, scale, bias if has_bias else scale
    sizes = rows, inputs, outputs, x.stride(0), weight.stride(0), inputs // groups, blocks_per_group, blocks_per_split
    blocks = {"BLOCK": block, "BLOCK_OUT": block_out, "BLOCK_IN": block_in, "num_warps": num_warps}
    _int8_linear_kernel[(*grid, splits)](
        *tensors, sums, *sizes, GROUPS=groups, HAS_BIAS=has_bias and splits == 1, **blocks
    )
    return sum_splits(sums, bias, out) if splits > 1 else out
