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
    optimizer, found = engine.optimizer, []
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3: a part of each parameter, the last one padded
            group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * numel
            found.append(Piece(name, group, offset, start, max(min(numel, parameter.ds_numel - start), 0)))
        elif getattr(parameter, "_hp_mapping", None) is not None:  # ZeRO-1 and 2: a range of all parameters
            group = next(i for i, of in enumerate(optimizer.bit16_groups) if any(p is parameter for p in of))
            whole, flat = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            found.append(Piece(name, group, flat.start, whole.start, whole.numel))
    return found


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
        for group, state in base_of(optimizer_state)["state"].items():
            for key, value in state.items():
                if value.dim():
                    flats.setdefault(key, {})[group] = value
        return cls(flats, pieces)


def weights_key(optimizer_state: dict[str, Any]) -> str:
    """The key of the flat weights in an `optimizer_state_dict`: that of ZeRO-3, or that of ZeRO-1 and 2."""
    return "fp32_flat_groups" if "fp32_flat_groups" in optimizer_state else "single_partition_of_fp32_groups"


def base_of(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's optimizer within it."""
    return optimizer_state["optimizer_state_dict" if "fp32_flat_groups" in optimizer_state else "base_optimizer_state"]


def recut(old: list[Partition], kind: str, own: list[Piece], sizes: list[int]) -> list[Tensor]:
    """This rank's flat tensors of a kind, float32, with the given sizes, assembled from those of all old ranks; 0 in
    padding.
    """
    by_name = defaultdict(list)
    for partition in old:
        for piece in partition.pieces:
            by_name[piece.name].append((partition.flats[kind][piece.group], piece))
    flats = [torch.zeros(size) for size in sizes]
    for piece in own:
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
    own = pieces_of(engine)
    saved = {piece.name for pieces in old for piece in pieces}
    if unfit := sorted({piece.name for piece in own} - saved):
        raise ValueError(
            f"resume: the checkpoint is one of another model: {', '.join(unfit[:4])} is on one side alone; give the "
            "settings that the run began with"
        )
    files = [one_file(tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(len(old))]
    loaded = [read(file) for file in files]
    states = [of_rank["optimizer_state_dict"] for of_rank in loaded]
    partitions = [Partition.of(state, pieces) for state, pieces in zip(states, old, strict=True)]
    found = dict(engine.optimizer.state_dict())  # keeps what belongs to this rank, such as its paddings
    live, base, template = found[weights_key(found)], base_of(found), base_of(states[0])
    paddings = found.get("group_paddings", [0] * len(live))
    sizes = [flat.numel() + padding for flat, padding in zip(live, paddings, strict=True)]
    cut = {kind: recut(partitions, kind, own, sizes) for kind in partitions[0].flats}
    weights = [flat[: flat.numel() - padding] for flat, padding in zip(cut.pop("fp32"), paddings, strict=True)]
    found[weights_key(found)] = weights
    whole = {key: value for key, value in template["state"][0].items() if not value.dim()}  # the number of steps
    base["state"] = {group: {**whole, **{key: of[group] for key, of in cut.items()}} for group in range(len(sizes))}
    groups = zip(template["param_groups"], base["param_groups"], strict=True)
    base["param_groups"] = [{**saved_group, "params": group["params"]} for saved_group, group in groups]
    (target / tag.name).mkdir(parents=True, exist_ok=True)
    torch.save({**loaded[0], "optimizer_state_dict": found}, engine._get_zero_ckpt_name(str(target), tag.name))
    if engine.zero_optimization_stage() == 3 or dist.get_rank() == 0:
        of_model = read(next(tag.glob("*mp_rank_00_model_states.pt")))
        path = engine._get_ckpt_name(str(target), tag.name)
        torch.save({**of_model, "dp_world_size": dist.get_world_size()}, path)


def one_file(directory: Path, name: str) -> Path:
    """The file `name`, or that with the prefix "bf16_"."""
    return next(path for path in (directory / name, directory / f"bf16_{name}") if path.is_file())


def read(path: Path) -> dict[str, Any]:
    """A file's contents, its tensors memory-mapped."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
