"""The page docs/upstream.md: every defect of another library that it lists is still there, and so is our workaround.
The page docs/upstream_reports.md: every script shows its defect, and succeeds where the cause is avoided.

A failure that begins with "fixed" is good news: it says what may be deleted.
"""

import ast
import importlib.metadata
import importlib.util
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankFailure, rank_context

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "upstream.md").read_text()
SOURCE = "the block"  # file name of the code in tracebacks
TIMEOUT_S = 60
NAMED = r"`((?:hybrid|rlhf_examples)/[\w/]+\.py):([\w.]+)`"
# Blocks that say nothing on CPUs without these instructions.
NEEDS = {"int8 products read beyond their rows": "AVX512"}


@dataclass(frozen=True)
class Row:
    """A row of the table at the top.  file: of the workaround; several are separated by commas."""

    title: str
    version: str
    runs: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Defect:
    """A section of the page.  version: the library and the version.  code: shows the defect.  names: files and
    functions that work around it.  until: when they may go."""

    title: str
    version: str
    code: str
    names: tuple[tuple[str, str], ...]
    until: str

    def __str__(self) -> str:
        return self.title


def table_rows() -> list[Row]:
    """The table at the top of the page."""
    cells = re.findall(r"^\| \[(.+?)\]\(#.*?\) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.M)
    return [Row(title, version, runs, tuple(files.strip("`").split("`, `"))) for title, version, runs, files in cells]


def sections() -> list[Defect]:
    """The page's sections, with their libraries."""
    defects, version = [], ""
    for part in re.split(r"^(?=##+ )", PAGE, flags=re.M)[1:]:
        level, title = re.match(r"(#+) (.*)", part).groups()
        if level == "##":
            version = title
            continue
        (code,) = re.findall(r"```python\n(.*?)```", part, re.S)
        (ours,), (until,) = (re.findall(rf"^- {key}: (.*?)(?=^- |\Z)", part, re.M | re.S) for key in ("Ours", "Until"))
        defects.append(Defect(title, version, code, tuple(re.findall(NAMED, ours)), " ".join(until.split())))
    return defects


DEFECTS = sections()
ROWS = {row.title: row for row in table_rows()}
PREAMBLE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]


def shown(code: str, preamble: str = PREAMBLE) -> tuple[str, str]:
    """Run a block: ("ends", ""), ("asserts", why) if an assertion of the block itself fails, or ("raises", why)."""
    names: dict[str, Any] = {}
    exec(compile(preamble, "the page's first block", "exec"), names)
    try:
        exec(compile(code, SOURCE, "exec"), names)
    except pytest.fail.Exception as error:  # `raises` and `warns`
        return "asserts", str(error)
    except Exception as error:
        own = isinstance(error, AssertionError) and traceback.extract_tb(error.__traceback__)[-1].filename == SOURCE
        return "asserts" if own else "raises", traceback.format_exc()
    return "ends", ""


def in_a_process(code: str, preamble: str = PREAMBLE) -> tuple[str, str]:
    """`shown` in a process of its own; ("dies", why) if that ends without an answer."""
    context = rank_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, code, preamble), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            return "dies", f"no answer in {TIMEOUT_S} s"
        return ours.recv()
    except EOFError:
        process.join()
        return "dies", f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def answer(pipe: Any, *arguments: str) -> None:
    """Send what `shown` returns."""
    pipe.send(shown(*arguments))


def on_ranks(ranks: Any, code: str, preamble: str = PREAMBLE) -> tuple[str, str]:
    """`shown` on two ranks; of their answers the first that is not "ends"."""
    try:
        answers = ranks.run(shown, code, preamble, timeout_s=TIMEOUT_S)
    except RankFailure as failure:
        return "dies", str(failure)
    return next((answer for answer in answers if answer[0] != "ends"), ("ends", ""))


def verdict(runs: str, end: str, why: str = "") -> str:
    """Whether a block that should run as `runs` says, and ended by `end`, has shown the defect: "shown", "fixed", or
    "unclear" if it does not run at all. An error that the defect itself causes is a RuntimeError: of a collective."""
    if "fails" in runs:
        is_own = end in ("dies", "asserts") or why.rstrip().rpartition("\n")[2].startswith("RuntimeError")
        return "fixed" if end == "ends" else "shown" if is_own else "unclear"
    return {"ends": "shown", "asserts": "fixed"}.get(end, "unclear")


def message(defect: Defect, result: str, why: str) -> str:
    """What to do about a defect that was not shown."""
    library = defect.version.split()[0]
    version = f"{library} {importlib.metadata.version(library.lower())}"
    if result == "unclear":
        return (
            f"{version}: the block '{defect}' of docs/upstream.md does not run; see whether the defect is left\n{why}"
        )
    ours = ", ".join(":".join(name) for name in defect.names)
    return (
        f"fixed: '{defect}' does not show with {version}. Workaround: {ours}. Until: {defect.until} Then delete its "
        f"row and section of docs/upstream.md too, or move it to those that an older version needs.\n{why}"
    )


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_the_defect_is_still_there(defect, request):
    if NEEDS.get(defect.title, "") not in (capability := torch.backends.cpu.get_cpu_capability()):
        pytest.skip(f"says nothing on a CPU with {capability}")
    runs = ROWS[defect.title].runs
    if runs.startswith("two ranks"):
        end, why = on_ranks(request.getfixturevalue("ranks"), defect.code)
    else:
        end, why = in_a_process(defect.code)
    result = verdict(runs, end, why)
    assert result == "shown", message(defect, result, why)


def test_a_block_whose_defect_is_gone_is_reported():
    gone = Defect("a", "torch 2.13.0", "assert 1 + 1 == 3", (("hybrid/training/builder.py", "Builder"),), "never.")
    end, why = in_a_process(gone.code)
    assert verdict("one process", end) == "fixed"
    assert "hybrid/training/builder.py:Builder. Until: never." in message(gone, "fixed", why)
    assert in_a_process("with raises(ValueError): pass")[0] == "asserts"
    assert in_a_process("none")[0] == "raises" and verdict("one process", "raises") == "unclear"
    assert in_a_process("os._exit(3)") == ("dies", "exit code 3")
    assert verdict("one process, fails", "ends") == "fixed" and verdict("two ranks, fails", "dies") == "shown"
    for code, expected in (("raise RuntimeError('gloo')", "shown"), ("torch._renamed()", "unclear")):
        assert verdict("two ranks, fails", *in_a_process(code)) == expected


def test_the_table_lists_the_sections():
    assert list(ROWS) == [defect.title for defect in DEFECTS]
    assert len(ROWS) == len(table_rows()) > 20
    for defect in DEFECTS:
        row = ROWS[defect.title]
        assert row.version == defect.version
        assert row.files == tuple(dict.fromkeys(file for file, _ in defect.names)), defect
        assert row.runs in {f"{where}{how}" for where in ("one process", "two ranks") for how in ("", ", fails")}


def test_versions_are_those_that_the_suite_runs_on():
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M)[::-1])
    for version in {defect.version for defect in DEFECTS}:
        library, number = version.split()
        assert pins[library.lower()] == number, f"{version} on the page: run its blocks, then write the new version"


def test_a_fixed_defect_is_kept_for_an_allowed_version():
    fixed, kept = re.findall(
        r"\| transformers ([\d.]+) \| .* \| `pyproject.toml` allows transformers ([\d.]+) \|", PAGE
    )[0]
    (least,) = re.findall(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert kept == least and [int(n) for n in least.split(".")] < [int(n) for n in fixed.split(".")], "delete it now"


@pytest.mark.parametrize("file, name", sorted(set(re.findall(NAMED, PAGE))))
def test_the_workaround_exists(file, name):
    body = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}


REPORTS_PAGE = (ROOT / "docs" / "upstream_reports.md").read_text()
REPORTS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", REPORTS_PAGE, re.M | re.S))
FIELDS = ["Versions", "What happens", "Expected", "Cause", "Suggested fix", "Workaround"]
# For each report: lines of its script that avoid the cause, so that the script succeeds.
AVOIDED = {
    "ZeRO-3 engines stay in memory after `destroy()`": (
        "engine.destroy()\n",
        "engine.destroy()\n__import__('hybrid.training.engine').training.engine.drop_global_references(model())\n",
    ),
    "`initialize` fails for a head added after `zero.Init`": ("Linear(8, 1)", "Linear(8, 1).to(torch.bfloat16)"),
    "MoE with expert parallelism hangs if ranks have different numbers of tokens": ("4 + 60 *", "64 + 0 *"),
    "GRPO with tools hangs under ZeRO-3 if ranks have different numbers of turns": (
        "(without_call)",
        "(with_call)",
    ),
    "`disable_dropout` leaves functional dropout on": ("dropout=0.5", "dropout=0.0"),
}


def run_report(title: str, request: Any, *avoided: str) -> tuple[str, str]:
    """How a report's script ends, as it is or with a part replaced, on the processes that the page names."""
    (script,) = re.findall(r"```python\n(.*?)```", REPORTS[title], re.S)
    if avoided:
        assert avoided[0] in script
        script = script.replace(*avoided)
    if "**Versions:** DeepSpeed" in REPORTS[title]:
        return on_ranks(request.getfixturevalue("ranks"), script, preamble="")
    return in_a_process(script, preamble="")


@pytest.mark.parametrize("title", REPORTS)
def test_the_script_of_a_report_shows_its_defect(title, request):
    end, why = run_report(title, request)
    own = end in ("dies", "asserts") or why.rstrip().rpartition("\n")[2].startswith(("AssertionError", "RuntimeError"))
    assert own, "fixed: the report is not needed" if end == "ends" else f"the script does not run\n{why}"


@pytest.mark.parametrize("title", REPORTS)
def test_the_script_of_a_report_succeeds_where_the_cause_is_avoided(title, request):
    assert run_report(title, request, *AVOIDED[title]) == ("ends", "")


@pytest.mark.parametrize("title", REPORTS)
def test_a_report_is_complete_and_quotes_installed_sources(title):
    assert re.findall(r"^\*\*(.*?):\*\*", REPORTS[title], re.M) == FIELDS
    quoted = re.findall(r"^- `(\w+)/([\w/]+\.py):(\d+)` `(.*?)`", REPORTS[title], re.M)
    assert quoted
    for package, file, number, code in quoted:
        source = Path(importlib.util.find_spec(package).origin).parent / file
        assert source.read_text().splitlines()[int(number) - 1].strip() == code, f"{package}/{file}:{number}"
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M)[::-1])
    versions = re.findall(r"(DeepSpeed|TRL|transformers|torch) (\d[\d.]*\d)", REPORTS[title].partition("**What")[0])
    assert versions and [(name, pins[name.lower()]) for name, _ in versions] == versions


def test_the_reports_page_has_five_and_lists_them():
    assert len(REPORTS) == 5 and list(AVOIDED) == list(REPORTS)
    assert re.findall(r"^\| \[(.*)\]\(#\S+\) \| (?:DeepSpeed|TRL) \|", REPORTS_PAGE, re.M) == list(REPORTS)
