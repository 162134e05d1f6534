"""Decode steps that run without the host: tokens, ends and positions stay on the device, and steps are graphs.

A capture that records operations stands in for CUDA's (`tests/device_ops.py`): replays run on the recorded tensors and
run no Python code, so that a stale address or a value read by the host shows. The oracle is the scheduler's loop of
single steps, and the count of launches that a device would see.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.config import SpeculationConfig
from hybrid.decoders.batch import KVWeights, PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.decode_state import DecodeState
from hybrid.generation import scheduler
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.model_runner import ModelRunner
from hybrid.generation.request import Request, StopCondition
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.scoring import score_packed
from hybrid.generation.speculation import Speculator
from hybrid.kernels.cuda_graph import capture_sizes
from hybrid.models.reader import read_decoder
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import stream_keys
from hybrid.sampling.state import SamplingState
from tests.decoders.test_cuda_decoder import DEVICE, VARIANTS, Decoding, checked_model, cuda_decoder, sequences, small
from tests.decoders.test_self_check import self_check_reason
from tests.decoders.test_torch_decoder import own_weights
from tests.device_ops import DeviceOps, RecordedCapture
from tests.generation.test_scheduler import request_of
from tests.marks import slow_but
from tests.sampling_params import params_of
from tests.tiny_models import VOCABULARY
from tests.training.test_speculation import forced

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has the real capture")
NEW = 7
# Launches of a decode step outside of its layers: the embedding's and the head's, with projections, scales, soft caps.
OUTSIDE = 10
MIXTURES = ("moe", "mixtral", "gpt_oss", "solar_open", "dots1", "hy_v3", "mellum", "minimax_m2")
MIXTURES += ("deepseek", "axk1", "mistral4")
DENSE = [variant for variant in VARIANTS if not any(name in variant for name in MIXTURES)]
SETTINGS = {
    "greedy": params_of(0),
    "plain": params_of(0.8),
    "truncated": params_of(1.3, top_k=12, top_p=0.9, min_p=0.01),
    "penalized": params_of(0.9, repetition_penalty=1.6, min_new_tokens=4),
    "greedy, penalized": params_of(0, repetition_penalty=1.6, min_new_tokens=4),
}


class SingleSteps(CudaDecoder):
    """Samples each step on the host, after Hugging Face's processors."""

    samples_in_kernel = samples_with_penalties = False


def decoder_of(model: torch.nn.Module, max_capture_size: int, monkeypatch: pytest.MonkeyPatch) -> CudaDecoder:
    capture = RecordedCapture(monkeypatch)
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, max_capture_size, capture)
    decoder.bind()
    return decoder


def one_layer() -> torch.nn.Module:
    return small("llama", num_hidden_layers=1)


def request(sampling: str, rows: int = 4) -> Request:
    """Rows with prompts of different lengths and with limits of their own; one token in eight is a stop token."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, ((7, 31, 3)[row % 3],), generator=generator) for row in range(rows)]
    keys = stream_keys(0, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    metadata = SETTINGS[sampling]
    settings = {"max_new_tokens": NEW, "sampling_params": metadata, "sampling_keys": keys}
    made = request_of(prompts, stop_token_ids=torch.arange(0, VOCABULARY, 8), **settings)
    return replace(made, limits=torch.arange(rows) % 3 + NEW - 2, pad_token_id=1)


@torch.no_grad()
def completions_of(
    request: Request, decoder: CudaDecoder, max_num_seqs: int, steps: int, pool=None, speculator=None, weights=None
) -> Completions:
    pool = BlockPool(32) if pool is None else pool
    pool.begin_call(decoder.kv, weights)
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    return Scheduler(request, decoder, pool, max_num_seqs, phase, steps, speculator=speculator).run()


def require_equal(actual: Completions, expected: Completions) -> None:
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.lengths, expected.lengths)
    for name in ("sampling_logps", "old_logps", "raw_logps"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=2e-6)
    assert actual.sequences == expected.sequences


@pytest.mark.parametrize("max_num_seqs", slow_but([3], [3, 4]))  # 3: rows wait for others to end
@pytest.mark.parametrize("sampling", slow_but(["penalized"], SETTINGS))
def test_the_loop_gives_what_single_steps_give(sampling, max_num_seqs, monkeypatch):
    """In graphs, with padding sequences; a second call, whose KV cache lies elsewhere, replays the same graphs."""
    model = one_layer()
    single = SingleSteps(read_decoder(model), own_weights, model.dtype)
    single.bind()
    expected = completions_of(request(sampling), single, max_num_seqs, 1)
    limits = request(sampling).limits
    assert (expected.lengths < limits).any() and (expected.lengths == limits).any(), expected.lengths
    graphed = decoder_of(model, 4, monkeypatch)
    for _ in range(2):  # in other blocks each time
        require_equal(completions_of(request(sampling), graphed, max_num_seqs, 4), expected)
        captured = graphed.graphs.capture.captured
    assert captured == len(graphed.graphs), "the second call captured again"
    assert graphed.graphs.capture.replays > 2 * captured


@pytest.mark.slow
def test_steps_between_two_checks_take_as_long_as_a_check_is_worth(monkeypatch):
    """Where nothing waits for a row's end, once the time of a step is known; the tokens are the same."""
    strides: list[int] = []
    run = ModelRunner.sampled_steps

    def recorded(runner: ModelRunner, tokens: torch.Tensor, sampling: SamplingState, steps: int):
        strides.append(steps)
        return run(runner, tokens, sampling, steps)

    monkeypatch.setattr(ModelRunner, "sampled_steps", recorded)
    made, decoder = replace(request("plain"), stop_token_ids=torch.tensor([9])), cuda_decoder(one_layer())
    made = replace(made, max_new_tokens=45, limits=torch.tensor([45, 30, 45, 20]))
    conditions = (StopCondition(((0, 1), (2, 3)), 2),)

    def decoded(seconds: float, max_num_seqs: int = 4, **changes: object) -> tuple[Completions, list[int]]:
        monkeypatch.setattr(scheduler, "STRIDE_S", seconds)
        strides.clear()
        return completions_of(replace(made, **changes), decoder, max_num_seqs, 4), list(strides)

    expected, usual = decoded(1e-9)
    assert max(usual) == 4 and sum(usual) == int(expected.lengths.max()) - 1
    assert len(set(expected.lengths.tolist())) > 2, expected.lengths
    actual, long = decoded(1e9)
    require_equal(actual, expected)
    assert long[:2] == [4, 32] and len(long) < len(usual)
    actual, waiting = decoded(1e9, max_num_seqs=3)
    require_equal(actual, expected)
    assert waiting[:2] == [4, 4] and 32 in waiting
    assert max(decoded(1e9, stop_conditions=conditions)[1]) == 4


@pytest.mark.slow
def test_long_strides_write_behind_the_limits_of_rows_that_began_earlier(monkeypatch):
    """A row that entered late sets the number of steps; the others end in the middle of it."""
    monkeypatch.setattr(scheduler, "MAX_STEPS", 8)
    made = replace(request("plain"), stop_token_ids=torch.tensor([-1]), max_new_tokens=12)
    made, decoder = replace(made, limits=torch.tensor([7, 12, 12, 12])), cuda_decoder(one_layer())
    expected = completions_of(made, decoder, 3, 2)
    monkeypatch.setattr(scheduler, "STRIDE_S", 1e9)
    require_equal(completions_of(made, decoder, 3, 2), expected)
    assert expected.lengths.tolist() == [7, 12, 12, 12]


@pytest.mark.parametrize("bound", ["group", "environment"])
def test_ranks_and_environments_keep_the_usual_number_of_steps(bound, monkeypatch):
    """Ranks that share a batch would each take the number that its own clock gives."""
    decoder, pool = cuda_decoder(one_layer()), BlockPool(32)
    pool.begin_call(decoder.kv)
    own = Scheduler(request("plain"), decoder, pool, 4, lambda name: contextlib.nullcontext(), 4)
    own.step_s = 1e-9
    assert own.stride() == 32
    monkeypatch.setattr(*{"group": (decoder, "group"), "environment": (own, "environment")}[bound], object())
    assert own.stride() == 4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", slow_but(["plain"], SETTINGS))
def test_verified_drafts_give_what_single_steps_give(sampling, monkeypatch):
    """In graphs, with waiting rows, ends and limits inside drafts; with a repetition penalty nothing is drafted."""
    plain, speculating = (decoder_of(one_layer(), 8, monkeypatch) for _ in range(2))
    expected, speculator = completions_of(request(sampling), plain, 3, 4), Speculator(SpeculationConfig(max_draft=3))
    for _ in range(2):  # then the history has the whole text
        with forced():
            require_equal(completions_of(request(sampling), speculating, 3, 4, speculator=speculator), expected)
    drafted, accepted, _ = speculator.taken_counters()
    assert accepted > 3 if SETTINGS[sampling].repetition_penalty == 1.0 else not drafted


@pytest.mark.slow
def test_rows_that_reach_their_limits_have_not_stopped_where_padding_is_a_stop_token(monkeypatch):
    """After its limit a row's tokens on the device are padding, which must not be taken for the token that ended it."""
    model = one_layer()
    single = SingleSteps(read_decoder(model), own_weights, model.dtype)
    single.bind()
    own = replace(request("plain", rows=8), pad_token_id=8)
    assert 8 in own.stop_token_ids.tolist()
    expected = completions_of(own, single, 8, 1)
    assert (expected.lengths == own.limits).any() and (expected.lengths < own.limits).any(), expected.lengths
    require_equal(completions_of(own, decoder_of(model, 8, monkeypatch), 8, 4), expected)


@pytest.mark.slow
@torch.no_grad()
def test_the_outputs_that_graphs_keep_are_those_that_scores_compute(monkeypatch):
    """Also in other blocks than those of the capture."""
    decoder, pool = decoder_of(one_layer(), 4, monkeypatch), BlockPool(32, extra_bytes=10**6)
    decoder.keeps_hidden_states, weights = True, KVWeights(0, 0)
    made = replace(request("plain"), limits=torch.full((4,), NEW), stop_token_ids=torch.tensor([-1]))
    completions_of(made, decoder, 2, 4)
    captured = decoder.graphs.capture.captured
    done = completions_of(made, decoder, 2, 4, pool, weights=weights)
    assert decoder.graphs.capture.captured == captured
    prompts = (ids[-length:] for ids, length in zip(made.prompt_ids, made.prompt_lengths, strict=True))
    rows = [torch.cat([own, more]) for own, more in zip(prompts, done.tokens, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    pool.begin_call(decoder.kv, weights)
    found = score_packed(decoder, pool, ids, mask, 0.7, 4)
    assert pool.reused_scored_tokens == mask.sum() - len(ids)
    pool.begin_call(decoder.kv, KVWeights(1, 0))
    expected = score_packed(decoder, pool, ids, mask, 0.7, 4)
    assert pool.reused_scored_tokens == 0
    torch.testing.assert_close(found.per_token_logps, expected.per_token_logps, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.entropies, expected.entropies, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_graphs_stop_at_the_stop_tokens_of_the_latest_request(monkeypatch):
    """Also if it has another number of them. The second tokens of most sequences end the first request's alone."""
    graphed, eager = (decoder_of(one_layer(), size, monkeypatch) for size in (4, 0))
    endless = replace(request("plain"), stop_token_ids=torch.tensor([-1]))
    expected = completions_of(endless, eager, 4, 4)
    completions_of(replace(endless, stop_token_ids=expected.tokens[:3, 1].clone()), graphed, 4, 4)
    require_equal(completions_of(endless, graphed, 4, 4), expected)


def test_the_loop_without_graphs_gives_the_same(monkeypatch):
    model = one_layer()
    eager, graphed = decoder_of(model, 0, monkeypatch), decoder_of(model, 4, monkeypatch)
    expected = completions_of(request("plain"), graphed, 8, 4)
    require_equal(completions_of(request("plain"), eager, 8, 4), expected)
    assert not len(eager.graphs) and len(graphed.graphs)


def test_steps_that_cannot_be_captured_run_without_graphs_and_warn_once(monkeypatch):
    """The capture fails at its second step, when one graph has been replayed."""
    model, recorded, captures = one_layer(), RecordedCapture(monkeypatch), []

    def capture(run):
        captures.append(run)
        if len(captures) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorded(run)

    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, 4, capture)
    decoder.bind()
    with pytest.warns(UserWarning, match="slower.*operation not permitted.*when the process ends") as caught:
        actual = completions_of(request("plain"), decoder, 4, 4)
    assert len([warning for warning in caught if "CUDA graphs" in str(warning.message)]) == 1
    assert len(captures) == 2 and recorded.replays == 1
    assert decoder.eager_reason == "a decode step cannot be captured: operation not permitted when stream is capturing"
    require_equal(actual, completions_of(request("plain"), decoder_of(model, 0, monkeypatch), 4, 4))


@pytest.mark.slow
def test_the_self_check_and_rollouts_of_all_sizes_share_one_state_and_its_graphs(monkeypatch):
    """Where the state was dropped, so were the check's graphs, and torch refused the next capture into their pool."""
    model = checked_model()
    decoder = decoder_of(model, 8, monkeypatch)
    assert self_check_reason(decoder, model) == ""
    state = decoder.state
    completions_of(request("plain", rows=5), decoder, 5, 4)
    assert decoder.state is state and decoder.eager_reason == ""
    assert decoder.graphs.capture.captured == len(decoder.graphs), "a graph was captured twice"


@pytest.mark.slow
def test_dropped_graphs_are_captured_again(monkeypatch):
    """Longer sequences need longer tables, at other addresses."""
    decoder = decoder_of(one_layer(), 4, monkeypatch)
    completions_of(request("plain"), decoder, 4, 4)
    captured = decoder.graphs.capture.captured
    decoder.reserve(2 * decoder.positions)
    assert not len(decoder.graphs)
    completions_of(request("plain"), decoder, 4, 4)
    assert decoder.eager_reason == "" and decoder.graphs.capture.captured == 2 * captured


def test_every_size_of_a_long_rollout_is_captured_once(monkeypatch):
    """Rows end one by one from 256 to none, twice, under two kinds of sampling settings."""
    captured: list[Callable] = []
    capture = lambda run: captured.append(run) or (lambda: None)  # noqa: E731
    model = one_layer()
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, 256, capture)
    decoder.bind()
    kv, counts = decoder.kv(2), []
    for _ in range(2):
        for sampling in ("plain", "truncated"):
            for rows in range(256, 0, -1):
                ones = torch.ones(rows, dtype=torch.int64)
                draws = SamplingState(ones, ones, ones, torch.tensor([0]), 0, RowParams.of(SETTINGS[sampling]))
                tables = torch.ones(rows, 1, dtype=torch.int32)
                batch = PackedBatch(ones, ones.int(), torch.arange(rows + 1).int(), ones.int(), tables)
                decoder.decode_steps(batch, kv, draws, 1)
            counts.append(len(captured))
    sizes = len(capture_sizes(256))
    assert counts == [2 * sizes, 3 * sizes, 3 * sizes, 3 * sizes]


def test_a_step_outside_of_the_graphs_launches_next_to_nothing_and_never_waits(monkeypatch):
    """Five launches a step are allowed; loading the batch costs a dozen for all steps together."""
    decoder, pool, steps = decoder_of(one_layer(), 4, monkeypatch), BlockPool(32), NEW - 1
    endless = replace(request("plain"), stop_token_ids=torch.tensor([-1]), limits=torch.full((4,), NEW))
    completions_of(endless, decoder, 4, steps, pool)  # captures
    ops, replays, own = DeviceOps(), Counter(), CudaDecoder.decode_steps

    def seen(*args):
        with ops.on(monkeypatch):
            return own(*args)

    monkeypatch.setattr(CudaDecoder, "decode_steps", seen)
    monkeypatch.setattr(decoder.graphs, "replay", lambda key: replays.update([key[0]]))
    completions_of(endless, decoder, 4, steps, pool)
    assert not ops.waits
    assert replays["decode"] == replays["draw"] == steps
    assert (len(ops.seen) + sum(replays.values())) / steps <= 5, Counter(ops.seen)


def launches_in(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> DeviceOps:
    """What a device sees of a function."""
    ops = DeviceOps()
    with torch.no_grad(), ops.on(monkeypatch):
        run()
    return ops


@pytest.mark.parametrize("variant", slow_but(["qwen3", "gemma2", "youtu"], DENSE))
def test_a_layer_of_a_decode_step_launches_at_most_ten_kernels(variant, monkeypatch):
    """Two layers against one; and what is outside of the layers: embedding, slots, final norm, head, logits.

    Latent attention launches four more: the two products of its heads with the latents, and the down-projection and
    norm of its queries.
    """
    model = small(variant)
    decoder = cuda_decoder(model)
    decoding = Decoding(decoder, sequences((5, 5)))
    decoding.run([0, 0], [2, 2])
    batch = decoding.batch([(2, 3), (2, 3)])
    hidden = torch.zeros(2, decoder.spec.hidden_size)
    of_one, of_two = (
        launches_in(lambda last=last: decoder.decode_layers(hidden, batch, decoding.kv, 0, last), monkeypatch)
        for last in (1, 2)
    )
    whole = launches_in(lambda: decoder.eager_decode(batch, decoding.kv), monkeypatch)
    assert not whole.waits
    limit = 14 if decoder.spec.latent_dim else 10
    assert len(of_two.seen) - len(of_one.seen) <= limit, of_two.seen
    assert len(whole.seen) - len(of_two.seen) <= OUTSIDE, whole.seen


@pytest.mark.parametrize("sampling", SETTINGS)
def test_drawing_takes_three_launches_and_never_waits_for_the_device(sampling, monkeypatch):
    drawn = request(sampling)
    keys, token_ids = drawn.sampling_keys, drawn.prompt_ids if SETTINGS[sampling].repetition_penalty > 1 else None
    stops, params = drawn.stop_token_ids, RowParams.of(drawn.sampling_params, drawn.prompt_ids.device)
    draws = SamplingState(keys, torch.zeros_like(keys), drawn.limits, stops, 0, params, token_ids)
    state = DecodeState(8, 64, VOCABULARY, torch.float32, torch.device(DEVICE))
    state.load_draws(draws)
    ops = launches_in(lambda: state.draw(draws, 4), monkeypatch)
    assert ops.seen == ["_sums_kernel", "_draw_kernel", "_advance_kernel"] and not ops.waits


@pytest.mark.parametrize("rows", [3, 11])
def test_the_plan_counts_the_loops_tensors(rows, monkeypatch):
    """As planned without a device: exactly the tensors that the loop makes, at 152k logits a row as at 200."""
    decoder = decoder_of(one_layer(), 64, monkeypatch)
    decoding = Decoding(decoder, sequences((5,) * rows))
    decoding.run([0] * rows, [2] * rows)
    decoding.decode([2] * rows)
    size = next(size for size in capture_sizes(64) if size >= rows)
    pool = decoder.activation_bytes(size) + decoder.state.logits[:size].nbytes
    assert decoder.loop_bytes(rows, 5) == decoder.state.nbytes + pool
    assert decoder.state.capacity == 64, "the largest step with a graph"
    monkeypatch.setattr(CudaDecoder, "_num_logits", 151_936)
    assert decoder.loop_bytes(rows, 5) > 2 * 4 * 151_936 * rows
