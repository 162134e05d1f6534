"""Models with a vision tower: their language model is read as its family, and computes prompts of text as they do."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import hybrid
from benchmarks.models import Case
from benchmarks.models import tiny_model as table_model
from hybrid.models.modules import TEXT_PARTS
from hybrid.models.placeholders import Placeholders
from hybrid.models.reader import read_decoder
from hybrid.models.spec import UnsupportedModel
from tests.decoders import test_cpu_decoder, test_torch_decoder
from tests.decoders.test_cpu_decoder import CpuRun
from tests.decoders.test_recurrent_mixers import require_as_exact
from tests.decoders.test_torch_decoder import Run, distance, sequences
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts
from tests.vision_models import MODELS, vision_model


@pytest.mark.parametrize("kind", slow_but(["gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "lfm2_vl"], MODELS))
def test_logits_of_text_equal_hugging_face(kind):
    model = vision_model(kind)
    layout = read_decoder(model)
    assert layout.family == MODELS[kind][0]
    if layout.spec.is_recurrent:
        require_as_exact(model, (33, 7))
        return
    texts = texts_of(model)
    expected = logits_of(model, texts)
    for run, decoders in ((Run, test_torch_decoder), (CpuRun, test_cpu_decoder)):
        assert distance(run(decoders.decoder_of(model), texts).every_logit(), expected) < 2e-6


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
    model = table_model(Case(kind, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]))
    texts = texts_of(model)
    decoded = Run(test_torch_decoder.decoder_of(model), texts).every_logit()
    assert distance(decoded, logits_of(model, texts)) < 3e-6


def check_exact() -> None:
    engine = engine_of(vision_model("gemma3"), settings(3))
    ids, mask = prompts(2, 6, padded=True)
    batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=5, seed=3))
    engine.train()
    exact = engine.logps(batch, forward="exact").per_token_logps
    assert torch.equal(exact, batch.old_per_token_logps)
    assert torch.allclose(exact, engine.logps(batch, forward="model").per_token_logps, atol=1e-4)
    exact.sum().backward()


def test_exact_logprobs_are_the_language_models(ranks):
    """A vision tower has layers too, which do not run."""
    ranks.run(check_exact)


def test_settings_of_logits_that_the_whole_model_ignores_are_refused():
    """Gemma 3's text model has a soft cap, which the model around it does not apply (transformers 5.23)."""
    with pytest.raises(UnsupportedModel, match=r"no model\.embed_tokens"):
        read_decoder(vision_model("gemma3", final_logit_softcapping=3.0))
