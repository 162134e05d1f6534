"""CUDA graphs: functions over tensors at fixed addresses, by key; a module's forward for each shape of its inputs.

Capture and replay have not run on a device yet; the code around them is tested with a substitute for CUDA's capture.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries allocate workspaces
Run = Callable[[], None]


class DeviceCapture:
    """Captures functions as CUDA graphs on the current device.

    All of its graphs are captured on one stream and share one memory pool: replay them one after the other.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None  # torch's handle of the memory pool

    def __call__(self, run: Run) -> Run:
        """Capture `run`, and return the function that replays it.

        Raises NotImplementedError without a CUDA device; RuntimeError of torch if `run` cannot be captured.
        """
        if not torch.cuda.is_available():
            raise NotImplementedError(
                "CUDA graphs need a CUDA device, and torch sees none; run the step itself instead"
            )
        if self.stream is None:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which empties the allocator's cache before every capture (torch 2.13).
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                run()
            torch.cuda.synchronize()
            # Other threads may call CUDA during the capture: data loaders that pin memory, NCCL's watchdog.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid, and ending it says so too
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay


class Graphs:
    """Functions over tensors at fixed addresses, each captured once and then replayed by its key.

    A captured function is run several times before and during its capture, so its side effects must be repeatable.
    max_graphs: graphs that are kept; the least recently used one is dropped.
    capture: captures a function, and gives what replays it.
    """

    def __init__(self, max_graphs: int = 64, capture: Callable[[Run], Run] | None = None):
        self.max_graphs, self.capture = max_graphs, DeviceCapture() if capture is None else capture
        self.replays: OrderedDict[Hashable, Run] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self.replays

    def __len__(self) -> int:
        return len(self.replays)

    def add(self, key: Hashable, run: Run) -> None:
        """Capture `run` under `key`."""
        self.replays[key] = self.capture(run)
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
    """The batch sizes that get a graph: few enough to capture, close enough that padding wastes little."""
    counts = {1, 2, 4, *range(8, max_capture_size, 8), max_capture_size}
    return sorted(count for count in counts if 0 < count <= max_capture_size)


class GraphedForward:
    """A module's forward, replayed from graphs: one for each structure, shape and dtype of its inputs.

    max_graphs, capture: as in Graphs.
    """

    def __init__(self, module: torch.nn.Module, max_graphs: int = 8, capture: Callable[[Run], Run] | None = None):
        self.module, self.graphs = module, Graphs(max_graphs, capture)
        self.captured: dict[tuple, CapturedForward] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, in new tensors.

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
        except RuntimeError as error:
            raise NotImplementedError(
                f"enable_cuda_graph: this forward of {type(self.module).__name__} cannot be captured: {error}"
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
    """The key of an input: a graph is reused only for inputs with equal keys."""
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else (type(value), repr(value))
