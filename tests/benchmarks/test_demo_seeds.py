"""The table of `benchmarks/demo_seeds.py`."""

import pytest

from benchmarks.tables import demo_seeds


def test_the_standard_error_is_over_seeds():
    """For 1, 2, 3: a standard deviation of 1, over √3; a single run lies within two of it."""
    summaries = {str(seed): {"kl": seed + 1.0, "kl_stderr": 0.5, "share": 0.25} for seed in range(3)}
    assert demo_seeds({"summaries": summaries}) == [
        "| figure | mean ± standard error | a single run | its standard error | seed 0 | seed 1 | seed 2 |",
        "|---|---|---|---|---|---|---|",
        "| kl | 2 ± 0.58 | ± 2 | 0.5 | 1 | 2 | 3 |",
        "| share | 0.25 ± 0 | ± 0 | – | 0.25 | 0.25 | 0.25 |",
    ]


def test_one_seed_raises():
    with pytest.raises(ValueError, match="seeds: 1 given; a standard error needs 2"):
        demo_seeds({"summaries": {"0": {"kl": 1.0}}})
