"""`hybrid.initialize`: the signature and return value of deepspeed.initialize, with a HybridEngine."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import log_dist

from hybrid.config import HybridEngineConfig, check_settings, load_config, read_blocks
from hybrid.kernels import has_fast_bfloat16
from hybrid.runtime.extension_lock import extension_lock_reported
from hybrid.runtime.parallel import rank, world_size
from hybrid.training.engine import HybridEngine
from hybrid.training.invalid_settings import (
    invalid_blocks,
    invalid_dtypes,
    invalid_quantized,
    invalid_sequence_parallel,
    invalid_training,
    is_cast,
)
from hybrid.weights.offload import require_movable

# Environment variables that torchrun, deepspeed, accelerate, MPI and Slurm set for a rank.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

# Dtypes that DeepSpeed's `zero.Init` takes (0.19.8).
INIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@extension_lock_reported()
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Any = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[HybridEngine, Any, Any, Any]:
    """Build a HybridEngine, with the arguments and the return value of `deepspeed.initialize`.

    Args:
        config: path of a DeepSpeed JSON file, or a dict; may have the blocks `hybrid_engine` and `rollout`. It is not
            changed. An explicit `"hybrid_engine": {"enabled": false}` builds DeepSpeed's own engine.

    Returns:
        Engine, optimizer, dataloader and learning rate scheduler.

    Raises:
        ValueError: for an invalid setting, with key, value and what is allowed, before DeepSpeed partitions anything.
        NotImplementedError: for a PipelineModule, and for tensor or pipeline parallel training, likewise; and for
            `sequence_parallel_size` with a model whose rows cannot be divided over ranks.
    """
    if model is None:
        raise ValueError("initialize: no model given")
    config = config if config is not None else config_params
    from_args: Any = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise ValueError("initialize: a config is given twice, as an argument and as args.deepspeed_config; give one")
    if config is None and from_args is None:
        raise ValueError("initialize: no config given; pass config=<path or dict>, or args.deepspeed_config")
    settings = load_config(from_args if config is None else config)
    blocks = read_blocks(settings)
    if isinstance(model, deepspeed.PipelineModule):
        raise NotImplementedError("initialize: a PipelineModule cannot generate in-process; use deepspeed.initialize")
    arguments = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
    }
    if not blocks[0].enabled:
        arguments["args"] = None if from_args is not None else args
        return deepspeed.initialize(
            **arguments, distributed_port=distributed_port, config=settings, mesh_param=mesh_param
        )

    check_settings(invalid_training(settings, mpu, mesh_param))
    partition_parameters.shutdown_init_context()
    try:
        init_single_process_group()
        comm.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
        )
        check_settings(invalid_sequence_parallel(settings, training_data))
        sequence_parallel_size = settings.get("sequence_parallel_size", 1)
        mesh = make_mesh(settings, mesh_param)
        sizes = mpu
        if "sequence_parallel_size" in settings:
            sizes = DataParallelSize(world_size() // sequence_parallel_size)
        deepspeed_config = DeepSpeedConfig(settings, sizes, mesh_device=mesh)
        blocks = (pinned_below_zero3(blocks[0], deepspeed_config.zero_config.stage), blocks[1])
        check_settings(invalid_blocks(*blocks))
        check_settings(invalid_dtypes(model, deepspeed_config))
        check_settings(invalid_quantized(model, deepspeed_config))
        blocks = (without_graphs_on_cpu(blocks[0]), blocks[1])
        if blocks[1].offload_states:
            require_movable(deepspeed_config)
        deepspeed.set_optimizer_flags(deepspeed_config, model)
        partition_other_dtypes(model, settings, deepspeed_config, mpu)
        arguments |= {"config": settings, "config_class": deepspeed_config, "mesh_device": mesh}
        engine = HybridEngine(**arguments, blocks=blocks, sequence_parallel_size=sequence_parallel_size)
    finally:
        partition_parameters.restore_init_context()
    engine._configure_python_gc()
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and engine.bfloat16_enabled() and not has_fast_bfloat16(engine.device):
        warn_about_slow_bfloat16()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@cache  # once a process
def warn_about_slow_bfloat16() -> None:
    """Warn on rank 0 that training in bfloat16 is slow on this CPU."""
    if rank() == 0:
        warnings.warn(
            "bf16 is enabled, and this CPU has no bfloat16 instructions: training takes up to 50 times as long as in "
            'float32. Use float32: "bf16": {"enabled": false}; in rlhf_examples --dtype float32',
            stacklevel=4,
        )


def init_single_process_group() -> None:
    """Make a process group of this process alone, unless a launcher started it or a process group exists.

    Otherwise DeepSpeed (0.19.8) would use MPI. The store is in memory and takes no port.
    """
    if dist.is_initialized() or any(name in os.environ for name in RANK_VARIABLES):
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    backend = get_accelerator().communication_backend_name()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def partition_other_dtypes(model: torch.nn.Module, settings: dict[str, Any], config: DeepSpeedConfig, mpu: Any) -> None:
    """Partition a model under ZeRO-3 here if its first parameter has a dtype such as float64.

    DeepSpeed (0.19.8) would pass that dtype to `zero.Init`, which refuses it, but only where the accelerator supports
    float16. `zero.Init` with a configuration and no dtype partitions every parameter in the dtype that it has.
    """
    first = next(model.parameters(), None)
    if config.zero_config.stage != 3 or is_cast(config) or first is None or first.dtype in INIT_DTYPES:
        return
    if not any(is_zero_param(parameter) for parameter in model.parameters()):
        deepspeed.zero.Init(module=model, config_dict_or_path=settings, mpu=mpu)


class DataParallelSize:
    """An mpu from which DeepSpeed's configuration learns how many ranks have rows of their own: the batch size's
    factor.

    Without one DeepSpeed (0.19.8) divides the world size by `sequence_parallel_size`, and batch sizes are floats.
    """

    def __init__(self, size: int):
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        """Return the number of groups of ranks that share their rows."""
        return self.size


def make_mesh(settings: dict[str, Any], mesh_param: Any) -> Any:
    """DeepSpeed's device mesh [data parallel, sequence parallel] if one is configured, else None.

    Ranks that share sequences are none of DeepSpeed's: with a mesh it would reduce gradients among data parallel ranks
    alone (0.19.8).
    """
    if not mesh_param and settings.get("sequence_parallel_size") == 1 and "data_parallel_size" in settings:
        mesh_param = (settings["data_parallel_size"], settings["sequence_parallel_size"])
    return comm.initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel")) if mesh_param else None


def pinned_below_zero3(settings: HybridEngineConfig, stage: int) -> HybridEngineConfig:
    """Return `settings`, with pin_parameters=false replaced by true below ZeRO-3, where weights are whole; rank 0 logs
    it."""
    if settings.pin_parameters is not False or stage == 3:
        return settings
    log_dist(
        f"hybrid: pin_parameters=false has no effect with zero_optimization.stage={stage}: weights are whole on every "
        "rank, and inference reads them where they are",
        ranks=[0],
    )
    return settings.model_copy(update={"pin_parameters": True})


def without_graphs_on_cpu(settings: HybridEngineConfig) -> HybridEngineConfig:
    """Return `settings`, with enable_cuda_graph=true replaced by false without a CUDA device; rank 0 warns. DeepSpeed
    goes on without graphs too."""
    if settings.enable_cuda_graph is not True or torch.cuda.is_available():
        return settings
    if rank() == 0:
        warnings.warn(
            "hybrid_engine.enable_cuda_graph: true given; it has no effect without a CUDA device", stacklevel=4
        )
    return settings.model_copy(update={"enable_cuda_graph": False})
