"""The best checkpoint by a metric is kept, and exported with load_best_model_at_end; early stopping ends training."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from rlhf_examples.common import training
from rlhf_examples.common.actor import Evaluation
from rlhf_examples.common.arguments import GRPOArguments, PPOArguments, SFTArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.parsing import arguments_of, parse_arguments
from tests.marks import slow_but
from tests.rank_pool import RankFailure, RankPool
from tests.rlhf_examples.scripts import logged, models_of, run_in_this_rank

VALUES = {
    1: 3.0,
    2: 1.0,
    3: 2.0,
    4: 1.5,
    5: 0.5,
    6: 0.25,
}  # a loss by iteration: the best of the first four is iteration 2's
BEST = {"eval_every": 1, "lr_scheduler_type": "constant"}
STOPPING = {**BEST, "early_stopping_patience": 2, "load_best_model_at_end": True}
METRIC = {"sft": "loss", "grpo": "eval_number_of_words", "ppo": "eval_reward_model"}
STEPS = {"sft": "max_steps", "grpo": "num_iterations", "ppo": "num_iterations"}


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_early_stopping_matches_transformers_callback(alone, tmp_path, greater, threshold):
    generator = torch.Generator().manual_seed(1)
    for patience in (1, 2, 3):
        values = torch.randn(40, generator=generator, dtype=torch.float64).tolist()
        args = TrainingArguments(str(tmp_path), metric_for_best_model="x", greater_is_better=greater)
        callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
        best = BestModel("eval_x", greater, patience, threshold)
        for iteration, value in enumerate(values, start=1):
            callback.on_evaluate(args, state, control, {"eval_x": value})
            is_best = state.best_metric is None or (value > state.best_metric) == greater
            state.best_metric = value if is_best else state.best_metric  # as Trainer._determine_best_metric
            assert best.update({"eval_x": value}, iteration) == is_best
            assert (best.value, best.ends_training) == (state.best_metric, control.should_training_stop)
            if best.ends_training:
                break
        assert 1 < iteration < 40


def test_nan_is_never_the_best(alone):
    best = BestModel("eval_x", patience=3)
    assert [best.update({"eval_x": value}, 1 + i) for i, value in enumerate((math.nan, 1.0, math.nan))] == [0, 1, 0]
    assert (best.value, best.iteration, best.waited) == (1.0, 2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end: True given without metric_for_best_model"),
        ({"early_stopping_patience": 1}, "early_stopping_patience: 1 given without metric_for_best_model"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model: 'loss' given with eval_every: 0"),
        (
            {"metric_for_best_model": "loss", "eval_every": 1, "early_stopping_threshold": 0.1},
            "early_stopping_threshold: 0.1 given without early_stopping_patience",
        ),
        ({"early_stopping_patience": -1}, "early_stopping_patience: -1 given; it must be at least 0"),
        ({"greater_is_better": [True]}, "greater_is_better: .* given; it must be bool"),
    ],
)
def test_contradicting_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        arguments_of(SFTArguments, settings)


def test_metric_names_and_directions_match_transformers(tmp_path):
    of = {"--metric_for_best_model": "loss", "--eval_every": "1"}
    flags = [text for pair in of.items() for text in pair]
    best = BestModel.from_args(parse_arguments(SFTArguments, flags))
    assert (best.metric, best.greater_is_better) == ("eval_loss", False)
    best = BestModel.from_args(parse_arguments(SFTArguments, [*flags, "--greater_is_better", "true"]))
    assert best.greater_is_better
    path = tmp_path / "run.yaml"
    path.write_text("metric_for_best_model: eval_reward\neval_every: 2\ngreater_is_better: false\n")
    assert not BestModel.from_args(parse_arguments(GRPOArguments, [str(path)])).greater_is_better
    path.write_text("metric_for_best_model: eval_reward\neval_every: 2\n")
    assert BestModel.from_args(parse_arguments(PPOArguments, [str(path)])).greater_is_better


@pytest.mark.usefixtures("alone")
def test_the_best_checkpoint_is_not_pruned(tmp_path):
    best = BestModel("eval_x")
    checkpoints = Checkpoints(tmp_path, {}, {"best": best}, keep_last=1)
    for iteration, value in enumerate((1.0, 3.0, 2.0, 0.0, 4.0), start=1):
        best.update({"eval_x": value}, iteration)
        checkpoints.save(iteration, best.iteration)
        kept = sorted(int(path.name[-6:]) for path in tmp_path.glob("iteration-*"))
        assert kept == sorted({iteration, best.iteration})
    checkpoints.save(6, best.iteration)
    fresh = BestModel("eval_x")
    assert Checkpoints(tmp_path, {}, {"best": fresh}, 1).load_latest() == 6
    assert fresh.state_dict() == best.state_dict() == {"value": 4.0, "iteration": 5, "waited": 0}
    other = Checkpoints(tmp_path, {}, {"best": fresh, "average": fresh}, 1)
    with pytest.raises(ValueError, match="has no state of average; give the settings that the run began with"):
        other.load_latest()


def run_scripted(script: str, settings: dict) -> dict[str, float]:
    """Run a script whose evaluations give VALUES by iteration on the first rank, and other values on the second."""
    count, sign = settings.pop("evaluated", 0), 1 if dist.get_rank() == 0 else -1
    name = settings["metric_for_best_model"].removeprefix("eval_")
    evaluate, call = training.evaluate, Evaluation.__call__

    def value_of() -> float:
        nonlocal count
        count += 1
        return sign * VALUES.get(count - 1, 9.0)  # the first evaluation is before training

    training.evaluate = lambda *args: {**evaluate(*args), f"eval_{name}": value_of()}

    def scripted(self, draw: int = 0):
        metrics, *more = call(self, draw)
        return {**metrics, f"eval_{name}": value_of()}, *more

    Evaluation.__call__ = scripted
    try:
        return run_in_this_rank(script, settings)
    finally:
        training.evaluate, Evaluation.__call__ = evaluate, call


def settings_of(script: str, small, directory: Path, **changes) -> dict:
    models = {} if script == "sft" else models_of(script, small)
    metric = {"metric_for_best_model": METRIC[script], "greater_is_better": False}
    return {**models, **metric, **STOPPING, STEPS[script]: 6, "output_dir": str(directory), **changes}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model" / "model.safetensors")


def require_the_best(script: str, ranks, small, tmp_path) -> None:
    """Of six iterations training ends after the fourth; the second was the best, and is exported."""
    stopped, short = tmp_path / "stopped", tmp_path / "short"
    ranks.run(run_scripted, script, settings_of(script, small, stopped))
    assert [row["iteration"] for row in logged(stopped)] == [1, 2, 3, 4]
    checkpoints = sorted(path.name for path in (stopped / "checkpoints").glob("iteration-*"))
    assert checkpoints == ["iteration-000001", "iteration-000002"], (
        "checkpoints are not those of the best iterations so far"
    )
    plain = settings_of(script, small, short, early_stopping_patience=0, load_best_model_at_end=False)
    plain = {name: value for name, value in plain.items() if name not in ("metric_for_best_model", "greater_is_better")}
    ranks.run(run_in_this_rank, script, {**plain, STEPS[script]: 2})
    best, expected = weights(stopped), weights(short)
    assert best.keys() == expected.keys() and all(torch.equal(best[name], expected[name]) for name in best)
    # The same, ended after the third iteration and resumed: the patience counter is restored.
    again = tmp_path / "again"
    saving = {"save_every": 1, "keep_last": 1}
    ranks.run(run_scripted, script, settings_of(script, small, again, **{STEPS[script]: 3}, **saving))
    evaluated = 4  # before training, and after three iterations
    resumed = settings_of(script, small, again, resume=True, evaluated=evaluated, **saving)
    ranks.run(run_scripted, script, resumed)
    assert logged(again) == logged(stopped)
    best = weights(again)
    assert all(torch.equal(best[name], expected[name]) for name in best)


def test_sft_exports_the_best_and_ends_early(ranks, small, tmp_path):
    require_the_best("sft", ranks, small, tmp_path)


@pytest.mark.slow
def test_grpo_exports_the_best_and_ends_early(ranks, small, tmp_path):
    require_the_best("grpo", ranks, small, tmp_path)


@pytest.mark.slow
def test_ppo_exports_the_best_and_ends_early(ranks, small, tmp_path):
    require_the_best("ppo", ranks, small, tmp_path)


@pytest.mark.parametrize("script", slow_but(["dpo"], ["dpo", "grpo"]))
def test_an_unknown_metric_raises_with_the_available_ones(script, ranks, small, tmp_path):
    settings = {**models_of(script, small), "metric_for_best_model": "accuracy", "eval_every": 1}
    available = {"dpo": "eval_loss, eval_rewards/accuracies, .*", "grpo": "eval_number_of_words"}[script]
    with pytest.raises(RankFailure, match=f"'eval_accuracy' given; evaluations of this run have: {available}"):
        ranks.run(run_in_this_rank, script, {**settings, "output_dir": str(tmp_path)})
    assert not logged(tmp_path), "training began"
    assert json.loads((tmp_path / "before.json").read_text())


@pytest.mark.slow
def test_the_best_checkpoint_of_another_world_size_is_exported(ranks, small, tmp_path):
    """The best checkpoint was saved by two ranks; one rank resumes, ends, and loads those weights."""
    saving = {"save_every": 1, "enable_ema": True, "load_best_model_at_end": True}
    ranks.run(run_scripted, "sft", settings_of("sft", small, tmp_path, max_steps=3, **saving))
    best = {name: load_file(tmp_path / name / "model.safetensors") for name in ("model", "model_ema")}
    alone = RankPool(1)
    resumed = settings_of("sft", small, tmp_path, resume=True, evaluated=4, per_device_train_batch_size=8, **saving)
    alone.run(run_scripted, "sft", resumed)
    alone.close()
    assert [row["iteration"] for row in logged(tmp_path)] == [1, 2, 3, 4]
    for name, expected in best.items():
        actual = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(actual[key], expected[key]) for key in expected), name
