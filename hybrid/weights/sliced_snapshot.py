"""Snapshots that keep a rank's slices alone: weights are whole for a group at a time, while they are cut."""

from contextlib import ExitStack

import torch
from torch import nn

from hybrid.architectures.spec import Place, Reading
from hybrid.architectures.structure import Structure
from hybrid.profiling import Phase
from hybrid.weights.gather import Fetch, gathered, is_partitioned, storage_for, whole_bytes, whole_in, whole_shape
from hybrid.weights.lora import Adapted
from hybrid.weights.snapshot import Group, Snapshot, WeightVersion, copied, factors_of
from hybrid.weights.tensor_parallel import Slice

Owner = nn.Parameter | tuple[Adapted, str]  # whose slices: a parameter's, or those of what an adapted module merges


class SlicedSnapshot(Snapshot):
    """For a decoder that ranks share.  slices: what is this rank's.  reading: the decoder that they are of.

    A parameter without a place is not kept: the model's own forward alone runs on it. There is nothing whole here, so
    `tensor` and `weights_of` have no meaning; `part` takes their place.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        adapted: list[Adapted],
        layers_per_group: int,
        version: WeightVersion | None,
        slices: dict[Place, Slice],
        reading: Reading | None = None,
    ):
        super().__init__(model, structure, adapted, layers_per_group, version)
        self.reading = reading
        self.slices = slices
        self.cuts = cuts_by_owner(self.slices, adapted)
        self.parts: dict[Owner, dict[tuple, torch.Tensor | None]] = {}  # by owner and slice key

    def part(self, place: Place, owner: Owner) -> torch.Tensor | None:
        """This rank's part of what `owner` has at a place; None where another rank has it all."""
        return self.parts[owner][self.slices[place].key]

    def part_of(self, place: Place, one: Adapted, adapters: bool) -> torch.Tensor | None:
        """As `part`, of an adapted module; None where the module has no such parameter."""
        merged = (one, place.parameter)
        if adapters and one.state() and merged in self.parts:
            return self.part(place, merged)
        param = one.sources.get(place.parameter)
        return None if param is None else self.part(place, param)

    @torch.no_grad()
    def _refresh_group(self, group: Group, phase: Phase, adapters: bool) -> int:
        copies = self.stale(param for param in group.carried if param in self.cuts)
        merges = self.stale(one for one in group.adapted if adapters and one.state())
        if not copies and not merges:
            return 0
        read = {}  # where the model has it: merging is of whole weights, and may look at whole rows (DoRA)
        for one in merges:
            read.update(dict.fromkeys([*one.sources.values(), *one.adapter_params()]))
        with ExitStack() as whole, phase("gather"):
            fetch = Fetch({param: storage_for(param) for param in copies if is_partitioned(param)})
            moved = whole.enter_context(gathered(read)) + fetch.nbytes
            fetch.wait()
            for param in copies:
                storage = fetch.storage.get(param)
                self._cut(param, param if storage is None else whole_in(storage, param))
                self.stamps[param] = self.wanted(param)
            for one in merges:
                for name, tensor in one.merged(one.sources).items():
                    self._cut((one, name), tensor.to(one.sources.get(name, tensor).dtype))
                self.stamps[one] = self.wanted(one)
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + moved)
        return moved

    def _cut(self, owner: Owner, whole: torch.Tensor) -> None:
        parts = self.parts.setdefault(owner, {})
        for one in self.cuts.get(owner, ()):
            part = one.of(whole)
            parts[one.key] = None if part is None else copied(part, parts.get(one.key))

    def planned(self) -> tuple[int, int]:
        """Bytes that the slices will take; and the largest group, which is whole while it is cut."""
        owners = {
            owner: owner if isinstance(owner, nn.Parameter) else owner[0].sources.get(owner[1])
            for owner in self.cuts
            if isinstance(owner, nn.Parameter) or (owner[0].state() and owner[1] != "bias")
        }
        kept = sum(
            self._planned_part(param, one) for owner, param in owners.items() for one in unique(self.cuts[owner])
        )
        groups = ([*group.carried, *factors_of(group)] for group in self.groups)
        return kept, max((sum(whole_bytes(p) for p in group if is_partitioned(p)) for group in groups), default=0)

    def _planned_part(self, param: nn.Parameter, one: Slice) -> int:
        part = one.of(torch.empty(whole_shape(param), dtype=param.dtype, device="meta"))
        return 0 if part is None else part.nbytes

    def nbytes(self) -> int:
        """Bytes that the slices hold."""
        return sum(part.nbytes for parts in self.parts.values() for part in parts.values() if part is not None)

    def release(self) -> None:
        """Free the slices; the next refresh makes them anew."""
        self.parts.clear()
        super().release()


class LentSlices(SlicedSnapshot):
    """For a model whose own modules ranks share: what has no slice is kept whole, or is the model's own where that is
    whole all along."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        adapted: list[Adapted],
        layers_per_group: int,
        version: WeightVersion | None,
        slices: dict[Place, Slice],
    ):
        super().__init__(model, structure, adapted, layers_per_group, version, slices)
        whole = Slice(Place(model, ""), ("whole",), None)
        for param in filter(is_partitioned, model.parameters()):
            self.cuts.setdefault(param, [whole])
        for one in adapted:
            for name in (*one.sources, "bias"):
                self.cuts.setdefault((one, name), [whole])

    def tensor(self, param: nn.Parameter) -> torch.Tensor | None:
        """What this rank lends in the parameter's place; None where another rank has it all."""
        parts = self.parts.get(param)
        return param if parts is None else next(iter(parts.values()))

    def weights_of(self, one: Adapted, adapters: bool) -> dict[str, torch.Tensor | None]:
        """What this rank lends to `one.plain`, by parameter name."""
        base = {name: self.tensor(param) for name, param in one.sources.items()}
        if not (adapters and one.state()):
            return base
        merged = {name: self.parts[one, name] for name in (*one.sources, "bias") if (one, name) in self.parts}
        return {**base, **{name: next(iter(parts.values())) for name, parts in merged.items()}}


def unique(slices: list[Slice]) -> list[Slice]:
    """Of slices that are the same, as of tied embeddings, one."""
    return list({one.key: one for one in slices}.values())


def cuts_by_owner(slices: dict[Place, Slice], adapted: list[Adapted]) -> dict[Owner, list[Slice]]:
    """The slices that are cut from each owner."""
    wrapped = {one.wrapper: one for one in adapted}
    found: dict[Owner, list[Slice]] = {}
    for place, part in slices.items():
        module, name = place.module, place.parameter
        owners: list[Owner | None]
        if module in wrapped:
            owners = [(wrapped[module], name), wrapped[module].sources.get(name)]
        elif name in module._parameters:
            owners = [module._parameters[name]]
        else:  # PEFT's modules_to_save: the original, and a copy for each adapter
            owners = [child._parameters[name] for child in module.modules() if name in child._parameters]
        for owner in owners:
            if owner is not None:
                found.setdefault(owner, []).append(part)
    return found
