"""What is changed in all modules of a model at once: hooks off, training mode off. Large models have tens of thousands
of tables of hooks, so each change is one pass over lists that are made once."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import getitem, is_, setitem
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

END = object()  # of a list that is compared with a longer or shorter one
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def set_all(owners: Iterable[dict], names: Iterable[str], values: Iterable) -> None:
    """owner[name] = value for each of them."""
    deque(map(setitem, owners, names, values), maxlen=0)


def all_the_same(these: Iterable, those: Iterable) -> bool:
    """Whether two sequences of one length, or that end with END, hold the same objects."""
    return all(map(is_, these, those))


class ModuleTree:
    """The modules of a model, listed once, until `changed` says that the model has others."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._list()

    def _list(self) -> None:
        self.modules = list(self.model.modules())
        self.states = [module.__dict__ for module in self.modules]
        self.tables = [table for module in self.modules for table in (module._modules, module._parameters)]
        self.content = list(self._content())
        self.switchers = [module for module in self.modules if type(module).train is not nn.Module.train]

    def _content(self) -> Iterator[object]:
        return chain(chain.from_iterable(map(dict.values, self.tables)), (END,))

    def changed(self) -> bool:
        """Whether modules or parameters were added, removed or replaced since the last look. They are listed again."""
        if all_the_same(self._content(), self.content):
            return False
        self._list()
        return True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block the listed modules do not train; afterwards each of them trains or not as it did."""
        states = self.states
        before = list(map(getitem, states, repeat("training")))
        try:
            if any(map(does_more_in_train, self.switchers)):
                self.model.train(False)
            else:
                set_all(states, repeat("training"), repeat(False, len(states)))
            yield
        finally:
            set_all(states, repeat("training"), before)


def does_more_in_train(module: nn.Module) -> bool:
    """Whether `train()` of a module that overrides it does more than note the mode (transformers 5.23 would exchange
    kernels, if it were to use any)."""
    return type(module).train is not PreTrainedModel.train or module.use_kernels


class EngineHooks:
    """A training engine's hooks on some modules, to be taken off and put back.

    modules: gives the modules.  handles: gives the handles of the engine's hooks, on these modules and on others.

    A table that holds the engine's hooks alone is replaced by an empty one. From a table that holds others' hooks too
    they are taken one by one. What is where is read on first use, and again where a table has changed since.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], handles: Callable[[], Iterable[RemovableHandle]]):
        self.modules, self.handles = modules, handles
        self.is_off = False
        self.counts: list[int] | None = None  # of hooks, by table; None: not read

    def _read(self) -> None:
        handles: dict[int, list[RemovableHandle]] = {}
        for handle in self.handles():
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table:
                handles.setdefault(id(table), []).append(handle)
        self.owners, self.names, self.tables, self.own, self.among_others = [], [], [], [], []
        for module in self.modules():
            if type(module).forward is nn.Module.forward:  # a list or dictionary of modules, which nobody calls
                continue
            for name in HOOK_TABLES:
                table = module.__dict__[name]
                own = handles.get(id(table), [])
                if len(own) < len(table):
                    self.among_others += own
                elif own:
                    self.owners.append(module.__dict__)
                    self.names.append(name)
                    self.tables.append(table)
                    self.own.append(own)
        self.counts, self.next_id = list(map(len, self.tables)), RemovableHandle.next_id
        self.empty = [OrderedDict() for _ in self.tables]

    def _is_current(self) -> bool:
        if self.counts is None:
            return False
        if RemovableHandle.next_id != self.next_id:  # of hooks of all kinds, anywhere
            if list(map(len, self.tables)) != self.counts:
                return False
            self.next_id = RemovableHandle.next_id
        return self._have(self.tables)

    def _have(self, tables: list[dict]) -> bool:
        return all_the_same(map(getitem, self.owners, self.names), tables)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the engine's hooks do not run; afterwards they are back in their order. Others' hooks may
        come and go meanwhile. Within itself it does nothing."""
        if self.is_off:
            yield
            return
        if not self._is_current():
            self._read()
        with unhooked(self.among_others):
            self.is_off = True
            set_all(self.owners, self.names, self.empty)
            try:
                yield
            finally:
                self._put_back()
                self.is_off = False

    def _put_back(self) -> None:
        if RemovableHandle.next_id == self.next_id or (not any(self.empty) and self._have(self.empty)):
            set_all(self.owners, self.names, self.tables)
            return
        entries = zip(self.owners, self.names, self.tables, self.empty, self.own, strict=True)
        for owner, name, table, empty, own in entries:
            now = owner[name]
            if now is empty and not empty:
                owner[name] = table
                continue
            # Somebody has hooks here whose handles know this table: the engine's move into it, and come first.
            content = {**table, **now}
            now.clear()
            now.update(content)
            for handle in own:
                handle.hooks_dict_ref = ref(now)
        self.counts = None


@contextmanager
def unhooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside the block the hooks behind `handles` do not run; afterwards they are back in their order.

    Other hooks on the same modules stay, and may come and go meanwhile.
    """
    taken: dict[int, tuple[dict, dict, set]] = {}  # by dictionary: the dictionary, what it held, whose hooks left
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
