"""Checkpoints, whatever form they are in, as tensors by name that are read one at a time.

Hugging Face's files (safetensors and pickles, whole and sharded), state dicts that torch has saved, what a DeepSpeed
engine has saved in training (ZeRO 0-3), DeepSpeed's JSON, and what `save_mp_checkpoint` has written. Pickles are read
with `weights_only=True`.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

# Classes that DeepSpeed's own checkpoints hold beside tensors (0.19.8).
DEEPSPEEDS = [DynamicLossScaler, LossScaler, ZeroStageEnum]
# What torch's reader of pickles raises for bytes that are not one.
DAMAGED = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError)
DAMAGED += (AssertionError, struct.error)
JSON_NAME = "ds_inference_config.json"  # DeepSpeed's name for it
WRAPPERS = ("module", "model", "state_dict")  # keys under which a saved dictionary has the state dict
MODEL_FILES = "mp_rank_*_model_states.pt"
EXPERT_FILES = "layer_*_expert_*_model_states.pt"


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.  read: gives it, from the file."""

    shape: torch.Size
    read: Callable[[], torch.Tensor]


Tensors = dict[str, Stored]


def open_checkpoint(
    source: str | dict[str, Any], base_dir: str, parts: int, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """The tensors of a checkpoint by their names in it.

    source: a directory, a file, or DeepSpeed's JSON, its path or what is in it; relative paths begin in `base_dir`.
    parts: tensor-parallel parts that it must be in; 1: any number.  shapes: of the model's tensors, which tell along
        which dimension parts go together.
    Raises ValueError for what is missing, damaged or in no form that is known.
    """
    if isinstance(source, dict):
        return described(source, Path(base_dir), parts, shapes)
    path = Path(base_dir) / source
    if path.is_dir():
        return in_directory(path, parts, shapes)
    require_files([path])
    if path.suffix != ".json":
        return in_file(path)
    content = read_json(path)
    if "weight_map" in content:
        return indexed(path, content)
    return described(content, Path(base_dir) if base_dir else path.parent, parts, shapes)


def in_directory(path: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The tensors in a directory, by the first form in which it has any."""
    if (path / JSON_NAME).is_file():
        return described(read_json(path / JSON_NAME), path, parts, shapes)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file():
            return indexed(index, read_index(index))
        if (path / name).is_file():
            return in_file(path / name)
    if (path / "latest").is_file():
        tagged = path / (path / "latest").read_text().strip()
        if not tagged.is_dir():
            raise ValueError(f"checkpoint: {path / 'latest'} names {tagged.name!r}, and there is no {tagged}")
        return of_training(tagged, parts, shapes)
    if any(path.glob(MODEL_FILES)) or any(path.glob(f"zero_pp_rank_*_{MODEL_FILES}")):
        return of_training(path, parts, shapes)
    raise ValueError(
        f"checkpoint: {path} has none of {JSON_NAME}, model.safetensors, pytorch_model.bin, an index of either, "
        f"'latest' and {MODEL_FILES}"
    )


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


def read_index(path: Path) -> dict[str, Any]:
    """The index of Hugging Face's sharded files."""
    content = read_json(path)
    if not isinstance(content.get("weight_map"), dict):
        raise ValueError(f"checkpoint: {path} has no weight_map, which names the files of tensors")
    return content


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


def indexed(path: Path, index: dict[str, Any]) -> Tensors:
    """The tensors of Hugging Face's sharded files."""
    files = {name: path.parent / name for name in sorted(set(index["weight_map"].values()))}
    require_files(files.values())
    shards = {name: in_file(file) for name, file in files.items()}
    if absent := [name for name, file in index["weight_map"].items() if name not in shards[file]]:
        raise ValueError(f"checkpoint: {path} names tensors that its files do not have: {some(absent)}")
    return {name: shards[file][name] for name, file in index["weight_map"].items()}


def some(names: Iterable[str], most: int = 20) -> str:
    """Names in words, at most so many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


# DeepSpeed's JSON, and parts by tensor parallelism


def described(content: dict[str, Any], base_dir: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The tensors that DeepSpeed's JSON describes: `checkpoints`, a list of files, or ranks' parts ("tp") and what all
    ranks have ("non_tp"); `parallelization`, "pp" (files have different tensors) or "tp" (so where `type` is Megatron);
    `tp_size`; `version`; `base_dir`."""
    if not isinstance(content.get("checkpoints"), list | dict):
        raise ValueError(
            f"checkpoint: DeepSpeed's JSON has `checkpoints`, a list of files; this one has {some(content)}"
        )
    base, files = base_dir / content.get("base_dir", ""), content["checkpoints"]
    way = content.get("parallelization", "tp" if content.get("type") == "Megatron" else "pp")
    if way not in ("pp", "tp"):
        raise ValueError(f"checkpoint: parallelization={way!r} given; it is 'pp' or 'tp'")
    if isinstance(files, dict) and "tp" not in files:
        raise ValueError(f"checkpoint: checkpoints has {some(files)}; it must have `tp`, the ranks' parts")
    split, whole = (files["tp"], files.get("non_tp", [])) if isinstance(files, dict) else (files, [])
    require_files([base / name for name in (*split, *whole)])
    if way == "pp":
        return together([in_file(base / name) for name in (*split, *whole)])
    size = content.get("tp_size", content.get("mp_size")) or len(split)
    if len(split) % size or parts not in (1, size):
        raise ValueError(
            f"checkpoint: {len(split)} files for tp_size={size}, and training_mp_size={parts}; the files are a "
            "multiple of tp_size, which is training_mp_size where that is not 1"
        )
    opened = [in_file(base / name) for name in split]
    runs = [opened[start : start + size] for start in range(0, len(opened), size)]
    joined = [joined_parts(run, shapes, content.get("version", 1)) for run in runs]
    return together([*joined, *(in_file(base / name) for name in whole)])


def together(files: list[Tensors]) -> Tensors:
    """The tensors of several files, each of which has its own."""
    found: Tensors = {}
    for tensors in files:
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"checkpoint: in more than one file: {some(sorted(twice))}")
        found |= tensors
    return found


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


def save_mp_checkpoint(
    path: str, names: Iterable[str], read: Callable[[str], torch.Tensor], size: int, index: int
) -> None:
    """Write a rank's part of every tensor: so many of its rows. Together they are a checkpoint in DeepSpeed's JSON, for
    any tensor-parallel size."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name in names:
        tensor = read(name)
        rows = tensor.chunk(size) if tensor.dim() else (tensor,)
        if index < len(rows):
            parts[name] = rows[index].contiguous().clone()
    save_file(parts, folder / part_name(index), metadata={"format": "pt"})
    if index == 0:
        content = {
            "type": "ds_model",
            "checkpoints": [part_name(other) for other in range(size)],
            "version": 1.0,
            "parallelization": "tp",
            "tp_size": size,
        }
        (folder / JSON_NAME).write_text(json.dumps(content, indent=1))


def part_name(index: int) -> str:
    """The file of a rank's part."""
    return f"tp_{index:02d}.safetensors"


# What a DeepSpeed engine has saved


def of_training(folder: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The weights in a training checkpoint: under ZeRO 0-2 those that the model computed with, under ZeRO-3 the
    optimizer's in float32, put together from the ranks' partitions."""
    experts = together([in_file(path) for path in sorted(folder.glob(EXPERT_FILES))])
    files = [path for path in sorted(folder.glob(MODEL_FILES)) if not path.name.startswith("zero_pp_rank")]
    if not files:
        return experts | partitioned(folder)
    if parts not in (1, len(files)):
        raise ValueError(
            f"training_mp_size: {parts} given; {folder} has {len(files)} parts: {some(f.name for f in files)}"
        )
    ranks = [in_file(path) for path in files]
    return experts | (joined_parts(ranks, shapes, version=1) if len(ranks) > 1 else ranks[0])


def partitioned(folder: Path) -> Tensors:
    """ZeRO-3's: of every parameter each rank has so many elements, in the order of the parameters."""
    models = in_order(folder, "zero_pp_rank_{}_mp_rank_00_model_states.pt")
    states = [pickled(path) for path in models]
    found = {name: held(states[0]["module"][name]) for name in states[0]["buffer_names"]}
    for name, shape in (states[0]["frozen_param_shapes"] or {}).items():
        fragments = [state["frozen_param_fragments"][name] for state in states]
        found[name] = Stored(shape, partial(whole_of, fragments, shape))
    trained = {name: shape for group in states[0]["param_shapes"] for name, shape in group.items()}
    flats = [flat_weights(path, len(states)) for path in optimizer_files(folder, len(states))] if trained else []
    widths = [-(-shape.numel() // len(states)) for shape in trained.values()]
    for (name, shape), width, end in zip(trained.items(), widths, accumulate(widths), strict=True):
        found[name] = Stored(shape, partial(whole_between, flats, end - width, end, shape))
    for name, other in (states[0]["shared_params"] or {}).items():
        found[name] = found[other]
    return found


def in_order(folder: Path, pattern: str) -> list[Path]:
    """The ranks' files, by rank."""
    count = len(list(folder.glob(pattern.format("*"))))
    paths = [folder / pattern.format(rank) for rank in range(count)]
    require_files(paths or [folder / pattern.format(0)])
    return paths


def optimizer_files(folder: Path, ranks: int) -> list[Path]:
    """The ranks' optimizer states."""
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    prefix = "bf16_" if any(folder.glob(f"bf16_{name.format('*')}")) else ""
    paths = [folder / f"{prefix}{name.format(rank)}" for rank in range(ranks)]
    require_files(paths)
    return paths


def flat_weights(path: Path, ranks: int) -> list[torch.Tensor]:
    """A rank's partitions, float32, one behind the other, in groups."""
    state = pickled(path)["optimizer_state_dict"]
    if state["partition_count"] != ranks:
        raise ValueError(f"checkpoint: {path} is one of {state['partition_count']} ranks', and there are {ranks}")
    return state["fp32_flat_groups"]


def whole_between(flats: list[list[torch.Tensor]], start: int, end: int, shape: torch.Size) -> torch.Tensor:
    """The parameter of which each rank has elements `start` to `end` of its partitions."""
    return whole_of([between(groups, start, end) for groups in flats], shape)


def between(groups: list[torch.Tensor], start: int, end: int) -> torch.Tensor:
    """Elements `start` to `end` of tensors that lie one behind the other."""
    pieces, offset = [], 0
    for group in groups:
        pieces.append(group[max(start - offset, 0) : max(end - offset, 0)])
        offset += group.numel()
    return torch.cat(pieces)


def whole_of(partitions: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A parameter of its partitions; the last one's padding is left out."""
    return torch.cat(partitions)[: shape.numel()].view(shape)
