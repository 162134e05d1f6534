"""DeepSpeed's expert parallelism (`deepspeed.moe.layer.MoE`): which ranks run their forwards together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the model's MoE layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@dataclass(frozen=True)
class TokenExchange:
    """Ranks whose forwards send tokens to each other's experts, and so are collectives.

    group: these ranks; None: all ranks.  layers: the MoE layers that send tokens.
    """

    group: torch.distributed.ProcessGroup | None
    layers: tuple[MOELayer, ...]


def needs_equal_messages(layer: MOELayer) -> bool:
    """Whether all ranks must run a layer on equally many tokens, because DeepSpeed sizes its messages by its own
    rank's number (0.19.8): if experts drop tokens over their capacity, and if each token has one expert.
    """
    return layer.gate.drop_tokens or layer.gate.k == 1


def padded_forward(layer: MOELayer) -> Callable:
    """Return the layer's forward on as many tokens as the rank with the most has. A collective of the layer's group.

    The rank's tokens are repeated at the end, marked as unused so that they displace none; these outputs are cut off.
    """
    original = layer.forward

    def forward(hidden: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        count = len(flat)
        max_rows = torch.tensor(count, device=hidden.device)
        torch.distributed.all_reduce(max_rows, op=torch.distributed.ReduceOp.MAX, group=layer.ep_group)
        rows = torch.arange(int(max_rows), device=hidden.device)
        used = (rows < count).to(flat.dtype)
        if used_token is not None:
            used[:count] = used_token.to(flat.dtype)
        return original(flat[rows % count], used)[:count].view(hidden.shape)

    return forward


def exchange_tokens(layers: dict[str, MoE]) -> TokenExchange | None:
    """Return the ranks and layers that exchange tokens; None if no layer sends tokens to other ranks.

    Creates the layers' expert groups: a collective of all ranks, unless the groups exist.
    """
    parallel = [layer for layer in layers.values() if layer.ep_size > 1]
    for layer in parallel:
        if layer.deepspeed_moe.ep_group is None:
            layer.set_deepspeed_parallelism()
    if not parallel:
        return None
    widest = max(parallel, key=lambda layer: layer.ep_size)
    nested = all(widest.ep_size % layer.ep_size == 0 for layer in parallel)  # groups are consecutive ranks
    group = widest.deepspeed_moe.ep_group if nested else None
    return TokenExchange(group, tuple(layer.deepspeed_moe for layer in parallel))
