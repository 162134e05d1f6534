"""The losses of distillation as pure functions: how far a student's distribution of the next token is from a teacher's.

Shapes: n tokens of any leading dimensions, a vocabulary of V. Logits are already divided by the temperature, which is
the same for both; they have gradients for the student alone. `beta` selects the divergence:

- 0, forward KL: KL(teacher ‖ student), as supervised distillation has it (Hinton et al., arXiv:1503.02531);
- 1, reverse KL: KL(student ‖ teacher), which looks for one mode of the teacher (MiniLLM, arXiv:2306.08543);
- between, the generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649, eq. 1).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_examples.common.losses import Loss, masked_sum, upcast

Tail = Literal["bucket", "renormalize"]


@dataclass(frozen=True)
class Divergence:
    """Which divergence a run takes, of which tokens of the vocabulary.

    beta: see the module.
    top_k: compare the k most probable tokens alone; 0: the whole vocabulary.
    support: whose most probable tokens these are. TRL's SDPO and SDFT take the student's; DeepSpeed's OPSD, and a
        teacher that returns top logprobs, the teacher's.
    tail: the rest of the vocabulary: one more token that has its probability (bucket), or left out, and the k
        probabilities divided by their sum (renormalize).
    """

    beta: float = 1.0
    top_k: int = 0
    support: Literal["student", "teacher"] = "teacher"
    tail: Tail = "bucket"


def generalized_jsd(student_logps: torch.Tensor, teacher_logps: torch.Tensor, beta: float) -> torch.Tensor:
    """β·KL(teacher ‖ m) + (1 - β)·KL(student ‖ m) with m = β·teacher + (1 - β)·student; the KL itself for β of 0 and 1
    (GKD, arXiv:2306.13649, eq. 1; TRL's `generalized_jsd_loss`, and `compute_divergence` of its SDPO, where β is α).

    student_logps, teacher_logps [n, V]: log probabilities, -inf allowed; returns [n], in nats.
    """
    student_logps, teacher_logps = finite(student_logps), finite(teacher_logps)
    if beta == 0:
        return kl(teacher_logps, student_logps)
    if beta == 1:
        return kl(student_logps, teacher_logps)
    weight = student_logps.new_tensor(beta)
    mixture = torch.logaddexp(student_logps + torch.log1p(-weight), teacher_logps + weight.log())
    return beta * kl(teacher_logps, mixture) + (1 - beta) * kl(student_logps, mixture)


def kl(logps: torch.Tensor, other_logps: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) = Σ p·(log p - log q).  logps, other_logps [n, V], finite: of p and q; returns [n]."""
    return (logps.exp() * (logps - other_logps)).sum(dim=-1)


def finite(logps: torch.Tensor) -> torch.Tensor:
    """The log probabilities with -inf, of impossible tokens, as the lowest number: 0 · -inf is NaN."""
    return logps.clamp(min=torch.finfo(logps.dtype).min)


def tail_bucket(logps: torch.Tensor) -> torch.Tensor:
    """The log probabilities of some tokens, and of all others together: log(1 - Σ p).  logps [n, k]; returns [n, k + 1]

    At most 1 - 1e-7 is left to the tokens, as in TRL's `add_tail_bucket`: the logarithm of the rest stays finite.
    """
    total = torch.logsumexp(logps, dim=-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logps, torch.log(-torch.expm1(total))], dim=-1)


def over_support(logps: torch.Tensor, tail: Tail) -> torch.Tensor:
    """The distribution over k tokens and their tail.  logps [n, k]: log probabilities of the whole vocabulary's
    distribution; returns [n, k + 1] (bucket) or [n, k] (renormalize).
    """
    return tail_bucket(logps) if tail == "bucket" else logps - torch.logsumexp(logps, dim=-1, keepdim=True)


def divergence_of_logits(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    """The divergence at each token, from both models' logits.  [n, V] each; returns [n].

    TRL's DistillationTrainer without `top_k`; `compute_topk_self_distillation_loss` of its SDPO and SDFT with the
    student's support; DeepSpeed's OPSD with the teacher's and `renormalize`.
    """
    student, teacher = (upcast(logits).log_softmax(dim=-1) for logits in (student_logits, teacher_logits))
    if divergence.top_k:
        of = student if divergence.support == "student" else teacher
        ids = of.topk(min(divergence.top_k, of.shape[-1]), dim=-1).indices
        student, teacher = (over_support(logps.gather(-1, ids), divergence.tail) for logps in (student, teacher))
    return generalized_jsd(student, teacher, divergence.beta)


def divergence_from_top(
    student_logits: torch.Tensor, ids: torch.Tensor, teacher_logps: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    """The divergence at each token over the teacher's k most probable tokens, which a server or `engine.score(...,
    top_logprobs=k)` returns.

    student_logits [n, V]; ids int64 [n, k], teacher_logps [n, k]: log probabilities under the whole distribution;
    returns [n].
    """
    student_logits = upcast(student_logits)
    student = student_logits.gather(-1, ids) - torch.logsumexp(student_logits, dim=-1, keepdim=True)
    student, teacher = (over_support(logps, divergence.tail) for logps in (student, teacher_logps.to(student.dtype)))
    return generalized_jsd(student, teacher, divergence.beta)


def sampled_reverse_kl(logps: torch.Tensor, teacher_logps: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is that of the reverse KL, estimated from the sampled tokens alone: the log ratio, k1
    (Schulman, "Approximating KL divergence", 2020), as a reward's negative; TRL's `sampled_token` of SDPO and SDFT.

    Its value is (log p - log q)·log p, which says nothing of the divergence: `k1` of the metrics does.
    logps, teacher_logps [n]: of tokens that the student sampled; returns [n].
    """
    return (logps - teacher_logps).detach() * logps


def distillation_loss(
    token_losses: torch.Tensor,
    logps: torch.Tensor,
    teacher_logps: torch.Tensor | None,
    mask: torch.Tensor,
    denominator: float,
) -> Loss:
    """The tokens' losses, summed and divided by `denominator`.

    token_losses, logps, teacher_logps, mask [B, T]: losses, and the sampled tokens' logprobs under both models, None if
        the teacher's are not known.
    Metrics, by token: loss, and k1 if they are (log p - log q: an estimate of the reverse KL where the student
        sampled).
    """
    total = masked_sum(token_losses, mask)
    sums = {"loss": total.detach()}
    if teacher_logps is not None:
        sums["k1"] = masked_sum((logps - teacher_logps).detach(), mask)
    return Loss(total / denominator, sums, dict.fromkeys(sums, mask.sum()))
