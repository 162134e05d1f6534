"""The examples with Ray actors and with a thread for rewards: the metrics of a run in one thread, always awake."""

import importlib.util
import json
import sys
import threading
import types

import pytest

from rlhf_examples import ray_grpo, threaded_grpo
from rlhf_examples.common.arguments import RayGRPOArguments, ThreadedGRPOArguments
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.learner import Learner
from tests.marks import slow_but
from tests.rlhf_examples.scripts import ROLLOUTS, load_with_transformers, make_small_models, number_of_words
from tests.test_launchers import run_together

WORDS = "tests.rlhf_examples.scripts:number_of_words"
TINY = {
    **{name: value for name, value in ROLLOUTS.items() if name not in ("eval_rows", "num_samples")},
    "num_iterations": 2,
    "num_generations": 4,
    "data_path": ["synthetic:stories"],
}
no_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: the extra `ray`")


def settings_in(directory, **more) -> dict:
    return {**TINY, "actor_model_name_or_path": str(directory / "model"), "output_dir": str(directory / "run"), **more}


def iterations_of(settings: dict) -> list[dict[str, float]]:
    """The metrics of `ray_grpo`'s iterations by this rank, without Ray and without sleep."""
    args = arguments_of(RayGRPOArguments, settings)
    learner, history = Learner(args), []
    for iteration in range(args.num_iterations):
        rollout = learner.roll_out(iteration)
        history.append(learner.update(rollout, learner.score(rollout), iteration))
    learner.destroy()
    return history


def iterations_of_actors(settings: dict) -> list[dict[str, float]]:
    """The same by the actors' methods, whose engines sleep, in a rank of the pool; what is on the device is watched."""
    args = arguments_of(RayGRPOArguments, settings)
    actor, history = ray_grpo.RankActor(args, 0), []
    actor.learner = learner = Learner(args, sleeps=True)
    engines = [learner.policy, learner.reference, *learner.reward_models]
    levels = lambda: [engine.asleep for engine in engines if engine is not None]  # noqa: E731
    for iteration in range(args.num_iterations):
        for call in (lambda i: actor.roll_out(i), lambda _: actor.score(), lambda i: history.append(actor.update(i))):
            assert set(levels()) == {2}
            call(iteration)
    assert len(levels()) > 1 and learner.policy.stats()["host_bytes"] > 0
    learner.export()
    learner.destroy()
    return history


@pytest.mark.parametrize("beta", slow_but([0.05], [0.0, 0.05]))
def test_ranks_whose_engines_take_turns_train_as_ranks_that_are_always_awake(ranks, tmp_path, beta):
    settings = settings_in(make_small_models(tmp_path), reward=str(tmp_path / "reward_model"), beta=beta)
    asleep, awake = ranks.run(iterations_of_actors, settings), ranks.run(iterations_of, settings)
    assert asleep == awake and len(asleep[0]) == 2
    assert load_with_transformers(tmp_path / "run" / "model").config.num_hidden_layers == 2


@no_ray
@pytest.mark.slow
def test_ray_actors_train_as_ranks_without_ray(ranks, tmp_path):
    settings = settings_in(make_small_models(tmp_path), reward=str(tmp_path / "reward_model"))
    expected = ranks.run(iterations_of, settings)[0]
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    output = run_together([[sys.executable, "-m", "rlhf_examples.ray_grpo", "run.yaml"]], tmp_path)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"iteration"')]
    assert lines == [{"iteration": number, **metrics} for number, metrics in enumerate(expected)]
    assert load_with_transformers(tmp_path / "run" / "model").config.num_hidden_layers == 2


NEXT_ROLLOUTS, calls = threading.Semaphore(0), []  # that have begun, and no reward has waited for


def words_after_the_next_rollout(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """A reward that can be computed only while the next rollout of its iteration decodes."""
    calls.append(threading.current_thread().name)
    if len(calls) % 3:
        assert NEXT_ROLLOUTS.acquire(timeout=60), "no rollout began while the reward was computed"
    return number_of_words(prompts, completions)


def check_threaded(settings: dict) -> None:
    settings = {**settings, "num_rollouts": 3}
    own, first = Learner.roll_out, threading.current_thread().name

    def roll_out(learner: Learner, iteration: int, number: int = 0):
        if number and learner.args.threaded:
            NEXT_ROLLOUTS.release()
        return own(learner, iteration, number)

    histories = []
    for threaded in (False, True):
        reward = f"{__name__}:words_after_the_next_rollout" if threaded else WORDS
        args = arguments_of(ThreadedGRPOArguments, {**settings, "reward": [reward], "threaded": threaded})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "roll_out", roll_out)
            history = threaded_grpo.run(args)
        histories.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in history])
    assert histories[0] == histories[1] and len(histories[0]) == 2
    assert len(calls) == 6 and first not in calls


def test_rewards_in_a_thread_give_the_metrics_of_a_run_that_waits(ranks, tmp_path):
    ranks.run(check_threaded, settings_in(make_small_models(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic_sampling": True}, "dynamic_sampling: True given; leave it out here, or run rlhf_examples.grpo"),
        ({"reward": []}, "reward: none given"),
        ({"reward": ["tests.rlhf_examples.scripts:no_such"]}, "no_such"),
    ],
)
def test_arguments_of_grpo_alone_raise(tmp_path, changes, message):
    (tmp_path / "model").mkdir()
    args = arguments_of(RayGRPOArguments, {**settings_in(tmp_path, reward=[WORDS]), **changes})
    with pytest.raises(ValueError, match=message):
        ray_grpo.require_supported(args)


def test_fewer_gpus_than_ranks_raise(tmp_path, monkeypatch):
    cluster = types.SimpleNamespace(init=lambda **_: None, cluster_resources=lambda: {"CPU": 8.0, "GPU": 1.0})
    monkeypatch.setitem(sys.modules, "ray", cluster)
    (tmp_path / "model").mkdir()
    args = arguments_of(RayGRPOArguments, settings_in(tmp_path, reward=[WORDS], num_ranks=2))
    with pytest.raises(ValueError, match="num_ranks: 2 given, and the cluster has 1 GPUs"):
        ray_grpo.run(args)


def test_a_reward_model_in_a_thread_raises(tmp_path):
    settings = settings_in(make_small_models(tmp_path), reward=[str(tmp_path / "reward_model")])
    with pytest.raises(ValueError, match="a model, whose ranks compute in step"):
        threaded_grpo.run(arguments_of(ThreadedGRPOArguments, settings))
