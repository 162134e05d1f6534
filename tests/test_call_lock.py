"""The lock of an engine: fair, re-entrant, and never passed to one who has gone; asyncio tasks of one thread."""

import asyncio
import threading
import time
import warnings

import pytest

from hybrid.call_lock import CallLock


def waiting(lock: CallLock, count: int) -> None:
    """Return once so many threads wait for the lock."""
    deadline = time.monotonic() + 5
    while len(lock._waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_get_it_in_the_order_in_which_they_came():
    """Also against one that takes it again and again, which starves others of a `threading.RLock`."""
    lock, order = CallLock(), []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(5)]
    with lock, lock:  # re-entrant: the inner end lets nobody in
        for count, thread in enumerate(threads, start=1):
            thread.start()
            waiting(lock, count)
        with lock:
            pass
        assert order == []
    take("last")
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3, 4, "last"]


def test_who_stops_waiting_is_passed_over():
    """A warning that is raised as an error stands for any exception that ends the waiting, such as Ctrl-C."""
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
    with lock:  # nobody has it, and nobody waits
        assert not lock._waiting


def test_a_block_ends_in_the_thread_that_it_began_in():
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


def test_a_task_that_finds_another_task_of_its_thread_inside_is_told():
    """Waiting would stop the thread for ever, and letting it in would mix the two calls."""
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
    with lock:  # a loop within a block is part of it
        asyncio.run(block(asyncio.Event(), set_event()))


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
