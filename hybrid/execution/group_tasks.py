"""Tasks that the ranks of a group run together: exchanged once, then run by every rank on the rows of all of them."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from io import BytesIO
from typing import Any

import torch

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.runtime.errors import SharedError, UserCodeError
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import InferenceGroup, all_gather_objects
from hybrid.runtime.waiting import waiting_to


class Task(ABC):
    """Decoder work that every rank of the group can run: tensors and settings, no user callbacks."""

    @property
    def key(self) -> Hashable:
        """Tasks of several ranks with equal keys run as one; None: the task runs by itself."""
        return None

    @abstractmethod
    def run(self, decoder: AnyDecoder | None, state: Any, is_local: bool = True) -> Any:
        """Return the result.  state: of the rank that runs the task.  is_local: whether that rank asked for it."""

    def merged(self, tasks: list["Task"]) -> "Task":
        """Return tasks with the same key, this one among them, as one task, in the order of `tasks`."""
        raise NotImplementedError

    def part(self, result: Any, tasks: list["Task"], index: int) -> Any:
        """Return the result of tasks[index], from that of the merged task."""
        return result


class GroupTasks:
    """Runs the tasks of all ranks of a group on all of them, in the same order: their decoder is a collective."""

    def __init__(self, group: InferenceGroup, device: torch.device):
        self.group, self.device = group, device
        self.is_pending = False  # other ranks wait for this rank's work of the current request

    @waiting_to("exchange prompts")
    def run_tasks(self, decoder: AnyDecoder, local: Task | None, state: Any) -> Any:
        """Return the result of this rank's work, None without any. A collective.

        Raises what this rank's work raised, or a SharedError of any rank's, once all ranks' work is done;
        RankFailedError or LostRankError for an error that the ranks cannot go on after.
        """
        self.is_pending = False
        messages = all_gather_objects(packed_task((local, state.rank_state(decoder))), self.group.group)
        tasks, states = zip(*(unpacked_task(message, self.device) for message in messages), strict=True)
        state.agree(states)
        try:
            with INTERRUPTS.together():
                result, failure = run_tasks(tasks, local, self.group.index, decoder, state)
        except BaseException:
            self.group.fail()
            raise
        if failure is not None:
            raise failure
        return result


def run_tasks(
    tasks: Sequence[Task | None], local: Task | None, index: int, decoder: AnyDecoder | None, state: Any
) -> tuple[Any, BaseException | None]:
    """Run the tasks of all ranks. Return the result of `local`, the task of rank `index`, and the error of its user
    code."""
    by_rank = {rank: task for rank, task in enumerate(tasks) if task is not None}
    if local is not None:
        by_rank[index] = local  # which has what cannot be sent
    batches: dict[Hashable, list[int]] = {}  # ranks whose tasks run as one, in the order of the first of each
    for rank, task in by_rank.items():
        batches.setdefault((rank,) if task.key is None else task.key, []).append(rank)
    result: Any = None
    failure: BaseException | None = None
    for ranks in batches.values():
        parts, is_local = [by_rank[rank] for rank in ranks], index in ranks
        task = parts[0] if len(parts) == 1 else parts[0].merged(parts)
        try:
            output = task.run(decoder, state, is_local)
        except UserCodeError as error:  # in user code, on this rank alone
            failure = error.__cause__
            continue
        except SharedError as error:
            failure = error
            continue
        if is_local:
            result = task.part(output, parts, ranks.index(index)) if len(parts) > 1 else output
    return result, failure


def packed_task(value: Any) -> bytes:
    """Return an object with tensors as bytes."""
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked_task(message: bytes, device: torch.device) -> Any:
    """Return the object of `packed_task`; tensors that were not on the CPU are on `device`."""
    place = lambda storage, where: storage if where == "cpu" else storage.to(device)  # noqa: E731
    return torch.load(BytesIO(message), map_location=place, weights_only=False)
