"""Host memory of a process, now and at its peak inside a block."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 2**20
M_MMAP_THRESHOLD = -3  # malloc.h
SAMPLE_S = 0.002
# Names in /proc/self/smaps_rollup.
FIGURES = {"anonymous": "Pss_Anon", "shared": "Pss_Shmem", "file": "Pss_File", "proportional": "Pss"}


def memory_now() -> dict[str, int]:
    """Bytes of this process.  A page mapped by n processes counts as 1/n in each (proportional set size), so that sums
    over processes are the machine's memory.

    anonymous: allocated by the process.  file: pages of mapped files, which the kernel may drop."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    values = {key.rstrip(":"): int(value) * 1024 for key, value, *_ in lines}
    return {name: values[key] for name, key in FIGURES.items()}


class PeakMemory:
    """Inside the block a thread samples memory; `figures` gives the peak increase of each figure."""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        self.before = memory_now()
        self.most = dict(self.before)
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.done.wait(SAMPLE_S):
            self.most = {name: max(self.most[name], value) for name, value in memory_now().items()}

    def figures(self) -> dict[str, int]:
        """Peak bytes above those before the block."""
        return {name: value - self.before[name] for name, value in self.most.items()}


@contextmanager
def malloc_returns_memory() -> Iterator[None]:
    """Inside the block malloc returns freed tensors to the system at once, as it does by default above 32 MiB (a matrix
    of a real model); otherwise it keeps smaller ones, which would dominate a small model's figures."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MIB)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 * MIB)


def sum_over_ranks(figures: list[dict[str, int]]) -> dict[str, int]:
    """Figures summed over the ranks."""
    return {name: sum(rank_figures[name] for rank_figures in figures) for name in figures[0]}
