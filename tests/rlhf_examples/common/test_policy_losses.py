"""The surrogates of GRPO's variants: against loops in float64, TRL's own `_compute_loss`, and values of verl."""

import inspect
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlhf_examples.common.choices import LOSS_SETTINGS, LOSS_TYPES
from rlhf_examples.common.controllers import AdaptiveEntropyController
from rlhf_examples.common.losses import Loss, entropy_bonus, mean_metrics, mixed_loss
from rlhf_examples.common.policy_losses import (
    POLICY_LOSSES,
    clipped_surrogate,
    grpo_loss,
    importance_sampling_weights,
    loss_denominator,
)

ROWS, WIDTH, LENGTHS = 6, 7, [7, 2, 4, 3, 1, 6]
NEW = [name for name, surrogate in POLICY_LOSSES.items() if surrogate is not clipped_surrogate]
# Settings at which every surrogate bounds some tokens of the example and leaves others.
SETTINGS: dict[str, dict[str, float]] = {
    "cispo": {"epsilon_high": 1.3},
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "vespo": {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    "gmpo": {"epsilon": 0.2, "epsilon_high": 0.3},
    "dppo_tv": {"epsilon": 0.05, "epsilon_high": 0.1, "clip_ratio_c": 20.0},
    "dppo_kl": {"epsilon": 0.01, "epsilon_high": 0.02, "clip_ratio_c": 20.0},
    "clip_cov": {"epsilon": 0.2, "clip_cov_ratio": 0.4, "clip_cov_lb": 0.02, "clip_cov_ub": 1.5},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
}
OF_MICRO_BATCHES = ("clip_cov", "kl_cov")  # their covariances are of a micro batch


def wave(number: int, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1 that no random generator makes.  float64"""
    count = math.prod(shape)
    values = [math.sin(12.9898 * (place + 1) + 78.233 * number) for place in range(count)]
    return torch.tensor(values, dtype=torch.float64).view(shape)


def example(filler: float = math.nan) -> dict[str, torch.Tensor]:
    """logps, old_logps, ref_logps, weights, token_advantages, entropies, mask [ROWS, WIDTH]; advantages [ROWS]."""
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    old = -1.2 + wave(1, ROWS, WIDTH)
    x = {
        "old_logps": old,
        "logps": (old + 0.6 * wave(2, ROWS, WIDTH) - 0.1).clamp(max=-0.01),
        "ref_logps": old + 0.3 * wave(6, ROWS, WIDTH),
        "weights": 1 + 0.7 * wave(3, ROWS, WIDTH),
        "token_advantages": wave(4, ROWS, WIDTH),
        "entropies": 1 + wave(7, ROWS, WIDTH),
    }
    x = {name: torch.where(mask.bool(), tensor, filler) for name, tensor in x.items()}
    return {**x, "mask": mask, "advantages": torch.tensor([1.3, -0.7, 0.9, -1.1, -0.4, 0.6], dtype=torch.float64)}


def loss_of(
    x: dict, loss_type: str, rows=slice(None), micro_batches: int = 1, advantages: str = "advantages", **options
):
    """`grpo_loss` of some rows of the example."""
    denominator = loss_denominator(
        loss_type, sequences=ROWS, tokens=sum(LENGTHS), max_completion_length=9, micro_batches=micro_batches
    )
    options = {**SETTINGS.get(loss_type, {}), "generator": torch.Generator().manual_seed(0), **options}
    tensors = {name: options[name][rows] for name in ("weights", "ref_logps", "entropies") if name in options}
    given = (x[name][rows] for name in ("logps", "old_logps", advantages, "mask"))
    return grpo_loss(*given, denominator=denominator, loss_type=loss_type, **{**options, **tensors})


def token_loss(loss_type: str, s: dict, logp, old, advantage):
    """A token's term as its paper has it, with the operations of torch's scalars so that torch gives the gradient."""
    ratio, log_ratio = torch.exp(logp - old), logp - old
    if loss_type == "cispo":
        return -min(ratio.item(), s["epsilon_high"]) * advantage * logp
    if loss_type == "sapo":
        tau = s["sapo_temperature_pos"] if advantage > 0 else s["sapo_temperature_neg"]
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    p, q = logp.exp().item(), old.exp().item()
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))  # of two outcomes
    divergence = abs(p - q) if loss_type == "dppo_tv" else kl
    high, low = s["epsilon_high"], s["epsilon"]
    outside = (divergence > high and p > q) if advantage > 0 else (divergence > low and p < q)
    return 0 * log_ratio if outside else -min(ratio.item(), s["clip_ratio_c"]) * advantage * logp


def row_loss(loss_type: str, s: dict, logps: list, olds: list, advantage: float, weights: list):
    """The sum of a row's terms (vespo), or its single term (gmpo)."""
    logs = [logp - old for logp, old in zip(logps, olds, strict=True)]
    if loss_type == "vespo":
        w = math.exp(sum(log.item() for log in logs) + sum(math.log(weight) for weight in weights))
        side = "pos" if advantage >= 0 else "neg"
        k, decay = s[f"vespo_k_{side}"], s[f"vespo_lambda_{side}"]
        return sum(-(w**k) * math.exp(decay * (1 - w)) * advantage * logp for logp in logps)
    low, high = -s["epsilon"], s["epsilon_high"]
    clipped = [torch.clamp(log, max=high) if advantage > 0 else torch.clamp(log, min=low) for log in logs]
    return -advantage * torch.exp(sum(clipped) / len(logs)) * math.prod(weights) ** (1 / len(weights))


def covariance_losses(loss_type: str, s: dict, x: dict, weights) -> tuple:
    """Clip-Cov's and KL-Cov's sum over tokens, and how many were chosen: all candidates."""
    cells = [(b, t) for b in range(ROWS) for t in range(LENGTHS[b])]
    mean_a = sum(x["advantages"][b].item() for b, _ in cells) / len(cells)
    mean_logp = sum(x["logps"][b, t].item() for b, t in cells) / len(cells)
    covariance = {
        (b, t): (x["advantages"][b].item() - mean_a) * (x["logps"][b, t].item() - mean_logp) for b, t in cells
    }
    highest = sorted(cells, key=covariance.get, reverse=True)[: int(len(cells) * s.get("kl_cov_ratio", 0))]
    total, chosen = 0.0, 0
    for b, t in cells:
        log, advantage = x["logps"][b, t] - x["old_logps"][b, t], x["advantages"][b].item()
        plain = -advantage * torch.exp(log)
        if loss_type == "kl_cov":
            loss = plain + (s["ppo_kl_coef"] * log.abs() if (b, t) in highest else 0.0)
            chosen += (b, t) in highest
        else:
            bounded = -advantage * torch.clamp(torch.exp(log), 1 - s["epsilon"], 1 + s["epsilon"])
            left_out = s["clip_cov_lb"] < covariance[b, t] < s["clip_cov_ub"] and not bounded > plain
            loss = 0.0 * plain if left_out else torch.maximum(plain, bounded)
            chosen += left_out
        total = total + weights[b, t] * loss
    return total, chosen


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss_type", NEW)
def test_surrogates_and_their_gradients_match_loops(loss_type, weighted):
    x, s = example(), SETTINGS[loss_type]
    x["logps"].requires_grad_()
    weights = x["weights"] if weighted else torch.ones(ROWS, WIDTH, dtype=torch.float64)
    actual = loss_of(x, loss_type, weights=weights)
    rows, tokens = [], 0.0
    for b in range(ROWS):
        kept, advantage = range(LENGTHS[b]), x["advantages"][b].item()
        logps, olds = [x["logps"][b, t] for t in kept], [x["old_logps"][b, t] for t in kept]
        of_row = [weights[b, t].item() for t in kept]
        if loss_type in ("vespo", "gmpo"):
            rows.append(row_loss(loss_type, s, logps, olds, advantage, of_row))
        elif loss_type not in OF_MICRO_BATCHES:
            terms = [token_loss(loss_type, s, *pair, advantage) for pair in zip(logps, olds, strict=True)]
            rows.append(sum(weight * term for weight, term in zip(of_row, terms, strict=True)))
    if loss_type in OF_MICRO_BATCHES:
        tokens, chosen = covariance_losses(loss_type, s, x, weights)
        assert 1 < chosen < sum(LENGTHS) / 2
        assert mean_metrics([actual])[f"{loss_type}/region_mean"] == pytest.approx(chosen / sum(LENGTHS))
    expected = (tokens + sum(rows)) / sum(LENGTHS)
    if loss_type == "sapo":
        expected = sum(row / length for row, length in zip(rows, LENGTHS, strict=True)) / ROWS
    if loss_type == "gmpo":
        expected = sum(rows) / ROWS
    gradients = [torch.autograd.grad(loss, x["logps"])[0] for loss in (actual.loss, expected)]
    assert actual.loss.item() == pytest.approx(expected.item(), rel=1e-7)  # dppo_kl's 1e-8, gmpo's 1e-10
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-7)
    assert (gradients[0][x["mask"] == 0] == 0).all() and gradients[0].abs().max() > 1e-3


def test_gspo_token_has_gspos_value_and_gradient_for_one_advantage_a_row():
    """arXiv:2507.18071, section 4.3; with advantages of tokens they differ."""
    x = example()
    x["logps"].requires_grad_()
    found = [loss_of(x, "grpo", epsilon=0.1, importance_sampling_level=f"sequence{end}") for end in ("", "_token")]
    torch.testing.assert_close(found[0].loss, found[1].loss, atol=1e-14, rtol=1e-12)
    gradients = [torch.autograd.grad(loss.loss, x["logps"])[0] for loss in found]
    torch.testing.assert_close(*gradients, atol=1e-14, rtol=1e-12)
    of_tokens = [
        loss_of(x, "grpo", advantages="token_advantages", epsilon=0.1, importance_sampling_level=level).loss
        for level in ("sequence", "sequence_token")
    ]
    gradients = [torch.autograd.grad(loss, x["logps"])[0] for loss in of_tokens]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3
    total, expected = 0.0, torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for b in range(ROWS):
        logs = [(x["logps"] - x["old_logps"])[b, t].item() for t in range(LENGTHS[b])]
        ratio = math.exp(sum(logs) / LENGTHS[b])
        for t in range(LENGTHS[b]):
            advantage = x["token_advantages"][b, t].item()
            plain, bounded = -advantage * ratio, -advantage * min(max(ratio, 0.9), 1.1)
            total += max(plain, bounded) / LENGTHS[b] / ROWS
            expected[b, t] = plain / LENGTHS[b] / ROWS if plain >= bounded else 0.0
    assert of_tokens[1].item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradients[1], expected, atol=1e-14, rtol=1e-12)


def trl_loss(
    x: dict, loss_type: str, level: str, weights=None, beta: float = 0.0, **options
) -> tuple[torch.Tensor, dict]:
    """The loss and the metrics of TRL's own GRPOTrainer or GMPOTrainer, on one rank without accumulation."""
    trainer, fake, inputs = trl_trainer(x, loss_type, level, weights, beta, **options)
    return trainer._compute_loss(fake, None, inputs), {
        name: values[0] for name, values in fake._metrics["train"].items()
    }


def trl_trainer(x: dict, loss_type: str, level: str, weights=None, beta: float = 0.0, **options) -> tuple:
    """TRL's trainer's class, what its `_compute_loss` reads of a trainer, and the inputs."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is compared with where it is installed")
    trainer = module.GRPOTrainer
    if loss_type == "gmpo":
        trainer = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    ids, metrics = torch.zeros(ROWS, WIDTH, dtype=torch.long), defaultdict(list)
    # TRL multiplies masked values by 0, so they must be finite.
    x = {name: tensor.nan_to_num(nan=0.0) for name, tensor in x.items()}
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda v, reduction: v, gather=lambda v: v, sync_gradients=True
    )
    trl_args = SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False, **options)
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logps"], x["entropies"], None),
        get_gamma_weights=trainer.get_gamma_weights,
        model=SimpleNamespace(training=True),
        args=trl_args,
        accelerator=accelerator,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=options.get("epsilon"),
        epsilon_high=options.get("epsilon_high"),
        beta=beta,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": metrics},
    )
    inputs = {
        **dict.fromkeys(("prompt_ids", "completion_ids", "prompt_mask"), ids),
        "completion_mask": x["mask"],
        "advantages": x["advantages"],
        "old_per_token_logps": x["old_logps"],
        "ref_per_token_logps": x["ref_logps"],
        "num_items_in_batch": x["mask"].sum(),
    }
    if weights is not None:
        inputs["importance_sampling_ratio"] = torch.where(x["mask"].bool(), weights, 1.0)
    return trainer, fake, inputs


def test_the_adapted_entropy_bonus_is_that_of_trls_trainer():
    """Losses and weights of five optimizer steps whose entropy lies above and below the target."""
    x, target = example(), {"epsilon": 0.2, "epsilon_high": 0.2, "entropy_target": 1.0}
    limits = {"entropy_coef_delta": 0.05, "entropy_coef_min": 0.05, "entropy_coef_max": 0.2}
    trainer, fake, inputs = trl_trainer(x, "dapo", "token", **target, **limits)
    vars(fake).update(_entropy_bonus_enabled=True, use_adaptive_entropy=True, entropy_coef=0.1)
    vars(fake).update(_last_world_entropy=math.inf, _entropy_window_stats=None)
    controller = AdaptiveEntropyController(0.1, 1.0, 0.05, 0.05, 0.2)
    logps, applied = x["logps"].nan_to_num(nan=0.0), []
    for scale in (2.0, 0.5, 0.6, 0.4, 3.0):
        entropies = scale * x["entropies"]
        plain = loss_of(x, "dapo", epsilon=0.2, entropies=entropies)
        bonus = entropy_bonus(entropies, x["mask"], sum(LENGTHS))
        fake._get_per_token_logps_and_entropies = lambda *_, of=entropies, **__: (logps, of.nan_to_num(nan=0.0), None)
        expected = trainer._compute_loss(fake, None, inputs)
        actual = mixed_loss(plain, entropy=bonus, entropy_coef=controller.value)
        assert actual.loss.item() == pytest.approx(expected.item(), rel=1e-12)
        applied.append(controller.value)
        controller.update(mean_metrics([actual])["entropy"])
        assert controller.coef == pytest.approx(fake.entropy_coef, rel=1e-12)
    assert len(set(applied)) > 2 and 0.0 in applied


@pytest.mark.parametrize(
    ("loss_type", "level", "weighted"),
    [
        ("grpo", "token", False),
        ("grpo", "sequence", False),
        ("dr_grpo", "token", False),
        ("bnpo", "token", False),
        ("dapo", "token", True),
        ("luspo", "sequence", True),
        ("cispo", "token", False),
        ("cispo", "token", True),
        ("cispo", "sequence", False),
        ("sapo", "token", True),
        ("sapo", "sequence", False),
        ("vespo", "token", False),
        ("vespo", "token", True),
        ("gmpo", "token", False),
    ],
)
def test_losses_are_those_of_trls_trainer(loss_type, level, weighted):
    """TRL's code, run on the same tensors: loss, gradient and the metrics that we log."""
    x = example()
    x["logps"].requires_grad_()
    s = SETTINGS.get(loss_type, {"epsilon": 0.2, "epsilon_high": 0.3})
    weights = x["weights"] if weighted else None
    expected, metrics = trl_loss(x, loss_type, level, weights, beta=0.1, **s)
    actual = loss_of(
        x,
        loss_type,
        importance_sampling_level=level,
        weights=torch.ones(ROWS, WIDTH) if weights is None else weights,
        beta=0.1,
        ref_logps=x["ref_logps"],
        entropies=x["entropies"],
        use_bias_correction_kl=False,
        **s,
    )
    gradients = [torch.autograd.grad(loss, x["logps"])[0] for loss in (actual.loss, expected)]
    assert actual.loss.item() == pytest.approx(expected.item(), rel=1e-6)  # TRL's temperatures are float32
    torch.testing.assert_close(*gradients, atol=1e-8, rtol=1e-6)
    logged = mean_metrics([actual])
    shared = logged.keys() & metrics.keys()
    assert {"kl", "entropy"} <= shared and (loss_type == "sapo" or len(shared) > 2)
    assert {name: logged[name] for name in shared} == pytest.approx({name: metrics[name] for name in shared}, rel=1e-6)


# Loss and norm of the gradient of verl's compute_policy_loss_… on the same tensors in float64, loss_agg_mode
# token-mean (verl 0.10.0.dev, commit 1dda039b9c6311889a9c9a26040677e1254814f9). geo_mean is gmpo.
VERL = {
    "dppo_tv": (1.095349620092, 0.245128346693),
    "dppo_kl": (0.717861242690, 0.206103645719),
    "sapo": (-0.312332036390, 0.199265453481),
    "gspo": (-0.100410567005, 0.161074492454),
    "gspo_token": (-0.143770830310, 0.132509691441),
    "gmpo": (-0.126126296747, 0.172689796440),
    "clip_cov": (-0.423348661426, 0.139230622108),
    "kl_cov": (-0.548094771581, 0.250462050390),
    "cispo": (0.921397785774, 0.229654962504),
    "dppo_tv/weighted": (0.784897660657, 0.160517811434),
    "dppo_kl/weighted": (0.649575558988, 0.155927882795),
    "sapo/weighted": (-0.254797058522, 0.148711699293),
    "gspo/weighted": (-0.094765175040, 0.130388549743),
    "gspo_token/weighted": (0.181773943165, 0.103849369797),
    "gmpo/weighted": (-0.084679147825, 0.124994563451),
    "clip_cov/weighted": (-0.303654583563, 0.128111504618),
    "kl_cov/weighted": (-0.371638599856, 0.187778043791),
    "cispo/weighted": (0.672397959857, 0.161964089384),
}


@pytest.mark.parametrize("case", VERL)
def test_losses_are_those_of_verl(case):
    name, _, weighted = case.partition("/")
    x, options = example(), {}
    x["logps"].requires_grad_()
    loss_type, advantages = name, "advantages"
    if name.startswith("gspo"):
        loss_type, options = "grpo", {"importance_sampling_level": "sequence_token", "epsilon": 0.1}
        advantages = "token_advantages" if name == "gspo_token" else advantages
    actual = loss_of(x, loss_type, advantages=advantages, **options, **({"weights": x["weights"]} if weighted else {}))
    (gradient,) = torch.autograd.grad(actual.loss, x["logps"])
    assert (actual.loss.item(), gradient.norm().item()) == pytest.approx(VERL[case], rel=1e-6)


SPLITS = [[[0, 1, 2], [3, 4, 5]], [[5, 2], [1], [0], [4, 3]], [[1], [0, 2, 3, 4], [5]]]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("loss_type", [name for name in NEW if name not in OF_MICRO_BATCHES])
def test_losses_do_not_depend_on_ranks_and_micro_batches(loss_type, split):
    x = example()
    x["logps"].requires_grad_()

    def total_of(parts: list[list[int]]) -> tuple[torch.Tensor, dict]:
        options = {"beta": 0.1, "weights": x["weights"], "ref_logps": x["ref_logps"], "entropies": x["entropies"]}
        losses = [loss_of(x, loss_type, rows, len(parts), **options) for rows in parts]
        total = sum(loss.loss for loss in losses) / len(parts)
        return torch.autograd.grad(total, x["logps"])[0], mean_metrics(losses)

    (gradient, figures), (expected, expected_figures) = total_of(split), total_of([[*range(ROWS)]])
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-12)
    assert figures == pytest.approx(expected_figures, rel=1e-12)


@pytest.mark.parametrize("loss_type", NEW)
def test_a_dropped_row_contributes_nothing(loss_type):
    """Also a micro batch without any token: no NaN, and gradients of 0."""
    x = example()
    x["mask"][3] = 0
    x["logps"][3], x["advantages"][3] = math.nan, math.nan
    x["logps"].requires_grad_()
    for rows in (slice(None), [3]):
        loss: Loss = loss_of(x, loss_type, rows, weights=x["weights"])
        (gradient,) = torch.autograd.grad(loss.loss, x["logps"])
        assert gradient.isfinite().all() and (gradient[3] == 0).all()
        assert all(math.isfinite(value) for value in mean_metrics([loss]).values())
    assert loss.loss.item() == 0


def test_clip_cov_draws_by_its_generator():
    """As many tokens as the share says, among the candidates, and others by another seed."""
    x = example()
    gradients = []
    for seed in (0, 0, 1):
        x["logps"] = x["logps"].detach().requires_grad_()
        loss = loss_of(x, "clip_cov", clip_cov_ratio=0.09, generator=torch.Generator().manual_seed(seed))
        assert loss.sums["clip_cov/region_mean"] == 2  # of 23 tokens
        gradients.append(torch.autograd.grad(loss.loss, x["logps"])[0])
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


def test_every_loss_type_names_the_settings_of_its_surrogate():
    """`LOSS_SETTINGS`, which settings are checked by before torch is imported, is what the functions take."""
    assert tuple(POLICY_LOSSES) == LOSS_TYPES == tuple(LOSS_SETTINGS)
    for loss_type, surrogate in POLICY_LOSSES.items():
        keywords = [p.name for p in inspect.signature(surrogate).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert tuple(keywords) == LOSS_SETTINGS[loss_type]


# The sum over each row's tokens of verl's compute_rollout_correction_weights on these tensors (the same commit):
# token or sequence, with a threshold of 1.2 (TIS) or of two numbers (IcePop).
VERL_WEIGHTS = {
    "token_truncate": [7.838902489487, 1.963070480777, 3.799220045023, 3.099306616028, 0.611503449305, 5.503126796759],
    "token_mask": [1.838902489487, 1.963070480777, 1.901104257096, 1.899306616028, 0.0, 1.837154478911],
    "sequence_truncate": [8.4, 1.90621410744, 3.14591000114, 3.370854667918, 0.611503449305, 3.442584691191],
    "sequence_mask": [0.0, 1.90621410744, 3.14591000114, 3.370854667918, 0.611503449305, 3.442584691191],
}


@pytest.mark.parametrize("mode", VERL_WEIGHTS)
def test_importance_sampling_weights_are_those_of_verl(mode):
    x = example()
    floor = {"token_mask": 0.8, "sequence_mask": 0.5}.get(mode, 0.0)
    log_ratio = 0.5 * wave(2, ROWS, WIDTH) - 0.1
    weights = importance_sampling_weights(log_ratio, torch.zeros_like(log_ratio), x["mask"], 1.2, mode, floor)
    assert (weights * x["mask"]).sum(dim=1).tolist() == pytest.approx(VERL_WEIGHTS[mode], rel=1e-10)
