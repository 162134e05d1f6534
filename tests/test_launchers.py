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

from rlhf_examples.common.arguments import RayGRPOArguments
from rlhf_examples.common.parsing import parse_arguments
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
    (hosts,) = blocks_of("Several machines", "text")
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


# Replaces `srun`: starts a task's command as often as the job has tasks, each with Slurm's variables.
SRUN = """#!{python}
import os, subprocess, sys
tasks = int(os.environ["SLURM_NTASKS"])
started = [
    subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(tasks)
]
sys.exit(max(process.wait() for process in started))
"""
# Replaces `docker` and `apptainer`: runs what follows the image.
CONTAINER = """#!{python}
import os, sys
words = sys.argv[2:]
image = next(index for index, word in enumerate(words) if word.startswith("my-image"))
assert all(word.startswith("--") for word in words[:image]), words
os.execvp(words[image + 1], words[image + 1 :])
"""


def with_programs(folder: Path, programs: dict[str, str]) -> str:
    """A PATH on which `programs`, by name, come first."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:{environment()['PATH']}"


def blocks_of(section: str, language: str) -> list[str]:
    """The code blocks of a section of the page."""
    text = PAGE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["torchrun", "tasks"])
def test_slurm_scripts(folder, number):
    script = blocks_of("Slurm", "bash")[number]
    (directives,) = re.findall(r"^#SBATCH (.*)$", script, re.M)
    tasks_per_node = int(re.search(r"--ntasks-per-node=(\d+)", directives)[1])
    assert tasks_per_node == (1 if "torchrun" in script else 8), "torchrun is one task on a node"
    tasks = 1 if tasks_per_node == 1 else 2
    path = with_programs(
        folder, {"srun": SRUN.format(python=sys.executable), "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n"}
    )
    (folder / "train.sbatch").write_text(
        re.sub(r"nproc_per_node=\d+", "nproc_per_node=2", script)
        .replace("29400", str(free_port()))
        .replace("29500", str(free_port()))
    )
    slurm = {"SLURM_NNODES": "1", "SLURM_NTASKS": str(tasks), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "host[0-1]"}
    require_output_of_ranks(run_together([["bash", "train.sbatch"]], folder, PATH=path, **slurm), 2)


@pytest.mark.slow
def test_accelerate_with_a_file(folder):
    (settings,), (command,) = (blocks_of("accelerate on several machines", language) for language in ("text", "bash"))
    (folder / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2})
    )
    here = {"num_machines: 2": "num_machines: 1", "num_processes: 16": "num_processes: 2", "host0": "127.0.0.1"}
    for there, value in {**here, "29500": str(free_port())}.items():
        assert there in settings
        settings = settings.replace(there, value)
    (folder / "accelerate.yaml").write_text(settings)
    require_output_of_ranks(run_together([shlex.split(command)], folder), 2)


@pytest.mark.slow
def test_containers(folder):
    container = CONTAINER.format(python=sys.executable)
    path = with_programs(folder, {"docker": container, "apptainer": container})
    for command in blocks_of("Containers", "bash")[0].splitlines():
        command = command.replace("--nproc_per_node=8", f"--nproc_per_node=2 --master_port={free_port()}")
        require_output_of_ranks(run_together([["bash", "-c", command]], folder, PATH=path), 2)


def test_rays_command_has_the_trainers_flags():
    (command,) = blocks_of("Ray", "text")
    words = shlex.split(command.replace("\\\n", " "))
    _, *flags = words[words.index("rlhf_examples.ray_grpo") :]
    args = parse_arguments(RayGRPOArguments, flags)
    assert (args.num_ranks, args.dtype) == (16, "bfloat16")
