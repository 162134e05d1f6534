"""Results as they come: a call that runs in a thread of its own, and an iterator over what it gives meanwhile."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from transformers.generation.streamers import BaseStreamer

from hybrid.call_lock import CallLock

Item = TypeVar("Item")
END: Any = object()  # the call has ended


class StoppedByCaller(Exception):
    """The caller wants no more results."""


class Stream(Generic[Item]):
    """Iterates over a call's results while the call goes on in another thread; `for` and `async for`.

    run: the call; it gives results to the function that it is passed, and returns the whole.
    lock: the engine's, which the call holds until its end: this thread's other calls of the engine wait for that.
    stops: whether the call may end early, as no other rank takes part in it.

    Leave an iteration early by `close()`, or use the stream in a `with`: the call then stops, or, if other ranks take
    part, ends first. An error of the call is raised by the iteration.
    """

    def __init__(self, run: Callable[[Callable[[Item], None]], Any], lock: CallLock, device: torch.device, stops: bool):
        self._run, self._lock, self._device, self._stops = run, lock, device, stops
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._output: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, name="hybrid-stream", daemon=True)
        lock.__enter__()
        try:
            lock.hand_over(self._thread)
            self._thread.start()
        except BaseException:
            lock.__exit__()
            raise

    def _call(self) -> None:
        try:
            if self._device.type != "cpu":  # a thread begins on the first device
                get_accelerator().set_device(self._device.index)
            self._output = self._run(self._put)
        except StoppedByCaller:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._lock.hand_back()
            self._results.put(END)

    def _put(self, item: Item) -> None:
        if self._closed.is_set() and self._stops:
            raise StoppedByCaller
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
        item = await asyncio.get_running_loop().run_in_executor(None, next, self, END)
        if item is END:
            raise StopAsyncIteration
        return item

    def output(self) -> Any:
        """What the call returned, once it has ended; waits for that. Raises the call's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._output

    def close(self) -> None:
        """Stop the call, if no other rank takes part in it, and wait for its end."""
        self._closed.set()
        self._thread.join()

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
        """The last step has been."""
