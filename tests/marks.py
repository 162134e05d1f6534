"""Marks: which cases of a parametrised test run by default, and with which versions."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import transformers
from packaging.version import Version


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """pytest's parameters for `cases` (tuples for several arguments); those that are not in `quick` are slow."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"{[case for case in quick if case not in cases]}: no cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else pytest.mark.slow)
        for case in cases
    ]


def skip_with_old_transformers(*families: str) -> None:
    """Skip a test of families whose oracle, the model's own forward, is wrong in an older transformers that we allow:
    before 5.21 Gemma 2's SDPA had no soft cap."""
    if "gemma2" in families and Version(transformers.__version__) < Version("5.21"):
        pytest.skip(f"Gemma 2's SDPA has no soft cap in transformers {transformers.__version__}")
