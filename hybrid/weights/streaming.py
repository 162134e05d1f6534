"""Weights that are whole while the stretch of a decoder that reads them runs, and at no other time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hybrid.profiling import Phase
from hybrid.weights.gather import Fetch, gathered, is_partitioned, storage_for, whole_bytes, whole_in
from hybrid.weights.host_memory import HostMemory
from hybrid.weights.lora import Adapted
from hybrid.weights.snapshot import Snapshot, merged_bytes

Owner = nn.Parameter | Adapted


class StreamedSnapshot(Snapshot):
    """For streaming: of a decoder's stretches one is whole, and the next is on its way.

    kept: what Snapshot is made of.  phase: times the gathering.  count: told of bytes gathered.
    `base` and `merged` have what is whole now. Memory is used again by the next stretch of the same size, and is
    shared by ranks on one host's CPUs.
    """

    def __init__(self, *kept: Any, phase: Phase, count: Callable[[int], None]):
        super().__init__(*kept)
        self.phase, self.count = phase, count
        self.spare: dict[tuple, list[torch.Tensor]] = {}  # by size and dtype: memory that nobody uses now
        self.spare_bytes = 0
        self.host: HostMemory | None = None
        self.has_looked = False  # for what ranks share; a plan of memory must not wait for them

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """Nothing to do: nothing is kept."""
        return 0

    def must_gather(self, adapters: bool) -> bool:
        """Never: weights are gathered as the decoder runs."""
        return False

    def in_turn(self, stretches: Sequence[Sequence[Owner]], adapters: bool) -> Iterator[None]:
        """Yields once for each stretch, while its owners' weights are whole.

        A collective: every rank must come with the same stretches, and go on to the end.
        """
        needed = [
            dict.fromkeys(param for owner in owners for param in self._sources(owner, adapters)) for owners in stretches
        ]
        last = {param: number for number, params in enumerate(needed) for param in params}  # stretch that reads it
        if not self.has_looked:
            groups = {param.ds_process_group for param in self.model.parameters() if is_partitioned(param)}
            self.host, self.has_looked = HostMemory.shared_by(groups.pop()) if len(groups) == 1 else None, True
        if self.host:
            self.host.settle()  # nobody reads the last pass' weights anymore
        coming = self._fetch(needed[0])
        for number, owners in enumerate(stretches):
            self._arrive(coming)
            self._merge_all([one for one in owners if isinstance(one, Adapted) and self.is_merged(one, adapters)])
            if number + 1 < len(stretches):
                coming = self._fetch(needed[number + 1])
            self.peak_bytes = max(self.peak_bytes, self.nbytes())
            yield
            self._give_back([param for param in self.base if last[param] == number])
            self.merged.clear()

    def _sources(self, owner: Owner, adapters: bool) -> list[nn.Parameter]:
        """What an owner's weights are made from, and what is computed beside them; factors that are merged come when
        they are."""
        if not isinstance(owner, Adapted):
            return [owner]
        return [*owner.sources.values(), *(owner.adapter_params() if self.is_unmerged(owner, adapters) else [])]

    def _fetch(self, params: dict[nn.Parameter, None]) -> Fetch:
        """Begin to bring together what is not whole."""
        absent = [param for param in params if is_partitioned(param) and param not in self.base]
        for param in absent:
            self.storage[param] = self._memory(param)
        fetch = Fetch({param: self.storage[param] for param in absent}, self.host)
        self.count(fetch.nbytes)
        return fetch

    def _arrive(self, coming: Fetch) -> None:
        with self.phase("gather"):
            coming.wait()
        for param, storage in coming.storage.items():
            self.base[param] = nn.Parameter(whole_in(storage, param), requires_grad=False)

    def _merge_all(self, merges: list[Adapted]) -> None:
        if not merges:  # a phase waits for the device
            return
        with self.phase("merge"), gathered([param for one in merges for param in one.adapter_params()]) as moved:
            self.count(moved)
            for one in merges:
                self._merge(one)

    def _memory(self, param: nn.Parameter) -> torch.Tensor:
        spare = self.spare.get(kind_of_memory(param))
        if not spare:
            return storage_for(param, self.host)
        storage = spare.pop()
        self.spare_bytes -= storage.nbytes
        return storage

    def _give_back(self, params: list[nn.Parameter]) -> None:
        for param in params:
            storage = self.storage.pop(param)
            self.spare.setdefault(kind_of_memory(param), []).append(storage)
            self.spare_bytes += storage.nbytes
            del self.base[param]

    def weights_of(self, one: Adapted, adapters: bool) -> dict[str, nn.Parameter]:
        """As Snapshot's; while the stretch of `one` does not run, what the model itself has."""
        base = {name: self.tensor(param) for name, param in one.sources.items()}
        return {**base, **self.merged.get(one, {})} if adapters else base

    def nbytes(self) -> int:
        """Bytes held, for use again by the next stretches too."""
        return super().nbytes() + self.spare_bytes

    def planned(self) -> tuple[int, int]:
        """Nothing is kept. Whole are a layer and the next one, and what is outside the layers."""
        layers = [sum(whole_bytes(p) for p in part.module.parameters()) for part in self.structure.layers]
        outer = {param for part in self.structure.outer for param in part.module.parameters()}
        merges = (sum(merged_bytes(one) for one in group.adapted if self.is_merged(one, True)) for group in self.groups)
        return 0, 2 * max(layers, default=0) + sum(map(whole_bytes, outer)) + max(merges, default=0)

    def release(self) -> None:
        """Let go of the memory."""
        self.spare.clear()
        self.spare_bytes = 0
        super().release()


def kind_of_memory(param: nn.Parameter) -> tuple:
    """Equal for parameters that may use each other's memory."""
    return param.ds_numel, param.ds_tensor.ds_numel, param.ds_tensor.dtype
