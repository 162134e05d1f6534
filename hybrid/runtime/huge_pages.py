"""Huge pages for CPU memory that every decode step reads whole: Linux gives them on request (`man 2 madvise`).

With pages of 4 KiB, steps that read hundreds of MiB wait for the translation of addresses; LOG.md has the measurements.
"""

import ctypes
import sys

import torch

HUGE_PAGE = 2 << 20  # bytes, where a page has 4 KiB
HUGEPAGE, COLLAPSE = 14, 25  # of <linux/mman.h>: MADV_HUGEPAGE, and MADV_COLLAPSE (Linux 6.1)
MIN_BYTES = HUGE_PAGE // 4  # of a tensor, so that neighbours in its huge pages cost little


def request_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for new CPU memory, before it is first written; returns the tensor."""
    _advise(tensor, HUGEPAGE)
    return tensor


def collapse(tensor: torch.Tensor) -> None:
    """Move a CPU tensor's content to huge pages; its address and bytes stay. At first it takes up to 2 s a GB."""
    _advise(tensor, COLLAPSE)


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Give the advice for each huge page that the tensor touches. What the system refuses stays as it is."""
    if tensor.device.type != "cpu" or sys.platform != "linux" or tensor.nbytes < MIN_BYTES:
        return
    madvise, first = ctypes.CDLL(None).madvise, tensor.data_ptr() // HUGE_PAGE
    for page in range(first, -(-(tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE)):
        madvise(ctypes.c_void_p(page * HUGE_PAGE), ctypes.c_size_t(HUGE_PAGE), advice)
