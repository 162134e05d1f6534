"""Block tables, updated in place: correct as rows grow and finish, with only new blocks written."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from hybrid.decoders import batch
from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.generation import model_runner as rows
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import ModelRunner, hidden_states
from hybrid.generation.sequence import Sequence


class TableReader:
    """A decoder that stores its last batch."""

    device = torch.device("cpu")
    mixed_adapters = ()

    def kv(self, num_blocks: int) -> PagedKV:
        return PagedKV([torch.zeros(num_blocks, 1)], [torch.zeros(num_blocks, 1)])

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.batch = batch
        return torch.zeros(len(batch.ids), 3)


def runner_of(lengths: list[int], longest: int) -> tuple[ModelRunner, TableReader, BlockPool]:
    decoder, block_pool = TableReader(), BlockPool(BLOCK_SIZE)
    block_pool.begin_call(decoder.kv)
    block_pool.reserve_call(len(lengths) * blocks_for(longest))
    made = ModelRunner(decoder, block_pool, longest)
    made.add([Sequence(blocks=block_pool.allocate(blocks_for(length))) for length in lengths], lengths)
    return made, decoder, block_pool


def require_block_table(runner: ModelRunner, decoder: TableReader, lengths: list[int]) -> None:
    """The decoder's block table equals the rows' lists of blocks, which have room for every token."""
    block_tables = decoder.batch.block_tables
    assert block_tables.is_contiguous()
    assert block_tables.dtype == torch.int32
    assert decoder.batch.lengths.tolist() == lengths
    for table, blocks, length in zip(
        block_tables.tolist(), [own.blocks for own in runner.sequences], lengths, strict=True
    ):
        assert table[: len(blocks)] == blocks
        assert len(blocks) * BLOCK_SIZE >= length
    assert len({block for own in runner.sequences for block in own.blocks}) == sum(
        len(own.blocks) for own in runner.sequences
    )


@pytest.mark.parametrize("stride", [1, 3])
def test_block_tables_list_each_rows_blocks(stride):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (9,), generator=generator).tolist()
    made, decoder, block_pool = runner_of(lengths, 1000)
    for turn in range(60):
        made.allocate_slots(stride)
        for _ in range(stride):
            made.step(torch.zeros(len(made), dtype=torch.int64))
            lengths = [length + 1 for length in lengths]
            require_block_table(made, decoder, lengths)
        if turn % 7 == 3:
            stay = (torch.rand(len(lengths), generator=generator) > 0.3).nonzero().flatten().tolist()
            made.remove_finished(keep=stay)
            lengths = [lengths[row] for row in stay]
            more = torch.randint(1, 200, (3,), generator=generator).tolist()
            made.add([Sequence(blocks=block_pool.allocate(blocks_for(length))) for length in more], more)
            lengths += more


def test_a_step_writes_only_new_blocks_to_the_table(monkeypatch):
    """256 rows of up to 32k tokens at different offsets in their blocks: a step does not rebuild the table."""
    lengths = [31_000 + row for row in range(256)]
    runner, _, _ = runner_of(lengths, 32_768)
    monkeypatch.setattr(rows, "table_of", lambda *_: pytest.fail("the whole table was rebuilt"))
    written = []
    write = ModelRunner._write_tables
    monkeypatch.setattr(
        ModelRunner, "_write_tables", lambda self, entries: (written.append(len(entries)), write(self, entries))
    )
    memory = runner.block_tables.data_ptr()
    tokens = torch.zeros(256, dtype=torch.int64)
    for _ in range(BLOCK_SIZE):
        runner.allocate_slots(1)
        runner.step(tokens)
    assert sum(written) == 256, "a row crosses the end of a block once in BLOCK_SIZE steps"
    assert len(written) == BLOCK_SIZE, "a step wrote no block"
    assert runner.block_tables.data_ptr() != memory, "the table had its largest width from the start"
    memory = runner.block_tables.data_ptr()
    for _ in range(BLOCK_SIZE):
        runner.allocate_slots(1)
        runner.step(tokens)
    assert runner.block_tables.data_ptr() == memory


class Pinned(torch.Tensor):
    """Pinned memory of a machine with a device: its copies to the device are recorded."""

    copies: ClassVar[list[tuple[object, bool]]] = []

    def to(self, device, non_blocking=False):
        self.copies.append((device, non_blocking))
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("with_states", [False, True])
def test_all_chunks_of_a_prefill_are_uploaded_by_one_copy_that_the_host_does_not_wait_for(with_states, monkeypatch):
    """A fake device gets the same batches as a CPU decoder."""
    monkeypatch.setattr(Pinned, "copies", [])
    monkeypatch.setattr(batch, "pinned_bytes", lambda count: torch.zeros(count, dtype=torch.uint8).as_subclass(Pinned))
    pool, of_devices = BlockPool(BLOCK_SIZE), []
    generator = torch.Generator().manual_seed(0)
    lengths = (70, 3, 41)
    sequences = [torch.randint(100, (length,), generator=generator) for length in lengths]
    blocks = [[5, 9, 2], [1], [7, 3]]
    for device in (SimpleNamespace(type="cuda"), torch.device("cpu")):
        batches = []
        forward = lambda batch, kv: batches.append(batch)  # noqa: B023, E731
        decoder = SimpleNamespace(device=device, prefill_tokens=24, forward=forward)
        slots = [2, 0, 1] if with_states else None
        list(hidden_states(decoder, pool, sequences, blocks, [32, 0, 7], state_slots=slots))
        of_devices.append(batches)
        assert len(Pinned.copies) == 1 and Pinned.copies[0][1]
    assert len(of_devices[0]) == len(of_devices[1]) == 4
    for uploaded, expected in zip(*of_devices, strict=True):
        for name, tensor in vars(expected).items():
            actual = getattr(uploaded, name)
            assert (actual is None) == (tensor is None)
            if tensor is not None:
                assert actual.dtype == tensor.dtype and torch.equal(actual, tensor), name
                assert actual.data_ptr() % 16 == 0, "Triton would compile again"
