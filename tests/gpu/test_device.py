"""Tests that need a CUDA device: graphs, eager runs and the CPU agree, also in bfloat16, and the host never waits.

None of this has run yet: no device was at hand when it was written. On a device, `pytest -m gpu` runs, besides these,
the tests of kernels and decoder that run elsewhere in Triton's interpreter; `make gpu-test` runs all of them.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.generation.sampler import SamplingMetadata, sample_tokens_in_torch, stream_keys
from hybrid.kernels.triton_sampling import sample
from hybrid.models.reader import read_decoder
from tests.decoders.test_cuda_decoder import Decoding, cuda_decoder, hugging_face, sequences, small
from tests.decoders.test_torch_decoder import VARIANTS, average, distance, own_weights
from tests.engines import engine_of, settings
from tests.tiny_models import ALL_FAMILIES, tiny_model

pytestmark = pytest.mark.gpu
LENGTHS = (50, 7, 33, 40)  # of whole sequences: four, which fill a captured size
PROMPTS = (44, 1, 27, 34)


def cpu_logits(family: str) -> list[torch.Tensor]:
    """The logits of TorchDecoder on the CPU, in float32."""
    model = small(family).cpu()
    decoder = TorchDecoder(read_decoder(model), own_weights, torch.float32)
    decoder.bind()
    decoding = Decoding(decoder, [ids.cpu() for ids in sequences(LENGTHS)], "cpu")
    return decoding.run([0] * len(LENGTHS), list(LENGTHS))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_graphs_eager_runs_and_the_cpu_agree_in_float32(family):
    """TF32 is off by default, and our kernels never use it: only the order of sums differs."""
    cpu = cpu_logits(family)
    eager, graphs = (
        [
            logits.cpu()
            for logits in Decoding(cuda_decoder(small(family), max_capture_size), sequences(LENGTHS)).every_logit(
                PROMPTS
            )
        ]
        for max_capture_size in (0, 8)
    )
    assert distance(eager, cpu) < 1e-5
    assert distance(graphs, cpu) < 1e-5
    # The same kernels on as many rows, but libraries may choose other ones during capture.
    assert distance(graphs, eager) < 1e-6


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_bfloat16_logits_round_as_hugging_face(family):
    """Independent roundings would be √2 times as far apart."""
    ids = sequences(LENGTHS)
    exact = hugging_face(small(family), ids)
    model = small(family).bfloat16()
    expected = hugging_face(model, ids)
    for max_capture_size in (0, 8):
        actual = Decoding(cuda_decoder(model, max_capture_size), ids).every_logit(PROMPTS)
        assert average(actual, expected) < 1.2 * average(expected, exact)


@pytest.fixture
def sync_raises():
    """While it is on, a synchronization of host and device raises."""

    def switch(on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_never_synchronize_with_the_host(variant, sync_raises):
    """In prefill and decode steps, replayed and eager, once tables and graphs exist."""
    ids = sequences(LENGTHS)
    for max_capture_size in (0, 8):
        decoding = Decoding(cuda_decoder(small(variant), max_capture_size), ids)
        prefill = decoding.batch([(0, length) for length in PROMPTS])
        step = decoding.batch([(length, length + 1) for length in PROMPTS])
        with torch.no_grad():
            for on in (False, True):
                sync_raises(on)
                decoding.decoder.forward(prefill, decoding.kv)
                decoding.decoder.decode(step, decoding.kv)
            sync_raises(False)


def test_every_captured_size_matches_the_eager_step():
    """1 to 13 sequences, in an order in which each graph's outputs overwrite another's."""
    model = small("qwen3")
    graphs, eager = cuda_decoder(model, 13), cuda_decoder(model)
    for count in (13, 1, 9, 2, 8, 3, 5, 13, 4):
        graphed, eager_decoding = (Decoding(decoder, sequences((6,) * count)) for decoder in (graphs, eager))
        for decoding in (graphed, eager_decoding):
            decoding.run([0] * count, [5] * count)
        assert distance([graphed.decode([5] * count)], [eager_decoding.decode([5] * count)]) < 1e-6


def test_graphs_share_one_memory_pool():
    """Eight graphs need little more memory than one: intermediates are in one pool."""
    decoder = cuda_decoder(small("llama"), 32)
    decoding = Decoding(decoder, sequences((6,) * 32))
    decoding.run([0] * 32, [5] * 32)
    decoder.decode(decoding.batch([(5, 6)] * 32), decoding.kv)
    first = torch.cuda.memory_reserved()
    for count in (1, 2, 4, 8, 16, 24):
        batch = decoding.batch([(5, 6)] * 32)
        part = type(batch)(
            batch.ids[:count],
            batch.positions[:count],
            batch.cu_seqlens[: count + 1],
            batch.lengths[:count],
            batch.block_tables[:count],
        )
        decoder.decode(part, decoding.kv)
    assert len(decoder.graphed.graphs) == 7
    assert torch.cuda.memory_reserved() - first <= 2**24


@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.0), (0.6, 0.1), (0.0, 0.0)])
def test_sampled_tokens_match_torch_on_the_cpu(temperature, min_p):
    """Except where u is within rounding of a boundary: fewer than one token in a thousand."""
    logits = torch.randn(256, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    keys, steps = stream_keys(3, torch.arange(256), torch.zeros(256, dtype=torch.long)), torch.arange(256)
    reference = sample_tokens_in_torch(logits, keys, steps, SamplingMetadata(temperature, min_p=min_p))
    ones = torch.ones(256)
    inputs = (logits, keys, steps.int(), ones * temperature, ones * min_p)
    tokens, *logps = (out.cpu() for out in sample(*(tensor.cuda() for tensor in inputs)))
    same = tokens == reference.tokens
    assert (~same).sum() <= 1
    expected = (reference.sampling_logps, reference.old_logps, reference.raw_logps)
    for actual, expected_logps in zip(logps, expected, strict=True):
        torch.testing.assert_close(actual[same], expected_logps[same], rtol=1e-5, atol=1e-5)


def check_switch_on_a_device() -> None:
    """Like tests/engine/test_memory_modes.py, measured by the device's allocator."""
    for block in ({}, {"inference_tp_size": 2}):
        model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
        block = {"tp_gather_partition_size": 1, **block}
        engine = engine_of(model, settings(3, hybrid_engine=block, rollout={"containers": "fused"}))
        layer = sum(p.ds_numel * p.element_size() for p in engine.module.model.layers[0].parameters())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine._window.refresh(True)
        held = engine.stats()["snapshot_bytes"]
        rounding = 512 * 2 * sum(1 for _ in engine.module.parameters())  # of the allocator, for every tensor
        assert torch.cuda.memory_allocated() - before <= held + rounding
        assert torch.cuda.max_memory_allocated() - before <= held + layer + rounding
        engine.destroy()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two devices")
def test_peak_memory_of_a_refresh_is_the_snapshot_and_one_group(device_ranks):
    device_ranks(2).run(check_switch_on_a_device)
