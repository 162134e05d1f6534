"""Models with a vision tower: their language model is read as its family, and computes prompts of text as they do."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

import hybrid
from benchmarks.models import Case
from benchmarks.models import tiny_model as table_model
from hybrid.models.modules import TEXT_PARTS
from hybrid.models.placeholders import Placeholders
from hybrid.models.reader import read_decoder
from tests.decoders import test_cpu_decoder, test_torch_decoder
from tests.decoders.test_cpu_decoder import CpuRun
from tests.decoders.test_recurrent_mixers import require_as_exact
from tests.decoders.test_torch_decoder import Run, distance, sequences
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts
from tests.vision_models import MODELS, MROPE, vision_model

GLM_4_1V_9B = {  # its heads, half of each rotated
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]},
}


@pytest.mark.parametrize(
    ("kind", "text_changes"),
    slow_but(
        [(kind, {}) for kind in ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "lfm2_vl", "glm4v")],
        [*((kind, {}) for kind in MODELS), ("glm4v", GLM_4_1V_9B)],
    ),
)
def test_logits_of_text_equal_hugging_face(kind, text_changes):
    model = vision_model(kind, **text_changes)
    layout = read_decoder(model)
    assert layout.family == MODELS[kind][0]
    if layout.spec.is_recurrent:
        require_as_exact(model, (33, 7))
        return
    texts = texts_of(model)
    expected = logits_of(model, texts)
    for run, decoders in ((Run, test_torch_decoder), (CpuRun, test_cpu_decoder)):
        difference = distance(run(decoders.decoder_of(model), texts).every_logit(), expected)
        assert difference < (5e-6 if text_changes else 2e-6)  # sums over 4096 elements: 2.6e-6 measured


def texts_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Sequences without placeholders of images."""
    return [ids.where(~torch.isin(ids, Placeholders(model.config).tokens), 3) for ids in sequences()]


@torch.no_grad()
def logits_of(model: torch.nn.Module, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's own logits of each text, alone."""
    return [model(ids[None]).logits[0] for ids in texts]


@pytest.mark.parametrize("kind", slow_but(["vipllava"], sorted(TEXT_PARTS.keys() - MODELS.keys())))
def test_logits_of_text_equal_hugging_face_in_every_type(kind):
    """Types whose configuration is transformers' own, made small."""
    model = table_model(Case(kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]))
    texts = texts_of(model)
    decoded = Run(test_torch_decoder.decoder_of(model), texts).every_logit()
    assert distance(decoded, logits_of(model, texts)) < 3e-6


def check_exact(text_changes: dict) -> None:
    engine = engine_of(vision_model("gemma3", **text_changes), settings(3))
    ids, mask = prompts(2, 6, padded=True)
    batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=5, seed=3))
    engine.train()
    exact = engine.logps(batch, forward="exact").per_token_logps
    assert torch.equal(exact, batch.old_per_token_logps)
    for forward in ("model", "packed"):
        assert torch.allclose(exact, engine.logps(batch, forward=forward).per_token_logps, atol=1e-4)
    assert not [row for row in engine.coverage() if row["kind"] == "training forward" and row["reason"]]
    exact.sum().backward()


@pytest.mark.parametrize("text_changes", [{}, {"final_logit_softcapping": 0.5}])
def test_exact_logprobs_are_the_language_models(ranks, text_changes):
    """A vision tower has layers too, which do not run; the whole model ignores a soft cap of its text."""
    ranks.run(check_exact, text_changes)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("gemma3", "final_logit_softcapping", 3.0),  # ignored by the model around the text model, as of Cohere
        ("aya_vision", "logit_scale", 0.25),
        ("cohere2_vision", "logit_scale", 0.25),
        ("granite_docling", "logits_scaling", 4.0),
        ("hyperclovax_vision_v2", "logits_scaling", 4.0),
    ],
)
def test_settings_of_logits_are_applied_where_the_whole_model_applies_them(kind, name, value):
    model = (
        vision_model(kind) if kind in MODELS else table_model(Case(kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]))
    )
    setattr(model.config.get_text_config(), name, value)
    texts = texts_of(model)
    decoded = Run(test_torch_decoder.decoder_of(model), texts).every_logit()
    assert distance(decoded, logits_of(model, texts)) < 3e-6
    assert getattr(model.config.get_text_config(), name) == value, "the model's own configuration was changed"
