"""Snapshots that keep only a rank's slices: one group of weights at a time is gathered in full, and sliced."""

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

Owner = nn.Parameter | tuple[Adapted, str]  # what is sliced: a parameter, or a merged tensor (module, name)


class SlicedSnapshot(Snapshot):
    """The snapshot of a tensor-parallel decoder: this rank's slices.

    kept, joined: the arguments of Snapshot.  slices: this rank's slice of each ParamRef.

    A parameter without a ParamRef is not kept: only the model's own forward reads it. No full tensor is kept, so use
    `part` in place of `tensor` and `weights_of`.

    Low-rank deltas are merged into the kept slices of their base, from factors that are sliced in the same way, so only
    the factors are gathered again. Other adapters need full tensors: their base is gathered each time, merged, and then
    sliced. These are DoRA (norms of full rows), experts (products over several parameters), and an adapter's bias (its
    base may be on another rank).
    """

    def __init__(self, *kept: Any, slices: dict[ParamRef, Slice], joined: Iterable[tuple[ParamRef, ...]] = ()):
        super().__init__(*kept, joined=joined)
        self.slices = slices
        self.cuts = cuts_by_owner(self.slices, self.adapted)
        self.parts: dict[Owner, dict[tuple, torch.Tensor | None]] = {}  # by owner and slice key
        self.factors: dict[Adapted, dict[tuple, list[LowRank]]] = {}  # sliced unmerged factors, by slice key

    def part(self, ref: ParamRef, owner: Owner) -> torch.Tensor | None:
        """This rank's slice of `owner` at `ref`; None if another rank has all of it."""
        return self.parts[owner][self.slices[ref].key]

    def part_of(self, ref: ParamRef, one: Adapted, adapters: bool) -> torch.Tensor | None:
        """This rank's slice at `ref` of the adapted module `one`, merged if `adapters`. None if another rank has all of
        it, or the module has no such parameter."""
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
        """Whether the active adapters of `one` can be sliced like their base: merged into its slices or kept
        unmerged."""
        return one.is_low_rank()

    def _take(self, one: Adapted) -> None:
        """Keep this rank's slices of the adapters in `one`, merged or unmerged. Expects its parameters gathered."""
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
        """The buffer of a slice of `owner`; allocated on first use with the shape and dtype of `like`."""
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
        """Planned bytes: of the slices, and of the temporary memory to make them (the largest group, gathered in full,
        and the merge)."""
        owners = {
            owner: owner if isinstance(owner, nn.Parameter) else owner[0].sources.get(owner[1])
            for owner in self.cuts
            if isinstance(owner, nn.Parameter) or (self.is_merged(owner[0], True) and owner[1] != "bias")
        }
        kept = sum(
            self._planned_part(param, one) for owner, param in owners.items() for one in unique(self.cuts[owner])
        )
        # An upper bound: a rank keeps one of the two factors in full, and a slice of the other.
        beside = [param for one in self.adapted if self.is_unmerged(one, True) for param in one.adapter_params()]
        groups = [[*group.carried, *self._read(group.adapted)] for group in self.groups]
        fills = sum(self._blank(ref).nbytes for ref in self._joined_to_merged())
        gathered = max(sum(map(gathered_bytes, group)) for group in groups)
        merging = max((one.merge_temporary_bytes() for one in self.adapted if self.is_merged(one, True)), default=0)
        return kept + fills + sum(map(whole_bytes, beside)), gathered + merging

    def _read(self, adapted: Iterable[Adapted]) -> list[nn.Parameter]:
        """The parameters to gather for the active adapters: their own, and their bases if these are merged in full."""
        active = [one for one in adapted if one.state()]
        bases = [param for one in active if not self.merges_parts(one) for param in one.sources.values()]
        return list(dict.fromkeys([*(param for one in active for param in one.adapter_params()), *bases]))

    def _planned_part(self, param: nn.Parameter, one: Slice) -> int:
        part = one.of(torch.empty(whole_shape(param), dtype=param.dtype, device="meta"))
        return 0 if part is None else part.nbytes

    def nbytes(self) -> int:
        """Bytes that the slices and unmerged factors hold."""
        parts = [part for parts in self.parts.values() for part in parts.values() if part is not None]
        return sum(tensor.nbytes for tensor in (*parts, *self.fills.values(), *self.unmerged_factors(adapters=True)))

    def drop_merged(self) -> None:
        for owner in [owner for owner in self.parts if isinstance(owner, tuple)]:
            del self.parts[owner]
            self.stamps.pop(owner[0], None)
        super().drop_merged()

    def release(self) -> None:
        """Free the slices; the next refresh makes new ones."""
        self.parts.clear()
        self.factors.clear()
        super().release()


class LentSlices(SlicedSnapshot):
    """The snapshot for tensor parallelism over the model's own modules.

    A partitioned parameter without a slice is kept in full, any other is the model's own. Adapters are always merged,
    before the weights are sliced.
    """

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
        """False: a plan may leave some of a module's weights unsliced, and slices then differ in kind."""
        return False

    def tensor(self, param: nn.Parameter) -> torch.Tensor | None:
        """The tensor that this rank lends in place of `param`; None if another rank has all of it."""
        parts = self.parts.get(param)
        return param if parts is None else next(iter(parts.values()))

    def weights_of(self, one: Adapted, adapters: bool) -> dict[str, torch.Tensor | None]:
        """The tensors that this rank lends to `one.plain`, by parameter name; None as in `tensor`."""
        base = {name: self.tensor(param) for name, param in one.sources.items()}
        if not (adapters and one.state()):
            return base
        merged = {name: self.parts[one, name] for name in (*one.sources, "bias") if (one, name) in self.parts}
        return {**base, **{name: next(iter(parts.values())) for name, parts in merged.items()}}


def unique(slices: list[Slice]) -> list[Slice]:
    """The slices without duplicates: tied embeddings have equal keys."""
    return list({one.key: one for one in slices}.values())


def cuts_by_owner(slices: dict[ParamRef, Slice], adapted: list[Adapted]) -> dict[Owner, list[Slice]]:
    """The slices of each owner. An adapted module owns its base parameter and its merged tensor, which have the same
    slices."""
    wrapped = {one.wrapper: one for one in adapted}
    found: dict[Owner, list[Slice]] = {}
    for ref, part in slices.items():
        module, name = ref.module, ref.parameter
        owners: list[Owner | None]
        if module in wrapped:
            owners = [(wrapped[module], name), wrapped[module].sources.get(name)]
        elif name in module._parameters:
            owners = [module._parameters[name]]
        else:  # PEFT's modules_to_save: the original module, and a copy for each adapter
            owners = [child._parameters[name] for child in module.modules() if name in child._parameters]
        for owner in owners:
            if owner is not None:
                found.setdefault(owner, []).append(part)
    return found
