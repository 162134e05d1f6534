"""Tensors in files, by name, read one at a time; and parts of tensors, put together. Pickles are read with
`weights_only=True`."""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors import SafetensorError, safe_open

# Classes that DeepSpeed's own checkpoints hold beside tensors (0.19.8).
DEEPSPEEDS = [DynamicLossScaler, LossScaler, ZeroStageEnum]
# What torch's reader of pickles raises for bytes that are not one.
DAMAGED = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError)
DAMAGED += (AssertionError, struct.error)
WRAPPERS = ("module", "model", "state_dict")  # keys under which a saved dictionary has the state dict


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.  read: gives it, from the file."""

    shape: torch.Size
    read: Callable[[], torch.Tensor]


Tensors = dict[str, Stored]


# Files


def require_files(paths: Iterable[Path]) -> None:
    """Raise ValueError where files are not there, naming them all."""
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"checkpoint: no file at {', '.join(absent)}")


def read_json(path: Path) -> dict[str, Any]:
    """The dictionary in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(content).__name__}, not a dictionary")
    return content


def read_index(path: Path) -> dict[str, str]:
    """By a tensor's name, its file: the index of Hugging Face's sharded files."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"checkpoint: {path} has no weight_map, which names the files of tensors")
    return files


def in_file(path: Path) -> Tensors:
    """The tensors of one file: safetensors, or a pickle of a state dict."""
    if path.suffix != ".safetensors":
        return of_state(state_in(path), path)
    try:
        file = safe_open(path, framework="pt")
        names = file.keys()
        shapes = [torch.Size(file.get_slice(name).get_shape()) for name in names]
    except SafetensorError as error:
        raise damaged(path, error) from error
    return {name: Stored(shape, partial(file.get_tensor, name)) for name, shape in zip(names, shapes, strict=True)}


def pickled(path: Path) -> Any:
    """What torch has saved in a file; its tensors stay there until they are read, where the format allows it."""
    try:
        with torch.serialization.safe_globals(DEEPSPEEDS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except DAMAGED as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """That a file cannot be read."""
    return ValueError(f"checkpoint: {path} cannot be read; it is damaged, or no checkpoint of weights: {error}")


def state_in(path: Path) -> dict[str, Any]:
    """The state dict in a pickle, alone or beside other things."""
    content = pickled(path)
    while isinstance(content, dict):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            return content
        content = inner
    raise ValueError(f"checkpoint: {path} holds a {type(content).__name__}, not a state dict")


def of_state(state: dict[str, Any], path: Path) -> Tensors:
    """The tensors of a state dict."""
    found = {name: held(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise ValueError(f"checkpoint: {path} holds no tensors")
    return found


def held(tensor: torch.Tensor) -> Stored:
    """A tensor that is there already, or is mapped from a file."""
    return Stored(tensor.shape, lambda: tensor)


def indexed(path: Path) -> Tensors:
    """The tensors of Hugging Face's sharded files, by their index."""
    index = read_index(path)
    files = {name: path.parent / name for name in sorted(set(index.values()))}
    require_files(files.values())
    shards = {name: in_file(file) for name, file in files.items()}
    if absent := [name for name, file in index.items() if name not in shards[file]]:
        raise ValueError(f"checkpoint: {path} names tensors that its files do not have: {some(absent)}")
    return {name: shards[file][name] for name, file in index.items()}


def some(names: Iterable[str], most: int = 20) -> str:
    """Names in words, at most so many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


# Parts


def together(files: list[Tensors]) -> Tensors:
    """The tensors of several files, each of which has its own."""
    found: Tensors = {}
    for tensors in files:
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"checkpoint: in more than one file: {some(sorted(twice))}")
        found |= tensors
    return found


def require_one_part(path: Path, parts: int) -> None:
    """Raise ValueError where a checkpoint that is whole is said to be in parts."""
    if parts != 1:
        raise ValueError(
            f"training_mp_size: {parts} given; {path} is whole. Parts are those of a DeepSpeed JSON with "
            "parallelization='tp', or of a training directory with several mp_rank_*_model_states.pt"
        )


def joined_parts(ranks: list[Tensors], shapes: Mapping[str, torch.Size], version: float) -> Tensors:
    """Tensors of which each rank has a part, or all have the whole.

    version: of Megatron's layout; with 0, queries, keys and values of a rank lie one behind the other.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {
        name: joined([rank[name] for rank in ranks if name in rank], shapes.get(name), version == 0 and is_qkv(name))
        for name in names
    }


def is_qkv(name: str) -> bool:
    """Whether a tensor has queries, keys and values in it."""
    return "query_key_value" in name or "qkv" in name


def joined(parts: list[Stored], shape: torch.Size | None, strided: bool) -> Stored:
    """One tensor of its parts: along the dimension in which they make up the whole, where they are not that already."""
    first = parts[0].shape
    for dim in range(len(first)) if shape is not None and first != shape else ():
        width = sum(part.shape[dim] for part in parts)
        whole = torch.Size([*first[:dim], width, *first[dim + 1 :]])
        if whole == shape:
            return Stored(whole, partial(concatenated, parts, dim, 3 if strided else 1))
    return parts[0]


def concatenated(parts: list[Stored], dim: int, blocks: int) -> torch.Tensor:
    """The parts one behind the other, block by block."""
    pieces = [part.read().chunk(blocks, dim) for part in parts]
    return torch.cat([piece[block] for block in range(blocks) for piece in pieces], dim)
