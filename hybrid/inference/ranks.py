"""The ranks that share one copy of the weights, by the tensor- and expert-parallel settings of `init_inference`."""

import os

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from hybrid.config import InferenceConfig, MoEConfig, TensorParallelConfig
from hybrid.parallel import InferenceGroup


def callers_group(settings: TensorParallelConfig) -> torch.distributed.ProcessGroup | None:
    """The caller's process group for tensor parallelism, from `mpu` or `tp_group`; None if neither is given."""
    return settings.tp_group if settings.mpu is None else settings.mpu.get_model_parallel_group()


def tensor_parallel_size(settings: TensorParallelConfig) -> int:
    """The tensor-parallel size: of the caller's group, or `tp_size`."""
    group = callers_group(settings)
    if not settings.enabled:
        return 1
    return settings.tp_size if group is None else torch.distributed.get_world_size(group)


def expert_parallel_size(settings: MoEConfig) -> int:
    """The expert-parallel size."""
    return settings.ep_size if settings.enabled else 1


def group_size(config: InferenceConfig) -> int:
    """The number of ranks that share one copy of the weights: tensor- times expert-parallel size."""
    return tensor_parallel_size(config.tensor_parallel) * expert_parallel_size(config.moe)


def inference_group(config: InferenceConfig) -> InferenceGroup:
    """The ranks that share one copy of the weights: the caller's group, or consecutive ranks. Building a new group is a
    collective of all ranks."""
    size = group_size(config)
    group = callers_group(config.tensor_parallel) if expert_parallel_size(config.moe) == 1 else config.moe.ep_group
    tensor_size = tensor_parallel_size(config.tensor_parallel)
    return InferenceGroup(size, group=group if size > 1 else None, tensor_size=tensor_size)


def join_ranks(config: InferenceConfig) -> None:
    """Initialize torch.distributed and select the device, if `config` needs several ranks and a launcher started
    them."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    several = config.tensor_parallel.tp_size * config.moe.ep_size > 1
    if several and launched and not torch.distributed.is_initialized():
        comm.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
