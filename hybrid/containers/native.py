"""The native container: the Hugging Face module itself, run over the snapshot's tensors."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from hybrid.architectures.structure import Part
from hybrid.containers.window import Window


class NativeContainer:
    """Takes the place of one module's forward while the engine is in eval mode."""

    kind = "native"
    why = "the Hugging Face module itself, over the snapshot's weights"

    def __init__(self, part: Part, window: Window):
        self.part = part
        self.window = window
        self.own_forward = None  # the forward that was on the instance, if one was
        self.installed = False

    def install(self) -> None:
        """Switch the module's forward to this container's."""
        module: nn.Module = self.part.module
        window, original = self.window, module.forward
        self.own_forward = module.__dict__.get("forward")

        @functools.wraps(original)  # Hugging Face reads the signature of a forward
        @torch.no_grad()
        def forward(*args, **kwargs):
            if window.is_open:
                return self.run(original, args, kwargs)
            with window.opened():
                return self.run(original, args, kwargs)

        module.forward = forward
        self.installed = True

    def run(self, original: Callable, args: tuple, kwargs: dict):
        """The module's output, inside an open window."""
        with self.window.as_asked():
            return original(*args, **kwargs)

    def uninstall(self) -> None:
        """Give the module the forward back that it had; nothing where it was not switched."""
        if not self.installed:
            return
        if self.own_forward is None:
            del self.part.module.forward
        else:
            self.part.module.forward = self.own_forward
        self.own_forward, self.installed = None, False
