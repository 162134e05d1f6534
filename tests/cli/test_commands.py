"""`hybrid doctor`, `plan`, `serve`, `report` and `replay`: what they print, and how they exit."""

import copy
import json
import logging
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import peft
import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hybrid.__main__ import app
from hybrid.cli import doctor
from hybrid.cli.commands import adapter_paths, bytes_of
from hybrid.cli.doctor import size_text
from tests.marks import slow_but
from tests.rlhf_examples.chat_models import chat_model
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


def test_a_command_says_nothing_of_bitsandbytes_kernels(tmp_path):
    """bitsandbytes 0.50, which PEFT imports, warns where the package `kernels` is absent."""
    assert run("plan", config_of(tmp_path)).exit_code == 0
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


def written(folder, *arguments: str):
    """What `hybrid doctor --json` writes; `findings` by their subjects."""
    result = run("doctor", "--json", folder / "doctor.json", *arguments)
    content = json.loads((folder / "doctor.json").read_text())
    assert content["ok"] == (result.exit_code == 0), result.output
    content["findings"] = {finding["subject"]: finding for finding in content["findings"]}
    return content


def checked(monkeypatch, *results: doctor.Finding) -> None:
    """The checks of the machine find only `results`: they take seconds and are no part of the test."""
    monkeypatch.setattr("hybrid.cli.commands.findings", lambda: iter(results))


def test_a_healthy_machine(machine):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "deepspeed", "processor", "compiler", "CPU kernels", "two processes sum", "locks"):
        assert word in result.output
    assert len(result.output.splitlines()) < 40, "one screen"


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_to_train_in_depends_on_the_instructions(monkeypatch, fast, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("hybrid.cli.doctor.has_fast_bfloat16", lambda device: fast)
    assert [finding.detail.split(" (")[0] for finding in doctor.training_dtype()] == [f"train in {dtype}"]


def test_the_module_runs_alone(machine, tmp_path):
    command = [sys.executable, "-m", "hybrid.cli.doctor", "--json", str(tmp_path / "doctor.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "doctor.json").read_text())["ok"] is True


def test_a_model_and_its_plan_fit_on_one_screen(machine, tmp_path):
    machine.setenv("COLUMNS", "120")
    result = run("doctor", config_of(tmp_path), "--zero", 3, "--tp", 2)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) <= 50


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler", "CXX='no-such-compiler' is not there"), ("false", "do not build")]
)
def test_a_compiler_that_does_not_compile(machine, compiler, words):
    machine.setenv("CXX", compiler)
    machine.setattr(doctor, "sum_of_two", lambda backend: doctor.Finding(backend, doctor.OK, ""))
    assert run("doctor").exit_code == 0, "torch's operations run instead"
    result = run("doctor", "--strict")
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
        assert [finding.status for finding in doctor.build_locks()] == [doctor.OK], "a build that runs"
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
    checked(machine)
    content = written(tmp_path, native)
    model = content["findings"][str(native)]
    assert model["status"] == doctor.WARNING
    assert "model's own layers" in model["detail"]
    assert content["plan"]["in_use"] == content["plan"]["auto"] == "pinned"
    need = content["plan"]["modes"]["pinned"]
    assert need["fits"] and need["total"] == sum(need[kind] for kind in ("snapshot", "kv", "logits", "activations"))


# Of a rank: a pinned model of 0.5 GiB does not fit, and layers of it do.
def test_settings_that_do_not_fit_are_a_problem_though_others_fit(machine, tmp_path):
    checked(machine)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 1024}
    model = config_of(tmp_path / "model", **sizes)
    flags = [model, "--ranks", 8, "--batch-size", 1, "--prompt-length", 16, "--max-new-tokens", 16]
    machine.setattr("hybrid.cli.commands.device_memory_here", lambda *_: 1 << 30)
    content = written(tmp_path, *flags)
    memory, plan = content["findings"]["memory"], content["plan"]
    assert memory["status"] == doctor.PROBLEM
    assert "pinned does not fit: a rank has 1.0 GiB free" in memory["detail"]
    assert plan["in_use"] == "pinned" and not plan["modes"]["pinned"]["fits"] and plan["modes"][plan["auto"]]["fits"]
    assert f'"auto", which takes: {plan["auto"]}' in memory["remedy"]
    (tmp_path / "ds.json").write_text(json.dumps({"hybrid_engine": {"pin_parameters": "auto"}}))
    content = written(tmp_path, *flags, "--config", tmp_path / "ds.json")
    assert content["findings"]["memory"]["status"] == doctor.OK
    machine.setattr("hybrid.cli.commands.device_memory_here", lambda *_: 1 << 20)
    for config in ([], ["--config", tmp_path / "ds.json"]):
        assert "nor does any other way" in written(tmp_path, *flags, *config)["findings"]["memory"]["detail"]


def test_an_invalid_model_is_reported_as_a_finding(machine, tmp_path):
    machine.setenv("HF_HUB_OFFLINE", "1")
    checked(machine, doctor.Finding("python", doctor.OK, "3"))
    content = written(tmp_path, "no/such-model")
    assert content["findings"].keys() == {"python", "no/such-model"} and content["plan"] is None
    assert "give a directory, or a name" in content["findings"]["no/such-model"]["detail"]


def test_more_ranks_than_gpus_are_a_warning(machine, tmp_path):
    checked(machine)
    machine.setattr("torch.cuda.device_count", lambda: 1)
    content = written(tmp_path, config_of(tmp_path / "model"), "--tp", 2)
    assert content["findings"]["ranks"]["detail"].startswith("1 GPUs are here, and inference_tp_size=2 needs 2 ranks")
    assert "ranks" not in written(tmp_path, tmp_path / "model", "--tp", 2, "--ranks", 2)["findings"]


def test_a_kernel_of_triton(machine):
    """In Triton's interpreter here; `make gpu` runs it on a GPU."""
    machine.setenv("TRITON_INTERPRET", "1")
    finding = doctor.triton_kernel("cpu")
    assert finding.status == doctor.OK, finding
    assert "compiles and runs a kernel" in finding.detail
    machine.setattr(doctor, "KERNEL", doctor.KERNEL.replace("1e-5", "-1"))
    assert "results are off by" in doctor.triton_kernel("cpu").detail
    machine.setattr(doctor, "KERNEL", "import os; os.abort()")
    assert doctor.triton_kernel("cpu").status == doctor.PROBLEM


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
    # an eighth of one copy of the matrices: merged for rollouts, the base's for the reference.
    assert float(row[3]) == pytest.approx(70.76e9 * 2 / 16 / 2**20, rel=0.01)
    assert float(row[5]) == pytest.approx(70.76e9 * 2 / 8 / 2**20, rel=0.03)
    assert '"auto" takes: tensor parallel 4, which decodes 16 of rollout.max_num_seqs=16' in result.output
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
    flags = ["--ranks", 2, "--device", "cpu", "--config", tmp_path / "ds.json", "--zero", 3, "--tp", 1]
    flagged = run("plan", model, *flags)
    used = next(line for line in flagged.output.splitlines() if line.endswith("in use"))
    assert used.split()[0] == "pinned" and "streaming" in flagged.output, "flags count more than the file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}", "--device-memory", "much"], "'much' is no size"),
        (["{model}", "--device-memory", "1.2.3GB"], "'1.2.3GB' is no size"),
        (
            ["{model}", "--ranks", "3", "--tp", "2"],
            "inference_tp_size=2 does not divide 3 ranks",
        ),
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
    done = subprocess.run(
        [sys.executable, "-m", "hybrid", "report", "no-such-run"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "there is no metrics.jsonl in 'no-such-run'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-run", "--step", "3"], "error: RUN: 'no-such-run' given; it has no settings.json"),
        (["no-such-run"], "error: the following arguments are required: --step"),
    ],
)
def test_replay_hands_its_arguments_on(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "hybrid", "replay", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(message), (
        done.stderr
    )  # others' warnings before


WRONG_CONFIGS = {
    "a list": ("[1, 2]", "holds a list; it must be settings by name"),
    "a text": ('"zero"', "it must be settings by name"),
    "not JSON": ("{{{", "is not JSON"),
    "nested": ("[" * 100_000, "is not JSON"),
    "binary": (b"\xff\xfe\x00", "is not JSON"),
    "block null": ({"hybrid_engine": None}, "hybrid_engine: None given; it must be a dictionary"),
    "block a list": ({"hybrid_engine": [1]}, "hybrid_engine: [1] given; it must be a dictionary"),
    "rollout a text": ({"rollout": "fast"}, "rollout: 'fast' given; it must be a dictionary"),
    "tokens a text": ({"hybrid_engine": {"max_out_tokens": "many"}}, "hybrid_engine.max_out_tokens: 'many' given"),
    "tokens null": ({"hybrid_engine": {"max_out_tokens": None}}, "hybrid_engine.max_out_tokens: None given"),
    "tp a list": ({"hybrid_engine": {"inference_tp_size": [2]}}, "hybrid_engine.inference_tp_size: [2] given"),
    "zero null": ({"zero_optimization": None}, "zero_optimization: None given; it must be a dictionary"),
    "zero a text": ({"zero_optimization": "stage 3"}, "zero_optimization: 'stage 3' given"),
    "stage a word": (
        {"zero_optimization": {"stage": "three"}},
        "zero_optimization.stage: 'three' given",
    ),
    "stage 7": ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage: 7 given"),
    "stage null": ({"zero_optimization": {"stage": None}}, "zero_optimization.stage: None given"),
    "batch size": ({"train_batch_size": "x"}, "train_batch_size: 'x' given; it must be a whole number above 0"),
    "accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 given"),
}


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_wrong_configuration_is_one_line(machine, tmp_path, command, name):
    content, words = WRONG_CONFIGS[name]
    path = tmp_path / "ds.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    checked(machine)
    check_refused(words, command, config_of(tmp_path / "model"), "--config", path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "{model}", "--config", "{folder}"), "no file at"),
        (("plan", "{model}", "--config", "x" * 300), "cannot be read: File name too long"),
        (("plan", "{model}", "--device-memory", "."), "'.' is no size"),
        (("plan", "{model}", "--device-memory", "9" * 400), "is no size"),
        (("plan", "{list}"), "Should have a `model_type` key"),
        (("doctor", "--config", "no.json"), "no file at 'no.json'"),
        (("doctor", "--json", "{folder}"), "Is a directory; give the path of a file"),
        (("doctor", "--json", "{folder}/no/such.json"), "No such file or directory; give the path of a file"),
    ],
)
def test_a_wrong_path_is_one_line(machine, tmp_path, arguments, words):
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    places = {"model": config_of(tmp_path / "model"), "folder": tmp_path, "list": tmp_path / "list"}
    checked(machine)
    check_refused(words, *(argument.format(**places) for argument in arguments))


def check_refused(words: str, *arguments) -> None:
    """The command ends with status 2 and one line that contains `words`."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert line.startswith("error: ") and words in line, line


def test_doctor_shows_no_secrets(machine, tmp_path):
    secrets = {
        "HF_TOKEN": "hf_abcdef",
        "HF_API_KEY": "key-abc",
        "TORCH_PASSWORD": "hunter2",
        "HF_ENDPOINT": "https://me:p@ss@hub.example/x?token=abcd",
    }
    for name, value in secrets.items():
        machine.setenv(name, value)
    machine.setenv("HF_HUB_OFFLINE", "1")
    machine.setattr("hybrid.cli.commands.findings", doctor.environment)
    text = run("doctor", "--json", tmp_path / "doctor.json").output + (tmp_path / "doctor.json").read_text()
    assert all(text.count(shown) == 2 for shown in ("HF_TOKEN=***", "HF_API_KEY=***", "TORCH_PASSWORD=***"))
    assert text.count("HF_ENDPOINT=https://***@hub.example/x?token=***") == 2 and text.count("HF_HUB_OFFLINE=1") == 2
    assert not any(secret in text for secret in ("hf_abcdef", "key-abc", "hunter2", "p@ss", "abcd"))


def adapters_of(model, folder: Path, *names: str) -> dict[str, Path]:
    """Paths of random adapters of a model, large enough that the texts differ."""
    for number, name in enumerate(names):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(model), config, adapter_name=name)
        adapted.save_pretrained(folder / "adapters")
    return {name: folder / "adapters" / name for name in names}


def test_what_is_no_adapter_is_said():
    with pytest.raises(ValueError, match="--lora-modules: 'sql' given; it must be NAME=PATH of an adapter"):
        adapter_paths(["sql"])


@pytest.mark.parametrize("number", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_serve_answers_until_it_is_interrupted(machine, tmp_path, number):
    pytest.importorskip("fastapi", reason="the extra `server` has it")
    model = chat_model(tmp_path)
    adapters = adapters_of(AutoModelForCausalLM.from_pretrained(model), tmp_path, "sql", "chat")
    command = [sys.executable, "-m", "hybrid", "serve", model, "--port", "0", "--name", "tiny", "--dtype", "float32"]
    command += [text for name, path in adapters.items() for text in ("--lora-modules", f"{name}={path}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            line = next(line for line in served.stdout if line.startswith("tiny at "))
            url = line.split()[2].removesuffix(";")
            with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
                parents = {each["id"]: each["parent"] for each in json.load(answer)["data"]}
            assert parents == {"tiny": None, "chat": "tiny", "sql": "tiny", "__base__": "tiny"}
            texts = {}
            for name in parents:
                chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}
                body, headers = json.dumps(chat).encode(), {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{url}/chat/completions", body, headers)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    content = json.load(answer)
                assert 0 < content["usage"]["completion_tokens"] <= 8
                texts[name] = content["choices"][0]["message"]["content"]
            assert texts["tiny"] == texts["__base__"] and len(set(texts.values())) == 3, texts
            served.send_signal(number)
            _, errors = served.communicate(timeout=60)
        finally:
            served.kill()
    assert served.returncode == 0 and "Traceback" not in errors, errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "host: '0.0.0.0' given without api_key; give api_key=..."),
        (("--max-model-len", "1"), "Invalid value for '--max-model-len'"),
        ((), "the directory has no config.json"),
    ],
)
def test_a_wrong_argument_of_serve_is_said(machine, tmp_path, arguments, words):
    result = run("serve", tmp_path, *arguments)
    assert result.exit_code == 2 and words in result.output, result.output
    assert "Traceback" not in result.output


def test_help_needs_no_heavy_imports():
    code = "import sys; sys.argv = ['hybrid', 'serve', '--help']\nfrom hybrid.__main__ import app\n"
    code += "try: app()\nfinally: assert not {'torch', 'fastapi', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "--api-key" in done.stdout, done.stderr
