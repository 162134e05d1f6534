"""Tensors in files, by name, read one at a time, and joining of tensor-parallel parts. Pickles are read with
`weights_only=True`. What cannot be read or joined raises ValueError."""

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

from hybrid.runtime.messages import shortened

# Classes in DeepSpeed's own checkpoints, in addition to tensors (0.19.8).
DEEPSPEEDS = [DynamicLossScaler, LossScaler, ZeroStageEnum]
# The exceptions of torch.load for a file that is not a valid pickle.
DAMAGED: tuple[type[Exception], ...] = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError)
DAMAGED += (LookupError, TypeError, AttributeError, AssertionError, struct.error)
WRAPPERS = ("module", "model", "state_dict")  # keys under which a saved dictionary may hold the state dict


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a checkpoint.  read: loads it from the file."""

    shape: torch.Size
    read: Callable[[], torch.Tensor]


Tensors = dict[str, FileTensor]


# Files


def require_files(paths: Iterable[Path]) -> None:
    """Raise ValueError, with the paths, if files are missing."""
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"checkpoint: no file at {', '.join(missing)}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the dictionary in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(content).__name__}, not a dictionary")
    return content


def open_file(path: Path) -> Tensors:
    """Return the tensors of one file: safetensors, or a pickle of a state dict, at the top level or under one of
    WRAPPERS."""
    if path.suffix == ".safetensors":
        try:
            file = safe_open(path, framework="pt")
            shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise damaged(path, error) from error
        return {name: FileTensor(shape, partial(file.get_tensor, name)) for name, shape in shapes.items()}
    state = load_pickle(path)
    while isinstance(state, dict) and (inner := [key for key in WRAPPERS if isinstance(state.get(key), dict)]):
        state = state[inner[0]]
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(state).__name__}, not a state dict")
    tensors = {name: in_memory(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"checkpoint: {path} holds no tensors")
    return tensors


def load_pickle(path: Path) -> Any:
    """Return the content of a file saved by torch, on the CPU; memory-mapped if the file is a zip archive."""
    try:
        with torch.serialization.safe_globals(DEEPSPEEDS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except DAMAGED as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that cannot be read."""
    return ValueError(f"checkpoint: {path} cannot be read; it is damaged, or no checkpoint of weights: {error}")


def in_memory(tensor: torch.Tensor) -> FileTensor:
    """Return a tensor that is in memory already, or memory-mapped."""
    return FileTensor(tensor.shape, lambda: tensor)


def open_index(path: Path) -> Tensors:
    """Return the tensors of Hugging Face's sharded files, by their index, a JSON file."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"checkpoint: {path} has no weight_map, which names the files of tensors")
    files = {name: path.parent / name for name in sorted(set(index.values()))}
    require_files(files.values())
    shards = {name: open_file(file) for name, file in files.items()}
    if missing := [name for name, file in index.items() if name not in shards[file]]:
        raise ValueError(f"checkpoint: {path} names tensors that its files do not have: {shortened(missing)}")
    return {name: shards[file][name] for name, file in index.items()}


# Parts


def merged(files: list[Tensors]) -> Tensors:
    """Return the tensors of several files. Raises ValueError if two files have the same tensor."""
    tensors: Tensors = {}
    for file in files:
        if duplicates := tensors.keys() & file.keys():
            raise ValueError(f"checkpoint: in more than one file: {shortened(sorted(duplicates))}")
        tensors |= file
    return tensors


def require_unsplit(path: Path, parts: int) -> None:
    """Raise ValueError if `parts`, the number of tensor-parallel parts, is not 1 for a checkpoint that is not split."""
    if parts != 1:
        raise ValueError(
            f"training_mp_size: {parts} given; {path} is not split. Parts are those of a DeepSpeed JSON with "
            "parallelization='tp', or of a training directory with several mp_rank_*_model_states.pt"
        )


def joined_parts(ranks: list[Tensors], shapes: Mapping[str, torch.Size], version: float) -> Tensors:
    """Join tensors of which each rank has a part, or all ranks have the full tensor.

    shapes: the full shapes by name.  version: of Megatron's layout; in 0 a rank's q, k and v are concatenated blocks.
    """
    tensors = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        blocks = 3 if version == 0 and ("query_key_value" in name or "qkv" in name) else 1
        tensors[name] = joined([rank[name] for rank in ranks if name in rank], shapes.get(name), blocks)
    return tensors


def joined(parts: list[FileTensor], shape: torch.Size | None, blocks: int) -> FileTensor:
    """Return the full tensor from its parts, joined along the dimension in which they add up to `shape`; the first part
    if it has that shape already or none fits.

    blocks: number of blocks (q, k, v) in each part that are joined separately.
    """
    first = parts[0].shape
    for dim in range(len(first)) if shape is not None and first != shape else ():
        width = sum(part.shape[dim] for part in parts)
        if torch.Size([*first[:dim], width, *first[dim + 1 :]]) == shape:
            return FileTensor(shape, partial(concatenated, parts, dim, blocks))
    return parts[0]


def concatenated(parts: list[FileTensor], dim: int, blocks: int) -> torch.Tensor:
    """Return the parts concatenated along `dim`, each split into `blocks` that are joined block by block."""
    pieces = [part.read().chunk(blocks, dim) for part in parts]
    return torch.cat([piece[block] for block in range(blocks) for piece in pieces], dim)
