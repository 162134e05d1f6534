"""What training needs and inference does not, in host memory for a while: DeepSpeed's `offload_states` (0.19.8)."""

from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def require_movable(config: DeepSpeedConfig) -> None:
    """Raise ValueError, in words, where a configuration leaves nothing that could be moved."""
    zero = config.zero_config
    if zero.stage == 0:
        raise ValueError(
            "rollout.offload_states: true given with zero_optimization.stage=0, whose states DeepSpeed cannot move; "
            "use stage 1, 2 or 3, or false"
        )
    for name in ("offload_param", "offload_optimizer"):
        offload = getattr(zero, name)
        if offload is not None and offload.device != OffloadDeviceEnum.none:
            device = OffloadDeviceEnum(offload.device).value
            raise ValueError(
                f"rollout.offload_states: true given with zero_optimization.{name}.device={device}, which keeps "
                "states on the host all the time; use one of the two"
            )


def require_movable_optimizer(optimizer: Any) -> None:
    """Raise ValueError, in words, where DeepSpeed cannot move the states of an engine's optimizer."""
    if not hasattr(optimizer, "offload_states"):
        raise ValueError(
            f"rollout.offload_states: true given with {type(optimizer).__name__} as DeepSpeed's optimizer, which has "
            "no states to move; use false"
        )
    own = optimizer.optimizer
    if (
        isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
        and type(own) is not deepspeed.ops.adam.fused_adam.FusedAdam
    ):
        raise ValueError(
            f"rollout.offload_states: true given with {type(own).__name__} and ZeRO-3, of which DeepSpeed moves only "
            "the states of its FusedAdam; use that, stage 1 or 2, or false"
        )


def movable_states(optimizer: Any) -> list[OffloadStateTypeEnum]:
    """What can be moved now, and comes back as it was. Weights in the model's dtype stay: the snapshot reads them."""
    states = OffloadStateTypeEnum
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return [states.optim_states, states.hp_params, states.lp_grads]
    found = [states.optim_states, states.contiguous_grad_buffer]
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
    if not any(master is weight for master, weight in groups):  # in float32 they may be the weights themselves
        found.append(states.hp_params)
    if all(gradients is None for gradients in optimizer.averaged_gradients.values()):
        found.append(states.lp_grads)  # what a step still waits for would be forgotten
    return found


def relink(optimizer: Any) -> None:
    """Tell ZeRO 1 and 2 where each parameter's states are, once they are back: reloading forgets it (0.19.8), and
    `safe_get_full_optimizer_state` would fail from then on."""
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
