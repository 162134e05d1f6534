"""int8 weight-only quantization: symmetric, with one scale per output channel or per group of a channel's inputs.

A module with an int8 parameter `name` has its scales in the buffer `name_scale`. Activations are not quantized.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hybrid.models.quantized import is_quantized
from hybrid.models.spec import ParamRef

WeightLoader = Callable[[torch.Tensor], None]
LEVELS = 127  # quantization levels on each side of 0


def quantized(weight: torch.Tensor, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [..., out, in]: int8 [..., out, in], and scales [..., out, groups] in `dtype`.

    scale = max |group| / LEVELS; the error of an element is at most half its scale. Rounding the scale to bfloat16
    changes it by at most 2^-9 of itself, a quarter of a step at level 127, so no value leaves the int8 range.
    """
    parts = weight.float().unflatten(-1, (groups, -1))
    scale = (parts.abs().amax(dim=-1) / LEVELS).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return (parts / scale.float()[..., None]).round().to(torch.int8).flatten(-2), scale


# Elements that are held in float32 at once while a weight is quantized: on CPUs a block that stays in the cache, 5.7
# times as fast as 2^22 (8192 x 768 in bfloat16, one thread); elsewhere one that is worth the launches.
QUANTIZED_ELEMENTS, QUANTIZED_ELEMENTS_ON_CPU = 2**22, 2**17


def elements_at_once(device: torch.device) -> int:
    """Return the elements of a weight that `quantize_into` quantizes at once, if they are a row or more."""
    return QUANTIZED_ELEMENTS_ON_CPU if device.type == "cpu" else QUANTIZED_ELEMENTS


def quantize_into(weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize a matrix [out, in] with one scale per output channel, as `quantized` does, a block of rows at a time.

    values: int8 [out, in], scale: [out, 1], both written.
    """
    step = max(elements_at_once(weight.device) // max(weight.shape[1], 1), 1)
    for rows in (slice(start, start + step) for start in range(0, len(weight), step)):
        values[rows], scale[rows] = quantized(weight[rows], 1, scale.dtype)


def quantizing_bytes(elements: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that `quantize_into` takes for a weight of so many elements: the quotients and the rounded ones
    in float32, and a copy in float32 unless the weight is."""
    return min(elements, elements_at_once(device)) * (8 if dtype == torch.float32 else 12)


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight [..., out, in] in the scales' dtype.  weight: int8 [..., out, in], scale: [..., out, groups]"""
    return (weight.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype) * scale[..., None]).flatten(-2)


# torch's _weight_int8pack_mm (2.13, CPU) reads beyond the rows of other numbers of inputs: wrong results, or a crash.
INT8PACK_INPUTS = 16


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weightᵀ + bias: [..., out] in x's dtype.

    x: [..., in], weight: [out, in], int8 with scales [out, groups], or floating point with None; bias: [out].
    """
    if scale is None:
        return F.linear(x, weight, bias)
    fits = x.shape[-1] % INT8PACK_INPUTS == 0
    if scale.shape[1] > 1 or x.dtype != torch.bfloat16 or x.device.type != "cpu" or not fits:
        return F.linear(x, dequantized(weight, scale).to(x.dtype), bias)
    # Dequantizes inside the matmul. In float32 and on GPUs torch's kernel is slower than dequantizing first (2.13).
    y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), weight.contiguous(), scale[:, 0].contiguous())
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def keep_in_int8(module: nn.Module, name: str, weight: torch.Tensor, groups: int) -> None:
    """Replace a module's parameter `name` by `weight` [..., out, in], quantized to int8, and register its scales."""
    # In float16 the scales of small weights would underflow.
    values, scale = quantized(weight, groups, torch.float32 if weight.dtype == torch.float16 else weight.dtype)
    setattr(module, name, nn.Parameter(values, requires_grad=False))
    module.register_buffer(f"{name}_scale", scale)


def int8_weights(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a module's own int8 parameters, each with its scales."""
    params = {name: param for name, param in module._parameters.items() if param is not None}
    names = [name for name, param in params.items() if param.dtype == torch.int8 and not is_quantized(param)]
    return [(module._parameters[name], getattr(module, f"{name}_scale")) for name in names]


def scale_of(ref: ParamRef) -> torch.Tensor:
    """Return the scales of the int8 weight that `ref` refers to."""
    scale = getattr(ref.module, f"{ref.parameter}_scale")
    return scale if ref.select is None else ref.select(scale)


class Int8Linear(nn.Linear):
    """An int8 replacement of nn.Linear or of Hugging Face's Conv1D (weight [in, out]).

    It computes with the replaced layer's own weight until `load_weight` is called. groups: scales per output channel.
    """

    def __init__(self, linear: nn.Linear | Conv1D, groups: int):
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate a weight
        self.transposed, self.groups = isinstance(linear, Conv1D), groups
        self.weight, self.bias = linear.weight, linear.bias
        sizes = reversed(linear.weight.shape) if self.transposed else linear.weight.shape
        self.out_features, self.in_features = sizes
        self.register_buffer("weight_scale", None)

    def load_weight(self, weight: torch.Tensor) -> None:
        """Quantize `weight`, in the layout of the replaced layer, and compute with it from here on."""
        keep_in_int8(self, "weight", weight.T if self.transposed else weight, self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        taken = self.weight_scale is not None
        return int8_linear(
            x, self.weight.T if self.transposed and not taken else self.weight, self.weight_scale, self.bias
        )


class Int8Experts:
    """Keeps a module's expert matrices in int8 and dequantizes them for its forward. Until `load_weight` is called the
    module computes as before.

    groups: scales per output channel.
    """

    def __init__(self, module: nn.Module, groups: int):
        self.module, self.groups = module, groups
        self.dtypes: dict[str, torch.dtype] = {}
        self.own_forward, module.forward = module.forward, self._forward

    def load_weight(self, name: str, weight: torch.Tensor) -> None:
        """Quantize `weight` [experts, out, in] as the module's parameter `name`."""
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


def is_linear(module: nn.Module) -> "TypeGuard[nn.Linear | Conv1D | Int8Linear]":
    """Whether a module is a plain linear layer. Other subclasses are not: they may compute something else, or other
    code may read their weight. FalconLinear differs only in rounding."""
    return type(module) in (nn.Linear, Conv1D, FalconLinear, Int8Linear)


def expert_matrices(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters that hold a matrix for each expert, [experts, out, in]. Those of [in,
    out] (GPT-OSS; transformers 5.23 says `is_transposed`) keep their dtype: scales are per output."""
    if getattr(module, "is_transposed", False):
        return []
    count = getattr(module, "num_experts", None)
    params = module._parameters.items()
    return [name for name, param in params if param is not None and param.dim() == 3 and len(param) == count]


def quantizable(model: nn.Module) -> "dict[str, nn.Linear | Conv1D | Int8Linear]":
    """Return the layers of a model that can be quantized, by name: linear layers whose weight no other module
    shares."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            owners[id(param)] = owners.get(id(param), 0) + 1
    return {
        name: module for name, module in model.named_modules() if is_linear(module) and owners[id(module.weight)] == 1
    }


def require_groups(model: nn.Module, groups: int, ranks: int) -> None:
    """Raise ValueError if `groups` does not divide the inputs of every quantizable layer and expert matrix on each of
    `ranks` tensor-parallel ranks."""
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


def in_int8(model: nn.Module, groups: int) -> dict[str, WeightLoader]:
    """Replace the model's linear layers and expert matrices by int8 ones. Returns, by parameter name, the function that
    quantizes a floating-point weight into it."""
    loaders: dict[str, WeightLoader] = {}
    for name, linear in quantizable(model).items():
        parent, _, child = name.rpartition(".")
        assert not isinstance(linear, Int8Linear), f"{name} is quantized already"
        layer = Int8Linear(linear, groups)
        loaders[f"{name}.weight"] = layer.load_weight
        setattr(model.get_submodule(parent), child, layer)
    for path, module in model.named_modules():
        if names := expert_matrices(module):
            experts = Int8Experts(module, groups)
            loaders |= {f"{path}.{name}": partial(experts.load_weight, name) for name in names}
    return loaders
