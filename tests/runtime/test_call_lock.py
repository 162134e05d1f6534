"""The engine's lock: fair, re-entrant, skipping threads that stopped waiting; asyncio tasks of one thread."""

import asyncio
import threading
import time
import warnings

import pytest
import torch

from hybrid.execution.stream import Stream
from hybrid.runtime import call_lock
from hybrid.runtime.call_lock import CallLock


def wait_for_waiters(lock: CallLock, count: int) -> None:
    """Return once `count` threads wait for the lock."""
    deadline = time.monotonic() + 5
    while len(lock._waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_acquire_the_lock_in_order_of_arrival():
    """Also against a thread that reacquires it repeatedly, which would starve others of a `threading.RLock`."""
    lock, order = CallLock(), []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(5)]
    with lock, lock:  # re-entrant: the inner release admits no thread
        for count, thread in enumerate(threads, start=1):
            thread.start()
            wait_for_waiters(lock, count)
        with lock:
            pass
        assert order == []
    take("last")
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3, 4, "last"]


def test_a_thread_that_stops_waiting_is_skipped():
    """A warning raised as an error stands in for any exception that ends the wait, such as Ctrl-C."""
    lock, outcomes = CallLock(report_after_s=0.01), []

    def take() -> None:
        try:
            with lock:
                outcomes.append("has it")
        except UserWarning as warning:
            outcomes.append(str(warning))

    with pytest.warns(UserWarning) as caught, lock:
        patient = threading.Thread(target=take, name="patient")
        patient.start()
        while not caught:
            time.sleep(0.001)
    patient.join(5)
    assert outcomes == ["has it"]
    assert "thread 'patient' has waited" in str(caught[0].message) and "'MainThread' uses" in str(caught[0].message)

    outcomes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lock:
            impatient = threading.Thread(target=take)
            impatient.start()
            impatient.join(5)
    assert len(outcomes) == 1 and "has waited" in outcomes[0]
    with lock:  # the lock is free
        assert not lock._waiting


def test_releasing_in_another_thread_raises():
    lock, errors = CallLock(), []

    def leave() -> None:
        try:
            lock.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with lock:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(5)
    assert len(errors) == 1 and "in another thread" in errors[0]


def test_a_second_asyncio_task_of_the_thread_raises():
    """Waiting would block the thread forever, and admitting the task would mix the two calls."""
    lock = CallLock()

    async def block(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with lock, lock:
            entered.set()
            await leave.wait()

    async def main() -> str:
        entered, leave = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(block(entered, leave))
        await entered.wait()
        with pytest.raises(RuntimeError) as caught, lock:
            pass
        leave.set()
        await first
        with lock:
            return str(caught.value)

    assert "asyncio.to_thread" in asyncio.run(main())
    with lock:  # an event loop inside a block belongs to it
        asyncio.run(block(asyncio.Event(), set_event()))


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Devices:
    """Stands in for CUDA's devices: each thread has a current one, at first 0."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def current_device(self) -> int:
        return getattr(self.of_thread, "index", 0)

    def set_device(self, index: int) -> None:
        self.of_thread.index = index


@pytest.fixture
def devices(monkeypatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr(call_lock, "get_accelerator", lambda: devices)
    return devices


def lock_on(index: int) -> CallLock:
    lock = CallLock()
    lock.device = torch.device("cuda", index)
    return lock


def in_a_thread(function) -> list:
    """Call `function` in a new thread and return its result in a list."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(5)
    return results


def test_calls_of_a_thread_run_on_the_engines_device(devices):
    """A new thread begins on device 0, also on the rank of device 1; two engines of a process have a device each."""
    first, second = lock_on(0), lock_on(1)
    devices.set_device(1)

    def calls() -> list[int]:
        seen = [devices.current_device()]
        with second.call():
            seen.append(devices.current_device())
            with second.call():
                seen.append(devices.current_device())
            seen.append(devices.current_device())
            with first.call():
                seen.append(devices.current_device())
            seen.append(devices.current_device())
        return [*seen, devices.current_device()]

    assert in_a_thread(calls) == [[0, 1, 1, 1, 0, 1, 0]]
    with pytest.raises(KeyError), first.call():
        raise KeyError
    assert devices.current_device() == 1


def test_a_streams_thread_runs_on_the_engines_device(devices):
    lock = lock_on(1)

    def run(put) -> None:
        put(devices.current_device())

    assert list(Stream(run, lock, lock.device, stops=True)) == [1]
    assert devices.current_device() == 0
    with lock:
        assert list(Stream(run, lock, lock.device, stops=True)) == [1]
        assert devices.current_device() == 1
    assert devices.current_device() == 0 and lock.owner_ident is None
