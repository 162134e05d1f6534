"""Benchmarks against TRL's trainer: every contender trains, and the tables have a row for each."""

import importlib.util
import re
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import plot, tables, trl_sums
from tests.rlhf_examples.test_demos import ROOT

NAMES = (
    "TRL's default: gather all, Hugging Face",
    "hybrid.install()",
    "hybrid.install(), TRL gathers all the same",
    "rollout_func",
    'hybrid.install(training_forward="packed")',
    'hybrid.install(training_forward="exact")',
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
def test_every_contender_has_a_row(measure, tmp_path):
    flags = "--shape micro --sequences 4 --num_generations 2 --new_tokens 3 --rounds 1 --steps 1"
    printed, report = measure("trl_step", flags, timeout_s=500)
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| [\d.]+ \| [\d.]+ \|$", printed, re.M)
    assert tuple(name for name, *_ in rows) == NAMES, printed[-4000:]
    assert all(float(generation) <= float(step) for _, step, generation in rows)
    coverages = re.findall(r"^coverage of (.*): (.*)$", printed, re.M)
    assert coverages == [(name, "fused") for name in NAMES[1:]], "TRL's defaults disable the fused decoder"
    assert report["machine"]["ranks"] == 2 and report["args"]["shape"] == "micro"
    assert [len(contender["step_s"]) for contender in report["contenders"].values()] == [1] * len(NAMES)
    plot.iteration(report).draw(tmp_path / "step.svg")
    assert "<svg" in (tmp_path / "step.svg").read_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
def test_both_trainers_start_from_one_model_and_have_the_same_budget(tmp_path, monkeypatch):
    """At a learning rate of 0 both end with the supervised model, so their evaluations, with equal keys, are equal."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    demo = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    demo["steps"]["sums"] |= {"max_steps": 20}
    demo["steps"]["grpo"] |= {"num_iterations": 4, "actor_learning_rate": 0.0}
    demo["steps"]["exported"] |= {"eval_rows": 32, "eval_num_generations": 2}
    ways = trl_sums.run(0, demo, tmp_path)
    assert [len(way["rewards"]) for way in ways.values()] == [4, 4]
    ours, theirs = ways[trl_sums.OURS], ways[trl_sums.TRL]
    assert ours["exact_match"] == theirs["exact_match"] and 0 < ours["standard_error"] < 0.2
    (_, _, first, second) = tables.trl_sums({"ways": {name: [way, way] for name, way in ways.items()}})
    assert first.startswith(f"| {trl_sums.OURS} |") and second.startswith(f"| {trl_sums.TRL} |")


def test_the_bars_have_the_medians_lengths(tmp_path):
    """A step of 8 s, half of which is generation, has two bars of the same length; one of 2 s a quarter of that."""
    slow = {"step_s": [8.0, 7.0, 9.0], "generate_s": [4.0, 3.0, 5.0]}
    fast = {"step_s": [2.0], "generate_s": [1.0]}
    contenders = {"TRL's default: gather all, Hugging Face": slow, "hybrid.install()": fast}
    figure, path = plot.iteration({"title": "7M <parameters>", "contenders": contenders}), tmp_path / "step.svg"
    figure.draw(path)
    picture = path.read_text()
    colours = "|".join(plot.COLOURS[name] for name in ("generation", "logprobs, loss, backward, optimizer step"))
    corners = re.findall(
        rf'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*" clip-path[^>]* style="fill: (?:{colours})', picture
    )
    widths = [float(right) - float(left) for left, right in corners]
    assert widths == pytest.approx([widths[0], widths[0], widths[0] / 4, widths[0] / 4], abs=0.1)
    assert "7M &lt;parameters&gt;" in picture
    ElementTree.fromstring(picture)
    dark = picture.partition("prefers-color-scheme: dark")[2].partition("</style>")[0]
    neutral = {*re.findall("(?:fill|stroke): #[0-9a-f]+", picture.replace(dark, ""))} - {
        f"fill: {c}" for c in plot.COLOURS.values()
    }
    assert neutral and all(f'[style*="{colour}"]' in dark for colour in neutral), "a colour stays as it is in the dark"
    assert figure.is_at(path) and not plot.iteration({"title": "7M", "contenders": contenders}).is_at(path)
