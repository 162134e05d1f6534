"""Pages of the KV cache: who holds which, what is in them, and how many there may be."""

from itertools import pairwise

import pytest
import torch

from hybrid.decoders.batch import PAGE, PagedKV
from hybrid.generation.block_pool import BlockPool, pages_for

LAYERS, WIDTH = 2, 3


class Maker:
    """Makes pages, and keeps a list of how many were asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = WIDTH):
        self.dtype, self.width = dtype, width
        self.made: list[int] = []

    def __call__(self, pages: int) -> PagedKV:
        self.made.append(pages)
        keys, values = (
            [torch.full((pages, PAGE, self.width), torch.nan, dtype=self.dtype) for _ in range(LAYERS)]
            for _ in range(2)
        )
        return PagedKV(keys, values)


PAGE_BYTES = 2 * LAYERS * PAGE * WIDTH * 4


def store_of(step: int = PAGE, limit_pages: int | None = None, maker: Maker | None = None) -> BlockPool:
    """A store in which a call has begun; limit_pages: that may be held."""
    store = BlockPool(step, None if limit_pages is None else (limit_pages + 1) * PAGE_BYTES)
    store.begin(maker or Maker())
    return store


def write(store: BlockPool, pages: list[int]) -> None:
    """Something of its own into every tensor of each page."""
    for page in pages:
        for index, tensor in enumerate((*store.kv.keys, *store.kv.values)):
            tensor[page] = 100.0 * page + index


def is_written(store: BlockPool, page: int, of: int) -> bool:
    """Whether a page holds what was written to page `of`."""
    tensors = (*store.kv.keys, *store.kv.values)
    return all(bool((tensor[page] == 100.0 * of + index).all()) for index, tensor in enumerate(tensors))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens) == pages


def test_a_page_is_given_to_one_and_page_0_to_nobody():
    store = store_of()
    taken = store.take(5) + store.take(0) + store.take(7)
    assert len(set(taken)) == 12
    assert 0 not in taken
    assert max(taken) < store.capacity
    assert store.held == 12


def test_a_page_is_free_when_its_last_holder_gives_it_back():
    store = store_of()
    pages = store.take(3)
    store.hold(pages[:2])
    store.hold(pages[:1])
    store.give_back(pages)
    assert store.held == 2
    store.give_back(pages[:2])
    assert store.held == 1
    taken = store.take(store.capacity - 1 - store.held)
    assert pages[0] not in taken
    assert set(pages[1:]) <= set(taken)
    store.give_back(pages[:1])
    assert store.take(1) == pages[:1]


def test_growing_keeps_numbers_and_content():
    store = store_of(step=4 * PAGE)
    pages = store.take(3)
    write(store, pages)
    before = store.capacity
    more = store.take(30)
    assert store.capacity > before
    assert not set(pages) & set(more)
    assert all(is_written(store, page, page) for page in pages)
    write(store, more)
    assert all(is_written(store, page, page) for page in pages + more)


def test_it_grows_in_steps_and_never_by_little():
    """Where nobody knew how much it would be: a token at a time does not copy the cache a token at a time."""
    maker = Maker()
    store = store_of(step=4 * PAGE, maker=maker)
    for _ in range(200):
        store.take(1)
    capacities = maker.made[1:]  # the first page only told what pages look like
    assert capacities[0] == 4
    assert all(after >= before + before // 2 for before, after in pairwise(capacities))
    assert len(capacities) < 12


def test_copies_are_whole():
    store = store_of()
    one, other, *targets = store.take(5)
    write(store, [one, other])
    store.copy([one, one, other], targets)
    assert is_written(store, targets[0], one)
    assert is_written(store, targets[1], one)
    assert is_written(store, targets[2], other)
    store.copy([], [])
    write(store, targets)
    assert is_written(store, one, one), "a copy is the page itself"


def test_storage_is_kept_over_calls_and_let_go_of():
    maker = Maker()
    store = store_of(maker=maker)
    store.take(9)
    made, kv, held = len(maker.made), store.kv, store.nbytes()
    store.begin(maker)
    assert store.held == 0, "pages of the call before are still held"
    store.take(9)
    assert store.kv is kv
    assert len(maker.made) == made + 1  # the one page that tells their kind
    assert store.peak_bytes == held == 10 * PAGE_BYTES
    store.release()
    assert store.nbytes() == 0
    assert store.held == 0
    store.begin(maker)
    assert sorted(store.take(2)) == [1, 2]
    assert store.peak_bytes == held


@pytest.mark.parametrize("other", [Maker(torch.bfloat16), Maker(width=4)], ids=["dtype", "shape"])
def test_pages_of_another_kind_are_new_storage(other):
    store = store_of()
    store.take(5)
    store.begin(other)
    assert store.nbytes() == 0
    store.take(2)
    assert store.kv.keys[0].dtype == other.dtype
    assert store.kv.keys[0].shape[-1] == other.width


def test_an_interrupted_call_leaves_nothing_held():
    store = store_of(limit_pages=4)
    store.hold(store.take(4))
    store.begin(Maker())
    assert len(store.take(4)) == 4


@pytest.mark.parametrize("limit", [1, 2, 5, 23])
def test_the_limit_is_reached_and_not_passed(limit):
    store = store_of(step=8 * PAGE, limit_pages=limit)
    assert store.limit == limit
    for _ in range(limit):
        store.take(1)
        assert store.nbytes() <= store.limit_bytes
    assert store.capacity == limit + 1


def test_what_cannot_be_in_the_cache_together_is_refused_in_words():
    store = BlockPool(PAGE, 11 * PAGE_BYTES)
    store.require_room([10 * PAGE], PAGE_BYTES)
    store.require_room([PAGE] * 10, PAGE_BYTES)
    with pytest.raises(
        ValueError, match=rf"kv_cache_bytes leaves {11 * PAGE_BYTES} bytes.*a row of 321 tokens.*{12 * PAGE_BYTES}"
    ):
        store.require_room([10 * PAGE + 1], PAGE_BYTES)
    with pytest.raises(ValueError, match=r"11 rows that have to be in the cache together, the longest of 30 tokens"):
        store.require_room([30] + [1] * 10, PAGE_BYTES)
    BlockPool(PAGE, None).require_room([10**9], PAGE_BYTES)
    store.require_room([10**9], 0)  # the model runs natively


def test_what_a_call_expects_is_reserved_once():
    """Nothing grows in the call, and storage that is too small is gone before the new one is there."""
    maker = Maker()
    store = store_of(step=4 * PAGE, maker=maker)
    store.expect(9)
    assert maker.made == [1, 12]
    for _ in range(9):
        store.take(1)
    assert maker.made == [1, 12]
    assert store.peak_bytes == 12 * PAGE_BYTES
    store.begin(maker)
    store.expect(5)
    assert maker.made == [1, 12, 1], "storage that is large enough is used again"
    alive = []

    def watched(pages: int) -> PagedKV:
        alive.append(store.nbytes())
        return maker(pages)

    store.begin(watched)
    alive.clear()
    store.expect(30)
    assert alive == [0], "the storage before was held beside the new one"
    assert store.peak_bytes == store.nbytes() == 32 * PAGE_BYTES
    store.take(1)
    with pytest.raises(AssertionError, match="content"):
        store.expect(40)


def test_what_is_expected_is_bounded_by_the_limit_and_by_free_memory():
    store = store_of(limit_pages=6)
    store.expect(100)
    assert store.capacity == 7
    store = BlockPool(PAGE, free_bytes=lambda: 20 * PAGE_BYTES)
    store.begin(Maker())
    store.expect(100)
    assert store.capacity == 18
    store.take(17)
    peak = store.nbytes()
    store.take(1)  # more than was free when the call began
    assert store.peak_bytes == peak + store.nbytes()
