"""Recurrent mixers of packed rows: gated delta nets, Kimi delta attention, Mamba 2 and short convolutions.

transformers' mixers (5.23) call the convolution and the scan as functions of their own Python module, with states to
begin with and to end with. While rows are packed, these functions are given each segment's tokens as a row of a batch,
which begins with the states that the segment before it ended with: gradients flow through those as through any tensor.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hybrid.training.packing import PackedRows
from hybrid.weights.module_dicts import Replacement, replaced

Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]


def convolved(
    packed_rows: PackedRows, convolve: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int
) -> torch.Tensor:
    """Return a causal convolution over each row's tokens.  x: [1, channels, tokens].

    convolve: computes it over one sequence, [1, channels, n].  width: of the convolution, in tokens.
    """
    tokens, kept = packed_rows.with_contexts(width - 1)
    return convolve(F.pad(x, (0, 1)).index_select(2, tokens)).index_select(2, kept)


def scanned(packed_rows: PackedRows, scan: Scan, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scan's output over each row's tokens, [1, tokens, ...].

    Args:
        packed_rows: the packing.
        scan: of (inputs [rows, n, ...], first states [rows, ...] or None, whether the last states are needed): returns
            the output, [rows, n, ...], and the last states.
        inputs: what the scan has for each token, [1, tokens, ...].
    """
    outputs, states = [], dict[int, torch.Tensor]()
    for batch in packed_rows.scan_batches:
        size, tokens = batch.tokens.shape, batch.tokens.flatten()
        parts = [value[0].index_select(0, tokens).unflatten(0, size) for value in inputs]
        first = torch.cat([states[parent] for parent in batch.parents]) if batch.parents else None
        output, last = scan(parts, first, batch.is_continued)
        if batch.is_continued:
            assert last is not None, "the scan was asked for it"
            states.update(zip(batch.segments, last.split(1), strict=True))
        outputs.append(output.flatten(0, 1).index_select(0, batch.kept))
    return torch.cat(outputs).index_select(0, packed_rows.scan_order)[None]


class MixerFunction:
    """Stands in for a function of recurrent mixers while rows are packed.

    Args:
        own: transformers' function.
        replacement: has the packing of the forward that runs.
    """

    def __init__(self, own: Callable, replacement: "MixerReplacement"):
        self.own, self.replacement = own, replacement

    def packing(self, x: torch.Tensor, tokens: int) -> PackedRows | None:
        """Return the packing of a call with x [rows, ...]; None if it is of other tokens."""
        packed_rows = self.replacement.packed_rows
        assert packed_rows is not None, "mixers call it inside `over`"
        return packed_rows if len(x) == 1 and tokens == packed_rows.num_tokens else None


class Convolution(MixerFunction):
    """A causal convolution of each channel."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(self, hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the convolution, [1, channels, tokens].  hidden_states: the same shape.  weight: [channels, width]."""
        packed_rows = self.packing(hidden_states, hidden_states.shape[-1])

        def convolve(x: torch.Tensor) -> torch.Tensor:
            return self.own(x, weight, *args, **kwargs)

        if packed_rows is None:
            return convolve(hidden_states)
        return convolved(packed_rows, convolve, hidden_states, weight.shape[-1])


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
        packed_rows = self.packing(query, query.shape[1])

        def scan(
            inputs: Sequence[torch.Tensor], first: torch.Tensor | None, ends: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value, g, beta = inputs
            states = {"initial_state": first, "output_final_state": ends}
            return self.own(query, key, value, g=g, beta=beta, **states, **kwargs)

        inputs = query, key, value, g, beta
        if packed_rows is None:
            return scan(inputs, initial_state, output_final_state)
        return scanned(packed_rows, scan, inputs), None


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
        packed_rows = self.packing(hidden_states, hidden_states.shape[1])

        def scan(
            inputs: Sequence[torch.Tensor], first: torch.Tensor | None, ends: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            x, dt, b, c = inputs
            states = {"initial_states": first, "return_final_states": ends}
            result = self.own(x, dt, A, b, c, *args, **states, **kwargs)
            return result if ends else (result, None)

        inputs = hidden_states, dt, B, C
        if packed_rows is None:
            output, states = scan(inputs, initial_states, return_final_states)
            return (output, states) if return_final_states else output
        return scanned(packed_rows, scan, inputs)


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
        self.packed_rows: PackedRows | None = None  # of the forward that runs
        self.packed: dict[FunctionType, FunctionType] = {}  # forwards, by the mixers' own

    def forwards(self, modules: Iterable[nn.Module]) -> list[Replacement]:
        """Return the forwards of those modules that are recurrent mixers, for `over`."""
        found: list[Replacement] = []
        for module in modules:
            own = inspect.unwrap(type(module).forward)  # without accelerate's hooks for offloaded weights
            if not isinstance(own, FunctionType) or "forward" in vars(module):
                continue
            # The names of attributes are among those of the code (transformers before 5.23 called some of the mixer).
            if names := FUNCTIONS.keys() & own.__globals__.keys() & set(own.__code__.co_names):
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
        outer, self.packed_rows = self.packed_rows, packed_rows
        try:
            with replaced(forwards):
                yield
        finally:
            self.packed_rows = outer
