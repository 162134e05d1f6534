"""Slices for inference tensor parallelism: the part of each role's tensor that a rank of a group keeps.

Column-, row- and vocabulary-parallel as in Megatron-LM (arXiv:1909.08053): the outputs of a rank's heads and of its
part of the MLP are summed over the group. Where a size does not divide, the last ranks' slices are padded with zeros: a
hidden unit with zero weights adds nothing, since all known activations map 0 to 0.
"""

from dataclasses import dataclass, replace

import torch

from hybrid.models.spec import DecoderLayout, DecoderSpec, ParamRef
from hybrid.models.tp_plan import TensorPlan
from hybrid.weights.lora import LowRank


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


def part_of(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """A view of a rank's part of dimension `dim`; shorter than the others' on the last ranks if the size does not
    divide."""
    width = part_width(tensor, dim, shard)
    start = min(width * shard.index, tensor.shape[dim])
    return tensor.narrow(dim, start, min(width, tensor.shape[dim] - start))


def part_width(tensor: torch.Tensor, dim: int, shard: Shard) -> int:
    """The size of dimension `dim` in every rank's slice."""
    return -(-tensor.shape[dim] // shard.size)


def padded(part: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """`part`, with zeros at the end of dimension `dim` if that is shorter than `width`."""
    if part.shape[dim] == width:
        return part
    shape = list(part.shape)
    shape[dim] = width - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def chunk(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """A rank's slice of dimension `dim`, of the same size on every rank: padded with zeros at the end."""
    return padded(part_of(tensor, dim, shard), dim, part_width(tensor, dim, shard))


def row_dim(tensor: torch.Tensor) -> int:
    """The output dimension of a matrix [out, in], of expert matrices [experts, out, in], or of a bias [out]."""
    return max(tensor.dim() - 2, 0)


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


@dataclass(frozen=True)
class Cut:
    """Cuts a rank's slice out of a full tensor: a matrix [out, in], experts' [experts, out, in], or a bias [out].

    kind: a value of `Share.cuts`.  kv_heads: over all ranks, for the kind "kv".
    experts: the rank's experts, if a leading experts dimension is divided too.
    """

    kind: str
    shard: Shard
    kv_heads: int = 0
    experts: Shard = WHOLE

    def __post_init__(self) -> None:
        assert self.kind in ("rows", "columns", "halves", "kv", "once"), f"{self.kind!r} is not a cut"

    @property
    def keeps_all(self) -> bool:
        """Whether the slice is the full tensor."""
        return self.kind == "once" and self.shard.index == 0

    def dim(self, tensor: torch.Tensor) -> int:
        """The dimension that is cut."""
        return tensor.dim() - 1 if self.kind == "columns" else row_dim(tensor)

    def parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """What the slice consists of, in order along `dim`: parts of the full tensor, and the width that each is padded
        to with zeros. [] if another rank has all of it."""
        if self.experts.size > 1:
            tensor = chunk(tensor, 0, self.experts)
        dim, shard = self.dim(tensor), self.shard
        if self.kind == "once":
            return [(tensor, tensor.shape[dim])] if self.keeps_all else []
        if self.kind == "kv" and self.kv_heads < shard.size:  # ranks share heads
            shard = Shard(self.kv_heads, shard.index * self.kv_heads // shard.size)
        blocks = tensor.chunk(2, dim) if self.kind == "halves" else [tensor]  # gate and up
        return [(part_of(block, dim, shard), part_width(block, dim, shard)) for block in blocks]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The slice of a full tensor, a view where possible; None if another rank has all of it."""
        dim = self.dim(tensor)
        parts = [padded(part, dim, width) for part, width in self.parts(tensor)]
        return torch.cat(parts, dim) if len(parts) > 1 else next(iter(parts), None)


@dataclass(frozen=True)
class Slice:
    """A rank's slice of the tensor at one ParamRef.

    key: equal for equal slices of the same tensor, such as those of tied embeddings.
    cut: None: the slice is the full tensor on every rank.
    row_parallel: the matrix is sliced along its inputs.
    """

    ref: ParamRef
    key: tuple
    cut: Cut | None
    row_parallel: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the full parameter."""
        return self.ref.select is None and (self.cut is None or self.cut.keeps_all)

    def of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """The slice of the full parameter `whole`; None if another rank has all of it."""
        selected = self._selected(whole)
        return selected if self.cut is None else self.cut(selected)

    def _selected(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.ref.select is None else self.ref.select(whole)

    def at(self, index: int) -> "Slice":
        """The slice of the group's rank `index`."""
        if self.cut is None:
            return self
        return replace(self, cut=replace(self.cut, shard=replace(self.cut.shard, index=index)))

    def views(self, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal tensors: of the full parameter `whole`, and of a new contiguous tensor for the slice, whose
        other elements are 0. Of the parameter they are views, unless `ref.select` makes a copy."""
        selected, part = self._selected(whole), self.of(whole)
        if part is None:
            return []
        target = torch.empty_like(part, memory_format=torch.contiguous_format)
        if self.cut is None:
            return [(selected, target)]
        dim, parts = self.cut.dim(selected), self.cut.parts(selected)
        targets = target.split([width for _, width in parts], dim)
        return [(source, to.narrow(dim, 0, source.shape[dim])) for (source, _), to in zip(parts, targets, strict=True)]

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
            kind = cut_of(role, layout.spec)
            divided = experts if role.startswith("experts_") else WHOLE
            key = ("vocabulary" if role in VOCABULARY else role, ref.select)
            cut = None if kind is None else Cut(kind, shard, layout.spec.num_kv_heads, divided)
            slices[ref] = Slice(ref, key, cut, role in ("o.weight", "down.weight"))
    return slices


def planned_slices(plan: TensorPlan, shard: Shard) -> dict[ParamRef, Slice]:
    """A rank's slice of every parameter that a plan slices."""
    slices = {}
    for share in plan.shares:
        for name, kind in share.cuts.items():
            ref = ParamRef(share.module, name)
            slices[ref] = Slice(ref, (kind,), Cut(kind, shard, share.kv_heads))
    return slices
