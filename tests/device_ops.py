"""What a device would run, seen on a machine without one: launches, waits of the host, and CUDA graphs.

torch's operations are seen by a dispatch mode, Triton's kernels where the interpreter starts them.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import WeakValueDictionary, finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from hybrid.kernels import cuda_graph
from hybrid.kernels.kv_addresses import LayerKV, kv_addresses

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


def layer_kv(keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
    """One layer's keys and values [blocks, block_size, kv_heads, head_dim], with a table of its own."""
    assert keys.shape == values.shape, f"keys are {tuple(keys.shape)}, values {tuple(values.shape)}"
    return LayerKV(kv_addresses([keys], [values])[0].to(keys.device), keys.dtype, *keys.shape[1:])


def waits(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the host waits for the device in this operation."""
    by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return func in WAITS or by_mask


def launches(func: torch._ops.OpOverload) -> bool:
    """Whether an operation launches work: it is neither a view nor an allocation."""
    views = aten.detach.default, aten._unsafe_view.default
    return not func.is_view and func not in ALLOCATIONS and func not in views


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
    """Records operations and kernels with the tensors that they read and wrote. Raises where the host would wait, and
    where an operation reads host memory, which a replay would read again.

    host: tensors in host memory; those that `torch.tensor` makes are added.
    """

    def __init__(self, host: list[torch.Tensor]):
        super().__init__()
        self.again: list[Callable[[], None]] = []
        self.host, self.invalid = [*host], False

    def operation(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object) -> None:
        if func is aten.lift_fresh.default:
            self.host.append(result)
            return
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.host}
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        reads_host = not memory.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors)
        if waits(func, args) or reads_host:
            self.invalid = True
            reason = "reads host memory" if reads_host else "waits"
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} {reason}")
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


class GraphPools:
    """torch's rule of memory pools: a pool that nothing keeps any more cannot be captured into again. Nor do we capture
    into one whose capture has failed (pytorch#180395).

    graphs: the number of live graphs in each pool that was ever captured into.  failed: pools of failed captures.
    kept: the pools whose `torch.cuda.MemPool` exists.  in_use: the pool that is allocated from; None: the usual memory.
    """

    def __init__(self):
        self.graphs: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.kept: WeakValueDictionary[int, MemoryPool] = WeakValueDictionary()
        self.in_use: int | None = None
        self.handles = 0

    def add(self, pool: int, graph: object) -> None:
        """Begin a capture into a pool. Raises as c10's `create_or_incref_pool` does (torch 2.11 to 2.13)."""
        assert pool not in self.failed, "a capture into this pool has failed"
        if pool in self.graphs and not self.graphs[pool] and pool not in self.kept:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.graphs[pool] += 1
        finalize(graph, self.graphs.subtract, [pool])


class MemoryPool:
    """Stands in for `torch.cuda.MemPool`.  device: where it was made, the only one that it can be used on."""

    def __init__(self, capture: "RecordedCapture"):
        capture.pools.handles += 1
        self.id, self.device = capture.pools.handles, capture.device
        capture.pools.kept[self.id] = self


class RecordedGraph:
    """Stands in for `torch.cuda.CUDAGraph`: a replay runs the operations that were recorded between begin and end."""

    def __init__(self, capture: "RecordedCapture"):
        self.capture, self.recording, self.opened = capture, Recording(capture.host), ExitStack()

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pool = pool
        self.capture.pools.add(pool, self)
        self.opened.enter_context(self.capture.allocating_from(pool))
        self.opened.enter_context(self.recording.on(self.capture.monkeypatch))

    def capture_end(self) -> None:
        self.opened.close()
        if self.recording.invalid:
            self.capture.pools.failed.add(self.pool)
            raise RuntimeError("operation failed due to a previous error during capture")
        self.capture.captured += 1

    def replay(self) -> None:
        self.capture.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for again in self.recording.again:
                again()


class RecordedCapture:
    """The engine's capture over a stand-in for CUDA: a replay runs the recorded operations on the recorded tensors, and
    no Python code of the step. What the step read on the host keeps the value that it had in the capture.

    captured: how many functions were captured.  replays: how many replays ran.  pools: of all graphs.  host: tensors in
    host memory, which no captured operation may read.  device: the current one; streams and pools belong to one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch, self.captured, self.replays = monkeypatch, 0, 0
        self.host: list[torch.Tensor] = []
        self.device = 0
        self.pools, self.capture = GraphPools(), cuda_graph.DeviceCapture()
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda: Mock(device_index=self.device),
            current_device=lambda: self.device,
            current_stream=Mock,
            stream=self.on_stream,
            synchronize=lambda: None,
            MemPool=lambda: MemoryPool(self),
            use_mem_pool=lambda pool: self.allocating_from(pool.id),
            CUDAGraph=lambda: RecordedGraph(self),
        )

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(cuda_graph, "torch", SimpleNamespace(cuda=self.cuda))
            patch.setattr(cuda_graph, "WARM_UPS", 1)
            return self.capture(run)

    @contextmanager
    def on_stream(self, stream: Mock):
        """As `torch.cuda.stream`, which also selects the stream's device; ours is always on the current one."""
        assert stream.device_index == self.device, "a stream of another device"
        yield

    @contextmanager
    def allocating_from(self, pool: int):
        """Inside the block memory comes from the pool."""
        assert pool not in self.pools.kept or self.pools.kept[pool].device == self.device, "a pool of another device"
        assert self.pools.in_use is None, "already recording to mempool_id"
        self.pools.in_use = pool
        try:
            yield
        finally:
            self.pools.in_use = None
