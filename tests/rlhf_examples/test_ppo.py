"""The PPO run itself, tiny, on two ranks under ZeRO-3 with everything partitioned."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_examples.run_log import read_metrics
from tests.rank_pool import run_script

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "sft_steps": 8,
    "sft_batch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_iterations": 4,
    "per_device_rollout_batch_size": 8,
    "per_device_train_batch_size": 2,
    "response_length": 12,
    "save_every": 1,
}


def ppo(directory: Path, kill_when=None, **changes) -> list[dict[str, float]]:
    """Run the script on two ranks; gives its metrics."""
    flags = {**TINY, "output_dir": str(directory), **changes}
    argv = ["-m", "rlhf_examples.ppo", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]
    done = run_script(argv, world_size=2, timeout_s=240, kill_when=kill_when, env={"PYTHONPATH": str(ROOT)})
    assert kill_when or done.returncode == 0, done.stdout[-4000:]
    return read_metrics(directory)


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))} for row in rows]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """An uninterrupted run and its metrics."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, ppo(directory)


def test_the_first_ratio_is_one(whole_run, tmp_path):
    """Before the first update, training logprobs are the old ones: recomputed, and, in float32, as sampled too."""
    _, rows = whole_run
    assert len(rows) == TINY["num_iterations"]
    model = str(whole_run[0] / "sft")
    sampled = ppo(tmp_path, model=model, logprob_mode="sampling", save_every=0, temperature=0.7)
    for row in (*rows, *sampled):
        assert row["val/first_ratio_error"] < 1e-5
        for name in ("sampling", "control"):
            assert row[f"{name}/sampling_logp_difference/max"] < 1e-5
            assert row[f"{name}/ratio_outside"] == 0
        assert row["sampling/sampling_logp_difference/max"] > 0, "decoding is not the training forward, to the last bit"
        assert row["policy/approxkl_avg"] > 0, "nothing was learned, so every ratio is 1"


@pytest.mark.slow
def test_the_control_changes_nothing(whole_run, tmp_path):
    """Its forwards, which under ZeRO-3 are collectives, leave every other number as it is."""
    _, rows = whole_run
    (without,) = without_times(ppo(tmp_path, num_iterations=1, save_every=0, numerics_control_rows=0))
    assert without == {name: value for name, value in without_times(rows)[0].items() if "control/" not in name}
    assert len(rows[0].keys() - without.keys() - {n for n in rows[0] if n.startswith(("time/", "memory/"))}) == 4


@pytest.mark.slow
def test_importance_sampling_correction(whole_run, tmp_path):
    """In float32 sampler and trainer agree, so it changes nothing beyond rounding; in bf16 weights leave 1, and the
    training forward, which the old logprobs are then of, agrees with itself better than with the sampler."""
    shared = {"model": str(whole_run[0] / "sft"), "num_iterations": 2, "save_every": 0}
    corrected = {**shared, "importance_sampling_correction": True}
    plain, exact, rounded = (
        ppo(tmp_path / name, **changes)
        for name, changes in (
            ("plain", shared),
            ("exact", {**corrected, "importance_sampling_cap": 3.0}),
            ("rounded", {**corrected, "dtype": "bfloat16", "importance_sampling_cap": 1.0}),
        )
    )
    ratio = "sampling/importance_sampling_ratio"
    for row, expected in zip(exact, plain, strict=True):
        assert all(row[f"{ratio}/{name}"] == pytest.approx(1, abs=1e-5) for name in ("min", "mean", "max"))
        for name in ("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "objective/scores"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
        assert f"{ratio}/mean" not in expected
    for row in rounded:
        assert row[f"{ratio}/min"] < row[f"{ratio}/mean"] < row[f"{ratio}/max"] == 1, "the cap is 1"
        assert row["sampling/sampling_logp_difference/max"] > 1e-5, "bf16 was not rounded to"
        assert row["sampling/gen_kl_error"] > row["control/gen_kl_error"] >= 0
        assert row["val/first_ratio_error"] < row["sampling/sampling_logp_difference/max"]


@pytest.mark.slow
def test_padding_changes_no_loss(whole_run, tmp_path):
    """Ranks hold rows of other lengths, and micro batches cut them otherwise: the same losses."""
    _, rows = whole_run
    model = str(whole_run[0] / "sft")
    first, second = (
        ppo(tmp_path / str(size), model=model, per_device_train_batch_size=size, num_iterations=1, save_every=0)
        for size in (1, 4)
    )
    lengths = rows[0]["completions/mean_length"]
    assert lengths < TINY["response_length"], "no completion is padded, and nothing is tested"
    for name in ("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "val/ratio"):
        # Sums over micro batches in another order.
        assert first[0][name] == pytest.approx(second[0][name], rel=1e-4, abs=1e-7), name


def test_a_killed_run_goes_on_as_if_it_had_not_been(whole_run, tmp_path):
    _, expected = whole_run
    ppo(tmp_path, kill_when=lambda: len(read_metrics(tmp_path)) >= 2)
    survived = len(read_metrics(tmp_path))
    assert 2 <= survived < TINY["num_iterations"], "the run was not killed in its middle"
    rows = ppo(tmp_path, resume=True)
    assert without_times(rows) == without_times(expected)
    samples = [json.loads((directory / "samples.json").read_text()) for directory in (tmp_path, whole_run[0])]
    assert samples[0] == samples[1]


def test_checkpoints_are_whole_and_few(whole_run):
    folder = whole_run[0] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["iteration-000003", "iteration-000004", "latest"]
    assert (folder / "latest").read_text() == "iteration-000004"


def test_the_policy_loads_in_hugging_face(whole_run):
    directory = whole_run[0]
    policy = AutoModelForCausalLM.from_pretrained(directory / "policy")
    before = AutoModelForCausalLM.from_pretrained(directory / "sft")
    tokenizer = AutoTokenizer.from_pretrained(directory / "policy")
    ids = tokenizer("anna found a red ball in the garden .", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert (policy(ids).logits - before(ids).logits).abs().max() > 1e-3, "what was exported was not trained"
    # The samples printed at the end are what the exported directory makes of the same prompts: see its first token.
    samples = json.loads((directory / "samples.json").read_text())
    assert len(samples) == 4 and all(set(sample) == {"prompt", "before", "after"} for sample in samples)
    assert (directory / "curves.png").stat().st_size > 10_000
    assert list((directory / "tensorboard").iterdir())


@pytest.mark.slow
def test_lora_resumes_and_loads_in_peft(whole_run, tmp_path):
    base = str(whole_run[0] / "sft")
    changes = {"model": base, "lora_r": 4, "learning_rate": 1e-2, "num_iterations": 3}
    expected = ppo(tmp_path / "whole", **changes)
    ppo(tmp_path / "killed", kill_when=lambda: len(read_metrics(tmp_path / "killed")) >= 1, **changes)
    rows = ppo(tmp_path / "killed", resume=True, **changes)
    assert without_times(rows) == without_times(expected)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4), "the reference is the policy without its adapter"
    assert abs(rows[-1]["objective/kl"]) > 1e-3
    model = AutoModelForCausalLM.from_pretrained(base)
    policy = peft.PeftModel.from_pretrained(model, tmp_path / "whole" / "policy")
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        adapted = policy(ids).logits
        with policy.disable_adapter():
            assert (adapted - policy(ids).logits).abs().max() > 1e-3


@pytest.mark.slow
def test_the_reward_of_the_demo_rises(tmp_path):
    argv = ["-m", "rlhf_examples.ppo", str(ROOT / "configs" / "demo.yaml"), "--output_dir", str(tmp_path)]
    done = run_script(argv, world_size=2, timeout_s=550, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-4000:]
    scores = [row["objective/scores"] for row in read_metrics(tmp_path)]
    assert sum(scores[-5:]) / 5 > sum(scores[:2]) / 2 + 1.5
