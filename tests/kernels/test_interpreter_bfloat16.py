"""bfloat16 in Triton's interpreter equals torch's."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
import triton
import triton.language as tl

from tests.kernels import interpreter_bfloat16

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled, not interpreted")
interpreter_bfloat16.install()
SIZE = 64


@triton.jit
def _cast_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + SIZE + at, a - b)
    tl.store(out + 2 * SIZE + at, a * b)
    tl.store(out + 3 * SIZE + at, tl.maximum(a, b))
    tl.store(out + 4 * SIZE + at, tl.where(a < b, a, -b))
    tl.store(out + 5 * SIZE + at, tl.abs(a))


@triton.jit
def _matrix_kernel(x, y, product, sums, maxima, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = (tl.load(matrix + at[:, None] * SIZE + at[None, :]) for matrix in (x, y))
    tl.store(product + at[:, None] * SIZE + at[None, :], tl.dot(a, tl.trans(b)))
    tl.store(sums + at, tl.sum(a, 1))
    tl.store(maxima + at, tl.max(a, 1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_casts_round_to_nearest_even():
    """Ties, the largest numbers, subnormal ones and what is not a number."""
    x = numbers(SIZE)
    x[:8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, math.inf, -math.inf, 1e-40, math.nan])
    narrow, wide = torch.empty(SIZE, dtype=torch.bfloat16), torch.empty(SIZE)
    _cast_kernel[(1,)](x, narrow, SIZE=SIZE)
    torch.testing.assert_close(narrow, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    _cast_kernel[(1,)](narrow, wide, SIZE=SIZE)
    torch.testing.assert_close(wide, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
def test_casts_from_and_to_other_types_match_torch(dtype):
    x = (numbers(SIZE) * 300).to(dtype)
    narrow, back = torch.empty(SIZE, dtype=torch.bfloat16), torch.empty(SIZE, dtype=dtype)
    _cast_kernel[(1,)](x, narrow, SIZE=SIZE)
    assert torch.equal(narrow, x.bfloat16())
    _cast_kernel[(1,)](narrow, back, SIZE=SIZE)
    assert torch.equal(back, x.bfloat16().to(dtype))


def test_arithmetic_and_comparisons_match_torch():
    x, y = numbers(2, SIZE).bfloat16()
    out = torch.empty(6, SIZE, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](x, y, out, SIZE=SIZE)
    assert torch.equal(out, torch.stack([x + y, x - y, x * y, x.maximum(y), torch.where(x < y, x, -y), x.abs()]))


def test_products_of_matrices_and_reductions_match_float64():
    x, y = numbers(2, SIZE, SIZE).bfloat16()
    product, (sums, maxima) = torch.empty(SIZE, SIZE), torch.empty(2, SIZE, dtype=torch.bfloat16)
    _matrix_kernel[(1,)](x, y, product, sums, maxima, SIZE=SIZE)
    torch.testing.assert_close(product, (x.double() @ y.double().T).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(sums, x.float().sum(1).bfloat16())
    assert torch.equal(maxima, x.amax(1))


def test_an_interpreter_that_has_changed_is_refused(monkeypatch):
    """Other parameters, or results that need no correction."""
    builder = interpreter_bfloat16.InterpreterBuilder
    corrected = builder.cast_impl
    monkeypatch.setattr(builder, "cast_impl", lambda self, src, dst_type: corrected(self, src, dst_type))
    with pytest.raises(RuntimeError, match="remove"):
        interpreter_bfloat16.install()
    monkeypatch.setattr(builder, "cast_impl", lambda self, source, dst_type: None)
    with pytest.raises(RuntimeError, match=r"cast_impl is not \(self src dst_type\)"):
        interpreter_bfloat16.install()
