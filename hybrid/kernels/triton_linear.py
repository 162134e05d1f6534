"""A linear layer in Triton whose result for a row is the same bits among any number of rows (batch invariance).

cuBLAS chooses a kernel, and with it the order of the sums over the inputs, by the number of rows. Here the order
follows from the weight's shape and dtype alone: inputs are divided into splits, a split is summed by blocks in their
order, and the splits' sums are added in their order. With few tiles each split is a program of its own, so that all of
a GPU reads the weight; with more tiles one program runs through all of them. Both do the same operations on a row:
tiles of 64 and of 128 rows are multiplied by one instruction (`mma.m16n8k16` on sm_80, `wgmma.m64n128k16` on sm_90; a
test reads the PTX).
No GPU has timed it.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.triton_attention import architecture
from hybrid.kernels.triton_int8 import sum_splits

PROGRAMS = 132  # that few tiles are divided into, for a GPU of as many multiprocessors
MIN_INPUTS = 512  # of a split; less work does not pay for adding its sum
GROUP_ROWS = 8  # tiles of rows that run side by side, and read the same columns of the weight


@triton.jit(do_not_specialize=("rows",))  # differs from batch to batch
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_stride,
    weight_stride,
    weight_input_stride,
    SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    PARALLEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program per BLOCK rows and BLOCK_OUT columns of out [rows, outputs]; if PARALLEL also per split, whose sum it
    writes to out [SPLITS, rows, outputs]."""
    tile_row, tile_column = tl.swizzle2d(
        tl.program_id(0) % tl.cdiv(rows, BLOCK),
        tl.program_id(0) // tl.cdiv(rows, BLOCK),
        tl.cdiv(rows, BLOCK),
        tl.cdiv(outputs, BLOCK_OUT),
        GROUP,
    )
    row = tile_row.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tile_column.to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_column = (row < rows)[:, None], (column < outputs)[None, :]
    x_rows, columns = x + row[:, None] * x_stride, weight + column[None, :] * weight_stride
    first, last = tl.program_id(1) * 0, tl.program_id(1) * 0 + SPLITS
    if PARALLEL:
        first, last = tl.program_id(1), tl.program_id(1) + 1
    total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    for split in range(first, last):
        begin = split * SPLIT_BLOCKS * BLOCK_IN
        part = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
        for start in range(begin, tl.minimum(begin + SPLIT_BLOCKS * BLOCK_IN, inputs), BLOCK_IN):
            element = start + tl.arange(0, BLOCK_IN)
            live = element < inputs
            a = tl.load(x_rows + element[None, :], mask=is_row & live[None, :], other=0.0)
            b = tl.load(columns + element[:, None] * weight_input_stride, mask=live[:, None] & is_column, other=0.0)
            part = tl.dot(a, b, part, input_precision="ieee")
        total += part
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * outputs + column[None, :]
    if PARALLEL:
        place += first.to(tl.int64) * rows * outputs
    tl.store(out + place, total, mask=is_row & is_column)


def num_splits(outputs: int, inputs: int, block_out: int) -> int:
    """Return the number of splits of the inputs. It must not depend on the rows, nor on the device."""
    return max(min(triton.cdiv(PROGRAMS, triton.cdiv(outputs, block_out)), inputs // MIN_INPUTS), 1)


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, arch: int = 0
) -> torch.Tensor:
    """x @ weightᵀ + bias, summed in float32 and rounded once.  [rows, out] in x's dtype

    x [rows, in], rows may be strided; weight [out, in] in x's dtype, any strides; bias [out]. The bits of a row depend
    on that row, the weight and the bias alone.  arch: compute capability; 0: the device's.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    assert weight.shape[1] == inputs and weight.dtype == x.dtype, (
        f"{x.dtype} {x.shape} by {weight.dtype} {weight.shape}"
    )
    assert weight.device == x.device and x.stride(1) == 1, "rows must be contiguous"
    if bias is not None:
        require_contiguous(x.device, bias.dtype, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    full = x.dtype.itemsize == 4
    block_out, block_in = (64, 32) if full else (128, 64)
    splits = num_splits(outputs, inputs, block_out)
    split_blocks = triton.cdiv(triton.cdiv(inputs, block_in), splits)
    splits = triton.cdiv(inputs, split_blocks * block_in)
    few = rows <= 64
    # The products of Blackwell's tensor cores have 64 or 128 rows, by the tile: one tile there.
    block = 64 if few or full or (arch or architecture(x.device)) >= 100 else 128
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, block_out)
    parallel = splits > 1 and tiles < PROGRAMS
    sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device) if parallel else out
    grid = tiles, splits if parallel else 1
    sizes = rows, inputs, outputs, x.stride(0), *weight.stride()
    constants = {"SPLITS": splits, "SPLIT_BLOCKS": split_blocks, "PARALLEL": parallel, "GROUP": GROUP_ROWS}
    constants |= {"BLOCK": block, "BLOCK_OUT": block_out, "BLOCK_IN": block_in}
    constants |= {"num_warps": 8 if full or block == 128 else 4, "num_stages": 3}
    has_bias = bias is not None and not parallel
    _linear_kernel[grid](x, weight, x if bias is None else bias, sums, *sizes, HAS_BIAS=has_bias, **constants)
    return sum_splits(sums, bias, out) if parallel else out
