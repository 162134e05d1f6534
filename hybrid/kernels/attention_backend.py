"""The seam between a decoder on a GPU and the kernels that compute its attention over the KV cache."""

from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid.kernels.kv_addresses import LayerKV


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of a decoder's attention that all layers share.

    num_heads, num_kv_heads: of this rank.  dtype: of queries, keys, values and outputs.
    block_size: tokens in a block of the KV cache.
    scale: factor of q·k.  softcap: c·tanh(x / c) of scaled scores; 0: off.
    windows: those of the layers, each once: tokens that a query sees, itself included; 0: all tokens before it;
        below 0: those of its chunk of as many tokens.
    alibi: whether a bias is added to the scaled scores.  sinks: whether heads have sinks.
    latent_dim: elements of a latent in latent attention; 0: it is not.
    rounded: whether scores are rounded to `dtype` step by step, as in Hugging Face's "eager" attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    scale: float
    softcap: float = 0.0
    windows: tuple[int, ...] = (0,)
    alibi: bool = False
    rounded: bool = False
    sinks: bool = False
    latent_dim: int = 0


class SequenceTables(Protocol):
    """The sequences of a forward, as in `PackedBatch`.

    cu_seqlens: int32 [sequences + 1].  lengths: int32 [sequences].  block_tables: int32 [sequences, max_blocks].
    """

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def lengths(self) -> torch.Tensor: ...

    @property
    def block_tables(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class LayerBlocks:
    """A layer's keys and values, as tensors and as addresses on the device.

    keys, values: [blocks, block_size, kv_heads, head_dim], contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor
    addresses: LayerKV


class AttentionBackend(Protocol):
    """Kernels for attention over the KV cache, in which the keys and values of new tokens are already.

    q [tokens, heads, head_dim] in the settings' dtype, and so is the output. window: one of the settings' windows.
    bias: ALiBi's, [heads, positions], or None.  sinks: for each head the logit of a key without a value, [heads], or
    None.  q_rope: in latent attention [tokens, heads, rope_dim], the queries' part that is compared with the last
    elements of the one key; q [tokens, heads, latent_dim] then is compared with its latent.
    """

    def plan(self, batch: SequenceTables, decoding: bool) -> None:
        """Prepare `attend`, of the same `decoding`, for all layers of one forward over `batch`.

        Call it before every forward that does not run in a CUDA graph. It may wait for the device.
        """

    def attend(
        self,
        decoding: bool,
        q: torch.Tensor,
        kv: LayerBlocks,
        batch: SequenceTables,
        window: int,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the last token of each sequence if `decoding`; else causal attention of each sequence's
        new tokens, the last ones of it in the cache."""
