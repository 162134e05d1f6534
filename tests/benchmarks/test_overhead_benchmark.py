"""The overhead benchmark, tiny: it prints every figure, and the memory plan equals the peak."""

import re

import pytest

from benchmarks.results import ROOT
from tests.rank_pool import run_script


@pytest.mark.slow
def test_every_figure_is_printed(measure):
    flags = "--layers 2 --turns 2 --shapes tiny 7M"
    flags += " --prompt_length 128 --new_tokens 8"
    printed, result = measure("overhead", flags)
    assert re.search(r"2 layers with LoRA: \d+ modules, \d+ hooks, \d+ parameters", printed)
    assert len(re.findall(r"ms of processor time", printed)) == 2
    shares = [float(share) for share in re.findall(r"^7M .*: ([\d.]+)$", printed, re.MULTILINE)]
    assert len(shares) == 3, printed[-4000:]
    assert all(0.9 <= share <= 1.1 for share in shares), printed[-4000:]
    (window,) = result["windows"]
    assert len(window["empty_ms"]) == len(window["gather_ms"]) == 2
    plans = [plan["planned"] / plan["peak"] for plan in result["plans"] if plan["shape"] == "7M"]
    assert plans == pytest.approx(shares, abs=0.006)


def test_the_trip_of_a_plain_rollout_is_counted():
    done = run_script(
        ["-m", "benchmarks.overhead", "--trip", "--verbose"], 1, timeout_s=240, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout[-4000:]
    total = re.search(r"both stages: (\d+) files, (\d+) functions, (\d+) record types", done.stdout)
    files = re.findall(r"^(\S+\.py): (\d+) functions, (\d+) calls$", done.stdout, re.MULTILINE)
    functions = re.findall(r"^ {4} *(\d+) (\S+)$", done.stdout, re.MULTILINE)
    (records,) = re.findall(r"^record types: (.*)$", done.stdout, re.MULTILINE)
    assert [int(number) for number in total.groups()] == [len(files), len(functions), len(records.split(", "))]
    assert sum(int(calls) for _, _, calls in files) == sum(int(calls) for calls, _ in functions)
    assert re.search(r"RolloutBatch \(\S*rollout\S*\) ×\d+", records)
    assert ("4", "HybridEngine.rollout") in functions
    assert len(re.findall(r"calls per request: \d+ with 4 layers, \d+ with 16 layers", done.stdout)) == 2
