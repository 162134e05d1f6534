"""The KV cache's block pool: pages that outlive a call, reserved when a call begins, with reference counts."""

import math
from collections.abc import Callable

from hybrid.decoders.batch import PAGE, PagedKV

RESERVED_SHARE = 0.9  # of free memory: the most that `expect` reserves; activations need the rest


def pages_for(tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class BlockPool:
    """The engine's pool of KV pages; every call uses the same storage.

    step: growth increment of the storage, in tokens.
    limit_bytes: the most bytes that the storage may take; None: unlimited.
    limit_name: the setting that sets `limit_bytes`, named in error messages.
    explain: gives text that is appended to `require_room`'s error message.
    free_bytes: gives the bytes of free memory, which bound what `expect` reserves.

    Page 0 is never allocated: the padding rows of a CUDA graph write there.
    """

    def __init__(
        self,
        step: int,
        limit_bytes: int | None = None,
        limit_name: str = "rollout.kv_cache_bytes",
        explain: Callable[[], str] = str,
        free_bytes: Callable[[], float] = lambda: math.inf,
    ):
        self.step = step
        self.limit_bytes = limit_bytes
        self.limit_name, self.explain, self.free_bytes = limit_name, explain, free_bytes
        self.kv: PagedKV | None = None
        self.free: list[int] = []
        self.holders: list[int] = []  # reference count of each page
        self.peak_bytes = 0

    def begin(self, make: Callable[[int], PagedKV]) -> None:
        """Start a call with every page free.

        make: allocates a given number of pages. The previous call's storage is kept if its pages have the same shapes,
            dtype and device.
        """
        one = make(1)
        if self.kv is not None and self.kv.kind != one.kind:
            self.release()
        self.make, self.page_bytes = make, one.nbytes
        self._all_free()

    def expect(self, pages: int) -> None:
        """Reserve storage for a call that holds at most `pages` pages at once. Call it before the first `take`.

        Storage that is too small is freed first; then storage is allocated for all pages, or for as many as
        `limit_bytes` and free memory allow. If the call needs more, `reserve` grows the storage, and old and new are
        held together while the content is copied.
        """
        assert not self.held, "pages are held, and their content would be lost"
        wanted = self._rounded(pages + 1)
        if wanted > self.capacity:
            free_pages = (self.free_bytes() + self.nbytes()) * RESERVED_SHARE / self.page_bytes
            wanted = self._rounded(int(min(pages + 1, max(free_pages, 1))))
        if wanted > self.capacity:
            self.release()
            self.kv = self.make(wanted)
            self.peak_bytes = max(self.peak_bytes, self.nbytes())
            self._all_free()

    def _all_free(self) -> None:
        self.holders = [0] * self.capacity
        self.free = list(range(self.capacity - 1, 0, -1))

    def _rounded(self, capacity: int) -> int:
        """`capacity` rounded up to whole steps, within the limit."""
        steps = pages_for(self.step)
        capacity = -(-capacity // steps) * steps
        return capacity if self.limit is None else min(capacity, self.limit + 1)

    @property
    def capacity(self) -> int:
        """Pages that storage exists for, page 0 included."""
        return 0 if self.kv is None else self.kv.pages

    @property
    def limit(self) -> int | None:
        """The most pages that may be in use at once; None: unlimited."""
        return None if self.limit_bytes is None else max(self.limit_bytes // self.page_bytes - 1, 0)

    @property
    def held(self) -> int:
        """Pages in use."""
        return max(self.capacity - 1, 0) - len(self.free)

    def require_room(self, lengths: list[int], page_bytes: int) -> None:
        """Raise ValueError if sequences of these lengths, in the cache at once, may need more than `limit_bytes`.

        lengths: tokens of each sequence, new ones included.  page_bytes: the most bytes that a page takes.
        """
        needed = (1 + sum(map(pages_for, lengths))) * page_bytes
        if self.limit_bytes is not None and needed > self.limit_bytes:
            rows = f"{len(lengths)} rows that have to be in the cache together, the longest" if lengths[1:] else "a row"
            raise ValueError(
                f"{self.limit_name} leaves {self.limit_bytes} bytes for keys and values: {rows} of {max(lengths)} "
                f"tokens, new ones included, may need {needed}; raise it by the difference, or ask for fewer tokens"
                + self.explain()
            )

    def reserve(self, pages: int) -> None:
        """Make sure that `pages` pages are free; the storage grows by steps. Pages in use keep their numbers and
        content.
        """
        if len(self.free) >= pages:
            return
        old, needed = self.capacity, self.capacity + pages - len(self.free) + (self.capacity == 0)
        capacity = max(self._rounded(max(needed, old + old // 2)), needed)
        grown = self.make(capacity)
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + grown.nbytes)
        if self.kv is not None:
            grown.take_over(self.kv)
        self.kv = grown
        self.free = list(range(capacity - 1, max(old, 1) - 1, -1)) + self.free
        self.holders += [0] * (capacity - old)

    def take(self, pages: int) -> list[int]:
        """Allocate `pages` pages, each with reference count 1. Their content is undefined."""
        self.reserve(pages)
        taken = [self.free.pop() for _ in range(pages)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, pages: list[int]) -> None:
        """Increment the pages' reference counts."""
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Decrement the pages' reference counts; pages at 0 become free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the content of page `sources[i]` to page `targets[i]`."""
        if sources:
            self.kv.copy(sources, targets)

    def nbytes(self) -> int:
        """Bytes of the storage."""
        return 0 if self.kv is None else self.kv.nbytes

    def release(self) -> None:
        """Free the storage."""
        self.kv, self.free, self.holders = None, [], []
