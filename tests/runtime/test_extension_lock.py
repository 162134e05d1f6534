"""A lock left by a killed build in torch's extension directory is named in a warning; after its removal the wait
ends."""

import itertools
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

import hybrid
from hybrid.runtime.extension_lock import REPORT_AFTER_S, extension_lock_reported, is_abandoned
from tests.engines import settings
from tests.marks import slow_but
from tests.rank_pool import RankPool, free_port
from tests.tiny_models import tiny_model


class Messages(logging.Handler):
    """Collects warnings; removes the lock once a warning names it, as a user would."""

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


def abandoned_lock(folder: str) -> Path:
    """A lock file from an hour ago in the directory of an extension."""
    lock = Path(folder) / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    return lock


def waiting_optimizer(lock: Path):
    """An optimizer factory that waits for an operator, which another process seems to be building."""

    def make(params) -> torch.optim.Optimizer:
        FileBaton(str(lock), 0.05).wait()
        return torch.optim.AdamW(params, lr=1e-3)

    return make


def check_initialize(folder: str) -> None:
    rank = int(os.environ["RANK"])
    lock = abandoned_lock(f"{folder}/{rank}")
    config = {key: value for key, value in settings(2).items() if key != "optimizer"}
    threads = threading.active_count()
    with Messages(lock) as messages:
        if rank:  # the host's second rank waits silently; its lock is removed when the first one's is
            threading.Timer(REPORT_AFTER_S + 3, lock.unlink).start()
        started = time.monotonic()
        engine = hybrid.initialize(
            model=tiny_model("llama"),
            model_parameters=None,
            optimizer=waiting_optimizer(lock),
            config={**config, "zero_allow_untested_optimizer": True},
        )[0]
        waited_s = time.monotonic() - started
    named = [text for text in messages.texts if str(lock) in text]
    assert len(named) == (rank == 0), messages.texts
    if rank == 0:
        assert "which is 36" in named[0], named[0]  # 3600 seconds and some
        assert f"rm {lock}" in named[0]
        assert "no process of this machine holds it" in named[0]
        assert waited_s >= REPORT_AFTER_S
    assert type(engine) is hybrid.HybridEngine
    assert FileBaton.wait.__module__ == "torch.utils.file_baton"
    time.sleep(0.1)
    assert threading.active_count() <= threads + 1, "the watching thread is still alive"


def test_initialize_names_the_lock_that_it_waits_for(ranks, tmp_path):
    ranks.run(check_initialize, str(tmp_path))


class WaitingModule(nn.Module):
    """A module that waits for an operator which another process seems to be building."""

    def __init__(self, lock: Path):
        super().__init__()
        self.linear, self.lock = nn.Linear(2, 2), lock

    def train(self, mode: bool = True) -> "WaitingModule":
        FileBaton(str(self.lock), 0.05).wait()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.slow
def test_init_inference_names_the_lock_that_it_waits_for(tmp_path):
    lock = abandoned_lock(str(tmp_path))
    with Messages(lock) as messages:
        hybrid.init_inference(WaitingModule(lock), dtype=torch.float32)
    assert [str(lock) in text for text in messages.texts].count(True) == 1


@pytest.mark.parametrize("after_s", [0.2, 30.0])
def test_a_short_wait_is_not_reported(tmp_path, after_s):
    """A short build of another process, or a lock that is not waited for, gives no warning."""
    lock = abandoned_lock(str(tmp_path))
    with Messages(lock) as messages, extension_lock_reported(after_s):
        time.sleep(0.7)
        assert messages.texts == []
        # A busy machine may take long for the warning, with which the lock goes.
        timer = threading.Timer(60 if after_s < 1 else 0.8, partial(lock.unlink, missing_ok=True))
        timer.start()
        FileBaton(str(lock), 0.05).wait()
        timer.cancel()
    assert len(messages.texts) == (after_s < 1)


def test_a_held_lock_is_not_called_abandoned(tmp_path):
    baton = FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    assert not is_abandoned(baton.lock_file_path)
    with Messages(Path(baton.lock_file_path)) as messages, extension_lock_reported(0.2):
        FileBaton(baton.lock_file_path).wait()
    assert "another process builds this extension" in messages.texts[0]


def locked_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool = True) -> Path:
    """The lock of a killed build in an extension directory of this test's own, with the operator that DeepSpeed's
    start needs, or without."""
    built = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    extension = tmp_path / built.name
    if is_built:
        shutil.copytree(built, extension, ignore=shutil.ignore_patterns("lock"))
    extension.mkdir(exist_ok=True)
    (extension / "lock").touch()
    return extension / "lock"


def test_ranks_start_despite_an_abandoned_lock(ranks, tmp_path, monkeypatch):
    """A test killed while its ranks start leaves a lock, for which every later start on this machine would wait
    forever."""
    ranks.run(os.getpid)  # has built the operator
    locked_extension(tmp_path, monkeypatch)
    pool = RankPool(1, timeout_s=60)
    try:
        assert pool.run(os.getpid) == [process.pid for process in pool.processes]
    finally:
        pool.close()


def start(module: str, world_size: int) -> str:
    """Start and end ranks by the function of a module; returns their output."""
    code = f"from {module} import start_ranks; start_ranks(); import torch.distributed as dist; dist.barrier()"
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--no_python"]
    result = subprocess.run(
        [*launch, f"--master_port={free_port()}", sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "world_size", "is_built"),
    slow_but(
        [("rlhf_examples.common.ranks", 2, True)],
        [
            *itertools.product(["rlhf_examples.common.ranks", "benchmarks.ranks"], [1, 2], [True]),
            ("rlhf_examples.common.ranks", 2, False),
        ],
    ),
)
def test_examples_and_benchmarks_remove_an_abandoned_lock(ranks, tmp_path, monkeypatch, module, world_size, is_built):
    """Before DeepSpeed's start, which would wait for it forever; they say which."""
    ranks.run(os.getpid)
    lock = locked_extension(tmp_path, monkeypatch, is_built)
    output = start(module, world_size)
    assert output.count(f"removed {lock}, which is") == 1, output
    assert not lock.exists()


def test_a_held_lock_and_other_machines_locks_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("deepspeed.init_distributed", lambda *args, **kwargs: None)
    held, left = FileBaton(str(tmp_path / "lock")), abandoned_lock(str(tmp_path))
    assert held.try_acquire()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # two machines, which may share the directory
    hybrid.init_distributed(remove_locks=True)
    hybrid.init_distributed()
    assert left.exists()
    monkeypatch.setenv("WORLD_SIZE", "8")
    hybrid.init_distributed(remove_locks=True)
    assert not left.exists()
    assert Path(held.lock_file_path).exists()
    held.release()


def test_install_reports_waits_before_initialize(tmp_path, monkeypatch):
    """accelerate and scripts start the process group themselves, before they build an engine."""
    lock = abandoned_lock(str(tmp_path))
    monkeypatch.setattr("deepspeed.comm.init_distributed", lambda: FileBaton(str(lock), 0.05).wait())
    monkeypatch.setattr("hybrid.compat.install.extension_lock_reported", partial(extension_lock_reported, 0.2))
    with hybrid.installed(), Messages(lock) as messages:
        deepspeed.comm.init_distributed()
    assert [str(lock) in text for text in messages.texts] == [True]
