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
    rows = re.findall(r"^\| ([\w-]+) \| \d+ \(\d+–\d+\) \| ([\d.]+) \| \d+ \(\d+–\d+\) \| ([\d.]+) \|$", text, re.M)
    assert [name for name, *_ in rows] == contenders
    assert {name: ratio for name, ratio, _ in rows}["hf"] == "1.00"
    seconds = json.loads(output.read_text())["seconds"]
    assert all(len(phases["decode"]) == 2 for phases in seconds.values())
