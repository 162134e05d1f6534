"""What a device would run, seen on a machine without one: launches, waits of the host, and CUDA graphs.

torch's operations are seen by a dispatch mode, Triton's kernels where the interpreter starts them.
"""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

aten = torch.ops.aten
# Operations for which the host waits: it reads a number, or a shape depends on one.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
# Operations that only allocate.
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


def waits(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the host waits for the device in this operation."""
    by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return func in WAITS or by_mask


def launches(func: torch._ops.OpOverload) -> bool:
    """Whether an operation launches work: it is neither a view nor an allocation."""
    return not func.is_view and func not in ALLOCATIONS and func is not aten.detach.default


class DeviceOps(TorchDispatchMode):
    """While it is on, `seen` gets the name of each launch, and `waits` those for which the host waits."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operation(func, args, kwargs or {}, result)
        return result

    def operation(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object) -> None:
        """An operation of torch has run."""
        if waits(func, args):
            self.waits.append(str(func))
        elif launches(func):
            self.seen.append(str(func))

    def kernel(self, executor: GridExecutor, args: tuple, kwargs: dict) -> None:
        """A Triton kernel has run."""
        self.seen.append(executor.fn.__name__)

    @contextmanager
    def on(self, monkeypatch: pytest.MonkeyPatch):
        """Inside the block all operations and kernels are seen."""
        own = GridExecutor.__call__

        def run(executor: GridExecutor, *args, **kwargs):
            with _disable_current_modes():
                own(executor, *args, **kwargs)
            self.kernel(executor, args, kwargs)

        with monkeypatch.context() as patch, self:
            patch.setattr(GridExecutor, "__call__", run)
            yield self


class Recording(DeviceOps):
    """Records operations and kernels with the tensors that they read and wrote. Raises where the host would wait."""

    def __init__(self):
        super().__init__()
        self.again: list[Callable[[], None]] = []

    def operation(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object) -> None:
        if waits(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func.is_view or func in ALLOCATIONS:
            return
        outputs = [] if func._schema.is_mutable else [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]

        def again() -> None:
            new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for held, value in zip(outputs, new, strict=False):
                held.copy_(value)

        self.again.append(again)

    def kernel(self, executor: GridExecutor, args: tuple, kwargs: dict) -> None:
        self.again.append(lambda: executor(*args, **kwargs))


class RecordedCapture:
    """Stands in for CUDA's capture: a replay runs the recorded operations on the recorded tensors, and no Python code
    of the step. What the step read on the host keeps the value that it had in the capture.

    captured: how many functions were captured.  replays: how many replays ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch, self.captured, self.replays = monkeypatch, 0, 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # the warm-up
        recording = Recording()
        with recording.on(self.monkeypatch):
            run()
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            with _disable_current_modes(), torch.no_grad():
                for again in recording.again:
                    again()

        return replay
