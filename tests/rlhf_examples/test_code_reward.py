"""The reward `code`: programs pass or fail their tests, and none of them outlives or outgrows its limits."""

import json
import os
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_examples import code_reward, rewards
from rlhf_examples.code_reward import CodeSettings, problem_of, program_of, run_program
from tests.rlhf_examples.test_reward_server import served

LIMITS = CodeSettings(timeout_s=60.0)  # for programs that end by themselves, also on a machine under load
PROBLEM = problem_of(LIMITS)
isolated = pytest.mark.skipif(bool(PROBLEM), reason=f"programs are not cut off from the network here: {PROBLEM}")
SOLUTION = "Here it is.\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]


def passes(program: str, tests: str = "", **settings) -> bool:
    return run_program(program, tests, CodeSettings(**{"timeout_s": 60.0, **settings})) is not None


def test_solutions_pass_or_fail():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on systems without user namespaces
        reward = rewards.load_reward("code")
    completions = [SOLUTION, SOLUTION.replace("2 *", "3 *"), "def double(x): return x + x", "no program", ""]
    tests = [TESTS, TESTS, "\n".join(TESTS), TESTS, TESTS]
    assert reward([""] * 5, completions, tests=tests, source=["a"] * 5) == [1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="needs the column 'tests', which some records lack"):
        reward([""], [SOLUTION])
    with pytest.raises(ValueError, match="column tests: 7 given; it must be Python text, or a list of such texts"):
        reward([""], [SOLUTION], tests=[7])


def test_the_last_block_is_the_program():
    assert program_of("```py\na\n```\n```\nb\n```") == "b\n"
    assert program_of("a = 1") == "a = 1"


@pytest.mark.parametrize("program", ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise KeyboardInterrupt"])
def test_a_program_that_exits_before_its_tests_fails(program):
    assert not passes(program, "assert False")


def test_a_solutions_own_examples_do_not_run_and_its_dataclasses_work():
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    )
    assert passes(program + "if __name__ == '__main__':\n    input()", "assert A(1).x == 1")


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(600)"])
def test_an_endless_loop_ends_at_the_timeout(program):
    start = time.monotonic()
    assert not passes(program, timeout_s=1.0)
    assert time.monotonic() - start < 30


def test_memory_is_limited():
    assert passes("x = bytearray(100 << 20)") and not passes("x = bytearray(2 << 30)")


def test_a_flood_of_output_goes_nowhere_and_files_are_limited():
    flood = "for _ in range(2000):\n    print('x' * 10000)"
    assert passes(flood)
    file = "with open('file', 'wb') as f:\n    for _ in range(40):\n        f.write(bytes(1 << 20))"
    assert not passes(file) and passes(file.replace("40", "8"))


FORKS = """
import os, time
children = 0
try:
    while children < 100:
        if not os.fork():
            time.sleep(600)
        children += 1
except BlockingIOError:
    pass
assert 2 < children < 16, children
"""


@pytest.mark.skipif(bool(PROBLEM) and os.geteuid() != 0, reason="the limit would count all processes of this user")
def test_a_fork_bomb_meets_its_limit():
    assert passes(FORKS, processes=16)


def processes_in(directory: Path) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and str(directory) in command_line(pid)]


def command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@isolated
def test_processes_that_leave_the_group_end_with_the_program(tmp_path):
    """They have a session of their own, which a signal to the process group does not reach."""
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    command = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '{tmp_path}/sleep.py'], start_new_session=True)"
    )
    assert passes(command)
    deadline = time.monotonic() + 20
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_in(tmp_path)


@isolated
def test_the_network_is_cut_off():
    """The kernel has no route, not even to a server on this machine that listens."""
    with served(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as port:
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
        assert not passes(connect)
        caught = f"import errno, socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 5)\n"
        assert passes(caught + "except OSError as error:\n    assert error.errno == errno.ENETUNREACH")


def test_the_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert passes("import os\nassert 'API_KEY' not in os.environ and os.environ['HOME'] == os.getcwd()")
    if not PROBLEM:  # the parents' environments are files
        read = f"open('/proc/{os.getpid()}/environ').read()"
        assert passes(f"try:\n    {read}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError")


def test_a_system_without_namespaces_is_said_so(monkeypatch):
    monkeypatch.setattr(code_reward, "problem_of", lambda settings: "unshare: Operation not permitted")
    with pytest.warns(UserWarning, match=r"not cut off from the network here \(unshare: Operation not permitted\)"):
        rewards.load_reward("code")


def test_settings_are_checked(tmp_path):
    file = tmp_path / "limits.yaml"
    for settings, message in (
        ({"memory_gb": 1}, "memory_gb"),
        ({"processes": 0}, "processes: 0 given; it must be at least 1"),
        ({"timeout_s": 0.01}, "timeout_s: 0.01 given; it must be at least 0.1"),
    ):
        file.write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=message):
            rewards.load_reward(f"code:{file}")


def test_a_machine_on_which_no_program_runs_is_an_error(monkeypatch):
    monkeypatch.setattr(code_reward, "run_program", lambda *program: None)
    with pytest.raises(ValueError, match=r"an empty program failed or took longer than 10.0 s with memory_mb: 1024"):
        rewards.load_reward("code")


class Sandbox(BaseHTTPRequestHandler):
    """SandboxFusion's answers: runs the code, unless it is told to fail."""

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and job["language"] == "python" and job["run_timeout"] == 7.0
        if "broken" in job["code"]:
            answer = {"status": "SandboxError", "message": "no", "run_result": None}
        else:
            printed = job["code"].rstrip().rpartition("print(")[2].strip("')") if "2 * x" in job["code"] else "Error"
            done = {"status": "Finished", "return_code": 0, "stdout": f"noise\n{printed}\n", "stderr": ""}
            answer = {"status": "Success", "run_result": done}
        content = json.dumps([] if "other form" in job["code"] else answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def test_a_sandbox_fusion_server_runs_the_programs(tmp_path):
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Sandbox)) as port:
        file = tmp_path / "server.yaml"
        file.write_text(f"url: http://127.0.0.1:{port}/\ntimeout_s: 7\n")
        reward = {"code": rewards.load_reward(f"code:{file}")}
        completions = [SOLUTION, "x = 1", "broken"]
        scores = rewards.score_all(reward, [""] * 3, completions, {"tests": [TESTS] * 3})["code"]
        assert scores[:2] == [1, 0] and scores[2] != scores[2], "NaN: the sandbox failed, not the program"
        with pytest.raises(ValueError, match="must return SandboxFusion's answer"):
            rewards.score_all(reward, [""], ["other form"], {"tests": [TESTS]})
