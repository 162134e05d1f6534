"""Selects the decoder over whole weights that is fastest on their device and reads their dtype."""

from collections.abc import Sequence

import torch
from deepspeed.utils.logging import warning_once
from torch import nn

from hybrid.decoders.cpu_decoder import CpuDecoder, Workspace, reads_int8
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.decoders.torch_decoder import Copies, TorchDecoder, WholeDecoder
from hybrid.kernels import has_triton
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.spec import DecoderLayout
from hybrid.weights.int8 import int8_weights

CPU_KERNELS, TRITON, TORCH = "CPU kernels", "Triton", "torch's operations"
SLOW_INT8 = (
    "int8 weights save memory on this CPU, but they are slower: AMX multiplies bfloat16, to which they are converted "
    "first. Measured: 0.80 to 0.93 of bfloat16's tokens a second. For speed use the model's dtype "
    '(rollout.weight_dtype: "model", or dtype="bf16").'
)
Int8Weights = Sequence[tuple[torch.Tensor, torch.Tensor]]  # weights, each with its scales


def kernels_for(weight: torch.Tensor, int8: Int8Weights = ()) -> str:
    """Return the kernels of a decoder over whole weights: CPU_KERNELS, TRITON or TORCH.

    weight: any weight that is not int8; it may be partitioned.  int8: the model's int8 weights.
    """
    floats = weight.dtype in (torch.float32, torch.bfloat16)
    if weight.device.type == "cpu" and floats and cpu_library() is not None and reads_int8(int8):
        return CPU_KERNELS
    experts = any(values.dim() > 2 for values, _ in int8)  # the kernel of a mixture multiplies floating point alone
    return TRITON if weight.device.type == "cuda" and has_triton() and not experts else TORCH


def int8_weights_of(model: nn.Module) -> Int8Weights:
    """Return the model's int8 weights, each with its scales."""
    return [pair for module in model.modules() for pair in int8_weights(module)]


def whole_decoder(
    layout: DecoderLayout,
    weights: DecoderWeights,
    int8: Int8Weights,
    max_capture_size: int,
    workspace: Workspace,
    copies: Copies | None = None,
    flashinfer: bool = False,
    batch_invariant: bool = False,
) -> WholeDecoder:
    """Return a decoder in the embedding's dtype, over whole weights, on the kernels that `kernels_for` selects.

    int8: the model's int8 weights.  max_capture_size, flashinfer, batch_invariant: as CudaDecoder's.
    workspace, copies: as CpuDecoder's.
    """
    embedding = weights.embedding()
    kernels, reads = kernels_for(embedding, int8), (layout, weights.tensor, embedding.dtype)
    if kernels == CPU_KERNELS:
        if int8 and embedding.dtype == torch.bfloat16 and cpu_library().multiplies_in_tiles():
            warning_once(SLOW_INT8)
        return CpuDecoder(*reads, cpu_library(), weights.lora_deltas, copies, workspace)
    if kernels == TRITON:
        from hybrid.decoders.cuda_decoder import CudaDecoder, Int8CudaDecoder  # need triton, which a CPU install lacks

        if int8:
            return Int8CudaDecoder(*reads, max_capture_size, copies=copies, flashinfer=flashinfer)
        return CudaDecoder(
            *reads,
            max_capture_size,
            lora_deltas=weights.lora_deltas,
            copies=copies,
            flashinfer=flashinfer,
            batch_invariant=batch_invariant,
        )
    return Int8Decoder(*reads) if int8 else TorchDecoder(*reads, weights.lora_deltas, copies)
