"""Every loss and every advantage of `grpo.py` in a small run on two ranks."""

import math
import re
import warnings
from pathlib import Path

import pytest

from rlhf_examples import grpo
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.choices import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES, AdvantageName
from tests.marks import slow_but
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank

REWARD = "tests.rlhf_examples.scripts:number_of_words"
SEVERAL = [REWARD, "tests.rlhf_examples.test_grpo_variants:length"]
# Two passes, so that ratios differ from 1.
SHORT = {"num_iterations": 2, "num_grpo_iterations": 2, "max_answer_seq_len": 6, "eval_rows": 0, "num_samples": 0}
OF_LOSS = {
    "cispo": {"epsilon_high": 2.0},
    "luspo": {"importance_sampling_level": "sequence"},
    "dppo_tv": {"epsilon": 0.05},
    "dppo_kl": {"epsilon": 0.01},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 10.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}
# Metrics that a variant adds.
METRICS = {
    "cispo": "cispo_clip_ratio",
    "vespo": "vespo/phi_seq_mean",
    "gmpo": "clip_ratio/region_mean",
    "dppo_tv": "clip_ratio/region_mean",
    "dppo_kl": "clip_ratio/region_mean",
    "clip_cov": "clip_cov/region_mean",
    "kl_cov": "kl_cov/region_mean",
}
CASES = {
    **{loss_type: {"loss_type": loss_type, **OF_LOSS.get(loss_type, {})} for loss_type in LOSS_TYPES},
    **{f"advantages {name}": {"advantages": name} for name in AdvantageName.__args__},
    **{
        f"correction {mode}": {
            "importance_sampling_correction": True,
            "importance_sampling_mode": mode,
            "importance_sampling_clip_min": 0.5,
        }
        for mode in IMPORTANCE_SAMPLING_MODES
    },
    # Rewards with few ties for the best, which teach pass@k nothing.
    "advantages grpo_passk": {"advantages": "grpo_passk", "reward": SEVERAL, "reward_weights": [1.0, 0.5]},
    "vespo corrected": {
        "loss_type": "vespo",
        "importance_sampling_correction": True,
        "importance_sampling_mode": "token_mask",
    },
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo-token": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence_token",
        "advantages": "reinforce_plus_plus",
        "gamma": 0.9,
    },
    "gdpo": {
        "reward": SEVERAL,
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "sampling mask": {"top_k": 5, "top_p": 0.95, "keep_sampling_mask": True, "beta": 0.1},
    "sampling mask corrected": {"top_k": 5, "keep_sampling_mask": True, "importance_sampling_correction": True},
    "kl in reward": {"advantages": "reinforce_plus_plus", "use_kl_in_reward": True, "beta": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 20.0},
}


def length(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """A second reward."""
    return [-len(completion) / 8 for completion in completions]


@pytest.mark.parametrize("case", slow_but(["clip_cov", "advantages remax"], CASES))
def test_a_small_run_learns_with_every_variant(ranks, small, tmp_path, case):
    settings = models_of("grpo", small)
    settings |= {"output_dir": str(tmp_path / "run"), **SHORT, **CASES[case]}
    ranks.run(run_in_this_rank, "grpo", settings)
    rows = logged(tmp_path / "run")
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert all(row["grad_norm"] > 0 for row in rows)
    if case in METRICS:
        assert METRICS[case] in rows[0]
    if case == "adaptive entropy":  # two optimizer steps a pass, below a target that is never reached
        assert [row["entropy_coef"] for row in rows] == pytest.approx([0.1 + 4 * 0.005, 0.1 + 8 * 0.005])
    if case == "gdpo":
        assert {"rewards/number_of_words/mean", "rewards/length/mean", "rewards/reward/mean"} <= rows[0].keys()


def run_and_count_warnings(settings: dict) -> int:
    """Run GRPO in this rank; returns how often it warned of truncated sampling."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_in_this_rank("grpo", settings)
    return sum("truncate the sampled distribution" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("forward", slow_but(["exact"], ["exact", "packed"]))
def test_a_sampling_mask_makes_sampler_and_trainer_one_policy(ranks, small, tmp_path, forward):
    """At the weights that sampled, the ratio of the trainer's probability to the sampler's is 1 with the mask, and the
    probability that was not cut off without it, about which the first rank warns once."""
    settings = models_of("grpo", small) | SHORT | {"num_grpo_iterations": 1, "num_iterations": 1, "top_k": 3}
    settings |= {"importance_sampling_correction": True, "training_forward": forward}
    rows = {}
    for keeps in (False, True):
        directory = tmp_path / str(keeps)
        given = settings | {"output_dir": str(directory), "keep_sampling_mask": keeps}
        assert ranks.run(run_and_count_warnings, given) == ([0, 0] if keeps else [1, 0])
        (rows[keeps],) = logged(directory)
    ratio = "sampling/importance_sampling_ratio/"
    assert rows[False][ratio + "mean"] < 0.99
    for name in ("min", "mean", "max"):
        assert rows[True][ratio + name] == (1.0 if forward == "exact" else pytest.approx(1.0, abs=1e-4))
    assert rows[True]["sampling/sampling_logp_difference/max"] < (1e-9 if forward == "exact" else 1e-4)
    assert rows[True]["entropy"] < rows[False]["entropy"], "of three tokens, not of all"


def test_every_row_of_the_table_is_a_case_here():
    """The settings of docs/rlhf.md's table are those of small runs, and every loss and advantage has a row."""
    page = (Path(__file__).parents[2] / "docs" / "rlhf.md").read_text()
    table = page.split("### Losses and advantages by name")[1].split("| topic |")[0]
    rows = re.findall(r"^\|[^|]+\| (`--[^|]+`) \|", table, re.M)
    cells = [cell for row in rows for cell in re.findall(r"`(--[^`]+)`", row)]
    settings = [dict(re.findall(r"--(\w+) (\w+)", cell)) for cell in cells]
    for of_row in settings:
        assert any(
            all(str(case.get(name)).lower() == value for name, value in of_row.items()) for case in CASES.values()
        ), f"{of_row}: no run has these settings"
    for name, values in {"loss_type": LOSS_TYPES, "advantages": AdvantageName.__args__}.items():
        assert {of_row.get(name) for of_row in settings} >= set(values)


def test_remax_scores_the_greedy_completion_of_each_prompt(alone, monkeypatch):
    """One completion for each prompt, of its most probable tokens."""
    drawn = []

    def roll_out(policy, tokenizer, prompts: list[dict], row_ids, params) -> None:
        drawn.append((prompts, row_ids.tolist(), params.temperature))

    monkeypatch.setattr(grpo, "roll_out", roll_out)
    rows = [{"prompt": text} for text in "aabbcc"]
    args = GRPOArguments(num_generations=2, advantages="remax")
    grpo.greedy_completions(None, None, rows, 1, args)
    assert drawn == [([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], [0, 1, 2], 0.0)]
    assert grpo.greedy_completions(None, None, rows, 1, GRPOArguments(num_generations=2)) is None
