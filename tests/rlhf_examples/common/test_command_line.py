"""Invalid input ends a script with a one-line error and status 2, without a traceback, before any engine is built."""

import importlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest

import rlhf_examples
from rlhf_examples.common import input_errors, ranks
from rlhf_examples.common.arguments import (
    ChatArguments,
    EvaluateArguments,
    PipelineArguments,
    RayGRPOArguments,
    VisionGRPOArguments,
)
from rlhf_examples.common.parsing import by_subject
from rlhf_examples.common.steps import SCRIPTS
from tests.rank_pool import run_script
from tests.rlhf_examples.scripts import make_small_models

MODEL = "{model}"
CASES = {
    "a flag": ("grpo", ["--num_generation", "4"], "unknown key 'num_generation'; the nearest known key is"),
    "a flag's value": ("ppo", ["--seed", "x"], "argument --seed: invalid int value: 'x'"),
    "a setting": ("sft", ["{folder}/unknown.yaml"], "unknown key 'learningrate'"),
    "a setting's type": ("sft", ["{folder}/typed.yaml"], "max_steps: [3] given; it must be int"),
    "a list's type": ("sft", ["{folder}/listed.yaml"], "report_to: {'a': 1} given; it must be a list of str"),
    "a setting's value": ("dpo", ["--zero_stage", "4"], "zero_stage: 4 given; allowed: 0, 1, 2, 3"),
    "no file of settings": ("pipeline", ["{folder}/none.yaml"], "no file at"),
    "no YAML": ("sft", ["{folder}/broken.yaml"], "broken.yaml is not YAML: "),
    "a step": ("pipeline", ["{folder}/steps.yaml"], "steps.sft: unknown key 'epochs'"),
    "a tracker": ("sft", ["--report_to", "papers"], "report_to: 'papers' given; allowed: tensorboard"),
    "no model": ("reward_model", [], "model_name_or_path: none given"),
    "another model": (
        "grpo",
        ["--actor_model_name_or_path", "{folder}/m", "--reward", "rlhf_examples.rewards:exact_match"],
        "actor_model_name_or_path: '{folder}/m' given; there is no such file or directory",
    ),
    "no model of a directory": (
        "grpo",
        ["--actor_model_name_or_path", "{folder}", "--reward", "rlhf_examples.rewards:exact_match"],
        "actor_model_name_or_path: '{folder}' given; there is no such model",
    ),
    "another critic": (
        "ppo",
        ["--actor_model_name_or_path", MODEL, "--critic_model_name_or_path", "{folder}/m"],
        "critic_model_name_or_path: '{folder}/m' given; there is no such file or directory",
    ),
    "a reward": (
        "grpo",
        ["--actor_model_name_or_path", MODEL, "--reward", "nowhere:f"],
        "reward: 'nowhere:f' given; it must be module:function, and there is no module 'nowhere'",
    ),
    "no function of a module": (
        "grpo",
        ["--actor_model_name_or_path", MODEL, "--reward", "rlhf_examples.rewards:f"],
        "reward: 'rlhf_examples.rewards:f' given; it must be module:function",
    ),
    "no reward": ("grpo", ["--actor_model_name_or_path", MODEL], "reward: none given; give functions"),
    "a step's data": ("pipeline", ["{folder}/data.yaml"], "steps.ppo: data_path: '{folder}/none.csv' given; there is"),
    "a step's model": ("pipeline", ["{folder}/model.yaml"], "steps.dpo: model_name_or_path: none given"),
    "a step that runs later": ("pipeline", ["{folder}/later.yaml"], "steps.dpo: 'step:sft/model' given; a step has"),
    "what no step writes": ("pipeline", ["{folder}/output.yaml"], "unknown key 'modle'; the nearest known key is"),
    "a file of results": (
        "evaluate",
        ["--model_name_or_path", MODEL, "--output_file", "{folder}/none/results.json"],
        "output_file: '{folder}/none/results.json' given; there is no directory '{folder}/none'",
    ),
    "records": ("sft", ["--data_path", "{folder}/none.jsonl"], "there is no such file or directory"),
    "records' form": ("dpo", ["--model_name_or_path", MODEL, "--data_path", "{folder}/odd.jsonl"], "odd.jsonl"),
    "a template": (
        "sft",
        ["--model_name_or_path", MODEL, "--chat_template", "{folder}/none"],
        "chat_template: '{folder}/none' given; there is no such file or directory",
    ),
    "a model to talk with": ("chat", ["--path", "{folder}/m"], "path: '{folder}/m' given"),
    "one of the compared": ("evaluate", ["--model_name_or_path", MODEL, "{folder}/m"], "'{folder}/m' given"),
}


class Ended(Exception):
    """Raised instead of ending the process."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "unknown.yaml").write_text("learningrate: 1\n")
    (tmp_path / "broken.yaml").write_text("learning_rate: [1\n")
    (tmp_path / "typed.yaml").write_text("max_steps: [3]\n")
    (tmp_path / "listed.yaml").write_text("report_to: {a: 1}\n")
    (tmp_path / "steps.yaml").write_text("steps: {sft: {epochs: 3}}\n")
    (tmp_path / "data.yaml").write_text(
        "steps: {sft: {}, ppo: {actor_model_name_or_path: step:sft/model, reward: rlhf_examples.rewards:cheerful, "
        f"data_path: {tmp_path}/none.csv}}}}\n"
    )
    (tmp_path / "model.yaml").write_text("steps: {sft: {}, dpo: {}}\n")
    (tmp_path / "later.yaml").write_text("steps: {dpo: {model_name_or_path: step:sft/model}, sft: {}}\n")
    (tmp_path / "output.yaml").write_text("steps: {sft: {}, dpo: {model_name_or_path: step:sft/modle}}\n")
    rows = [f'{{"question": "what is {n}?", "answer": "{n}"}}\n' for n in range(200)]
    (tmp_path / "odd.jsonl").write_text("".join(rows))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_invalid_input_is_a_one_line_error(case, folder, tmp_path_factory, monkeypatch, capsys):
    script, argv, message = CASES[case]
    datasets.disable_progress_bars()  # as `start_ranks` does
    model = make_small_models(tmp_path_factory.mktemp("small")) / "model" if MODEL in argv else ""
    filled = [text.format(folder=folder, model=model) for text in argv]
    module = importlib.import_module(f"rlhf_examples.{script}")

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.chdir(tmp_path_factory.mktemp("run"))
    monkeypatch.setattr(sys, "argv", [script, *filled])
    monkeypatch.setattr(input_errors.os, "_exit", end)
    monkeypatch.setattr(ranks, "start_ranks", lambda: None)
    for name, value in (("get_rank", 0), ("get_world_size", 1)):
        monkeypatch.setattr(ranks.dist, name, lambda *_, value=value: value)
    capsys.readouterr()
    with pytest.raises(Ended) as ended:
        module.main()
    assert ended.value.args == (2,)
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    line = err.strip()
    assert line.startswith("error: ")
    assert message.replace("{folder}", str(folder)) in line


HEAVY = ("torch", "transformers", "deepspeed", "datasets", "accelerate", "pandas", "matplotlib")
STARTED_BY_THE_PACKAGE = ("sandbox.py", "math_reward.py")  # processes without a command line for users
# Runs commands, given as JSON, in one process; prints the exit status, the loaded heavy modules and the output of each.
COMMANDS = f"""
import contextlib, io, json, runpy, sys
for module, *flags in json.loads(sys.argv[1]):
    sys.argv, out, status = [module, *flags], io.StringIO(), "none"
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, [name for name in {HEAVY} if name in sys.modules], out.getvalue()]))
import rlhf_examples.report.write
print("deepspeed" in sys.modules)
"""


def test_help_is_grouped_shows_defaults_and_imports_nothing_heavy():
    root = Path(rlhf_examples.__file__).parents[1]
    paths = [path.relative_to(root) for path in sorted((root / "rlhf_examples").rglob("*.py"))]
    scripts = [path for path in paths if 'if __name__ == "__main__"' in (root / path).read_text()]
    scripts = [path for path in scripts if path.name not in STARTED_BY_THE_PACKAGE]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in scripts]
    commands = [[name, "--help"] for name in names]
    commands += [["hybrid", *command, "--help"] for command in ([], ["doctor"], ["plan"], ["report"], ["replay"])]
    assert len(commands) >= 19
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(root)}
    program = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, check=True)
    *printed, report_needs_deepspeed = done.stdout.splitlines()
    assert report_needs_deepspeed == "False"
    results = dict(zip(map(tuple, commands), map(json.loads, printed), strict=True))
    for command, (status, heavy, text) in results.items():
        assert (status, heavy) == (0, []), command
        assert "usage: " in text.lower() and "usage: __main__" not in text, command
    for name in names:
        text = results[name, "--help"][2]
        if name in ("rlhf_examples.report", "rlhf_examples.replay"):
            continue
        assert f"usage: python -m {name} [FILE.yaml]" in text
        assert text.count("(default: ") == text.count("\n  --"), "a default for each flag"
        assert text.count("\n  --") >= 4
    grpo = results["rlhf_examples.grpo", "--help"][2]
    for subject in ("Group relative policy", "Rewards", "Rollouts", "Training", "LoRA", "Evaluation", "Checkpoints"):
        assert f"\n{subject}" in grpo
    rewards = grpo.partition("\nRewards:")[2].partition(":\n\n")[0]
    assert "--reward_timeout_s FLOAT" in rewards and "(default: 60.0)" in rewards
    assert "--learning" not in rewards
    assert "[default: 512]" in results["hybrid", "plan", "--help"][2]


def test_every_flag_of_a_script_is_in_its_help_once():
    others = (EvaluateArguments, ChatArguments, PipelineArguments, RayGRPOArguments, VisionGRPOArguments)
    for kind in (*SCRIPTS.values(), *others):
        shown = [item.name for group in by_subject(kind).values() for item in group]
        assert sorted(shown) == sorted(item.name for item in fields(kind) if item.init)


def test_an_error_after_an_engine_is_built_keeps_its_traceback(caplog):
    with pytest.raises(ValueError, match="inside"), input_errors.input_errors_reported():
        input_errors.end_startup()
        raise ValueError("inside")


def test_input_errors_of_a_later_step_are_one_line(monkeypatch, capsys, caplog):
    monkeypatch.setattr(input_errors.os, "_exit", lambda status: None)
    with caplog.at_level(logging.DEBUG, "rlhf_examples"), input_errors.input_errors_reported():
        with input_errors.startup_phase():
            input_errors.end_startup()
        with input_errors.startup_phase():
            raise ValueError("two\nlines")
    assert capsys.readouterr().err == "error: two lines\n"
    assert "Traceback" in caplog.text


@pytest.mark.slow
def test_only_one_rank_prints_the_error():
    done = run_script(["-m", "rlhf_examples.grpo", "--reward", "x", "--temprature", "1"], 2, timeout_s=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert lines == ["error: unknown key 'temprature'; the nearest known key is 'temperature'"]
    assert done.stdout.count("Traceback") <= 1, "more than the launcher's traceback"
    assert "rlhf_examples/" not in done.stdout
    assert done.returncode != 0
