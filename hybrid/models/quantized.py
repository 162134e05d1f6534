"""Layers of bitsandbytes whose frozen weights are quantized, as QLoRA trains adapters on them (arXiv:2305.14314).

Inference reads such a weight dequantized by bitsandbytes itself, in the model's dtype: the matrix that the layer's own
forward multiplies with. A parameter that is read so is marked with its full shape and dtype (`mark_quantized`).
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

FOUR_BITS, EIGHT_BITS = "Linear4bit", "Linear8bitLt"
BLOCK_SIZE = 64  # 4-bit values that share a scale, by bitsandbytes' default


class Dequantized(NamedTuple):
    """A quantized parameter as inference reads it.  state_bytes: of its scales, which are on every rank."""

    shape: torch.Size
    dtype: torch.dtype
    state_bytes: int


def kind_of(module: nn.Module) -> str:
    """Return the class of bitsandbytes that a module is of, FOUR_BITS or EIGHT_BITS, or whose name is another one's; ""
    if it is of none."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("bitsandbytes.nn")]
    return next((kind for kind in kinds if kind in (FOUR_BITS, EIGHT_BITS)), next(iter(kinds), ""))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of the layers whose weights are read dequantized."""
    for name, module in model.named_modules():
        if kind_of(module) in (FOUR_BITS, EIGHT_BITS) and not unreadable(module):
            yield name, module


def unreadable(module: Any) -> str:
    """Return why the weight of a module of bitsandbytes or torchao cannot be read; "" if it can or is not quantized."""
    params = dict(module.named_parameters(recurse=False))
    for name, param in params.items():
        for cls in (type(param), type(param.data)):
            if cls.__module__.startswith("torchao"):
                return f"{name} is a {cls.__name__} of torchao"
    kind = kind_of(module)
    if kind == FOUR_BITS and getattr(module.quant_state, "packing_format_for_cpu", False):
        return "an eval forward on the CPU has packed its weight and rounded its scales"
    if kind == FOUR_BITS and module.quant_state is None:
        return "its weight is not quantized yet"
    if kind == EIGHT_BITS and (module.state.has_fp16_weights or module.weight.dtype != torch.int8):
        return "its weight is not quantized yet, or has_fp16_weights is set"
    is_other = kind not in ("", FOUR_BITS, EIGHT_BITS)
    is_other = is_other and any(hasattr(param, "quant_state") or hasattr(param, "SCB") for param in params.values())
    return f"a {kind} of bitsandbytes" if is_other else ""


def mark_quantized(model: nn.Module) -> None:
    """Mark the quantized parameters of a model. Again after a cast: they are read in the dtype of the other ones."""
    layers = [module for _, module in quantized_layers(model)]
    weights = {module.weight for module in layers}
    dtype = next((param.dtype for param in model.parameters() if param not in weights), torch.float32)
    for module in layers:
        weight = module.weight
        if kind_of(module) == FOUR_BITS:
            if getattr(weight, "quant_state", None) is None:  # lost where ZeRO-3 has made another parameter
                weight.quant_state = module.quant_state
            shape = torch.Size(weight.quant_state.shape)
        else:
            if weight.CB is not None:  # as its first forward does
                module.init_8bit_state()
            weight.SCB = module.state.SCB
            shape = torch.Size((module.out_features, module.in_features))
        weight.dequantized = Dequantized(shape, dtype, sum(tensor.nbytes for tensor in scales_of(weight)))


def keep_formats(model: nn.Module) -> None:
    """Keep 4-bit layers from packing their weights in an eval forward, which bitsandbytes (0.50) does in the place of
    the training weights, on CPUs with AVX-512 BF16, and does not undo."""
    for _, module in quantized_layers(model):
        if kind_of(module) == FOUR_BITS:
            module.support_avx512bf16_for_cpu = False


def is_quantized(param: Any) -> bool:
    """Whether a parameter is read dequantized."""
    return hasattr(param, "dequantized")


def read_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which a parameter is read: its own, unless it is quantized."""
    return param.dequantized.dtype if is_quantized(param) else param.dtype


def state_bytes(param: Any) -> int:
    """Return the bytes of a parameter's scales: 0 unless it is quantized."""
    return param.dequantized.state_bytes if is_quantized(param) else 0


def scales_of(param: Any) -> list[torch.Tensor]:
    """Return the tensors besides its values that a quantized parameter has."""
    state = getattr(param, "quant_state", None)
    if state is None:
        return [param.SCB]
    tensors = [state.absmax, state.code]
    return [*tensors, state.offset, state.state2.absmax, state.state2.code] if state.nested else tensors


def without_scales(model: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a state dict without the scales of 4-bit weights, which such layers save but cannot load
    (bitsandbytes 0.50).

    Raises ValueError if they are not those of `model`: its weights were quantized from others.
    """
    state_dict = copy.copy(state_dict)  # with its `_metadata`
    for name, layer in quantized_layers(model):
        scales = layer.weight.quant_state.as_dict(packed=True) if kind_of(layer) == FOUR_BITS else {}
        for key, expected in scales.items():
            given = state_dict.pop(f"{prefix}{name}.weight.{key}", None)
            if given is not None and not torch.equal(given.cpu(), expected.cpu()):
                raise ValueError(
                    f"{name}: the checkpoint's {key} is another one than the model's, whose base was quantized from "
                    "other weights or in another format; load the base that the checkpoint was trained on"
                )
    return state_dict


@torch.no_grad()
def dequantized(param: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter, which is gathered: a new tensor in its full shape if it is quantized, else the
    parameter itself."""
    if not is_quantized(param):
        return param
    weight: Any = param
    dtype, state = weight.dequantized.dtype, getattr(weight, "quant_state", None)
    if state is None:
        return weight.data.to(dtype, copy=True).mul_(weight.SCB.unsqueeze(1).mul(1.0 / 127.0))
    from bitsandbytes.functional import dequantize_4bit  # an optional package

    state = copy.copy(state)
    state.dtype = dtype
    return dequantize_4bit(weight.data, state)


class DequantizedLinear(nn.Linear):
    """Stands in for a quantized layer inside of a window, which gives it weights; computes in the layer's compute
    dtype."""

    def __init__(self, layer: Any):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.compute_dtype = compute_dtype(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


def compute_dtype(layer: Any) -> torch.dtype | None:
    """Return the dtype that a quantized layer casts its inputs to; None: it casts none."""
    return layer.compute_dtype if kind_of(layer) == FOUR_BITS and layer.compute_type_is_set else None


def narrow_reason(model: nn.Module) -> str:
    """Return why a decoder in the model's dtype would compute otherwise than its quantized layers; "" if it would
    not."""
    for name, layer in quantized_layers(model):
        own, dtype = compute_dtype(layer), read_dtype(layer.weight)
        if own is not None and own.itemsize < dtype.itemsize:
            return f"{name} computes in {own}, and the model is in {dtype}"
    return ""
