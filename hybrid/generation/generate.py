"""Hugging Face's `generate()` with our decode loop: what the training and the inference engine share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from hybrid.decoders.batch import PackedBatch, PagedKV
from hybrid.generation.decode import MODES, Decoding, require_room, with_stop_strings
from hybrid.generation.model_runner import Decoder
from hybrid.models.model_info import ModelInfo
from hybrid.profiling import ModelTimes
from hybrid.rollout import check_prompts

# Arguments of Hugging Face's `generate` that select a decoding method of their own.
OTHER_METHODS = ("custom_generate", "assistant_model")
STRIDE_ON_DEVICES = 8  # decode steps between two checks for ended sequences: a check waits for the device


def prompts_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The prompts in `generate`'s arguments, checked, [rows, tokens] of any integer dtype.

    None if no prompts are given, if they are `inputs_embeds`, or if the model's main input is not `input_ids`.
    Raises TypeError if the prompts are not a tensor; ValueError if they are not integers, not two-dimensional or empty,
    or if the mask has another shape or masks a whole row.
    """
    given = kwargs.get("inputs")
    prompts = args[0] if args else kwargs.get("input_ids") if given is None else given
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


def require_generate(info: ModelInfo) -> None:
    """Raise ValueError if the model has no `generate`."""
    if not info.can_generate:
        raise ValueError(
            f"{type(info.model).__name__} has no generate(): generation needs a Hugging Face model with a "
            "language-modelling head. eval(), train() and forward work with any model."
        )


def require_decoder(info: ModelInfo, call: str) -> None:
    """Raise NotImplementedError if the model is an encoder-decoder: its prompt and completion are not one sequence."""
    if info.is_encoder_decoder:
        raise NotImplementedError(
            f"{call}: {type(info.model).__name__} is an encoder-decoder; {call} takes decoders, whose prompt and "
            "completion are one sequence. engine.generate() and forwards in eval mode run with encoder-decoders"
        )


def refuse_model_inputs(model_inputs: dict[str, Any], call: str) -> None:
    """Raise NotImplementedError if a call gives inputs other than token ids and their mask, such as images."""
    if model_inputs:
        raise NotImplementedError(
            f"{call}: {', '.join(model_inputs)} given; {call} takes token ids and their mask alone. engine.generate() "
            "and forwards in eval mode take what the model takes"
        )


class Route:
    """Replaces a module's `generate`: every call goes through the engine.

    through: the engine's `generate`. A copy or a pickle of the module has its class's `generate` again.
    """

    def __init__(self, module: nn.Module, through: Callable):
        functools.update_wrapper(self, module.generate)  # callers read the signature
        self.module, self.own, self.through = module, module.generate, through
        self.before = module.__dict__.get("generate")  # a `generate` set on the instance, such as a user's patch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.through(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self.module, "generate")

    def open(self) -> None:
        """Install the route as the module's `generate`."""
        self.module.generate = self

    def close(self) -> None:
        """Restore the module's own `generate`, unless it has been replaced again since `open`."""
        if self.module.__dict__.get("generate") is self:
            del self.module.generate
            if self.before is not None:
                self.module.generate = self.before


def own_generate(model: nn.Module) -> Callable:
    """The model's own `generate`, without an engine's route around it."""
    found = model.generate
    while isinstance(found, Route):
        found = found.own
    return found


def generate(model: nn.Module, args: tuple, kwargs: dict[str, Any], decoding: Decoding) -> Any:
    """The output of the model's own `generate`, with our decode loop as its decoding method.

    Other decoding methods, such as beam search, run by Hugging Face's loop if `decoding.runs_other_methods`.
    Raises ValueError if the model has no `generate`, a sequence would be too long, or stop strings lack a tokenizer;
    NotImplementedError for `adapter_names` and for decoding methods that cannot run.
    """
    require_generate(model)
    if hasattr(model, "reset_cache"):  # a model that keeps its own cache, as under DeepSpeed's engines
        model.reset_cache()
    if kwargs.get("adapter_names") is not None:
        raise NotImplementedError(
            "generate: adapter_names is not available; active adapters are the same for every row; use "
            "model.set_adapter"
        )
    kwargs = {**kwargs, "synced_gpus": False}
    if "generation_config" not in kwargs and len(args) < 2:
        kwargs.setdefault("use_cache", True)  # gradient checkpointing turns it off in the model's configuration
    if decoding.runs_other_methods:
        config = prepared_config(model, args, kwargs)
        if method := other_method(config, kwargs):
            return generate_natively(model, args, kwargs, config, decoding, method)
    for key in OTHER_METHODS:
        if kwargs.get(key) is not None:
            raise NotImplementedError(f"generate: {key} is not available; the engine decodes by its own loop")
    kwargs = with_stop_strings(kwargs)
    decoding.streamer = kwargs.get("streamer")
    return own_generate(model)(*args, custom_generate=decoding.method(), **kwargs)


def prepared_config(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> GenerationConfig:
    """The GenerationConfig that `generate` builds from its arguments and the model's own configuration (transformers
    5.23).
    """
    kwargs = dict(kwargs)
    given = kwargs.pop("generation_config", None)
    return model._prepare_generation_config(args[1] if len(args) > 1 else given, **kwargs)[0]


def other_method(config: GenerationConfig, kwargs: dict[str, Any]) -> str:
    """The decoding method that `generate`'s arguments ask for; "" for greedy search and sampling."""
    for key in OTHER_METHODS:
        if kwargs.get(key) is not None:
            return key
    mode = config.get_generation_mode()
    return "" if mode in MODES else mode.value


def generate_natively(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], config: GenerationConfig, decoding: Decoding, method: str
) -> Any:
    """The output of Hugging Face's `generate`, with Hugging Face's decode loop, over the model's own layers.

    Draws come from torch's generators, seeded from the call's sampling keys; the generators' states are restored
    afterwards. Raises TooManyTokensError if prompt and completion exceed `decoding.max_out_tokens`.
    """
    reason = f"generate: {method} runs by Hugging Face's own loop (fused are greedy search and sampling, num_beams=1)"
    prompts = prompts_of(model, args, kwargs)
    rows = 1 if prompts is None else len(prompts)
    before = 0 if prompts is None or model.config.is_encoder_decoder else prompts.shape[1]
    new_tokens = config.max_new_tokens or max((config.max_length or 0) - before, 0)
    require_room(before, new_tokens, decoding.max_out_tokens, decoding.limit)
    if not decoding.expands:  # beams reorder a cache's rows, and other ranks hold parts of the cache
        kwargs["use_cache"] = False
    device = next(model.parameters()).device
    with (
        decoding.request(None, reason),
        decoding.phase("decode"),
        torch.no_grad(),
        torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
    ):
        torch.manual_seed(int(decoding.noise(rows).keys(rows, torch.device("cpu"))[0]))
        output = own_generate(model)(*args, **kwargs)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    decoding.produced(len(sequences), len(sequences) * (sequences.shape[1] - before))
    return output


def stride_on(device: torch.device) -> int:
    """Decode steps between two checks for ended sequences."""
    return 1 if device.type == "cpu" else STRIDE_ON_DEVICES


class TimedDecoder:
    """A decoder whose forwards are timed. A forward and the head that follows it count as one."""

    def __init__(self, decoder: Decoder, times: ModelTimes):
        self.decoder, self.times = decoder, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The decoder's `forward`, timed."""
        with self.times.forward():
            return self.decoder.forward(batch, kv)

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The decoder's `decode`, timed."""
        with self.times.forward():
            return self.decoder.decode(batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's `logits`; its time is added to the preceding forward's."""
        with self.times.forward(goes_on=True):
            return self.decoder.logits(hidden)
