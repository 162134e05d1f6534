"""Tests that need a CUDA device: graphs, eager runs and the CPU agree, also in bfloat16, and the host never waits.

None of this has run yet: no device was at hand when it was written. On a device, `pytest -m gpu` runs, besides these,
the tests of kernels and decoder that run elsewhere in Triton's interpreter; `make gpu-test` runs all of them.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.batch import PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.kernels.triton_sampling import SamplingFeatures, sample, sampling_features, values_of_rows
from hybrid.models.reader import read_decoder
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import sample_tokens_in_torch, stream_keys
from hybrid.sampling.state import SamplingState
from tests.decoders.test_cuda_decoder import (
    ALL_FAMILIES,
    DEVICE,
    VARIANTS,
    Decoding,
    cuda_decoder,
    hugging_face,
    sequences,
    small,
)
from tests.decoders.test_torch_decoder import average, distance, own_weights
from tests.engines import engine_of, settings
from tests.sampling_params import params_of
from tests.tiny_models import tiny_model

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
    assert len(decoder.graphs) == 7
    assert torch.cuda.memory_reserved() - first <= 2**24


def loop_of(decoder: CudaDecoder, rows: int, tokens: int) -> tuple[Decoding, PackedBatch, SamplingState]:
    """Sequences of 40 tokens in blocks with room for more, and how `tokens` more of each are drawn."""
    decoding = Decoding(decoder, sequences((40 + tokens,) * rows))
    decoding.run([0] * rows, [39] * rows)
    keys = stream_keys(3, torch.arange(rows), torch.zeros(rows, dtype=torch.long)).to(DEVICE)
    limits, stops = torch.full_like(keys, tokens), torch.tensor([2], device=DEVICE)
    draws = SamplingState(keys, torch.zeros_like(keys), limits, stops, 0, RowParams.of(params_of(0.8, top_k=20)))
    return decoding, decoding.batch([(39, 40)] * rows), draws


@torch.no_grad()
def test_the_decode_loop_draws_the_same_in_graphs_and_never_synchronizes(sync_raises):
    """Eight steps, eager and from graphs: equal tokens, while a synchronization would raise."""
    drawn = []
    for max_capture_size in (0, 8):
        decoder = cuda_decoder(small("qwen3"), max_capture_size)
        decoding, batch, draws = loop_of(decoder, 5, 8)
        for on in (False, True):  # the first time it compiles and captures
            sync_raises(on)
            tokens, logps = decoder.decode_steps(batch, decoding.kv, draws, 8)
        sync_raises(False)
        drawn.append((tokens.tolist(), logps.cpu()))
        assert len(decoder.graphs) == (2 if max_capture_size else 0)
    assert drawn[0][0] == drawn[1][0]
    torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_loops_memory_is_as_planned():
    """Its tensors and the pool of its graphs, at two sizes. The allocator rounds up, and cuBLAS has a workspace."""
    for rows, hidden in ((8, 256), (128, 1024)):
        decoder = cuda_decoder(small("llama", hidden_size=hidden, intermediate_size=3 * hidden), 128)
        decoding, batch, draws = loop_of(decoder, rows, 8)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        decoder.decode_steps(batch, decoding.kv, draws, 8)
        assert torch.cuda.memory_reserved() - before <= 1.1 * decoder.loop_bytes(rows, 48) + 2**26


SETTINGS = {
    "plain": params_of(),
    "min_p": params_of(0.6, min_p=0.1),
    "greedy": params_of(0.0),
    "top_k": params_of(0.8, top_k=50),
    "top_p": params_of(1.0, top_p=0.9),
    "all truncations": params_of(1.2, 50, 0.9, 0.01),
    "wide top_k": params_of(1.0, top_k=5000),
    "wide top_p": params_of(3.0, top_p=0.99),
}


def rows_to_sample(rows: int = 256, vocab: int = 50_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, keys, positions, on the CPU."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    return logits, stream_keys(3, torch.arange(rows), torch.zeros(rows, dtype=torch.long)), torch.arange(rows)


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_tokens_match_torch_on_the_cpu(setting):
    """Except where u is within rounding of a boundary: fewer than one token in a thousand. Torch's cumulative sums over
    thousands of sorted tokens round by more, about 1e-5: they move the edge of a wide top-p by a few tokens."""
    metadata, is_wide = SETTINGS[setting], setting == "wide top_p"
    logits, keys, positions = rows_to_sample()
    reference = sample_tokens_in_torch(logits, keys, positions, metadata)
    table = RowParams.of(metadata).table
    values, features = values_of_rows(table, None, len(keys), "cuda"), sampling_features(table)
    drawn = sample(logits.cuda(), keys.cuda(), positions.cuda(), values, features)
    tokens, *logps, mask = (part.cpu() for part in drawn)
    same = tokens == reference.tokens
    assert (~same).sum() <= (8 if is_wide else 1)
    assert is_wide or (mask != reference.sampling_mask)[same].sum() <= 1
    expected = (reference.sampling_logps, reference.old_logps, reference.raw_logps)
    for actual, expected_logps in zip(logps, expected, strict=True):
        torch.testing.assert_close(actual[same], expected_logps[same], rtol=1e-5, atol=1e-4 if is_wide else 1e-5)


def test_processed_scores_are_hugging_faces():
    """Repetition penalty and min_new_tokens, before all truncations."""
    metadata = params_of(0.9, 50, 0.9, 0.01, 1.3, 100)
    logits, keys, positions = rows_to_sample(64)
    seen = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    stops = logits[:2].argmax(dim=-1)
    penalized = torch.where(logits < 0, logits * 1.3, logits / 1.3)
    scores = torch.where(seen, penalized, logits)
    scores[(positions < 100)[:, None] & torch.isin(torch.arange(logits.shape[1]), stops)] = -torch.inf
    reference = sample_tokens_in_torch(scores, keys, positions, params_of(0.9, 50, 0.9, 0.01))
    table = RowParams.of(metadata).table
    inputs = (tensor.cuda() for tensor in (logits, keys, positions, values_of_rows(table, None, len(keys), "cpu")))
    tokens, sampling, *_ = sample(*inputs, sampling_features(table), seen.cuda(), stops.cuda())
    same = tokens.cpu() == reference.tokens
    assert (~same).sum() <= 1
    torch.testing.assert_close(sampling.cpu()[same], reference.sampling_logps[same], rtol=1e-5, atol=1e-5)


def test_one_graph_samples_with_all_values_and_never_synchronizes(sync_raises):
    """A captured call with every feature, replayed after values are overwritten, equals calls of its own; a row of a
    batch equals the row alone, bit for bit."""
    logits, keys, positions = (tensor.cuda() for tensor in rows_to_sample(64))
    features, seen = SamplingFeatures(True, True, True, True, True), logits > 3
    stops, values = (
        torch.tensor([3, 8], device="cuda"),
        values_of_rows(RowParams.of(params_of()).table, None, 64, "cuda"),
    )
    tables = {name: RowParams.of(params).table for name, params in SETTINGS.items()}
    eager = {name: values_of_rows(table, None, 64, "cuda") for name, table in tables.items()}
    sample(logits, keys, positions, values, features, seen, stops)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, keys, positions, values, features, seen, stops)
    for own_values in eager.values():
        sync_raises(True)
        values.copy_(own_values)
        graph.replay()
        expected = sample(logits, keys, positions, own_values, features, seen, stops)
        sync_raises(False)
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))
        last = sample(logits[63:], keys[63:], positions[63:], own_values[63:], features, seen[63:], stops)
        assert all(torch.equal(alone[0], part[63]) for alone, part in zip(last, expected, strict=True))


def check_switch_on_a_device() -> None:
    """Like tests/training/test_memory_modes.py, measured by the device's allocator."""
    for block in ({}, {"inference_tp_size": 2}):
        model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
        block = {"tp_gather_partition_size": 1, **block}
        engine = engine_of(model, settings(3, hybrid_engine=block, rollout={"containers": "fused"}))
        layer = sum(p.ds_numel * p.element_size() for p in engine.module.model.layers[0].parameters())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine._runtime.window.refresh(True)
        held = engine.stats()["snapshot_bytes"]
        rounding = 512 * 2 * sum(1 for _ in engine.module.parameters())  # of the allocator, for every tensor
        assert torch.cuda.memory_allocated() - before <= held + rounding
        assert torch.cuda.max_memory_allocated() - before <= held + layer + rounding
        engine.destroy()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two devices")
def test_peak_memory_of_a_refresh_is_the_snapshot_and_one_group(device_ranks):
    device_ranks(2).run(check_switch_on_a_device)
