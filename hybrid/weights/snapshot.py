"""The snapshot: inference's copy of the weights, and the version of the weights that it was made from.

A parameter that is not partitioned and needs no merge is not copied: the model's own is used. Partitioned parameters
(ZeRO-3) are gathered in groups, straight into the copies. Adapted weights are merged out of place, or the adapters'
factors are kept unmerged. Weights that a decoder reads as one matrix lie in one buffer: q, k and v; gate and up.
Buffers keep their addresses until they are freed.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from hybrid.models.spec import ParamRef
from hybrid.models.structure import Structure
from hybrid.profiling import Phase
from hybrid.weights.gather import (
    Fetch,
    gathered,
    is_partitioned,
    staging_bytes,
    storage_for,
    whole_bytes,
    whole_in,
    whole_shape,
)
from hybrid.weights.joined import JoinedBuffers
from hybrid.weights.lora import Adapted, LowRank


@dataclass
class WeightVersion:
    """Counts the changes of weights. A step changes the trainable parameters, a load changes all parameters."""

    steps: int = 0
    loads: int = 0
    adapter_changes: int = 0
    adapters: tuple = field(default=())  # the active adapters at the last `see_adapters`
    updating: bool = False  # an optimizer may have written weights since the last `settle`

    @property
    def number(self) -> int:
        """The version as one number, which never decreases."""
        return self.steps + self.loads + self.adapter_changes

    def begin_update(self, *_: object) -> None:
        """A pre-step hook for an optimizer: weights may be written from here on, even if the step then raises."""
        self.updating = True

    def settle(self) -> None:
        """Count all optimizer calls since the last `settle` as one step."""
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

    carried: tuple[nn.Parameter, ...]
    adapted: tuple[Adapted, ...]


class Snapshot:
    """The weights that inference runs on.

    structure, layers_per_group: the model's parts, and how many layers are gathered together.
    adapted: the model's adapted modules.
    unmerged: keep adapters unmerged where `has_side_path` allows it.
    version: the counter to continue; None: a new one.
    joined: sets of ParamRefs (matrices, or biases) that a decoder reads as one; their copies lie in one buffer.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        adapted: list[Adapted],
        layers_per_group: int,
        unmerged: bool = False,
        version: WeightVersion | None = None,
        joined: Iterable[tuple[ParamRef, ...]] = (),
    ):
        self.model, self.structure = model, structure
        self.adapted, self.unmerged = adapted, unmerged
        self.groups = make_groups(model, structure, adapted, layers_per_group)
        self.version = version or WeightVersion(adapters=active_adapters(adapted))
        self.learning = {param for param in model.parameters() if param.requires_grad}
        self.base: dict[nn.Parameter, nn.Parameter] = {}  # copies of partitioned parameters
        self.storage: dict[nn.Parameter, torch.Tensor] = {}  # memory of the copies, [numel]
        self.merged: dict[Adapted, dict[str, nn.Parameter]] = {}
        self.stamps: dict[nn.Parameter | Adapted, tuple] = {}  # the version that each copy was made from
        self.owners = owners_of_joined(joined, adapted)
        self.joined = JoinedBuffers(refs for refs in joined if self.owners.keys() >= set(refs))
        self.place_of = {param: ref for ref, (_, param) in self.owners.items()}
        self.fills: dict[ParamRef, torch.Tensor] = {}  # copies of unadapted weights in joined buffers of merged ones
        self.layout = 0  # grows when `tensor` and `weights_of` start to give other tensors
        self.lent: dict[bool, tuple[tuple, list]] = {}  # Window's cache, by use of adapters: its key, and dictionaries
        self.fresh: dict[bool, tuple] = {}  # by use of adapters: the version that all copies were made from
        self.peak_bytes = 0  # most bytes held at once by the copies and the group being gathered

    def number(self) -> int:
        """The current version of the weights. Changes of the active adapters count."""
        self.version.see_adapters(active_adapters(self.adapted))
        return self.version.number

    def wanted(self, weight: nn.Parameter | Adapted) -> tuple:
        """The stamp of a copy of `weight` that is made now."""
        version = self.version
        if isinstance(weight, Adapted):
            return (version.loads, version.steps, weight.state())
        return (version.loads, version.steps if weight in self.learning else 0)

    def stale(self, weights: Iterable[nn.Parameter | Adapted]) -> list:
        """Those of `weights` whose copy is out of date or does not exist."""
        return [weight for weight in weights if self.stamps.get(weight) != self.wanted(weight)]

    def is_unmerged(self, one: Adapted, adapters: bool) -> bool:
        """Whether the active adapters of `one` are used unmerged. False if `adapters` is False or none is active."""
        return adapters and self.unmerged and bool(one.state()) and one.has_side_path()

    def is_merged(self, one: Adapted, adapters: bool) -> bool:
        """Whether the active adapters of `one` are merged. False if `adapters` is False or none is active."""
        return adapters and bool(one.state()) and not self.is_unmerged(one, adapters)

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Update every stale copy, group by group; with `adapters` False, merged weights are not updated.

        Gives the bytes gathered. A collective unless nothing is stale.
        """
        if self.is_fresh(adapters):
            return 0
        version = self._wanted_version(adapters)
        nbytes = sum(self._refresh_group(group, phase, adapters) for group in self.groups)
        if adapters:
            self._fill()
        self.fresh[adapters] = version
        return nbytes

    def must_gather(self, adapters: bool) -> bool:
        """Whether `refresh` has copies to update. With partitioned parameters it is then a collective."""
        if self.is_fresh(adapters):
            return False
        return any(self._is_stale(group, adapters) for group in self.groups)

    def is_fresh(self, adapters: bool) -> bool:
        """Whether no copy that a window opened with `adapters` uses is stale."""
        return self.fresh.get(adapters) == self._wanted_version(adapters)

    def _wanted_version(self, adapters: bool) -> tuple:
        """The value of `fresh` if nothing is stale."""
        return (self.version.loads, self.version.steps, *(active_adapters(self.adapted) if adapters else ()))

    def _is_stale(self, group: Group, adapters: bool) -> bool:
        unmerged = [param for one in group.adapted if self.is_unmerged(one, adapters) for param in one.adapter_params()]
        merged = [one for one in group.adapted if self.is_merged(one, adapters)]
        return bool(self.stale([*filter(is_partitioned, (*group.carried, *unmerged)), *merged]))

    @torch.no_grad()
    def _refresh_group(self, group: Group, phase: Phase, adapters: bool) -> int:
        unmerged = [param for one in group.adapted if self.is_unmerged(one, adapters) for param in one.adapter_params()]
        copies = self.stale(param for param in (*group.carried, *unmerged) if is_partitioned(param))
        merges = self.stale(one for one in group.adapted if self.is_merged(one, adapters))
        if not copies and not merges:
            return 0
        factors = [param for one in merges for param in one.adapter_params()]
        with ExitStack() as whole:
            with phase("gather"):
                fetch = Fetch({param: self._storage(param) for param in copies})
                staging = fetch.staging_nbytes
                beside = whole.enter_context(gathered(factors))
                fetch.wait()
                self.stamps.update((param, self.wanted(param)) for param in copies)
            if merges:
                with phase("merge"):
                    for one in merges:
                        self._merge(one)
        temporary = max((one.merge_temporary_bytes() for one in merges), default=0)
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + beside + max(staging, temporary))
        return beside + fetch.nbytes

    def _storage(self, param: nn.Parameter) -> torch.Tensor:
        """The memory [numel] for the copy of a partitioned parameter; allocated on first use."""
        if param not in self.storage:
            ref = self.place_of.get(param)
            self.storage[param] = storage_for(param) if ref is None else self._joined_part(ref, False).view(-1)
            self.layout += 1
            self.base[param] = nn.Parameter(whole_in(self.storage[param], param), requires_grad=False)
            # A forward may check whether it must gather a weight that it reads directly (TRL 1.16: a fused head).
            self.base[param].ds_status = ZeroParamStatus.AVAILABLE
        return self.storage[param]

    def _merge(self, one: Adapted) -> None:
        buffers = self.merged.setdefault(one, {})
        for name, shape in one.changed().items():
            ref = self.place_of.get(one.sources.get(name))
            if ref is not None:  # this part of the joined buffer now holds a merged weight, no fill
                self.fills.pop(ref, None)
                self.stamps.pop(ref, None)
            if name not in buffers:
                like = next(iter(one.sources.values()))
                data = like.new_empty(shape) if ref is None else self._joined_part(ref, True)
                buffers[name] = nn.Parameter(data, requires_grad=False)
                self.layout += 1
        one.merge({name: self.tensor(param) for name, param in one.sources.items()}, buffers)
        self.stamps[one] = self.wanted(one)

    def _joined_part(self, ref: ParamRef, merged: bool) -> torch.Tensor:
        """The part of the joined buffer that belongs to `ref`."""
        return self.joined.part(ref, merged, self._blank, torch.device(get_accelerator().current_device_name()))

    def _blank(self, ref: ParamRef) -> torch.Tensor:
        """A meta tensor with the shape and dtype of what is kept at `ref`."""
        _, param = self.owners[ref]
        return torch.empty(whole_shape(param), dtype=param.dtype, device="meta")

    def _is_merged_at(self, ref: ParamRef) -> bool:
        one, _ = self.owners[ref]
        return one is not None and self.is_merged(one, True) and ref.parameter in one.changed()

    def keeps_joined(self, ref: ParamRef) -> bool:
        """Whether, with adapters, the weight at `ref` lies in a joined buffer."""
        if ref not in self.joined.sets:
            return False
        refs = self.joined.sets[ref]
        return any(map(self._is_merged_at, refs)) or is_partitioned(self.owners[ref][1])

    def _joined_to_merged(self) -> list[ParamRef]:
        """The refs of weights that are not merged but joined with merged ones."""
        found = []
        for refs in set(self.joined.sets.values()):
            unmerged = [ref for ref in refs if not self._is_merged_at(ref)]
            found += unmerged if len(unmerged) < len(refs) else []
        return found

    @torch.no_grad()
    def _fill(self) -> None:
        """Copy weights that are not merged into the joined buffers of the merged ones they are read with."""
        needed = self._joined_to_merged()
        for ref in needed:
            one, param = self.owners[ref]
            if self.stamps.get(ref) != self.wanted(param):
                self.fills[ref] = self._joined_part(ref, True).copy_(self._unmerged_at(ref))
                self.stamps[ref] = self.wanted(param)
                self.stamps.pop(one, None)  # the merged weight that was here is overwritten
        for ref in self.fills.keys() - set(needed):
            del self.fills[ref], self.stamps[ref]
        self.peak_bytes = max(self.peak_bytes, self.nbytes())

    def _unmerged_at(self, ref: ParamRef) -> torch.Tensor:
        return self.tensor(self.owners[ref][1])

    def tensor(self, param: nn.Parameter) -> nn.Parameter:
        """The full tensor that inference uses for `param`: its copy, or `param` itself if it is not partitioned."""
        return self.base.get(param, param)

    def weights_of(self, one: Adapted, adapters: bool) -> dict[str, nn.Parameter]:
        """The tensors for `one.plain`, by parameter name; merged if `is_merged`."""
        base = {name: self.tensor(param) for name, param in one.sources.items()}
        return {**base, **self.merged[one]} if self.is_merged(one, adapters) else base

    def at(self, ref: ParamRef, one: Adapted | None, param: nn.Parameter | None, adapters: bool) -> torch.Tensor | None:
        """The tensor that a decoder reads at `ref`; None if there is no parameter.

        one: the adapted module there, if any.  param: else the model's own parameter.
        """
        if adapters and ref in self.fills:
            return self.fills[ref]
        if one is not None:
            return self.weights_of(one, adapters).get(ref.parameter)
        return None if param is None else self.tensor(param)

    def sides(self, ref: ParamRef, one: Adapted, adapters: bool) -> list[LowRank]:
        """The unmerged low-rank deltas to the weight at `ref` of `one`, with b's rows those of `ref`."""
        if not self.is_unmerged(one, adapters):
            return []
        return [low_rank._replace(b=selected(ref, one, low_rank.b)) for low_rank in one.low_rank(self.tensor)]

    def unmerged_factors(self, adapters: bool) -> list[torch.Tensor]:
        """The factors of all unmerged adapters."""
        beside = [one for one in self.adapted if self.is_unmerged(one, adapters)]
        return [self.tensor(param) for one in beside for param in one.adapter_params()]

    def words(self, module: nn.Module) -> str:
        """How many adapted modules inside `module` run unmerged and merged, for the log; "" if the snapshot merges all
        adapters or none is active."""
        within = set(module.modules())
        active = [one for one in self.adapted if one.state() and not within.isdisjoint((one.wrapper, one.plain))]
        beside = sum(self.is_unmerged(one, adapters=True) for one in active)
        if not self.unmerged or not active:
            return ""
        return f"adapters unmerged in {beside} of {len(active)} modules" + ", merged in the others" * (
            beside < len(active)
        )

    def nbytes(self) -> int:
        """Bytes that the copies hold."""
        merged = (buffer for buffers in self.merged.values() for buffer in buffers.values())
        return sum(buffer.nbytes for buffer in (*self.storage.values(), *merged, *self.fills.values()))

    def planned(self) -> tuple[int, int]:
        """Planned bytes: of the copies, and of the temporary memory needed while they are made."""
        carried = [param for group in self.groups for param in group.carried]
        beside = [param for one in self.adapted if self.is_unmerged(one, True) for param in one.adapter_params()]
        kept = sum(whole_bytes(param) for param in (*carried, *beside) if is_partitioned(param))
        merged = sum(merged_bytes(one) for one in self.adapted if self.is_merged(one, True))
        fills = sum(self._blank(ref).nbytes for ref in self._joined_to_merged())
        return kept + merged + fills, max(map(self._planned_unmerged, self.groups), default=0)

    def _planned_unmerged(self, group: Group) -> int:
        """Temporary bytes while a group is gathered and merged: factors, and the larger of staging and merging."""
        merged = [one for one in group.adapted if self.is_merged(one, True)]
        factors = sum(gathered_bytes(param) for one in merged for param in one.adapter_params())
        staged = sum(staging_bytes(param) for param in group.carried if is_partitioned(param))
        return factors + max(staged, *(one.merge_temporary_bytes() for one in merged), 0)

    def drop_merged(self) -> None:
        """Free the merged weights; the next refresh merges again."""
        for owner in (*self.merged, *self.fills):
            self.stamps.pop(owner, None)
        self.merged.clear()
        self.fills.clear()
        self.joined.release(merged=True)
        self._forget()

    def release(self) -> None:
        """Free all copies; the next refresh makes new ones."""
        self.base.clear()
        self.storage.clear()
        self.merged.clear()
        self.fills.clear()
        self.joined.release()
        self.stamps.clear()
        self._forget()

    def _forget(self) -> None:
        self.fresh.clear()
        self.lent.clear()
        self.layout += 1


def owners_of_joined(
    joined: Iterable[tuple[ParamRef, ...]], adapted: Iterable[Adapted]
) -> dict[ParamRef, tuple[Adapted | None, nn.Parameter]]:
    """The adapted module (or None) and the training parameter at each ParamRef of the sets that can be joined.

    A set can be joined if its parameters exist, are distinct, and agree in dtype and in all but the first dimension. A
    parameter that layers share belongs to the first layer's set.
    """
    wrapped = {one.wrapper: one for one in adapted}
    found: dict[ParamRef, tuple[Adapted | None, nn.Parameter]] = {}
    taken: set[nn.Parameter] = set()
    for refs in joined:
        ones = [wrapped.get(ref.module) for ref in refs]
        params = [
            (ref.module._parameters if one is None else one.sources).get(ref.parameter)
            for ref, one in zip(refs, ones, strict=True)
        ]
        if None in params or len({*params} - taken) < len(refs):
            continue
        if len({(param.dtype, whole_shape(param)[1:]) for param in params}) == 1:
            found |= zip(refs, zip(ones, params, strict=True), strict=True)
            taken.update(params)
    return found


def gathered_bytes(param: nn.Parameter) -> int:
    """Full bytes of a partitioned parameter; 0 for one that need not be gathered."""
    return whole_bytes(param) if is_partitioned(param) else 0


def merged_bytes(one: Adapted) -> int:
    """Bytes of an adapted module's merged weights. Biases are not counted: hardly any adapter changes one."""
    return sum(whole_bytes(param) for name, param in one.sources.items() if name != "bias")


def selected(ref: ParamRef, one: Adapted, b: torch.Tensor) -> torch.Tensor:
    """The rows of a factor b [out, r] that belong to `ref`."""
    stored = one.stored(b)
    return stored if ref.select is None else ref.select(stored)


def active_adapters(adapted: list[Adapted]) -> tuple:
    """The state of every adapted module, to be compared with an earlier one."""
    return tuple(one.state() for one in adapted)


def make_groups(
    model: nn.Module, structure: Structure, adapted: list[Adapted], layers_per_group: int
) -> tuple[Group, ...]:
    """The groups in which weights are gathered: parts outside the layers, then layers, `layers_per_group` at a time.

    A parameter that two parts share is in the first part's group. Adapter factors are in no group: they are gathered
    with the modules that they adapt.
    """
    carried_sources = {param for one in adapted for param in one.sources.values()}
    factors = {param for one in adapted for param in one.wrapper.parameters()} - carried_sources
    bundles = [
        modules[start : start + layers_per_group]
        for modules in ([part.module for part in structure.outer], [part.module for part in structure.layers])
        for start in range(0, len(modules), layers_per_group)
    ]
    taken, waiting, groups = set(factors), list(adapted), []
    for bundle in bundles:
        params = dict.fromkeys(param for module in bundle for param in module.parameters())
        modules = {module for root in bundle for module in root.modules()}
        here = [one for one in waiting if one.wrapper in modules or one.plain in modules]
        # A merge reads the base's copy, so the base must be in this group or an earlier one.
        params.update(dict.fromkeys(param for one in here for param in one.sources.values()))
        waiting = [one for one in waiting if one not in here]
        groups.append(Group(tuple(param for param in params if param not in taken), tuple(here)))
        taken.update(params)
    assert not waiting, f"{waiting[0].name} is in no part of the model"
    assert taken >= set(model.parameters()), "a parameter is in no part of the model"
    return tuple(group for group in groups if group.carried or group.adapted)
