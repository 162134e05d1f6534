"""Checkpoints, whatever form they are in, as tensors by name that are read one at a time.

Hugging Face's files (safetensors and pickles, whole and sharded), state dicts that torch has saved, what a DeepSpeed
engine has saved in training, DeepSpeed's JSON, and what `save_mp_checkpoint` has written.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hybrid.inference.tensor_files import (
    Tensors,
    in_file,
    indexed,
    joined_parts,
    pickled,
    read_json,
    require_files,
    require_one_part,
    some,
    together,
)
from hybrid.inference.training_checkpoints import MODEL_FILES, of_training

JSON_NAME = "ds_inference_config.json"  # DeepSpeed's name for it
JSON_TYPES = ("megatron", "bloom", "ds_model")  # DeepSpeed's, in small letters


def open_checkpoint(
    source: str | dict[str, Any], base_dir: str, parts: int, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """The tensors of a checkpoint by their names in it.

    source: a directory, a file, or DeepSpeed's JSON, its path or what is in it. A directory or a file of weights begins
        in `base_dir`; a JSON file in the working directory, as DeepSpeed's, or where it is not there, in `base_dir`.
        What a JSON file names is looked for in `folders_of`.
    parts: tensor-parallel parts that it must be in; 1: any number.  shapes: of the model's tensors, which tell along
        which dimension parts go together.
    Raises ValueError for what is missing, damaged or in no form that is known.
    """
    if isinstance(source, dict):
        return described(source, folders_of(source, base_dir, Path()), parts, shapes)
    path = Path(base_dir) / source
    if source.endswith(".json") and Path(source).is_file():
        path = Path(source)
    if path.is_dir():
        return in_directory(path, parts, shapes)
    require_files([path])
    if path.suffix != ".json":
        require_one_part(path, parts)
        return in_file(path)
    content = read_json(path)
    if "weight_map" in content or path.name.endswith(".index.json"):
        require_one_part(path, parts)
        return indexed(path)
    return described(content, folders_of(content, base_dir, path.parent), parts, shapes)


def in_directory(path: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The tensors in a directory, by the first form in which it has any."""
    if (path / JSON_NAME).is_file():
        content = read_json(path / JSON_NAME)
        return described(content, folders_of(content, "", path), parts, shapes)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file() or (path / name).is_file():
            require_one_part(path, parts)
            return indexed(index) if index.is_file() else in_file(path / name)
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(errors="replace").strip()
        if not tag or not (path / tag).is_dir():
            raise ValueError(f"checkpoint: {path / 'latest'} names {tag!r}, and there is no such directory beside it")
        return of_training(path / tag, parts, shapes)
    if any(path.glob(MODEL_FILES)) or any(path.glob(f"zero_pp_rank_*_{MODEL_FILES}")):
        return of_training(path, parts, shapes)
    raise ValueError(
        f"checkpoint: {path} has none of {JSON_NAME}, model.safetensors, pytorch_model.bin, an index of either, "
        f"'latest' and {MODEL_FILES}"
    )


def folders_of(content: dict[str, Any], base_dir: str, folder: Path) -> list[Path]:
    """Where the files that DeepSpeed's JSON names may be, the likeliest first.

    The JSON's own `base_dir`, else the `base_dir` that was given, from the working directory, as DeepSpeed's; then the
    first within the second, within the JSON's folder, and that folder. Without either the JSON's folder, and then the
    working directory.
    """
    said = content.get("base_dir") or base_dir
    if not isinstance(said, str):
        raise ValueError(f"checkpoint: base_dir={said!r} given; it must be the path of a directory")
    return [Path(said), Path(base_dir) / said, folder / said, folder] if said else [folder, Path()]


def described(content: dict[str, Any], folders: list[Path], parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The tensors that DeepSpeed's JSON describes: `type`, one of JSON_TYPES; `checkpoints`, a list of files, or ranks'
    parts ("tp") and what all ranks have ("non_tp"); `parallelization`, "pp" (files have different tensors) or "tp" (so
    where `type` is Megatron); `tp_size`; `version`, which the files say where it is null; `base_dir`.

    folders: where its files may be; the first that has all of them is taken."""
    split, whole = files_described(content)
    has_all = (folder for folder in folders if all((folder / name).is_file() for name in (*split, *whole)))
    base, kind = next(has_all, folders[0]), content.get("type", "ds_model")
    if not isinstance(kind, str) or kind.lower() not in JSON_TYPES:
        raise ValueError(f"checkpoint: type={kind!r} given; it is one of {', '.join(JSON_TYPES)}")
    way = content.get("parallelization", "tp" if kind.lower() == "megatron" else "pp")
    if way not in ("pp", "tp"):
        raise ValueError(f"checkpoint: parallelization={way!r} given; it is 'pp' or 'tp'")
    require_files([base / name for name in (*split, *whole)])
    if way == "pp":
        require_one_part(base, parts)
        return together([in_file(base / name) for name in (*split, *whole)])
    size = content.get("tp_size", content.get("mp_size")) or len(split)
    if not isinstance(size, int) or len(split) % size or parts not in (1, size):
        raise ValueError(
            f"checkpoint: {len(split)} files for tp_size={size!r}, and training_mp_size={parts}; the files are a "
            "multiple of tp_size, which is training_mp_size where that is not 1"
        )
    version = content.get("version", 1)
    if version is None:
        version = pickled(base / split[0]).get("checkpoint_version", 0)
    if not isinstance(version, int | float):
        raise ValueError(f"checkpoint: version={version!r} given; it is a number, or null")
    opened = [in_file(base / name) for name in split]
    runs = [opened[start : start + size] for start in range(0, len(opened), size)]
    joined = [joined_parts(run, shapes, version) for run in runs]
    return together([*joined, *(in_file(base / name) for name in whole)])


def files_described(content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The files in DeepSpeed's JSON: of parts or of different tensors, and those that all ranks have."""
    files = content.get("checkpoints")
    if not isinstance(files, list | dict):
        raise ValueError(
            f"checkpoint: DeepSpeed's JSON has `checkpoints`, a list of files; this one has {some(content)}"
        )
    if isinstance(files, dict) and "tp" not in files:
        raise ValueError(f"checkpoint: checkpoints has {some(files)}; it must have `tp`, the ranks' parts")
    split, whole = (files["tp"], files.get("non_tp", [])) if isinstance(files, dict) else (files, [])
    for names in (split, whole):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"checkpoint: checkpoints has {names!r}; it must be a list of files")
    if not split:
        raise ValueError("checkpoint: checkpoints is empty; it must name files")
    return split, whole


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
