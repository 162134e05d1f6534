"""The KV cache's block pool: blocks that outlive a call, reserved when a call begins, with reference counts."""

import math
from collections.abc import Callable

import torch

from hybrid.decoders.batch import BLOCK_SIZE, KVWeights, PagedKV
from hybrid.generation.prefix_cache import PrefixCache

RESERVED_SHARE = 0.9  # of free memory: the most that `reserve_call` reserves; activations need the rest


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockPool:
    """The engine's pool of KV blocks; every call uses the same storage.

    Blocks that `insert` has been told the tokens of keep their content when nothing refers to them, until their room is
    needed (the least recently used one first) or the weights change: `reuse` gives them to sequences that begin alike.

    step: growth increment of the storage, in tokens.
    limit_bytes: the most bytes that the storage may take; None: unlimited.
    limit_name: the setting that sets `limit_bytes`, named in error messages.
    explain: gives text that is appended to `require_room`'s error message.
    free_bytes: gives the bytes of free memory, which bound what `reserve_call` reserves.
    caches_prefixes: whether blocks are kept for sequences that begin alike.
    extra_bytes: for them, beyond what a call needs.

    Block 0 is never allocated: the padding rows of a CUDA graph write there.
    """

    def __init__(
        self,
        step: int,
        limit_bytes: int | None = None,
        limit_name: str = "rollout.kv_cache_bytes",
        explain: Callable[[], str] = str,
        free_bytes: Callable[[], float] = lambda: math.inf,
        caches_prefixes: bool = True,
        extra_bytes: int = 0,
    ):
        self.step, self.caches_prefixes, self.extra_bytes = step, caches_prefixes, extra_bytes
        self.limit_bytes = limit_bytes
        self.limit_name, self.explain, self.free_bytes = limit_name, explain, free_bytes
        self.kv: PagedKV | None = None
        self.make: Callable[[int], PagedKV] | None = None  # during a call
        self.free_blocks: list[int] = []
        self.ref_counts: list[int] = []  # reference count of each block
        self.prefix_cache = PrefixCache()
        self.evictable: dict[int, None] = {}  # cached blocks without references, the least recently used first
        self.prefilled_tokens = self.reused_tokens = 0  # of this call's prompts: computed, and found
        self.reused_scored_tokens = 0  # of the sequences that this call scores: those whose layers are not computed
        self.affordable_bytes: float | None = None  # the least `free_bytes` of ranks that decode one batch
        self.peak_bytes = 0

    def begin_call(self, make: Callable[[int], PagedKV], weights: KVWeights | None = None) -> None:
        """Start a call without references to blocks.

        make: allocates a given number of blocks. The previous call's storage is kept if its blocks have the same
            shapes, dtype and device.
        weights: what will compute the blocks' content; None: unknown. Blocks of another version are forgotten.
        """
        block = make(1)
        if self.kv is not None and self.kv.kind != block.kind:
            self.release()
        self.make, self.block_bytes = make, block.nbytes
        self.prefilled_tokens = self.reused_tokens = self.reused_scored_tokens = 0
        self._forget(self.prefix_cache.use(weights))
        referenced = [block for block, count in enumerate(self.ref_counts) if count]
        self.ref_counts = [0] * self.capacity
        self._give_back(referenced)

    def end_call(self) -> None:
        """Forget the decoder that allocates, so that the memory of its weight copies can be freed."""
        self.make = None

    def reserve_call(self, num_blocks: int) -> None:
        """Reserve storage for a call that holds at most `num_blocks` blocks at once. Call it before the first
        `allocate`.

        Storage that is too small grows: to all blocks, or to as many as `limit_bytes` and free memory allow. If the
        call needs more, `allocate` grows it again. Old and new are held together for one layer's keys or values.
        """
        assert not self.num_used, "blocks are in use before they are reserved"
        num_blocks += self.extra_bytes // self.block_bytes
        wanted = self._rounded(num_blocks + 1)
        if wanted > self.capacity:
            free = self.free_bytes() if self.affordable_bytes is None else self.affordable_bytes
            affordable = (free + self.nbytes()) * RESERVED_SHARE / self.block_bytes
            wanted = self._rounded(int(min(num_blocks + 1, max(affordable, 1))))
        if wanted > self.capacity:
            self._grow(wanted)

    def _grow(self, capacity: int) -> None:
        """Grow the storage; blocks that are in use or cached keep their numbers and content. If memory does not
        suffice, the storage is lost."""
        old, held = self.capacity, 0
        try:
            if self.kv is None or not (self.num_used or self.evictable):
                self.kv = None  # before the new one is allocated
                self.kv = self.make(capacity)
            else:
                held = self.kv.growth_bytes
                self.kv = self.kv.grown(capacity)
        except BaseException:
            self.release()
            raise
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + held)
        self.free_blocks = list(range(capacity - 1, max(old, 1) - 1, -1)) + self.free_blocks
        self.ref_counts += [0] * (capacity - old)

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
        return max(self.capacity - 1, 0) - len(self.free_blocks) - len(self.evictable)

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
        """Make sure that `num_blocks` blocks are free: cached ones are forgotten, then the storage grows by steps."""
        while len(self.free_blocks) < num_blocks and self.evictable:
            self._forget(self.prefix_cache.remove(next(iter(self.evictable))))
        if len(self.free_blocks) >= num_blocks:
            return
        old, needed = self.capacity, self.capacity + num_blocks - len(self.free_blocks) + (self.capacity == 0)
        self._grow(max(self._rounded(max(needed, old + old // 2)), needed))

    def _forget(self, blocks: list[int]) -> None:
        """Free those of these blocks, which are not cached any more, that nothing refers to."""
        for block in blocks:
            if block in self.evictable:
                del self.evictable[block]
                self.free_blocks.append(block)

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
            self.evictable.pop(block, None)

    def free(self, blocks: list[int]) -> None:
        """Decrement the blocks' reference counts. Blocks at 0 become free; of those that are cached, the last one of a
        sequence is forgotten first."""
        for block in blocks:
            self.ref_counts[block] -= 1
        self._give_back([block for block in reversed(blocks) if not self.ref_counts[block]])

    def _give_back(self, blocks: list[int]) -> None:
        """Take back blocks that nothing refers to any more."""
        for block in blocks:
            if block in self.prefix_cache:
                self.evictable[block] = None
            else:
                self.free_blocks.append(block)

    def num_reusable(self, weights: KVWeights | None) -> int:
        """Blocks that hold known tokens, computed with this version of the weights."""
        return len(self.prefix_cache) if weights is not None and weights.version == self.prefix_cache.version else 0

    def forget_all(self) -> None:
        """Forget which tokens blocks hold. Call it between calls."""
        self._forget(self.prefix_cache.use(None))

    def insert(self, token_ids: torch.Tensor, blocks: list[int]) -> None:
        """Remember that blocks hold these tokens, int64 [n], from a sequence's begin on. Nothing may write these
        positions of the blocks any more."""
        if self.caches_prefixes:
            self.prefix_cache.insert(token_ids.cpu(), blocks)

    def first_new_block(self, token_ids: torch.Tensor) -> bytes | None:
        """A sequence, int64 [n] on the host, up to its first full block that is not cached; None if all of them are, or
        nothing is kept."""
        if not self.caches_prefixes:
            return None
        full = self.prefix_cache.num_full_blocks(token_ids)
        if (full + 1) * BLOCK_SIZE > len(token_ids):
            return None
        return token_ids[: (full + 1) * BLOCK_SIZE].numpy().tobytes()

    def same_blocks(self, token_ids: torch.Tensor) -> list[int]:
        """The cached full blocks that a sequence, int64 [n], begins with, with a reference to each: for a caller that
        computes their content again, to the same values, and so needs no others."""
        if not self.caches_prefixes:
            return []
        blocks = self.prefix_cache.match(token_ids.cpu())[0]
        self.ref(blocks)
        return blocks

    def reuse(self, token_ids: torch.Tensor, is_prompt: bool = True) -> tuple[list[int], int]:
        """Blocks, with a reference to each, that hold the longest known begin of a sequence, int64 [n], without its
        last token, whose logits are needed; and how many tokens they hold. The last one, if it is not full, is a copy:
        or the cached block itself, which is forgotten, where there is no room for two.

        is_prompt: count the tokens as a prompt's, else as those of a sequence that is scored, whose last token is not
            computed.
        """
        blocks, partial, common = self.prefix_cache.match(token_ids[:-1].cpu())
        self.ref(blocks)
        if common and len(self.free_blocks) + len(self.evictable) > (partial in self.evictable):
            self.ref([partial])
            own = self.allocate(1)
            self.copy([partial], own)
            self.free([partial])
        elif common and partial in self.evictable:
            self._forget(self.prefix_cache.remove(partial))
            own = self.allocate(1)
            assert own == [partial], "the block that was just freed is allocated first"
        else:
            own, common = [], 0
        reused = len(blocks) * BLOCK_SIZE + common
        if is_prompt:
            self.reused_tokens += reused
            self.prefilled_tokens += len(token_ids) - reused
        else:
            self.reused_scored_tokens += reused
        return blocks + own, reused

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the content of block `sources[i]` to block `targets[i]`."""
        if sources:
            self.kv.copy(sources, targets)

    def nbytes(self) -> int:
        """Bytes of the storage."""
        return 0 if self.kv is None else self.kv.nbytes

    def release(self) -> None:
        """Free the storage; what is cached is lost."""
        self.kv, self.free_blocks, self.ref_counts = None, [], []
        self.prefix_cache, self.evictable = PrefixCache(), {}
