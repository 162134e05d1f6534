"""Arithmetic on tensors: what a decoder is computed with on each kind of machine. Knows nothing of models."""

import importlib.util


def has_triton() -> bool:
    """Whether Triton's kernels can be made here: torch's CUDA builds bring triton, its CPU builds do not."""
    return importlib.util.find_spec("triton") is not None
