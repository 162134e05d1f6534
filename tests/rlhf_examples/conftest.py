"""Fixtures of the examples' tests."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.rlhf_examples.scripts import make_small_models


@pytest.fixture
def alone(tmp_path_factory):
    """A process group of which this process is the only rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """The directory of `make_small_models`, which tests only read."""
    return make_small_models(tmp_path_factory.mktemp("small"))
