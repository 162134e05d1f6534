"""PEFT's adapters by name: one of them, or several, run for a while, whatever is active."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.weights.module_dicts import Replacement, patched_attribute, replaced

BASE = "__base__"  # no adapter, in PEFT's mixed batches
# Methods of PEFT that also run outside of the layers, whose flags do not switch them (0.21).
UNSWITCHABLE = (PeftType.XLORA, PeftType.SHADOW)

# Of a window: the active ones, none of them, the one of that name, or several, each for the rows that name it.
Adapters = bool | str | tuple[str, ...]


class RowNames(tuple[str, ...]):
    """The adapters that a call's rows name: of one request for all of them, or of one each."""


class NamedAdapters:
    """A model's adapters by their names in PEFT.

    Flags alone are set: PEFT's `set_adapter` would also change which parameters require gradients (0.21).
    """

    def __init__(self, model: nn.Module):
        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper, BaseTuner, PeftModel)
        self.modules: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
        self.configs: dict[str, Any] = getattr(model, "peft_config", {})
        self.own_flags: list[Replacement] = []  # the model's own, while a named adapter runs

    def names(self) -> list[str]:
        """Return the names of all adapters."""
        return sorted({*self.configs, *(name for module in self.modules for name in adapters_at(module))})

    def has_module_copies(self) -> bool:
        """Whether adapters have copies of whole modules (PEFT's `modules_to_save`) or of an embedding's rows."""
        return any(isinstance(module, AuxiliaryTrainingWrapper) for module in self.modules)

    def require(self, name: Any) -> None:
        """Raise TypeError if `name` is no string, ValueError if no adapter has it, NotImplementedError if its method
        cannot be switched, RuntimeError if PEFT has merged adapters into the training weights."""
        if not isinstance(name, str):
            several = "; for one name a row use adapter_names" if isinstance(name, list | tuple) else ""
            raise TypeError(f"adapter: {name!r} given; it must be the name of one of PEFT's adapters{several}")
        names = self.names()
        if name not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(
                f"adapter: {name!r} given; "
                + (f"it must be one of {known}, or {BASE!r} for none" if names else "the model has no adapters of PEFT")
            )
        config = self.configs.get(name)
        if config is not None and not runs_in_layers(config):
            raise NotImplementedError(
                f"adapter: {name!r} given; {config.peft_type.value} does not run in layers alone and cannot be named "
                "for a call; make it active with set_adapter"
            )
        for module in self.modules:
            if isinstance(module, BaseTunerLayer) and module.merged:
                raise RuntimeError(
                    f"adapter: {name!r} given, and PEFT has merged {module.merged_adapters} into the base weights; "
                    "call unmerge_adapter() first"
                )

    def flags(self, adapters: str | tuple[str, ...]) -> list[Replacement]:
        """Return the flags with which one adapter, or several, run and no others."""
        names = (adapters,) if isinstance(adapters, str) else adapters
        return [flag for module in self.modules for flag in flags_of(module, names)]

    def active(self) -> str | None:
        """Return the name of the adapter that is active alone, "__base__" if none is, and None if several are."""
        layers = [module for module in self.modules if isinstance(module, BaseTunerLayer)]
        active = {() if layer.disable_adapters else tuple(layer.active_adapters) for layer in layers} or {()}
        names = active.pop()
        return None if active or len(names) > 1 else names[0] if names else BASE

    def require_given(self, adapters: bool | None, adapter: Any, adapter_names: Any = None) -> None:
        """Raise for arguments of a call of which more than one is given, and for names as `require`."""
        given = {"adapters": adapters, "adapter": adapter, "adapter_names": adapter_names}
        given = {key: value for key, value in given.items() if value is not None}
        if len(given) > 1:
            text = " and ".join(f"{key}={value!r}" for key, value in given.items())
            raise ValueError(f"{text} given; give one of them")
        if isinstance(adapter_names, str):
            raise TypeError(f"adapter_names: {adapter_names!r} given; it must be a name for each row, or use adapter")
        names = [] if adapter is None else [adapter]
        for name in names if adapter_names is None else adapter_names:
            if name != BASE:
                self.require(name)

    @contextmanager
    def switched(self, adapters: Adapters) -> Iterator[None]:
        """Inside the block the adapters of these names run and no others; with a bool the model's own active ones
        do."""
        with replaced(self.own_flags if isinstance(adapters, bool) else self.flags(adapters)) as before:
            own_flags = [] if isinstance(adapters, bool) else (self.own_flags or before)
            with patched_attribute(self, "own_flags", own_flags):
                yield


def runs_in_layers(config: Any) -> bool:
    """Whether an adapter runs in PEFT's layers alone, which flags switch: no virtual tokens, and no invocation tokens
    (aLoRA), which `generate()` finds."""
    elsewhere = config.is_prompt_learning or config.is_adaption_prompt or config.peft_type in UNSWITCHABLE
    return not elsewhere and not getattr(config, "alora_invocation_tokens", None)


def adapters_at(module: Any) -> set[str]:
    """Return the names of the adapters that a module has."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        return module._adapters
    return module._get_available_adapters() if isinstance(module, BaseTunerLayer) else set()


def flags_of(module: Any, names: Sequence[str]) -> list[Replacement]:
    """Return the flags with which a module of PEFT runs adapters, as `set_adapter` and `enable_adapters` leave
    them."""
    table = module.__dict__
    if isinstance(module, PeftModel):
        return [(table, "active_adapter", names[0]), (table, "_adapters_disabled", False)]
    if isinstance(module, BaseTuner):
        return [(table, "active_adapter", names[0])]
    own = adapters_at(module)
    active = [name for name in names if name in own]
    return [(table, "_active_adapter", active), (table, "_disable_adapters", False)]


def chosen_adapters(adapters: bool | None, adapter: str | None) -> Adapters | None:
    """Return the adapters that a call's arguments give."""
    return False if adapter == BASE else adapters if adapter is None else adapter


def adapters_of(names: Sequence[str]) -> Adapters | None:
    """Return the adapters of a request whose rows name these; None without names."""
    if len(names) < 2:
        return chosen_adapters(None, names[0] if names else None)
    return tuple(name for name in names if name != BASE)


def require_name_for_each(adapter_names: Sequence[str], rows: int, of: str) -> None:
    """Raise ValueError unless there is a name for each row."""
    if len(adapter_names) != rows:
        raise ValueError(f"adapter_names: {len(adapter_names)} names given for {rows} rows of {of}; give one for each")
