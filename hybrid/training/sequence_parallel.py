"""Sequence parallel training: a packed row's tokens over the ranks of a group (DeepSpeed's Ulysses, arXiv 2309.14509).

Each rank runs the model's modules on its own tokens. Around attention an all-to-all exchanges tokens for heads: a rank
computes attention of its heads over all tokens. DeepSpeed knows nothing of the groups: ZeRO partitions over all ranks,
and averages gradients over them. Its own way, an `mpu`, is kept in a global variable, for every engine of the process
(0.19.8).
"""

import hashlib
from collections.abc import Sequence
from math import gcd
from typing import Any

import torch

from hybrid.runtime.parallel import InferenceGroup, all_gather_objects, world_size


class SequenceParallel:
    """The ranks that share each packed row: of n ranks, rank i computes tokens i, i + n, i + 2 n, …

    So prompts and completions, whose tokens alone run the head, are divided evenly. Building one is a collective of all
    ranks.
    """

    def __init__(self, size: int):
        self.group = InferenceGroup(size)
        self.size, self.index = self.group.size, self.group.index

    def require_same(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Raise ValueError, on all ranks, unless the ranks of each group have the same tensors. A collective of all
        ranks."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(b"" if tensor is None else f"{tuple(tensor.shape)}".encode())
            digest.update(b"" if tensor is None else tensor.contiguous().cpu().numpy().tobytes())
        digests = all_gather_objects(digest.digest())
        for first in range(0, world_size(), self.size):
            if len(set(digests[first : first + self.size])) > 1:
                raise ValueError(
                    f"sequence_parallel_size={self.size}: ranks {first} to {first + self.size - 1} train together and "
                    "were given different rows; give them the same rows, in the same order, and compute the same loss"
                )

    def local(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens, [1, tokens / n, ...], of a packed row's, [1, tokens, ...]."""
        return tokens[:, self.index :: self.size]

    def local_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of this rank's heads, [heads / n], of [heads]."""
        return values.chunk(self.size)[self.index]

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all tokens of this rank's heads, of this rank's tokens of all heads; differentiable. A collective.

        Args:
            tensors: query, key and value, [1, heads, tokens / n, dim] each. Key-value heads that n does not divide are
                repeated, as few times as needed.

        Returns:
            [1, heads / n, tokens, dim] each.
        """
        parts, shapes = [], []
        for tensor in tensors:
            if repeats := self.size // gcd(tensor.shape[1], self.size) - 1:
                tensor = tensor.repeat_interleave(1 + repeats, dim=1)
            heads, tokens, dim = tensor.shape[1:]
            shapes.append((self.size, heads // self.size, tokens, dim))
            parts.append(tensor.reshape(self.size, -1))
        exchanged = _Exchange.apply(torch.cat(parts, dim=1), self.group)
        received = exchanged.split([part.shape[1] for part in parts], dim=1)
        return [
            of_ranks.view(shape).permute(1, 2, 0, 3).reshape(1, shape[1], -1, shape[3])
            for of_ranks, shape in zip(received, shapes, strict=True)
        ]

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens, [1, heads, tokens / n, dim], of all tokens of this rank's heads, [1,
        heads / n, tokens, dim]; differentiable. A collective."""
        _, heads, tokens, dim = output.shape
        by_rank = output.view(heads, tokens // self.size, self.size, dim).permute(2, 0, 1, 3)
        return _Exchange.apply(by_rank, self.group).reshape(1, heads * self.size, -1, dim)

    def joined(self, values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values of all ranks, [count, ...], of which this rank has those at `places`; differentiable. A
        collective in the forward alone.

        Each rank must compute the same loss of them: its gradient at `places` is this rank's part of the whole one.
        """
        whole = values.new_zeros(count, *values.shape[1:]).index_put((places,), values)
        return _Sum.apply(whole, self.group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, [ranks, ...], which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: InferenceGroup) -> torch.Tensor:
        """Return the ranks' parts for this one, [ranks, ...]."""
        ctx.group = group
        return group.exchange(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients to the ranks that the parts came from."""
        return ctx.group.exchange(grad), None


class _Sum(torch.autograd.Function):
    """A sum over ranks of which each one holds the whole result and computes the same loss of it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: InferenceGroup) -> torch.Tensor:
        """Return the sum."""
        ctx.size = group.size
        return group.sum(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient times the number of ranks: each has a part of the parameters' gradients, and DeepSpeed
        averages over all ranks."""
        return grad * ctx.size, None
