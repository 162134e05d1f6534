"""The inference benchmark runs, and its table has every contender with its ratio."""

import json
import re

import pytest
import torch

from benchmarks import inference
from benchmarks.inference import CONTENDERS, main, phases_of


@pytest.mark.slow
def test_the_benchmark_runs_tiny(tmp_path, capsys):
    output = tmp_path / "out.json"
    contenders = [name for name in CONTENDERS if name != "hf-compiled"]  # takes a minute to compile
    flags = "--shape micro --rows 2 --prompt_len 9 --new_tokens 24 --rounds 2 --output"
    main([*flags.split(), str(output), "--contenders", *contenders])
    text = capsys.readouterr().out
    rows = re.findall(
        r"^\| micro bf16, 2 × 9 \| ([\w-]+) \| \d+ \(\d+–\d+\) \| ([\d.]+) \| \d+ \(\d+–\d+\) \| ([\d.]+) \|$",
        text,
        re.M,
    )
    assert [name for name, *_ in rows] == contenders
    assert {name: ratio for name, ratio, _ in rows}["hf"] == "1.00"
    result = json.loads(output.read_text())
    assert result["benchmark"] == "inference" and result["args"]["rounds"] == 2
    seconds = result["seconds"]
    assert all(len(phases["decode"]) == 2 for phases in seconds.values())


def test_a_disturbed_measurement_is_repeated(monkeypatch):
    seconds = iter([2.0, 1.0, 1.0, 3.0])  # of 1 and of 8 tokens, twice
    monkeypatch.setattr(inference, "seconds_of", lambda *_: next(seconds))
    assert phases_of(None, torch.zeros(1, 1), 8) == (1.0, 2.0)
    monkeypatch.setattr(inference, "seconds_of", lambda *_: 1.0)
    with pytest.raises(RuntimeError, match="1 token took longer than 8 tokens in each of 5 tries"):
        phases_of(None, torch.zeros(1, 1), 8)
