"""The block pool of the KV cache: reference counts, contents, growth and limits."""

from itertools import pairwise

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, NO_ADAPTER, KVWeights, PagedKV
from hybrid.generation.block_pool import NO_SLOT, RESERVED_SHARE, BlockPool, blocks_for

LAYERS, WIDTH = 2, 3


class Maker:
    """Allocates blocks, and records the requested sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = WIDTH):
        self.dtype, self.width = dtype, width
        self.sizes: list[int] = []

    def __call__(self, blocks: int) -> PagedKV:
        self.sizes.append(blocks)
        keys, values = (
            [torch.full((blocks, BLOCK_SIZE, self.width), torch.nan, dtype=self.dtype) for _ in range(LAYERS)]
            for _ in range(2)
        )
        return PagedKV(keys, values)


BLOCK_BYTES = 2 * LAYERS * BLOCK_SIZE * WIDTH * 4


def pool_of(step: int = BLOCK_SIZE, limit_blocks: int | None = None, maker: Maker | None = None) -> BlockPool:
    """A BlockPool after begin_call; limit_blocks: the most blocks in use."""
    block_pool = BlockPool(step, None if limit_blocks is None else (limit_blocks + 1) * BLOCK_BYTES)
    block_pool.begin_call(maker or Maker())
    return block_pool


def write(block_pool: BlockPool, blocks: list[int]) -> None:
    """Write distinct values into every tensor of each block."""
    for block in blocks:
        for index, tensor in enumerate((*block_pool.kv.keys, *block_pool.kv.values)):
            tensor[block] = 100.0 * block + index


def is_written(block_pool: BlockPool, block: int, of: int) -> bool:
    """Whether a block has the values written to block `of`."""
    tensors = (*block_pool.kv.keys, *block_pool.kv.values)
    return all(bool((tensor[block] == 100.0 * of + index).all()) for index, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (10 * BLOCK_SIZE, 10)]
)
def test_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_allocate_gives_distinct_blocks_and_never_block_0():
    block_pool = pool_of()
    taken = block_pool.allocate(5) + block_pool.allocate(0) + block_pool.allocate(7)
    assert len(set(taken)) == 12
    assert 0 not in taken
    assert max(taken) < block_pool.capacity
    assert block_pool.num_used == 12


def test_a_block_is_free_when_its_last_reference_is_dropped():
    block_pool = pool_of()
    blocks = block_pool.allocate(3)
    block_pool.ref(blocks[:2])
    block_pool.ref(blocks[:1])
    block_pool.free(blocks)
    assert block_pool.num_used == 2
    block_pool.free(blocks[:2])
    assert block_pool.num_used == 1
    taken = block_pool.allocate(block_pool.capacity - 1 - block_pool.num_used)
    assert blocks[0] not in taken
    assert set(blocks[1:]) <= set(taken)
    block_pool.free(blocks[:1])
    assert block_pool.allocate(1) == blocks[:1]


def test_growing_keeps_block_ids_and_contents():
    block_pool = pool_of(step=4 * BLOCK_SIZE)
    blocks = block_pool.allocate(3)
    write(block_pool, blocks)
    before = block_pool.capacity
    more = block_pool.allocate(30)
    assert block_pool.capacity > before
    assert not set(blocks) & set(more)
    assert all(is_written(block_pool, block, block) for block in blocks)
    write(block_pool, more)
    assert all(is_written(block_pool, block, block) for block in blocks + more)


def test_storage_grows_geometrically():
    """Without a reservation: allocating block by block does not copy the cache block by block."""
    maker = Maker()
    block_pool = pool_of(step=4 * BLOCK_SIZE, maker=maker)
    for _ in range(200):
        block_pool.allocate(1)
    capacities = maker.sizes[1:]  # the first call, of one block, only measures a block
    assert capacities[0] == 4
    assert all(after >= before + before // 2 for before, after in pairwise(capacities))
    assert len(capacities) < 12


def test_copy_copies_whole_blocks():
    block_pool = pool_of()
    first, second, *targets = block_pool.allocate(5)
    write(block_pool, [first, second])
    block_pool.kv.copy([first, first, second], targets)
    assert is_written(block_pool, targets[0], first)
    assert is_written(block_pool, targets[1], first)
    assert is_written(block_pool, targets[2], second)
    block_pool.kv.copy([], [])
    write(block_pool, targets)
    assert is_written(block_pool, first, first), "a copy aliases its source"


def test_storage_is_reused_over_calls_and_released():
    maker = Maker()
    block_pool = pool_of(maker=maker)
    block_pool.allocate(9)
    count, kv, reserved_bytes = len(maker.sizes), block_pool.kv, block_pool.nbytes()
    block_pool.begin_call(maker)
    assert block_pool.num_used == 0, "blocks of the previous call are still in use"
    block_pool.allocate(9)
    assert block_pool.kv is kv
    assert len(maker.sizes) == count + 1  # the one block that measures dtype and shape
    assert block_pool.peak_bytes == reserved_bytes == 10 * BLOCK_BYTES
    block_pool.release()
    assert block_pool.nbytes() == 0
    assert block_pool.num_used == 0
    block_pool.begin_call(maker)
    assert sorted(block_pool.allocate(2)) == [1, 2]
    assert block_pool.peak_bytes == reserved_bytes


@pytest.mark.parametrize("other", [Maker(torch.bfloat16), Maker(width=4)], ids=["dtype", "shape"])
def test_another_dtype_or_shape_allocates_new_storage(other):
    block_pool = pool_of()
    block_pool.allocate(5)
    block_pool.begin_call(other)
    assert block_pool.nbytes() == 0
    block_pool.allocate(2)
    assert block_pool.kv.keys[0].dtype == other.dtype
    assert block_pool.kv.keys[0].shape[-1] == other.width


def test_an_interrupted_call_leaves_no_block_in_use():
    block_pool = pool_of(limit_blocks=4)
    block_pool.ref(block_pool.allocate(4))
    block_pool.begin_call(Maker())
    assert len(block_pool.allocate(4)) == 4


@pytest.mark.parametrize("limit", [1, 2, 5, 23])
def test_the_limit_is_reached_but_not_exceeded(limit):
    block_pool = pool_of(step=8 * BLOCK_SIZE, limit_blocks=limit)
    assert block_pool.limit == limit
    for _ in range(limit):
        block_pool.allocate(1)
        assert block_pool.nbytes() <= block_pool.limit_bytes
    assert block_pool.capacity == limit + 1


def test_rows_that_exceed_kv_cache_bytes_raise():
    block_pool = BlockPool(BLOCK_SIZE, 11 * BLOCK_BYTES)
    block_pool.require_room([10 * BLOCK_SIZE], BLOCK_BYTES)
    block_pool.require_room([BLOCK_SIZE] * 10, BLOCK_BYTES)
    with pytest.raises(
        ValueError, match=rf"kv_cache_bytes leaves {11 * BLOCK_BYTES} bytes.*a row of 321 tokens.*{12 * BLOCK_BYTES}"
    ):
        block_pool.require_room([10 * BLOCK_SIZE + 1], BLOCK_BYTES)
    with pytest.raises(ValueError, match=r"11 rows that have to be in the cache together, the longest of 30 tokens"):
        block_pool.require_room([30] + [1] * 10, BLOCK_BYTES)
    BlockPool(BLOCK_SIZE, None).require_room([10**9], BLOCK_BYTES)
    block_pool.require_room([10**9], 0)  # the model runs natively


def test_reserve_call_allocates_once_without_holding_two_storages():
    """No growth within the call; storage that is too small is freed before the new one is allocated."""
    maker = Maker()
    block_pool = pool_of(step=4 * BLOCK_SIZE, maker=maker)
    block_pool.reserve_call(9)
    assert maker.sizes == [1, 12]
    for _ in range(9):
        block_pool.allocate(1)
    assert maker.sizes == [1, 12]
    assert block_pool.peak_bytes == 12 * BLOCK_BYTES
    block_pool.begin_call(maker)
    block_pool.reserve_call(5)
    assert maker.sizes == [1, 12, 1], "storage that is large enough is not reused"
    live_bytes = []

    def measuring(blocks: int) -> PagedKV:
        live_bytes.append(block_pool.nbytes())
        return maker(blocks)

    block_pool.begin_call(measuring)
    live_bytes.clear()
    block_pool.reserve_call(30)
    assert live_bytes == [0], "old and new storage were held together"
    assert block_pool.peak_bytes == block_pool.nbytes() == 32 * BLOCK_BYTES
    block_pool.allocate(1)
    with pytest.raises(AssertionError, match="in use"):
        block_pool.reserve_call(40)


def test_reserve_call_is_bounded_by_the_limit_and_by_free_memory():
    block_pool = pool_of(limit_blocks=6)
    block_pool.reserve_call(100)
    assert block_pool.capacity == 7
    block_pool = BlockPool(BLOCK_SIZE, free_bytes=lambda: 20 * BLOCK_BYTES)
    block_pool.begin_call(Maker())
    block_pool.reserve_call(100)
    assert block_pool.capacity == 18
    block_pool.allocate(17)
    growth = block_pool.kv.growth_bytes
    block_pool.allocate(1)  # more than was free when the call began
    assert block_pool.peak_bytes == block_pool.nbytes() + growth


def test_reserve_call_leaves_memory_to_forwards_and_the_call_waits_for_blocks():
    """Without a limit of the settings, too; the next call has one of its own."""
    block_pool = BlockPool(BLOCK_SIZE, free_bytes=lambda: 20 * BLOCK_BYTES)
    block_pool.begin_call(Maker())
    block_pool.reserve_call(100, forward_bytes=lambda: 10 * BLOCK_BYTES, needed=4)
    assert (block_pool.capacity, block_pool.limit) == (9, 8)
    block_pool.begin_call(Maker())
    assert block_pool.limit is None
    block_pool.reserve_call(100, forward_bytes=lambda: 50 * BLOCK_BYTES, needed=20)  # a row has to fit
    assert (block_pool.capacity, block_pool.limit) == (9, 20)
    block_pool.begin_call(Maker())
    block_pool.reserve_call(8, forward_bytes=lambda: 50 * BLOCK_BYTES, needed=4)  # what is there suffices
    assert (block_pool.capacity, block_pool.limit) == (9, None)


def states_of(slots: int) -> dict[int, tuple[torch.Tensor, ...]]:
    """The recurrent states of a layer, its content undefined."""
    return {3: (torch.full((slots, 2, 4), torch.nan), torch.full((slots, 5), torch.nan))}


SLOT_BYTES = 4 * (2 * 4 + 5)


def test_recurrent_states_have_slots_that_are_copied_and_grow():
    block_pool = BlockPool(BLOCK_SIZE)
    block_pool.begin_call(Maker(), make_states=states_of)
    block_pool.reserve_states(2)
    block_pool.reserve_call(3)
    slots = block_pool.allocate_states(2)
    assert sorted(slots) == [0, 1] and block_pool.kv.states[3][0].shape[0] == 2
    for tensor in block_pool.kv.states[3]:
        tensor[slots[0]], tensor[slots[1]] = 7.0, 8.0
    more = block_pool.allocate_states(3)
    assert len({*slots, *more}) == 5
    block_pool.copy_states(slots[0], more[:2])
    block_pool.allocate(20)  # the blocks grow
    for tensor in block_pool.kv.states[3]:
        assert [tensor[slot].unique().tolist() for slot in (*slots, *more[:2])] == [[7.0], [8.0], [7.0], [7.0]]
    assert block_pool.nbytes() == block_pool.capacity * BLOCK_BYTES + block_pool.num_slots * SLOT_BYTES
    block_pool.free_states(more)
    assert sorted(block_pool.allocate_states(3)) == sorted(more)
    block_pool.begin_call(Maker(), make_states=states_of)
    assert len(set(block_pool.allocate_states(5))) == 5, "slots of the call before are free"


def kept_sequence(block_pool: BlockPool, token_ids: torch.Tensor, value: float, is_shared: bool = False) -> list[int]:
    """The blocks of a sequence that has left, whose states are `value`."""
    blocks, (slot,) = block_pool.allocate(blocks_for(len(token_ids))), block_pool.allocate_states(1)
    write(block_pool, blocks)
    for tensor in block_pool.kv.states[3]:
        tensor[slot] = value
    kept = block_pool.keep_state(token_ids, blocks, slot, is_shared=is_shared)
    block_pool.free_states([NO_SLOT if kept else slot])
    block_pool.free(blocks)
    return blocks


def resumed(block_pool: BlockPool, prompt: torch.Tensor) -> tuple[list[int], int, int]:
    return block_pool.resume([prompt], [NO_ADAPTER])[0]


def states_in(block_pool: BlockPool, slots: list[int]) -> list[float]:
    """The states in slots, of which each has one value."""
    values = [[tensor[slot].unique().tolist() for tensor in block_pool.kv.states[3]] for slot in slots]
    assert all(first == second and len(first) == 1 for first, second in values)
    return [first[0] for first, _ in values]


def recurrent_pool(num_slots: int) -> BlockPool:
    block_pool = BlockPool(BLOCK_SIZE)
    block_pool.begin_call(Maker(), make_states=states_of)
    block_pool.reserve_states(num_slots)
    block_pool.reserve_call(20)
    return block_pool


@pytest.mark.parametrize("tokens", [3, BLOCK_SIZE, BLOCK_SIZE + 5, 3 * BLOCK_SIZE])
def test_a_sequence_goes_on_from_the_states_after_its_longest_kept_begin(tokens):
    block_pool, ids = recurrent_pool(6), torch.arange(4 * BLOCK_SIZE)
    kept_sequence(block_pool, ids[:2], 1.0)
    blocks = kept_sequence(block_pool, ids[:tokens], 2.0)
    held, reused, slot = resumed(block_pool, ids[: tokens + 1])
    assert reused == tokens and len(held) == len(blocks)
    assert held == blocks, "no other sequence needs them"
    assert states_in(block_pool, [slot]) == [2.0]
    held, reused, slot = resumed(block_pool, ids[: tokens + 1])
    assert reused == 2, "states serve one sequence"
    assert states_in(block_pool, [slot]) == [1.0]


@pytest.mark.parametrize("tokens", [3, BLOCK_SIZE, BLOCK_SIZE + 5, 3 * BLOCK_SIZE])
def test_states_after_other_tokens_or_all_tokens_are_not_taken(tokens):
    """A prompt's last token is computed, for its logits."""
    block_pool, ids = recurrent_pool(6), torch.arange(4 * BLOCK_SIZE)
    kept_sequence(block_pool, ids[:tokens], 2.0)
    other = ids.clone()
    other[tokens - 1] = 0
    for prompt in (other, ids[:tokens], ids[: tokens - 1]):
        assert resumed(block_pool, prompt)[:2] == ([], 0)
    assert resumed(block_pool, ids)[1] == tokens


def test_kept_states_go_before_the_storage_grows_and_with_their_blocks():
    block_pool, ids = recurrent_pool(2), torch.arange(5)
    kept_sequence(block_pool, ids, 1.0)
    kept_sequence(block_pool, ids + 10, 2.0)
    kept_sequence(block_pool, ids + 20, 3.0)
    assert block_pool.num_slots == 2, "the oldest states are forgotten first"
    found = [resumed(block_pool, torch.cat([ids + first, ids]))[1] for first in (20, 10)]
    assert found == [5, 5] and block_pool.num_slots == 2
    block_pool.begin_call(Maker(), make_states=states_of)
    kept_sequence(block_pool, ids, 1.0)
    block_pool.allocate(block_pool.capacity - 1)
    assert sorted(block_pool.allocate_states(2)) == [0, 1], "states whose blocks are gone leave their slot"
    assert resumed(block_pool, torch.cat([ids, ids]))[1] == 0
    assert len(set(block_pool.allocate_states(3))) == 3 and block_pool.num_slots > 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [0.5, 1, 4])
def test_slots_for_kept_states_stay_within_the_limit_and_free_memory(rows, share):
    """They take what the call's rows and blocks leave."""
    room = 8 * BLOCK_BYTES + 6 * SLOT_BYTES
    limited = BlockPool(BLOCK_SIZE, room, extra_bytes=int(share * room))
    free = BlockPool(BLOCK_SIZE, extra_bytes=int(share * room), free_bytes=lambda: room / RESERVED_SHARE)
    for block_pool in (limited, free):
        block_pool.begin_call(Maker(), make_states=states_of)
        block_pool.reserve_states(rows, 7)
        block_pool.reserve_call(7)
        assert rows < block_pool.num_slots <= 6 and block_pool.nbytes() <= room
        assert block_pool.limit is None or block_pool.limit >= 7
    limited.reserve_states(6, 7)
    assert limited.num_slots == 6
    limited.reserve_states(2, 7)
    assert limited.num_slots == 6, "blocks do not need the room"
    limited.reserve_states(2, 10)
    assert limited.num_slots == 2, "blocks need the room"


def test_kept_states_are_lost_with_the_storage_when_memory_does_not_suffice(monkeypatch):
    """Else the layers that have moved would be read by the old slots."""
    block_pool, ids = recurrent_pool(3), torch.arange(5)
    for value in (1.0, 2.0):
        kept_sequence(block_pool, ids + 10 * int(value), value)
    layers, new_empty = [], torch.Tensor.new_empty

    def fails_at_the_second(tensor, *shape, **settings):
        layers.append(shape)
        if len(layers) == 2:
            raise RuntimeError("out of memory")
        return new_empty(tensor, *shape, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", fails_at_the_second)
        with pytest.raises(RuntimeError, match="out of memory"):
            block_pool.reserve_states(9)
    block_pool.begin_call(Maker(), make_states=states_of)
    block_pool.reserve_states(3)
    assert resumed(block_pool, torch.cat([ids + 10, ids]))[1] == 0
    assert len(block_pool.free_slots) == 2


@pytest.mark.parametrize("limit_bytes", [None, 20 * BLOCK_BYTES + 9 * SLOT_BYTES])
def test_the_last_kept_states_outlive_another_number_of_slots(limit_bytes):
    block_pool, ids = BlockPool(BLOCK_SIZE, limit_bytes), torch.arange(5)
    for num_slots, expected in ((4, [0, 0, 0]), (9, [5, 5, 5]), (3, [5, 5, 5]), (2, [5, 5, 0])):
        block_pool.begin_call(Maker(), KVWeights(1, 0), make_states=states_of)
        before, sizes = block_pool.kv, block_pool.num_slots
        block_pool.reserve_states(num_slots, 20)
        assert (block_pool.kv is before) == (block_pool.num_slots == sizes), "decoders keep the addresses of a record"
        block_pool.reserve_call(8)
        assert limit_bytes is None or (block_pool.num_slots == num_slots and block_pool.nbytes() <= limit_bytes)
        found = [resumed(block_pool, torch.cat([ids + first, ids])) for first in (30, 20, 10)]
        if limit_bytes is not None or num_slots > 2:
            assert [reused for _, reused, _ in found] == expected
        for value, (_, reused, slot) in zip((3.0, 2.0, 1.0), found, strict=True):
            assert not reused or states_in(block_pool, [slot]) == [value]
        slots = [*block_pool.free_slots, *(slot for *_, slot in found)]
        assert sorted(slots) == list(range(block_pool.num_slots))
        for blocks, _, slot in found:
            block_pool.free(blocks)
            block_pool.free_states([slot])
        for value in (1.0, 2.0, 3.0):
            kept_sequence(block_pool, ids + 10 * int(value), value)
        block_pool.end_call()


def test_kept_states_outlive_a_call_with_the_same_weights():
    block_pool, ids = recurrent_pool(2), torch.arange(5)
    for version, expected in ((1, 5), (1, 5), (2, 0)):
        block_pool.begin_call(Maker(), KVWeights(1, 0), make_states=states_of)
        block_pool.reserve_states(2)
        kept_sequence(block_pool, ids, 1.0)
        block_pool.end_call()
        block_pool.begin_call(Maker(), KVWeights(version, 0), make_states=states_of)
        block_pool.reserve_states(2)
        assert resumed(block_pool, torch.cat([ids, ids]))[1] == expected
        block_pool.begin_call(Maker(), KVWeights(version, 0), make_states=states_of)
    kept_sequence(block_pool, ids, 1.0)
    block_pool.release()
    block_pool.begin_call(Maker(), KVWeights(2, 0), make_states=states_of)
    assert resumed(block_pool, torch.cat([ids, ids]))[:2] == ([], 0)


def test_nothing_is_kept_without_prefix_caching():
    block_pool = BlockPool(BLOCK_SIZE, caches_prefixes=False)
    block_pool.begin_call(Maker(), make_states=states_of)
    kept_sequence(block_pool, torch.arange(5), 1.0)
    assert resumed(block_pool, torch.arange(9))[:2] == ([], 0)
    assert block_pool.num_slots == len(block_pool.free_slots) + 1


def test_shared_states_serve_every_sequence():
    """Each gets a copy; where slots are short the last one takes the states, and other kept states go first."""
    block_pool, ids = recurrent_pool(4), torch.arange(2 * BLOCK_SIZE)
    kept_sequence(block_pool, ids[:BLOCK_SIZE], 1.0, is_shared=True)
    kept_sequence(block_pool, ids + 7, 2.0)
    prompts = [torch.cat([ids[:BLOCK_SIZE], torch.tensor([first, 5])]) for first in (90, 91)]
    found = block_pool.resume(prompts, [NO_ADAPTER] * 2)
    assert [reused for _, reused, _ in found] == [BLOCK_SIZE] * 2
    assert found[0][0] == found[1][0], "full blocks are shared"
    slots = [slot for *_, slot in found]
    assert states_in(block_pool, slots) == [1.0, 1.0] and len(set(slots)) == 2
    for tensor in block_pool.kv.states[3]:
        tensor[slots] = 3.0
    assert resumed(block_pool, prompts[0])[1] == BLOCK_SIZE and block_pool.num_slots == 4
    block_pool.free_states(slots)
    found = block_pool.resume([*prompts, prompts[0] + 1], [NO_ADAPTER] * 3)
    assert [reused for _, reused, _ in found] == [BLOCK_SIZE, BLOCK_SIZE, 0]
    slots = [slot for *_, slot in found]
    assert states_in(block_pool, slots[:2]) == [1.0, 1.0] and len(set(slots)) == 3
    assert block_pool.num_slots == 4 and not block_pool.kept_states


def test_states_that_a_prompt_continues_are_forgotten_last():
    block_pool, ids = recurrent_pool(2), torch.arange(5)
    kept_sequence(block_pool, ids, 1.0)
    kept_sequence(block_pool, ids + 10, 2.0)
    prompt, other = torch.cat([ids, ids]), torch.cat([ids + 10, ids])
    assert block_pool.touch_state(prompt, NO_ADAPTER) == 5 and block_pool.touch_state(ids, NO_ADAPTER) == 0
    block_pool.allocate_states(1)
    assert [resumed(block_pool, own)[1] for own in (prompt, other)] == [5, 0]


def test_another_adapters_states_are_not_found():
    block_pool, ids = recurrent_pool(4), torch.arange(2 * BLOCK_SIZE)
    kept_sequence(block_pool, ids[:BLOCK_SIZE], 1.0, is_shared=True)
    assert [reused for _, reused, _ in block_pool.resume([ids, ids], [0, NO_ADAPTER])] == [0, BLOCK_SIZE]


def test_recurrent_states_count_in_the_limit_and_blocks_without_them_are_not_found():
    limit = 9 * SLOT_BYTES + 10 * BLOCK_BYTES
    block_pool = BlockPool(BLOCK_SIZE, limit)
    block_pool.begin_call(Maker(), make_states=states_of)
    assert block_pool.num_seqs_within_limit(2 * BLOCK_SIZE, 100) == limit // (2 * SLOT_BYTES + 2 * BLOCK_BYTES)
    block_pool.reserve_states(9)
    block_pool.reserve_call(100)
    assert (block_pool.limit, block_pool.nbytes()) == (9, limit)
    block_pool.begin_call(Maker(), make_states=states_of)
    block_pool.reserve_states(2)  # fewer: their bytes are for blocks
    assert block_pool.limit == (limit - 2 * SLOT_BYTES) // BLOCK_BYTES - 1
    ids = torch.arange(2 * BLOCK_SIZE)
    block_pool.insert(ids, block_pool.allocate(2))
    assert resumed(block_pool, ids)[:2] == ([], 0) and len(block_pool.same_blocks(ids)) == 2
    with pytest.raises(ValueError, match="may need"):
        block_pool.require_room([10 * BLOCK_SIZE - 1], BLOCK_BYTES, SLOT_BYTES)
