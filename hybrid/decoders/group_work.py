"""Work that the ranks of a group do together: exchanged once, then run by every rank on the rows of all of them."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from io import BytesIO
from typing import Any

import torch

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.parallel import InferenceGroup, all_gather_objects


class Work(ABC):
    """What a rank wants of the decoder, in a form that other ranks can run too: inputs without user code."""

    @property
    def key(self) -> Hashable:
        """Work of several ranks with equal keys runs as one; None: it runs by itself."""
        return None

    @abstractmethod
    def run(self, decoder: AnyDecoder, resources: Any, is_own: bool = True) -> Any:
        """The result.  resources: of the rank that runs it.  is_own: whether that rank asked for it."""

    def joined(self, works: list["Work"]) -> "Work":
        """This and other work with the same key as one, in the order of `works`."""
        raise NotImplementedError

    def part(self, result: Any, works: list["Work"], index: int) -> Any:
        """The result of works[index], from that of the joined work."""
        return result


class GroupWork:
    """Runs the work of all ranks of a group on all of them, in the same order: their decoder is a collective."""

    def __init__(self, group: InferenceGroup, device: torch.device):
        self.group, self.device = group, device
        self.is_pending = False  # other ranks wait for this rank's work of the current request

    def run(self, decoder: AnyDecoder, own: Work | None, resources: Any) -> Any:
        """The result of this rank's work, None without any. A collective.

        Raises what this rank's work raised, once all ranks' work is done; RankFailedError or LostRankError for an error
        that the ranks cannot go on after.
        """
        self.is_pending = False
        messages = all_gather_objects(packed_work((own, resources.shared(decoder))), self.group.group)
        works, shared = zip(*(unpacked_work(message, self.device) for message in messages), strict=True)
        resources.agree(shared)
        try:
            result, failure = run_all(works, own, self.group.index, decoder, resources)
        except BaseException:
            self.group.fail()
            raise
        if failure is not None:
            raise failure
        return result


def run_all(
    works: Sequence[Work | None], own: Work | None, index: int, decoder: AnyDecoder | None, resources: Any
) -> tuple[Any, BaseException | None]:
    """Run the work of all ranks; gives the result of `own`, which is that of rank `index`, and the error of its user
    code."""
    result = failure = None
    for indices in batches_of(works):
        # This rank's own work has what cannot be sent.
        parts, is_own = [own if rank == index else works[rank] for rank in indices], index in indices
        work = parts[0] if len(parts) == 1 else parts[0].joined(parts)
        try:
            output = work.run(decoder, resources, is_own)
        except OwnError as error:  # in user code, on this rank alone
            failure = error.__cause__
            continue
        if is_own:
            result = work.part(output, parts, indices.index(index)) if len(parts) > 1 else output
    return result, failure


class OwnError(Exception):
    """Raised from an error of user code that only this rank runs; the other ranks know that it has ended."""


def batches_of(works: Sequence[Work | None]) -> list[list[int]]:
    """The indices of works that run as one, in the order of the first of each."""
    batches: dict[Hashable, list[int]] = {}
    for index, work in enumerate(works):
        if work is not None:
            batches.setdefault((index,) if work.key is None else work.key, []).append(index)
    return list(batches.values())


def packed_work(value: Any) -> bytes:
    """An object with tensors as bytes."""
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked_work(message: bytes, device: torch.device) -> Any:
    """The object of `packed_work`; tensors that were not on the CPU are on `device`."""
    place = lambda storage, where: storage if where == "cpu" else storage.to(device)  # noqa: E731
    return torch.load(BytesIO(message), map_location=place, weights_only=False)
