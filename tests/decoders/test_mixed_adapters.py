"""Tokens of several LoRA adapters in one batch: each has the bits that it has in a batch of its adapter alone."""

from dataclasses import replace

import peft
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.batch import NO_ADAPTER, PackedBatch
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.kernels.cpu_library import cpu_library
from hybrid.weights.named_adapters import NamedAdapters
from tests.decoders.test_cpu_decoder import threads
from tests.decoders.test_cuda_decoder import DEVICE, NEW, PROMPTS, Decoding, eager_capture, sequences
from tests.decoders.test_torch_decoder import distance
from tests.decoders.test_unmerged_lora import fused_of
from tests.kernels import interpreter_bfloat16
from tests.marks import slow_but
from tests.tiny_models import tiny_model

interpreter_bfloat16.install()
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

MIXED = ("alice", "bob", "ref")
SETTINGS = {"alice": {"r": 4}, "bob": {"r": 17, "lora_alpha": 9}, "ref": {"r": 2, "use_rslora": True}}
FAMILIES = ("llama", "gpt2", "bloom", "gemma2", "mixtral", "qwen3_5_text")
ROWS = ([0, 1, 2], [1, NO_ADAPTER, 1], [NO_ADAPTER, 0, 0], [2, 2, 2])  # the adapter of each sequence


class Mixed(Decoding):
    """Sequences with an adapter each."""

    adapters: list[int] | None = None

    def batch(self, spans: list[tuple[int, int]]) -> PackedBatch:
        batch = super().batch(spans)
        if self.adapters is None:
            return batch
        own = torch.tensor(self.adapters, dtype=torch.int32, device=self.device)
        return replace(batch, adapters=own.repeat_interleave(batch.cu_seqlens.diff().long()))


def model_of(family: str, dtype: torch.dtype, **settings: int) -> peft.PeftModel:
    """A model with the adapters, random ones, each on some of the layers' matrices; experts have none."""
    model = tiny_model(family, **settings)
    linears = [
        name
        for name, module in model.named_modules()
        if "weight" in module._parameters
        and module.weight.dim() == 2
        and any(part in name for part in ("proj", "dense", ".c_", "query_key_value"))
        and "expert" not in name
    ]
    assert len(linears) > 3, [name for name, _ in model.named_modules()]
    first, *others = MIXED
    configs = {
        name: peft.LoraConfig(init_lora_weights=False, target_modules=linears[at:] if at else linears, **given)
        for at, (name, given) in enumerate(SETTINGS.items())
    }
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, configs[first], adapter_name=first, autocast_adapter_dtype=False)
    for name in others:
        adapted.add_adapter(name, configs[name], autocast_adapter_dtype=False)
    return adapted.to(DEVICE, dtype).eval()


def decoder_of(kind: type, model: peft.PeftModel) -> tuple[TorchDecoder | CpuDecoder, NamedAdapters]:
    """A decoder over unmerged adapters, not yet bound, and what switches these."""
    fused = fused_of(model)
    weights = DecoderWeights(fused.layout, fused.snapshot, adapters=True)
    library = {"library": cpu_library()} if kind is CpuDecoder else {}
    if kind is CudaDecoder:
        library = {"max_capture_size": 4} | ({} if DEVICE == "cuda" else {"capture": eager_capture})
    made = kind(
        fused.layout, weights.tensor, next(model.parameters()).dtype, lora_deltas=weights.lora_deltas, **library
    )
    named = NamedAdapters(model)
    with named.switched(MIXED):
        assert fused.can_mix_adapters()
    return made, named


def logits(decoder: TorchDecoder | CpuDecoder, adapters: list[int] | None) -> list[torch.Tensor]:
    """Of prompts, of decode steps, and behind a prefix."""
    made = Mixed(decoder, sequences(tuple(length + NEW + 1 for length in PROMPTS)))
    made.adapters = adapters
    return made.every_logit()


CASES = [
    (kind, family, dtype)
    for kind in (TorchDecoder, CpuDecoder, CudaDecoder)
    for family in (FAMILIES if kind is not CudaDecoder else ("llama", "bloom"))
    for dtype in (torch.float32, torch.bfloat16)
]
QUICK = [
    (TorchDecoder, "llama", torch.float32),
    (TorchDecoder, "qwen3_5_text", torch.float32),
    *((CpuDecoder, family, torch.bfloat16) for family in ("llama", "gpt2", "mixtral", "qwen3_5_text")),
    (CpuDecoder, "bloom", torch.float32),
    (CudaDecoder, "llama", torch.float32),
]


@pytest.mark.parametrize(("kind", "family", "dtype"), slow_but(QUICK, CASES))
def test_a_token_has_the_bits_of_its_adapter_alone(kind, family, dtype):
    """Also in graphs, of which none outlives a change between one adapter and several."""
    if DEVICE == "cuda" and kind is CpuDecoder:
        pytest.skip("the model is on the GPU")
    layers = {"n_layer" if family == "bloom" else "num_hidden_layers": 1} if kind is CudaDecoder else {}
    model = model_of(family, dtype, **layers)
    decoder, named = decoder_of(kind, model)
    alone = {}
    for number, name in ((NO_ADAPTER, None), *enumerate(MIXED)):
        with model.disable_adapter() if name is None else named.switched(name):
            decoder.mixed_adapters = ()
            decoder.bind()
            alone[number] = logits(decoder, None)
    assert len({str(rows[0][0].tolist()) for rows in alone.values()}) == 1 + len(MIXED), "adapters do nothing"
    with named.switched(MIXED):
        decoder.mixed_adapters = ()
        decoder.bind()
        together = logits(decoder, None)
        decoder.mixed_adapters = MIXED
        decoder.bind()
        assert kind is not CudaDecoder or not len(decoder.graphs), "graphs of all adapters together"
        assert not any(torch.equal(*pair) for pair in zip(together, logits(decoder, ROWS[0]), strict=True))
        for adapters in ROWS[:2] if kind is CudaDecoder else ROWS:
            for count in (1, 3) if kind is CpuDecoder else (1,):
                with threads(count):
                    actual = logits(decoder, adapters)
                for row, number in enumerate(adapters):
                    what = f"row {row} of {adapters}, {count} threads"
                    if family == "mixtral" and kind is not CpuDecoder:  # torch's products depend on an expert's rows
                        assert distance([actual[row]], [alone[number][row]]) < 1e-2, what
                    else:
                        assert torch.equal(actual[row], alone[number][row]), what
    with named.switched("bob"):
        decoder.mixed_adapters = ()
        decoder.bind()
        assert all(map(torch.equal, logits(decoder, None), alone[1]))


CANNOT = {
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
}


@pytest.mark.parametrize("what", ["latent attention", *CANNOT])
def test_adapters_that_a_row_cannot_choose_are_not_mixed(what):
    """Adapters of the head and of absorbed projections, and those that are merged, are decoded one at a time."""
    family = "deepseek_v3" if what == "latent attention" else "llama"
    given = CANNOT.get(what, {"target_modules": ["kv_b_proj"]})
    model = peft.get_peft_model(tiny_model(family), peft.LoraConfig(**given), adapter_name="alice")
    model.add_adapter("bob", peft.LoraConfig(**given))
    with NamedAdapters(model).switched(("alice", "bob")):
        assert not fused_of(model).can_mix_adapters()
