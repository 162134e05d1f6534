"""The weights of a DecoderLayout as a decoder reads them: from a snapshot or an int8 copy, or on the meta device for
memory plans."""

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from hybrid.models.modules import active_copy
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.joined import JoinedBuffers
from hybrid.weights.lora import Adapted, LowRank
from hybrid.weights.snapshot import Snapshot

META = torch.device("meta")


class BoundWeights:
    """The weights of a layout in a snapshot: whole, or this rank's slices; or those of an int8 copy, by its own layout.

    adapters: whether the snapshot's adapters are used, merged or unmerged.
    """

    def __init__(self, layout: DecoderLayout, snapshot: Snapshot | Int8Copy, adapters: bool):
        self.layout, self.snapshot, self.adapters = layout, snapshot, adapters
        self.adapted = {adapted.wrapper: adapted for adapted in snapshot.adapted}

    def tensor(self, ref: ParamRef) -> torch.Tensor | None:
        """The snapshot's tensor of a ParamRef, before its `select`; None if there is none."""
        return self.snapshot.weight_at(ref, *self.owner(ref), self.adapters)

    def lora_deltas(self, ref: ParamRef) -> list[LowRank]:
        """The snapshot's unmerged LoRA factors of a weight."""
        adapted, _ = self.owner(ref)
        if adapted is None or ref.parameter != "weight":
            return []
        assert isinstance(self.snapshot, Snapshot), "an int8 copy has its adapters merged"
        return self.snapshot.lora_deltas(ref, adapted, self.adapters)

    def owner(self, ref: ParamRef) -> tuple[Adapted | None, nn.Parameter | None]:
        """The adapted module that a ParamRef is in, None without an adapter; and the model's own parameter, None if
        there is none."""
        module = ref.module
        if isinstance(module, ModulesToSaveWrapper):
            module = active_copy(module)
        adapted = self.adapted.get(module)
        return adapted, (module._parameters if adapted is None else adapted.sources).get(ref.parameter)

    def embedding(self) -> nn.Parameter:
        """The model's own embedding weight, which may be partitioned. It does not need a snapshot."""
        return self.owner(self.snapshot.weights.info.layout.outer["embedding.weight"])[1]

    def key(self) -> tuple:
        """Differs when a decoder must bind again: the version of the weights, and the addresses of the tensors, which
        may move without a new version. Weights that are streamed, or loaded once, need no addresses."""
        number = self.snapshot.number()
        if not self.snapshot.weights.groups:
            return (number,)
        tensors = [self.tensor(ref) for roles in (self.layout.outer, *self.layout.layers) for ref in roles.values()]
        tensors += self.snapshot.unmerged_factors(self.adapters)
        return number, *(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


class MetaWeights(BoundWeights):
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
