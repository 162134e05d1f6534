"""Export a training model to a Hugging Face directory, one layer at a time: no rank ever holds the full model."""

import json
import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybrid.models.modules import active_copy, running_adapters
from hybrid.models.quantized import dequantized
from hybrid.runtime.parallel import broadcast_object
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.gather import gathered
from hybrid.weights.lora import AdaptedModule, read_adapters

WEIGHTS = "model.safetensors"
# The full float32 values to write in a parameter's place; None: write the parameter itself. A collective.
Override = Callable[[nn.Parameter], torch.Tensor | None]
# Tensors in host memory by name, on rank 0 only. The other ranks join the gathers and get an empty dict.
Tensors = dict[str, torch.Tensor]
Values = dict[nn.Parameter, torch.Tensor]


@waiting_to("export the model")
def save_pretrained(
    model: nn.Module, directory: str | Path, merged: bool, max_shard_bytes: int, override: Override | None
) -> None:
    """Write `model` into `directory`, which is created if needed. Rank 0 writes; a collective of all ranks.

    merged: write the full model with the active adapters merged; else write PEFT's adapter files.
    override: returns the float32 values to write in a parameter's place, or None for the parameter itself.
    Peak host memory: on rank 0 one shard and one layer (outside the layers, one module), on other ranks one parameter.

    Raises ValueError if `model` is no PreTrainedModel, or if `merged` is False and it has no PEFT adapters;
    NotImplementedError if its adapters cannot be merged. An error while writing is raised on rank 0, and as
    RuntimeError on the other ranks.
    """
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"save_pretrained: a {type(base).__name__} given, which Hugging Face cannot load; give its PreTrainedModel "
            "as part=..."
        )
    if not merged and not isinstance(model, peft.PeftModel):
        raise ValueError(f"save_pretrained: merged=False given for a {type(base).__name__} without PEFT's adapters")
    layers: Iterator[Any] = iter(merged_layers(base, override) if merged else [adapter_tensors(model, override)])
    first, error = dist.get_rank() == 0, None
    try:
        if first:
            Path(directory).mkdir(parents=True, exist_ok=True)
        if first and merged:
            write_model(base, layers, Path(directory), max_shard_bytes, override)
        elif first:
            model.save_pretrained(directory, state_dict=next(layers))
    except Exception as raised:  # the other ranks are still gathering: the error is broadcast below
        error = raised
    for _ in layers:  # joins the gathers: all of them on the other ranks, on rank 0 those left after an error
        pass
    message = broadcast_object(repr(error) if error else "")
    if error:
        raise error
    if message:
        raise RuntimeError(f"save_pretrained: the first rank could not write {directory}: {message}")


def write_model(
    model: PreTrainedModel,
    layers: Iterator[list[Callable[[], Tensors]]],
    directory: Path,
    max_shard_bytes: int,
    override: Override | None,
) -> None:
    """Write the full model from rank 0: the config and Hugging Face's other files, then the tensors.

    layers: the tensors, in the form that `merged_layers` returns.  override: if not None, config.json says float32. It
        does not say that weights are quantized.
    """
    model.save_pretrained(directory, state_dict={})  # all but the weights
    config = copy(model.config)
    if override is not None:
        config.dtype = torch.float32
    vars(config).pop("quantization_config", None)  # what is written is dequantized
    config.save_pretrained(directory)
    shards = Shards(directory, max_shard_bytes)
    for modules in layers:
        tensors: Tensors = {}
        while modules:  # popped, so that a module's gathered parameters are freed before the next module is merged
            tensors |= modules.pop(0)()
        shards.add(revert_weight_conversion(model, tensors))
    shards.close()


class Shards:
    """Writes safetensors shards of at most `max_shard_bytes` (or one tensor), and their index, into `directory`."""

    def __init__(self, directory: Path, max_shard_bytes: int):
        self.directory, self.max_shard_bytes = directory, max_shard_bytes
        self.files: list[list[str]] = []  # by shard: the names of its tensors
        self.pending: Tensors = {}
        self.total_bytes = self.total_parameters = 0

    def add(self, tensors: Tensors) -> None:
        """Add tensors to the current shard, which is written when it is full."""
        for name, tensor in tensors.items():
            pending_bytes = sum(other.nbytes for other in self.pending.values())
            if self.pending and pending_bytes + tensor.nbytes > self.max_shard_bytes:
                self._write()
            self.pending[name] = tensor.contiguous()

    def close(self) -> None:
        """Write the last shard and the index, and rename the shards: their names contain the number of shards."""
        self._write()
        (self.directory / WEIGHTS).unlink(missing_ok=True)
        count = len(self.files)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            os.replace(self._unfinished(number), self.directory / name)
        index = self.directory / f"{WEIGHTS}.index.json"
        index.unlink(missing_ok=True)  # a model that was saved here before may have left one
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

Wrappers = dict[nn.Module, AdaptedModule]


@dataclass(frozen=True)
class SavedModule:
    """A module without adapter wrappers, its name without them, and its adapters; None: it has none."""

    name: str
    module: nn.Module
    adapted: AdaptedModule | None

    @property
    def is_merged(self) -> bool:
        """Whether the module has active adapters, which are then merged."""
        return self.adapted is not None and bool(self.adapted.state())

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The module's own parameters by name; for an adapted module its base's training parameters."""
        params = self.module._parameters if self.adapted is None else self.adapted.sources
        return {key: param for key, param in params.items() if param is not None}


def merged_layers(model: PreTrainedModel, override: Override | None) -> Iterator[list[Callable[[], Tensors]]]:
    """Return the tensors of a model with adapters merged: per item one layer or, outside the layers, one module.

    An item is a list with a function for each module, which returns the module's tensors by name; rank 0 calls them. A
    shared parameter comes once, under the name that Hugging Face saves it by. Advancing the iterator is a collective.
    Raises NotImplementedError if an adapter cannot be merged.
    """
    wrappers = {adapted.wrapper: adapted for adapted in read_adapters(model)}
    require_mergeable(model)
    layers = list(layers_of("", model, wrappers))
    owners = owners_of(layers, set(getattr(model, "all_tied_weights_keys", None) or ()))
    ignored = set(model._keys_to_ignore_on_save or ())
    return (
        [partial(tensors_of, saved, gather(saved, owners, override), ignored) for saved in layer] for layer in layers
    )


def gather(saved: SavedModule, owners: dict[nn.Parameter, str], override: Override | None) -> Values:
    """Return the gathered parameters from which a module's tensors are made, without those that another module owns. A
    collective; empty on all ranks but 0."""
    if saved.is_merged:
        params = list(dict.fromkeys((*saved.adapted.sources.values(), *saved.adapted.adapter_params())))
    else:
        params = [param for key, param in saved.params.items() if owners[param] == joined(saved.name, key)]
    return {param: value for param in params if (value := read(param, override)) is not None}


@torch.no_grad()
def tensors_of(saved: SavedModule, values: Values, ignored: set[str]) -> Tensors:
    """Return a module's tensors to save, buffers included, by their full names in the model.

    values: the module's gathered parameters.  ignored: names that are not saved.
    Merged adapters are summed in float32, then rounded once to the dtype that the weight has in `values`.
    """
    tensors = {key: values[param] for key, param in saved.params.items() if param in values}
    if saved.is_merged:
        merged = saved.adapted.merged(tensors, values.__getitem__)
        tensors |= {key: tensor.to(tensors.get(key, tensor).dtype) for key, tensor in merged.items()}
    for key, buffer in saved.module._buffers.items():
        if buffer is not None and key not in saved.module._non_persistent_buffers_set:
            tensors[key] = on_host(buffer)
    return {path: tensor for key, tensor in tensors.items() if (path := joined(saved.name, key)) not in ignored}


def owners_of(layers: list[list[SavedModule]], tied: set[str]) -> dict[nn.Parameter, str]:
    """Return the name under which each parameter is saved: its first name that is not in `tied`. Parameters of modules
    with merged adapters are left out."""
    owners: dict[nn.Parameter, str] = {}
    for saved in (saved for layer in layers for saved in layer if not saved.is_merged):
        for key, param in saved.params.items():
            if param not in owners or owners[param] in tied:
                owners[param] = joined(saved.name, key)
    return owners


def adapter_tensors(model: nn.Module, override: Override | None) -> Tensors:
    """Return the tensors of PEFT's adapter files, and every other trainable parameter. A collective; empty on all ranks
    but 0."""
    marks = (model.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    params = {
        name: param for name, param in model.named_parameters() if param.requires_grad or any(m in name for m in marks)
    }
    return {name: value for name, param in params.items() if (value := read(param, override)) is not None}


def layers_of(name: str, module: nn.Module, wrappers: Wrappers) -> Iterator[list[SavedModule]]:
    """Yield a module and all modules inside it without their adapters, by what is gathered together: the modules of a
    layer (a child of an nn.ModuleList); elsewhere each module alone."""
    saved = unwrapped(name, module, wrappers)
    yield [saved]
    for key, child in saved.module.named_children():
        inner = layers_of(joined(name, key), child, wrappers)
        yield from [[*chain.from_iterable(inner)]] if isinstance(saved.module, nn.ModuleList) else inner


def unwrapped(name: str, module: nn.Module, wrappers: Wrappers) -> SavedModule:
    """Return the module without adapters; for PEFT's modules_to_save the active copy."""
    if isinstance(module, ModulesToSaveWrapper):
        return SavedModule(name, active_copy(module), None)
    adapted = wrappers.get(module)
    return SavedModule(name, module if adapted is None else adapted.plain, adapted)


def require_mergeable(model: PreTrainedModel) -> None:
    """Raise NotImplementedError if a module has an adapter that cannot be saved merged (e.g. trainable tokens)."""
    for name, module in running_adapters(model):
        raise NotImplementedError(
            f"save_pretrained: {name} is a {type(module).__name__}, which cannot be written merged; give "
            "merged=False, and merge what is written with PEFT"
        )


@torch.no_grad()
def read(param: nn.Parameter, override: Override | None) -> torch.Tensor | None:
    """Return a parameter's full values in host memory on rank 0, None on the other ranks. A collective.

    With `override` the values are float32: those that it returns, or the parameter's own where it returns None.
    """
    value = None if override is None else override(param)
    if value is None:
        with gathered([param]):
            return None if dist.get_rank() else on_host(dequantized(param), None if override is None else torch.float32)
    return None if dist.get_rank() else on_host(value)


def on_host(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy in host memory, in `dtype` if given and the tensor is floating point. A copy also on CPUs: the
    gathered tensor is freed afterwards."""
    return tensor.detach().to("cpu", dtype if dtype and tensor.is_floating_point() else tensor.dtype, copy=True)


def joined(*names: str) -> str:
    """Return the names joined to a dotted module path; empty names are skipped."""
    return ".".join(filter(None, names))
