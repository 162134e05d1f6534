"""The pages in docs/jobs/: their code runs, on tiny models, and gives what the pages say."""

import contextlib
import functools
import io
import re
import sys
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

import hybrid
from tests.rlhf_examples.scripts import make_small_models

JOBS = Path(__file__).resolve().parents[1] / "docs" / "jobs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (JOBS / f"{page}.md").read_text(), re.S)


def patched(code: str, diff: str) -> str:
    """`code` with the change of a diff, whose context must be in it exactly once."""
    lines = diff.splitlines()
    assert all(line[:1] in "+- " for line in lines)
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    assert code.count(old) == 1, old
    return code.replace(old, new)


@contextlib.contextmanager
def command_line(*arguments: str):
    """Inside the block a script's arguments are these."""
    before, sys.argv = sys.argv, ["script.py", *arguments]
    try:
        yield
    finally:
        sys.argv = before
        hybrid.uninstall()


def run_script(code: str, *arguments: str) -> tuple[dict, str]:
    """The names that a script defines, and what it prints."""
    names, output = {"__name__": "__main__"}, io.StringIO()
    with command_line(*arguments), contextlib.redirect_stdout(output):
        exec(compile(code, "script", "exec"), names)
    return names, output.getvalue()


# DeepSpeed-Chat


def check_deepspeed_chat(model: str) -> None:
    (script,) = blocks("deepspeed_chat", "python")
    assert 55 < len(script.splitlines()) < 70
    *two_lines, second = blocks("deepspeed_chat", "diff")
    # Without DeepSpeed's own hybrid engine, which needs a GPU, and greedy, so that the runs can be compared.
    disabled = script.replace('"enabled": True', '"enabled": False')
    scripts = {"before": disabled, "installed": functools.reduce(patched, two_lines, script)}
    scripts["rollout"] = patched(scripts["installed"], second)
    losses = {}
    for name, code in scripts.items():
        greedy = code.replace("do_sample=True", "do_sample=False").replace("temperature=1.0", "temperature=0.0")
        assert greedy != code
        names, output = run_script(greedy, model)
        assert type(names["actor"]) is (DeepSpeedEngine if name == "before" else hybrid.HybridEngine)
        assert type(names["reference"]) is DeepSpeedEngine
        losses[name] = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
        if name != "before":
            assert {row["container"] for row in names["actor"].coverage()} == {"fused"}
            assert names["actor"].stats()["tokens"] > 0 and names["actor"].stats()["fallback_reason"] == ""
            assert names["actor"].weight_version == 3
    assert len(losses["before"]) == 3 and len(set(losses["before"])) == 3
    for name in ("installed", "rollout"):
        assert losses[name] == pytest.approx(losses["before"], abs=2e-5), losses  # float32, other order of sums


def test_the_deepspeed_chat_script_trains_alike_before_and_after(ranks, tmp_path):
    ranks.run(check_deepspeed_chat, str(make_small_models(tmp_path) / "model"))
