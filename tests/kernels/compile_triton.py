"""Compile every Triton kernel for a GPU architecture, which this machine may lack, and print its resource usage.

python -m tests.kernels.compile_triton 90 128    # attention with heads of 128 for sm_90: a line of JSON a kernel
python -m tests.kernels.compile_triton 90        # all other kernels
python -m tests.kernels.compile_triton 0         # all other kernels, arguments only: compiles and prints nothing
"""

import inspect
import io
import itertools
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hybrid.kernels import (
    triton_attention,
    triton_decode,
    triton_experts,
    triton_fused,
    triton_int8,
    triton_latent,
    triton_linear,
    triton_sampling,
    triton_scoring,
)
from hybrid.kernels.kv_addresses import LayerKV
from hybrid.kernels.recurrent import RecurrentMixer
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.torch_mamba2 import Mamba2
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.kernels.triton_delta_net import delta_net, kimi_delta
from hybrid.kernels.triton_mamba2 import mamba2
from hybrid.kernels.triton_recurrent import KernelLayer, StateTables, short_conv
from hybrid.kernels.triton_sampling import SamplingFeatures

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
# Instructions that show how a kernel reads and multiplies.
INSTRUCTIONS = {
    "async_copies_of_16_bytes": r"cp\.async\.cg\.shared\.global[^\n]*, 0x10",
    "async_copies": r"cp\.async\.c[ag]\.",
    "loads_of_16_bytes": r"ld\.global[.\w:]*\.v4",
    "mma": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "m16n8k16": r"mma\.sync[.\w]*\.m16n8k16",
    "m64n128k16": r"wgmma\.mma_async[.\w:]*\.m64n128k16",
}


def compiling(arch: int):
    """Replaces a launch: compiles the kernel and prints its name, its case and its resource usage; arch 0: nothing.

    As a launch does, it specializes integers that are 1 and those divisible by 16.
    """

    def launch(kernel, *args, grid, warmup, num_warps=4, num_stages=3, maxnreg=None, **constants):
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
        if not arch:
            return
        source = ASTSource(kernel, signature, values, hints)
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        triton.knobs.nvidia.dump_ptxas_log = True
        log = io.StringIO()
        with redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        if not log.getvalue():  # the same code as before
            return
        usage = {
            "registers": int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
            "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))),
            "shared_bytes": compiled.metadata.shared,
        }
        usage |= {name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()}
        case = {
            name: value for name, value in constants.items() if name in ("HEAD_DIM", "GROUP", "NUM_SPLITS", "BLOCK")
        }
        tensor = next(value for value in bound.arguments.values() if isinstance(value, torch.Tensor))
        case |= {"dtype": TYPES[tensor.dtype], "num_warps": num_warps, "num_stages": num_stages}
        print(json.dumps({"kernel": kernel.fn.__name__, **case, **usage}), flush=True)

    return launch


# Features of models: plain, Gemma 2's and BLOOM's. Falcon's ALiBi has groups.
FEATURES = {
    "plain": {},
    "soft cap": {"softcap": 50.0, "window": 77, "rounded": True},
    "bias": {"bias": True, "rounded": True},
    "sinks": {"sinks": True, "window": 128},
}


def launch_attention(dtype: torch.dtype, head_dim: int, group: int, feature: str, arch: int) -> None:
    """Prefill and decode steps, with two KV heads; in a group of four also a decode step with one split."""
    kv = LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 2, head_dim)
    # Queries are a slice of the product for queries, keys and values.
    q = torch.empty(4, 2 * group + 4, head_dim, dtype=dtype)[:, : 2 * group]
    lengths, block_tables = torch.empty(4, dtype=torch.int32), torch.empty(4, 128, dtype=torch.int32)
    workspace, features = triton_attention.split_workspace(group, head_dim, q.device), dict(FEATURES[feature])
    if "bias" in features:
        features["bias"] = torch.empty(2 * group, 4096)
    if "sinks" in features:
        features["sinks"] = torch.empty(2 * group, dtype=dtype)
    for splits in (1, 16) if group == 4 else (16,):
        blocks = (lengths, block_tables, workspace)
        triton_attention.decode_attention(q, kv, *blocks, 0.1, **features, splits=splits, arch=arch)
    triton_attention.prefill_attention(q, kv, lengths, lengths, block_tables, 0.1, **features, arch=arch)


def launch_all_attention(head_dim: int, arch: int) -> None:
    """Attention with the groups and features of models."""
    for group in (1, 4, 7, 8):
        launch_attention(torch.bfloat16, head_dim, group, "plain", arch)
    if head_dim > 256:  # no model with such heads has more
        return
    launch_attention(torch.bfloat16, head_dim, 2, "soft cap", arch)
    launch_attention(torch.bfloat16, head_dim, 8, "sinks", arch)
    for group in (1, 4):
        launch_attention(torch.bfloat16, head_dim, group, "bias", arch)
    launch_attention(torch.float32, head_dim, 7, "plain", arch)
    launch_attention(torch.float32, head_dim, 4, "bias", arch)


def launch_latent_attention(dtype: torch.dtype, heads: int, arch: int) -> None:
    """DeepSeek V3's sizes: latents of 512 and keys of 64 more, with several splits and one, and what is before."""
    cache = LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 1, 576)
    numbers, tables = torch.empty(4, dtype=torch.int32), torch.empty(4, 128, dtype=torch.int32)
    q, kv = torch.empty(4, heads, 192, dtype=dtype), torch.empty(4, 576, dtype=dtype)
    table, slot_mapping, weight = torch.empty(99, 32, dtype=dtype), torch.empty(4, dtype=torch.int64), kv[0, :512]
    for interleaved in (False, True):
        triton_latent.latent_and_rope(
            kv, q, weight, table, table, numbers, slot_mapping, cache, 1e-6, interleaved=interleaved
        )
    q, q_rope = torch.empty(heads, 4, 512, dtype=dtype).transpose(0, 1), torch.empty(4, heads, 64, dtype=dtype)
    workspace = triton_attention.split_workspace(triton_attention.heads_of_program(heads, dtype), 512, q.device)
    for splits in (1, 4):  # the workspace is of fewer than twice the multiprocessors
        blocks = numbers, tables, workspace
        triton_attention.decode_attention(q, cache, *blocks, 0.1, q_rope=q_rope, splits=splits, arch=arch)
    triton_attention.prefill_attention(q, cache, numbers, numbers, tables, 0.1, q_rope=q_rope, arch=arch)


def launch_fused(dtype: torch.dtype) -> None:
    """Rope, norms, activations; head_dim 80 needs masked columns."""
    q, k = (torch.empty(4, heads, 80, dtype=dtype) for heads in (32, 2))
    kv = LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 2, 80)
    table, slot_mapping = torch.empty(99, 40, dtype=dtype), torch.empty(4, dtype=torch.int64)
    norm = triton_fused.QKNorm(torch.empty(80, dtype=dtype), torch.empty(80, dtype=dtype), 1e-6)
    for interleaved, head_norm in ((False, None), (True, norm)):
        triton_fused.rope_and_write(q, k, k, table, table, slot_mapping, slot_mapping, kv, interleaved, head_norm)
    triton_fused.rope_and_write(q, k, k, None, None, slot_mapping, slot_mapping, kv)
    norm = triton_fused.QKNorm(torch.empty(32 * 80, dtype=dtype), torch.empty(2 * 80, dtype=dtype), 1e-6)
    triton_fused.rope_and_write(q, k, k, table, table, slot_mapping, slot_mapping, kv, norm=norm)
    x = torch.empty(4, 4096, dtype=dtype)
    triton_fused.add_norm(x, x, x[0], None, 1e-5)
    triton_fused.add_norm(x, None, x[0], None, 1e-5, 1.0, True)
    triton_fused.add_norm(x, x, x[0], x[0], 1e-5, centered=True)
    triton_fused.add_norm(x, x, x[0], None, 1e-5, 1.0, True, post_weight=x[0])
    triton_fused.add_norm(x, x, None, None, 1e-5, float32_weight=True, post_weight=x[0])
    for activation in triton_fused.ACTIVATIONS:
        for gated in (False, True):
            triton_fused.activated(x, activation, gated)
    triton_fused.activated(x, triton_fused.CLAMPED, True, 1.702, 7.0)
    # Qwen3.5's queries, each head with its gate behind it; and a gate of a head.
    q, gate = torch.empty(4, 16, 2, 256, dtype=dtype).unbind(2)
    k, kv = torch.empty(4, 2, 256, dtype=dtype), LayerKV(torch.empty(2, dtype=torch.int64), dtype, 32, 2, 256)
    norm, table = triton_fused.QKNorm(k[0, 0], k[0, 0], 1e-6, 1.0, True), torch.empty(99, 32, dtype=dtype)
    triton_fused.rope_and_write(q, k, k, table, table, slot_mapping, slot_mapping, kv, norm=norm)
    for gates in (gate, torch.empty(4, 16, 1, dtype=dtype)):
        triton_fused.gated_by_sigmoid(q.contiguous(), gates)


def launch_experts(dtype: torch.dtype) -> None:
    """Few tokens per expert, and many."""
    x, weight = torch.empty(1000, 2048, dtype=dtype), torch.empty(8, 1408, 2048, dtype=dtype)
    for items in (16, 1000):
        order, cu_seqlens = torch.empty(items, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
        triton_experts.grouped_linear(x, weight, order, cu_seqlens, 2)
    chosen = torch.empty(1000, 8, dtype=torch.int64)
    triton_experts.record_experts(chosen, chosen[:, 0].contiguous(), chosen[0, :1], layer=1, layers=48)


def launch_loop() -> None:
    """What a decode step does outside of its layers, with and without the tokens that a sequence has."""
    ids, numbers, tables = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int32), torch.empty(4, 9)
    triton_decode.decode_slot_mapping(numbers, tables.int(), 32)
    logps, tokens, results = [torch.empty(4)] * 4, torch.empty(32, 4, dtype=torch.int64), torch.empty(4, 32, 4)
    for seen in (None, torch.empty(4, 151937, dtype=torch.uint8)):
        batch = ids, numbers, numbers, ids, ids, numbers, numbers
        triton_decode.advance(ids, logps, *batch, ids, tokens, results, seen, numbers, tables.int())


def launch_sampling() -> None:
    """Every combination of features at a vocabulary of 152k. Positions and logits of both types."""
    of_dtype = {dtype: torch.empty(4, 151936, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    seen = torch.empty(4, 151936, dtype=torch.uint8)
    keys, stop_token_ids = torch.empty(4, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    for index, choice in enumerate(itertools.product((False, True), repeat=len(fields(SamplingFeatures)))):
        positions = torch.empty(4, dtype=(torch.int32, torch.int64)[index % 2])
        features = SamplingFeatures(*choice)
        for logits in of_dtype.values():
            triton_sampling.sample(logits, keys, positions, torch.empty(4, 6), features, seen, stop_token_ids)


def launch_scoring() -> None:
    """Scores at a vocabulary of 152k, with and without a sampling mask; and of a slice of it."""
    logits, targets = torch.empty(4, 151936), torch.empty(4, dtype=torch.int64)
    triton_scoring.score(logits, targets, 0.7)
    triton_scoring.score(logits, targets, 0.7, targets)
    triton_scoring.score_sums(logits[:, :18992].contiguous(), targets, 0.7, 18992, 18992)


def launch_int8(dtype: torch.dtype) -> None:
    """Few rows and some, whose inputs are split, and many; a scale per channel, and per group of inputs."""
    weight, bias = torch.empty(4096, 4096, dtype=torch.int8), torch.empty(4096, dtype=dtype)
    for rows in (16, 64, 1000):
        for groups in (1, 32):
            x, scale = torch.empty(rows, 4096, dtype=dtype), torch.empty(4096, groups)
            triton_int8.int8_linear(x, weight, scale)
            triton_int8.int8_linear(x, weight, scale, bias)


def launch_linear(dtype: torch.dtype, arch: int) -> None:
    """Batch-invariant products: few rows and many, of weights whose inputs are split, and are not."""
    for rows, outputs in itertools.product((16, 1000), (4096, 32000)):
        x, weight = torch.empty(rows, 4096, dtype=dtype), torch.empty(outputs, 4096, dtype=dtype)
        triton_linear.invariant_linear(x, weight, weight[:, 0].contiguous(), arch=arch)


def recurrent_layer(mixer: RecurrentMixer, dtype: torch.dtype, decoding: bool, chunked: bool) -> KernelLayer:
    """A layer of two sequences, of one new token each or of some, by chunks or not. Only its shapes are read."""
    hidden, numbers, tokens = 2048, torch.empty(2, dtype=torch.int32), 2 if decoding else 8
    shapes = mixer.weight_shapes(hidden)
    weights = {f"{role}.weight": torch.empty(shape, dtype=dtype) for role, shape in shapes.items()}
    weights["delta_in.weight"] = weights["conv.weight"]  # its roles have one product
    products = {"delta_conv_in": ("delta_q", "delta_k", "delta_v"), "delta_in": ("delta_qkv", "delta_z")}
    products["delta_ba"] = ("delta_b", "delta_a", "delta_forget_a", "delta_z_a")

    def linear(role: str, x: torch.Tensor) -> torch.Tensor:
        parts = [shapes[part] for part in products.get(role, [role]) if part in shapes]
        return torch.empty(tokens, sum(part[0] for part in parts), dtype=dtype)

    owners = None if decoding else torch.empty(tokens, dtype=torch.int64)
    positions, cu_seqlens = torch.empty(tokens, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    tables = StateTables(numbers, positions, cu_seqlens, owners, numbers if chunked else None)
    return KernelLayer(linear, weights, torch.empty(2, dtype=torch.int64), tables, 1e-6)


def launch_recurrent(dtype: torch.dtype) -> None:
    """Prefill and decode steps of mixers with the sizes of Qwen3.5, OLMo-hybrid, Kimi-Linear, Nemotron 3, Granite 4 and
    LFM2."""
    mixers = [
        (delta_net, GatedDeltaNet(16, 32, 128, 128, 4)),
        (delta_net, GatedDeltaNet(30, 30, 96, 192, 4, 2.0)),
        (kimi_delta, KimiDeltaAttention(32, 128, 4)),
        (mamba2, Mamba2(64, 64, 8, 128, 4)),
        (mamba2, Mamba2(48, 64, 1, 256, 4)),
        (mamba2, Mamba2(24, 64, 1, 256, 4, group_ranks=2)),  # of two ranks
        (short_conv, ShortConv(2048, 3)),
    ]
    ways = [(False, False), (True, False)] + [(False, True)] * (dtype == torch.bfloat16)
    for way, (kernels, mixer) in itertools.product(ways, mixers):
        kernels(mixer, torch.empty(8, 2048, dtype=dtype), recurrent_layer(mixer, dtype, *way))


def main(arch: int, head_dim: int = 0) -> None:
    """Compile attention with heads of `head_dim`; 0: all other kernels."""
    JITFunction.run = compiling(arch)
    if head_dim:
        launch_all_attention(head_dim, arch)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for heads in (128, 20):
            launch_latent_attention(dtype, heads, arch)
        launch_fused(dtype)
        launch_experts(dtype)
        launch_int8(dtype)
        launch_linear(dtype, arch)
        launch_recurrent(dtype)
    launch_sampling()
    launch_scoring()
    launch_loop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
