"""KTO's and ORPO's losses against loops in float64 and TRL's own code, and as settings of `dpo.py`."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlhf_examples.common.losses import mean_metrics
from rlhf_examples.common.preference_losses import kto_loss, log_1m_exp, orpo_loss
from rlhf_examples.common.run_log import read_metrics
from rlhf_examples.dpo import mismatched
from tests.marks import slow_but
from tests.rlhf_examples.common.test_policy_losses import wave
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank

PAIRS = 6
MASK = torch.tensor([1, 1, 0, 1, 1, 1])


def logps_of(number: int, filler: float = math.nan) -> list[torch.Tensor]:
    """chosen, rejected and the reference's two, float64 [PAIRS]; `filler` in the masked pair."""
    tensors = [-4 + 3 * wave(number + place, PAIRS) for place in range(4)]
    return [torch.where(MASK.bool(), tensor, filler).requires_grad_(place < 2) for place, tensor in enumerate(tensors)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto_loss_and_gradient_match_a_loop(kl):
    tensors, given = logps_of(20), {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    actual = kto_loss(*tensors, torch.tensor(kl, dtype=torch.float64), **given, denominator=4.0, mask=MASK)
    gradients = torch.autograd.grad(actual.loss, tensors[:2])
    total, rewards = 0.0, []
    for pair in range(PAIRS):
        slopes = [0.0, 0.0]
        if MASK[pair]:
            chosen, rejected, ref_chosen, ref_rejected = (tensor[pair].item() for tensor in tensors)
            good, bad = sigmoid(0.3 * (chosen - ref_chosen - kl)), sigmoid(0.3 * (kl - (rejected - ref_rejected)))
            total += (1.5 * (1 - good) + 0.5 * (1 - bad)) / 2
            slopes = [-1.5 * 0.3 * good * (1 - good) / 2, 0.5 * 0.3 * bad * (1 - bad) / 2]
            rewards.append((0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)))
        for gradient, slope in zip(gradients, slopes, strict=True):
            assert gradient[pair].item() == pytest.approx(slope / 4.0, abs=1e-14)
    assert actual.loss.item() == pytest.approx(total / 4.0, rel=1e-12)
    accuracy = sum(good > bad for good, bad in rewards) / 5
    assert 0 < accuracy < 1
    means = {
        "loss": total / 5,
        "kl": kl,
        "rewards/chosen": sum(good for good, _ in rewards) / 5,
        "rewards/rejected": sum(bad for _, bad in rewards) / 5,
        "rewards/accuracies": accuracy,
        "rewards/margins": sum(good - bad for good, bad in rewards) / 5,
    }
    assert mean_metrics([actual]) == pytest.approx(means, rel=1e-12)


def test_orpo_loss_and_gradient_match_a_loop():
    chosen, rejected, *_ = logps_of(30)
    actual = orpo_loss(chosen, rejected, beta=0.3, denominator=4.0, mask=MASK)
    gradients = torch.autograd.grad(actual.loss, (chosen, rejected))
    terms, leaves = [], []
    for pair in range(PAIRS):
        if MASK[pair]:
            leaves.append([tensor[pair].detach().requires_grad_() for tensor in (chosen, rejected)])
            odds = [logp.exp() / (1 - logp.exp()) for logp in leaves[-1]]
            ratio = odds[0] / odds[1]
            terms.append(-leaves[-1][0] - 0.3 * torch.log(1 / (1 + torch.exp(-torch.log(ratio)))))
    total = sum(terms) / 4.0
    assert actual.loss.item() == pytest.approx(total.item(), rel=1e-12)
    expected = iter(torch.autograd.grad(total, [leaf for pair in leaves for leaf in pair]))
    for pair in range(PAIRS):
        for gradient in gradients:
            assert gradient[pair].item() == pytest.approx(next(expected).item() if MASK[pair] else 0.0, rel=1e-10)
    assert mean_metrics([actual])["nll_loss"] == pytest.approx(-chosen[MASK.bool()].mean().item(), rel=1e-12)


def test_log_1m_exp_is_exact_near_zero_and_far_below():
    values = torch.tensor([-1e-12, -1e-3, -0.69, -0.7, -5.0, -60.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) if v > -1 else math.log1p(-math.exp(v)) for v in values.tolist()]
    assert log_1m_exp(values).tolist() == pytest.approx(expected, rel=1e-14)


def test_orpos_odds_ratio_is_that_of_trls_trainer():
    trainer = pytest.importorskip(
        "trl.experimental.orpo", reason="trl is compared with where it is installed"
    ).ORPOTrainer
    chosen, rejected = (tensor.detach() for tensor in logps_of(30, filler=-2.0)[:2])
    fake = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    losses, good, bad, ratio, odds = trainer.odds_ratio_loss(fake, chosen, rejected)
    actual = orpo_loss(chosen, rejected, beta=0.3, denominator=PAIRS)
    assert actual.loss.item() == pytest.approx((-chosen - losses).mean().item(), rel=1e-5)  # TRL's is float32
    found, means = mean_metrics([actual]), {"log_odds_ratio": ratio, "log_odds_chosen": odds}
    means |= {"rewards/chosen": good.mean(), "rewards/rejected": bad.mean()}
    assert {name: found[name] for name in means} == pytest.approx(
        {name: value.item() for name, value in means.items()}, rel=1e-5
    )


def test_ktos_loss_is_that_of_trls_trainer():
    """TRL's own `_compute_loss`, in which a model returns our logprobs: a token for each completion."""
    trainer = pytest.importorskip(
        "trl.trainer.kto_trainer", reason="trl is compared with where it is installed"
    ).KTOTrainer
    chosen, rejected, ref_chosen, ref_rejected = (tensor.detach() for tensor in logps_of(20, filler=-3.0))
    log_probs = torch.cat([chosen, rejected])[:, None].requires_grad_()
    of_others = -2 + wave(40, 2 * PAIRS)
    ref_of_others, ids = of_others - 0.3 - 0.2 * wave(41, 2 * PAIRS), torch.zeros(2 * PAIRS, 2, dtype=torch.long)

    def model(input_ids: torch.Tensor, **_) -> SimpleNamespace:
        unused = torch.zeros(2 * PAIRS, 1)
        logps = of_others[:, None] if input_ids.any() else log_probs
        return SimpleNamespace(log_probs=logps, entropy=unused, mean_logits=unused)

    model.training = True
    fake = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    fake._compute_kl_logps = lambda *given: trainer._compute_kl_logps(fake, *given)
    inputs = {
        "label": torch.tensor([True] * PAIRS + [False] * PAIRS),
        **dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), ids),
        **dict.fromkeys(("KL_input_ids", "KL_attention_mask", "KL_completion_mask"), ids + 1),
        "ref_logps": torch.cat([ref_chosen, ref_rejected]),
        "ref_KL_logps": ref_of_others,
    }
    expected = trainer._compute_loss(fake, model, inputs, False)
    kl = (of_others - ref_of_others).mean().clamp(min=0)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    chosen, rejected = log_probs[:PAIRS, 0], log_probs[PAIRS:, 0]
    actual = kto_loss(chosen, rejected, ref_chosen, ref_rejected, kl, beta=0.3, denominator=PAIRS, **weights)
    assert kl > 0.1 and actual.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (actual.loss, expected)]
    torch.testing.assert_close(*gradients, atol=1e-14, rtol=1e-12)
    found = mean_metrics([actual])
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert found[name] == pytest.approx(fake._metrics["train"][name][0], rel=1e-12)


def test_mismatched_rows_have_the_completions_of_others():
    rows = [
        {"prompt_ids": [n] * (n + 1), "chosen_ids": [10 + n] * 3, "rejected_ids": [20 + n] * 2, "margin": 0.0}
        for n in range(3)
    ]
    found = mismatched(rows, max_seq_len=4)
    assert [row["prompt_ids"] for row in found] == [row["prompt_ids"] for row in rows]
    assert [row["chosen_ids"] for row in found] == [[12] * 3, [10] * 2, [11]]
    assert [row["rejected_ids"] for row in found] == [[22] * 2, [20] * 2, [21]]


@pytest.mark.parametrize(
    ("loss_type", "lora_dim"), slow_but([("kto", 0)], [("kto", 0), ("kto", 2), ("orpo", 0), ("orpo", 2)])
)
def test_dpo_learns_by_kto_and_orpo(ranks, small, tmp_path, loss_type, lora_dim):
    """Two ranks, also with LoRA, whose reference is the policy without it: the chosen completions gain."""
    settings = models_of("dpo", small)
    settings |= {"output_dir": str(tmp_path / "run"), "loss_type": loss_type, "lora_dim": lora_dim, "max_steps": 4}
    ranks.run(run_in_this_rank, "dpo", settings)
    rows = logged(tmp_path / "run")
    assert len(rows) == 4 and all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["grad_norm"] > 0
    if loss_type == "kto":
        assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-4) and rows[0]["kl"] == pytest.approx(0, abs=1e-4)
        assert rows[-1]["rewards/chosen"] != 0
    else:
        before, *_, after = read_metrics(tmp_path / "run")  # of the same records, which batches of training are not
        assert after["eval_nll_loss"] < before["eval_nll_loss"]
