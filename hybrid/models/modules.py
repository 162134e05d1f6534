"""Modules of a model and their parameters, seen through adapter wrappers."""

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from hybrid.models.spec import ParamRef


def hugging_face_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def own_parameters(root: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameters of the module at `path` without its adapters, or for "path:name" that parameter alone."""
    module_path, _, name = path.partition(":")
    parameters = plain(find(root, module_path))._parameters
    return [parameters[name]] if name else [param for param in parameters.values() if param is not None]


def has(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path` and, for "path:name", whether it has that parameter."""
    module_path, _, name = path.partition(":")
    module = find(root, module_path)
    return module is not None and (not name or name in plain(module)._parameters)


def find(root: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, or None."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def plain(module: nn.Module) -> nn.Module:
    """The module without its adapter wrappers. DeepSpeed-Chat's LoRA layer is returned itself: it owns the weight."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def adapter_parameters(root: nn.Module) -> set[nn.Parameter]:
    """The adapters' own parameters under `root`: PEFT's, and DeepSpeed-Chat's."""
    params: set[nn.Parameter] = set()
    for module in root.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            params |= set(module.parameters()) - set(plain(module).parameters())
        elif hasattr(module, "lora_left_weight") and hasattr(module, "lora_right_weight"):
            params |= {module.lora_left_weight, module.lora_right_weight}
    return params


def parameter_at(ref: ParamRef) -> nn.Parameter | None:
    """The parameter that `ref` refers to, without adapters; None if there is none."""
    return getattr(plain(ref.module), ref.parameter, None)


def whole_shape(param: torch.Tensor) -> torch.Size:
    """The parameter's full shape; the `shape` of one partitioned by ZeRO-3 is empty."""
    return getattr(param, "ds_shape", param.shape)


def active_copy(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """The copy that PEFT's modules_to_save compute with: the active adapter's, or the original."""
    active = None if wrapper.disable_adapters else next(iter(wrapper.active_adapters), None)
    copies = wrapper.modules_to_save
    return copies[active] if active in copies else wrapper.original_module  # noqa: SIM401 - a ModuleDict has no get
