"""Fixtures of the examples' tests."""

import pytest
import torch.distributed as dist


@pytest.fixture
def alone(tmp_path_factory):
    """A process group of which this process is the only rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()
