"""`InferenceEngine.score`: a reference's logprobs, against Hugging Face's logits and a training engine's scores."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

import hybrid
from tests.engines import engine_of, settings
from tests.inference.test_tensor_parallel import tp_engine
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, tiny_model, tiny_non_decoder, twin
from tests.training.grouped_rows import grouped_rows

IDS, MASK, _ = grouped_rows(0, groups=2)  # padded on both sides; rows of a group share their prompt


def expected_scores(model: nn.Module, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of every token but the first, row by row, without padding."""
    logps, entropies = (torch.zeros(len(IDS), IDS.shape[1] - 1) for _ in range(2))
    for row, (ids, mask) in enumerate(zip(IDS, MASK.bool(), strict=True)):
        with torch.no_grad():
            distribution = (model(ids[mask][None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        at = mask.nonzero()[1:, 0] - 1
        logps[row, at] = distribution.gather(-1, ids[mask][1:, None])[:, 0]
        entropies[row, at] = -(distribution.exp() * distribution).sum(-1)
    return logps, entropies


@pytest.mark.parametrize("family", slow_but(["llama", "gemma2"], ALL_FAMILIES))
@pytest.mark.parametrize("inject", [True, False])
def test_scores_are_those_of_hugging_faces_logits(family, inject):
    model = tiny_model(family)
    engine = hybrid.init_inference(twin(model), dtype="fp32", replace_with_kernel_inject=inject)
    for temperature in (1.0, 0.7):
        logps, entropies = expected_scores(model, temperature)
        scores = engine.score(IDS, MASK, temperature, rows_per_forward=3)
        torch.testing.assert_close(scores.per_token_logps, logps, atol=2e-5, rtol=0)
        torch.testing.assert_close(scores.entropies, entropies, atol=5e-5, rtol=0)
        again = engine.score(IDS.int(), MASK.bool(), temperature, rows_per_forward=3)
        assert torch.equal(again.per_token_logps, scores.per_token_logps)


@pytest.mark.parametrize("family", slow_but(["llama", "gemma2"], ALL_FAMILIES))
@pytest.mark.parametrize("inject", [True, False])
def test_distributions_and_top_logprobs_are_those_of_hugging_faces_logits(family, inject):
    """A distribution's logits, asked for in any order, and the most probable tokens of it."""
    model = tiny_model(family)
    engine = hybrid.init_inference(twin(model), dtype="fp32", replace_with_kernel_inject=inject)
    scored = (MASK[:, 1:] & MASK[:, :-1]).bool()
    rows, columns = scored.nonzero(as_tuple=True)
    expected = []
    for ids, mask in zip(IDS, MASK.bool(), strict=True):
        with torch.no_grad():
            expected.append((model(ids[mask][None]).logits[0, :-1].float() / 0.7).log_softmax(-1))
    expected = torch.cat(expected)
    top = engine.score(IDS, MASK, 0.7, rows_per_forward=3, top_logprobs=4)
    torch.testing.assert_close(top.top_logprobs[scored], expected.topk(4).values, atol=2e-5, rtol=0)
    found = expected.gather(-1, top.top_ids[scored])  # ties may change places
    torch.testing.assert_close(found, expected.topk(4).values, atol=2e-5, rtol=0)
    if not inject:
        with pytest.raises(NotImplementedError, match="score_distribution: the fused decoder .* top_logprobs"):
            engine.score_distribution(IDS, MASK, 0.7)
        return
    distributions = engine.score_distribution(IDS, MASK, 0.7, rows_per_forward=3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    logits = torch.cat([distributions.logits(rows[part], columns[part]) for part in order.split(7)])
    torch.testing.assert_close(logits.log_softmax(-1), expected[order], atol=2e-5, rtol=0)
    last = distributions.logits(rows[:1], columns[:1] - (IDS.shape[1] - 1))
    torch.testing.assert_close(last.log_softmax(-1), expected[:1], atol=2e-5, rtol=0)
    engine.sleep()
    with pytest.raises(RuntimeError, match="while the engine sleeps at level 1"):
        distributions.logits(rows[:1], columns[:1])


def check_bits() -> None:
    """A reference in an InferenceEngine and one in a training engine give the same bits; so do two ranks' slices."""
    model = tiny_model("llama")
    alone = hybrid.init_inference(twin(model), dtype="fp32", kernel_inject=True)
    scores = alone.score(IDS, MASK)
    trained = engine_of(twin(model), settings(3))
    assert torch.equal(trained.score(IDS, MASK).per_token_logps, scores.per_token_logps)
    sliced = tp_engine(twin(model)).score(IDS, MASK)
    torch.testing.assert_close(sliced.per_token_logps, scores.per_token_logps, atol=2e-5, rtol=0)


def test_scores_have_the_training_engines_bits(ranks):
    ranks.run(check_bits)


def test_int8_scores_are_those_of_its_logits():
    engine = hybrid.init_inference(tiny_model("llama"), dtype="int8", kernel_inject=True)
    logps, _ = expected_scores(engine, 1.0)
    torch.testing.assert_close(engine.score(IDS, MASK).per_token_logps, logps, atol=2e-5, rtol=0)


def test_what_cannot_be_scored_is_refused():
    engine = hybrid.init_inference(tiny_model("llama"), dtype="fp32")
    with pytest.raises(ValueError, match="temperature: 0 given"):
        engine.score(IDS, MASK, 0)
    with pytest.raises(ValueError, match="attention mask: .* given"):
        engine.score(IDS, MASK[:, 1:])
    engine.sleep()
    with pytest.raises(RuntimeError, match="score"):
        engine.score(IDS, MASK)
    engine.wake()
    assert engine.score(IDS, MASK).per_token_logps.shape == (len(IDS), IDS.shape[1] - 1)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        hybrid.init_inference(tiny_non_decoder("t5"), dtype="fp32").score(IDS, MASK)
    classifier = AutoModelForSequenceClassification.from_config(tiny_model("llama").config)
    with pytest.raises(ValueError, match="language-modelling head, with logits"):
        hybrid.init_inference(classifier, dtype="fp32").score(IDS, MASK)
