"""The page of benchmarks: every figure in it comes from a JSON file; the repository's page is what its files give."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import page, results
from benchmarks.machine import cpu_name
from benchmarks.results import RESULTS, ROOT, Figures, Results, Spread
from benchmarks.suite import RUNS
from benchmarks.tables import captions

MACHINE = {
    "name": "abacus",
    "cpu": "An Abacus",
    "gpu": None,
    "instructions": "avx2",
    "cores": 2,
    "threads": 1,
    "ranks": 2,
    "load": [0.25, 1.5],
}
ABOUT = {"date": "2030-01-02T03:04:05+00:00", "commit": "abc1234", "machine": MACHINE, "versions": {}}


def rollout(name: str, tokens: int, **seconds: list[float]) -> dict:
    """A case of `benchmarks.rollout`."""
    made = {
        key: {"seconds": each, "first_token_s": 0.5, "roofline": 0.75, "ratio": seconds["hf"][0] / each[0]}
        for key, each in seconds.items()
    }
    return {"name": name, "tokens": tokens, "results": made}


def step(seconds: float) -> dict:
    return {"step_s": [seconds], "generate_s": [seconds / 2]}


def forwards(**seconds: float) -> dict:
    """Contenders of `benchmarks.training`."""
    figures = {"cpu_seconds": [1.0], "token_ratio": 1.0, "peak_bytes": 2**20, "kl": 0.0}
    return {name: {**figures, "seconds": [each]} for name, each in seconds.items()}


def ways(*names: str) -> dict:
    """Results of `benchmarks.modes`: each way takes a second longer than the one before."""
    return {
        name: {"switch_s": [0.5], "rollout_s": [float(row)], "gathered_mib": 1.0} for row, name in enumerate(names, 1)
    }


def latencies(tokens_per_s: float) -> dict:
    """Figures of a server of `benchmarks.serving`."""
    times = {"first_token_p50_s": 0.25, "first_token_p99_s": 0.5, "token_p50_s": 0.004, "token_p99_s": 0.008}
    return {"tokens_per_s": [tokens_per_s]} | {name: [value] for name, value in times.items()}


CASE = rollout("120M bf16 b64", 400, hybrid=[2.0, 1.0, 4.0], hf=[8.0], vllm=[3.0])
MODES = {"sequences": 4, "new_tokens": 10, "prompt_length": 5, "rounds": 1, "dtype": "f32", "shape": "10M"}
RANK = {"seconds": {"rollout": 2.0, "train": 3.0}, "tokens": 50, "planned": 2**20, "measured": 2**21}
TURNS = {"title": "turns", "unit": "s", "more_is_better": False, "share_of": "computed"}
GPU_ROW = {
    "code": "c",
    "case": "7B bf16 b64 prompt 512",
    "kind": "rollout",
    "rows": 64,
    "note": "",
    "prefill_flops": 1e14,
}
GPU_ROW |= {"prefill_s": [1.0], "step_bytes": 1e9, "rates": {"gemm_flops_per_s": 2e14, "copy_bytes_per_s": 4e12}}
# By the name of the run; the figures are such that what follows from them is seen at once.
INVENTED = {
    "rollout": {"cases": [CASE], "contenders": {"vllm": "vllm 9.8.7 _C.abi3.so"}},
    "rollout-long": {"cases": [rollout("120M bf16 b1 prompt 8192", 9, hybrid=[3.0], hf=[9.0], vllm=[6.0])]},
    "trl_step": {
        "title": "7M parameters, f32; 16 sequences per rank in groups of 8; 1 round",
        "contenders": {page.TRL[1]: step(6.0), page.TRL[0]: step(2.0), page.PACKED_TRL[0]: step(1.2)},
    },
    "training-120M": {
        "shape": "qwen3_5",
        "title": "125M parameters",
        "cases": [
            {
                "group": 8,
                "prompt_len": 3,
                "completion_len": 4,
                "contenders": forwards(padded=5.0, packed=2.0, exact=2.5),
            }
        ],
    },
    "modes-10M": {
        "parameters": 7e6,
        "args": MODES,
        "results": ways("pinned", "streaming", "ZeRO-3 that keeps all + Hugging Face", "plain ZeRO-3 Hugging Face"),
    },
    "tp-10M-f32": {"parameters": 7e6, "args": MODES, "results": ways("pinned", "tensor parallel", "pinned, native")},
    "inference-b1": {
        "args": {"rows": 1, "prompt_len": 10, "new_tokens": 11, "shape": "120M", "dtype": "bf16"},
        "seconds": {"fused": {"prefill": [1.0], "decode": [2.0]}, "hf": {"prefill": [3.0], "decode": [10.0]}},
    },
    "serving-120M": {
        "args": {"shape": "120M", "dtype": "bf16", "rows": 32},
        "agents": [
            {
                "rate": 8.0,
                "results": {name: latencies(rate) for name, rate in (("hybrid", 600.0), ("vllm", 400.0))},
            }
        ],
        "overhead": {"rollout": [200.0, 100.0, 400.0], "endpoint": [150.0]},
    },
    "overhead": {
        "windows": [{"layers": 8, "modules": 9, "hooks": 7, "empty_ms": [3.0, 1.25], "gather_ms": [50.0]}],
        "plans": [{"shape": "7M", "way": "LoRA, merged", "planned": 3 * 2**20, "peak": 2 * 2**20}],
    },
    "real_size-fused": {"args": {"containers": "fused"}, "ranks": [RANK, RANK]},
    "rollout_features-turns": {
        **TURNS,
        "measured": {"computed again": [4.0], "from the KV cache": [0.5]},
        "shares": {"computed again": [1.0], "from the KV cache": [0.25]},
    },
    "speculation": {"cases": {"greedy": {"without": {"tail": [3.0, 2.0]}, "speculating": {"tail": [1.0, 1.0]}}}},
    "demo_seeds": {
        "summaries": {
            str(seed): {
                "gold_score_before": 0.25,
                "gold_score_after": 0.5 + seed / 4,
                "grpo_exact_match_before": 0.125,
                "grpo_exact_match_after": 0.75,
                "tokens_per_second": 100.0 * seed,
            }
            for seed in range(2)
        }
    },
    "trl_sums": {
        "ways": {
            "TRL's GRPOTrainer": [{"rewards": [0.25] * 10 + [0.75] * 10, "exact_match": match} for match in (0.5, 0.75)]
        }
    },
    "stories": {
        "runs": {
            "full": [
                [{"objective/scores": score, "objective/kl": 4.0, "completions/ref_nll": 0.0}] * 5
                + [{"objective/scores": score + 2, "objective/kl": 4.0, "completions/ref_nll": 0.0}] * 5
                for score in (1.0, 1.0)
            ]
        }
    },
    "gpu": {
        "runs": [{"hardware": "G1", "copy_bytes_per_s": 4e12, "gemm_flops_per_s": 2e14, "versions": {}, "commit": ""}],
        "rows": [
            {**GPU_ROW, "contender": "hybrid", "step_s": [0.001]},
            {**GPU_ROW, "contender": "hf-static", "step_s": [0.003]},
            {**GPU_ROW, "contender": "hf-static", "step_s": [0.9], "code": "earlier code"},
        ],
        "not_measured": [],
    },
}
INVENTED["gpu"]["runs"][0]["code"] = "c"


@pytest.fixture
def root(tmp_path) -> Path:
    """A repository with README.md and docs/, and a folder of invented results."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    for run, figures in INVENTED.items():
        write(tmp_path, run, figures)
    return tmp_path


def write(root: Path, run: str, figures: dict, **more) -> None:
    machine = MACHINE | ({"gpu": "G1", "name": "g1"} if run == "gpu" else {})
    about = {**ABOUT, "benchmark": run.partition("-")[0], "command": f"measure {run}", "machine": machine}
    (root / "results" / f"{run}-{machine['name']}.json").write_text(
        json.dumps({"args": {}, **about, **figures, **more})
    )


def run(root: Path, *flags: str) -> None:
    page.main(["--root", str(root), "--results", str(root / "results"), *flags])


def test_every_figure_is_that_of_the_files(root):
    run(root)
    text, readme = ((root / name).read_text() for name in ("docs/benchmarks.md", "README.md"))
    for line in (
        "| 120M bf16 b64 | 200 (100–400) | 50 | 133 | 4.00 | 1.50 | 75% |",  # 400 tokens in 2 s, 8 s and 3 s
        "| 120M bf16 b1 prompt 8192 | 3.0 | 1.5 | 2.00 | 0.5 | 0.5 |",
        "| hybrid.install() | 2.00 | 1.00 | 3.00 | 3.00 |",
        "7M parameters, f32; 4 sequences a rank, 5 + 10 tokens; 1 rounds in turns:",
        "| streaming | 0.50 | 25.0% | 1 | 40 | 2.00 |",  # 80 tokens of both ranks in 2 s; the last way takes 4 s
        "| 7M, f32 | 80 | 40 | 0.50 | – | – |",
        "| 120M bf16, 1 × 10 | fused | 10 | 3.00 | 5 | 5.00 |",
        "| 120M bf16 | 8 | this engine | 600 | 1.50 | 250 | 500 | 4.0 | 8.0 |",
        "| 120M bf16 | 8 | `vllm serve` | 400 | 1.00 | 250 | 500 | 4.0 | 8.0 |",
        "| 120M bf16, 32 rows | endpoint | 150 | 0.75 |",
        "| 8 layers, 9 modules, 7 hooks of DeepSpeed | 1.2 | 50.0 |",
        "| 7M, LoRA, merged | 3.0 | 2.0 | 1.50 |",
        "| rollout, tokens/s | 50.0 |",  # both ranks' 100 tokens in 2 s
        "| measured, of each rank | 2, 2 |",
        "| from the KV cache | 0.500 | 8.00 | 25.0% |",
        "| greedy, tail | 2.500 (2.000–3.000) | 1.000 | 2.50 (2.00–3.00) |",
        "| gold_score_after | 0.625 ± 0.12 | ± 0.35 | – | 0.5 | 0.75 |",
        "| trainer | reward 1–5 | reward 6–10 | reward 11–15 | reward 16–20 | last 10 | held-out exact match | "
        "of each seed |",
        "| TRL's GRPOTrainer | 0.250 ± 0.000 | 0.250 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.000 | "
        "0.625 ± 0.177 | 0.500, 0.750 |",
        "| full | 1.00 | 3.00 | 2.00 ± 0.00 | 4.0, 4.0 nats a sequence | 1.00, 1.00 |",
        "| 7B bf16 b64 prompt 512 | hybrid | 1000.00 (1000.00–1000.00) | 50% | 1.00 (1.00–1.00) | 25% | 64000 |  |",
        "| tokens a second of rollouts | Hugging Face's `generate`, whole model | 4.00 | An Abacus, AVX2 |",
        "| rollouts under ZeRO-3, whole weights | ZeRO-3 that keeps all | 3.00 | An Abacus, AVX2 |",
        "| the same | ZeRO-3 that keeps a seventh | 4.00 | An Abacus, AVX2 |",
        "| the same, a layer at a time | the same | 2.00 | An Abacus, AVX2 |",
        "| memory of the plan | the peak of live tensors | 1.50 | An Abacus, AVX2 |",
        "| the same, 0.5B | the peak of the process's memory | 0.50 | An Abacus, AVX2 |",
        "*vLLM* is vllm 9.8.7 for CPUs",
        "*An Abacus (avx2), 2 cores, 2 ranks, 1 thread; load 0.2 to 1.5; `hybrid/` at abc1234; 2030-01-02; "
        "`measure rollout`.*",
    ):
        assert line in text, line
    assert "{{" not in text and "tokens_per_second" not in text
    for line in (
        "| what | this engine | compared with | on |",
        "| rollouts, 120M bf16, 64 rows | 200 tokens/s | 4.00 × Hugging Face's `generate`, 1.50 × vLLM for CPUs | "
        "An Abacus, AVX2 |",
        "| rollouts, 120M bf16, 16 rows | not measured | – | – |",
        "| rollouts, 7B bf16, 64 rows, prompts of 512 tokens | 64000 tokens/s | "
        "3.00 × Hugging Face's `generate`, static cache | G1 |",
        "| GRPO step in TRL, 7M, 16 rows in groups of 8 | plain 2.0 s, packed 1.2 s | TRL's default 6.0 s | "
        "An Abacus, AVX2 |",
        "| forward and backward, qwen3_5, groups of 8, 3 + 4 tokens, one round | packed 2.0 s, exact 2.5 s | "
        "plain 5.0 s | An Abacus, AVX2 |",
        "| PPO: gold score, 0 to 1 | 0.25 ± 0.00 | 0.62 ± 0.12 |",
    ):
        assert line in readme, line


def test_without_results_the_page_says_so(root):
    for path in (root / "results").glob("*.json"):
        path.unlink()
    run(root)
    text, readme = ((root / name).read_text() for name in ("docs/benchmarks.md", "README.md"))
    computed = ("in_short", "vllm", "roofline_anchors", "roofline_steps", "roofline_iterations")
    places = [place for place in page.PLACE.findall(page.TEMPLATE.read_text()) if place not in computed]
    assert text.count("*Not measured.*") == len(places) > 10 and "| tokens a second of rollouts |" in text
    assert "| GRPO: exact match on sums that it has not seen | not measured | not measured |" in readme
    assert "| GRPO step in TRL | not measured | – | – |" in readme
    assert not (root / "docs" / "rollout.png").exists()


def test_every_machine_is_shown_and_earlier_code_comes_last(root):
    older = json.loads((root / "results" / "rollout-abacus.json").read_text())
    older["machine"] = MACHINE | {"name": "slate", "cpu": "A Slate"}
    older |= {"note": "earlier code", "date": "2031-01-01"}
    (root / "results" / "rollout-slate.json").write_text(json.dumps(older))
    assert [result["machine"]["name"] for result in Results.read(root / "results").of("rollout")] == ["abacus", "slate"]
    run(root)
    readme = (root / "README.md").read_text()
    assert "| An Abacus, AVX2 |" in readme and "A Slate" not in readme, "README has figures of the present code alone"
    assert (root / "docs" / "benchmarks.md").read_text().count("| 120M bf16 b64 | 200 (100–400) |") == 2


def test_a_caption_says_which_rows_were_measured_when(root):
    tp = INVENTED["tp-10M-f32"]
    write(root, "tp-10M-bf16", {**tp, "args": {**MODES, "dtype": "bf16"}}, date="2020-01-01", source="an earlier page")
    run(root)
    captions = [line for line in (root / "docs" / "benchmarks.md").read_text().splitlines() if "measure tp-" in line]
    assert len(captions) == 2
    for line, run_name, date in zip(sorted(captions), ("bf16", "f32"), ("2020-01-01", "2030-01-02"), strict=True):
        assert f"measure tp-10M-{run_name}" in line and date in line
        assert ("an earlier page" in line) == (run_name == "bf16")


def test_a_missing_figure_names_the_file_and_the_key(root):
    write(
        root, "rollout", {"cases": [{"name": "120M bf16 b64", "tokens": 1, "results": {"hybrid": {"seconds": [1.0]}}}]}
    )
    message = r"rollout-abacus.json: cases\[0\]: results: hybrid: no 'roofline', only 'seconds'"
    with pytest.raises(KeyError, match=message):
        run(root)


def test_a_file_must_be_named_after_its_machine(root):
    (root / "results" / "rollout-other.json").write_text((root / "results" / "rollout-abacus.json").read_text())
    with pytest.raises(ValueError, match="measured on 'abacus'; the file must be called <run>-abacus.json"):
        run(root)


def check(root: Path, capsys) -> str:
    """What `--check` prints; "" if it found no difference."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(root, "--check")
    printed = capsys.readouterr().out.strip()
    assert ended.value.code == bool(printed)
    return printed


def test_check_detects_a_changed_figure(root, capsys):
    run(root)
    assert check(root, capsys) == ""
    text = (root / "docs" / "benchmarks.md").read_text()
    (root / "docs" / "benchmarks.md").write_text(text.replace("200 (100–400)", "201 (100–400)"))
    changed = check(root, capsys)
    assert "-| 120M bf16 b64 | 201 (100–400) |" in changed and "+| 120M bf16 b64 | 200 (100–400) |" in changed
    run(root)
    readme = (root / "README.md").read_text()
    (root / "README.md").write_text(readme.replace("| 4.00 × Hugging", "| 4.10 × Hugging"))
    assert "-| rollouts, 120M bf16, 64 rows | 200 tokens/s | 4.10 × Hugging Face's `generate`, 1.50 × vLLM" in check(
        root, capsys
    )
    run(root)
    write(root, "rollout", {"cases": [{**CASE, "name": "120M bf16 b16"}]})
    assert "rollout.png: drawn from other results" in check(root, capsys)


def test_the_repositorys_pages_are_what_its_results_give(capsys):
    with pytest.raises(SystemExit) as ended:
        page.main(["--check"])
    assert ended.value.code == 0, f"run `make bench-page`:\n{capsys.readouterr().out}"


def test_the_readme_calls_gpus_unmeasured_as_long_as_they_are():
    assert ("Its speed on GPUs is unmeasured" in (ROOT / "README.md").read_text()) == (not Results.read().of("gpu"))


def test_the_readme_counts_the_models_of_their_page(root):
    run(root)
    classes, fused, native = re.search(
        r"(\d+) classes: (\d+) fused, (\d+) native", (ROOT / "docs" / "models.md").read_text()
    ).groups()
    assert f" | {fused} of {classes} | {native} run natively | " in (root / "README.md").read_text()


def test_readme_needs_its_blocks(root):
    (root / "README.md").write_text("<!-- benchmarks.page: demo -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="blocks \\['demo'\\]; needed once each: numbers, demo"):
        run(root)


def test_an_unknown_place_is_an_error(root):
    with pytest.raises(ValueError, match="unknown place 'rollout'; allowed: in_short, rollouts"):
        page.filled("{{ rollout rollout }}", Results({}))


def test_every_run_of_the_suite_is_on_the_page():
    places = [place.split()[1:] for place in page.PLACE.findall(page.TEMPLATE.read_text())]
    prefixes = [place[0] for place in places if place]
    assert [run.name for run in RUNS if not any(run.name.startswith(prefix) for prefix in prefixes)] == []
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_every_result_of_the_repository_says_where_it_is_from():
    there = [Figures(json.loads(path.read_text()), path.name) for path in RESULTS.glob("*.json")]
    assert there
    for result in there:
        assert result["command"] and result["date"] and result["machine"]["cores"] and captions(result)
        assert result.get("source") or (result["commit"] and result["versions"]), f"{result.where}: no commit"


# Writing


def test_a_result_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    arguments = ["--cases", "a b", "--output", str(tmp_path / "x.json"), "--rounds", "2"]
    result = results.begin(
        "modes", argparse.Namespace(rounds=2, output=tmp_path / "x.json", model=Path("m")), arguments
    )
    assert result["command"] == "OMP_NUM_THREADS=3 python -m benchmarks.modes --cases 'a b' --rounds 2"
    assert result["args"] == {"rounds": 2, "model": "m"}
    results.write(tmp_path / "new" / "x.json", {**result, "seconds": [1.0]})
    written = json.loads((tmp_path / "new" / "x.json").read_text())
    assert written["seconds"] == [1.0] and written["versions"]["torch"] and len(written["machine"]["load"]) == 2
    assert os.listdir(tmp_path / "new") == ["x.json"]
    results.write(None, result)


def test_names_of_machines():
    assert cpu_name("AMD EPYC", ["avx2", "avx512f"]) == "epyc-avx512"
    assert cpu_name("Intel(R) Xeon(R) Platinum 8481C", ["avx2", "avx512f", "amx_bf16"]) == "xeon-amx"
    assert cpu_name("Apple M4 Pro", []) == "apple-m4-pro"


def test_a_spread_of_lost_measurements():
    known = Spread.of({"median": 2.0, "min": 1.0, "max": 4.0})
    assert known == Spread.of([4.0, 1.0, 2.0]) and known.per(8).show(".0f") == "4 (2–8)"
    assert Spread.of([2.0]).show() == "2.00"
