"""The benchmark of the training forward: contenders differentiate the same rows, and the table has a row for each."""

import importlib.util

import pytest

from benchmarks import tables

NAMES = ["padded", *["TRL"] * (importlib.util.find_spec("trl") is not None), "packed", "exact"]


@pytest.mark.slow
def test_every_contender_has_a_row(measure):
    flags = "--shape micro --sequences 4 --groups 2 --prompts 8 --completions 4 --rounds 1 --memory"
    printed, report = measure("training", flags)
    (case,) = report["cases"]
    assert list(case["contenders"]) == NAMES
    for name, way in case["contenders"].items():
        assert f"| micro | 2 | 8 | 4 | {name} |" in printed, printed[-4000:]
        assert way["peak_bytes"] > 0 and len(way["seconds"]) == 1
    assert case["contenders"]["exact"]["kl"] == 0.0 and 0.0 <= case["contenders"]["packed"]["kl"] < 1e-5
    # 2 prompts of 8 tokens once, and 3 of the 4 tokens of each of 4 completions.
    assert case["contenders"]["packed"]["token_ratio"] == pytest.approx(4 * 12 / (2 * 8 + 4 * 3))


def test_the_table():
    padded = {"seconds": [8.0, 9.0, 7.0], "token_ratio": 1.0, "peak_bytes": None, "kl": 3e-7}
    exact = {"seconds": [1.0, 3.0, 2.0], "token_ratio": 4.5, "peak_bytes": 3 * 2**20, "kl": 0.0}
    case = {"group": 8, "prompt_len": 512, "completion_len": 64, "contenders": {"padded": padded, "exact": exact}}
    _, _, *rows = tables.training({"shape": "10M", "cases": [case]})
    assert rows == [
        "| 10M | 8 | 512 | 64 | padded | 8.00 (7.00–9.00) | 1.00 | 1.00 | – | 3.0e-07 |",
        "| 10M | 8 | 512 | 64 | exact | 2.00 (1.00–3.00) | 4.00 | 4.50 | 3 | 0.0 |",
    ]
