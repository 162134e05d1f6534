"""Snapshots that keep a rank's slices alone: weights are whole for a group at a time, while they are cut."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hybrid.models.spec import ParamRef
from hybrid.profiling import Phase
from hybrid.weights.gather import Fetch, gathered, is_partitioned, storage_for, whole_bytes, whole_in, whole_shape
from hybrid.weights.lora import Adapted, LowRank, merge_low_rank
from hybrid.weights.slices import Slice
from hybrid.weights.snapshot import Group, Snapshot, gathered_bytes, selected

Owner = nn.Parameter | tuple[Adapted, str]  # whose slices: a parameter's, or those of what an adapted module merges


class SlicedSnapshot(Snapshot):
    """For a decoder that ranks share.

    kept, joined: what Snapshot is made of.  slices: what is this rank's.

    A parameter without a place is not kept: the model's own forward alone runs on it. There is nothing whole here, so
    `tensor` and `weights_of` have no meaning; `part` takes their place.

    Products of factors are merged into the kept parts of their base, of factors that are cut as it is, so that factors
    alone are gathered again. What needs more than a rank's part is merged whole and then cut, from a base that is
    gathered with it each time: DoRA's norms are of whole rows; experts' products are of several parameters; and a
    bias that an adapter brings may have a base of which this rank has nothing.
    """

    def __init__(self, *kept: Any, slices: dict[ParamRef, Slice], joined: Iterable[tuple[ParamRef, ...]] = ()):
        super().__init__(*kept, joined=joined)
        self.slices = slices
        self.cuts = cuts_by_owner(self.slices, self.adapted)
        self.parts: dict[Owner, dict[tuple, torch.Tensor | None]] = {}  # by owner and slice key
        self.factors: dict[Adapted, dict[tuple, list[LowRank]]] = {}  # of what runs unmerged, by slice key

    def part(self, ref: ParamRef, owner: Owner) -> torch.Tensor | None:
        """This rank's part of what `owner` has at a place; None where another rank has it all."""
        return self.parts[owner][self.slices[ref].key]

    def part_of(self, ref: ParamRef, one: Adapted, adapters: bool) -> torch.Tensor | None:
        """As `part`, of an adapted module; None where the module has no such parameter."""
        merged = (one, ref.parameter)
        if self.is_merged(one, adapters) and merged in self.parts:
            return self.part(ref, merged)
        param = one.sources.get(ref.parameter)
        return None if param is None else self.part(ref, param)

    def sides(self, ref: ParamRef, one: Adapted, adapters: bool) -> list[LowRank]:
        return self.factors[one][self.slices[ref].key] if self.is_unmerged(one, adapters) else []

    def unmerged_factors(self, adapters: bool) -> list[torch.Tensor]:
        beside = [kept for one, kept in self.factors.items() if self.is_unmerged(one, adapters)]
        return [
            factor for kept in beside for factors in kept.values() for low_rank in factors for factor in low_rank[:2]
        ]

    def _is_stale(self, group: Group, adapters: bool) -> bool:
        changed = [one for one in group.adapted if adapters and one.state()]
        return bool(self.stale([*(param for param in group.carried if param in self.cuts), *changed]))

    @torch.no_grad()
    def _refresh_group(self, group: Group, phase: Phase, adapters: bool) -> int:
        copies = self.stale(param for param in group.carried if param in self.cuts)
        changed = self.stale(one for one in group.adapted if adapters and one.state())
        if not copies and not changed:
            return 0
        read = self._read(changed)
        with ExitStack() as whole, phase("gather"):
            fetch = Fetch({param: storage_for(param) for param in copies if is_partitioned(param)})
            temporary = fetch.staging_nbytes
            moved = whole.enter_context(gathered(read)) + fetch.nbytes
            fetch.wait()
            for param in copies:
                storage = fetch.storage.get(param)
                self._cut(param, param if storage is None else whole_in(storage, param))
                self.stamps[param] = self.wanted(param)
            for one in changed:
                self._take(one)
                self.stamps[one] = self.wanted(one)
        temporary = max((temporary, *(one.merge_temporary_bytes() for one in changed)))
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + moved + temporary)
        return moved

    def merges_parts(self, one: Adapted) -> bool:
        """Whether what is active in `one` is merged into, or kept beside, the parts of its base."""
        return one.is_low_rank()

    def _take(self, one: Adapted) -> None:
        """This rank's part of what the adapters in `one` are or make, of whole parameters."""
        if not self.merges_parts(one):
            for name, tensor in one.merged(one.sources).items():
                self._cut((one, name), tensor)
            return
        beside = self.is_unmerged(one, adapters=True)
        for part in self.cuts.get((one, "weight"), ()):
            factors = [
                part.of_factors(low_rank._replace(b=selected(part.ref, one, low_rank.b)))
                for low_rank in one.low_rank(lambda param: param)
            ]
            self._keep_unmerged(one, part, factors) if beside else self._merge_part(one, part, factors)

    def _keep_unmerged(self, one: Adapted, part: Slice, factors: list[LowRank]) -> None:
        kept = self.factors.setdefault(one, {})
        kept[part.key] = [low_rank._replace(a=low_rank.a.clone(), b=low_rank.b.clone()) for low_rank in factors]

    def _merge_part(self, one: Adapted, part: Slice, factors: list[LowRank]) -> None:
        base = self.part(part.ref, one.sources["weight"])
        merge_low_rank(base, factors, self._buffer((one, "weight"), part, base))

    def _cut(self, owner: Owner, whole: torch.Tensor) -> None:
        parts = self.parts.setdefault(owner, {})
        for one in self.cuts.get(owner, ()):
            part = one.of(whole)
            if part is None:
                self.layout += one.key not in parts
                parts[one.key] = None
            else:
                self._buffer(owner, one, part).copy_(part)

    def _buffer(self, owner: Owner, one: Slice, like: torch.Tensor) -> torch.Tensor:
        """Where a part of an owner's is kept, from now on if it was not; `like` it in shape and dtype."""
        parts, merged = self.parts.setdefault(owner, {}), isinstance(owner, tuple)
        if merged and one.ref in self.joined.sets:
            self.fills.pop(one.ref, None)
            self.stamps.pop(one.ref, None)
        if one.key not in parts:
            if one.ref in self.joined.sets:
                data = self._joined_part(one.ref, merged)
            else:
                data = torch.empty_like(like, memory_format=torch.contiguous_format)
            parts[one.key] = nn.Parameter(data, requires_grad=False)
            self.layout += 1
        return parts[one.key].data

    def _blank(self, ref: ParamRef) -> torch.Tensor:
        return self.slices[ref].of(super()._blank(ref))

    def _unmerged_at(self, ref: ParamRef) -> torch.Tensor:
        return self.part(ref, self.owners[ref][1])

    def keeps_joined(self, ref: ParamRef) -> bool:
        return ref in self.joined.sets

    def at(self, ref: ParamRef, one: Adapted | None, param: nn.Parameter | None, adapters: bool) -> torch.Tensor | None:
        if adapters and ref in self.fills:
            return self.fills[ref]
        if one is not None:
            return self.part_of(ref, one, adapters)
        return None if param is None else self.part(ref, param)

    def planned(self) -> tuple[int, int]:
        """Bytes that the slices will take; and the largest group, which is whole while it is cut."""
        owners = {
            owner: owner if isinstance(owner, nn.Parameter) else owner[0].sources.get(owner[1])
            for owner in self.cuts
            if isinstance(owner, nn.Parameter) or (self.is_merged(owner[0], True) and owner[1] != "bias")
        }
        kept = sum(
            self._planned_part(param, one) for owner, param in owners.items() for one in unique(self.cuts[owner])
        )
        # An upper bound: a rank keeps one of two factors whole, and its part of the other.
        beside = [param for one in self.adapted if self.is_unmerged(one, True) for param in one.adapter_params()]
        groups = [[*group.carried, *self._read(group.adapted)] for group in self.groups]
        fills = sum(self._blank(ref).nbytes for ref in self._joined_to_merged())
        gathered = max(sum(map(gathered_bytes, group)) for group in groups)
        merging = max((one.merge_temporary_bytes() for one in self.adapted if self.is_merged(one, True)), default=0)
        return kept + fills + sum(map(whole_bytes, beside)), gathered + merging

    def _read(self, adapted: Iterable[Adapted]) -> list[nn.Parameter]:
        """What is read of active adapters, and of what they adapt where that is merged whole."""
        active = [one for one in adapted if one.state()]
        bases = [param for one in active if not self.merges_parts(one) for param in one.sources.values()]
        return list(dict.fromkeys([*(param for one in active for param in one.adapter_params()), *bases]))

    def _planned_part(self, param: nn.Parameter, one: Slice) -> int:
        part = one.of(torch.empty(whole_shape(param), dtype=param.dtype, device="meta"))
        return 0 if part is None else part.nbytes

    def nbytes(self) -> int:
        """Bytes that the slices hold."""
        parts = [part for parts in self.parts.values() for part in parts.values() if part is not None]
        return sum(tensor.nbytes for tensor in (*parts, *self.fills.values(), *self.unmerged_factors(adapters=True)))

    def drop_merged(self) -> None:
        for owner in [owner for owner in self.parts if isinstance(owner, tuple)]:
            del self.parts[owner]
            self.stamps.pop(owner[0], None)
        super().drop_merged()

    def release(self) -> None:
        """Free the slices; the next refresh makes them anew."""
        self.parts.clear()
        self.factors.clear()
        super().release()


class LentSlices(SlicedSnapshot):
    """For a model whose own modules ranks share: what has no slice is kept whole, or is the model's own where that is
    whole all along. Adapters are merged, always, before their modules' weights are cut."""

    def __init__(self, *kept: Any, slices: dict[ParamRef, Slice]):
        super().__init__(*kept, slices=slices)
        self.unmerged = False
        whole = Slice(ParamRef(self.model, ""), ("whole",), None)
        for param in filter(is_partitioned, self.model.parameters()):
            self.cuts.setdefault(param, [whole])
        for one in self.adapted:
            for name in (*one.sources, "bias"):
                self.cuts.setdefault((one, name), [whole])

    def merges_parts(self, one: Adapted) -> bool:
        """Not here: a plan may leave a module's weights whole, and parts are then not of one kind."""
        return False

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


def cuts_by_owner(slices: dict[ParamRef, Slice], adapted: list[Adapted]) -> dict[Owner, list[Slice]]:
    """The slices that are cut from each owner."""
    wrapped = {one.wrapper: one for one in adapted}
    found: dict[Owner, list[Slice]] = {}
    for ref, part in slices.items():
        module, name = ref.module, ref.parameter
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
