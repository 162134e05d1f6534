"""A pytest plugin: files in an order that changes with the commit, and as many tests as start within some minutes."""

import hashlib
import time

import pytest

STARTED = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--rotation", default="", help="order the files by a hash of this text, such as a commit")
    parser.addoption("--minutes", type=float, default=0, help="skip tests that have not started after so many minutes")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()


@pytest.hookimpl(trylast=True)  # after tests have been deselected by their marks
def pytest_collection_modifyitems(config, items):
    if rotation := config.getoption("--rotation"):
        items.sort(key=lambda item: place_in(rotation, item.nodeid.partition("::")[0]))


def place_in(rotation: str, file: str) -> bytes:
    """The sort key of a file. Its tests stay together and in their order, because they share fixtures."""
    return hashlib.sha256(f"{rotation} {file}".encode()).digest()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - item.config.stash[STARTED] > 60 * minutes:
        pytest.skip(f"not started within {minutes:g} minutes; another commit has another order")
