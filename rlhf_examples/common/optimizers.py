"""Optimizers by name: DeepSpeed's configuration of each, and groups of parameters.

adamw: torch's AdamW. fused: DeepSpeed's AdamW kernels, on the host (CPU Adam) where states are offloaded. lion:
DeepSpeed's Lion, on a GPU or, with offloaded states, on the host. muon: DeepSpeed's Muon for matrices, and its AdamW
for embeddings, heads and vectors. adamw8bit: bitsandbytes' AdamW with states of 8 bits, on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Optimizer → DeepSpeed's type, and parameters of its own. adamw8bit is none of DeepSpeed's.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"torch_adam": True}),
    "fused": ("AdamW", {}),
    "lion": ("Lion", {"betas": [0.9, 0.99]}),  # the paper's, arXiv:2302.06675; DeepSpeed's default is another
    "muon": ("Muon", {"momentum": 0.95}),
}


def optimizer_config(name: str, learning_rate: float, weight_decay: float, adam_learning_rate: float) -> dict[str, Any]:
    """The entries of the DeepSpeed configuration for an optimizer.

    adam_learning_rate: of the parameters that muon leaves to AdamW; 0: `learning_rate`.
    """
    if name == "adamw8bit":
        return {"zero_allow_untested_optimizer": True}
    kind, own = TYPES[name]
    parameters = {"lr": learning_rate, "weight_decay": weight_decay, **own}
    if name == "muon" and adam_learning_rate:
        parameters["adam_lr"] = adam_learning_rate
    return {"optimizer": {"type": kind, "params": parameters}}


def client_optimizer(name: str, learning_rate: float, weight_decay: float) -> Callable | None:
    """A function that makes an optimizer that DeepSpeed has not; None if it has the optimizer."""
    if name != "adamw8bit":
        return None
    from bitsandbytes.optim import AdamW8bit

    return lambda parameters: AdamW8bit(parameters, lr=learning_rate, weight_decay=weight_decay)


def parameter_groups(model: nn.Module, weight_decay: float, decay: str) -> list:
    """The parameters that train, all in one group, or matrices, which decay, apart from vectors, which do not.

    decay: "all" or "matrices". Without a weight decay there is one group.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay == "all" or not weight_decay:
        return trained
    matrices = [parameter for parameter in trained if len(layer_shape(parameter)) > 1]
    vectors = [parameter for parameter in trained if len(layer_shape(parameter)) < 2]
    groups = (matrices, weight_decay), (vectors, 0.0)
    return [{"params": group, "weight_decay": value} for group, value in groups if group]


def layer_shape(parameter: nn.Parameter) -> torch.Size:
    """A parameter's shape as a whole, also where ZeRO-3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def require_device(name: str, offload: bool, device: torch.device) -> None:
    """Raises ValueError if DeepSpeed has no kernel of an optimizer for this device."""
    if device.type == "cpu" and (name == "adamw8bit" or (name == "lion" and not offload)):
        remedy = "; with offload: true and a ZeRO stage above 0 it runs on CPUs" if name == "lion" else ""
        raise ValueError(f"optimizer: {name!r} given, which has no kernel for CPUs{remedy}; give adamw, fused or muon")
