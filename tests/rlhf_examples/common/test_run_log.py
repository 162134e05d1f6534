"""The log of a run: its files, resuming, and trackers."""

import json
import math
import sys
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlhf_examples.common.run_log as module
from rlhf_examples.common import files
from rlhf_examples.common.choices import check_report_to
from rlhf_examples.common.run_log import RunLog, format_number, read_completions, read_metrics
from rlhf_examples.common.trackers import LOGP_DIFFERENCE_EDGES, Histogram

# A stand-in for Trackio and W&B, which both have these calls.
SERVICE = """
calls = []
class Histogram:
    def __init__(self, np_histogram):
        self.np_histogram = np_histogram
class Table:
    def __init__(self, columns=None, data=None, dataframe=None):
        self.dataframe = dataframe
class Run:
    def log(self, metrics, step):
        calls.append(("log", step, metrics))
    def finish(self):
        calls.append(("finish",))
def init(**kwargs):
    calls.append(("init", kwargs))
    return Run()
"""


def run_log(directory, total=4, **options) -> RunLog:
    """A quiet log without trackers."""
    return RunLog(directory, **{"total": total, "print_every": 0, "report_to": [], **options})


@pytest.fixture
def service(tmp_path, monkeypatch, request):
    """Installs a fake of the package that the test names; returns its name and calls."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / f"{request.param}.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield request.param, lambda: sys.modules[request.param].calls
    sys.modules.pop(request.param, None)


def test_a_resumed_log_drops_later_and_truncated_lines(tmp_path):
    log = run_log(tmp_path)
    for iteration in (1, 2, 3):
        log.add(iteration, {"loss": float(iteration)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')  # killed while writing
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    log = run_log(tmp_path, start=2)
    log.add(3, {"loss": 30.0})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"iteration": 1, "loss": 1.0},
        {"iteration": 2, "loss": 2.0},
        {"iteration": 3, "loss": 30.0},
    ]


def test_a_new_log_starts_empty(tmp_path):
    run_log(tmp_path).add(1, {"loss": 1.0})
    run_log(tmp_path)
    assert read_metrics(tmp_path) == []


def test_a_kill_while_resuming_loses_nothing(tmp_path, monkeypatch):
    run_log(tmp_path).add(1, {"loss": 1.0})
    before = (tmp_path / "metrics.jsonl").read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_log(tmp_path, start=1)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        read_metrics(tmp_path)


def test_values_that_are_not_finite_are_null_and_warned_of_once(tmp_path):
    log = run_log(tmp_path)
    with pytest.warns(UserWarning, match="iteration 1: loss is nan, grad_norm is inf") as warned:
        log.add(1, {"loss": math.nan, "grad_norm": math.inf, "reward": 1.0})
        log.add(2, {"loss": math.nan, "grad_norm": 1.0, "reward": 1.0})
    assert len(warned) == 1

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0], parse_constant=no_constant)
    assert row == {"iteration": 1, "loss": None, "grad_norm": None, "reward": 1.0}
    assert math.isnan(read_metrics(tmp_path)[0]["loss"]), "a value that is not finite was not read as a number"
    log = run_log(tmp_path, start=2)  # the read lines are written again
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


def test_tensors_and_numpy_are_numbers(tmp_path):
    run_log(tmp_path).add(1, {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.int64(3), "d": 2**40})
    assert read_metrics(tmp_path) == [{"iteration": 1, "a": 0.5, "b": 0.25, "c": 3.0, "d": 2**40}]


def test_histograms_count_as_numpy_does(tmp_path):
    edges = (0.0, 0.5, 1.0, 4.0)
    values = torch.tensor([[0.0, 0.5, 0.75], [4.0, 1.0, 0.49]])
    histogram = Histogram.of(values, edges)
    assert list(histogram.counts) == np.histogram(values.numpy(), edges)[0].tolist()
    outside = Histogram.of(torch.tensor([-1.0, 9.0, math.inf, math.nan]), edges)
    assert outside.counts == (1, 0, 2)
    summed = Histogram.of(values, edges, over_ranks=lambda counts: counts * 2)
    assert summed.counts == tuple(2 * count for count in histogram.counts)
    assert Histogram.of(torch.empty(0), edges).counts == (0, 0, 0)
    run_log(tmp_path).add(1, {"difference": histogram})
    assert read_metrics(tmp_path) == [{"iteration": 1, "difference": histogram}]
    assert list(LOGP_DIFFERENCE_EDGES) == sorted(set(LOGP_DIFFERENCE_EDGES))


def test_the_bar_and_the_tables_show_the_selected_metrics(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    log = run_log(
        tmp_path, print_every=2, description="GRPO", bar_metrics={"KL": "kl", "reward": "score", "eval": "eval"}
    )
    for iteration in (1, 2, 3):
        log.add(iteration, {"score": 0.5, "kl": 1234.5, "loss": 7.0, "histogram": Histogram((0, 1), (5,))})
    log.close()
    out, err = capfd.readouterr()
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("GRPO:  75%") and "3/4" in last and "KL=1,23" in last and "reward=0.5" in last, last
    assert "loss" not in last and "eval" not in last
    assert "iteration 1" in out and "iteration 2" in out and "iteration 3" not in out
    assert "│ loss" in out and "histogram" not in out


def test_evaluations_before_and_after_training_are_a_row_and_the_last_line(tmp_path, capfd):
    log = run_log(tmp_path, total=2, description="PPO")
    before = {"eval_reward": 0.204, "eval_reward_stderr": 0.0278, "eval_gold": 1234.5}
    log.add(0, before)
    for iteration in (1, 2):
        log.add(iteration, {"score": 0.5})
    log.set_held_out(before, {"eval_reward": 0.7061, "eval_reward_stderr": 0.0314, "eval_gold": math.nan})
    log.close()
    out, err = capfd.readouterr()
    expected = "PPO, held out, before → after: eval_reward 0.204 ± 0.0278 → 0.706 ± 0.0314; eval_gold 1,234 → nan"
    assert out.splitlines()[-1] == expected
    assert "PPO: 2/2" in err and "3/2" not in err, "the evaluation before training was counted as an iteration"
    run_log(tmp_path, start=1)
    assert read_metrics(tmp_path) == [{"iteration": 0, **before}, {"iteration": 1, "score": 0.5}]


def test_samples_are_saved_and_printed_verbatim(tmp_path, capfd):
    log = run_log(tmp_path)
    after = "[/red] \ud83d \x1b[2J <b> 🙂"
    log.show_samples(["p"], ["b"], [after], rewards_before=[math.nan], rewards_after=[2.0])
    kept = json.loads((tmp_path / "samples.json").read_text())
    assert kept == [{"prompt": "p", "before": "b", "after": after, "reward_before": None, "reward_after": 2.0}]
    out = capfd.readouterr().out
    assert "[/red] \ufffd \ufffd[2J <b> 🙂" in out, "markup or terminal control characters were printed"
    log.show_samples(["p", "q"], ["b", "c"], ["a", "d"])
    kept = json.loads((tmp_path / "samples.json").read_text())
    assert kept == [{"prompt": "p", "before": "b", "after": "a"}, {"prompt": "q", "before": "c", "after": "d"}]
    with pytest.raises(ValueError):
        log.show_samples(["p", "q"], ["b"], ["a", "d"])


def test_settings_are_saved_without_secrets(tmp_path):
    address = "http://me:my-password@rewards:80/f?api_key=my-key"
    log = run_log(tmp_path, settings={"lr": 1e-4, "model": tmp_path, "reward": [address], "HF_TOKEN": "my-token"})
    text = (tmp_path / "settings.json").read_text()
    assert json.loads(text) == {"lr": 1e-4, "model": str(tmp_path), "reward": [ANY], "HF_TOKEN": "***"}
    log.add(1, {"loss": 1.0})
    log.close()
    for secret in ("my-password", "my-key", "my-token"):
        assert not any(secret in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file())


def test_tensorboard_events_of_a_resumed_run(tmp_path):
    for start, value in ((0, 1.0), (2, 5.0)):
        log = run_log(tmp_path, report_to=["tensorboard"], start=start)
        for iteration in range(start + 1, 5):
            log.add(iteration, {"loss": value, "difference": Histogram((0.0, 1.0, 2.0), (3.0, 4.0))})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]
    histograms = events.Histograms("difference")
    assert [event.step for event in histograms] == [1, 2, 3, 4]
    shown = histograms[-1].histogram_value
    assert (shown.num, list(shown.bucket_limit), list(shown.bucket)) == (7, [1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("service", ["trackio", "wandb"], indirect=True)
def test_trackers_get_metrics_settings_and_resumed_iterations(tmp_path, service):
    name, calls = service
    run = tmp_path / "my-run"
    log = run_log(run, report_to=[name], project="words", settings={"lr": 1e-4})
    log.add(1, {"loss": 1.0, "difference": Histogram((0.0, 1.0), (3.0,))})
    log.add(2, {"loss": 2.0})
    log.close()
    init, first, second, finish = calls()
    assert init[1].items() >= {"project": "words", "name": "my-run", "config": {"lr": 1e-4}}.items()
    assert (first[1], first[2]["loss"], first[2]["difference"].np_histogram) == (1, 1.0, ([3.0], [0.0, 1.0]))
    assert second == ("log", 2, {"loss": 2.0})
    assert finish == ("finish",)
    calls().clear()
    run_log(run, report_to=[name], start=1, run_name="mine").add(2, {"loss": 20.0})
    assert calls()[0][1]["name"] == "mine-from-2"
    steps = [(call[1], call[2]["loss"]) for call in calls()[1:]]
    assert steps == [(1, 1.0), (2, 20.0)], "a resumed run did not send earlier iterations"


def test_unknown_or_missing_trackers_raise(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="report_to: 'mlflow' given; allowed: tensorboard, trackio, wandb"):
        run_log(tmp_path / "a", report_to=["mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'wandb' given, which is not installed; run: pip install wandb"):
        run_log(tmp_path / "a", report_to=["wandb"])
    assert not (tmp_path / "a").exists(), "files were written before the error"
    check_report_to([])


def log_on_a_rank(directory: str) -> None:
    """A complete log in a directory per rank."""
    log = run_log(f"{directory}/{dist.get_rank()}")
    log.add(1, {"loss": 1.0})
    with log.bar_cleared():
        pass
    log.show_samples(["p"], ["b"], ["a"])
    log.close()


def test_only_the_first_rank_logs(ranks, tmp_path):
    ranks.run(log_on_a_rank, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["metrics.jsonl", "samples.json"]


def test_short_numbers():
    figures = (None, 0.0, -0.0, 0.012345, 1.0, 999.9, 12345.6, -1e6, math.nan, math.inf)
    assert [format_number(x) for x in figures] == "– 0 0 0.0123 1 1,000 12,346 -1,000,000 nan inf".split()


def test_progress_without_a_terminal_is_a_line_every_few_seconds(tmp_path, monkeypatch, capsys):
    """Without a terminal no bar is redrawn, and DeepSpeed's line of each iteration is in a file."""
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    log = RunLog(tmp_path, total=40, bar_metrics={"reward": "reward"}, description="PPO", print_every=0, report_to=[])
    for iteration in range(1, 26):
        with log.engine_output():
            print(f"|E2E latency={iteration}")
        now[0] += 1
        log.add(iteration, {"reward": iteration / 2})
    log.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert [line.split(" [")[0] for line in lines] == ["PPO: 1/40", "PPO: 11/40", "PPO: 21/40", "PPO: 25/40"]
    assert lines[1] == "PPO: 11/40 [00:11<00:29,  1.00it/s, reward=5.5]"
    assert "\r" not in err
    assert "|E2E" not in out
    assert (tmp_path / "engine.log").read_text().splitlines() == [f"|E2E latency={n}" for n in range(1, 26)]


def test_progress_in_a_terminal_is_a_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    log = RunLog(tmp_path, total=2, report_to=[])
    assert isinstance(log.bar, module.tqdm)
    log.close()


COLUMNS = {"prompt": ["one |", "<two>"], "completion": ["a\nb", "[bold]c[/bold]"], "cheerful": [0.5, math.nan]}


@pytest.mark.parametrize("service", ["trackio", "wandb"], indirect=True)
def test_completions_of_evaluations_are_saved_and_sent_to_trackers(tmp_path, service, capfd):
    name, calls = service
    run = tmp_path / "run"
    log = run_log(run, report_to=["tensorboard", name], print_every=1)
    for iteration in (0, 2, 4):
        log.add_completions(iteration, COLUMNS, shown=1)
    log.close()
    out = capfd.readouterr().out
    assert "iteration 2" in out and "one |" in out and "<two>" not in out, "more completions are printed than `shown`"
    completions = read_completions(run)
    assert completions["iteration"].tolist() == [0, 0, 2, 2, 4, 4]
    assert completions["completion"].tolist()[:2] == COLUMNS["completion"]
    assert completions["cheerful"].tolist()[0] == 0.5 and math.isnan(completions["cheerful"][1])
    tables = [call[2]["completions"].dataframe for call in calls() if call[0] == "log"]
    assert [table["prompt"].tolist() for table in tables] == [COLUMNS["prompt"]] * 3
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    texts = events.Tensors("completions/text_summary")
    assert [event.step for event in texts] == [0, 2, 4]
    assert "one &#124;" in texts[0].tensor_proto.string_val[0].decode()
    assert "&lt;two&gt;" in texts[0].tensor_proto.string_val[0].decode()

    calls().clear()
    run_log(run, report_to=[name], start=2)
    assert read_completions(run)["iteration"].tolist() == [0, 0, 2, 2], (
        "completions of iterations that run again were kept"
    )
    assert [call[1] for call in calls() if call[0] == "log"] == [0, 2]
    run_log(run, start=2).add_completions(2, COLUMNS, shown=0)
    assert read_completions(run)["iteration"].tolist() == [0, 0, 2, 2], "an iteration's completions are logged twice"
    run_log(run)
    assert read_completions(run).empty
