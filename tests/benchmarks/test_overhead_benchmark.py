"""The overhead benchmark, tiny: it prints every figure, and the memory plan equals the peak."""

import json
import re
from pathlib import Path

import pytest

from tests.rank_pool import run_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_figure_is_printed(tmp_path):
    output = tmp_path / "overhead.json"
    flags = f"--output {output} --layers 2 --turns 2 --rows 40 --tokens 300 --shapes tiny 7M"
    flags += " --prompt_length 128 --new_tokens 8"
    done = run_script(["-m", "benchmarks.overhead", *flags.split()], 2, timeout_s=300, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"2 layers with LoRA: \d+ modules, \d+ hooks, \d+ parameters", done.stdout)
    assert len(re.findall(r"ms of processor time", done.stdout)) == 3
    shares = [float(share) for share in re.findall(r"^7M .*: ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(shares) == 3, done.stdout[-4000:]
    assert all(0.9 <= share <= 1.1 for share in shares), done.stdout[-4000:]
    result = json.loads(output.read_text())
    (window,) = result["windows"]
    assert len(window["empty_ms"]) == len(window["gather_ms"]) == 2
    plans = [plan["planned"] / plan["peak"] for plan in result["plans"] if plan["shape"] == "7M"]
    assert plans == pytest.approx(shares, abs=0.006)
