"""The benchmark of TRL's step: every contender trains, and the table has a row for each."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.rank_pool import run_script

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "TRL's default: gather all, Hugging Face",
    "hybrid.install()",
    "hybrid.install(), TRL gathers all the same",
    "rollout_func",
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
def test_every_contender_has_a_row():
    flags = "--shape micro --sequences 4 --num_generations 2 --new_tokens 3 --rounds 1 --steps 1"
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = run_script(["-m", "benchmarks.trl_step", *flags.split()], 2, timeout_s=500, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-4000:]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \(.*\) \| ([\d.]+) \(.*\) \| [\d.]+ \| [\d.]+ \|$", done.stdout, re.M)
    assert tuple(name for name, *_ in rows) == NAMES, done.stdout[-4000:]
    assert all(float(generation) <= float(step) for _, step, generation in rows)
    coverages = re.findall(r"^coverage of (.*): (.*)$", done.stdout, re.M)
    assert coverages == [(name, "fused") for name in NAMES[1:]], "TRL's defaults disable the fused decoder"
