"""Arithmetic on tensors: what a decoder is computed with on each kind of machine. Knows nothing of models."""

import importlib.util

import torch


def has_triton() -> bool:
    """Whether Triton's kernels can be made here: torch's CUDA builds bring triton, its CPU builds do not."""
    return importlib.util.find_spec("triton") is not None


def require_contiguous(device: torch.device, dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """Assert what a kernel that reads tensors by their addresses relies on."""
    for tensor in tensors:
        assert tensor.dtype == dtype, f"the kernel reads {dtype}, not {tensor.dtype}"
        assert tensor.device == device, f"the kernel runs on {device}, and a tensor is on {tensor.device}"
        assert tensor.is_contiguous(), "the kernel reads contiguous tensors"
