"""Decoders over an int8 copy equal Hugging Face with rounded weights: on Triton kernels, in torch and on CPU kernels.

Without a GPU the Triton kernels run in the interpreter: two layers, a few tokens.
"""

from contextlib import nullcontext

import pytest
import torch

from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.model_info import ModelInfo
from hybrid.weights.int8 import dequantized, int8_weights, quantized
from hybrid.weights.int8_copy import Int8Copy
from hybrid.weights.joined import joined_refs
from hybrid.weights.model_weights import read_weights
from tests.decoders.test_torch_decoder import distance
from tests.inference.test_int8 import rounded
from tests.marks import slow_but
from tests.tiny_models import RECURRENT, tiny_model, with_peft

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
from hybrid.decoders.cuda_decoder import Int8CudaDecoder
from tests.decoders.test_cuda_decoder import DEVICE, NEW, PROMPTS, Decoding, eager_capture, hugging_face, sequences
from tests.decoders.test_cuda_recurrent import small

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KINDS = {"triton": Int8CudaDecoder, "torch": Int8Decoder, "cpu": CpuDecoder}


def copy_of(model: torch.nn.Module, joins: bool = True) -> Int8Copy:
    """A refreshed copy.  joins: q, k and v lie in one buffer, and gate and up."""
    info = ModelInfo(model)
    copy = Int8Copy(read_weights(info, layers_per_group=1), 1, joined_refs(info.layout) if joins else ())
    copy.refresh(lambda name: nullcontext(), adapters=True)
    return copy


def decoder_over(copy: Int8Copy, kind: str, max_capture_size: int = 0):
    """A bound decoder over a copy."""
    weights = DecoderWeights(copy.layout, copy, adapters=True)
    more = {
        "triton": {"max_capture_size": max_capture_size, **({} if DEVICE == "cuda" else {"capture": eager_capture})},
        "cpu": {"library": cpu_library()},
    }.get(kind, {})
    decoder = KINDS[kind](copy.layout, weights.tensor, weights.embedding().dtype, **more)
    decoder.bind()
    return decoder


CASES = [(kind, family) for kind in KINDS for family in ("llama", "qwen2", "gpt2", "gpt_neox", "bloom")]
RECURRENT_CASES = [
    (kind, family) for kind in KINDS for family in ("qwen3_5_text", "bamba", "lfm2", "falcon_h1", "olmo_hybrid")
]


@pytest.mark.parametrize(
    ("kind", "family"),
    slow_but(
        [("triton", "qwen2"), ("torch", "qwen2"), ("torch", "gpt2"), ("cpu", "gpt_neox"), ("torch", "qwen3_5_text")],
        CASES + RECURRENT_CASES,
    ),
)
def test_logits_equal_hugging_face_with_rounded_weights(kind, family):
    """Prefill, decode steps in graphs, a token behind a prefix; also after the weights have changed."""
    if kind == "cpu" and (cpu_library() is None or DEVICE == "cuda"):
        pytest.skip("no C++ compiler here, or weights on a GPU")
    layers = {"gpt2": "n_layer", "bloom": "n_layer"}.get(family, "num_hidden_layers")
    model = (small(family) if family in RECURRENT else tiny_model(family, **{layers: 2})).to(DEVICE).eval()
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    copy = copy_of(model)
    decoder = decoder_over(copy, kind, max_capture_size=4)
    for _ in range(2):
        decoder.reserve(len(ids[0]))
        actual = Decoding(decoder, ids).every_logit()
        assert distance(actual, hugging_face(rounded(model, 1), ids)) < 2e-6  # as test_cuda_decoder.py's
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.03).add_(0.001)
        copy.weights.version.loads += 1
        copy.refresh(lambda name: nullcontext(), adapters=True)
        decoder.bind()


@pytest.mark.parametrize("joins", [True, False])
def test_joined_matrices_are_one_product(joins):
    decoder = decoder_over(copy_of(tiny_model("qwen2").to(DEVICE), joins), "torch")
    assert ("qkv.weight" in decoder.blocks[0]) == ("gate_up.scale" in decoder.blocks[0]) == joins
    assert decoder.nbytes() == (0 if not joins else 3 * 4 * (32 + 16 + 16)), "more is copied than the joined biases"


def test_adapters_are_merged_in_float32_and_rounded_once():
    """bfloat16 weights plus their deltas: quantizing the merged weight in bfloat16 would round twice."""
    model = with_peft(tiny_model("llama", dtype=torch.bfloat16)).to(DEVICE)
    copy = copy_of(model)
    [gate] = [
        entry for entry in copy.entries.values() if entry.module is copy.holders[1] and entry.name == "gate_weight"
    ]
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj")
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.weight.double() + layer.scaling["default"] * b @ a
    [(values, scale)] = [
        pair for pair in int8_weights(gate.module) if pair[0] is gate.module._parameters["gate_weight"]
    ]
    error = (dequantized(values, scale).double() - exact).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-5)).all()
    twice = dequantized(*quantized(exact.bfloat16(), 1, torch.float32))
    assert ((twice.double() - exact).abs() > scale.double() / 2 * (1 + 1e-5)).any(), "bfloat16 hides the difference"


def test_a_tied_head_is_read_in_place_and_not_quantized():
    model = tiny_model("llama", tie_word_embeddings=True).to(DEVICE)
    copy = copy_of(model)
    weights = DecoderWeights(copy.layout, copy, adapters=True)
    assert weights.tensor(copy.layout.outer["head.weight"]) is model.model.embed_tokens.weight
    assert {tensor.dtype for tensor in copy.holders.parameters()} == {torch.int8}
    matrices = sum(param.numel() for name, param in model.named_parameters() if "_proj" in name)
    rows = sum(len(param) for name, param in model.named_parameters() if "_proj" in name)
    assert copy.nbytes() == copy.planned()[0] == matrices + 4 * rows
