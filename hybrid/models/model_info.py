"""What inference reads of a model: read once, on first use, and passed down as one record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from torch import nn
from transformers import PretrainedConfig

from hybrid.models.modules import hugging_face_model
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

    def size(self, name: str) -> int:
        """A size in `text_config`, such as "vocab_size"; 0 if it has none."""
        return getattr(self.text_config, name, None) or 0

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model's prompt and completion are two sequences."""
        return getattr(self.config, "is_encoder_decoder", False)

    @cached_property
    def can_generate(self) -> bool:
        """Whether the model has a working `generate`."""
        return can_generate(self.model)

    @cached_property
    def structure(self) -> Structure:
        """The model's transformer layers, and the other modules that own parameters."""
        return read_structure(self.model)

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The transformer layers, in order."""
        return [part.module for part in self.structure.layers]

    @cached_property
    def layout(self) -> DecoderLayout | None:
        """The model as its family describes it; None, with the reason in `reasons`, if no family does."""
        return self._read("layout", read_decoder)

    @cached_property
    def tp_plan(self) -> TensorPlan | None:
        """Hugging Face's plan for tensor parallelism; None, with the reason in `reasons`, if it cannot be followed."""
        return self._read("tp_plan", read_tp_plan)

    def _read(self, name: str, read: Callable[[nn.Module], Value]) -> Value | None:
        try:
            return read(self.model)
        except UnsupportedModel as reason:
            self.reasons[name] = str(reason)
            return None
