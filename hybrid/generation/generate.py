"""Around Hugging Face's `generate()`: checks of its arguments, and the route of a module's `generate` to its engine."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMode

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.request import GenerateInputs
from hybrid.rollout import check_prompts
from hybrid.runtime.profiling import ModelTimes

OUR_METHODS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Arguments of Hugging Face's `generate` that select a decoding method of their own.
OTHER_METHODS = ("custom_generate", "assistant_model")


class TooManyTokensError(ValueError, RuntimeError):
    """A sequence would exceed `max_out_tokens`. Also a RuntimeError, which DeepSpeed's engine raises in this case."""


def prompts_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the prompts in `generate`'s arguments, checked, [rows, tokens] of any integer dtype.

    None if no prompts are given, if they are `inputs_embeds`, or if the model's main input is not `input_ids`.
    Raises TypeError if the prompts are not a tensor; ValueError if they are not integers, not two-dimensional or empty,
    or if the mask has another shape or masks a whole row.
    """
    inputs = kwargs.get("inputs")
    prompts = args[0] if args else kwargs.get("input_ids") if inputs is None else inputs
    if prompts is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    if kwargs.get("inputs_embeds") is not None:  # the prompts are the embeddings; the mask has their shape
        return None
    # With past_key_values, the mask also covers the tokens in the cache.
    mask = None if kwargs.get("past_key_values") is not None else kwargs.get("attention_mask")
    check_prompts(prompts, mask, "input_ids")
    if len(prompts) == 0:
        raise ValueError("input_ids: a batch of size 0 given; it must have at least one row")
    return prompts


def require_sampling(config: GenerationConfig) -> None:
    """Raise NotImplementedError for other methods than greedy search and sampling."""
    mode = config.get_generation_mode()
    if mode not in OUR_METHODS:
        raise NotImplementedError(
            f"generate: {mode.value} (num_beams={config.num_beams}) is not available; "
            "the decode loop does greedy search and sampling (num_beams=1)"
        )


def require_supported_arguments(kwargs: dict[str, Any], runs_other_methods: bool) -> None:
    """Raise NotImplementedError for `adapter_names`, and for arguments that select a decoding method of their own."""
    if kwargs.get("adapter_names") is not None:
        raise NotImplementedError(
            "generate: adapter_names is not available; give adapter=... for one adapter for all rows, or use "
            "rollout(adapter_names=...)"
        )
    for key in () if runs_other_methods else OTHER_METHODS:
        if kwargs.get(key) is not None:
            raise NotImplementedError(f"generate: {key} is not available; the engine decodes by its own loop")


def with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `generate`'s arguments with `stop_strings` and `tokenizer` replaced by a stopping criterion: Hugging Face
    does not pass the tokenizer on with a custom decoding method (5.23).

    Raises ValueError if there are stop strings and no tokenizer.
    """
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if not strings:
        return kwargs
    if tokenizer is None:
        raise ValueError(f"generate: stop_strings={strings!r} needs the model's tokenizer; give tokenizer=...")
    if config is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    criterion = StopStringCriteria(tokenizer, strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return kwargs


class GeneratePatch:
    """Replaces a module's `generate`, until it is closed: every call goes through the engine.

    through: the engine's `generate`. A copy or a pickle of the module has its class's `generate` again.
    """

    def __init__(self, module: nn.Module, through: Callable):
        functools.update_wrapper(self, module.generate)  # callers read the signature
        self.module, self.original, self.through = module, module.generate, through
        self.before = module.__dict__.get("generate")  # a `generate` set on the instance, such as a user's patch
        module.__dict__["generate"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.through(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self.module, "generate")

    def close(self) -> None:
        """Restore the module's own `generate`, unless it has been replaced again since."""
        if self.module.__dict__.get("generate") is self:
            del self.module.generate
            if self.before is not None:
                self.module.generate = self.before


def hugging_face_generate(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the output of the model's own `generate`, called without an engine's route around it."""
    if hasattr(model, "reset_cache"):  # a model that keeps its own cache, as under DeepSpeed's engines
        model.reset_cache()
    generate = model.generate
    while isinstance(generate, GeneratePatch):
        generate = generate.original
    return generate(*args, **{**kwargs, "synced_gpus": False})


def decoded_by(
    decode: Callable[[nn.Module, GenerateInputs], Any], model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Return the result of `decode` for the model and the inputs that its `generate` prepares from these arguments."""

    def decoding_method(
        model: nn.Module,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        streamer = kwargs.get("streamer")
        inputs = GenerateInputs(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        return decode(model, inputs)

    return hugging_face_generate(model, args, {**kwargs, "custom_generate": decoding_method})


def hugging_face_method(config: GenerationConfig, kwargs: dict[str, Any]) -> str:
    """Return the decoding method of Hugging Face that `generate`'s arguments ask for; "" for greedy search and
    sampling."""
    for key in OTHER_METHODS:
        if kwargs.get(key) is not None:
            return key
    mode = config.get_generation_mode()
    return "" if mode in OUR_METHODS else mode.value


def prepared_config(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> GenerationConfig:
    """Return the GenerationConfig that `generate` builds from its arguments and the model's own configuration
    (transformers 5.23)."""
    kwargs = dict(kwargs)
    config = kwargs.pop("generation_config", None)
    return model._prepare_generation_config(args[1] if len(args) > 1 else config, **kwargs)[0]


class TimedDecoder:
    """A decoder whose forwards are timed, one by one. A forward and the head that follows it count as one."""

    samples_in_kernel = samples_with_penalties = False

    def __init__(self, decoder: AnyDecoder, times: ModelTimes):
        self.decoder, self.times = decoder, times

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.decoder, name)
        if name in ("forward", "decode", "verify", "logits"):
            return self.times.forward(continues=name == "logits")(attribute)
        return attribute
