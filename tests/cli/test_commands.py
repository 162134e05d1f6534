"""`hybrid doctor`, `hybrid plan` and `hybrid report`: what they print, and how they exit."""

import json
import os
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement
from transformers import AutoConfig
from typer.testing import CliRunner

from hybrid import doctor
from hybrid.__main__ import app, bytes_of
from hybrid.doctor import size_text
from tests.tiny_models import FAMILIES, VOCABULARY

LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without leftovers of other builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("CXX", raising=False)
    return monkeypatch


def run(*arguments: str):
    return CliRunner().invoke(app, [*map(str, arguments)])


def config_of(folder, family="llama", **sizes):
    """The directory of a model that has a configuration and no weights."""
    settings = {"vocab_size": VOCABULARY, **(sizes or FAMILIES[family])}
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    return folder


def found(*arguments: str) -> dict[str, dict[str, str]]:
    """The findings of `hybrid doctor --json`, by subject."""
    return {
        finding["subject"]: finding for finding in json.loads(run("doctor", "--json", *arguments).stdout)["findings"]
    }


def test_a_healthy_machine(machine):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "deepspeed", "processor", "compiler", "CPU kernels", "two processes sum", "locks"):
        assert word in result.output
    assert len(result.output.splitlines()) < 40, "one screen"


def test_the_module_runs_alone(machine):
    done = subprocess.run(
        [sys.executable, "-m", "hybrid.doctor", "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["ok"] is True


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler", "CXX='no-such-compiler' is not there"), ("false", "do not build")]
)
def test_a_compiler_that_does_not_compile(machine, compiler, words):
    machine.setenv("CXX", compiler)
    result = run("doctor")
    assert result.exit_code == 1
    assert words in result.output
    assert "do: " in result.output and "CXX" in result.output


def test_a_lock_that_a_killed_build_left(machine, tmp_path):
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    result = run("doctor")
    assert result.exit_code == 1
    assert f"rm {lock}" in result.output
    with subprocess.Popen(
        [sys.executable, "-c", f"f = open({str(lock)!r}); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        assert [finding.status for finding in doctor.abandoned_locks()] == [doctor.OK], "a build that runs"
        holder.communicate(b"\n")


def test_strict_takes_warnings_for_problems(machine):
    machine.delenv("OMP_NUM_THREADS")
    assert run("doctor").exit_code == 0
    result = run("doctor", "--strict")
    assert result.exit_code == 1
    assert "export OMP_NUM_THREADS=1" in result.output


@pytest.mark.parametrize(
    ("requirement", "words"), [("torch>=99", ">=99 is needed"), ("no-such-package>=1", "is not installed")]
)
def test_a_package_that_is_too_old_or_absent(requirement, words):
    finding = doctor.version_of(Requirement(requirement))
    assert finding.status == doctor.PROBLEM
    assert words in finding.detail
    assert finding.remedy == f"pip install '{requirement}'"


def test_a_collective_that_does_not_answer(machine):
    machine.setattr(doctor, "SUM_OF_TWO", "import time; time.sleep(60)")
    machine.setattr(doctor, "COLLECTIVE_TIMEOUT_S", 1)
    start = time.monotonic()
    finding = doctor.sum_of_two("gloo")
    assert finding.status == doctor.PROBLEM
    assert "no answer within 1 s" in finding.detail
    assert time.monotonic() - start < 20
    machine.setattr(doctor, "SUM_OF_TWO", "raise OSError('no route to host')")
    assert "no route to host" in doctor.sum_of_two("gloo").detail


def test_a_model_that_runs_fused_and_one_that_does_not(machine, tmp_path):
    result = run("doctor", config_of(tmp_path / "llama"), "--tp", 2)
    assert result.exit_code == 0, result.output
    assert "rollouts run fused" in result.output
    assert "tensor parallel 2" in result.output
    native = config_of(tmp_path / "codegen", "codegen", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    model = found(native)[str(native)]
    assert model["status"] == doctor.WARNING
    assert "model's own layers" in model["detail"]


def test_a_plan_of_70b_without_a_machine_for_it(machine, tmp_path):
    start = time.monotonic()
    (tmp_path / "ds.json").write_text(json.dumps({"rollout": {"max_num_seqs": 16}}))
    flags = ["--ranks", 16, "--lora", 16, "--device-memory", "80GiB", "--config", tmp_path / "ds.json"]
    result = run("plan", config_of(tmp_path, **LLAMA_70B), *flags)
    assert time.monotonic() - start < 60
    assert result.exit_code == 0, result.output
    assert "Rollouts run fused" in result.output
    row = next(line.split() for line in result.output.splitlines() if line.strip().startswith("tensor parallel 8"))
    # 70.55e9 parameters and the adapter's 0.21e9, in MiB of bfloat16: a rank holds 1/16. The snapshot has
    # an eighth of the merged matrices and of the base's, which are the reference.
    assert float(row[3]) == pytest.approx(70.76e9 * 2 / 16 / 2**20, rel=0.01)
    assert float(row[5]) == pytest.approx(2 * 70.76e9 * 2 / 8 / 2**20, rel=0.03)
    assert '"auto" takes: tensor parallel 8, which decodes 16 of rollout.max_num_seqs=16' in result.output
    pinned = next(line for line in result.output.splitlines() if line.strip().startswith("pinned"))
    assert pinned.endswith("too much")


def test_a_plan_of_which_nothing_fits(machine, tmp_path):
    result = run("plan", config_of(tmp_path), "--device-memory", "1KiB")
    assert result.exit_code == 1
    assert "not one sequence fits" in result.output


def test_a_plan_by_a_deepspeed_file(machine, tmp_path):
    settings = {"zero_optimization": {"stage": 1}, "hybrid_engine": {"inference_tp_size": 2, "max_out_tokens": 64}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    model = config_of(tmp_path / "model")
    result = run("plan", model, "--ranks", 2, "--device", "cpu", "--config", tmp_path / "ds.json")
    assert result.exit_code == 0, result.output
    used = next(line for line in result.output.splitlines() if line.endswith("in use"))
    assert used.split()[:3] == ["tensor", "parallel", "2"]
    assert "streaming" not in result.output, "only ZeRO-3 streams"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}", "--device-memory", "much"], "'much' is no size"),
        (["{model}", "--device-memory", "1.2.3GB"], "'1.2.3GB' is no size"),
        (["{model}", "--ranks", "3", "--tp", "2"], "--tp 2 does not divide --ranks 3"),
        (["{empty}"], "the directory has no config.json"),
        (["no/such-model"], "give a directory, or a name that the hub has"),
        (["{model}", "--config", "no.json"], "no file at 'no.json'"),
    ],
)
def test_what_is_wrong_is_said(machine, tmp_path, arguments, words):
    machine.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    places = {"model": str(config_of(tmp_path / "model")), "empty": str(tmp_path / "empty")}
    result = run("plan", *(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_sizes_as_text():
    sizes = [80 << 30, 1 << 30, 110 << 20, 60 << 20, 0]
    assert [size_text(size) for size in sizes] == ["80.0 GiB", "1.0 GiB", "0.1 GiB", "60.0 MiB", "0.0 MiB"]


def test_sizes():
    assert [bytes_of(text) for text in ("80GiB", "24 GB", "1.5MiB", "17", "2kb")] == [
        80 << 30,
        24 * 10**9,
        3 << 19,
        17,
        2000,
    ]


def test_report_hands_its_arguments_on():
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "hybrid", "report", "no-such-run"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode != 0
    assert "no-such-run" in done.stdout + done.stderr
