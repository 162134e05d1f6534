"""Moving training-only states to host memory during inference, by DeepSpeed's `offload_states` (0.19.8)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hybrid.runtime.profiling import Phase


def require_movable(config: DeepSpeedConfig) -> None:
    """Raise ValueError if DeepSpeed cannot move states under `config`: ZeRO stage 0, or states offloaded already."""
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
    """Raise ValueError if DeepSpeed cannot move the states of `optimizer`, an engine's. Under ZeRO-3 only FusedAdam's
    can be moved."""
    if not hasattr(optimizer, "offload_states"):
        raise ValueError(
            f"rollout.offload_states: true given with {type(optimizer).__name__} as DeepSpeed's optimizer, which has "
            "no states to move; use false"
        )
    inner = optimizer.optimizer
    if (
        isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
        and type(inner) is not deepspeed.ops.adam.fused_adam.FusedAdam
    ):
        raise ValueError(
            f"rollout.offload_states: true given with {type(inner).__name__} and ZeRO-3, of which DeepSpeed moves only "
            "the states of its FusedAdam; use that, stage 1 or 2, or false"
        )


class TrainingStates:
    """An engine's optimizer states, master weights and gradients, which need not be on the device during inference.

    phase: times the moves.
    """

    def __init__(self, engine: DeepSpeedEngine, phase: Phase):
        self.engine, self.phase, self.is_on_host = engine, phase, False

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside the block the states are in host memory."""
        try:
            self._offload()
            yield
        finally:
            self._reload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the block the states are on the device, also inside an `on_host` block."""
        if not self.is_on_host:
            yield
            return
        try:
            self._reload()
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        self.is_on_host = True
        with self.phase("release"):
            self.engine.offload_states(movable_states(self.engine.optimizer))

    def _reload(self) -> None:
        self.is_on_host = False
        with self.phase("release"):
            self.engine.reload_states()
            relink(self.engine.optimizer)


def movable_states(optimizer: Any) -> list[OffloadStateTypeEnum]:
    """Return the kinds of state that can be moved now and restored unchanged. Weights in the model's dtype are not
    moved: the snapshot reads them."""
    states = OffloadStateTypeEnum
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return [states.optim_states, states.hp_params, states.lp_grads]
    movable = [states.optim_states, states.contiguous_grad_buffer]
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
    if not any(master is weight for master, weight in groups):  # in float32 they may be the weights themselves
        movable.append(states.hp_params)
    if all(gradients is None for gradients in optimizer.averaged_gradients.values()):
        movable.append(states.lp_grads)  # moving would drop gradients that the next step still needs
    return movable


def scratch(optimizer: Any) -> list[torch.Tensor]:
    """Return the buffers of a DeepSpeed optimizer whose content is needed only while a backward runs: ZeRO-3's gradient
    buckets, of `reduce_bucket_size` elements. DeepSpeed's own offloading drops it too."""
    buckets = optimizer.ipg_buckets.values() if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else ()
    return [bucket.buffer for bucket in buckets if bucket.buffer is not None]


def relink(optimizer: Any) -> None:
    """Link each parameter to its optimizer states again after a reload, for ZeRO 1 and 2 (docs/upstream.md)."""
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
