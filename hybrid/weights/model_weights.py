"""A model's weights as snapshots copy them: adapted modules, groups that are gathered together, and their version."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from hybrid.models.model_info import ModelInfo
from hybrid.models.structure import Structure
from hybrid.weights.lora import Adapted, read_adapters


@dataclass
class WeightVersion:
    """Counts the changes of weights. A step changes the trainable parameters, a load changes all parameters."""

    steps: int = 0
    loads: int = 0
    adapter_changes: int = 0
    adapters: tuple = ()  # the active adapters at the last `see_adapters`
    updating: bool = False  # an optimizer may have written weights since the last `end_update`

    @property
    def number(self) -> int:
        """The version as one number, which never decreases."""
        return self.steps + self.loads + self.adapter_changes

    def begin_update(self, *_: object) -> None:
        """A pre-step hook for an optimizer: weights may be written from here on, even if the step then raises."""
        self.updating = True

    def end_update(self) -> None:
        """Count all optimizer calls since the last `end_update` as one step."""
        self.steps += self.updating
        self.updating = False

    def see_adapters(self, adapters: tuple) -> None:
        """Count a change if the active adapters differ from the last ones."""
        self.adapter_changes += adapters != self.adapters
        self.adapters = adapters


@dataclass(frozen=True)
class Group:
    """Weights that are gathered together: parameters that are copied unchanged, and modules whose adapters are merged
    (or kept unmerged)."""

    params: tuple[nn.Parameter, ...]
    adapted: tuple[Adapted, ...]


class State(NamedTuple):
    """What copies were made from: the version, and the active adapters; () for copies without adapters."""

    loads: int
    steps: int
    adapters: tuple


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights.

    adapted: the model's adapted modules.
    groups: the weights that `Snapshot.refresh` updates, in order; (): it updates nothing.
    unmerged: adapters are kept unmerged where `Adapted.can_run_unmerged` allows it.
    trainable: the parameters that a step may change.
    """

    info: ModelInfo
    adapted: tuple[Adapted, ...]
    groups: tuple[Group, ...]
    unmerged: bool
    version: WeightVersion
    trainable: frozenset[nn.Parameter]

    def number(self) -> int:
        """The current version of the weights. Changes of the active adapters count."""
        self.version.see_adapters(active_adapters(self.adapted))
        return self.version.number

    def state(self, adapters: bool) -> State:
        """The current state of all weights.  adapters: with the active adapters."""
        return State(self.version.loads, self.version.steps, active_adapters(self.adapted) if adapters else ())

    def stamp(self, weight: nn.Parameter | Adapted) -> State:
        """The current state of one parameter, or of one adapted module's merged weights."""
        version = self.version
        if isinstance(weight, Adapted):
            return State(version.loads, version.steps, weight.state())
        return State(version.loads, version.steps if weight in self.trainable else 0, ())

    def is_unmerged(self, adapted: Adapted, adapters: bool) -> bool:
        """Whether the active adapters of `adapted` run unmerged. False if `adapters` is False or none is active."""
        return adapters and self.unmerged and bool(adapted.state()) and adapted.can_run_unmerged()

    def is_merged(self, adapted: Adapted, adapters: bool) -> bool:
        """Whether the active adapters of `adapted` are merged. False if `adapters` is False or none is active."""
        return adapters and bool(adapted.state()) and not self.is_unmerged(adapted, adapters)


def read_weights(
    info: ModelInfo, layers_per_group: int, unmerged: bool = False, version: WeightVersion | None = None
) -> ModelWeights:
    """The weights of `info.model`, `layers_per_group` layers to a group.

    version: the counter to continue; None: a new one.
    Raises NotImplementedError, with the module's name, for an adapter that cannot be merged.
    """
    adapted = tuple(read_adapters(info.model))
    version = version or WeightVersion()
    version.adapters = active_adapters(adapted)
    groups = make_groups(info.model, info.structure, adapted, layers_per_group)
    trainable = frozenset(param for param in info.model.parameters() if param.requires_grad)
    return ModelWeights(info, adapted, groups, unmerged, version, trainable)


def active_adapters(adapted: tuple[Adapted, ...]) -> tuple:
    """The state of every adapted module, to be compared with an earlier one."""
    return tuple(layer.state() for layer in adapted)


def make_groups(
    model: nn.Module, structure: Structure, adapted: tuple[Adapted, ...], layers_per_group: int
) -> tuple[Group, ...]:
    """The groups in which weights are gathered: parts outside the layers, then layers, `layers_per_group` at a time.

    A parameter that two parts share is in the first part's group. Adapter factors are in no group: they are gathered
    with the modules that they adapt.
    """
    sources = {param for layer in adapted for param in layer.sources.values()}
    factors = {param for layer in adapted for param in layer.wrapper.parameters()} - sources
    bundles = [
        modules[start : start + layers_per_group]
        for modules in ([part.module for part in structure.outer], [part.module for part in structure.layers])
        for start in range(0, len(modules), layers_per_group)
    ]
    taken, waiting, groups = set(factors), list(adapted), []
    for bundle in bundles:
        params = dict.fromkeys(param for module in bundle for param in module.parameters())
        modules = {module for root in bundle for module in root.modules()}
        here = [layer for layer in waiting if layer.wrapper in modules or layer.plain in modules]
        # A merge reads the base's copy, so the base must be in this group or an earlier one.
        params.update(dict.fromkeys(param for layer in here for param in layer.sources.values()))
        waiting = [layer for layer in waiting if layer not in here]
        groups.append(Group(tuple(param for param in params if param not in taken), tuple(here)))
        taken.update(params)
    assert not waiting, f"{waiting[0].name} is in no part of the model"
    assert taken >= set(model.parameters()), "a parameter is in no part of the model"
    return tuple(group for group in groups if group.params or group.adapted)
