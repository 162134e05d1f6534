"""Loading a model's weights for inference: from the model or a checkpoint, cast, onto the device."""

import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from hybrid.inference.tensor_files import Tensors
from hybrid.runtime.messages import shortened
from hybrid.weights.int8 import WeightLoader

ReadTensor = Callable[[str], torch.Tensor]  # a name in the model to the full tensor, cast and on the device


class Cast:
    """Casts a model's tensors to `dtype`, or to the model's own if that is int8, and moves them to `device`.

    Modules that a Hugging Face model always computes in float32 (T5's `wo`) stay float32, as in `from_pretrained`
    (transformers 5.23). Integer tensors keep their dtype.  device: None: tensors are not moved.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device | None):
        if dtype == torch.int8:
            dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
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


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's state dict, each once, under its first name."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def cast_model(model: nn.Module, cast: Cast) -> None:
    """Cast and move a model's own weights; non-persistent buffers, which `move_buffers` moves, are not cast."""
    for name, tensor in state_tensors(model).items():
        tensor.data = cast(name, tensor.data)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers; those on the meta device, which are loaded later, are skipped.

    They keep their dtype, as in a model that was built in the dtype of the weights: rounding the frequencies of rotary
    embeddings would shift every position.
    """
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)


class CheckpointWeights:
    """A checkpoint's tensors by a model's names.

    For Hugging Face models the conversions of transformers are applied: renamed tensors, and tensors that are combined
    from several (experts). A tied tensor needs to be in the checkpoint under one of its names.

    tensors: the checkpoint's, by its names.
    strict: raise ValueError if tensors are missing, unexpected or of another shape, with all of them listed. Otherwise
        warn; `missing` lists the model's tensors that the checkpoint does not have.
    """

    def __init__(self, model: nn.Module, tensors: Tensors, strict: bool):
        self.model, self.tensors = model, tensors
        self.transforms: dict[str, WeightTransform] = {}  # by the model's name of the first tensor that it makes
        self.sources: dict[str, list[tuple[str, str]]] = {}  # by the same key: the checkpoint's names, with patterns
        self.made_by: dict[str, str] = {}  # by name in the model: the key of `transforms` and `sources`
        state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor is not None}
        unexpected = self._match_names(state)
        misshaped = self._match_shapes(state)
        self.names: dict[str, str] = {}  # by a tensor's first name: its name that the checkpoint has
        first_names: dict[int, str] = {}
        for name, tensor in state.items():
            first = first_names.setdefault(id(tensor), name)
            if name in self.made_by:
                self.names.setdefault(first, name)
        self.missing = [name for name in first_names.values() if name not in self.names]
        problems = {
            "missing": [name for name in self.missing if name not in misshaped and not self._may_be("missing", name)],
            "unexpected": [name for name in unexpected if not self._may_be("unexpected", name)],
            "of another shape": list(misshaped.values()),
        }
        if any(problems.values()):
            listed = [f"{what}: {shortened(names)} ({len(names)} in all)" for what, names in problems.items() if names]
            message = f"checkpoint: it does not fit {type(model).__name__}: {'; '.join(listed)}"
            if strict:
                raise ValueError(f"{message}. strict=False loads what fits")
            warnings.warn(message, stacklevel=2)

    def _match_names(self, state: dict[str, torch.Tensor]) -> list[str]:
        """Match the checkpoint's tensors with the model's. Gives the names of those that match none."""
        transforms = get_model_conversion_mapping(self.model) if isinstance(self.model, PreTrainedModel) else []
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, unexpected = getattr(self.model, "base_model_prefix", None), []
        for key in sorted(self.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if name not in state:
                unexpected.append(key)
                continue
            transform = WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
            self.transforms.setdefault(name, transform)
            self.sources.setdefault(name, []).append((key, pattern or key))
        return unexpected

    def _match_shapes(self, state: dict[str, torch.Tensor]) -> dict[str, str]:
        """Find the tensors that the checkpoint makes, by their shapes. Gives, by name, each mismatch as text."""
        misshaped = {}
        for first in self.transforms:
            try:
                tensors = self._converted(first, lambda key: torch.empty(self.tensors[key].shape, device="meta"))
            except (RuntimeError, ValueError, IndexError) as error:
                misshaped[first] = f"{first} cannot be put together: {error}"
                continue
            for name, tensor in tensors.items():
                if name in state and tensor.shape == state[name].shape:
                    self.made_by[name] = first
                elif name in state:
                    misshaped[name] = f"{name} is {list(tensor.shape)} and must be {list(state[name].shape)}"
        return misshaped

    def _converted(self, first: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's tensors, by name, that the transform with key `first` makes.  read: by the checkpoint's
        names."""
        transform: Any = copy.deepcopy(self.transforms[first])
        for key, pattern in self.sources[first]:
            transform.add_tensor(first, key, pattern, partial(read, key))
        converted = transform.convert(first, model=self.model, config=getattr(self.model, "config", None))
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

    def _may_be(self, what: str, name: str) -> bool:
        """Whether a Hugging Face model allows a tensor to be missing, or unexpected, as `what` says."""
        patterns = getattr(self.model, f"_keys_to_ignore_on_load_{what}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor whose first name in the model is `name`, in the checkpoint's dtype, on the CPU."""
        name = self.names[name]
        return self._converted(self.made_by[name], lambda key: self.tensors[key].read())[name]


def load(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    read: ReadTensor,
    weight_loaders: Mapping[str, WeightLoader],
) -> None:
    """Load tensors into the model, one at a time; tensors on the meta device are materialized.

    tensors: the model's, by name; emptied in the process.
    weight_loaders: by name, a function that takes the full tensor instead of the model (e.g. to slice or quantize it).
    """
    while tensors:
        name, tensor = tensors.popitem()
        if name in weight_loaders:
            weight_loaders[name](read(name))
        else:
            set_tensor(model, name, tensor, read(name))
    unset = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not unset, f"still on the meta device: {shortened(unset)}"


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter or buffer to a contiguous copy of `value`; a parameter stays the same object."""
    value = torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
    if isinstance(tensor, nn.Parameter):
        set_data(tensor, value)
    else:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value


def set_data(param: torch.Tensor, value: torch.Tensor) -> None:
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
def loaded_while_running(parts: list[nn.Module], names: Mapping[torch.Tensor, str], read: ReadTensor) -> Iterator[None]:
    """Inside the block each of `parts` holds its full weights only while it runs, so the model's own forward works with
    one part in memory at a time.

    names: parameters to the names that `read` takes. A part that has run is left empty.
    """

    def fill(module: nn.Module, args: tuple) -> None:
        for param in module.parameters():
            set_data(param, read(names[param]))

    def empty(module: nn.Module, args: tuple, output: object) -> None:
        for param in module.parameters():
            set_data(param, param.new_empty(0))

    with ExitStack() as hooks:
        for module in parts:
            hooks.enter_context(module.register_forward_pre_hook(fill))
            hooks.enter_context(module.register_forward_hook(empty))
        yield


def require_initializable(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError, with the names, for tensors that are not in the checkpoint if the model is not a Hugging Face
    model, which could initialize them."""
    if names and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"checkpoint: it does not have {shortened(names)} ({len(names)} in all), which would be without values; "
            f"only a Hugging Face model can initialize them, and this is a {type(model).__name__}"
        )


def materialize(model: nn.Module, missing: Collection[str], device: torch.device) -> None:
    """Materialize tensors on the meta device that no checkpoint has, with the model's own initialization:
    non-persistent buffers, and the tensors in `missing`.

    Raises ValueError if there are any and the model is not a Hugging Face model.
    """
    unset: dict[nn.Module, list[tuple[dict, str]]] = {}  # by module: the dictionary and the name in it
    names: list[str] = []
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for leaf, tensor in own.items():
                name = f"{path}.{leaf}" if path else leaf
                unsaved = name in missing or leaf in module._non_persistent_buffers_set
                if unsaved and tensor is not None and tensor.is_meta:
                    unset.setdefault(module, []).append((own, leaf))
                    names.append(name)
    require_initializable(model, names)
    for module, tensors in unset.items():
        for own, leaf in tensors:
            empty = torch.empty_like(own[leaf], device=device)
            if isinstance(own[leaf], nn.Parameter):
                set_data(own[leaf], empty)
            else:
                own[leaf] = empty
        model._init_weights(module)
    if not names:
        return
    by_name = dict((*model.named_parameters(), *model.named_buffers()))
    loaded = [by_name[name] for name in by_name.keys() - set(names)]
    unmarked = [tensor for tensor in loaded if not getattr(tensor, "_is_hf_initialized", False)]
    try:
        for tensor in unmarked:
            tensor._is_hf_initialized = True  # transformers' initialization then leaves it as it is
        for path, module in model.named_modules():
            # A module's tensor may be initialized by a module around it (FalconH1's multipliers, transformers 5.23).
            if module not in unset and any(name.startswith(f"{path}." if path else "") for name in names):
                model._init_weights(module)
    finally:
        for tensor in unmarked:
            del tensor._is_hf_initialized


@contextmanager
def restored_on_error(model: nn.Module, with_values: bool) -> Iterator[None]:
    """If the block raises, the model gets its modules, attributes and hooks back, and the exception is raised again.

    with_values: also its tensors, which stay in memory until the block ends.
    """

    def copied(attributes: dict) -> dict:
        return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}

    states = [(module, copied(module.__dict__)) for module in model.modules()]
    own = (*model.parameters(), *model.buffers()) if with_values else ()
    tensors = [(tensor, tensor.detach(), tensor.requires_grad) for tensor in own]
    try:
        yield
    except BaseException:
        for module, state in states:
            module.__dict__.clear()
            module.__dict__.update(copied(state))
        for tensor, value, requires_grad in tensors:
            set_data(tensor, value)
            tensor.requires_grad_(requires_grad)
        raise
