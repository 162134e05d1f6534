"""The sequences of a decode loop on a device, in tensors at fixed addresses that CUDA graphs read and write."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch
from hybrid.kernels.triton_decode import advance
from hybrid.sampling.sampler import PER_TOKEN
from hybrid.sampling.state import SamplingState, mark_seen

MAX_STEPS = 32  # that run before the host reads their tokens


class DecodeState:
    """A decode loop's batch, its logits and what is drawn, for up to `capacity` sequences of up to `tokens` tokens.

    BLOCK 0 OF THE CACHE IS RESERVED: padding sequences, which fill a batch up to a captured size, write there.

    ids: int64 [capacity], each sequence's next input.  positions: int32 [capacity], its position.
    lengths: int32 [capacity], tokens in the cache after it.  block_tables: int32 [capacity, blocks].
    state_slots: int32 [capacity], as PackedBatch's; -1 for sequences that have ended, and for padding, so that no
        state is written.  finished: int32 [capacity], 1 for these sequences.
    adapters: int32 [capacity], as PackedBatch's.
    steps: int32 [capacity], tokens recorded since `load_draws`.  tokens: int64 [MAX_STEPS, capacity].
    logps: float32 [4, MAX_STEPS, capacity]: sampling, old, raw, sampling mask.
    logits: [capacity, vocab_size], of the model's dtype: sampling reads them so.
    values: float32 [capacity, 6], as SamplingState's.
    """

    def __init__(self, capacity: int, tokens: int, vocab_size: int, dtype: torch.dtype, device: torch.device):
        self.capacity, self.vocab_size, self.device = capacity, vocab_size, device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids, self.keys, self.new_positions, self.limits = zeros(4, capacity).unbind()
        self.positions, self.lengths, self.finished, self.steps = zeros(4, capacity, dtype=torch.int32).unbind()
        self.state_slots, self.adapters = zeros(2, capacity, dtype=torch.int32).unbind()
        self.block_tables = zeros(capacity, -(-tokens // BLOCK_SIZE), dtype=torch.int32)
        self.cu_seqlens = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self.tokens = zeros(MAX_STEPS, capacity)
        self.logps = zeros(len(PER_TOKEN), MAX_STEPS, capacity, dtype=torch.float32)
        self.logits = zeros(capacity, vocab_size, dtype=dtype)
        self.values = zeros(capacity, 6, dtype=torch.float32)
        self.stop_token_ids: dict[int, torch.Tensor] = {}  # by their number
        self.seen: torch.Tensor | None = None  # uint8 [capacity, vocab + 1]; the last column is for no token

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (value for value in vars(self).values() if isinstance(value, torch.Tensor))
        return sum(tensor.nbytes for tensor in (*tensors, *self.stop_token_ids.values()))

    def batch(self, count: int) -> PackedBatch:
        """Return the step's batch of the first `count` sequences."""
        return PackedBatch(
            self.ids[:count],
            self.positions[:count],
            self.cu_seqlens[: count + 1],
            self.lengths[:count],
            self.block_tables[:count],
            self.state_slots[:count],
            self.adapters[:count],
        )

    def load(self, batch: PackedBatch, size: int) -> None:
        """Copy a batch of one new token for each sequence in; the sequences after it, up to `size`, are padding."""
        count, width = batch.block_tables.shape
        self.ids[:count].copy_(batch.ids)
        self.positions[:count].copy_(batch.positions)
        self.lengths[:count].copy_(batch.lengths)
        self.block_tables[:count, :width].copy_(batch.block_tables)
        if batch.state_slots is not None:
            self.state_slots[:count].copy_(batch.state_slots)
        if batch.adapters is not None:
            self.adapters[:count].copy_(batch.adapters)
        self._pad(count, size)

    def _pad(self, first: int, last: int) -> None:
        """Make the sequences from `first` to `last` (exclusive) padding: of length 1, in block 0."""
        if first == last:
            return
        for tensor in (self.ids, self.positions, self.block_tables):
            tensor[first:last].zero_()
        for tensor in (self.lengths, self.finished):
            tensor[first:last].fill_(1)
        self.state_slots[first:last].fill_(-1)

    def load_draws(self, sampling: SamplingState) -> None:
        """Copy in how the loaded sequences' tokens are sampled. None of them has ended, and nothing is recorded."""
        count = len(sampling.keys)
        self.keys[:count].copy_(sampling.keys)
        self.new_positions[:count].copy_(sampling.positions)
        self.limits[:count].copy_(sampling.limits)
        self.finished[:count].zero_()
        self.steps.zero_()
        self.tokens.fill_(sampling.pad_token_id)
        self.logps.zero_()
        self.values[:count].copy_(sampling.values)
        self.stop_ids(sampling).copy_(sampling.stop_token_ids)
        if sampling.token_ids is not None:
            if self.seen is None:
                self.seen = torch.zeros(self.capacity, self.vocab_size + 1, dtype=torch.uint8, device=self.device)
            self.seen.zero_()
            mark_seen(self.seen[:count], sampling.token_ids)

    def stop_ids(self, sampling: SamplingState) -> torch.Tensor:
        """Return the tensor of as many stop tokens as `draws` has, int64 [n]."""
        count = len(sampling.stop_token_ids)
        if count not in self.stop_token_ids:
            self.stop_token_ids[count] = sampling.stop_token_ids.clone()
        return self.stop_token_ids[count]

    def draw(self, sampling: SamplingState, count: int) -> None:
        """Sample a token for each of the first `count` sequences, record it, and make it the sequence's next input."""
        stop_token_ids = self.stop_ids(sampling)
        seen = None if sampling.token_ids is None else self.seen[:count]
        settings = self.keys[:count], self.new_positions[:count], self.values[:count], stop_token_ids
        drawn, *values = sampling.sample_in_kernels(
            self.logits[:count], *settings, None if seen is None else seen[:, :-1]
        )
        state = self.ids, self.positions, self.lengths, self.new_positions, self.limits, self.finished, self.steps
        ids, positions, lengths, new_positions, limits, finished, steps = (tensor[:count] for tensor in state)
        sequences = ids, positions, lengths, new_positions, limits, finished, steps
        recorded = stop_token_ids, self.tokens, self.logps
        advance(drawn, tuple(values), *sequences, *recorded, seen, self.state_slots[:count], self.block_tables[:count])

    @contextmanager
    def padding(self, count: int) -> Iterator[None]:
        """Inside the block the first `count` sequences are padding: captured steps write block 0, and draw nothing."""
        held = self.ids, self.positions, self.lengths, self.block_tables, self.state_slots, self.finished
        before = [tensor[:count].clone() for tensor in held]
        self._pad(0, count)
        try:
            yield
        finally:
            for tensor, saved in zip(held, before, strict=True):
                tensor[:count].copy_(saved)
