"""Packages for `make gpu`: which are carried, what is installed where, and the messages when something is missing."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import wheels

ROOT = Path(__file__).resolve().parents[2]


def write_wheel(folder: Path, name: str) -> Path:
    """A wheel of version 1.0 with one module."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_versions_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.S | re.M)
    dependencies = dict(re.findall(r'"([\w-]+)([^"]*)"', block)) | {"pytest": ">=8"}
    needed = {each.name: str(each.specifier) for each in wheels.requirements(wheels.NEEDED, "3.12")}
    for name, version in (wheels.GIVEN | needed).items():
        assert dependencies.get(name, "") == version, name
    # Only data preparation reads `datasets`, and only the command `hybrid` the next two.
    brought = {"packaging", "safetensors", "jinja2"}  # by torch and transformers
    assert set(dependencies) - {"datasets", "typer", "rich", *brought} <= (wheels.GIVEN | needed).keys()


def required(name: str, version: str) -> set[str]:
    """The names that an installed distribution requires on Linux, without its extras."""
    lines = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    linux = {"python_version": version, "python_full_version": f"{version}.0", "sys_platform": "linux", "extra": ""}
    linux |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    return {wheels.normalized(each.name) for each in lines if each.marker is None or each.marker.evaluate(linux)}


def test_the_list_is_complete_and_without_large_packages():
    for version in ("3.10", "3.12"):
        names = {each.name for each in wheels.requirements(wheels.NEEDED, version)}
        brought = {"torch", "transformers", *required("torch", version), *required("transformers", version)}
        for name in names - {"exceptiongroup", "tomli"}:  # not installed here, and require nothing more
            assert required(name, version) <= names | brought, name
        assert not names & brought and not [name for name in names if name.startswith("nvidia")]
    pins = {each.name: str(each.specifier) for each in wheels.requirements(wheels.PINS, "3.10")}
    assert (pins["deepspeed"], pins["numpy"]) == ("==0.19.8", "==2.2.6")


@pytest.fixture
def lacking(monkeypatch, tmp_path):
    """`NEEDED` lists packages that this environment lacks."""
    needed = 'rare_tree>=1\nrare_leaf>=1\npackaging\nrare_fruit; python_version < "3"\n'
    (tmp_path / "needed.txt").write_text(needed)
    monkeypatch.setattr(wheels, "NEEDED", tmp_path / "needed.txt")
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_only_what_is_lacking_is_installed(tmp_path, lacking, capsys):
    folder, target = tmp_path / "wheels", tmp_path / "packages"
    for name in ("rare_tree", "rare_leaf", "rare_fruit", "packaging"):
        write_wheel(folder, name)
    wheels.main(["install", "--wheels", str(folder), "--target", str(target)])
    assert capsys.readouterr().out == f"installing into {target}: rare-leaf, rare-tree\n"
    assert {path.name for path in target.glob("*.py")} == {"rare_leaf.py", "rare_tree.py"}
    wheels.main(["install", "--wheels", str(folder), "--target", str(target)])
    assert capsys.readouterr().out == "", "installed twice"


def test_a_missing_wheel_is_named_with_the_command_that_makes_it(tmp_path, lacking):
    folder, version = tmp_path / "wheels", f"{sys.version_info.major}.{sys.version_info.minor}"
    arguments = ["install", "--wheels", str(folder), "--target", str(tmp_path / "packages")]
    with pytest.raises(
        SystemExit, match=f"lacks rare_tree>=1, rare_leaf>=1, and there is no folder .*PYTHON_VERSION={version}, and"
    ):
        wheels.main(arguments)
    write_wheel(folder, "rare_tree")
    with pytest.raises(SystemExit, match=r"lacks rare_leaf>=1, and .* does not have it; .* make wheels"):
        wheels.main(arguments)
    assert not (tmp_path / "packages").exists()


def test_a_python_without_torch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "GIVEN", {"torch": ">=2.6", "transformers": ">=99"})
    with pytest.raises(SystemExit, match=r"lacks transformers>=99, which wheels/ does not hold; .*make gpu PYTHON="):
        wheels.main(["install", "--wheels", str(tmp_path)])


def test_a_bare_python_gets_the_message_too(tmp_path):
    """Without any package, `packaging` included."""
    command = [sys.executable, "-S", "-m", "benchmarks.wheels", "install", "--wheels", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={})
    assert done.returncode == 1 and "lacks torch>=2.10, transformers>=5.17,<6, which wheels/" in done.stderr


def test_make_downloads_pinned_versions_for_the_other_python(tmp_path, monkeypatch):
    commands = []

    def pip(arguments, **variables):
        commands.append((list(map(str, arguments)), variables))

    monkeypatch.setattr(wheels, "pip", pip)
    wheels.main(["make", "--wheels", str(tmp_path / "wheels"), "--python_version", "3.12"])
    (download, none), (build, variables) = commands
    assert "--python-version=3.12" in download and "--platform=manylinux_2_28_x86_64" in download
    assert f"pydantic=={importlib.metadata.version('pydantic')}" in download and none == {}
    assert build[0] == "wheel" and build[-1] == "deepspeed==0.19.8" and variables == {"DS_BUILD_OPS": "0"}
    assert "deepspeed==0.19.8" not in download
