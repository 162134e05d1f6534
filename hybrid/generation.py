"""Hugging Face's `generate()` with our decode loop in it: what engines have in common."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.containers.batch import PackedBatch, PagedKV
from hybrid.decoding.loop import Decoding, with_stop_strings
from hybrid.decoding.rows import Decoder
from hybrid.profiling import ModelTimes
from hybrid.rollout import check_prompts

# Arguments of Hugging Face's and PEFT's `generate` that cannot be followed here.
NOT_AVAILABLE = {
    "custom_generate": "the engine decodes by its own loop",
    "assistant_model": "the engine decodes by its own loop",
    "adapter_names": "active adapters are the same for every row; use model.set_adapter",
}
STRIDE_ON_DEVICES = 8  # steps between two looks at a device that the host would wait for


def prompts_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The prompts in `generate`'s arguments, checked; None where there are none, or they are no token ids.

    Raises TypeError or ValueError, in words, for prompts that cannot be decoded.
    """
    given = kwargs.get("inputs")
    prompts = args[0] if args else kwargs.get("input_ids") if given is None else given
    if prompts is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    if kwargs.get("inputs_embeds") is not None:  # these are the prompts, and the mask is theirs
        return None
    # Of a sequence that goes on from a cache, the mask covers what is in the cache too.
    mask = None if kwargs.get("past_key_values") is not None else kwargs.get("attention_mask")
    check_prompts(prompts, mask, "input_ids")
    if len(prompts) == 0:
        raise ValueError("input_ids: a batch of size 0 given; it must have at least one row")
    return prompts


def require_generate(model: nn.Module) -> None:
    """Raise ValueError where a model has no `generate`."""
    if not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} has no generate(): generation needs a Hugging Face model with a "
            "language-modelling head. eval(), train() and forward work with any model."
        )


def require_decoder(model: nn.Module, call: str) -> None:
    """Raise NotImplementedError for an encoder-decoder, whose prompt and completion are not one sequence."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{call}: {type(model).__name__} is an encoder-decoder; {call} takes decoders, whose prompt and completion "
            "are one sequence. engine.generate() and forwards in eval mode run with encoder-decoders"
        )


def refuse_model_inputs(model_inputs: dict[str, Any], call: str) -> None:
    """Raise NotImplementedError for inputs of a model besides token ids and their mask, such as images."""
    if model_inputs:
        raise NotImplementedError(
            f"{call}: {', '.join(model_inputs)} given; {call} takes token ids and their mask alone. engine.generate() "
            "and forwards in eval mode take what the model takes"
        )


class Route:
    """The `generate` of a module that an engine has: leads through the engine, whoever calls it.

    A copy or a pickle of the module has its class's again.
    """

    def __init__(self, module: nn.Module, through: Callable):
        functools.update_wrapper(self, module.generate)  # callers read the signature
        self.module, self.own, self.through = module, module.generate, through
        self.before = module.__dict__.get("generate")  # somebody's patch, if there was one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.through(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self.module, "generate")

    def open(self) -> None:
        """From here on it is the module's `generate`."""
        self.module.generate = self

    def close(self) -> None:
        """The module's `generate` is what it was, unless somebody has put another one there since."""
        if self.module.__dict__.get("generate") is self:
            del self.module.generate
            if self.before is not None:
                self.module.generate = self.before


def own_generate(model: nn.Module) -> Callable:
    """The model's own `generate`, which leads through no engine."""
    found = model.generate
    while isinstance(found, Route):
        found = found.own
    return found


def generate(model: nn.Module, args: tuple, kwargs: dict[str, Any], decoding: Decoding) -> Any:
    """The model's own `generate`, which prepares, around our loop."""
    require_generate(model)
    for key, why in NOT_AVAILABLE.items():
        if kwargs.get(key) is not None:
            raise NotImplementedError(f"generate: {key} is not available; {why}")
    kwargs = with_stop_strings({**kwargs, "synced_gpus": False})
    if "generation_config" not in kwargs and len(args) < 2:
        kwargs.setdefault("use_cache", True)  # gradient checkpointing turns it off in the model's configuration
    decoding.streamer = kwargs.get("streamer")
    return own_generate(model)(*args, custom_generate=decoding.method(), **kwargs)


def stride_on(device: torch.device) -> int:
    """Steps between two looks at which rows have ended."""
    return 1 if device.type == "cpu" else STRIDE_ON_DEVICES


class TimedDecoder:
    """A decoder whose forwards are timed: one for each forward, head included."""

    def __init__(self, decoder: Decoder, times: ModelTimes):
        self.decoder, self.times = decoder, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """As the decoder's."""
        with self.times.forward():
            return self.decoder.forward(batch, kv)

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """As the decoder's."""
        with self.times.forward():
            return self.decoder.decode(batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the decoder's; the rest of the forward before."""
        with self.times.forward(goes_on=True):
            return self.decoder.logits(hidden)
