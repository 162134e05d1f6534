"""What a DeepSpeed engine has saved in training, ZeRO 0-3, with and without tensor parallelism."""

import re
from collections.abc import Mapping
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

from hybrid.inference.tensor_files import (
    Stored,
    Tensors,
    held,
    in_file,
    joined_parts,
    pickled,
    require_files,
    some,
    together,
)

MODEL_FILES = "mp_rank_*_model_states.pt"
EXPERT_FILES = "layer_*_expert_*_model_states.pt"
# Keys of ZeRO-3's model files.
ZERO_KEYS = tuple("module buffer_names param_shapes shared_params frozen_param_shapes frozen_param_fragments".split())
# Ends of names of what holds several matrices one behind the other, so that a part holds a part of each.
SEVERAL = ("gate_up_proj.weight", "qkv_proj.weight", "c_attn.weight", "W_pack.weight", "Wqkv.weight")
SEVERAL += tuple(name.replace("weight", "bias") for name in SEVERAL)


def of_training(folder: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The weights in a training checkpoint: under ZeRO 0-2 those that the model computed with, under ZeRO-3 the
    optimizer's in float32, put together from the ranks' partitions; where tensor parallelism has split them, whole."""
    experts = together([in_file(path) for path in sorted(folder.glob(EXPERT_FILES))])
    found = [path.name for path in folder.glob(MODEL_FILES)]
    prefix = "zero_pp_rank_0_" if all(name.startswith("zero_pp_rank") for name in found) else ""
    first = state_of_engine(folder / f"{prefix}mp_rank_00_model_states.pt", ("module",))
    count = first.get("mp_world_size", 1)
    if parts not in (1, count):
        raise ValueError(f"training_mp_size: {parts} given; {folder} was trained with {count}")
    files = [folder / f"{prefix}mp_rank_{index:02d}_model_states.pt" for index in range(count)]
    require_files(files)
    ranks = [partitioned(folder, index) if prefix else in_file(file) for index, file in enumerate(files)]
    if len(ranks) == 1:
        return experts | ranks[0]
    return experts | joined_by_map(ranks, first.get(UNIVERSAL_CHECKPOINT_INFO) or {}, shapes, folder)


def state_of_engine(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """What a DeepSpeed engine has written into a file, which has these keys."""
    require_files([path])
    state = pickled(path)
    absent = [key for key in keys if key not in state] if isinstance(state, dict) else keys
    if absent:
        raise ValueError(f"checkpoint: {path} has no {some(absent)}; it is not what a DeepSpeed engine saves")
    return state


def joined_by_map(
    ranks: list[Tensors], info: dict[str, Any], shapes: Mapping[str, torch.Size], folder: Path
) -> Tensors:
    """Tensors of which each rank has a part, by the map that DeepSpeed's automatic tensor parallelism leaves of them,
    or, where there is none (another's tensor parallelism), by their shapes.

    Raises ValueError where they cannot be put together, or it is not said how.
    """
    if unknown := info.get(AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS):
        raise ValueError(f"checkpoint: {folder} has parts that DeepSpeed does not know how to put together: {unknown}")
    maps = info.get(AFFINE_MAP) or {AFFINE_MAP_PARAMS: {}}
    if maps.get(AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION) != AFFINE_MAP_FORMAT_VERSION:
        raise ValueError(
            f"checkpoint: {folder} has a map of parts of version {maps[AFFINE_MAP_VERSION]}, and DeepSpeed here knows "
            f"version {AFFINE_MAP_FORMAT_VERSION}; use the DeepSpeed that has written it"
        )
    found = joined_parts(ranks, shapes, version=1)
    mapped = {name: maps[AFFINE_MAP_PARAMS].get(f"^{re.escape(name)}$") for name in found}
    fused = [name for name, entry in mapped.items() if entry is None and name.endswith(SEVERAL) and name in shapes]
    if fused := [name for name in fused if ranks[0][name].shape != shapes[name]]:
        raise ValueError(
            f"checkpoint: {folder} has parts of {some(fused)}, which hold parts of several matrices each, and no map "
            "of them; write it as a whole first"
        )
    for name, entry in mapped.items():
        if entry is not None:
            split = [rank[name] for rank in ranks]
            found[name] = Stored(torch.Size(entry["logical_shape"]), partial(rebuilt, entry, split))
    return found


def rebuilt(entry: dict[str, Any], parts: list[Stored]) -> torch.Tensor:
    """A tensor of its parts, by DeepSpeed's map of it."""
    return ParamAffineMap.from_dict(entry).rebuild({rank: part.read() for rank, part in enumerate(parts)})


def partitioned(folder: Path, index: int) -> Tensors:
    """ZeRO-3's, of one rank of tensor parallelism: of every parameter each rank has so many elements, in the order of
    the parameters."""
    models = in_order(folder, f"zero_pp_rank_{{}}_mp_rank_{index:02d}_model_states.pt")
    states = [state_of_engine(path, ZERO_KEYS) for path in models]
    found = {name: held(states[0]["module"][name]) for name in states[0]["buffer_names"]}
    for name, shape in (states[0]["frozen_param_shapes"] or {}).items():
        fragments = [state["frozen_param_fragments"][name] for state in states]
        found[name] = Stored(shape, partial(whole_of, fragments, shape))
    trained = {name: shape for group in states[0]["param_shapes"] for name, shape in group.items()}
    widths = [-(-shape.numel() // len(states)) for shape in trained.values()]
    paths = optimizer_files(folder, len(states), index) if trained else []
    flats = [flat_weights(path, len(states), sum(widths)) for path in paths]
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


def optimizer_files(folder: Path, ranks: int, index: int) -> list[Path]:
    """The ranks' optimizer states."""
    name = f"zero_pp_rank_{{}}_mp_rank_{index:02d}_optim_states.pt"
    prefix = "bf16_" if any(folder.glob(f"bf16_{name.format('*')}")) else ""
    paths = [folder / f"{prefix}{name.format(rank)}" for rank in range(ranks)]
    require_files(paths)
    return paths


def flat_weights(path: Path, ranks: int, width: int) -> list[torch.Tensor]:
    """A rank's partitions, float32, one behind the other, in groups; `width` elements in all."""
    state = state_of_engine(path, ("optimizer_state_dict",))["optimizer_state_dict"]
    if state["partition_count"] != ranks:
        raise ValueError(f"checkpoint: {path} is one of {state['partition_count']} ranks', and there are {ranks}")
    groups = state["fp32_flat_groups"]
    if (held := sum(group.numel() for group in groups)) < width:
        raise ValueError(f"checkpoint: {path} has {held} elements of weights, and its model's file says {width}")
    return groups


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
