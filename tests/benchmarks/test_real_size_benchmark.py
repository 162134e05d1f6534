"""The real-size benchmark, tiny: every phase has a time, and the containers are printed."""

import re

import pytest

PHASES = ("rollout", "score, policy", "score, base", "train")


@pytest.mark.slow
@pytest.mark.parametrize("containers", ["fused", "native"])
def test_every_phase_of_a_step_is_measured(containers, measure):
    flags = (
        f"--shape micro --sequences 8 --num_generations 2 --prompt_length 9 --new_tokens 5 --containers {containers}"
    )
    printed, result = measure("real_size", flags)
    reason = "none" if containers == "fused" else "rollout.containers=native"
    assert f"coverage: {containers}; fallback_reason: {reason}" in printed
    assert float(re.search(r"tokens/s of the rollout: ([\d.]+); loss -?\d+\.\d+$", printed, re.M)[1]) > 0
    seconds = dict(re.findall(r"^\| ([^|]+) \| (\d+\.\d) \|$", printed, re.M))
    assert set(PHASES) <= set(seconds)
    assert len(re.findall(r"^\| [01] \| \d+ \| -?\d+ \| -?[\d.]+ \|$", printed, re.M)) == 2, (
        "the memory line of a rank is missing"
    )
    ranks = result["ranks"]
    assert [rank["tokens"] for rank in ranks] == [20, 20] and all(set(PHASES) == set(rank["seconds"]) for rank in ranks)
