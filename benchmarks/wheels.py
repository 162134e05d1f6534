"""Packages for `make gpu` on a machine without a network: what its python lacks next to torch and transformers.

    python -m benchmarks.wheels make --python_version 3.12       # with a network: the folder wheels/
    python -m benchmarks.wheels install                          # without: what is lacking, into .gpu-packages/

`install` leaves the python's own packages as they are and puts into the directory only what it lacks, so that with the
directory on PYTHONPATH nothing that is there is hidden. It does nothing where nothing is lacking.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # transformers brings it, so the message below says that transformers is missing
    Requirement = None

ROOT = Path(__file__).resolve().parents[1]
GIVEN = {"torch": ">=2.10", "transformers": ">=5.17,<6"}  # they must be installed: they are too large to carry
# What `hybrid`, `benchmarks/gpu.py` and the tests on a device import, and what runs these tests.
NEEDED = {
    "deepspeed": ">=0.19.8",
    "peft": ">=0.21",
    "accelerate": ">=1.10",
    "pydantic": ">=2.3",
    "hjson": ">=3.1",
    "psutil": ">=5.9",
    "pytest": ">=8",
    "pytest-timeout": "",
    "pytest-xdist": "",
}
FROM_SOURCE = ("deepspeed",)  # has no wheels on the index
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1")
MAX_BYTES = 64 * 2**20


def main(arguments: list[str] | None = None) -> None:
    """Make the folder of wheels, or install from it. Exits with a message that says what is missing and what to do."""
    args = parse(arguments)
    if args.action == "make":
        make(args.wheels, args.python_version, args.machine)
    else:
        install(args.wheels, args.target)


# With a network


def make(folder: Path, python_version: str, machine: str) -> None:
    """Fill `folder` with wheels of everything in NEEDED that torch and transformers do not bring, in the versions of
    constraints.txt, for Linux. The running python must have the packages, because their requirements are read there."""
    environment = {
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "os_name": "posix",
        "extra": "",
    }
    names = sorted(carried(environment))
    pins = pinned(environment)
    requirements = [f"{name}=={pins[name]}" if name in pins else name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    built = [each for each in requirements if re.split("=", each)[0] in FROM_SOURCE]
    platforms = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp", *platforms]
    pip(["download", "--no-deps", "-d", folder, *target, *(each for each in requirements if each not in built)])
    # DeepSpeed compiles its operators on first use; this engine uses none of them on GPUs.
    pip(["wheel", "--no-deps", "-w", folder, *built], DS_BUILD_OPS="0")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(names)} wheels for python {python_version} on {machine}, {size / 2**20:.1f} MiB")
    if size > MAX_BYTES:
        sys.exit(f"{folder}: more than {MAX_BYTES / 2**20:.0f} MiB")


def carried(environment: dict[str, str]) -> set[str]:
    """The normalized names of NEEDED and of all that it requires, as installed here, where `environment` are the
    markers' values; without torch, transformers and their direct requirements, which every version of them brings."""
    given = {each.name for name in GIVEN for each in required(requirements_of(name), environment)} | GIVEN.keys()
    known, waiting = {normalized(name) for name in given}, [normalized(name) for name in NEEDED]
    names = set()
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            names.add(name)
            waiting += [normalized(each.name) for each in required(requirements_of(name), environment)]
    return names


def requirements_of(name: str) -> list[str]:
    """The requirements of an installed distribution; none if it is not installed."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def required(lines: Iterable[str], environment: dict[str, str] | None = None) -> list["Requirement"]:
    """The requirements whose markers hold in `environment`; None: here."""
    requirements = [Requirement(line) for line in lines]
    values = environment or {"extra": ""}
    return [each for each in requirements if each.marker is None or each.marker.evaluate(values)]


def pinned(environment: dict[str, str]) -> dict[str, str]:
    """The versions in constraints.txt, by normalized name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {normalized(each.name): str(each.specifier)[2:] for each in required(lines, environment)}


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(arguments: list[str | Path], **variables: str) -> None:
    """Run pip. Exits with its code if it fails."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "-q", "--disable-pip-version-check"]
    code = subprocess.run(command, env={**os.environ, **variables}).returncode
    if code:
        sys.exit(code)


# Without one


def install(folder: Path, target: Path) -> None:
    """Install what is lacking from `folder` into `target`, where earlier calls may have installed some of it."""
    absent = [f"{name}{version}" for name, version in GIVEN.items() if Requirement is None or not have(name, version)]
    if absent:
        sys.exit(
            f"make gpu: {sys.executable} lacks {', '.join(absent)}, which wheels/ does not hold; take a python that "
            "has them: make gpu PYTHON=..."
        )
    sys.path.insert(0, str(target))
    wheels = {normalized(wheel.name.partition("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    chosen, unavailable, waiting = {}, [], [Requirement(f"{name}{version}") for name, version in NEEDED.items()]
    while waiting:
        requirement = waiting.pop(0)
        name = normalized(requirement.name)
        if name in chosen or have(name, str(requirement.specifier)):
            continue
        if name not in wheels:
            unavailable.append(str(requirement))
            continue
        chosen[name] = wheels[name]
        waiting += required(metadata_of(wheels[name]))
    if unavailable:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        where = f"{folder} does not have it" if folder.is_dir() else f"there is no folder {folder}"
        sys.exit(
            f"make gpu: {sys.executable} lacks {', '.join(sorted(set(unavailable)))}, and {where}; on a machine with a "
            f"network run: make wheels PYTHON_VERSION={version}, and copy wheels/ here"
        )
    if chosen:
        print(f"installing into {target}: {', '.join(sorted(chosen))}")
        pip(["install", "--no-index", "--no-deps", "--upgrade", "--target", target, *sorted(chosen.values())])


def have(name: str, specifier: str) -> bool:
    """Whether a distribution is installed in a version that `specifier` allows."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True)


def metadata_of(wheel: Path) -> list[str]:
    """The requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        text = archive.read(path).decode()
    return re.findall(r"^Requires-Dist: (.*)$", text, re.M)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "install"))
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--target", type=Path, default=ROOT / ".gpu-packages")
    parser.add_argument("--python_version", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
