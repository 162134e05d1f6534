"""A lock that a killed build left in torch's extension directory is named, and the wait goes on once it is gone."""

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

import hybrid
from hybrid.extension_lock import REPORT_AFTER_S, extension_lock_reported, is_abandoned
from tests.engines import settings
from tests.rank_pool import RankPool
from tests.tiny_models import tiny_model


class Messages(logging.Handler):
    """Collects warnings; removes a file once one names it, as a user would."""

    def __init__(self, lock: Path):
        super().__init__(logging.WARNING)
        self.path, self.texts = lock, []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if str(self.path) in self.texts[-1]:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Messages":
        logger.addHandler(self)
        return self

    def __exit__(self, *error) -> None:
        logger.removeHandler(self)


def left_behind(folder: str) -> Path:
    """A lock file from an hour ago in an extension's directory of its own."""
    lock = Path(folder) / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    return lock


def optimizer_that_waits(lock: Path):
    """A maker of optimizers that needs an operator which somebody builds, or so it seems."""

    def make(params) -> torch.optim.Optimizer:
        FileBaton(str(lock), 0.05).wait()
        return torch.optim.AdamW(params, lr=1e-3)

    return make


def check_initialize(folder: str) -> None:
    rank = int(os.environ["RANK"])
    lock = left_behind(f"{folder}/{rank}")
    config = {key: value for key, value in settings(2).items() if key != "optimizer"}
    threads = threading.active_count()
    with Messages(lock) as messages:
        if rank:  # the second rank of the host waits and says nothing; its file goes when the first one's does
            threading.Timer(REPORT_AFTER_S + 3, lock.unlink).start()
        started = time.monotonic()
        engine = hybrid.initialize(
            model=tiny_model("llama"),
            model_parameters=None,
            optimizer=optimizer_that_waits(lock),
            config={**config, "zero_allow_untested_optimizer": True},
        )[0]
        waited_s = time.monotonic() - started
    named = [text for text in messages.texts if str(lock) in text]
    assert len(named) == (rank == 0), messages.texts
    if rank == 0:
        assert "which is 36" in named[0], named[0]  # 3600 seconds and a few
        assert f"rm {lock}" in named[0]
        assert "no process of this machine holds it" in named[0]
        assert waited_s >= REPORT_AFTER_S
    assert type(engine) is hybrid.HybridEngine
    assert FileBaton.wait.__module__ == "torch.utils.file_baton"
    time.sleep(0.1)
    assert threading.active_count() <= threads + 1, "the watcher is still there"


def test_initialize_names_the_lock_that_it_waits_for(ranks, tmp_path):
    ranks.run(check_initialize, str(tmp_path))


class Waits(nn.Module):
    """A module whose move to another dtype needs an operator that somebody builds."""

    def __init__(self, lock: Path):
        super().__init__()
        self.linear, self.lock = nn.Linear(2, 2), lock

    def train(self, mode: bool = True) -> "Waits":
        FileBaton(str(self.lock), 0.05).wait()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_init_inference_names_the_lock_that_it_waits_for(tmp_path):
    lock = left_behind(str(tmp_path))
    with Messages(lock) as messages:
        hybrid.init_inference(Waits(lock), dtype=torch.float32)
    assert [str(lock) in text for text in messages.texts].count(True) == 1


@pytest.mark.parametrize("after_s", [0.2, 30.0])
def test_a_short_wait_is_not_reported(tmp_path, after_s):
    """Another process that builds for a moment is nobody's trouble; and what nobody waits for is no news."""
    lock = left_behind(str(tmp_path))
    threading.Timer(1.5, lock.unlink).start()
    with Messages(tmp_path / "none") as messages, extension_lock_reported(after_s):
        time.sleep(0.7)
        assert messages.texts == []
        FileBaton(str(lock), 0.05).wait()
    assert len(messages.texts) == (after_s < 1)


def test_a_lock_that_a_process_holds_is_not_called_abandoned(tmp_path):
    baton = FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    assert not is_abandoned(baton.lock_file_path)
    with Messages(tmp_path / "none") as messages, extension_lock_reported(0.2):
        threading.Timer(1.5, baton.release).start()
        FileBaton(baton.lock_file_path).wait()
    assert "another process builds this extension" in messages.texts[0]


def test_ranks_start_though_a_killed_build_left_its_lock(tmp_path, monkeypatch):
    """A test that is killed as its ranks start leaves one: every later start on this machine would wait for ever."""
    folder = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    extension = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("lock"))
    (extension / "lock").touch()
    pool = RankPool(1, timeout_s=60)
    try:
        assert pool.run(os.getpid) == [process.pid for process in pool.processes]
    finally:
        pool.close()
