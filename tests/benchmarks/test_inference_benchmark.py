"""The inference benchmark runs, and its table has every contender with its ratio."""

import json
import re

import pytest

from benchmarks.inference import CONTENDERS, main


@pytest.mark.slow
def test_the_benchmark_runs_tiny(tmp_path, capsys):
    output = tmp_path / "out.json"
    contenders = [name for name in CONTENDERS if name != "hf-compiled"]  # takes a minute to compile
    flags = "--shape micro --rows 2 --prompt_len 9 --new_tokens 24 --rounds 2 --output"
    main([*flags.split(), str(output), "--contenders", *contenders])
    text = capsys.readouterr().out
    # On a busy machine a prompt may take longer than the same prompt with 23 more tokens: the difference is negative.
    rates, ratio = r"-?\d+ \(-?\d+–-?\d+\)", r"(-?[\d.]+)"
    rows = re.findall(rf"^\| ([\w-]+) \| {rates} \| {ratio} \| {rates} \| {ratio} \|$", text, re.M)
    assert [name for name, *_ in rows] == contenders
    assert {name: ratio for name, ratio, _ in rows}["hf"] == "1.00"
    seconds = json.loads(output.read_text())["seconds"]
    assert all(len(phases["decode"]) == 2 for phases in seconds.values())
