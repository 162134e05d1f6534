"""Weights in int8: symmetric, a scale for each output channel or for each of several parts of it. Activations stay as
they are."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

LEVELS = 127  # on each side of 0


def quantized(weight: torch.Tensor, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and scales [out, groups] in `dtype`, of a weight [out, in].

    An element is off by at most half its scale, which is the largest of its group over LEVELS. Rounded to bfloat16 the
    scale is off by 2^-9 of itself at most, which is a quarter of a step at the last level: nothing is cut off.
    """
    parts = weight.float().view(len(weight), groups, -1)
    scale = (parts.abs().amax(dim=2) / LEVELS).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return (parts / scale.float()[:, :, None]).round().to(torch.int8).view_as(weight), scale


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] in the scales' dtype."""
    parts = weight.view(len(weight), scale.shape[1], -1).to(scale.dtype)
    return (parts * scale[:, :, None]).view_as(weight)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] by a quantized weight; [..., out] in x's dtype."""
    if scale.shape[1] > 1 or x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return F.linear(x, dequantized(weight, scale).to(x.dtype), bias)
    # Reads int8 as it goes; in float32, and elsewhere, torch's is slower than making floats first (2.13).
    y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), weight.contiguous(), scale[:, 0].contiguous())
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Int8Linear(nn.Module):
    """A linear layer in int8, in the place of nn.Linear, or of Hugging Face's Conv1D, whose weight is [in, out].

    `scale` is a buffer: a decoder reads it where it finds `weight`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, groups: int):
        super().__init__()
        self.turned, self.groups = isinstance(linear, Conv1D), groups
        self.weight: nn.Parameter | None = None
        self.bias = linear.bias

    def take(self, weight: torch.Tensor) -> None:
        """Quantize a weight as the layer in whose place this is has it."""
        weight = weight.T if self.turned else weight
        # float16's smallest numbers are too large for scales of small weights.
        values, scale = quantized(weight, self.groups, torch.float32 if weight.dtype == torch.float16 else weight.dtype)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear's."""
        return int8_linear(x, self.weight, self.scale, self.bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more: a subclass may compute otherwise, or be read by others.
    Falcon's differs in rounding alone."""
    return type(module) in (nn.Linear, Conv1D, FalconLinear)


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose weights are quantized, by name: linear ones that share theirs with no other."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            owners[id(param)] = owners.get(id(param), 0) + 1
    return {
        name: module for name, module in model.named_modules() if is_linear(module) and owners[id(module.weight)] == 1
    }


def require_groups(model: nn.Module, groups: int) -> None:
    """Raise ValueError where rows cannot be parted so."""
    for name, linear in quantizable(model).items():
        inputs = linear.weight.shape[0 if isinstance(linear, Conv1D) else 1]
        if inputs % groups:
            raise ValueError(
                f"quant.weight.q_groups: {groups} given; it must divide the inputs of every layer, and {name} has "
                f"{inputs}"
            )


def in_int8(model: nn.Module, groups: int) -> dict[str, Callable[[torch.Tensor], None]]:
    """Put int8 layers, which have no weights yet, in the place of linear ones; gives, by a weight's name, what takes
    it."""
    found = {}
    for name, linear in quantizable(model).items():
        parent, _, child = name.rpartition(".")
        layer = Int8Linear(linear, groups)
        found[f"{name}.weight"] = layer.take
        setattr(model.get_submodule(parent), child, layer)
    return found
