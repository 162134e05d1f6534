"""A decode step as CUDA graphs: one for each of a few numbers of slots, over inputs that stay where they are.

Capturing and replaying have not run on a device yet; what surrounds them is tested with a capture that is not CUDA's.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

WARM_UPS = 3  # runs before a capture: kernels are compiled and libraries make their workspaces
Step = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured run.  replay: runs it again.  pool: the memory that its intermediate results are in."""

    replay: Callable[[], None]
    pool: object


def capture_on_device(run: Callable[[], None], pool: object | None) -> Captured:
    """Capture `run` on the current CUDA device, in the memory of `pool` where there is one already."""
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
    # Other threads of a trainer, loaders that pin and NCCL's watchdog, may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return Captured(graph.replay, pool)


def slot_buckets(max_slots: int) -> list[int]:
    """The numbers of slots that get a graph: few enough to capture, so close that little is computed for nothing."""
    counts = {1, 2, 4, *range(8, max_slots, 8), max_slots}
    return sorted(count for count in counts if count <= max_slots)


class GraphedStep:
    """A step over slots, replayed from graphs that are captured on first use.

    step: inputs by name, [slots, ...] each, to outputs, [slots, ...] each. What it does beside that it must be able to
        do again: it is run before, and while, it is captured. Addresses that it reads must not change; see `reset`.
    blank: by name, the inputs of slots that hold nothing, [max_slots, ...]; on the device. A bucket's surplus slots
        compute these, so what they write must harm nobody: a blank slot has length 1 and only page 0 in its table, and
        PAGE 0 IS RESERVED: it is never given to a sequence.
    max_graphs: graphs that are kept; beyond it the one not used for longest goes.
    capture: captures a run.
    """

    def __init__(
        self,
        step: Step,
        blank: Mapping[str, torch.Tensor],
        max_graphs: int = 64,
        capture: Callable[[Callable[[], None], object | None], Captured] = capture_on_device,
    ):
        self.step = step
        self.blank = dict(blank)
        self.max_slots = len(next(iter(blank.values())))
        self.buckets = slot_buckets(self.max_slots)
        self.max_graphs = max_graphs
        self.capture = capture
        self.inputs = {name: tensor.clone() for name, tensor in blank.items()}
        self.outputs: tuple[torch.Tensor, ...] | None = None  # of all graphs, [max_slots, ...]
        self.graphs: OrderedDict[int, Captured] = OrderedDict()

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The step's outputs for these slots. They are good until the next call.

        inputs: by name, [slots, ...]; behind the first, a dimension may be smaller than that of `blank`, and the step
            then sees anything there.
        """
        slots = self._slots(inputs)
        bucket = next(count for count in self.buckets if count >= slots)
        if bucket not in self.graphs:
            self._capture(bucket)
        self.graphs.move_to_end(bucket)
        for name, held in self.inputs.items():
            if slots < bucket:
                held[slots:bucket] = self.blank[name][slots:bucket]
            held[tuple(slice(size) for size in inputs[name].shape)] = inputs[name]
        self.graphs[bucket].replay()
        return tuple(output[:slots] for output in self.outputs)

    def reset(self) -> None:
        """Forget every graph. Call it when something that the step reads, weights or pages, has moved."""
        self.graphs.clear()
        self.outputs = None

    def _slots(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """How many slots the inputs have, which must be the inputs that graphs can hold."""
        if inputs.keys() != self.inputs.keys():
            raise ValueError(f"the step takes {sorted(self.inputs)}, and was given {sorted(inputs)}")
        for name, given in inputs.items():
            held = self.inputs[name]
            fits = given.dim() == held.dim() and all(a <= b for a, b in zip(given.shape, held.shape, strict=True))
            if not fits or given.dtype != held.dtype:
                raise ValueError(
                    f"{name} is {given.dtype} {tuple(given.shape)}, and the graphs hold at most "
                    f"{held.dtype} {tuple(held.shape)}"
                )
        counts = {len(given) for given in inputs.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"inputs are of {sorted(counts)} slots; one number for all, at least 1, is allowed")
        return counts.pop()

    def _capture(self, bucket: int) -> None:
        """A graph of so many blank slots."""
        views = {name: held[:bucket] for name, held in self.inputs.items()}
        for name, view in views.items():
            view.copy_(self.blank[name][:bucket])
        if self.outputs is None:
            made = self.step(views)
            self.outputs = tuple(output.new_empty(self.max_slots, *output.shape[1:]) for output in made)

        def run() -> None:
            for held, output in zip(self.outputs, self.step(views), strict=True):
                held[:bucket].copy_(output)

        pool = next((graph.pool for graph in self.graphs.values()), None)
        self.graphs[bucket] = self.capture(run, pool)
        if len(self.graphs) > self.max_graphs:
            self.graphs.popitem(last=False)


class GraphedForward:
    """A module's forward, replayed from graphs: one for each structure, shape and dtype of what it is given.

    max_graphs: graphs that are kept; beyond it the one not used for longest goes.  capture: captures a run.
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
        """The module's output, in tensors of the caller's own.

        Raises NotImplementedError, in words, where the forward cannot be captured.
        """
        given, structure = tree_flatten((args, kwargs))
        require_plain(given, "given to")
        key = (structure, *map(kind_of_input, given))
        if key not in self.graphs:
            self.graphs[key] = self._captured(given, structure)
            if len(self.graphs) > self.max_graphs:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        for held, new in zip(graph.inputs, given, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(new)
        graph.captured.replay()
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, graph.outputs)

    def _captured(self, given: list, structure: TreeSpec) -> "CapturedForward":
        held = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        args, kwargs = tree_unflatten(held, structure)
        made = CapturedForward(held)

        def run() -> None:
            made.outputs = self.module(*args, **kwargs)

        require_plain(tree_leaves(self.module(*args, **kwargs)), "made by")
        pool = next((graph.captured.pool for graph in self.graphs.values()), None)
        try:
            made.captured = self.capture(run, pool)
        except RuntimeError as error:
            raise NotImplementedError(
                f"enable_cuda_graph: this forward of {type(self.module).__name__} cannot be captured: {error}"
            ) from error
        return made


@dataclass
class CapturedForward:
    """A graph with the inputs that it reads and the outputs that it writes."""

    inputs: list
    captured: Captured | None = None
    outputs: object = None


def require_plain(values: list, where: str) -> None:
    """Raise NotImplementedError for what cannot be copied into a graph's inputs or out of it: caches, above all."""
    odd = sorted({type(one).__name__ for one in values if not isinstance(one, torch.Tensor | int | float | str | None)})
    if odd:
        raise NotImplementedError(
            f"enable_cuda_graph: {', '.join(odd)} {where} a forward; a graph has tensors and numbers alone: give "
            "use_cache=False"
        )


def kind_of_input(value: object) -> object:
    """What must be the same for a graph to be used again."""
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else (type(value), repr(value))
