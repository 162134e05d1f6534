"""A snapshot that keeps a rank's slices alone: weights are whole for a group at a time, while they are cut."""

import torch
from torch import nn

from hybrid.architectures.spec import Place, Reading
from hybrid.architectures.structure import Structure
from hybrid.profiling import Phase
from hybrid.weights.gather import gathered
from hybrid.weights.lora import Adapted, LowRank, merged_weight
from hybrid.weights.snapshot import Group, Snapshot, copied, selected
from hybrid.weights.tensor_parallel import Shard, Slice, slices_of

Owner = nn.Parameter | tuple[Adapted, str]  # whose slices: a parameter's, or those of what an adapted module merges


class SlicedSnapshot(Snapshot):
    """For inference tensor parallelism.  reading: what is cut.  shard: which part of it is this rank's.

    A parameter without a place is not kept: the model's own forward alone runs on it. There is nothing whole here, so
    `tensor` and `weights_of` have no meaning; `part` takes their place.

    Products of factors are merged into the kept parts of their base, of factors that are cut as it is, so that factors
    alone are gathered again. What needs more than a rank's part is merged whole and then cut, from a base that is
    gathered with it each time: DoRA's norms are of whole rows; experts' products are of several parameters; and a
    bias that an adapter brings may have a base of which this rank has nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        adapted: list[Adapted],
        layers_per_group: int,
        unmerged: bool,
        reading: Reading,
        shard: Shard,
    ):
        super().__init__(model, structure, adapted, layers_per_group, unmerged)
        self.reading = reading
        self.slices = slices_of(reading, shard)
        self.cuts = cuts_by_owner(self.slices, adapted)
        self.parts: dict[Owner, dict[tuple, torch.Tensor | None]] = {}  # by owner and slice key
        self.factors: dict[Adapted, dict[tuple, list[LowRank]]] = {}  # of what runs unmerged, by slice key

    def part(self, place: Place, owner: Owner) -> torch.Tensor | None:
        """This rank's part of what `owner` has at a place; None where another rank has it all."""
        return self.parts[owner][self.slices[place].key]

    def part_of(self, place: Place, one: Adapted, adapters: bool) -> torch.Tensor | None:
        """As `part`, of an adapted module; None where the module has no such parameter."""
        merged = (one, place.parameter)
        if self.is_merged(one, adapters) and merged in self.parts:
            return self.part(place, merged)
        param = one.sources.get(place.parameter)
        return None if param is None else self.part(place, param)

    def sides(self, place: Place, one: Adapted, adapters: bool) -> list[LowRank]:
        return self.factors[one][self.slices[place].key] if self.is_beside(one, adapters) else []

    def factors_beside(self, adapters: bool) -> list[torch.Tensor]:
        beside = [kept for one, kept in self.factors.items() if self.is_beside(one, adapters)]
        return [
            factor for kept in beside for factors in kept.values() for low_rank in factors for factor in low_rank[:2]
        ]

    @torch.no_grad()
    def _refresh_group(self, group: Group, phase: Phase, adapters: bool) -> int:
        copies = self.stale(param for param in group.carried if param in self.cuts)
        changed = self.stale(one for one in group.adapted if adapters and one.state())
        if not copies and not changed:
            return 0
        whole = dict.fromkeys(copies)
        for one in changed:
            whole.update(dict.fromkeys(one.adapter_params()))
            if not one.is_low_rank():
                whole.update(dict.fromkeys(one.sources.values()))
        with phase("gather"), gathered(whole) as moved:
            for param in copies:
                self._cut(param, param)
                self.stamps[param] = self.wanted(param)
            for one in changed:
                self._take(one)
                self.stamps[one] = self.wanted(one)
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + moved)
        return moved

    def _take(self, one: Adapted) -> None:
        """This rank's part of what the adapters in `one` are or make, of whole parameters."""
        if not one.is_low_rank():
            for name, tensor in one.merged(one.sources).items():
                self._cut((one, name), tensor.to(one.sources.get(name, tensor).dtype))
            return
        beside = self.is_beside(one, adapters=True)
        for part in self.cuts.get((one, "weight"), ()):
            factors = [
                part.of_factors(low_rank._replace(b=selected(part.place, one, low_rank.b)))
                for low_rank in one.low_rank(lambda param: param)
            ]
            self._keep_beside(one, part, factors) if beside else self._merge_part(one, part, factors)

    def _keep_beside(self, one: Adapted, part: Slice, factors: list[LowRank]) -> None:
        kept = self.factors.setdefault(one, {})
        kept[part.key] = [low_rank._replace(a=low_rank.a.clone(), b=low_rank.b.clone()) for low_rank in factors]

    def _merge_part(self, one: Adapted, part: Slice, factors: list[LowRank]) -> None:
        base = self.part(part.place, one.sources["weight"])
        merged = base
        for low_rank in factors:
            merged = merged_weight(merged, *low_rank)
        parts = self.parts.setdefault((one, "weight"), {})
        parts[part.key] = copied(merged.to(base.dtype), parts.get(part.key))

    def _cut(self, owner: Owner, whole: torch.Tensor) -> None:
        parts = self.parts.setdefault(owner, {})
        for one in self.cuts.get(owner, ()):
            part = one.of(whole)
            parts[one.key] = None if part is None else copied(part, parts.get(one.key))

    def nbytes(self) -> int:
        """Bytes that the slices hold."""
        parts = [part for parts in self.parts.values() for part in parts.values() if part is not None]
        return sum(tensor.nbytes for tensor in (*parts, *self.factors_beside(adapters=True)))

    def release(self) -> None:
        """Free the slices; the next refresh makes them anew."""
        self.parts.clear()
        self.factors.clear()
        super().release()


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
