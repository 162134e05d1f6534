"""The real-size benchmark, tiny: every phase has a time, and the containers are printed."""

import json
import re
from pathlib import Path

import pytest

from tests.rank_pool import run_script

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("rollout", "score, policy", "score, base", "train")


@pytest.mark.slow
@pytest.mark.parametrize("containers", ["fused", "native"])
def test_every_phase_of_a_step_is_measured(containers, tmp_path):
    flags = (
        f"--shape micro --sequences 8 --num_generations 2 --prompt_length 9 --new_tokens 5 --containers {containers}"
        f" --output {tmp_path}/step.json"
    )
    path = {"PYTHONPATH": str(ROOT)}
    done = run_script(["-m", "benchmarks.real_size", *flags.split()], 2, timeout_s=300, env=path)
    assert done.returncode == 0, done.stdout[-4000:]
    reason = "none" if containers == "fused" else "rollout.containers=native"
    assert f"coverage: {containers}; fallback_reason: {reason}" in done.stdout
    assert float(re.search(r"tokens/s of the rollout: ([\d.]+); loss -?\d+\.\d+$", done.stdout, re.M)[1]) > 0
    seconds = dict(re.findall(r"^\| ([^|]+) \| (\d+\.\d) \|$", done.stdout, re.M))
    assert set(PHASES) <= set(seconds)
    assert len(re.findall(r"^\| [01] \| \d+ \| -?\d+ \| -?[\d.]+ \|$", done.stdout, re.M)) == 2, (
        "the memory line of a rank is missing"
    )
    ranks = json.loads((tmp_path / "step.json").read_text())["ranks"]
    assert [rank["tokens"] for rank in ranks] == [20, 20] and all(set(PHASES) == set(rank["seconds"]) for rank in ranks)
