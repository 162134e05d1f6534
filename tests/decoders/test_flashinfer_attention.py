"""Attention by FlashInfer: when it is chosen, and that the decoder gives its wrappers what they document.

A recording stand-in with the wrappers of flashinfer-python 0.7.2 checks shapes, dtypes and the order of plan and run,
and computes by a formula (`tests/fake_flashinfer.py`). The package itself has not run here.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.config import RolloutConfig, check_settings
from hybrid.decoders.attention_choice import attention_settings, choose_attention
from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.fused_model import FusedModel
from hybrid.generation.block_pool import BlockPool
from hybrid.kernels.attention_backend import AttentionSettings, LayerBlocks
from hybrid.kernels.flashinfer_attention import FlashInferAttention, flashinfer_reason
from hybrid.kernels.triton_attention import TritonAttention
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.training.invalid_settings import invalid_attention
from hybrid.weights.model_weights import read_weights
from hybrid.weights.snapshot import Snapshot
from tests import fake_flashinfer
from tests.decoders.test_cuda_decoder import (
    DEVICE,
    PROMPTS,
    Decoding,
    checked_model,
    eager_capture,
    hugging_face,
    sequences,
    small,
)
from tests.decoders.test_decode_loop import (
    SingleSteps,
    completions_of,
    one_layer,
    request,
    require_equal,
)
from tests.decoders.test_self_check import self_check_reason
from tests.decoders.test_torch_decoder import distance, own_weights
from tests.device_ops import RecordedCapture, layer_kv
from tests.marks import slow_but
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in is for machines without a device")
NEW = 2
# By name: a family and changes of it. Gemma 2 without soft caps has windows in some layers, and a scale of its own.
MODELS = {
    "llama": ("llama", {}),
    "gemma2, not capped": ("gemma2", {"attn_logit_softcapping": None}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}


@pytest.fixture
def calls(monkeypatch) -> fake_flashinfer.Calls:
    """The calls of a stand-in that is installed as `flashinfer`."""
    return fake_flashinfer.install(monkeypatch)


def flashinfer_decoder(model: torch.nn.Module, max_capture_size: int = 0, capture=eager_capture) -> CudaDecoder:
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, max_capture_size, capture, flashinfer=True)
    decoder.bind()
    return decoder


@pytest.mark.parametrize("name", slow_but(["gemma2, not capped"], MODELS))
def test_logits_equal_hugging_face(name, calls):
    """Prefill, decode steps without graphs, a token behind a prefix; unwritten positions and other blocks are NaN."""
    family, changes = MODELS[name]
    model = small(family, **changes)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    actual = Decoding(flashinfer_decoder(model), ids).every_logit()
    assert distance(actual, hugging_face(model, ids)) < 2e-6  # as with our kernels: sums in another order
    windows = len({layer.window for layer in read_decoder(model).spec.layers})
    assert calls.planned == ["prefill"] * windows + ["decode"] * windows * NEW + ["prefill"] * windows
    assert calls.ran == [kind for kind in ("prefill", *["decode"] * NEW, "prefill") for _ in range(2)]  # two layers


@pytest.mark.parametrize("max_capture_size", slow_but([0], [0, 4]), ids="eager graphs".split())
def test_the_loop_gives_what_single_steps_give(max_capture_size, calls, monkeypatch):
    """With sequences that end, and a second call in other blocks. Graphs run our kernels, also over moved blocks."""
    model = one_layer()
    single = SingleSteps(read_decoder(model), own_weights, model.dtype)
    single.bind()
    expected = completions_of(request("plain"), single, 3, 1)
    assert len(set(expected.lengths.tolist())) > 1, "all sequences end together"
    capture = RecordedCapture(monkeypatch)
    decoder = flashinfer_decoder(model, max_capture_size, capture)
    captured = []
    for _ in range(2):
        require_equal(completions_of(request("plain"), decoder, 3, 4, BlockPool(32)), expected)
        captured.append(capture.captured)
    assert captured[0] == captured[1] == len(decoder.graphs)
    assert "prefill" in calls.ran and ("decode" in calls.ran) == (max_capture_size == 0)
    assert calls.planned == calls.ran, "one layer: a plan for each run"


@pytest.mark.slow
def test_the_self_check_runs_flashinfer(calls, monkeypatch):
    """It accepts the decoder, prefill and decode; and rejects one whose decode attention misses a token."""
    model = checked_model()
    assert self_check_reason(flashinfer_decoder(model), model) == ""
    assert {"prefill", "decode"} == set(calls.ran)
    own = FlashInferAttention.attend

    def without_the_newest(attention, decoding, q, kv, batch, *others):
        if decoding:
            attention.plan(replace(batch, lengths=(batch.lengths - 1).clamp(min=1)), decoding)
        return own(attention, decoding, q, kv, batch, *others)

    monkeypatch.setattr(FlashInferAttention, "attend", without_the_newest)
    reason = self_check_reason(flashinfer_decoder(model), model)
    assert reason.startswith("layer 0, in decode steps, of the fused container differs"), reason


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_prefill_and_decode_equal_our_kernels(softcap, group, calls):
    """A soft cap, windows, GQA and a scale, without a decoder: prompts, prefixes, full and just begun blocks."""
    lengths, new = [BLOCK_SIZE + 1, 1, 2 * BLOCK_SIZE, 7], [3, 1, 2 * BLOCK_SIZE, 2]
    settings = AttentionSettings(2 * group, 2, 16, torch.float32, BLOCK_SIZE, 0.4, softcap, windows=(0, 1, 5))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 12, BLOCK_SIZE, 2, 16, generator=generator)
    tables = (1 + torch.randperm(11, generator=generator)[:8]).view(4, 2).int()
    tables[1, 1] = 10**6  # past the sequence's blocks, undefined
    kv = LayerBlocks(keys, values, layer_kv(keys, values))
    q = torch.randn(sum(new), 2 * group, 16, generator=generator)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    batch = PackedBatch(torch.zeros(0), torch.zeros(0), cu_seqlens, torch.tensor(lengths, dtype=torch.int32), tables)
    ours, flashinfer = (kind(settings, torch.device("cpu")) for kind in (TritonAttention, FlashInferAttention))
    for decoding in (False, True):
        flashinfer.plan(batch, decoding)
        for window in settings.windows:
            inputs = decoding, q[:4] if decoding else q, kv, batch, window, None
            actual, expected = flashinfer.attend(*inputs), ours.attend(*inputs)
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    kept = FlashInferAttention.workspace_bytes(settings)
    assert kept == 2**27 + len(calls.wrappers) * 2**23  # the workspace and each wrapper's own 8 MiB


HEADS_OF_64 = AttentionSettings(4, 2, 64, torch.bfloat16, BLOCK_SIZE, 1.0)
REASONS = {
    "none": ({}, ""),
    "float16, 256, windows": ({"dtype": torch.float16, "head_dim": 256, "windows": (0, 9)}, ""),
    "alibi": ({"alibi": True}, "ALiBi"),
    "rounded": ({"softcap": 2.0, "rounded": True}, "rounded as in Hugging Face's eager attention"),
    "float32": ({"dtype": torch.float32}, "not float32"),
    "head_dim": ({"head_dim": 80}, "not 80"),
    "chunks": ({"windows": (0, -64)}, "chunks of attention"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_says_what_flashinfer_lacks(case, calls, monkeypatch):
    changes, reason = REASONS[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    actual = flashinfer_reason(replace(HEADS_OF_64, **changes), torch.device("cuda"))
    assert (reason in actual) and bool(actual) == bool(reason), actual


def test_flashinfer_needs_a_device_and_the_package(monkeypatch, calls):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0" in flashinfer_reason(HEADS_OF_64, torch.device("cuda"))
    assert "is on cpu" in flashinfer_reason(HEADS_OF_64, torch.device("cpu"))
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "flashinfer is not installed" in flashinfer_reason(HEADS_OF_64, torch.device("cuda"))


@pytest.mark.parametrize(("family", "lack"), [("bloom", "ALiBi"), ("gemma2", "rounded"), ("llama", "not float32")])
def test_a_models_settings_are_its_features(family, lack, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = read_decoder(tiny_model(family)).spec
    choice = choose_attention("auto", spec, torch.float32, torch.device("cuda"))
    assert not choice.flashinfer and lack in choice.reason
    assert attention_settings(spec, torch.float32).windows == ((0, 6) if family == "gemma2" else (0,))


def test_an_explicit_flashinfer_that_cannot_be_used_is_refused():
    info = ModelInfo(tiny_model("llama"))
    for backend in ("triton", "auto"):
        check_settings(invalid_attention(info, RolloutConfig(attention_backend=backend)))
    for more, message in (({}, ".*"), ({"containers": "native"}, "it needs rollout.containers=fused")):
        rollout = RolloutConfig(attention_backend="flashinfer", **more)
        with pytest.raises(ValueError, match=f"rollout.attention_backend: 'flashinfer' given; {message}.*use triton"):
            check_settings(invalid_attention(info, rollout))
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    with pytest.raises(ValueError, match="only fused decoders use it, and XGLMForCausalLM has none"):
        check_settings(
            invalid_attention(ModelInfo(tiny_model("xglm", sizes=sizes)), RolloutConfig(attention_backend="flashinfer"))
        )


def test_the_description_names_the_attention_and_the_reason(calls, monkeypatch):
    monkeypatch.setattr("hybrid.decoders.fused_model.kernels_for", lambda *args: "Triton")
    info = ModelInfo(tiny_model("llama"))

    def described(backend: str, max_capture_size: int = 0) -> str:
        snapshot = Snapshot(read_weights(info, layers_per_group=2))
        return FusedModel(info, snapshot, max_capture_size, attention_backend=backend).description

    assert described("triton").endswith("attention by Triton (rollout.attention_backend is triton)")
    assert "attention by Triton (FlashInfer needs a CUDA device" in described("auto")
    monkeypatch.setattr("hybrid.decoders.attention_choice.flashinfer_reason", lambda *args: "")
    assert described("auto").endswith("attention by FlashInfer")
    assert "by FlashInfer, and by Triton in decode steps (FlashInfer plans" in described("flashinfer", 4)


def test_the_description_says_that_a_capture_has_failed(monkeypatch):
    monkeypatch.setattr("hybrid.decoders.fused_model.kernels_for", lambda *args: "Triton")
    info = ModelInfo(tiny_model("llama"))
    fused = FusedModel(info, Snapshot(read_weights(info, layers_per_group=2)), 4)
    assert ", decode steps as CUDA graphs, attention by Triton" in fused.description
    fused.bound[True] = SimpleNamespace(decoder=SimpleNamespace(eager_reason="no memory"))
    assert ", decode steps without CUDA graphs (no memory), attention by Triton" in fused.description
    assert fused.eager_reason == "no memory" and not fused.has_graphs
