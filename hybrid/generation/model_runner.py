"""The model runner: prompts packed into blocks, then one token for each row per step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.decoders.batch import BLOCK_SIZE, Draws, PackedBatch, packed, table_of
from hybrid.decoders.drafts import Drafting, VerifiedTokens, most_new_tokens
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for

PREFILL_TOKENS = 2048  # prompt tokens in one forward; bounds the memory of activations


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence in a forward.

    sequence: the sequence's index.  begin, stop: positions in it.  row: index of the chunk's first token in the
        forward.
    """

    sequence: int
    begin: int
    stop: int
    row: int


def hidden_states(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: list[torch.Tensor],
    blocks: list[list[int]],
    begins: list[int] | None = None,
) -> Iterator[tuple[list[Chunk], torch.Tensor]]:
    """Run sequences, int64 [n] each, through the layers and write their keys and values to their blocks.

    begins: how many tokens of each sequence its blocks already hold; None: none.
    Yields the chunks and the last layer's output [tokens, hidden] of each forward. Sequences are packed without
    padding, PREFILL_TOKENS in a forward; a sequence that does not fit is split.
    """
    begins = [0] * len(sequences) if begins is None else begins
    for chunks in prefill_chunks(begins, [len(sequence) for sequence in sequences]):
        ids = [sequences[chunk.sequence][chunk.begin : chunk.stop] for chunk in chunks]
        block_tables = [blocks[chunk.sequence] for chunk in chunks]
        yield (
            chunks,
            decoder.forward(
                packed(ids, [chunk.begin for chunk in chunks], block_tables, decoder.device), block_pool.kv
            ),
        )


def prefill(
    decoder: AnyDecoder, block_pool: BlockPool, prompts: list[torch.Tensor]
) -> tuple[list[list[int]], torch.Tensor]:
    """Write the keys and values of distinct prompts, int64 [n] each, to blocks. What the pool has of them is not
    computed again, and what several of them begin with is computed once.

    Returns each prompt's blocks, and the logits after its last token, float32 [prompts, vocab].
    """
    blocks: list[list[int]] = [[] for _ in prompts]
    logits: dict[int, torch.Tensor] = {}
    for wave in prefill_waves(block_pool, [prompt.cpu() for prompt in prompts]):
        begins = []
        for index in wave:
            blocks[index], begin = block_pool.reuse(prompts[index])
            blocks[index] += block_pool.allocate(blocks_for(len(prompts[index])) - len(blocks[index]))
            begins.append(begin)
        own = [prompts[index] for index in wave], [blocks[index] for index in wave]
        for chunks, hidden in hidden_states(decoder, block_pool, *own, begins):
            last = [chunk for chunk in chunks if chunk.stop == len(prompts[wave[chunk.sequence]])]
            if last:
                ends = torch.tensor([chunk.row + chunk.stop - chunk.begin - 1 for chunk in last], device=decoder.device)
                of_ends = decoder.logits(hidden[ends])
                logits.update((wave[chunk.sequence], row) for chunk, row in zip(last, of_ends, strict=True))
        for prompt, held in zip(*own, strict=True):
            full = len(prompt) // BLOCK_SIZE
            block_pool.insert(prompt[: full * BLOCK_SIZE], held[:full])
    return blocks, torch.stack([logits[index] for index in range(len(prompts))])


def prefill_waves(block_pool: BlockPool, prompts: list[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of prompts, int64 [n] on the host, to compute together: in one wave no two share a block that is not
    computed yet. The caller computes and inserts a wave's blocks before it asks for the next one."""
    waiting = list(range(len(prompts)))
    while waiting:
        begun: set[bytes] = set()
        wave: list[int] = []
        later: list[int] = []
        for index in waiting:
            begin = block_pool.first_new_block(prompts[index])
            (later if begin in begun else wave).append(index)
            if begin is not None:
                begun.add(begin)
        yield wave
        waiting = later


def prefill_chunks(begins: list[int], lengths: list[int]) -> list[list[Chunk]]:
    """Split sequences of the given lengths, from `begins` on, over forwards of at most PREFILL_TOKENS tokens."""
    batches: list[list[Chunk]] = []
    used = PREFILL_TOKENS
    for sequence, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        while begin < length:
            if used == PREFILL_TOKENS:
                batches.append([])
                used = 0
            stop = min(begin + PREFILL_TOKENS - used, length)
            batches[-1].append(Chunk(sequence, begin, stop, used))
            begin, used = stop, used + stop - begin
    return batches


class ModelRunner:
    """The rows that are being decoded: a token for each at every step. A row's index changes when earlier rows leave.

    longest: the most tokens that a row may have.
    """

    def __init__(self, decoder: AnyDecoder, block_pool: BlockPool, longest: int):
        self.decoder, self.block_pool, self.device = decoder, block_pool, decoder.device
        self.blocks: list[list[int]] = []
        self.lengths = torch.zeros(0, dtype=torch.int32, device=self.device)  # tokens in the cache, by row
        self.steps = 0
        self.offsets: list[int] = []  # by row: tokens in the cache minus `steps`
        self.num_free_slots = 0  # tokens that every row can still append without another block
        self.block_tables = BlockTables(blocks_for(longest), self.device)

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, blocks: list[list[int]], lengths: list[int]) -> None:
        """Append rows with these blocks, which hold `lengths` tokens each. The runner takes over the references."""
        self.block_tables.add(blocks)
        self.blocks += blocks
        self.offsets += [length - self.steps for length in lengths]
        more = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.lengths = torch.cat([self.lengths, more])
        self._update()

    def allocate_slots(self, tokens: int, max_blocks: Sequence[int] | None = None) -> None:
        """Allocate blocks so that every row has room for `tokens` more.  max_blocks: the most blocks of each row."""
        if self.num_free_slots >= tokens:
            return
        entries: list[tuple[int, int, int]] = []
        for row, (blocks, offset) in enumerate(zip(self.blocks, self.offsets, strict=True)):
            needed = blocks_for(offset + self.steps + tokens)
            missing = (needed if max_blocks is None else min(needed, max_blocks[row])) - len(blocks)
            if missing > 0:
                more = self.block_pool.allocate(missing)
                entries += ((row, column, block) for column, block in enumerate(more, len(blocks)))
                blocks += more
        self.block_tables.write(entries)
        self._update()

    def _update(self) -> None:
        """Update `num_free_slots` and `cu_seqlens` after the rows or their blocks have changed."""
        spare = (len(own) * BLOCK_SIZE - offset for own, offset in zip(self.blocks, self.offsets, strict=True))
        self.num_free_slots = min(spare, default=0) - self.steps
        self.cu_seqlens = torch.arange(len(self) + 1, dtype=torch.int32, device=self.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token, int64 [rows], to each row; returns the logits after it, float32 [rows, vocab]."""
        batch = self._batch(tokens)
        self._advance(1)
        return self.decoder.decode(batch, self.block_pool.kv)

    def sampled_steps(self, tokens: torch.Tensor, draws: Draws, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, int64 [rows], sample the next ones, append these, and so on, up to `steps` times. The decoder
        must have `samples_in_kernel`.

        Gives the tokens drawn, int64 [steps done, rows], and their logprobs, float32 [3, steps done, rows].
        """
        steps_of: Any = self.decoder  # one with `samples_in_kernel`
        drawn, logps = steps_of.decode_steps(self._batch(tokens), self.block_pool.kv, draws, steps)
        self._advance(len(drawn))
        return drawn, logps

    def verified_steps(
        self, tokens: torch.Tensor, draws: Draws, drafting: Drafting, steps: int, max_blocks: Sequence[int]
    ) -> VerifiedTokens:
        """Append tokens, int64 [rows], and drafts, keep those that are drawn, and so on, up to `steps` times. Rows get
        different numbers of tokens.  max_blocks: the most blocks of each row."""
        self.allocate_slots(most_new_tokens(draws, drafting, steps)[0], max_blocks)
        verified = self.decoder.verify_steps(self._batch(tokens), self.block_pool.kv, draws, drafting, steps)
        counts, done = verified.counts.tokens, len(verified.step_tokens)
        self.lengths = self.lengths + torch.tensor(counts, dtype=torch.int32, device=self.device)
        self.steps += done
        self.offsets = [offset + count - done for offset, count in zip(self.offsets, counts, strict=True)]
        self._update()
        return verified

    def _batch(self, tokens: torch.Tensor) -> PackedBatch:
        """The batch that appends a token to each row."""
        return PackedBatch(tokens, self.lengths, self.cu_seqlens, self.lengths + 1, self.block_tables.rows())

    def _advance(self, steps: int) -> None:
        """Count `steps` tokens that are appended to every row."""
        self.lengths = self.lengths + steps
        self.steps += steps
        self.num_free_slots -= steps

    def keep(self, stay: list[int]) -> None:
        """Keep the rows with these indices, ascending; remove the others, and give back their blocks."""
        staying = set(stay)
        for row, blocks in enumerate(self.blocks):
            if row not in staying:
                self.block_pool.free(blocks)
        self.blocks, self.offsets = [self.blocks[row] for row in stay], [self.offsets[row] for row in stay]
        kept = torch.tensor(stay, dtype=torch.int64, device=self.device)
        self.lengths = self.lengths[kept]
        self.block_tables.keep(kept)
        self._update()


class BlockTables:
    """The rows' block tables on the device, updated in place: a step writes only the blocks that it adds.

    max_blocks: the most blocks that a row may have.
    """

    def __init__(self, max_blocks: int, device: torch.device):
        self.count, self.max_blocks = 0, max_blocks
        self.memory = torch.zeros(0, 0, dtype=torch.int32, device=device)  # [rows, blocks], unused entries undefined

    def rows(self) -> torch.Tensor:
        """The block tables, int32 [rows, blocks], contiguous. Entries after a row's last block are undefined."""
        return self.memory[: self.count]

    def add(self, blocks: list[list[int]]) -> None:
        """Append rows with these blocks."""
        self._grow(self.count + len(blocks), max(map(len, blocks), default=0))
        first, self.count = self.count, self.count + len(blocks)
        own = table_of(blocks, self.memory.device)
        self.memory[first : self.count, : own.shape[1]] = own

    def write(self, entries: list[tuple[int, int, int]]) -> None:
        """Write entries, (row, column, block) each."""
        if not entries:
            return
        rows, columns, blocks = zip(*entries, strict=True)
        self._grow(self.count, max(columns) + 1)
        at = torch.tensor([rows, columns], device=self.memory.device)
        self.memory[at[0], at[1]] = torch.tensor(blocks, dtype=torch.int32, device=self.memory.device)

    def keep(self, stay: torch.Tensor) -> None:
        """Keep the rows with these indices, int64 [n], ascending; they move up."""
        kept = self.rows()[stay]
        self.count = len(kept)
        self.memory[: self.count] = kept

    def _grow(self, rows: int, blocks: int) -> None:
        """Grow the memory, by doubling, to at least [rows, blocks]."""
        height, width = self.memory.shape
        if rows <= height and blocks <= width:
            return
        assert blocks <= self.max_blocks, f"{blocks} blocks in a row of at most {self.max_blocks}"
        larger = self.memory.new_zeros(
            height if rows <= height else max(rows, 2 * height),
            width if blocks <= width else max(blocks, min(2 * width, self.max_blocks)),
        )
        larger[:height, :width] = self.memory
        self.memory = larger
