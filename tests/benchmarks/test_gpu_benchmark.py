"""The benchmark of `make gpu`: its runner with a stand-in for the processes of cases, and a dry run on the CPU."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, gpu_case, plot
from benchmarks.cases import SHAPES, Case, Request, make_model
from benchmarks.contenders import Contender, Outcome
from benchmarks.limits import prefill_flops
from hybrid.config import read_blocks

DRY_RUN = "--device cpu --shapes micro --batches 2 --prompts 8 --new_tokens 4 --rounds 2".split()
NAME = "micro bf16 b2 4 prompt 8"
STEP = "micro bf16 1x2 16 prompt 8 grpo"

# Stands in for benchmarks.gpu_case: the faults are real, the figures are not. Each process adds a line to `calls`.
STAND_IN = """
import json, os, signal, sys, time
work, events = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
say = lambda **event: events.write(json.dumps(event) + "\\n")
open(os.environ["CALLS"], "a").write(json.dumps([work["kind"], work.get("contenders")]) + "\\n")
if work["kind"] == "device":
    rates = {"copy_bytes_per_s": 4e12, "gemm_flops_per_s": 8e14}
    say(result={"hardware": "A Device, 1", "memory": int(os.environ["MEMORY"]), "versions": {"torch": "2"}, **rates})
for name in work.get("contenders", []) if work["kind"] == "rollout" else []:
    say(begin=name)
    if name == "crash":
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(600)
    if name == "out-of-memory":
        say(error="OutOfMemoryError: CUDA out of | memory")
        sys.exit(1)
for name in work.get("contenders", []) if work["kind"] == "rollout" else []:
    seconds = {"prefill_s": [0.004, 0.002, 0.003], "step_s": [0.002, 0.001, 0.003]}
    say(result={"contender": name, **seconds, "prefill_flops": 12e11, "step_bytes": 4e9, "note": ""})
if work["kind"] == "profile":
    say(begin="hybrid")
    kernels = [["attention<a|b>", 28.0, 700.0], ["copy", 0.5, 300.0]]
    times = {"kernels_s": 1e-3, "launches": 28.5, "profiled_step_s": 2e-3, "step_bytes": 4e9, "cuda_graphs": 3}
    say(result={"contender": "hybrid", "kernels": kernels, **times, "note": ""})
if work["kind"] == "switch":
    say(begin="hybrid")
    seconds = {"switch_s": [0.5, 0.4], "gather_s": [0.3, 0.3], "merge_s": [0.1, 0.1]}
    say(result={"contender": "hybrid", **seconds, "snapshot_bytes": 2**30, "gathered_bytes": 2**30, "note": ""})
if work["kind"] == "grpo":
    say(begin="hybrid")
    seconds = {"rollout_s": [2.0, 4.0, 3.0], "score_s": [0.5], "train_s": [6.0]}
    say(result={"contender": "hybrid", **seconds, "tokens": 48, "planned": 2**21, "measured": 2**20, "note": ""})
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Replaces the processes of cases; a function that gives their kinds and contenders since it was last called."""
    script, log = tmp_path / "stand_in.py", tmp_path / "calls"
    script.write_text(STAND_IN)
    monkeypatch.setattr(gpu, "CASE_PROCESS", [sys.executable, "-S", str(script)])
    monkeypatch.setenv("CALLS", str(log))
    monkeypatch.setenv("MEMORY", str(80 * 2**30))

    def since() -> list:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    return since


def run(directory: Path, *flags: str) -> gpu.Report:
    return gpu.main([*DRY_RUN, "--directory", str(directory), *flags])


def test_a_failure_costs_one_row_and_nothing_is_measured_twice(tmp_path, calls, capsys):
    contenders = ["hybrid", "crash", "hang", "out-of-memory", "hf-static"]
    report = run(tmp_path, "--contenders", *contenders, "--case_seconds", "2", "--out", str(tmp_path / "out"))
    rows = {row["contender"]: row for row in report.rows if row["kind"] == "rollout"}
    assert set(rows) == set(contenders)
    assert rows["crash"]["error"] == "killed by SIGSEGV; its last line: about to crash"
    assert rows["hang"]["error"] == "did not end within 2 s"
    assert rows["out-of-memory"]["error"] == "OutOfMemoryError: CUDA out of | memory"
    assert rows["hybrid"]["in_turns_with"] == ["hybrid"]
    measured = calls()
    left = [contenders[:4], ["hybrid", "hang", "out-of-memory"], ["hybrid", "out-of-memory"], ["hybrid"]]
    others = [[kind, ["hybrid"]] for kind in ("profile", "switch", "grpo")]
    first = [["device", None], *(["rollout", names] for names in left), *others]
    assert measured == [*first, ["rollout", ["hf-static"]]], "Hugging Face's and vLLM's follow in a second pass"
    picture = report.path.with_suffix(".png")
    for path in (report.path, report.path.with_suffix(".md"), picture):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    figure = plot.gpu(report.content)
    assert figure.is_at(picture)
    assert [panel.title for panel in figure.panels] == [
        "A Device, 1: prefill, of its matrix products",
        "A Device, 1: decode step, of its copies",
    ]
    bars = [plot.Bar({name: 0.5}, "50%") for name in ("hybrid", "hf-static")]
    assert all(panel.cases == {NAME: bars} for panel in figure.panels)
    table = capsys.readouterr().out
    # 12e11 operations in 3 ms at 8e14 a second; 4e9 bytes in 2 ms at 4e12 a second; two rows in 2 ms.
    assert f"| {NAME} | hybrid | 3.00 (2.00–4.00) | 50% | 2.00 (1.00–3.00) | 50% | 1000 |  |" in table
    assert f"| {NAME} | out-of-memory | – | – | – | – | – | OutOfMemoryError: CUDA out of / memory |" in table
    # 4e9 bytes in a step of 2 ms, whose kernels take 1 ms.
    step = "a step of 2.00 ms (2000 GB/s), 28 kernels of together 1.00 ms (4000 GB/s); 3 CUDA graphs"
    assert f"{NAME} profile: {step}\n\n| kernel |" in table and "| attention<a/b> | 28.0 | 700.0 |" in table
    assert "| micro bf16 switch | 450.00 (400.00–500.00) | 300.0 | 100.0 | 1.00 |" in table
    assert f"| {STEP} | 3.00 (2.00–4.00) | 0.50 | 6.00 | 16 | 2 | 1 |  |" in table
    assert report.path.name == "gpu-a-device-1.json" and report.path.with_suffix(".md").is_file()
    assert table.count("| hybrid |") == report.path.with_suffix(".md").read_text().count("| hybrid |") == 1

    again = run(tmp_path, "--contenders", *contenders)
    assert calls() == [["device", None]] and again.rows == report.rows
    run(tmp_path, "--contenders", "hybrid", "out-of-memory", "--retry")
    assert calls() == [["device", None], ["rollout", ["out-of-memory"]]]
    more = run(tmp_path, "--contenders", "hybrid", "--new_tokens", "5")
    assert calls() == [["device", None], *([kind, ["hybrid"]] for kind in ("rollout", "profile", "grpo"))]
    content = json.loads(more.path.read_text())
    assert len(content["runs"]) == 4 and content["rows"] == more.rows


def test_a_picture_that_cannot_be_drawn_costs_no_figure(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(plot.Figure, "draw", lambda *_: 1 / 0)
    report = run(tmp_path, "--contenders", "hybrid", "--out", str(tmp_path / "out"))
    assert report.not_measured == [] and "no picture: ZeroDivisionError" in capsys.readouterr().out
    assert (tmp_path / "out" / report.path.name).is_file() and not report.path.with_suffix(".png").exists()


def test_figures_are_written_when_a_contenders_own_rounds_are_done(tmp_path):
    """The next one fails in its last round."""
    runs, events = [], gpu_case.Events(tmp_path / "events.jsonl")

    def fails(request: Request) -> Outcome:
        runs.append(request)
        if len(runs) == 6:
            raise RuntimeError("lost")
        return Outcome(request.completion_lengths)

    contenders = [Contender("first", lambda request: Outcome(request.completion_lengths)), Contender("second", fails)]
    with pytest.raises(RuntimeError, match="lost"):
        gpu_case.measure(contenders, Case("micro", "f32", 2, prompt_len=8, new_tokens=4), 2, events)
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (result,) = (event["result"] for event in written if "result" in event)
    assert result["contender"] == "first" and len(result["step_s"]) == 2 and written[-1] == {"begin": "second"}


def test_what_does_not_fit_into_the_minutes_is_listed_and_measured_next(tmp_path, calls, capsys, monkeypatch):
    first = run(tmp_path, "--contenders", "hybrid", "--minutes", "0")
    assert calls() == [["device", None]]
    names = [f"{name}, hybrid" for name in (NAME, f"{NAME} profile", "micro bf16 switch", STEP)]
    assert first.not_measured == names
    assert f"Not measured, call again: {'; '.join(names)}." in capsys.readouterr().out
    # A case that the end of the minutes cuts off has not failed.
    monkeypatch.setattr(gpu, "START_S", 1.0)
    cut = run(tmp_path, "--contenders", "hang", "--minutes", f"{3 / 60}")
    assert cut.not_measured[0] == f"{NAME}, hang" and cut.current_rows() == []
    second = run(tmp_path, "--contenders", "hybrid")
    assert second.not_measured == [] and len(second.current_rows()) == 4


def test_other_code_is_measured_again(tmp_path, calls, monkeypatch):
    run(tmp_path, "--contenders", "hybrid")
    monkeypatch.setattr(gpu, "code_digest", lambda: "another")
    report = run(tmp_path, "--contenders", "hybrid")
    assert len(report.rows) == 8 and len(report.current_rows()) == 4
    assert [kind for kind, _ in calls()] == ["device", "rollout", "profile", "switch", "grpo"] * 2


def test_contenders_that_do_not_fit_together_run_alone_and_those_too_large_get_a_reason(tmp_path, calls, monkeypatch):
    work = gpu.Work("rollout", Case("micro", "bf16", 2, prompt_len=8, new_tokens=4), ("hybrid", "hf-static"))
    needs = [work.needs(name) for name in work.contenders]
    assert needs[0] > needs[1] > gpu.RESERVE, "the engine holds the weights twice"
    monkeypatch.setenv("MEMORY", str(2 * needs[0] - 1))
    run(tmp_path / "alone", "--contenders", "hybrid", "hybrid-eager")
    assert calls()[1:3] == [["rollout", ["hybrid"]], ["rollout", ["hybrid-eager"]]]
    monkeypatch.setenv("MEMORY", str(needs[1]))
    report = run(tmp_path / "less", "--contenders", "hybrid", "hf-static")
    errors = {row["contender"]: row.get("error") for row in report.rows if row["kind"] == "rollout"}
    assert errors == {"hybrid": "needs 2 GiB, 2 GiB are free", "hf-static": None}


def test_the_most_telling_cases_come_first():
    names = [work.name for work in gpu.planned(gpu.parse([]))]
    assert len(names) == len(set(names)) == 3 * 4 * 2 + 3 + 3 + 2
    large = [f"{shape} bf16 b64 prompt 512" for shape in ("1.5B", "7B", "0.5B")]
    switches = [f"{shape} bf16 switch" for shape in ("1.5B", "7B", "0.5B")]
    assert names[:9] == [*large, *(f"{name} profile" for name in large), *switches]
    sooner = [f"{shape} bf16 {size}" for size in ("b1", "b256") for shape in ("1.5B", "7B", "0.5B")]
    assert names[9:17] == [*sooner, *(f"{shape} bf16 32x8 256 prompt 512 grpo" for shape in ("1.5B", "0.5B"))]
    assert {"hybrid", "hf-static"} <= set(gpu.parse([]).contenders) <= set(gpu.CONTENDERS)
    installed = gpu.has_package("flashinfer")
    assert ("hybrid-flashinfer" in gpu.parse([]).contenders) == installed
    read_blocks(gpu.FLASHINFER)


def test_the_commands_of_the_first_hour_are_accepted():
    page = (gpu.ROOT / "docs/jobs/first_gpu_hour.md").read_text()
    commands = [shlex.split(command) for command in re.findall(r"`(make gpu[^`]*)`", page)]
    assert [command[1] for command in commands] == ["gpu", "gpu-test", "gpu-bench", "gpu-bench"]
    for command in commands:
        planned = subprocess.run([*command, "--dry-run"], cwd=gpu.ROOT, capture_output=True, text=True, check=True)
        for line in re.findall(r"-m benchmarks\.gpu (.*)", planned.stdout):
            gpu.parse(shlex.split(line))


def test_a_decode_step_needs_two_tokens(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--new_tokens", "1"])
    assert "--new_tokens 1 given" in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_parameters_is_the_models(shape):
    assert gpu.parameters(shape) == sum(each.numel() for each in make_model(shape, "bf16", "meta").parameters())


def test_flops_of_a_prefill_match_torchs_counter():
    case = Case("micro", "f32", prompts=3, prompt_len=9)
    model = make_model("micro", "f32", "cpu")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(case.rows, case.prompt_len, dtype=torch.long), logits_to_keep=1)
    masked = case.rows * (9 * 9 - 9 * 10 / 2) * 4 * 2 * 64  # pairs × (q·k and p·v) × layers × hidden
    # torch also counts the rotary table's products of positions and frequencies, which are no matrices of the model.
    assert prefill_flops(model, case) == pytest.approx(counter.get_total_flops() - masked, rel=2e-3)


def check_dry_run(directory: Path, contenders: list[str], output: str) -> None:
    """Every measured contender has all its figures, in the file and the table."""
    (path,) = directory.glob("gpu-*.json")
    content = json.loads(path.read_text())
    rows = {row["contender"]: row for row in content["rows"] if row["kind"] == "rollout"}
    (switch,) = (row for row in content["rows"] if row["kind"] == "switch")
    (profile,) = (row for row in content["rows"] if row["kind"] == "profile")
    (step,) = (row for row in content["rows"] if row["kind"] == "grpo")
    assert all(len(step[name]) == 2 and min(step[name]) > 0 for name in ("rollout_s", "score_s", "train_s"))
    assert step["tokens"] == 2 * 4 * 4 and step["planned"] > 0 and step["note"] == ""
    assert re.search(rf"^\| {STEP} \| [\d.]+ \([\d.]+–[\d.]+\) \|", output, re.M)
    times = [micros for _, _, micros in profile["kernels"]]
    assert times and times == sorted(times, reverse=True) and profile["cuda_graphs"] == 0
    assert f"{NAME} profile: a step of " in output
    assert list(rows) == contenders and content["not_measured"] == []
    for row in rows.values():
        assert len(row["prefill_s"]) == len(row["step_s"]) == 2 and min(row["prefill_s"]) > 0
        assert row["note"] == "", "it did not run fused"
        assert re.search(rf"^\| {NAME} \| {row['contender']} \| [\d.]+ \([\d.]+–[\d.]+\) \|", output, re.M)
    size = 2 * gpu.parameters("micro")
    assert size <= switch["snapshot_bytes"] <= 1.1 * size and min(switch["switch_s"]) > 0
    assert switch["gathered_bytes"] == size, "stale weights are gathered once"
    assert "written to" in output and content["runs"][0]["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_dry_run_on_the_cpu(tmp_path, capsys):
    run(tmp_path, "--contenders", "hybrid", "hf-static")
    check_dry_run(tmp_path, ["hybrid", "hf-static"], capsys.readouterr().out)


@pytest.mark.slow
def test_a_dry_run_with_faults(tmp_path, capsys):
    """The injected crash, hang and exception happen in the real process, after the engine has been built."""
    names = ["hybrid", "crash", "hang", "out-of-memory", "hybrid-eager"]
    report = run(tmp_path, "--contenders", *names, "--case_seconds", "100")
    errors = {row["contender"]: row["error"] for row in report.rows if "error" in row}
    assert set(errors) == set(names[1:4])
    assert errors["crash"].startswith("killed by SIGSEGV") and errors["hang"].startswith("did not end within 100 s")
    assert errors["out-of-memory"] == "torch.OutOfMemoryError: CUDA out of memory (injected by a test)"
    report.rows = [row for row in report.rows if "error" not in row]
    report.write()
    check_dry_run(tmp_path, ["hybrid", "hybrid-eager"], capsys.readouterr().out)
