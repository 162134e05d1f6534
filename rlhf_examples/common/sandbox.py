"""Run one solution and its tests with limits: `python -I sandbox.py`, which `rlhf_examples.code_reward` starts.

Standard input is a job as JSON: "solution" and "tests" (Python), "token", "cpu_s", "memory_bytes", "file_bytes" and
"processes". Standard output gets the token, and behind it why the solution was not cut off from the network, once the
solution and its tests have run without an exception. The file imports nothing of this project.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types

NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET
PR_SET_PDEATHSIG = 1
NOBODY = 65534
OPEN_FILES = 64


def main() -> None:
    """Read the job, set the limits, run the solution."""
    job = json.load(sys.stdin)
    if os.geteuid() == 0:
        os.setresuid(NOBODY, -1, -1)  # Linux limits the processes of every real user but root
    problem = isolation_problem()
    if not problem:
        run_as_first_process()
    limit(job, count_processes=not problem or os.geteuid() == 0)
    report = os.dup(1)
    silence()
    if passes(job["solution"], job["tests"]):
        os.write(report, (job["token"] + problem).encode())
    os._exit(0)  # waits for no thread of the solution


def isolation_problem() -> str:
    """Move this process into user, network and PID namespaces of its own; return why that failed, empty if it did not.

    A new network namespace has no device but a loopback that is down. Children are in the PID namespace.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        return "this system has no unshare"
    if unshare(NEW_USER | NEW_NETWORK | NEW_PIDS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    return ""


def run_as_first_process() -> None:
    """Continue in a child that is the first process of the PID namespace: the others die with it.

    The parent ends with it, and it dies with the parent.
    """
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(job: dict, count_processes: bool) -> None:
    """Set the limits.  count_processes: False where the limit would count every process of this user."""
    limits = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if count_processes:
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def silence() -> None:
    """Connect standard input, output and error with /dev/null: no output is too much."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def passes(solution: str, tests: str) -> bool:
    """Whether the solution, and then its tests in the same module, run without an exception."""
    module = types.ModuleType("solution")  # not __main__: a solution's own examples do not run
    sys.modules["solution"] = module
    try:
        for name, text in (("solution.py", solution), ("tests.py", tests)):
            exec(compile(text, name, "exec"), module.__dict__)
    except BaseException:  # SystemExit too: a solution that exits has not passed
        return False
    return True


if __name__ == "__main__":
    main()
