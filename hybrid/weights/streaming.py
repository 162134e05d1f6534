"""Streaming: weights are gathered only while the stretch (consecutive parts) of the decoder that reads them runs."""

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
    """The snapshot of a streamed decoder: one stretch is gathered, and the next is being prefetched.

    kept: the arguments of Snapshot.  phase: times the gathers.  count: called with the number of bytes gathered.
    `base` and `merged` hold the tensors that are gathered now. Buffers are reused for parameters of the same size, and
    are shared by ranks on the CPUs of one host.
    """

    def __init__(self, *kept: Any, phase: Phase, count: Callable[[int], None]):
        super().__init__(*kept)
        self.phase, self.count = phase, count
        self.spare: dict[tuple, list[torch.Tensor]] = {}  # free buffers by size and dtype
        self.spare_bytes = 0
        self.host: HostMemory | None = None
        self.has_looked = False  # whether `host` is set: on first use, as planning memory must not be a collective

    def refresh(self, phase: Phase, adapters: bool) -> int:
        """0: nothing is kept, so nothing is refreshed."""
        return 0

    def must_gather(self, adapters: bool) -> bool:
        """False: weights are gathered as the decoder runs."""
        return False

    def in_turn(self, stretches: Sequence[Sequence[Owner]], adapters: bool) -> Iterator[None]:
        """Yields once for each stretch, while the weights of its owners are gathered (and merged, with `adapters`).

        A collective: every rank must pass the same stretches, and iterate to the end.
        """
        needed = [
            dict.fromkeys(param for owner in owners for param in self._sources(owner, adapters)) for owners in stretches
        ]
        last = {param: number for number, params in enumerate(needed) for param in params}  # last stretch that reads it
        if not self.has_looked:
            groups = {param.ds_process_group for param in self.model.parameters() if is_partitioned(param)}
            self.host, self.has_looked = HostMemory.shared_by(groups.pop()) if len(groups) == 1 else None, True
        if self.host:
            self.host.settle()  # no rank still reads the last pass's weights
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
        """The parameters to prefetch for an owner: its weights, and its factors if they are unmerged. Factors to be
        merged are gathered when they are merged."""
        if not isinstance(owner, Adapted):
            return [owner]
        return [*owner.sources.values(), *(owner.adapter_params() if self.is_unmerged(owner, adapters) else [])]

    def _fetch(self, params: dict[nn.Parameter, None]) -> Fetch:
        """Start gathering those of `params` that are not gathered yet."""
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
        if not merges:  # entering a phase synchronizes with the device
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
        """The tensors for `one.plain`, by parameter name; the model's own while the stretch of `one` does not run."""
        base = {name: self.tensor(param) for name, param in one.sources.items()}
        return {**base, **self.merged.get(one, {})} if adapters else base

    def nbytes(self) -> int:
        """Bytes held, free buffers included."""
        return super().nbytes() + self.spare_bytes

    def planned(self) -> tuple[int, int]:
        """Planned bytes: 0 kept, and the peak: two layers, everything outside the layers, and the largest merge."""
        layers = [sum(whole_bytes(p) for p in part.module.parameters()) for part in self.structure.layers]
        outer = {param for part in self.structure.outer for param in part.module.parameters()}
        merges = (sum(merged_bytes(one) for one in group.adapted if self.is_merged(one, True)) for group in self.groups)
        return 0, 2 * max(layers, default=0) + sum(map(whole_bytes, outer)) + max(merges, default=0)

    def release(self) -> None:
        """Free all buffers."""
        self.spare.clear()
        self.spare_bytes = 0
        super().release()


def kind_of_memory(param: nn.Parameter) -> tuple:
    """A key that is equal for parameters that may reuse each other's buffers."""
    return param.ds_numel, param.ds_tensor.ds_numel, param.ds_tensor.dtype
