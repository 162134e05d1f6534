"""What inference reads of a model: read once, on first use, and passed down as one record."""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ModelInfo:
    """A model, PEFT's wrapper included, and what is read of it. Each property is read on first use and kept.

    Read the model again, into a new record, once its modules, its adapters or the dtype of its weights have changed.
    """

    model: nn.Module

    @cached_property
    def base(self) -> nn.Module:
        """The Hugging Face model, without PEFT's wrapper."""
        return hugging_face_model(self.model)

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """The Hugging Face configuration of the part that generates text; None if the model has none."""
        config = getattr(self.base, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

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

    @property
    def layout(self) -> DecoderLayout | None:
        """The model as its family describes it; None if no family does."""
        return self._layout[0]

    @property
    def no_layout(self) -> str:
        """Why there is no `layout`; "" if there is one."""
        return self._layout[1]

    @property
    def tp_plan(self) -> TensorPlan | None:
        """Hugging Face's plan for tensor parallelism; None if there is none that can be followed."""
        return self._tp_plan[0]

    @property
    def no_tp_plan(self) -> str:
        """Why there is no `tp_plan`; "" if there is one."""
        return self._tp_plan[1]

    @cached_property
    def _layout(self) -> tuple[DecoderLayout | None, str]:
        return value_or_reason(read_decoder, self.model)

    @cached_property
    def _tp_plan(self) -> tuple[TensorPlan | None, str]:
        return value_or_reason(read_tp_plan, self.model)


def value_or_reason(read: Callable[[nn.Module], Value], model: nn.Module) -> tuple[Value | None, str]:
    """What `read` gives for the model and "", or None and the message of its UnsupportedModel."""
    try:
        return read(model), ""
    except UnsupportedModel as reason:
        return None, str(reason)
