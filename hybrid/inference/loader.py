"""Loading a model's weights for inference: from the model or a checkpoint, cast, onto the device."""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from hybrid.inference.tensor_files import Tensors, some

Read = Callable[[str], torch.Tensor]  # a name in the model to the full tensor, cast and on the device


def floating_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The dtype of activations: `dtype`, or the model's own if that is int8."""
    if dtype.is_floating_point:
        return dtype
    return next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)


class Cast:
    """Casts a model's tensors to `dtype` and moves them to `device`.

    Modules that a Hugging Face model always computes in float32 (T5's `wo`) stay float32, as in `from_pretrained`
    (transformers 5.23). Integer tensors keep their dtype.  device: None: tensors are not moved.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device | None):
        names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
        if dtype == torch.float16:
            names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        kept = "|".join(map(re.escape, sorted(names)))
        self.kept = re.compile(rf"(^|\.)({kept})($|\.)") if names else None
        self.dtype, self.device = dtype, device

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which the model calls `name`, cast and moved."""
        dtype = tensor.dtype
        if tensor.is_floating_point():
            dtype = torch.float32 if self.kept is not None and self.kept.search(name) else self.dtype
        return tensor.to(device=self.device, dtype=dtype)


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model's state dict, each once, under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def cast_model(model: nn.Module, cast: Cast) -> None:
    """Cast and move a model's own weights.

    Non-persistent buffers (rotary frequencies) are moved but keep their dtype, as in a model that was built in `dtype`:
    rounding the frequencies would shift every position.
    """
    for name, tensor in stored_tensors(model).items():
        tensor.data = cast(name, tensor.data)
    move_buffers(model, cast.device)


def move_buffers(model: nn.Module, device: torch.device | None) -> None:
    """Move a model's buffers without casting; those on the meta device, which are loaded later, are skipped."""
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)


class Weights:
    """A checkpoint's tensors by a model's names.

    For Hugging Face models the conversions of transformers are applied: renamed tensors, and tensors that are combined
    from several (experts). A tied tensor needs to be in the checkpoint under one of its names.

    stored: the checkpoint's tensors by its names.
    strict: raise ValueError if tensors are missing, unexpected or of another shape, with all of them listed. Otherwise
        warn; `absent` lists the model's tensors that the checkpoint does not have.
    """

    def __init__(self, model: nn.Module, stored: Tensors, strict: bool):
        self.model, self.stored = model, stored
        self.transforms: dict[str, WeightTransform] = {}  # by the model's name of the first tensor that it makes
        self.sources: dict[str, list[tuple[str, str]]] = {}  # by the same key: the checkpoint's names, with patterns
        self.giver: dict[str, str] = {}  # by name in the model: the key of `transforms` and `sources`
        state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor is not None}
        left = self._match(state)
        misshaped = self._look(state)
        self.names: dict[str, str] = {}  # by a tensor's first name: its name that the checkpoint has
        owners: dict[int, str] = {}
        for name, tensor in state.items():
            first = owners.setdefault(id(tensor), name)
            if name in self.giver:
                self.names.setdefault(first, name)
        self.absent = [name for name in owners.values() if name not in self.names]
        missing = [name for name in self.absent if name not in misshaped and not self._may("missing", name)]
        left = [name for name in left if not self._may("unexpected", name)]
        said = [("missing", missing), ("left over", left), ("of other shapes", list(misshaped.values()))]
        if words := "; ".join(f"{what}: {some(names)} ({len(names)} in all)" for what, names in said if names):
            words = f"checkpoint: it does not fit {type(model).__name__}: {words}"
            if strict:
                raise ValueError(f"{words}. strict=False loads what fits")
            warnings.warn(words, stacklevel=2)

    def _match(self, state: dict[str, torch.Tensor]) -> list[str]:
        """Match the checkpoint's tensors with the model's. Gives the names of those that match none."""
        transforms = get_model_conversion_mapping(self.model) if isinstance(self.model, PreTrainedModel) else []
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, left = getattr(self.model, "base_model_prefix", None), []
        for key in sorted(self.stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if name not in state:
                left.append(key)
                continue
            made = WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
            self.transforms.setdefault(name, made)
            self.sources.setdefault(name, []).append((key, pattern or key))
        return left

    def _look(self, state: dict[str, torch.Tensor]) -> dict[str, str]:
        """Find the tensors that the checkpoint gives, by their shapes. Gives, by name, the reason for each mismatch."""
        misshaped = {}
        for first in self.transforms:
            try:
                given = self._converted(first, lambda key: torch.empty(self.stored[key].shape, device="meta"))
            except (RuntimeError, ValueError, IndexError) as error:
                misshaped[first] = f"{first} cannot be put together: {error}"
                continue
            for name, tensor in given.items():
                if name in state and tensor.shape == state[name].shape:
                    self.giver[name] = first
                elif name in state:
                    misshaped[name] = f"{name} is {list(tensor.shape)} and must be {list(state[name].shape)}"
        return misshaped

    def _converted(self, first: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors, by name, that the transform with key `first` makes.  read: by the checkpoint's names."""
        transform = copy.deepcopy(self.transforms[first])
        for key, pattern in self.sources[first]:
            transform.add_tensor(first, key, pattern, partial(read, key))
        found = transform.convert(first, model=self.model, config=getattr(self.model, "config", None))
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}

    def _may(self, what: str, name: str) -> bool:
        """Whether a Hugging Face model allows a tensor to be missing, or unexpected, as `what` says."""
        patterns = getattr(self.model, f"_keys_to_ignore_on_load_{what}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def read(self, name: str) -> torch.Tensor:
        """The full tensor whose first name in the model is `name`, in the checkpoint's dtype, on the CPU."""
        stored = self.names[name]
        return self._converted(self.giver[stored], lambda key: self.stored[key].read())[stored]


def load(
    model: nn.Module,
    made: dict[str, torch.Tensor],
    read: Read,
    takers: Mapping[str, Callable[[torch.Tensor], None]],
) -> None:
    """Load tensors into the model, one at a time; tensors on the meta device are materialized.

    made: the model's tensors by name; emptied in the process.  read: gives the full tensor for a name.
    takers: by name, a function that takes the tensor instead of the model (e.g. to slice or quantize it).
    """
    while made:
        name, tensor = made.popitem()
        if name in takers:
            takers[name](read(name))
        else:
            put(model, name, tensor, read(name))
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"still on the meta device: {some(left)}"


def put(model: nn.Module, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter or buffer to a contiguous copy of `value`; a parameter stays the same object."""
    value = torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
    if isinstance(tensor, nn.Parameter):
        give(tensor, value)
    else:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value


def give(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the contents of a parameter or buffer by `value`, which is not copied; it stays the same object.

    `.data` is set where possible: a tensor that something else refers to (autograd, after a forward with gradients)
    cannot be swapped. To and from the meta device swapping is the only way.
    """
    if param.is_meta or value.is_meta:
        new = nn.Parameter(value, requires_grad=False) if isinstance(param, nn.Parameter) else value
        torch.utils.swap_tensors(param, new)
    else:
        param.requires_grad_(False).data = value


@contextmanager
def whole_as_they_run(
    parts: list[nn.Module], names: Mapping[torch.Tensor, str], read: Read
) -> Iterator[list[RemovableHandle]]:
    """Inside the block each of `parts` holds its full weights only while it runs, so the model's own forward works with
    one part in memory at a time. Yields the handles of the hooks that do this.

    names: parameters to the names that `read` takes. A part that has run is left empty.
    """

    def fill(module: nn.Module, args: tuple) -> None:
        for param in module.parameters():
            give(param, read(names[param]))

    def empty(module: nn.Module, args: tuple, output: object) -> None:
        for param in module.parameters():
            give(param, param.new_empty(0))

    handles = []
    try:
        for module in parts:
            handles += [module.register_forward_pre_hook(fill), module.register_forward_hook(empty)]
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def emptied(model: nn.Module) -> None:
    """Free the model's parameters by moving them to the meta device."""
    for param in model.parameters():
        give(param, torch.empty_like(param, device="meta"))


def require_makers(model: nn.Module, absent: Iterable[str]) -> None:
    """Raise ValueError, with their names, for tensors that are not in the checkpoint if the model is not a Hugging Face
    model, which could initialize them."""
    if (absent := list(absent)) and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"checkpoint: it does not have {some(absent)} ({len(absent)} in all), which would be without values; only "
            f"a Hugging Face model can make them anew, and this is a {type(model).__name__}"
        )


def initialize(model: nn.Module, absent: list[str], device: torch.device) -> None:
    """Materialize tensors that are on the meta device and not in the checkpoint, with the model's own initialization:
    non-persistent buffers, and the tensors in `absent`.

    Raises ValueError if there are any and the model is not a Hugging Face model.
    """
    found: dict[nn.Module, list[tuple[dict, str, str]]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        slots = [(module._parameters, leaf) for leaf in module._parameters if prefix + leaf in absent]
        slots += [
            (module._buffers, leaf)
            for leaf in module._buffers
            if prefix + leaf in absent or leaf in module._non_persistent_buffers_set
        ]
        found[module] = [
            (own, leaf, prefix + leaf) for own, leaf in slots if own[leaf] is not None and own[leaf].is_meta
        ]
    require_makers(model, (name for slots in found.values() for _, _, name in slots))
    for module, slots in found.items():
        for owner, leaf, _ in slots:
            empty = torch.empty_like(owner[leaf], device=device)
            if isinstance(owner[leaf], nn.Parameter):
                give(owner[leaf], empty)
            else:
                owner[leaf] = empty
        if slots:
            model._init_weights(module)
    made = {path for slots in found.values() for _, _, path in slots}
    if not made:
        return
    with known_to_be_made(model, made):
        for path, module in model.named_modules():
            # A module's tensor may be initialized by a module around it (FalconH1's multipliers, transformers 5.23).
            if not found[module] and any(is_within(name, path) for name in made):
                model._init_weights(module)


def is_within(name: str, path: str) -> bool:
    """Whether a tensor belongs to a module or its submodules, by their names."""
    return name.startswith(f"{path}." if path else "")


@contextmanager
def known_to_be_made(model: nn.Module, but: set[str]) -> Iterator[None]:
    """Inside the block transformers' initialization changes only the tensors in `but`."""
    tensors = [tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name not in but]
    unmarked = [tensor for tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
    try:
        for tensor in unmarked:
            tensor._is_hf_initialized = True
        yield
    finally:
        for tensor in unmarked:
            del tensor._is_hf_initialized
