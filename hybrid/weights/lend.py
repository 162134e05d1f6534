"""Lending the snapshot to the model: inside a `with` block the model's modules compute with the snapshot's tensors.

The modules' parameter *dictionaries* are replaced, not the parameters' `.data`: under ZeRO-3 the getter would gather
again on access and run the base weights (deepspeed 0.19.8). Afterwards the model has its own dictionaries, unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import getitem
from typing import Any, NoReturn

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.parallel import any_rank, lost_rank_reported, world_size
from hybrid.profiling import Profiler
from hybrid.weights.gather import is_partitioned
from hybrid.weights.module_tables import EngineHooks, set_all
from hybrid.weights.offload import TrainingStates
from hybrid.weights.snapshot import Snapshot


class InferenceOnly(dict[Any, Any]):
    """Replaces the `state_dict` hooks of a module inside a window. The module then holds inference's weights, so a
    `state_dict`, a copy or a pickle of it raises RuntimeError."""

    def values(self) -> list[Callable]:
        return [refuse_lent]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_lent()

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        refuse_lent()


def refuse_lent(*args: Any) -> NoReturn:
    """Raise RuntimeError: a module that holds inference's weights cannot be saved, loaded or copied."""
    raise RuntimeError(
        "state_dict(), load_state_dict(), a copy or a pickle of a module inside `with engine.inference()`: there the "
        "module holds inference's weights, adapters merged. Leave the block first; the engine's own save_checkpoint() "
        "and save_16bit_model() work inside too"
    )


INFERENCE_ONLY = InferenceOnly()
STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


Table = tuple[dict, str, dict]  # a module's `__dict__`, the name of a dictionary in it, and that dictionary


class Window:
    """The window of a model: inside `opened()` the model computes with the snapshot's tensors.

    lends: False if the model's modules get no tensors: weights are gathered layer by layer as the model's own layers
        run (streaming), or only the fused decoder reads the snapshot.
    merges: whether the snapshot contains the adapters, merged or as unmerged factors.
    hooks: the training engine's hooks on the model, which are off while the snapshot is lent.
    slices_lent: if ranks run the model's modules together, a context in which these compute with slices.
    states: training states that are in host memory while a window is open.
    device: where a call of the model moves its inputs to; None: they stay where they are.
    require_awake: raises if the engine sleeps. Gets what cannot be done then.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshot: Snapshot,
        profiler: Profiler,
        lends: bool,
        merges: bool,
        hooks: Sequence[EngineHooks] = (),
        slices_lent: Callable[[], AbstractContextManager] = nullcontext,
        states: TrainingStates | None = None,
        device: torch.device | None = None,
        require_awake: Callable[[str], None] = lambda call: None,
    ):
        self.model, self.snapshot, self.profiler, self.device = model, snapshot, profiler, device
        self.require_awake = require_awake
        self.lends, self.merges = lends, merges
        self.hooks, self.slices_lent, self.states = hooks, slices_lent, states
        self.is_collective = world_size() > 1 and any(map(is_partitioned, model.parameters()))  # refreshing
        self.adapters: list[bool] = []  # whether adapters are used, for each open window, the outermost first
        self.replaced: list[Table] = []  # the model's own dictionaries that are replaced now, in order
        # The model's own dictionaries, read once: inside a window the module tree is a different one.
        self.owners = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
        self.plains = [(layer, dict(layer.plain._parameters)) for layer in snapshot.adapted]
        # Adapter layers whose own forward runs, and which must be disabled to run without adapters. LoRA layers are
        # among them unless the snapshot contains the adapters.
        kinds = AuxiliaryTrainingWrapper | (TrainableTokensLayer if merges else BaseTunerLayer)
        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self.switchable = [module for module in model.modules() if isinstance(module, kinds)]

    @property
    def is_open(self) -> bool:
        """Whether a window is open: the model computes with the snapshot."""
        return bool(self.adapters)

    @property
    def uses_adapters(self) -> bool:
        """Whether the innermost open window uses adapters. Expects an open window."""
        return self.adapters[-1]

    def resolved(self, adapters: bool | None) -> bool:
        """Whether a window opened now with `adapters` uses them. None: as the enclosing window, or True without one."""
        return (self.adapters[-1] if self.adapters else True) if adapters is None else adapters

    @contextmanager
    def opened(self, adapters: bool | None = None) -> Iterator[None]:
        """Inside the block the model computes with the snapshot, which is refreshed first.

        adapters: False: without adapters; None: as the enclosing window or the model. A nested window with the same
        choice costs nothing. Raises NotImplementedError for False if the adapters cannot be disabled.
        """
        adapters = self.resolved(adapters)
        self.require_awake("inference")
        with ExitStack() as stack:
            if not self.adapters:
                stack.enter_context(nullcontext() if self.states is None else self.states.on_host())
            if not self.adapters or self.adapters[-1] != adapters:
                if not adapters:
                    stack.enter_context(disabled(self.switchable))
                    if not self.merges:
                        self._require_switchable()
                self.refresh(adapters)
                for hooks in self.hooks if self.lends else ():
                    stack.enter_context(hooks.off())
                stack.enter_context(self._lent(adapters))
                if self.lends:
                    stack.enter_context(self.slices_lent())
            self.adapters.append(adapters)
            stack.callback(self.adapters.pop)
            yield

    def refresh(self, adapters: bool) -> None:
        """Update the snapshot for a window with `adapters`. A collective if partitioned weights must be gathered."""
        if self.snapshot.is_fresh(adapters):
            return
        with lost_rank_reported("gathering the weights"):
            if self._must_gather(adapters):  # tell ranks whose request failed to join: see `join_refresh`
                any_rank([True], self.device)
            self._gather(adapters)

    def join_refresh(self, adapters: bool) -> None:
        """Called where a request failed before its window opened: join the gather if another rank refreshes."""
        with lost_rank_reported("gathering the weights"):
            if self._must_gather(adapters) and any_rank([False], self.device)[0]:
                self._gather(adapters)

    def _must_gather(self, adapters: bool) -> bool:
        return self.is_collective and self.snapshot.must_gather(adapters)

    def _gather(self, adapters: bool) -> None:
        self.profiler.gathered(self.snapshot.refresh(self.profiler.phase, adapters))

    @contextmanager
    def _lent(self, adapters: bool) -> Iterator[None]:
        tables = self._to_lend(adapters)
        owners, names = [owner for owner, _, _ in tables], [name for _, name, _ in tables]
        # Copied: code inside the window may change a dictionary that was lent.
        content = [table if table is INFERENCE_ONLY else table.copy() for _, _, table in tables]
        count = len(self.replaced)
        self.replaced += zip(owners, names, map(getitem, owners, names), strict=True)
        try:
            set_all(owners, names, content)
            yield
        finally:
            restore(self.replaced[count:])
            del self.replaced[count:]

    def _to_lend(self, adapters: bool) -> list[Table]:
        """The replacements of dictionaries. Made once for each layout of the snapshot and set of active adapters."""
        # The refresh has just read the active adapters.
        key = (self.snapshot.layout, self.snapshot.fresh[adapters].adapters)
        cached_key, tables = self.snapshot.lent.get(adapters, (None, []))
        # Inside another window the module tree is a different one.
        if self.adapters or key != cached_key:
            lent = list(self._lent_dictionaries(adapters)) if self.lends else []
            # With adapters disabled by PEFT's flag a copy of any module would have them disabled for ever.
            modules = [module for module, _, _ in lent] if adapters else [module for module, _ in self.owners]
            lent += [(module, name, INFERENCE_ONLY) for module in modules for name in STATE_HOOKS]
            # An adapted module's plain module occurs twice, as an owner of parameters and as `plain`: the last counts.
            tables = list({(module, name): (module.__dict__, name, table) for module, name, table in lent}.values())
            if not self.adapters:
                self.snapshot.lent[adapters] = key, tables
        return tables

    def _lent_dictionaries(self, adapters: bool) -> Iterator[tuple[nn.Module, str, dict]]:
        """For each dictionary to replace: its module, its name, and the replacement."""
        for module, own in self.owners:
            tensors = {name: param if param is None else self.snapshot.tensor(param) for name, param in own.items()}
            if any(tensors[name] is not param for name, param in own.items()):
                yield module, "_parameters", tensors
        children: dict[nn.Module, dict] = {}
        for layer, own in self.plains:
            if not self.snapshot.weights.is_unmerged(layer, adapters):  # else the wrapper itself runs, on lent tensors
                yield layer.plain, "_parameters", {**own, **self.snapshot.weights_of(layer, adapters)}
                children.setdefault(layer.parent, dict(layer.parent._modules))[layer.child] = layer.plain
            elif layer.parent._modules[layer.child] is not layer.wrapper:  # nested in a window without adapters
                children.setdefault(layer.parent, dict(layer.parent._modules))[layer.child] = layer.wrapper
        yield from ((parent, "_modules", own) for parent, own in children.items())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block the model has its own parameters and modules, also while a window is open."""
        lent = [(owner, name, owner[name]) for owner, name, _ in self.replaced]
        restore(self.replaced)
        try:
            yield
        finally:
            for owner, name, content in lent:
                owner[name] = content

    @contextmanager
    def adapters_matched(self) -> Iterator[None]:
        """Inside the block the model's own modules use adapters exactly if the open window does.

        Needed where the snapshot contains the adapters and is not lent: the modules then still have theirs. Raises
        NotImplementedError if they cannot be disabled.
        """
        if self.lends or not self.merges or self.uses_adapters:
            yield
            return
        self._require_switchable()
        with disabled(self.layers):
            yield

    def _require_switchable(self) -> None:
        for layer in self.snapshot.adapted:
            if not isinstance(layer.wrapper, BaseTunerLayer):
                raise NotImplementedError(
                    f"{layer.name}: adapters=False is not available with hybrid_engine.pin_parameters=false or "
                    "inference_tp_size above 1: DeepSpeed-Chat's LoRA cannot be switched off where it runs as it is. "
                    "Set pin_parameters to true, and inference_tp_size to 1."
                )


def restore(replaced: Sequence[Table]) -> None:
    """Put the modules' own dictionaries back, the last replaced first: nested windows may replace one twice."""
    for owner, name, table in reversed(replaced):
        owner[name] = table


@contextmanager
def disabled(layers: Iterable[Any]) -> Iterator[None]:
    """Inside the block PEFT's adapters in `layers`, BaseTunerLayers, are disabled.

    Only the flag is set: PEFT's `enable_adapters` would also change which parameters require gradients (0.21).
    """
    before = [(layer, layer._disable_adapters) for layer in layers]
    try:
        for layer, _ in before:
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in before:
            layer._disable_adapters = flag
