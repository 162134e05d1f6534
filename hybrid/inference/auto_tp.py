"""Automatic tensor parallelism: the model's own modules permanently on a rank's slices, by the model's `tp_plan` or by
the names of its layers' projections. All ranks of a group call with the same inputs."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import nn
from transformers import DynamicCache

from hybrid.decoders.tp_modules import SharedModules
from hybrid.inference.injection_policy import (
    HEAD_BY_HEAD,
    PER_RANK,
    THREE_IN_ONE,
    LayerPolicy,
    Policy,
    is_three_in_one,
    owned,
    read_policy,
    require_whole_heads,
    shard_of,
    share_out,
    width_of,
)
from hybrid.models.spec import UnsupportedModel
from hybrid.models.structure import read_structure
from hybrid.models.tp_plan import TensorPlan, read_tp_plan
from hybrid.parallel import InferenceGroup
from hybrid.weights.int8 import Take, is_linear
from hybrid.weights.slices import Slice, planned_slices, require_divisible

# Names of the projections at the end of an attention or MLP, whose outputs are summed over ranks (row-parallel).
# DeepSpeed's automatic tensor parallelism goes by the same names (0.19.8).
SUMS = ("o_proj", "out_proj", "wo", "down_proj", "fc2", "fc_out", "w2", "dense_4h_to_h", "c_proj", "attention.dense")
SUMS += ("self_attention.dense",)


class Spread:
    """How a model's own modules are divided over `size` ranks.

    policy: the user's injection policy; None: the model's `tp_plan` or, without one, a policy made from the names of
        its layers' projections.
    Raises UnsupportedModel if there is neither a plan nor a list of layers, and ValueError if `size` does not divide
    the heads. Warns if no layer can be divided.
    """

    def __init__(self, model: nn.Module, size: int, policy: Policy | None = None):
        self.model, self.undo = model, ExitStack()
        self.plan: TensorPlan | None = None
        self.policy: Policy = policy or {}
        self.what = "the injection policy" if policy else "the model's tp_plan"
        if policy:
            require_whole_heads(model, read_policy(model, policy), size)
            return
        try:
            self.plan = read_tp_plan(model)
        except UnsupportedModel as reason:
            layers = [part.module for part in read_structure(model).layers]
            if not layers:
                raise UnsupportedModel(f"{reason}, and no stack of layers is found") from reason
            self.policy = policy_by_names(layers)
            self.what = "the names of its layers' projections"
            shared = read_policy(model, self.policy) if self.policy else {}
            self._warn_of_nothing(shared)
            require_whole_heads(model, shared, size)
            return
        for one in self.plan.attentions:
            require_divisible(one.heads, one.kv_heads, size, "tensor_parallel.tp_size")

    def _warn_of_nothing(self, shared: Mapping[str, object]) -> None:
        if not shared:
            self.what = "nothing: every rank keeps all of its layers"
            warnings.warn(
                f"tensor_parallel: {type(self.model).__name__} has no attention and no MLP that is known to be cut; "
                "every rank keeps the whole model. Give injection_policy, or use tp_size=1",
                stacklevel=2,
            )

    def takers(
        self, group: InferenceGroup, names: Mapping[torch.Tensor, str], int8: Mapping[str, Take]
    ) -> dict[str, Take]:
        """Prepare the modules for their slices. Gives, by parameter name, a function that takes the full tensor and
        keeps this rank's slice of it.

        names: the model's parameters to their names.  int8: by name, the function that quantizes a tensor into a
            parameter; where it also has a slice, it gets the slice.
        """
        if self.plan is None:
            shared = read_policy(self.model, self.policy) if self.policy else {}
            return {**int8, **share_out(self.model, shared, group)}
        shared = SharedModules(self.model, self.plan, [], group, torch.device("cpu"), DynamicCache)
        self.undo.enter_context(shared.lent())
        self.undo.enter_context(shared.meetings.together())  # every call is made by all ranks
        parts: dict[str, list[Slice]] = {}  # a tied parameter has several, all sliced alike
        for ref, part in planned_slices(self.plan, shard_of(group)).items():
            param = ref.module._parameters.get(ref.parameter)
            if param is not None:
                parts.setdefault(names[param], []).append(part)
        return {**int8, **{name: taker(alike, int8.get(name)) for name, alike in parts.items()}}


def taker(parts: list[Slice], quantize: Take | None) -> Take:
    """A function that takes a full parameter and gives this rank's slice to every module that shares it.

    quantize: where given, it takes the slice instead; the parameter must belong to one module.
    """

    def take(whole: torch.Tensor) -> None:
        part = parts[0].of(whole)
        if quantize is not None:
            quantize(part)
            return
        kept = None if part is None else owned(part)
        for one in parts:
            one.ref.module._parameters[one.ref.parameter] = kept

    return take


def policy_by_names(layers: Iterable[nn.Module]) -> dict[type, LayerPolicy]:
    """An injection policy made from the names of the layers' projections; {} if none is known.

    In each block (attention or MLP) with a projection of SUMS all linear layers are sliced. All others are replicated.
    """
    found: dict[type, LayerPolicy] = {}
    for layer in layers:
        before = found.get(type(layer), LayerPolicy(()))  # layers of one class may differ in their modules
        linear = [name for name, module in layer.named_modules() if is_linear(module) or is_table(module)]
        ends = tuple(f".{one}" for one in SUMS)
        sums = [name for name in linear if f".{name}".endswith(ends) and can_be_cut(layer, name)]
        blocks = {name.rpartition(".")[0] for name in sums}
        whole = [name for name in linear if name.rpartition(".")[0] not in blocks]
        if sums or before.sums:
            whole = dict.fromkeys((*before.whole, *dotted(whole)))
            sums = [name for name in dict.fromkeys((*before.sums, *dotted(sums))) if name not in whole]
            found[type(layer)] = LayerPolicy(tuple(sums), tuple(whole), (*PER_RANK, "embed_dim"))
    return found


def dotted(names: Iterable[str]) -> tuple[str, ...]:
    """Names within a layer, with a leading dot: as name endings they then match full names only."""
    return tuple(f".{name}" for name in names)


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding; inside a layer it is one of relative positions."""
    return isinstance(module, nn.Embedding)


def can_be_cut(layer: nn.Module, end: str) -> bool:
    """Whether the block that ends with the projection `end` can be tensor-parallel.

    It can if its other linear layers output heads or hidden units in order, and it has no other parameters of the same
    width: its output is then a sum over heads or units.
    """
    path, _, last = end.rpartition(".")
    block = layer.get_submodule(path)
    others = {name: child for name, child in block.named_children() if name != last}
    if path == "":  # an MLP without a module of its own, between other parts of the layer
        others = {name: child for name, child in others.items() if is_linear(child)}
    linear = {name: child for name, child in others.items() if is_linear(child)}
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
    if name in (THREE_IN_ONE, HEAD_BY_HEAD):
        return not is_three_in_one(linear)
    return "qkv" in name.lower() or name in ("in_proj", "gate_up_proj")
