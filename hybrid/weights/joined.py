"""Joined buffers: tensors that a decoder reads as one matrix (q, k, v; gate, up) lie in one piece of memory."""

from collections.abc import Callable, Iterable, Sequence

import torch

from hybrid.models.spec import JOINED, DecoderLayout, ParamRef
from hybrid.runtime.huge_pages import request_huge_pages


class JoinedBuffers:
    """Memory in which the tensors of each set of ParamRefs are concatenated along dimension 0; allocated on first use.

    sets: refs of matrices, or of biases, in the order in which a decoder reads them. Each set has two buffers: one for
    base weights and one for merged weights.
    """

    def __init__(self, sets: Iterable[tuple[ParamRef, ...]] = ()):
        self.sets = {ref: refs for refs in sets for ref in refs}
        self.parts: dict[tuple[bool, ParamRef], torch.Tensor] = {}

    def part(
        self, ref: ParamRef, merged: bool, blank: Callable[[ParamRef], torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """Return the view of the joined buffer that belongs to `ref`.  [rows, ...]

        merged: in the buffer of merged weights.  blank: returns a tensor with the shape and dtype of a ref's part.
        """
        if (merged, ref) not in self.parts:
            refs = self.sets[ref]
            parts = empty_rows([blank(member) for member in refs], device)
            self.parts |= {(merged, member): part for member, part in zip(refs, parts, strict=True)}
        return self.parts[merged, ref]

    def drop(self, refs: Iterable[ParamRef]) -> None:
        """Free the base weights' buffer of a set."""
        for ref in refs:
            self.parts.pop((False, ref), None)

    def release(self, only_merged: bool = False) -> None:
        """Free all buffers, or only those of merged weights."""
        self.parts = {key: part for key, part in self.parts.items() if only_merged and not key[0]}


def empty_rows(blanks: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return views of one new uninitialized tensor, shaped like `blanks`, concatenated along dimension 0."""
    rows = [len(blank) for blank in blanks]
    whole = torch.empty(sum(rows), *blanks[0].shape[1:], dtype=blanks[0].dtype, device=device)
    return request_huge_pages(whole).split(rows)


def joined_view(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of `pieces` as one tensor, concatenated along dimension 0; None if they are not adjacent in
    memory."""
    first = pieces[0]
    end = first.storage_offset()
    for piece in pieces:
        if (
            piece.untyped_storage()._cdata != first.untyped_storage()._cdata
            or piece.dtype != first.dtype
            or piece.stride() != first.stride()
            or piece.shape[1:] != first.shape[1:]
            or piece.storage_offset() != end
        ):
            return None
        end += len(piece) * piece.stride(0)
    shape = (sum(map(len, pieces)), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def joined_refs(layout: DecoderLayout) -> list[tuple[ParamRef, ...]]:
    """Return the sets of ParamRefs, in every layer, that a decoder reads as one matrix and that are complete
    parameters."""
    sets = []
    for layer in layout.layers:
        for roles in JOINED.values():
            for kind in ("weight", "bias"):
                present = [role for role in roles if f"{role}.weight" in layer or role == roles[0]]
                refs = tuple(layer.get(f"{role}.{kind}") for role in present)
                if all(ref is not None and ref.select is None for ref in refs):
                    sets.append(refs)
    return sets
