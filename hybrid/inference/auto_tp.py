"""Automatic tensor parallelism: the model's own modules permanently on a rank's slices, by the model's `tp_plan` or by
the names of its layers' projections. All ranks of a group call with the same inputs."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from transformers import DynamicCache

from hybrid.decoders.tp_modules import SharedModules
from hybrid.inference.injection_policy import (
    CONCATENATED_QKV,
    INTERLEAVED_QKV,
    PER_RANK,
    LayerPolicy,
    ModuleSlice,
    Policy,
    has_three_outputs,
    own_parameter,
    read_policy,
    require_divisible_heads,
    shard_of,
    slice_modules,
    width_of,
)
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.models.tp_plan import TensorPlan
from hybrid.parallel import InferenceGroup
from hybrid.weights.int8 import WeightLoader, is_linear
from hybrid.weights.slices import Slice, planned_slices, require_divisible

# Names of the projections at the end of an attention or MLP, whose outputs are summed over ranks (row-parallel).
# DeepSpeed's automatic tensor parallelism goes by the same names (0.19.8).
ROW_PARALLEL = ("o_proj", "out_proj", "wo", "down_proj", "fc2", "fc_out", "w2", "dense_4h_to_h", "c_proj")
ROW_PARALLEL += ("attention.dense", "self_attention.dense")


class AutoTP:
    """How a model's own modules are sliced for `size` ranks.

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
            require_divisible(attention.heads, attention.kv_heads, size, "tensor_parallel.tp_size")

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
        self.undo.enter_context(shared.lent())
        self.undo.enter_context(shared.exchange.together())  # every call is made by all ranks
        slices: dict[str, list[Slice]] = {}  # a tied parameter has several, all sliced alike
        for ref, part in planned_slices(self.plan, shard_of(group)).items():
            param = ref.module._parameters.get(ref.parameter)
            if param is not None:
                slices.setdefault(names[param], []).append(part)
        return {**int8, **{name: partial(load_slice, alike, int8.get(name)) for name, alike in slices.items()}}


def load_slice(slices: list[Slice], quantize: WeightLoader | None, weight: torch.Tensor) -> None:
    """Give this rank's slice of a full parameter to every module that shares it.

    quantize: where given, it takes the slice instead; the parameter must belong to one module.
    """
    part = slices[0].of(weight)
    if quantize is not None:
        quantize(part)
        return
    param = None if part is None else own_parameter(part)
    for alike in slices:
        alike.ref.module._parameters[alike.ref.parameter] = param


def policy_by_names(layers: Iterable[nn.Module]) -> dict[type, LayerPolicy]:
    """An injection policy made from the names of the layers' projections; {} if none is known.

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
            whole = dict.fromkeys((*before.whole, *(f".{name}" for name in whole)))
            sums = dict.fromkeys((*before.sums, *(f".{name}" for name in sums)))
            sums = tuple(name for name in sums if name not in whole)
            policy[type(layer)] = LayerPolicy(sums, tuple(whole), (*PER_RANK, "embed_dim"))
    return policy


def can_be_sliced(layer: nn.Module, end: str) -> bool:
    """Whether the block that ends with the projection `end` can be tensor-parallel.

    It can if its other linear layers output heads or hidden units in order, and it has no other parameters of the same
    width: its output is then a sum over heads or units.
    """
    path, _, last = end.rpartition(".")
    block = layer.get_submodule(path)
    others = {name: child for name, child in block.named_children() if name != last}
    linear = {name: child for name, child in others.items() if is_linear(child)}
    if path == "":  # an MLP without a module of its own, between other parts of the layer
        others = linear
    widths = {width_of(child) for child in linear.values()}
    norms = [param for name, child in others.items() if name not in linear for param in child.parameters()]
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
