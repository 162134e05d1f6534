"""Kernels of the decoders: torch, C++ for CPUs, Triton and CUDA graphs for GPUs. Model-independent."""

import importlib.util

import torch


def has_triton() -> bool:
    """Whether Triton is installed: torch's CUDA builds depend on it, its CPU builds do not."""
    return importlib.util.find_spec("triton") is not None


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 matrices fast: on a CPU, whether oneDNN has kernels for its instructions."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def require_contiguous(device: torch.device, dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """Assert dtype, device and contiguity of tensors that a kernel reads by address."""
    for tensor in tensors:
        assert tensor.dtype == dtype, f"the kernel reads {dtype}, not {tensor.dtype}"
        assert tensor.device == device, f"the kernel runs on {device}, and a tensor is on {tensor.device}"
        assert tensor.is_contiguous(), "the kernel reads contiguous tensors"
