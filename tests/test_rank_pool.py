"""The harness itself: a rank's failure is reported with its traceback, and nobody hangs."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests import rank_pool
from tests.rank_pool import RankFailure, RankPool, run_script


def summed(value: int) -> int:
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


def answer_late(value: str) -> str:
    time.sleep(2)
    return value


class Interruption(Exception):
    """What a signal handler raises in a test, as pytest's timeout does."""


def interrupt(signum, frame) -> None:
    raise Interruption


@pytest.fixture(scope="module")
def own_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


def test_results_come_by_rank(own_ranks):
    assert own_ranks.run(summed, 10) == [21, 21]
    assert own_ranks.run(os.getpid) == [process.pid for process in own_ranks.processes]


def test_an_exception_is_reported_while_others_wait(own_ranks):
    own_ranks.run(summed, 0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 raised[\s\S]*the reason"):
        own_ranks.run(raise_on_one_rank)
    assert time.monotonic() - start < 10
    assert own_ranks.run(summed, 1) == [3, 3]


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -9)])
def test_a_death_is_reported(own_ranks, how, code):
    with pytest.raises(RankFailure, match=f"rank 1 died with exit code {code}"):
        own_ranks.run(exit_on_one_rank, how)


def test_a_death_is_named_though_its_peer_raises_too(own_ranks, monkeypatch):
    """Rank 0 raises "connection closed" because rank 1 died; both are there when we look."""
    own_ranks.run(summed, 0)

    def late(*args, **kwargs):
        time.sleep(1)
        return wait(*args, **kwargs)

    wait = rank_pool.wait
    monkeypatch.setattr(rank_pool, "wait", late)
    with pytest.raises(RankFailure, match=r"\Aexit_on_one_rank: rank 1 died with exit code 3"):
        own_ranks.run(exit_on_one_rank, "exit")


def test_a_death_between_runs_is_reported_once(own_ranks):
    own_ranks.run(summed, 0)
    own_ranks.processes[1].kill()
    own_ranks.processes[1].join()
    with pytest.raises(RankFailure, match="rank 1 died with exit code -9"):
        own_ranks.run(summed, 0)
    assert own_ranks.run(summed, 1) == [3, 3]


def test_an_interrupted_run_leaves_no_answers(own_ranks):
    own_ranks.run(summed, 0)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(Interruption):
            own_ranks.run(answer_late, "old")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert own_ranks.run(answer_late, "new") == ["new", "new"]


def test_a_timeout_shows_the_stacks(own_ranks):
    own_ranks.run(summed, 0)
    with pytest.raises(RankFailure, match=r"did not finish in 1 s[\s\S]*sleep_here"):
        own_ranks.run(sleep_here, timeout_s=1)


def test_ranks_that_did_not_start_are_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(rank_pool, "START_TIMEOUT_S", 0.1)
    pool = RankPool(1)
    try:
        with pytest.raises(RankFailure, match=r"start: ranks \[0\] did not finish in 0.1 s"):
            pool.run(summed, 0)
        with pytest.raises(RankFailure, match="ranks did not start before"):
            pool.run(summed, 0)
        assert pool.processes == []
    finally:
        pool.close()


def test_close_leaves_nobody():
    pool = RankPool(1)
    (pid,) = pool.run(os.getpid)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_is_killed_at_its_timeout(tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text("import time; print('here', flush=True); time.sleep(60)")
    with pytest.raises(RankFailure, match="here"):
        run_script([str(script)], world_size=1, timeout_s=15)
