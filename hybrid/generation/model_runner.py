"""The model runner: prompts packed into blocks, then one token for each row per step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV, packed, table_of
from hybrid.generation.block_pool import BlockPool, blocks_for

PREFILL_TOKENS = 2048  # prompt tokens in one forward; bounds the memory of activations


class Decoder(Protocol):
    """The interface that generation needs of a decoder. `hybrid.decoders` implements it for each device."""

    device: torch.device

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks."""

    def reserve(self, tokens: int) -> None:
        """Prepare for sequences of up to `tokens` tokens, such as by building rope tables of that many positions."""

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output.  [tokens, hidden]"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocab]"""

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence.  float32 [sequences, vocab]"""


@dataclass(frozen=True)
class Piece:
    """A part of a sequence in a forward.

    sequence: the sequence's index.  begin, stop: positions in it.  row: index of the piece's first token in the
        forward.
    """

    sequence: int
    begin: int
    stop: int
    row: int


def hidden_states(
    decoder: Decoder, block_pool: BlockPool, sequences: list[torch.Tensor], blocks: list[list[int]]
) -> Iterator[tuple[list[Piece], torch.Tensor]]:
    """Run sequences, int64 [n] each, through the layers and write their keys and values to their blocks.

    Yields the pieces and the last layer's output [tokens, hidden] of each forward. Sequences are packed without
    padding, PREFILL_TOKENS in a forward; a sequence that does not fit is split.
    """
    for pieces in forwards([len(sequence) for sequence in sequences]):
        ids = [sequences[piece.sequence][piece.begin : piece.stop] for piece in pieces]
        block_tables = [blocks[piece.sequence] for piece in pieces]
        yield (
            pieces,
            decoder.forward(
                packed(ids, [piece.begin for piece in pieces], block_tables, decoder.device), block_pool.kv
            ),
        )


def prefill(
    decoder: Decoder, block_pool: BlockPool, prompts: list[torch.Tensor]
) -> tuple[list[list[int]], torch.Tensor]:
    """Write the keys and values of prompts, int64 [n] each, to newly allocated blocks.

    Returns each prompt's blocks, and the logits after its last token, float32 [prompts, vocab].
    """
    blocks = [block_pool.allocate(blocks_for(len(prompt))) for prompt in prompts]
    found = []
    for pieces, hidden in hidden_states(decoder, block_pool, prompts, blocks):
        ends = [p.row + p.stop - p.begin - 1 for p in pieces if p.stop == len(prompts[p.sequence])]
        if ends:
            found.append(decoder.logits(hidden[torch.tensor(ends, device=decoder.device)]))
    return blocks, torch.cat(found)


def forwards(lengths: list[int]) -> list[list[Piece]]:
    """Split sequences of the given lengths over forwards of at most PREFILL_TOKENS tokens."""
    found: list[list[Piece]] = []
    used = PREFILL_TOKENS
    for sequence, length in enumerate(lengths):
        begin = 0
        while begin < length:
            if used == PREFILL_TOKENS:
                found.append([])
                used = 0
            stop = min(begin + PREFILL_TOKENS - used, length)
            found[-1].append(Piece(sequence, begin, stop, used))
            begin, used = stop, used + stop - begin
    return found


class ModelRunner:
    """The rows that are being decoded: a token for each at every step. A row's index changes when earlier rows leave.

    longest: the most tokens that a row may have.
    """

    def __init__(self, decoder: Decoder, block_pool: BlockPool, longest: int):
        self.decoder, self.block_pool, self.device = decoder, block_pool, decoder.device
        self.blocks: list[list[int]] = []
        self.lengths = torch.zeros(0, dtype=torch.int32, device=self.device)  # tokens in the cache, by row
        self.steps = 0
        self.before: list[int] = []  # by row: tokens in the cache minus `steps`
        self.room = 0  # tokens that every row can still append without another block
        self.table = BlockTables(blocks_for(longest), self.device)

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, blocks: list[list[int]], lengths: list[int]) -> None:
        """Append rows with these blocks, which hold `lengths` tokens each. The runner takes over the references."""
        self.table.add(blocks)
        self.blocks += blocks
        self.before += [length - self.steps for length in lengths]
        more = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.lengths = torch.cat([self.lengths, more])
        self._look()

    def make_room(self, tokens: int) -> None:
        """Allocate blocks so that every row has room for `tokens` more."""
        if self.room >= tokens:
            return
        entries = []
        for row, (blocks, before) in enumerate(zip(self.blocks, self.before, strict=True)):
            missing = blocks_for(before + self.steps + tokens) - len(blocks)
            if missing > 0:
                more = self.block_pool.allocate(missing)
                entries += ((row, column, block) for column, block in enumerate(more, len(blocks)))
                blocks += more
        self.table.write(entries)
        self._look()

    def _look(self) -> None:
        """Update `room` and `cu_seqlens` after the rows or their blocks have changed."""
        spare = (len(own) * BLOCK_SIZE - before for own, before in zip(self.blocks, self.before, strict=True))
        self.room = min(spare, default=0) - self.steps
        self.cu_seqlens = torch.arange(len(self) + 1, dtype=torch.int32, device=self.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token, int64 [rows], to each row; returns the logits after it, float32 [rows, vocab]."""
        positions, self.lengths = self.lengths, self.lengths + 1
        self.steps += 1
        self.room -= 1
        batch = PackedBatch(tokens, positions, self.cu_seqlens, self.lengths, self.table.rows())
        return self.decoder.decode(batch, self.block_pool.kv)

    def leave(self, stay: torch.Tensor) -> None:
        """Remove the rows where `stay`, bool [rows], is False, and give back their blocks."""
        staying = stay.tolist()
        for kept, blocks in zip(staying, self.blocks, strict=True):
            if not kept:
                self.block_pool.free(blocks)
        self.blocks = [blocks for kept, blocks in zip(staying, self.blocks, strict=True) if kept]
        self.before = [before for kept, before in zip(staying, self.before, strict=True) if kept]
        self.lengths = self.lengths[stay]
        self.table.keep(stay)
        self._look()


class BlockTables:
    """The rows' block tables on the device, updated in place: a step writes only the blocks that it adds.

    most: the most blocks that a row may have.
    """

    def __init__(self, most: int, device: torch.device):
        self.count, self.most = 0, most
        self.memory = torch.zeros(0, 0, dtype=torch.int32, device=device)  # [rows, blocks], unused entries undefined

    def rows(self) -> torch.Tensor:
        """The block tables, int32 [rows, blocks], contiguous. Entries after a row's last block are undefined."""
        return self.memory[: self.count]

    def add(self, blocks: list[list[int]]) -> None:
        """Append rows with these blocks."""
        self._make_room(self.count + len(blocks), max(map(len, blocks), default=0))
        first, self.count = self.count, self.count + len(blocks)
        own = table_of(blocks, self.memory.device)
        self.memory[first : self.count, : own.shape[1]] = own

    def write(self, entries: list[tuple[int, int, int]]) -> None:
        """Write entries, (row, column, block) each."""
        if not entries:
            return
        rows, columns, blocks = zip(*entries, strict=True)
        self._make_room(self.count, max(columns) + 1)
        at = torch.tensor([rows, columns], device=self.memory.device)
        self.memory[at[0], at[1]] = torch.tensor(blocks, dtype=torch.int32, device=self.memory.device)

    def keep(self, stay: torch.Tensor) -> None:
        """Keep the rows where `stay`, bool [rows], is True; they move up."""
        kept = self.rows()[stay]
        self.count = len(kept)
        self.memory[: self.count] = kept

    def _make_room(self, rows: int, blocks: int) -> None:
        """Grow the memory, by doubling, to at least [rows, blocks]."""
        height, width = self.memory.shape
        if rows <= height and blocks <= width:
            return
        assert blocks <= self.most, f"{blocks} blocks in a row of at most {self.most}"
        larger = self.memory.new_zeros(
            height if rows <= height else max(rows, 2 * height),
            width if blocks <= width else max(blocks, min(2 * width, self.most)),
        )
        larger[:height, :width] = self.memory
        self.memory = larger
