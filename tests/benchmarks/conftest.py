"""Fixtures: a benchmark that runs on ranks."""

import json
import os
from collections.abc import Callable

import pytest

from benchmarks.results import ROOT
from tests.rank_pool import run_script


@pytest.fixture
def measure(tmp_path) -> Callable[..., tuple[str, dict]]:
    """Runs a benchmark by its name and flags; returns its output, and the result that it wrote."""

    def run(name: str, flags: str, timeout_s: int = 300) -> tuple[str, dict]:
        output, path = tmp_path / f"{name}.json", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        command = ["-m", f"benchmarks.{name}", *flags.split(), "--output", str(output)]
        done = run_script(command, 2, timeout_s=timeout_s, env={"PYTHONPATH": path})
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout, json.loads(output.read_text())

    return run
