"""The model runner: prompts packed into blocks, then one token for each row per step."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from hybrid.decoders.batch import (
    BLOCK_SIZE,
    NO_ADAPTER,
    LayerActivations,
    PackedBatch,
    on_device,
    packed_on_host,
    table_of,
    uploaded,
)
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.drafts import Drafting, VerifiedTokens, verify_steps
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.decoders.self_check import checked_lengths
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.recurrent_prefixes import shared_prefixes
from hybrid.generation.sequence import Sequence
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.sampling.state import SamplingState

COPIED_STATES = 8  # slots for copies of recurrent states, in addition to those of rows that have ended
LOGIT_ROWS = 256  # tokens whose logits are in memory at once while sequences are scored


def hidden_states(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: list[torch.Tensor],
    blocks: list[list[int]],
    begins: list[int],
    activations_of: Callable[[dict[int, range]], LayerActivations] | None = None,
    state_slots: list[int] | None = None,
    adapters: list[int] | None = None,
) -> Iterator[tuple[dict[int, range], torch.Tensor]]:
    """Run sequences, int64 [n] each on the host, through the layers and write their keys and values to their blocks.

    begins: how many tokens of each sequence its blocks already hold.
    activations_of: returns the memory that a forward of these chunks writes its layers' inputs to; None: they are not
        kept.
    state_slots: of each sequence; None: the model has no recurrent layers.
    adapters: the number of each sequence's, as `PackedBatch.adapters`; None: all have the active ones.
    Yields `prefill_chunks` and the last layer's output [tokens, hidden] of each forward.
    """
    forwards = prefill_chunks(begins, [len(sequence) for sequence in sequences], decoder.prefill_tokens)
    batches = []
    for chunks in forwards:
        ids = [sequences[index][chunk.start : chunk.stop] for index, chunk in chunks.items()]
        starts, tables = [chunk.start for chunk in chunks.values()], [blocks[index] for index in chunks]
        slots = None if state_slots is None else [state_slots[index] for index in chunks]
        numbers = None if adapters is None else [adapters[index] for index in chunks]
        batches.append(packed_on_host(ids, starts, tables, slots, numbers))
    for chunks, batch in zip(forwards, uploaded(batches, decoder.device), strict=True):
        INTERRUPTS.raise_pending()
        more = {} if activations_of is None else {"activations": activations_of(chunks)}
        yield chunks, decoder.forward(batch, block_pool.kv, **more)


def prefill(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    prompts: list[torch.Tensor],
    adapters: list[int] | None = None,
) -> tuple[list[list[int]], list[int], torch.Tensor]:
    """Write the keys and values of distinct prompts, int64 [n] each, to blocks. What the pool has of them is not
    computed again, and what several of them begin with is computed once.

    adapters: of each prompt, as for `hidden_states`.
    Returns each prompt's blocks, the slot of its recurrent states, and the logits after its last token, float32
        [prompts, vocab].
    """
    state_slots = [0] * len(prompts)
    blocks: list[list[int]] = [[] for _ in prompts]
    logits: dict[int, torch.Tensor] = {}
    prompts = [prompt.cpu() for prompt in prompts]
    own = [NO_ADAPTER] * len(prompts) if adapters is None else adapters
    if not block_pool.shares_prefixes:
        keep_shared_states(decoder, block_pool, prompts, adapters)
    for wave in prefill_waves(block_pool, prompts, own):
        begins = []
        resumed = [] if block_pool.shares_prefixes else block_pool.resume(prompts, own)  # all in one wave
        for index in wave:
            if resumed:
                blocks[index], begin, state_slots[index] = resumed[index]
            else:
                blocks[index], begin = block_pool.reuse(prompts[index], adapter=own[index])
            blocks[index] += block_pool.allocate(blocks_for(len(prompts[index])) - len(blocks[index]))
            begins.append(begin)
        ids, tables = [prompts[index] for index in wave], [blocks[index] for index in wave]
        slots = None if block_pool.shares_prefixes else [state_slots[index] for index in wave]
        numbers = None if adapters is None else [adapters[index] for index in wave]
        for chunks, hidden in hidden_states(decoder, block_pool, ids, tables, begins, None, slots, numbers):
            ends = zip(chunks.items(), accumulate(map(len, chunks.values())), strict=True)
            last = {wave[index]: end - 1 for (index, chunk), end in ends if chunk.stop == len(ids[index])}
            if last:
                (ends_of_prompts,) = on_device([torch.tensor(list(last.values()))], decoder.device)
                logits.update(zip(last, decoder.logits(hidden[ends_of_prompts]), strict=True))
        for index in wave:
            full = len(prompts[index]) // BLOCK_SIZE
            block_pool.insert(prompts[index][: full * BLOCK_SIZE], blocks[index][:full], own[index])
    return blocks, state_slots, torch.stack([logits[index] for index in range(len(prompts))])


def keep_shared_states(
    decoder: AnyDecoder, block_pool: BlockPool, prompts: list[torch.Tensor], adapters: list[int] | None
) -> None:
    """Compute what several prompts begin with, of a model with recurrent layers, and keep its blocks and states, from
    which `prefill` continues. The arguments are `prefill`'s."""
    own = [NO_ADAPTER] * len(prompts) if adapters is None else adapters
    for wave in shared_prefixes(block_pool, prompts, own):
        of_wave, prefixes = [adapter for adapter, _ in wave], [token_ids for _, token_ids in wave]
        resumed = block_pool.resume(prefixes, of_wave)
        begins, slots = [begin for _, begin, _ in resumed], [slot for *_, slot in resumed]
        blocks = [
            known + block_pool.allocate(blocks_for(len(token_ids)) - len(known))
            for token_ids, (known, *_) in zip(prefixes, resumed, strict=True)
        ]
        numbers = None if adapters is None else of_wave
        for _ in hidden_states(decoder, block_pool, prefixes, blocks, begins, None, slots, numbers):
            pass  # its logits are not needed
        block_pool.reused_tokens -= sum(map(len, prefixes))  # the prompts count them, of which one has computed them
        for token_ids, held, slot, adapter in zip(prefixes, blocks, slots, of_wave, strict=True):
            if not block_pool.keep_state(token_ids, held, slot, adapter, is_shared=True):
                block_pool.free_states([slot])
            block_pool.free(held)


def prefill_waves(block_pool: BlockPool, prompts: list[torch.Tensor], adapters: list[int]) -> Iterator[list[int]]:
    """Yield indices of prompts, int64 [n] on the host, to compute together: in one wave no two share a block that is
    not computed yet. The caller computes and inserts a wave's blocks before it asks for the next one.

    adapters: of each prompt, as for `BlockPool.insert`.
    """
    waiting = list(range(len(prompts)))
    while waiting:
        prefixes: set[tuple[int, bytes]] = set()
        wave: list[int] = []
        later: list[int] = []
        for index in waiting:
            prefix = block_pool.first_new_block(prompts[index], adapters[index])
            (later if prefix in prefixes else wave).append(index)
            if prefix is not None:
                prefixes.add(prefix)
        yield wave
        waiting = later


def prefill_chunks(begins: list[int], lengths: list[int], max_tokens: int) -> list[dict[int, range]]:
    """Split sequences of the given lengths, from `begins` on, over forwards of at most `max_tokens` tokens.

    Returns for each forward the positions that it computes, by index of the sequence, whose tokens it has in this
    order, without padding. A sequence that does not fit is split.
    """
    forwards: list[dict[int, range]] = []
    used = max_tokens
    for sequence, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        while begin < length:
            if used == max_tokens:
                forwards.append({})
                used = 0
            stop = min(begin + max_tokens - used, length)
            forwards[-1][sequence] = range(begin, stop)
            begin, used = stop, used + stop - begin
    return forwards


class RunningSequences:
    """The running sequences, in the order of `sequences`, and their columns.

    rows: int64 [n], of the request.
    positions: int64 [n], the position of each next new token in its completion.
    latest_tokens: int64 [n].
    steps: tokens that have been appended to every sequence.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.sequences: list[Sequence] = []
        self.rows, self.positions, self.latest_tokens = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self.steps = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def append_columns(self, sequences: list[Sequence]) -> None:
        """Append sequences whose next tokens follow their completions' `length`."""
        self.sequences = self.sequences + sequences
        new = torch.tensor([(each.row, each.length, 0) for each in sequences])
        more = on_device([new], self.device)[0].unbind(1)
        columns = self.rows, self.positions, self.latest_tokens
        self.rows, self.positions, self.latest_tokens = (torch.cat(pair) for pair in zip(columns, more, strict=True))

    def keep_columns(self, keep: list[int], kept: torch.Tensor) -> None:
        """Remove all sequences but those with the indices `keep`, ascending; `kept` has them on the device."""
        self.sequences = [self.sequences[index] for index in keep]
        columns = self.rows, self.positions, self.latest_tokens
        self.rows, self.positions, self.latest_tokens = (column[kept] for column in columns)


class ModelRunner(RunningSequences):
    """Sequences over blocks: a token for each at every step.

    longest: the most tokens that a sequence may have.

    lengths: int32 [n], tokens in the cache.
    """

    def __init__(self, decoder: AnyDecoder, block_pool: BlockPool, longest: int):
        super().__init__(decoder.device)
        self.decoder, self.block_pool = decoder, block_pool
        self.lengths = torch.zeros(0, dtype=torch.int32, device=self.device)
        self.offsets: list[int] = []  # of each sequence: tokens in the cache minus `steps`
        self.state_slots: Any = None  # int32 [n]; None without recurrent layers
        self.adapters: Any = None  # int32 [n], as `PackedBatch.adapters`; None: all sequences have the same
        self.max_steps = 0  # the value of `steps` up to which no sequence needs another block
        self.max_blocks = blocks_for(longest)  # of a sequence
        # int32 [rows, blocks], contiguous; the first `len(self)` rows are in use. Entries after a row's last block are
        # undefined. Updated in place: a step writes only the blocks that it adds.
        self.block_tables = torch.zeros(0, 0, dtype=torch.int32, device=self.device)

    def add(self, sequences: list[Sequence], lengths: list[int]) -> None:
        """Append sequences whose blocks hold `lengths` tokens each, and whose next tokens follow their completions'
        `length`. The runner takes over the references to the blocks."""
        first, stop = len(self), len(self) + len(sequences)
        (tables,) = on_device([table_of([sequence.blocks for sequence in sequences])], self.device)
        self._grow_tables(stop, tables.shape[1])
        self.block_tables[first:stop, : tables.shape[1]] = tables
        self.offsets += [length - self.steps for length in lengths]
        (cached,) = on_device([torch.tensor(lengths, dtype=torch.int32)], self.device)
        self.lengths = torch.cat([self.lengths, cached])
        self.append_columns(sequences)
        self._update()

    def tokens_in_cache(self) -> dict[int, int]:
        """Return the tokens that have been run through the layers, by row."""
        return {each.row: offset + self.steps for each, offset in zip(self.sequences, self.offsets, strict=True)}

    def allocate_slots(self, tokens: int) -> None:
        """Allocate blocks so that every sequence has room for `tokens` more, or has its `max_blocks`."""
        if self.steps + tokens <= self.max_steps:
            return
        entries: list[tuple[int, int, int]] = []
        for row, (sequence, offset) in enumerate(zip(self.sequences, self.offsets, strict=True)):
            needed, blocks = blocks_for(offset + self.steps + tokens), sequence.blocks
            missing = min(needed, sequence.max_blocks) - len(blocks)
            if missing > 0:
                more = self.block_pool.allocate(missing)
                entries += ((row, column, block) for column, block in enumerate(more, len(blocks)))
                blocks += more
        if entries:
            self._write_tables(entries)
        self._update()

    def _update(self) -> None:
        """Update `max_steps` and `cu_seqlens` after the rows or their blocks have changed."""
        pairs = zip(self.sequences, self.offsets, strict=True)
        self.max_steps = min((len(sequence.blocks) * BLOCK_SIZE - offset for sequence, offset in pairs), default=0)
        self.cu_seqlens = torch.arange(len(self) + 1, dtype=torch.int32, device=self.device)
        if not self.block_pool.shares_prefixes:
            slots = [sequence.state_slot for sequence in self.sequences]
            (self.state_slots,) = on_device([torch.tensor(slots, dtype=torch.int32)], self.device)
        if self.decoder.mixed_adapters:
            numbers = [sequence.adapter for sequence in self.sequences]
            (self.adapters,) = on_device([torch.tensor(numbers, dtype=torch.int32)], self.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token, int64 [rows], to each row; returns the logits after it, float32 [rows, vocab]."""
        batch = self._batch(tokens)
        self.lengths, self.steps = batch.lengths, self.steps + 1
        return self.decoder.decode(batch, self.block_pool.kv)

    def sampled_steps(
        self, tokens: torch.Tensor, sampling: SamplingState, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, int64 [rows], sample the next ones, append these, and so on, up to `steps` times. The decoder
        must have `samples_in_kernel`.

        Returns the sampled tokens, int64 [steps done, rows], and their logprobs, float32 [4, steps done, rows].
        """
        steps_of: Any = self.decoder  # one with `samples_in_kernel`
        drawn, logps = steps_of.decode_steps(self._batch(tokens), self.block_pool.kv, sampling, steps)
        self.lengths, self.steps = self.lengths + len(drawn), self.steps + len(drawn)
        return drawn, logps

    @property
    def may_verify(self) -> bool:
        """Whether steps may verify drafts: each row's recurrent states need a second slot."""
        return self.block_pool.shares_prefixes or 2 * len(self) < self.block_pool.call_slots

    def verified_steps(
        self, tokens: torch.Tensor, sampling: SamplingState, drafting: Drafting, steps: int
    ) -> VerifiedTokens:
        """Append tokens, int64 [rows], and drafts, keep those that are drawn, and so on, up to `steps` times. Rows get
        different numbers of tokens."""
        self.allocate_slots(steps * (1 + drafting.max_length))
        pool, spare_slots = self.block_pool, self.block_pool.allocate_states(len(self))
        verified = verify_steps(self.decoder, self._batch(tokens), pool.kv, sampling, drafting, steps, spare_slots)
        pool.free_states(spare_slots)
        self.lengths = self.lengths + torch.tensor(verified.counts, dtype=torch.int32, device=self.device)
        self.steps += verified.steps
        pairs = zip(self.offsets, verified.counts, strict=True)
        self.offsets = [offset + count - verified.steps for offset, count in pairs]
        self._update()
        return verified

    def _batch(self, tokens: torch.Tensor) -> PackedBatch:
        """Return the batch that appends a token to each row."""
        tables, lengths = self.block_tables[: len(self)], self.lengths + 1
        return PackedBatch(tokens, self.lengths, self.cu_seqlens, lengths, tables, self.state_slots, self.adapters)

    def remove_finished(self, keep: list[int]) -> None:
        """Remove all sequences but those with the indices `keep`, ascending, and free their blocks."""
        ended = [self.sequences[index] for index in sorted(set(range(len(self))) - set(keep))]
        for sequence in ended:
            self.block_pool.free(sequence.blocks)
            sequence.blocks = []
        if self.state_slots is not None:
            self.block_pool.free_states([sequence.state_slot for sequence in ended])
        self.offsets = [self.offsets[index] for index in keep]
        (kept,) = on_device([torch.tensor(keep, dtype=torch.int64)], self.device)
        self.block_tables[: len(keep)] = self.block_tables[: len(self)][kept]
        self.keep_columns(keep, kept)
        self.lengths = self.lengths[kept]
        self._update()

    def _write_tables(self, entries: list[tuple[int, int, int]]) -> None:
        """Write entries of the block tables, (row, column, block) each."""
        rows, columns, blocks = zip(*entries, strict=True)
        self._grow_tables(len(self), max(columns) + 1)
        written = torch.tensor([rows, columns]), torch.tensor(blocks, dtype=torch.int32)
        at, values = on_device(written, self.device)
        self.block_tables[at[0], at[1]] = values

    def _grow_tables(self, rows: int, blocks: int) -> None:
        """Grow the block tables, by doubling, to at least [rows, blocks]."""
        height, width = self.block_tables.shape
        if rows <= height and blocks <= width:
            return
        assert blocks <= self.max_blocks, f"{blocks} blocks in a row of at most {self.max_blocks}"
        larger = self.block_tables.new_zeros(
            height if rows <= height else max(rows, 2 * height),
            width if blocks <= width else max(blocks, min(2 * width, self.max_blocks)),
        )
        larger[:height, :width] = self.block_tables
        self.block_tables = larger


# Memory of forward passes


def reserve_memory(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    num_seqs: int,
    num_blocks: int,
    longest: int,
    decodes: bool = True,
    verifies: bool = False,
) -> None:
    """Reserve a call's blocks and recurrent states. If free memory does not hold all blocks and what forward passes
    need, the pool's limit is lowered: rows wait for others' blocks.

    num_seqs, num_blocks: the most at once.  longest: tokens of the longest sequence.  decodes: as for `forward_bytes`.
    verifies: as for `state_slots`.
    """
    forwards = partial(forward_bytes, decoder, num_seqs, longest, decodes)
    if not block_pool.shares_prefixes:
        block_pool.reserve_states(state_slots(num_seqs, verifies), num_blocks, forwards)
    block_pool.reserve_call(num_blocks, forwards, blocks_for(longest))
    if decoder.group is not None:
        block_pool.agree_on_call(decoder.group.gather, decoder.device)


def state_slots(num_seqs: int, verifies: bool) -> int:
    """Return the slots of recurrent states of `num_seqs` sequences at once: theirs, a waiting group's, and copies if
    their steps may verify drafts."""
    return num_seqs + 1 + (min(num_seqs, COPIED_STATES) if verifies else 0)


def forward_bytes(decoder: AnyDecoder, rows: int, tokens: int, decodes: bool = True) -> int:
    """Return the bytes that a decoder's forward passes need: logits, activations and CUDA graphs.

    rows: decoded or scored in one batch, those of other ranks included.  tokens: of each.  decodes: False: rows are
        scored alone.
    """
    whole = decoder.inner if isinstance(decoder, StreamedDecoder) else decoder
    vocabulary = decoder.vocabulary  # a rank's slice
    num_logits = decoder.spec.vocab_size if vocabulary is None else vocabulary.width
    logits = logit_rows(whole, max(rows, 1), tokens, decodes) * num_logits * 4
    graphs = whole.loop_bytes(rows, tokens) if rows and decodes and whole is decoder else 0
    return logits + activation_bytes(decoder, rows, tokens) + graphs


def activation_bytes(decoder: AnyDecoder, rows: int, tokens: int) -> int:
    """Return the bytes of activations; the arguments are `forward_bytes`'s. The self-check's are among them."""
    whole = decoder.inner if isinstance(decoder, StreamedDecoder) else decoder
    return whole.activation_bytes(max(min(rows * tokens, decoder.prefill_tokens), sum(checked_lengths(whole))))


def logit_rows(decoder: WholeDecoder | None, rows: int, tokens: int, decodes: bool = True) -> int:
    """Return the rows of logits that exist at once, temporaries counted: in a decode step (`rows` sequences), if the
    call decodes, or in scoring.

    Kernels sample and score without a copy, torch's operations make temporaries of the same size. The head makes one
    more on a GPU, where its logits are converted to float32, and so do the most probable tokens of scored prompts.
    """
    for_decoding = 3 if decoder is not None and decoder.samples_in_kernel else 5
    for_scoring = 1 if isinstance(decoder, CpuDecoder) else for_decoding
    return max(for_decoding * rows * decodes, for_scoring * min(rows * tokens, LOGIT_ROWS))
