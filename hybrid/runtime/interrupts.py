"""Ctrl-C while an engine works: it waits until nothing is half done, such as a gather of weights or a step of several
ranks. Streams that are closed stop their calls at the same places.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FORCED_AFTER_S = 2.0  # a later Ctrl-C does not wait; launchers pass a terminal's on at once, so ranks get it twice


class Interrupts(threading.local):
    """Requests to stop this thread's call. Signals reach the main thread alone.

    asks: returns the error that is to stop the call, or None; where the thread does something for another one.
    joint: ranks run this together, so that none may stop alone: they agree by `taken`.
    forced: Ctrl-C was raised where something may be half done.
    """

    asks: Callable[[], BaseException | None] | None = None
    joint = forced = False
    _handler: Any = None  # the program's own, of signals that are held back
    _since: float | None = None  # time of a signal that is held back

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block Ctrl-C waits for `raise_pending`, `taken` or the block's end. Does nothing where no handler
        in Python would run, and in threads that get no signals."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if is_main else None
        if not callable(handler) or handler == self._note:
            yield
            return
        outer = self._handler, self.forced
        self._handler, self.forced, self._since = handler, False, None
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            error = self.taken()
            self._handler, self.forced = outer
            if error is not None:
                raise error

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside the block, within `held`, code of the user runs: Ctrl-C does not wait."""
        handler = self._handler
        if handler is None or signal.getsignal(signal.SIGINT) != self._note:
            yield
            return
        signal.signal(signal.SIGINT, handler)
        try:
            self.raise_pending()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > FORCED_AFTER_S:
            self._since, self.forced = None, True
            self._handler(number, frame)
            self.forced = False  # the program's handler did not raise

    def taken(self) -> BaseException | None:
        """Return the error that is to stop this thread's call, which the caller raises; None: go on."""
        if self._since is not None:
            self._since = None
            try:
                self._handler(signal.SIGINT, sys._getframe())
            except BaseException as error:
                return error
        return None if self.asks is None else self.asks()

    def raise_pending(self) -> None:
        """Stop the call here if that is asked for: nothing is half done, and no other rank waits for this one."""
        if not self.joint and (error := self.taken()) is not None:
            raise error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block ranks run the same steps, so that `raise_pending` does nothing."""
        outer, self.joint = self.joint, True
        try:
            yield
        finally:
            self.joint = outer


INTERRUPTS = Interrupts()  # signals are the process's
