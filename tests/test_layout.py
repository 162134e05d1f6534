"""The layout of the code: imports point down, examples use the public API, the map is complete, configs parse."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

import hybrid

ROOT = Path(__file__).resolve().parents[1]
# Top-down. A file may import from its own layer and from those below, never from above.
LAYERS = [
    ("hybrid.__main__", "hybrid.cli"),
    ("hybrid", "hybrid.public"),
    ("hybrid.compat",),
    ("hybrid.training",),
    ("hybrid.inference",),
    ("hybrid.serving",),
    ("hybrid.execution",),
    ("hybrid.generation",),
    ("hybrid.environments",),
    ("hybrid.rollout",),
    ("hybrid.decoders",),
    ("hybrid.sampling",),
    ("hybrid.weights",),
    ("hybrid.models",),
    ("hybrid.kernels",),
    ("hybrid.config", "hybrid.runtime"),
]


def modules_of(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package, by name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


def imports_of(name: str, path: Path, package: str) -> set[str]:
    """The modules of `package` that a file imports anywhere, in functions too; relative imports resolved."""
    imported = set()
    current_package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = current_package.split(".")[: len(current_package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            imported.add(base)
            imported.update(f"{base}.{alias.name}" for alias in node.names)
    return {module for module in imported if module == package or module.startswith(f"{package}.")}


def layer_of(name: str) -> int:
    """Index of a module's layer, or of its package's."""
    for depth, members in enumerate(LAYERS):
        if name in members or any(name.startswith(f"{member}.") for member in members if member != "hybrid"):
            return depth
    raise AssertionError(f"{name} is in no layer; add it to LAYERS")


def wrong_imports(root: Path) -> list[str]:
    """Import errors of the package `hybrid` under `root`."""
    modules, wrong = modules_of(root, "hybrid"), []
    graph = {name: imports_of(name, path, "hybrid") & modules.keys() for name, path in modules.items()}
    for name, targets in graph.items():
        for target in sorted(targets - {name}):
            if target == "hybrid":
                wrong.append(f"{name} imports from the package root")
            elif layer_of(target) < layer_of(name):
                wrong.append(f"{name} imports {target}, which is above it")
            elif name in reachable(graph, target):
                wrong.append(f"{name} and {target} import each other")
    return wrong


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that `start` imports, directly or not."""
    reached, waiting = set(), [start]
    while waiting:
        for target in graph[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def test_imports_point_down():
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "weights/gather.py",
            "def f():\n    from hybrid.generation import decode",
            "hybrid.weights.gather imports hybrid.generation",
        ),
        ("config.py", "from .runtime import parallel", "hybrid.config and hybrid.runtime.parallel import each other"),
        ("rollout.py", "import hybrid", "hybrid.rollout imports from the package root"),
        (
            "generation/decode.py",
            "from ..training.engine import HybridEngine",
            "hybrid.training.engine, which is above it",
        ),
    ],
)
def test_a_wrong_import_is_reported(tmp_path, file, text, message):
    tree = {
        "__init__.py": "from hybrid.training.engine import HybridEngine",
        "training/__init__.py": "",
        "training/engine.py": "from hybrid.generation.decode import x",
        "rollout.py": "",
        "generation/__init__.py": "",
        "generation/decode.py": "",
        "weights/__init__.py": "",
        "weights/gather.py": "",
        "runtime/__init__.py": "",
        "runtime/parallel.py": "from hybrid import config as settings" if file == "config.py" else "",
        "config.py": "",
        file: text,
    }
    for name, content in tree.items():
        (tmp_path / "hybrid" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hybrid" / name).write_text(
            content.replace("from hybrid import config as settings", "import hybrid.config")
        )
    assert any(message in line for line in wrong_imports(tmp_path)), wrong_imports(tmp_path)


MEASURED_ALONE = tuple(
    f"hybrid.{name}"
    for name in ("decoders.batch", "generation.block_pool", "generation.model_runner", "generation.sequence")
)


def test_examples_and_benchmarks_use_the_public_api():
    for package in ("rlhf_examples", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for module in imports_of(path.stem, path, "hybrid"):
                public = module == "hybrid" or module.removeprefix("hybrid.") in hybrid.__all__
                # A benchmark measures a step's overhead without a decoder.
                internal = path.name == "overhead.py" and module.startswith(MEASURED_ALONE)
                assert public or internal or module.startswith("hybrid.compat"), f"{path}: {module}"
            used = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hybrid"
            }
            assert used <= {*hybrid.__all__, "__file__"}, f"{path}: {used - {*hybrid.__all__}}"


def test_the_map_lists_every_file():
    text = (ROOT / "docs" / "map.md").read_text()
    listed = set(re.findall(r"`((?:hybrid|rlhf_examples|benchmarks)/[\w/]+\.py)`", text))
    there = {
        str(path.relative_to(ROOT))
        for package in ("hybrid", "rlhf_examples", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == there


def test_make_gpu_runs_every_test_of_a_device():
    """`tests/gpu`, and the tests of kernels and decoders that run on a device where there is one."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    listed = re.search(r"^GPU_TESTS = (.*)$", makefile, re.MULTILINE)[1].split()
    run = {path for name in listed for path in [*(ROOT / name).rglob("*.py"), ROOT / name]}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "gpu" in path.read_text()}
    assert all(path.exists() for path in run) and marked <= run, marked - run


def test_every_config_parses():
    paths = [*(ROOT / "configs").glob("*.json"), *(ROOT / "configs").glob("*.yaml")]
    assert len(paths) >= 4
    for path in paths:
        settings = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
        assert settings, path
