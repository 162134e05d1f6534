"""`hybrid.initialize`: the signature and return value of deepspeed.initialize, with a HybridEngine."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import log_dist

from hybrid.config import HybridEngineConfig, Refusal, RolloutConfig, load_config, read_blocks, refuse, unsupported
from hybrid.engine import HybridEngine
from hybrid.extension_lock import extension_lock_reported
from hybrid.parallel import rank, world_size
from hybrid.weights.offload import require_movable

# Environment variables that torchrun, deepspeed, accelerate, MPI and Slurm set for a rank.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


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
    """Build a HybridEngine. Same arguments as `deepspeed.initialize`, same return value: engine, optimizer, dataloader,
    learning rate scheduler.

    config: path of a DeepSpeed JSON file, or a dict; may have the blocks `hybrid_engine` and `rollout`. It is not
        changed. An explicit `"hybrid_engine": {"enabled": false}` builds DeepSpeed's own engine.
    Raises ValueError for an invalid setting, with key, value and what is allowed; NotImplementedError for features that
    are not available: a PipelineModule, tensor, pipeline or sequence parallel training, adapters that cannot be merged.
    Both before DeepSpeed partitions anything.
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

    refuse(training_rows(settings, mpu, mesh_param))
    partition_parameters.shutdown_init_context()
    try:
        init_single_process_group()
        comm.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
        )
        mesh = make_mesh(settings, mesh_param)
        deepspeed_config = DeepSpeedConfig(settings, mpu, mesh_device=mesh)
        blocks = (pinned_below_zero3(blocks[0], deepspeed_config.zero_config.stage), blocks[1])
        refuse(rows(*blocks))
        blocks = (without_graphs_on_cpu(blocks[0]), blocks[1])
        if blocks[1].offload_states:
            require_movable(deepspeed_config)
        deepspeed.set_optimizer_flags(deepspeed_config, model)
        arguments |= {"config": settings, "config_class": deepspeed_config, "mesh_device": mesh}
        engine = HybridEngine(**arguments, blocks=blocks)
    finally:
        partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def init_single_process_group() -> None:
    """Make a process group of this process alone, unless a launcher started it or a process group exists.

    Otherwise DeepSpeed (0.19.8) would use MPI. The store is in memory and takes no port.
    """
    if dist.is_initialized() or any(name in os.environ for name in RANK_VARIABLES):
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
    backend = get_accelerator().communication_backend_name()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def make_mesh(settings: dict[str, Any], mesh_param: Any) -> Any:
    """DeepSpeed's device mesh [data parallel, sequence parallel] if one is configured, else None."""
    if not mesh_param and "sequence_parallel_size" in settings and "data_parallel_size" in settings:
        mesh_param = (settings["data_parallel_size"], settings["sequence_parallel_size"])
    return comm.initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel")) if mesh_param else None


# Methods of an `mpu` that give the size of a model or sequence parallel group.
MODEL_PARALLEL_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_sequence_parallel_world_size",
)


def training_rows(settings: dict[str, Any], mpu: Any, mesh_param: Any) -> Iterator[Refusal]:
    """Tensor, pipeline and sequence parallel training: the engine assumes that every rank of ZeRO trains the whole
    model on its own rows."""
    sizes = {
        "tensor_parallel.autotp_size": (settings.get("tensor_parallel") or {}).get("autotp_size"),
        "sequence_parallel_size": settings.get("sequence_parallel_size"),
        "mesh_param[1] (sequence parallel ranks)": mesh_param[1] if mesh_param else None,
    }
    sizes |= {f"mpu.{name}()": getattr(mpu, name)() for name in MODEL_PARALLEL_SIZES if hasattr(mpu, name)}
    instead = (
        "tensor, pipeline and sequence parallel training are not available with the hybrid engine. Use 1, with ZeRO to "
        "partition the model and hybrid_engine.inference_tp_size to share it during generation; or "
        "deepspeed.initialize without hybrid_engine"
    )
    for key, size in sizes.items():
        yield unsupported(size is not None and size > 1, key, size, instead)


def pinned_below_zero3(settings: HybridEngineConfig, stage: int) -> HybridEngineConfig:
    """`settings`, with pin_parameters=false replaced by true below ZeRO-3, where weights are whole; rank 0 logs it."""
    if settings.pin_parameters is not False or stage == 3:
        return settings
    log_dist(
        f"hybrid: pin_parameters=false has no effect with zero_optimization.stage={stage}: weights are whole on every "
        "rank, and inference reads them where they are",
        ranks=[0],
    )
    return settings.model_copy(update={"pin_parameters": True})


def without_graphs_on_cpu(settings: HybridEngineConfig) -> HybridEngineConfig:
    """`settings`, with enable_cuda_graph=true replaced by false without a CUDA device; rank 0 warns. DeepSpeed goes on
    without graphs too."""
    if settings.enable_cuda_graph is not True or torch.cuda.is_available():
        return settings
    if rank() == 0:
        warnings.warn(
            "hybrid_engine.enable_cuda_graph: true given; it has no effect without a CUDA device", stacklevel=4
        )
    return settings.model_copy(update={"enable_cuda_graph": False})


def rows(settings: HybridEngineConfig, rollout: RolloutConfig) -> Iterator[Refusal]:
    """Settings that contradict each other, the world size or the device."""
    graphs, ranks, pins = settings.enable_cuda_graph is True, world_size(), settings.pin_parameters
    size = 1 if settings.inference_tp_size == "auto" else settings.inference_tp_size
    key, tp_key = "hybrid_engine.enable_cuda_graph", "hybrid_engine.inference_tp_size"
    streamed = "weights that are gathered layer by layer (pin_parameters) have no graphs; use 'auto', or true for both"
    yield Refusal(graphs and pins is not True, key, graphs, streamed)
    yield Refusal(ranks % size > 0, tp_key, size, f"it must divide the world size, {ranks}")
    streams = "pin_parameters=false keeps no copy for ranks to share; use inference_tp_size=1, or pin_parameters=true"
    yield Refusal(size > 1 and not pins, tp_key, size, streams)
    native = "rollout.containers=native has no graphs; use 'auto', or fused containers"
    yield Refusal(graphs and rollout.containers == "native", key, graphs, native)
