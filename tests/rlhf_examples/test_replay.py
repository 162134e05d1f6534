"""Completions of a run are made again from its log and checkpoints: to the bit on CPUs, after kills, on any ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf_examples import agent
from rlhf_examples.common import checkpoint, groups
from rlhf_examples.common.arguments import AgentArguments, VisionGRPOArguments
from rlhf_examples.common.files import CHECKPOINTS
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.rollout_log import read_rollouts, rollout_files
from rlhf_examples.replay import Replayed, replayed, select
from tests.marks import slow_but
from tests.rank_pool import RankFailure, pool_of
from tests.rlhf_examples.common.test_partial_rollouts import PARTIAL
from tests.rlhf_examples.scripts import models_of, run_in_this_rank

one_rank, two_ranks, four_ranks = pool_of(1), pool_of(2), pool_of(4)
LOGGED = {"log_rollouts": True, "save_every": 1, "keep_last": 9, "eval_rows": 0}
DYNAMIC = {"dynamic_sampling": True, "per_device_generation_batch_size": 3}


def replay_step(directory: str, *selected: int) -> list[Replayed]:
    """Completions of a step, sampled again by these ranks.  selected: step, row, sample; all of what is left out."""
    return replayed(Path(directory), select(Path(directory), *selected))


def require_every_completion(pool, directory: Path) -> int:
    """Sample every completion that a run has logged again; returns their number."""
    count = 0
    for step in sorted({step for step, _ in rollout_files(directory)}):
        again = pool.run(replay_step, str(directory), step)[0]
        assert [completion.difference() for completion in again] == [""] * len(again), step
        assert all(completion.is_equal for completion in again)
        count += len(again)
    return count


@pytest.fixture(scope="module")
def run_directory(ranks, small, tmp_path_factory) -> Path:
    """A run of conversations on two ranks under ZeRO-3."""
    directory = tmp_path_factory.mktemp("agent")
    settings = {**models_of("agent", small), **LOGGED, "output_dir": str(directory), "num_iterations": 3}
    ranks.run(run_in_this_rank, "agent", settings)
    return directory


def test_every_completion_of_a_step_is_made_again(ranks, run_directory):
    again = ranks.run(replay_step, str(run_directory), 3)[0]
    assert len(again) == 2 * 4 * 4 and all(completion.is_equal for completion in again)
    assert [completion.logged for completion in again] == read_rollouts(run_directory, 3)
    assert {len(completion.logged.turns) for completion in again} == {1, 2, 3}
    assert len({completion.logged.sampling_key for completion in again}) == len(again)
    one, same = ranks.run(replay_step, str(run_directory), 1, 6, 3)  # the second rank has no row
    assert one == same and one[0].is_equal and (one[0].logged.row, one[0].logged.sample) == (6, 3)


def test_one_rank_makes_a_row_again_and_sees_a_changed_bit(one_rank, run_directory):
    (again,) = one_rank.run(replay_step, str(run_directory), 2, 5)
    assert len(again) == 4 and all(completion.is_equal for completion in again)
    changed, logged = again[0], again[0].logged
    logged.logps[-1] += 1e-7
    assert not changed.is_equal and "the tokens are equal, and a logprob differs by 1e-07" in changed.difference()
    begin, end = logged.turns[0]
    logged.completion_ids[end - 1] += 1
    assert f"token {end - begin - 1} of the turns is {changed.token_ids[end - begin - 1]}, and" in changed.difference()


def test_errors_say_what_can_be_replayed(run_directory, tmp_path):
    with pytest.raises(ValueError, match=r"RUN: .* given; it has no settings.json: give the directory of a run"):
        select(tmp_path, 1)
    with pytest.raises(ValueError, match="step: 4 given; .*rollouts' does not have it: logged are 1 to 3"):
        select(run_directory, 4)
    with pytest.raises(ValueError, match="row: 8 given; step 2 has 0 to 7"):
        select(run_directory, 2, row=8)
    with pytest.raises(ValueError, match="sample: -1 given; step 2 has 0 to 3"):
        select(run_directory, 2, row=1, sample=-1)
    kept = run_directory / CHECKPOINTS / "iteration-000001"
    kept.rename(tmp_path / "away")
    try:
        with pytest.raises(ValueError, match="those after iteration 1, of which .* that can be replayed: 1, 3$"):
            select(run_directory, 2)
    finally:
        (tmp_path / "away").rename(kept)
    harness = {"harness": "tests.rlhf_examples.test_agent:talk_by_requests"}
    with pytest.raises(ValueError, match="log_rollouts: true given with harness: 'tests"):
        arguments_of(AgentArguments, {**harness, "log_rollouts": True})
    with pytest.raises(ValueError, match="log_rollouts: True given; leave it out here"):
        arguments_of(VisionGRPOArguments, {"log_rollouts": True})


def command(*arguments: str) -> subprocess.CompletedProcess:
    """`hybrid replay` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hybrid", "replay", *arguments],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_prints_a_completion_and_exits_by_the_result(run_directory):
    given = (str(run_directory), "--step", "2", "--row", "3", "--sample", "1")
    done = command(*given)
    (logged,) = select(run_directory, 2, 3, 1)
    assert done.returncode == 0 and "1 of 1 completions equal the log to the bit" in done.stdout, done.stderr
    for text in ("step 2, row 3, sample 1", f"tokens: {logged.token_ids()}", f"logprobs: {logged.logps}", "prompt: "):
        assert text in done.stdout
    path = next(path for step, path in rollout_files(run_directory) if step == 2 and "rank1" in path.name)
    whole = path.read_text()
    try:
        path.write_text(whole.replace(f"[{logged.logps[0]}", f"[{logged.logps[0] - 0.5}"))
        differs = command(*given)
    finally:
        path.write_text(whole)
    assert differs.returncode == 1 and "a logprob differs by 0.5" in differs.stdout, differs.stderr
    wrong = command(str(run_directory), "--step", "9")
    assert (
        wrong.returncode == 2 and wrong.stderr.splitlines()[-1].startswith("error: step: 9 given") and not wrong.stdout
    )


@pytest.mark.parametrize(
    ("script", "changes"),
    slow_but(
        [("grpo", PARTIAL)],
        [("grpo", PARTIAL), ("grpo", DYNAMIC), ("grpo", {**PARTIAL, **DYNAMIC}), ("ppo", {"actor_lora_dim": 4})],
    ),
    ids=["partial", "dynamic", "both", "ppo"],
)
def test_other_ways_to_roll_out(ranks, small, tmp_path, script, changes):
    """Of a partial rollout each step has the tokens that it sampled, and those before them as context."""
    settings = {**models_of(script, small), **LOGGED, **changes, "output_dir": str(tmp_path)}
    ranks.run(run_in_this_rank, script, settings)
    assert require_every_completion(ranks, tmp_path) >= 4 * 8
    last = read_rollouts(tmp_path, 4)
    if "partial_rollout" in changes:
        assert any(completion.turns[0][0] for completion in last), "no row was resumed"
        assert any(completion.finish_reason == "unfinished" for completion in last)


def die_in(script: str, settings: dict, iteration: int, point: str) -> None:
    """Run a script whose last rank kills itself in an iteration: once it has logged its rollout, or before it saves."""
    if dist.get_rank() == dist.get_world_size() - 1:
        owner, name = {
            "logged": ({"grpo": groups, "agent": agent}[script], "log_rollout"),
            "saving": (checkpoint.Checkpoints, "save"),
        }[point]
        original = getattr(owner, name)

        def dying(*args, **kwargs) -> None:
            if iteration in args and point == "saving":
                os.kill(os.getpid(), signal.SIGKILL)
            original(*args, **kwargs)
            if iteration in args:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, dying)
    run_in_this_rank(script, settings)


@pytest.fixture(scope="module")
def calculator_model(one_rank, tmp_path_factory) -> Path:
    """A small model that calls the calculator in some of its turns."""
    directory = tmp_path_factory.mktemp("calculator")
    settings = {
        "output_dir": str(directory),
        "tokenizer_name_or_path": "synthetic:environments",
        "data_path": ["synthetic:calculator@train"],
        "assistant_only_loss": True,
        "hidden_size": 64,
        "per_device_train_batch_size": 32,
        "max_steps": 100,
        "learning_rate": 3e-3,
        "eval_rows": 0,
    }
    one_rank.run(run_in_this_rank, "sft", settings)
    return directory / "model"


CASES = [
    ("grpo", "one_rank", {"actor_zero_stage": 1}),
    ("grpo", "two_ranks", {"actor_lora_dim": 4}),
    ("grpo", "four_ranks", {"dtype": "bfloat16", "temperature": 1.3, "top_p": 0.9}),
    ("agent", "one_rank", {"dtype": "bfloat16"}),
    ("agent", "two_ranks", {"top_k": 8}),
    ("agent", "four_ranks", {"actor_lora_dim": 4}),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("script", "pool", "changes"), CASES, ids=[f"{script}-{pool}" for script, pool, _ in CASES])
def test_every_completion_of_a_run_with_two_kills(script, pool, changes, one_rank, small, request, tmp_path):
    """192 of 192 in each of the six cases, 1152 in all, on one rank, whatever number the run had."""
    run_ranks = request.getfixturevalue(pool)
    world_size = {"one_rank": 1, "two_ranks": 2, "four_ranks": 4}[pool]
    own = {"max_answer_seq_len": 12}
    if script == "agent":
        model = request.getfixturevalue("calculator_model")
        own = {"environment": "calculator", "actor_model_name_or_path": str(model), "max_turn_tokens": 6}
    settings = {
        **models_of(script, small),
        **LOGGED,
        **own,
        **changes,
        "output_dir": str(tmp_path),
        "num_generations": 6,
        "per_device_generation_batch_size": 8 // world_size,
        "per_device_training_batch_size": 12,
    }
    for iteration, point, resume in ((2, "logged", False), (3, "saving", True)):
        with pytest.raises(RankFailure, match="died with exit code -9"):
            run_ranks.run(die_in, script, {**settings, "resume": resume}, iteration, point)
    dropped = {path: path.read_text() for step, path in rollout_files(tmp_path) if step == 3}
    assert len(dropped) == world_size
    run_ranks.run(run_in_this_rank, script, {**settings, "resume": True})
    assert {path: path.read_text() for path in dropped} == dropped, "the resumed run sampled other tokens"
    assert require_every_completion(one_rank, tmp_path) == 4 * 8 * 6
    if script == "agent":
        assert any(len(completion.turns) > 1 for completion in read_rollouts(tmp_path, 1)), "no tool was called"
