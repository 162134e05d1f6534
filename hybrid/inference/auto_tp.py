"""Tensor parallelism in the model's own modules, permanently on a rank's slices: by the user's injection policy, the
model's `tp_plan`, or the names of its layers' projections. All ranks of a group call with the same inputs.

With a policy or by names, in the layer classes that it lists, some projections are row-parallel (their outputs are
summed over ranks, arXiv:1909.08053), and every other linear layer is column-parallel.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from hybrid.execution.tp_modules import SharedModules
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.models.tp_plan import TensorPlan
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights.int8 import Int8Linear, WeightLoader, int8_linear, is_linear, keep_in_int8
from hybrid.weights.slices import Shard, Slice, chunk, planned_slices, require_divisible

# Names of the projections at the end of an attention or MLP, whose outputs are summed over ranks (row-parallel).
# DeepSpeed's automatic tensor parallelism goes by the same names (0.19.8).
ROW_PARALLEL: tuple[str, ...] = (
    "o_proj",
    "out_proj",
    "wo",
    "down_proj",
    "fc2",
    "fc_out",
    "w2",
    "dense_4h_to_h",
    "c_proj",
)
ROW_PARALLEL += ("attention.dense", "self_attention.dense")
# Attributes of attention modules that hold numbers of heads, or their total width.
PER_RANK = tuple("n_heads num_heads n_head num_attention_heads num_key_value_heads all_head_size inner_dim".split())
# The linear layer that outputs all queries, then all keys, then all values; the attribute with the width of each.
CONCATENATED_QKV, QKV_WIDTH = "c_attn", "split_size"
INTERLEAVED_QKV = "query_key_value"  # outputs them interleaved by head; its module may take ALiBi biases
Policy = Mapping[type, "str | tuple[str, ...] | LayerPolicy"]  # by layer class; plain names are those of `sums`


@dataclass(frozen=True)
class LayerPolicy:
    """The sharing of a class of layers by ranks, if the names of the row-parallel projections are not enough.

    Args:
        sums: name endings of row-parallel linear layers: they take a slice of their inputs, and their outputs are
            summed.
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
        self.weight: Any = None  # a parameter once it is loaded
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
    """Return this rank's part of the group's tensors."""
    return Shard(group.size, group.index)


def own_parameter(part: torch.Tensor) -> nn.Parameter:
    """Return a copy of `part`, contiguous and in its own memory, as a parameter without gradients."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


@dataclass(frozen=True)
class ModuleSlice:
    """The slicing of a linear layer, or of a layer's embedding of relative positions.

    row_parallel, blocks: as ParallelLinear's.  counts: as LayerPolicy's, plus the width for CONCATENATED_QKV.
    """

    row_parallel: bool
    counts: tuple[str, ...]
    blocks: int = 1


def read_policy(model: nn.Module, policy: Policy) -> dict[str, ModuleSlice]:
    """Return the modules that a policy slices, by name.

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
    """Return the slicing of a module of a layer.  name: its name in the layer, with a leading dot."""
    if name.endswith(policy.sums):
        return ModuleSlice(True, policy.counts)
    if name.endswith(f".{CONCATENATED_QKV}") and has_three_outputs(module):
        return ModuleSlice(False, (*policy.counts, QKV_WIDTH), blocks=3)
    return ModuleSlice(False, policy.counts)


def has_three_outputs(module: nn.Module) -> bool:
    """Whether a linear layer has three times as many outputs as inputs."""
    inputs = getattr(module, "nx", 0) or getattr(module, "in_features", -1)  # nx: Conv1D's name
    return width_of(module) == 3 * inputs


def width_of(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer, or of columns of an embedding."""
    return getattr(module, "nf", 0) or getattr(module, "out_features", 0) or module.embedding_dim


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
        assert is_linear(module), f"{name} is sliced, and is a {type(module).__name__}"
        linear = ParallelLinear(module, group, part.row_parallel, part.blocks)
        setattr(parent, child, linear)
        loaders |= {f"{name}.weight": linear.load_weight, f"{name}.bias": linear.load_bias}
    for parent, keys in counts.items():
        for key in keys:
            if hasattr(parent, key):
                setattr(parent, key, getattr(parent, key) // group.size)
        if hasattr(parent, INTERLEAVED_QKV):
            parent.forward = with_sliced_alibi(parent, group)
    return loaders


def load_columns(embedding: nn.Embedding, group: InferenceGroup, weight: torch.Tensor) -> None:
    """Give an embedding of relative positions, which has a column per head, this rank's columns of its full weight."""
    embedding.weight = own_parameter(chunk(weight, 1, shard_of(group)))


def with_sliced_alibi(attention: nn.Module, group: InferenceGroup) -> Callable:
    """Return an attention's forward that slices ALiBi's biases, [rows · heads, 1, tokens], to this rank's heads."""
    own = attention.forward

    @functools.wraps(own)
    def forward(*args: Any, alibi: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if alibi is None:
            return own(*args, **kwargs)
        heads = attention.num_heads * group.size
        part = chunk(alibi.unflatten(0, (-1, heads)), 1, shard_of(group)).flatten(0, 1)
        return own(*args, alibi=part, **kwargs)

    return forward


class AutoTP:
    """The slicing of a model's own modules for `size` ranks.

    policy: the user's injection policy; None: the model's `tp_plan` or, without one, a policy made from the names of
        its layers' projections.
    Attributes: `source` is which of these was used, as text. `undo` restores the modules' forwards when it is closed.
    Raises UnsupportedModel if there is neither a plan nor a list of layers, and ValueError if `size` does not divide
    the heads. Warns if no layer can be sliced.
    """

    def __init__(self, info: ModelInfo, size: int, policy: Policy | None = None):
        self.info, self.model, self.undo = info, info.model, ExitStack()
        self.plan: TensorPlan | None = None
        self.slices: dict[str, ModuleSlice] = {}  # by module name, without a plan
        if policy:
            self.source = "the injection policy"
            self.slices = read_policy(self.model, policy)
        elif info.tp_plan is not None:
            self.plan, self.source = info.tp_plan, "the model's tp_plan"
        else:
            self._read_names()
        require_divisible_heads(self.model, self.slices, size)
        for attention in self.plan.attentions if self.plan else ():
            require_divisible(size, attention.heads, attention.kv_heads, key="tensor_parallel.tp_size")

    def _read_names(self) -> None:
        if not self.info.layers:
            raise UnsupportedModel(f"{self.info.reasons['tp_plan']}, and no list of layers is found")
        if policy := policy_by_names(self.info.layers):
            self.source = "the names of its layers' projections"
            self.slices = read_policy(self.model, policy)
            return
        self.source = "nothing: every rank keeps all of its layers"
        warnings.warn(
            f"tensor_parallel: {type(self.model).__name__} has no attention and no MLP that can be sliced; every rank "
            "keeps the full model. Give injection_policy, or use tp_size=1",
            stacklevel=3,
        )

    def weight_loaders(
        self, group: InferenceGroup, names: Mapping[torch.Tensor, str], int8: Mapping[str, WeightLoader]
    ) -> dict[str, WeightLoader]:
        """Prepare the modules for their slices. Gives, by parameter name, a function that takes the full tensor and
        keeps this rank's slice of it.

        names: the model's parameters to their names.  int8: by name, the function that quantizes a tensor into a
            parameter; where it also has a slice, it gets the slice.
        """
        if self.plan is None:
            return {**int8, **slice_modules(self.model, self.slices, group)}
        shared = SharedModules(self.info, [], group, torch.device("cpu"), DynamicCache)
        self.undo.enter_context(shared.swapped())
        self.undo.enter_context(shared.exchange.together())  # every call is made by all ranks
        slices: dict[str, list[Slice]] = {}  # a tied parameter has several, all sliced alike
        for ref, part in planned_slices(self.plan, shard_of(group)).items():
            param = ref.module._parameters.get(ref.parameter)
            if param is not None:
                slices.setdefault(names[param], []).append(part)
        loaders = {name: functools.partial(load_slice, alike, int8.get(name)) for name, alike in slices.items()}
        return {**int8, **loaders}


def load_slice(slices: list[Slice], quantize: WeightLoader | None, weight: torch.Tensor) -> None:
    """Give this rank's slice of a full parameter to every module that shares it.

    quantize: where given, it takes the slice instead; the parameter must belong to one module.
    """
    part = slices[0].of(weight)
    if quantize is not None:
        assert part is not None, "each rank has a slice of a linear layer"
        quantize(part)
        return
    param = None if part is None else own_parameter(part)
    for alike in slices:
        alike.ref.module._parameters[alike.ref.parameter] = param


def policy_by_names(layers: Iterable[nn.Module]) -> dict[type, LayerPolicy]:
    """Return an injection policy made from the names of the layers' projections; {} if none is known.

    In each block (attention or MLP) with a projection of ROW_PARALLEL all linear layers are sliced. All others are
    replicated.
    """
    policy: dict[type, LayerPolicy] = {}
    ends = tuple(f".{name}" for name in ROW_PARALLEL)
    for layer in layers:
        # An embedding within a layer is one of relative positions.
        modules = layer.named_modules()
        linear = [name for name, module in modules if is_linear(module) or isinstance(module, nn.Embedding)]
        sums = [name for name in linear if f".{name}".endswith(ends) and can_be_sliced(layer, name)]
        blocks = {name.rpartition(".")[0] for name in sums}
        whole = [name for name in linear if name.rpartition(".")[0] not in blocks]
        before = policy.get(type(layer), LayerPolicy(()))  # layers of one class may differ in their modules
        if sums or before.sums:
            # With a leading dot a name ending matches full names only.
            replicated = dict.fromkeys((*before.whole, *(f".{name}" for name in whole)))
            summed = dict.fromkeys((*before.sums, *(f".{name}" for name in sums)))
            row_parallel = tuple(name for name in summed if name not in replicated)
            policy[type(layer)] = LayerPolicy(row_parallel, tuple(replicated), (*PER_RANK, "embed_dim"))
    return policy


def can_be_sliced(layer: nn.Module, end: str) -> bool:
    """Whether the block that ends with the projection `end` can be tensor-parallel.

    It can if its other linear layers output heads or hidden units in order, and it has no other parameters of the same
    width: its output is then a sum over heads or units.
    """
    path, _, last = end.rpartition(".")
    block = layer.get_submodule(path)
    children = {name: child for name, child in block.named_children() if name != last}
    linear: dict[str, nn.Module] = {name: child for name, child in children.items() if is_linear(child)}
    if path == "":  # an MLP without a module of its own, between other parts of the layer
        children = linear
    widths = {width_of(child) for child in linear.values()}
    norms = [param for name, child in children.items() if name not in linear for param in child.parameters()]
    return (
        bool(linear)
        and not (block._parameters and path)
        and all(param.dim() == 1 and len(param) not in widths for param in norms)
        and not any(is_packed(name, child) for name, child in linear.items())
    )


def is_packed(name: str, linear: nn.Module) -> bool:
    """Whether a linear layer's output packs several matrices (q, k, v; gate, up) in an unknown order."""
    if name in (CONCATENATED_QKV, INTERLEAVED_QKV):
        return not has_three_outputs(linear)
    return "qkv" in name.lower() or name in ("in_proj", "gate_up_proj")
