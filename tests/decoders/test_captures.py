"""What a GPU's graphs and compiler see of the decoder on Triton kernels, on a machine without one.

Captures contain no wait of the host and no copy from its memory, for every decoder, way of sampling and division over
ranks. Launches of a rollout whose batch shrinks have one specialization for each kernel.
"""

import inspect
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from hybrid.decoders.batch import PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder, ShardedCudaDecoder
from hybrid.decoders.decode_state import DecodeState
from hybrid.kernels.triton_int8 import int8_linear
from hybrid.models.reader import read_decoder
from hybrid.runtime.parallel import InferenceGroup
from hybrid.sampling.params import RowParams, SamplingParams
from hybrid.sampling.sampler import in_fields, sample_sharded, stream_keys
from hybrid.sampling.state import SamplingState
from hybrid.sampling.vocabulary import VocabularySlice
from hybrid.weights.slices import Shard
from tests.decoders.test_cuda_decoder import DEVICE, LATENTS, cuda_decoder, small
from tests.decoders.test_sharded_decoder import Slices
from tests.device_ops import RecordedCapture
from tests.marks import slow_but
from tests.sampling_params import params_of

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has the real capture")
SETTINGS = {
    "greedy": params_of(0),
    "plain": params_of(0.8),
    "top_k": params_of(0.8, top_k=12),
    "top_p": params_of(1.0, top_p=0.9),
    "min_p": params_of(0.6, min_p=0.1),
    "all": params_of(1.3, top_k=12, top_p=0.9, min_p=0.01),
}
PENALIZED = {name: replace(params, repetition_penalty=1.6, min_new_tokens=4) for name, params in SETTINGS.items()}


class EqualRanks(InferenceGroup):
    """Stands in for ranks that all compute what this one does, but for small differences of their logits."""

    def __init__(self, size: int, tensor_size: int):
        super().__init__(size, connected=False)
        self.tensor = self if tensor_size == size else EqualRanks(tensor_size, tensor_size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.size)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return parts + 0.01 * torch.arange(self.size)[:, None, None]


def sharded_decoder(variant: str, size: int, tensor_size: int, capture: RecordedCapture) -> CudaDecoder:
    """Of the first of `size` ranks, which have each a slice of heads and vocabulary, and of the experts."""
    layout, group = read_decoder(small(variant)), EqualRanks(size, tensor_size)
    weights = Slices(layout, Shard(tensor_size, 0), Shard(size // tensor_size, 0))
    decoder = ShardedCudaDecoder(layout, weights, group, max_capture_size=2, capture=capture)
    decoder.bind()
    return decoder


def step_of(rows: int) -> PackedBatch:
    """The first token of each of `rows` sequences."""
    ids, starts = torch.arange(rows) % 50, torch.arange(rows + 1).int()
    return PackedBatch(ids, torch.zeros(rows).int(), starts, torch.ones(rows).int(), starts[1:, None])


def sampling_of(
    vocabulary: VocabularySlice | None, rows: int, params: SamplingParams, num_stops: int = 1
) -> SamplingState:
    """Draws of a token for each of `rows` sequences."""
    keys, zeros = stream_keys(3, torch.arange(rows), torch.zeros(rows, dtype=torch.long)), torch.zeros(rows).long()
    seen = torch.ones(rows, 2, dtype=torch.int64) if params.repetition_penalty != 1 else None
    settings = zeros + 9, torch.arange(num_stops) + 60, 0, RowParams.of(params), seen, vocabulary
    return SamplingState(keys, zeros, *settings)


CASES = [("qwen3", 2, 2), ("mixtral", 2, 1), ("qwen3", 1, 1), ("mixtral", 1, 1), ("mixtral", 4, 2), (LATENTS, 1, 1)]


@torch.no_grad()
@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize(("variant", "size", "tensor_size"), CASES)
def test_captured_steps_and_draws_neither_wait_nor_read_host_memory(variant, size, tensor_size, sampling, monkeypatch):
    """Around the kernels, which do not run here."""
    capture = RecordedCapture(monkeypatch)
    monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *args, **kwargs: None)
    if size == 1:
        decoder = cuda_decoder(small(variant), 2)
        decoder.graphs.capture = capture
    else:
        decoder = sharded_decoder(variant, size, tensor_size, capture)
    params = SETTINGS[sampling] if decoder.vocabulary else PENALIZED[sampling]
    draws = sampling_of(decoder.vocabulary, 2, params)
    capture.host.append(draws.params.table)
    decoder.decode_steps(step_of(2), decoder.kv(3), draws, 1)
    assert decoder.eager_reason == "" and capture.captured == capture.replays == len(decoder.graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("sampling", slow_but(["plain", "all"], SETTINGS))
def test_captured_draws_over_ranks_are_those_outside_of_a_graph(sampling, monkeypatch):
    """From logits that are written after the capture; those that read host memory would be of the capture's."""
    vocabulary, capture = VocabularySlice(EqualRanks(2, 2), 100), RecordedCapture(monkeypatch)
    draws = sampling_of(vocabulary, 2, SETTINGS[sampling])
    state = DecodeState(2, 32, vocabulary.width, torch.float32, torch.device("cpu"))
    state.load_draws(draws)
    capture.host.append(draws.params.table)
    replay = capture(partial(state.draw, draws, 2))
    for seed in range(3):
        state.logits.copy_(3 * torch.randn(state.logits.shape, generator=torch.Generator().manual_seed(seed)))
        state.load_draws(draws)
        replay()
        drawn = sample_sharded(state.logits, draws.keys, draws.positions, draws.params, vocabulary)
        expected, *logps = in_fields(drawn)
        assert torch.equal(state.tokens[0], expected)
        torch.testing.assert_close(state.logps[:, 0], torch.stack(logps), rtol=0, atol=2e-6)


class Specializations:
    """Replaces launches: nothing runs, and `keys` gets what Triton compiles for, by kernel and constants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.keys: dict[tuple, set[tuple]] = defaultdict(set)
        monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", self.launch())

    def launch(self):
        def run(kernel, *args, grid, warmup, **constants) -> None:
            parameters = inspect.signature(kernel.fn).parameters
            options = {name: constants.pop(name) for name in [*constants] if name not in parameters}
            given = dict(zip(parameters, args, strict=False)) | constants
            fixed, varying = [], []
            for name, parameter in parameters.items():
                if parameter.annotation in (triton.language.constexpr, "tl.constexpr"):
                    fixed.append((name, given[name]))
                    continue
                specialize, aligned = (
                    name not in (kernel.kwargs[option] or ())
                    for option in ("do_not_specialize", "do_not_specialize_on_alignment")
                )
                varying.append((name, native_specialize_impl(BaseBackend, given[name], False, specialize, aligned)))
            self.keys[(kernel.__name__, *fixed, *options.items())].add(tuple(varying))

        return run

    def require_one_each(self) -> None:
        """Assert that no kernel is compiled twice with the same constants."""
        for (name, *_), keys in self.keys.items():
            differing = {of_name[0][0] for of_name in zip(*keys, strict=True) if len({*of_name}) > 1}
            assert not differing, f"{name} is compiled {len(keys)} times, for {differing}"


@torch.no_grad()
@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_a_shrinking_batch_compiles_each_kernel_once(variant, monkeypatch):
    """From 48 rows to one, with experts recorded and hidden states kept, and several numbers of stop tokens."""
    decoder = cuda_decoder(small(variant))
    decoder.records_experts, decoder.keeps_hidden_states = bool(decoder.spec.num_experts), True
    kv, launches = decoder.kv(49), Specializations(monkeypatch)
    for rows in (48, 33, 16, 9, 5, 3, 2, 1):
        for params, num_stops in ((SETTINGS["plain"], 1), *((PENALIZED["all"], count) for count in (1, 3, 16))):
            decoder.decode_steps(step_of(rows), kv, sampling_of(None, rows, params, num_stops), 1)
    names = {name for name, *_ in launches.keys}
    assert {"_advance_kernel", "_draw_kernel", "_decode_kernel", "_keep_kernel", "_slot_mapping_kernel"} <= names
    assert ("_record_experts_kernel" in names) == decoder.records_experts
    launches.require_one_each()


def test_int8_products_of_few_rows_are_compiled_once(monkeypatch):
    launches, weight, scale = Specializations(monkeypatch), torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1)
    for rows in (16, 15, 2, 1):
        int8_linear(torch.zeros(rows, 64), weight, scale)
    assert len(launches.keys) == 1
    launches.require_one_each()
