"""Selects the decoder over whole weights that is fastest on their device and reads their dtype."""

from collections.abc import Sequence

import torch
from torch import nn

from hybrid.decoders.bound_weights import BoundWeights
from hybrid.decoders.cpu_decoder import CpuDecoder, Workspace, reads_int8
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.decoders.torch_decoder import Copies, TorchDecoder
from hybrid.kernels import has_triton
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.spec import DecoderLayout
from hybrid.weights.int8 import int8_weights

WholeDecoder = CpuDecoder | TorchDecoder  # a CudaDecoder is a TorchDecoder
CPU_KERNELS, TRITON, TORCH = "CPU kernels", "Triton", "torch's operations"
Int8Weights = Sequence[tuple[torch.Tensor, torch.Tensor]]  # weights, each with its scales


def kernels_for(weight: torch.Tensor, int8: Int8Weights = ()) -> str:
    """What a decoder over whole weights computes with: CPU_KERNELS, TRITON or TORCH.

    weight: any weight that is not int8; it may be partitioned.  int8: the model's int8 weights.
    """
    floats = weight.dtype in (torch.float32, torch.bfloat16)
    if weight.device.type == "cpu" and floats and cpu_library() is not None and reads_int8(int8):
        return CPU_KERNELS
    return TRITON if weight.device.type == "cuda" and has_triton() and not int8 else TORCH


class DecoderSelection:
    """Makes a model's decoders over whole weights, on the kernels that `kernels_for` selects.

    modules: all modules of the model.
    max_capture_size: decode steps of up to so many rows are CUDA graphs; 0: no graphs.
    """

    def __init__(self, modules: list[nn.Module], max_capture_size: int):
        self.modules, self.max_capture_size = modules, max_capture_size
        self.workspace = Workspace()  # shared by CpuDecoders

    def int8_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's int8 weights, each with its scales."""
        return [pair for module in self.modules for pair in int8_weights(module)]

    def decoder(self, layout: DecoderLayout, weights: BoundWeights, copies: Copies | None = None) -> WholeDecoder:
        """A decoder in the embedding's dtype, over whole weights.  copies: as TorchDecoder's."""
        embedding, int8 = weights.embedding(), self.int8_weights()
        kernels, reads = kernels_for(embedding, int8), (layout, weights.tensor, embedding.dtype)
        if kernels == CPU_KERNELS:
            return CpuDecoder(*reads, cpu_library(), weights.lora_deltas, copies, self.workspace)
        if kernels == TRITON:
            from hybrid.decoders.cuda_decoder import CudaDecoder  # needs triton, which a CPU install lacks

            return CudaDecoder(*reads, self.max_capture_size, lora_deltas=weights.lora_deltas, copies=copies)
        return Int8Decoder(*reads) if int8 else TorchDecoder(*reads, weights.lora_deltas, copies)
