"""The page docs/upstream.md: every defect of another library that it lists is still there, and so is our workaround.

A failure that begins with "fixed" is good news: it says what may be deleted.
"""

import ast
import importlib.metadata
import platform
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankFailure, rank_context

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "upstream.md").read_text()
SOURCE = "the block"  # file name of the code in tracebacks
TIMEOUT_S = 60
NAMED = r"`((?:hybrid|rlhf_examples)/[\w/]+\.py):([\w.]+)`"
# Blocks that say nothing on other machines.
MACHINES = {"int8 products read beyond their rows": ("x86_64", "AMD64")}


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


def shown(code: str) -> tuple[str, str]:
    """Run a block: ("ends", ""), ("asserts", why) if an assertion of the block itself fails, or ("raises", why)."""
    names: dict[str, Any] = {}
    exec(compile(PREAMBLE, "the page's first block", "exec"), names)
    try:
        exec(compile(code, SOURCE, "exec"), names)
    except pytest.fail.Exception as error:  # `raises` and `warns`
        return "asserts", str(error)
    except Exception as error:
        own = isinstance(error, AssertionError) and traceback.extract_tb(error.__traceback__)[-1].filename == SOURCE
        return "asserts" if own else "raises", traceback.format_exc()
    return "ends", ""


def in_a_process(code: str) -> tuple[str, str]:
    """`shown` in a process of its own; ("dies", why) if that ends without an answer."""
    context = rank_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, code), daemon=True)
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


def answer(pipe: Any, code: str) -> None:
    """Send what `shown` returns."""
    pipe.send(shown(code))


def on_ranks(ranks: Any, code: str) -> tuple[str, str]:
    """`shown` on two ranks; of their answers the first that is not "ends"."""
    try:
        answers = ranks.run(shown, code, timeout_s=TIMEOUT_S)
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
    if platform.machine() not in MACHINES.get(defect.title, (platform.machine(),)):
        pytest.skip(f"says nothing on {platform.machine()}")
    runs = ROWS[defect.title].runs
    if runs.startswith("two ranks"):
        end, why = on_ranks(request.getfixturevalue("ranks"), defect.code)
    else:
        end, why = in_a_process(defect.code)
    result = verdict(runs, end, why)
    assert result == "shown", message(defect, result, why)


def test_a_block_whose_defect_is_gone_is_reported():
    gone = Defect("a", "torch 2.13.0", "assert 1 + 1 == 3", (("hybrid/build.py", "Builder"),), "never.")
    end, why = in_a_process(gone.code)
    assert verdict("one process", end) == "fixed"
    assert "hybrid/build.py:Builder. Until: never." in message(gone, "fixed", why)
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
