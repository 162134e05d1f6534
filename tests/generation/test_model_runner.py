"""Block tables that are written in place: what rows hold, however they grow and leave; and how little is written."""

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.generation import model_runner as rows
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import BlockTables, ModelRunner


class TableReader:
    """A decoder that keeps the last batch that it was given."""

    device = torch.device("cpu")

    def kv(self, num_blocks: int) -> PagedKV:
        return PagedKV([torch.zeros(num_blocks, 1)], [torch.zeros(num_blocks, 1)])

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.batch = batch
        return torch.zeros(len(batch.ids), 3)


def rows_of(lengths: list[int], longest: int) -> tuple[ModelRunner, TableReader, BlockPool]:
    decoder, block_pool = TableReader(), BlockPool(BLOCK_SIZE)
    block_pool.begin_call(decoder.kv)
    block_pool.reserve_call(len(lengths) * blocks_for(longest))
    made = ModelRunner(decoder, block_pool, longest)
    made.add([block_pool.allocate(blocks_for(length)) for length in lengths], lengths)
    return made, decoder, block_pool


def require_table(made: ModelRunner, decoder: TableReader, lengths: list[int]) -> None:
    """The table that the decoder was given is the lists of blocks, with room for every token."""
    block_tables = decoder.batch.block_tables
    assert block_tables.is_contiguous()
    assert block_tables.dtype == torch.int32
    assert decoder.batch.lengths.tolist() == lengths
    for table, own, length in zip(block_tables.tolist(), made.blocks, lengths, strict=True):
        assert table[: len(own)] == own
        assert len(own) * BLOCK_SIZE >= length
    assert len({block for own in made.blocks for block in own}) == sum(map(len, made.blocks))


@pytest.mark.parametrize("stride", [1, 3])
def test_tables_are_the_rows_blocks(stride):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (9,), generator=generator).tolist()
    made, decoder, block_pool = rows_of(lengths, 1000)
    for turn in range(60):
        made.make_room(stride)
        for _ in range(stride):
            made.step(torch.zeros(len(made), dtype=torch.int64))
            lengths = [length + 1 for length in lengths]
            require_table(made, decoder, lengths)
        if turn % 7 == 3:
            stay = torch.rand(len(lengths), generator=generator) > 0.3
            made.leave(stay)
            lengths = [length for length, kept in zip(lengths, stay.tolist(), strict=True) if kept]
            more = torch.randint(1, 200, (3,), generator=generator).tolist()
            made.add([block_pool.allocate(blocks_for(length)) for length in more], more)
            lengths += more


def test_a_step_writes_the_blocks_that_it_adds(monkeypatch):
    """256 rows of up to 32k tokens at different places of their blocks: a table is not made again for a step."""
    lengths = [31_000 + row for row in range(256)]
    made, _, _ = rows_of(lengths, 32_768)
    monkeypatch.setattr(rows, "table_of", lambda *_: pytest.fail("the whole table was made"))
    written = []
    write = BlockTables.write
    monkeypatch.setattr(
        BlockTables, "write", lambda self, entries: (written.append(len(entries)), write(self, entries))
    )
    memory = made.table.memory.data_ptr()
    tokens = torch.zeros(256, dtype=torch.int64)
    for _ in range(BLOCK_SIZE):
        made.make_room(1)
        made.step(tokens)
    assert sum(written) == 256, "a row crosses the end of a block once in BLOCK_SIZE steps"
    assert len(written) == BLOCK_SIZE, "some row does at every step"
    assert made.table.memory.data_ptr() != memory, "the table was as wide as could be from the start"
    memory = made.table.memory.data_ptr()
    for _ in range(BLOCK_SIZE):
        made.make_room(1)
        made.step(tokens)
    assert made.table.memory.data_ptr() == memory
