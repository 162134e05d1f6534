"""With `batch_invariant` a token's logits are the same bits alone and in any batch, in prefill and decode steps.

Without a GPU the kernels run in Triton's interpreter: it shows the order of the sums; that one instruction multiplies
all tiles is read from the PTX (tests/kernels/test_triton_compiles.py).
"""

import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

import triton

from hybrid.config import HybridEngineConfig, RolloutConfig, check_settings
from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.selection import TRITON
from hybrid.kernels import torch_ops, triton_attention, triton_linear
from hybrid.kernels.triton_linear import invariant_linear
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.training.invalid_settings import invalid_invariance
from tests.decoders.test_cuda_decoder import (
    DEVICE,
    HALF,
    TOLERANCE,
    Decoding,
    average,
    cuda_decoder,
    distance,
    eager_capture,
    hugging_face,
    sequences,
    small,
)
from tests.decoders.test_cuda_recurrent import small as small_recurrent
from tests.decoders.test_torch_decoder import own_weights
from tests.decoders.test_unmerged_lora import fused_of
from tests.kernels import interpreter_bfloat16
from tests.marks import slow_but
from tests.tiny_models import tiny_model, with_peft

interpreter_bfloat16.install()

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LENGTH = BLOCK_SIZE + 9  # tokens of the sequence that is compared: three of attention's tiles in float32
PROMPT = LENGTH - 1
CAPTURE = {} if DEVICE == "cuda" else {"capture": eager_capture}


@pytest.fixture(autouse=True)
def rows_alike(monkeypatch):
    """The interpreter's products are numpy's, in which a row's bits depend on its place in the matrix (OpenBLAS on an
    EPYC with AVX-512). A device computes all rows of a tile alike: so do products of one row after the other."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    def matmul(a: np.ndarray, b: np.ndarray, **settings: object) -> np.ndarray:
        return np.matmul(a[..., None, :], b[..., None, :, :], **settings)[..., 0, :]

    monkeypatch.setattr(interpreter, "np", SimpleNamespace(**{**vars(np), "matmul": matmul}))

    # On CPUs torch computes an element's sigmoid by another formula at the end of a row than before.
    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + x.neg().exp())

    monkeypatch.setattr(torch.Tensor, "sigmoid", sigmoid)
    monkeypatch.setitem(torch_ops.ACTIVATIONS, "silu", lambda x: x * sigmoid(x))


# The linear layer


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("inputs", "outputs"), [(1100, 130), (40, 33)])
def test_rows_are_the_same_bits_in_any_number(inputs, outputs, dtype, monkeypatch):
    """1 to 300 rows, at other places of their tiles: up to 64 of them split over programs, more in one program."""
    monkeypatch.setattr(triton_linear, "PROGRAMS", 4)
    x, weight, bias = operands(300, inputs, outputs, dtype)
    exact = x.double() @ weight.double().T + bias.double()
    whole = invariant_linear(x, weight, bias)
    # Half precision rounds once, at the end; float32 sums in another order.
    error = (whole.double() - exact).abs().max() / exact.abs().max()
    assert error <= (1e-6 if dtype == torch.float32 else 2**-8)
    for first, last in ((0, 1), (299, 300), (5, 22), (0, 64), (100, 165), (1, 300)):
        assert torch.equal(invariant_linear(x[first:last], weight, bias), whole[first:last]), (first, last)
    transposed = weight.T.contiguous().T
    assert torch.equal(invariant_linear(x[:3], transposed, bias), whole[:3])
    assert invariant_linear(x[:0], weight, bias).shape == (0, outputs)


def test_inputs_are_split_by_the_weight_alone(monkeypatch):
    """With splits by the number of rows, the test above would fail."""
    x, weight, _ = operands(65, 1100, 130, torch.float32)
    whole = invariant_linear(x, weight)
    assert triton_linear.num_splits(*weight.shape, 64) > 1
    monkeypatch.setattr(triton_linear, "num_splits", lambda *sizes: 1)
    assert not torch.equal(invariant_linear(x[:64], weight), whole[:64])


# The decoder


def invariant_decoder(model: torch.nn.Module, max_capture_size: int = 0) -> CudaDecoder:
    decoder = CudaDecoder(
        read_decoder(model), own_weights, model.dtype, max_capture_size, batch_invariant=True, **CAPTURE
    )
    decoder.bind()
    return decoder


def last_logits(decoder: CudaDecoder, others: tuple[int, ...], cuts: tuple[int, ...]) -> torch.Tensor:
    """The logits of the last two tokens of the compared sequence, [2, vocabulary]: it is prefilled up to each of
    `cuts`, together with `others`, sequences of so many tokens; decode steps follow."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 90, (length + 2,), generator=generator).to(DEVICE) for length in others]
    place = len(others) // 2
    decoding = Decoding(decoder, [*ids[:place], *sequences((LENGTH,)), *ids[place:]])
    ends = [0] * (len(others) + 1)
    rows = []
    for cut in cuts:
        begins, ends = ends, [*others[:place], cut, *others[place:]]
        rows = [decoding.run(begins, ends)[place][-1]]
    for _ in range(LENGTH - cuts[-1]):
        rows.append(decoding.decode(ends)[place].clone())
        ends = [end + 1 for end in ends]
    return torch.stack(rows)


TWO, TEN = (5, 27), (1, 2, 3, 4, 9, 1, 6, 2, 3, 5)


def batches(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The logits of the last two tokens: by decode steps alone and among others, with and without graphs, and by
    prefill, whole and in chunks."""
    eager, graphs = invariant_decoder(model), invariant_decoder(model, 16)
    logits = {
        "alone": last_logits(eager, (), (PROMPT,)),
        "among 3": last_logits(eager, TWO, (PROMPT,)),
        "among 11": last_logits(eager, TEN, (PROMPT,)),
        "in graphs": last_logits(graphs, TWO, (PROMPT,)),
        "in chunks": last_logits(graphs, (), (3, 20, PROMPT)),
    }
    assert len(graphs.graphs)
    logits["prefilled"] = Decoding(eager, sequences((LENGTH,))).run([0], [LENGTH])[0][PROMPT - 1 :]
    return logits


# Norms of heads; windows, soft caps and rounded scores; ALiBi; transposed weights; experts, with sinks; head sizes and
# inputs that differ by layer, and experts parallel to an MLP.
GEMMA4 = "gemma4_text", "gemma4, mixture"
COVERED = ["qwen3", "gemma2", "bloom", "gpt2", "mixtral", "gpt_oss", *GEMMA4]


# Gated delta nets; Mamba 2, with experts in other layers and with attention in the same; short convolutions.
RECURRENT = ["qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2"]


@pytest.mark.parametrize(
    ("variant", "dtype"),
    slow_but([("qwen3", HALF)], product([*COVERED, *RECURRENT], (torch.float32, HALF))),
)
def test_logits_are_the_same_bits_in_any_batch(variant, dtype):
    logits = batches((small_recurrent if variant in RECURRENT else small)(variant).to(dtype))
    for name, each in logits.items():
        assert torch.equal(each, logits["alone"]), name


@torch.no_grad()
@pytest.mark.parametrize("variant", RECURRENT)
def test_states_are_updated_by_one_code_in_prefill_and_decode_steps(variant):
    """From token to token. In the interpreter other kernels give the same bits; on a device their sums may differ."""
    model = small_recurrent(variant).to(HALF)
    decoders = {True: invariant_decoder(model), False: cuda_decoder(model)}
    for is_invariant, decoder in decoders.items():
        batch = Decoding(decoder, sequences((70, 40))).batch([(69, 70), (39, 40)])
        prefill, step = (decoder._step(batch, decoding=decoding).states for decoding in (False, True))
        assert (prefill.chunks is None) == is_invariant and step.chunks is None
        assert not prefill.decoding and step.decoding != is_invariant


def test_without_the_setting_logits_depend_on_the_batch(monkeypatch):
    """Attention divides a context by the number of sequences, and a product its inputs by that of rows; without a
    device torch's own product stands for cuBLAS."""
    monkeypatch.setattr(triton_attention, "MULTIPROCESSORS", 12)
    decoder = cuda_decoder(small("qwen3"))
    alone, among = (last_logits(decoder, others, (PROMPT,)) for others in ((), TEN))
    assert not torch.equal(alone, among)
    assert distance([alone], [among]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*COVERED, *RECURRENT])
def test_invariant_logits_equal_hugging_face(variant):
    model = (small_recurrent if variant in RECURRENT else small)(variant)
    decoding = Decoding(invariant_decoder(model, 4), sequences((LENGTH, 6, 4)))
    assert distance(decoding.every_logit((PROMPT - 1, 4, 2)), hugging_face(model, decoding.ids)) < TOLERANCE


@pytest.mark.slow
def test_half_precision_rounds_as_hugging_face():
    model = small("qwen3")
    exact, ids = hugging_face(model, sequences((LENGTH, 6, 4))), sequences((LENGTH, 6, 4))
    expected = hugging_face(model.to(HALF), ids)
    actual = Decoding(invariant_decoder(model), ids).every_logit((PROMPT - 1, 4, 2))
    assert average(actual, expected) < average(expected, exact)


@pytest.mark.slow
def test_unmerged_adapters_are_covered():
    model = with_peft(small("qwen3")).eval()
    fused = fused_of(model)
    weights = DecoderWeights(fused.layout, fused.snapshot, adapters=True)
    reads = {"lora_deltas": weights.lora_deltas, "batch_invariant": True}
    decoder = CudaDecoder(read_decoder(model), weights.tensor, torch.float32, **reads)
    decoder.bind()
    alone, among = (last_logits(decoder, others, (PROMPT,)) for others in ((), TEN))
    assert torch.equal(alone, among)


# The setting


def refusal(family: str, settings: HybridEngineConfig | None = None, device: str = "meta", **rollout) -> str:
    """The message of the setting's refusal; "" if it is not refused."""
    model = tiny_model(family)
    settings, info = settings or HybridEngineConfig(), ModelInfo(model)
    assert info.layout is not None
    model.to(device)
    try:
        check_settings(invalid_invariance(info, settings, RolloutConfig(batch_invariant=True, **rollout)))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def test_what_is_not_covered_is_refused(monkeypatch):
    """On GPUs, for which another device than a CPU stands; on CPUs, whose kernels are invariant, only native layers."""
    assert refusal("llama", HybridEngineConfig(inference_tp_size=2), "cpu", weight_dtype="int8") == ""
    native = "rollout.batch_invariant: true given; it needs rollout.containers=fused; use false"
    assert refusal("llama", device="cpu", containers="native") == native
    assert re.search("needs triton; install it", refusal("llama"))
    monkeypatch.setattr("hybrid.training.invalid_settings.kernels_for", lambda weight: TRITON)
    assert refusal("llama") == refusal("lfm2") == ""
    for message, reason in {
        "latent attention .* use false": refusal("deepseek_v3"),
        "int8 .* weight_dtype=model": refusal("llama", weight_dtype="int8"),
        "sums over ranks .*inference_tp_size=1": refusal("llama", HybridEngineConfig(inference_tp_size="auto")),
        "FlashInfer's .* attention_backend=triton": refusal("llama", attention_backend="auto"),
        "values of another size.* use false": refusal("mimo_v2_flash"),
    }.items():
        assert re.search(message, reason), (message, reason)
