"""Memory plans from a model's configuration alone, for ranks and devices that need not be there."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.models.quantized import BLOCK_SIZE, Dequantized
from hybrid.training.builder import Builder, Mode
from hybrid.training.invalid_settings import require_decoder_slices
from hybrid.training.memory_plan import MemoryPlan, MemoryPlanner, bytes_at_rest

# Bytes for each trained parameter besides its weight: a gradient in the weight's dtype, and what AdamW keeps in float32
# (its two moments, and a copy of weights that are not float32). ZeRO, Rajbhandari et al. 2020, section 3.1.
MOMENT_BYTES, MASTER_BYTES = 8, 4


@dataclass(frozen=True)
class Training:
    """The training of a model.

    ranks: of the world.  zero_stage: 0 to 3.  lora_rank: of an adapter on all linear layers; 0 trains all weights.
    dtype: of the weights.  device: "cuda" or "cpu".
    bits: 4 or 8 for a base that bitsandbytes quantizes, under an adapter; 0 for none.
    """

    ranks: int = 1
    zero_stage: int = 3
    lora_rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    bits: int = 0

    def __post_init__(self) -> None:
        if self.bits and not self.lora_rank:
            raise ValueError(f"a base in {self.bits} bits learns nothing itself; give the rank of an adapter (--lora)")


@dataclass(frozen=True)
class OfflinePlan:
    """The memory plan of such an engine, and the reason why it would not run fused.

    training_bytes: weights, gradients and AdamW's states on a rank, without activations.
    fallback_reason: why rollouts would run in the model's own layers; "" if they would run fused.
    chosen, num_seqs: the mode that "auto" takes in the given device memory, and how many sequences of `max_out_tokens`
        tokens it decodes at once, of the at most `max_num_seqs` that it plans for; None and 0 without a device memory,
        or if nothing fits.
    """

    plan: MemoryPlan
    training_bytes: int
    fallback_reason: str
    chosen: Mode | None
    num_seqs: int
    max_num_seqs: int


def offline_plan(
    config: PretrainedConfig,
    training: Training,
    settings: HybridEngineConfig,
    rollout: RolloutConfig,
    rows: int,
    tokens: int,
    device_memory: int | None = None,
) -> OfflinePlan:
    """Return the memory plan of an engine that trains a model of `config`, without its weights, its ranks or its
    devices.

    rows, tokens: sequences of a rank's rollout that are decoded at once, and tokens of each, prompt included.
    device_memory: bytes of a rank's device. Training's share is taken off; "auto" chooses within the rest, or within
        `rollout.memory_limit` if that is less. It is needed if the settings are "auto".
    Starts a process group of its own: raises RuntimeError if this process already has one. Raises ValueError if
    `inference_tp_size` fits neither the ranks nor the model, or the model's configuration is none of a causal language
    model.
    """
    with pretended_ranks(training.ranks), torch.no_grad():
        model = model_without_weights(config, training)
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        pretend_weights(model, training)
        builder = Builder(
            model, settings, rollout, training.zero_stage, lambda *_: nullcontext(), lambda _: None, lambda: ()
        )
        require_decoder_slices(builder.info, settings, rollout)
        PlannedParameter.planned_device = torch.device(training.device)
        try:
            return planned(builder, training, trained, rows, tokens, device_memory)
        finally:
            PlannedParameter.planned_device = torch.device("cpu")


def planned(
    builder: Builder, training: Training, trained: int, rows: int, tokens: int, device_memory: int | None
) -> OfflinePlan:
    """Return the plan of a builder's modes, and the choice of "auto".  trained: parameters that learn, of all ranks."""
    settings, held = builder.settings, bytes_at_rest(builder.info.model) + optimizer_bytes(training, trained)
    if device_memory is not None:
        limits = [max(device_memory - held, 0), builder.rollout.memory_limit]
        limit = min(each for each in limits if each is not None)
        builder.rollout = builder.rollout.model_copy(update={"memory_limit": limit})
    asked = planner_of(builder, settings)
    if asked is None:
        asked = fixed_planner(builder, settings, inference_tp_size=1, pin_parameters=True)
    plan = asked.plan(min(rows, builder.rollout.max_num_seqs), tokens)
    reason = builder.planned(plan.in_use)[1].fallback_reason
    chosen, num_seqs = None, 0
    if device_memory is not None:
        auto = planner_of(builder, settings, inference_tp_size="auto", pin_parameters="auto")
        num_seqs = auto.num_seqs_that_fit(auto.in_use, limit) if auto else 0
        chosen = auto.in_use if auto and num_seqs else None
    return OfflinePlan(plan, held, reason, chosen, num_seqs, builder.rollout.max_num_seqs)


def planner_of(builder: Builder, settings: HybridEngineConfig, **changes: Any) -> MemoryPlanner | None:
    """Return a planner with changed settings; None if they leave the choice ("auto") and not one sequence fits."""
    try:
        return fixed_planner(builder, settings, **changes)
    except ValueError:
        if "auto" not in (builder.settings.inference_tp_size, builder.settings.pin_parameters):
            raise
        return None


def fixed_planner(builder: Builder, settings: HybridEngineConfig, **changes: Any) -> MemoryPlanner:
    """Return a planner with changed settings. Raises ValueError if not one sequence fits."""
    builder.settings = settings.model_copy(update=changes)
    return MemoryPlanner(builder)


def optimizer_bytes(training: Training, trained: int) -> int:
    """Return the bytes on a rank of gradients and AdamW's states for `trained` parameters.

    ZeRO partitions the states from stage 1 on, the gradients from stage 2 on.
    """
    gradient = training.dtype.itemsize
    states = MOMENT_BYTES + MASTER_BYTES * (gradient < 4)
    shards = [training.ranks if training.zero_stage >= stage else 1 for stage in (2, 1)]
    return sum(math.ceil(trained / count) * size for count, size in zip(shards, (gradient, states), strict=True))


@contextmanager
def pretended_ranks(count: int) -> Iterator[None]:
    """Inside the block this process is rank 0 of `count` ranks, of which no other exists: collectives do nothing."""
    if dist.is_initialized():
        raise RuntimeError("a plan without ranks needs a process that has no process group; use engine.memory_plan")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_without_weights(config: PretrainedConfig, training: Training) -> nn.Module:
    """Return the model of `config` in eval mode, with an adapter if it has one; parameters have no data, buffers do."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=training.dtype)
    model.tie_weights()
    if training.lora_rank:
        adapter = peft.LoraConfig(r=training.lora_rank, target_modules="all-linear")
        model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    return model.to(training.dtype).eval()


class PlannedParameter(nn.Parameter):
    """A parameter without data that says that it is on `planned_device`."""

    planned_device = torch.device("cpu")
    dequantized: Dequantized

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch declares an attribute
        """The device of the engine that is planned."""
        return PlannedParameter.planned_device


def pretend_weights(model: nn.Module, training: Training) -> None:
    """Replace each parameter by one without data on the planned device; at ZeRO-3 partitioned as DeepSpeed does it."""
    head = model.get_output_embeddings().weight
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)} if training.bits else set()
    planned: dict[nn.Parameter, PlannedParameter] = {}  # tied parameters stay one
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if param not in planned:
                blank, is_quantized = param.data.to("meta"), param in linear - {head} and not param.requires_grad
                if is_quantized:
                    blank = torch.empty(param.numel() * training.bits // 8, dtype=torch.uint8, device="meta")
                planned[param] = torch.Tensor._make_subclass(PlannedParameter, blank, False)
                planned[param].requires_grad = param.requires_grad
                if is_quantized:
                    scales = param.numel() // BLOCK_SIZE if training.bits == 4 else len(param)
                    of_scales = scales * torch.float32.itemsize
                    planned[param].dequantized = Dequantized(param.shape, training.dtype, of_scales)
                if training.zero_stage == 3:
                    partition(planned[param], len(planned), training.ranks)
            module._parameters[name] = planned[param]


def partition(param: PlannedParameter, number: int, ranks: int) -> None:
    """Give a parameter the attributes of one that ZeRO-3 has partitioned over `ranks` (deepspeed 0.19.8).

    number: of the parameter, unique in its model.
    """
    size = math.ceil(param.numel() / ranks)
    shard = torch.Tensor._make_subclass(PlannedParameter, torch.empty(size, dtype=param.dtype, device="meta"), False)
    shard.ds_numel, shard.final_location = size, OffloadDeviceEnum.none
    param.ds_id, param.ds_shape, param.ds_numel, param.ds_tensor = number, param.shape, param.numel(), shard
    param.ds_status, param.ds_process_group = ZeroParamStatus.NOT_AVAILABLE, dist.group.WORLD
    param.data = torch.empty(0, dtype=param.dtype, device="meta")
