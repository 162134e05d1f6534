"""Inputs of a decoder's forward: tokens packed without padding, and keys and values in blocks."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch

from hybrid.runtime.huge_pages import request_huge_pages

BLOCK_SIZE = 32  # tokens in a block of the KV cache
PREFILL_TOKENS = 2048  # prompt tokens in one forward; bounds the memory of activations
NO_ADAPTER = -1  # in `PackedBatch.adapters`: the base model
UPLOAD_ALIGNMENT = 16  # bytes: Triton compiles a kernel again for pointers that are not divisible by 16
States = dict[int, tuple[torch.Tensor, ...]]  # as `PagedKV.states`


@dataclass(frozen=True)
class PackedBatch:
    """New tokens of several sequences, one sequence after the other, without padding.

    ids: int64 [tokens].
    positions: int32 [tokens], each token's index in its sequence and in its part of the cache.
    cu_seqlens: int32 [sequences + 1], where each sequence's tokens begin in `ids`, and their total.
    lengths: int32 [sequences], tokens of each sequence in the cache, these included.
    block_tables: int32 [sequences, blocks], each sequence's cache blocks in order; entries after the last are
        undefined.
    state_slots: int32 [sequences], where each sequence's recurrent state is; None: the model has none. A sequence whose
        first token is among these begins with a state of zero.
    adapters: int32 [tokens], the number of each token's adapter among `WholeDecoder.mixed_adapters`, NO_ADAPTER for
        none; None: the active adapters are of all tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor
    state_slots: torch.Tensor | None = None
    adapters: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerActivations:
    """Memory that a forward writes each layer's input to, and each token's experts. It changes no other result.

    layer_inputs: [layers + 1, n, hidden], contiguous, in the decoder's dtype. Index l has the residual stream that
        layer l reads, as the model's own layer receives it; the last index has the input of the final norm.
    router_indices: int16 [n, layers with experts, experts per token], contiguous, as `PagedKV.router_indices`; None: it
        is not written.
    rows: int64 [tokens], for each token of the batch its index among the n.
    """

    layer_inputs: torch.Tensor
    router_indices: torch.Tensor | None
    rows: torch.Tensor

    def write_input(self, layer: int, hidden: torch.Tensor) -> None:
        """Write the batch's input of a layer, [tokens, hidden]."""
        self.layer_inputs[layer].index_copy_(0, self.rows, hidden)

    def write_experts(self, moe_layer: int, chosen: torch.Tensor) -> None:
        """Write the experts of the batch's tokens, integers [tokens, experts per token].

        moe_layer: the layer's number among those with experts.
        """
        if self.router_indices is not None:
            self.router_indices[self.rows, moe_layer] = chosen.to(torch.int16)


class KVWeights(NamedTuple):
    """The weights that compute keys and values.

    version: another one after every change of the weights.  variant: which of the decoders over them, such as with or
        without adapters.
    """

    version: Hashable
    variant: Hashable


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every layer, in blocks of BLOCK_SIZE tokens, laid out by the decoder that allocates them.

    router_indices: int16 [blocks, BLOCK_SIZE, layers with experts, experts per token], the experts that each token was
        routed to, the one with the largest weight first; None if they are not recorded. Rows that share a block share
        them, as they share its keys and values.
    hidden_states: [blocks, BLOCK_SIZE, hidden], the last layer's output for each token, in the decoder's dtype; None if
        it is not kept.
    states: the recurrent state of every layer that has one, by its index: tensors whose leading dimension is a slot.
        They are no part of the blocks: see `BlockPool.allocate_states`.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    router_indices: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    states: States = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, each with a leading dimension of blocks."""
        more = self.router_indices, self.hidden_states
        return [*self.keys, *self.values, *(tensor for tensor in more if tensor is not None)]

    @property
    def kind(self) -> object:
        """Shapes, dtypes and devices of every layer's blocks: blocks of equal kind can be copied to each other."""
        return [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(attrgetter("nbytes"), self.tensors))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of these; 1 if no layer keeps keys and values, so that sizes can be divided by it."""
        return max(sum(tensor[:1].nbytes for tensor in self.tensors), 1)

    @property
    def growth_bytes(self) -> int:
        """The most bytes that `grown` holds in addition to the larger storage: one tensor."""
        return max(tensor.nbytes for tensor in self.tensors)

    def grown(self, num_blocks: int) -> "PagedKV":
        """More blocks, the first of which have the content of these. This storage is freed tensor by tensor as it is
        copied, and must not be used any more, also after an error."""

        def larger(tensor: torch.Tensor) -> torch.Tensor:
            grown = request_huge_pages(tensor.new_empty(num_blocks, *tensor.shape[1:]))
            grown[: len(tensor)].copy_(tensor)
            return grown

        more = self.router_indices, self.hidden_states
        router_indices, hidden_states = (None if tensor is None else larger(tensor) for tensor in more)
        keys, values = ([larger(of_all.pop(0)) for _ in range(len(of_all))] for of_all in (self.keys, self.values))
        return PagedKV(keys, values, router_indices, hidden_states, self.states)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the content of block `sources[i]` to block `targets[i]`."""
        device = self.keys[0].device
        source, target = (torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in (sources, targets))
        for tensor in self.tensors:
            tensor[target] = tensor[source]


def state_bytes(states: States) -> int:
    """Return the bytes of recurrent states."""
    return sum(tensor.nbytes for tensors in states.values() for tensor in tensors)


def on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors of the host on a device, by one copy from pinned memory that the host does not wait for."""
    if device.type == "cpu":
        return [*tensors]
    sizes = [-(-tensor.nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT for tensor in tensors]
    host = pinned_bytes(sum(sizes))
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def pinned_bytes(count: int) -> torch.Tensor:
    """Return pinned host memory, uint8 [count], its content undefined. torch reuses it once copies from it are done."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def table_of(blocks: list[list[int]]) -> torch.Tensor:
    """Block tables of sequences, int32 [sequences, blocks], as wide as the longest; shorter ones are padded with 0."""
    width = max(map(len, blocks))
    return torch.tensor([each + [0] * (width - len(each)) for each in blocks], dtype=torch.int32)


def packed(
    pieces: list[torch.Tensor],
    begins: list[int],
    blocks: list[list[int]],
    device: torch.device,
    state_slots: list[int] | None = None,
) -> PackedBatch:
    """Return a batch of pieces of sequences on a device.

    pieces: int64 [n] each, on the host.  begins: position of each piece's first token in its sequence.
    blocks, state_slots: of each sequence.
    """
    return uploaded([packed_on_host(pieces, begins, blocks, state_slots)], device)[0]


def packed_on_host(
    pieces: list[torch.Tensor],
    begins: list[int],
    blocks: list[list[int]],
    state_slots: list[int] | None = None,
    adapters: list[int] | None = None,
) -> PackedBatch:
    """Return `packed` on the host.  adapters: of each sequence, as `PackedBatch.adapters`."""
    sizes = torch.tensor([len(piece) for piece in pieces])
    begin = torch.tensor(begins)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.arange(int(cu_seqlens[-1])) + (begin - cu_seqlens[:-1]).repeat_interleave(sizes)
    return PackedBatch(
        ids=torch.cat(pieces),
        positions=positions.int(),
        cu_seqlens=cu_seqlens.int(),
        lengths=(begin + sizes).int(),
        block_tables=table_of(blocks),
        state_slots=None if state_slots is None else torch.tensor(state_slots, dtype=torch.int32),
        adapters=None if adapters is None else torch.tensor(adapters, dtype=torch.int32).repeat_interleave(sizes),
    )


def uploaded(batches: list[PackedBatch], device: torch.device) -> list[PackedBatch]:
    """Return batches of the host on a device, by one copy for all of them."""
    fields = [{name: value for name, value in vars(batch).items() if value is not None} for batch in batches]
    tensors = iter(on_device([tensor for of_batch in fields for tensor in of_batch.values()], device))
    return [PackedBatch(**{name: next(tensors) for name in of_batch}) for of_batch in fields]


def is_packable(attention_mask: torch.Tensor) -> bool:
    """Whether the ones of each row of a mask [rows, tokens] are adjacent, and there is at least one."""
    begins = attention_mask[:, :1].sum(dim=1) + (attention_mask.diff(dim=1) > 0).sum(dim=1)
    return bool((begins == 1).all())
