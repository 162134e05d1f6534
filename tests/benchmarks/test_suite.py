"""The suite of benchmarks, with a stand-in for them: what it skips, what a failure costs, and its commands."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import inference, modes, overhead, real_size, rollout, suite, trl_step
from benchmarks.results import ROOT
from benchmarks.suite import RUNS, Run
from tests.benchmarks.test_modes_benchmark import NAMES

# Stands in for a benchmark; its flags say what it does.
STAND_IN = """
import json, sys, time
flags, output = sys.argv[1], sys.argv[2]
open(output + ".partial", "w").write("half a result")
print("about to", flags)
if flags == "fail":
    sys.exit(3)
if flags == "hang":
    time.sleep(600)
json.dump({"commit": "first", "flags": flags}, open(output, "w"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the results are; runs are stand-ins."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(Run, "command", lambda run, output: [sys.executable, "-S", str(script), run.flags, str(output)])
    monkeypatch.setattr(suite, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(suite, "commit", lambda: "first")
    monkeypatch.setattr(suite, "machine", lambda: {"name": "abacus"})
    return tmp_path / "results"


def run(folder: Path, *flags: str) -> None:
    suite.main(["--directory", str(folder), *flags])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_measured_is_not_measured_again(folder, monkeypatch, capsys):
    monkeypatch.setattr(suite, "RUNS", (Run("a", "x", "measure", 1), Run("b-1", "x", "measure", 1)))
    run(folder)
    assert names(folder) == ["a-abacus.json", "b-1-abacus.json"]
    assert "a: about 1 minutes; took 0.0\n" in capsys.readouterr().out
    run(folder)
    assert "a: already measured at first\nb-1: already measured at first\n" in capsys.readouterr().out
    run(folder, "--retry", "--only", "b-1")
    printed = capsys.readouterr().out
    assert "b-1: about 1 minutes" in printed and "a:" not in printed
    monkeypatch.setattr(suite, "commit", lambda: "second")
    run(folder, "--only", "a")
    assert "a: about 1 minutes" in capsys.readouterr().out
    monkeypatch.setattr(suite, "commit", lambda: "first+")
    (folder / "a-abacus.json").write_text('{"commit": "first+"}')
    run(folder, "--only", "a")
    assert "a: about 1 minutes" in capsys.readouterr().out


def test_a_failure_costs_its_own_file(folder, monkeypatch, capsys):
    folder.mkdir()
    (folder / "a-abacus.json").write_text('{"commit": "before"}')
    runs = (
        Run("a", "x", "fail", 1),
        Run("b", "x", "hang", 1),
        Run("c", "x", "measure", 1),
        Run("d", "x", "", 1, needs="/d"),
    )
    monkeypatch.setattr(suite, "RUNS", runs)
    for limit in ("PATIENCE", "MIN_MINUTES"):
        monkeypatch.setattr(suite, limit, 1 / 60)
    with pytest.raises(
        SystemExit, match=r"^failed: a \(ended with code 3; .*a\.log\); b \(did not end within 0 minutes; "
    ):
        run(folder)
    assert names(folder) == ["a-abacus.json", "c-abacus.json"]
    assert json.loads((folder / "a-abacus.json").read_text()) == {"commit": "before"}
    assert (suite.LOGS / "a.log").read_text() == "about to fail\n"
    assert "not measured: d (needs /d)" in capsys.readouterr().out


def test_minutes_start_only_what_is_expected_to_end(folder, monkeypatch, capsys):
    monkeypatch.setattr(suite, "RUNS", (Run("long", "x", "measure", 30), Run("short", "x", "measure", 1)))
    run(folder, "--minutes", "5")
    assert names(folder) == ["short-abacus.json"]
    assert "not measured: long (takes 30 minutes)" in capsys.readouterr().out


PARSERS = {"inference": inference, "modes": modes, "overhead": overhead, "real_size": real_size, "rollout": rollout}
PARSERS["trl_step"] = trl_step


@pytest.mark.parametrize("each", RUNS, ids=lambda each: each.name)
def test_every_command_is_valid(each, tmp_path, monkeypatch):
    command = each.command(tmp_path / "x.json")
    module = command[command.index(f"benchmarks.{each.benchmark}") :]
    assert ("--nproc_per_node=2" in command) == (each.ranks == 2) and module[-2:] == [
        "--output",
        str(tmp_path / "x.json"),
    ]
    source = (ROOT / "benchmarks" / f"{each.benchmark}.py").read_text()
    for flag in re.findall(r"--\w+", " ".join(module[1:-2])):
        assert re.search(rf'"{flag}"|parser\(__doc__.*\b{flag[2:]}=', source), flag
    if each.benchmark not in PARSERS:
        return
    monkeypatch.setattr(sys, "argv", module)
    takes_arguments = each.benchmark in ("inference", "rollout")
    args = PARSERS[each.benchmark].parse(*[None] * takes_arguments)
    assert args.output == tmp_path / "x.json"
    known = {
        "modes": NAMES,
        "trl_step": ("TRL's default: gather all, Hugging Face", "hybrid.install()", "rollout_func"),
    }
    if each.benchmark in known:
        assert set(args.contenders) <= set(known[each.benchmark])
    assert shlex.join(module[1:-2]).count("{") == 0


def test_the_suite_takes_three_to_four_hours():
    assert 180 <= sum(each.minutes for each in RUNS) <= 240
