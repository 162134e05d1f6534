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

from hybrid.kernels import triton_attention, triton_experts, triton_fused, triton_sampling
from hybrid.kernels.kv_addresses import LayerKV

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiling(arch: int):
    """Replaces a launch: compiles the kernel and prints its name and resource usage.

    As a launch does, it specializes integers that are 1 and those divisible by 16.
    """

    def launch(kernel, *args, grid, warmup, num_warps=4, num_stages=3, **constants):
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
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
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


def launch_attention(dtype: torch.dtype, head_dim: int, group: int, arch: int) -> None:
    """Decode and prefill attention, plain and with all features; decode steps with one split and with several."""
    kv = LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 2, head_dim)
    # Queries are a slice of the product for queries, keys and values.
    q = torch.empty(4, 2 * group + 4, head_dim, dtype=dtype)[:, : 2 * group]
    lengths, block_tables = torch.empty(4, dtype=torch.int32), torch.empty(4, 128, dtype=torch.int32)
    workspace = triton_attention.split_workspace(group, head_dim, q.device)
    everything = {"softcap": 50.0, "window": 77, "bias": torch.empty(2 * group, 4096), "rounded": True}
    for features in ({}, everything):
        for splits in (1, 16):
            triton_attention.decode_attention(
                q, kv, lengths, block_tables, workspace, 0.1, **features, splits=splits, arch=arch
            )
        triton_attention.prefill_attention(q, kv, lengths, lengths, block_tables, 0.1, **features, arch=arch)


def launch_fused(dtype: torch.dtype) -> None:
    """Rope, norms, activations; head_dim 80 needs masked columns."""
    q, k = (torch.empty(4, heads, 80, dtype=dtype) for heads in (32, 2))
    kv = LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 2, 80)
    table, slot_mapping = torch.empty(99, 40, dtype=dtype), torch.empty(4, dtype=torch.int64)
    norm = triton_fused.QKNorm(torch.empty(80, dtype=dtype), torch.empty(80, dtype=dtype), 1e-6)
    for interleaved, head_norm in ((False, None), (True, norm)):
        triton_fused.rope_and_write(q, k, k, table, table, slot_mapping, slot_mapping, kv, interleaved, head_norm)
    triton_fused.rope_and_write(q, k, k, None, None, slot_mapping, slot_mapping, kv)
    x = torch.empty(4, 4096, dtype=dtype)
    triton_fused.add_norm(x, x, x[0], None, 1e-5)
    triton_fused.add_norm(x, None, x[0], None, 1e-5, 1.0, True)
    triton_fused.add_norm(x, x, x[0], x[0], 1e-5, centered=True)
    triton_fused.add_norm(x, x, x[0], None, 1e-5, 1.0, True, post_weight=x[0])
    triton_fused.add_norm(x, x, None, None, 1e-5, float32_weight=True, post_weight=x[0])
    for activation in triton_fused.ACTIVATIONS:
        for gated in (False, True):
            triton_fused.activated(x, activation, gated)


def launch_experts(dtype: torch.dtype) -> None:
    """Few tokens per expert, and many."""
    x, weight = torch.empty(1000, 2048, dtype=dtype), torch.empty(8, 1408, 2048, dtype=dtype)
    for items in (16, 1000):
        order, cu_seqlens = torch.empty(items, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
        triton_experts.grouped_linear(x, weight, order, cu_seqlens, 2)


def main(arch: int) -> None:
    JITFunction.run = compiling(arch)
    for dtype in (torch.bfloat16, torch.float32):
        launch_fused(dtype)
        launch_experts(dtype)
        for head_dim in (64, 128, 256):
            launch_attention(dtype, head_dim, 4, arch)
    number = torch.empty(4)
    keys, steps = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    triton_sampling.sample(torch.empty(4, 151936), keys, steps, number, number)


if __name__ == "__main__":
    main(int(sys.argv[1]))
