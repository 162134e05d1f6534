"""Checkpoints of all supported formats, opened as tensors by name that are read one at a time.

Formats: Hugging Face's files (safetensors and pickles, single or sharded), state dicts saved by torch, training
checkpoints of DeepSpeed engines, DeepSpeed's JSON, and what `save_mp_checkpoint` has written.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION, ParamAffineMap
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AFFINE_MAP_PARAMS,
    AFFINE_MAP_VERSION,
    AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.moe.layer import MoE
from safetensors.torch import save_file

from hybrid.inference.tensor_files import (
    FileTensor,
    Tensors,
    in_memory,
    joined_parts,
    load_pickle,
    merged,
    open_file,
    open_index,
    read_json,
    require_files,
    require_unsplit,
)
from hybrid.runtime.messages import shortened

HUGGING_FACE_NAMES: tuple[str, ...] = (
    "model.safetensors.index.json",
    "model.safetensors",
)  # in the order of precedence
HUGGING_FACE_NAMES += ("pytorch_model.bin.index.json", "pytorch_model.bin")
JSON_NAME = "ds_inference_config.json"  # DeepSpeed's file name
PART_NAME = "tp_{:02d}.safetensors"  # of a rank's part
JSON_TYPES = ("megatron", "bloom", "ds_model")  # DeepSpeed's values, in lower case
MODEL_FILES = "mp_rank_*_model_states.pt"
EXPERT_FILES = "layer_*_expert_*_model_states.pt"
EXPERTS = "deepspeed_moe.experts.deepspeed_experts"  # path in a layer of the numbered experts (0.19.8)
# Keys that ZeRO-3's model files have.
ZERO_KEYS = tuple("module buffer_names param_shapes shared_params frozen_param_shapes frozen_param_fragments".split())
# Name endings of parameters that concatenate several matrices, so that a tensor-parallel part has a part of each.
PACKED: tuple[str, ...] = ("gate_up_proj.weight", "qkv_proj.weight", "c_attn.weight", "W_pack.weight", "Wqkv.weight")
PACKED += tuple(name.replace("weight", "bias") for name in PACKED)


def open_checkpoint(
    source: str | dict[str, Any], base_dir: str, parts: int, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """Return the tensors of a checkpoint, by their names in it.

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
    """Return the tensors of a file of weights, or of the files that an index names."""
    require_unsplit(path, parts)
    return open_index(path) if path.suffix == ".json" else open_file(path)


def open_directory(path: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """Return the tensors in a directory, in the first known format found there."""
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
    """Return the folders in which to search for the files that DeepSpeed's JSON names, in order.

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
    """Return the tensors that DeepSpeed's JSON describes.

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
        require_unsplit(base, parts)
    return merged([*files, *(open_file(base / name) for name in full)])


def listed_files(content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the file names in DeepSpeed's JSON: those of `checkpoints` or "tp", and those of "non_tp"."""
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


# Training checkpoints of DeepSpeed engines, ZeRO 0-3, with and without tensor parallelism


def open_training_checkpoint(folder: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """Return the weights in a training checkpoint, joined over tensor-parallel ranks.

    ZeRO 0-2: in the dtype the model computed in. ZeRO-3: the optimizer's float32 weights, joined from the ranks'
    partitions.  parts, shapes: as for `open_checkpoint`. Raises ValueError if files are missing, damaged, or do not fit
    together.
    """
    experts = merged([open_file(path) for path in sorted(folder.glob(EXPERT_FILES))])
    names = [path.name for path in folder.glob(MODEL_FILES)]
    prefix = "zero_pp_rank_0_" if all(name.startswith("zero_pp_rank") for name in names) else ""
    first = engine_state(folder / f"{prefix}mp_rank_00_model_states.pt", ("module",))
    count = first.get("mp_world_size", 1)
    if parts not in (1, count):
        raise ValueError(f"training_mp_size: {parts} given; {folder} was trained with {count}")
    files = [folder / f"{prefix}mp_rank_{index:02d}_model_states.pt" for index in range(count)]
    require_files(files)
    ranks = [zero3_tensors(folder, index) if prefix else open_file(file) for index, file in enumerate(files)]
    if len(ranks) == 1:
        return experts | ranks[0]
    return experts | joined_by_map(ranks, first.get(UNIVERSAL_CHECKPOINT_INFO) or {}, shapes, folder)


def own_experts(layers: dict[str, MoE], tensors: Tensors) -> Tensors:
    """Return the tensors of a training checkpoint without the experts of other ranks.

    The checkpoint numbers experts over all ranks; the result uses this rank's local numbers.  layers: MoE layers by
    name, with their expert-parallel groups set.
    """
    selected: Tensors = {}
    pattern = re.compile(rf"(.*)\.{re.escape(EXPERTS)}\.(\d+)\.(.*)")
    for name, tensor in tensors.items():
        matched = pattern.fullmatch(name)
        if matched is None or matched[1] not in layers:
            selected[name] = tensor
            continue
        layer, number = layers[matched[1]], int(matched[2])
        rank = torch.distributed.get_rank(layer.deepspeed_moe.ep_group) if layer.ep_size > 1 else 0
        own = number - rank * layer.num_local_experts
        if 0 <= own < layer.num_local_experts:
            selected[f"{matched[1]}.{EXPERTS}.{own}.{matched[3]}"] = tensor
    return selected


def engine_state(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of a file saved by a DeepSpeed engine. Raises ValueError if the file or one of `keys` is
    missing."""
    require_files([path])
    state = load_pickle(path)
    missing = [key for key in keys if key not in state] if isinstance(state, dict) else keys
    if missing:
        raise ValueError(f"checkpoint: {path} has no {shortened(missing)}; a DeepSpeed engine did not save it")
    return state


def joined_by_map(
    ranks: list[Tensors], info: dict[str, Any], shapes: Mapping[str, torch.Size], folder: Path
) -> Tensors:
    """Join the ranks' parts by the map that DeepSpeed's automatic tensor parallelism saves or, for tensors without an
    entry (split by other code), by their shapes.

    info: the checkpoint's UNIVERSAL_CHECKPOINT_INFO.
    """
    if unknown := info.get(AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS):
        raise ValueError(f"checkpoint: {folder} has parts that DeepSpeed does not know how to put together: {unknown}")
    maps = info.get(AFFINE_MAP) or {AFFINE_MAP_PARAMS: {}}
    if maps.get(AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION) != AFFINE_MAP_FORMAT_VERSION:
        raise ValueError(
            f"checkpoint: {folder} has a map of parts of version {maps[AFFINE_MAP_VERSION]}, and DeepSpeed here knows "
            f"version {AFFINE_MAP_FORMAT_VERSION}; use the DeepSpeed that wrote it"
        )
    tensors = joined_parts(ranks, shapes, version=1)
    packed = []
    for name in tensors:
        if entry := maps[AFFINE_MAP_PARAMS].get(f"^{re.escape(name)}$"):
            parts = [rank[name] for rank in ranks]
            tensors[name] = FileTensor(torch.Size(entry["logical_shape"]), partial(rebuilt, entry, parts))
        elif name.endswith(PACKED) and name in shapes and ranks[0][name].shape != shapes[name]:
            packed.append(name)
    if packed:
        raise ValueError(
            f"checkpoint: {folder} has parts of {shortened(packed)}, which hold parts of several matrices each, and no "
            "map of them; save it unsplit first"
        )
    return tensors


def rebuilt(entry: dict[str, Any], parts: list[FileTensor]) -> torch.Tensor:
    """Return the full tensor from the ranks' parts, by its entry in DeepSpeed's map."""
    return ParamAffineMap.from_dict(entry).rebuild({rank: part.read() for rank, part in enumerate(parts)})


def zero3_tensors(folder: Path, index: int) -> Tensors:
    """Return the tensors of a ZeRO-3 checkpoint, for one tensor-parallel rank.

    Each data-parallel rank has an equal share of every parameter's elements, in the order of the parameters.
    """
    file = f"zero_pp_rank_{{}}_mp_rank_{index:02d}_{{}}_states.pt"
    ranks = range(len(list(folder.glob(file.format("*", "model")))) or 1)
    states = [engine_state(folder / file.format(rank, "model"), ZERO_KEYS) for rank in ranks]
    tensors = {name: in_memory(states[0]["module"][name]) for name in states[0]["buffer_names"]}
    for name, shape in (states[0]["frozen_param_shapes"] or {}).items():
        fragments = [state["frozen_param_fragments"][name] for state in states]
        tensors[name] = FileTensor(shape, partial(unpartitioned, fragments, shape))
    trained = {name: shape for group in states[0]["param_shapes"] for name, shape in group.items()}
    widths = [-(-shape.numel() // len(states)) for shape in trained.values()]
    prefix = "bf16_" if any(folder.glob(f"bf16_{file.format('*', 'optim')}")) else ""
    paths = [folder / f"{prefix}{file.format(rank, 'optim')}" for rank in ranks] if trained else []
    require_files(paths)
    flats = [flat_weights(path, len(states), sum(widths)) for path in paths]
    for (name, shape), width, end in zip(trained.items(), widths, accumulate(widths), strict=True):
        tensors[name] = FileTensor(shape, partial(trained_tensor, flats, end - width, end, shape))
    for name, other in (states[0]["shared_params"] or {}).items():
        tensors[name] = tensors[other]
    return tensors


def flat_weights(path: Path, ranks: int, width: int) -> list[torch.Tensor]:
    """Return a rank's partitions of all parameters, as flat float32 tensors, one per parameter group.

    ranks, width: the number of ranks that must have saved them, and of elements that they must have together.
    """
    state = engine_state(path, ("optimizer_state_dict",))["optimizer_state_dict"]
    if state["partition_count"] != ranks:
        raise ValueError(f"checkpoint: {path} is one of {state['partition_count']} ranks', and there are {ranks}")
    groups = state["fp32_flat_groups"]
    if (elements := sum(group.numel() for group in groups)) < width:
        raise ValueError(f"checkpoint: {path} has {elements} elements of weights, and its model's file says {width}")
    return groups


def trained_tensor(flats: list[list[torch.Tensor]], start: int, end: int, shape: torch.Size) -> torch.Tensor:
    """Return the full parameter, whose partition is elements `start` to `end` of the concatenation of each rank's
    groups."""
    partitions = []
    for groups in flats:
        offset = 0
        for group in groups:
            partitions.append(group[max(start - offset, 0) : max(end - offset, 0)])
            offset += group.numel()
    return unpartitioned(partitions, shape)


def unpartitioned(partitions: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Return the full parameter from its partitions, without the padding at the end."""
    return torch.cat(partitions)[: shape.numel()].view(shape)
