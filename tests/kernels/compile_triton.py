"""Compile every Triton kernel for a GPU architecture, which this machine may lack, and print its resource usage.

python -m tests.kernels.compile_triton 90    # a line of JSON a kernel, for sm_90
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hybrid.kernels import triton_attention, triton_experts, triton_fused, triton_int8, triton_sampling

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiling(arch: int):
    """Replaces a launch: compiles the kernel and prints its name and resource usage.

    As a launch does, it specializes integers that are 1 and those divisible by 16.
    """

    def launch(kernel, *args, grid, warmup, num_warps=4, **constants):
        bound = inspect.signature(kernel.fn).bind(*args, **constants)
        signature, values, hints = {}, {}, {}
        for index, (param, value) in enumerate(zip(kernel.params, bound.arguments.values(), strict=True)):
            specialized = type(value) is int and not param.do_not_specialize
            if param.is_constexpr or (specialized and value == 1):
                signature[param.name], values[index,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name], hints[index,] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
            else:
                signature[param.name] = "i32" if isinstance(value, int) else "fp32"
                if specialized and value % 16 == 0:
                    hints[index,] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, values, hints)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([DISASSEMBLER, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
        usage_of_kernel = {
            "registers": int(registers),
            "stack_bytes": int(stack),
            "shared_bytes": compiled.metadata.shared,
        }
        print(json.dumps({"kernel": kernel.fn.__name__, **usage_of_kernel}), flush=True)

    return launch


def launch_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Decode and prefill attention, plain and with all features."""
    q, blocks = torch.empty(4, 8, head_dim, dtype=dtype), torch.empty(4, 32, 2, head_dim, dtype=dtype)
    lengths, block_tables = torch.empty(4, dtype=torch.int32), torch.empty(4, 128, dtype=torch.int32)
    everything = {"softcap": 50.0, "window": 77, "bias": torch.empty(8, 4096), "rounded": True}
    for features in ({}, everything):
        triton_attention.decode_attention(q, blocks, blocks, lengths, block_tables, 0.1, **features)
        triton_attention.prefill_attention(q, blocks, blocks, lengths, lengths, block_tables, 0.1, **features)


def launch_fused(dtype: torch.dtype) -> None:
    """Rope, norms, activations; head_dim 80 needs masked columns."""
    q, kv, blocks = (torch.empty(4, heads, 80, dtype=dtype) for heads in (32, 2, 2))
    table, slot_mapping = torch.empty(99, 40, dtype=dtype), torch.empty(4, dtype=torch.int64)
    norm = triton_fused.HeadNorm(torch.empty(80, dtype=dtype), torch.empty(80, dtype=dtype), 1e-6)
    for interleaved, head_norm in ((False, None), (True, norm)):
        triton_fused.rope_and_write(
            q, kv, kv, table, table, slot_mapping, slot_mapping, blocks, blocks, interleaved, head_norm
        )
    triton_fused.rope_and_write(q, kv, kv, None, None, slot_mapping, slot_mapping, blocks, blocks)
    x = torch.empty(4, 4096, dtype=dtype)
    triton_fused.add_norm(x, x, x[0], None, 1e-5)
    triton_fused.add_norm(x, None, x[0], None, 1e-5, 1.0, True)
    triton_fused.add_norm(x, x, x[0], x[0], 1e-5, centered=True)
    for activation in triton_fused.ACTIVATIONS:
        triton_fused.gated_activation(x, activation)


def launch_experts(dtype: torch.dtype) -> None:
    """Few tokens per expert, and many."""
    x, weight = torch.empty(1000, 2048, dtype=dtype), torch.empty(8, 1408, 2048, dtype=dtype)
    for items in (16, 1000):
        order, cu_seqlens = torch.empty(items, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
        triton_experts.grouped_linear(x, weight, order, cu_seqlens, 2)


def launch_int8(dtype: torch.dtype) -> None:
    """Few rows, whose inputs are split, and many; a scale per channel, and per group of inputs."""
    weight, bias = torch.empty(4096, 4096, dtype=torch.int8), torch.empty(4096, dtype=dtype)
    for rows in (16, 1000):
        for groups in (1, 32):
            x, scale = torch.empty(rows, 4096, dtype=dtype), torch.empty(4096, groups)
            triton_int8.int8_linear(x, weight, scale)
            triton_int8.int8_linear(x, weight, scale, bias)


def main(arch: int) -> None:
    JITFunction.run = compiling(arch)
    for dtype in (torch.bfloat16, torch.float32):
        launch_fused(dtype)
        launch_experts(dtype)
        launch_int8(dtype)
        for head_dim in (64, 128, 256):
            launch_attention(dtype, head_dim)
    number = torch.empty(4)
    keys, steps = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    triton_sampling.sample(torch.empty(4, 151936), keys, steps, number, number)


if __name__ == "__main__":
    main(int(sys.argv[1]))
