"""Threads' shares of a product, of more threads than a machine has: they cover it once, are even, and read little."""

import pytest
import torch

from hybrid.kernels.cpu_library import address, cpu_library

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")


def shares_of(rows: int, columns: int, threads: int, bfloat16: bool) -> list[tuple[int, int, int, int]]:
    """Every thread's first and last row of x, and first and last column of y."""
    shares = []
    for thread in range(threads):
        share = torch.zeros(4, dtype=torch.int64)
        cpu_library().product_share(bfloat16, rows, columns, thread, threads, address(share, torch.int64))
        shares.append(tuple(share.tolist()))
    return shares


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 8, 16, 48, 64])
def test_shares_of_a_product_cover_it_once(threads, bfloat16):
    for rows in (1, 5, 64, 300, 2048):
        for columns in (1, 30, 97, 768, 4096):
            counts = torch.zeros(rows, columns, dtype=torch.int8)
            for top, bottom, left, right in shares_of(rows, columns, threads, bfloat16):
                counts[top:bottom, left:right] += 1
            assert (counts == 1).all(), f"{rows} x {columns}"


# Outputs of the matrices of Qwen2.5-0.5B and Mistral-7B: q, k and v; o and down; gate and up.
OUTPUTS = (1152, 896, 9728, 6144, 4096, 28672)


@pytest.mark.parametrize("threads", [8, 16, 32, 64])
def test_shares_of_a_product_are_even_and_read_little(threads):
    """The largest share is little more than the mean. With many rows a thread reads less of x and W together than by
    columns alone."""
    for outputs in OUTPUTS:
        for rows in (1, 64, 2048):
            shares = shares_of(rows, outputs, threads, bfloat16=True)
            areas = [(bottom - top) * (right - left) for top, bottom, left, right in shares]
            # 64 threads have 14 of 896 columns each, and a tile of AMX has 32.
            assert max(areas) <= 1.35 * rows * outputs / threads or outputs / threads < 64, (rows, outputs)
            read = max(4 * (bottom - top) + 2 * (right - left) for top, bottom, left, right in shares)
            widest = max(right - left for *_, left, right in shares_of(1, outputs, threads, bfloat16=True))
            by_columns = 4 * rows + 2 * widest  # a single row is divided by columns alone
            assert read <= 1.5 * by_columns, (rows, outputs)
            if rows == 2048 and threads >= 16 and outputs <= 4096:
                assert read < 0.6 * by_columns, (rows, outputs)
