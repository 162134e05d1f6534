"""Modules of a model and their parameters, whatever adapters have been put around them."""

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hybrid.models.spec import ParamRef


def own_parameters(root: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameters of the module at `path`, adapters aside, or the one that "path:name" names."""
    module_path, _, name = path.partition(":")
    parameters = plain(find(root, module_path))._parameters
    return [parameters[name]] if name else [param for param in parameters.values() if param is not None]


def has(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path`, with the parameter of "path:name"."""
    module_path, _, name = path.partition(":")
    module = find(root, module_path)
    return module is not None and (not name or name in plain(module)._parameters)


def find(root: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, None where there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def plain(module: nn.Module) -> nn.Module:
    """The module without its adapters; DeepSpeed-Chat's is its own plain one, as its weight has the usual name."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def adapter_parameters(root: nn.Module) -> set[nn.Parameter]:
    """The parameters under `root` that adapters brought: PEFT's, and DeepSpeed-Chat's."""
    found: set[nn.Parameter] = set()
    for module in root.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found |= set(module.parameters()) - set(plain(module).parameters())
        elif hasattr(module, "lora_left_weight") and hasattr(module, "lora_right_weight"):
            found |= {module.lora_left_weight, module.lora_right_weight}
    return found


def parameter_at(ref: ParamRef) -> nn.Parameter | None:
    """The parameter at a place; None where there is none."""
    return getattr(plain(ref.module), ref.parameter, None)


def whole_shape(ref: ParamRef) -> torch.Size:
    """The shape of the whole parameter at a place; ZeRO-3 empties a partitioned one's own."""
    param = parameter_at(ref)
    return getattr(param, "ds_shape", param.shape)
