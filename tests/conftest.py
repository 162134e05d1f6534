"""Fixtures: ranks that live for the session, and resources that a machine may lack."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Triton chooses between compiling and interpreting kernels at its first import, which transformers triggers.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every process takes the same ninja: another version does not know what was compiled, and compiles DeepSpeed's
# operators again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

from tests.engines import CONTAINERS
from tests.rank_pool import RankPool

STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"


def pytest_addoption(parser):
    parser.addoption(
        "--containers", choices=("fused", "native"), default="fused", help="the containers that tests' engines use"
    )


def pytest_configure(config):
    os.environ[CONTAINERS] = config.getoption("--containers")  # ranks inherit it


@pytest.fixture(scope="session")
def ranks():
    """Two ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """The directory of a small pretrained model."""
    if not STORIES.is_dir():
        pytest.skip(f"the pretrained model stories260K is not at {STORIES}")
    return STORIES


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # the keywords of an item also have its directory's name
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
