"""Latent attention in Triton equals float64's, and what is before it the formulas in torch.

Without a GPU the kernels run in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.kernels import torch_ops
from hybrid.kernels import triton_attention as attention
from hybrid.kernels.triton_latent import latent_and_rope
from tests.kernels.test_triton import DEVICE, HALF, Cache, close, close_with_the_same_rounding, random
from tests.marks import slow_but

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LATENT, ROPE = 40, 12
CASES = [(4, torch.float32), (4, HALF), (70, torch.float32)]  # heads of several programs


def exact(cache: Cache, row: int, q: torch.Tensor, q_rope: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the row's last queries, [queries, heads, LATENT] each, over its latents, in float64."""
    keys, count = cache.k[row].double()[:, 0], len(q)
    scores = torch.einsum("qhd,kd->hqk", torch.cat((q, q_rope), dim=-1).double(), keys) * scale
    position = torch.arange(len(keys) - count, len(keys), device=DEVICE)[:, None]
    weights = scores.masked_fill(torch.arange(len(keys), device=DEVICE) > position, -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT])


def queries(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of latents, whose heads are the outer dimension in memory, and of keys."""
    return random(heads, tokens, LATENT, dtype=dtype).transpose(0, 1), random(tokens, heads, ROPE, dtype=dtype)


@pytest.mark.parametrize("splits", slow_but([4], [1, 4]))
@pytest.mark.parametrize(("heads", "dtype"), slow_but([(4, HALF)], CASES), ids=str)
def test_decode_attention_matches_float64(heads, dtype, splits):
    cache = Cache([1, 150, 32], 1, LATENT + ROPE, dtype)
    q, q_rope = queries(3, heads, dtype)
    memory = attention.split_workspace(attention.heads_of_program(heads, dtype), LATENT, torch.device(DEVICE))
    blocks = cache.lengths_tensor, cache.block_tables, memory
    actual = attention.decode_attention(q, cache.kv, *blocks, 0.2, q_rope=q_rope, splits=splits)
    assert not memory.counters.any()
    for row in range(3):
        expected = exact(cache, row, q[row : row + 1], q_rope[row : row + 1], 0.2)
        close(actual[row : row + 1], expected, 2.0)


@pytest.mark.parametrize(("heads", "dtype"), slow_but([(4, HALF)], CASES), ids=str)
def test_prefill_attention_matches_float64(heads, dtype):
    """With prefixes and without."""
    cache, counts = Cache([9, 70, 33], 1, LATENT + ROPE, dtype), [9, 5, 1]
    q, q_rope = queries(sum(counts), heads, dtype)
    cu_seqlens = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    blocks = cu_seqlens, cache.lengths_tensor, cache.block_tables
    actual = attention.prefill_attention(q, cache.kv, *blocks, 0.2, q_rope=q_rope)
    for row, parts in enumerate(zip(*(each.split(counts) for each in (actual, q, q_rope)), strict=True)):
        close(parts[0], exact(cache, row, *parts[1:], 0.2), 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rope", ["halves", "neighbours", ""])
def test_latents_and_keys_are_written_and_queries_rotated(rope, dtype):
    cache, tokens, heads = Cache([40, 8], 1, LATENT + ROPE, dtype), 3, 11
    kv, q = random(tokens, LATENT + ROPE + 4, dtype=dtype)[:, :-4], random(tokens, heads, 20, dtype=dtype)
    weight, positions = random(LATENT, dtype=dtype), torch.tensor([5, 0, 9], dtype=torch.int32, device=DEVICE)
    slots, before = torch.tensor([70, 3, 34], device=DEVICE), cache.keys.clone()
    angles = torch.rand(10, ROPE // 2, device=DEVICE) * 6
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if rope else (None, None)
    choices = 1e-6, 1.0, dtype == HALF, rope == "neighbours"
    actual = latent_and_rope(kv, q, weight, *tables, positions, slots, cache.kv, *choices)
    latent, key = kv.split([LATENT, ROPE], dim=-1)
    latent, key, q = torch_ops.rms_norm(latent, weight, *choices[:3]), key.unsqueeze(1), q[..., -ROPE:]
    if rope:
        at = [table[positions.long()] for table in tables]
        key, q = (torch_ops.rotated(part, *at, rope == "neighbours") for part in (key, q))
    close_with_the_same_rounding(actual, q)
    rows = cache.keys.view(-1, LATENT + ROPE)
    close_with_the_same_rounding(rows[slots], torch.cat((latent, key[:, 0]), dim=-1))
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, slots.cpu(), False)
    assert torch.equal(rows[others].nan_to_num(7), before.view_as(rows)[others].nan_to_num(7))
    assert len(rows) == cache.keys.shape[0] * BLOCK_SIZE
