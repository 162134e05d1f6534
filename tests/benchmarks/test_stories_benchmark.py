"""The tables of `benchmarks/stories.py`."""

import pytest

from benchmarks.tables import rise


def run(first: float, last: float, iterations: int = 20) -> list[dict[str, float]]:
    return [{"objective/scores": first if number < iterations / 2 else last} for number in range(iterations)]


def test_the_standard_error_is_over_seeds():
    """For rises of 1, 2, 3: a standard deviation of 1 over √3, for any number of iterations."""
    for iterations in (10, 1000):
        runs = [run(5.0, 6.0, iterations), run(0.0, 2.0, iterations), run(-1.0, 2.0, iterations)]
        assert rise(runs) == pytest.approx((2.0, 1 / 3**0.5))


def test_one_seed_raises():
    with pytest.raises(ValueError, match="seeds: 1 given; a standard error needs 2"):
        rise([run(0.0, 1.0)])
