"""Finds code that a fused decoder cannot stand in for: users' hooks, and forwards, or functions that they call, of no
known package.

The self-check compares a few random tokens. A forward that differs for some inputs alone (a token, a position, a
length) passes it, so the code itself is asked where it comes from.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import compress, repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid.models.model_info import ModelInfo
from hybrid.weights.lora import is_chat_lora

# Frameworks' hooks that do not change what a fused decoder computes, by the module that defines them (deepspeed 0.19.8,
# transformers 5.23, TRL 1.16): ZeRO's and the engine's, the FLOPS profiler's, NEFTune's (off in eval mode), activation
# offloading's, and transformers' collectors of hidden states, which stay on the layers after the first forward with
# `output_hidden_states`.
HARMLESS_HOOK_MODULES = (
    "deepspeed.runtime.zero.",
    "deepspeed.runtime.engine",
    "deepspeed.profiling.",
    "transformers.integrations.neftune",
    "transformers.utils.output_capturing",
    "trl.models.activation_offloading",
)
# The hook that makes an embedding's output require gradients: transformers' and PEFT's names, which tutorials copy.
INPUT_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
# The packages whose forwards are the families' own, or leave their results: TRL's computes losses (1.16), accelerate's
# and torch's call what they wrap.
KNOWN_PACKAGES = (
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "torch",
    "trl",
    "hybrid",
    "functools",
    "bitsandbytes",
)
REMEDY = (
    "the self-check compares a few inputs alone; restore it before the engine is built, or set rollout.trust_forward, "
    "or init_inference's trust_forward, to true if it computes the same for all inputs"
)


def is_harmless_hook(hook: Callable) -> bool:
    """Whether a forward hook or forward pre-hook is a framework's that does not change a fused decoder's results.

    The input-gradient hook is recognised by its name and its code, because every framework has its own copy.
    """
    while isinstance(hook, partial):
        hook = hook.func
    if (getattr(hook, "__module__", None) or "").startswith(HARMLESS_HOOK_MODULES):
        return True
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_name in INPUT_GRADIENT_HOOKS and code.co_names == ("requires_grad_",)


class UserHooks:
    """Finds hooks on the model's modules that only run if the modules run.

    model: whose modules are searched.  own_hooks: gives the training engine's handles. Each hook is classified once, by
        its number, which is unique for the life of the process; later calls only read every module's hook dictionaries.
    """

    def __init__(self, model: nn.Module, own_hooks: Callable[[], Iterable[RemovableHandle]]):
        self.modules, self.own_hooks = list(model.named_modules()), own_hooks
        self.harmless: set[int] = set()  # numbers of hooks that do not prevent the fused decoder

    def first(self) -> str:
        """Return a description of the first foreign hook; "" if there is none."""
        for name, module in self.modules:
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number, hook in hooks.items():
                    if number in self.harmless:
                        continue
                    if not is_harmless_hook(hook) and number not in {handle.id for handle in self.own_hooks()}:
                        return f"{getattr(hook, '__qualname__', type(hook).__name__)} on {name or 'the model'}"
                    self.harmless.add(number)
        return ""


def layers_of(forward: Any) -> Iterator[Any]:
    """Yield a forward's function, then the functions that it wraps (`functools.wraps`, `partial`), outermost first."""
    if isinstance(forward, MethodType):
        yield from layers_of(forward.__func__)
        return
    if isinstance(forward, partial):
        yield from layers_of(forward.func)
    else:
        yield forward
    if "__wrapped__" in getattr(forward, "__dict__", {}):
        yield from layers_of(forward.__dict__["__wrapped__"])


def module_of(function: Any) -> str:
    """Return the Python module that a function's code is from, or the class of a callable object. `functools.wraps`
    copies `__module__`, so that of a Python function or an object is not asked."""
    if isinstance(function, BuiltinFunctionType):
        return function.__module__ or ""
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__


def foreign_part(forward: Any, trusted: Collection[Callable] = ()) -> str:
    """Return the name of the outermost function of a forward that is neither trusted nor of a known package; "" if all
    are."""
    for function in layers_of(forward):
        # The plain module that a window swaps in is listed itself.
        if isinstance(function, nn.Module) or function in trusted:
            continue
        if (module := module_of(function)).partition(".")[0] not in KNOWN_PACKAGES:
            return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
    return ""


def references_of(forward: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each global function that a forward of transformers calls, directly or through another one: the globals
    dictionary that has it, and its name there."""
    pending, seen = list(layers_of(forward)), set()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or not module_of(function).startswith("transformers.models."):
            continue
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if (name, id(function.__globals__)) in seen or isinstance(value, type) or not callable(value):
                continue
            seen.add((name, id(function.__globals__)))
            yield function.__globals__, name
            pending += layers_of(value)


class ForeignForwards:
    """Finds forwards, and functions that forwards call, that are of no known package: a remote model's, a patch of the
    class or of an instance, of a function in the family's own module, or of its attention.

    One look reads every module's forward; they are searched again only if a class's forward, an instance's, or one of
    these functions is another one.

    Args:
        trusts_all: search nothing; only `replaced` is kept up to date.

    Attributes:
        replaced: grows when a look finds another forward within the layers, where the engine replaces none.
    """

    def __init__(self, info: ModelInfo, trusts_all: bool = False):
        self.config, self.trusts_all, self.reason, self.replaced = info.text_config, trusts_all, "", 0
        self.names, self.modules = zip(*info.model.named_modules(), strict=True)
        self.states = [module.__dict__ for module in self.modules]
        index = {module: number for number, module in enumerate(self.modules)}
        inner = [index[module] for layer in info.layers for module in layer.modules() if module is not layer]
        self.is_inner = [False] * len(self.modules)
        for number in inner:
            self.is_inner[number] = True
        self.references: list[tuple[dict[str, Any], str]] = []
        self.instances: list[Any] = []  # the forward that each module has on its instance, else None; as last read
        self.overrides: list[Any] = []  # the same without the plain modules that a window swaps in
        self.seen: tuple = ()
        self.seen_inner: tuple = ()

    def first(self) -> str:
        """Look at the forwards; return a description of the first foreign one, "" if there is none."""
        kinds = list(map(type, self.modules))
        instances = list(map(dict.get, self.states, repeat("forward")))
        if not self.instances or not all(map(is_, instances, self.instances)):
            self.instances = instances
            self.overrides = [None if isinstance(forward, nn.Module) else forward for forward in instances]
        inner_kinds, inner_overrides = (list(compress(of_all, self.is_inner)) for of_all in (kinds, self.overrides))
        inner = inner_kinds, [kind.forward for kind in dict.fromkeys(inner_kinds)], inner_overrides
        if inner != self.seen_inner:
            self.seen_inner = inner
            self.replaced += 1
        if not self.trusts_all and self._current(kinds) != self.seen:
            self.reason = self._find()
            self.seen = self._current(kinds)
        return self.reason

    def _current(self, kinds: list[type[nn.Module]]) -> tuple:
        forwards = [kind.forward for kind in dict.fromkeys(kinds)]
        functions = [values.get(name) for values, name in self.references]
        return kinds, forwards, self.overrides, functions, self._attention()

    def _attention(self) -> Callable | None:
        """Return the attention function of the configuration; None for the one in the family's own module."""
        return ALL_ATTENTION_FUNCTIONS.get(getattr(self.config, "_attn_implementation", None) or "eager")

    def _find(self) -> str:
        self.references = []
        examples: dict[type[nn.Module], int] = {}
        for index, module in enumerate(self.modules):
            examples.setdefault(type(module), index)
        forwards = [(index, kind.forward) for kind, index in examples.items()]
        # Every script has its own copy of DeepSpeed-Chat's LoRA layer; the merge is checked instead.
        trusted = {type(module).forward for module in self.modules if is_chat_lora(module)}
        on_instances = [(index, forward) for index, forward in enumerate(self.overrides) if forward is not None]
        for index, forward in (*forwards, *on_instances):
            if foreign := foreign_part(forward, trusted):
                return f"the forward of {self._name(index)} is {foreign} ({REMEDY})"
        self.references = [reference for _, forward in forwards for reference in references_of(forward)]
        for values, name in self.references:
            if foreign := foreign_part(values.get(name)):
                return f"{values['__name__']}.{name} is {foreign} ({REMEDY})"
        foreign = foreign_part(self._attention()) if self._attention() is not None else ""
        return f"the attention function is {foreign} ({REMEDY})" if foreign else ""

    def _name(self, index: int) -> str:
        return self.names[index] or "the model"
