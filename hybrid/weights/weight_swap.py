"""Swapping the snapshot into the model: inside a `with` block the model's modules compute with the snapshot's tensors.

The modules' parameter *dictionaries* are replaced, not the parameters' `.data`: under ZeRO-3 the getter would gather
again on access and run the base weights (deepspeed 0.19.8). Afterwards the model has its own dictionaries, unchanged.

The module tree stays: an adapted module whose adapters are merged gets the plain module's forward, so that what PEFT
switches inside a window (`set_adapter`, `disable_adapter`) is switched, and the next call runs with it.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain, repeat
from operator import is_
from typing import Any, NoReturn

import torch
from deepspeed.utils import logger
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.models.quantized import DequantizedLinear, quantized_layers
from hybrid.runtime.parallel import all_gather_objects, lost_rank_reported, rank, world_size
from hybrid.runtime.profiling import Profiler
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.gather import is_partitioned
from hybrid.weights.model_weights import adapters_text
from hybrid.weights.module_dicts import (
    ABSENT,
    EngineHooks,
    Replacement,
    patched_attribute,
    restore,
    set_items,
)
from hybrid.weights.named_adapters import UNSWITCHABLE, Adapters, NamedAdapters
from hybrid.weights.offload import TrainingStates
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.watch import WeightWatch


class InferenceOnly(dict[Any, Any]):
    """Replaces the `state_dict` hooks of a module inside a window. The module then holds inference's weights, so a
    `state_dict`, a copy or a pickle of it raises RuntimeError."""

    def values(self) -> list[Callable]:
        return [refuse_swapped]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_swapped()

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        refuse_swapped()


def refuse_swapped(*args: Any) -> NoReturn:
    """Raise RuntimeError: a module that holds inference's weights cannot be saved, loaded or copied."""
    raise RuntimeError(
        "state_dict(), load_state_dict(), a copy or a pickle of a module inside `with engine.inference()`: there the "
        "module holds inference's weights, adapters merged. Leave the block first; the engine's own save_checkpoint() "
        "and save_16bit_model() work inside too"
    )


INFERENCE_ONLY = InferenceOnly()
STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
# Methods of adapter layers, PEFT's and DeepSpeed-Chat's, that read or write base weights.
WEIGHT_METHODS = ("merge", "unmerge", "update_layer", "fuse_lora_weight", "unfuse_lora_weight")
MAX_BASE_GATHERS = 3  # for one weight version, before a warning; a step with one reference takes one or two


def refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError: an adapter layer over inference's weights cannot be merged, unmerged or extended."""
    raise RuntimeError(
        "adapters merged, unmerged or added inside `with engine.inference()`: there the base weights are inference's. "
        "Leave the block first; adapters may be switched, disabled and scaled inside"
    )


WRITTEN = (
    "parameters of the model were written, cast or replaced inside `with engine.inference()`, where they are "
    "inference's copies: training weights are unchanged. Leave the block first, or write to parameters that were taken "
    "from the model before it, under ZeRO-3 inside `GatheredParameters(..., modifier_rank=0)`"
)


class OverwrittenParameters(dict[str, Any]):
    """Replaces a module's parameters in a window once a call with other adapters has overwritten the copies, until the
    next call in the window brings back its own: reading one as an attribute raises RuntimeError."""

    def __getitem__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{name!r} of a module that was read inside `with engine.inference()` after a call with other adapters "
            "there: its copy holds the other call's weights until the next call of the engine or the model. Read it "
            "before that call, or set rollout.memory_limit so that the base is kept too (engine.memory_plan)"
        )


class SwappedParameters:
    """Detects writes to the parameters that a user's window has swapped in: they would be lost when the window ends.

    tables: parameter dictionaries as swapped in.  own: the model's own parameters, which are not copies.
    refreshes: of the snapshot so far.
    watch: of the same parameters, from the last window; None: a new one.
    """

    def __init__(
        self, tables: list[dict], own: set[nn.Parameter | None], refreshes: int, watch: WeightWatch | None = None
    ):
        self.tables, self.refreshes, self.is_changed = tables, refreshes, False
        self.params = list(chain.from_iterable(map(dict.values, tables)))
        if watch is None:
            copies = dict.fromkeys(param for param in self.params if param is not None and param not in own)
            # Copies are contiguous, and the snapshot's own.
            watch = WeightWatch(copies, keeps_views=all(map(torch.Tensor.is_contiguous, copies)))
        self.watch = watch

    def changed(self) -> bool:
        """Whether a swapped-in parameter has been written, cast or replaced."""
        now = list(chain.from_iterable(map(dict.values, self.tables)))
        replaced = len(now) != len(self.params) or not all(map(is_, now, self.params))
        self.is_changed = self.is_changed or replaced or self.watch.written()
        return self.is_changed

    def accept(self, refreshes: int) -> None:
        """If a nested window has refreshed the snapshot since it was swapped in, ignore its writes."""
        if refreshes > self.refreshes:
            self.watch.written()
        self.refreshes = refreshes


class InferenceWindow:
    """The window of a model: inside `opened()` the model computes with the snapshot's tensors.

    swaps: False if the model's modules get no tensors: weights are gathered layer by layer as the model's own layers
        run (streaming), or only the fused decoder reads the snapshot.
    merges: whether the snapshot contains the adapters, merged or as unmerged factors.
    hooks: the training engine's hooks on the model, which are off while the snapshot is swapped in.
    slices_swapped: if ranks run the model's modules together, a context in which these compute with slices.
    states: training states that are in host memory while a window is open.
    device: where a call of the model moves its inputs to; None: they stay where they are.
    require_awake: raises if the engine sleeps. Gets what cannot be done then.
    model_changed: updates the version of the weights; gives whether the model's modules or parameters were added,
        removed, replaced or cast.
    switched: modules whose forward is a container's, which calls `forward_of`.
    Its arguments are many, since a window touches all that a model has: weights, adapters, hooks, slices, states. Its
    fields are these, the model's own attributes, which are read once, and those that are replaced now.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshot: Snapshot,
        profiler: Profiler,
        swaps: bool,
        merges: bool,
        hooks: Sequence[EngineHooks] = (),
        slices_swapped: Callable[[], AbstractContextManager] = nullcontext,
        states: TrainingStates | None = None,
        device: torch.device | None = None,
        require_awake: Callable[[str], None] = lambda call: None,
        model_changed: Callable[[], bool] = lambda: False,
    ):
        self.model, self.snapshot, self.profiler, self.device = model, snapshot, profiler, device
        self.require_awake, self.model_changed = require_awake, model_changed
        self.swaps, self.merges = swaps, merges
        self.hooks, self.slices_swapped, self.states = hooks, slices_swapped, states
        self.is_collective = world_size() > 1 and any(map(is_partitioned, model.parameters()))  # refreshing
        self.adapters: list[Adapters] = []  # those of each open window, the outermost first
        self.named = NamedAdapters(model)
        self.replaced: list[Replacement] = []  # the model's own attributes that are replaced now, in order
        self.first_replaced: list[int] = []  # where those of each swapped-in snapshot begin, the outermost first
        self.swapped_key: tuple = ()  # of the parameters that are swapped in now
        self.swapped: SwappedParameters | None = None  # the parameters that are swapped in now, inside a user's window
        self.swapped_overwrites = 0  # the snapshot's `overwrites` when they were swapped in
        self.refreshes = 0  # of the snapshot, by windows
        self.warns_of_gathers = self.logs_switches = rank() == 0
        self.switched: set[nn.Module] = set()
        # The model's own dictionaries, read once: inside a window the module tree is a different one.
        self.owners = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
        self.own = {param for _, params in self.owners for param in params.values()}
        self.plains = [(layer, dict(layer.plain._parameters)) for layer in snapshot.adapted]
        self.adapted = {layer.wrapper: layer for layer in snapshot.adapted}
        # Quantized layers, what stands in for each, and its parameters.
        layers = [layer for _, layer in quantized_layers(model)]
        self.quantized = [(layer, DequantizedLinear(layer), dict(layer._parameters)) for layer in layers]
        # Adapter layers whose own forward runs, and which must be disabled to run without adapters. LoRA layers are
        # among them unless the snapshot contains the adapters.
        contained = merges and not snapshot.weights.running
        kinds = AuxiliaryTrainingWrapper | (TrainableTokensLayer if contained else BaseTunerLayer)
        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self.switchable = [module for module in model.modules() if isinstance(module, kinds)]
        self.merging = [
            (module, name)
            for module in dict.fromkeys((*self.layers, *self.adapted))
            for name in WEIGHT_METHODS
            if hasattr(module, name)
        ]

    @property
    def is_open(self) -> bool:
        """Whether a window is open: the model computes with the snapshot."""
        return bool(self.adapters)

    @property
    def uses_adapters(self) -> bool:
        """Whether the innermost open window uses adapters. Expects an open window."""
        return bool(self.adapters[-1])

    def resolved(self, adapters: Adapters | None) -> Adapters:
        """Return the adapters of a window opened now. None: those of the enclosing window, or True without one."""
        return (self.adapters[-1] if self.adapters else True) if adapters is None else adapters

    @contextmanager
    def naming(self, adapters: Adapters) -> Iterator[None]:
        """Inside the block PEFT's layers have the adapter of this name active. Neither that nor running without
        adapters is a change of the weights' version."""
        weights, is_switched = self.snapshot.weights, adapters is not True
        if is_switched:
            weights.number()  # counts what the user has switched before
        with self.named.switched(adapters), patched_attribute(weights.version, "is_switched", is_switched):
            yield

    @contextmanager
    def opened(self, adapters: Adapters | None = None, by_user: bool = False) -> Iterator[Adapters]:
        """Inside the block the model computes with the snapshot, which is refreshed first. Yields its adapters.

        adapters: False: without adapters; None: as the enclosing window or the model; a str: the adapter of that name;
            a tuple: those, which only a fused decoder runs, each for the rows that name it. A nested window with the
            same choice swaps again only if weights or adapters have changed.
        by_user: whether a user's code runs inside the block. Raises RuntimeError at its end if that has written to
            parameters that are swapped in.
        Raises NotImplementedError for False if the adapters cannot be disabled.
        """
        adapters = self.resolved(adapters)
        self.require_awake("inference")
        with ExitStack() as stack:
            if self.adapters and self.adapters[-1] == adapters:
                self._renew(adapters)
            else:
                if self.adapters:
                    stack.callback(self._refuse_overwritten, by_name=not isinstance(adapters, bool))
                elif self.states is not None:
                    stack.enter_context(self.states.on_host())
                if self.adapters or adapters is not True:  # else the model's active adapters stay
                    stack.enter_context(self.naming(adapters))
                if not adapters:
                    self._require_switchable(runs_modules=not self.merges)
                    stack.enter_context(disabled(self.switchable))
                if isinstance(adapters, str) and self._exchanges_names(adapters):
                    self.agree_on(adapters)
                if not self.snapshot.is_fresh(bool(adapters)):
                    self.refresh(adapters)
                for hooks in self.hooks if self.swaps else ():
                    stack.enter_context(hooks.off())
                stack.enter_context(self._swapped(adapters, by_user))
                if self.swaps:
                    stack.enter_context(self.slices_swapped())
            self.adapters.append(adapters)
            stack.callback(self.adapters.pop)
            yield adapters

    def refusal(self) -> str:
        """Return the reason why a call cannot run inside the open window; "" if it can, or if none is open.

        Call it before each request: it notes weights that were written, which the request then reads again.
        """
        if not self.adapters:
            return ""
        if self.model_changed():
            return (
                "modules, parameters or adapters of the model were added, removed, replaced or cast inside `with "
                "engine.inference()`; leave the block first"
            )
        return WRITTEN if self.swapped is not None and self.swapped.changed() else ""

    def error_inside(self, call: str) -> RuntimeError | None:
        """Return the error of a call that must not be made inside a window; None outside of one."""
        if not self.is_open:
            return None
        return RuntimeError(f"{call} inside `with engine.inference()`: leave the block first")

    def require_closed(self, call: str) -> None:
        """Raise RuntimeError inside a window."""
        if error := self.error_inside(call):
            raise error

    def forward_of(self, module: nn.Module, own: Callable) -> Callable:
        """Return the forward of a module with a container inside the open window: its own, or the plain module's."""
        layer = self.adapted.get(module)
        runs_own = layer is None or not self.swaps or self.snapshot.weights.is_unmerged(layer, self.uses_adapters)
        return own if runs_own else layer.plain

    def _renew(self, adapters: Adapters) -> None:
        """If weights or adapters have changed since the snapshot was swapped in, refresh it and swap it in again."""
        if not adapters:  # PEFT's `disable_adapter()` enables them at its end
            set_items((layer.__dict__ for layer in self.switchable), repeat("_disable_adapters"), repeat(True))
        if not isinstance(adapters, bool):  # `set_adapter` in the window does not change what it is of
            restore(self.named.flags(adapters))
        is_fresh = self.snapshot.is_fresh(bool(adapters))
        if is_fresh and self.swapped_key == self._key(adapters):
            return
        if not is_fresh:
            self.refresh(adapters)
        first = self.first_replaced[-1]
        restore(self.replaced[first:])
        del self.replaced[first:]
        self._swap_in(adapters, self.swapped is not None)

    def _exchanges_names(self, adapters: Adapters) -> bool:
        """Whether opening a window of a named adapter is a collective even if no copy is stale: ranks that name
        different ones would gather different weights. On several adapters ranks have agreed before."""
        return self.is_collective and isinstance(adapters, str) and self.adapters[-1:] != [adapters]

    @waiting_to("agree on the adapters")
    def agree_on(self, own: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Return the name that all ranks' calls give, or of calls with a name for each row, the names of all ranks. A
        collective.

        own: None if this rank's call has failed.  Returns None if every rank's has, or if the others raise.
        Raises RuntimeError, on every rank with a call, if they differ.
        """
        with lost_rank_reported("agreeing on the adapters"):
            of_ranks = all_gather_objects(own)
        given = [names for names in of_ranks if names is not None]
        if all(isinstance(names, tuple) for names in given):
            return tuple(sorted({name for names in given for name in names})) if given else None
        if len(set(given)) == 1:
            return given[0]
        if own is None:
            return None
        on_ranks = "; ".join(f"rank {rank}: {names!r}" for rank, names in enumerate(of_ranks) if names is not None)
        raise RuntimeError(f"ranks name different adapters ({on_ranks}); under ZeRO-3 name the same on every rank")

    @waiting_to("refresh weights")
    def refresh(self, adapters: Adapters) -> None:
        """Update the stale snapshot for a window with `adapters`. A collective if weights are partitioned."""
        with lost_rank_reported("gathering the weights"):
            if self._must_gather(adapters):  # tell ranks whose request failed to join: see `join_refresh`
                self._any_refreshes(adapters, True)
            self._gather(adapters)

    @waiting_to("refresh weights")
    def join_refresh(self, adapters: Adapters) -> None:
        """Join the gather if another rank refreshes; for a request that failed before its window opened."""
        if self._exchanges_names(adapters):
            agreed = self.agree_on(None)
            if agreed is None:
                return
            adapters = agreed
        with lost_rank_reported("gathering the weights"), self.naming(adapters):
            if self._must_gather(adapters) and self._any_refreshes(adapters, False):
                self._gather(adapters)

    def _any_refreshes(self, adapters: Adapters, is_own: bool) -> bool:
        """Whether a rank refreshes. A collective. Raises RuntimeError, on every rank, if their adapters differ."""
        state = self.snapshot.weights.state(bool(adapters))
        texts = all_gather_objects(adapters_text(state.adapters) if is_own else None)
        if len({text for text in texts if text is not None}) > 1:
            on_ranks = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
            raise RuntimeError(f"ranks gather weights for different adapters ({on_ranks}); set the same on every rank")
        return any(text is not None for text in texts)

    def _must_gather(self, adapters: Adapters) -> bool:
        return self.is_collective and self.snapshot.must_gather(bool(adapters))

    def _gather(self, adapters: Adapters) -> None:
        self.refreshes += 1
        begin = time.perf_counter()
        nbytes = self.snapshot.refresh(self.profiler.phase, bool(adapters))
        self.profiler.gathered(nbytes)
        if isinstance(adapters, str) and self.logs_switches and self.snapshot.merges():
            self.logs_switches = False
            logger.info(
                f"hybrid: adapter {adapters!r} was merged for a call in {time.perf_counter() - begin:.3g} s "
                f"({nbytes} bytes gathered). Merged weights are one adapter's: each call for another one than the last "
                "merges again. Make the calls of one adapter one after the other, or set rollout.lora to 'unmerged'"
            )
        _, gathers = self.snapshot.base_gathers
        if gathers > MAX_BASE_GATHERS and self.warns_of_gathers:
            self.warns_of_gathers = False
            warnings.warn(
                f"the base weights were gathered {gathers} times without a step in between, since calls with and "
                "without adapters, or for different ones, alternate and one copy holds the base or the merged weights. "
                "Make all calls of one kind before those of the other, or set rollout.memory_limit to what both need: "
                "engine.memory_plan(...), 'pinned, base kept'",
                stacklevel=2,
            )

    @contextmanager
    def _swapped(self, adapters: Adapters, by_user: bool) -> Iterator[None]:
        outer = self.swapped, self.swapped_key, self.swapped_overwrites
        self.first_replaced.append(len(self.replaced))
        try:
            self._swap_in(adapters, by_user)
            yield
            written = by_user and self.swapped is not None and self.swapped.changed()
        except BaseException:
            written = False
            if by_user and self.swapped is not None and self.swapped.changed():
                self.snapshot.release()
            raise
        finally:
            first = self.first_replaced.pop()
            restore(self.replaced[first:])
            del self.replaced[first:]
            self.swapped, self.swapped_key, self.swapped_overwrites = outer
            if self.swapped is not None:
                self.swapped.accept(self.refreshes)
        if written:
            self.snapshot.release()
            raise RuntimeError(WRITTEN)

    def _refuse_overwritten(self, by_name: bool) -> None:
        """If a nested window has overwritten copies that the open one has swapped in, let reading them raise until
        `_renew` swaps in current ones.

        by_name: whether the nested window was of a named adapter, whose merge may have overwritten any merged weight.
        """
        if not self.swaps:
            return
        if not by_name and self.swapped_overwrites == self.snapshot.overwrites:
            return
        if self.swapped_key == () or self.snapshot.is_fresh(self.uses_adapters):
            return
        over = self.snapshot.merged_over
        modules = [module for module, own in self.owners if not over.keys().isdisjoint(own.values())]
        layers = {*over.values(), *(self.snapshot.merged_modules() if by_name else ())}
        tables = [module.__dict__ for module in dict.fromkeys((*modules, *(layer.plain for layer in layers)))]
        self.replaced += [(table, "_parameters", table["_parameters"]) for table in tables]
        for table in tables:
            table["_parameters"] = OverwrittenParameters(table["_parameters"])
        self.swapped_key = ()

    def _swap_in(self, adapters: Adapters, by_user: bool) -> None:
        key = self._key(adapters)
        cached_key, tables = self.snapshot.swapped.get(adapters, (None, []))
        if self.adapters:  # inside another window modules have other forwards
            tables = self._replacements(adapters)
        elif key != cached_key:  # copies have moved, or other adapters are active
            tables = self._replacements(adapters)
            self.snapshot.swapped[adapters] = key, tables
        owners, names = [owner for owner, _, _ in tables], [name for _, name, _ in tables]
        # Copied: code inside the window may change a dictionary that was swapped in.
        content = [value.copy() if type(value) is dict else value for _, _, value in tables]
        self.replaced += [(owner, name, owner.get(name, ABSENT)) for owner, name, _ in tables]
        set_items(owners, names, content)
        self.swapped_key, self.swapped_overwrites, self.swapped = key, self.snapshot.overwrites, None
        if by_user:
            # Only a refresh writes to copies: what the last window found at its end is what they hold now.
            last_key, watch = self.snapshot.watches.get(adapters, (None, None))
            watch = watch if (key, self.refreshes) == last_key else None
            swapped = [value for value in content if type(value) is dict]
            self.swapped = SwappedParameters(swapped, self.own, self.refreshes, watch)
            self.snapshot.watches[adapters] = (key, self.refreshes), self.swapped.watch

    def _key(self, adapters: Adapters) -> tuple:
        """Differs if other tensors or modules are to be swapped in. The refresh has just read the active adapters."""
        return self.snapshot.moves, self.snapshot.fresh[bool(adapters)].adapters, len(self.switched)

    def _replacements(self, adapters: Adapters) -> list[Replacement]:
        """Return the replacements of attributes."""
        swapped = list(self._swapped_attributes(bool(adapters))) if self.swaps else []
        # With adapters disabled by PEFT's flag a copy of any module would have them disabled for ever.
        modules = [module for module, _, _ in swapped] if adapters else [module for module, _ in self.owners]
        swapped += [(module, name, INFERENCE_ONLY) for module in modules for name in STATE_HOOKS]
        swapped += [(module, name, refuse_merge) for module, name in self.merging]
        # An adapted module's plain module occurs twice, as an owner of parameters and as `plain`: the last counts.
        return list({(module, name): (module.__dict__, name, value) for module, name, value in swapped}.values())

    def _swapped_attributes(self, adapters: bool) -> Iterator[tuple[nn.Module, str, Any]]:
        """For each attribute to replace: its module, its name, and the replacement."""
        for module, own in self.owners:
            tensors = {name: param if param is None else self.snapshot.tensor(param) for name, param in own.items()}
            if any(tensors[name] is not param for name, param in own.items()):
                yield module, "_parameters", tensors
        for module, shell, own in self.quantized:
            yield (
                shell,
                "_parameters",
                {name: param if param is None else self.snapshot.tensor(param) for name, param in own.items()},
            )
            yield module, "forward", shell
        for layer, own in self.plains:
            runs_own = self.snapshot.weights.is_unmerged(
                layer, adapters
            )  # the wrapper itself runs, on swapped-in tensors
            if not runs_own:
                yield layer.plain, "_parameters", {**own, **self.snapshot.weights_of(layer, adapters)}
            if layer.wrapper in self.switched:
                continue
            if not runs_own:
                yield layer.wrapper, "forward", layer.plain
            elif layer.wrapper.__dict__.get("forward") is layer.plain:  # nested in a window without adapters
                yield layer.wrapper, "forward", type(layer.wrapper).forward.__get__(layer.wrapper)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block the model has its own parameters and modules, also while a window is open."""
        swapped = [(owner, name, owner.get(name, ABSENT)) for owner, name, _ in self.replaced]
        restore(self.replaced)
        try:
            yield
        finally:
            restore(swapped)

    @contextmanager
    def adapters_matched(self) -> Iterator[None]:
        """Inside the block the model's own modules use adapters exactly if the open window does.

        Needed where the snapshot contains the adapters and is not swapped in: the modules then still have theirs.
        Raises NotImplementedError if they cannot be disabled.
        """
        if self.swaps or not self.merges or self.uses_adapters:
            yield
            return
        self._require_switchable(runs_modules=True)
        with disabled(self.layers):
            yield

    def _require_switchable(self, runs_modules: bool) -> None:
        """Raise NotImplementedError if an adapter whose own forward runs cannot be disabled.

        runs_modules: whether adapter layers' own forwards run, though they could be merged.
        """
        for layer in self.snapshot.adapted:
            if getattr(layer.wrapper, "merged_adapters", ()):
                raise RuntimeError(
                    f"{layer.name}: adapters=False, and PEFT has merged {layer.wrapper.merged_adapters} into the base "
                    "weights; call unmerge_adapter() first"
                )
            if runs_modules and not isinstance(layer.wrapper, BaseTunerLayer):
                raise NotImplementedError(
                    f"{layer.name}: adapters=False is not available with hybrid_engine.pin_parameters=false or "
                    "inference_tp_size above 1: DeepSpeed-Chat's LoRA cannot be switched off where it runs as it is. "
                    "Set pin_parameters to true, and inference_tp_size to 1."
                )
        if reason := unswitchable(self.model, self.snapshot.weights.running):
            raise NotImplementedError(
                f"adapters=False is not available: {reason}. For a reference, train with LoRA, or load the base model "
                "into an engine of its own (hybrid.init_inference)"
            )


def unswitchable(model: nn.Module, running: Iterable[Any]) -> str:
    """Return the reason why the flags of PEFT's adapter layers, `running`, do not disable `model`'s adapters; or ""."""
    for name, config in (getattr(model, "peft_config", {}) if running else {}).items():
        if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type in UNSWITCHABLE:
            return f"adapter {name!r}, {config.peft_type.value}, is not in layers that can be disabled"
    if any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in running):
        return "the adapters are merged into the training weights (call the model's unmerge_adapter())"
    return ""


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
