"""The benchmark of TRL's step: every contender trains, and the table has a row for each."""

import importlib.util
import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import iteration_plot
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
def test_every_contender_has_a_row(tmp_path):
    flags = "--shape micro --sequences 4 --num_generations 2 --new_tokens 3 --rounds 1 --steps 1"
    flags += f" --output {tmp_path}/step.json"
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = run_script(["-m", "benchmarks.trl_step", *flags.split()], 2, timeout_s=500, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-4000:]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| [\d.]+ \| [\d.]+ \|$", done.stdout, re.M)
    assert tuple(name for name, *_ in rows) == NAMES, done.stdout[-4000:]
    assert all(float(generation) <= float(step) for _, step, generation in rows)
    coverages = re.findall(r"^coverage of (.*): (.*)$", done.stdout, re.M)
    assert coverages == [(name, "fused") for name in NAMES[1:]], "TRL's defaults disable the fused decoder"
    report = json.loads((tmp_path / "step.json").read_text())
    assert report["machine"]["ranks"] == 2 and report["args"]["shape"] == "micro"
    assert [len(contender["step_s"]) for contender in report["contenders"].values()] == [1] * len(NAMES)
    iteration_plot.main([str(tmp_path / "step.json"), "--output", str(tmp_path / "step.svg")])
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_the_bars_have_the_medians_lengths():
    """A step of 8 s, half of which is generation, has two bars of the same length; one of 2 s a quarter of that."""
    slow = {"step_s": [8.0, 7.0, 9.0], "generate_s": [4.0, 3.0, 5.0]}
    fast = {"step_s": [2.0], "generate_s": [1.0]}
    contenders = {"TRL's default: gather all, Hugging Face": slow, "hybrid.install()": fast}
    picture = iteration_plot.picture({"title": "7M <parameters>", "contenders": contenders})
    widths = [
        float(width)
        for width in re.findall(
            r'class="(?:generation|training)" x="[\d.]+" y="\d\d+" width="([\d.]+)" height="26"', picture
        )
    ]
    assert widths == pytest.approx([widths[0], widths[0], widths[0] / 4, widths[0] / 4], abs=0.1)
    assert "7M &lt;parameters&gt;" in picture
    ElementTree.fromstring(picture)
