"""A pytest plugin: tests in an order that changes with the commit, as many as can start within some minutes."""

import hashlib
import time

import pytest


def pytest_addoption(parser):
    parser.addoption("--rotation", default="", help="order the tests by a hash of this text, such as a commit")
    parser.addoption("--minutes", type=float, default=0, help="skip tests that have not started after so many minutes")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)  # after tests have been deselected by their marks
def pytest_collection_modifyitems(config, items):
    if rotation := config.getoption("--rotation"):
        items.sort(key=lambda item: place_in(rotation, item.nodeid))


def place_in(rotation: str, nodeid: str) -> bytes:
    """The sort key of a test. Cases of a parametrised test have the same key, and so stay together."""
    return hashlib.sha256(f"{rotation} {nodeid.partition('[')[0]}".encode()).digest()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - item.config.stash[STARTED] > 60 * minutes:
        pytest.skip(f"not started within {minutes:g} minutes; another commit has another order")
