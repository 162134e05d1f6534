"""The machine's best measured rates of reading and arithmetic, and the bytes and operations of a decode step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import PretrainedConfig

from benchmarks.cases import Case

PEAK_ROWS = 256
ROUNDS = 3
ROUND_S = 0.05
MAX_BYTES = 2**30  # read at once; larger steps are read no faster


@dataclass(frozen=True)
class Limits:
    """The cost of a decode step of a case, and the machine's rates.

    step_bytes: weights and the KV cache of the mean step.  step_flops: of its matmuls and attention.
    bytes_per_s: of reading as many bytes as the step does.  flops_per_s: the best of torch's products with
        any of the step's matrices and at least PEAK_ROWS rows: with few rows torch does not reach the machine's peak.
    """

    step_bytes: int
    step_flops: int
    bytes_per_s: float
    flops_per_s: float

    @property
    def step_s(self) -> float:
        """The lower bound of a step's time."""
        return max(self.step_bytes / self.bytes_per_s, self.step_flops / self.flops_per_s)

    @property
    def bound(self) -> str:
        """The resource that limits the step: memory or arithmetic."""
        return "memory" if self.step_bytes / self.bytes_per_s > self.step_flops / self.flops_per_s else "arithmetic"


def measure_limits(model: nn.Module, case: Case) -> Limits:
    """The limits of a decode step of `case` halfway through: every row has half of its new tokens."""
    step_bytes, step_flops = step_cost(model, case)
    return Limits(
        step_bytes=step_bytes,
        step_flops=step_flops,
        bytes_per_s=read_rate(min(step_bytes, MAX_BYTES), model.device),
        flops_per_s=max(
            matmul_rate(max(case.rows, PEAK_ROWS), *shape, dtype, model.device)
            for shape in {tuple(matrix.shape) for matrix in step_matrices(model)}
            for dtype in {model.dtype, torch.float32}
        ),
    )


def step_cost(model: nn.Module, case: Case) -> tuple[int, int]:
    """Bytes that a decode step of `case` reads halfway through, weights and KV cache, and its operations. The model may
    be on the meta device."""
    config = model.config.get_text_config()
    context = case.rows * (case.prompt_len + case.new_tokens // 2)
    kv_values = context * kv_values_of_a_token(config)
    weights = sum(matrix.numel() for matrix in step_matrices(model))
    attention_flops = 4 * context * config.num_hidden_layers * config.num_attention_heads * head_dim_of(config)
    return (weights + kv_values) * model.dtype.itemsize, 2 * case.rows * weights + attention_flops


def prefill_flops(model: nn.Module, case: Case) -> int:
    """Operations of the prompts of `case`: matmuls, the head of each row's last token alone, and causal attention."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight.numel()
    layers = sum(matrix.numel() for matrix in step_matrices(model)) - head
    pairs = case.prompt_len * (case.prompt_len + 1) // 2  # of a query and a key that it sees, in a row
    attention = 4 * pairs * config.num_hidden_layers * config.num_attention_heads * head_dim_of(config)
    return case.rows * (2 * case.prompt_len * layers + 2 * head + attention)


def head_dim_of(config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_values_of_a_token(config: PretrainedConfig) -> int:
    """Numbers of a token in the KV cache of all layers."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim_of(config)


def step_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The matrices that a token is multiplied with: all but the embedding, unless it is tied to the head.

    A mixture of experts counts all experts, so the limit is right for dense models only.
    """
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    embedding = None if tied else model.get_input_embeddings().weight
    return [weight for weight in model.parameters() if weight.dim() == 2 and weight is not embedding]


def read_rate(size: int, device: torch.device) -> float:
    """Bytes per second of reading `size` bytes with all threads; on a GPU, of reading and writing in a copy."""
    source = torch.ones(max(size // 4, 2), device=device)  # float32
    if device.type != "cpu":
        target = torch.empty_like(source)
        return 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source))
    vector = torch.ones(min(4096, source.numel() // 2), device=device)
    matrix = source[: source.numel() // vector.numel() * vector.numel()].view(-1, vector.numel())
    return max(
        source.numel() * 4 / seconds_of(source.sum),
        matrix.numel() * 4 / seconds_of(lambda: torch.mv(matrix, vector)),
    )


def matmul_rate(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a matmul of [rows, inputs] by [outputs, inputs], by the faster of two torch calls."""
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    transposed = weight.t().contiguous()
    out = torch.empty(rows, outputs, dtype=dtype, device=device)
    calls = (lambda: nn.functional.linear(x, weight), lambda: torch.mm(x, transposed, out=out))
    return 2 * rows * outputs * inputs / min(seconds_of(call) for call in calls)


def seconds_of(call: Callable) -> float:
    """Seconds per call, by the fastest round."""
    call()
    once = timed(call, 1)
    count = max(int(ROUND_S / max(once, 1e-7)), 1)
    return min(timed(call, count) for _ in range(ROUNDS)) / count


def timed(call: Callable, count: int) -> float:
    """Seconds of `count` calls, the device's work included."""
    get_accelerator().synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    get_accelerator().synchronize()
    return time.perf_counter() - start
