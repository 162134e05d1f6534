"""`init_inference`'s settings checked against the model, the ranks and the device, before anything changes; and the
ranks that share one copy of the weights, by the tensor- and expert-parallel settings."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hybrid.config import (
    InferenceConfig,
    InvalidSetting,
    MoEConfig,
    TensorParallelConfig,
    check_settings,
    unsupported,
    value_if_set,
)
from hybrid.inference.auto_tp import AutoTP, read_policy, require_divisible_heads
from hybrid.models.model_info import ModelInfo
from hybrid.models.modules import native_adapter
from hybrid.models.quantized import quantized_layers
from hybrid.models.spec import UnsupportedModel
from hybrid.runtime.parallel import InferenceGroup, world_size
from hybrid.weights.gather import is_partitioned
from hybrid.weights.int8 import require_groups
from hybrid.weights.lora import read_adapters
from hybrid.weights.slices import require_decoder_divisible

warn = partial(warnings.warn, stacklevel=6)  # of the caller of `init_inference`


def validated(info: ModelInfo, config: InferenceConfig, moe_layers: dict[str, MoE]) -> InferenceConfig:
    """`config`, without its `moe` settings if the model has DeepSpeed's own MoE layers, which send tokens to their
    experts themselves.

    Raises ValueError for invalid settings and NotImplementedError for unsupported ones. Warns about settings without
    effect.  moe_layers: DeepSpeed's MoE layers by name.
    """
    if moe_layers:
        check_settings(invalid_deepspeed_moe(moe_layers, config))
        config = config.model_copy(update={"moe": MoEConfig()})
    check_settings(invalid_settings(info, config))
    if config.dtype != torch.int8 and value_if_set(config, "quant") is not None:
        warn(f"quant: given with dtype={config.dtype}; it has no effect, only int8 quantizes")
    # DeepSpeed's object always has the last two keys.
    if config.zero.get("stage") or config.zero.keys() - {"stage", "leaf_module", "overlap_comm"}:
        warn(f"zero: {config.zero} given; it has no effect, nothing is trained here")
    if config.moe.ep_group is not None and expert_parallel_size(config.moe) == 1:
        warn("moe.ep_group: given with ep_size=1; it has no effect, give ep_size too")
    if config.enable_cuda_graph is True and not torch.cuda.is_available():
        warn("enable_cuda_graph: true given; it has no effect without a CUDA device")
        config = config.model_copy(update={"enable_cuda_graph": False})
    return config


def invalid_settings(info: ModelInfo, config: InferenceConfig) -> Iterator[InvalidSetting]:
    """Yield the settings that are invalid or not supported, in the order in which they are checked."""
    model, kind = info.model, type(info.model).__name__
    device, has_cuda = get_accelerator(), torch.cuda.is_available()
    dtypes, int8, policy = device.supported_dtypes(), config.dtype == torch.int8, config.injection_policy
    computes = f"{device.device_name()} computes {', '.join(map(str, dtypes))}"
    yield InvalidSetting(not int8 and config.dtype not in dtypes, "dtype", config.dtype, computes)
    least, most = config.min_out_tokens, config.max_out_tokens
    yield InvalidSetting(least >= most, "min_out_tokens", least, f"it must be less than max_out_tokens={most}")
    tp, group = config.tensor_parallel, callers_group(config.tensor_parallel)
    if group is None:
        size, allowed = tp.tp_size if tp.enabled else 1, f"it must divide the world size, {world_size()}"
        yield InvalidSetting(world_size() % size > 0, "tensor_parallel.tp_size", size, allowed)
    else:
        ranks = torch.distributed.get_world_size(group)
        differs = "tp_size" in tp.model_fields_set and tp.tp_size != ranks
        yield InvalidSetting(differs, "tensor_parallel.tp_size", tp.tp_size, f"the group given too has {ranks} ranks")
    partitioned = any(is_partitioned(param) for param in model.parameters())
    yield unsupported(partitioned, "model", kind, "ZeRO-3 has partitioned its weights; use hybrid.initialize")
    quantized = any(True for _ in quantized_layers(model))
    yield unsupported(quantized, "model", kind, "it has layers of bitsandbytes; use hybrid.initialize")
    partitions = zero_stage(config.zero) == ZeroStageEnum.weights
    yield unsupported(partitions, "zero.stage", 3, "use hybrid.initialize with hybrid_engine.pin_parameters=false")
    if config.checkpoint is None:
        empty = config.set_empty_params
        yield InvalidSetting(empty, "set_empty_params", empty, "without a checkpoint the model would have no weights")
        meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        yield InvalidSetting(meta, "model", kind, "it is on the meta device, and has no weights; give checkpoint=...")
    if int8:
        yield from invalid_int8(model, config)
    for key in ("training_mp_size", "base_dir") if config.checkpoint is None else ():
        value = value_if_set(config, key)
        yield InvalidSetting(value is not None, key, value, "it describes a checkpoint; give checkpoint too")
    internal = config.injection_policy_tuple
    yield InvalidSetting(
        internal is not None, "injection_policy_tuple", internal, "it is internal; give injection_policy"
    )
    triton, injects = config.use_triton, config.replace_with_kernel_inject
    needs = "it needs a CUDA device and replace_with_kernel_inject=true"
    yield unsupported(triton and not (has_cuda and injects), "use_triton", True, needs)
    if config.speculation is not None:
        remedy = "leave it out"
        needed = f"it needs replace_with_kernel_inject=true; {remedy}"
        yield InvalidSetting(not injects, "speculation", None, needed)
        is_missing = info.layout is None  # reading the layout records the reason
        none = f"only fused decoders verify drafts, and {kind} has none ({info.reasons.get('layout')}); {remedy}"
        yield InvalidSetting(is_missing, "speculation", None, none)
    if policy is not None:
        other = "replace_with_kernel_inject=true or moe.ep_size is given too; give one of them"
        yield InvalidSetting(injects or expert_parallel_size(config.moe) > 1, "injection_policy", None, other)
        read_policy(model, policy)
    yield from invalid_moe(info, config)
    if group_size(config) > 1:
        yield from invalid_sharing(info, config, group_size(config))
    unmasked = not config.triangular_masking and is_causal(model)
    yield unsupported(unmasked, "triangular_masking", False, "the model's attention is causal; use true")


def zero_stage(settings: dict[str, Any]) -> int:
    """Return the stage in `zero`. Raises ValueError for invalid settings."""
    try:
        return DeepSpeedZeroConfig(**settings).stage
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ValueError(f"zero.{path}: {first['input']!r} given; {first['msg']}") from error


def invalid_int8(model: nn.Module, config: InferenceConfig) -> Iterator[InvalidSetting]:
    """Yield settings and models that cannot be quantized to int8. Raises ValueError for `q_groups` that do not fit."""
    weight, path = config.quant.weight, config.save_mp_checkpoint_path
    disabled = not (config.quant.enabled and weight.enabled)
    yield InvalidSetting(disabled, "quant.enabled", False, "dtype=int8 quantizes; use true, or another dtype")
    yield unsupported(weight.num_bits != 8, "quant.weight.num_bits", weight.num_bits, "it must be 8")
    yield unsupported(weight.q_type != "symmetric", "quant.weight.q_type", weight.q_type, "it must be 'symmetric'")
    for key in ("quantized_initialization", "post_init_quant"):
        value = getattr(weight, key)
        yield unsupported(bool(value), f"quant.weight.{key}", value, "it is for ZeRO; leave it out")
    instead = "dtype=int8 needs whole experts on every rank; use another dtype, or tensor_parallel"
    yield unsupported(expert_parallel_size(config.moe) > 1, "moe.ep_size", config.moe.ep_size, instead)
    merge = "the model has adapters; merge them first (merge_and_unload), or use another dtype"
    yield unsupported(has_adapters(model), "dtype", config.dtype, merge)
    require_groups(model, weight.q_groups, group_size(config))
    yield unsupported(path is not None, "save_mp_checkpoint_path", path, "dtype=int8 given too; use a floating dtype")


def invalid_moe(info: ModelInfo, config: InferenceConfig) -> Iterator[InvalidSetting]:
    """Check the `moe` settings against the model and the ranks."""
    moe, kind, tp = config.moe, type(info.model).__name__, config.tensor_parallel
    size, expected = expert_parallel_size(moe), None if moe.moe_experts == [1] else moe.moe_experts
    yield unsupported(moe.type == "residual", "moe.type", moe.type, "it must be 'standard'")
    yield unsupported(moe.ep_mp_group is not None, "moe.ep_mp_group", None, "ranks share an expert by tensor_parallel")
    if size == 1 and expected is None:
        return
    experts = 0 if info.layout is None else info.layout.spec.num_experts
    differs = expected is not None and experts not in expected
    yield InvalidSetting(differs, "moe.moe_experts", expected, f"{kind} has {experts} experts in a layer")
    yield unsupported(size > 1 and not experts, "moe.ep_size", size, f"{kind} has no experts that are known")
    yield InvalidSetting(experts % size > 0, "moe.ep_size", size, f"it must divide the {experts} experts of a layer")
    grouped = size > 1 and callers_group(tp) is not None
    yield unsupported(grouped, "moe.ep_size", size, "tensor_parallel.tp_group or mpu given too; give tp_size instead")
    if moe.ep_group is not None:
        wrong = tp.tp_size > 1 or torch.distributed.get_world_size(moe.ep_group) != size
        yield InvalidSetting(wrong, "moe.ep_group", None, f"it must have ep_size={size} ranks, and needs tp_size=1")
    allowed = f"tp_size={tensor_parallel_size(tp)} times ep_size must divide the world size, {world_size()}"
    yield InvalidSetting(world_size() % group_size(config) > 0, "moe.ep_size", size, allowed)


def invalid_deepspeed_moe(layers: dict[str, MoE], config: InferenceConfig) -> Iterator[InvalidSetting]:
    """Check the `moe` settings against DeepSpeed's own MoE layers."""
    moe, size, path = config.moe, expert_parallel_size(config.moe), config.save_mp_checkpoint_path
    for key in ("ep_group", "ep_mp_group"):
        grouped = getattr(moe, key) is not None
        yield unsupported(grouped, f"moe.{key}", None, "DeepSpeed's MoE layers make their own groups; leave it out")
    saves = size > 1 and path is not None
    yield unsupported(saves, "save_mp_checkpoint_path", path, "experts over several ranks are not saved; leave it out")
    expected = None if moe.moe_experts == [1] else moe.moe_experts
    for name, layer in layers.items():
        kind = "residual" if layer.use_residual else "standard"
        differs = expected is not None and layer.num_experts not in expected
        is_other = moe.type != kind and value_if_set(moe, "type") is not None
        indivisible = world_size() % layer.ep_size > 0
        yield InvalidSetting(
            size != layer.ep_size, "moe.ep_size", size, f"{name} was built with ep_size={layer.ep_size}"
        )
        yield InvalidSetting(differs, "moe.moe_experts", expected, f"{name} has {layer.num_experts} experts")
        yield InvalidSetting(is_other, "moe.type", moe.type, f"{name} is {kind}")
        yield InvalidSetting(
            indivisible, "moe.ep_size", layer.ep_size, f"it must divide the world size, {world_size()}"
        )


def invalid_sharing(info: ModelInfo, config: InferenceConfig, size: int) -> Iterator[InvalidSetting]:
    """Whether `size` ranks can share the model's weights. Raises ValueError if its heads or mixers do not divide."""
    model, reason = info.model, why_no_fused_slices(info, config)
    graphs = f"{size} ranks share the model's own modules ({reason}), which have no graphs; use false"
    yield unsupported(bool(reason) and config.enable_cuda_graph is True, "enable_cuda_graph", True, graphs)
    if config.injection_policy is not None:
        require_divisible_heads(model, read_policy(model, config.injection_policy), size)
        return
    merge = "ranks cannot share a model with adapters; merge them first (merge_and_unload), or use 1"
    yield unsupported(has_adapters(model), "tensor_parallel.tp_size", size, merge)
    if reason:
        try:
            AutoTP(info, size)
        except UnsupportedModel as error:
            instead = f"{type(model).__name__} cannot be sliced ({error}; {reason}); give injection_policy, or use 1"
            yield unsupported(True, "tensor_parallel.tp_size", size, instead)
        return
    assert info.layout is not None, "a model without a fused decoder has a reason"
    ranks = tensor_parallel_size(config.tensor_parallel)
    require_decoder_divisible(ranks, info.layout.spec, key="tensor_parallel.tp_size")


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has adapters, of any kind."""
    return bool(native_adapter(model)) or bool(read_adapters(model))


def why_no_fused_slices(info: ModelInfo, config: InferenceConfig) -> str:
    """Return the reason why ranks share the model's own modules; "" if they share a fused decoder."""
    if config.injection_policy is not None:
        return "injection_policy is given"
    if config.dtype == torch.int8:
        return "fused slices are not in int8"
    if info.layout is None:
        return f"no fused container: {info.reasons['layout']}"
    # The model's own modules would keep all experts.
    if config.replace_with_kernel_inject or expert_parallel_size(config.moe) > 1:
        return ""
    # Without a tp_plan, slicing by its layers' names would be a guess; the decoder is certain.
    return "" if info.tp_plan is None else "replace_with_kernel_inject=false"


def is_causal(model: nn.Module) -> bool:
    """Whether a model has causal attention, if only in its decoder.

    Read from the attention modules' `is_causal`. Models without it (BLOOM) are causal if they generate, or if their
    model type has only causal language models (transformers 5.23).
    """
    flags = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if flags:
        return True in flags
    kind = getattr(getattr(model, "config", None), "model_type", None)
    only_causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    return (isinstance(model, PreTrainedModel) and model.can_generate()) or kind in only_causal


# Ranks


def callers_group(settings: TensorParallelConfig) -> torch.distributed.ProcessGroup | None:
    """Return the caller's process group for tensor parallelism, from `mpu` or `tp_group`; None if neither is given."""
    return settings.tp_group if settings.mpu is None else settings.mpu.get_model_parallel_group()


def tensor_parallel_size(settings: TensorParallelConfig) -> int:
    """Return the tensor-parallel size: of the caller's group, or `tp_size`."""
    group = callers_group(settings)
    if not settings.enabled:
        return 1
    return settings.tp_size if group is None else torch.distributed.get_world_size(group)


def expert_parallel_size(settings: MoEConfig) -> int:
    """Return the expert-parallel size."""
    return settings.ep_size if settings.enabled else 1


def group_size(config: InferenceConfig) -> int:
    """Return the number of ranks that share one copy of the weights: tensor- times expert-parallel size."""
    return tensor_parallel_size(config.tensor_parallel) * expert_parallel_size(config.moe)


def inference_group(config: InferenceConfig) -> InferenceGroup:
    """Return the ranks that share one copy of the weights: the caller's group, or consecutive ranks. Building a new
    group is a collective of all ranks."""
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
