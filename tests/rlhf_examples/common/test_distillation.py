"""The divergences of distillation against plain Python loops in float64, TRL's functions and DeepSpeed's."""

import math

import pytest
import torch
from deepspeed.runtime.rollout import generalized_jsd_loss as deepspeed_jsd
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo.loss_utils import (
    add_tail_bucket,
    compute_full_logit_self_distillation_loss,
    compute_sampled_token_self_distillation_loss,
    compute_topk_self_distillation_loss,
)
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from rlhf_examples.common.distillation import (
    Divergence,
    distillation_loss,
    divergence_from_top,
    divergence_of_logits,
    generalized_jsd,
    sampled_reverse_kl,
    tail_bucket,
)

TOKENS, VOCAB = 6, 11
BETAS = (0.0, 0.3, 0.5, 1.0)


def example(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, with gradients, and of a teacher."""
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(2, TOKENS, VOCAB, dtype=dtype)
    return student.requires_grad_(), teacher


def probabilities(logits: torch.Tensor) -> list[list[float]]:
    """Each row's softmax, by hand."""
    rows = [[math.exp(value) for value in row] for row in logits.tolist()]
    return [[value / sum(row) for value in row] for row in rows]


def loop_divergence(p: list[float], q: list[float], beta: float) -> float:
    """p: student's, q: teacher's."""
    if beta == 0:
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    if beta == 1:
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    return beta * loop_divergence(m, q, 0) + (1 - beta) * loop_divergence(m, p, 0)


def loop_gradient(compute, logits: torch.Tensor) -> torch.Tensor:
    """Central differences of a function of logits, summed over its results."""
    gradient = torch.zeros_like(logits)
    for at in torch.cartesian_prod(*map(torch.arange, logits.shape)).tolist():
        values = []
        for step in (1e-5, -1e-5):
            moved = logits.detach().clone()
            moved[tuple(at)] += step
            values.append(compute(moved).sum().item())
        gradient[tuple(at)] = (values[0] - values[1]) / 2e-5
    return gradient


@pytest.mark.parametrize("beta", BETAS)
def test_divergences_and_gradients_match_a_loop(beta):
    student, teacher = example()
    actual = divergence_of_logits(student, teacher, Divergence(beta))
    expected = [
        loop_divergence(p, q, beta) for p, q in zip(probabilities(student), probabilities(teacher), strict=True)
    ]
    assert actual.tolist() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(actual.sum(), student)
    differences = loop_gradient(lambda moved: divergence_of_logits(moved, teacher, Divergence(beta)), student)
    torch.testing.assert_close(gradient, differences, atol=1e-8, rtol=0)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_top_k_matches_a_loop(beta, support, tail):
    student, teacher = example()
    actual = divergence_of_logits(student, teacher, Divergence(beta, 4, support, tail))
    expected = []
    for p, q in zip(probabilities(student), probabilities(teacher), strict=True):
        of = p if support == "student" else q
        kept = sorted(range(VOCAB), key=lambda token: -of[token])[:4]
        parts = [[row[token] for token in kept] for row in (p, q)]
        if tail == "bucket":
            parts = [[*part, 1 - sum(part)] for part in parts]
        else:
            parts = [[value / sum(part) for value in part] for part in parts]
        expected.append(loop_divergence(*parts, beta))
    assert actual.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_teachers_top_logprobs_are_enough(tail):
    student, teacher = example()
    ids = teacher.topk(4).indices
    top = teacher.log_softmax(-1).gather(-1, ids)
    expected = divergence_of_logits(student, teacher, Divergence(0.3, 4, "teacher", tail))
    actual = divergence_from_top(student, ids, top, Divergence(0.3, 4, "teacher", tail))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(values.sum(), student)[0] for values in (actual, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_equals_trl_and_deepspeed(beta, temperature, dtype):
    """GKD's loss, which DistillationTrainer has in chunks, SDPO's and OPSD's, with their gradients."""
    student, teacher = example(dtype)
    actual = divergence_of_logits(student / temperature, teacher / temperature, Divergence(beta))
    shaped = student[None], teacher[None]
    losses = [
        GKDTrainer.generalized_jsd_loss(*shaped, beta=beta, temperature=temperature, num_items_in_batch=1),
        compute_full_logit_self_distillation_loss(
            student / temperature, teacher / temperature, distillation_alpha=beta
        ).sum(),
        deepspeed_jsd(*shaped, torch.ones(1, TOKENS), beta=beta, temperature=temperature).loss_sum,
    ]
    (gradient,) = torch.autograd.grad(actual.sum(), student)
    for loss in losses:
        assert actual.sum().item() == pytest.approx(loss.item(), abs=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, student)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_the_loss_is_that_of_trls_distillation_trainer(beta):
    """From hidden states and heads, with its gradients; float32."""
    torch.manual_seed(0)
    hidden, teacher_hidden = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 6)
    head, teacher_head = torch.randn(40, 8, requires_grad=True), torch.randn(40, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    both = hidden, teacher_hidden, head, teacher_head
    expected, _, count = _chunked_divergence_loss(*both, mask, beta, temperature=0.7)
    logits, teacher_logits = hidden @ head.T / 0.7, teacher_hidden @ teacher_head.T / 0.7
    actual = divergence_of_logits(logits, teacher_logits, Divergence(beta))[mask.bool()].sum() / count
    assert actual.item() == pytest.approx(expected.item(), abs=1e-5)
    gradients = (torch.autograd.grad(loss, [hidden, head]) for loss in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_top_k_equals_trl_and_deepspeed(beta):
    student, teacher = example(torch.float32)
    for tail in ("bucket", "renormalize"):
        settings = {"distillation_topk": 4, "distillation_alpha": beta, "distillation_add_tail": tail == "bucket"}
        expected = compute_topk_self_distillation_loss(student, teacher, **settings)
        actual = divergence_of_logits(student, teacher, Divergence(beta, 4, "student", tail))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    theirs = deepspeed_jsd(student[None], teacher[None], torch.ones(1, TOKENS), beta=beta, teacher_top_k=4)
    ours = divergence_of_logits(student, teacher, Divergence(beta, 4, "teacher", "renormalize"))
    assert ours.sum().item() == pytest.approx(theirs.loss_sum.item(), abs=1e-5)


def test_the_sampled_estimate_equals_trl_and_is_unbiased():
    """Its gradient, weighted by the student's probabilities of each token, is that of the reverse KL."""
    student, teacher = example()
    ids = torch.randint(VOCAB, (TOKENS,))
    logps, teacher_logps = (logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for logits in (student, teacher))
    expected = compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)
    torch.testing.assert_close(sampled_reverse_kl(logps, teacher_logps), expected, atol=1e-12, rtol=0)
    every = sampled_reverse_kl(student.log_softmax(-1), teacher.log_softmax(-1))
    (estimate,) = torch.autograd.grad((student.softmax(-1).detach() * every).sum(), student)
    (exact,) = torch.autograd.grad(divergence_of_logits(student, teacher, Divergence(1.0)).sum(), student)
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=0)


def test_impossible_tokens_and_certain_ones_stay_finite():
    """Where both models exclude a token it contributes nothing; a top-k that has all the probability has a tail."""
    student, teacher = (logits.detach().clone() for logits in example())
    student[:, 3] = teacher[:, 3] = -math.inf
    student.requires_grad_()
    kept = [token for token in range(VOCAB) if token != 3]
    for beta in BETAS:
        actual = divergence_of_logits(student, teacher, Divergence(beta))
        expected = divergence_of_logits(student[:, kept], teacher[:, kept], Divergence(beta))
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
        assert torch.autograd.grad(actual.sum(), student)[0].isfinite().all()
    certain = torch.zeros(1, 1)
    assert tail_bucket(certain).isfinite().all() and torch.equal(tail_bucket(certain), add_tail_bucket(certain))
    assert generalized_jsd(tail_bucket(certain), tail_bucket(certain), 0.5).item() == 0


def test_the_loss_sums_over_the_mask():
    torch.manual_seed(0)
    losses, logps, teacher_logps = torch.randn(3, 2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    losses[mask == 0] = math.nan
    cells = [(0, 0), (0, 1), (0, 2), (1, 0)]
    actual = distillation_loss(losses, logps, teacher_logps, mask, 7.0)
    assert actual.loss.item() == pytest.approx(sum(losses[cell].item() for cell in cells) / 7)
    assert actual.sums["k1"].item() == pytest.approx(
        sum((logps - teacher_logps)[cell].item() for cell in cells), rel=1e-5
    )
    assert actual.counts["k1"] == 4
