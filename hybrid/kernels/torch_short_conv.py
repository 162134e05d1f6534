"""Gated short convolutions (LFM2, arXiv:2511.23404) in torch, on any device: the reference for the CPU kernels, and the
fallback.

A token's output is a gate times a convolution over the latest gated inputs of each channel. It rounds where Hugging
Face's modules round (transformers 5.23).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from hybrid.kernels.recurrent import MixerLayer, WeightPart


@dataclass(frozen=True)
class ShortConv:
    """Sizes of a model's gated short convolutions.

    channels: of the convolution: the model's hidden size, or a rank's part of it.
    conv_width: of the convolution, in tokens.
    """

    kind: ClassVar[str] = "short convolution"
    channels: int
    conv_width: int

    @property
    def width(self) -> int:
        """Elements per token that a layer holds at once."""
        return 8 * self.channels  # both gates and the input, and before and after the convolution, of which in float32

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each role's weight.  hidden: the model's hidden size."""
        return {
            "conv_in": (3 * self.channels, hidden),
            "conv": (self.conv_width, self.channels),
            "conv_o": (hidden, self.channels),
        }

    def state_shapes(self, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a sequence's only state: the convolution's latest inputs.  lanes: not read."""
        return ((self.conv_width - 1, self.channels),)

    def sliced(self, ranks: int) -> Self | None:
        """Return the sizes of the slice that each of `ranks` ranks has; None if they cannot divide the channels."""
        return None if self.channels % ranks else replace(self, channels=self.channels // ranks)

    def weight_parts(self) -> dict[str, tuple[WeightPart, ...]]:
        """Return the parts of the sliced weights that have several, by role: of both gates and the input."""
        return {"conv_in": (WeightPart(self.channels),) * 3}

    def mixed(self, x: torch.Tensor, layer: MixerLayer) -> torch.Tensor:
        """Return the mixer's output for x [tokens, hidden], and update the states of its sequences."""
        input_gate, output_gate, inputs = layer.linear("conv_in", x).chunk(3, dim=-1)
        return layer.linear("conv_o", output_gate * layer.convolved(input_gate * inputs))
