"""A training model written as a directory that Hugging Face loads, a layer at a time: no rank ever holds it whole."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybrid.weights.gather import gathered
from hybrid.weights.lora import Adapted, read_adapters

WEIGHTS = "model.safetensors"
# A parameter's float32 values that are written instead of its own; None where it has no others. A collective.
Instead = Callable[[nn.Parameter], torch.Tensor | None]
# Names and tensors on the host: on the first rank; others take part in what gathers them, and get nothing.
Tensors = dict[str, torch.Tensor]
Values = dict[nn.Parameter, torch.Tensor]


def save_pretrained(
    model: nn.Module, directory: str | Path, merged: bool, max_shard_bytes: int, instead: Instead | None
) -> None:
    """Write `model` into `directory`, which is made; the first rank writes, and every rank takes part.

    Peak host memory: on the first rank a file and a layer (a module, outside the layers), on others one parameter.
    Raises what writing raised on every rank, as RuntimeError on those that did not write.
    """
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"save_pretrained: a {type(base).__name__} given, which Hugging Face cannot load; give its PreTrainedModel "
            "as part=..."
        )
    if not merged and not isinstance(model, peft.PeftModel):
        raise ValueError(f"save_pretrained: merged=False given for a {type(base).__name__} without PEFT's adapters")
    layers = iter(merged_layers(base, instead) if merged else [adapter_tensors(model, instead)])
    first, error = dist.get_rank() == 0, None
    try:
        if first:
            Path(directory).mkdir(parents=True, exist_ok=True)
        if first and merged:
            write_model(base, layers, Path(directory), max_shard_bytes, instead)
        elif first:
            model.save_pretrained(directory, state_dict=next(layers))
    except Exception as raised:  # the other ranks are still gathering: they hear of it below
        error = raised
    for _ in layers:  # on the ranks that do not write; and what an error has left on the one that does
        pass
    message = [repr(error) if error else ""]
    dist.broadcast_object_list(message)
    if error:
        raise error
    if message[0]:
        raise RuntimeError(f"save_pretrained: the first rank could not write {directory}: {message[0]}")


def write_model(
    model: PreTrainedModel,
    layers: Iterator[list[Callable[[], Tensors]]],
    directory: Path,
    max_shard_bytes: int,
    instead: Instead | None,
) -> None:
    """Write a whole model: its tensors as they come, and what Hugging Face writes beside them."""
    model.save_pretrained(directory, state_dict={})  # all but the weights
    if instead is not None:
        config = copy(model.config)
        config.dtype = torch.float32
        config.save_pretrained(directory)
    shards = Shards(directory, max_shard_bytes)
    for modules in layers:
        tensors: Tensors = {}
        while modules:  # what a module's tensors were made of is free before the next one's are made
            tensors |= modules.pop(0)()
        shards.add(revert_weight_conversion(model, tensors))
    shards.close()


class Shards:
    """safetensors files in `directory` and their index, written as tensors come."""

    def __init__(self, directory: Path, max_shard_bytes: int):
        self.directory, self.max_shard_bytes = directory, max_shard_bytes
        self.files: list[list[str]] = []  # names of the tensors in each
        self.pending: Tensors = {}
        self.total_bytes = self.total_parameters = 0

    def add(self, tensors: Tensors) -> None:
        """Write tensors, now or with later ones."""
        for name, tensor in tensors.items():
            pending_bytes = sum(other.nbytes for other in self.pending.values())
            if self.pending and pending_bytes + tensor.nbytes > self.max_shard_bytes:
                self._write()
            self.pending[name] = tensor.contiguous()

    def close(self) -> None:
        """Write what is left, and name the files: how many there are is known only now."""
        self._write()
        (self.directory / WEIGHTS).unlink(missing_ok=True)
        count = len(self.files)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            os.replace(self._unfinished(number), self.directory / name)
        index = self.directory / f"{WEIGHTS}.index.json"
        index.unlink(missing_ok=True)  # of a model that was there before
        if count > 1:
            metadata = {"total_parameters": self.total_parameters, "total_size": self.total_bytes}
            files = {name: file for file, of_file in zip(names, self.files, strict=True) for name in of_file}
            content = {"metadata": metadata, "weight_map": files}
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        save_file(self.pending, self._unfinished(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.total_bytes += sum(tensor.nbytes for tensor in self.pending.values())
        self.total_parameters += sum(tensor.numel() for tensor in self.pending.values())
        self.pending = {}

    def _unfinished(self, number: int) -> Path:
        return self.directory / f"{WEIGHTS}.{number}.unfinished"


# Tensors


Wrappers = dict[nn.Module, Adapted]
# A module's name without adapters' wrappers, the module without adapters, and how it is adapted, if it is.
Plain = tuple[str, nn.Module, Adapted | None]


def merged_layers(model: PreTrainedModel, instead: Instead | None) -> Iterator[list[Callable[[], Tensors]]]:
    """The tensors of a model, adapters merged, a layer at a time, and one module at a time outside the layers: for each
    module what makes its tensors of gathered ones, which the first rank calls. A parameter that modules share comes
    once, by the name that Hugging Face gives it."""
    wrappers = {one.wrapper: one for one in read_adapters(model)}
    require_mergeable(model)
    layers = list(layers_of("", model, wrappers))
    owners = owners_of(layers, set(getattr(model, "all_tied_weights_keys", None) or ()))
    ignored = set(model._keys_to_ignore_on_save or ())
    return ([partial(tensors_of, ref, gather(ref, owners, instead), ignored) for ref in layer] for layer in layers)


def gather(ref: Plain, owners: dict[nn.Parameter, str], instead: Instead | None) -> Values:
    """What a module's tensors are made of, but for parameters that another one owns. A collective."""
    name, module, one = ref
    if is_merged(one):
        params = dict.fromkeys((*one.sources.values(), *one.adapter_params()))
    else:
        params = [param for key, param in own_params(module, one).items() if owners[param] == joined(name, key)]
    return {param: value for param in params if (value := read(param, instead)) is not None}


@torch.no_grad()
def tensors_of(ref: Plain, values: Values, ignored: set[str]) -> Tensors:
    """A module's tensors by their names in the model."""
    name, module, one = ref
    if is_merged(one):
        found = merged_tensors(one, values)
    else:
        found = {key: values[param] for key, param in own_params(module, one).items() if param in values}
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            found[key] = on_host(buffer)
    return {path: tensor for key, tensor in found.items() if (path := joined(name, key)) not in ignored}


def owners_of(layers: list[list[Plain]], tied: set[str]) -> dict[nn.Parameter, str]:
    """By which of its names a parameter is written: the first that is not among `tied`. Merged ones are apart."""
    owners: dict[nn.Parameter, str] = {}
    for name, module, one in (ref for layer in layers for ref in layer if not is_merged(ref[2])):
        for key, param in own_params(module, one).items():
            if param not in owners or owners[param] in tied:
                owners[param] = joined(name, key)
    return owners


def adapter_tensors(model: peft.PeftModel, instead: Instead | None) -> Tensors:
    """The parameters that an adapter's files hold, and those that train beside it."""
    marks = (model.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    params = {
        name: param for name, param in model.named_parameters() if param.requires_grad or any(m in name for m in marks)
    }
    return {name: value for name, param in params.items() if (value := read(param, instead)) is not None}


def layers_of(name: str, module: nn.Module, wrappers: Wrappers) -> Iterator[list[Plain]]:
    """What is gathered together: a layer, which is a child of a list of modules; outside, every module for itself."""
    plain, one = unwrapped(module, wrappers)
    yield [(name, plain, one)]
    for key, child in plain.named_children():
        if isinstance(plain, nn.ModuleList):
            yield [*modules_of(joined(name, key), child, wrappers)]
        else:
            yield from layers_of(joined(name, key), child, wrappers)


def modules_of(name: str, module: nn.Module, wrappers: Wrappers) -> Iterator[Plain]:
    """A module and those in it, as they are without adapters."""
    plain, one = unwrapped(module, wrappers)
    yield name, plain, one
    for key, child in plain.named_children():
        yield from modules_of(joined(name, key), child, wrappers)


def unwrapped(module: nn.Module, wrappers: Wrappers) -> tuple[nn.Module, Adapted | None]:
    """The module without adapters, and how it is adapted; of PEFT's modules_to_save the copy that is active."""
    if isinstance(module, ModulesToSaveWrapper):
        active = None if module.disable_adapters else next(iter(module.active_adapters), None)
        saved = module.modules_to_save
        return (saved[active] if active in saved else module.original_module), None  # noqa: SIM401 - no get
    one = wrappers.get(module)
    return (module, None) if one is None else (one.plain, one)


def own_params(module: nn.Module, one: Adapted | None) -> dict[str, nn.Parameter]:
    """A module's own parameters by name; of an adapted one, those that training has in their place."""
    params = module._parameters if one is None else one.sources
    return {key: param for key, param in params.items() if param is not None}


def is_merged(one: Adapted | None) -> bool:
    """Whether adapters are active in a module."""
    return one is not None and bool(one.state())


def require_mergeable(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for adapters whose weights cannot be written merged."""
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise NotImplementedError(
                f"save_pretrained: {name} is a {type(module).__name__}, which cannot be written merged; give "
                "merged=False, and merge what is written with PEFT"
            )


@torch.no_grad()
def read(param: nn.Parameter, instead: Instead | None) -> torch.Tensor | None:
    """A parameter's whole values on the host, on the first rank; other ranks have part in gathering them.

    With `instead` in float32: its values, or the parameter's own where it has none.
    """
    value = None if instead is None else instead(param)
    if value is None:
        with gathered([param]):
            return None if dist.get_rank() else on_host(param, None if instead is None else torch.float32)
    return None if dist.get_rank() else on_host(value)


def on_host(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy in host memory: what was gathered is freed after it."""
    floating = dtype is not None and tensor.is_floating_point()
    return tensor.detach().to("cpu", dtype if floating else tensor.dtype, copy=True)


def merged_tensors(one: Adapted, values: Values) -> Tensors:
    """An adapted module's tensors with its active adapters in them: summed in float32, and rounded once to the dtype
    that the weight has in `values`."""
    base = {key: values[param] for key, param in one.sources.items()}
    with lent(one, values):
        changed = one.merged(base)
    return base | {key: tensor.to(base.get(key, tensor).dtype) for key, tensor in changed.items()}


@contextmanager
def lent(one: Adapted, values: Values) -> Iterator[None]:
    """Inside the block the adapter's modules have the tensors given for their parameters. Their dictionaries are
    replaced: ZeRO-3's would gather on access (deepspeed 0.19.8)."""
    own, before = one.own, {module: module._parameters for module in one.own}
    try:
        one.own = {m: {key: values.get(param, param) for key, param in params.items()} for m, params in own.items()}
        for module, tensors in one.own.items():
            module._parameters = tensors
        yield
    finally:
        one.own = own
        for module, params in before.items():
            module._parameters = params


def joined(*names: str) -> str:
    """A path in the model."""
    return ".".join(filter(None, names))
