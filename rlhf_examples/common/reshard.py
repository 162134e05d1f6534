"""Converts a DeepSpeed engine's checkpoint to another number of ranks: parameters and optimizer states of ZeRO 1 to 3.

The checkpoint also holds which part of which parameter lies where in a rank's flat tensors, so this code does not
depend on DeepSpeed's padding and order (deepspeed 0.19.8).
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid
from rlhf_examples.common.checkpoint_files import load_tensors, save_tensors


@dataclass(frozen=True)
class Piece:
    """A part of a parameter in a rank's partition.

    name: the parameter's.  group, offset: index of the flat tensor that holds the part, and the part's first element in
        it.
    start, numel: the part's first element in the flattened parameter, and its number of elements.
    """

    name: str
    group: int
    offset: int
    start: int
    numel: int


def pieces_of(engine: hybrid.HybridEngine) -> list[Piece]:
    """The parts in this rank's flat tensors; empty under ZeRO-0, where every rank holds everything."""
    optimizer, pieces = engine.optimizer, []
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3: a part of each parameter, the last one padded
            group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * numel
            pieces.append(Piece(name, group, offset, start, max(min(numel, parameter.ds_numel - start), 0)))
        elif getattr(parameter, "_hp_mapping", None) is not None:  # ZeRO-1 and 2: a range of all parameters
            group = next(
                i for i, parameters in enumerate(optimizer.bit16_groups) if any(p is parameter for p in parameters)
            )
            in_parameter, in_flat = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            pieces.append(Piece(name, group, in_flat.start, in_parameter.start, in_parameter.numel))
    return pieces


@dataclass(frozen=True)
class Partition:
    """A rank's part of an optimizer, as DeepSpeed saves it.

    flats: flat tensors by kind ("fp32" for the weights, else a state's name such as "exp_avg"), then by group.
    """

    flats: dict[str, dict[int, Tensor]]
    pieces: list[Piece]

    @classmethod
    def of(cls, optimizer_state: dict[str, Any], pieces: list[Piece]) -> "Partition":
        """From the `optimizer_state_dict` of a rank's file."""
        flats = {"fp32": dict(enumerate(optimizer_state[weights_key(optimizer_state)]))}
        for group, state in torch_optimizer_state(optimizer_state)["state"].items():
            for key, value in state.items():
                if value.dim():
                    flats.setdefault(key, {})[group] = value
        return cls(flats, pieces)


def weights_key(optimizer_state: dict[str, Any]) -> str:
    """The key of the flat weights in an `optimizer_state_dict`: that of ZeRO-3, or that of ZeRO-1 and 2."""
    return "fp32_flat_groups" if "fp32_flat_groups" in optimizer_state else "single_partition_of_fp32_groups"


def torch_optimizer_state(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's optimizer within it."""
    return optimizer_state["optimizer_state_dict" if "fp32_flat_groups" in optimizer_state else "base_optimizer_state"]


def repartition(old: list[Partition], kind: str, local: list[Piece], sizes: list[int]) -> list[Tensor]:
    """This rank's flat tensors of a kind, float32, with the given sizes, assembled from those of all old ranks; 0 in
    padding.
    """
    by_name = defaultdict(list)
    for partition in old:
        for piece in partition.pieces:
            by_name[piece.name].append((partition.flats[kind][piece.group], piece))
    flats = [torch.zeros(size) for size in sizes]
    for piece in local:
        for flat, other in by_name[piece.name]:
            first, last = max(piece.start, other.start), min(piece.start + piece.numel, other.start + other.numel)
            if first < last:
                source = flat[other.offset + first - other.start :][: last - first]
                flats[piece.group][piece.offset + first - piece.start :][: last - first] = source
    return flats


def reshard(engine: hybrid.HybridEngine, tag: Path, old: list[list[Piece]], target: Path) -> None:
    """Write the files that this rank loads: the checkpoint in `tag`, saved by ranks with the pieces `old`, converted to
    the directory of the same name in `target`. Every rank takes part.

    Raises ValueError if the checkpoint has other parameters.
    """
    local_pieces = pieces_of(engine)
    saved_names = {piece.name for pieces in old for piece in pieces}
    if mismatched := sorted({piece.name for piece in local_pieces} - saved_names):
        raise ValueError(
            f"resume: the checkpoint is of another model: it lacks {', '.join(mismatched[:4])}; give the settings that "
            "the run began with"
        )
    files = [optimizer_file(tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(len(old))]
    loaded = [load_tensors(file) for file in files]
    states = [of_rank["optimizer_state_dict"] for of_rank in loaded]
    partitions = [Partition.of(state, pieces) for state, pieces in zip(states, old, strict=True)]
    optimizer_state = dict(engine.optimizer.state_dict())  # keeps what belongs to this rank, such as its paddings
    flat_weights, base, template = (
        optimizer_state[weights_key(optimizer_state)],
        torch_optimizer_state(optimizer_state),
        torch_optimizer_state(states[0]),
    )
    paddings = optimizer_state.get("group_paddings", [0] * len(flat_weights))
    sizes = [flat.numel() + padding for flat, padding in zip(flat_weights, paddings, strict=True)]
    flats = {kind: repartition(partitions, kind, local_pieces, sizes) for kind in partitions[0].flats}
    weights = [flat[: flat.numel() - padding] for flat, padding in zip(flats.pop("fp32"), paddings, strict=True)]
    optimizer_state[weights_key(optimizer_state)] = weights
    scalar_state = {key: value for key, value in template["state"][0].items() if not value.dim()}  # the number of steps
    base["state"] = {
        group: {**scalar_state, **{key: tensors[group] for key, tensors in flats.items()}}
        for group in range(len(sizes))
    }
    groups = zip(template["param_groups"], base["param_groups"], strict=True)
    base["param_groups"] = [{**saved_group, "params": group["params"]} for saved_group, group in groups]
    (target / tag.name).mkdir(parents=True, exist_ok=True)
    save_tensors(
        {**loaded[0], "optimizer_state_dict": optimizer_state}, engine._get_zero_ckpt_name(str(target), tag.name)
    )
    if engine.zero_optimization_stage() == 3 or dist.get_rank() == 0:
        model_state = load_tensors(next(tag.glob("*mp_rank_00_model_states.pt")))
        path = engine._get_ckpt_name(str(target), tag.name)
        save_tensors({**model_state, "dp_world_size": dist.get_world_size()}, path)


def optimizer_file(directory: Path, name: str) -> Path:
    """The file `name`, or that with the prefix "bf16_"."""
    return next(path for path in (directory / name, directory / f"bf16_{name}") if path.is_file())
