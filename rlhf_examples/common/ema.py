"""An exponential moving average of trained weights, partitioned as they are."""

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_fp32_param

import hybrid


class MovingAverage:
    """ema ← beta · ema + (1 - beta) · weights after every optimizer step, in float32, of this rank's partitions only.

    DeepSpeed-Chat averages gathered 16-bit weights, of which its copy under ZeRO-3 has none (deepspeedexamples,
    `moving_average`); this one averages the optimizer's float32 weights.
    """

    def __init__(self, engine: hybrid.HybridEngine, beta: float):
        self.beta = beta
        self.names = {p: name for name, p in engine.module.named_parameters() if p.requires_grad}
        self.parts = {name: part.clone() for name, part in self._local_partitions().items()}

    def _local_partitions(self) -> dict[str, torch.Tensor]:
        """This rank's float32 weights, flat, by parameter name."""
        parts = {name: local_partition(parameter) for parameter, name in self.names.items()}
        return {name: part.detach() for name, part in parts.items() if part is not None}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; call it after every optimizer step."""
        for name, part in self._local_partitions().items():
            self.parts[name].lerp_(part, 1 - self.beta)

    @torch.no_grad()
    def full_tensor(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A parameter's average, float32, in its shape; None if it is not trained. Every rank takes part."""
        name = self.names.get(parameter)
        return None if name is None else gather_full_tensor(parameter, self.parts.get(name))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part of the average."""
        return self.parts

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore this rank's part from a checkpoint."""
        for name, part in state.items():
            self.parts[name].copy_(part)

    def load_state_dicts(self, states: list[dict[str, torch.Tensor]]) -> None:
        """Restore this rank's part from the states of another number of ranks."""
        for parameter, name in self.names.items():
            if name in self.parts:
                parts, part = [state[name] for state in states if name in state], self.parts[name]
                whole = torch.cat(parts)[: getattr(parameter, "ds_numel", parameter.numel())]  # without padding
                values = whole[partition_start(parameter) :][: len(part)]
                part.zero_()[: len(values)] = values


def partition_start(parameter: torch.nn.Parameter) -> int:
    """The index of the first element of `local_partition` in the flattened parameter."""
    if hasattr(parameter, "ds_tensor"):
        return dist.get_rank() * parameter.ds_tensor.numel()
    if getattr(parameter, "_hp_mapping", None) is not None:
        return parameter._hp_mapping.lp_fragment_address.start
    return 0


def local_partition(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's float32 weights of a parameter, flat; None if this rank holds no part of it (ZeRO-1, ZeRO-2)."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3
        return safe_get_local_fp32_param(parameter).flatten()
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1, ZeRO-2, and bfloat16 without ZeRO
        return None if parameter._hp_mapping is None else parameter._hp_mapping.hp_fragment
    return parameter.detach().float().flatten()


def gather_full_tensor(parameter: torch.nn.Parameter, part: torch.Tensor | None) -> torch.Tensor:
    """All ranks' parts of a parameter put together, in its shape. Every rank takes part."""
    if hasattr(parameter, "ds_tensor"):
        assert part is not None, "every rank has a part of a ZeRO-3 parameter"
        parts = torch.empty(dist.get_world_size() * part.numel(), device=part.device)
        dist.all_gather_into_tensor(parts, part)
        return parts[: parameter.ds_numel].view(parameter.ds_shape)
    if hasattr(parameter, "_hp_mapping"):
        full_tensor = torch.zeros(parameter.numel(), device=parameter.device)
        if part is not None:
            address = parameter._hp_mapping.lp_fragment_address
            full_tensor[address.start : address.start + address.numel] = part
        dist.all_reduce(full_tensor)
        return full_tensor.view(parameter.shape)
    assert part is not None, "every rank has all of a parameter that is not partitioned"
    return part.view(parameter.shape)
