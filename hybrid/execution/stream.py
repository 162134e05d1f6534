"""Results as they come: a call that runs in a thread of its own, and an iterator over the results that it yields."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from hybrid.runtime import at_exit
from hybrid.runtime.background_loop import in_thread
from hybrid.runtime.call_lock import CallLock, select_device
from hybrid.runtime.interrupts import INTERRUPTS

Item = TypeVar("Item")
END: Any = object()  # the call has ended


class StoppedByCaller(BaseException):
    """The caller wants no more results. As a signal, it ends the call on the ranks that compute with this one, too."""


class Stream(Generic[Item]):
    """Iterates over a call's results while the call goes on in another thread; `for` and `async for`.

    run: the call; it gives results to the function that it is passed, and returns the whole.
    lock: the engine's, which the call holds until its end: this thread's other calls of the engine wait for that.
    stops: whether the call may end early, as no other rank takes part in it.
    refusal: the error of other calls of the engine meanwhile; "": they wait.

    Leave an iteration early by `close()`, or use the stream in a `with`: the call then stops after its current step,
    or, if other ranks take part, ends first. An `async for` that is cancelled closes the stream without waiting for
    that. An error of the call is raised by the iteration.
    """

    def __init__(
        self,
        run: Callable[[Callable[[Item], None]], Any],
        lock: CallLock,
        device: torch.device,
        stops: bool,
        refusal: str = "",
    ):
        self._run, self._lock, self._device, self._stops = run, lock, device, stops
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._output: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._call, name="hybrid-stream", daemon=True)
        lock.__enter__()
        try:
            lock.hand_over(self.thread, refusal)
            self.thread.start()
        except BaseException:
            lock.__exit__()
            raise
        at_exit.OWNERS.add(self)

    def _call(self) -> None:
        try:
            select_device(self._device)
            if self._stops:
                INTERRUPTS.asks = lambda: StoppedByCaller() if self._closed.is_set() else None
            self._output = self._run(self._put)
        except StoppedByCaller:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._lock.hand_back()
            self._results.put(END)

    def _put(self, item: Item) -> None:
        self._results.put(item)

    def __iter__(self) -> "Stream[Item]":
        return self

    def __next__(self) -> Item:
        item = self._results.get()
        if item is not END:
            return item
        self._results.put(END)  # for later calls of next()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def __aiter__(self) -> "Stream[Item]":
        return self

    async def __anext__(self) -> Item:
        try:
            item = await in_thread(next, self, END)
        except asyncio.CancelledError:  # nobody waits for the rest, and the task must not wait for it
            self._closed.set()
            raise
        if item is END:
            raise StopAsyncIteration
        return item

    def output(self) -> Any:
        """Return the call's result, once it has ended; waits for that. Raises the call's error."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        return self._output

    def join(self) -> None:
        """Wait for the call's end."""
        self.thread.join()

    def stop(self) -> None:
        """Ask the call to stop; does not wait."""
        self._closed.set()

    def close(self) -> None:
        """Stop the call, if no other rank takes part in it, and wait for its end."""
        self.stop()
        self.thread.join()

    def __enter__(self) -> "Stream[Item]":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class TokenStreamer(BaseStreamer):
    """A streamer of Hugging Face's `generate` that gives each step's tokens to a function."""

    def __init__(self, put: Callable[[torch.Tensor], None]):
        self.give, self.has_prompt = put, False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts first, and then the tokens of each step, int64 [rows]."""
        if self.has_prompt:
            self.give(value)
        self.has_prompt = True

    def end(self) -> None:
        """End the iteration: the last step has run."""
