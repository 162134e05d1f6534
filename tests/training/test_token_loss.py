"""`engine.token_losses` and `score(top_logprobs=...)`: distributions by chunks, against whole logits."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig

import hybrid
from hybrid.training import logps as training_logps
from hybrid.training.logps import TrainingForwards, chunked_logps
from hybrid.training.packed_forwards import target_tokens
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import in_float64, tiny_model, twin
from tests.training.grouped_rows import grouped_rows
from tests.training.test_logps import RELEASE_AT_ONCE, PeakBytes

TEMPERATURE = 0.7


def whole_logits(model: nn.Module, ids, mask, width: int) -> torch.Tensor:
    """The logits that completion tokens are drawn from, by the model's own forward of each row alone."""
    outputs = []
    for row, kept in zip(ids, mask.bool(), strict=True):
        logits = model(input_ids=row[kept][None], use_cache=False).logits[0, :-1] / TEMPERATURE
        whole = logits.new_zeros(ids.shape[1], logits.shape[1])
        outputs.append(whole.index_put((kept.nonzero()[1:, 0],), logits))
    return torch.stack(outputs)[:, -width:]


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    logps, teacher = student.log_softmax(-1), teacher.to(student.dtype).log_softmax(-1)
    return (logps.exp() * (logps - teacher)).sum(-1)


# Eager attention in float64 is NaN at left padding: the model's own forward of Gemma 2.
LOSSES = [("llama", "model"), *((family, "packed") for family in ("cohere", "gemma2", "llama", "qwen2_moe"))]


@pytest.mark.parametrize(("family", "forward"), slow_but([LOSSES[0], ("gemma2", "packed")], LOSSES))
def test_losses_of_logits_and_gradients_match_whole_logits(family, forward):
    """A teacher whose distribution differs by row: rows with equal tokens are not computed as one. In float64."""
    torch.manual_seed(0)
    model = in_float64(tiny_model(family)).train()
    expected_model = copy.deepcopy(model)
    ids, mask, completion_mask = grouped_rows(0)
    teacher = 2 * torch.randn(*completion_mask.shape, model.config.vocab_size, dtype=torch.float64)
    sizes = []

    def token_loss(tokens: hybrid.TokenLogits) -> torch.Tensor:
        sizes.append(len(tokens.logits))
        return reverse_kl(tokens.logits, teacher[tokens.rows, tokens.columns])

    forwards = TrainingForwards(model, model, model)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    with (
        mock.patch.object(training_logps, "HEAD_TOKENS", 16),
        mock.patch.object(
            chunked_logps, "__defaults__", (*chunked_logps.__defaults__[:2], 16, *chunked_logps.__defaults__[3:])
        ),
    ):
        result = forwards.token_losses(rows, TEMPERATURE, token_loss, forward)
    assert max(sizes) == 16
    plain = forwards.logps(rows, TEMPERATURE, False, forward)
    torch.testing.assert_close(result.per_token_logps, plain.per_token_logps, atol=1e-10, rtol=0)
    expected = reverse_kl(whole_logits(expected_model, ids, mask, 14), teacher) * completion_mask
    torch.testing.assert_close(result.token_losses, expected, atol=1e-5, rtol=0)
    result.token_losses.sum().backward()
    expected.sum().backward()
    parameters = dict(model.named_parameters())
    for name, parameter in expected_model.named_parameters():
        error = (parameters[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-4)
        assert error < 1e-5, f"{name}: {error:.2g}"


def test_only_one_chunk_of_both_models_logits_is_in_memory():
    """Student's and teacher's, of 256 tokens with a vocabulary of 2000, in forward and backward."""
    torch.manual_seed(0)
    head, hidden, ids = nn.Linear(4, 2000), torch.randn(256, 4, requires_grad=True), torch.randint(2000, (256,))
    teacher_head, teacher_hidden, at = nn.Linear(6, 2000), torch.randn(256, 6), torch.arange(256)

    def token_loss(tokens: hybrid.TokenLogits) -> torch.Tensor:
        with torch.no_grad():
            teacher = teacher_head(teacher_hidden[tokens.rows])
        return reverse_kl(tokens.logits, teacher)

    peaks = {}
    for chunk_size in (256, 16):
        with PeakBytes() as made:
            loss = token_loss, at, at
            outputs = chunked_logps(hidden, head, ids, LlamaConfig(), 0.7, False, chunk_size, loss)
            sum(output.sum() for output in outputs).backward()
        peaks[chunk_size] = made.peak / (2000 * 4)  # in rows of logits
        head.weight.grad = hidden.grad = head.bias.grad = None
    assert peaks[256] > 4 * 256, "logits of both, log_softmax and their gradients were not measured"
    assert peaks[16] < peaks[256] / 16 + 4 * 5 + 30, peaks  # and four gradients of the head at once


def check_self_teacher() -> None:
    """The policy's own distribution on other prompts: hidden states, and its head inside the loss, under ZeRO-3 with
    ranks of unequal rows; the same weights give a divergence of 0 on the same prompts."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3, **RELEASE_AT_ONCE))
    engine.train()
    ids, mask, completion_mask = grouped_rows(0, groups=2 - dist.get_rank())
    others = torch.where(torch.arange(32) < 18, (ids + 1) % 97, ids) * mask
    for teacher_ids in (ids, others):
        hidden = engine.last_hidden_states(teacher_ids, mask, completion_mask)
        assert hidden.shape == (*completion_mask.shape, reference.config.hidden_size) and not hidden.requires_grad

        def token_loss(tokens: hybrid.TokenLogits, hidden: torch.Tensor = hidden) -> torch.Tensor:
            return reverse_kl(tokens.logits, tokens.head(hidden[tokens.rows, tokens.columns]))

        result = engine.token_losses(token_loss, ids, mask, completion_mask, TEMPERATURE)
        with torch.no_grad():
            expected = reverse_kl(
                whole_logits(reference, ids, mask, 14), whole_logits(reference, teacher_ids, mask, 14)
            )
        torch.testing.assert_close(result.token_losses, expected * completion_mask, atol=1e-5, rtol=0)
        engine.backward(result.token_losses.sum())
    engine.step()


def test_a_policy_is_its_own_teacher(ranks):
    ranks.run(check_self_teacher)


def check_refusals() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask, completion_mask = grouped_rows(0, groups=1)
    engine.eval()
    for call in (engine.last_hidden_states, partial(engine.token_losses, reverse_kl)):
        with pytest.raises(RuntimeError, match="eval mode"):
            call(ids, mask)
    engine.train()
    with pytest.raises(ValueError, match="forward: 'exact' given; it must be one of 'model', 'packed'"):
        engine.token_losses(lambda tokens: tokens.logits[:, 0], ids, mask, completion_mask, forward="exact")
    with pytest.raises(NotImplementedError, match="head is not available with forward='model'"):
        engine.token_losses(lambda tokens: tokens.head(tokens.logits), ids, mask, forward="model")
    for k in (-1, 1000, True):
        with pytest.raises(ValueError, match="top_logprobs: .* given; it must be from 0"):
            engine.score(ids, mask, top_logprobs=k)


def test_what_is_not_available_is_refused(ranks):
    ranks.run(check_refusals)


MODES = {
    "fused": {},
    "native": {"rollout": {"containers": "native"}},
    "kept hidden states": {"rollout": {"cache_hidden_states": True, "prefix_cache_bytes": 10**6}},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
}


def check_top_logprobs(blocks: dict) -> None:
    """Ranks differ in rows; one has none the second time. Other scores are those without, to the bit."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    for groups in (2 - dist.get_rank(), 0):
        ids, mask, _ = grouped_rows(dist.get_rank(), groups=max(groups, 1))
        if groups == 0 and dist.get_rank():
            ids, mask = ids[:0], mask[:0]
        plain = engine.score(ids, mask, temperature=TEMPERATURE)
        scores = engine.score(ids, mask, temperature=TEMPERATURE, top_logprobs=5)
        assert plain.top_ids is None and torch.equal(plain.per_token_logps, scores.per_token_logps)
        assert scores.top_ids.shape == scores.top_logprobs.shape == (len(ids), ids.shape[1] - 1, 5)
        if len(ids):
            with torch.no_grad():
                logps = whole_logits(reference, ids, mask, ids.shape[1] - 1).log_softmax(-1)
            scored = (mask[:, 1:] & mask[:, :-1]).bool()
            top = logps.topk(5)
            torch.testing.assert_close(scores.top_logprobs[scored], top.values[scored], atol=2e-5, rtol=0)
            assert torch.equal(scores.top_ids[scored], top.indices[scored])
            assert not scores.top_logprobs[~scored].any()
    engine.destroy()


@pytest.mark.parametrize("mode", slow_but(["fused", "native", "tensor parallel"], MODES))
def test_top_logprobs_are_those_of_hugging_faces_logits(ranks, mode):
    ranks.run(check_top_logprobs, MODES[mode])
