"""Inference tensor parallelism: a decoder sharded over a group of ranks by heads, MLP columns and vocabulary, and
the exchange that runs all ranks' batches as one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.decoders.torch_decoder import Copies, Step, TorchDecoder, no_lora_deltas
from hybrid.kernels import torch_ops
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.parallel import InferenceGroup
from hybrid.weights.lora import LowRank
from hybrid.weights.slices import Shard, shard_spec


class ShardedDecoder(TorchDecoder):
    """TorchDecoder over a rank's slices of the weights. Its functions are collectives: every rank calls them with the
    same tokens, and gets the same hidden states and logits.

    weights: gives this rank's slice of a ParamRef's tensor; None if it has none.
    lora_deltas: gives LoRA factors sliced in the same way.
    group: the calling ranks. Heads, matrices and vocabulary are sharded over `group.tensor`, experts over all of it.
    """

    def __init__(
        self,
        layout: DecoderLayout,
        weights: Callable[[ParamRef], torch.Tensor | None],
        dtype: torch.dtype,
        group: InferenceGroup,
        lora_deltas: Callable[[ParamRef], list[LowRank]] = no_lora_deltas,
        copies: Copies | None = None,
    ):
        self.group, self.tensor = group, group.tensor
        local = shard_spec(layout.spec, Shard(self.tensor.size, self.tensor.index))
        super().__init__(replace(layout, spec=local), weights, dtype, lora_deltas, copies)
        ranks = group.size // self.tensor.size  # number of shards of the experts
        self.first_expert = group.index // self.tensor.size * -(-local.num_experts // ranks)

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        return self.weights(ref)  # a slice of `select`'s result: no `select` again

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.outer["embedding.weight"]
        own = ids - self.tensor.index * len(table)
        here = (own >= 0) & (own < len(table))
        return self.tensor.sum(F.embedding(own * here, table) * here[:, None])

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
        size = x.shape[-1] * self.tensor.size
        spec = self.spec
        return torch_ops.rms_norm(
            x,
            tensors[f"{role}.weight"],
            spec.norm_eps,
            spec.norm_offset,
            spec.norm_float32,
            mean_of=lambda squares: self.tensor.sum(squares.sum(-1, keepdim=True)) / size,
        )


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

        While calls run, their content is kept. Between calls, storage that is too small is freed before new storage is
        allocated.
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


class Brought(NamedTuple):
    """The header of a rank's message in an exchange, all integers.

    wants: whether the rank wants a forward or logits; 0 for a dummy step.
    tokens, sequences, width: of its batch and block tables.
    copies: number of block copies.  num_blocks: number of its blocks.
    rows: number of hidden states that it wants logits of.  judged: whether it wants the logits of its batch.
    """

    wants: int = 0
    tokens: int = 0
    sequences: int = 0
    width: int = 0
    copies: int = 0
    num_blocks: int = 0
    rows: int = 0
    judged: int = 0

    @property
    def message(self) -> int:
        """Number of int64 in the message that holds the batch and the copies."""
        return (
            2 * self.tokens + 2 * self.sequences + (self.sequences > 0) + self.sequences * self.width + 2 * self.copies
        )


class SharedDecoder:
    """Runs a ShardedDecoder for ranks with batches of their own: every forward waits for all ranks of the group, whose
    batches run as one.

    To its callers it is a decoder of this rank's batch. `finish` runs dummy steps until every rank is done.
    """

    def __init__(self, sharded: ShardedDecoder, pool: Pool):
        self.lockstep, self.pool, self.group = sharded, pool, sharded.group
        self.spec, self.layout, self.dtype = sharded.spec, sharded.layout, sharded.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.lockstep.device

    def bind(self) -> None:
        """Read the weights, on first use or again."""
        self.lockstep.bind()

    def nbytes(self) -> int:
        """Bytes of weight copies: joined matrices."""
        return self.lockstep.nbytes()

    def reserve(self, tokens: int) -> None:
        """Does nothing, as TorchDecoder's."""

    def kv(self, num_blocks: int) -> SharedBlocks:
        """Blocks of this rank, allocated in the group's pool at the next exchange."""
        spec = self.spec
        block_bytes = 2 * len(spec.layers) * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        return SharedBlocks(self.pool, num_blocks, block_bytes * self.group.size)

    def forward(self, batch: PackedBatch, kv: SharedBlocks) -> torch.Tensor:
        """The last layer's output for this rank's tokens.  [tokens, hidden]"""
        return self._meet(batch, kv)[0]

    def decode(self, batch: PackedBatch, kv: SharedBlocks) -> torch.Tensor:
        """Logits after one new token for each of this rank's sequences.  float32 [sequences, vocab]"""
        return self._meet(batch, kv, judged=True)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output [n, hidden].  float32 [n, vocab]"""
        return self._meet(rows=hidden)[1]

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""
        self.pool.copies = []
        while self._meet() is not None:
            pass
        self.pool.is_read = False  # every rank's call is done

    def _meet(
        self,
        batch: PackedBatch | None = None,
        kv: SharedBlocks | None = None,
        rows: torch.Tensor | None = None,
        judged: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Exchange headers and batches, then run all ranks' forwards and logits. A collective.

        Returns this rank's hidden states and logits; None if no rank wants anything.
        """
        wants = batch is not None or rows is not None
        own = Brought(wants=int(wants), rows=0 if rows is None else len(rows), judged=int(judged))
        if batch is not None:
            sequences, width = batch.block_tables.shape
            own = own._replace(tokens=len(batch.ids), sequences=sequences, width=width)
            own = own._replace(copies=len(self.pool.copies), num_blocks=kv.num_blocks)
        all_brought = [Brought(*one) for one in self.group.gather(torch.tensor(own, device=self.device)).tolist()]
        if not any(one.wants for one in all_brought):
            return None
        nothing = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        hidden = asked = [nothing] * self.group.size
        if any(one.tokens for one in all_brought):
            together, blocks = self._together(batch, all_brought)
            hidden = self.lockstep.forward(together, blocks).split([one.tokens for one in all_brought])
        if any(one.rows for one in all_brought):
            asked = self.group.gather_rows(nothing if rows is None else rows, [one.rows for one in all_brought])
        asked = [own if one.judged else rows for one, own, rows in zip(all_brought, hidden, asked, strict=True)]
        logits = torch.empty(0, self.spec.vocab_size, device=self.device)
        if any(map(len, asked)):
            logits = self.lockstep.logits(torch.cat(asked)).split([len(rows) for rows in asked])[self.group.index]
        return hidden[self.group.index], logits

    def _together(self, batch: PackedBatch | None, all_brought: list[Brought]) -> tuple[PackedBatch, PagedKV]:
        """All ranks' batches as one, and the pool's blocks, after the pending block copies."""
        message = torch.zeros(0, dtype=torch.int64, device=self.device)
        if batch is not None:
            copies = torch.tensor(self.pool.copies, dtype=torch.int64, device=self.device)
            parts = (batch.ids, batch.positions, batch.cu_seqlens, batch.lengths, batch.block_tables, copies)
            message = torch.cat([part.flatten().long() for part in parts])
            self.pool.copies = []
        messages = self.group.gather_rows(message, [one.message for one in all_brought])
        blocks = self.pool.grow(self.lockstep.kv, max(one.num_blocks for one in all_brought), self.group.size)
        capacity, width, tokens = self.pool.capacity, max(one.width for one in all_brought), 0
        ids, positions, cu_seqlens, lengths, block_tables, copies = [], [], [], [], [], []
        for index, (one, said) in enumerate(zip(all_brought, messages, strict=True)):
            if not one.tokens:
                continue
            sizes = (one.tokens, one.tokens, one.sequences + 1, one.sequences, one.sequences * one.width)
            *parts, wanted = said.split([*sizes, 2 * one.copies])
            ids.append(parts[0])
            positions.append(parts[1])
            cu_seqlens.append(parts[2][:-1] + tokens)
            lengths.append(parts[3])
            table = parts[4].view(one.sequences, one.width)
            block_tables.append(F.pad(table, (0, width - one.width)) + index * capacity)
            copies.append(wanted.view(-1, 2) + index * capacity)
            tokens += one.tokens
        sources, targets = torch.cat(copies).unbind(1)
        if len(sources):
            blocks.copy(sources.tolist(), targets.tolist())
        cu_seqlens.append(cu_seqlens[0].new_tensor([tokens]))
        return PackedBatch(
            ids=torch.cat(ids),
            positions=torch.cat(positions).int(),
            cu_seqlens=torch.cat(cu_seqlens).int(),
            lengths=torch.cat(lengths).int(),
            block_tables=torch.cat(block_tables).int(),
        ), blocks
