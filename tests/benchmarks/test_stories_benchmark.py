"""What `benchmarks/stories.py` says of its runs."""

import pytest

from benchmarks.stories import rise


def run(first: float, last: float, iterations: int = 20) -> list[dict[str, float]]:
    return [{"objective/scores": first if number < iterations / 2 else last} for number in range(iterations)]


def test_the_standard_error_is_over_seeds():
    """Of three rises 1, 2, 3: a deviation of 1 over the root of 3, however many iterations have the same score."""
    for iterations in (10, 1000):
        runs = [run(5.0, 6.0, iterations), run(0.0, 2.0, iterations), run(-1.0, 2.0, iterations)]
        assert rise(runs) == pytest.approx((2.0, 1 / 3**0.5))


def test_one_seed_has_no_standard_error():
    with pytest.raises(ValueError, match="seeds: 1 given; a standard error needs 2"):
        rise([run(0.0, 1.0)])
