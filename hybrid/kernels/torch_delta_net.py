"""Gated delta nets (arXiv:2412.06464) and Kimi delta attention (arXiv:2510.26692) in torch, on any device: the
reference for the CPU kernels, and the fallback.

A value head has a state, a matrix [key_dim, value_dim] in float32, that each token decays, corrects and reads; the
convolution before it reads the latest tokens. Both are computed token by token, in prefills as in decode steps, and
round where Hugging Face's modules round (transformers 5.23).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional as F

from hybrid.kernels.recurrent import MixerLayer, StateRows, WeightPart, padded


@dataclass(frozen=True)
class GatedDeltaNet:
    """Sizes of a model's gated delta nets.

    key_heads, value_heads, key_dim, value_dim: heads, and their sizes; a key head serves consecutive value heads.
    conv_width: of the convolution, in tokens.
    beta_scale: beta is beta_scale · sigmoid (OLMo-hybrid's 2: eigenvalues may be negative).
    norm_eps: of the output's norm; 0: the epsilon of the model's norms.
    """

    kind: ClassVar[str] = "gated delta net"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    beta_scale: float = 1.0
    norm_eps: float = 0.0

    @property
    def keys(self) -> int:
        """Elements of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def width(self) -> int:
        """Elements per token that a layer holds at once."""
        return 4 * self.channels  # before and after the convolution, and both in float32

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each role's weight.  hidden: the model's hidden size."""
        return {
            "delta_qkv": (self.channels, hidden),
            **dict.fromkeys(("delta_q", "delta_k"), (self.keys, hidden)),
            "delta_v": (self.values, hidden),
            "delta_z": (self.values, hidden),
            **dict.fromkeys(("delta_b", "delta_a"), (self.value_heads, hidden)),
            "conv": (self.conv_width, self.channels),
            **dict.fromkeys(("dt_bias", "a_log"), (self.value_heads,)),
            "delta_norm": (self.value_dim,),
            "delta_o": (hidden, self.values),
        }

    def state_shapes(self, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a sequence's states: each value head's matrix, and the convolution's latest inputs."""
        return (self.value_heads, self.key_dim, padded(self.value_dim, lanes)), (self.conv_width - 1, self.channels)

    def sliced(self, ranks: int) -> Self | None:
        """Return the sizes of the slice that each of `ranks` ranks has; None if they cannot divide the key heads."""
        if self.key_heads % ranks:
            return None
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def weight_parts(self) -> dict[str, tuple[WeightPart, ...]]:
        """Return the parts of the sliced weights that have several, by role: of queries, keys and values."""
        return dict.fromkeys(
            ("delta_qkv", "conv"), (WeightPart(self.keys), WeightPart(self.keys), WeightPart(self.values))
        )

    def projected(self, x: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the convolution reads, [tokens, channels], and the gate of the output, [tokens, values].

        layer: a MixerLayer, or a KernelLayer.
        """
        if {"delta_conv_in.weight", "delta_q.weight"} & layer.weights.keys():  # joined, or int8 and apart in memory
            return layer.linear("delta_conv_in", x), layer.linear("delta_z", x)
        return layer.linear("delta_in", x).split([self.channels, self.values], dim=-1)

    def mixed(self, x: torch.Tensor, layer: MixerLayer) -> torch.Tensor:
        """Return the mixer's output for x [tokens, hidden], and update the states of its sequences."""
        linear, weights = layer.linear, layer.weights
        qkv, z = self.projected(x, layer)
        b, a = linear("delta_ba", x).chunk(2, dim=-1)
        qkv = F.silu(layer.convolved(qkv))
        q, k, v = qkv.split([self.keys, self.keys, self.values], dim=-1)
        q, k = (rows.unflatten(-1, (self.key_heads, -1)) for rows in (q, k))
        v, z = (rows.unflatten(-1, (self.value_heads, -1)) for rows in (v, z))
        time_step = F.softplus(a.float() + weights["dt_bias.weight"].float())
        decay = (-weights["a_log.weight"].float().exp() * time_step).exp()
        beta = b.sigmoid() * self.beta_scale
        read = gated_delta_rule(q, k, v, decay.unsqueeze(-1), beta, layer.states[0], layer.groups)
        normed = gated_norm(read, z, weights["delta_norm.weight"], self.norm_eps or layer.eps)
        return linear("delta_o", normed.flatten(1))


@dataclass(frozen=True)
class KimiDeltaAttention:
    """Sizes of a model's Kimi delta attentions: gated delta nets in which each element of a key has a decay.

    heads, head_dim: of queries, keys and values.  conv_width: of the convolution, in tokens.
    """

    kind: ClassVar[str] = "Kimi delta attention"
    heads: int
    head_dim: int
    conv_width: int

    @property
    def inner(self) -> int:
        """Elements of all queries, of all keys, and of all values."""
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Elements per token that a layer holds at once."""
        return 16 * self.inner  # before and after the convolution, in float32 too, with decays and gates

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each role's weight.  hidden: the model's hidden size."""
        return {
            **dict.fromkeys(("delta_q", "delta_k", "delta_v"), (self.inner, hidden)),
            **dict.fromkeys(("delta_forget_a", "delta_z_a"), (self.head_dim, hidden)),
            **dict.fromkeys(("delta_forget_b", "delta_z_b"), (self.inner, self.head_dim)),
            "delta_b": (self.heads, hidden),
            "conv": (self.conv_width, 3 * self.inner),
            "dt_bias": (self.inner,),
            "a_log": (self.heads,),
            "delta_norm": (self.head_dim,),
            "delta_o": (hidden, self.inner),
        }

    def state_shapes(self, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a sequence's states: each head's matrix, and the convolution's latest inputs."""
        return (self.heads, self.head_dim, padded(self.head_dim, lanes)), (self.conv_width - 1, 3 * self.inner)

    def sliced(self, ranks: int) -> Self | None:
        """Return the sizes of the slice that each of `ranks` ranks has; None if they cannot divide the heads."""
        return None if self.heads % ranks else replace(self, heads=self.heads // ranks)

    def weight_parts(self) -> dict[str, tuple[WeightPart, ...]]:
        """Return the parts of the sliced weights that have several, by role: of queries, keys and values."""
        return {"conv": (WeightPart(self.inner),) * 3}

    def mixed(self, x: torch.Tensor, layer: MixerLayer) -> torch.Tensor:
        """Return the mixer's output for x [tokens, hidden], and update the states of its sequences."""
        linear, weights = layer.linear, layer.weights
        b, forget, z = linear("delta_ba", x).split([self.heads, self.head_dim, self.head_dim], dim=-1)
        qkv = F.silu(layer.convolved(linear("delta_conv_in", x)))
        q, k, v = (rows.unflatten(-1, (self.heads, -1)) for rows in qkv.chunk(3, dim=-1))
        time_step = linear("delta_forget_b", forget).float() + weights["dt_bias.weight"].float()
        # Hugging Face's softplus (transformers 5.23), whose sum rounds.
        time_step = torch.where(time_step > 20, time_step, (1 + time_step.exp()).log())
        decay = (-weights["a_log.weight"].float().exp()[:, None] * time_step.unflatten(-1, (self.heads, -1))).exp()
        read = gated_delta_rule(q, k, v, decay, b.sigmoid(), layer.states[0], layer.groups)
        z = linear("delta_z_b", z).unflatten(-1, (self.heads, -1))
        return linear("delta_o", sigmoid_gated_norm(read, z, weights["delta_norm.weight"], layer.eps).flatten(1))


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    groups: Sequence[StateRows],
) -> torch.Tensor:
    """Return what each token reads of the state, after it has decayed and corrected it.  [tokens, value_heads,
    value_dim]

    q, k [tokens, key_heads, key_dim]; v [tokens, value_heads, value_dim]; decay float32 [tokens, value_heads, 1 or
    key_dim]; beta [tokens, value_heads]; state float32 [slots, value_heads, key_dim, value_dim].  Returns v's dtype.
    """
    out, repeats = torch.empty_like(v), v.shape[1] // q.shape[1]
    q, k = (normed(x.float()).repeat_interleave(repeats, dim=1) for x in (q, k))
    q, wide, beta = q * q.shape[-1] ** -0.5, v.float(), beta.float()
    for group in groups:
        held = state[group.slots].masked_fill(group.fresh[:, None, None, None], 0)
        for rows in group.rows.unbind(1):
            held = held * decay[rows].unsqueeze(-1)
            key = k[rows].unsqueeze(-1)
            delta = (wide[rows] - (held * key).sum(-2)) * beta[rows].unsqueeze(-1)
            held = held + key * delta.unsqueeze(-2)
            out[rows] = (held * q[rows].unsqueeze(-1)).sum(-2).to(v.dtype)
        state[group.slots] = held
    return out


def normed(x: torch.Tensor) -> torch.Tensor:
    """x divided by its norm over the last dimension.  float32, any shape."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head, times silu of its gate.  x, z [tokens, heads, size], weight [size].  Returns x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * wide.to(x.dtype)) * F.silu(z.float())).to(x.dtype)


def sigmoid_gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head, times the sigmoid of its gate, rounded once.  Shapes and dtype as `gated_norm`'s."""
    wide = x.float()
    wide = weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))
    return (wide * z.float().sigmoid()).to(x.dtype)
