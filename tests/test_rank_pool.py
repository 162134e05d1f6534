"""The rank pool: a rank's failure is reported with its traceback, and no run hangs."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import rank_pool
from tests.rank_pool import RankFailure, RankPool, pool_of, run_script


def sum_over_ranks(value: int) -> int:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def raise_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def exit_on_one_rank(how: str) -> None:
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_here() -> None:
    time.sleep(60)


def return_late(value: str) -> str:
    time.sleep(2)
    return value


def go_elsewhere(folder: str) -> None:
    os.chdir(folder)
    os.environ["HYBRID_LEFT_BEHIND"] = "1"
    del os.environ["HF_HUB_OFFLINE"]


def surroundings() -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)


class Interruption(Exception):
    """Raised by a signal handler, as pytest's timeout does."""


def interrupt(signum, frame) -> None:
    raise Interruption


separate_ranks = pool_of(2)


def test_results_are_by_rank(separate_ranks):
    assert separate_ranks.run(sum_over_ranks, 10) == [21, 21]
    assert separate_ranks.run(os.getpid) == [process.pid for process in separate_ranks.processes]


def test_a_run_begins_in_the_folder_and_environment_of_the_first(separate_ranks, tmp_path):
    before = separate_ranks.run(surroundings)
    separate_ranks.run(go_elsewhere, str(tmp_path))
    assert separate_ranks.run(surroundings) == before


def test_an_exception_is_reported_while_other_ranks_wait(separate_ranks):
    separate_ranks.run(sum_over_ranks, 0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 raised[\s\S]*the reason"):
        separate_ranks.run(raise_on_one_rank)
    assert time.monotonic() - start < 10
    assert separate_ranks.run(sum_over_ranks, 1) == [3, 3]


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -9)])
def test_a_death_is_reported(separate_ranks, how, code):
    with pytest.raises(RankFailure, match=f"rank 1 died with exit code {code}"):
        separate_ranks.run(exit_on_one_rank, how)


def test_a_death_is_reported_even_if_its_peer_raises(separate_ranks, monkeypatch):
    """Rank 0 raises "connection closed" because rank 1 died; both are noticed at once."""
    separate_ranks.run(sum_over_ranks, 0)

    def late(*args, **kwargs):
        time.sleep(1)
        return wait(*args, **kwargs)

    wait = rank_pool.wait
    monkeypatch.setattr(rank_pool, "wait", late)
    with pytest.raises(RankFailure, match=r"\Aexit_on_one_rank: rank 1 died with exit code 3"):
        separate_ranks.run(exit_on_one_rank, "exit")


@pytest.mark.slow
def test_a_death_between_runs_is_reported_once(separate_ranks):
    separate_ranks.run(sum_over_ranks, 0)
    separate_ranks.processes[1].kill()
    separate_ranks.processes[1].join()
    with pytest.raises(RankFailure, match="rank 1 died with exit code -9"):
        separate_ranks.run(sum_over_ranks, 0)
    assert separate_ranks.run(sum_over_ranks, 1) == [3, 3]


def test_an_interrupted_run_leaves_no_results(separate_ranks):
    separate_ranks.run(sum_over_ranks, 0)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(Interruption):
            separate_ranks.run(return_late, "old")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert separate_ranks.run(return_late, "new") == ["new", "new"]


def test_a_timeout_shows_the_stacks(separate_ranks):
    separate_ranks.run(sum_over_ranks, 0)
    with pytest.raises(RankFailure, match=r"did not finish in 1 s[\s\S]*sleep_here"):
        separate_ranks.run(sleep_here, timeout_s=1)


def test_a_failed_start_is_not_retried(monkeypatch):
    monkeypatch.setattr(rank_pool, "START_TIMEOUT_S", 0.1)
    pool = RankPool(1)
    try:
        with pytest.raises(RankFailure, match=r"start: ranks \[0\] did not finish in 0.1 s"):
            pool.run(sum_over_ranks, 0)
        with pytest.raises(RankFailure, match="ranks did not start before"):
            pool.run(sum_over_ranks, 0)
        assert pool.processes == []
    finally:
        pool.close()


def test_close_leaves_no_process():
    pool = RankPool(1)
    (pid,) = pool.run(os.getpid)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_is_killed_at_its_timeout(tmp_path, monkeypatch):
    """The clock jumps past the timeout once the script has printed."""
    script, printed = tmp_path / "sleeper.py", tmp_path / "printed"
    script.write_text(f"import time; print('here', flush=True); open({str(printed)!r}, 'w'); time.sleep(60)")
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * printed.exists(), sleep=time.sleep)
    monkeypatch.setattr(rank_pool, "time", clock)
    with pytest.raises(RankFailure, match="here"):
        run_script([str(script)], world_size=1, timeout_s=60)
