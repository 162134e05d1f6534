"""The KV cache's block pool: blocks that outlive a call, reserved when a call begins, with reference counts."""

import math
from bisect import bisect_left, insort
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch

from hybrid.decoders.batch import BLOCK_SIZE, NO_ADAPTER, KVWeights, PagedKV, States, state_bytes

RESERVED_SHARE = 0.9  # of what forwards leave of free memory: the most that `reserve_call` reserves
TOKEN_BYTES = 8  # int64
FULL_BYTES = BLOCK_SIZE * TOKEN_BYTES
NO_SLOT = -1  # the pool has taken the slot, or none is allocated yet


class KeptState(NamedTuple):
    """The slot of the recurrent states after a cached block's tokens.

    is_shared: each sequence that begins with these tokens copies the states; else one sequence takes the slot.
    """

    slot: int
    is_shared: bool


def blocks_for(tokens: int) -> int:
    """Return number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockPool:
    """The engine's pool of KV blocks; every call uses the same storage.

    Blocks registered with `insert` stay cached at reference count 0 until they are evicted, the least recently used one
    first, or the weights change: `reuse` gives them to sequences with the same prefix.

    step: growth increment of the storage, in tokens.
    limit_bytes: the most bytes that the storage may take; None: unlimited.
    limit_name: the setting that sets `limit_bytes`, named in error messages.
    explain: gives text that is appended to `require_room`'s error message.
    free_bytes: gives the bytes of free memory, which bound what `reserve_call` reserves.
    caches_prefixes: whether blocks are kept for sequences that begin alike.
    extra_bytes: for them, beyond what a call needs; of a model with recurrent layers one half is for states.

    Of a model with recurrent layers a sequence also has a slot for its states, which no other sequence shares. Blocks
    alone do not continue such a sequence: `keep_state` keeps them with the states after their last token, for sequences
    that begin with exactly these tokens (`resume`).

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
        self.kv = PagedKV([], [])  # no storage yet
        self.make: Callable[[int], PagedKV] | None = None  # during a call
        self.free_blocks: list[int] = []
        self.ref_counts: list[int] = []  # reference count of each block
        self.prefix_cache = PrefixCache()
        self.evictable: dict[int, None] = {}  # cached blocks without references, the least recently used first
        self.prefilled_tokens = self.reused_tokens = 0  # of this call's prompts: computed, and found
        self.reused_scored_tokens = 0  # of the sequences that this call scores: those whose layers are not computed
        self.affordable_bytes: float | None = None  # the least `free_bytes` of ranks that decode one batch
        self.call_limit: int | None = None  # blocks, where free memory does not suffice for the call; None: it does
        self.peak_bytes = 0
        self.make_states: Callable[[int], States] | None = None  # during a call of a model with recurrent layers
        self.states: States = {}  # as `PagedKV.states`
        self.free_slots: list[int] = []
        self.kept_states: dict[int, KeptState] = {}  # by cached block, the least recently used first
        self.num_slots = self.slot_bytes = self.call_slots = 0

    def begin_call(
        self,
        make: Callable[[int], PagedKV],
        weights: KVWeights | None = None,
        make_states: Callable[[int], States] | None = None,
    ) -> None:
        """Start a call without references to blocks.

        make: allocates a given number of blocks. The previous call's storage is kept if its blocks have the same
            shapes, dtype and device.
        weights: what will compute the blocks' content; None: unknown. Blocks of another version are forgotten.
        make_states: allocates a given number of slots for recurrent states; None: the model has none.
        """
        block = make(1)
        states = {} if make_states is None else make_states(1)
        kind, former_kind = (
            [(layer, tensor.shape[1:], tensor.dtype) for layer, tensors in each.items() for tensor in tensors]
            for each in (states, self.states)
        )
        if kind != former_kind:
            self.states, self.num_slots, self.kept_states = {}, 0, {}
        self.make_states, self.slot_bytes = make_states, state_bytes(states)
        self.free_slots = sorted(set(range(self.num_slots)) - {kept.slot for kept in self.kept_states.values()})
        if self.kv.keys and self.kv.kind != block.kind:
            self.release()
        self.make, self.block_bytes, self.call_limit = make, block.block_bytes, None
        self.prefilled_tokens = self.reused_tokens = self.reused_scored_tokens = 0
        self._forget(self.prefix_cache.use(weights))
        # References are left of a call that has failed.
        self.ref_counts = [min(count, 1) for count in self.ref_counts]
        self.free([block for block in reversed(range(self.capacity)) if self.ref_counts[block]])

    def end_call(self) -> None:
        """Forget the decoder that allocates, so that the memory of its weight copies can be freed."""
        self.make = self.make_states = None

    def reserve_states(self, num_slots: int, num_blocks: int = 0, forward_bytes: Callable[[], int] = int) -> None:
        """Reserve slots for the recurrent states of a call that has `num_slots` sequences at once, and as many more for
        kept states as `extra_bytes` and memory allow. Call it before `reserve_call`: what the slots leave of a limit is
        for blocks.

        num_blocks, forward_bytes: as for `reserve_call`. Slots that they leave room for are not taken away.
        """
        self.call_slots = num_slots
        for_blocks = (num_blocks + 1) * self.block_bytes
        free = self.free_bytes() if self.affordable_bytes is None else self.affordable_bytes
        for_states = (free - forward_bytes() + self.nbytes()) * RESERVED_SHARE - for_blocks
        if self.limit_bytes is not None:
            for_states = min(for_states, self.limit_bytes - for_blocks)
        affordable = for_states // max(self.slot_bytes, 1)
        wanted = int(max(min(num_slots + self.extra_bytes // 2 // max(self.slot_bytes, 1), affordable), num_slots))
        if self.num_slots == wanted or (
            self.num_slots > wanted and (self.limit_bytes is None or self.num_slots <= affordable)
        ):
            return
        if self.kept_states:
            self._resize_kept(wanted)
        else:
            self.states, self.num_slots, self.free_slots = {}, 0, []
            self._grow_slots(wanted)
        if self.limit_bytes is not None and self.nbytes() > self.limit_bytes:
            self._release_blocks()

    def _resize_kept(self, num_slots: int) -> None:
        """Give the storage `num_slots` slots, at least 1, between calls. The most recently used states are kept. Old
        and new are held together for one layer. If memory does not suffice, the storage is lost."""
        kept = list(self.kept_states.items())[-num_slots:]
        slots = [state.slot for _, state in kept]
        held = self.nbytes() + max(state_bytes({0: tensors}) for tensors in self.states.values())
        try:
            for layer, tensors in self.states.items():
                resized = tuple(tensor.new_empty(num_slots, *tensor.shape[1:]) for tensor in tensors)
                for tensor, new in zip(tensors, resized, strict=True):
                    new[: len(slots)] = tensor[slots]
                self.states[layer] = resized
        except BaseException:
            self.release()
            raise
        self.kv = replace(self.kv, states=self.states)  # decoders read addresses again of another record alone
        self.kept_states = {block: state._replace(slot=slot) for slot, (block, state) in enumerate(kept)}
        self.num_slots, self.free_slots = num_slots, list(range(num_slots - 1, len(kept) - 1, -1))
        self.peak_bytes = max(self.peak_bytes, held, self.nbytes())

    def reserve_call(self, num_blocks: int, forward_bytes: Callable[[], int] = int, needed: int = 0) -> None:
        """Reserve storage for a call that holds at most `num_blocks` blocks at once. Call it before the first
        `allocate`.

        Storage that is too small grows: to all blocks, or to as many as `limit_bytes` and free memory allow. If the
        call needs more, `allocate` grows it again. Old and new are held together for one layer's keys or values.

        forward_bytes: gives the free memory that the call's forward passes need. Asked only if the storage must grow.
        needed: blocks of the longest row. If free memory does not hold `num_blocks`, `limit` is lowered to what it
            holds, but not below this, and rows wait. 0: nothing is lowered.
        """
        assert not self.num_used, "blocks are in use before they are reserved"
        num_blocks += self.extra_bytes // (1 if self.shares_prefixes else 2) // self.block_bytes
        wanted = self._rounded(num_blocks + 1)
        if wanted > self.capacity:
            free = self.free_bytes() if self.affordable_bytes is None else self.affordable_bytes
            affordable = (free - forward_bytes() + self.nbytes()) * RESERVED_SHARE / self.block_bytes
            wanted = self._rounded(int(min(num_blocks + 1, max(affordable, self.capacity, 1))))
            if needed and wanted <= num_blocks:
                self.call_limit = max(wanted - 1, needed)
        if wanted > self.capacity:
            self._grow(wanted)

    def _grow(self, capacity: int) -> None:
        """Grow the storage; blocks that are in use or cached keep their numbers and content. If memory does not
        suffice, the storage is lost."""
        assert self.make is not None, "blocks are allocated between `begin_call` and `end_call`"
        old, held = self.capacity, 0
        try:
            if not (self.num_used or self.evictable):
                self.kv = PagedKV([], [])  # before the new one is allocated
                self.kv = replace(self.make(capacity), states=self.states) if self.states else self.make(capacity)
            else:
                held = self.kv.growth_bytes
                self.kv = self.kv.grown(capacity)
        except BaseException:
            self.release()
            raise
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + held)
        self.free_blocks = list(range(capacity - 1, max(old, 1) - 1, -1)) + self.free_blocks
        self.ref_counts += [0] * (capacity - old)

    def agree_on_call(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Take the smallest limit of the call that a rank has, so that all ranks of a batch admit the same rows.

        gather: all-gathers an int64 tensor [1] on `device` of each rank, [ranks, 1].
        """
        unlimited = torch.iinfo(torch.int64).max
        own = unlimited if self.call_limit is None else self.call_limit
        least = int(gather(torch.tensor([own], device=device)).min())
        self.call_limit = None if least == unlimited else least

    def _rounded(self, capacity: int) -> int:
        """`capacity` rounded up to whole steps, within the limit."""
        steps = blocks_for(self.step)
        capacity = -(-capacity // steps) * steps
        return capacity if self.limit is None else min(capacity, self.limit + 1)

    @property
    def capacity(self) -> int:
        """Blocks that storage exists for, block 0 included."""
        return len(self.ref_counts)

    @property
    def limit(self) -> int | None:
        """The most blocks that may be in use at once; None: unlimited."""
        if self.limit_bytes is None:
            return self.call_limit
        limit = max((self.limit_bytes - self.num_slots * self.slot_bytes) // self.block_bytes - 1, 0)
        return limit if self.call_limit is None else min(limit, self.call_limit)

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences that begin alike share blocks."""
        return self.make_states is None

    def num_seqs_within_limit(self, tokens: int, num_seqs: int, verifies: bool = False) -> int:
        """Return how many of `num_seqs` sequences of up to `tokens` tokens the limit leaves slots for; at least 1. A
        group whose rows wait has a slot too, and a sequence has one more for copies if it `verifies` drafts."""
        if self.make_states is None or self.limit_bytes is None:
            return num_seqs
        each = (2 + verifies) * self.slot_bytes + blocks_for(tokens) * self.block_bytes
        return max(min(num_seqs, self.limit_bytes // each), 1)

    def allocate_states(self, count: int) -> list[int]:
        """Allocate slots for the states of `count` sequences, their content undefined. If too few are free, the oldest
        kept states are forgotten, then the storage grows. Without recurrent layers: 0 for each."""
        if self.make_states is None:
            return [0] * count
        while len(self.free_slots) < count and self.kept_states:
            self.free_slots.append(self.kept_states.pop(next(iter(self.kept_states))).slot)
        if len(self.free_slots) < count:
            self._grow_slots(max(self.num_slots + count - len(self.free_slots), self.num_slots * 3 // 2))
        return [self.free_slots.pop() for _ in range(count)]

    def free_states(self, slots: list[int]) -> None:
        """Take slots back; NO_SLOT is none."""
        if self.make_states is not None:
            self.free_slots += [slot for slot in slots if slot != NO_SLOT]

    def copy_states(self, source: int, targets: list[int]) -> None:
        """Copy the states in a slot to others."""
        for tensors in self.states.values() if targets else ():
            for tensor in tensors:
                tensor[targets] = tensor[source].clone()

    def _grow_slots(self, num_slots: int) -> None:
        """Grow the storage of recurrent states; those in use keep their slots and content."""
        assert self.make_states is not None, "slots are allocated between `begin_call` and `end_call`"
        larger = self.make_states(num_slots)
        for layer, tensors in self.states.items():
            for tensor, grown in zip(tensors, larger[layer], strict=True):
                grown[: self.num_slots].copy_(tensor)
        self.free_slots = list(range(num_slots - 1, self.num_slots - 1, -1)) + self.free_slots
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + num_slots * self.slot_bytes)
        self.states, self.num_slots = larger, num_slots
        self.kv = replace(self.kv, states=larger)

    @property
    def num_used(self) -> int:
        """Blocks in use."""
        return max(self.capacity - 1, 0) - len(self.free_blocks) - len(self.evictable)

    def require_room(self, lengths: list[int], block_bytes: int, slot_bytes: int = 0) -> None:
        """Raise ValueError if sequences of these lengths, in the cache at once, may need more than `limit_bytes`.

        lengths: tokens of each sequence, new ones included.  block_bytes: the most bytes that a block takes.
        slot_bytes: the bytes of a sequence's recurrent states.
        """
        needed = (1 + sum(map(blocks_for, lengths))) * block_bytes + (1 + len(lengths)) * slot_bytes
        if self.limit_bytes is not None and needed > self.limit_bytes:
            rows = f"{len(lengths)} rows that have to be in the cache together, the longest" if lengths[1:] else "a row"
            raise ValueError(
                f"{self.limit_name} leaves {self.limit_bytes} bytes for keys and values: {rows} of {max(lengths)} "
                f"tokens, new ones included, may need {needed}; raise it by the difference, or ask for fewer tokens"
                + self.explain()
            )

    def _forget(self, blocks: list[int]) -> None:
        """Free those of these blocks, which are not cached any more, that nothing refers to."""
        for block in blocks:
            if block in self.kept_states:
                self.free_slots.append(self.kept_states.pop(block).slot)
            if block in self.evictable:
                del self.evictable[block]
                self.free_blocks.append(block)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` blocks, each with reference count 1. Their content is undefined. If too few are free,
        cached ones are forgotten, then the storage grows by steps."""
        while len(self.free_blocks) < num_blocks and self.evictable:
            self._forget(self.prefix_cache.remove(next(iter(self.evictable))))
        if len(self.free_blocks) < num_blocks:
            old, needed = self.capacity, self.capacity + num_blocks - len(self.free_blocks) + (self.capacity == 0)
            self._grow(max(self._rounded(max(needed, old + old // 2)), needed))
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
        for block in reversed(blocks):
            if not self.ref_counts[block]:
                if block in self.prefix_cache.by_block:
                    self.evictable[block] = None
                else:
                    self.free_blocks.append(block)

    def num_reusable(self, weights: KVWeights | None) -> int:
        """Return the blocks that hold known tokens, computed with this version of the weights."""
        is_current = weights is not None and weights.version == self.prefix_cache.version
        return len(self.prefix_cache.by_block) if is_current else 0

    def forget_all(self) -> None:
        """Forget which tokens blocks hold. Call it between calls."""
        self._forget(self.prefix_cache.use(None))

    def insert(self, token_ids: torch.Tensor, blocks: list[int], adapter: int = NO_ADAPTER) -> None:
        """Record that blocks hold these tokens, int64 [n], from a sequence's begin on. Nothing may write these
        positions of the blocks any more.

        adapter: the number of the sequence's, as `PackedBatch.adapters`. Sequences of different ones share no blocks.
        """
        if self.caches_prefixes:
            self.prefix_cache.insert(token_ids.cpu(), blocks, adapter)

    def first_new_block(self, token_ids: torch.Tensor, adapter: int = NO_ADAPTER) -> tuple[int, bytes] | None:
        """Return the adapter and the bytes of a sequence, int64 [n] on the host, up to its first full block that is not
        cached; None if all of them are, or nothing is kept.  adapter: as for `insert`."""
        if not (self.caches_prefixes and self.shares_prefixes):
            return None
        full = len(self.prefix_cache.full_blocks(token_ids.numpy().tobytes(), adapter))
        if (full + 1) * BLOCK_SIZE > len(token_ids):
            return None
        return adapter, token_ids[: (full + 1) * BLOCK_SIZE].numpy().tobytes()

    def blocks_before_divergence(self, token_ids: torch.Tensor, adapter: int = NO_ADAPTER) -> int:
        """Return how many full blocks a sequence, int64 [n], has in common with a cached one that then diverges.
        0: none does."""
        return self.prefix_cache.blocks_before_divergence(token_ids.cpu(), adapter) if self.caches_prefixes else 0

    def same_blocks(self, token_ids: torch.Tensor) -> list[int]:
        """Return the cached full blocks that a sequence, int64 [n], begins with, with a reference to each: for a caller
        that computes their content again, to the same values, and so needs no others."""
        if not self.caches_prefixes:
            return []
        blocks = self.prefix_cache.match(token_ids.cpu())[0]
        self.ref(blocks)
        return blocks

    def reuse(
        self, token_ids: torch.Tensor, is_prompt: bool = True, adapter: int = NO_ADAPTER
    ) -> tuple[list[int], int]:
        """Blocks, with a reference to each, that hold the longest known begin of a sequence, int64 [n], without its
        last token, whose logits are needed; and how many tokens they hold. The last one, if it is not full, is a copy:
        or the cached block itself, which is forgotten, where there is no room for two.

        is_prompt: count the tokens as a prompt's, else as those of a sequence that is scored, whose last token is not
            computed.
        adapter: as for `insert`.
        """
        assert self.shares_prefixes, "blocks alone do not continue recurrent states"
        blocks, partial, common = self.prefix_cache.match(token_ids[:-1].cpu(), adapter)
        self.ref(blocks)
        last = self._own_copy(partial) if common else []
        reused = len(blocks) * BLOCK_SIZE + common * len(last)
        if is_prompt:
            self.reused_tokens += reused
            self.prefilled_tokens += len(token_ids) - reused
        else:
            self.reused_scored_tokens += reused
        return blocks + last, reused

    def keep_state(
        self, token_ids: torch.Tensor, blocks: list[int], slot: int, adapter: int = NO_ADAPTER, is_shared: bool = False
    ) -> bool:
        """Record that blocks hold these tokens, int64 [n], from a sequence's begin on, and a slot the states after the
        last of them; as `insert`.

        is_shared: as in `KeptState`; then n is a multiple of BLOCK_SIZE.
        Returns whether the pool has taken the slot: not if it keeps nothing, or has these states.
        """
        if not self.caches_prefixes:
            return False
        last = self.prefix_cache.insert(token_ids.cpu(), blocks, adapter)
        return self.kept_states.setdefault(last, KeptState(slot, is_shared)).slot == slot

    def touch_state(self, token_ids: torch.Tensor, adapter: int) -> int:
        """Mark the states that a prompt, int64 [n], would start from as the most recently used ones. Returns how many
        of the prompt's tokens they cover; 0: no states are kept for it."""
        blocks, partial, known = self.prefix_cache.match_kept(token_ids[:-1].cpu(), self.kept_states, adapter)
        if known:
            last = blocks[-1] if partial is None else partial
            self.kept_states[last] = self.kept_states.pop(last)
        return known

    def resume(self, prompts: list[torch.Tensor], adapters: list[int]) -> list[tuple[list[int], int, int]]:
        """Start prompts, int64 [n] each, of a model with recurrent layers from their longest cached prefixes that have
        states. A prompt's last token, whose logits are needed, is not part of them.

        Returns for each prompt the blocks of its prefix, with a reference to each; the number of the prefix's tokens;
        and a slot, which has the states after these tokens.
        """
        shared: dict[int, KeptState] = {}  # which prompts begin with, by block: not forgotten before they are copied
        found: list[tuple[list[int], int]] = []
        slots, sources = [NO_SLOT] * len(prompts), dict[int, list[int]]()
        for index, (token_ids, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            states = ChainMap(shared, self.kept_states)
            blocks, partial, reused = self.prefix_cache.match_kept(token_ids[:-1].cpu(), states, adapter)
            if reused:
                last = blocks[-1] if partial is None else partial
                state = shared[last] if last in shared else self.kept_states.pop(last)
                if state.is_shared:
                    shared[last] = state
                    sources.setdefault(last, []).append(index)
                else:
                    slots[index] = state.slot
            self.ref(blocks)
            if partial is not None and not (own := self._own_copy(partial, takes=True)):  # of no use without its states
                self.free(blocks)
                self.free_states([slots[index]])
                blocks, reused, slots[index] = [], 0, NO_SLOT
            elif partial is not None:
                blocks += own
            self.reused_tokens += reused
            self.prefilled_tokens += len(token_ids) - reused
            found.append((blocks, reused))
        self._allocate_missing(slots, shared, sources)
        return [(blocks, reused, slot) for (blocks, reused), slot in zip(found, slots, strict=True)]

    def _allocate_missing(self, slots: list[int], shared: dict[int, KeptState], sources: dict[int, list[int]]) -> None:
        """Replace each NO_SLOT in `slots` by a new slot, with a copy of the shared states that its prompt starts from.

        shared: states by block, which are kept again.  sources: the indices in `slots` of each one's prompts.
        """
        missing = slots.count(NO_SLOT) - len(self.free_slots) - len(self.kept_states)
        for block, state in list(shared.items()):
            users = sources[block]
            if missing > 0:  # the last one takes the states
                slots[users.pop()] = shared.pop(block).slot
                missing -= 1
            copies = self.allocate_states(len(users))
            self.copy_states(state.slot, copies)
            for index, slot in zip(users, copies, strict=True):
                slots[index] = slot
        without = [index for index, slot in enumerate(slots) if slot == NO_SLOT]
        for index, slot in zip(without, self.allocate_states(len(without)), strict=True):
            slots[index] = slot
        self.kept_states |= shared

    def _own_copy(self, block: int, takes: bool = False) -> list[int]:
        """Return a new block with a cached block's content; or that block itself, which is forgotten, if `takes` or
        where there is no room for two; none if others use it and there is no room."""
        is_unused = block in self.evictable
        has_room = len(self.free_blocks) + len(self.evictable) > is_unused
        if is_unused and (takes or not has_room):
            self._forget(self.prefix_cache.remove(block))
            copy = self.allocate(1)
            assert copy == [block], "the block that was just freed is allocated first"
            return copy
        if not has_room:
            return []
        self.ref([block])
        copy = self.allocate(1)
        self.kv.copy([block], copy)
        self.free([block])
        return copy

    def nbytes(self) -> int:
        """Return the bytes of the storage."""
        return self.kv.nbytes + self.num_slots * self.slot_bytes

    def release(self) -> None:
        """Free the storage; what is cached is lost."""
        self.states, self.free_slots, self.num_slots, self.kept_states = {}, [], 0, {}
        self._release_blocks()

    def _release_blocks(self) -> None:
        self.free_states([kept.slot for kept in self.kept_states.values()])
        self.kept_states = {}
        self.kv, self.free_blocks, self.ref_counts = PagedKV([], []), [], []
        self.prefix_cache, self.evictable = PrefixCache(), {}


class CachedBlock:
    """A block's place in the tree.

    tokens: the bytes of its token ids, int64, at most BLOCK_SIZE of them.
    parent: the block before it in its sequence; a root's is itself.
    children: blocks that may follow, by their tokens; only a full block has any.  ordered: their tokens, sorted.
    """

    __slots__ = ("block", "children", "ordered", "parent", "tokens")

    def __init__(self, parent: "CachedBlock | None" = None, tokens: bytes = b"", block: int = 0):
        self.parent, self.tokens, self.block = self if parent is None else parent, tokens, block
        self.children: dict[bytes, CachedBlock] = {}
        self.ordered: list[bytes] = []

    def closest(self, tokens: bytes) -> tuple[int, int]:
        """Return how many tokens a child begins with that a sequence, given as bytes, begins with too, and that child's
        block: of the child that has the most of them. (0, 0) if no child has any."""
        at = bisect_left(self.ordered, tokens[:FULL_BYTES])  # of sorted sequences a neighbour has the longest prefix
        neighbours = (self.children[child] for child in self.ordered[max(at - 1, 0) : at + 1])
        return max(((common_tokens(child.tokens, tokens), child.block) for child in neighbours), default=(0, 0))


class PrefixCache:
    """Finds blocks by their content: the weights, all tokens before the block, and its own. Compared token by token."""

    def __init__(self) -> None:
        self.version: Hashable = None
        # By variant of the weights and number of the adapter: the root of what such sequences have computed.
        self.roots: defaultdict[Hashable, CachedBlock] = defaultdict(CachedBlock)
        self.by_block: dict[int, CachedBlock] = {}
        self.variant: Hashable = None

    def use(self, weights: KVWeights | None) -> list[int]:
        """Find and insert blocks that these weights compute, from now on; None: unknown ones. Forgets, and gives, the
        blocks that another version has computed."""
        removed: list[int] = []
        if weights is None or weights.version != self.version:
            removed = list(self.by_block)
            self.roots.clear()
            self.by_block.clear()
        self.version, self.variant = (None, None) if weights is None else (weights.version, weights.variant)
        return removed

    def match(self, token_ids: torch.Tensor, adapter: int = NO_ADAPTER) -> tuple[list[int], int, int]:
        """Find the longest cached prefix of a sequence, int64 [n] on the host.

        Returns:
            The blocks of its first tokens, BLOCK_SIZE each; the block whose content continues them the longest; and the
            number of that block's tokens that match, 0 if there is no such block.
        """
        tokens = token_ids.numpy().tobytes()
        path = self.full_blocks(tokens, adapter)
        node = path[-1] if path else self.roots[self.variant, adapter]
        common, partial = node.closest(tokens[len(path) * FULL_BYTES :])
        return [node.block for node in path], partial, common

    def match_kept(
        self, token_ids: torch.Tensor, kept: Container[int], adapter: int = NO_ADAPTER
    ) -> tuple[list[int], int | None, int]:
        """Find the longest cached prefix of a sequence, int64 [n] on the host, that ends with a block of `kept`.

        Returns:
            The blocks of its first tokens, BLOCK_SIZE each; the block of the tokens after these, None if there are
            none; and the number of all these tokens, 0 if nothing is found.
        """
        tokens = token_ids.numpy().tobytes()
        path = self.full_blocks(tokens, adapter)
        blocks = [node.block for node in path]
        for depth in range(len(path), -1, -1):
            node = path[depth - 1] if depth else self.roots[self.variant, adapter]
            rest = tokens[depth * FULL_BYTES : (depth + 1) * FULL_BYTES]
            has_others = len(node.children) > (depth < len(path))  # than the next full block
            for size in range(min(len(rest), FULL_BYTES - TOKEN_BYTES), 0, -TOKEN_BYTES) if has_others else ():
                child = node.children.get(rest[:size])
                if child is not None and child.block in kept:
                    return blocks[:depth], child.block, depth * BLOCK_SIZE + size // TOKEN_BYTES
            if depth and node.block in kept:
                return blocks[:depth], None, depth * BLOCK_SIZE
        return [], None, 0

    def blocks_before_divergence(self, token_ids: torch.Tensor, adapter: int = NO_ADAPTER) -> int:
        """As `BlockPool.blocks_before_divergence`, of a sequence on the host."""
        tokens = token_ids.numpy().tobytes()
        path = self.full_blocks(tokens, adapter)
        if not path or not path[-1].children:
            return 0
        common, block = path[-1].closest(tokens[len(path) * FULL_BYTES :])
        is_continued = common * TOKEN_BYTES == len(self.by_block[block].tokens) if common else False
        return 0 if is_continued else len(path)

    def full_blocks(self, tokens: bytes, adapter: int = NO_ADAPTER) -> list[CachedBlock]:
        """Return the cached full blocks of a sequence's first tokens, int64 as bytes."""
        path, node = [], self.roots[self.variant, adapter]
        for begin in range(0, len(tokens) - FULL_BYTES + 1, FULL_BYTES):
            child = node.children.get(tokens[begin : begin + FULL_BYTES])
            if child is None:
                break
            path.append(node := child)
        return path

    def insert(self, token_ids: torch.Tensor, blocks: list[int], adapter: int = NO_ADAPTER) -> int:
        """Remember the blocks of a sequence, int64 [n] on the host. Of two of equal content the first is kept. Returns
        the block that is kept for the last tokens."""
        tokens, node = token_ids.numpy().tobytes(), self.roots[self.variant, adapter]
        for begin, block in zip(range(0, len(tokens), FULL_BYTES), blocks, strict=True):
            content = tokens[begin : begin + FULL_BYTES]
            if content not in node.children:
                insort(node.ordered, content)
                self.by_block[block] = node.children[content] = CachedBlock(node, content, block)
            node = node.children[content]
        return node.block

    def remove(self, block: int) -> list[int]:
        """Forget a block and all that follow it; return them."""
        node = self.by_block[block]
        siblings = node.parent.ordered
        del node.parent.children[node.tokens], siblings[bisect_left(siblings, node.tokens)]
        removed = [node]
        for each in removed:  # which grows; long sequences are deeper than Python's recursion
            removed += each.children.values()
            del self.by_block[each.block]
        return [each.block for each in removed]


def common_tokens(tokens: bytes, others: bytes) -> int:
    """Return the length of the common prefix of two sequences, given as bytes of int64."""
    if tokens[:TOKEN_BYTES] != others[:TOKEN_BYTES]:  # the usual case, and fast
        return 0
    count, high = 0, min(len(tokens), len(others)) // TOKEN_BYTES
    while count < high:
        middle = (count + high + 1) // 2
        part = slice(count * TOKEN_BYTES, middle * TOKEN_BYTES)
        if tokens[part] == others[part]:
            count = middle
        else:
            high = middle - 1
    return count
