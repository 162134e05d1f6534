"""bfloat16 in Triton's interpreter, as a device computes it: arithmetic in float32, rounded to nearest even.

The interpreter keeps bfloat16 as the bits of 16-bit integers, and computes with these integers; casts from float32
truncate (triton 3.7.1). `install` corrects casts, arithmetic, comparisons, products of matrices, reductions and scans
for the rest of the process. It raises if the interpreter has other functions than those that it replaces, or if they
compute bfloat16 already.
"""

import inspect
from collections.abc import Callable
from functools import wraps

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

# The functions that are replaced, with their parameters.
REPLACED = {
    (InterpreterBuilder, "cast_impl"): "self src dst_type",
    (InterpreterBuilder, "create_fp_to_fp"): "self src dst_type rounding_mode",
    (InterpreterBuilder, "binary_op"): "self lhs rhs op",
    (InterpreterBuilder, "ternary_op"): "self lhs rhs other op",
    (InterpreterBuilder, "unary_op"): "self arg op",
    (InterpreterBuilder, "create_fma"): "self x y z",
    (InterpreterBuilder, "create_erf"): "self arg",
    (InterpreterBuilder, "create_rsqrt"): "self arg",
    (InterpreterBuilder, "create_dot"): "self a b d input_precision max_num_imprecise_acc",
    (ReduceScanOpInterface, "apply"): "self input",
}


def install() -> None:
    """Correct the interpreter; does nothing in a process that compiles kernels, or the second time."""
    if not triton.knobs.runtime.interpret or hasattr(InterpreterBuilder.cast_impl, "corrects"):
        return
    for (owner, name), parameters in REPLACED.items():
        function = getattr(owner, name, None)
        if function is None or " ".join(inspect.signature(function).parameters) != parameters:
            raise RuntimeError(
                f"triton {triton.__version__}: {owner.__name__}.{name} is not ({parameters}); adapt {__name__}"
            )
    if not is_wrong(InterpreterBuilder()):
        raise RuntimeError(f"triton {triton.__version__} computes bfloat16 in its interpreter; remove {__name__}")
    for owner, name in REPLACED:
        corrected = (
            reduced if owner is ReduceScanOpInterface else cast if "dst_type" in REPLACED[owner, name] else computed
        )
        replacement = corrected(getattr(owner, name))
        replacement.corrects = True
        setattr(owner, name, replacement)


def is_wrong(builder: InterpreterBuilder) -> bool:
    """Whether a cast truncates, and a sum and a product of matrices are those of bits."""
    cast_wrong = builder.cast_impl(handle(np.array([1 + 3 * 2.0**-9])), tl.bfloat16).data.item() == 0x3F80
    ones = TensorHandle(np.full((1, 1), 0x3F80, np.uint16), tl.bfloat16)
    sum_wrong = builder.create_fadd(ones, ones).data.item() == 2 * 0x3F80
    dot = builder.create_dot(ones, ones, handle(np.zeros((1, 1))), None, 0)
    return cast_wrong and sum_wrong and dot.data.item() == 0x3F80**2


def handle(data: np.ndarray) -> TensorHandle:
    """Numbers as the interpreter holds float32."""
    return TensorHandle(np.asarray(data, np.float32), tl.float32)


def is_bfloat16(x: object) -> bool:
    """Whether x is a TensorHandle of bfloat16."""
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def widened(x: object) -> object:
    """x in float32 if it is a TensorHandle of bfloat16, which is exact; anything else as it is."""
    if not is_bfloat16(x):
        return x
    bits = np.ascontiguousarray(x.data).astype(np.uint32) << 16
    return handle(bits.view(np.float32).reshape(x.data.shape))


def rounded(x: TensorHandle) -> TensorHandle:
    """Numbers rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    numbers = np.ascontiguousarray(x.data, dtype=np.float32)
    bits = numbers.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(
        np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16).reshape(x.data.shape), tl.bfloat16
    )


def cast(function: Callable) -> Callable:
    """`cast_impl` and `create_fp_to_fp`, by way of float32 from and to bfloat16."""

    @wraps(function)
    def corrected(self, src, dst_type, *rounding_mode):
        if dst_type.scalar != tl.bfloat16:
            wide = widened(src)
            is_done = is_bfloat16(src) and dst_type.scalar == tl.float32
            return wide if is_done else function(self, wide, dst_type, *rounding_mode)
        if rounding_mode not in ((), (None,), (interpreter._ir.ROUNDING_MODE.RTNE,)):
            raise NotImplementedError("bfloat16 is rounded to nearest even only")
        return src if is_bfloat16(src) else rounded(src)

    return corrected


def computed(function: Callable) -> Callable:
    """Operations on TensorHandles in float32: numbers are rounded to bfloat16 if the last operand is of it.

    The last operand of a product of matrices is its accumulator.
    """

    @wraps(function)
    def corrected(self, *arguments):
        operands = [argument for argument in arguments if isinstance(argument, TensorHandle)]
        if not any(map(is_bfloat16, operands)):
            return function(self, *arguments)
        result = function(self, *map(widened, arguments))
        return rounded(result) if is_bfloat16(operands[-1]) and result.data.dtype != bool else result

    return corrected


def reduced(function: Callable) -> Callable:
    """Reductions and scans in float32, rounded once at the end; a device may round every step."""

    @wraps(function)
    def corrected(self, input):
        if not isinstance(input, tuple):
            return corrected(self, (input,))[0]
        results = function(self, tuple(tensor_of(widened(x.handle), x) if is_bfloat16(x.handle) else x for x in input))
        return tuple(
            tensor_of(rounded(result.handle), result)
            if is_bfloat16(x.handle) and result.dtype == tl.float32
            else result
            for x, result in zip(input, results, strict=False)
        )

    return corrected


def tensor_of(data: TensorHandle, like: tl.tensor) -> tl.tensor:
    """A tensor of this data with the shape of `like`."""
    return tl.tensor(data, tl.block_type(data.dtype, list(like.shape)) if like.type.is_block() else data.dtype)
