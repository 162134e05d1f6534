"""The int8 linear layer in Triton equals the float64 formula: few rows and many, split inputs, groups, strides.

Without a GPU it runs in Triton's interpreter, which cannot do bfloat16 (3.7.1).
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
from hybrid.kernels import triton_int8
from hybrid.kernels.triton_int8 import FEW_ROWS, MIN_INPUTS, int8_linear
from hybrid.weights.int8 import quantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Of the largest sum: the order of float32 sums; half precision rounds once, at the end.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def formula(x, weight, scale, bias) -> torch.Tensor:
    """In float64."""
    wide = weight.double() * scale.double().repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    return x.double() @ wide.T + (0.0 if bias is None else bias.double())


def operands(rows: int, inputs: int, outputs: int, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    values, scale = quantized(torch.randn(outputs, inputs), groups, torch.float32)
    x, bias = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
    return tuple(tensor.to(DEVICE) for tensor in (x, values, scale, bias))


def require_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[actual.dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "groups"),
    [
        (1, 64, 33, 1),
        (3, 2 * MIN_INPUTS + 40, 70, 1),  # two splits, the last block partly masked
        (FEW_ROWS, 4 * MIN_INPUTS, 64, 4),
        (FEW_ROWS + 1, 100, 130, 1),
        (70, 2 * MIN_INPUTS + 40, 130, 1),  # two splits of tiles of 64 rows
        (64, 4 * MIN_INPUTS, 64, 4),
        (70, 96, 20, 3),  # groups of fewer inputs than a block
    ],
)
def test_int8_linear_is_the_formula(rows, inputs, outputs, groups, dtype):
    x, weight, scale, bias = operands(rows, inputs, outputs, groups, dtype)
    for each in (None, bias):
        actual = int8_linear(x, weight, scale, each)
        assert (actual.dtype, actual.shape) == (dtype, (rows, outputs))
        require_close(actual, formula(x, weight, scale, each))


def test_rows_may_be_strided():
    """q, k and v are parts of one product, and its rows are the next product's inputs."""
    x, weight, scale, bias = operands(5, 64, 48, 1, torch.float32)
    wide_x, wide_weight = torch.randn(5, 100, device=DEVICE), torch.full((48, 80), 7, dtype=torch.int8, device=DEVICE)
    wide_x[:, 10:74], wide_weight[:, :64] = x, weight
    actual = int8_linear(wide_x[:, 10:74], wide_weight[:, :64], scale, bias)
    assert torch.equal(actual, int8_linear(x, weight, scale, bias))


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 255, 1000])
def test_programs_are_enough_for_a_gpu(rows, monkeypatch):
    """Of the products of an 8B model: at least 96 of 132 multiprocessors have one, and splits add no wave."""
    grids = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **constants: grids.append((grid, constants["num_warps"]))

    monkeypatch.setattr(triton_int8, "_int8_linear_kernel", Recorded())
    monkeypatch.setattr(triton_int8, "_sum_splits_kernel", mock.MagicMock())
    for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096)):
        x, weight = torch.empty(rows, inputs, dtype=HALF), torch.empty(outputs, inputs, dtype=torch.int8)
        int8_linear(x, weight, torch.empty(outputs, 1))
    for (row_tiles, column_tiles, splits), num_warps in grids:
        programs = row_tiles * column_tiles * splits
        assert programs >= 96
        assert splits == 1 or programs <= 132 * 8 // num_warps


def test_no_rows():
    x, weight, scale, bias = operands(0, 64, 48, 1, torch.float32)
    assert int8_linear(x, weight, scale, bias).shape == (0, 48)


@pytest.mark.parametrize("rows", [2, 64])
def test_splits_are_added_in_their_order(rows, monkeypatch):
    """Equal to the last bit from run to run, and close to the unsplit sum."""
    x, weight, scale, bias = operands(rows, 4 * MIN_INPUTS, 40, 1, torch.float32)
    split = int8_linear(x, weight, scale, bias)
    assert torch.equal(split, int8_linear(x, weight, scale, bias))
    monkeypatch.setattr(triton_int8, "MULTIPROCESSORS", 1)
    whole = int8_linear(x, weight, scale, bias)
    assert not torch.equal(split, whole), "the inputs were not split"
    require_close(split, whole.double())


@pytest.mark.parametrize(
    "wrong",
    [lambda x, w, s: (x, w.float(), s), lambda x, w, s: (x.T.contiguous().T, w, s), lambda x, w, s: (x, w, s.T)],
)
def test_operands_that_the_kernel_cannot_read_are_refused(wrong):
    x, weight, scale, _ = operands(4, 64, 48, 1, torch.float32)
    with pytest.raises(AssertionError):
        int8_linear(*wrong(x, weight, scale))
