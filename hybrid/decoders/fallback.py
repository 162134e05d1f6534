"""Reasons for running a model's own layers, and one warning per reason."""

import warnings
from collections.abc import Callable

import torch

from hybrid.models.model_info import ModelInfo
from hybrid.models.modules import native_adapter
from hybrid.models.quantized import narrow_reason
from hybrid.models.spec import DecoderSpec
from hybrid.runtime.parallel import rank

DECODER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MERGED_ADAPTERS = "fused are adapters that can be merged: LoRA, and whole modules by PEFT's modules_to_save"
NO_WARNING = "rollout.containers=native, or replace_with_kernel_inject=false, runs so without this warning"


def no_decoder_reason(info: ModelInfo, embedding: Callable[[], torch.Tensor]) -> str:
    """Return why no fused decoder can run a model, and what the user can do about it; "" if one may.

    embedding: gives the embedding weight of a model with a layout.
    """
    if info.layout is None:
        remedy = (
            MERGED_ADAPTERS if native_adapter(info.model) else "hybrid/models/README.md shows how a family is added"
        )
        return f"{info.reasons['layout']} ({remedy}; {NO_WARNING})"
    if (dtype := embedding().dtype) not in DECODER_DTYPES:
        return (
            f"its weights are {dtype}, and decoders compute in float32, bfloat16 and float16 (cast the model to "
            f"one of these; {NO_WARNING})"
        )
    if reason := narrow_reason(info.model):
        return f"{reason} (load the model in bnb_4bit_compute_dtype, or set that to the model's dtype; {NO_WARNING})"
    return ""


def no_triton_reason(spec: DecoderSpec, dtype: torch.dtype) -> str:
    """Return what a decoder in `dtype` lacks Triton kernels for; "" if it has all."""
    if spec.value_dim and not spec.latent_dim:
        return "values of another size than keys have no kernels for GPUs yet"
    if spec.residual_float32 and dtype != torch.float32:
        return "a residual stream in float32 has no kernels for GPUs yet"
    return ""


class FallbackReasons:
    """Reasons why requests of one engine ran natively. Each reason is warned about once, on rank 0.

    last: the latest reason since `reset()`; "" if no request ran natively.
    """

    def __init__(self) -> None:
        self.last = ""
        self.warned: set[str] = set()

    def note(self, reason: str, warns: bool = True) -> None:
        """Record that a request runs natively.

        reason: why, and what the user can do about it.  warns: False if the user asked for it.
        """
        self.last = reason
        if warns and reason not in self.warned:
            self.warned.add(reason)
            if rank() == 0:
                warnings.warn(f"the model runs in native containers: {reason}", stacklevel=4)

    def reset(self) -> None:
        """Clear the latest reason at the start of an iteration."""
        self.last = ""
