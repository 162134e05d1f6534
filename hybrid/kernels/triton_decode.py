"""A decode step's bookkeeping in Triton: cache positions before the layers, and each sequence's next token after them.

Both kernels read and write tensors on the device only, so that many steps run without the host.
"""

import torch
import triton
import triton.language as tl

from hybrid.kernels import require_contiguous

ROWS = 64  # sequences per program
# Arguments that differ from batch to batch and must not cause a recompilation.
VARYING = ("count", "num_stops", "capacity", "table_stride")
# Parts of one tensor: their alignment depends on the batch.
DRAWN = ("sampling_logps", "old_logps", "raw_logps", "sampling_mask")


@triton.jit(do_not_specialize=VARYING)
def _slot_mapping_kernel(
    positions, block_tables, slot_mapping, count, table_stride, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """One program per ROWS sequences."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    position = tl.load(positions + row, mask=live, other=0)
    entry = block_tables + row.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=live, other=0).to(tl.int64)
    tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


def decode_slot_mapping(positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the cache position of each sequence's new token, int64 [sequences].

    positions: int32 [sequences], of the new token.  block_tables: int32 [sequences, blocks], rows may be strided.
    """
    require_contiguous(positions.device, torch.int32, positions)
    assert block_tables.dtype == torch.int32 and block_tables.stride(1) == 1, "block tables are int32, by rows"
    count = len(positions)
    slot_mapping = torch.empty(count, dtype=torch.int64, device=positions.device)
    grid = (triton.cdiv(count, ROWS),)
    _slot_mapping_kernel[grid](
        positions, block_tables, slot_mapping, count, block_tables.stride(0), BLOCK_SIZE=block_size, ROWS=ROWS
    )
    return slot_mapping


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=DRAWN)
def _advance_kernel(
    drawn,
    sampling_logps,
    old_logps,
    raw_logps,
    sampling_mask,
    ids,
    positions,
    lengths,
    new_positions,
    limits,
    finished,
    steps,
    stop_token_ids,
    tokens,
    logps,
    seen,
    state_slots,
    block_tables,
    count,
    num_stops,
    capacity,
    max_steps,
    seen_stride,
    table_stride,
    HAS_SEEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per ROWS sequences; a finished sequence changes nothing, and becomes padding."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    runs = live & (tl.load(finished + row, mask=live, other=1) == 0)
    token = tl.load(drawn + row, mask=runs, other=0)
    step = tl.load(steps + row, mask=runs, other=0)
    cell = step.to(tl.int64) * capacity + row
    layer = tl.zeros((ROWS,), tl.int64) + max_steps * capacity
    tl.store(tokens + cell, token, mask=runs)
    tl.store(logps + cell, tl.load(sampling_logps + row, mask=runs, other=0.0), mask=runs)
    tl.store(logps + layer + cell, tl.load(old_logps + row, mask=runs, other=0.0), mask=runs)
    tl.store(logps + 2 * layer + cell, tl.load(raw_logps + row, mask=runs, other=0.0), mask=runs)
    tl.store(logps + 3 * layer + cell, tl.load(sampling_mask + row, mask=runs, other=0.0), mask=runs)
    if HAS_SEEN:
        tl.store(seen + row.to(tl.int64) * seen_stride + token, tl.full((ROWS,), 1, tl.uint8), mask=runs)
    new = tl.load(new_positions + row, mask=runs, other=0) + 1
    ends = new >= tl.load(limits + row, mask=runs, other=0)
    for index in range(num_stops):
        ends |= token == tl.load(stop_token_ids + index)
    goes_on = runs & (ends == 0)
    tl.store(steps + row, step + 1, mask=runs)
    tl.store(new_positions + row, new, mask=runs)
    tl.store(finished + row, tl.full((ROWS,), 1, tl.int32), mask=runs & ends)
    tl.store(state_slots + row, tl.full((ROWS,), -1, tl.int32), mask=runs & ends)
    zero = tl.zeros((ROWS,), tl.int32)
    tl.store(block_tables + row.to(tl.int64) * table_stride, zero, mask=runs & ends)
    position = tl.load(positions + row, mask=goes_on, other=-1) + 1
    length = tl.load(lengths + row, mask=goes_on, other=0) + 1
    tl.store(ids + row, token, mask=goes_on)
    tl.store(positions + row, position, mask=runs)
    tl.store(lengths + row, length, mask=runs)


def advance(
    drawn: torch.Tensor,
    drawn_logps: tuple[torch.Tensor, ...],
    ids: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    new_positions: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    steps: torch.Tensor,
    stop_token_ids: torch.Tensor,
    tokens: torch.Tensor,
    logps: torch.Tensor,
    seen: torch.Tensor | None,
    state_slots: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Record each unfinished sequence's new token, and make it the input of its next step. After its last one a
    sequence is padding: of one token, in block 0, so that further steps write nothing of it and read little.

    drawn: int64 [sequences], with three logprobs and the sampling mask, float32 [sequences] each.
    ids int64, positions, lengths int32 [sequences]: a step's batch.
    new_positions: int64 [sequences], the index of the new token in its completion.  limits: int64 [sequences], the most
        new tokens.  finished: int32 [sequences], 0 or 1.  steps: int32 [sequences], tokens recorded so far.
    stop_token_ids: int64 [n].
    tokens: int64 [max_steps, capacity], and logps: float32 [4, max_steps, capacity], by step and sequence.
    seen: None, or uint8 [sequences, vocab], 1 for the tokens that a sequence has; rows may be strided.
    state_slots: int32 [sequences]; -1 for a sequence that has ended, so that later steps do not write its state.
    block_tables: int32 [sequences, blocks], rows may be strided.
    """
    (max_steps, capacity), device = tokens.shape, drawn.device
    require_contiguous(device, torch.int64, drawn, ids, new_positions, limits, stop_token_ids, tokens)
    require_contiguous(device, torch.int32, positions, lengths, finished, steps, state_slots)
    require_contiguous(device, torch.float32, *drawn_logps, logps)
    assert logps.shape == (4, max_steps, capacity), f"logprobs are {tuple(logps.shape)}, tokens {tuple(tokens.shape)}"
    assert seen is None or (seen.dtype == torch.uint8 and seen.stride(1) == 1), "seen tokens are uint8, by rows"
    assert block_tables.dtype == torch.int32 and block_tables.stride(1) == 1, "block tables are int32, by rows"
    grid = (triton.cdiv(len(drawn), ROWS),)
    batch = ids, positions, lengths, new_positions, limits, finished, steps
    results = stop_token_ids, tokens, logps, finished if seen is None else seen, state_slots, block_tables
    strides = 0 if seen is None else seen.stride(0), block_tables.stride(0)
    sizes = len(drawn), len(stop_token_ids), capacity, max_steps, *strides
    _advance_kernel[grid](drawn, *drawn_logps, *batch, *results, *sizes, HAS_SEEN=seen is not None, ROWS=ROWS)
