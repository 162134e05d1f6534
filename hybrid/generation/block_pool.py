"""The KV cache's block pool: blocks that outlive a call, reserved when a call begins, with reference counts."""

import math
from collections.abc import Callable

from hybrid.decoders.batch import BLOCK_SIZE, PagedKV

RESERVED_SHARE = 0.9  # of free memory: the most that `reserve_call` reserves; activations need the rest


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockPool:
    """The engine's pool of KV blocks; every call uses the same storage.

    step: growth increment of the storage, in tokens.
    limit_bytes: the most bytes that the storage may take; None: unlimited.
    limit_name: the setting that sets `limit_bytes`, named in error messages.
    explain: gives text that is appended to `require_room`'s error message.
    free_bytes: gives the bytes of free memory, which bound what `reserve_call` reserves.

    Block 0 is never allocated: the padding rows of a CUDA graph write there.
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
        self.make: Callable[[int], PagedKV] | None = None  # during a call
        self.free_blocks: list[int] = []
        self.ref_counts: list[int] = []  # reference count of each block
        self.peak_bytes = 0

    def begin_call(self, make: Callable[[int], PagedKV]) -> None:
        """Start a call with every block free.

        make: allocates a given number of blocks. The previous call's storage is kept if its blocks have the same
            shapes, dtype and device.
        """
        block = make(1)
        if self.kv is not None and self.kv.kind != block.kind:
            self.release()
        self.make, self.block_bytes = make, block.nbytes
        self._all_free()

    def end_call(self) -> None:
        """Forget the decoder that allocates, so that the memory of its weight copies can be freed."""
        self.make = None

    def reserve_call(self, num_blocks: int) -> None:
        """Reserve storage for a call that holds at most `num_blocks` blocks at once. Call it before the first
        `allocate`.

        Storage that is too small is freed first; then storage is allocated for all blocks, or for as many as
        `limit_bytes` and free memory allow. If the call needs more, `allocate` grows the storage, and old and new are
        held together while the content is copied.
        """
        assert not self.num_used, "blocks are in use, and their content would be lost"
        wanted = self._rounded(num_blocks + 1)
        if wanted > self.capacity:
            affordable = (self.free_bytes() + self.nbytes()) * RESERVED_SHARE / self.block_bytes
            wanted = self._rounded(int(min(num_blocks + 1, max(affordable, 1))))
        if wanted > self.capacity:
            self.release()
            self.kv = self.make(wanted)
            self.peak_bytes = max(self.peak_bytes, self.nbytes())
            self._all_free()

    def _all_free(self) -> None:
        self.ref_counts = [0] * self.capacity
        self.free_blocks = list(range(self.capacity - 1, 0, -1))

    def _rounded(self, capacity: int) -> int:
        """`capacity` rounded up to whole steps, within the limit."""
        steps = blocks_for(self.step)
        capacity = -(-capacity // steps) * steps
        return capacity if self.limit is None else min(capacity, self.limit + 1)

    @property
    def capacity(self) -> int:
        """Blocks that storage exists for, block 0 included."""
        return 0 if self.kv is None else self.kv.num_blocks

    @property
    def limit(self) -> int | None:
        """The most blocks that may be in use at once; None: unlimited."""
        return None if self.limit_bytes is None else max(self.limit_bytes // self.block_bytes - 1, 0)

    @property
    def num_used(self) -> int:
        """Blocks in use."""
        return max(self.capacity - 1, 0) - len(self.free_blocks)

    def require_room(self, lengths: list[int], block_bytes: int) -> None:
        """Raise ValueError if sequences of these lengths, in the cache at once, may need more than `limit_bytes`.

        lengths: tokens of each sequence, new ones included.  block_bytes: the most bytes that a block takes.
        """
        needed = (1 + sum(map(blocks_for, lengths))) * block_bytes
        if self.limit_bytes is not None and needed > self.limit_bytes:
            rows = f"{len(lengths)} rows that have to be in the cache together, the longest" if lengths[1:] else "a row"
            raise ValueError(
                f"{self.limit_name} leaves {self.limit_bytes} bytes for keys and values: {rows} of {max(lengths)} "
                f"tokens, new ones included, may need {needed}; raise it by the difference, or ask for fewer tokens"
                + self.explain()
            )

    def _ensure_free(self, num_blocks: int) -> None:
        """Make sure that `num_blocks` blocks are free; the storage grows by steps. Blocks in use keep their numbers and
        content."""
        if len(self.free_blocks) >= num_blocks:
            return
        old, needed = self.capacity, self.capacity + num_blocks - len(self.free_blocks) + (self.capacity == 0)
        capacity = max(self._rounded(max(needed, old + old // 2)), needed)
        grown = self.make(capacity)
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + grown.nbytes)
        if self.kv is not None:
            grown.take_over(self.kv)
        self.kv = grown
        self.free_blocks = list(range(capacity - 1, max(old, 1) - 1, -1)) + self.free_blocks
        self.ref_counts += [0] * (capacity - old)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` blocks, each with reference count 1. Their content is undefined."""
        self._ensure_free(num_blocks)
        blocks = [self.free_blocks.pop() for _ in range(num_blocks)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def ref(self, blocks: list[int]) -> None:
        """Increment the blocks' reference counts."""
        for block in blocks:
            self.ref_counts[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Decrement the blocks' reference counts; blocks at 0 become free."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks.append(block)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the content of block `sources[i]` to block `targets[i]`."""
        if sources:
            self.kv.copy(sources, targets)

    def nbytes(self) -> int:
        """Bytes of the storage."""
        return 0 if self.kv is None else self.kv.nbytes

    def release(self) -> None:
        """Free the storage."""
        self.kv, self.free_blocks, self.ref_counts = None, [], []
