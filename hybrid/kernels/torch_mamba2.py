"""Mamba 2 mixers (arXiv:2405.21060) in torch, on any device: the reference for the CPU kernels, and the fallback.

A head has a state, a matrix [state_size, head_dim] in float32, that each token decays, adds to and reads. It is
computed token by token, in prefills as in decode steps, and rounds where the prefill of Hugging Face's modules rounds
(transformers 5.23).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch.nn import functional as F

from hybrid.kernels.recurrent import MixerLayer, StateRows, WeightPart, padded, sum_over_one_rank


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a model's Mamba 2 mixers.

    groups: of consecutive heads, which share B and C; a norm is over the channels of a group.
    conv_width: of the convolution, in tokens.  min_step, max_step: limits of the time steps.
    in_multiplier, out_multiplier: factors of the input and the output.  multipliers: those of the projection's parts,
        which are the gate, the heads' inputs, B, C and the time steps (Falcon-H1).
    group_ranks: ranks that have slices of a group: each has B and C, and some of its heads.
    """

    kind: ClassVar[str] = "Mamba 2 mixer"
    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_width: int
    min_step: float = 0.0
    max_step: float = float("inf")
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    group_ranks: int = 1

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: the heads' inputs, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def width(self) -> int:
        """Elements per token that a layer holds at once."""
        return 2 * self.inner + 4 * self.channels  # before and after the convolution, and both in float32

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each role's weight.  hidden: the model's hidden size."""
        return {
            "mamba_in": (self.inner + self.channels + self.heads, hidden),
            "conv": (self.conv_width, self.channels),
            **dict.fromkeys(("dt_bias", "a_log", "skip"), (self.heads,)),
            "mamba_norm": (self.inner,),
            "mamba_o": (hidden, self.inner),
        }

    def state_shapes(self, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a sequence's states: each head's matrix, and the convolution's latest inputs."""
        return (self.heads, self.state_size, padded(self.head_dim, lanes)), (self.conv_width - 1, self.channels)

    def sliced(self, ranks: int) -> Self | None:
        """Return the sizes of the slice that each of `ranks` ranks has: of whole groups, or of the only one. None if
        they cannot divide the heads so."""
        if self.heads % ranks or (self.groups > 1 and self.groups % ranks):
            return None
        if self.groups == 1:
            return replace(self, heads=self.heads // ranks, group_ranks=ranks)
        return replace(self, heads=self.heads // ranks, groups=self.groups // ranks)

    def weight_parts(self) -> dict[str, tuple[WeightPart, ...]]:
        """Return the parts of the sliced weights that have several, by role."""
        inner, shared = WeightPart(self.inner), WeightPart(self.groups * self.state_size, shared=self.groups == 1)
        channels = inner, shared, shared
        return {"mamba_in": (inner, *channels, WeightPart(self.heads)), "conv": channels}

    def factors(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return `multipliers` for each row of the projection, rounded, as Hugging Face's buffer; None if all are 1."""
        if set(self.multipliers) == {1.0}:
            return None
        shared = self.groups * self.state_size
        counts = torch.tensor([self.inner, self.inner, shared, shared, self.heads])
        return torch.tensor(self.multipliers, dtype=dtype).repeat_interleave(counts).to(device)

    def mixed(self, x: torch.Tensor, layer: MixerLayer) -> torch.Tensor:
        """Return the mixer's output for x [tokens, hidden], and update the states of its sequences."""
        projected = layer.linear("mamba_in", x if self.in_multiplier == 1.0 else x * self.in_multiplier)
        factors = self.factors(x.dtype, x.device)
        if factors is not None:
            projected = projected * factors
        z, channels, steps = projected.split([self.inner, self.channels, self.heads], dim=-1)
        weights, channels = layer.weights, layer.convolved(channels)
        x_of_heads, b, c = F.silu(channels).float().split([self.inner, *[self.groups * self.state_size] * 2], dim=-1)
        heads = x_of_heads.unflatten(-1, (self.heads, -1))
        b, c = (part.unflatten(-1, (self.groups, -1)) for part in (b, c))
        steps = F.softplus(steps + weights["dt_bias.weight"]).clamp(self.min_step, self.max_step).float()
        decay = (-weights["a_log.weight"].float().exp() * steps).exp()
        read = selective_scan(heads * steps[..., None], b, c, decay, layer.states[0], layer.groups)
        read = (read + weights["skip.weight"].float()[:, None] * heads).flatten(1)
        norm = weights.get("mamba_norm.weight"), self.groups, layer.eps, self.group_ranks, layer.summed
        normed = grouped_norm(read, z, *norm)
        output = layer.linear("mamba_o", normed)
        return output if self.out_multiplier == 1.0 else output * self.out_multiplier


def selective_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    groups: Sequence[StateRows],
) -> torch.Tensor:
    """Return what each token reads of the state by c, after it has decayed and b ⊗ x was added.  [tokens, heads,
    head_dim]

    x [tokens, heads, head_dim]; b, c [tokens, groups, state_size]; decay [tokens, heads]; state [slots, heads,
    state_size, head_dim]: float32 all.
    """
    out, repeats = torch.empty_like(x), x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(repeats, dim=1).unsqueeze(-1) for part in (b, c))
    for group in groups:
        held = state[group.slots].masked_fill(group.fresh[:, None, None, None], 0)
        for rows in group.rows.unbind(1):
            held = held * decay[rows][..., None, None] + b[rows] * x[rows].unsqueeze(-2)
            out[rows] = (held * c[rows]).sum(-2)
        state[group.slots] = held
    return out


def grouped_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    ranks: int = 1,
    summed: Callable[[torch.Tensor], torch.Tensor] = sum_over_one_rank,
) -> torch.Tensor:
    """RMS norm of each group of x · silu(z).  x float32, z [tokens, size], weight [size]; None: no norm, and rounded at
    every step.  Returns z's dtype.

    ranks, summed: the ranks that have as many elements of a group, and a tensor's sum over them.
    """
    if weight is None:
        return x.to(z.dtype) * F.silu(z)
    gated = (x * F.silu(z.float())).unflatten(-1, (groups, -1))
    mean = gated.pow(2).mean(-1, keepdim=True)
    mean = mean if ranks == 1 else summed(mean) / ranks
    return (weight * (gated * torch.rsqrt(mean + eps)).flatten(-2)).to(z.dtype)
