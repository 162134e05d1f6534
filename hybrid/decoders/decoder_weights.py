"""The weights of a DecoderLayout as a decoder reads them: from a snapshot or an int8 copy, or on the meta device for
memory plans."""

from operator import attrgetter
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from hybrid.models.modules import active_copy, plain
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.joined import JoinedBuffers
from hybrid.weights.lora import AdaptedModule, LowRank
from hybrid.weights.snapshot import Snapshot

META = torch.device("meta")
PARAMETERS = attrgetter("_parameters")


class DecoderWeights:
    """The weights of a layout in a snapshot: whole, or this rank's slices; or those of an int8 copy, by its own layout.

    adapters: whether the snapshot's adapters are used, merged or unmerged.
    """

    def __init__(self, layout: DecoderLayout, snapshot: Snapshot | Int8Copy, adapters: bool):
        self.layout, self.snapshot, self.adapters = layout, snapshot, adapters
        self.adapted = {adapted.wrapper: adapted for adapted in snapshot.adapted}
        self.refs = [] if layout is None else [ref for at in (layout.outer, *layout.layers) for ref in at.values()]
        unadapted = [ref for ref in self.refs if ref.module not in self.adapted]
        self.modules, self.names = [ref.module for ref in unadapted], [ref.parameter for ref in unadapted]
        self.buffers = [ref for ref in self.refs if ref.parameter in plain(ref.module)._buffers]
        self.saved = [ref.module for ref in unadapted if isinstance(ref.module, ModulesToSaveWrapper)]
        self.sources: tuple = ()  # what the addresses were read of
        self.addresses: list[int] = []
        self.in_place: list[torch.Tensor] = []  # tensors that are not the snapshot's, and their addresses
        self.pointers: list[int] = []

    def tensor(self, ref: ParamRef) -> torch.Tensor | None:
        """Return the snapshot's tensor of a ParamRef, before its `select`; None if there is none."""
        return self.snapshot.weight_at(ref, *self.owner(ref), self.adapters)

    def lora_deltas(self, ref: ParamRef) -> list[LowRank]:
        """Return the snapshot's unmerged LoRA factors of a weight."""
        adapted, _ = self.owner(ref)
        if adapted is None or ref.parameter != "weight":
            return []
        assert isinstance(self.snapshot, Snapshot), "an int8 copy has its adapters merged"
        return self.snapshot.lora_deltas(ref, adapted, self.adapters)

    def owner(self, ref: ParamRef) -> tuple[AdaptedModule | None, nn.Parameter | None]:
        """Return the adapted module that a ParamRef is in, None without an adapter; and the model's own parameter, or
        buffer, None if there is none."""
        module = ref.module
        buffer: Any = plain(module)._buffers.get(ref.parameter)
        if buffer is not None:
            return None, buffer
        if isinstance(module, ModulesToSaveWrapper):
            module = active_copy(module)
        adapted = self.adapted.get(module)
        return adapted, (module._parameters if adapted is None else adapted.sources).get(ref.parameter)

    def embedding(self) -> nn.Parameter:
        """Return the model's own embedding weight, which may be partitioned. It does not need a snapshot."""
        return self.owner(self.snapshot.weights.info.layout.outer["embedding.weight"])[1]

    def key(self) -> tuple:
        """Return a key that differs when a decoder must bind again.

        It has the version of the weights and the tensors' addresses, which may move without a new version. Addresses
        are read only if something may have moved. Weights that are streamed, or loaded once, need none.
        """
        number = self.snapshot.number()
        if not self.snapshot.weights.groups:
            return (number,)
        # The parameters and buffers that the model's modules have now.
        params = [*map(dict.get, map(PARAMETERS, self.modules), self.names)]
        params += (plain(ref.module)._buffers[ref.parameter] for ref in self.buffers)
        sources = number, self.snapshot.moves, list(map(active_copy, self.saved)), list(map(id, params))
        if self.sources != sources or list(map(torch.Tensor.data_ptr, self.in_place)) != self.pointers:
            self.addresses = self._read_addresses()
            self.sources = sources
        return number, *self.addresses

    def _read_addresses(self) -> list[int]:
        tensors = [self.tensor(ref) for ref in self.refs]
        tensors += self.snapshot.unmerged_factors(self.adapters)
        owned = self.snapshot.owned()
        self.in_place = [tensor for tensor in tensors if tensor is not None and id(tensor) not in owned]
        self.pointers = list(map(torch.Tensor.data_ptr, self.in_place))
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class MetaWeights(DecoderWeights):
    """Tensors on the meta device, laid out as the snapshot's will be. They take no memory."""

    def __init__(self, layout: DecoderLayout, snapshot: Snapshot | Int8Copy):
        super().__init__(layout, snapshot, adapters=True)
        self.joined = JoinedBuffers(set(snapshot.joined.sets.values()))

    def tensor(self, ref: ParamRef) -> torch.Tensor | None:
        if self.snapshot.keeps_joined(ref):
            return self.joined.part(ref, False, self._unjoined, META)
        return self._unjoined(ref)

    def lora_deltas(self, ref: ParamRef) -> list[LowRank]:
        return []

    def _unjoined(self, ref: ParamRef) -> torch.Tensor | None:
        param = self.owner(ref)[1]
        return None if param is None else self.snapshot.blank(ref, param)
