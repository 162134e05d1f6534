"""Modules of a model and their parameters, seen through adapter wrappers."""

import copy
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftType
from peft.tuners.lora import layer as lora
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.quantized import is_quantized
from hybrid.models.spec import ParamRef

# Where the forwards x Wᵀ + b are defined, in which an adapter's sum can be a change of W.
LINEAR_FORWARDS = (
    "torch.nn.modules.linear",
    "transformers.pytorch_utils",
    "transformers.models.falcon.modeling_falcon",
)


def hugging_face_model(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


# Types of models that read images or sound, whose forward of token ids alone is their language model's, by the path of
# this part (transformers 5.23).
TEXT_PARTS = dict.fromkeys(
    (
        "aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 gemma3 gemma4 gemma4_unified "
        "glm46v glm4v glm4v_moe glm_ocr glmasr glmga got_ocr2 hyperclovax_vision_v2 internvl janus kimi_k25 lfm2_vl "
        "lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 "
        "mistral3 moss_transcribe_diarize ovis2 paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_omni_thinker "
        "qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
        "vibevoice_asr video_llama_3 video_llava vipllava voxtral"
    ).split(),
    "model.language_model",
) | {
    **dict.fromkeys(("granite_docling", "idefics2", "idefics3", "smolvlm"), "model.text_model"),
    **dict.fromkeys(("llama4", "nemotron_h_omni"), "language_model"),
}
# Settings of a language model's logits, with the values that change nothing: models of TEXT_PARTS do not apply them,
# but for those of APPLYING (transformers 5.23).
OF_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
APPLYING = ("gemma4", "gemma4_unified", "granite_docling", "hyperclovax_vision_v2", "llama4", "nemotron_h_omni")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model's language model; in a copy, without settings of logits that the model does
    not apply."""
    text = config.get_text_config()
    if config.model_type not in TEXT_PARTS or config.model_type in APPLYING:
        return text
    text = copy.copy(text)
    for name in OF_LOGITS.keys() & vars(text).keys():
        setattr(text, name, OF_LOGITS[name])
    return text


class TextPart(nn.Module):
    """The language model of a model of TEXT_PARTS, with its head and its configuration, as a causal model has them."""

    def __init__(self, model: nn.Module, language_model: nn.Module):
        super().__init__()
        self.model, self.lm_head = language_model, model.lm_head
        self.config = text_config(model.config)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as transformers' models do."""
        return self.model.embed_tokens


def text_part(model: nn.Module) -> nn.Module:
    """Return what computes token ids in `model`: its language model with its head, or `model` itself."""
    config: Any = getattr(model, "config", None)
    path = TEXT_PARTS.get(getattr(config, "model_type", ""), "")
    if path and has(model, f"{path}.lm_head"):  # a causal model (Llama 4)
        return model.get_submodule(path)
    if not path or not has(model, path) or not has(model, "lm_head"):
        return model
    return TextPart(model, model.get_submodule(path))


def own_parameters(root: nn.Module, path: str) -> list[nn.Parameter]:
    """Return the parameters of the module at `path` without its adapters, or for "path:name" that parameter alone."""
    module_path, _, name = path.partition(":")
    parameters = plain(find(root, module_path))._parameters
    found = [parameters.get(name)] if name else parameters.values()
    return [param for param in found if param is not None]


def has(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path` and, for "path:name", whether it has that parameter or buffer."""
    module_path, _, name = path.partition(":")
    module = find(root, module_path)
    return module is not None and (not name or name in plain(module)._parameters or name in plain(module)._buffers)


def find(root: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path`, or None."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def plain(module: nn.Module) -> nn.Module:
    """Return the module without its adapter wrappers. DeepSpeed-Chat's LoRA layer is returned itself: it owns the
    weight."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def adapter_parameters(root: nn.Module) -> set[nn.Parameter]:
    """Return the adapters' own parameters under `root`: PEFT's, and DeepSpeed-Chat's."""
    params: set[nn.Parameter] = set()
    for module in root.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            params |= set(module.parameters()) - set(plain(module).parameters())
        elif hasattr(module, "lora_left_weight") and hasattr(module, "lora_right_weight"):
            params |= {module.lora_left_weight, module.lora_right_weight}
    return params


def unmergeable_adapter(model: nn.Module) -> str:
    """Return why the adapters of `model` cannot be merged into its weights: the first one that cannot; "" if all
    can."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (reason := unmergeable(module)):
            return f"{name}: {reason}"
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type not in (PeftType.LORA, PeftType.TRAINABLE_TOKENS):
            return f"adapter {name!r} is {config.peft_type.value}"
    return ""


def unmergeable(layer: Any) -> str:
    """Return why an adapter layer of PEFT cannot be merged into the weights of its base; "" if it can, or computes only
    which rows of an embedding are trained (see `running_adapters`)."""
    base, kind = layer.get_base_layer(), type(layer)  # PEFT's subclasses are for quantized bases
    adds_to_weight = (
        is_on_quantized(layer)
        or (kind is lora.Linear and type(base).forward.__module__ in LINEAR_FORWARDS)
        or (kind is lora.Embedding and (type(base).forward is nn.Embedding.forward or hasattr(base, "embed_scale")))
        or kind is lora.ParamWrapper
    )
    if isinstance(layer, TrainableTokensLayer):
        return ""
    if not adds_to_weight:
        return f"{kind.__module__}.{kind.__name__} on a {type(base).__name__}"
    for name, param in base.named_parameters(recurse=False):
        if not param.is_floating_point() and not is_quantized(param):
            return f"an adapter on a quantized weight ({name} is {param.dtype})"
    for adapter, variant in layer.lora_variant.items():
        if not isinstance(variant, DoraLinearVariant | DoraEmbeddingVariant):
            return f"adapter {adapter!r} is a {type(variant).__name__}"
    return ""


def is_on_quantized(layer: Any) -> bool:
    """Whether an adapter layer is PEFT's LoRA on a layer of bitsandbytes whose weight is read dequantized."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    return type(layer).__module__ == "peft.tuners.lora.bnb" and is_quantized(weight)


def ignored_adapters(model: nn.Module) -> list[str]:
    """Return the names of adapter layers whose weight the module around them reads, instead of calling them: the model
    ignores these adapters, as Mamba's mixers do on `dt_proj` (transformers 5.23), and a merge would not."""
    names = []
    for path, module in model.named_modules():
        kind: Any = type(module)  # functools.cache takes what mypy knows to be hashable
        for name, child in module.named_children():
            if isinstance(child, BaseTunerLayer) and name in read_weights(kind):
                names.append(f"{path}.{name}".lstrip("."))
    return names


@functools.cache
def read_weights(kind: Any) -> frozenset[str]:
    """Return the attributes whose `weight` the code of a class reads as a tensor, by its source. In training Mamba 2
    mixers pass that of `out_proj` to mamba_ssm's kernel, if it is installed."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # defined where there is no file
        return frozenset()
    reads = re.findall(r"self\.(\w+)\.weight\s*(?:@|\.squeeze\()", source)
    if importlib.util.find_spec("mamba_ssm"):
        reads += re.findall(r"outproj_weight=self\.(\w+)\.weight", source)
    return frozenset(reads)


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens before each sequence: prompt tuning, P-tuning, prefix tuning."""
    return any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())


def has_invocation_tokens(model: nn.Module) -> bool:
    """Whether an adapter begins at tokens of its own (aLoRA): PEFT finds them in its `generate()`, and its layers then
    expect the rows of that call (0.21)."""
    return any(
        getattr(config, "alora_invocation_tokens", None) for config in getattr(model, "peft_config", {}).values()
    )


def prompt_encoders(model: nn.Module) -> Iterator[nn.Module]:
    """PEFT's modules that make virtual tokens: `generate()` reads them before it calls the model."""
    yield from getattr(model, "prompt_encoder", nn.ModuleDict()).values() if has_virtual_tokens(model) else ()


def running_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of adapters that are not merged where others are, but run: PEFT's trainable
    tokens."""
    for name, module in model.named_modules():
        is_wrapper = isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper)
        if is_wrapper or isinstance(module, TrainableTokensLayer):
            yield name, module


def native_adapter(model: nn.Module) -> str:
    """Return why adapters of `model` run in the model's own modules; "" if none does."""
    if reason := unmergeable_adapter(model):
        return f"{reason}, which cannot be merged"
    return next((f"a {type(module).__name__} changes a module as it runs" for _, module in running_adapters(model)), "")


def parameter_at(ref: ParamRef) -> nn.Parameter | None:
    """Return the parameter that `ref` refers to, without adapters; None if there is none."""
    return getattr(plain(ref.module), ref.parameter, None)


def whole_shape(param: Any) -> torch.Size:
    """Return the parameter's full shape; the `shape` of one partitioned by ZeRO-3 is empty, that of a quantized one
    another."""
    return param.dequantized.shape if is_quantized(param) else getattr(param, "ds_shape", param.shape)


def active_copy(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """Return the copy that PEFT's modules_to_save compute with: the active adapter's, or the original."""
    active = None if wrapper.disable_adapters else next(iter(wrapper.active_adapters), None)
    copies = wrapper.modules_to_save
    return copies[active] if active in copies else wrapper.original_module  # noqa: SIM401 - a ModuleDict has no get
