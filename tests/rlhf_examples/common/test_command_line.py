"""Invalid input ends a script with a one-line error and status 2, without a traceback, before any engine is built."""

import importlib
import logging
import sys

import datasets
import pytest

from rlhf_examples.common import command_line, ranks
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
    "a step": ("pipeline", ["{folder}/steps.yaml"], "steps.sft: unknown key 'epochs'"),
    "a tracker": ("sft", ["--report_to", "papers"], "report_to: 'papers' given; allowed: tensorboard"),
    "no model": ("reward_model", [], "model_name_or_path: none given"),
    "another model": ("grpo", ["--actor_model_name_or_path", "{folder}/m"], "actor_model_name_or_path: '{folder}/m'"),
    "another critic": (
        "ppo",
        ["--actor_model_name_or_path", MODEL, "--critic_model_name_or_path", "{folder}/m"],
        "critic_model_name_or_path: '{folder}/m' given; there is no such model",
    ),
    "a reward": (
        "grpo",
        ["--actor_model_name_or_path", MODEL, "--reward", "nowhere:f"],
        "reward: 'nowhere:f' given; it must be module:function",
    ),
    "records": ("sft", ["--data_path", "{folder}/none.jsonl"], "there is no such file or directory"),
    "records' form": ("dpo", ["--model_name_or_path", MODEL, "--data_path", "{folder}/odd.jsonl"], "odd.jsonl"),
    "a template": (
        "sft",
        ["--model_name_or_path", MODEL, "--chat_template", "{folder}/none"],
        "chat_template: no file at '{folder}/none'",
    ),
    "a model to talk with": ("chat", ["--path", "{folder}/m"], "path: '{folder}/m' given"),
    "one of the compared": ("evaluate", ["--model_name_or_path", MODEL, "{folder}/m"], "'{folder}/m' given"),
}


class Ended(Exception):
    """Raised instead of ending the process."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "unknown.yaml").write_text("learningrate: 1\n")
    (tmp_path / "typed.yaml").write_text("max_steps: [3]\n")
    (tmp_path / "listed.yaml").write_text("report_to: {a: 1}\n")
    (tmp_path / "steps.yaml").write_text("steps: {sft: {epochs: 3}}\n")
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

    monkeypatch.setattr(sys, "argv", [script, *filled])
    monkeypatch.setattr(command_line.os, "_exit", end)
    for target in (command_line, module):
        monkeypatch.setattr(target, "start_ranks", lambda: None, raising=False)
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


def test_an_error_after_an_engine_is_built_keeps_its_traceback(caplog):
    with pytest.raises(ValueError, match="inside"), command_line.input_errors_reported():
        ranks.end_preparation()
        raise ValueError("inside")


def test_input_errors_of_a_later_step_are_one_line(monkeypatch, capsys, caplog):
    monkeypatch.setattr(command_line.os, "_exit", lambda status: None)
    with caplog.at_level(logging.DEBUG, "rlhf_examples"), command_line.input_errors_reported():
        with ranks.preparing():
            ranks.end_preparation()
        with ranks.preparing():
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
