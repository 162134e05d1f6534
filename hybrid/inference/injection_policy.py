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
from hybrid.weights.int8 import Int8Linear, Take, int8_linear, is_linear, keep_in_int8
from hybrid.weights.slices import Shard, chunk

# Attributes of attention modules that hold numbers of heads, or their total width.
PER_RANK = tuple("n_heads num_heads n_head num_attention_heads num_key_value_heads all_head_size inner_dim".split())
# The linear layer that outputs all queries, then all keys, then all values; the attribute with the width of each.
THREE_IN_ONE, WIDTH_OF_ONE = "c_attn", "split_size"
HEAD_BY_HEAD = "query_key_value"  # one that outputs them interleaved by head; its module may take ALiBi biases
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


class PartLinear(nn.Module):
    """A rank's slice of a linear layer; int8 if `linear` is an Int8Linear.

    sums: row-parallel: slices the inputs, and sums the outputs over the group. Otherwise column-parallel.
    blocks: number of equal matrices concatenated in the outputs, each of which is sliced.
    """

    def __init__(self, linear: nn.Linear | Conv1D | Int8Linear, group: InferenceGroup, sums: bool, blocks: int = 1):
        super().__init__()
        self.group, self.sums, self.blocks = group, sums, blocks
        self.turned = isinstance(linear, Conv1D) or getattr(linear, "turned", False)
        self.groups = getattr(linear, "groups", 0)  # int8 scales per output channel; 0: not quantized
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.register_buffer("weight_scale", None)

    def take_weight(self, whole: torch.Tensor) -> None:
        """Keep this rank's slice of the full weight, which is in the layout of the replaced layer."""
        whole = whole.T if self.turned else whole
        part = chunk(whole, 1, shard_of(self.group)) if self.sums else self._outputs(whole)
        if self.groups:
            keep_in_int8(self, "weight", part, self.groups)
        else:
            self.weight = owned(part)

    def take_bias(self, whole: torch.Tensor) -> None:
        """Keep this rank's slice of the full bias; all of it if row-parallel, to be added after the sum."""
        self.bias = owned(whole if self.sums else self._outputs(whole))

    def _outputs(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([chunk(block, 0, shard_of(self.group)) for block in whole.chunk(self.blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to this rank's slice of the outputs; if row-parallel, a slice of x to the full outputs."""
        if not self.sums:
            return int8_linear(x, self.weight, self.weight_scale, self.bias)
        y = self.group.sum(int8_linear(x, self.weight, self.weight_scale))
        return y if self.bias is None else y + self.bias


def shard_of(group: InferenceGroup) -> Shard:
    """This rank's part of the group's tensors."""
    return Shard(group.size, group.index)


def owned(part: torch.Tensor) -> nn.Parameter:
    """A copy of `part`, contiguous and in its own memory, as a parameter without gradients."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


@dataclass(frozen=True)
class Shared:
    """How a linear layer, or a layer's embedding of relative positions, is sliced.

    sums, blocks: as PartLinear's.  counts: as LayerPolicy's, plus the width for THREE_IN_ONE.
    """

    sums: bool
    counts: tuple[str, ...]
    blocks: int = 1


def read_policy(model: nn.Module, policy: Policy) -> dict[str, Shared]:
    """The modules that a policy slices, by name.

    Raises ValueError, as DeepSpeed does, if a key is no nn.Module class, or the model has no such layer or projection.
    """
    modules = dict(model.named_modules())
    found: dict[str, Shared] = {}
    for kind, said in policy.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ValueError(f"injection_policy: {kind!r} given; it must be a class of the model's layers")
        one = layer_policy(said)
        for projection in (*one.sums, *one.whole):
            if not any(name.endswith(projection) for name in modules):
                raise ValueError(f"injection_policy: the model has no module whose name ends in {projection!r}")
        for path, layer in modules.items():
            for name, module in layer.named_modules() if type(layer) is kind else ():
                dotted = f".{name}"  # name endings may begin with a dot, as in DeepSpeed's policies
                if (is_linear(module) or isinstance(module, nn.Embedding)) and not dotted.endswith(one.whole):
                    found[f"{path}.{name}"] = shared_out(dotted, module, one)
    if not found:
        raise ValueError(f"injection_policy: the model has none of {[kind.__name__ for kind in policy]}")
    return found


def shared_out(name: str, module: nn.Module, policy: LayerPolicy) -> Shared:
    """How a module of a layer is sliced.  name: its name in the layer, with a leading dot."""
    if name.endswith(policy.sums):
        return Shared(True, policy.counts)
    if name.endswith(f".{THREE_IN_ONE}") and is_three_in_one(module):
        return Shared(False, (*policy.counts, WIDTH_OF_ONE), blocks=3)
    return Shared(False, policy.counts)


def is_three_in_one(module: nn.Module) -> bool:
    """Whether a linear layer has three times as many outputs as inputs."""
    outputs, inputs = getattr(module, "nf", None), getattr(module, "nx", None)  # Conv1D's names
    if outputs is None:
        outputs, inputs = getattr(module, "out_features", 0), getattr(module, "in_features", -1)
    return outputs == 3 * inputs


def width_of(module: nn.Module) -> int:
    """The number of outputs of a linear layer, or of columns of an embedding."""
    return getattr(module, "nf", None) or getattr(module, "out_features", None) or module.embedding_dim


def layer_policy(said: str | tuple[str, ...] | LayerPolicy) -> LayerPolicy:
    """A policy's value for one layer class as a LayerPolicy. Raises ValueError if it is neither names nor a
    LayerPolicy."""
    if isinstance(said, LayerPolicy):
        return said
    names = (said,) if isinstance(said, str) else said
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"injection_policy: {said!r} given; it must be names of projections, or a hybrid.LayerPolicy")
    return LayerPolicy(tuple(names))


def require_whole_heads(model: nn.Module, names: Mapping[str, Shared], size: int) -> None:
    """Raise ValueError if `size` does not divide the heads of the sliced modules."""
    for name, shared in names.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        for key in shared.counts:
            if getattr(parent, key, 0) % size:
                raise ValueError(
                    f"tensor_parallel.tp_size: {size} given; it must divide {key}={getattr(parent, key)} of "
                    f"{type(parent).__name__}"
                )
        heads, rest = divmod(width_of(model.get_submodule(name)), getattr(parent, "head_dim", None) or 1)
        if hasattr(parent, "head_dim") and not shared.sums and not rest and heads % size:
            raise ValueError(
                f"tensor_parallel.tp_size: {size} given; it must divide the {heads} heads that {name} makes"
            )


def share_out(model: nn.Module, names: Mapping[str, Shared], group: InferenceGroup) -> dict[str, Take]:
    """Replace the layers `names` by a rank's slices, and divide their modules' counts. Gives, by parameter name, the
    function that takes the full tensor."""
    found: dict[str, Take] = {}
    counts: dict[nn.Module, set[str]] = {}
    for name, shared in names.items():
        path, _, child = name.rpartition(".")
        parent, module = model.get_submodule(path), model.get_submodule(name)
        counts.setdefault(parent, set()).update(shared.counts)
        if isinstance(module, nn.Embedding):  # relative positions: one column per head
            found[f"{name}.weight"] = columns_of(module, group)
            continue
        part = PartLinear(module, group, shared.sums, shared.blocks)
        setattr(parent, child, part)
        found |= {f"{name}.weight": part.take_weight, f"{name}.bias": part.take_bias}
    for parent, keys in counts.items():
        for key in keys:
            if hasattr(parent, key):
                setattr(parent, key, getattr(parent, key) // group.size)
    for parent in counts:
        if hasattr(parent, HEAD_BY_HEAD):
            parent.forward = with_own_alibi(parent.forward, group)
    return found


def with_own_alibi(own: Callable, group: InferenceGroup) -> Callable:
    """An attention's forward that slices ALiBi's biases, [rows · heads, 1, tokens], to this rank's heads."""

    @functools.wraps(own)
    def forward(*args: Any, alibi: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if alibi is None:
            return own(*args, **kwargs)
        heads = own.__self__.num_heads * group.size
        part = chunk(alibi.unflatten(0, (-1, heads)), 1, shard_of(group)).flatten(0, 1)
        return own(*args, alibi=part, **kwargs)

    return forward


def columns_of(embedding: nn.Embedding, group: InferenceGroup) -> Take:
    """A function that takes the full table and gives the embedding this rank's columns."""

    def take(whole: torch.Tensor) -> None:
        embedding.weight = owned(chunk(whole, 1, shard_of(group)))

    return take
