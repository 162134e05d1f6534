"""Slices for inference tensor parallelism: the part of each role's tensor that a rank of a group keeps.

Column-, row- and vocabulary-parallel as in Megatron-LM (arXiv:1909.08053): the outputs of a rank's heads and of its
part of the MLP are summed over the group. Where a size does not divide, the last ranks' slices are padded with zeros: a
hidden unit with zero weights adds nothing, since all known activations map 0 to 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hybrid.models.spec import DecoderLayout, DecoderSpec, ParamRef
from hybrid.models.tp_plan import TensorPlan
from hybrid.weights.lora import LowRank

Cut = Callable[[torch.Tensor], torch.Tensor | None]  # a full tensor to a rank's slice; None: another rank has all of it


@dataclass(frozen=True)
class Shard:
    """Part `index` of `size` equal parts."""

    size: int
    index: int


WHOLE = Shard(1, 0)


def sizes_that_fit(heads: int, kv_heads: int) -> list[int]:
    """The tensor-parallel sizes that the heads can be divided by.

    A size divides `heads`, and divides `kv_heads` or is a multiple of it (ranks then share key and value heads).
    """
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def require_divisible(heads: int, kv_heads: int, size: int, key: str = "hybrid_engine.inference_tp_size") -> None:
    """Raise ValueError if the heads cannot be divided over `size` ranks.  key: the setting that the error names."""
    fits = sizes_that_fit(heads, kv_heads)
    if size not in fits:
        raise ValueError(
            f"{key}: {size} given; the model's {heads} attention heads and {kv_heads} key "
            f"and value heads can be shared out by {', '.join(map(str, fits))}"
        )


def shard_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """`spec` with one rank's heads. With fewer key and value heads than ranks, ranks share them: each has one."""
    heads = spec.num_heads // shard.size
    alibi = None if spec.alibi is None else spec.alibi[shard.index * heads : (shard.index + 1) * heads]
    return replace(spec, num_heads=heads, num_kv_heads=max(spec.num_kv_heads // shard.size, 1), alibi=alibi)


def chunk(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """A rank's slice of dimension `dim`, of the same size on every rank: padded with zeros at the end."""
    width = -(-tensor.shape[dim] // shard.size)
    start = min(width * shard.index, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(width, tensor.shape[dim] - start))
    if part.shape[dim] == width:
        return part
    shape = list(part.shape)
    shape[dim] = width - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def kv_rows(tensor: torch.Tensor, kv_heads: int, shard: Shard) -> torch.Tensor:
    """The rows of the key or value heads that a rank's query heads attend to.  tensor: [kv_heads · head_dim, ...]"""
    if kv_heads >= shard.size:
        return chunk(tensor, 0, shard)
    return tensor.chunk(kv_heads)[shard.index * kv_heads // shard.size]


def row_dim(tensor: torch.Tensor) -> int:
    """The output dimension of a matrix [out, in], of expert matrices [experts, out, in], or of a bias [out]."""
    return max(tensor.dim() - 2, 0)


def both_halves(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A rank's slice of the gate and of the up projection, concatenated.

    tensor: [2 · inner, hidden], gate first, with or without a leading experts dimension, or a bias [2 · inner].
    """
    dim = row_dim(tensor)
    return torch.cat([chunk(half, dim, shard) for half in tensor.chunk(2, dim=dim)], dim=dim)


# How each role's tensors are sliced, by the values of `Share.cuts`; every rank keeps the full tensors of other roles.
ROLE_CUTS = {
    **dict.fromkeys(("q", "q_norm", "gate", "up", "embedding", "head"), "rows"),
    **dict.fromkeys(("k", "v", "k_norm"), "kv"),
    **dict.fromkeys(("o", "down", "experts_down"), "columns"),
    "experts_gate_up": "halves",
}


def cut_of(role: str, spec: DecoderSpec) -> str | None:
    """How "<role>.weight" [out, in] or "<role>.bias" [out] is sliced; None: not.

    Biases of outputs that are summed over the group belong to the first rank.
    """
    name, _, kind = role.partition(".")
    if name in ("q_norm", "k_norm") and spec.qk_norm != "row":
        return None
    return "once" if kind == "bias" and name in ("o", "down") else ROLE_CUTS.get(name)


def cutter(cut: str, kv_heads: int, shard: Shard) -> Cut | None:
    """The function that slices a tensor as `cut`, a value of `Share.cuts`; None: the rank keeps the full tensor. For
    ranks without the tensor the function gives None."""
    if cut == "once" and shard.index == 0:
        return None
    return {
        "rows": lambda tensor: chunk(tensor, row_dim(tensor), shard),
        "columns": lambda tensor: chunk(tensor, tensor.dim() - 1, shard),
        "halves": lambda tensor: both_halves(tensor, shard),
        "kv": lambda tensor: kv_rows(tensor, kv_heads, shard),
        "once": lambda tensor: None,
    }[cut]


def of_experts(cut: Cut, experts: Shard) -> Cut:
    """The function that slices the matrices of a rank's experts by `cut`."""
    return lambda tensor: cut(chunk(tensor, 0, experts))


@dataclass(frozen=True)
class Slice:
    """A rank's slice of the tensor at one ParamRef.

    key: equal for equal slices of the same tensor, such as those of tied embeddings.
    cut: slices the full tensor; None: the slice is the full tensor.
    row_parallel: the matrix is sliced along its inputs.
    """

    ref: ParamRef
    key: tuple
    cut: Cut | None
    row_parallel: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the full parameter."""
        return self.cut is None and self.ref.select is None

    def of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """The slice of the full parameter `whole`; None if another rank has all of it."""
        selected = whole if self.ref.select is None else self.ref.select(whole)
        return selected if self.cut is None else self.cut(selected)

    def of_factors(self, low_rank: LowRank) -> LowRank:
        """The factors of this slice's low-rank delta. b must have the rows of `ref`.

        A row-parallel slice gets a slice of `a`: a·x is then a sum over ranks, and as b is linear, ranks may apply it
        before the sum.
        """
        if self.cut is None:
            return low_rank
        if self.row_parallel:
            return low_rank._replace(a=self.cut(low_rank.a))
        return low_rank._replace(b=self.cut(low_rank.b))


WHOLE_KEY = ("whole",)  # of a slice that is all of a parameter
VOCABULARY = ("embedding.weight", "head.weight")  # sliced alike, so that tied weights are kept once


def slices_of(layout: DecoderLayout, shard: Shard, experts: Shard = WHOLE) -> dict[ParamRef, Slice]:
    """A rank's slice of every ParamRef of a layout.

    experts: the rank's experts, for expert parallelism; the matrices of these are sliced by `shard`.
    """
    slices = {}
    for layer in (layout.outer, *layout.layers):
        for role, ref in layer.items():
            cut = cut_of(role, layout.spec)
            function = None if cut is None else cutter(cut, layout.spec.num_kv_heads, shard)
            if role.startswith("experts_"):
                function = of_experts(function, experts)
            key = ("vocabulary" if role in VOCABULARY else role, ref.select)
            slices[ref] = Slice(ref, key, function, role in ("o.weight", "down.weight"))
    return slices


def planned_slices(plan: TensorPlan, shard: Shard) -> dict[ParamRef, Slice]:
    """A rank's slice of every parameter that a plan slices."""
    slices = {}
    for share in plan.shares:
        for name, cut in share.cuts.items():
            ref = ParamRef(share.module, name)
            slices[ref] = Slice(ref, (cut,), cutter(cut, share.kv_heads, shard))
    return slices
