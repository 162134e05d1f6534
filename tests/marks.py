"""Marks: which cases of a parametrised test run by default."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """pytest's parameters for `cases` (tuples for several arguments); those that are not in `quick` are slow."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"{[case for case in quick if case not in cases]}: no cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else pytest.mark.slow)
        for case in cases
    ]
