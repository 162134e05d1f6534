"""Signals that wait, in one process."""

import os
import signal
import threading

import pytest

from hybrid.runtime import interrupts
from hybrid.runtime.call_lock import CallLock
from hybrid.runtime.interrupts import INTERRUPTS


@pytest.fixture(autouse=True)
def handler():
    """Python's own handler, also where tests run in the background, whose jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_waits_for_the_next_safe_place_or_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), INTERRUPTS.held():
        interrupt()
        done.append("held")
        INTERRUPTS.raise_pending()
        done.append("not reached")
    with pytest.raises(KeyboardInterrupt):
        with INTERRUPTS.held(), INTERRUPTS.held():
            interrupt()
            with INTERRUPTS.together():
                INTERRUPTS.raise_pending()
            done.append("together")
        done.append("not reached")
    with INTERRUPTS.held():
        with pytest.raises(KeyboardInterrupt), INTERRUPTS.released():
            interrupt()
        interrupt()
        with pytest.raises(KeyboardInterrupt), INTERRUPTS.released():
            done.append("not reached")
    assert done == ["held", "together"]


def test_a_handler_of_the_program_decides():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with INTERRUPTS.held():
        interrupt()
        assert not seen
        INTERRUPTS.raise_pending()
        assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with INTERRUPTS.held():
        interrupt()
        INTERRUPTS.raise_pending()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_second_signal_does_not_wait_and_ends_the_engine(monkeypatch):
    monkeypatch.setattr(interrupts, "FORCED_AFTER_S", 0.0)
    lock = CallLock()
    with pytest.raises(KeyboardInterrupt), lock.call():
        interrupt()
        interrupt()
        pytest.fail("not reached")
    with pytest.raises(RuntimeError, match="a second Ctrl-C.*build the engine again"), lock.call():
        pass


def test_other_threads_hold_nothing_back():
    errors = []

    def work() -> None:
        with INTERRUPTS.held():
            try:
                INTERRUPTS.raise_pending()
            except KeyboardInterrupt as error:
                errors.append(error)

    with pytest.raises(KeyboardInterrupt), INTERRUPTS.held():
        interrupt()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors
