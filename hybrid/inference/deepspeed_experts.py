"""Checkpoints of DeepSpeed's own MoE layers: selecting this rank's experts."""

import re

import torch
from deepspeed.moe.layer import MoE

from hybrid.inference.tensor_files import Tensors

EXPERTS = "deepspeed_moe.experts.deepspeed_experts"  # path in a layer of the numbered experts (0.19.8)


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
