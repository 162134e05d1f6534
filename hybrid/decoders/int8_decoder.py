"""A whole decoder over int8 weights, in torch operations."""

from collections.abc import Mapping

import torch

from hybrid.decoders.torch_decoder import Tensors, TorchDecoder
from hybrid.models.spec import JOINED, ParamRef
from hybrid.weights.int8 import dequantized, int8_linear, scale_of


class Int8Decoder(TorchDecoder):
    """TorchDecoder over a model with int8 weights. q, k, v and gate, up are not joined, so nothing is copied."""

    def _bound(self, refs: Mapping[str, ParamRef]) -> Tensors:
        bound = Tensors()
        for role, ref in refs.items():
            tensor = self._read(ref)
            if tensor is None:
                continue
            bound[role] = tensor if tensor.dtype in (self.dtype, torch.int8) else tensor.to(self.dtype)
            if tensor.dtype == torch.int8:
                bound[role.replace(".weight", ".scale")] = scale_of(ref)
        return bound

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        if role in JOINED:
            return torch.cat([self._linear(tensors, part, x) for part in JOINED[role]], dim=-1)
        return int8_linear(x, *(tensors.get(f"{role}.{kind}") for kind in ("weight", "scale", "bias")))

    def _expert(self, block: Tensors, role: str, expert: int) -> torch.Tensor:
        weight, scale = (block.get(f"{role}.{kind}") for kind in ("weight", "scale"))
        return weight[expert] if scale is None else dequantized(weight[expert], scale[expert]).to(self.dtype)
