"""The rollout benchmark: contenders do the same work, and its limits and tables are correct."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plot
from benchmarks.cases import CPU_CASES, GROUPS, Case, EndAtLength, make_model, make_request, prompt_lengths
from benchmarks.families import FAMILIES, FUSED
from benchmarks.limits import Limits, measure_limits
from benchmarks.results import ROOT
from benchmarks.rollout import Timing, chosen_cases, parse, result
from benchmarks.vllm_contender import VLLM, VLLMSettings
from hybrid.models.model_info import ModelInfo

CONTENDERS = ["hybrid", "hf", "zero3-gathered"]
NATURAL = Case("micro", "f32", prompts=6, prompt_len=8, new_tokens=24, natural=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[str, Path]:
    """What a run of the program printed, and its JSON file."""
    output = tmp_path_factory.mktemp("rollout") / "micro.json"
    flags = "--shape micro --dtype f32 --prompts 6 --prompt_len 8 --new_tokens 24 --natural --rounds 2 --threads 1"
    command = [sys.executable, "-m", "benchmarks.rollout", *flags.split(), "--output", str(output)]
    done = subprocess.run(
        [*command, "--contenders", *CONTENDERS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, output


@pytest.mark.slow
def test_contenders_generate_the_same_tokens(run):
    (case,) = json.loads(run[1].read_text())["cases"]
    assert list(case["results"]) == CONTENDERS
    assert case["lengths"] == list(prompt_lengths(NATURAL)) and len(set(case["lengths"])) > 2
    for made in case["results"].values():
        assert made["tokens"] == [sum(case["lengths"])] * 2
        assert len(made["seconds"]) == len(made["phases"]) == 2 and min(made["seconds"]) > 0


@pytest.mark.slow
def test_the_report_names_hardware_and_versions(run):
    report = json.loads(run[1].read_text())
    (case,) = report["cases"]
    assert report["versions"]["torch"] == torch.__version__
    machine = report["machine"]
    assert machine["threads"] == machine["ranks"] == 1 and len(machine["load"]) == 2
    assert (
        "1 thread" in run[0]
        and "avx2" in machine["instructions"]
        and machine["name"].endswith(("avx2", "avx512", "amx"))
    )
    assert case["limits"]["bytes_per_s"] > 0 and case["limits"]["flops_per_s"] > 0 and case["limits"]["step_s"] > 0
    assert case["results"]["hf"]["ratio"] == 1


@pytest.mark.slow
def test_the_table_has_every_contender(run):
    rows = re.findall(r"^\| ([\w-]+) \| \d+ \| \d+–\d+ \| [\d.]+ \| [\d.]+ \| – \| – \| 2 \|$", run[0], re.M)
    assert rows == CONTENDERS
    assert NATURAL.name in run[0]


@pytest.mark.slow
def test_the_plot_is_drawn(run, tmp_path):
    report = json.loads(run[1].read_text())
    plot.rollouts([report, report]).draw(tmp_path / "rollout.png")
    assert (tmp_path / "rollout.png").read_bytes().startswith(b"\x89PNG")


def test_cases_are_selected_by_name():
    names = ["120M bf16 b64", "120M bf16 b64 natural 256", "120M bf16 8x8 prompt 512", "10M bf16 b16"]
    assert [case.name for case in chosen_cases(parse(["--cases", *names]))] == names
    assert chosen_cases(parse(["--cases", "all"])) == list(CPU_CASES) or torch.cuda.is_available()
    flags = "--shape 120M --dtype bf16 --prompts 8 --group 8 --prompt_len 512 --new_tokens 64"
    assert [case.name for case in chosen_cases(parse(flags.split()))] == [names[2]]


def test_an_unknown_case_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse(["--cases", "120M bf16 b65"])
    assert (
        "'120M bf16 b65' given; allowed: one of all, families, native, or some of: 120M bf16 b64"
        in capsys.readouterr().err
    )


def test_natural_lengths_are_geometric():
    case = Case("micro", "f32", prompts=20000, new_tokens=64, natural=True)
    end = 4 / case.new_tokens
    lengths = prompt_lengths(case)
    assert min(lengths) == 1 and max(lengths) == case.new_tokens
    # The mean of min(geometric, n); its standard error is 0.1 here.
    assert sum(lengths) / len(lengths) == pytest.approx((1 - (1 - end) ** case.new_tokens) / end, abs=0.5)
    assert lengths == prompt_lengths(case)


def test_a_group_has_no_natural_lengths():
    with pytest.raises(ValueError, match="natural lengths with groups of 8"):
        Case("micro", "f32", prompts=2, group=8, natural=True)


def test_prompts_differ_between_seeds_and_rows():
    first, second = (make_request(NATURAL, 512, seed) for seed in (0, 1))
    assert not torch.equal(first.prompt_ids, second.prompt_ids) and first.lengths == second.lengths
    assert len(set(map(tuple, first.prompt_ids.tolist()))) == NATURAL.prompts


def test_each_row_ends_at_its_length_in_any_batch():
    request = make_request(NATURAL, 512, seed=0)
    processor = EndAtLength(request)
    scores = torch.randn(NATURAL.prompts, 512)
    for made in range(max(request.lengths)):
        ids = torch.cat([request.prompt_ids, torch.ones(NATURAL.prompts, made, dtype=torch.long)], dim=1)
        after = processor(ids, scores.clone())
        ended = [length <= made + 1 for length in request.lengths]
        assert (after.softmax(dim=1)[:, request.end] == 1).tolist() == ended
        assert torch.equal(after[:, : request.end].isinf().all(dim=1), torch.tensor(ended))
        order = torch.randperm(NATURAL.prompts)
        padded = torch.cat([torch.zeros(NATURAL.prompts, 3, dtype=torch.long), ids[order]], dim=1)
        assert torch.equal(processor(padded, scores[order]), after[order])


@pytest.mark.parametrize("group", [1, 4])
def test_flops_of_a_step_match_torchs_counter(group):
    case = Case("micro", "f32", prompts=3, group=group, prompt_len=8, new_tokens=16)
    model = make_model("micro", "f32", "cpu")
    model.set_attn_implementation("eager")
    context = case.prompt_len + case.new_tokens // 2
    cache = model(torch.ones(case.rows, context - 1, dtype=torch.long)).past_key_values
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(case.rows, 1, dtype=torch.long), past_key_values=cache)
    limits = measure_limits(model, case)
    # torch also counts the rotary table's products of positions and frequencies, which are no matrices of the model.
    assert limits.step_flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    kv_values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    head_and_layers = sum(p.numel() for p in model.parameters() if p.dim() == 2) - 512 * 64
    assert limits.step_bytes == 4 * (head_and_layers + kv_values)


def test_a_tied_heads_bytes_are_counted():
    model = make_model("micro", "f32", "cpu")
    before = measure_limits(model, NATURAL).step_bytes
    model.lm_head.weight = model.model.embed_tokens.weight
    assert measure_limits(model, NATURAL).step_bytes == before


def test_the_roofline_is_the_longer_of_reading_and_arithmetic():
    memory = Limits(step_bytes=100, step_flops=10, bytes_per_s=50, flops_per_s=10)
    assert (memory.step_s, memory.bound) == (2, "memory")
    arithmetic = dataclasses.replace(memory, step_flops=30)
    assert (arithmetic.step_s, arithmetic.bound) == (3, "arithmetic")
    case = Case("micro", "f32", prompts=2, new_tokens=5)
    timing, base = Timing(1.0, [17.0, 9.0, 5.0], [10] * 3, [{}] * 3), Timing(1.0, [27.0, 18.0], [10] * 2, [{}] * 2)
    figures = result(case, timing, base, tokens=10, limits=memory)
    assert figures["tokens_per_s"] == pytest.approx(10 / 9) and figures["ratio"] == 22.5 / 9
    assert figures["step_s"] == (9 - 1) / 4 and figures["roofline"] == 1.0
    faster = Timing(1.0, [5.0], [10], [{}])
    assert result(case, faster, None, tokens=10, limits=memory)["roofline"] == 1.0, "never above 100 %"


def vllm_settings(python: Path, directory: Path) -> VLLMSettings:
    return VLLMSettings(python, directory, threads=1)


def test_a_missing_vllm_environment_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `make bench-vllm`"):
        VLLM(vllm_settings(tmp_path / "python", tmp_path), make_model("micro", "f32", "cpu"), 4, 16, eager=True)


def test_a_dead_vllm_process_raises_with_its_output(tmp_path):
    here = Path(sys.executable)  # an environment without vLLM
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1; .*No module named 'vllm'"):
        VLLM(vllm_settings(here, tmp_path), make_model("micro", "f32", "cpu"), 4, 16, eager=True)


# A stand-in for vLLM's two classes in the worker's process: completions of the requested lengths, grouped.
STAND_IN = """
class SamplingParams:
    def __init__(self, n, max_tokens, logprobs, **more):
        self.n, self.max_tokens = n, max_tokens
        print("logprobs", logprobs)
class Completion:
    def __init__(self, count):
        self.token_ids = [0] * count
class Output:
    def __init__(self, sampling):
        self.outputs = [Completion(sampling.max_tokens) for _ in range(sampling.n)]
__version__ = "0.0"
class LLM:
    def __init__(self, **settings):
        print("words that are no answer")
    def generate(self, requests, sampling, use_tqdm):
        return [Output(each) for _, each in zip(requests, sampling, strict=True)]
"""


def test_requests_to_the_vllm_process(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = VLLM(vllm_settings(Path(sys.executable), tmp_path), make_model("micro", "f32", "cpu"), 6, 40, eager=False)
    try:
        for case in (NATURAL, Case("micro", "f32", prompts=3, group=2, new_tokens=5)):
            request = make_request(case, 512, seed=0)
            assert server.run(request) == request.completion_lengths
        assert server.about == "vllm 0.0"
    finally:
        server.close()
    log = server.log.read_text()
    assert "words that are no answer" in log
    assert "logprobs 0" in log, "this engine returns each token's logprob, so vLLM is asked for it"
    assert server.process.returncode == 0 and not Path(server.weights.name).exists()


def test_groups_of_cases_are_named():
    assert [case.shape for case in chosen_cases(parse(["--cases", "families"]))][::2] == list(FUSED)[1:]
    assert chosen_cases(parse(["--cases", "native"])) == list(GROUPS["native"])
    with pytest.raises(SystemExit):
        parse(["--cases", "native", "120M bf16 b1"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", FAMILIES)
def test_families_have_a_decoder_or_none(shape):
    """At the size that is measured, of 11M to 101M parameters."""
    model = make_model(shape, "f32", "cpu")
    assert 10e6 < sum(parameter.numel() for parameter in model.parameters()) < 102e6
    assert (ModelInfo(model).layout is not None) == (shape in FUSED)
