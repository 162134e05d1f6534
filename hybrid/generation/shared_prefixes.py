"""Sequences that begin alike, in one call: what they share, and forwards that compute each of their tokens once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hybrid.decoders.batch import BLOCK_SIZE, LayerActivations
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import FULL_BYTES, TOKEN_BYTES, BlockPool, blocks_for
from hybrid.generation.model_runner import hidden_states, reserve_memory
from hybrid.generation.recurrent_prefixes import common_to_two

NO_PARENT = -1


@dataclass(frozen=True)
class PackedSequences:
    """Sequences, packed so that tokens which several of them begin with occur once.

    The packed tokens are those of the first sequence, then those of the second one that the first does not begin with,
    and so on: a sequence's tokens that no earlier one has are adjacent.

    sequences: int64 [n] each, on the host.
    parents: for each sequence, an earlier one that has the longest common prefix with it; NO_PARENT: there is none.
    shared: number of tokens of that prefix, of any length.
    index: for each sequence int64 [n], each token's index among the packed ones.
    count: number of packed tokens.
    rows: the indices in `sequences` of the given ones; the others are shared prefixes, from whose recurrent states
        later sequences continue.
    is_recurrent: a sequence can continue only from another one's end, where the states are.
    """

    sequences: list[torch.Tensor]
    parents: list[int]
    shared: list[int]
    index: list[torch.Tensor]
    count: int
    rows: list[int]
    is_recurrent: bool

    @classmethod
    def of(cls, sequences: list[torch.Tensor], is_recurrent: bool = False) -> "PackedSequences":
        """Pack sequences, int64 [n] each.

        is_recurrent: states exist only after a sequence's last token. Prefixes shorter than a block are not shared.
        """
        sequences, rows = [ids.cpu() for ids in sequences], list(range(len(sequences)))
        if is_recurrent:
            sequences, rows, parents = with_prefixes(sequences)
            shared = [0 if parent == NO_PARENT else len(sequences[parent]) for parent in parents]
        else:
            parents, shared = common_prefixes(sequences)
        index: list[torch.Tensor] = []
        count = 0
        for ids, parent, prefix in zip(sequences, parents, shared, strict=True):
            new = torch.arange(count, count + len(ids) - prefix)
            index.append(torch.cat([index[parent][:prefix], new]) if prefix else new)
            count += len(new)
        return cls(sequences, parents, shared, index, count, rows, is_recurrent)

    def runs(self, max_rows: int, max_blocks: int | None) -> "list[Run]":
        """Split the sequences into runs of at most `max_rows` sequences, whose blocks and those of the prefixes that
        they share with earlier runs are at most `max_blocks`, or one sequence. Of a recurrent model the states of these
        sequences and prefixes are at most `max_rows` + 1."""
        children: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents):
            if parent != NO_PARENT:
                children[parent].append(row)
        runs: list[Run] = []
        row, kept = 0, dict[int, int]()
        while row < len(self.sequences):
            if self.is_recurrent and len(kept) > max_rows:
                kept = {}
            limit = max_rows - (max(len(kept) - 1, 0) if self.is_recurrent else 0)
            begins, num_blocks = dict[int, int](), sum(map(blocks_for, kept.values()))
            while row < len(self.sequences) and len(begins) < limit:
                parent = self.parents[row]
                begin = self.shared[row] if parent in begins or parent in kept else 0
                new = blocks_for(len(self.sequences[row])) - begin // BLOCK_SIZE
                if max_blocks is not None and num_blocks + new > max_blocks and (begins or kept):
                    if begins:
                        break
                    kept, num_blocks = {}, 0  # the sequence fits only without them: its prefix is computed again
                    continue
                begins[row] = begin
                num_blocks += new
                row += 1
            runs.append(Run(begins, kept, num_blocks))
            longest = {own: max((self.shared[n] for n in children[own] if n >= row), default=0) for own in begins}
            longest |= {own: max((self.shared[n] for n in children[own] if n >= row), default=0) for own in kept}
            kept = {own: prefix for own, prefix in longest.items() if prefix}
        return runs


@dataclass(frozen=True)
class Run:
    """Sequences whose blocks are in the cache together.

    begins: for each sequence, how many of its first tokens its parent's blocks hold.
    kept: sequences of earlier runs whose blocks are needed, for the first so many tokens.
    num_blocks: the most blocks that the run has in use.
    """

    begins: dict[int, int]
    kept: Mapping[int, int]
    num_blocks: int

    def waves(self, packed: PackedSequences) -> list[list[int]]:
        """Return the sequences in waves: one that begins in the middle of a block of another one, or with its recurrent
        states, which it copies, comes in a later wave. Blocks that are full are shared within a wave: a forward writes
        all keys and values of a layer before it attends to them."""
        wave_of: dict[int, int] = {}
        for row, begin in self.begins.items():
            parent = packed.parents[row] if begin else NO_PARENT
            copies = parent in wave_of and (packed.is_recurrent or begin % BLOCK_SIZE > 0)
            wave_of[row] = wave_of.get(parent, 0) + copies
        waves: list[list[int]] = [[] for _ in range(max(wave_of.values()) + 1)]
        for row, wave in wave_of.items():
            waves[wave].append(row)
        return waves


def with_prefixes(sequences: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Insert the prefixes of at least a block that several sequences, int64 [n] on the host, share, each before the
    first sequence that begins with it.

    Returns all sequences, the indices of the given ones, and for each sequence the index of its longest prefix among
    them, NO_PARENT if there is none.
    """
    keys = [ids.numpy().tobytes() for ids in sequences]
    prefixes = sorted((prefix for prefix in common_to_two(keys) if len(prefix) >= FULL_BYTES), key=len)
    packed: list[torch.Tensor] = []
    rows, parents, place_of = list[int](), list[int](), dict[bytes, int]()
    for ids, key in zip(sequences, keys, strict=True):
        parent = NO_PARENT
        for prefix in prefixes:
            if key.startswith(prefix):
                if prefix not in place_of:
                    place_of[prefix] = len(packed)
                    packed.append(ids[: len(prefix) // TOKEN_BYTES])
                    parents.append(parent)
                parent = place_of[prefix]
        rows.append(len(packed))
        packed.append(ids)
        parents.append(parent)
    return packed, rows, parents


def common_prefixes(sequences: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return, for each sequence, int64 [n] on the host, the earlier one with the longest common prefix (NO_PARENT:
    none), and the tokens of that prefix."""
    keys = [ids.numpy().tobytes() for ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    # In this order the longest prefix that a sequence shares with any of some others, it shares with one of its two
    # neighbours among them. The later sequences leave the list first; `common` has the prefix shared with the next one.
    following = dict(zip([NO_PARENT, *order], [*order, NO_PARENT], strict=True))
    preceding = {own: other for other, own in following.items()}
    common = {a: common_tokens(sequences[a], sequences[b]) for a, b in pairwise(order)}
    parents, shared = [NO_PARENT] * len(keys), [0] * len(keys)
    for row in reversed(range(len(keys))):
        before, after = preceding[row], following[row]
        sides = ((common.get(before, 0), before), (common.get(row, 0), after))
        prefix, parent = max(sides, key=lambda side: (side[0], -side[1]))
        if prefix:
            parents[row], shared[row] = parent, prefix
        following[before], preceding[after] = after, before
        common[before] = min(side[0] for side in sides)
    return parents, shared


def common_tokens(ids: torch.Tensor, others: torch.Tensor) -> int:
    """Return the length of the common prefix of two sequences, int64 [n] each."""
    count = min(len(ids), len(others))
    differs = (ids[:count] != others[:count]).nonzero()
    return int(differs[0]) if len(differs) else count


def packed_hidden_states(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    packed: PackedSequences,
    max_rows: int,
    activations: LayerActivations | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Run packed sequences through the layers, at most `max_rows` of them in the cache at once.

    activations: memory for all packed tokens; None: the layers' inputs are not kept.
    Yields the packed indices of each forward's tokens, int64 [tokens] on the host, and the last layer's output,
    [tokens, hidden]. A token is computed once, unless the block pool's limit leaves no room to keep its block for a
    later run.
    """
    longest = max(map(len, packed.sequences), default=0)
    max_rows = block_pool.num_seqs_within_limit(longest, min(max_rows, len(packed.sequences)))
    if block_pool.kept_states:  # more rows than fill a forward gain nothing, and take the kept states' slots
        rows_of_forward = decoder.prefill_tokens * len(packed.sequences) // max(packed.count, 1) + 2
        max_rows = min(max_rows, max(rows_of_forward, len(block_pool.free_slots) - 1))
    num_blocks = max((run.num_blocks for run in packed.runs(max_rows, block_pool.limit)), default=0)
    reserve_memory(decoder, block_pool, max_rows, num_blocks, longest, decodes=False)
    runs = packed.runs(max_rows, block_pool.limit)
    blocks: dict[int, list[int]] = {}
    slots: dict[int, int] = {}  # of recurrent states
    for run in runs:
        for row in list(blocks):
            needed = blocks_for(run.kept.get(row, 0))
            block_pool.free(blocks[row][needed:])
            blocks[row] = blocks[row][:needed]
        block_pool.free_states([slots.pop(row) for row in slots.keys() - run.kept.keys()])
        for wave in run.waves(packed):
            slots |= zip(wave, block_pool.allocate_states(len(wave)), strict=True)
            for row in wave:
                parent = blocks[packed.parents[row]] if run.begins[row] else []
                blocks[row] = blocks_after(block_pool, packed.sequences[row], parent, run.begins[row])
                if run.begins[row] and packed.is_recurrent:
                    block_pool.copy_states(slots[packed.parents[row]], [slots[row]])
            index = [packed.index[row] for row in wave]

            def kept(chunks: dict[int, range], index: list[torch.Tensor] = index) -> LayerActivations:
                assert activations is not None
                return replace(activations, rows=indices_of(chunks, index).to(decoder.device))

            ids, begins = [packed.sequences[row] for row in wave], [run.begins[row] for row in wave]
            of_wave, keeping = [blocks[row] for row in wave], None if activations is None else kept
            of_rows = [slots[row] for row in wave] if packed.is_recurrent else None
            for chunks, hidden in hidden_states(decoder, block_pool, ids, of_wave, begins, keeping, of_rows):
                yield indices_of(chunks, index), hidden
    block_pool.free_states(list(slots.values()))
    for held in blocks.values():
        block_pool.free(held)


def indices_of(chunks: dict[int, range], index: list[torch.Tensor]) -> torch.Tensor:
    """Return the packed indices of a forward's tokens.  index: int64 [n], of each sequence's tokens."""
    return torch.cat([index[sequence][chunk.start : chunk.stop] for sequence, chunk in chunks.items()])


def blocks_after(block_pool: BlockPool, ids: torch.Tensor, parent: list[int], begin: int) -> list[int]:
    """Return a sequence's blocks, with a reference to each, which hold the parent's first `begin` tokens.

    Blocks that the prefix cache has for the sequence are taken: they are written again, with the values that they have.

    ids: int64 [n].  parent: the parent's blocks.
    """
    blocks, full = block_pool.same_blocks(ids), begin // BLOCK_SIZE
    if len(blocks) < full:
        more = parent[len(blocks) : full]
        block_pool.ref(more)
        blocks += more
    if begin % BLOCK_SIZE and len(blocks) == full:
        copied = block_pool.allocate(1)
        block_pool.kv.copy([parent[full]], copied)
        blocks += copied
    return blocks + block_pool.allocate(blocks_for(len(ids)) - len(blocks))
