"""A whole decoder over int8 weights, in torch operations."""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from hybrid.architectures.spec import Place
from hybrid.containers.torch_decoder import JOINED, Tensors, TorchDecoder
from hybrid.weights.quantize import int8_linear


class Int8Decoder(TorchDecoder):
    """TorchDecoder over a model of Int8Linear layers. Matrices of one input stay apart: nothing is copied."""

    def _bound(self, places: Mapping[str, Place], before: Tensors) -> Tensors:
        bound = Tensors()
        for role, place in places.items():
            tensor = self._read(place)
            if tensor is None:
                continue
            bound[role] = tensor if tensor.dtype in (self.dtype, torch.int8) else tensor.to(self.dtype)
            if tensor.dtype == torch.int8:
                scale = place.module.scale
                bound[role.replace(".weight", ".scale")] = scale if place.select is None else place.select(scale)
        return bound

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        if role in JOINED:
            return torch.cat([self._linear(tensors, part, x) for part in JOINED[role]], dim=-1)
        weight, scale, bias = (tensors.get(f"{role}.{kind}") for kind in ("weight", "scale", "bias"))
        return F.linear(x, weight, bias) if scale is None else int8_linear(x, weight, scale, bias)
