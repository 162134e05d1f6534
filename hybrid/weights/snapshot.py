"""The snapshot: inference's copy of the weights, each with the version of the weights that it was made from.

What is kept of a weight is a slice: a rank's part of it, or the whole. A weight that is kept whole, is not partitioned
and needs no merge is not copied: the model's own is used. Partitioned weights (ZeRO-3) are gathered in groups, straight
into their copies if they are kept whole. Adapters are merged out of the training weights' place, or their factors are
kept unmerged. Weights that a decoder reads as one matrix lie in one buffer: q, k and v; gate and up. Buffers keep their
addresses until they are freed.

A weight with merged adapters has one copy, which holds either the base or the merged weight (`merged_over`): a merge
overwrites the copy of its base, and what reads the base gathers it again. With `keeps_base` each has a copy.

Of weights to be sliced a rank receives its slices only (`SliceExchange`). On the CPUs of one host ranks read them from
whole weights in shared memory; weights that an exchange does not support are gathered whole on every rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from hybrid.kernels.host_memory import HostMemory
from hybrid.models.modules import whole_shape
from hybrid.models.quantized import dequantized, is_quantized, read_dtype
from hybrid.models.spec import ParamRef
from hybrid.runtime.huge_pages import request_huge_pages
from hybrid.runtime.profiling import Phase
from hybrid.weights.gather import (
    AsyncAllGather,
    copy_dtype,
    gathered,
    has_plain_shard,
    is_partitioned,
    memory_of_hosts,
    missing,
    staging_bytes,
    storage_for,
    whole_bytes,
    whole_in,
)
from hybrid.weights.joined import JoinedBuffers
from hybrid.weights.lora import AdaptedModule, LowRank, merge_low_rank
from hybrid.weights.model_weights import Group, ModelWeights, State
from hybrid.weights.named_adapters import Adapters
from hybrid.weights.slice_exchange import Layout, SliceExchange, exchange_bytes, exchanges_of, layout_of
from hybrid.weights.slices import WHOLE_KEY, Slice
from hybrid.weights.watch import WeightWatch

Owner = (
    nn.Parameter | tuple[AdaptedModule, str]
)  # what slices are kept of: a parameter, or a merged tensor (module, name)


@dataclass
class GroupRefresh:
    """The refresh of a group's stale copies, whose transfers have begun.

    params, adapted: what is copied, merged or sliced.  exchanged: parameters that ranks exchange slices of.
    temporary_nbytes: of the transfers' buffers.  gathered_bytes: of what merges read.
    """

    params: list[nn.Parameter]
    adapted: list[AdaptedModule]
    exchanges: list[SliceExchange]
    exchanged: set[nn.Parameter]
    fetch: AsyncAllGather
    temporary_nbytes: int = field(init=False)
    gathered_bytes: int = 0

    def __post_init__(self) -> None:
        self.temporary_nbytes = self.fetch.staging_nbytes + sum(exchange.nbytes for exchange in self.exchanges)


class Snapshot:
    """The weights that inference runs on.

    slices: this rank's slice of each ParamRef; {}: weights are kept whole.
    decoder_only: only a decoder reads the snapshot, by `slices`; a weight without a ParamRef is not kept. Else the
        model's modules read it too: a partitioned weight without a slice is kept whole.
    joined: sets of ParamRefs (matrices, or biases) that a decoder reads as one; their copies lie in one buffer.
    keeps_base: keep the base and the merged copy of each weight with adapters: calls with and without adapters may then
        alternate at one version without a gather.
    Its many fields: a table for each kind of copy (parts, factors, fills, spare memory), their sources and versions.

    Adapters of sliced weights: for a decoder, low-rank deltas are merged into the slices of their base, from factors
    that are sliced in the same way, so only the factors are gathered again. All others are merged into the whole base,
    which is gathered each time, and then sliced: DoRA (norms of full rows), experts (products over several parameters),
    an adapter's bias (its base may be on another rank), and adapters of modules that run on slices (a plan may leave
    some of a module's weights unsliced); these are never unmerged.
    """

    def __init__(
        self,
        weights: ModelWeights,
        slices: dict[ParamRef, Slice] | None = None,
        decoder_only: bool = False,
        joined: Sequence[tuple[ParamRef, ...]] = (),
        keeps_base: bool = True,
    ):
        if slices and not decoder_only:
            weights = replace(weights, unmerged=False)
        self.weights, self.adapted = weights, weights.adapted
        self.slices, self.decoder_only = slices or {}, decoder_only
        self.device = torch.device(get_accelerator().current_device_name())
        self.sources = joined_sources(joined, self.adapted)
        self.kept = self._kept_slices()
        self.joined = JoinedBuffers(
            refs for refs in joined if self.sources.keys() >= set(refs) and self._are_copied_alike(refs)
        )
        self.merged_over = {} if keeps_base else self._copies_to_merge_over()
        self.parts: dict[Owner, dict[tuple, nn.Parameter | None]] = {}  # the kept slices, by `Slice.key`
        self.factors: dict[AdaptedModule, dict[tuple, list[LowRank]]] = {}  # sliced unmerged factors, by `Slice.key`
        self.fills: dict[ParamRef, torch.Tensor] = {}  # copies of unadapted weights in joined buffers of merged ones
        self.spare: dict[tuple, list[torch.Tensor]] = {}  # memory of dropped parameters, by `memory_kind`
        self.stamps: dict[nn.Parameter | AdaptedModule | ParamRef, State] = {}  # what each copy was made from
        self.fresh: dict[bool, State] = {}  # by use of adapters: what all copies were made from
        self.overwrites = 0  # grows whenever a copy in `merged_over` is written
        # The weights' version, and how many refreshes have gathered bases of merged weights at it.
        self.base_gathers: tuple[tuple, int] = (), 0
        self.moves = 0  # grows whenever memory of a copy is allocated, replaced or freed
        self.swapped: dict[
            Adapters, tuple[tuple, list]
        ] = {}  # InferenceWindow's cache, by its adapters: its key, and dictionaries
        self.watches: dict[
            Adapters, tuple[tuple, WeightWatch]
        ] = {}  # InferenceWindow's, of swapped-in copies, in the same way
        self.peak_bytes = 0  # most bytes held at once by the copies and the group being gathered
        self.slice_layouts: dict[tuple, Layout | None] = {}  # `layout_of` its arguments
        self.staging: torch.Tensor | None = None  # memory of a host's ranks for weights to be sliced, in a refresh

    def _kept_slices(self) -> dict[Owner, list[Slice]]:
        """Return the slices to keep of each owner, each once: tied embeddings have equal keys."""
        kept = slices_by_owner(self.slices, self.adapted)
        if not self.decoder_only:
            refs = {param: ref for ref, (_, param) in self.sources.items()}
            anywhere = ParamRef(self.weights.info.model, "")
            for param in filter(must_copy, self.weights.info.model.parameters()):
                kept.setdefault(param, [Slice(refs.get(param, anywhere), WHOLE_KEY, None)])
            for adapted in self.adapted:
                for name in (*adapted.sources, "bias"):
                    ref = refs.get(adapted.sources.get(name), anywhere)
                    kept.setdefault((adapted, name), [Slice(ref, WHOLE_KEY, None)])
        return kept

    def _copies_to_merge_over(self) -> dict[nn.Parameter, AdaptedModule]:
        """Return the base parameters whose copies hold the merged weights too, by turns, with their adapted modules.

        Tied weights are left out: with adapters the model reads both, the base in the other place. Of a joined set all
        adapted weights are included, or none.
        """
        counts = Counter(param for module in self.weights.info.model.modules() for param in module._parameters.values())
        over: dict[nn.Parameter, AdaptedModule] = {}
        for group in self.weights.groups:
            copied = {param for param in group.params if counts[param] == 1 and self._is_copied(param)}
            over |= {param: layer for layer in group.adapted for param in layer.sources.values() if param in copied}
        for refs in set(self.joined.sets.values()):
            adapted = {param for layer, param in map(self.sources.__getitem__, refs) if layer is not None}
            if not over.keys() >= adapted:
                over = {param: layer for param, layer in over.items() if param not in adapted}
        return over

    # ------------------------------------------------------------- refresh

    def stale(self, weights: Iterable[nn.Parameter | AdaptedModule]) -> list[nn.Parameter | AdaptedModule]:
        """Return the weights whose copy is out of date or does not exist."""
        return [weight for weight in weights if self.stamps.get(weight) != self.weights.stamp(weight)]

    def is_fresh(self, adapters: bool) -> bool:
        """Whether no copy that a window opened with `adapters` uses is stale."""
        return self.fresh.get(adapters) == self.weights.state(adapters)

    def must_gather(self, adapters: bool) -> bool:
        """Whether `refresh` has copies to update. With partitioned parameters it is then a collective."""
        groups = () if self.is_fresh(adapters) else self.weights.groups
        return any(self._stale_in(group, adapters) for group in groups)

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Update every stale copy, group by group; with `adapters` False, merged weights are not updated.

        Gives the bytes gathered. A collective unless nothing is stale.
        """
        if self.is_fresh(adapters):
            return 0
        state, nbytes, gathers_base = self.weights.state(adapters), 0, False
        groups = (group for group in self.weights.groups)
        current = following = None
        try:
            current = self._start_next(groups, phase, adapters)
            while current is not None:
                gathers_base = gathers_base or not self.merged_over.keys().isdisjoint(current.params)
                with ExitStack() as whole:
                    nbytes += self._receive(current, whole, phase)
                    if not self.slices:  # else the next group's transfers need this one's memory
                        following = self._start_next(groups, phase, adapters)
                    self._keep(current, phase, 0 if following is None else following.temporary_nbytes)
                current, following = following, None  # frees the memory of what was sliced
                current = current or self._start_next(groups, phase, adapters)
        finally:
            for refresh in filter(None, (current, following)):  # after an error, no transfer writes to freed memory
                refresh.fetch.finish_transfers()
            self.staging = None
        if adapters:
            self._fill()
        self.fresh[adapters] = state
        if gathers_base:
            version, count = self.base_gathers
            self.base_gathers = state[:2], 1 + count * (version == state[:2])
        return nbytes

    def _overwritten(self, adapted: AdaptedModule, adapters: bool) -> list[nn.Parameter]:
        """Return the base parameters of a module whose copies hold merged weights in a window with `adapters`."""
        if not self.merged_over or not self.weights.is_merged(adapted, adapters):
            return []
        return [param for name in adapted.changed() if (param := adapted.sources.get(name)) in self.merged_over]

    def _stale_in(self, group: Group, adapters: bool) -> list[nn.Parameter | AdaptedModule]:
        """Return the weights of a group that a refresh updates: stale ones, and the bases that stale merges read."""
        overwritten = {layer: self._overwritten(layer, adapters) for layer in group.adapted}
        merged = {param for params in overwritten.values() for param in params}
        stale = self.stale(weight for weight in self._copied(group, adapters) if weight not in merged)
        merges = [layer for layer in split_by_kind(stale)[1] if not self._merges_into_gathered(layer)]
        return [*self.stale(param for layer in merges for param in overwritten[layer]), *stale]

    def _will_overwrite(self, params: Iterable[nn.Parameter]) -> None:
        """Note, before it happens, that the copies of those of `params` that are in `merged_over` are written: until
        that has ended they hold neither the base nor the merged weight."""
        for param in params:
            if param in self.merged_over:
                self.stamps.pop(param, None)
                self.stamps.pop(self.merged_over[param], None)
                self.fresh.clear()
                self.overwrites += 1

    def _copied(self, group: Group, adapters: bool) -> list[nn.Parameter | AdaptedModule]:
        """Return the copied weights of a group: parameters, and modules whose adapters are merged or sliced."""
        unmerged = [layer for layer in group.adapted if self.weights.is_unmerged(layer, adapters)]
        merged = [layer for layer in group.adapted if self.weights.is_merged(layer, adapters)]
        factors = () if self.decoder_only else (param for layer in unmerged for param in layer.adapter_params())
        params = [param for param in (*group.params, *factors) if self._is_copied(param)]
        return [*params, *(unmerged if self.decoder_only else ()), *merged]

    def _start_next(self, groups: Iterator[Group], phase: Phase, adapters: bool) -> "GroupRefresh | None":
        """Start the transfers of the next group that has a stale copy; None if there is none."""
        for group in groups:
            params, adapted = split_by_kind(self._stale_in(group, adapters))
            if not params and not adapted:
                continue
            self._will_overwrite(params)
            with phase("gather"), torch.no_grad():
                partitioned = [param for param in params if is_partitioned(param)]
                exchanges = self._exchange(partitioned)
                exchanged = {param for exchange in exchanges for param in exchange.layouts}
                fetch = self._fetch([param for param in partitioned if param not in exchanged])
            return GroupRefresh(params, adapted, exchanges, exchanged, fetch)
        return None

    def _receive(self, refresh: "GroupRefresh", whole: ExitStack, phase: Phase) -> int:
        """Gather what a group's merges read, until `whole` ends, and wait for the slices. Gives the bytes gathered.

        To be called before the next group's transfers start: transfers of one process group run one after the other.
        """
        with phase("gather"), torch.no_grad():
            refresh.gathered_bytes = whole.enter_context(gathered(self._read(refresh.adapted)))
            slices = sum(exchange.finish(self._slices(exchange.layouts)) for exchange in refresh.exchanges)
            refresh.exchanges.clear()  # and their buffers
        return refresh.gathered_bytes + refresh.fetch.nbytes + slices

    @torch.no_grad()
    def _keep(self, refresh: "GroupRefresh", phase: Phase, next_temporary: int) -> None:
        """Wait for the group's all-gathers, copy the results into the snapshot, merge its adapters.

        next_temporary: bytes of buffers of the next group's transfers.
        """
        fetch, adapted = refresh.fetch, refresh.adapted
        with phase("gather"):
            fetch.wait()
            for param in refresh.params:
                if param in fetch.storage and (fetch.host is not None or not self._is_copied_whole(param)):
                    self.keep(param, whole_in(fetch.storage[param], param))
                elif param not in fetch.storage and param not in refresh.exchanged:
                    self.keep(param, dequantized(param))
                self.stamps[param] = self.weights.stamp(param)
        if adapted:
            with phase("merge"):
                for layer in adapted:
                    self._will_overwrite(self._overwritten(layer, adapters=True))
                    self.keep_adapters(layer)
                    self.stamps[layer] = self.weights.stamp(layer)
        sliced = sum(storage.nbytes for param, storage in fetch.storage.items() if not self._is_copied_whole(param))
        merging = (layer.merge_temporary_bytes() for layer in adapted)
        temporary = max(refresh.temporary_nbytes, dequantizing_bytes(refresh.params), *merging)
        temporary += next_temporary + sliced + refresh.gathered_bytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + temporary)

    def _exchange(self, params: list[nn.Parameter]) -> list[SliceExchange]:
        """Start the exchange of those partitioned weights whose slices ranks send each other; the same on all ranks.
        None on the CPUs of one host, see `_fetch`."""
        if not params or not self.slices or self.host is not None:
            return []
        return exchanges_of(self._exchangeable(missing(params)))

    def _exchangeable(self, params: list[nn.Parameter]) -> dict[nn.Parameter, Layout]:
        """Return the partitioned parameters whose slices ranks can send each other, and their layouts."""
        plain = [param for param in params if has_plain_shard(param)]
        layouts = {param: self._slice_layout(whole_shape(param), self.kept[param]) for param in plain}
        return {param: layout for param, layout in layouts.items() if layout is not None}

    def _slice_layout(self, shape: torch.Size, parts: list[Slice]) -> Layout | None:
        key = shape, *((part.ref.select, part.cut) for part in parts)  # equal for the layers
        if key not in self.slice_layouts:
            size = next((part.cut.shard.size for part in self.slices.values() if part.cut is not None), 1)
            self.slice_layouts[key] = layout_of(shape, parts, size)
        return self.slice_layouts[key]

    def _slices(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, list[torch.Tensor | None]]:
        """Return the memory of the slices to keep of each parameter; None: another rank has all of it."""
        return {param: [self._memory(param, part) for part in self.kept[param]] for param in params}

    def _memory(self, param: nn.Parameter, part: Slice) -> torch.Tensor | None:
        blank = blank_part(part, param)
        if blank is None:
            self._leave_out(param, part)
            return None
        return self._buffer(param, part, blank.shape, blank.dtype, self.device)

    def _fetch(self, params: list[nn.Parameter]) -> AsyncAllGather:
        """Start gathering partitioned weights: into their copies, or into memory of their own if slices are kept.

        On the CPUs of one host that memory is shared by its ranks: each writes its shards there and reads its slices.
        What is sliced differs by rank, so it is then for all of `params`.
        """
        if not params or not self.slices or self.host is None:
            return AsyncAllGather({param: self._target(param) for param in params})
        if self.staging is None:
            self.staging = self.host.empty(max(map(self._staged_bytes, self.weights.groups)), torch.uint8)
        else:
            self.host.barrier()  # no rank still reads the last group's weights
        storage, first = {}, 0
        for param in params:
            nbytes = whole_bytes(param)
            storage[param] = self.staging[first : first + nbytes].view(copy_dtype(param))
            first += aligned(nbytes)
        return AsyncAllGather(storage, self.host)

    def _staged_bytes(self, group: Group) -> int:
        """Return the bytes of a group's partitioned weights in `staging`."""
        factors = (param for layer in group.adapted for param in layer.adapter_params())
        return sum(aligned(whole_bytes(param)) for param in {*group.params, *factors} if is_partitioned(param))

    @cached_property
    def host(self) -> HostMemory | None:
        """Memory of the ranks, if they compute on the CPUs of one host. The first use is a collective."""
        return memory_of_hosts(self.weights.info.model.parameters())

    def _is_copied(self, param: nn.Parameter) -> bool:
        """Whether a parameter is copied: else none of it is kept, or the model's own is used."""
        return param in self.kept and (must_copy(param) or not self._is_copied_whole(param))

    def _are_copied_alike(self, refs: Iterable[ParamRef]) -> bool:
        """Whether all of the weights at `refs` are copied, or none: others do not lie in one buffer."""
        return not self.slices or len({self._is_copied(self.sources[ref][1]) for ref in refs}) == 1

    def _is_copied_whole(self, owner: Owner) -> bool:
        """Whether one copy is kept of `owner`, which is all of it."""
        slices = self.kept[owner]
        return len(slices) == 1 and slices[0].is_whole

    def _target(self, param: nn.Parameter) -> torch.Tensor:
        """Return the memory [numel] to gather `param` into: its copy, or memory of its own if slices are kept."""
        if not self._is_copied_whole(param):
            return storage_for(param)
        shape, dtype = whole_shape(param), copy_dtype(param)
        return self._buffer(param, self.kept[param][0], shape, dtype, self.device).view(-1)

    def _read(self, adapted: Iterable[AdaptedModule]) -> list[nn.Parameter]:
        """Return the parameters to gather for merging or slicing adapters: factors, and bases that are read whole."""
        factors = [param for layer in adapted for param in layer.adapter_params()]
        bases = [param for layer in adapted if self._merges_into_gathered(layer) for param in layer.sources.values()]
        return list(dict.fromkeys([*factors, *bases]))

    def _merges_into_copies(self, adapted: AdaptedModule) -> bool:
        """Whether the merged weights of a module are kept whole: they are made from the copies of its base."""
        return not self.decoder_only and all(
            self._is_copied_whole((adapted, name)) for name in (*adapted.sources, "bias")
        )

    def _merges_into_gathered(self, adapted: AdaptedModule) -> bool:
        """Whether a module's weights are merged whole, and then sliced."""
        return not self._merges_into_copies(adapted) and not (self.decoder_only and adapted.is_low_rank())

    def keep(self, owner: Owner, whole: torch.Tensor) -> None:
        """Copy the slices to keep of `owner`, whose full tensor is `whole`."""
        for part in self.kept.get(owner, ()):
            tensor = part.of(whole)
            if tensor is not None:
                self._buffer(owner, part, tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
            else:
                self._leave_out(owner, part)

    def _leave_out(self, owner: Owner, part: Slice) -> None:
        """Record that another rank has all of a slice."""
        owner = self._memory_owner(owner)
        if part.key not in self.parts.setdefault(owner, {}):
            self.parts[owner][part.key] = None
            self.moves += 1

    def keep_adapters(self, adapted: AdaptedModule) -> None:
        """Merge a module's active adapters into copies, or keep slices of their factors if they are unmerged. Expects
        the parameters gathered that this reads."""
        if self.weights.is_unmerged(adapted, adapters=True):
            self.moves += 1
            kept = self.factors.setdefault(adapted, {})
            for part in self.kept.get((adapted, "weight"), ()):
                kept[part.key] = [
                    delta._replace(a=delta.a.clone(), b=delta.b.clone()) for delta in sliced_factors(adapted, part)
                ]
            return
        changed = adapted.changed()
        for name in {*adapted.sources, "bias"} - changed.keys():  # merged from other adapters
            self.moves += self.parts.pop((adapted, name), None) is not None
        if self._merges_into_copies(adapted):
            like = next(iter(adapted.sources.values()))
            merged = {
                name: self._buffer((adapted, name), self.kept[adapted, name][0], shape, read_dtype(like), like.device)
                for name, shape in changed.items()
            }
            adapted.merge({name: self.tensor(param) for name, param in adapted.sources.items()}, merged)
        elif self._merges_into_gathered(adapted):
            base = {name: dequantized(param) for name, param in adapted.sources.items()}
            for name, tensor in adapted.merged(base).items():
                self.keep((adapted, name), tensor)
        else:
            for part in self.kept.get((adapted, "weight"), ()):
                weight = self._part(adapted.sources["weight"], part.ref)
                buffer = self._buffer((adapted, "weight"), part, weight.shape, weight.dtype, weight.device)
                merge_low_rank(weight, sliced_factors(adapted, part), buffer)

    def _buffer(
        self, owner: Owner, part: Slice, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a slice, contiguous; allocated on first use."""
        owner = self._memory_owner(owner)
        merged, joined = isinstance(owner, tuple), part.ref in self.joined.sets
        if merged and joined:  # this part of the joined buffer now holds a merged weight, no fill
            self.moves += self.fills.pop(part.ref, None) is not None
            self.stamps.pop(part.ref, None)
        parts = self.parts.setdefault(owner, {})
        if part.key not in parts:
            if joined:
                data = self.joined.part(part.ref, merged, self._blank, self.device)
            else:
                data = request_huge_pages(torch.empty(shape, dtype=dtype, device=device))
            self._add(owner, part.key, data)
        return parts[part.key].data

    def _memory_owner(self, owner: Owner) -> Owner:
        """Return the owner of the memory that the slices of `owner` are in: of a merged weight it may be its base."""
        base = owner[0].sources.get(owner[1]) if isinstance(owner, tuple) else None
        return base if base in self.merged_over else owner

    def _add(self, owner: Owner, key: tuple, data: torch.Tensor) -> None:
        param = nn.Parameter(data, requires_grad=False)
        if not isinstance(owner, tuple):
            # A forward may check whether it must gather a weight that it reads directly (TRL 1.16: a fused head).
            param.ds_status = ZeroParamStatus.AVAILABLE
        self.parts.setdefault(owner, {})[key] = param
        self.moves += 1

    # ------------------------------------------------------ joined buffers

    def _blank(self, ref: ParamRef) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of what is kept at `ref`."""
        return self.blank(ref, self.sources[ref][1])

    def blank(self, ref: ParamRef, param: nn.Parameter) -> torch.Tensor | None:
        """Return a meta tensor with the shape and dtype of what is kept of `param` at `ref`; None if another rank has
        it."""
        blank = blank_part(self.slices.get(ref), param)
        return None if blank is None else torch.empty_like(blank, memory_format=torch.contiguous_format)

    def _is_merged_at(self, ref: ParamRef) -> bool:
        """Whether, with adapters, there is a merged weight at `ref`, in memory of its own."""
        adapted, param = self.sources[ref]
        if adapted is None or param in self.merged_over:
            return False
        return self.weights.is_merged(adapted, True) and ref.parameter in adapted.changed()

    def keeps_joined(self, ref: ParamRef) -> bool:
        """Whether, with adapters, the weight at `ref` lies in a joined buffer."""
        if ref not in self.joined.sets:
            return False
        copied = bool(self.slices) or must_copy(self.sources[ref][1])
        return copied or any(map(self._is_merged_at, self.joined.sets[ref]))

    def _joined_to_merged(self) -> list[ParamRef]:
        """Return the refs of weights that are not merged but joined with merged ones."""
        refs_to_fill = []
        for refs in set(self.joined.sets.values()):
            unmerged = [ref for ref in refs if not self._is_merged_at(ref)]
            refs_to_fill += unmerged if len(unmerged) < len(refs) else []
        return refs_to_fill

    @torch.no_grad()
    def _fill(self) -> None:
        """Copy weights that are not merged into the joined buffers of the merged ones they are read with."""
        refs_to_fill = self._joined_to_merged()
        for ref in refs_to_fill:
            adapted, param = self.sources[ref]
            if self.stamps.get(ref) != self.weights.stamp(param):
                buffer = self.joined.part(ref, True, self._blank, self.device)
                self.moves += self.fills.get(ref) is not buffer
                self.fills[ref] = buffer.copy_(self._part(param, ref))
                self.stamps[ref] = self.weights.stamp(param)
                self.stamps.pop(adapted, None)  # the merged weight that was here is overwritten
        for ref in self.fills.keys() - set(refs_to_fill):
            self.moves += 1
            del self.fills[ref], self.stamps[ref]
        self.peak_bytes = max(self.peak_bytes, self.nbytes())

    # ------------------------------------------------------------- reading

    def number(self) -> int:
        """Differs if the tensors may have changed."""
        return self.weights.number()

    def owned(self) -> set[int]:
        """Return the ids of the tensors whose memory is the snapshot's: they move only when `moves` grows."""
        parts = (part for parts in self.parts.values() for part in parts.values())
        factors = (delta for kept in self.factors.values() for deltas in kept.values() for delta in deltas)
        return set(map(id, (*parts, *self.fills.values(), *(each for delta in factors for each in delta[:2]))))

    def tensor(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return the tensor that replaces `param` in the model's modules: its copy or slice, or `param` itself without
        one; None if another rank has all of it."""
        parts = self.parts.get(param)
        return next(iter(parts.values())) if parts else param

    def weights_of(self, adapted: AdaptedModule, adapters: bool) -> dict[str, nn.Parameter | None]:
        """Return the tensors for `adapted.plain`, by parameter name; merged if its adapters are."""
        tensors = {name: self.tensor(param) for name, param in adapted.sources.items()}
        if self.weights.is_merged(adapted, adapters):
            merged = {name: self.parts.get((adapted, name)) for name in (*adapted.sources, "bias")}
            tensors |= {name: next(iter(parts.values())) for name, parts in merged.items() if parts}
        return tensors

    def weight_at(
        self, ref: ParamRef, adapted: AdaptedModule | None, param: nn.Parameter | None, adapters: bool
    ) -> torch.Tensor | None:
        """Return the tensor that a decoder reads at `ref`: with a slice, that slice. None if another rank has all of
        it, or if there is no parameter.

        adapted: the adapted module there, if any.  param: its base's parameter, or the model's own.
        """
        if adapters and ref in self.fills:
            return self.fills[ref]
        merged = (adapted, ref.parameter)
        if adapted is not None and self.weights.is_merged(adapted, adapters) and merged in self.parts:
            return self._part(merged, ref)
        return None if param is None else self._part(param, ref)

    def _part(self, owner: Owner, ref: ParamRef) -> torch.Tensor | None:
        """Return the kept part of `owner` at `ref`; the parameter itself if nothing is kept."""
        parts = self.parts.get(owner)
        if not parts:
            return owner  # type: ignore[return-value]  # merged weights have parts: this is a parameter
        return parts[self.slices[ref].key if ref in self.slices else WHOLE_KEY]

    def lora_deltas(self, ref: ParamRef, adapted: AdaptedModule, adapters: bool) -> list[LowRank]:
        """Return the unmerged low-rank deltas to the weight at `ref` of `adapted`, with b's rows those of `ref`."""
        if not self.weights.is_unmerged(adapted, adapters):
            return []
        if self.decoder_only:
            return self.factors[adapted][self.slices[ref].key]
        deltas = adapted.low_rank(self.tensor)
        return [delta._replace(b=selected_rows(ref, adapted, delta.b)) for delta in deltas]

    def unmerged_factors(self, adapters: bool) -> list[torch.Tensor]:
        """Return the factors of all unmerged adapters."""
        unmerged = [layer for layer in self.adapted if self.weights.is_unmerged(layer, adapters)]
        if not self.decoder_only:
            return [self.tensor(param) for layer in unmerged for param in layer.adapter_params()]
        deltas = [delta for layer in unmerged for kept in self.factors.get(layer, {}).values() for delta in kept]
        return [factor for delta in deltas for factor in (delta.a, delta.b)]

    def describe_adapters(self, module: nn.Module) -> str:
        """Return how many adapted modules inside `module` run unmerged and merged, as a text.

        "" if the snapshot merges all adapters, or if none is active.
        """
        within = set(module.modules())
        here = [layer for layer in self.adapted if not within.isdisjoint((layer.wrapper, layer.plain))]
        active = [layer for layer in here if layer.state()]
        if not self.weights.unmerged or not active:
            return ""
        unmerged = sum(self.weights.is_unmerged(layer, adapters=True) for layer in active)
        rest = ", merged in the others" * (unmerged < len(active))
        return f"adapters unmerged in {unmerged} of {len(active)} modules{rest}"

    # -------------------------------------------------------------- memory

    def nbytes(self) -> int:
        """Return the bytes that the copies hold, spare memory included."""
        parts = (part for parts in self.parts.values() for part in parts.values() if part is not None)
        factors = self.unmerged_factors(adapters=True) if self.decoder_only else ()
        spare = (storage for storages in self.spare.values() for storage in storages)
        return sum(tensor.nbytes for tensor in (*parts, *self.fills.values(), *factors, *spare))

    def planned(self) -> tuple[int, int]:
        """Return planned bytes: of the copies, and of the temporary memory needed while they are made."""
        copied = [self._copied(group, adapters=True) for group in self.weights.groups]
        following = [self._staged_ahead(weights) for weights in copied[1:]] + [0]
        temporary = (need + ahead for need, ahead in zip(map(self._planned_temporary, copied), following, strict=False))
        kept = sum(self._planned_bytes(weight) for weights in copied for weight in weights)
        fills = sum(self._blank(ref).nbytes for ref in self._joined_to_merged())
        return kept + fills, max(temporary, default=0)

    def _staged_ahead(self, weights: list[nn.Parameter | AdaptedModule]) -> int:
        """Return the bytes of buffers of a group's transfers, which start while the group before is merged."""
        params, _ = split_by_kind(weights)
        return 0 if self.slices else sum(staging_bytes(param) for param in params if is_partitioned(param))

    def _planned_bytes(self, weight: nn.Parameter | AdaptedModule) -> int:
        if isinstance(weight, nn.Parameter):
            return sum(planned_part_bytes(part, weight) for part in self.kept[weight])
        if self.weights.is_unmerged(weight, True):
            # An upper bound: a rank keeps one of the two factors in full, and a slice of the other.
            return sum(map(whole_bytes, weight.adapter_params()))
        return sum(
            planned_part_bytes(part, param)
            for name, param in weight.sources.items()
            for part in self.kept.get((weight, name), ())
            if name != "bias" and param not in self.merged_over  # adapters rarely change a bias
        )

    def _planned_temporary(self, weights: list[nn.Parameter | AdaptedModule]) -> int:
        """Return temporary bytes while a group is gathered and merged.

        On CPUs of the way that needs more: that ranks are on one host is known only after a collective.
        """
        params, adapted = split_by_kind(weights)
        partitioned = [param for param in params if is_partitioned(param)]
        read = sum(whole_bytes(param) for param in self._read(adapted) if is_partitioned(param))
        merging = max(dequantizing_bytes(params), *(layer.merge_temporary_bytes() for layer in adapted), 0)
        exchangeable = self._exchangeable(partitioned) if self.slices else {}
        ways = [exchangeable, {}] if HostMemory.is_possible() else [exchangeable]
        return read + max(self._gather_temporary(partitioned, exchanged, merging) for exchanged in ways)

    def _gather_temporary(
        self, partitioned: list[nn.Parameter], exchanged: dict[nn.Parameter, Layout], merging: int
    ) -> int:
        """Return temporary bytes if `exchanged` are exchanged and the others gathered: what is sliced, and the larger
        of buffers and `merging`."""
        whole = [param for param in partitioned if param not in exchanged]
        sliced = sum(whole_bytes(param) for param in whole if not self._is_copied_whole(param))
        buffers = sum(map(staging_bytes, whole)) + sum(exchange_bytes(*each) for each in exchanged.items())
        return sliced + max(buffers, merging)

    def add_whole(self, param: nn.Parameter, host: HostMemory | None) -> torch.Tensor:
        """Add a copy of a partitioned parameter, in spare memory of its size if there is any, else as
        `storage_for`. Gives that memory, [numel], for the caller to fill."""
        spare = self.spare.get(memory_kind(param))
        storage = spare.pop() if spare else storage_for(param, host)
        self._add(param, WHOLE_KEY, whole_in(storage, param))
        return storage

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Drop whole copies; their memory is spare."""
        for param in params:
            self.moves += 1
            storage = self.parts.pop(param)[WHOLE_KEY].data.view(-1)
            self.spare.setdefault(memory_kind(param), []).append(storage)

    def merges(self) -> bool:
        """Whether the active adapters of a module are merged."""
        return any(self.weights.is_merged(adapted, True) for adapted in self.adapted)

    def merged_modules(self) -> set[AdaptedModule]:
        """Return the modules of which merged weights are kept."""
        return {owner[0] for owner in self.parts if isinstance(owner, tuple)}

    def drop_merged(self) -> None:
        """Free the merged weights, and what is joined with them; the next refresh merges again."""
        for owner in [owner for owner in self.parts if isinstance(owner, tuple)]:
            del self.parts[owner]
            self.stamps.pop(owner[0], None)
        over = {param for param in self.merged_over if param not in self.stamps}  # does not hold the base
        for refs in set(self.joined.sets.values()):
            joined = {self.sources[ref][1] for ref in refs}
            if not over.isdisjoint(joined):
                over |= joined
                self.joined.drop(refs)
        for param in over:
            self.parts.pop(param, None)
            self.stamps.pop(param, None)
            if param in self.merged_over:
                self.stamps.pop(self.merged_over[param], None)
        for ref in self.fills:
            self.stamps.pop(ref, None)
        self.fills.clear()
        self.joined.release(only_merged=True)
        self._forget()

    def release(self) -> None:
        """Free all memory; the next refresh makes new copies."""
        for tables in (self.parts, self.factors, self.fills, self.spare, self.stamps):
            tables.clear()
        self.joined.release()
        self._forget()

    def _forget(self) -> None:
        self.fresh.clear()
        self.swapped.clear()
        self.watches.clear()
        self.moves += 1


def split_by_kind(weights: Iterable[nn.Parameter | AdaptedModule]) -> tuple[list[nn.Parameter], list[AdaptedModule]]:
    """Return the parameters among `weights`, and the adapted modules."""
    by_kind: tuple[list, list] = ([], [])
    for weight in weights:
        by_kind[isinstance(weight, AdaptedModule)].append(weight)
    return by_kind


def slices_by_owner(slices: dict[ParamRef, Slice], adapted: Iterable[AdaptedModule]) -> dict[Owner, list[Slice]]:
    """Return the slices of each owner, each once. An adapted module owns its base parameter and its merged tensor,
    which have the same slices."""
    wrapped = {layer.wrapper: layer for layer in adapted}
    by_key: dict[Owner, dict[tuple, Slice]] = {}
    for ref, part in slices.items():
        module, name = ref.module, ref.parameter
        if module in wrapped:
            owners = [(wrapped[module], name), wrapped[module].sources.get(name)]
        elif name in module._parameters:
            owners = [module._parameters[name]]
        else:  # PEFT's modules_to_save: the original module, and a copy for each adapter
            owners = [child._parameters[name] for child in module.modules() if name in child._parameters]
        for owner in owners:
            if owner is not None:
                by_key.setdefault(owner, {}).setdefault(part.key, part)
    return {owner: list(parts.values()) for owner, parts in by_key.items()}


def joined_sources(
    joined: Iterable[tuple[ParamRef, ...]], adapted: Iterable[AdaptedModule]
) -> dict[ParamRef, tuple[AdaptedModule | None, nn.Parameter]]:
    """Return the adapted module (or None) and the training parameter at each ParamRef of the sets that can be joined.

    A set can be joined if its parameters exist, are distinct, and agree in dtype and in all but the first dimension. A
    parameter that layers share belongs to the first layer's set.
    """
    wrapped = {layer.wrapper: layer for layer in adapted}
    sources: dict[ParamRef, tuple[AdaptedModule | None, nn.Parameter]] = {}
    taken: set[nn.Parameter] = set()
    for refs in joined:
        modules = [wrapped.get(ref.module) for ref in refs]
        params = [
            (ref.module._parameters if module is None else module.sources).get(ref.parameter)
            for ref, module in zip(refs, modules, strict=True)
        ]
        if None in params or len({*params} - taken) < len(refs):
            continue
        if len({(read_dtype(param), whole_shape(param)[1:]) for param in params}) == 1:
            sources |= zip(refs, zip(modules, params, strict=True), strict=True)
            taken.update(params)
    return sources


def sliced_factors(adapted: AdaptedModule, part: Slice) -> list[LowRank]:
    """Return the factors of a module's low-rank deltas to a slice of its weight. Expects them gathered."""
    deltas = adapted.low_rank()
    return [part.of_factors(delta._replace(b=selected_rows(part.ref, adapted, delta.b))) for delta in deltas]


def selected_rows(ref: ParamRef, adapted: AdaptedModule, b: torch.Tensor) -> torch.Tensor:
    """Return the rows of a factor b [out, r] that belong to `ref`."""
    rows = adapted.in_weight_layout(b)
    return rows if ref.select is None else ref.select(rows)


def planned_part_bytes(part: Slice, param: nn.Parameter) -> int:
    """Return the bytes of a slice of `param`."""
    kept = blank_part(part, param)
    return 0 if kept is None else kept.nbytes


def blank_part(part: Slice | None, param: nn.Parameter) -> torch.Tensor | None:
    """Return a meta tensor for a slice of `param`, or for all of it; None if another rank has all of the slice."""
    blank = torch.empty(whole_shape(param), dtype=read_dtype(param), device="meta")
    return blank if part is None else part.of(blank)


def must_copy(param: torch.Tensor) -> bool:
    """Whether a parameter cannot be read in place: it is partitioned or quantized."""
    return is_partitioned(param) or is_quantized(param)


def dequantizing_bytes(params: Iterable[torch.Tensor]) -> int:
    """Return the temporary bytes while quantized ones among `params` are copied, one after the other."""
    return max((whole_bytes(param) for param in params if is_quantized(param)), default=0)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where a tensor of any dtype may begin."""
    return -(-nbytes // 64) * 64


def memory_kind(param: nn.Parameter) -> tuple:
    """Return a key that is equal for partitioned parameters that may use each other's memory."""
    return whole_shape(param).numel(), param.ds_tensor.ds_numel, copy_dtype(param)
