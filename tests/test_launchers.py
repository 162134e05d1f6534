"""Every command of docs/launchers.md starts ranks that roll out and train, here and between two "machines"."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_pool import RANK_KEYS, free_port, kill_tree, rank_environment

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "launchers.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.S)[0].splitlines()
PORTS = {"torchrun": "--master_port", "deepspeed": "--master_port", "accelerate": "--main_process_port"}
HOSTS = ("10.213.0.1", "10.213.0.2")  # the addresses of two machines
TIMEOUT_S = 500  # half of it is imports on machines with few cores


def environment(**more: str) -> dict[str, str]:
    """The environment of a CPU machine outside any launcher."""
    cpu = rank_environment(0, 1, 0)
    own = {key: value for key, value in os.environ.items() if not key.endswith(RANK_KEYS)}
    cpu = {key: value for key, value in cpu.items() if not key.endswith(RANK_KEYS)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**own, **cpu, "PATH": path, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **more}


def run_together(commands: list[list[str]], folder: Path, **more: str) -> str:
    """Run commands at the same time; returns their output once all have succeeded."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        started = []
        for command in commands:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(**more), stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(kill_tree, process)
            started.append(process)
        codes = [process.wait(TIMEOUT_S) for process in started]
        output.seek(0)
        text = output.read()
    assert codes == [0] * len(commands), text[-4000:]
    return text


def require_output_of_ranks(text: str, count: int) -> None:
    """Every rank printed its line, with equal greedy completions."""
    lines_by_rank = dict(re.findall(rf"^rank (\d+) of {count}: (.*), version 1$", text, re.M))
    assert sorted(lines_by_rank) == [str(rank) for rank in range(count)], text[-4000:]
    assert len(set(lines_by_rank.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_every_command_of_the_page_runs(tmp_path, command):
    shutil.copy(ROOT / "tests" / "launched.py", tmp_path / "train.py")
    program, *arguments = shlex.split(command)
    if program in PORTS:  # the default port may be in use
        arguments.insert(program == "accelerate", f"{PORTS[program]}={free_port()}")  # behind `launch`
    text = run_together([[program, *arguments]], tmp_path)
    require_output_of_ranks(text, 1 if program == "python" else 2)


def test_the_page_covers_every_launcher():
    assert [command.split()[0] for command in COMMANDS] == ["python", "torchrun", "deepspeed", "accelerate"]


@pytest.fixture
def two_machines() -> Iterator[dict[str, list[str]]]:
    """Two network namespaces joined by a veth pair: address → prefix of commands that run there."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two machines: needs `ip` and root")
    names = [f"hybrid{os.getpid()}{end}" for end in "ab"]
    cables = [f"hv{os.getpid()}{end}" for end in "ab"]
    made = [["ip", "netns", "add", name] for name in names]
    made.append(["ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1]])
    for index, (name, cable) in enumerate(zip(names, cables, strict=True)):
        inside = ["ip", "-n", name]
        made += [
            ["ip", "link", "set", cable, "netns", name],
            [*inside, "addr", "add", f"{HOSTS[index]}/24", "dev", cable],
            [*inside, "link", "set", cable, "name", "cable0"],
            [*inside, "link", "set", "cable0", "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    try:
        for command in made:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"two machines: {shlex.join(command)}: {done.stderr.strip()}")
        # A machine's host name is its address, so that torchrun recognizes the rendezvous host.
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"']
        yield {host: ["ip", "netns", "exec", name, *named, host] for name, host in zip(names, HOSTS, strict=True)}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def with_one_rank_per_machine(text: str) -> str:
    """The page's text for our two machines with one rank each."""
    text = re.sub(r"nproc_per_node=\d+", "nproc_per_node=1", re.sub(r"slots=\d+", "slots=1", text))
    return text.replace("host0", HOSTS[0]).replace("host1", HOSTS[1])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory with the script and the page's hostfile."""
    shutil.copy(ROOT / "tests" / "launched.py", tmp_path / "train.py")
    (hosts,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    (tmp_path / "hostfile").write_text(with_one_rank_per_machine(hosts))
    return tmp_path


def command_with(text: str) -> list[str]:
    """The page's command that contains `text`."""
    (line,) = (line for line in re.findall(r"^\w+ .*train\.py$", PAGE, re.M) if text in line)
    return shlex.split(with_one_rank_per_machine(line))


@pytest.mark.slow
def test_two_machines_with_torchruns_rendezvous(folder, two_machines):
    commands = [[*machine, *command_with("--nnodes=2")] for machine in two_machines.values()]
    require_output_of_ranks(run_together(commands, folder, GLOO_SOCKET_IFNAME="cable0"), 2)


@pytest.mark.slow
def test_two_machines_with_deepspeeds_hostfile_without_ssh(folder, two_machines):
    own = command_with("--node_rank=0")
    commands = [
        [*machine, *[part.replace("--node_rank=0", f"--node_rank={rank}") for part in own]]
        for rank, machine in enumerate(two_machines.values())
    ]
    require_output_of_ranks(run_together(commands, folder, GLOO_SOCKET_IFNAME="cable0"), 2)


# Replaces `pdsh` and `ssh`: each machine runs the command in a clean environment.
WIRE = """#!{python}
import json, subprocess, sys
from pathlib import Path
machines = json.loads(Path("machines.json").read_text())
if Path(sys.argv[0]).name == "ssh":
    hosts, words = sys.argv[-2:-1], sys.argv[-1:]
else:
    at = sys.argv.index("-w")
    hosts, words = sys.argv[at + 1].split(","), sys.argv[at + 2:]
command = " ".join(words)
own = ["env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/root"]
started = [
    subprocess.Popen([*machines[host], *own, "sh", "-c", command.replace("%n", str(number))])
    for number, host in enumerate(hosts)
]
sys.exit(max(process.wait() for process in started))
"""


@pytest.mark.slow
def test_two_machines_with_deepspeeds_hostfile(folder, two_machines):
    """The launcher runs on the first machine."""
    (folder / "machines.json").write_text(json.dumps(two_machines))
    (folder / "bin").mkdir()
    for name in ("pdsh", "ssh"):
        (folder / "bin" / name).write_text(WIRE.format(python=sys.executable))
        (folder / "bin" / name).chmod(0o755)
    cpu = "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1"
    assert all(f"`{line}`" in PAGE for line in cpu.splitlines())
    (folder / ".deepspeed_env").write_text(f"{cpu}\nGLOO_SOCKET_IFNAME=cable0\n")
    command = [*two_machines[HOSTS[0]], *command_with("--hostfile=hostfile --master_addr")]
    require_output_of_ranks(run_together([command], folder, PATH=f"{folder / 'bin'}:{environment()['PATH']}"), 2)
