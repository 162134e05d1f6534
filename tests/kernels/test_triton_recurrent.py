"""The Triton kernels of recurrent mixers equal the mixers in torch operations, in prefills and in decode steps.

Without a GPU they run in Triton's interpreter.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.generation.input_prefill import in_ring
from hybrid.kernels import triton_delta_net, triton_mamba2, triton_recurrent
from hybrid.kernels.kv_addresses import state_addresses
from hybrid.kernels.recurrent import MixerLayer, RecurrentMixer, state_rows
from hybrid.kernels.torch_delta_net import GatedDeltaNet, KimiDeltaAttention
from hybrid.kernels.torch_mamba2 import Mamba2
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.kernels.triton_delta_net import delta_net, kimi_delta
from hybrid.kernels.triton_mamba2 import mamba2
from hybrid.kernels.triton_recurrent import CHUNK, KernelLayer, StateTables, chunks_of, short_conv
from hybrid.models.spec import JOINED
from tests.kernels import interpreter_bfloat16
from tests.marks import slow_but

interpreter_bfloat16.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HIDDEN, EPS = 16, 1e-5
Mixed = Callable[[RecurrentMixer, torch.Tensor, KernelLayer], torch.Tensor]
# Mixers, and roles that they lack. Sizes that are no powers of two; heads that share keys or B and C; several programs
# of a head in prefills ("wide").
MIXERS: dict[str, tuple[RecurrentMixer, Mixed, tuple[str, ...]]] = {
    "gated delta net": (GatedDeltaNet(2, 4, 8, 6, 4), delta_net, ()),
    "parts, betas up to 2": (GatedDeltaNet(3, 3, 6, 10, 2, 2.0, 1e-3), delta_net, ("delta_qkv",)),
    "wide": (GatedDeltaNet(1, 2, 64, 24, 4), delta_net, ("conv.bias",)),
    "Kimi": (KimiDeltaAttention(3, 6, 3), kimi_delta, ("delta_qkv", "conv.bias")),
    "Mamba 2": (Mamba2(4, 6, 2, 10, 4), mamba2, ()),
    "limits, no norm": (Mamba2(4, 8, 1, 8, 2, 0.6, 0.8), mamba2, ("mamba_norm", "conv.bias")),
    "factors": (Mamba2(2, 8, 1, 8, 4, 0.0, 2.0, 1.3, 0.7, (0.9, 0.7, 1.2, 1.1, 0.8)), mamba2, ()),
    "short convolution": (ShortConv(20, 3), short_conv, ()),
    "one tap": (ShortConv(20, 1), short_conv, ("conv.bias",)),
}
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 2e-5, torch.bfloat16: 2**-7}  # of the largest element
# Tokens of each sequence by forward; rows of ones are decode steps too. Some are shorter than the convolution.
FORWARDS = ((5, 1, 2), (1, 1, 1), (2, 0, 7), (1, 1, 1))
# Several chunks, parts of one, one to the token, none.
CHUNKED = ((CHUNK + 6, 1, 2 * CHUNK + 1), (1, 1, 1), (3, CHUNK, 0), (1, 1, 1))


class Layers:
    """A layer of the mixer in torch operations, and the same in kernels, over states of their own, at first NaN."""

    def __init__(self, name: str, dtype: torch.dtype, slots: int = 4):
        self.mixer, self.kernels, without = MIXERS[name]
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / 2).to(DEVICE, dtype)

        shapes = {f"{role}.weight": shape for role, shape in self.mixer.weight_shapes(HIDDEN).items()}
        shapes["conv.bias"] = shapes["conv.weight"][1:]
        self.weights = {role: random(*shape) for role, shape in shapes.items() if role.split(".")[0] not in without}
        self.weights = {role: weight for role, weight in self.weights.items() if role not in without}
        for joined, roles in JOINED.items():
            parts = [self.weights[f"{role}.weight"] for role in roles if f"{role}.weight" in self.weights]
            if f"{roles[0]}.weight" in self.weights:
                self.weights[f"{joined}.weight"] = torch.cat(parts)
        *matrices, (kept, channels) = self.mixer.state_shapes()
        shapes_of_states = [*matrices, (kept, channels)], [*matrices, (kept + 1, channels)]
        self.expected, self.states = (
            tuple(torch.full((slots, *shape), torch.nan, device=DEVICE) for shape in each) for each in shapes_of_states
        )
        self.addresses = state_addresses({0: self.states}, 1)[0].to(DEVICE)
        self.factors = self.mixer.factors(dtype, torch.device(DEVICE)) if isinstance(self.mixer, Mamba2) else None

    def linear(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """Row by row: a row's bits do not depend on the others."""
        return torch.stack([self.weights[f"{role}.weight"] @ row for row in x])

    def mixed(self, x: torch.Tensor, sequences: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """In torch operations.  sequences: slots, positions, cu_seqlens."""
        slots, positions, cu_seqlens = sequences
        groups = state_rows(cu_seqlens, positions, slots)
        return self.mixer.mixed(x, MixerLayer(self.linear, self.weights, self.expected, groups, EPS))

    def run(
        self, x: torch.Tensor, sequences: tuple[torch.Tensor, ...], decoding: bool, chunked: bool = False
    ) -> torch.Tensor:
        """In kernels."""
        counts = sequences[2].diff().long()
        owners = None if decoding else torch.arange(len(counts), device=DEVICE).repeat_interleave(counts)
        chunks = chunks_of(sequences[2], len(x)) if chunked and not decoding else None
        tables = StateTables(*sequences, owners, chunks)
        layer = KernelLayer(self.linear, self.weights, self.addresses, tables, EPS, self.factors)
        return self.kernels(self.mixer, x, layer)


def sequences_of(begins: list[int], counts: tuple[int, ...], slots: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Slots, positions and cu_seqlens."""
    spans = zip(begins, counts, strict=True)
    positions = torch.cat([torch.arange(begin, begin + count) for begin, count in spans])
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
    return tuple(tensor.int().to(DEVICE) for tensor in (torch.tensor(slots), positions, cu_seqlens))


QUICK = ["gated delta net", "Kimi", "Mamba 2", "short convolution"]
CASES = [(name, torch.float32) for name in MIXERS] + [(name, torch.bfloat16) for name in QUICK]


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), slow_but([(name, torch.float32) for name in QUICK], CASES))
def test_kernels_equal_the_mixers_in_torch(name, dtype):
    """Outputs and states, also of bits that are never written: a slot without a sequence stays NaN."""
    check_forwards(Layers(name, dtype), dtype, FORWARDS)


def check_forwards(layers: Layers, dtype: torch.dtype, forwards: tuple[tuple[int, ...], ...], chunked=False) -> None:
    """A layer's forwards of three sequences."""
    begins, slots = [0, 0, 0], (2, 0, 3)
    for number, counts in enumerate(forwards):
        sequences = sequences_of(begins, counts, slots)
        x = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(number)).to(DEVICE, dtype)
        expected = layers.mixed(x, sequences)
        actual = layers.run(x, sequences, set(counts) == {1}, chunked)
        # Chunks sum in another order: errors of the mean are five times as large, of 5e-8 of the largest element.
        limit = (1 + 4 * chunked) * TOLERANCE[dtype] * expected.abs().max()
        assert actual.dtype == dtype and (actual - expected).abs().max() <= limit
        begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
        for state, other in zip(layers.states[:-1], layers.expected[:-1], strict=True):
            assert torch.isnan(state[1]).all()
            torch.testing.assert_close(state[list(slots)], other[list(slots)], rtol=1e-4, atol=2e-5)
        for slot, length in zip(slots, begins, strict=True):
            ring, width = layers.states[-1][slot], len(layers.states[-1][slot])
            written = [position % width for position in range(max(length - width + 1, 0), length)]
            expected_ring = in_ring(layers.expected[-1][slot], length, width)
            torch.testing.assert_close(ring[written], expected_ring[written])
        assert torch.isnan(layers.states[-1][1]).all()


# On a device chunks are for bfloat16: products of float32 have TF32's precision there.
CHUNK_DTYPES = [torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.bfloat16]
CHUNKS_OF = ["gated delta net", "parts, betas up to 2", "wide", "Mamba 2", "limits, no norm"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but([(name, CHUNK_DTYPES[0]) for name in ("gated delta net", "Mamba 2")], product(CHUNKS_OF, CHUNK_DTYPES)),
)
def test_chunks_equal_the_mixers_in_torch(name, dtype):
    """Sequences of several chunks, of parts of one, and of none; states go on from one forward to the next."""
    check_forwards(Layers(name, dtype), dtype, CHUNKED, chunked=True)


@torch.no_grad()
def test_chunks_of_keys_that_repeat():
    """One token all along, whose keys are corrected entirely and decay little: the worst case of the inverse, of which
    a series of powers would cancel."""
    dtype = CHUNK_DTYPES[0]
    layers, x = Layers("gated delta net", dtype), torch.ones(2 * CHUNK + 5, HIDDEN, dtype=dtype, device=DEVICE)
    layers.weights["a_log.weight"].fill_(-7)
    layers.weights["delta_ba.weight"][: layers.mixer.value_heads] = 1  # betas of 1 - 1e-7
    sequences = sequences_of([0], (len(x),), (2,))
    expected, actual = layers.mixed(x, sequences), layers.run(x, sequences, decoding=False, chunked=True)
    assert (actual - expected).abs().max() <= 5 * TOLERANCE[dtype] * expected.abs().max()
    difference = (layers.states[0][2] - layers.expected[0][2]).abs().max()
    assert difference <= 5 * TOLERANCE[dtype] * layers.expected[0][2].abs().max()


@torch.no_grad()
@pytest.mark.slow
def test_real_heads_by_chunks_round_as_the_scan(monkeypatch):
    """Heads of 128 keys and values, and of 64 elements with 128 states, over 150 tokens in bfloat16: as far from
    float32 as the kernels that go from token to token."""
    for mixer, kernels in ((GatedDeltaNet(1, 2, 128, 128, 4), delta_net), (Mamba2(2, 64, 1, 128, 4), mamba2)):
        monkeypatch.setitem(MIXERS, "real", (mixer, kernels, ()))
        exact, layers = Layers("real", torch.float32), Layers("real", torch.bfloat16)
        x = torch.randn(150, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
        exact.weights = {role: weight.to(torch.bfloat16).float() for role, weight in exact.weights.items()}
        sequences = sequences_of([0], (len(x),), (2,))
        expected = exact.mixed(x.float(), sequences)
        scanned, by_chunks = (layers.run(x, sequences, False, chunked) for chunked in (False, True))
        errors = [(actual.float() - expected).abs().mean().item() for actual in (scanned, by_chunks)]
        assert errors[1] <= 1.05 * errors[0], errors


@torch.no_grad()
@pytest.mark.parametrize(
    "name", slow_but(["gated delta net"], ["gated delta net", "wide", "Mamba 2", "short convolution"])
)
def test_padding_and_ended_sequences_write_no_state_and_change_no_other(name):
    """A slot below 0. And a decode step gives a sequence the same bits alone and among others."""
    layers = Layers(name, torch.float32)
    for state in layers.states:
        state.zero_()
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layers.run(x, sequences_of([0, 0, 0], (3, 2, 2), (0, 1, 2)), decoding=False)
    before = [state.clone() for state in layers.states]
    batch = layers.run(x[4:], sequences_of([3, 5, 2], (1, 1, 1), (0, -1, 2)), decoding=True)
    after = [state.clone() for state in layers.states]
    assert batch.isfinite().all()
    for state, old in zip(layers.states, before, strict=True):
        assert torch.equal(state[1], old[1]) and not torch.equal(state[0], old[0])
        state.copy_(old)
    alone = layers.run(x[6:], sequences_of([2], (1,), (2,)), decoding=True)
    assert torch.equal(alone[0], batch[2])
    for state, other in zip(layers.states, after, strict=True):
        assert torch.equal(state[2], other[2])


@torch.no_grad()
@pytest.mark.parametrize("name", slow_but(["gated delta net"], ["gated delta net", "Mamba 2"]))
def test_heads_and_channels_may_be_divided(name, monkeypatch):
    for kernels in (triton_delta_net, triton_mamba2):
        monkeypatch.setattr(kernels, "DECODE_CELLS", 32)
    monkeypatch.setattr(triton_recurrent, "CHANNEL_BLOCK", 16)
    test_kernels_equal_the_mixers_in_torch(name, torch.float32)
