"""A model's weights as snapshots copy them: adapted modules, groups that are gathered together, and their version."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.models.model_info import ModelInfo
from hybrid.models.structure import Structure
from hybrid.weights.lora import AdaptedModule, read_adapters


@dataclass
class WeightVersion:
    """Counts the changes of weights. A step changes the trainable parameters, a load changes all parameters."""

    steps: int = 0
    loads: int = 0
    adapter_changes: int = 0
    adapters: tuple = ()  # the active adapters at the last `ModelWeights.number`
    is_switched: bool = False  # a window has other adapters than the model's active ones, which is no change
    updating: bool = False  # an optimizer may have written weights since the last `end_update`

    def begin_update(self, *_: object) -> None:
        """Mark that weights may be written from here on, even if the step then raises. An optimizer's pre-step hook."""
        self.updating = True

    def end_update(self) -> None:
        """Count all optimizer calls since the last `end_update` as one step."""
        self.steps += self.updating
        self.updating = False


@dataclass(frozen=True)
class Group:
    """Weights that are gathered together: parameters that are copied unchanged, and modules whose adapters are merged
    (or kept unmerged)."""

    params: tuple[nn.Parameter, ...]
    adapted: tuple[AdaptedModule, ...]


class State(NamedTuple):
    """The source of copies: the weights' version, and the active adapters; () for copies without adapters."""

    loads: int
    steps: int
    adapters: tuple


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights.

    adapted: the model's adapted modules.
    running: the model's adapter layers if they cannot be merged: their own forwards run. Then nothing is adapted.
    groups: the weights that `Snapshot.refresh` updates, in order; (): it updates nothing.
    unmerged: adapters are kept unmerged where `AdaptedModule.can_run_unmerged` allows it.
    trainable: the parameters that a step may change.
    """

    info: ModelInfo
    adapted: tuple[AdaptedModule, ...]
    running: tuple[nn.Module, ...]
    groups: tuple[Group, ...]
    unmerged: bool
    version: WeightVersion
    trainable: frozenset[nn.Parameter]

    def number(self) -> int:
        """Return the current version of the weights, which never decreases. Changes of the active adapters count."""
        version = self.version
        if not version.is_switched:
            adapters = (*active_adapters(self.adapted), *map(switch_state, self.running))
            version.adapter_changes += adapters != version.adapters
            version.adapters = adapters
        return version.steps + version.loads + version.adapter_changes

    def state(self, adapters: bool) -> State:
        """Return the current state of all weights.  adapters: with the active adapters."""
        return State(self.version.loads, self.version.steps, active_adapters(self.adapted) if adapters else ())

    def stamp(self, weight: nn.Parameter | AdaptedModule) -> State:
        """Return the current state of one parameter, or of one adapted module's merged weights."""
        version = self.version
        if isinstance(weight, AdaptedModule):
            return State(version.loads, version.steps, weight.state())
        return State(version.loads, version.steps if weight in self.trainable else 0, ())

    def is_unmerged(self, adapted: AdaptedModule, adapters: bool) -> bool:
        """Whether the active adapters of `adapted` run unmerged. False if `adapters` is False or none is active."""
        return adapters and self.unmerged and bool(adapted.state()) and adapted.can_run_unmerged()

    def is_merged(self, adapted: AdaptedModule, adapters: bool) -> bool:
        """Whether the active adapters of `adapted` are merged. False if `adapters` is False or none is active."""
        return adapters and bool(adapted.state()) and not self.is_unmerged(adapted, adapters)


def read_weights(
    info: ModelInfo, layers_per_group: int, unmerged: bool = False, version: WeightVersion | None = None
) -> ModelWeights:
    """Return the weights of `info.model`, `layers_per_group` layers to a group.

    version: the counter to continue; None: a new one.
    """
    adapted = tuple(read_adapters(info.model)) if info.merges_adapters else ()
    running = () if info.merges_adapters else tuple(filter(is_switch, info.model.modules()))
    version = version or WeightVersion()
    version.adapters = (*active_adapters(adapted), *map(switch_state, running))
    groups = make_groups(info.model, info.structure, adapted, layers_per_group)
    # Factors of an adapter that is not active require no gradients (PEFT's `set_adapter`), and may be trained later.
    trainable = {param for param in info.model.parameters() if param.requires_grad} | factors_of(adapted)
    return ModelWeights(info, adapted, running, groups, unmerged, version, frozenset(trainable))


def active_adapters(adapted: tuple[AdaptedModule, ...]) -> tuple:
    """Return the state of every adapted module, to be compared with an earlier one."""
    return tuple(layer.state() for layer in adapted)


@lru_cache(maxsize=8)
def adapters_text(adapters: tuple) -> str:
    """Return the active adapters of a `State` as a text that ranks compare: their names, and a checksum that scales and
    modules are part of."""
    names = dict.fromkeys(name for layer in adapters for name, _ in layer)
    return f"{', '.join(names) or 'no adapter'} ({crc32(repr(adapters).encode()):08x})"


def is_switch(module: nn.Module) -> bool:
    """Whether adapters are switched at this module: PEFT's layers and wrappers, and its model for virtual tokens."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | PeftModel)


def switch_state(module: Any) -> tuple:
    """Return which adapters run at a module of `is_switch`."""
    disabled = module._adapters_disabled if isinstance(module, PeftModel) else module.disable_adapters
    active = module.active_adapter if isinstance(module, PeftModel) else module.active_adapters
    return disabled, str(active)


def factors_of(adapted: tuple[AdaptedModule, ...]) -> set[nn.Parameter]:
    """Return the parameters of all adapters of these modules, active or not."""
    sources = {param for layer in adapted for param in layer.sources.values()}
    # A base may have modules inside it, with parameters of their own (a router's); they are copied as any others.
    params = {param for layer in adapted for param in {*layer.wrapper.parameters()} - {*layer.plain.parameters()}}
    return params - sources


def make_groups(
    model: nn.Module, structure: Structure, adapted: tuple[AdaptedModule, ...], layers_per_group: int
) -> tuple[Group, ...]:
    """Return the groups in which weights are gathered: parts outside the layers, then layers, `layers_per_group` at a
    time.

    A parameter that two parts share is in the first part's group. Adapter factors are in no group: they are gathered
    with the modules that they adapt.
    """
    factors = factors_of(adapted)
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
