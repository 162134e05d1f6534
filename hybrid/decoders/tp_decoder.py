"""Inference tensor parallelism: a decoder sharded over a group of ranks, which runs all ranks' batches as one."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.decoders.bound_weights import BoundWeights
from hybrid.decoders.shared_decoder import SharedDecoder
from hybrid.decoders.torch_decoder import Copies, Step, TorchDecoder
from hybrid.kernels import torch_ops
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.parallel import InferenceGroup
from hybrid.weights.slices import Shard, shard_spec


class ShardedDecoder(TorchDecoder):
    """TorchDecoder over a rank's slices of the weights. Its functions are collectives: every rank calls them with the
    same tokens, and gets the same hidden states and logits.

    weights: this rank's slices.
    group: the calling ranks. Heads, matrices and vocabulary are sharded over `group.tensor`, experts over all of it.
    """

    def __init__(self, layout: DecoderLayout, weights: BoundWeights, group: InferenceGroup, copies: Copies | None):
        self.group, self.tensor = group, group.tensor
        local = shard_spec(layout.spec, Shard(self.tensor.size, self.tensor.index))
        dtype = weights.embedding().dtype
        super().__init__(replace(layout, spec=local), weights.tensor, dtype, weights.lora_deltas, copies)
        ranks = group.size // self.tensor.size  # number of shards of the experts
        self.first_expert = group.index // self.tensor.size * -(-local.num_experts // ranks)

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        return self.weights(ref)  # a slice of `select`'s result: no `select` again

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.outer["embedding.weight"]
        rows = ids - self.tensor.index * len(table)
        is_own = (rows >= 0) & (rows < len(table))
        return self.tensor.sum(F.embedding(rows * is_own, table) * is_own[:, None])

    def _attention(self, index: int, read: torch.Tensor, step: Step, kv: PagedKV) -> torch.Tensor:
        return self.tensor.sum(super()._attention(index, read, step, kv))

    def _mlp(self, index: int, read: torch.Tensor) -> torch.Tensor:
        ranks = self.group if self.spec.layers[index].experts else self.tensor
        return ranks.sum(super()._mlp(index, read))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.tensor.gather(super()._head(hidden))
        return parts.permute(1, 0, 2).flatten(1)[:, : self.spec.vocab_size]

    def _norm(self, tensors: dict[str, torch.Tensor], role: str, x: torch.Tensor) -> torch.Tensor:
        if self.spec.qk_norm != "row" or role not in ("q_norm", "k_norm"):
            return super()._norm(tensors, role, x)
        # Key heads that several ranks hold are counted once for each of them, in the sum and in `size`.
        size, spec = x.shape[-1] * self.tensor.size, self.spec

        def mean_of(squares: torch.Tensor) -> torch.Tensor:
            return self.tensor.sum(squares.sum(-1, keepdim=True)) / size

        choices = spec.norm_eps, spec.norm_offset, spec.norm_float32
        return torch_ops.rms_norm(x, tensors[f"{role}.weight"], *choices, mean_of)


class SharedBlocks:
    """A rank's blocks, as a number of them. Each rank of the group holds its own heads of them, in its Pool."""

    def __init__(self, pool: "Pool", num_blocks: int, block_bytes: int):
        self.pool, self.num_blocks, self.block_bytes = pool, num_blocks, block_bytes

    @property
    def kind(self) -> object:
        """As PagedKV's: blocks of the same pool and size are of equal kind."""
        return (id(self.pool), self.block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that these blocks take on all ranks of the group together: this rank's share of the group's blocks."""
        return self.num_blocks * self.block_bytes

    def take_over(self, before: "SharedBlocks") -> None:
        """Does nothing: a block keeps its number, and the pool its content."""

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks to others, on every rank, before the next forward."""
        self.pool.copies += zip(sources, targets, strict=True)


class Pool:
    """This rank's heads of the blocks of all ranks of a group: `capacity` blocks for each rank, in rank order."""

    def __init__(self):
        self.kv: PagedKV | None = None
        self.capacity = 0
        self.copies: list[tuple[int, int]] = []  # pending copies of this rank's blocks: (source, target)
        self.is_read = False  # a rank's running call may still read the blocks' content

    def grow(self, make: Callable[[int], PagedKV], capacity: int, ranks: int) -> PagedKV:
        """The blocks, at least `capacity` for each rank.

        While calls run, their content is kept. Between calls, storage that is too small is freed first.
        """
        if self.kv is None or capacity > self.capacity:
            if not self.is_read:
                self.kv = None
            grown = make(capacity * ranks)
            if self.kv is not None:
                tensors = zip((*grown.keys, *grown.values), (*self.kv.keys, *self.kv.values), strict=True)
                for new, old in tensors:
                    new.unflatten(0, (ranks, capacity))[:, : self.capacity] = old.unflatten(0, (ranks, self.capacity))
            self.kv, self.capacity = grown, capacity
        self.is_read = True
        return self.kv

    def release(self) -> None:
        """Free the storage."""
        self.kv, self.capacity, self.copies, self.is_read = None, 0, [], False


class BatchHeader(NamedTuple):
    """What a rank brings to an exchange, all integers.

    active: whether the rank wants a forward or logits; 0 for a dummy step.
    tokens, sequences, width: of its batch and block tables.
    copies: number of block copies.  num_blocks: number of its blocks.
    rows: number of hidden states that it wants logits of.  wants_logits: whether it wants the logits of its batch.
    """

    active: int = 0
    tokens: int = 0
    sequences: int = 0
    width: int = 0
    copies: int = 0
    num_blocks: int = 0
    rows: int = 0
    wants_logits: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of int64 in the message: ids, positions, cu_seqlens, lengths, block tables, copies."""
        starts = self.sequences + (self.sequences > 0)
        return self.tokens, self.tokens, starts, self.sequences, self.sequences * self.width, 2 * self.copies


class TensorParallelDecoder(SharedDecoder):
    """Runs a ShardedDecoder on the batches of all ranks of its group as one."""

    def __init__(self, sharded: ShardedDecoder, pool: Pool):
        super().__init__(sharded)
        self.pool, self.group = pool, sharded.group

    def kv(self, num_blocks: int) -> SharedBlocks:
        """Blocks of this rank, allocated in the group's pool at the next exchange."""
        spec = self.spec
        block = 2 * len(spec.layers) * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        return SharedBlocks(self.pool, num_blocks, block * self.group.size)

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""
        self.pool.copies = []
        super().finish()
        self.pool.is_read = False  # every rank's call is done

    def _exchange(
        self,
        batch: PackedBatch | None = None,
        kv: SharedBlocks | None = None,
        rows: torch.Tensor | None = None,
        wants_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        no_rows = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        active, rows = batch is not None or rows is not None, no_rows if rows is None else rows
        own = BatchHeader(active=int(active), rows=len(rows), wants_logits=int(wants_logits))
        if batch is not None:
            sequences, width = batch.block_tables.shape
            own = own._replace(tokens=len(batch.ids), sequences=sequences, width=width)
            own = own._replace(copies=len(self.pool.copies), num_blocks=kv.num_blocks)
        headers = [BatchHeader(*header) for header in self.group.gather(torch.tensor(own, device=self.device)).tolist()]
        if not any(header.active for header in headers):
            return None
        hidden = inputs = [no_rows] * self.group.size  # of the head
        if any(header.tokens for header in headers):
            joined, blocks = self._joined_batch(batch, headers)
            hidden = self.inner.forward(joined, blocks).split([header.tokens for header in headers])
        if any(header.rows for header in headers):
            inputs = self.group.gather_rows(rows, [header.rows for header in headers])
        inputs = [h if header.wants_logits else x for header, h, x in zip(headers, hidden, inputs, strict=True)]
        logits = torch.empty(0, self.spec.vocab_size, device=self.device)
        if any(map(len, inputs)):
            logits = self.inner.logits(torch.cat(inputs)).split([len(x) for x in inputs])[self.group.index]
        return hidden[self.group.index], logits

    def _joined_batch(self, batch: PackedBatch | None, headers: list[BatchHeader]) -> tuple[PackedBatch, PagedKV]:
        """All ranks' batches as one, and the pool's blocks, after the pending block copies."""
        message = torch.zeros(0, dtype=torch.int64, device=self.device)
        if batch is not None:
            copies = torch.tensor(self.pool.copies, dtype=torch.int64, device=self.device)
            parts = (batch.ids, batch.positions, batch.cu_seqlens, batch.lengths, batch.block_tables, copies)
            message = torch.cat([part.flatten().long() for part in parts])
            self.pool.copies = []
        messages = self.group.gather_rows(message, [sum(header.sizes) for header in headers])
        blocks = self.pool.grow(self.inner.kv, max(header.num_blocks for header in headers), self.group.size)
        width, tokens, batches = max(header.width for header in headers), 0, []
        for index, (header, message) in enumerate(zip(headers, messages, strict=True)):
            if not header.tokens:
                continue
            first_block = index * self.pool.capacity
            ids, positions, cu_seqlens, lengths, table, copies = message.split(header.sizes)
            table = F.pad(table.view(header.sequences, header.width), (0, width - header.width)) + first_block
            copies = copies.view(-1, 2) + first_block
            batches.append((ids, positions, cu_seqlens[:-1] + tokens, lengths, table, copies))
            tokens += header.tokens
        ids, positions, cu_seqlens, lengths, block_tables, copies = map(torch.cat, zip(*batches, strict=True))
        sources, targets = copies.unbind(1)
        if len(sources):
            blocks.copy(sources.tolist(), targets.tolist())
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=tokens)
        return PackedBatch(ids, positions.int(), cu_seqlens.int(), lengths.int(), block_tables.int()), blocks
