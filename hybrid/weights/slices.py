"""Slices for inference tensor parallelism: which part of a role's tensor a rank of a group keeps.

Columns, rows and vocabulary as in Megatron-LM (arXiv:1909.08053): what a rank makes of its heads and of its part of the
MLP is summed over the group. Where a size does not divide, the last ranks' parts end in zeros: a hidden unit whose
weights are zeros adds nothing, whatever the activation (all known ones map 0 to 0).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hybrid.models.spec import DecoderLayout, DecoderSpec, ParamRef
from hybrid.models.tp_plan import Share, TensorPlan
from hybrid.weights.lora import LowRank


@dataclass(frozen=True)
class Shard:
    """One of `size` parts, the one at `index`."""

    size: int
    index: int


WHOLE = Shard(1, 0)


def sizes_that_fit(heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks that can share out the heads."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def require_divisible(heads: int, kv_heads: int, size: int, key: str = "hybrid_engine.inference_tp_size") -> None:
    """Raise ValueError, in words, where the heads cannot be shared out. key: the setting that asks for it."""
    fits = sizes_that_fit(heads, kv_heads)
    if size not in fits:
        raise ValueError(
            f"{key}: {size} given; the model's {heads} attention heads and {kv_heads} key "
            f"and value heads can be shared out by {', '.join(map(str, fits))}"
        )


def shard_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """What a rank computes of `spec`: its heads. Key and value heads are repeated where there are fewer than ranks."""
    heads = spec.num_heads // shard.size
    alibi = None if spec.alibi is None else spec.alibi[shard.index * heads : (shard.index + 1) * heads]
    return replace(spec, num_heads=heads, num_kv_heads=max(spec.num_kv_heads // shard.size, 1), alibi=alibi)


def chunk(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """A rank's part of a dimension; zeros where it has ended."""
    width = -(-tensor.shape[dim] // shard.size)
    start = min(width * shard.index, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(width, tensor.shape[dim] - start))
    if part.shape[dim] == width:
        return part
    shape = list(part.shape)
    shape[dim] = width - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def kv_rows(tensor: torch.Tensor, kv_heads: int, shard: Shard) -> torch.Tensor:
    """Rows of the key or value heads that a rank's query heads look at."""
    if kv_heads >= shard.size:
        return chunk(tensor, 0, shard)
    return tensor.chunk(kv_heads)[shard.index * kv_heads // shard.size]


def row_dim(tensor: torch.Tensor) -> int:
    """The dimension of the outputs of a matrix, of experts' matrices [experts, out, in], or of a bias."""
    return max(tensor.dim() - 2, 0)


def both_halves(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A rank's part of the gates, above its part of the ups.  [2 · inner, hidden], of experts or not, or a bias"""
    dim = row_dim(tensor)
    return torch.cat([chunk(half, dim, shard) for half in tensor.chunk(2, dim=dim)], dim=dim)


def cut_of(
    role: str, spec: DecoderSpec, shard: Shard, experts: Shard = WHOLE
) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """How a rank's part of "<role>.weight" or "<role>.bias" is cut from the whole, [out, in] or [out]; None: it is the
    whole. Biases of what is summed over the group are the first rank's, None for the others.

    experts: which of the experts are the rank's; of these it has its part.
    """
    name, _, kind = role.partition(".")
    row_norm = name in ("q_norm", "k_norm") and spec.qk_norm == "row"
    if name in ("q", "gate", "up", "embedding", "head") or (row_norm and name == "q_norm"):
        return lambda tensor: chunk(tensor, 0, shard)
    if name in ("k", "v") or row_norm:
        return lambda tensor: kv_rows(tensor, spec.num_kv_heads, shard)
    if name in ("o", "down"):
        if kind == "weight":
            return lambda tensor: chunk(tensor, 1, shard)
        return None if shard.index == 0 else lambda tensor: None
    if name == "experts_gate_up":
        return lambda tensor: both_halves(chunk(tensor, 0, experts), shard)
    if name == "experts_down":
        return lambda tensor: chunk(chunk(tensor, 0, experts), 2, shard)
    return None


@dataclass(frozen=True)
class Slice:
    """A rank's part of the role at one place.

    key: equal for parts that are the same, as of tied embeddings.  row_parallel: a matrix is cut along its inputs.
    """

    ref: ParamRef
    key: tuple
    cut: Callable[[torch.Tensor], torch.Tensor | None] | None
    row_parallel: bool = False

    def of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """The part, from the whole tensor of the place; None where another rank has it."""
        selected = whole if self.ref.select is None else self.ref.select(whole)
        return selected if self.cut is None else self.cut(selected)

    def of_factors(self, low_rank: LowRank) -> LowRank:
        """What a rank's part of the weight is given of b · a, b's rows being the place's.

        Where inputs are cut, a x is a sum over ranks; b is linear, so ranks may apply it before they sum.
        """
        if self.cut is None:
            return low_rank
        if self.row_parallel:
            return low_rank._replace(a=self.cut(low_rank.a))
        return low_rank._replace(b=self.cut(low_rank.b))


VOCABULARY = ("embedding.weight", "head.weight")  # cut alike, so that tied ones are kept once


def slices_of(layout: DecoderLayout, shard: Shard, experts: Shard = WHOLE) -> dict[ParamRef, Slice]:
    """A rank's part of every place of a reading."""
    found = {}
    for layer in (layout.outer, *layout.layers):
        for role, ref in layer.items():
            key = ("vocabulary" if role in VOCABULARY else role, ref.select)
            cut = cut_of(role, layout.spec, shard, experts)
            found[ref] = Slice(ref, key, cut, role in ("o.weight", "down.weight"))
    return found


def cut_as(cut: str, share: Share, shard: Shard) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """How a rank's part is cut by a word of `Share.cuts`; None: it is the whole."""
    if cut == "once" and shard.index == 0:
        return None
    return {
        "rows": lambda tensor: chunk(tensor, row_dim(tensor), shard),
        "columns": lambda tensor: chunk(tensor, tensor.dim() - 1, shard),
        "halves": lambda tensor: both_halves(tensor, shard),
        "kv": lambda tensor: kv_rows(tensor, share.kv_heads, shard),
        "once": lambda tensor: None,
    }[cut]


def planned_slices(plan: TensorPlan, shard: Shard) -> dict[ParamRef, Slice]:
    """A rank's part of every place that a plan cuts."""
    found = {}
    for share in plan.shares:
        for name, cut in share.cuts.items():
            ref = ParamRef(share.module, name)
            found[ref] = Slice(ref, (cut,), cut_as(cut, share, shard))
    return found
