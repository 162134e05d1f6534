"""Training checkpoints of DeepSpeed engines, ZeRO 0-3, with and without tensor parallelism."""

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
from deepspeed.moe.layer import MoE

from hybrid.inference.tensor_files import (
    FileTensor,
    Tensors,
    in_memory,
    joined_parts,
    load_pickle,
    merged,
    open_file,
    require_files,
    shortened,
)

MODEL_FILES = "mp_rank_*_model_states.pt"
EXPERT_FILES = "layer_*_expert_*_model_states.pt"
EXPERTS = "deepspeed_moe.experts.deepspeed_experts"  # path in a layer of the numbered experts (0.19.8)
# Keys that ZeRO-3's model files have.
ZERO_KEYS = tuple("module buffer_names param_shapes shared_params frozen_param_shapes frozen_param_fragments".split())
# Name endings of parameters that concatenate several matrices, so that a tensor-parallel part has a part of each.
PACKED = ("gate_up_proj.weight", "qkv_proj.weight", "c_attn.weight", "W_pack.weight", "Wqkv.weight")
PACKED += tuple(name.replace("weight", "bias") for name in PACKED)


def open_training_checkpoint(folder: Path, parts: int, shapes: Mapping[str, torch.Size]) -> Tensors:
    """The weights in a training checkpoint, joined over tensor-parallel ranks.

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
    """The tensors of a training checkpoint without the experts of other ranks.

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
    """The content of a file saved by a DeepSpeed engine. Raises ValueError if the file or one of `keys` is missing."""
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
    """The full tensor from the ranks' parts, by its entry in DeepSpeed's map."""
    return ParamAffineMap.from_dict(entry).rebuild({rank: part.read() for rank, part in enumerate(parts)})


def zero3_tensors(folder: Path, index: int) -> Tensors:
    """The tensors of a ZeRO-3 checkpoint, for one tensor-parallel rank.

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
    """A rank's partitions of all parameters, as flat float32 tensors, one per parameter group.

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
    """The full parameter, whose partition is elements `start` to `end` of the concatenation of each rank's groups."""
    partitions = []
    for groups in flats:
        offset = 0
        for group in groups:
            partitions.append(group[max(start - offset, 0) : max(end - offset, 0)])
            offset += group.numel()
    return unpartitioned(partitions, shape)


def unpartitioned(partitions: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The full parameter from its partitions, without the padding at the end."""
    return torch.cat(partitions)[: shape.numel()].view(shape)
