"""A whole decoder over int8 weights on Triton kernels."""

import torch

from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.kernels.triton_int8 import int8_linear


class Int8CudaDecoder(Int8Decoder, CudaDecoder):
    """CudaDecoder over int8 weights: they are dequantized as they are multiplied. Experts are not supported."""

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if scale is None:
            return super()._product(x, weight, scale, bias)
        return int8_linear(x, weight, scale, bias)
