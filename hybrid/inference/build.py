"""A model's weights loaded, cast, quantized or sliced as `init_inference`'s settings say."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from hybrid.config import InferenceConfig
from hybrid.decoders.tp_modules import first_output, whole_difference
from hybrid.inference.auto_tp import AutoTP
from hybrid.inference.checkpoints import open_checkpoint, save_mp_checkpoint
from hybrid.inference.deepspeed_experts import own_experts
from hybrid.inference.loaded_slices import LoadedSlices
from hybrid.inference.loader import (
    Cast,
    CheckpointWeights,
    ReadTensor,
    cast_model,
    floating_dtype,
    load,
    loaded_while_running,
    materialize,
    move_buffers,
    require_initializable,
    set_data,
    set_tensor,
    state_tensors,
)
from hybrid.inference.validation import why_no_fused_slices
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.parallel import InferenceGroup, first_to
from hybrid.weights.int8 import WeightLoader, in_int8
from hybrid.weights.lora import read_adapters
from hybrid.weights.snapshot import Snapshot

LAYERS_PER_GROUP = 8  # for the snapshot; without effect, as nothing is gathered here


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are loaded.

    group: the ranks whose slices, in `snapshot`, a fused decoder runs on; None: the model's own modules hold the
        weights.
    close: undoes what was changed in the model's forwards.
    fallback_reason: why no fused container may run; "" if one may.
    """

    info: ModelInfo
    snapshot: Snapshot
    group: InferenceGroup | None = None
    close: Callable[[], None] = lambda: None
    fallback_reason: str = ""


def load_model(
    info: ModelInfo, config: InferenceConfig, moe_layers: dict[str, MoE], group: InferenceGroup, device: torch.device
) -> LoadedModel:
    """Load the model, cast it and place it on `device`; if `group` has several ranks, this rank's slices of it.

    moe_layers: DeepSpeed's MoE layers by name. Raises ValueError if the checkpoint cannot be read or does not fit, and
    NotImplementedError if a quantized or sliced model's output differs from the model's.
    """
    model = info.model
    checkpoint = None if config.checkpoint is None else open_weights(model, config, moe_layers)
    cast = Cast(model, floating_dtype(model, config.dtype), device)
    if checkpoint is not None:
        materialize(model, checkpoint.missing, device)
    move_buffers(model, device)
    int8 = config.dtype == torch.int8
    if checkpoint is None and not int8 and group.size == 1:
        cast_model(model, cast)
    read = reader(model, checkpoint, cast)
    save(model, config, group, device, read)
    if group.size > 1:
        if reason := why_no_fused_slices(info, config):
            return load_sliced_modules(model, config, group, device, read, reason)
        return LoadedModel(info, LoadedSlices(info, group, read), group)
    if checkpoint is not None or int8:
        expected = output_of(info, next(model.parameters()).device) if checkpoint is None else None
        load(model, state_tensors(model), read, quantizers(model, config))
        if expected is not None:  # fails if a module reads a linear layer's weight directly, which is int8 now
            require_same_output(info, expected, config, group, device, "dtype: int8 given; {}; use another dtype")
    return loaded(model, "" if config.replace_with_kernel_inject else "replace_with_kernel_inject=false")


def loaded(model: nn.Module, fallback_reason: str, close: Callable[[], None] = lambda: None) -> LoadedModel:
    """The loaded model whose own modules hold the weights."""
    info = ModelInfo(model)
    snapshot = Snapshot(model, info.structure, read_adapters(model), LAYERS_PER_GROUP)
    return LoadedModel(info, snapshot, close=close, fallback_reason=fallback_reason)


def load_sliced_modules(
    model: nn.Module,
    config: InferenceConfig,
    group: InferenceGroup,
    device: torch.device,
    read: ReadTensor,
    fallback_reason: str,
) -> LoadedModel:
    """Put this rank's slices into the model's own modules, and compare their output with the full weights'.

    fallback_reason: why no fused decoder runs on the slices. Raises NotImplementedError if the outputs differ, or if
    the model does not run on token ids alone and there is no injection policy.
    """
    tensors = state_tensors(model)
    names = {tensor: name for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter):
            set_tensor(model, name, tensor, read(name))
    int8 = quantizers(model, config)
    info = ModelInfo(model)  # its linear layers may be int8 layers now
    auto_tp = AutoTP(info, group.size, config.injection_policy)
    parts = [part.module for part in (*info.structure.outer, *info.structure.layers)]
    with loaded_while_running(parts, names, read):
        expected = output_of(info, device)
    if expected is None and config.injection_policy is None:
        raise NotImplementedError(
            f"tensor_parallel: {type(model).__name__} does not run on token ids alone; give injection_policy"
        )
    load(model, tensors, read, auto_tp.weight_loaders(group, names, int8))
    if expected is not None:  # else the model takes other inputs, and the user's policy is trusted unchecked
        message = f"tensor_parallel: {{}}; sliced by {auto_tp.source}. Give another injection_policy, or use tp_size=1"
        require_same_output(info, expected, config, group, device, message)
    return loaded(model, f"sharded over {group.size} ranks by {auto_tp.source}; {fallback_reason}", auto_tp.undo.close)


def open_weights(model: nn.Module, config: InferenceConfig, moe_layers: dict[str, MoE]) -> CheckpointWeights:
    """The checkpoint's tensors by the model's names. With `set_empty_params` the model's own are freed.

    Raises ValueError if the checkpoint cannot be read, or does not fit the model and `strict` is set.
    """
    shapes = {name: tensor.shape for name, tensor in state_tensors(model).items()}
    tensors = open_checkpoint(config.checkpoint, config.base_dir, config.training_mp_size, shapes)
    checkpoint = CheckpointWeights(model, own_experts(moe_layers, tensors), config.strict)
    if config.set_empty_params:
        params = dict(model.named_parameters())
        require_initializable(model, [name for name in checkpoint.missing if name in params])
        for param in params.values():
            set_data(param, torch.empty_like(param, device="meta"))
    return checkpoint


def reader(model: nn.Module, checkpoint: CheckpointWeights | None, cast: Cast) -> ReadTensor:
    """A function that gives a full tensor by its name in the model, cast and on the device: the checkpoint's, else the
    model's own. It keeps the model's own tensors alive."""
    own = {
        name: tensor.detach()
        for name, tensor in state_tensors(model).items()
        if checkpoint is None or name in checkpoint.missing
    }
    return lambda name: cast(name, own[name] if name in own else checkpoint.read(name))


def quantizers(model: nn.Module, config: InferenceConfig) -> dict[str, WeightLoader]:
    """By parameter name, the function that quantizes a weight; {} unless dtype is int8."""
    return in_int8(model, config.quant.weight.q_groups) if config.dtype == torch.int8 else {}


def save(
    model: nn.Module, config: InferenceConfig, group: InferenceGroup, device: torch.device, read: ReadTensor
) -> None:
    """With save_mp_checkpoint_path, write this rank's part of the weights. Only the first group of ranks writes."""
    path = config.save_mp_checkpoint_path
    if path is None:
        return
    first = group.index == 0 and first_to(f"saves/{Path(path).resolve()}")
    if group.share(torch.tensor(int(first), device=device)):
        save_mp_checkpoint(path, state_tensors(model), read, group.size, group.index)


def output_of(info: ModelInfo, device: torch.device) -> torch.Tensor | None:
    """The output of a model on `device` for a few tokens; None if it does not run on token ids alone.  [tokens, n]"""
    try:
        return first_output(info, device)
    except UnsupportedModel:
        return None


def require_same_output(
    info: ModelInfo,
    expected: torch.Tensor,
    config: InferenceConfig,
    group: InferenceGroup,
    device: torch.device,
    message: str,
) -> None:
    """Raise NotImplementedError, on every rank of the group, if a rank's output differs from `expected`.

    message: of the error, with {} for the difference.
    """
    try:
        difference = whole_difference(first_output(info, device), expected.to(device), config.dtype)
    except UnsupportedModel as reason:
        difference = str(reason)
    if group.sum(torch.tensor(int(bool(difference)), device=device)):
        raise NotImplementedError(message.format(difference or "the output of another rank differs"))
