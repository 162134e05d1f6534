"""Slices for inference tensor parallelism: the part of each role's tensor that a rank of a group keeps.

Column-, row- and vocabulary-parallel as in Megatron-LM (arXiv:1909.08053): the outputs of a rank's heads and of its
part of the MLP are summed over the group. Where a size does not divide, the last ranks' slices are padded with zeros: a
hidden unit with zero weights adds nothing, since all known activations map 0 to 0.
"""

from dataclasses import dataclass, replace

import torch

from hybrid.kernels.recurrent import WeightPart
from hybrid.models.spec import ATTENTION, HYBRID, LATENT_ATTENTION, DecoderLayout, DecoderSpec, ParamRef
from hybrid.models.tp_plan import TensorPlan
from hybrid.weights.lora import LowRank


@dataclass(frozen=True)
class Shard:
    """Part `index` of `size` equal parts."""

    size: int
    index: int


WHOLE = Shard(1, 0)


def sizes_that_fit(heads: int, *kv_heads: int) -> list[int]:
    """Return the tensor-parallel sizes that the heads can be divided by.

    A size divides `heads`, and divides each of `kv_heads` or is a multiple of it (ranks then share key and value
    heads).
    """
    sizes = (n for n in range(1, heads + 1) if heads % n == 0)
    return [n for n in sizes if all(count % n == 0 or n % count == 0 for count in kv_heads)]


def require_divisible(size: int, heads: int, *kv_heads: int, key: str = "hybrid_engine.inference_tp_size") -> None:
    """Raise ValueError if the heads cannot be divided over `size` ranks.  key: the setting that the error names."""
    fits = sizes_that_fit(heads, *kv_heads)
    if size not in fits:
        raise ValueError(
            f"{key}: {size} given; the model's {heads} attention heads and {' or '.join(map(str, kv_heads))} key "
            f"and value heads can be shared out by {', '.join(map(str, fits))}"
        )


def decoder_sizes(spec: DecoderSpec) -> list[int]:
    """Return the tensor-parallel sizes that a decoder's heads, and its recurrent mixers, can be divided by."""
    mixer = spec.recurrent
    if mixer is None:
        return sizes_that_fit(spec.num_heads, *spec.kv_head_counts)
    by_heads = has_attention(spec)
    sizes = sizes_that_fit(spec.num_heads, *spec.kv_head_counts) if by_heads else range(1, spec.hidden_size + 1)
    return [n for n in sizes if mixer.sliced(n) is not None]


def require_decoder_divisible(size: int, spec: DecoderSpec, key: str = "hybrid_engine.inference_tp_size") -> None:
    """Raise ValueError if a decoder cannot be divided over `size` ranks.  key: the setting that the error names."""
    if spec.recurrent is None:
        require_divisible(size, spec.num_heads, *spec.kv_head_counts, key=key)
    elif size not in (fits := decoder_sizes(spec)):
        heads = "attention heads and its " if has_attention(spec) else ""
        raise ValueError(
            f"{key}: {size} given; the model's {heads}{spec.recurrent.kind}s can be shared out by "
            f"{', '.join(map(str, fits))}"
        )


def has_attention(spec: DecoderSpec) -> bool:
    """Whether a layer has attention."""
    return any(layer.mixer in (ATTENTION, LATENT_ATTENTION, HYBRID) for layer in spec.layers)


def shard_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """`spec` with one rank's heads. With fewer key and value heads than ranks, ranks share them: each has one."""
    heads = spec.num_heads // shard.size
    alibi = None if spec.alibi is None else spec.alibi[shard.index * heads : (shard.index + 1) * heads]
    layers = tuple(
        replace(layer, num_kv_heads=max(layer.num_kv_heads // shard.size, 1)) if layer.num_kv_heads else layer
        for layer in spec.layers
    )
    kv_heads = max(spec.num_kv_heads // shard.size, 1)
    recurrent = None if spec.recurrent is None else spec.recurrent.sliced(shard.size)
    assert (recurrent is None) == (spec.recurrent is None), f"{shard.size} ranks do not divide the mixers"
    return replace(spec, layers=layers, num_heads=heads, num_kv_heads=kv_heads, alibi=alibi, recurrent=recurrent)


def part_of(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """Return a view of a rank's part of dimension `dim`; shorter than the others' on the last ranks if the size does
    not divide."""
    width = part_width(tensor, dim, shard)
    start = min(width * shard.index, tensor.shape[dim])
    return tensor.narrow(dim, start, min(width, tensor.shape[dim] - start))


def part_width(tensor: torch.Tensor, dim: int, shard: Shard) -> int:
    """Return the size of dimension `dim` in every rank's slice."""
    return -(-tensor.shape[dim] // shard.size)


def padded(part: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """`part`, with zeros at the end of dimension `dim` if that is shorter than `width`."""
    if part.shape[dim] == width:
        return part
    shape = list(part.shape)
    shape[dim] = width - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def chunk(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """Return a rank's slice of dimension `dim`, of the same size on every rank: padded with zeros at the end."""
    return padded(part_of(tensor, dim, shard), dim, part_width(tensor, dim, shard))


def row_dim(tensor: torch.Tensor) -> int:
    """Return the output dimension of a matrix [out, in], of expert matrices [experts, out, in], or of a bias [out]."""
    return max(tensor.dim() - 2, 0)


# The slicing of each role's tensors, as in `TPModule.cuts`; every rank keeps the full tensors of other roles.
ROLE_CUTS = {
    **dict.fromkeys(("q", "q_norm", "q_b", "kv_b", "sinks", "gate", "up", "embedding", "head"), "rows"),
    "attention_gate": "rows",
    **dict.fromkeys(("shared_gate", "shared_up"), "rows"),
    **dict.fromkeys(("k", "v", "k_norm"), "kv"),
    **dict.fromkeys(("o", "down", "experts_down", "shared_down"), "columns"),
    "experts_gate_up": "halves",
    # Of recurrent mixers, by their heads or channels: `RecurrentMixer.weight_parts`.
    **dict.fromkeys(("delta_qkv", "delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a"), "rows"),
    **dict.fromkeys(("delta_forget_b", "delta_z_b", "dt_bias", "a_log"), "rows"),
    **dict.fromkeys(("mamba_in", "skip", "mamba_norm", "conv_in"), "rows"),
    **dict.fromkeys(("conv", "delta_o", "mamba_o", "conv_o"), "columns"),
}
# Roles of products that are summed over the group.
SUMMED = ("o", "down", "experts_down", "shared_down", "delta_o", "mamba_o", "conv_o")


def slice_spec_of(role: str, spec: DecoderSpec) -> str | None:
    """Return the slicing of "<role>.weight" [out, in] or "<role>.bias" [out]; None: not sliced.

    Biases of outputs that are summed over the group belong to the first rank.
    """
    name, _, kind = role.partition(".")
    if name in ("q_norm", "k_norm") and spec.qk_norm != "row":
        return None
    if name == "experts_gate_up" and not spec.gated:  # up alone
        return "rows"
    return "once" if kind == "bias" and name in SUMMED else ROLE_CUTS.get(name)


@dataclass(frozen=True)
class SliceSpec:
    """A rank's slice of a full tensor: a matrix [out, in], experts' [experts, out, in], or a bias [out].

    kind: a value of `TPModule.cuts`.  kv_heads: over all ranks, for the kind "kv".
    experts: the rank's experts, if a leading experts dimension is divided too.
    weight_parts: of the dimension that is cut, each of which is divided over the ranks; (): it is one part.
    """

    kind: str
    shard: Shard
    kv_heads: int = 0
    experts: Shard = WHOLE
    weight_parts: tuple[WeightPart, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in ("rows", "columns", "halves", "kv", "once"), f"{self.kind!r} is not a cut"

    @property
    def keeps_all(self) -> bool:
        """Whether the slice is the full tensor."""
        return self.kind == "once" and self.shard.index == 0

    def dim(self, tensor: torch.Tensor) -> int:
        """Return the dimension that is cut."""
        return tensor.dim() - 1 if self.kind == "columns" else row_dim(tensor)

    def parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Return the slice's parts in order along `dim`: views of the full tensor, and the width to which each is
        padded with zeros. [] if another rank has all of it."""
        if self.experts.size > 1:
            tensor = chunk(tensor, 0, self.experts)
        dim, shard = self.dim(tensor), self.shard
        if self.kind == "once":
            return [(tensor, tensor.shape[dim])] if self.keeps_all else []
        if self.kind == "kv" and self.kv_heads < shard.size:  # ranks share heads
            shard = Shard(self.kv_heads, shard.index * self.kv_heads // shard.size)
        if self.weight_parts:
            blocks = tensor.split([part.size for part in self.weight_parts], dim)
            shards = [WHOLE if part.shared else shard for part in self.weight_parts]
        else:
            blocks = tensor.chunk(2, dim) if self.kind == "halves" else (tensor,)  # gate and up
            shards = [shard] * len(blocks)
        pairs = zip(blocks, shards, strict=True)
        return [(part_of(block, dim, shard), part_width(block, dim, shard)) for block, shard in pairs]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the slice of a full tensor, a view where possible; None if another rank has all of it."""
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
    cut: SliceSpec | None
    row_parallel: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the full parameter."""
        return self.ref.select is None and (self.cut is None or self.cut.keeps_all)

    def of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Return the slice of the full parameter `whole`; None if another rank has all of it."""
        selected = self._selected(whole)
        return selected if self.cut is None else self.cut(selected)

    def _selected(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.ref.select is None else self.ref.select(whole)

    def at(self, index: int) -> "Slice":
        """Return the slice of the group's rank `index`."""
        if self.cut is None:
            return self
        return replace(self, cut=replace(self.cut, shard=replace(self.cut.shard, index=index)))

    def views(self, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of equal tensors: of the full parameter `whole`, and of a new contiguous tensor for the slice,
        whose other elements are 0. Of the parameter they are views, unless `ref.select` makes a copy."""
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
        """Return the factors of this slice's low-rank delta. b must have the rows of `ref`.

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
    """Return a rank's slice of every ParamRef of a layout.

    experts: the rank's experts, for expert parallelism; the matrices of these are sliced by `shard`.
    """
    slices = {}
    spec = layout.spec
    parts = {} if spec.recurrent is None else spec.recurrent.weight_parts()
    by_layer = [(layout.outer, spec), *((layer, spec.of_layer(index)) for index, layer in enumerate(layout.layers))]
    for layer, of_layer in by_layer:
        for role, ref in layer.items():
            kind = slice_spec_of(role, of_layer)
            divided = experts if role.startswith("experts_") else WHOLE
            key = ("vocabulary" if role in VOCABULARY else role, ref.select)
            name, _, suffix = role.partition(".")
            more = of_layer.num_kv_heads, divided, parts.get(name, ())
            cut = None if kind is None else SliceSpec(kind, shard, *more)
            row_parallel = name in SUMMED and name != "experts_down" and suffix == "weight"
            slices[ref] = Slice(ref, key, cut, row_parallel)
    return slices


def planned_slices(plan: TensorPlan, shard: Shard) -> dict[ParamRef, Slice]:
    """Return a rank's slice of every parameter that a plan slices."""
    slices = {}
    for share in plan.shares:
        for name, kind in share.cuts.items():
            ref = ParamRef(share.module, name)
            slices[ref] = Slice(ref, (kind,), SliceSpec(kind, shard, share.kv_heads))
    return slices
