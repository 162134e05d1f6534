"""Recurrent mixers of packed rows: gated delta nets, Kimi delta attention, Mamba 2 and short convolutions.

transformers' mixers (5.23) call the convolution and the scan as functions of their own Python module, with states to
begin with and to end with. While rows are packed, these functions are given each segment's tokens as a row of a batch,
which begins with the states that the segment before it ended with: gradients flow through those as through any tensor.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hybrid.training.packing import PackedRows, Segment
from hybrid.weights.module_dicts import Replacement, replaced

CHUNK_BITS = 6  # scans compute chunks of 64 tokens and more: shorter segments cost as much

Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]


class ScanBatch(NamedTuple):
    """Segments that are scanned as one batch.

    segments: indices in `PackedRows.segments`.
    parents: of the segment before each of them; empty: they begin rows.
    tokens: int64 [segments, longest], packed tokens; after a shorter segment's end its last one, which nothing reads.
    kept: int64 [n], the segments' tokens in `tokens`, flattened.
    is_continued: whether segments follow each of them.
    """

    segments: list[int]
    parents: list[int]
    tokens: torch.Tensor
    kept: torch.Tensor
    is_continued: bool


class PackedMixers:
    """The convolutions and scans of one packing.

    Args:
        packed_rows: the packing.
    """

    def __init__(self, packed_rows: PackedRows):
        self.packed_rows = packed_rows
        self._contexts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convolved(self, convolve: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int) -> torch.Tensor:
        """Return a causal convolution over each row's tokens.  x: [1, channels, tokens].

        convolve: computes it over one sequence, [1, channels, n].  width: of the convolution, in tokens.
        """
        tokens, kept = self._with_contexts(width - 1)
        return convolve(F.pad(x, (0, 1)).index_select(2, tokens)).index_select(2, kept)

    def scanned(self, scan: Scan, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a scan's output over each row's tokens, [1, tokens, ...].

        Args:
            scan: of (inputs [rows, n, ...], first states [rows, ...] or None, whether the last states are needed):
                returns the output, [rows, n, ...], and the last states.
            inputs: what the scan has for each token, [1, tokens, ...].
        """
        outputs, states = [], dict[int, torch.Tensor]()
        for batch in self._batches:
            size, tokens = batch.tokens.shape, batch.tokens.flatten()
            parts = [value[0].index_select(0, tokens).unflatten(0, size) for value in inputs]
            first = torch.cat([states[parent] for parent in batch.parents]) if batch.parents else None
            output, last = scan(parts, first, batch.is_continued)
            if batch.is_continued:
                assert last is not None, "the scan was asked for it"
                states.update(zip(batch.segments, last.split(1), strict=True))
            outputs.append(output.flatten(0, 1).index_select(0, batch.kept))
        return torch.cat(outputs).index_select(0, self._order)[None]

    def _with_contexts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed tokens, int64 [n], with the `count` tokens before each segment in its rows in front of it,
        the number of packed tokens where rows begin; and the places of the segments' own tokens among these."""
        if count not in self._contexts:
            rows, tails = self.packed_rows, list[list[int]]()
            tokens, kept = list[torch.Tensor](), list[torch.Tensor]()
            place = 0
            for segment, parent in zip(rows.segments, self._parents, strict=True):
                before = [rows.num_tokens] * count if parent is None else tails[parent]
                tails.append([*before, *range(max(segment.start, segment.stop - count), segment.stop)][-count:])
                tokens += [torch.tensor(before, dtype=torch.int64), torch.arange(segment.start, segment.stop)]
                kept.append(torch.arange(segment.stop - segment.start) + place + count)
                place += count + segment.stop - segment.start
            joined = torch.cat(tokens).to(rows.device), torch.cat(kept).to(rows.device)
            self._contexts[count] = joined
        return self._contexts[count]

    @cached_property
    def _parents(self) -> list[int | None]:
        """For each segment, the one that its rows have before it; None: rows begin with it."""
        parents, path = list[int | None](), list[int]()
        segments = self.packed_rows.segments
        for index, segment in enumerate(segments):
            while path and segments[path[-1]].subtree_stop <= segment.start:
                path.pop()
            parents.append(path[-1] if path else None)
            path.append(index)
        return parents

    @cached_property
    def _batches(self) -> list[ScanBatch]:
        """Batches of all segments, each after those of the segments before its own.

        Segments that others continue are batched with those of equal length: Mamba 2 decays states at tokens after
        the end too. The others are batched with those of at least half their length.
        """
        segments, parents = self.packed_rows.segments, self._parents
        groups, depths = dict[tuple[int, bool, int], list[int]](), list[int]()
        for index, segment in enumerate(segments):
            parent, length = parents[index], segment.stop - segment.start
            depths.append(0 if parent is None else depths[parent] + 1)
            is_continued = segment.subtree_stop > segment.stop
            size = length if is_continued else max((length - 1).bit_length(), CHUNK_BITS)
            groups.setdefault((depths[-1], is_continued, size), []).append(index)
        return [self._batch(groups[key], key[1]) for key in sorted(groups)]

    def _batch(self, indices: list[int], is_continued: bool) -> ScanBatch:
        spans: list[Segment] = [self.packed_rows.segments[index] for index in indices]
        start, length = torch.tensor([(span.start, span.stop - span.start) for span in spans]).T[..., None]
        steps = torch.arange(int(length.max()))
        tokens = start + torch.minimum(steps, length - 1)
        kept = (steps < length).flatten().nonzero()[:, 0]
        parents = [parent for index in indices if (parent := self._parents[index]) is not None]
        device = self.packed_rows.device
        return ScanBatch(indices, parents, tokens.to(device), kept.to(device), is_continued)

    @cached_property
    def _order(self) -> torch.Tensor:
        """int64 [tokens], the place of each packed token among the batches' own tokens."""
        return torch.cat([batch.tokens.flatten()[batch.kept] for batch in self._batches]).argsort()


class MixerFunction:
    """Stands in for a function of recurrent mixers while rows are packed.

    Args:
        own: transformers' function.
        replacement: has the packing of the forward that runs.
    """

    def __init__(self, own: Callable, replacement: "MixerReplacement"):
        self.own, self.replacement = own, replacement

    def mixers_of(self, x: torch.Tensor, tokens: int) -> PackedMixers | None:
        """Return the packing of a call with x [rows, ...]; None if it is of other tokens."""
        mixers = self.replacement.mixers
        assert mixers is not None, "mixers call it inside `over`"
        return mixers if len(x) == 1 and tokens == mixers.packed_rows.num_tokens else None


class Convolution(MixerFunction):
    """A causal convolution of each channel."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(self, hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the convolution, [1, channels, tokens].  hidden_states: the same shape.  weight: [channels, width]."""
        mixers = self.mixers_of(hidden_states, hidden_states.shape[-1])

        def convolve(x: torch.Tensor) -> torch.Tensor:
            return self.own(x, weight, *args, **kwargs)

        if mixers is None:
            return convolve(hidden_states)
        return mixers.convolved(convolve, hidden_states, weight.shape[-1])


class DeltaRule(MixerFunction):
    """The gated delta rule, and Kimi's."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, [1, tokens, heads, dim], and the state after the last token, which packed rows have not:
        None.  The arguments are those of transformers' function."""
        mixers = self.mixers_of(query, query.shape[1])

        def scan(
            inputs: Sequence[torch.Tensor], first: torch.Tensor | None, ends: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value, g, beta = inputs
            states = {"initial_state": first, "output_final_state": ends}
            return self.own(query, key, value, g=g, beta=beta, **states, **kwargs)

        inputs = query, key, value, g, beta
        if mixers is None:
            return scan(inputs, initial_state, output_final_state)
        return mixers.scanned(scan, inputs), None


class Mamba2Scan(MixerFunction):
    """Mamba 2's selective scan."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # the names of transformers' arguments
        B: torch.Tensor,
        C: torch.Tensor,
        *args: Any,
        initial_states: torch.Tensor | None = None,
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the output, [1, tokens, heads, dim].  The arguments are those of transformers' function."""
        mixers = self.mixers_of(hidden_states, hidden_states.shape[1])

        def scan(
            inputs: Sequence[torch.Tensor], first: torch.Tensor | None, ends: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            x, dt, b, c = inputs
            states = {"initial_states": first, "return_final_states": ends}
            result = self.own(x, dt, A, b, c, *args, **states, **kwargs)
            return result if ends else (result, None)

        inputs = hidden_states, dt, B, C
        if mixers is None:
            output, states = scan(inputs, initial_states, return_final_states)
            return (output, states) if return_final_states else output
        return mixers.scanned(scan, inputs)


class FusedMamba2(MixerFunction):
    """Mamba 2's projection, convolution and scan in one, which a GPU's kernels have for forwards without states."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Return None, as transformers' function does without these kernels: the mixer calls the parts."""
        return


FUNCTIONS: Mapping[str, type[MixerFunction]] = {
    "causal_conv1d_fn": Convolution,
    "torch_chunk_gated_delta_rule": DeltaRule,
    "chunk_kimi_delta_attention": DeltaRule,
    "mamba2_chunk_scan": Mamba2Scan,
    "mamba2_split_conv1d_scan_combined": FusedMamba2,
}


class MixerReplacement:
    """The forwards of one model's recurrent mixers while rows are packed: their own code, which calls packed functions.

    They are set on the mixers: transformers' Python modules, which other models share, stay as they are. The functions
    are the same objects in each forward, over the packing of the one that runs: layers are compiled for a function, and
    would be compiled again for others. They are called uncompiled.
    """

    def __init__(self) -> None:
        self.mixers: PackedMixers | None = None  # of the forward that runs
        self.packed: dict[FunctionType, FunctionType] = {}  # forwards, by the mixers' own

    def forwards(self, modules: Iterable[nn.Module]) -> list[Replacement]:
        """Return the forwards of those modules that are recurrent mixers, for `over`."""
        found: list[Replacement] = []
        for module in modules:
            own = inspect.unwrap(type(module).forward)  # without accelerate's hooks for offloaded weights
            if not isinstance(own, FunctionType) or "forward" in vars(module):
                continue
            if names := FUNCTIONS.keys() & set(own.__code__.co_names):
                found.append((vars(module), "forward", MethodType(self._packed(own, names), module)))
        return found

    def _packed(self, own: FunctionType, names: Iterable[str]) -> FunctionType:
        """Return a forward of mixers in which these names of functions stand for packed ones."""
        if own not in self.packed:
            functions = {name: FUNCTIONS[name](own.__globals__[name], self) for name in names}
            space = {**own.__globals__, **functions}
            packed = FunctionType(own.__code__, space, own.__name__, own.__defaults__, own.__closure__)
            packed.__kwdefaults__ = own.__kwdefaults__
            self.packed[own] = packed
        return self.packed[own]

    @contextmanager
    def over(self, forwards: Sequence[Replacement], packed_rows: PackedRows) -> Iterator[None]:
        """Inside the block mixers compute the packed rows; afterwards rows as before.

        forwards: as `forwards` returns them.
        """
        outer, self.mixers = self.mixers, PackedMixers(packed_rows)
        try:
            with replaced(forwards):
                yield
        finally:
            self.mixers = outer
