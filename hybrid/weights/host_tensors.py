"""Moves tensors to host memory and back, in place: the tensor objects stay, and share memory as before.

It moves whole storages, each with all tensors over it, so flat buffers and their views stay one piece of memory,
whoever made them. While they are on the host the tensors can be read and written, and keep their version counters.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# torch 2.10 to 2.13: how many tensors and storage objects refer to a storage.
use_count = torch._C._storage_Use_Count


@dataclass(frozen=True)
class HostStorage:
    """A storage in host memory, and the tensors over it.  is_scratch: its content is not kept."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    is_scratch: bool

    def tensors_there(self) -> list[torch.Tensor]:
        """Return the tensors that still use this storage."""
        address = self.storage.data_ptr()
        return [tensor for tensor in self.tensors if tensor.untyped_storage().data_ptr() == address]


class HostTensors:
    """Tensors of a device that are in host memory for a while.  device: where they belong.

    Host memory is pageable: torch rounds each pinned block up to a power of two and never gives it back, which could
    double what the states of a large model take on the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.moved: list[Any] = []

    def nbytes(self) -> int:
        """Return the bytes whose content is in host memory."""
        return sum(moved.storage.nbytes() for moved in self.moved if not moved.is_scratch)

    def move(self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> int:
        """Move the memory of `tensors` on the device to the host. Returns the bytes that stay on the device, because
        tensors that are not among `tensors` share them: those would keep the old memory.

        scratch: those whose content is not kept: pages of host memory that nobody writes take none.
        If it fails, for lack of host memory for example, all tensors are on the device again.
        """
        not_kept = {tensor.untyped_storage().data_ptr() for tensor in scratch}
        shared = 0
        try:
            for group in by_storage(tensors, self.device):
                if is_shared(group):
                    shared += group[0].untyped_storage().nbytes()
                else:
                    self._move_storage(group, group[0].untyped_storage().data_ptr() in not_kept)
        except BaseException:
            self.move_back()
            raise
        return shared

    def _move_storage(self, tensors: list[torch.Tensor], is_scratch: bool) -> None:
        host = moved_storage(tensors[0].untyped_storage(), torch.device("cpu"), is_scratch)
        self.moved.append(HostStorage(host, tensors, is_scratch))
        put_over(host, tensors)

    def move_back(self) -> None:
        """Move the tensors to the device. If it fails, for lack of memory for example, call it again: what is on the
        device stays there, and the rest is still in host memory."""
        while self.moved:
            last = self.moved[-1]
            if tensors := last.tensors_there():
                put_over(moved_storage(last.storage, self.device, last.is_scratch), tensors)
            self.moved.pop()


def moved_storage(storage: torch.UntypedStorage, device: torch.device, is_scratch: bool) -> torch.UntypedStorage:
    """Return a storage of the same size on `device`, with the same content unless that is not kept."""
    moved = torch.UntypedStorage(storage.nbytes(), device=device)
    return moved if is_scratch else moved.copy_(storage, non_blocking=False)


def put_over(storage: torch.UntypedStorage, tensors: Iterable[torch.Tensor]) -> None:
    """Let `tensors` be the same views of `storage` as of the storage that they have.

    Their gradients' hooks stay: DeepSpeed's are those of the parameter (`register_post_accumulate_grad_hook`).
    """
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def by_storage(tensors: Iterable[torch.Tensor], device: torch.device) -> list[list[torch.Tensor]]:
    """Return the tensors that have memory on `device`, each once, grouped by their storages."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        has_memory = tensor.layout == torch.strided and tensor.device == device
        if has_memory and tensor.untyped_storage().nbytes() > 0:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return list(groups.values())


def is_shared(tensors: list[torch.Tensor]) -> bool:
    """Whether other tensors are over the storage of `tensors` too."""
    return use_count(tensors[0].untyped_storage()._cdata) > len(tensors) + REFERENCES_OF_A_STORAGE_OBJECT


def references_of_a_storage_object() -> int:
    """Return how much Python's object for a storage adds to its `use_count`."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return use_count(storage._cdata) - 1


REFERENCES_OF_A_STORAGE_OBJECT = references_of_a_storage_object()


def tensors_in(*roots: Any) -> Iterator[torch.Tensor]:
    """Every tensor that `roots` refer to, each once: a module's parameters and buffers, and all that optimizers,
    objects of DeepSpeed's classes, containers, and attributes of tensors (their partitions) hold."""
    waiting, seen = deque(roots), set()
    while waiting:
        holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if isinstance(holder, torch.Tensor):
            yield holder
        waiting.extend(held_by(holder))


def held_by(holder: Any) -> Iterable[Any]:
    """Return the objects inside another one that may be tensors, or hold tensors."""
    if isinstance(holder, torch.Tensor):
        gradient = holder.grad if holder.is_leaf else None
        # A view keeps the tensor that it was made from, also where nothing else does (gradients of ZeRO 1 and 2).
        return [*vars(holder).values(), gradient, holder._base]
    if isinstance(holder, nn.Module):
        return [*holder.parameters(), *holder.buffers()]
    if isinstance(holder, dict):
        return [*holder.keys(), *holder.values()]
    if isinstance(holder, list | tuple | set | frozenset | deque):
        return list(holder)
    is_known = isinstance(holder, torch.optim.Optimizer) or type(holder).__module__.startswith("deepspeed.")
    return list(getattr(holder, "__dict__", {}).values()) if is_known and not isinstance(holder, type) else ()
