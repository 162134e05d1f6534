"""Weights in int8: symmetric, a scale for each output channel or for each of several parts of it. Activations stay as
they are.

Beside an int8 parameter `name` its module has the buffer `name_scale`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hybrid.models.spec import ParamRef

Take = Callable[[torch.Tensor], None]
LEVELS = 127  # on each side of 0


def quantized(weight: torch.Tensor, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., out, in] and scales [..., out, groups] in `dtype`, of a weight [..., out, in].

    An element is off by at most half its scale, which is the largest of its group over LEVELS. Rounded to bfloat16 the
    scale is off by 2^-9 of itself at most, which is a quarter of a step at the last level: nothing is cut off.
    """
    parts = weight.float().unflatten(-1, (groups, -1))
    scale = (parts.abs().amax(dim=-1) / LEVELS).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return (parts / scale.float()[..., None]).round().to(torch.int8).flatten(-2), scale


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight [..., out, in] in the scales' dtype."""
    return (weight.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype) * scale[..., None]).flatten(-2)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] by a weight [out, in], which is quantized where it has scales; [..., out] in x's dtype."""
    if scale is None:
        return F.linear(x, weight, bias)
    if scale.shape[1] > 1 or x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return F.linear(x, dequantized(weight, scale).to(x.dtype), bias)
    # Reads int8 as it goes; in float32, and elsewhere, torch's is slower than making floats first (2.13).
    y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), weight.contiguous(), scale[:, 0].contiguous())
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def keep_in_int8(module: nn.Module, name: str, weight: torch.Tensor, groups: int) -> None:
    """Let a module's parameter be `weight` [..., out, in], quantized."""
    # float16's smallest numbers are too large for scales of small weights.
    values, scale = quantized(weight, groups, torch.float32 if weight.dtype == torch.float16 else weight.dtype)
    setattr(module, name, nn.Parameter(values, requires_grad=False))
    module.register_buffer(f"{name}_scale", scale)


def int8_weights(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A module's own weights that are quantized, each with its scales."""
    names = [name for name, param in module._parameters.items() if param is not None and param.dtype == torch.int8]
    return [(module._parameters[name], getattr(module, f"{name}_scale")) for name in names]


def scale_of(ref: ParamRef) -> torch.Tensor:
    """The scales of the quantized weight that is there."""
    scale = getattr(ref.module, f"{ref.parameter}_scale")
    return scale if ref.select is None else ref.select(scale)


class Int8Linear(nn.Linear):
    """A linear layer in int8, in the place of nn.Linear, or of Hugging Face's Conv1D, whose weight is [in, out]. It
    computes what that layer does until it takes a weight."""

    def __init__(self, linear: nn.Linear | Conv1D, groups: int):
        nn.Module.__init__(self)  # it has a weight already
        self.turned, self.groups = isinstance(linear, Conv1D), groups
        self.weight, self.bias = linear.weight, linear.bias
        sizes = reversed(linear.weight.shape) if self.turned else linear.weight.shape
        self.out_features, self.in_features = sizes
        self.register_buffer("weight_scale", None)

    def take(self, weight: torch.Tensor) -> None:
        """Quantize a weight as the layer in whose place this is has it."""
        keep_in_int8(self, "weight", weight.T if self.turned else weight, self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear's."""
        taken = self.weight_scale is not None
        return int8_linear(x, self.weight.T if self.turned and not taken else self.weight, self.weight_scale, self.bias)


class Int8Experts:
    """A module of experts, whose matrices are int8, and floats while it runs; as it was until it takes weights."""

    def __init__(self, module: nn.Module, groups: int):
        self.module, self.groups = module, groups
        self.dtypes: dict[str, torch.dtype] = {}
        self.own_forward, module.forward = module.forward, self._forward

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Quantize the experts' matrices [experts, out, in] called `name`."""
        self.dtypes[name] = weight.dtype
        keep_in_int8(self.module, name, weight, self.groups)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        params = self.module._parameters
        narrow = {name: params[name] for name in self.dtypes}
        try:
            for name, dtype in self.dtypes.items():
                whole = dequantized(narrow[name], getattr(self.module, f"{name}_scale")).to(dtype)
                params[name] = nn.Parameter(whole, requires_grad=False)
            return self.own_forward(*args, **kwargs)
        finally:
            params.update(narrow)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more: a subclass may compute otherwise, or be read by others.
    Falcon's differs in rounding alone."""
    return type(module) in (nn.Linear, Conv1D, FalconLinear, Int8Linear)


def expert_matrices(module: nn.Module) -> list[str]:
    """Names of a module's parameters that are a matrix for each of its experts, [experts, out, in]."""
    count = getattr(module, "num_experts", None)
    params = module._parameters.items()
    return [name for name, param in params if param is not None and param.dim() == 3 and len(param) == count]


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose weights are quantized, by name: linear ones that share theirs with no other."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            owners[id(param)] = owners.get(id(param), 0) + 1
    return {
        name: module for name, module in model.named_modules() if is_linear(module) and owners[id(module.weight)] == 1
    }


def require_groups(model: nn.Module, groups: int, ranks: int) -> None:
    """Raise ValueError where rows, or a rank's part of them, cannot be parted so."""
    inputs = {
        name: linear.weight.shape[0 if isinstance(linear, Conv1D) else 1] for name, linear in quantizable(model).items()
    }
    for path, module in model.named_modules():
        inputs |= {f"{path}.{name}": module._parameters[name].shape[-1] for name in expert_matrices(module)}
    for name, count in inputs.items():
        if groups > 1 and count % (groups * ranks):
            shared = f" over {ranks} ranks" if ranks > 1 else ""
            raise ValueError(
                f"quant.weight.q_groups: {groups} given; it must divide the inputs of every layer, and {name} has "
                f"{count}{shared}"
            )


def in_int8(model: nn.Module, groups: int) -> dict[str, Take]:
    """Put int8 layers in the place of linear ones, and let experts run on int8; gives, by a weight's name, what takes
    it."""
    found: dict[str, Take] = {}
    for name, linear in quantizable(model).items():
        parent, _, child = name.rpartition(".")
        layer = Int8Linear(linear, groups)
        found[f"{name}.weight"] = layer.take
        setattr(model.get_submodule(parent), child, layer)
    for path, module in model.named_modules():
        if names := expert_matrices(module):
            experts = Int8Experts(module, groups)
            found |= {f"{path}.{name}": partial(experts.take, name) for name in names}
    return found
