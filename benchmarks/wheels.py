"""Packages for `make gpu` on a machine without a network: what its python lacks of benchmarks/gpu-requirements.txt.

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
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # transformers brings it, so the message below says that transformers is missing
    Requirement = None

ROOT = Path(__file__).resolve().parents[1]
GIVEN = {"torch": ">=2.10", "transformers": ">=5.17,<6"}  # they must be installed: they are too large to carry
NEEDED, PINS = ROOT / "benchmarks" / "gpu-requirements.txt", ROOT / "constraints.txt"
FROM_SOURCE = "deepspeed"  # has no wheels on the index
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1")
MAX_BYTES = 64 * 2**20


def main(arguments: list[str] | None = None) -> None:
    """Make the folder of wheels, or install from it. Exits with a message that says what is missing and what to do."""
    args = parse(arguments)
    if args.action == "make":
        make(args.wheels, args.python_version, args.machine)
    else:
        install(args.wheels, args.target)


def make(folder: Path, python_version: str, machine: str) -> None:
    """Fill `folder` with wheels of everything in NEEDED, in the versions of PINS, for Linux."""
    names = [each.name for each in requirements(NEEDED, python_version)]
    pins = {normalized(each.name): f"{each.name}{each.specifier}" for each in requirements(PINS, python_version)}
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    target = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp"]
    target += [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    wheels = [pins.get(name, name) for name in names if name != FROM_SOURCE]
    pip(["download", "--no-deps", "-d", folder, *target, *wheels])
    # DeepSpeed compiles its operators on first use; this engine uses none of them on GPUs.
    pip(["wheel", "--no-deps", "-w", folder, pins[FROM_SOURCE]], DS_BUILD_OPS="0")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(names)} wheels for python {python_version} on {machine}, {size / 2**20:.1f} MiB")
    if size > MAX_BYTES:
        sys.exit(f"{folder}: more than {MAX_BYTES / 2**20:.0f} MiB")


def requirements(path: Path, python_version: str) -> list["Requirement"]:
    """The lines of a file that hold for a version of Python."""
    lines = [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]
    environment = {"python_version": python_version, "extra": ""}
    return [each for each in lines if each.marker is None or each.marker.evaluate(environment)]


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(arguments: list[str | Path], **variables: str) -> None:
    """Run pip. Exits with its code if it fails."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "-q", "--disable-pip-version-check"]
    code = subprocess.run(command, env={**os.environ, **variables}).returncode
    if code:
        sys.exit(code)


def install(folder: Path, target: Path) -> None:
    """Install what is lacking from `folder` into `target`, where earlier calls may have installed some of it."""
    absent = [f"{name}{version}" for name, version in GIVEN.items() if Requirement is None or not have(name, version)]
    if absent:
        sys.exit(
            f"make gpu: {sys.executable} lacks {', '.join(absent)}, which wheels/ does not hold; take a python that "
            "has them: make gpu PYTHON=..."
        )
    sys.path.insert(0, str(target))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = {normalized(wheel.name.partition("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    lacking = [each for each in requirements(NEEDED, version) if not have(each.name, str(each.specifier))]
    names = {str(each).partition(";")[0]: normalized(each.name) for each in lacking}
    if unavailable := [requirement for requirement, name in names.items() if name not in wheels]:
        where = f"{folder} does not have it" if folder.is_dir() else f"there is no folder {folder}"
        sys.exit(
            f"make gpu: {sys.executable} lacks {', '.join(unavailable)}, and {where}; on a machine with a network run: "
            f"make wheels PYTHON_VERSION={version}, and copy wheels/ here"
        )
    if names:
        print(f"installing into {target}: {', '.join(sorted(names.values()))}")
        chosen = sorted(wheels[name] for name in names.values())
        pip(["install", "--no-index", "--no-deps", "--upgrade", "--target", target, *chosen])


def have(name: str, specifier: str) -> bool:
    """Whether a distribution is installed in a version that `specifier` allows."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True)


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
