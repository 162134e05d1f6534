"""Changes to all modules of a model at once: hooks off, eval mode on. Large models have tens of thousands of hook
dictionaries, so each change is one pass over lists that are made once."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from operator import attrgetter, getitem, is_, setitem
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

END = object()  # ends a sequence that is compared with one of another length
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
ABSENT: Any = object()  # an attribute that is not set on the instance

Replacement = tuple[dict, str, Any]  # a module's `__dict__`, the name of an attribute in it, and its value


def set_items(owners: Iterable[dict], names: Iterable[str], values: Iterable) -> None:
    """owner[name] = value for each triple."""
    deque(map(setitem, owners, names, values), maxlen=0)


def restore(replaced: Sequence[Replacement]) -> None:
    """Put the modules' attributes back, the last replaced first: nested windows may replace one twice."""
    for owner, name, value in reversed(replaced):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value


@contextmanager
def replaced(values: Sequence[Replacement]) -> Iterator[list[Replacement]]:
    """Inside the block the modules' attributes have these values, each attribute once. Yields their own."""
    before = [(owner, name, owner.get(name, ABSENT)) for owner, name, _ in values]
    try:
        restore(values)
        yield before
    finally:
        restore(before)


class ModuleTree:
    """The modules of a model, listed once, and again when `changed` finds that they have changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._list()

    def _list(self) -> None:
        self.modules = list(self.model.modules())
        # The flag of a wrapper that has none (torch.compile's) is that of the module inside it.
        self.states = [module.__dict__ for module in self.modules if "training" in module.__dict__]
        self.tables: list[dict[str, Any]] = [
            table for module in self.modules for table in (module._modules, module._parameters)
        ]
        self.params = list(self.model.parameters())
        self.content = list(self._content())
        self.switchers = [module for module in self.modules if type(module).train is not nn.Module.train]

    def _content(self) -> Iterator[object]:
        return chain(chain.from_iterable(map(dict.values, self.tables)), map(attrgetter("dtype"), self.params), (END,))

    def differs(self) -> bool:
        """Whether modules or parameters were added, removed, replaced or cast since they were listed. Inside a window
        too: the model's own dictionaries are compared."""
        return not all(map(is_, self._content(), self.content))

    def listed(self) -> list[nn.Module]:
        """Return all modules: the same list until they have changed."""
        return list(self.model.modules()) if self.differs() else self.modules

    def changed(self) -> bool:
        """Whether modules or parameters were added, removed, replaced or cast since the last call. If so, relists
        them."""
        if not self.differs():
            return False
        self._list()
        return True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block the listed modules are in eval mode; afterwards each has its own mode back."""
        states = self.states
        before = list(map(getitem, states, repeat("training")))
        try:
            if any(map(does_more_in_train, self.switchers)):
                self.model.train(False)
            else:
                set_items(states, repeat("training"), repeat(False, len(states)))
            yield
        finally:
            set_items(states, repeat("training"), before)


def does_more_in_train(module: nn.Module) -> bool:
    """Whether a module's override of `train()` does more than set the flag (transformers 5.23 exchanges kernels if the
    model uses any)."""
    return type(module).train is not PreTrainedModel.train or module.use_kernels


class EngineHooks:
    """Takes a training engine's hooks off modules and puts them back.

    modules: returns the modules.  handles: returns the handles of the engine's hooks, on these and on other modules.

    A hook dictionary ("table") with only the engine's hooks is replaced by an empty one. From a table that also holds
    other hooks the engine's are removed one by one. The tables are read on first use, and again after one has changed.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], handles: Callable[[], Iterable[RemovableHandle]]):
        self.modules, self.handles = modules, handles
        self.is_off = False
        self.counts: list[int] | None = None  # number of hooks in each table; None: not read
        self.next_id = 0  # of the process's next hook, as of the last look

    def _read(self) -> None:
        handles: dict[int, list[RemovableHandle]] = {}
        for handle in self.handles():
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table:
                handles.setdefault(id(table), []).append(handle)
        self.owners, self.names, self.tables, self.own, self.in_mixed_tables = [], [], [], [], []
        for module in self.modules():
            if type(module).forward is nn.Module.forward:  # a ModuleList or ModuleDict, which is never called
                continue
            for name in HOOK_TABLES:
                table = module.__dict__[name]
                own = handles.get(id(table), [])
                if len(own) < len(table):
                    self.in_mixed_tables += own
                elif own:
                    self.owners.append(module.__dict__)
                    self.names.append(name)
                    self.tables.append(table)
                    self.own.append(own)
        self.counts = list(map(len, self.tables))
        self.empty: list[dict] = [OrderedDict() for _ in self.tables]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the engine's hooks do not run; afterwards they are back in their order. Other hooks may be
        added and removed meanwhile. Re-entrant: a nested block does nothing."""
        if self.is_off:
            yield
            return
        # With the same number no hook of any kind was registered in the process since.
        is_read = self.counts is not None and all(map(is_, map(getitem, self.owners, self.names), self.tables))
        if not is_read or (RemovableHandle.next_id != self.next_id and list(map(len, self.tables)) != self.counts):
            self._read()
        self.next_id = RemovableHandle.next_id
        with unhooked(self.in_mixed_tables) if self.in_mixed_tables else nullcontext():
            self.is_off = True
            set_items(self.owners, self.names, self.empty)
            try:
                yield
            finally:
                if RemovableHandle.next_id == self.next_id:
                    set_items(self.owners, self.names, self.tables)
                else:
                    self._put_back()
                self.is_off = False

    def _put_back(self) -> None:
        """Put the tables back where hooks may have been registered meanwhile."""
        if not any(self.empty) and all(map(is_, map(getitem, self.owners, self.names), self.empty)):
            set_items(self.owners, self.names, self.tables)
            return
        entries = zip(self.owners, self.names, self.tables, self.empty, self.own, strict=True)
        for owner, name, table, empty, own in entries:
            now = owner[name]
            if now is empty and not empty:
                owner[name] = table
                continue
            # Hooks were registered in the replacement table, and their handles refer to it: the engine's hooks move
            # into it, and run first.
            content = {**table, **now}
            now.clear()
            now.update(content)
            for handle in own:
                handle.hooks_dict_ref = ref(now)
        self.counts = None


@contextmanager
def unhooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside the block the hooks of `handles` do not run; afterwards they are back in their order.

    Other hooks on the same modules stay, and may be added and removed meanwhile.
    """
    taken: dict[int, tuple[dict, dict, set]] = {}  # by id: the dictionary, its hooks before, ids of removed hooks
    try:
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                _, _, gone = taken.setdefault(id(hooks), (hooks, dict(hooks), set()))
                gone.add(handle.id)
                del hooks[handle.id]
        yield
    finally:
        for hooks, before, gone in taken.values():
            kept = {key: hook for key, hook in before.items() if key in gone or key in hooks}
            after = {**kept, **hooks}
            hooks.clear()
            hooks.update(after)


@contextmanager
def patched_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Inside the block the attribute is `value`; afterwards the previous value is restored, or the class's."""
    before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
    owner.__dict__[name] = value
    try:
        yield
    finally:
        del owner.__dict__[name]
        owner.__dict__.update(before)
