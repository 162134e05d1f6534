"""CUDA graphs: a decode step captured for a few batch sizes, over static inputs; a module's forward for each shape.

Capture and replay have not run on a device yet; the code around them is tested with a substitute for CUDA's capture.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

WARM_UPS = 3  # runs before a capture, in which kernels are compiled and libraries allocate workspaces
Step = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured graph.  replay: runs it.  pool: handle of the memory pool of its intermediate results."""

    replay: Callable[[], None]
    pool: object


def capture_on_device(run: Callable[[], None], pool: object | None) -> Captured:
    """Capture `run` on the current CUDA device, in the memory pool `pool` or a new one.

    Raises NotImplementedError without a CUDA device; RuntimeError of torch if `run` cannot be captured.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("CUDA graphs need a CUDA device, and torch sees none; run the step itself instead")
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may call CUDA during the capture: data loaders that pin memory, NCCL's watchdog.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return Captured(graph.replay, pool)


def capture_sizes(max_capture_size: int) -> list[int]:
    """The batch sizes that get a graph: few enough to capture, close enough that padding wastes little."""
    counts = {1, 2, 4, *range(8, max_capture_size, 8), max_capture_size}
    return sorted(count for count in counts if count <= max_capture_size)


class GraphedStep:
    """A step over a batch of sequences, replayed from graphs that are captured on first use.

    step: inputs by name, [sequences, ...] each, to outputs, [sequences, ...] each. It is also run before and during a
        capture, so its side effects must be repeatable. Addresses that it reads must not change; see `reset`.
    blank: by name, the inputs of padding sequences, [max_capture_size, ...], on the device. Sequences that fill a batch
        up to a captured size compute these, and write to the KV cache: each has length 1 and only block 0 in its
        block table.
        BLOCK 0 IS RESERVED: it is never given to a sequence.
    max_graphs: graphs that are kept; the least recently used one is dropped.
    capture: captures a run.
    """

    def __init__(
        self,
        step: Step,
        blank: Mapping[str, torch.Tensor],
        max_graphs: int = 64,
        capture: Callable[[Callable[[], None], object | None], Captured] = capture_on_device,
    ):
        self.step, self.blank, self.max_graphs, self.capture = step, dict(blank), max_graphs, capture
        self.max_capture_size = len(next(iter(blank.values())))
        self.capture_sizes = capture_sizes(self.max_capture_size)
        self.inputs = {name: tensor.clone() for name, tensor in blank.items()}
        self.outputs: tuple[torch.Tensor, ...] | None = None  # of all graphs, [max_capture_size, ...]
        self.graphs: OrderedDict[int, Captured] = OrderedDict()

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The step's outputs, [sequences, ...] each; the next call overwrites them.

        inputs: by name, [sequences, ...]. Dimensions after the first may be smaller than those of `blank`; the rest is
            undefined then.
        Raises ValueError if names, shapes or dtypes do not fit `blank`.
        """
        num_seqs = self._num_seqs(inputs)
        size = next(count for count in self.capture_sizes if count >= num_seqs)
        if size not in self.graphs:
            self._capture(size)
        self.graphs.move_to_end(size)
        for name, held in self.inputs.items():
            if num_seqs < size:
                held[num_seqs:size] = self.blank[name][num_seqs:size]
            held[tuple(slice(length) for length in inputs[name].shape)] = inputs[name]
        self.graphs[size].replay()
        return tuple(output[:num_seqs] for output in self.outputs)

    def reset(self) -> None:
        """Drop all graphs. Call it when weights or KV blocks that the step reads have other addresses."""
        self.graphs.clear()
        self.outputs = None

    def _num_seqs(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """The number of sequences of the inputs. Raises ValueError if names, shapes or dtypes do not fit `blank`."""
        if inputs.keys() != self.inputs.keys():
            raise ValueError(f"the step takes {sorted(self.inputs)}, and was given {sorted(inputs)}")
        for name, tensor in inputs.items():
            held = self.inputs[name]
            fits = tensor.dim() == held.dim() and all(a <= b for a, b in zip(tensor.shape, held.shape, strict=True))
            if not fits or tensor.dtype != held.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and the graphs hold at most "
                    f"{held.dtype} {tuple(held.shape)}"
                )
        counts = set(map(len, inputs.values()))
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"inputs are of {sorted(counts)} sequences; one number for all, at least 1, is allowed")
        return counts.pop()

    def _capture(self, size: int) -> None:
        """Capture the step for `size` padding sequences; later replays copy their inputs in."""
        views = {name: held[:size] for name, held in self.inputs.items()}
        for name, view in views.items():
            view.copy_(self.blank[name][:size])
        if self.outputs is None:
            shapes = ((output, (self.max_capture_size, *output.shape[1:])) for output in self.step(views))
            self.outputs = tuple(output.new_empty(shape) for output, shape in shapes)

        def run() -> None:
            for held, output in zip(self.outputs, self.step(views), strict=True):
                held[:size].copy_(output)

        pool = next((graph.pool for graph in self.graphs.values()), None)
        self.graphs[size] = self.capture(run, pool)
        if len(self.graphs) > self.max_graphs:
            self.graphs.popitem(last=False)


class GraphedForward:
    """A module's forward, replayed from graphs: one for each structure, shape and dtype of its inputs.

    max_graphs: graphs that are kept; the least recently used one is dropped.  capture: captures a run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        max_graphs: int = 8,
        capture: Callable[[Callable[[], None], object | None], Captured] = capture_on_device,
    ):
        self.module, self.max_graphs, self.capture = module, max_graphs, capture
        self.graphs: OrderedDict[tuple, CapturedForward] = OrderedDict()

    def __call__(self, *args, **kwargs):
        """The module's output, in new tensors.

        Raises NotImplementedError for inputs or outputs other than tensors and plain values, or if capturing fails.
        """
        leaves, structure = tree_flatten((args, kwargs))
        require_plain(leaves, "given to")
        key = (structure, *map(kind_of_input, leaves))
        if key not in self.graphs:
            self.graphs[key] = self._captured(leaves, structure)
            if len(self.graphs) > self.max_graphs:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        for held, new in zip(graph.inputs, leaves, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(new)
        graph.captured.replay()
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, graph.outputs)

    def _captured(self, leaves: list, structure: TreeSpec) -> "CapturedForward":
        held = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(held, structure)
        captured = CapturedForward(held)

        def run() -> None:
            captured.outputs = self.module(*args, **kwargs)

        require_plain(tree_leaves(self.module(*args, **kwargs)), "made by")
        pool = next((graph.captured.pool for graph in self.graphs.values()), None)
        try:
            captured.captured = self.capture(run, pool)
        except RuntimeError as error:
            raise NotImplementedError(
                f"enable_cuda_graph: this forward of {type(self.module).__name__} cannot be captured: {error}"
            ) from error
        return captured


@dataclass
class CapturedForward:
    """A graph, the static inputs that it reads and the outputs that it writes."""

    inputs: list
    captured: Captured | None = None
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
