"""The native container: runs the Hugging Face module itself over the snapshot's tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.decoders.calls import Calls
from hybrid.inputs import as_model_inputs
from hybrid.models.structure import Part


class Forward:
    """The forward of a switched module: its container's, without gradients.

    A copy or a pickle of the module has the module's own forward again, and no reference to the engine.
    """

    def __init__(self, container: "NativeContainer", own: Callable):
        functools.update_wrapper(self, own)  # Hugging Face reads the signature of a forward
        self.container, self.own = container, own

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.container.calls.lock:
            return self._output(self.container, args, kwargs)

    def _output(self, container: "NativeContainer", args: tuple, kwargs: dict[str, Any]) -> Any:
        if container.part.kind == "model":
            args, kwargs = as_model_inputs(args, kwargs, container.window.device)
        if container.calls.inside:
            return container.run(self.own, args, kwargs)
        if not container.window.is_open and container.window.renew():
            return container.part.module.forward(*args, **kwargs)
        return container.request(self.own, args, kwargs)

    def __reduce__(self) -> tuple:
        before = self.container.own_forward
        # While a module is copied, the copy exists but has no attributes yet: getattr gives its class's forward.
        return (getattr, (self.container.part.module, "forward")) if before is None else (itself, (before,))


def itself(forward: Callable) -> Callable:
    """Returns `forward`: restores, in a copy, a forward that was set on the instance."""
    return forward


class NativeContainer:
    """Replaces one module's forward while the engine is in eval mode."""

    kind = "native"
    why = "the Hugging Face module itself, over the snapshot's weights"

    def __init__(self, part: Part, calls: Calls):
        self.part = part
        self.calls, self.window = calls, calls.window
        self.own_forward = None  # a forward that was set on the instance
        self.installed = False

    def install(self) -> None:
        """Replace the module's forward by this container's."""
        module: nn.Module = self.part.module
        self.own_forward = module.__dict__.get("forward")
        module.forward = Forward(self, module.forward)
        self.installed = True

    def request(self, original: Callable, args: tuple, kwargs: dict):
        """The module's output, if the user calls it directly."""
        name = "" if self.part.kind == "model" else self.part.name
        with self.calls.request(module=name):
            return self.run(original, args, kwargs)

    def run(self, original: Callable, args: tuple, kwargs: dict):
        """The module's output, inside a request."""
        with self.window.as_asked():
            return self.calls.native(self.part.module, functools.partial(original, *args, **kwargs))

    def uninstall(self) -> None:
        """Restore the module's forward; does nothing if it was not replaced."""
        if not self.installed:
            return
        if self.own_forward is None:
            del self.part.module.forward
        else:
            self.part.module.forward = self.own_forward
        self.own_forward, self.installed = None, False
