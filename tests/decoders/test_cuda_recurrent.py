"""Models with recurrent mixers in the decoder on Triton kernels: logits, launches, and decode loops in graphs.

Without a GPU the kernels run in Triton's interpreter, and a capture that records operations stands in for CUDA's.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.config import SpeculationConfig
from hybrid.decoders.batch import KVWeights
from hybrid.decoders.cuda_decoder import CudaDecoder, ShardedCudaDecoder
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.fused_model import FusedModel
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.request import Request
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.speculation import Speculator
from hybrid.kernels.host_group import on_host
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights.model_weights import read_weights
from hybrid.weights.slices import Shard
from hybrid.weights.snapshot import Snapshot
from tests.decoders.test_captures import EqualRanks, Specializations, sampling_of, step_of
from tests.decoders.test_cuda_decoder import DEVICE, Decoding, cuda_decoder, eager_capture, hugging_face, sequences
from tests.decoders.test_recurrent_mixers import VARIANTS
from tests.decoders.test_self_check import self_check_reason
from tests.decoders.test_sharded_decoder import Slices
from tests.decoders.test_torch_decoder import own_weights
from tests.device_ops import DeviceOps, RecordedCapture
from tests.generation.test_scheduler import request_of
from tests.marks import slow_but
from tests.sampling_params import params_of
from tests.tiny_models import RECURRENT, VOCABULARY, in_float64, tiny_model, with_peft
from tests.training.test_speculation import forced

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
QUICK = ["qwen3_5_text", "falcon_h1", "lfm2"]
PROMPTS, NEW = (9, 3, 1), 2


def small(family: str, **changes) -> torch.nn.Module:
    """A model of two layers, one of them recurrent, or as few as its kinds of layers need."""
    settings = {**RECURRENT[family], **changes}
    types = settings.get("layer_types")
    if types is not None and "linear_attention" in types:
        settings |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        if "mlp_layer_types" in settings:
            settings["mlp_layer_types"] = ["dense", "sparse"]
    elif family == "lfm2":
        settings |= {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    elif family == "bamba":
        settings |= {"num_hidden_layers": 2, "attn_layer_indices": [1]}
    elif family in ("mamba2", "falcon_h1"):
        settings |= {"num_hidden_layers": 2}
    return tiny_model(family, **settings).to(DEVICE).eval()


@pytest.mark.parametrize("family", slow_but(QUICK, RECURRENT))
def test_logits_equal_hugging_face(family):
    """Prefill, decode steps in graphs with padding sequences, a token behind them. Compared with float64, from which
    Hugging Face's own forwards in float32 are as far."""
    model = small(family)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    actual = torch.cat(Decoding(cuda_decoder(model, max_capture_size=4), ids).every_logit(PROMPTS))
    exact = torch.cat(hugging_face(in_float64(copy.deepcopy(model)), ids))
    assert (actual - exact).abs().max() < 4e-6 * exact.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], ["qwen3_5_text", "falcon_h1"]))
def test_prompts_in_bfloat16_are_prefilled_by_chunks(family):
    """And round no more than Hugging Face's own forwards in bfloat16. Short prompts too: the self-check, whose prompts
    are of both kinds, runs the kernels of either."""
    model, ids = small(family), sequences((70, 1, 35))
    exact = torch.cat(hugging_face(in_float64(copy.deepcopy(model)), ids))
    half = model.bfloat16()
    expected, decoding = torch.cat(hugging_face(half, ids)), Decoding(cuda_decoder(half), ids)
    actual = torch.cat(decoding.run([0, 0, 0], [70, 1, 35]))
    assert (actual - exact).abs().mean() <= 1.1 * (expected - exact).abs().mean()
    for ends in ([70, 1, 35], [9, 1, 5]):
        batch = decoding.batch([(0, end) for end in ends])
        owners = torch.arange(3, device=DEVICE).repeat_interleave(batch.cu_seqlens.diff().long())
        assert decoding.decoder._state_tables(batch, owners).chunks is not None


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_is_read(variant):
    family, changes = VARIANTS[variant]
    model, ids = tiny_model(family, **changes).to(DEVICE).eval(), sequences((9, 5))
    exact = torch.cat(hugging_face(in_float64(copy.deepcopy(model)), ids))
    decoding = Decoding(cuda_decoder(model, max_capture_size=2), ids)
    parts = [decoding.run([0, 0], [8, 4]), list(decoding.decode([8, 4]).clone().split(1))]
    actual = torch.cat([torch.cat(rows) for rows in zip(*parts, strict=True)])
    assert (actual - exact).abs().max() < 4e-6 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_the_self_check_passes(family):
    """Also in bfloat16, with decode steps from graphs: the eager steps' states are not those of the graphs' begin."""
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2} if family == "qwen3_5_text" else {}
    sizes = {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1} if family == "bamba" else sizes
    model = small(family, **sizes).bfloat16()
    assert self_check_reason(cuda_decoder(model, max_capture_size=4), model) == ""


@pytest.mark.parametrize("unmerged", slow_but([False], [False, True]), ids=["merged", "unmerged"])
def test_lora_matches_peft(unmerged):
    model = with_peft(small("qwen3_5_text")).eval()
    info, ids = ModelInfo(model), sequences((7, 4))
    snapshot = Snapshot(read_weights(info, layers_per_group=2, unmerged=unmerged))
    snapshot.refresh(lambda name: torch.no_grad(), adapters=True)
    weights = DecoderWeights(FusedModel(info, snapshot).layout, snapshot, adapters=True)
    decoder = CudaDecoder(read_decoder(model), weights.tensor, torch.float32, lora_deltas=weights.lora_deltas)
    decoder.bind()
    decoding = Decoding(decoder, ids)
    parts = [decoding.run([0, 0], [6, 3]), list(decoding.decode([6, 3]).split(1))]
    actual = torch.cat([torch.cat(rows) for rows in zip(*parts, strict=True)])
    expected = torch.cat(hugging_face(model, ids))
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    with model.disable_adapter():
        assert (torch.cat(hugging_face(model, ids)) - expected).abs().max() > 0.1 * expected.abs().max()


# Of a recurrent layer and of an attention layer. Norm, products of its output, kernel, product; then norm, gate and up,
# activation, down. Mamba 2 has a norm, OLMo-hybrid a product more, and Qwen3.5's attention a gate.
LAUNCHES = {"qwen3_5_text": (9, 10), "olmo_hybrid": (10, 9), "bamba": (9, 9), "lfm2": (8, 9)}


@torch.no_grad()
@pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of interpreted kernels")
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], LAUNCHES))
def test_launches_of_a_layer_in_decode_steps(family, monkeypatch):
    """And the host waits for none of them."""
    decoder = cuda_decoder(small(family))
    decoding, counts = Decoding(decoder, sequences((3, 3))), []
    batch, hidden = decoding.batch([(2, 3), (2, 3)]), torch.zeros(2, decoder.spec.hidden_size, device=DEVICE)
    for first, last in ((0, 0), (0, 0), (0, 1), (0, 2)):  # the first run makes tables
        with DeviceOps().on(monkeypatch) as device:
            decoder.decode_layers(hidden, batch, decoding.kv, first, last)
        assert device.waits == [] or not counts
        counts.append(len(device.seen))
    # Without a layer there is no sum of its output and the residual stream.
    recurrent, attention = counts[2] - counts[1] - 1, counts[3] - counts[2]
    assert (recurrent, attention) == LAUNCHES[family]


# Slices

SLICED = {
    "qwen3_5_text": {"linear_num_key_heads": 2},
    "qwen3_next": {},
    "kimi_linear": {},
    "nemotron_h": {"moe_latent_size": 24, "mlp_bias": True},
    "bamba": {"mamba_n_groups": 1, "mamba_proj_bias": True},  # one group, whose norm is a sum over the ranks
    "falcon_h1": {},
    "lfm2": {"conv_bias": True},
}


def sharded(layout: DecoderLayout, group: Any, capture: Callable) -> ShardedCudaDecoder:
    """The decoder of a rank's slices."""
    weights = Slices(layout, Shard(group.size, group.index))
    decoder = ShardedCudaDecoder(layout, weights, group, max_capture_size=4, capture=capture)
    decoder.bind()
    return decoder


def check_slices(family: str) -> None:
    """Prefill and decode steps, in graphs, of two ranks' slices."""
    model = small(family, **SLICED[family])
    group, ids = on_host(InferenceGroup(2), torch.device("cpu")), sequences(tuple(n + NEW + 1 for n in PROMPTS))
    decoder = sharded(read_decoder(model), group, eager_capture)
    parts = Decoding(decoder, ids).every_logit(PROMPTS)
    assert len(decoder.graphs)
    actual = torch.cat([decoder.vocabulary.whole(rows) for rows in parts])
    exact = torch.cat(hugging_face(in_float64(copy.deepcopy(model)), ids))
    assert (actual - exact).abs().max() < 4e-6 * exact.abs().max()


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks of one device cannot exchange by NCCL")
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "bamba"], SLICED))
def test_slices_equal_hugging_face_at_two_ranks(ranks, family):
    ranks.run(check_slices, family)


def check_chunks_of_slices(family: str) -> None:
    """Prefill by chunks of two ranks' slices in bfloat16."""
    model, ids = small(family, **SLICED[family]), sequences((70, 40))
    exact = torch.cat(hugging_face(in_float64(copy.deepcopy(model)), ids))
    expected = torch.cat(hugging_face(model.bfloat16(), ids))
    group = on_host(InferenceGroup(2), torch.device("cpu"))
    decoder = sharded(read_decoder(model), group, eager_capture)
    actual = torch.cat([decoder.vocabulary.whole(rows) for rows in Decoding(decoder, ids).run([0, 0], [70, 40])])
    assert (actual - exact).abs().mean() <= 1.2 * (expected - exact).abs().mean()  # sums of two ranks round once more


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks of one device cannot exchange by NCCL")
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_slices_by_chunks_at_two_ranks(ranks, family):
    ranks.run(check_chunks_of_slices, family)


@torch.no_grad()
@pytest.mark.parametrize("family", SLICED)
def test_a_captured_step_of_slices_neither_waits_nor_reads_host_memory(family, monkeypatch):
    """Around the kernels, which do not run here."""
    capture = RecordedCapture(monkeypatch)
    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *args, **kwargs: None)
    decoder = sharded(read_decoder(small(family, **SLICED[family])), EqualRanks(2, 2), capture)
    kv = replace(decoder.kv(3), states=decoder.states(2))
    decoder.decode(replace(step_of(2), state_slots=torch.arange(2).int()), kv)
    assert decoder.eager_reason == "" and capture.captured == capture.replays == len(decoder.graphs) == 1


# Decode loops


def request(stop_token_id: int = -1, rows: int = 6) -> Request:
    """Greedy rows, two of each prompt, with limits of their own."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in (7, 3, 10)]
    settings = {"max_new_tokens": 6, "sampling_params": params_of(0), "groups": torch.arange(rows) // 2}
    made = request_of(
        [prompts[row // 2] for row in range(rows)], stop_token_ids=torch.tensor([stop_token_id]), **settings
    )
    return replace(made, limits=torch.arange(rows) % 3 + 4, pad_token_id=1)


@torch.no_grad()
def completions_of(
    request: Request,
    decoder: TorchDecoder,
    max_num_seqs: int,
    steps: int,
    pool: BlockPool,
    speculator: Speculator | None = None,
) -> Completions:
    pool.begin_call(decoder.kv, KVWeights(1, 0), decoder.states)
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    completions = Scheduler(request, decoder, pool, max_num_seqs, phase, steps, speculator=speculator).run()
    assert len(pool.free_slots) + len(pool.kept_states) == pool.num_slots, "slots were not given back"
    return completions


def require_equal(actual: Completions, expected: Completions) -> None:
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.lengths, expected.lengths)
    torch.testing.assert_close(actual.raw_logps, expected.raw_logps, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has the real capture")
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], ["qwen3_5_text", "qwen3_next", "bamba", "lfm2"]))
def test_the_loop_in_graphs_gives_the_tokens_of_the_decoder_in_torch(family, monkeypatch):
    """Rows of a group share a prompt's state, wait for others to end, and take their slots; captures neither wait nor
    read host memory. A second call, whose states lie elsewhere, replays the same graphs."""
    model = small(family)
    plain = TorchDecoder(read_decoder(model), own_weights, model.dtype)
    plain.bind()
    endless = completions_of(request(), plain, 3, 1, BlockPool(32))
    stopping = request(stop_token_id=endless.tokens[0, 1].item())  # the first group's second token
    expected, limits = completions_of(stopping, plain, 3, 1, BlockPool(32)), stopping.limits
    assert (expected.lengths < limits).any() and (expected.lengths == limits).any(), expected.lengths
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, 4, RecordedCapture(monkeypatch))
    decoder.bind()
    for _ in range(2):
        require_equal(completions_of(stopping, decoder, 3, 4, BlockPool(32)), expected)
        captured = decoder.graphs.capture.captured
    assert decoder.eager_reason == "" and captured == len(decoder.graphs), "the second call captured again"


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], ["qwen3_5_text", "bamba", "lfm2"]))
def test_refused_drafts_leave_no_trace_in_states(family):
    """Rows draft once half of the others have ended; in the second call most drafts are right: the history has them."""
    decoder, speculator = cuda_decoder(small(family)), Speculator(SpeculationConfig(ngram=1, max_draft=3))
    drafting = replace(request(), max_new_tokens=16, limits=torch.tensor([2, 16, 3, 16, 2, 15]))
    expected = completions_of(drafting, decoder, 6, 4, BlockPool(32))
    counts = []  # drafted and accepted
    for _ in range(2):
        with forced():
            require_equal(completions_of(drafting, decoder, 6, 4, BlockPool(32), speculator), expected)
        counts.append(speculator.taken_counters()[:2])
    assert counts[0][0] > counts[0][1] and counts[1][1] > 10, counts


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], ["qwen3_5_text", "bamba", "lfm2"]))
def test_kept_states_are_those_at_a_sequences_end(family):
    """Though its batch goes on for other rows: a next turn from them has the tokens of one from nothing."""
    decoder, pool = cuda_decoder(small(family)), BlockPool(32)
    first = replace(request(), max_new_tokens=14, limits=torch.tensor([5, 9, 14, 7, 12, 14]))
    done = completions_of(first, decoder, 6, 16, pool)
    prompts = [
        torch.cat([ids[-length:], tokens[:count], torch.tensor([7, 8])])
        for ids, length, tokens, count in zip(
            first.prompt_ids, first.prompt_lengths, done.tokens, done.lengths.tolist(), strict=True
        )
    ]
    second = request_of(prompts, sampling_keys=first.sampling_keys, max_new_tokens=6)
    second = replace(second, limits=torch.full((len(prompts),), 6), stop_token_ids=first.stop_token_ids)
    actual = completions_of(second, decoder, 6, 16, pool)
    assert pool.prefilled_tokens == 3 * len(prompts), "the last sampled token and the two new ones"
    require_equal(actual, completions_of(second, decoder, 6, 16, BlockPool(32)))


@torch.no_grad()
@pytest.mark.skipif(DEVICE == "cuda", reason="replaces launches")
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_a_shrinking_batch_compiles_each_kernel_once(family, monkeypatch):
    decoder = cuda_decoder(small(family))
    kv, launches = replace(decoder.kv(49), states=decoder.states(48)), Specializations(monkeypatch)
    for rows in (48, 33, 16, 9, 5, 3, 2, 1):
        batch = replace(step_of(rows), state_slots=torch.arange(rows).int())
        decoder.forward(batch, kv)
        decoder.decode_steps(batch, kv, sampling_of(None, rows, params_of(0.8)), 1)
    assert "_conv_kernel" in {name for name, *_ in launches.keys}
    launches.require_one_each()


@torch.no_grad()
def test_states_may_be_allocated_again_between_replays(monkeypatch):
    """Graphs read their addresses from a table."""
    decoder = cuda_decoder(small("lfm2"), max_capture_size=2)
    decoding = Decoding(decoder, sequences((5, 5)))
    decoding.run([0, 0], [3, 3])
    expected = decoding.decode([3, 3]).clone()
    moved = Decoding(decoder, sequences((5, 5)))
    moved.run([0, 0], [3, 3])
    before = [state.clone() for layer in decoding.kv.states.values() for state in layer]
    assert torch.equal(moved.decode([3, 3]), expected) and len(decoder.graphs) == 1
    after = [state for layer in decoding.kv.states.values() for state in layer]
    assert all(map(torch.equal, before, after)), "states that are no longer lent were written"


@pytest.mark.parametrize("family", RECURRENT)
def test_no_reason_prevents_the_decoder_on_a_gpu(family, monkeypatch):
    monkeypatch.setattr("hybrid.decoders.fused_model.kernels_for", lambda *args: "Triton")
    for dtype in (torch.float32, torch.bfloat16):
        info = ModelInfo(tiny_model(family, **({"residual_in_fp32": True} if family == "mamba2" else {})).to(dtype))
        fused = FusedModel(info, Snapshot(read_weights(info, layers_per_group=2)), 4)
        if family == "mamba2" and dtype == torch.bfloat16:
            assert "a residual stream in float32 has no kernels for GPUs yet" in fused.fallback_reason
        else:
            assert fused.fallback_reason == "" and "decode steps as CUDA graphs" in fused.description
