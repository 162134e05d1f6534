"""Reward servers and async functions that do not end are given up in time; nothing waits for them afterwards."""

import asyncio
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rlhf_examples import rewards
from rlhf_examples.rewards import load_reward, score_all

SOON_S = 20.0  # limit for what takes less than a second
ONE = (["a"], ["b"], {})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rewards, "FIRST_RETRY_DELAY_S", 0.001)


@contextmanager
def socket_server(answer) -> Iterator[tuple[str, list[threading.Event]]]:
    """Calls `answer` with each connection; gives the address, and an event for each connection, set once the client has
    closed it."""
    closed: list[threading.Event] = []

    def serve(connection: socket.socket, over: threading.Event) -> None:
        with connection, suppress(OSError):
            answer(connection)
            while connection.recv(1 << 16):
                pass
        over.set()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                closed.append(threading.Event())
                threading.Thread(target=serve, args=(connection, closed[-1]), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/words", closed
        listener.shutdown(socket.SHUT_RDWR)


def drip(connection: socket.socket) -> None:
    """Headers, then a byte now and then, for longer than anybody waits."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [lambda connection: None, drip], ids=["never answers", "drips"])
def test_a_server_that_does_not_finish_its_answer_is_left_at_the_timeout(answer):
    with socket_server(answer) as (address, closed):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"reward: s took longer than 0.5 s, after 1 retries"):
            score_all({"s": load_reward(address)}, *ONE, timeout_s=0.5, retries=1)
        assert 1.0 < time.monotonic() - start < SOON_S
        assert len(closed) == 2 and all(event.wait(SOON_S) for event in closed), "a connection stayed open"


def test_a_server_that_does_not_accept_is_left_at_the_timeout():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # they fill the kernel's queue
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"reward: s took longer than 0.3 s, after 0 retries"):
            score_all({"s": load_reward(f"http://127.0.0.1:{port}")}, *ONE, timeout_s=0.3, retries=0)
        assert time.monotonic() - start < SOON_S
        for client in waiting:
            client.close()


def test_an_async_function_that_blocks_its_event_loop_is_an_error(monkeypatch):
    monkeypatch.setattr(rewards, "GRACE_S", 0.2)
    release = threading.Event()

    async def blocks(prompts, completions, **columns):
        release.wait()

    with pytest.raises(RuntimeError, match="of blocks, .* runs for more than 0.1 s and cannot be cancelled"):
        score_all({"blocks": blocks}, *ONE, timeout_s=0.1, retries=0)
    release.set()


def test_an_error_of_one_reward_cancels_the_others():
    cancelled = {"by plain": threading.Event(), "by async": threading.Event()}

    def waiting(name: str):
        async def wait(prompts, completions, **columns):
            started.set()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled[name].set()
                raise

        return wait

    def fails(prompts, completions, **columns):
        assert started.wait(SOON_S)
        raise ArithmeticError("plain")

    async def fails_too(prompts, completions, **columns):
        raise ValueError("async")

    started = threading.Event()
    with pytest.raises(ArithmeticError, match="plain"):
        score_all({"waits": waiting("by plain"), "fails": fails}, *ONE)
    with pytest.raises(ValueError, match="async"):
        score_all({"waits": waiting("by async"), "fails": fails_too}, *ONE)
    assert all(event.wait(SOON_S) for event in cancelled.values())


ENDLESS = """
    import asyncio, threading, sys
    from rlhf_examples.common.daemon_threads import DaemonThreads
    from rlhf_examples.rewards import score_all

    async def in_a_thread(prompts, completions, **columns):
        await asyncio.to_thread(threading.Event().wait)

    try:
        score_all({"endless": in_a_thread}, ["a"], ["b"], {}, timeout_s=0.1, retries=1)
    except RuntimeError as error:
        print(error)
    with DaemonThreads(1) as worker:
        worker.submit(threading.Event().wait)
"""


def test_a_process_ends_while_a_rewards_thread_never_does():
    command = [sys.executable, "-c", textwrap.dedent(ENDLESS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * SOON_S)
    assert (done.returncode, done.stdout) == (0, "reward: endless took longer than 0.1 s, after 1 retries\n")
    assert done.stderr == ""
