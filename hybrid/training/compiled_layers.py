"""Transformer layers whose training forwards `torch.compile` makes faster, one layer at a time."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from torch import nn


class CompiledForward:
    """A layer's forward: compiled in train mode, the layer's own in eval mode.

    Layers of a class share their compiled code, which takes the layer as an argument. Hooks on the layer, such as
    ZeRO-3's, run outside of it. A copy or a pickle of the layer has the class's forward again.
    """

    def __init__(self, layer: nn.Module, compiled: Any):
        functools.update_wrapper(self, layer.forward)  # Hugging Face reads the signature of a forward
        self.layer, self.compiled = layer, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.compiled if self.layer.training else type(self.layer).forward
        return forward(self.layer, *args, **kwargs)

    def __reduce__(self) -> tuple:
        # While a layer is copied, the copy exists but has no attributes yet: getattr gives its class's forward.
        return getattr, (self.layer, "forward")


class CompiledLayers:
    """Layers with a CompiledForward each, until `close`.

    Args:
        layers: the transformer layers.
        partitioned: whether ZeRO-3 partitions their parameters.
        settings: arguments of `torch.compile`.

    Raises:
        NotImplementedError: for layers that this cannot compile, or cannot make faster.
    """

    def __init__(self, layers: Sequence[nn.Module], partitioned: bool, settings: dict[str, Any]):
        kinds = sorted({type(layer).__name__ for layer in layers})
        if not layers:
            raise NotImplementedError("compile: no transformer layers were found in this model")
        if any("forward" in vars(layer) for layer in layers):
            raise NotImplementedError(
                f"compile: a forward was set on a {' or '.join(kinds)} instance, such as by accelerate's hooks; only "
                "the class's own can be compiled: compile before that, or leave one of the two out"
            )
        if partitioned and not all(map(z3_leaf_module, layers)):
            raise NotImplementedError(
                "compile: ZeRO-3 gathers the parameters of each module in a layer by hooks, which divide compiled code "
                f'into parts that gain nothing; gather whole layers: "zero_optimization": {{"leaf_module": {{"classes":'
                f' ["{kinds[0]}"]}}}}, or use stage 0, 1 or 2'
            )
        self.layers = layers
        compiled = {kind: torch.compile(kind.forward, **settings) for kind in {type(layer) for layer in layers}}
        for layer in layers:
            layer.forward = CompiledForward(layer, compiled[type(layer)])

    def close(self) -> None:
        """Restore the layers' own forwards."""
        for layer in self.layers:
            vars(layer).pop("forward", None)
