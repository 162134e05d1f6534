"""Inputs of a decoder's forward: tokens packed without padding, and keys and values in blocks."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

BLOCK_SIZE = 32  # tokens in a block of the KV cache


@dataclass(frozen=True)
class PackedBatch:
    """New tokens of several sequences, one sequence after the other, without padding.

    ids: int64 [tokens].
    positions: int32 [tokens], each token's index in its sequence and in its part of the cache.
    cu_seqlens: int32 [sequences + 1], where each sequence's tokens begin in `ids`, and their total.
    lengths: int32 [sequences], tokens of each sequence in the cache, these included.
    block_tables: int32 [sequences, blocks], each sequence's cache blocks in order; entries after the last are
        undefined.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor


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
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    router_indices: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, each with a leading dimension of blocks."""
        more = self.router_indices, self.hidden_states
        return [*self.keys, *self.values, *(tensor for tensor in more if tensor is not None)]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.keys[0])

    @property
    def kind(self) -> object:
        """Shapes, dtypes and devices of every layer's blocks: blocks of equal kind can be copied to each other."""
        return [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def growth_bytes(self) -> int:
        """The most bytes that `grown` holds beside the larger storage: one tensor."""
        return max(tensor.nbytes for tensor in self.tensors)

    def grown(self, num_blocks: int) -> "PagedKV":
        """More blocks, the first of which have the content of these. This storage is freed tensor by tensor as it is
        copied, and must not be used any more, also after an error."""

        def larger(tensor: torch.Tensor) -> torch.Tensor:
            grown = tensor.new_empty(num_blocks, *tensor.shape[1:])
            grown[: len(tensor)].copy_(tensor)
            return grown

        more = self.router_indices, self.hidden_states
        router_indices, hidden_states = (None if tensor is None else larger(tensor) for tensor in more)
        keys, values = ([larger(own.pop(0)) for _ in range(len(own))] for own in (self.keys, self.values))
        return PagedKV(keys, values, router_indices, hidden_states)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the content of block `sources[i]` to block `targets[i]`."""
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in self.tensors:
            tensor[target] = tensor[source]


class Draws(Protocol):
    """How the tokens of running sequences are sampled in one or more decode steps, as a decoder sees it.

    keys: int64 [sequences], of the RNG.  positions: int64 [sequences], the index of the next new token in each
        sequence's completion.  limits: int64 [sequences], the most new tokens.
    values: float32 [n], the settings of `sample`.  stop_token_ids: int64 [n].  pad_token_id: of ended sequences.
    token_ids: int64 [sequences, n], each sequence's tokens so far, and -1 elsewhere; None if `sample` does not need
        them.
    graph_key: two draws of one key differ in nothing but these tensors.
    needs_tokens: whether a draw depends on the tokens before it: by `token_ids`, or by code that kernels cannot run.
    """

    @property
    def keys(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def limits(self) -> torch.Tensor: ...
    @property
    def stop_token_ids(self) -> torch.Tensor: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def token_ids(self) -> torch.Tensor | None: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def graph_key(self) -> Hashable: ...
    @property
    def needs_tokens(self) -> bool: ...

    def record(self, steps: int) -> tuple[Any, Any]:
        """The C++ kernels' record of what they draw in `steps` steps, and what they write: `tokens`, int64 [steps,
        sequences], and `logps()`, float32 [3, steps, sequences]."""

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        values: torch.Tensor,
        stop_token_ids: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """A token for each row of logits, and its three logprobs, without waiting for the device.

        seen: uint8 [rows, vocab], 1 for the tokens of `token_ids`; None without them.
        """

    def drawn_at(self, logits: torch.Tensor, sequences: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor) -> Any:
        """A token for each row of logits: `tokens`, int64 [rows], and `logps()`, float32 [3, rows].

        sequences: int64 [rows], the sequence that each row is of.  offsets: int64 [rows], its distance from the
            sequence's next new token.  ids: int64 [rows], the token before it: a drafted one, where the distance is
            not 0. If `needs_tokens`, rows with every smaller distance of the sequence are there too.
        """


def mark_seen(seen: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Set the tokens that each row has to 1.  seen: uint8 [rows, vocab + 1], its last column for no token.  token_ids:
    int64 [rows, n], with -1 for no token."""
    seen.scatter_(1, token_ids.masked_fill(token_ids < 0, seen.shape[1] - 1), 1)


def table_of(blocks: list[list[int]], device: torch.device) -> torch.Tensor:
    """Block tables of sequences, int32 [sequences, blocks], as wide as the longest; shorter ones are padded with 0."""
    width = max(map(len, blocks))
    return torch.tensor([own + [0] * (width - len(own)) for own in blocks], dtype=torch.int32, device=device)


def packed(pieces: list[torch.Tensor], begins: list[int], blocks: list[list[int]], device: torch.device) -> PackedBatch:
    """A batch of pieces of sequences.

    pieces: int64 [n] each.  begins: position of each piece's first token in its sequence.  blocks: of each sequence.
    """
    sizes = torch.tensor([len(piece) for piece in pieces])
    begin = torch.tensor(begins)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.arange(int(cu_seqlens[-1])) + (begin - cu_seqlens[:-1]).repeat_interleave(sizes)
    return PackedBatch(
        ids=torch.cat(pieces).to(device),
        positions=positions.int().to(device),
        cu_seqlens=cu_seqlens.int().to(device),
        lengths=(begin + sizes).int().to(device),
        block_tables=table_of(blocks, device),
    )


def is_packable(attention_mask: torch.Tensor) -> bool:
    """Whether the ones of each row of a mask [rows, tokens] are adjacent, and there is at least one."""
    begins = attention_mask[:, :1].sum(dim=1) + (attention_mask.diff(dim=1) > 0).sum(dim=1)
    return bool((begins == 1).all())
