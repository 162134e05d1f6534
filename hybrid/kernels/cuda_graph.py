"""CUDA graphs: functions over tensors at fixed addresses, by key; a module's forward for each shape of its inputs.

Capture and replay have not run on a device yet; the code around them is tested with a substitute for CUDA's capture.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries allocate workspaces
# How torch, CUDA, cuBLAS and Triton name an error of the capture itself, or of memory. Not "illegal memory access".
CAPTURE_ERRORS = re.compile("captur|out of memory|ALLOC_FAILED", re.IGNORECASE)
LEAK = (
    "torch frees what a failed capture has allocated only when the process ends (pytorch#190348), and through 2.12 "
    "that also holds for tensors that several streams use (pytorch#180395)"
)
Run = Callable[[], None]


class CaptureError(RuntimeError):
    """A function cannot be captured as a graph, or memory is short for it; it may run without one."""


class DeviceCapture:
    """Captures functions as CUDA graphs on the current device.

    All of its graphs are captured on one stream of a device and share one memory pool: replay them one after the other.
    Warm-ups allocate from that pool too, and so keep no memory of their own on that stream. When all graphs are gone
    the pool is freed, and the next capture begins a new one. A failed capture can leave torch's allocator in the belief
    that its pool is being captured into (pytorch#180395), so that later captures get another pool and another stream.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.pool: Callable[[], torch.cuda.MemPool | None] = lambda: None  # its graphs' replays keep it

    def __call__(self, run: Run) -> Run:
        """Capture `run`, and return the function that replays it.

        Raises NotImplementedError without a CUDA device; RuntimeError of torch if `run` cannot be captured.
        """
        if not torch.cuda.is_available():
            raise NotImplementedError(
                "CUDA graphs need a CUDA device, and torch sees none; run the step itself instead"
            )
        pool = self.pool()
        if self.stream is None or self.stream.device_index != torch.cuda.current_device():
            self.stream, pool = torch.cuda.Stream(), None
        pool = torch.cuda.MemPool() if pool is None else pool
        self.pool = ref(pool)
        try:
            graph = self._captured(run, self.stream, pool)
        except BaseException:
            self.stream = None
            raise
        torch.cuda.current_stream().wait_stream(self.stream)
        return partial(replayed, graph, pool)

    def _captured(self, run: Run, stream: torch.cuda.Stream, pool: torch.cuda.MemPool) -> torch.cuda.CUDAGraph:
        """Return the graph of `run`, in the pool."""
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which empties the allocator's cache before every capture (torch 2.13).
        with torch.cuda.stream(stream):
            with torch.cuda.use_mem_pool(pool):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.synchronize()
            # Other threads may call CUDA during the capture: data loaders that pin memory, NCCL's watchdog.
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]  # torch names the tuple
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid, and ending it says so too
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


def replayed(graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
    """Replay a graph on the current stream of its device.  pool: kept as long as the graph is."""
    graph.replay()


class Graphs:
    """Functions over tensors at fixed addresses, each captured once and then replayed by its key.

    A captured function is run several times before and during its capture, so its side effects must be repeatable.
    max_graphs: graphs that are kept; the least recently used one is dropped.
    capture: captures a function, and returns what replays it.
    """

    def __init__(self, max_graphs: int = 64, capture: Callable[[Run], Run] | None = None):
        self.max_graphs, self.capture = max_graphs, DeviceCapture() if capture is None else capture
        self.replays: OrderedDict[Hashable, Run] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self.replays

    def __len__(self) -> int:
        return len(self.replays)

    def add(self, key: Hashable, run: Run) -> None:
        """Capture `run` under `key`. Raises CaptureError if that fails, unless an error of `run` is the reason."""
        try:
            self.replays[key] = self.capture(run)
        except RuntimeError as error:
            if CAPTURE_ERRORS.search(str(error)):
                raise CaptureError(str(error)) from error
            raise
        if len(self.replays) > self.max_graphs:
            self.replays.popitem(last=False)

    def replay(self, key: Hashable) -> None:
        """Replay what was captured under `key`."""
        self.replays.move_to_end(key)
        self.replays[key]()

    def reset(self) -> None:
        """Drop all graphs. Call it when tensors that they read or write have other addresses."""
        self.replays.clear()


def capture_sizes(max_capture_size: int) -> list[int]:
    """Return the batch sizes that get a graph: few enough to capture, close enough that padding wastes little.

    Multiples of 8 up to 64; above, four sizes until the size has doubled, so that at most a fifth of a step's sequences
    is padding. 19 sizes up to 256, 27 up to 1024.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_capture_size:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return [size for size in sizes if size < max_capture_size] + [max_capture_size] * (max_capture_size > 0)


class GraphedForward:
    """A module's forward, replayed from graphs: one for each structure, shape and dtype of its inputs.

    max_graphs, capture: as in Graphs.
    """

    def __init__(self, module: torch.nn.Module, max_graphs: int = 8, capture: Callable[[Run], Run] | None = None):
        self.module, self.graphs = module, Graphs(max_graphs, capture)
        self.captured: dict[tuple, CapturedForward] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, in new tensors.

        Raises NotImplementedError for inputs or outputs other than tensors and plain values, or if capturing fails.
        """
        leaves, structure = tree_flatten((args, kwargs))
        require_plain(leaves, "given to")
        key = (structure, *map(kind_of_input, leaves))
        if key not in self.graphs:
            self._capture(key, leaves, structure)
        forward = self.captured[key]
        for held, new in zip(forward.inputs, leaves, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(new)
        self.graphs.replay(key)
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, forward.outputs)

    def _capture(self, key: tuple, leaves: list, structure: TreeSpec) -> None:
        held = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(held, structure)
        forward = CapturedForward(held)

        def run() -> None:
            forward.outputs = self.module(*args, **kwargs)

        require_plain(tree_leaves(self.module(*args, **kwargs)), "made by")
        try:
            self.graphs.add(key, run)
        except CaptureError as error:
            raise NotImplementedError(
                f"enable_cuda_graph: this forward of {type(self.module).__name__} cannot be captured: {error} ({LEAK})"
            ) from error
        self.captured[key] = forward
        self.captured = {key: kept for key, kept in self.captured.items() if key in self.graphs}


@dataclass
class CapturedForward:
    """The static inputs that a graph reads and the outputs that it writes."""

    inputs: list
    outputs: object = None


def require_plain(values: list, where: str) -> None:
    """Raise NotImplementedError for values that cannot be copied into or out of a graph, such as caches.

    where: "given to" or "made by", for the error message.
    """
    plain = torch.Tensor | int | float | str | None
    kinds = sorted({type(value).__name__ for value in values if not isinstance(value, plain)})
    if kinds:
        raise NotImplementedError(
            f"enable_cuda_graph: {', '.join(kinds)} {where} a forward; a graph takes tensors and numbers only: give "
            "use_cache=False"
        )


def kind_of_input(value: object) -> object:
    """Return the key of an input: a graph is reused only for inputs with equal keys."""
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else (type(value), repr(value))
