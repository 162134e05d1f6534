"""Pages of the KV cache: storage that outlives a call, reserved when a call begins, and who holds which page."""

import math
from collections.abc import Callable

from hybrid.decoders.batch import PAGE, PagedKV

RESERVED_SHARE = 0.9  # of free memory, at most, for what a call may come to need: activations need some too


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class BlockPool:
    """The engine's pages, used again by the next call.

    step: tokens by which the storage grows, at least.  limit_bytes: the most that it may hold; None: no end.
    limit_name: the setting that says so.  explain: words behind a refusal.
    free_bytes: memory that is free now, which bounds what `begin` reserves.
    Page 0 is never given out: what computes rows that are not there writes there.
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
        self.holders: list[int] = []  # by page: how many sequences hold it
        self.peak_bytes = 0

    def begin(self, make: Callable[[int], PagedKV]) -> None:
        """Start a call: no page is held. make: gives new pages.

        Storage of the call before is kept where its pages are of the same kind.
        """
        one = make(1)
        if self.kv is not None and self.kv.kind != one.kind:
            self.release()
        self.make, self.page_bytes = make, one.nbytes
        self._all_free()

    def expect(self, pages: int) -> None:
        """Reserve storage for a call that holds at most so many pages at once, before it takes the first one.

        Storage that is too small is let go of before new storage is made: for all pages, or for as many as the limit
        and free memory allow. More than those are made when they are needed; old and new are then held together while
        the content is copied.
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
        """Whole steps, within the limit."""
        steps = pages_for(self.step)
        capacity = -(-capacity // steps) * steps
        return capacity if self.limit is None else min(capacity, self.limit + 1)

    @property
    def capacity(self) -> int:
        """Pages that there is storage for, page 0 included."""
        return 0 if self.kv is None else self.kv.pages

    @property
    def limit(self) -> int | None:
        """Pages that may be held at once; None: no end."""
        return None if self.limit_bytes is None else max(self.limit_bytes // self.page_bytes - 1, 0)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return max(self.capacity - 1, 0) - len(self.free)

    def require_room(self, lengths: list[int], page_bytes: int) -> None:
        """Raise ValueError where sequences of so many tokens are too much to be in the cache at once.

        page_bytes: what a page takes at most.
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
        """See to it that so many pages are free, growing by steps. Pages in use keep their numbers and content."""
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
        """So many pages, held once each; their content is undefined."""
        self.reserve(pages)
        taken = [self.free.pop() for _ in range(pages)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, pages: list[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Hold pages once less; those that nobody holds are free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Give pages the content of others."""
        if sources:
            self.kv.copy(sources, targets)

    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.kv is None else self.kv.nbytes

    def release(self) -> None:
        """Let go of the storage."""
        self.kv, self.free, self.holders = None, [], []
