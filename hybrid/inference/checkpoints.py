"""Checkpoints of all supported formats, opened as tensors by name that are read one at a time.

Formats: Hugging Face's files (safetensors and pickles, single or sharded), state dicts saved by torch, training
checkpoints of DeepSpeed engines, DeepSpeed's JSON, and what `save_mp_checkpoint` has written.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hybrid.inference.tensor_files import (
    Tensors,
    joined_parts,
    load_pickle,
    merged,
    open_file,
    open_index,
    read_json,
    require_files,
    require_one_part,
    shortened,
)
from hybrid.inference.training_checkpoints import MODEL_FILES, open_training_checkpoint

HUGGING_FACE_NAMES = ("model.safetensors.index.json", "model.safetensors")  # in the order of precedence
HUGGING_FACE_NAMES += ("pytorch_model.bin.index.json", "pytorch_model.bin")
JSON_NAME = "ds_inference_config.json"  # DeepSpeed's file name
PART_NAME = "tp_{:02d}.safetensors"  # of a rank's part
JSON_TYPES = ("megatron", "bloom", "ds_model")  # DeepSpeed's values, in lower case


def open_checkpoint(
    source: str | dict[str, Any], base_dir: str, parts: int, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """The tensors of a checkpoint, by their names in it.

    source: a directory, a file, or DeepSpeed's JSON as a path or as its content. A directory or a file of weights is
        relative to `base_dir`. A JSON file is relative to the working directory, as in DeepSpeed, and if it is not
        there, to `base_dir`; the files that it names are searched for in `folders_of`.
    parts: the number of tensor-parallel parts that the checkpoint must have; 1: any number.
    shapes: of the model's tensors, from which the dimension follows along which parts are joined.
    Raises ValueError if a file is missing or damaged, the format is unknown, or a key of the JSON has an invalid value.
    """
    if isinstance(source, dict):
        return open_description(source, folders_of(source, base_dir, Path()), parts, shapes)
    path = Path(base_dir) / source
    if source.endswith(".json") and Path(source).is_file():
        path = Path(source)
    if path.is_dir():
        return open_directory(path, parts, shapes)
    require_files([path])
    content = read_json(path) if path.suffix == ".json" else {"weight_map": None}
    if "weight_map" in content or path.name.endswith(".index.json"):
        return open_weights(path, parts)
    return open_description(content, folders_of(content, base_dir, path.parent), parts, shapes)


def open_weights(path: Path, parts: int) -> Tensors:
    """The tensors of a file of weights, or of the files that an index names."""
    require_one_part(path, parts)
    return open_index(path) if path.suffix == ".json" else open_file(path)


def open_directory(path: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The tensors in a directory, in the first known format found there."""
    if (path / JSON_NAME).is_file():
        content = read_json(path / JSON_NAME)
        return open_description(content, folders_of(content, "", path), parts, shapes)
    for name in HUGGING_FACE_NAMES:
        if (path / name).is_file():
            return open_weights(path / name, parts)
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(errors="replace").strip()
        if not tag or not (path / tag).is_dir():
            raise ValueError(f"checkpoint: {path / 'latest'} names {tag!r}, and there is no such directory in {path}")
        return open_training_checkpoint(path / tag, parts, shapes)
    if any(path.glob(MODEL_FILES)) or any(path.glob(f"zero_pp_rank_*_{MODEL_FILES}")):
        return open_training_checkpoint(path, parts, shapes)
    raise ValueError(
        f"checkpoint: {path} has none of {JSON_NAME}, model.safetensors, pytorch_model.bin, an index of either, "
        f"'latest' and {MODEL_FILES}"
    )


def folders_of(content: dict[str, Any], base_dir: str, folder: Path) -> list[Path]:
    """The folders in which to search for the files that DeepSpeed's JSON names, in order.

    With a base directory B, which is the JSON's own `base_dir` or else the argument: B relative to the working
    directory, as in DeepSpeed; B relative to `base_dir`; B relative to the JSON's `folder`; that folder. Without one:
    the JSON's folder; the working directory.
    """
    base = content.get("base_dir") or base_dir
    if not isinstance(base, str):
        raise ValueError(f"checkpoint: base_dir={base!r} given; it must be the path of a directory")
    return [Path(base), Path(base_dir) / base, folder / base, folder] if base else [folder, Path()]


def open_description(
    content: dict[str, Any], folders: list[Path], parts: int, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """The tensors that DeepSpeed's JSON describes.

    content: `type`: one of JSON_TYPES. `checkpoints`: a list of files, or a dict with the ranks' parts ("tp") and the
        files of tensors that all ranks have ("non_tp"). `parallelization`: "pp" (files have different tensors) or "tp"
        (parts of the same tensors; the default for Megatron). `tp_size`. `version`: Megatron's layout; null: read it
        from the files. `base_dir`.
    folders: where to search for the files; the first folder with all of them is used.
    """
    split, full = listed_files(content)
    has_all = (folder for folder in folders if all((folder / name).is_file() for name in (*split, *full)))
    base, kind = next(has_all, folders[0]), content.get("type", "ds_model")
    if not isinstance(kind, str) or kind.lower() not in JSON_TYPES:
        raise ValueError(f"checkpoint: type={kind!r} given; it is one of {', '.join(JSON_TYPES)}")
    parallelization = content.get("parallelization", "tp" if kind.lower() == "megatron" else "pp")
    if parallelization not in ("pp", "tp"):
        raise ValueError(f"checkpoint: parallelization={parallelization!r} given; it is 'pp' or 'tp'")
    require_files([base / name for name in (*split, *full)])
    files = [open_file(base / name) for name in split]
    if parallelization == "tp":
        size = content.get("tp_size", content.get("mp_size")) or len(split)
        if not isinstance(size, int) or len(split) % size or parts not in (1, size):
            raise ValueError(
                f"checkpoint: {len(split)} files for tp_size={size!r}, and training_mp_size={parts}; the files are a "
                "multiple of tp_size, which is training_mp_size where that is not 1"
            )
        version = content.get("version", 1)
        if version is None:
            version = load_pickle(base / split[0]).get("checkpoint_version", 0)
        if not isinstance(version, int | float):
            raise ValueError(f"checkpoint: version={version!r} given; it is a number, or null")
        files = [joined_parts(files[start : start + size], shapes, version) for start in range(0, len(files), size)]
    else:
        require_one_part(base, parts)
    return merged([*files, *(open_file(base / name) for name in full)])


def listed_files(content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The file names in DeepSpeed's JSON: those of `checkpoints` or "tp", and those of "non_tp"."""
    files = content.get("checkpoints")
    if not isinstance(files, list | dict):
        raise ValueError(
            f"checkpoint: DeepSpeed's JSON has `checkpoints`, a list of files; this one has {shortened(content)}"
        )
    if isinstance(files, dict) and "tp" not in files:
        raise ValueError(f"checkpoint: checkpoints has {shortened(files)}; it must have `tp`, the ranks' parts")
    split, full = (files["tp"], files.get("non_tp", [])) if isinstance(files, dict) else (files, [])
    for names in (split, full):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"checkpoint: checkpoints has {names!r}; it must be a list of files")
    if not split:
        raise ValueError("checkpoint: checkpoints is empty; it must name files")
    return split, full


def save_mp_checkpoint(
    path: str, names: Iterable[str], read: Callable[[str], torch.Tensor], size: int, index: int
) -> None:
    """Write part `index` of `size` of every tensor: a slice of its rows. Part 0 also writes DeepSpeed's JSON.

    All parts together are a checkpoint that any tensor-parallel size can load.  read: gives a full tensor by name.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name in names:
        tensor = read(name)
        rows = tensor.chunk(size) if tensor.dim() else (tensor,)
        if index < len(rows):
            parts[name] = rows[index].contiguous().clone()
    save_file(parts, folder / PART_NAME.format(index), metadata={"format": "pt"})
    if index == 0:
        content = {
            "type": "ds_model",
            "checkpoints": [PART_NAME.format(other) for other in range(size)],
            "version": 1.0,
            "parallelization": "tp",
            "tp_size": size,
        }
        (folder / JSON_NAME).write_text(json.dumps(content, indent=1))
