"""A whole decoder over int8 weights, in torch operations."""

from collections.abc import Mapping

import torch

from hybrid.decoders.torch_decoder import Tensors, TorchDecoder
from hybrid.models.spec import JOINED, ParamRef
from hybrid.weights.int8 import dequantized, int8_linear, scale_of
from hybrid.weights.joined import joined_view


class Int8Decoder(TorchDecoder):
    """TorchDecoder over int8 weights. q, k, v and gate, up are read as one matrix if their weights and scales are
    adjacent in memory; otherwise one after the other, so no weight is copied."""

    def _bound(self, refs: Mapping[str, ParamRef]) -> Tensors:
        bound = Tensors()
        for role, ref in refs.items():
            tensor = self._read(ref)
            if tensor is None:
                continue
            dtype = self._dtype_of(role)
            bound[role] = tensor if tensor.dtype in (dtype, torch.int8) else tensor.to(dtype)
            if tensor.dtype == torch.int8:
                bound[role.replace(".weight", ".scale")] = scale_of(ref)
        for name, roles in JOINED.items():
            self._join(bound, refs, name, roles)
        return bound

    def _join(self, bound: Tensors, refs: Mapping[str, ParamRef], name: str, roles: tuple[str, ...]) -> None:
        """Replace the int8 matrices of `roles` by the one that they are parts of, if they are."""
        keys = {kind: [f"{role}.{kind}" for role in roles] for kind in ("weight", "scale", "bias")}
        if not all(key in bound for key in (*keys["weight"], *keys["scale"])):
            return
        views = {kind: joined_view([bound[key] for key in keys[kind]]) for kind in ("weight", "scale")}
        if any(view is None for view in views.values()):
            return
        rows = [len(bound[key]) for key in keys["weight"]]
        if any(key in bound for key in keys["bias"]):
            empty = [torch.zeros(count, dtype=self.dtype, device=views["weight"].device) for count in rows]
            biases = [bound.pop(key, zeros) for key, zeros in zip(keys["bias"], empty, strict=True)]
            bound[f"{name}.bias"] = self._joined([refs.get(key) for key in keys["bias"]], biases)
        for kind, view in views.items():
            for key in keys[kind]:
                del bound[key]
            bound[f"{name}.{kind}"] = view

    def _linear(self, tensors: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        if role in JOINED and f"{role}.weight" not in tensors:
            parts = [part for part in JOINED[role] if f"{part}.weight" in tensors]
            return torch.cat([self._linear(tensors, part, x) for part in parts], dim=-1)
        return self._product(x, *(tensors.get(f"{role}.{kind}") for kind in ("weight", "scale", "bias")))

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weightᵀ + bias, as `int8_linear`."""
        return int8_linear(x, weight, scale, bias)

    def _kv_b(self, block: Tensors) -> torch.Tensor:
        weight, scale = block["kv_b.weight"], block.get("kv_b.scale")
        return weight if scale is None else dequantized(weight, scale).to(self.dtype)

    def _expert(self, block: Tensors, role: str, expert: int) -> torch.Tensor:
        weight, scale = (block.get(f"{role}.{kind}") for kind in ("weight", "scale"))
        return weight[expert] if scale is None else dequantized(weight[expert], scale[expert]).to(self.dtype)
