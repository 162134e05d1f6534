"""A mixture of experts in Triton: a grouped matrix product, without synchronising with the device."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous
from hybrid.kernels.triton_attention import owner_of_block

BLOCK_OUT = 64  # output columns per program


@triton.jit
def _grouped_linear_kernel(
    x,
    weight,
    order,
    starts,
    out,
    groups,
    inputs,
    outputs,
    x_stride,
    weight_stride,
    weight_row_stride,
    weight_column_stride,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program per up to BLOCK items of one group and BLOCK_OUT columns; writes out [items, outputs].

    order int32 [items]: items sorted by group; starts int32 [groups + 1]: start of each group in `order`, and the end.
    Item i reads row i // PER_ROW of x.
    """
    block = tl.program_id(0)
    group = owner_of_block(starts, groups, block, BLOCK)
    first = tl.load(starts + group)
    count = tl.load(starts + group + 1) - first
    place = (block - first // BLOCK - group) * BLOCK + tl.arange(0, BLOCK)
    live = place < count
    item = tl.load(order + first + place, mask=live, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = x + (item // PER_ROW)[:, None] * x_stride
    matrix = weight + group.to(tl.int64) * weight_stride + column[None, :].to(tl.int64) * weight_row_stride
    total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    if tl.max(live.to(tl.int32), 0) > 0:
        for start in range(0, inputs, BLOCK_IN):
            element = start + tl.arange(0, BLOCK_IN)
            a = tl.load(rows + element[None, :], mask=live[:, None] & (element < inputs)[None, :], other=0.0)
            mask = (element < inputs)[:, None] & (column < outputs)[None, :]
            b = tl.load(matrix + element[:, None] * weight_column_stride, mask=mask, other=0.0)
            total += tl.dot(a, b, input_precision="ieee")
    row_out = out + item[:, None] * outputs + column[None, :]
    tl.store(row_out, total, mask=live[:, None] & (column < outputs)[None, :])


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, per_row: int
) -> torch.Tensor:
    """x[i // per_row] @ weight[group of i].T for every item i, in x's dtype [items, outputs]; sums in float32.

    x [rows, inputs], rows may be strided; weight [groups, outputs, inputs], any strides; order int32 [items]: items
    sorted by group; starts int32 [groups + 1]: start of each group in `order`, and the end.
    """
    require_contiguous(x.device, torch.int32, order, starts)
    assert weight.dtype == x.dtype and weight.device == x.device, f"weights are {weight.dtype}, their inputs {x.dtype}"
    assert x.stride(1) == 1, "rows must be contiguous"
    items, (groups, outputs, inputs) = len(order), weight.shape
    out = torch.empty((items, outputs), dtype=x.dtype, device=x.device)
    full = x.dtype.itemsize == 4
    block = 64 if items > 32 * groups and not full else 16
    grid = (items // block + groups, triton.cdiv(outputs, BLOCK_OUT))
    strides = (x.stride(0), *weight.stride())
    blocks = {"PER_ROW": per_row, "BLOCK": block, "BLOCK_OUT": BLOCK_OUT, "BLOCK_IN": 16 if full else 64}
    num_warps = 8 if full else 4
    _grouped_linear_kernel[grid](
        x, weight, order, starts, out, groups, inputs, outputs, *strides, **blocks, num_warps=num_warps
    )
    return out


@triton.jit(do_not_specialize=("layer", "items"))  # differ from launch to launch
def _record_experts_kernel(
    chosen, slot_mapping, address, layer, layers, items, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per BLOCK (token, expert) items."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = item < items
    slot = tl.load(slot_mapping + item // PER_TOKEN, mask=live, other=0)
    expert = tl.load(chosen + item, mask=live, other=0)
    router_indices = tl.load(address).to(tl.pointer_type(tl.int16))
    tl.store(router_indices + (slot * layers + layer) * PER_TOKEN + item % PER_TOKEN, expert.to(tl.int16), mask=live)


def record_experts(
    chosen: torch.Tensor, slot_mapping: torch.Tensor, address: torch.Tensor, layer: int, layers: int
) -> None:
    """Write the experts of each token to its slot of `PagedKV.router_indices`, without waiting for the device.

    chosen int64 [tokens, per_token]; slot_mapping int64 [tokens], the cache position of each token.
    address: int64 [1], on the device: of the int16 tensor [slots, layers, per_token] that is written. A CUDA graph
        reads it from here, and so stays valid when the blocks are allocated again.
    layer, layers: which of how many layers with experts.
    """
    require_contiguous(chosen.device, torch.int64, chosen, slot_mapping, address)
    block, items = 256, chosen.numel()
    grid = (triton.cdiv(items, block),)
    _record_experts_kernel[grid](
        chosen, slot_mapping, address, layer, layers, items, PER_TOKEN=chosen.shape[1], BLOCK=block
    )


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
    first_expert: int | None = None,
) -> torch.Tensor:
    """`hybrid.kernels.torch_ops.mixture`, with the same rounding.  [tokens, hidden], x's dtype

    x [tokens, hidden], gate_up [experts, 2 · inner or inner, hidden], down [experts, hidden, inner].
    weights, chosen [tokens, per_token]: of each token's experts.
    gate_up_bias [experts, rows of `gate_up`, 1], down_bias [experts, hidden, 1]: None: no bias.
    activation: [items, rows of `gate_up`], gate before up if the experts have gates, to [items, inner].
    first_expert: the index in `chosen` of the first of these experts, where other ranks have the others; None: these
        are all.
    """
    expert, per_token = chosen.flatten(), chosen.shape[1]
    if first_expert is not None:
        expert = expert - first_expert
        is_local = (expert >= 0) & (expert < len(gate_up))
        expert = expert.masked_fill(~is_local, len(gate_up))  # items after the last group, which are not computed
    of_bias = expert if first_expert is None else expert.clamp(max=len(gate_up) - 1)
    order = expert.argsort(stable=True)
    experts = torch.arange(len(gate_up) + 1, device=x.device)
    starts = torch.searchsorted(expert[order], experts).int()  # index of each expert's first item, and the end
    order = order.int()
    items = grouped_linear(x, gate_up, order, starts, per_token)
    if gate_up_bias is not None:
        items += gate_up_bias[of_bias, :, 0]
    out = grouped_linear(activation(items), down, order, starts, 1)
    if down_bias is not None:
        out += down_bias[of_bias, :, 0]
    if first_expert is not None:
        out.masked_fill_(~is_local[:, None], 0)
    out = out.unflatten(0, (-1, per_token))
    return (out * weights[..., None]).float().sum(1).to(x.dtype)
