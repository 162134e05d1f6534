"""The int8 copy: a training model's weights for decoding, quantized from the current ones at each refresh.

Linear weights are int8 [out, in] with a float32 scale per output channel. Other weights (embeddings, norms, biases, a
head that is tied to the embedding) keep their dtype; where they are whole and have no adapters, the model's own are
read. Adapters are merged in float32 before the sum is quantized, so that a weight is rounded once. With partitioned
weights (ZeRO-3) one group of layers is whole at a time; training storage is only read.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from deepspeed.accelerator import get_accelerator
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hybrid.models.modules import active_copy, whole_shape
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.runtime.profiling import Phase
from hybrid.weights.gather import (
    AsyncAllGather,
    gathered,
    is_partitioned,
    staging_bytes,
    storage_for,
    whole_bytes,
    whole_in,
)
from hybrid.weights.int8 import dequantized, is_linear, quantize_into, quantized, quantizing_bytes
from hybrid.weights.joined import JoinedBuffers, empty_rows
from hybrid.weights.lora import AdaptedModule
from hybrid.weights.model_weights import ModelWeights, State
from hybrid.weights.module_dicts import patched_attribute
from hybrid.weights.snapshot import blank_part


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor of the copy.

    ref: of the training model.  module, name: where the copy holds it.  quantized: as int8, with scales.
    """

    ref: ParamRef
    module: nn.Module
    name: str
    quantized: bool


class Int8Copy:
    """The weights of a decoder in int8, and what a decoder needs of a snapshot.

    layout: the training model's; references to what is copied are replaced. Each role's copy is [out, in], as the
        role's `select` returns it.
    holders: the modules that hold the copy, one for the outer roles and one for each layer; on the meta device until
        the first refresh.
    layers_per_group: layers whose weights are gathered together.
    joined: sets of ParamRefs of the training model that a decoder reads as one; their copies lie in one buffer.

    There is one buffer for a weight with adapters: a refresh without adapters replaces what one with adapters wrote.
    """

    def __init__(self, weights: ModelWeights, layers_per_group: int, joined: Iterable[tuple[ParamRef, ...]] = ()):
        self.weights, self.adapted = replace(weights, unmerged=False), weights.adapted
        self.device = torch.device(get_accelerator().current_device_name())
        self.wrapped = {layer.wrapper: layer for layer in self.adapted}
        self.joined, self.joined_refs = JoinedBuffers(), list(joined)
        self.stamps: dict[QuantizedTensor, tuple] = {}  # what each tensor was made from
        self.fresh: State | None = None  # what all tensors were made from
        self.refreshes = 0  # that changed the copy
        self.moves = 0  # grows when memory is freed
        self.overwrites = 0  # as Snapshot's: what a refresh writes counts in `refreshes`
        self.peak_bytes = 0  # most bytes held at once by the copy and the group that it was made from
        self.quantized_elements = 0  # over all refreshes
        self.entries: dict[tuple, QuantizedTensor] = {}  # by the training model's tensor; tied weights have one
        roles = (weights.info.layout.outer, *weights.info.layout.layers)
        self.holders = nn.ModuleList(nn.Module() for _ in roles)
        counts: dict[int, int] = {}
        for module in weights.info.model.modules():
            for param in module._parameters.values():
                counts[id(param)] = counts.get(id(param), 0) + 1
        self.owned_once = {param_id for param_id, count in counts.items() if count == 1}
        outer, *layers = (
            {role: self._copied_ref(ref, holder, role.replace(".", "_")) for role, ref in refs.items()}
            for refs, holder in zip(roles, self.holders, strict=True)
        )
        self.layout: DecoderLayout = replace(weights.info.layout, outer=outer, layers=tuple(layers))
        number = {holder: index for index, holder in enumerate(self.holders)}  # 0: outside the layers
        groups: dict[int, list[QuantizedTensor]] = {}
        for entry in self.entries.values():
            groups.setdefault(-(-number[entry.module] // layers_per_group), []).append(entry)
        self.groups = list(groups.values())

    def _copied_ref(self, ref: ParamRef, holder: nn.Module, name: str) -> ParamRef:
        """Return a reference to the copy of what `ref` refers to, on the meta device; `ref` if that is read in
        place."""
        adapted, param = self.source(ref)
        if param is None:
            return ref
        plain = active_copy(ref.module) if isinstance(ref.module, ModulesToSaveWrapper) else ref.module
        plain = plain if adapted is None else adapted.plain
        is_quantized = ref.parameter == "weight" and is_linear(plain) and id(param) in self.owned_once
        if not is_quantized and adapted is None and not is_partitioned(param):
            return ref
        key = (adapted or id(param), ref.parameter, ref.select)
        if key not in self.entries:
            self.entries[key] = QuantizedTensor(ref, holder, name, is_quantized)
            self._set_blank(self.entries[key])
        return ParamRef(self.entries[key].module, self.entries[key].name)

    def _set_blank(self, entry: QuantizedTensor) -> None:
        _, param = self.source(entry.ref)
        blank = blank_part(None, param)
        blank = blank if entry.ref.select is None else entry.ref.select(blank)
        dtype = torch.int8 if entry.quantized else param.dtype
        blank = torch.empty(blank.shape, dtype=dtype, device="meta")
        entry.module.register_parameter(entry.name, nn.Parameter(blank, requires_grad=False))
        if entry.quantized:
            entry.module.register_buffer(f"{entry.name}_scale", torch.empty(len(blank), 1, device="meta"))

    def source(self, ref: ParamRef) -> tuple[AdaptedModule | None, nn.Parameter | None]:
        """Return the adapted module that a ParamRef of the training model is in, None without an adapter; and the
        training parameter, None if there is none."""
        module = active_copy(ref.module) if isinstance(ref.module, ModulesToSaveWrapper) else ref.module
        adapted = self.wrapped.get(module)
        return adapted, (module._parameters if adapted is None else adapted.sources).get(ref.parameter)

    # ------------------------------------------------------------- refresh

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Quantize all weights that have changed, group by group.  adapters: with the active adapters merged.

        Call it in a window with the same `adapters`. Returns the bytes gathered. A collective if weights are
        partitioned, unless nothing has changed.
        """
        state = self.weights.state(adapters)
        if self.fresh == state:
            return 0
        self.fresh = None
        nbytes = sum(self._refresh_group(group, phase, adapters) for group in self.groups)
        self.fresh = state
        return nbytes

    def is_fresh(self, adapters: bool) -> bool:
        """Whether `refresh` has nothing to do."""
        return self.fresh == self.weights.state(adapters)

    @torch.no_grad()
    def _refresh_group(self, group: list[QuantizedTensor], phase: Phase, adapters: bool) -> int:
        stamps = {entry: self._stamp(entry, adapters) for entry in group}
        stale = [entry for entry in group if self.stamps.get(entry) != stamps[entry]]
        if not stale:
            return 0
        self.refreshes += 1
        self._allocate(group)
        merged, bases, factors = self._read(stale, adapters)
        with phase("gather"):
            fetch = AsyncAllGather({param: storage_for(param) for param in bases if is_partitioned(param)})
            staging = fetch.staging_nbytes
            fetch.wait()
        whole = {param: whole_in(storage, param) for param, storage in fetch.storage.items()}
        with phase("merge"), gathered(factors) as factor_bytes:
            for layer in merged:
                here = [entry for entry in stale if self.source(entry.ref)[0] is layer]
                base = {name: whole.get(param, param) for name, param in layer.sources.items()}
                changed = {name: torch.empty(shape, device=self.device) for name, shape in layer.changed().items()}
                layer.merge(base, changed)
                for entry in here:
                    self._keep(entry, changed.get(entry.ref.parameter, base.get(entry.ref.parameter)))
                del changed
            for entry in stale:
                adapted, param = self.source(entry.ref)
                if adapted not in merged:
                    self._keep(entry, whole.get(param, param))
            self.stamps |= {entry: stamps[entry] for entry in stale}
        read = sum(storage.nbytes for storage in fetch.storage.values()) + factor_bytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes() + read + max(staging, self._temporary(stale, adapters)))
        return fetch.nbytes + factor_bytes

    def _stamp(self, entry: QuantizedTensor, adapters: bool) -> tuple:
        """Return a stamp of the tensor's current sources: parameter, version, merged adapters."""
        adapted, param = self.source(entry.ref)
        is_merged = adapted is not None and self.weights.is_merged(adapted, adapters)
        return id(param), self.weights.stamp(adapted if is_merged else param)

    def _read(
        self, entries: list[QuantizedTensor], adapters: bool
    ) -> tuple[list[AdaptedModule], list[nn.Parameter], list[nn.Parameter]]:
        """Return the sources of entries: modules to merge, base weights, and the adapters' factors."""
        merged: dict[AdaptedModule, None] = {}
        bases: dict[nn.Parameter, None] = {}
        for entry in entries:
            adapted, param = self.source(entry.ref)
            if adapted is not None and self.weights.is_merged(adapted, adapters):
                merged[adapted] = None
                bases |= dict.fromkeys(adapted.sources.values())
            else:
                bases[param] = None
        factors = dict.fromkeys(param for layer in merged for param in layer.adapter_params())
        return list(merged), list(bases), list(factors)

    def _keep(self, entry: QuantizedTensor, whole: torch.Tensor) -> None:
        """Write the tensor's part of a full weight."""
        part = whole if entry.ref.select is None else entry.ref.select(whole)
        into = entry.module._parameters[entry.name].data
        if not entry.quantized:
            into.copy_(part)
            return
        quantize_into(part, into, entry.module._buffers[f"{entry.name}_scale"])
        self.quantized_elements += into.numel()

    def _allocate(self, group: list[QuantizedTensor]) -> None:
        """Give the group's tensors memory, unless they have some; those of a joined set in one piece."""
        entries = {entry.ref: entry for entry in group if entry.module._parameters[entry.name].is_meta}
        for refs in self.joined_refs:
            if all(ref in entries for ref in refs):
                self._allocate_together([entries.pop(ref) for ref in refs])
        for entry in entries.values():
            self._allocate_together([entry])

    def _allocate_together(self, entries: list[QuantizedTensor]) -> None:
        params = empty_rows([entry.module._parameters[entry.name] for entry in entries], self.device)
        scales = [entry.module._buffers.get(f"{entry.name}_scale") for entry in entries]
        if all(scale is not None for scale in scales):
            for entry, scale in zip(entries, empty_rows(scales, self.device), strict=True):
                entry.module._buffers[f"{entry.name}_scale"] = scale
        for entry, param in zip(entries, params, strict=True):
            entry.module._parameters[entry.name] = nn.Parameter(param, requires_grad=False)

    def release(self) -> None:
        """Free all memory; the next refresh quantizes again."""
        for entry in self.entries.values():
            self._set_blank(entry)
        self.moves += 1
        self.stamps.clear()
        self.fresh = None

    # ----------------------------------------- what a decoder reads of a snapshot

    def number(self) -> tuple:
        """Differs if the tensors may have changed."""
        return self.weights.number(), self.refreshes

    def owned(self) -> set[int]:
        """Return the ids of the copy's tensors."""
        return set(map(id, self.holders.parameters()))

    def weight_at(
        self, ref: ParamRef, adapted: AdaptedModule | None, param: nn.Parameter | None, adapters: bool
    ) -> torch.Tensor | None:
        """Return the tensor at a reference of `layout`, before its `select`."""
        return param

    def unmerged_factors(self, adapters: bool) -> list[torch.Tensor]:
        """None: all adapters are merged."""
        return []

    def keeps_joined(self, ref: ParamRef) -> bool:
        """Return false: a plan's tensors are those of the copy."""
        return False

    def blank(self, ref: ParamRef, param: nn.Parameter) -> torch.Tensor:
        """Return a meta tensor like the one at a reference of `layout`."""
        return blank_part(None, param)

    # ----------------------------------------------------------- the oracle

    @contextmanager
    def rounded_modules(self, adapters: bool) -> Iterator[None]:
        """Inside the block the training model's own linear layers, where the copy is int8, compute with weights that
        are rounded in the same way, made from the training weights at each forward: the self-check's reference.

        Expects a layer's parameters to be gathered while it runs. No weight is changed.
        """
        modules = {entry.ref.module: entry.ref for entry in self.entries.values() if entry.quantized}
        with ExitStack() as stack:
            for module, ref in modules.items():
                adapted, _ = self.source(ref)
                target = active_copy(module) if isinstance(module, ModulesToSaveWrapper) else module
                # Where adapters are merged into a snapshot, the plain module runs in the wrapper's place.
                for own in (target,) if adapted is None else (target, adapted.plain):
                    stack.enter_context(patched_attribute(own, "forward", RoundedForward(self, ref, own, adapters)))
            yield

    # -------------------------------------------------------------- memory

    def nbytes(self) -> int:
        """Return the bytes that the copy holds."""
        tensors = (*self.holders.parameters(), *self.holders.buffers())
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)

    def planned(self) -> tuple[int, int]:
        """Return planned bytes: of the copy, and of the temporary memory needed while it is made."""
        tensors = (*self.holders.parameters(), *self.holders.buffers())
        temporary = [0]
        for group in self.groups:
            _, bases, factors = self._read(group, adapters=True)
            partitioned = [param for param in bases if is_partitioned(param)]
            read = sum(map(whole_bytes, partitioned)) + sum(whole_bytes(p) for p in factors if is_partitioned(p))
            temporary.append(read + max(sum(map(staging_bytes, partitioned)), self._temporary(group, adapters=True)))
        return sum(tensor.nbytes for tensor in tensors), max(temporary)

    def _temporary(self, entries: list[QuantizedTensor], adapters: bool) -> int:
        """Return the bytes to merge and quantize the largest of `entries`, in addition to what is gathered."""
        merged, bases, _ = self._read(entries, adapters)
        needs = [quantizing_bytes(whole_shape(param).numel(), param.dtype, self.device) for param in bases]
        for layer in merged:
            total = 4 * sum(shape.numel() for shape in layer.changed().values())
            largest = max(shape.numel() for shape in layer.changed().values())
            needs.append(
                total + max(layer.merge_temporary_bytes(), quantizing_bytes(largest, torch.float32, self.device))
            )
        return max(needs, default=0)


@dataclass(frozen=True, eq=False)
class RoundedForward:
    """The forward of a linear layer over its training weight, adapters merged, rounded as int8 rounds it."""

    copy: Int8Copy
    ref: ParamRef
    module: nn.Module
    adapters: bool

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        adapted, param = self.copy.source(self.ref)
        if adapted is None:
            plain, weight, bias = self.module, param, self.module._parameters.get("bias")
        else:
            plain, tensors = adapted.plain, dict(adapted.sources)
            if self.copy.weights.is_merged(adapted, self.adapters):
                merged = {name: torch.empty(shape, device=x.device) for name, shape in adapted.changed().items()}
                adapted.merge(adapted.sources, merged)
                tensors |= merged
            weight, bias = tensors["weight"], tensors.get("bias")
        matrix = weight.T if isinstance(plain, Conv1D) else weight
        rounded = dequantized(*quantized(matrix, 1, torch.float32)).to(x.dtype)
        return F.linear(x, rounded, None if bias is None else bias.to(x.dtype))
