"""Blocks of the KV cache: who holds which, what is in them, and how many there may be."""

from itertools import pairwise

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, PagedKV
from hybrid.generation.block_pool import BlockPool, blocks_for

LAYERS, WIDTH = 2, 3


class Maker:
    """Makes blocks, and keeps a list of how many were asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = WIDTH):
        self.dtype, self.width = dtype, width
        self.made: list[int] = []

    def __call__(self, blocks: int) -> PagedKV:
        self.made.append(blocks)
        keys, values = (
            [torch.full((blocks, BLOCK_SIZE, self.width), torch.nan, dtype=self.dtype) for _ in range(LAYERS)]
            for _ in range(2)
        )
        return PagedKV(keys, values)


BLOCK_BYTES = 2 * LAYERS * BLOCK_SIZE * WIDTH * 4


def pool_of(step: int = BLOCK_SIZE, limit_blocks: int | None = None, maker: Maker | None = None) -> BlockPool:
    """A block_pool in which a call has begun; limit_blocks: that may be held."""
    block_pool = BlockPool(step, None if limit_blocks is None else (limit_blocks + 1) * BLOCK_BYTES)
    block_pool.begin_call(maker or Maker())
    return block_pool


def write(block_pool: BlockPool, blocks: list[int]) -> None:
    """Something of its own into every tensor of each block."""
    for block in blocks:
        for index, tensor in enumerate((*block_pool.kv.keys, *block_pool.kv.values)):
            tensor[block] = 100.0 * block + index


def is_written(block_pool: BlockPool, block: int, of: int) -> bool:
    """Whether a block holds what was written to block `of`."""
    tensors = (*block_pool.kv.keys, *block_pool.kv.values)
    return all(bool((tensor[block] == 100.0 * of + index).all()) for index, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (10 * BLOCK_SIZE, 10)]
)
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_a_block_is_given_to_one_and_block_0_to_nobody():
    block_pool = pool_of()
    taken = block_pool.allocate(5) + block_pool.allocate(0) + block_pool.allocate(7)
    assert len(set(taken)) == 12
    assert 0 not in taken
    assert max(taken) < block_pool.capacity
    assert block_pool.num_used == 12


def test_a_block_is_free_when_its_last_holder_gives_it_back():
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


def test_growing_keeps_numbers_and_content():
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


def test_it_grows_in_steps_and_never_by_little():
    """Where nobody knew how much it would be: a token at a time does not copy the cache a token at a time."""
    maker = Maker()
    block_pool = pool_of(step=4 * BLOCK_SIZE, maker=maker)
    for _ in range(200):
        block_pool.allocate(1)
    capacities = maker.made[1:]  # the first block only told what blocks look like
    assert capacities[0] == 4
    assert all(after >= before + before // 2 for before, after in pairwise(capacities))
    assert len(capacities) < 12


def test_copies_are_whole():
    block_pool = pool_of()
    one, other, *targets = block_pool.allocate(5)
    write(block_pool, [one, other])
    block_pool.copy([one, one, other], targets)
    assert is_written(block_pool, targets[0], one)
    assert is_written(block_pool, targets[1], one)
    assert is_written(block_pool, targets[2], other)
    block_pool.copy([], [])
    write(block_pool, targets)
    assert is_written(block_pool, one, one), "a copy is the block itself"


def test_storage_is_kept_over_calls_and_let_go_of():
    maker = Maker()
    block_pool = pool_of(maker=maker)
    block_pool.allocate(9)
    made, kv, held = len(maker.made), block_pool.kv, block_pool.nbytes()
    block_pool.begin_call(maker)
    assert block_pool.num_used == 0, "blocks of the call before are still held"
    block_pool.allocate(9)
    assert block_pool.kv is kv
    assert len(maker.made) == made + 1  # the one block that tells their kind
    assert block_pool.peak_bytes == held == 10 * BLOCK_BYTES
    block_pool.release()
    assert block_pool.nbytes() == 0
    assert block_pool.num_used == 0
    block_pool.begin_call(maker)
    assert sorted(block_pool.allocate(2)) == [1, 2]
    assert block_pool.peak_bytes == held


@pytest.mark.parametrize("other", [Maker(torch.bfloat16), Maker(width=4)], ids=["dtype", "shape"])
def test_blocks_of_another_kind_are_new_storage(other):
    block_pool = pool_of()
    block_pool.allocate(5)
    block_pool.begin_call(other)
    assert block_pool.nbytes() == 0
    block_pool.allocate(2)
    assert block_pool.kv.keys[0].dtype == other.dtype
    assert block_pool.kv.keys[0].shape[-1] == other.width


def test_an_interrupted_call_leaves_nothing_held():
    block_pool = pool_of(limit_blocks=4)
    block_pool.ref(block_pool.allocate(4))
    block_pool.begin_call(Maker())
    assert len(block_pool.allocate(4)) == 4


@pytest.mark.parametrize("limit", [1, 2, 5, 23])
def test_the_limit_is_reached_and_not_passed(limit):
    block_pool = pool_of(step=8 * BLOCK_SIZE, limit_blocks=limit)
    assert block_pool.limit == limit
    for _ in range(limit):
        block_pool.allocate(1)
        assert block_pool.nbytes() <= block_pool.limit_bytes
    assert block_pool.capacity == limit + 1


def test_what_cannot_be_in_the_cache_together_is_refused_in_words():
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


def test_what_a_call_expects_is_reserved_once():
    """Nothing grows in the call, and storage that is too small is gone before the new one is there."""
    maker = Maker()
    block_pool = pool_of(step=4 * BLOCK_SIZE, maker=maker)
    block_pool.reserve_call(9)
    assert maker.made == [1, 12]
    for _ in range(9):
        block_pool.allocate(1)
    assert maker.made == [1, 12]
    assert block_pool.peak_bytes == 12 * BLOCK_BYTES
    block_pool.begin_call(maker)
    block_pool.reserve_call(5)
    assert maker.made == [1, 12, 1], "storage that is large enough is used again"
    alive = []

    def watched(blocks: int) -> PagedKV:
        alive.append(block_pool.nbytes())
        return maker(blocks)

    block_pool.begin_call(watched)
    alive.clear()
    block_pool.reserve_call(30)
    assert alive == [0], "the storage before was held beside the new one"
    assert block_pool.peak_bytes == block_pool.nbytes() == 32 * BLOCK_BYTES
    block_pool.allocate(1)
    with pytest.raises(AssertionError, match="content"):
        block_pool.reserve_call(40)


def test_what_is_expected_is_bounded_by_the_limit_and_by_free_memory():
    block_pool = pool_of(limit_blocks=6)
    block_pool.reserve_call(100)
    assert block_pool.capacity == 7
    block_pool = BlockPool(BLOCK_SIZE, free_bytes=lambda: 20 * BLOCK_BYTES)
    block_pool.begin_call(Maker())
    block_pool.reserve_call(100)
    assert block_pool.capacity == 18
    block_pool.allocate(17)
    peak = block_pool.nbytes()
    block_pool.allocate(1)  # more than was free when the call began
    assert block_pool.peak_bytes == peak + block_pool.nbytes()
