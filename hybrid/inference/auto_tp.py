"""Automatic tensor parallelism: the model's own modules on a rank's slices, for good, by the model's `tp_plan` or by
what its layers call their projections. Ranks call with the same inputs."""

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

# What models call the projections that end an attention or an MLP, and so add up over ranks; DeepSpeed's automatic
# tensor parallelism knows the same by name (0.19.8).
SUMS = ("o_proj", "out_proj", "wo", "down_proj", "fc2", "fc_out", "w2", "dense_4h_to_h", "c_proj", "attention.dense")
SUMS += ("self_attention.dense",)


class Spread:
    """How a model is spread over a group.

    policy: the user's, or None: the model's `tp_plan`, or, where it has none, a policy made of its layers' names.
    Raises Unreadable, in words, where there is nothing to go by, and ValueError where heads cannot be shared out.
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
        """Spread the model; gives, by a weight's name, what takes the whole of it and keeps this rank's part.

        names: of the model's parameters.  int8: by name, what quantizes a weight, whole or a part of it.
        """
        if self.plan is None:
            shared = read_policy(self.model, self.policy) if self.policy else {}
            return {**int8, **share_out(self.model, shared, group)}
        shared = SharedModules(self.model, self.plan, [], group, torch.device("cpu"), DynamicCache)
        self.undo.enter_context(shared.lent())
        self.undo.enter_context(shared.meetings.together())  # every call is one of all ranks
        parts: dict[str, list[Slice]] = {}  # several of a tied parameter, which are cut alike
        for ref, part in planned_slices(self.plan, shard_of(group)).items():
            param = ref.module._parameters.get(ref.parameter)
            if param is not None:
                parts.setdefault(names[param], []).append(part)
        return {**int8, **{name: taker(alike, int8.get(name)) for name, alike in parts.items()}}


def taker(parts: list[Slice], quantize: Take | None) -> Take:
    """What gives modules this rank's part of a parameter that they have in common; or the one that has it alone, where
    it is quantized."""

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
    """An injection policy of what layers call their projections; {} where no name is known.

    Linear layers beside a projection that ends an attention or an MLP are cut; all else is whole.
    """
    found: dict[type, LayerPolicy] = {}
    for layer in layers:
        before = found.get(type(layer), LayerPolicy(()))  # layers of one class may have other parts
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
    """Names within a layer as ends that are whole names."""
    return tuple(f".{name}" for name in names)


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding, which within a layer is of relative positions."""
    return isinstance(module, nn.Embedding)


def can_be_cut(layer: nn.Module, end: str) -> bool:
    """Whether the attention or MLP that the projection `end` ends is known to be a sum of parts: linear layers whose
    outputs are heads or units in their order, and nothing else that is as wide as these."""
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
    """Whether a linear layer makes queries, keys and values together, in an order that is not known."""
    if name in (THREE_IN_ONE, HEAD_BY_HEAD):
        return not is_three_in_one(linear)
    return "qkv" in name.lower() or name in ("in_proj", "gate_up_proj")
