"""Every option of the losses and advantages is set by a flag, and the loss is computed with the flag's value."""

import ast
import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_examples import grpo
from rlhf_examples.common import advantages, controllers, losses, policy_losses, preference_losses
from rlhf_examples.common.arguments import GRPOArguments, PPOArguments
from rlhf_examples.common.choices import IMPORTANCE_SAMPLING_MODES, LOSS_SETTINGS
from rlhf_examples.common.controllers import AdaptiveEntropyController
from rlhf_examples.common.parsing import parse_arguments
from rlhf_examples.common.policy_losses import POLICY_LOSSES
from rlhf_examples.common.rollouts import Experience, loss_weights
from rlhf_examples.data.examples import collate_preference, tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.data.texts import RecordFormat
from tests.rlhf_examples.scripts import logged, make_small_models, models_of, run_in_this_rank

SCRIPTS = Path(losses.__file__).parents[1]
# Constant in the scripts: PPO's rewards keep their mean, its advantages do not.
CONSTANT = {
    ("masked_whiten", "shift_mean"),
    ("masked_whiten", "unbiased"),  # by the estimator
    ("gdpo_advantages", "weights"),  # by `reward_weights`, with the scores
    ("gdpo_advantages", "num_generations"),
    ("grpo_loss", "settings"),  # of the surrogates
}
DATA = ("Tensor", "Callable", "Loss", "PolicyRows", "Generator")  # types of a loss's inputs


FILES = (advantages, controllers, losses, policy_losses, preference_losses)
# Functions and classes of these files by name.
DEFINED = {
    name: of for file in FILES for name, of in vars(file).items() if getattr(of, "__module__", "") == file.__name__
}


def options() -> set[tuple[str, str]]:
    """(function or class of these files, option) for every parameter that is a number, a name or a switch."""
    parameters = set()
    for name, of in DEFINED.items():
        if name.startswith("_") or name in ("Loss", "PolicyRows", "Surrogate"):
            continue
        for parameter in inspect.signature(of).parameters.values():
            if parameter.name != "denominator" and not any(word in str(parameter.annotation) for word in DATA):
                parameters.add((name, parameter.name))
    return parameters


def set_by_scripts() -> set[tuple[str, str]]:
    """(function of these files, parameter) that a call in a script sets to anything but a constant."""
    parameters_set = set()
    for path in SCRIPTS.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            of = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and DEFINED.get(call.func.id)
            if not callable(of) or path in [Path(file.__file__) for file in FILES]:
                continue
            names, positional = list(inspect.signature(of).parameters), dict(enumerate(call.args))
            starred = [place for place, value in positional.items() if isinstance(value, ast.Starred)]
            known = {place: value for place, value in positional.items() if place < min(starred, default=99)}
            by_place = {names[place]: value for place, value in known.items()}
            by_name = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            settings = {
                name: value for name, value in (by_place | by_name).items() if not isinstance(value, ast.Constant)
            }
            parameters_set |= {(call.func.id, name) for name in settings}
    # Surrogates get their settings by the names of flags.
    flags = set(GRPOArguments.__dataclass_fields__)
    for loss_type, names in LOSS_SETTINGS.items():
        parameters_set |= {(POLICY_LOSSES[loss_type].__name__, name) for name in names if name in flags}
    return parameters_set


# Arithmetic inside a loss or a controller, and parameters that depend on the batch only.
INNER = {
    "mean_metrics",
    "require_choice",
    "pairs_loss",
    "FixedKLController",
    "in_groups",
    "importance_ratio",
    "dppo_surrogate",
    "by_sign",
    "AdaptiveEntropyController",
}


def test_every_option_is_set_by_a_script():
    loss_options = {(name, option) for name, option in options() if name not in INNER}
    assert {("clipped_surrogate", "delta"), ("grpo_loss", "beta"), ("dpo_loss", "beta")} <= loss_options
    assert {("importance_sampling_weights", "mode"), ("sapo_surrogate", "sapo_temperature_pos")} <= loss_options
    missing = sorted(loss_options - set_by_scripts() - CONSTANT)
    assert not missing, f"options that no script sets: {missing}"


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_importance_sampling_follows_its_flags(alone, mode):
    torch.manual_seed(0)
    flags = ["--importance_sampling_correction", "true", "--importance_sampling_mode", mode]
    flags += ["--importance_sampling_clip_max", "1.5", "--importance_sampling_clip_min", "0.7"]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    old, sampled = torch.randn(2, *mask.shape, dtype=torch.float64) / 3
    weights, _ = loss_weights(old, sampled, mask, parse_arguments(PPOArguments, flags))
    bounds = []
    for row, kept in enumerate(mask.bool().tolist()):
        tokens = [token for token, is_kept in enumerate(kept) if is_kept]
        ratios = {token: math.exp(old[row, token] - sampled[row, token]) for token in tokens}
        product = math.prod(ratios.values())
        for token in tokens:
            ratio = product if mode.startswith("sequence") else ratios[token]
            clipped = min(max(ratio, 0.7), 1.5)
            bounds.append(clipped != ratio)
            expected = clipped if clipped == ratio or mode.endswith("truncate") else 0.0
            assert weights[row, token].item() == pytest.approx(expected, rel=1e-9)
    assert 0 < sum(bounds) < len(bounds)


def stepped_loss(monkeypatch, *flags: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of GRPO's update with these flags, and its inputs: tensors [rows, tokens]."""
    torch.manual_seed(0)
    rows, width = 4, 5
    args = parse_arguments(GRPOArguments, ["--num_generations", "2", "--numerics_control_rows", "0", *flags])
    old, new, reference, entropies = (0.8 * torch.randn(rows, width) for _ in range(4))
    entropies, advantages, ones = entropies.abs(), torch.tensor([1.0, -1.0, 0.5, -0.5]), torch.ones(rows, width)
    number = torch.arange(rows)[:, None].expand(rows, width + 1)  # identifies each row
    experience = Experience(
        sequences=number,
        attention_mask=torch.ones_like(number),
        mask=ones.long(),
        sampling_logps=old,
        old_logps=old,
        weights=ones,
        advantages=advantages,
        ref_logps=reference,
    )
    losses_of_steps = []

    def token_logps(policy, sequences, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        return new[sequences[:, 0]], entropies[sequences[:, 0]]

    def backward_and_step(engine, loss: torch.Tensor, *_) -> list[float]:
        losses_of_steps.append(loss.item())
        return [0.0]

    class Numerics:
        def __init__(self, *_): ...

        def add(self, logps: torch.Tensor) -> None: ...

        def metrics(self) -> dict:
            return {}

    for name, own in {"token_logps": token_logps, "backward_and_step": backward_and_step, "Numerics": Numerics}.items():
        monkeypatch.setattr(grpo, name, own)
    grpo.update(SimpleNamespace(policy=None, update_average=lambda: None, entropy_controller=None), experience, 1, args)
    (loss,) = losses_of_steps
    ratio, kl = (new - old).exp(), (reference - new).exp() - (reference - new) - 1
    return loss, {"ratio": ratio, "kl": kl, "entropies": entropies, "advantages": advantages[:, None]}


def surrogate(ratio: torch.Tensor, advantages: torch.Tensor, delta: float = math.inf) -> torch.Tensor:
    """The surrogate of TRL's GRPOTrainer (1.16), clipped at 0.2."""
    return -torch.min(ratio.clamp(max=delta) * advantages, ratio.clamp(0.8, 1.2) * advantages)


def test_grpo_loss_follows_its_flags(alone, monkeypatch):
    plain, of = stepped_loss(monkeypatch)
    assert plain == pytest.approx(surrogate(of["ratio"], of["advantages"]).mean().item(), rel=1e-5)
    bounded, _ = stepped_loss(monkeypatch, "--delta", "1.4")
    assert bounded == pytest.approx(surrogate(of["ratio"], of["advantages"], 1.4).mean().item(), rel=1e-5)
    corrected, _ = stepped_loss(monkeypatch, "--beta", "0.5")
    assert corrected == pytest.approx(plain + 0.5 * (of["kl"] * of["ratio"]).mean().item(), rel=1e-5)
    biased, _ = stepped_loss(monkeypatch, "--beta", "0.5", "--use_bias_correction_kl", "false")
    assert biased == pytest.approx(plain + 0.5 * of["kl"].mean().item(), rel=1e-5)
    rewarded, _ = stepped_loss(monkeypatch, "--entropy_coef", "0.3", "--loss_type", "grpo")
    assert rewarded == pytest.approx(plain - 0.3 * of["entropies"].mean().item(), rel=1e-5)
    assert len({round(loss, 4) for loss in (plain, bounded, corrected, biased, rewarded)}) == 5


def pairs_file(directory: Path, margins: list[float]) -> Path:
    path = directory / "pairs.jsonl"
    rows = [
        {"prompt": "anna found", "chosen": f" a ball {number}", "rejected": " nothing", "by": margin}
        for number, margin in enumerate(margins)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_margins_are_read_from_margin_column(tmp_path):
    records = load_records([str(pairs_file(tmp_path, [0.5, 2, None, "much", True]))])
    tokenizer, settings = synthetic_tokenizer(), {"cache_dir": str(tmp_path)}
    by = RecordFormat(margin_column="by")
    examples = tokenize_records(records, tokenizer, "preference", 0, record_format=by, **settings)
    assert collate_preference(list(examples.rows), 0)["margin"].tolist() == [0.5, 2.0, 0.0]
    assert examples.skipped.counts == {"by is not a finite number": 2}
    unnamed = tokenize_records(records, tokenizer, "preference", 0, **settings)
    assert collate_preference(list(unnamed.rows), 0)["margin"].tolist() == [0.0] * 5


def test_margins_enter_the_reward_models_loss(ranks, tmp_path):
    """A head of zeros gives every completion 0: the first loss is -log σ(-margin)."""
    settings = models_of("reward_model", make_small_models(tmp_path / "small"))
    settings |= {"data_path": [str(pairs_file(tmp_path, [0.5] * 16))], "eval_fraction": 0.0, "max_steps": 1}
    settings |= {"output_dir": str(tmp_path / "run"), "margin_column": "by"}
    ranks.run(run_in_this_rank, "reward_model", settings)
    (row,) = logged(tmp_path / "run")
    assert row["loss"] == pytest.approx(math.log1p(math.exp(0.5)), rel=1e-4)


# A flag of each surrogate's settings, and the loss type that reads it; the other settings are those of the loss type.
SURROGATE_FLAGS = {
    "epsilon_high": ("2.5", ["--loss_type", "cispo", "--epsilon_high", "1.5"]),
    "sapo_temperature_pos": ("2", ["--loss_type", "sapo"]),
    "sapo_temperature_neg": ("2", ["--loss_type", "sapo"]),
    "vespo_k_pos": ("1", ["--loss_type", "vespo"]),
    "vespo_lambda_pos": ("1", ["--loss_type", "vespo"]),
    "vespo_k_neg": ("1", ["--loss_type", "vespo"]),
    "vespo_lambda_neg": ("1", ["--loss_type", "vespo"]),
    "epsilon": ("0.4", ["--loss_type", "gmpo"]),
    "clip_ratio_c": ("1.1", ["--loss_type", "dppo_tv", "--epsilon", "0.9"]),
    "clip_cov_ratio": ("0.5", ["--loss_type", "clip_cov", "--clip_cov_lb", "0", "--clip_cov_ratio", "0.1"]),
    "clip_cov_lb": ("0", ["--loss_type", "clip_cov", "--clip_cov_ratio", "1"]),
    "clip_cov_ub": ("0.1", ["--loss_type", "clip_cov", "--clip_cov_ratio", "1", "--clip_cov_lb", "0"]),
    "kl_cov_ratio": ("0.5", ["--loss_type", "kl_cov"]),
    "ppo_kl_coef": ("3", ["--loss_type", "kl_cov"]),
    "importance_sampling_level": ("sequence", ["--loss_type", "sapo"]),
}


@pytest.mark.parametrize("flag", SURROGATE_FLAGS)
def test_losses_follow_the_flags_of_their_surrogates(alone, monkeypatch, flag):
    value, flags = SURROGATE_FLAGS[flag]
    losses_of = [stepped_loss(monkeypatch, *given)[0] for given in (flags, [*flags, f"--{flag}", value])]
    assert all(map(math.isfinite, losses_of)) and losses_of[0] != pytest.approx(losses_of[1], rel=1e-4)


def test_the_entropys_weight_follows_its_controller():
    """TRL 1.16's rule (use_adaptive_entropy): at first no bonus; then the weight moves after every step."""
    controller = AdaptiveEntropyController(0.1, target=1.0, delta=0.05, minimum=0.05, maximum=0.2)
    found = [(controller.value, controller.coef)]
    for entropy in (0.5, 1.0, 0.9, 2.0, 2.0, 2.0, 2.0):
        controller.update(entropy)
        found.append((controller.value, controller.coef))
    coefs = [0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0.05, 0.05]
    assert [coef for _, coef in found] == pytest.approx(coefs)
    assert [value for value, _ in found] == pytest.approx([0, 0.15, 0.2, 0.2, 0, 0, 0, 0])
    resumed = AdaptiveEntropyController(0.1, target=1.0, delta=0.05, minimum=0.05, maximum=0.2)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(0.5), controller.update(0.5)
    assert (resumed.value, resumed.coef) == (controller.value, controller.coef)
