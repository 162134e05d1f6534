"""What is installed: sdist and wheel have every source, and an installed wheel builds its kernels and trains."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hybrid", "rlhf_examples")
FOLDERS = (*PACKAGES, "benchmarks", "configs", "docs", "tests")  # of the sdist


def sources() -> set[str]:
    """Every file of the packages, as git has them, or as they lie there where there is no git."""
    return {name for name in files_of(PACKAGES) if not name.endswith(".md")}


def files_of(folders: tuple[str, ...]) -> set[str]:
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist and a wheel, made from a copy of the tree without git."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree / path.name)
    for command in ("sdist", "wheel"):
        code = f"from setuptools import build_meta; print(build_meta.build_{command}({str(folder)!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_has_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources() - names == set()
    assert {"hybrid/kernels/cpu/decoder.cpp", "hybrid/py.typed", "rlhf_examples/py.typed"} <= names
    strange = [
        name for name in names if not name.startswith((*(f"{package}/" for package in PACKAGES), "hybrid_engine-"))
    ]
    assert strange == [], "tests and benchmarks are not installed"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_every_source(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_sdist_has_what_make_test_and_the_readme_read(built):
    """Every test with what it reads, and the pages: an unpacked sdist is a checkout without git."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of(FOLDERS) - names == set()
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "LOG.md", "mkdocs.yml", "tests/conftest.py"} <= names
    linked = set(re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / "README.md").read_text()))
    assert "docs/migration.md" in linked and linked - names == set()
    assert not [name for name in names if name.endswith(".pyc")]


def test_make_demo_finds_its_files_in_the_sdist(built, tmp_path):
    """`make -n` prints the commands of the demo once everything that they depend on is there."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    done = subprocess.run(["make", "-n", "demo"], cwd=tree, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install -q -c constraints.txt" in done.stdout
    ((module, config),) = re.findall(r"-m (rlhf_examples\.\S+) (\S+)", done.stdout)
    assert (tree / f"{module.replace('.', '/')}.py").is_file() and (tree / config).is_file()
    assert {file.name for file in (tree / "configs").iterdir()} == {file.name for file in (ROOT / "configs").iterdir()}
    (tree / "constraints.txt").unlink()
    assert subprocess.run(["make", "-n", "demo"], cwd=tree, capture_output=True, timeout=60).returncode != 0


def test_the_wheel_needs_what_pyproject_says(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(archive.read(name), validate=False)
    needed = {str(requirement) for requirement in metadata.requires_dist if "extra" not in str(requirement.marker)}
    assert needed == {str(Requirement(text)) for text in project["dependencies"]}
    assert str(metadata.version) == project["version"]
    (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "hybrid = hybrid.__main__:app" in archive.read(scripts).decode()


TEN_LINES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hybrid
assert "site-packages" in hybrid.__file__, hybrid.__file__
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
model = LlamaForCausalLM(LlamaConfig(**sizes))
trainable = model.parameters()
prompt_ids, prompt_mask = torch.randint(3, 97, (2, 6)), torch.ones(2, 6, dtype=torch.long)
my_loss = lambda logps, batch, reference: -logps.mean()
{code}
print("trained", engine.coverage()[0]["container"])
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The python of an environment with the wheel, and with the dependencies, of which the project is no part."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.check_output(where, text=True).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])  # after the project's own files
    return python


@pytest.mark.slow
def test_an_installed_wheel_builds_its_kernels_and_trains(installed, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = TEN_LINES.format(code=code.replace("max_new_tokens=256", "max_new_tokens=8"))
    command = [str(installed), "-c", script]
    settings = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 500}
    first = subprocess.run(command, **settings)
    assert first.returncode == 0, first.stderr[-4000:]
    assert "trained fused" in first.stdout
    assert "compiling the CPU kernels, once for this machine" in first.stderr
    assert str(tmp_path / "cache" / "hybrid-engine") in first.stderr
    assert "compiling" not in subprocess.run(command, **settings).stderr


@pytest.mark.slow
def test_a_users_script_type_checks_against_an_installed_wheel(installed, tmp_path):
    """Strictly, and without this project's configuration and plugin."""
    shutil.copy(ROOT / "tests" / "typed_script.py", tmp_path / "script.py")
    command = [str(installed), "-m", "mypy", "--strict", "script.py"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    settings = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(command, **settings)
    assert done.returncode == 0, done.stdout
    broken = (tmp_path / "script.py").read_text().replace("num_generations=8", "num_generations='8'")
    (tmp_path / "script.py").write_text(broken)
    assert "[arg-type]" in subprocess.run(command, **settings).stdout


OPTIONAL = {"bitsandbytes", "triton", "trl", "flashinfer", "openrlhf", "ray", "vllm"}  # imported where they are there


@pytest.mark.parametrize(
    ("package", "extras"), [("hybrid", ["server"]), ("rlhf_examples", ["examples", "math", "ray"])]
)
def test_what_a_package_imports_is_declared(package, extras):
    """That it comes with another package today is no promise of that package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    declared = {Requirement(line).name.lower() for line in lines}
    distributions = importlib.metadata.packages_distributions()
    imported = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.partition(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, *OPTIONAL, "hybrid", "rlhf_examples"}
    missing = {name for name in imported if not declared & {each.lower() for each in distributions.get(name, [name])}}
    assert len(imported) > 8 and missing == set()
