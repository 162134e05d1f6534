"""Ranks with a GPU each."""

from collections.abc import Callable

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def device_ranks() -> Callable[[int], RankPool]:
    """A function of the number of ranks; they live for the session."""
    pools: dict[int, RankPool] = {}

    def of_size(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, device="cuda"))

    yield of_size
    for pool in pools.values():
        pool.close()
