"""`ModelInfo`: a model's properties for inference, read once, on first use, and passed down as one record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from torch import nn
from transformers import PretrainedConfig

from hybrid.models.modules import hugging_face_model, text_part, unmergeable_adapter
from hybrid.models.placeholders import Placeholders
from hybrid.models.quantized import mark_quantized, quantized_layers
from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout, UnsupportedModel
from hybrid.models.structure import Structure, can_generate, read_structure
from hybrid.models.tp_plan import TensorPlan, read_tp_plan

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A model, PEFT's wrapper included, and what is read of it. Each property is read on first use and kept.

    reasons: why `layout` or `tp_plan` is None, by name, once it has been read.
    Read the model again, into a new record, once its modules, its adapters or the dtype of its weights have changed.
    """

    model: nn.Module
    reasons: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        mark_quantized(self.model)

    @cached_property
    def base(self) -> nn.Module:
        """The Hugging Face model, without PEFT's wrapper."""
        return hugging_face_model(self.model)

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """The Hugging Face configuration; None if the model has none."""
        return getattr(self.base, "config", None)

    @cached_property
    def text_config(self) -> PretrainedConfig | None:
        """The configuration of the part that generates text."""
        return self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config

    @cached_property
    def placeholders(self) -> Placeholders:
        """The tokens in whose place the model reads another input than text."""
        return Placeholders(self.config)

    def size(self, name: str) -> int:
        """Return a size in `text_config`, such as "vocab_size"; the largest if it varies by layer; 0 if it has none."""
        config = self.text_config
        if name in (getattr(config, "per_layer_attributes", None) or ()):
            return max(getattr(layer, name) or 0 for layer in config.per_layer_config)
        return getattr(config, name, None) or 0

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether the model's prompt and completion are two sequences."""
        return getattr(self.config, "is_encoder_decoder", False)

    @cached_property
    def can_generate(self) -> bool:
        """Whether the model has a working `generate`."""
        return can_generate(self.model)

    def require_generate(self) -> None:
        """Raise ValueError if the model has no `generate`."""
        if not self.can_generate:
            raise ValueError(
                f"{type(self.model).__name__} has no generate(): generation needs a Hugging Face model with a "
                "language-modelling head. eval(), train() and forward work with any model."
            )

    def require_decoder(self, call: str) -> None:
        """Raise NotImplementedError if the model is an encoder-decoder: its prompt and completion are not one
        sequence."""
        if self.is_encoder_decoder:
            raise NotImplementedError(
                f"{call}: {type(self.model).__name__} is an encoder-decoder; {call} takes decoders, whose prompt and "
                "completion are one sequence. engine.generate() and forwards in eval mode run with encoder-decoders"
            )

    @cached_property
    def merges_adapters(self) -> bool:
        """Whether the model's adapters, if it has any, can be merged. If not, their own forwards run."""
        return not unmergeable_adapter(self.model)

    @cached_property
    def structure(self) -> Structure:
        """The model's transformer layers, and the other modules that own parameters."""
        return read_structure(self.model)

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The transformer layers, in order."""
        return [part.module for part in self.structure.layers]

    @property
    def text_layers(self) -> list[nn.Module]:
        """The transformer layers that compute token ids, in order: not those of a vision tower."""
        within = set(text_part(self.base).modules())
        return [layer for layer in self.layers if layer in within]

    @cached_property
    def layout(self) -> DecoderLayout | None:
        """The model as its family describes it; None, with the reason in `reasons`, if no family does."""
        return self._read("layout", read_decoder)

    @property
    def is_recurrent(self) -> bool:
        """Whether a family describes the model, with recurrent layers."""
        return self.layout is not None and self.layout.spec.is_recurrent

    @cached_property
    def tp_plan(self) -> TensorPlan | None:
        """Hugging Face's plan for tensor parallelism; None, with the reason in `reasons`, if it cannot be followed."""
        if any(True for _ in quantized_layers(self.model)):
            self.reasons["tp_plan"] = "layers of bitsandbytes do not run on slices"
            return None
        return self._read("tp_plan", read_tp_plan)

    def _read(self, name: str, read: Callable[[nn.Module], Value]) -> Value | None:
        try:
            return read(self.model)
        except UnsupportedModel as reason:
            self.reasons[name] = str(reason)
            return None
