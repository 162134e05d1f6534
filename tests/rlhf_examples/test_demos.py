"""The figures of `make demo`, and of PPO on a pretrained model with a reward model from its own stories."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_examples.common.parsing import read_yaml
from tests.rank_pool import run_script

ROOT = Path(__file__).resolve().parents[2]


def run_pipeline(config: Path, directory: Path) -> dict[str, float]:
    """Run a pipeline on two ranks with its launcher; returns the summary."""
    argv = ["-m", "rlhf_examples.pipeline", str(config), "--output_dir", str(directory)]
    done = run_script(argv, world_size=2, timeout_s=1500, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_demo_reaches_its_figures(tmp_path):
    summary = run_pipeline(ROOT / "configs" / "demo.yaml", tmp_path)
    assert summary["sft_loss_after"] < 0.5 * summary["sft_loss_before"]
    assert summary["reward_accuracy"] >= 0.9
    assert summary["gold_score_before"] < 0.65 and summary["gold_score_after"] >= 0.85
    assert 0 < summary["kl"] < 25
    error = summary["grpo_exact_match_before_stderr"] + summary["grpo_exact_match_after_stderr"]
    assert 0 < error < 0.08  # of 213 different sums: two shares have 0.07 at most
    assert summary["grpo_exact_match_before"] <= 0.3 and summary["grpo_exact_match_after"] >= 0.7
    for name in ("calculator", "guessing"):
        assert summary[f"{name}_reward_before"] < 0.3 and summary[f"{name}_reward_after"] >= 0.8, name
    assert summary["openai_client_reward"] >= 0.7, "a program sees the model that the environment has trained"
    assert summary["tokens_per_second"] > 0 and summary["hf_tokens_per_second"] > 0
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_ppo_on_a_pretrained_model_improves_the_reward(stories260k, tmp_path):
    text = (ROOT / "configs" / "stories.yaml").read_text()
    settings = yaml.safe_load(text.replace("../shared/models/stories260K", str(stories260k)))
    assert read_yaml(ROOT / "configs" / "stories.yaml").keys() == settings.keys()
    config = tmp_path / "stories.yaml"
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    summary = run_pipeline(config, tmp_path / "run")
    assert summary["pairs"] > 500
    assert summary["reward_accuracy"] >= 0.75
    assert summary["joyful_after"] > summary["joyful_before"] + 1.0
    assert 0 < summary["kl"] < 40
