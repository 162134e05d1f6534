"""A model's weights as inference wants them: cast, on the device, from a checkpoint."""

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

Read = Callable[[str], torch.Tensor]  # by name in the model, a tensor as inference wants it, whole


def floating_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """What activations are computed in: `dtype`, or where that is int8, the model's own."""
    if dtype.is_floating_point:
        return dtype
    return next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)


class Cast:
    """Which dtype each tensor of a model gets, and where it goes.

    What a Hugging Face model computes in float32 whatever it is cast to (T5's `wo`) stays so, as in `from_pretrained`
    (transformers 5.23).  device: None leaves tensors where they are.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device | None):
        names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
        if dtype == torch.float16:
            names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        kept = "|".join(map(re.escape, sorted(names)))
        self.kept = re.compile(rf"(^|\.)({kept})($|\.)") if names else None
        self.dtype, self.device = dtype, device

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor called `name`, as it shall be."""
        dtype = tensor.dtype
        if tensor.is_floating_point():
            dtype = torch.float32 if self.kept is not None and self.kept.search(name) else self.dtype
        return tensor.to(device=self.device, dtype=dtype)


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a state dict of the model has, each tensor once: by the first of its names."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def cast_model(model: nn.Module, cast: Cast) -> None:
    """Cast and move a model's own weights.

    Buffers that no checkpoint has (frequencies of rotary tables) are moved and keep their dtype, as in a model that was
    built in it: rounding them would move every position.
    """
    for name, tensor in stored_tensors(model).items():
        tensor.data = cast(name, tensor.data)
    move_buffers(model, cast.device)


def move_buffers(model: nn.Module, device: torch.device | None) -> None:
    """Move a model's buffers, as they are; those on the meta device are still to be read."""
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)


class Weights:
    """A checkpoint's tensors by the names that a model has for them.

    Hugging Face models are read as transformers reads them: names that have changed, and tensors that are put together
    from several (experts). A tensor that has several names needs to be there by one of them.
    strict: raise ValueError, listing all, where tensors are missing, left over or of other shapes; otherwise warn, and
    `absent` are those that the checkpoint does not give.
    """

    def __init__(self, model: nn.Module, stored: Tensors, strict: bool):
        self.model, self.stored = model, stored
        self.transforms: dict[str, WeightTransform] = {}  # by a name in the model, the first of those it gives
        self.sources: dict[str, list[tuple[str, str]]] = {}  # by the same: names in the checkpoint, and patterns
        self.giver: dict[str, str] = {}  # by name in the model: the key of the two above
        state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor is not None}
        left = self._match(state)
        misshaped = self._look(state)
        self.names: dict[str, str] = {}  # by the first of a tensor's names: the one that the checkpoint has
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
        """Find out what each stored tensor is for; gives those that are for nothing."""
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
        """Find out which tensors the checkpoint gives; gives words for those whose shape is not the model's."""
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
        """What comes of the tensors that belong together."""
        transform = copy.deepcopy(self.transforms[first])
        for key, pattern in self.sources[first]:
            transform.add_tensor(first, key, pattern, partial(read, key))
        found = transform.convert(first, model=self.model, config=getattr(self.model, "config", None))
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}

    def _may(self, what: str, name: str) -> bool:
        """Whether a Hugging Face model says that a tensor may be missing, or unexpected."""
        patterns = getattr(self.model, f"_keys_to_ignore_on_load_{what}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def read(self, name: str) -> torch.Tensor:
        """The tensor whose first name in the model is `name`, whole, as it is stored."""
        stored = self.names[name]
        return self._converted(self.giver[stored], lambda key: self.stored[key].read())[stored]


def load(
    model: nn.Module,
    made: dict[str, torch.Tensor],
    read: Read,
    takers: Mapping[str, Callable[[torch.Tensor], None]],
) -> None:
    """Put tensors, read by the model's names, into the model, one at a time; those of the meta device come to life.

    made: what the model has, by name; it is emptied on the way.  takers: what takes a tensor in the model's place.
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
    """Give a parameter or buffer a value, in memory of its own; the parameter stays the same object."""
    value = torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
    if isinstance(tensor, nn.Parameter):
        give(tensor, value)
    else:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value


def give(param: torch.Tensor, value: torch.Tensor) -> None:
    """Let a parameter, or a buffer, be another tensor; it stays the same object.

    What somebody else holds (autograd, after a forward with gradients) cannot be swapped; to and from the meta device
    nothing else is possible.
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
    """Inside the block each of a model's parts has its weights while it runs, and at no other time: the model's own
    forward works, and one part is whole at once. Gives the hooks that see to it.

    names: of the parameters, as `read` knows them. Afterwards they are empty.
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
    """Let go of the model's weights: they are on the meta device afterwards."""
    for param in model.parameters():
        give(param, torch.empty_like(param, device="meta"))


def require_makers(model: nn.Module, absent: Iterable[str]) -> None:
    """Raise ValueError, naming all, for tensors that nothing gives a value: no checkpoint, and no Hugging Face model
    that makes them anew."""
    if (absent := list(absent)) and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"checkpoint: it does not have {some(absent)} ({len(absent)} in all), which would be without values; only "
            f"a Hugging Face model can make them anew, and this is a {type(model).__name__}"
        )


def initialize(model: nn.Module, absent: list[str], device: torch.device) -> None:
    """Bring to life what is on the meta device and in no checkpoint, as the model itself makes it: buffers that are not
    stored, and the tensors in `absent`.

    Raises ValueError, as `require_makers`, where there are such and the model is not Hugging Face's.
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
            # What is in a module may be made with a module around it (FalconH1's multipliers, transformers 5.23).
            if not found[module] and any(is_within(name, path) for name in made):
                model._init_weights(module)


def is_within(name: str, path: str) -> bool:
    """Whether a tensor is in a module, by their names."""
    return name.startswith(f"{path}." if path else "")


@contextmanager
def known_to_be_made(model: nn.Module, but: set[str]) -> Iterator[None]:
    """Inside the block transformers' initialization leaves all tensors alone but those named."""
    tensors = [tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name not in but]
    unmarked = [tensor for tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
    try:
        for tensor in unmarked:
            tensor._is_hf_initialized = True
        yield
    finally:
        for tensor in unmarked:
            del tensor._is_hf_initialized
