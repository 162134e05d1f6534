"""Every benchmark's `--help`."""

import json
import subprocess
import sys
from pathlib import Path

import benchmarks

ROOT = Path(benchmarks.__file__).parents[1]
WITHOUT_FLAGS = ("gpu_case", "serving_clients", "vllm_worker")  # started by another benchmark, with a case as JSON
PROGRAM = """
import contextlib, importlib, io, json, sys
for name in json.loads(sys.argv[1]):
    sys.argv, out = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main()
    print(json.dumps(out.getvalue()))
"""


def test_every_benchmark_prints_its_flags():
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    names = [path.stem for path in files if 'if __name__ == "__main__"' in path.read_text()]
    names = [name for name in names if name not in WITHOUT_FLAGS]
    assert len(names) > 12
    command = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, text in zip(names, map(json.loads, done.stdout.splitlines()[-len(names) :]), strict=True):
        assert "usage: " in text and "-h, --help" in text, name
