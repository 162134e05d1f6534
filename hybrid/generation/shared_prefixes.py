"""Sequences that begin alike, in one call: what they share, and forwards that compute each of their tokens once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hybrid.decoders.batch import BLOCK_SIZE, LayerActivations
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import hidden_states

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
    """

    sequences: list[torch.Tensor]
    parents: list[int]
    shared: list[int]
    index: list[torch.Tensor]
    count: int

    @classmethod
    def of(cls, sequences: list[torch.Tensor], shares_prefixes: bool = True) -> "PackedSequences":
        """Pack sequences, int64 [n] each.  shares_prefixes: False: every token of every sequence is packed."""
        sequences = [ids.cpu() for ids in sequences]
        parents, shared = [NO_PARENT] * len(sequences), [0] * len(sequences)
        if shares_prefixes:
            parents, shared = common_prefixes(sequences)
        index: list[torch.Tensor] = []
        count = 0
        for ids, parent, prefix in zip(sequences, parents, shared, strict=True):
            new = torch.arange(count, count + len(ids) - prefix)
            index.append(torch.cat([index[parent][:prefix], new]) if prefix else new)
            count += len(new)
        return cls(sequences, parents, shared, index, count)

    def runs(self, max_rows: int, max_blocks: int | None) -> "list[Run]":
        """Split the sequences into runs of at most `max_rows` sequences, whose blocks and those of the prefixes that
        they share with earlier runs are at most `max_blocks`, or one sequence."""
        children: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents):
            if parent != NO_PARENT:
                children[parent].append(row)
        runs: list[Run] = []
        row, kept = 0, dict[int, int]()
        while row < len(self.sequences):
            begins, num_blocks = dict[int, int](), sum(map(blocks_for, kept.values()))
            while row < len(self.sequences) and len(begins) < max_rows:
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

    def waves(self, parents: list[int]) -> list[list[int]]:
        """Return the sequences in waves: one that begins in the middle of a block of another one, which it copies,
        comes in a later wave. Blocks that are full are shared within a wave: a forward writes all keys and values of a
        layer before it attends to them."""
        wave_of: dict[int, int] = {}
        for row, begin in self.begins.items():
            wave_of[row] = wave_of.get(parents[row], 0) + (begin % BLOCK_SIZE > 0 and parents[row] in wave_of)
        waves: list[list[int]] = [[] for _ in range(max(wave_of.values()) + 1)]
        for row, wave in wave_of.items():
            waves[wave].append(row)
        return waves


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
    block_pool.reserve_states(max_rows)
    runs = packed.runs(max_rows, block_pool.limit)
    block_pool.reserve_call(max((run.num_blocks for run in runs), default=0))
    blocks: dict[int, list[int]] = {}
    for run in runs:
        for row in list(blocks):
            needed = blocks_for(run.kept.get(row, 0))
            block_pool.free(blocks[row][needed:])
            blocks[row] = blocks[row][:needed]
        for wave in run.waves(packed.parents):
            for row in wave:
                parent = blocks[packed.parents[row]] if run.begins[row] else []
                blocks[row] = blocks_after(block_pool, packed.sequences[row], parent, run.begins[row])
            index = [packed.index[row] for row in wave]

            def kept(chunks: dict[int, range], index: list[torch.Tensor] = index) -> LayerActivations:
                assert activations is not None
                return replace(activations, rows=indices_of(chunks, index).to(decoder.device))

            ids, begins = [packed.sequences[row] for row in wave], [run.begins[row] for row in wave]
            of_wave, keeping = [blocks[row] for row in wave], None if activations is None else kept
            slots = None if block_pool.shares_prefixes else block_pool.allocate_states(len(wave))
            for chunks, hidden in hidden_states(decoder, block_pool, ids, of_wave, begins, keeping, slots):
                yield indices_of(chunks, index), hidden
            block_pool.free_states(slots or [])
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
        block_pool.copy([parent[full]], copied)
        blocks += copied
    return blocks + block_pool.allocate(blocks_for(len(ids)) - len(blocks))
