"""Mixers with a state of fixed size for each sequence: what each kind declares, and what they share in torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch.nn import functional as F

Linear = Callable[[str, torch.Tensor], torch.Tensor]  # (role or name of JOINED, x [tokens, in]) -> [tokens, out]


class WeightPart(NamedTuple):
    """Consecutive rows of a weight, or channels of a convolution, that ranks divide.

    size: over all ranks.  shared: every rank has all of them.
    """

    size: int
    shared: bool = False


def sum_over_one_rank(x: torch.Tensor) -> torch.Tensor:
    """Return x: the sum of a mixer that is not sliced."""
    return x


@dataclass(frozen=True)
class StateRows:
    """Sequences with the same number of new tokens, whose states are updated together.

    rows: int64 [sequences, new], index of each new token in the packed tensors.
    slots: int64 [sequences], of the states.  fresh: bool [sequences], the sequence begins: its state is zero.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True)
class MixerLayer:
    """A layer's weights and states, and the sequences of a forward.

    linear: its products.  weights: by role.  states: [slots, …] each.  eps: of the model's norms.
    summed: returns a tensor's sum over the ranks that have slices of the mixer.
    """

    linear: Linear
    weights: Mapping[str, torch.Tensor]
    states: tuple[torch.Tensor, ...]
    groups: Sequence[StateRows]
    eps: float
    summed: Callable[[torch.Tensor], torch.Tensor] = sum_over_one_rank

    def convolved(self, x: torch.Tensor) -> torch.Tensor:
        """Return the causal convolution of each channel of x [tokens, channels], in x's dtype, and keep each sequence's
        latest inputs.

        Weights "conv.weight" [width, channels] and perhaps "conv.bias" [channels]; the last of `states` float32 [slots,
        width - 1, channels].
        """
        weight, bias, state = self.weights["conv.weight"], self.weights.get("conv.bias"), self.states[-1]
        out, width, filters = torch.empty_like(x), len(weight), weight.T.unsqueeze(1).contiguous()
        for group in self.groups:
            before = state[group.slots].masked_fill(group.fresh[:, None, None], 0)
            inputs = torch.cat([before.to(x.dtype), x[group.rows]], dim=1)  # [sequences, width - 1 + new, channels]
            state[group.slots] = inputs[:, inputs.shape[1] - width + 1 :].float()
            filtered = F.conv1d(inputs.transpose(1, 2), filters, bias, groups=weight.shape[1])
            out[group.rows] = filtered.transpose(1, 2)
        return out


class RecurrentMixer(Protocol):
    """A kind of mixer, and its sizes. The C++ kernels have a record of the same name and fields.

    kind: its name, as in `LayerSpec.mixer`.
    """

    kind: ClassVar[str]

    @property
    def width(self) -> int:
        """Elements per token that a layer holds at once."""

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each role's weight.  hidden: the model's hidden size."""

    def state_shapes(self, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a sequence's states, float32: the last of them the convolution's latest inputs.

        lanes: the last dimension of other states is padded to a multiple of it.
        """

    def sliced(self, ranks: int) -> Self | None:
        """Return the sizes of the slice that each of `ranks` ranks has; None if they cannot divide the mixer."""

    def weight_parts(self) -> dict[str, tuple[WeightPart, ...]]:
        """Return the parts of the sliced weights that have several, by role."""

    def mixed(self, x: torch.Tensor, layer: MixerLayer) -> torch.Tensor:
        """Return the mixer's output for x [tokens, hidden], and update the states of its sequences. Of a slice: the
        part of the output that is this rank's, to be summed over the ranks."""


def padded(size: int, lanes: int) -> int:
    """`size` rounded up to a multiple of `lanes`."""
    return -(-size // lanes) * lanes


def state_rows(cu_seqlens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> tuple[StateRows, ...]:
    """Return the sequences of a packed batch that have new tokens, grouped by how many. Synchronises with the device.

    cu_seqlens int32 [sequences + 1], positions int32 [tokens], slots int32 [sequences]: PackedBatch's.
    """
    counts, device = cu_seqlens.diff(), positions.device
    groups = []
    for new in counts.unique().tolist():
        if new:
            members = (counts == new).nonzero().flatten()
            rows = cu_seqlens[members].long()[:, None] + torch.arange(new, device=device)
            groups.append(StateRows(rows, slots[members].long(), positions[rows[:, 0]] == 0))
    return tuple(groups)
