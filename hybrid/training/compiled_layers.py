"""Transformer layers whose training forwards `torch.compile` makes faster, one layer at a time."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes
from transformers import PreTrainedModel

from hybrid.models.quantized import quantized_layers
from hybrid.weights.module_dicts import patched_attribute


class CompiledForward:
    """A layer's forward: compiled in train mode, the layer's own in eval mode.

    Layers of a class share their compiled code, which takes the layer as an argument. Hooks on the layer, such as
    ZeRO-3's, and gradient checkpointing run outside of it. A copy or a pickle of the layer has the class's forward
    again.
    """

    def __init__(self, layer: nn.Module, compiled: Any):
        functools.update_wrapper(self, layer.forward)  # Hugging Face reads the signature of a forward
        self.layer, self.compiled = layer, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, forward = self.layer, type(self.layer).forward
        if not layer.training:
            return forward(layer, *args, **kwargs)
        if not (checkpoints(forward) and layer.gradient_checkpointing):
            return self.run(layer, *args, **kwargs)
        checkpoint = layer._gradient_checkpointing_func

        def checkpointed(function: functools.partial, *inputs: Any) -> Any:
            return checkpoint(functools.partial(self.run, *function.args, **function.keywords), *inputs)

        with patched_attribute(layer, "_gradient_checkpointing_func", checkpointed):
            return forward(layer, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled code.

        Else rows as long as the hidden size or a head has channels would be compiled for just this length.
        """
        with symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # torch 2.13
            return self.compiled(*args, **kwargs)

    def __reduce__(self) -> tuple:
        # While a layer is copied, the copy exists but has no attributes yet: getattr gives its class's forward.
        return getattr, (self.layer, "forward")


def checkpoints(forward: Callable) -> bool:
    """Whether a layer's forward is transformers' wrapper, which checkpoints the layer's own (transformers 5.23)."""
    return "_gradient_checkpointing_func" in forward.__code__.co_names and hasattr(forward, "__wrapped__")


def without_checkpointing(forward: Any) -> Callable:
    """Return the forward inside of the wrappers. Compiled, these would run what they checkpoint as it is."""
    while checkpoints(forward):
        forward = forward.__wrapped__
    return forward


def declared_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose classes transformers declares as layers: of models without a head, such as critics."""
    declared = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in module._no_split_modules or ()
    }
    return [module for module in model.modules() if type(module).__name__ in declared]


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
        if any(list(quantized_layers(layer)) for layer in layers):
            raise NotImplementedError(
                "compile: layers in 4 or 8 bits given, whose kernels are not compiled; leave one of the two out"
            )
        self.layers = layers
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since torch 2.13
            # An engine's graphs do not count towards the limit of another engine's, above which layers run eagerly.
            settings = {"isolate_recompiles": True, **settings}
        classes = {type(layer) for layer in layers}
        compiled = {kind: torch.compile(without_checkpointing(kind.forward), **settings) for kind in classes}
        for layer in layers:
            layer.forward = CompiledForward(layer, compiled[type(layer)])

    def close(self) -> None:
        """Restore the layers' own forwards."""
        for layer in self.layers:
            vars(layer).pop("forward", None)
