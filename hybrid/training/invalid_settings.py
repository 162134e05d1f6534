"""The training engine's table of invalid settings: they contradict each other, the model, the ranks or the device.

Rows are checked in eight places, as soon as what they need is known; each yields its rows in the order of the checks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig

from hybrid.config import HybridEngineConfig, InvalidSetting, RolloutConfig, unsupported
from hybrid.decoders.attention_choice import choose_attention
from hybrid.decoders.fallback import no_triton_reason
from hybrid.decoders.selection import TRITON, kernels_for
from hybrid.execution.deepspeed_moe import expert_layers
from hybrid.generation.routing import routers_of
from hybrid.models.model_info import ModelInfo
from hybrid.models.modules import ignored_adapters
from hybrid.models.quantized import EIGHT_BITS, FOUR_BITS, kind_of, quantized_layers, unreadable
from hybrid.runtime.parallel import world_size
from hybrid.training.packed_forwards import has_attention_interface
from hybrid.weights.slices import require_decoder_divisible, require_divisible

# Methods of an `mpu` that return the size of a model or sequence parallel group.
MODEL_PARALLEL_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_sequence_parallel_world_size",
)
SEQUENCE_SIZE = "mpu.get_sequence_parallel_world_size()"
TP_SIZE, GRAPHS = "hybrid_engine.inference_tp_size", "hybrid_engine.enable_cuda_graph"


def invalid_training(settings: dict[str, Any], mpu: Any, mesh_param: Any) -> Iterator[InvalidSetting]:
    """Yield the rows of DeepSpeed's own settings: each rank of ZeRO must train the whole model."""
    sizes = {"tensor_parallel.autotp_size": (settings.get("tensor_parallel") or {}).get("autotp_size")}
    sizes |= {f"mpu.{name}()": getattr(mpu, name)() for name in MODEL_PARALLEL_SIZES if hasattr(mpu, name)}
    instead = (
        "tensor and pipeline parallel training are not available with the hybrid engine. Use 1, with ZeRO to "
        "partition the model and hybrid_engine.inference_tp_size to share it during generation; or "
        "deepspeed.initialize without hybrid_engine"
    )
    sequence = {SEQUENCE_SIZE: sizes.pop(SEQUENCE_SIZE, None), "mesh_param[1]": mesh_param[1] if mesh_param else None}
    for key, size in sizes.items():
        yield unsupported(size is not None and size > 1, key, size, instead)
    for key, size in sequence.items():
        in_config = "ranks share sequences by the configuration's key sequence_parallel_size; give it there alone"
        yield unsupported(size is not None and size > 1, key, size, in_config)


def invalid_sequence_parallel(settings: dict[str, Any], training_data: Any) -> Iterator[InvalidSetting]:
    """Yield the rows of DeepSpeed's `sequence_parallel_size`. Expects the process group."""
    key, ranks, of_data = "sequence_parallel_size", world_size(), settings.get("data_parallel_size")
    size = settings.get(key, 1)
    is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    yield InvalidSetting(not is_size or ranks % size > 0, key, size, f"it must divide the world size, {ranks}")
    product = f"times sequence_parallel_size, {size}, it must be the world size, {ranks}; leave it out"
    yield InvalidSetting(size > 1 and of_data not in (None, ranks // size), "data_parallel_size", of_data, product)
    own = f"with {key}={size} the ranks of a group need the same rows, and DeepSpeed's loader gives each rank its own"
    yield InvalidSetting(
        size > 1 and training_data is not None, "training_data", type(training_data).__name__, f"{own}; use your own"
    )


def invalid_sharing(info: ModelInfo, size: int) -> Iterator[InvalidSetting]:
    """Yield the rows of `sequence_parallel_size` for a model: its packed rows must be divisible over ranks."""
    if size == 1:
        return
    key, kind = "sequence_parallel_size", type(info.base).__name__
    recurrent = f"{kind} has recurrent layers, which run a row's tokens in their order; use 1"
    yield unsupported(info.is_recurrent, key, size, recurrent)
    models = [module for module in info.model.modules() if has_attention_interface(module)]
    plain = f"the attention of {kind} does not go through transformers' AttentionInterface; use 1"
    yield unsupported(not models, key, size, plain)
    experts = "DeepSpeed's MoE layers drop tokens by how many a rank has; use 1"
    yield unsupported(bool(expert_layers(info.model)), key, size, experts)
    heads = getattr(models[0].config.get_text_config(), "num_attention_heads", None)
    indivisible = isinstance(heads, int) and heads % size > 0
    yield InvalidSetting(indivisible, key, size, f"it must divide the {heads} attention heads of {kind}")


def invalid_blocks(settings: HybridEngineConfig, rollout: RolloutConfig) -> Iterator[InvalidSetting]:
    """Yield the rows of both blocks. Expects the process group."""
    graphs, ranks, pins = settings.enable_cuda_graph is True, world_size(), settings.pin_parameters
    size = 1 if settings.inference_tp_size == "auto" else settings.inference_tp_size
    streamed = "weights that are gathered layer by layer (pin_parameters) have no graphs; use 'auto', or true for both"
    yield InvalidSetting(graphs and pins is not True, GRAPHS, graphs, streamed)
    yield InvalidSetting(ranks % size > 0, TP_SIZE, size, f"it must divide the world size, {ranks}")
    streams = "pin_parameters=false keeps no copy for ranks to share; use inference_tp_size=1, or pin_parameters=true"
    yield InvalidSetting(size > 1 and not pins, TP_SIZE, size, streams)
    native = "rollout.containers=native has no graphs; use 'auto', or fused containers"
    yield InvalidSetting(graphs and rollout.containers == "native", GRAPHS, graphs, native)


def invalid_dtypes(model: torch.nn.Module, config: DeepSpeedConfig) -> Iterator[InvalidSetting]:
    """Yield the row of gradients that DeepSpeed (0.19.8) sums without ZeRO in the accelerator's dtypes alone. It raises
    at the first backward, at one rank too."""
    allowed = get_accelerator().supported_dtypes()
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    other = ", ".join(sorted(str(dtype) for dtype in trained.difference(allowed)))
    reason = (
        f"without ZeRO, DeepSpeed sums gradients in {', '.join(map(str, allowed))} alone, and parameters that train "
        f"are in {other}; use stage 1, 2 or 3, or cast the model"
    )
    is_whole = config.zero_config.stage == 0 and not is_cast(config)
    yield InvalidSetting(is_whole and bool(other), "zero_optimization.stage", 0, reason)


def invalid_quantized(model: torch.nn.Module, config: DeepSpeedConfig) -> Iterator[InvalidSetting]:
    """Yield the rows of a model with quantized layers."""
    stage, key = config.zero_config.stage, "zero_optimization.stage"
    for name, module in model.named_modules():
        loaded = "load 4-bit or 8-bit weights by transformers' BitsAndBytesConfig, and initialize before any forward"
        reason = unreadable(module)
        yield InvalidSetting(reason != "", f"model ({name})", reason, loaded)
        is_dora = type(module).__module__ == "peft.tuners.lora.bnb" and len(module.lora_magnitude_vector) > 0
        on_cpu = stage == 3 and get_accelerator().device_name() == "cpu"
        replaced = "on CPUs each forward of PEFT's DoRA puts a new parameter, which ZeRO-3 does not know, into a 4-bit "
        replaced += "layer; use stage 0, 1 or 2, or LoRA without use_dora"
        yield unsupported(is_dora and on_cpu, key, stage, replaced)
        if (kind := kind_of(module)) == EIGHT_BITS:
            held = "bitsandbytes holds each whole 8-bit weight a second time, which ZeRO-3 cannot free; use stage 0, 1 "
            yield unsupported(stage == 3, key, stage, f"{held}or 2, or 4-bit weights")
        elif kind == FOUR_BITS and is_cast(config) and module.weight.is_floating_point():
            dtype = torch.bfloat16 if config.bfloat16_config.enabled else torch.float16
            cast = f"DeepSpeed casts the model to {dtype}, and its bits with it; use uint8 or {dtype}"
            other = module.weight.dtype != dtype
            yield InvalidSetting(other, f"bnb_4bit_quant_storage ({name})", module.weight.dtype, cast)


def is_cast(config: DeepSpeedConfig) -> bool:
    """Whether DeepSpeed casts the model."""
    return config.float16_config.enabled or config.bfloat16_config.enabled


def invalid_for_model(
    info: ModelInfo, settings: HybridEngineConfig, rollout: RolloutConfig
) -> Iterator[InvalidSetting]:
    """Yield the rows of both blocks for a model, before DeepSpeed has changed it.

    Raises ValueError if `inference_tp_size` does not divide the heads that the model's family or `tp_plan` gives, or
    its recurrent mixers.
    """
    size, pins, kind = settings.inference_tp_size, settings.pin_parameters, type(info.base).__name__
    ignored = ignored_adapters(info.model)
    reads = (
        f"{kind} reads the weights of these modules directly and ignores their adapters; use exclude_modules for them"
    )
    yield InvalidSetting(bool(ignored), "LoraConfig.target_modules", ignored[:3], reads)
    if rollout.weight_dtype == "int8":
        key, value, model = "rollout.weight_dtype", "int8", "or weight_dtype=model"
        whole = f"with {key}=int8 every rank holds a whole int8 copy; use 1, {model}"
        yield InvalidSetting(size != 1, TP_SIZE, size, whole)
        kept = f"with {key}=int8 the int8 copy is kept, and all else is gathered layer by layer; use true, {model}"
        yield InvalidSetting(pins is not True, "hybrid_engine.pin_parameters", pins, kept)
        merged = f"with {key}=int8 adapters are merged before weights are quantized; use merged, {model}"
        yield InvalidSetting(rollout.lora == "unmerged", "rollout.lora", rollout.lora, merged)
        quantized = f"{kind} has layers of bitsandbytes, whose weights are not quantized again; use model"
        yield InvalidSetting(any(True for _ in quantized_layers(info.model)), key, value, quantized)
        yield from without_decoder(info, rollout, key, value, "read int8 weights", "use model")
        experts = f"{kind} is a mixture of experts, whose matrices are not quantized in training; use model"
        yield InvalidSetting(info.layout is not None and info.layout.spec.num_experts > 0, key, value, experts)
    if rollout.return_router_indices:
        none = f"{kind} has no routers of experts that transformers declares; use false"
        yield InvalidSetting(not routers_of(info.model), "rollout.return_router_indices", True, none)
    if rollout.speculation is not None:
        yield from without_decoder(info, rollout, "rollout.speculation", None, "verify drafts", "leave it out")
    require_decoder_slices(info, settings, rollout)
    if isinstance(size, int) and size > 1:
        for attention in () if info.tp_plan is None else info.tp_plan.attentions:
            require_divisible(size, attention.heads, attention.kv_heads)


def require_decoder_slices(info: ModelInfo, settings: HybridEngineConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if rollouts run in a fused decoder that `inference_tp_size` ranks cannot divide."""
    size = settings.inference_tp_size
    if isinstance(size, int) and size > 1 and info.layout is not None and rollout.containers != "native":
        require_decoder_divisible(size, info.layout.spec)


def invalid_attention(info: ModelInfo, rollout: RolloutConfig) -> Iterator[InvalidSetting]:
    """Yield the rows of `rollout.attention_backend` for a model, in its dtype and on its device."""
    if rollout.attention_backend != "flashinfer":
        return
    key, value = "rollout.attention_backend", "flashinfer"
    remedy = "use triton, or auto, which takes FlashInfer where it can"
    yield from without_decoder(info, rollout, key, value, "use it", remedy)
    assert info.layout is not None, "invalid without a decoder"
    weight = next(info.model.parameters())
    reason = choose_attention(value, info.layout.spec, weight.dtype, weight.device).reason
    yield InvalidSetting(reason != "", key, value, f"{reason}; {remedy}")


def invalid_invariance(
    info: ModelInfo, settings: HybridEngineConfig, rollout: RolloutConfig
) -> Iterator[InvalidSetting]:
    """Yield the rows of `rollout.batch_invariant` for a model, in its dtype and on its device."""
    if not rollout.batch_invariant:
        return
    key, value, weight = "rollout.batch_invariant", True, next(info.model.parameters())
    yield from without_decoder(info, rollout, key, value, "are batch invariant", "use false")
    if weight.device.type == "cpu":
        return
    assert info.layout is not None, "invalid without a decoder"
    spec, kind = info.layout.spec, type(info.base).__name__
    yield InvalidSetting(kernels_for(weight) != TRITON, key, value, "on GPUs it needs triton; install it, or use false")
    lack = no_triton_reason(spec, weight.dtype)
    yield unsupported(lack != "", key, value, f"{lack}; use false")
    latent = f"products of latent attention ({kind}) sum in an order that depends on the batch; use false"
    yield unsupported(bool(spec.latent_dim), key, value, latent)
    int8 = "products of int8 weights sum in an order that depends on the batch; use false, or weight_dtype=model"
    yield unsupported(rollout.weight_dtype == "int8", key, value, int8)
    sums = "sums over ranks may depend on the batch; use false, or hybrid_engine.inference_tp_size=1"
    yield unsupported(settings.inference_tp_size != 1, key, value, sums)
    backend = "FlashInfer's sums depend on the batch; use false, or attention_backend=triton"
    yield unsupported(rollout.attention_backend != "triton", key, value, backend)


def without_decoder(
    info: ModelInfo, rollout: RolloutConfig, key: str, value: Any, use: str, remedy: str
) -> Iterator[InvalidSetting]:
    """Yield the rows of a setting that needs the fused decoder.  use: what only fused decoders do."""
    yield InvalidSetting(rollout.containers == "native", key, value, f"it needs rollout.containers=fused; {remedy}")
    is_missing = info.layout is None  # reading the layout records the reason
    none = f"only fused decoders {use}, and {type(info.base).__name__} has none ({info.reasons.get('layout')})"
    yield InvalidSetting(is_missing, key, value, f"{none}; {remedy}")
