"""A run never deletes another run's results without `overwrite`, nor its own latest checkpoints."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rlhf_examples import pairs, pipeline
from rlhf_examples.common import run_lock
from rlhf_examples.common.arguments import GRPOArguments, PipelineArguments, SFTArguments
from rlhf_examples.common.checkpoint import Checkpoints, load_trained
from rlhf_examples.common.command_line import checked_arguments
from rlhf_examples.common.engines import make_engine
from rlhf_examples.common.models import load_policy
from rlhf_examples.common.run_directory import begin_run, require_same_settings
from rlhf_examples.common.run_lock import lock_directory
from rlhf_examples.common.steps import parse, read_pipeline
from tests.engines import storage_digest, train_step
from tests.marks import slow_but
from tests.rlhf_examples.common.test_models import on_first_rank, training
from tests.rlhf_examples.scripts import SCRIPTS, make_small_models, models_of, run_in_this_rank
from tests.tiny_models import tiny_model

alone = pytest.mark.usefixtures("alone")


class Counter:
    """A part of a run with a state."""

    value = 0

    def state_dict(self) -> int:
        return self.value

    def load_state_dict(self, state: int) -> None:
        self.value = state


def checkpoints_of(directory: Path, keep_last: int = 2) -> tuple[Checkpoints, Counter]:
    counter = Counter()
    return Checkpoints(directory, {}, {"counter": counter}, keep_last), counter


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@alone
@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_run_prunes_only_its_own_checkpoints(tmp_path, keep_last):
    """A run resumed from an earlier iteration than that of other checkpoints in the directory."""
    directory = tmp_path / "checkpoints"
    longer, counter = checkpoints_of(directory)
    for iteration in (100, 200):
        longer.save(iteration)
    shorter, counter = checkpoints_of(directory, keep_last)
    for iteration in (1, 2, 3):
        counter.value = iteration
        shorter.save(iteration)
        fresh, restored = checkpoints_of(directory)
        assert fresh.load_latest() == restored.value == iteration
    kept = [f"iteration-{iteration:06d}" for iteration in (*range(4 - keep_last, 4), 100, 200)]
    assert names(directory) == [*kept, "latest"]


@alone
def test_checkpoints_are_ordered_by_iteration(tmp_path):
    checkpoints, _ = checkpoints_of(tmp_path / "checkpoints")
    for iteration in (999_998, 999_999, 1_000_000, 1_000_001):
        checkpoints.save(iteration)
    assert names(tmp_path / "checkpoints") == ["iteration-1000000", "iteration-1000001", "latest"]
    assert checkpoints.load_latest() == 1_000_001


def with_a_run(directory: Path) -> Path:
    """A directory with files of a run and of its user."""
    (directory / "model").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (directory / "notes.txt").write_text("mine")
    return directory


@alone
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_directory_with_another_run_raises(script, tmp_path):
    directory = with_a_run(tmp_path / "run")
    settings = {**models_of(script, make_small_models(tmp_path / "small")), "output_dir": str(directory)}
    with pytest.raises(ValueError, match=r"output_dir: .*run' contains another run .*model.*--resume.*--overwrite"):
        run_in_this_rank(script, settings)
    assert names(directory) == ["metrics.jsonl", "model", "notes.txt"]


@alone
def test_invalid_arguments_raise_before_a_directory_is_cleared(tmp_path):
    directory = with_a_run(tmp_path / "run")
    with pytest.raises(ValueError, match="actor_model_name_or_path"):
        run_in_this_rank("grpo", {"output_dir": str(directory), "overwrite": True, "actor_model_name_or_path": "/none"})
    assert names(directory) == ["metrics.jsonl", "model", "notes.txt"]


@alone
@pytest.mark.parametrize("left", ["checkpoints/iteration-000004", "model", "metrics.jsonl"])
def test_any_result_of_a_run_counts_as_a_run(left, tmp_path):
    path = tmp_path / "run" / left
    path.parent.mkdir(parents=True)
    path.write_text("{}\n") if left.endswith("jsonl") else path.mkdir()
    args = SFTArguments(output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="contains another run"):
        begin_run(args)
    assert path.exists()


@alone
def test_overwrite_removes_only_files_of_a_run(tmp_path):
    directory = with_a_run(tmp_path / "run")
    begin_run(SFTArguments(output_dir=str(directory), resume=True))
    assert names(directory) == ["metrics.jsonl", "model", "notes.txt"]
    begin_run(SFTArguments(output_dir=str(directory), overwrite=True))
    assert names(directory) == ["notes.txt"]
    begin_run(SFTArguments(output_dir=str(directory)))  # no results of another run
    with pytest.raises(ValueError, match="overwrite: true given with resume: true"):
        SFTArguments(resume=True, overwrite=True)


@alone
def test_a_pipeline_does_not_delete_another_pipelines_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "run", lambda args: {"pairs": 1})
    sft = with_a_run(tmp_path / "run" / "sft")
    settings = {"output_dir": str(tmp_path / "run"), "steps": {"sft": {"script": "pairs"}, "pairs": {}}}
    with pytest.raises(ValueError, match="output_dir: .* contains another run"):
        pipeline.run(parse(dict(settings), []))
    assert names(tmp_path / "run") == ["sft"] and names(sft) == ["metrics.jsonl", "model", "notes.txt"]
    pipeline.run(parse(dict(settings), ["--overwrite", "true"]))
    assert names(sft) == ["done.json", "notes.txt", "settings.json"]


@alone
def test_resuming_a_pipeline_with_changed_settings_of_a_finished_step_raises(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(pairs, "run", lambda args: ran.append(args.rounds) or {"n": 1})

    def run(rounds: int, *flags: str, **more) -> None:
        steps = {"one": {"script": "pairs", "rounds": rounds, **more}, "pairs": {}}
        pipeline.run(parse({"output_dir": str(tmp_path / "run"), "steps": steps}, [*flags]))

    run(2)
    (tmp_path / "run" / "pairs" / "done.json").unlink()  # the run was killed in its second step
    message = (
        r"resume: the finished step in '.*run/one' ran with other settings: rounds was 2 and is 3; .*--overwrite true"
    )
    with pytest.raises(ValueError, match=message):
        run(3, "--resume", "true")
    with pytest.raises(ValueError, match="seed was 0 and is 5"):
        run(2, "--resume", "true", "--seed", "5")
    assert ran == [2, 4], "a step ran despite the error"
    run(2, "--resume", "true")
    assert ran == [2, 4, 4]
    run(3, "--overwrite", "true")
    assert ran == [2, 4, 4, 3, 4]


@alone
def test_settings_without_effect_on_results_may_change(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(asdict(SFTArguments())))
    same = SFTArguments(output_dir="other", resume=True, print_every=3, report_to=[], keep_last=9, save_every=4)
    require_same_settings({str(tmp_path): same})
    with pytest.raises(ValueError, match="max_steps was 0 and is 3; learning_rate was 0.0001 and is 0.1"):
        require_same_settings({str(tmp_path): SFTArguments(max_steps=3, learning_rate=0.1)})
    (tmp_path / "settings.json").write_text("{}")  # of an earlier version
    require_same_settings({str(tmp_path): same})


def check_frozen_left_out(folder: str, stage: int) -> None:
    """A LoRA checkpoint has no tensor of the base, and a run resumed from it trains to the same bits."""
    base, settings, args = f"{folder}/base", training(stage, 4), SFTArguments()
    # a tied head with two names
    on_first_rank(lambda: tiny_model("llama", tie_word_embeddings=True).save_pretrained(base))
    engines = []
    for seed in range(2):  # different factors, replaced by the checkpoint's
        torch.manual_seed(seed)
        engines.append(make_engine(load_policy(base, settings.config(args), settings.lora), args, settings))
    first, second = engines
    train_step(first)
    Checkpoints(Path(folder) / "kept", {"model": first}, {}, 1).save(1)
    for path in (Path(folder) / "kept" / "iteration-000001" / "model").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        assert state["module"] and all("lora_" in name for name in state["module"]), path
        assert not state.get("frozen_param_fragments")
    assert Checkpoints(Path(folder) / "kept", {"model": second}, {}, 1).load_latest() == 1
    assert storage_digest(first) == storage_digest(second)
    for engine in engines:
        train_step(engine, 1)
    assert storage_digest(first) == storage_digest(second)
    lacking = {name: values for name, values in second.module.state_dict().items() if "lora_A" in name}
    with pytest.raises(ValueError, match=r"resume: the checkpoint is of another model: .*lora_B"):
        load_trained(lacking, second.module)


@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3]))
def test_a_lora_checkpoint_excludes_the_frozen_base(ranks, tmp_path, stage):
    ranks.run(check_frozen_left_out, str(tmp_path), stage)


HOLD = """
import sys, time
from rlhf_examples.common.arguments import (GRPOArguments)
from rlhf_examples.common.command_line import checked_arguments
checked_arguments(GRPOArguments)
print("locked", flush=True)
time.sleep(100)
"""
FLAGS = ["--actor_model_name_or_path", "a-model", "--reward", "http://127.0.0.1/reward", "--output_dir"]


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    """Also a pipeline that has the directory as a step's; `resume` and `overwrite` do not help."""
    command = [sys.executable, "-c", HOLD, *FLAGS, str(tmp_path / "run" / "grpo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "locked\n"
        steps = json.dumps({"steps": {"grpo": {"actor_model_name_or_path": "a-model", "reward": "http://h/reward"}}})
        (tmp_path / "steps.yaml").write_text(steps)
        pipeline_flags = [str(tmp_path / "steps.yaml"), "--output_dir", str(tmp_path / "run")]
        message = rf"output_dir: '.*run/grpo' given; another run writes there \(process {first.pid} on .* since .*\)"
        for flags in ([], ["--resume", "true"], ["--overwrite", "true"]):
            monkeypatch.setattr(sys, "argv", ["grpo", *command[3:], *flags])
            with pytest.raises(ValueError, match=message):
                checked_arguments(GRPOArguments)
            monkeypatch.setattr(sys, "argv", ["pipeline", *pipeline_flags, *flags])
            with pytest.raises(ValueError, match=message):
                checked_arguments(PipelineArguments, read_pipeline)
        monkeypatch.setenv("RANK", "1")  # ranks of one run share the lock
        checked_arguments(PipelineArguments, read_pipeline)
        monkeypatch.setenv("RANK", "0")
        first.kill()
    checked_arguments(PipelineArguments, read_pipeline)  # the kernel has freed the lock
    assert str(os.getpid()) in (tmp_path / "run" / "grpo" / "run.lock").read_text()
    monkeypatch.setattr(sys, "argv", ["grpo", *command[3:]])
    checked_arguments(GRPOArguments)  # this process has the lock already


@pytest.mark.parametrize("directory", ["/proc/self/run", "/sys/kernel", "{file}/run"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, directory):
    """Tests may run as root, whom permission bits do not stop; the kernel's file systems do."""
    (tmp_path / "file").write_text("")
    directory = directory.format(file=tmp_path / "file")
    with pytest.raises(ValueError, match=f"output_dir: '{directory}' given; it cannot be written"):
        lock_directory(directory)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="no lock .No locks available.; start no second run there"):
        lock_directory(str(tmp_path / "run"))
