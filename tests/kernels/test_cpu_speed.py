"""The CPU kernels' products are not much slower than torch's, whatever instructions this processor has."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import hybrid
from benchmarks.machine import instructions
from hybrid.decoders.batch import BLOCK_SIZE, packed
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.reader import read_decoder
from hybrid.sampling.sampler import sample_tokens
from tests.decoders.test_cpu_decoder import threads
from tests.decoders.test_sharded_decoder import cpu_decoder
from tests.sampling_params import params_of
from tests.tiny_models import VOCABULARY as VOCABULARY_OF_TINY
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
HIDDEN, VOCABULARY = 768, 8192
LEAST = 0.4  # of torch's rate, which is near the processor's peak for many rows; measured are 0.8 to 1.9 with AVX-512
LEAST_WITH_ATTENTION = 0.25  # torch's attention uses AMX where there is AMX, ours vectors; 1.3 to 1.4 with AVX-512


def least_s(call: Callable, repetitions: int = 7) -> float:
    """Processor time of the fastest call, in seconds."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_keep_up_with_torch_s(dtype, rows):
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 12, "num_key_value_heads": 12, "num_hidden_layers": 1}
    model = tiny_model("llama", vocab_size=VOCABULARY, intermediate_size=64, **sizes).to(dtype)
    decoder, head = cpu_decoder(read_decoder(model)), model.lm_head.weight
    hidden = torch.randn(rows, HIDDEN)
    with threads(1):
        decoder.logits(hidden)  # the workspace
        rates = [1 / least_s(lambda: decoder.logits(hidden)), 1 / least_s(lambda: F.linear(hidden.to(dtype), head))]
    assert rates[0] > LEAST * rates[1], f"{rates[0] / rates[1]:.2f} of torch's rate"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prefill_keeps_up_with_torch_s_attention(dtype):
    """A layer of attention over 2048 tokens, with its four projections, which are half of the work."""
    heads, tokens = 12, 2048
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1}
    model = tiny_model(
        "llama", intermediate_size=64, head_dim=HIDDEN // heads, max_position_embeddings=tokens, **sizes
    ).to(dtype)
    decoder, attention = cpu_decoder(read_decoder(model)), model.model.layers[0].self_attn
    ids = torch.randint(3, VOCABULARY_OF_TINY, (tokens,))
    decoder.reserve(tokens)
    kv, hidden = decoder.kv(1 + tokens // BLOCK_SIZE), torch.randn(tokens, HIDDEN).to(dtype)
    batch = packed([ids], [0], [list(range(1, 1 + tokens // BLOCK_SIZE))], torch.device("cpu"))

    def torch_s() -> torch.Tensor:
        q, k, v = (
            F.linear(hidden, projection.weight).view(1, tokens, heads, -1).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(attended.transpose(1, 2).reshape(tokens, HIDDEN), attention.o_proj.weight)

    with threads(1):
        rates = [1 / least_s(lambda: decoder.forward(batch, kv), 4), 1 / least_s(torch_s, 4)]
    assert rates[0] > LEAST_WITH_ATTENTION * rates[1], f"{rates[0] / rates[1]:.2f} of torch's rate"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_over_long_contexts_keeps_up_with_torch_s_attention(dtype):
    """A layer of attention, its projections included, for a new token of each of 8 sequences of 2048 tokens. With
    AVX-512 0.9 in float32, which memory limits, and 4.8 in bfloat16."""
    heads, tokens, rows = 12, 2048, 8
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1}
    model = tiny_model(
        "llama", intermediate_size=64, head_dim=HIDDEN // heads, max_position_embeddings=tokens, **sizes
    ).to(dtype)
    decoder, attention = cpu_decoder(read_decoder(model)), model.model.layers[0].self_attn
    decoder.reserve(tokens)
    blocks = 1 + torch.arange(rows * tokens // BLOCK_SIZE).view(rows, -1)
    kv = decoder.kv(1 + blocks.numel())
    for cache in (*kv.keys, *kv.values):
        cache.normal_()
    ids = torch.randint(3, VOCABULARY_OF_TINY, (rows,))
    batch = packed(list(ids.split(1)), [tokens - 1] * rows, blocks.tolist(), torch.device("cpu"))
    hidden = torch.randn(rows, HIDDEN).to(dtype)
    keys, values = torch.randn(2, rows, heads, tokens, HIDDEN // heads).to(dtype)

    def torch_s() -> torch.Tensor:
        q, k, v = (
            F.linear(hidden, projection.weight).view(rows, heads, 1, -1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        keys[:, :, -1:], values[:, :, -1:] = k, v
        attended = F.scaled_dot_product_attention(q, keys, values)
        return F.linear(attended.reshape(rows, HIDDEN), attention.o_proj.weight)

    with threads(1):
        rates = [1 / least_s(lambda: decoder.forward(batch, kv)), 1 / least_s(torch_s)]
    assert rates[0] > LEAST * rates[1], f"{rates[0] / rates[1]:.2f} of torch's rate"


@pytest.mark.parametrize("vocabulary", [32000, 151936])
def test_top_p_of_a_flat_distribution_keeps_up_with_torch_s_sort(vocabulary):
    """3 times as fast with AVX-512."""
    logits, rows = torch.randn(2, vocabulary), torch.arange(2)
    metadata = params_of(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0)

    def torch_s() -> torch.Tensor:
        ordered, tokens = logits.softmax(dim=1).sort(dim=1, descending=True)
        kept = ordered.cumsum(dim=1) - ordered < metadata.top_p
        return tokens.gather(1, torch.multinomial(ordered * kept, 1))

    with threads(1):
        rates = [1 / least_s(lambda: sample_tokens(logits, rows, rows, metadata)), 1 / least_s(torch_s)]
    assert rates[0] > LEAST * rates[1], f"{rates[0] / rates[1]:.2f} of torch's rate"


@torch.no_grad()
@pytest.mark.parametrize(("rows", "least"), [(1, 0.8), (64, 0.5)])
def test_int8_weights_keep_up_with_bfloat16(rows, least):
    """A decode step reads half as much; many rows cost the conversion. With AVX-512: 2.0 with one row, 0.95 with 64."""
    if "amx_bf16" in instructions():
        least = 0.4  # tiles multiply bfloat16 in no time, converting takes as long as elsewhere; not measured
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 12, "num_key_value_heads": 2}
    model = tiny_model("llama", num_hidden_layers=2, head_dim=128, **sizes).bfloat16()
    decoders = [cpu_decoder(read_decoder(model))]
    hybrid.init_inference(model, dtype="int8", kernel_inject=True)
    decoders.append(cpu_decoder(read_decoder(model)))
    ids = torch.randint(3, VOCABULARY_OF_TINY, (rows,))
    batch = packed(list(ids.split(1)), [0] * rows, [[1 + row] for row in range(rows)], torch.device("cpu"))
    with threads(1):
        caches = [decoder.kv(1 + rows) for decoder in decoders]
        for decoder in decoders:
            decoder.reserve(1)
        bfloat16, int8 = (
            least_s(lambda decoder=decoder, kv=kv: decoder.forward(batch, kv))
            for decoder, kv in zip(decoders, caches, strict=True)
        )
    assert bfloat16 > least * int8, f"{bfloat16 / int8:.2f} of bfloat16's speed"
