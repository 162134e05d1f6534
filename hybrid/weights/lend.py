"""The snapshot lent to the model for the length of a `with`.

The parameter *dictionaries* of modules are replaced, not parameters' `.data`: under ZeRO-3 the getter would gather
again on access and run the base weights (deepspeed 0.19.8). What belongs to the model is put back untouched.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import getitem
from typing import Any, NoReturn

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.weights.module_tables import set_all
from hybrid.weights.snapshot import Snapshot, active_adapters


class InferenceOnly(dict):
    """In the place of a lent module's `state_dict` hooks: what the module holds now is inference's, which no checkpoint
    and no copy may have."""

    def values(self) -> list[Callable]:
        return [refuse_lent]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_lent()

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        refuse_lent()


def refuse_lent(*args: Any) -> NoReturn:
    """Raise RuntimeError for a copy, a pickle or a `state_dict` of what inference has lent."""
    raise RuntimeError(
        "state_dict(), load_state_dict(), a copy or a pickle of a module inside `with engine.inference()`: there the "
        "module holds inference's weights, adapters merged. Leave the block first; the engine's own save_checkpoint() "
        "and save_16bit_model() work inside too"
    )


INFERENCE_ONLY = InferenceOnly()
STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class Window:
    """Opens the snapshot to a model: inside `opened()`, the model computes with the snapshot's tensors.

    refresh: brings the snapshot up to date before it is used; called with whether adapters will be.
    hooks_off: entered while the snapshot is lent: the training engine's hooks are off.
    lends: false where there is nothing to lend: weights are gathered layer by layer as the model's own layers run
        (streaming), or the snapshot is a decoder's of ours alone.  merges: the snapshot has adapters, merged or
        beside what they adapt.
    sharing: entered while the snapshot is lent: modules that are lent slices compute with other ranks there.
    around: what is entered first of all and left last, once for windows within each other.
    renew: called before an outermost window is opened: brings what runs up to date with the model's modules, and gives
        whether they were others, so that another window than this one is the model's now.
    device: where calls of the model are to have their inputs; None: where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshot: Snapshot,
        refresh: Callable[[bool], None],
        hooks_off: Callable[[], AbstractContextManager],
        lends: bool,
        merges: bool,
        sharing: Callable[[], AbstractContextManager] = nullcontext,
        around: Callable[[], AbstractContextManager] = nullcontext,
        renew: Callable[[], bool] = lambda: False,
        device: torch.device | None = None,
    ):
        self.model = model
        self.snapshot = snapshot
        self.refresh = refresh
        self.hooks_off = hooks_off
        self.lends, self.merges = lends, merges
        self.sharing, self.around, self.renew, self.device = sharing, around, renew, device
        self.adapters: list[bool] = []  # for each window open now, the outermost first: whether adapters are used
        self.replaced: list[tuple[dict, str, dict]] = []  # what a dictionary of a module's `__dict__` was, in order
        # The model's own dictionaries, read once: inside a window, the model's tree is another one.
        self.owners = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
        self.plains = [(one, dict(one.plain._parameters)) for one in snapshot.adapted]
        # What runs as it is, and so must be switched off to run without adapters. LoRA layers the snapshot has, or not.
        kinds = AuxiliaryTrainingWrapper | (TrainableTokensLayer if merges else BaseTunerLayer)
        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self.switchable = [module for module in model.modules() if isinstance(module, kinds)]

    @property
    def is_open(self) -> bool:
        """Whether the model is computing with the snapshot now."""
        return bool(self.adapters)

    @property
    def uses_adapters(self) -> bool:
        """Whether the window that is open uses adapters."""
        return self.adapters[-1]

    def resolved(self, adapters: bool | None) -> bool:
        """Whether a window that is opened with `adapters` now uses them: None is as the one around it, or as the model
        has them."""
        return (self.adapters[-1] if self.adapters else True) if adapters is None else adapters

    @contextmanager
    def opened(self, adapters: bool | None = None) -> Iterator[None]:
        """Inside the block the model runs on the snapshot, fresh; adapters: None as the model has them, False none.

        Windows nest: an inner one that uses the same adapters costs nothing.
        """
        adapters = self.resolved(adapters)
        with ExitStack() as stack:
            if not self.adapters:
                stack.enter_context(self.around())
            if not self.adapters or self.adapters[-1] != adapters:
                if not adapters:
                    stack.enter_context(disabled(self.switchable))
                    if not self.merges:
                        self._require_switchable()
                self.refresh(adapters)
                if self.lends:
                    stack.enter_context(self.hooks_off())
                stack.enter_context(self._lent(adapters))
                if self.lends:
                    stack.enter_context(self.sharing())
            self.adapters.append(adapters)
            stack.callback(self.adapters.pop)
            yield

    @contextmanager
    def _lent(self, adapters: bool) -> Iterator[None]:
        lent = self._to_lend(adapters)
        owners, names = [owner for owner, _, _ in lent], [name for _, name, _ in lent]
        # A dictionary that was lent may have been changed by who it was lent to.
        content = [table if table is INFERENCE_ONLY else table.copy() for _, _, table in lent]
        count = len(self.replaced)
        self.replaced += zip(owners, names, map(getitem, owners, names), strict=True)
        try:
            set_all(owners, names, content)
            yield
        finally:
            give_back(self.replaced[count:])
            del self.replaced[count:]

    def _to_lend(self, adapters: bool) -> list[tuple[dict, str, dict]]:
        """Of each module whose own content is not what inference uses its `__dict__`, the name of one of its
        dictionaries, and what takes that one's place: made once for each layout of the snapshot and active adapters."""
        # The refresh before has looked at what is active; without adapters nothing depends on it.
        fresh = self.snapshot.fresh.get(adapters)
        active = active_adapters(self.snapshot.adapted) if fresh is None else fresh[2:]
        key = (self.snapshot.layout, adapters, active)
        known_for, lent = self.snapshot.lent.get(adapters, (None, []))
        # Within another window the model's tree is another one.
        if self.adapters or key != known_for:
            lent = list(self._lent_dictionaries(adapters)) if self.lends else []
            # With adapters off by PEFT's flag a copy of any module would have them off for ever.
            modules = [module for module, _, _ in lent] if adapters else [module for module, _ in self.owners]
            lent += [(module, name, INFERENCE_ONLY) for module in modules for name in STATE_HOOKS]
            lent = distinct([(module.__dict__, name, content) for module, name, content in lent])
            if not self.adapters:
                self.snapshot.lent[adapters] = key, lent
        return lent

    def _lent_dictionaries(self, adapters: bool) -> Iterator[tuple[nn.Module, str, dict]]:
        """Each module whose own content is not what inference uses, which of its dictionaries, what takes its place."""
        for module, own in self.owners:
            tensors = {name: param if param is None else self.snapshot.tensor(param) for name, param in own.items()}
            if any(tensors[name] is not param for name, param in own.items()):
                yield module, "_parameters", tensors
        children: dict[nn.Module, dict] = {}
        for one, own in self.plains:
            if not self.snapshot.is_unmerged(one, adapters):  # else the wrapper runs, over what its modules are lent
                yield one.plain, "_parameters", {**own, **self.snapshot.weights_of(one, adapters)}
                children.setdefault(one.parent, dict(one.parent._modules))[one.child] = one.plain
            elif one.parent._modules[one.child] is not one.wrapper:  # in a window within one without adapters
                children.setdefault(one.parent, dict(one.parent._modules))[one.child] = one.wrapper
        yield from ((parent, "_modules", own) for parent, own in children.items())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block the model has its own parameters and modules, in an open window too."""
        lent = [(owner, name, owner[name]) for owner, name, _ in self.replaced]
        give_back(self.replaced)
        try:
            yield
        finally:
            for owner, name, content in lent:
                owner[name] = content

    @contextmanager
    def as_asked(self) -> Iterator[None]:
        """Inside the block the model's own modules compute with adapters, or without, as the window has them: where
        the snapshot has them and is not lent, they are there all the same."""
        if self.lends or not self.merges or self.uses_adapters:
            yield
            return
        self._require_switchable()
        with disabled(self.layers):
            yield

    def _require_switchable(self) -> None:
        for one in self.snapshot.adapted:
            if not isinstance(one.wrapper, BaseTunerLayer):
                raise NotImplementedError(
                    f"{one.name}: adapters=False with hybrid_engine.pin_parameters=false or inference_tp_size above 1; "
                    "DeepSpeed-Chat's LoRA cannot be switched off where it runs as it is. Set pin_parameters to true, "
                    "and inference_tp_size to 1."
                )


def distinct(lent: list[tuple[dict, str, dict]]) -> list[tuple[dict, str, dict]]:
    """Of what takes the place of one dictionary twice the last: an adapted module's plain one is lent to as an owner of
    parameters, and as itself."""
    return list({(id(owner), name): (owner, name, content) for owner, name, content in lent}.values())


def give_back(replaced: list[tuple[dict, str, dict]]) -> None:
    """Give modules the dictionaries that they had; the last first, as one may have been replaced twice."""
    for owner, name, content in reversed(replaced):
        owner[name] = content


@contextmanager
def disabled(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block PEFT's adapters in `layers` are off.

    The flag alone: PEFT's `enable_adapters` would also rewrite which parameters require gradients (0.21).
    """
    before = [(layer, layer._disable_adapters) for layer in layers]
    try:
        for layer, _ in before:
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in before:
            layer._disable_adapters = flag
