"""Every Triton kernel compiles for its target GPUs, on a machine without one, and fits their registers and memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

KERNELS = {
    "_decode_kernel",
    "_join_kernel",
    "_prefill_kernel",
    "_rope_and_write_kernel",
    "_add_norm_kernel",
    "_gated_activation_kernel",
    "_grouped_linear_kernel",
    "_int8_linear_kernel",
    "_sum_splits_kernel",
    "_maxima_kernel",
    "_masses_kernel",
    "_pick_kernel",
}
SPILLED = 64  # bytes per thread: a few registers, not a matrix
SHARED = 99 * 1024  # bytes that a program may have on the smallest of them (sm_86, sm_89)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spilling_registers(arch, tmp_path):
    """In a separate process, in which Triton compiles instead of interpreting."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(arch)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    too_big = [kernel for kernel in kernels if kernel["stack_bytes"] > SPILLED or kernel["shared_bytes"] > SHARED]
    assert not too_big, too_big
