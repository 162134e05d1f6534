"""Tensor parallelism by an injection policy: the model's own modules, with linear layers replaced by a rank's slices.

In the layer classes that a policy names, the listed projections are row-parallel (their outputs are summed over ranks,
arXiv:1909.08053), and every other linear layer is column-parallel. All ranks call with the same inputs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid.parallel import InferenceGroup
from hybrid.weights.int8 import Int8Linear, WeightLoader, int8_linear, is_linear, keep_in_int8
from hybrid.weights.slices import Shard, chunk

# Attributes of attention modules that hold numbers of heads, or their total width.
PER_RANK = tuple("n_heads num_heads n_head num_attention_heads num_key_value_heads all_head_size inner_dim".split())
# The linear layer that outputs all queries, then all keys, then all values; the attribute with the width of each.
CONCATENATED_QKV, QKV_WIDTH = "c_attn", "split_size"
INTERLEAVED_QKV = "query_key_value"  # outputs them interleaved by head; its module may take ALiBi biases
Policy = Mapping[type, "str | tuple[str, ...] | LayerPolicy"]  # by layer class; plain names are those of `sums`


@dataclass(frozen=True)
class LayerPolicy:
    """How ranks share a class of layers, if the names of the row-parallel projections are not enough.

    sums: name endings of row-parallel linear layers: they take a slice of their inputs, and their outputs are summed.
    whole: name endings of linear layers and embeddings that are replicated (a router, a gate). All others are
        column-parallel.
    counts: attributes of the modules that contain them, which are divided by the number of ranks where they exist.
    """

    sums: tuple[str, ...]
    whole: tuple[str, ...] = ()
    counts: tuple[str, ...] = PER_RANK


class ParallelLinear(nn.Module):
    """A rank's slice of a linear layer; int8 if `linear` is an Int8Linear.

    row_parallel: slices the inputs, and sums the outputs over the group. Otherwise column-parallel.
    blocks: number of equal matrices concatenated in the outputs, each of which is sliced.
    """

    def __init__(self, linear: nn.Linear | Conv1D | Int8Linear, group: InferenceGroup, row_parallel: bool, blocks: int):
        super().__init__()
        self.group, self.row_parallel, self.blocks = group, row_parallel, blocks
        self.transposed = isinstance(linear, Conv1D) or getattr(linear, "transposed", False)
        self.groups = getattr(linear, "groups", 0)  # int8 scales per output channel; 0: not quantized
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.register_buffer("weight_scale", None)

    def load_weight(self, weight: torch.Tensor) -> None:
        """Keep this rank's slice of the full weight, which is in the layout of the replaced layer."""
        weight = weight.T if self.transposed else weight
        part = chunk(weight, 1, shard_of(self.group)) if self.row_parallel else self._rows(weight)
        if self.groups:
            keep_in_int8(self, "weight", part, self.groups)
        else:
            self.weight = own_parameter(part)

    def load_bias(self, bias: torch.Tensor) -> None:
        """Keep this rank's slice of the full bias; all of it if row-parallel, to be added after the sum."""
        self.bias = own_parameter(bias if self.row_parallel else self._rows(bias))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([chunk(block, 0, shard_of(self.group)) for block in tensor.chunk(self.blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to this rank's slice of the outputs; if row-parallel, a slice of x to the full outputs."""
        if not self.row_parallel:
            return int8_linear(x, self.weight, self.weight_scale, self.bias)
        y = self.group.sum(int8_linear(x, self.weight, self.weight_scale))
        return y if self.bias is None else y + self.bias


def shard_of(group: InferenceGroup) -> Shard:
    """This rank's part of the group's tensors."""
    return Shard(group.size, group.index)


def own_parameter(part: torch.Tensor) -> nn.Parameter:
    """A copy of `part`, contiguous and in its own memory, as a parameter without gradients."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


@dataclass(frozen=True)
class ModuleSlice:
    """How a linear layer, or a layer's embedding of relative positions, is sliced.

    row_parallel, blocks: as ParallelLinear's.  counts: as LayerPolicy's, plus the width for CONCATENATED_QKV.
    """

    row_parallel: bool
    counts: tuple[str, ...]
    blocks: int = 1


def read_policy(model: nn.Module, policy: Policy) -> dict[str, ModuleSlice]:
    """The modules that a policy slices, by name.

    Raises ValueError, as DeepSpeed does, if a key is no nn.Module class, a value is neither names nor a LayerPolicy, or
    the model has no such layer or projection.
    """
    modules = dict(model.named_modules())
    slices: dict[str, ModuleSlice] = {}
    for kind, value in policy.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ValueError(f"injection_policy: {kind!r} given; it must be a class of the model's layers")
        names = (value,) if isinstance(value, str) else value
        if not isinstance(value, LayerPolicy):
            if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"injection_policy: {value!r} given; it must be names of projections, or a hybrid.LayerPolicy"
                )
            value = LayerPolicy(tuple(names))
        for projection in (*value.sums, *value.whole):
            if not any(name.endswith(projection) for name in modules):
                raise ValueError(f"injection_policy: the model has no module whose name ends in {projection!r}")
        for path, layer in modules.items():
            for name, module in layer.named_modules() if type(layer) is kind else ():
                dotted = f".{name}"  # name endings may begin with a dot, as in DeepSpeed's policies
                if (is_linear(module) or isinstance(module, nn.Embedding)) and not dotted.endswith(value.whole):
                    slices[f"{path}.{name}"] = slice_of(dotted, module, value)
    if not slices:
        raise ValueError(f"injection_policy: the model has none of {[kind.__name__ for kind in policy]}")
    return slices


def slice_of(name: str, module: nn.Module, policy: LayerPolicy) -> ModuleSlice:
    """How a module of a layer is sliced.  name: its name in the layer, with a leading dot."""
    if name.endswith(policy.sums):
        return ModuleSlice(True, policy.counts)
    if name.endswith(f".{CONCATENATED_QKV}") and has_three_outputs(module):
        return ModuleSlice(False, (*policy.counts, QKV_WIDTH), blocks=3)
    return ModuleSlice(False, policy.counts)


def has_three_outputs(module: nn.Module) -> bool:
    """Whether a linear layer has three times as many outputs as inputs."""
    inputs = getattr(module, "nx", None) or getattr(module, "in_features", -1)  # nx: Conv1D's name
    return width_of(module) == 3 * inputs


def width_of(module: nn.Module) -> int:
    """The number of outputs of a linear layer, or of columns of an embedding."""
    return getattr(module, "nf", None) or getattr(module, "out_features", None) or module.embedding_dim


def require_divisible_heads(model: nn.Module, slices: Mapping[str, ModuleSlice], size: int) -> None:
    """Raise ValueError if `size` does not divide the heads of the sliced modules, which are given by name."""
    for name, part in slices.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        for key in part.counts:
            if getattr(parent, key, 0) % size:
                raise ValueError(
                    f"tensor_parallel.tp_size: {size} given; it must divide {key}={getattr(parent, key)} of "
                    f"{type(parent).__name__}"
                )
        heads, rest = divmod(width_of(model.get_submodule(name)), getattr(parent, "head_dim", None) or 1)
        if hasattr(parent, "head_dim") and not part.row_parallel and not rest and heads % size:
            raise ValueError(f"tensor_parallel.tp_size: {size} given; it must divide the {heads} heads of {name}")


def slice_modules(
    model: nn.Module, slices: Mapping[str, ModuleSlice], group: InferenceGroup
) -> dict[str, WeightLoader]:
    """Replace the modules `slices`, given by name, by a rank's slices, and divide their parents' counts. Gives, by
    parameter name, the function that takes the full tensor."""
    loaders: dict[str, WeightLoader] = {}
    counts: dict[nn.Module, set[str]] = {}
    for name, part in slices.items():
        path, _, child = name.rpartition(".")
        parent, module = model.get_submodule(path), model.get_submodule(name)
        counts.setdefault(parent, set()).update(part.counts)
        if isinstance(module, nn.Embedding):
            loaders[f"{name}.weight"] = functools.partial(load_columns, module, group)
            continue
        linear = ParallelLinear(module, group, part.row_parallel, part.blocks)
        setattr(parent, child, linear)
        loaders |= {f"{name}.weight": linear.load_weight, f"{name}.bias": linear.load_bias}
    for parent, keys in counts.items():
        for key in keys:
            if hasattr(parent, key):
                setattr(parent, key, getattr(parent, key) // group.size)
        if hasattr(parent, INTERLEAVED_QKV):
            parent.forward = with_sliced_alibi(parent.forward, group)
    return loaders


def load_columns(embedding: nn.Embedding, group: InferenceGroup, weight: torch.Tensor) -> None:
    """Give an embedding of relative positions, which has a column per head, this rank's columns of its full weight."""
    embedding.weight = own_parameter(chunk(weight, 1, shard_of(group)))


def with_sliced_alibi(own: Callable, group: InferenceGroup) -> Callable:
    """An attention's forward that slices ALiBi's biases, [rows · heads, 1, tokens], to this rank's heads."""

    @functools.wraps(own)
    def forward(*args: Any, alibi: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if alibi is None:
            return own(*args, **kwargs)
        heads = own.__self__.num_heads * group.size
        part = chunk(alibi.unflatten(0, (-1, heads)), 1, shard_of(group)).flatten(0, 1)
        return own(*args, alibi=part, **kwargs)

    return forward
