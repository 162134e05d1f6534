"""Streaming: weights are gathered only while the segment (consecutive parts) of the decoder that reads them runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from hybrid.runtime.profiling import Phase
from hybrid.weights.gather import AsyncAllGather, gathered, is_partitioned, whole_bytes
from hybrid.weights.lora import AdaptedModule
from hybrid.weights.model_weights import ModelWeights
from hybrid.weights.snapshot import Snapshot

Segment = Sequence[nn.Parameter | AdaptedModule]  # the parameters and adapted modules that a segment reads


class WeightStream:
    """Gathers a model's weights for a decoder that runs segment by segment, and prefetches the next segment's.

    snapshot: holds what is gathered now. Memory is reused for parameters of the same size, and shared by ranks on the
        CPUs of one host.
    phase: times the gathers.  count: called with the number of bytes gathered.
    """

    def __init__(self, weights: ModelWeights, phase: Phase, count: Callable[[int], None]):
        self.weights, self.phase, self.count = weights, phase, count
        self.snapshot = Snapshot(replace(weights, groups=()))

    def gathered_in_order(self, segments: Sequence[Segment], adapters: bool) -> Iterator[None]:
        """Yield once for each segment, while its weights are gathered (and merged, with `adapters`).

        A collective: every rank must pass the same segments, and iterate to the end.
        """
        snapshot = self.snapshot
        if self.snapshot.host:
            self.snapshot.host.barrier()  # no rank still reads the last pass's weights
        reads = [
            dict.fromkeys(param for weight in segment for param in self._params(weight, adapters))
            for segment in segments
        ]
        last = {param: number for number, params in enumerate(reads) for param in params}  # last segment that reads it
        fetch = self._fetch(reads[0])
        for number, segment in enumerate(segments):
            with self.phase("gather"):
                fetch.wait()
            adapted = [weight for weight in segment if isinstance(weight, AdaptedModule)]
            merged = [layer for layer in adapted if self.weights.is_merged(layer, adapters)]
            if merged:  # entering a phase synchronizes with the device
                self._merge(merged)
            if number + 1 < len(segments):
                fetch = self._fetch(reads[number + 1])
            snapshot.peak_bytes = max(snapshot.peak_bytes, snapshot.nbytes())
            yield
            snapshot.drop([param for param in reads[number] if param in snapshot.parts and last[param] == number])
            if merged:
                snapshot.drop_merged()

    def _params(self, weight: nn.Parameter | AdaptedModule, adapters: bool) -> list[nn.Parameter]:
        """Return the parameters to prefetch: weights, and the factors of unmerged adapters. Factors to be merged are
        gathered when they are merged."""
        if not isinstance(weight, AdaptedModule):
            return [weight]
        factors = weight.adapter_params() if self.weights.is_unmerged(weight, adapters) else []
        return [*weight.sources.values(), *factors]

    def _fetch(self, params: Iterable[nn.Parameter]) -> AsyncAllGather:
        """Start gathering those of `params` that are not gathered yet."""
        absent = [param for param in params if is_partitioned(param) and param not in self.snapshot.parts]
        host = self.snapshot.host
        fetch = AsyncAllGather({param: self.snapshot.add_whole(param, host) for param in absent}, host)
        self.count(fetch.nbytes)
        return fetch

    def _merge(self, adapted: list[AdaptedModule]) -> None:
        factors = [param for layer in adapted for param in layer.adapter_params()]
        with self.phase("merge"), torch.no_grad(), gathered(factors) as gathered_bytes:
            self.count(gathered_bytes)
            for layer in adapted:
                self.snapshot.keep_adapters(layer)

    def planned(self) -> tuple[int, int]:
        """Return planned bytes: 0 kept, and the peak: two layers, everything outside the layers, and the merged weights
        of one of these parts."""
        structure = self.weights.info.structure
        layers = [sum(whole_bytes(param) for param in part.module.parameters()) for part in structure.layers]
        outer = {param for part in structure.outer for param in part.module.parameters()}
        merges = [layer for layer in self.weights.adapted if self.weights.is_merged(layer, True)]
        merged = [merged_bytes(part.module, merges) for part in (*structure.outer, *structure.layers)]
        return 0, 2 * max(layers, default=0) + sum(map(whole_bytes, outer)) + max(merged, default=0)


def merged_bytes(part: nn.Module, adapted: Iterable[AdaptedModule]) -> int:
    """Return the bytes of the merged weights inside `part`. Biases are not counted: hardly any adapter changes one."""
    modules = set(part.modules())
    within = [layer for layer in adapted if layer.wrapper in modules or layer.plain in modules]
    return sum(whole_bytes(param) for layer in within for name, param in layer.sources.items() if name != "bias")
