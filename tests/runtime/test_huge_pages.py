"""Huge pages: Linux says in /proc/self/smaps which memory has them."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from hybrid.runtime.huge_pages import HUGE_PAGE, collapse, request_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 8 * HUGE_PAGE
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not ENABLED.exists() or "[never]" in ENABLED.read_text(),
    reason="this system gives no huge pages",
)


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes in huge pages of the mappings that the tensor lies in."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in match.groups())
            inside = first < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def new_memory() -> torch.Tensor:
    """Memory that no allocator had before: its pages, small or huge, would stay."""
    return torch.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def test_new_memory_gets_huge_pages():
    tensor = request_huge_pages(new_memory())
    tensor.fill_(7)
    if not huge_bytes(tensor):
        pytest.skip("this system has no huge pages left")
    assert huge_bytes(tensor) >= SIZE - 2 * HUGE_PAGE
    assert (tensor == 7).all()


def test_memory_in_use_moves_with_its_bytes_and_address():
    tensor = new_memory().random_(256)
    before, address, huge = tensor.clone(), tensor.data_ptr(), huge_bytes(tensor)
    collapse(tensor)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, before)
    if huge_bytes(tensor) == huge:
        pytest.skip("this kernel has no MADV_COLLAPSE (Linux 6.1), or no huge pages left")
    assert huge_bytes(tensor) - huge >= SIZE - 2 * HUGE_PAGE


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.ones(3), torch.empty(1 << 22, device="meta")])
def test_small_and_other_memory_is_left_alone(tensor):
    assert request_huge_pages(tensor) is tensor
    collapse(tensor)
