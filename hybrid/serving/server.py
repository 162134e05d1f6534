"""`engine.serve()`: requests come one by one, from asyncio tasks and threads, and are decoded together."""

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybrid.decoders.batch import NO_ADAPTER
from hybrid.environments.stepping import id_list, require_in_vocabulary
from hybrid.execution.generator import Generator, adapter_number
from hybrid.execution.stream import Stream
from hybrid.generation.scoring import Scores
from hybrid.generation.serving_scheduler import Arrivals, IncomingRow, Piece
from hybrid.runtime.background_loop import in_thread
from hybrid.runtime.call_lock import CallLock
from hybrid.runtime.inputs import checked_number, checked_top_logprobs
from hybrid.runtime.parallel import rank
from hybrid.sampling.params import COUNT, MAX_COUNT, SamplingParams, end_token_ids
from hybrid.sampling.sampler import stream_keys
from hybrid.weights.named_adapters import BASE, Adapters, chosen_adapters, runs_in_layers

IN_USE = (
    "the engine serves requests, and its weights stay as they are meanwhile: end the block of `engine.serve()` before "
    "any other call of the engine"
)
CLOSED = "the server has been closed, and the requests that it had end with it; await them inside `with engine.serve()`"
INT64 = 2**63
TURN_S = 1.0  # in which rows of one adapter are admitted while rows of another one wait
END: Any = object()  # of a stream's chunks


class ServerBusy(RuntimeError):
    """The queue is full: the request was not accepted. Send it again later, or raise `max_queue`."""


class ServerClosed(RuntimeError):
    """The server has ended, or was never started: it has no answer for the request."""


@dataclass(frozen=True)
class Completion:
    """A sample of a request.

    Attributes:
        request_id: as given, or the server's.
        index: of the sample, from 0.
        prompt_ids: as given.
        token_ids: sampled tokens, the stop token included; without the response prefix.
        logps: of each token, under the distribution that it was drawn from (`RolloutBatch.sampling_per_token_logps`).
        old_logps: under the model's logits at the request's temperature (`RolloutBatch.old_per_token_logps`).
        raw_logps: under the model's logits.
        finish_reason: "stop", "length" or "abort".
        weight_version: of the weights that sampled it.
        sampling_key: (seed, row, sample): with the same key, prompt, settings and weights the tokens are the same.
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    logps: list[float]
    old_logps: list[float]
    raw_logps: list[float]
    finish_reason: str
    weight_version: int
    sampling_key: tuple[int, int, int]


@dataclass(frozen=True)
class Chunk:
    """New tokens of a sample. Fields as Completion's.  finish_reason: None before the last chunk."""

    request_id: str
    index: int
    token_ids: list[int]
    logps: list[float]
    old_logps: list[float]
    raw_logps: list[float]
    finish_reason: str | None
    weight_version: int
    sampling_key: tuple[int, int, int]


@dataclass(frozen=True)
class TokenScores:
    """Logprobs of given tokens, under the model's logits.

    Attributes:
        request_id: as given, or the server's.
        token_ids: as given.
        logps: of each token but the first.
        top_token_ids: the most probable tokens at the same places, in falling order; [] each if none were requested.
        top_logps: their logprobs.
        weight_version: of the weights.
    """

    request_id: str
    token_ids: list[int]
    logps: list[float]
    top_token_ids: list[list[int]]
    top_logps: list[list[float]]
    weight_version: int

    def top(self, place: int) -> dict[int, float]:
        """Return the logprobs of the most probable tokens at a place above 0, and of the token there, by token."""
        of_top = zip(self.top_token_ids[place - 1], self.top_logps[place - 1], strict=True)
        return {**dict(of_top), self.token_ids[place]: self.logps[place - 1]}


@dataclass(frozen=True)
class ServerStats:
    """Counts of a server.

    Attributes:
        running: samples that are decoded now.
        waiting: samples in the queue.
        finished: requests with a result, aborted ones included.
        failed: requests that raised an error.
        prompt_tokens: of prompts that were admitted, once for each request.
        cached_tokens: of prompts, found in the prefix cache. In a tensor-parallel group: of all ranks.
        generation_tokens: sampled.
        kv_cache_usage: blocks in use, as a share of the KV cache.
        weight_version: of the weights.
    """

    running: int
    waiting: int
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    kv_cache_usage: float
    weight_version: int


@dataclass
class Sample:
    """The tokens of a sample so far, and their logprobs: sampling, old, raw."""

    sampling_key: tuple[int, int, int]
    token_ids: list[int] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=lambda: [[], [], []])
    reason: str | None = None


@dataclass
class ActiveRequest:
    """A request without its result.

    numbers: of its rows.
    on_chunk: gets the tokens as they are drawn.
    top_logprobs: as IncomingRow's.
    future: of the completions; of TokenScores where the prompt is scored.
    """

    request_id: str
    prompt_ids: list[int]
    numbers: range
    samples: list[Sample]
    on_chunk: Callable[[Chunk], None] | None = None
    top_logprobs: int | None = None
    future: "Future[Any]" = field(default_factory=Future)


class RequestTable:
    """The requests of a server that have no result yet: the source of a scheduler's rows.

    Where rows of several adapters cannot be decoded together, adapters take turns: a turn that others wait for ends
    after TURN_S seconds, or earlier if it has no rows left; rows in slots then end, the others wait for the next turn.

    max_queue: the most samples that wait.
    turn: adapters whose rows are being decoded; None: the server's own adapters.
    """

    def __init__(self, max_queue: int):
        self.max_queue = max_queue
        self.changed = threading.Condition()  # guards what follows
        self.requests: dict[str, ActiveRequest] = {}
        self.by_number: dict[int, ActiveRequest] = {}
        self.arrived: dict[Adapters | None, list[IncomingRow]] = {}  # not yet taken, by adapters
        self.turn: Adapters | None = None
        self.turn_end = 0.0
        self.last_turns: dict[Adapters | None, float] = {}  # when each ended
        self.aborted: list[int] = []
        self.waiting: set[int] = set()  # numbers of rows
        self.next_number = self.finished = self.failed = self.prompt_tokens = self.generation_tokens = 0
        self.weight_version, self.error = 0, ServerClosed("the server is not started: use it inside `with`")
        self.is_open = False

    def open(self, weight_version: int) -> None:
        """Accept requests from now on."""
        with self.changed:
            self.is_open, self.weight_version, self.turn_end = True, weight_version, time.monotonic() + TURN_S

    def close(self, error: ServerClosed) -> None:
        """Accept no more requests, and end those without a result by this error."""
        with self.changed:
            if self.is_open or not self.next_number:
                self.error = error
            self.is_open = False
            self.aborted += self.by_number
            left, self.requests, self.by_number, self.waiting = list(self.requests.values()), {}, {}, set()
            self.changed.notify_all()
        for request in left:
            request.future.set_exception(error)

    def add(
        self, request_id: str | None, n: int, adapters: Adapters | None, make: Callable[[str, range], tuple]
    ) -> ActiveRequest:
        """Add a request of `n` samples.  adapters: of its rows, as `turn`.  make: returns it and its rows, for its id
        and the rows' numbers."""
        with self.changed:
            if not self.is_open:
                raise self.error
            if len(self.waiting) + n > self.max_queue:
                raise ServerBusy(
                    f"serve: {len(self.waiting)} samples wait, and {n} more are over max_queue={self.max_queue}; send "
                    "the request again later, or raise max_queue"
                )
            numbers = range(self.next_number, self.next_number + n)
            request_id = f"request-{rank()}-{numbers.start}" if request_id is None else request_id
            if request_id in self.requests:
                raise ValueError(
                    f"request_id: {request_id!r} given, which a request without a result has; give another"
                )
            request, rows = make(request_id, numbers)
            request.future.set_running_or_notify_cancel()  # it ends by `abort`, not by Future.cancel
            self.next_number = numbers.stop
            self.requests[request_id] = request
            self.by_number.update(dict.fromkeys(numbers, request))
            self.waiting.update(numbers)
            self.arrived.setdefault(adapters, []).extend(rows)
            self.changed.notify_all()
        return request

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Let a request end with the tokens that it has, or one sample of it. Does nothing if it has ended."""
        with self.changed:
            if (request := self.requests.get(request_id)) is not None:
                self.aborted += request.numbers if index is None else [request.numbers[index]]
                self.changed.notify_all()

    # ---------------------------------------------- turns of adapters

    def begin_turn(self) -> bool:
        """Choose the adapters whose rows are decoded next, those whose last turn is the longest ago; return whether the
        table is open."""
        with self.changed:
            self.turn = min(self.arrived, key=lambda adapters: self.last_turns.get(adapters, 0.0), default=self.turn)
            self.turn_end = time.monotonic() + TURN_S
            return self.is_open

    def end_turn(self, error: Exception | None = None) -> None:
        """End the turn.  error: why it could not begin: that of its requests, too."""
        with self.changed:
            self.last_turns[self.turn] = time.monotonic()
            rows = [] if error is None else self.arrived.pop(self.turn, [])
            failed = {request.request_id: request for row in rows if (request := self.by_number.get(row.number))}
            for request in failed.values():
                self._end(request, failed=True)
        for request in failed.values():
            request.future.set_exception(error)

    # ---------------------------------------------- as a RowSource

    def take(self, wait_s: float) -> Arrivals:
        """Return what has come for the turn; wait up to `wait_s` seconds, of an idle scheduler, if nothing has. Closed
        once the turn ends."""
        with self.changed:
            if wait_s and self.is_open and not self.arrived and not self.aborted:
                self.changed.wait(wait_s)
            others_wait = bool(self.arrived.keys() - {self.turn})
            is_over = time.monotonic() >= self.turn_end or (wait_s > 0 and self.turn not in self.arrived)
            rows = [] if others_wait and is_over else self.arrived.pop(self.turn, [])
            aborted, self.aborted = self.aborted, []
            for adapters, waiting in list(self.arrived.items()) if aborted else ():  # the scheduler ends them too
                rows += [row for row in waiting if row.number in aborted]
                self.arrived[adapters] = [row for row in waiting if row.number not in aborted]
                if not self.arrived[adapters]:
                    del self.arrived[adapters]
            return Arrivals(rows, aborted, self.is_open and not (others_wait and is_over))

    def put_back(self, rows: Sequence[IncomingRow]) -> None:
        """Keep rows for the next turn of their adapters."""
        with self.changed:
            self.arrived[self.turn] = [*rows, *self.arrived.get(self.turn, [])]

    def admit(self, number: int) -> None:
        """Note that a row does not wait any more."""
        with self.changed:
            self.waiting.discard(number)
            request = self.by_number.get(number)
            if request is not None and number == request.numbers.start:
                self.prompt_tokens += len(request.prompt_ids)

    def give(self, number: int, piece: Piece) -> None:
        """Take new tokens of a row."""
        with self.changed:
            self.waiting.discard(number)
            if (request := self.by_number.get(number)) is None:  # the server is closed, or the request has failed
                return
            index = number - request.numbers.start
            sample = request.samples[index]
            sample.token_ids += piece.tokens
            for so_far, new in zip(sample.logps, piece.logps, strict=True):
                so_far += new
            sample.reason = piece.reason
            self.generation_tokens += len(piece.tokens)
            is_done = piece.error is not None or all(each.reason for each in request.samples)
            if is_done:
                self._end(request, failed=piece.error is not None)
        if request.on_chunk is not None and piece.error is None:
            request.on_chunk(Chunk(**self._fields(request, index, piece.tokens, piece.logps, piece.reason)))
        if piece.error is not None:
            piece.error.weight_version = self.weight_version
            request.future.set_exception(piece.error)
        elif is_done and request.top_logprobs is not None:
            self._set_scores(request, piece.scores)
        elif is_done:
            completions = []
            for index, each in enumerate(request.samples):
                fields = self._fields(request, index, each.token_ids, each.logps, each.reason)
                completions.append(Completion(prompt_ids=request.prompt_ids, **fields))
            request.future.set_result(completions)

    def _set_scores(self, request: ActiveRequest, scores: Scores | None) -> None:
        """Set the result of a request whose prompt was scored.  scores: None if it was aborted before."""
        if scores is None:
            request.future.set_exception(RuntimeError(f"score: request {request.request_id!r} was aborted"))
            return
        logps, k = scores.per_token_logps.tolist(), request.top_logprobs
        top_ids: list[list[int]] = [[] for _ in logps]
        top_logps: list[list[float]] = [[] for _ in logps]
        if scores.top_ids is not None and scores.top_logprobs is not None:  # of all rows that were scored together
            top_ids, top_logps = (each[:, :k].tolist() for each in (scores.top_ids, scores.top_logprobs))
        ids, version = request.prompt_ids, self.weight_version
        request.future.set_result(TokenScores(request.request_id, ids, logps, top_ids, top_logps, version))

    def _end(self, request: ActiveRequest, failed: bool) -> None:
        """Forget a request."""
        del self.requests[request.request_id]
        for number, sample in zip(request.numbers, request.samples, strict=True):
            del self.by_number[number]
            self.waiting.discard(number)
            if sample.reason is None:
                self.aborted.append(number)
        self.failed += failed
        self.finished += not failed

    def _fields(
        self, request: ActiveRequest, index: int, token_ids: list[int], logps: Sequence[list[float]], reason: str | None
    ) -> dict[str, Any]:
        """Return the fields that Completion and Chunk share.  logps: sampling, old, raw."""
        return {
            "request_id": request.request_id,
            "index": index,
            "token_ids": token_ids,
            **dict(zip(("logps", "old_logps", "raw_logps"), logps, strict=True)),
            "finish_reason": reason,
            "weight_version": self.weight_version,
            "sampling_key": request.samples[index].sampling_key,
        }


class Server:
    """Serves requests by an engine, until its `with` or `async with` block ends. Built by `engine.serve`.

    Its methods may be called from any thread and from any event loop. What is left of requests when the block ends
    raises ServerClosed. Until then the engine makes no other call.

    call: opens a call of the engine.  lock: the engine's.
    """

    def __init__(
        self,
        generator: Generator,
        call: Callable[[], AbstractContextManager],
        lock: CallLock,
        adapters: Adapters | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_queue: int = 1024,
    ):
        longest = generator.settings.max_out_tokens
        if max_num_seqs is None:
            max_num_seqs = generator.rollout_settings.max_num_seqs
        self.max_num_seqs = checked_number("max_num_seqs", max_num_seqs, *COUNT)
        up_to = (int, lambda value: 2 <= value <= longest, f"between 2 and max_out_tokens={longest}, an integer")
        self.max_model_len = checked_number(
            "max_model_len", longest if max_model_len is None else max_model_len, *up_to
        )
        self._table = RequestTable(checked_number("max_queue", max_queue, *COUNT))
        self._generator, self._open_call, self._lock, self._adapters = generator, call, lock, adapters
        self._stream: Stream[int] | None = None
        self._seed = 0
        self._mixed: tuple[str, ...] = ()  # adapters whose rows are decoded together; (): they take turns
        self._own_adapter = BASE  # the name of `_adapters`, where rows are decoded together

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give as `adapter`, "__base__" for none. Empty without adapters, and where ranks
        gather or compute together."""
        executor = self._generator.executor
        named = executor.window.named
        known = [] if executor.is_shared else named.names()
        names = [name for name in known if (config := named.configs.get(name)) is None or runs_in_layers(config)]
        return [*names, BASE] if names else []

    # ---------------------------------------------------------------- requests

    async def generate(
        self, prompt_ids: Sequence[int] | torch.Tensor, params: SamplingParams, **settings: Any
    ) -> list[Completion]:
        """Return a request's completions. Takes `submit`'s arguments; if the task is cancelled, the request ends."""
        return await self._result(self._add(prompt_ids, params, **settings))

    async def stream(
        self, prompt_ids: Sequence[int] | torch.Tensor, params: SamplingParams, **settings: Any
    ) -> AsyncIterator[Chunk]:
        """Yield a request's tokens as they are drawn. Takes the arguments of `submit`; if the iteration is left, the
        request ends."""
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def put(chunk: Any) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits for the rest
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request = self._add(prompt_ids, params, **settings, on_chunk=put)
        request.future.add_done_callback(lambda _: put(END))
        try:
            while (chunk := await chunks.get()) is not END:
                yield chunk
            request.future.result()
        finally:
            self._table.abort(request.request_id)

    async def score(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        top_logprobs: int = 0,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
        adapter: str | None = None,
    ) -> TokenScores:
        """Return the logprobs of given tokens under the model's logits, between two decode steps of other requests.

        The weights are those that sample: of `rollout.weight_dtype: int8`, the int8 copy. If the task is cancelled, the
        request ends.

        Args:
            token_ids: token ids, at least one.
            top_logprobs: number of most probable tokens to return at each place.
            request_id: as for `submit`.
            priority: as for `submit`.
            client: as for `submit`.
            adapter: as for `submit`.

        Raises:
            ServerBusy: if the queue is full.
            ServerClosed: outside the server's block.
            ValueError: for tokens that are too many, or outside the vocabulary.
            InvalidLogitsError: if logits had no softmax.
        """
        top_logprobs = checked_top_logprobs(top_logprobs, self._generator.info.size("vocab_size"))
        params = SamplingParams(1)  # required by `_add`; nothing is sampled
        order = request_id, 1, 0, priority, client
        request = self._add(token_ids, params, *order, adapter=adapter, top_logprobs=top_logprobs)
        return await self._result(request)

    def submit(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        n: int = 1,
        row_id: int | None = None,
        priority: int = 0,
        client: str = "",
        response_prefix: Sequence[int] | torch.Tensor = (),
        logit_bias: Mapping[int, float] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        adapter: str | None = None,
    ) -> "Future[list[Completion]]":
        """Send a request, from any thread, and return the future of its completions.

        Args:
            prompt_ids: token ids of the prompt.
            params: settings of sampling. Without a seed the server's is taken.
            request_id: unique among the requests without a result; None: the server makes one.
            n: samples, each with its own sampling key.
            row_id: keys the sampling RNG, as a row id of `engine.rollout` does. None: 0 if `params` has a seed, else a
                hash of the request's id. Tokens depend on the seed, this number and the sample's, not on other
                requests.
            priority: requests with a lower number are admitted first.
            client: the sender's name. Requests of equal priority are admitted round-robin over clients.
            response_prefix: tokens that the completions begin with; they are not returned. Positions count from the
                first of them: those of an earlier completion of the same key continue it. Limits count what follows.
            logit_bias: numbers added to the logits of tokens, by token.
            on_chunk: called with new tokens, in the server's thread, which it must not keep waiting.
            adapter: the name of the adapter of PEFT that samples, as in `engine.rollout`; None: what the server was
                opened with. With `rollout.lora: unmerged` requests of all adapters are decoded together. Elsewhere
                adapters take turns of about a second; priorities and clients count within one. A turn drops the prefix
                cache, and merges its adapter.

        Raises:
            ServerBusy: if the queue is full.
            ServerClosed: outside the server's block.
            TypeError: for a prompt or settings of a wrong type.
            ValueError: for their values, and for the name of no adapter.
            NotImplementedError: for an adapter that the server was not opened with, where ranks gather or compute
                together.
            InvalidLogitsError: of the future, if logits of a sample had no softmax. Other requests go on.
        """
        arguments = request_id, n, row_id, priority, client, response_prefix, logit_bias, on_chunk, adapter
        return self._add(prompt_ids, params, *arguments).future

    def generate_sync(
        self, prompt_ids: Sequence[int] | torch.Tensor, params: SamplingParams, **settings: Any
    ) -> list[Completion]:
        """Return a request's completions; the calling thread waits for them. Takes the arguments of `submit`."""
        request = self._add(prompt_ids, params, **settings)
        try:
            return request.future.result()
        finally:
            self._table.abort(request.request_id)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request: its completions have the tokens so far, and the reason "abort". Does nothing once it ended.

        index: of the one sample to end; None: all.
        """
        self.cancel(request_id, index)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request as `abort` does, from any thread."""
        self._table.abort(request_id, index)

    def stats(self) -> ServerStats:
        """Return the server's counts as of now."""
        table, pool = self._table, self._generator.block_pool
        with table.changed:
            waiting = len(table.waiting)
            return ServerStats(
                running=len(table.by_number) - waiting,
                waiting=waiting,
                finished=table.finished,
                failed=table.failed,
                prompt_tokens=table.prompt_tokens,
                cached_tokens=pool.reused_tokens,
                generation_tokens=table.generation_tokens,
                kv_cache_usage=pool.num_used / max(pool.capacity - 1, 1),
                weight_version=table.weight_version,
            )

    async def _result(self, request: ActiveRequest) -> Any:
        """Return a request's result; if the task is cancelled, the request ends."""
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            self._table.abort(request.request_id)
            raise

    def _add(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams,
        request_id: str | None = None,
        n: int = 1,
        row_id: int | None = None,
        priority: int = 0,
        client: str = "",
        response_prefix: Sequence[int] | torch.Tensor = (),
        logit_bias: Mapping[int, float] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        adapter: str | None = None,
        top_logprobs: int | None = None,
    ) -> ActiveRequest:
        """Check a request, and queue its samples.  top_logprobs: as IncomingRow's."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: {type(params).__name__} given; it must be hybrid.SamplingParams")
        for name, value in (("client", client), ("request_id", request_id or "")):
            if not isinstance(value, str):
                raise TypeError(f"{name}: {value!r} given; it must be a str")
        prompt, prefix = id_list(prompt_ids), tuple(id_list(response_prefix))
        n = checked_number("n", n, *COUNT)
        number = (int, lambda value: -INT64 <= value < INT64, "an integer of 64 bits")
        priority = checked_number("priority", priority, *number)
        self._require_tokens(prompt, prefix, params.max_new_tokens if top_logprobs is None else 0)
        bias, adapters, adapter_index = self._checked_bias(logit_bias), self._adapters_of(adapter), NO_ADAPTER
        if self._mixed:
            adapters, adapter_index = None, adapter_number(adapter or self._own_adapter, self._mixed)
        stop_token_ids = tuple(end_token_ids(self._generator.model, params.stop_token_ids))
        of_seed = 0 if row_id is None else checked_number("row_id", row_id, *number)
        least = params.min_new_tokens and len(prefix) + params.min_new_tokens
        of_rows = replace(params, max_new_tokens=len(prefix) + params.max_new_tokens, min_new_tokens=least)

        def make(request_id: str, numbers: range) -> tuple[ActiveRequest, list[IncomingRow]]:
            seed, row = (self._seed, row_of(request_id)) if params.seed is None else (params.seed, 0)
            row = row if row_id is None else of_seed
            keys = stream_keys(seed, torch.full((n,), row), torch.arange(n)).tolist()
            ids = torch.tensor(prompt, dtype=torch.int64)
            rows = [
                IncomingRow(
                    number=number,
                    prompt_ids=ids,
                    prefix_ids=prefix,
                    params=of_rows,
                    stop_token_ids=stop_token_ids,
                    sampling_key=key,
                    logit_bias=bias,
                    priority=priority,
                    client=client,
                    streams=on_chunk is not None,
                    top_logprobs=top_logprobs,
                    adapter=adapter_index,
                )
                for number, key in zip(numbers, keys, strict=True)
            ]
            samples = [Sample((seed, row, index)) for index in range(n)]
            return ActiveRequest(request_id, prompt, numbers, samples, on_chunk, top_logprobs), rows

        return self._table.add(request_id, n, adapters, make)

    def _adapters_of(self, adapter: str | None) -> Adapters | None:
        """Return the adapters of a request, None for the server's. Raises as `submit` for an adapter."""
        if adapter is None:
            return None
        executor = self._generator.executor
        executor.window.named.require_given(None, adapter)
        if (adapters := chosen_adapters(None, adapter)) == self._adapters:
            return None
        if executor.is_shared:
            raise NotImplementedError(
                f"adapter: {adapter!r} given; where ranks gather weights or compute together a server has one adapter: "
                f"open it with engine.serve(adapter={adapter!r})"
            )
        return adapters

    def _require_tokens(self, prompt: list[int], prefix: tuple[int, ...], max_new_tokens: int) -> None:
        """Raise ValueError for tokens that cannot be decoded."""
        if not prompt:
            raise ValueError("prompt_ids: no tokens given; a prompt needs one")
        if (total := len(prompt) + len(prefix) + max_new_tokens) > self.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens + a response_prefix of {len(prefix)} + {max_new_tokens} new tokens "
                f"= {total} is over max_model_len={self.max_model_len}; ask for fewer tokens, or give "
                "engine.serve(max_model_len=...) more, up to max_out_tokens"
            )
        info = self._generator.info
        require_in_vocabulary([*prompt, *prefix], "a request", info.size("vocab_size"))
        info.placeholders.require_inputs("serve", torch.tensor([prompt]))

    def _checked_bias(self, logit_bias: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
        finite = (float, lambda value: -MAX_COUNT <= value <= MAX_COUNT or value == -math.inf, "finite, or -inf")
        bias = {token: checked_number("logit_bias", value, *finite) for token, value in (logit_bias or {}).items()}
        require_in_vocabulary(id_list(list(bias)), "logit_bias", self._generator.info.size("vocab_size"))
        return tuple((int(token), float(value)) for token, value in bias.items())

    # -------------------------------------------------------------- its block

    def __enter__(self) -> "Server":
        stream = self._started()
        try:
            next(stream)
        except BaseException:  # also Ctrl-C, after which nobody would end the thread
            stream.close()
            raise
        return self

    async def __aenter__(self) -> "Server":
        await anext(self._started())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        assert self._stream is not None, "the block has begun"
        # A rank that ends by an error serves the other ranks' requests until their servers close; a signal stops them.
        # It is seen before the table closes: else the call may end as usual, and the other ranks go on.
        is_signal = error is not None and not isinstance(error, Exception)
        if is_signal:
            self._stream.stop()
        self._table.close(ServerClosed(CLOSED))
        if is_signal:
            self._stream.close()
        elif error is None:
            self._stream.output()
        else:
            self._stream.join()

    async def __aexit__(self, *error: Any) -> None:
        await in_thread(self.__exit__, *error)

    def _started(self) -> Stream[int]:
        """Start the thread that serves, and return the stream of its one item: the weight version."""
        if self._stream is not None:
            raise RuntimeError("a server has one block; call engine.serve() again for another")
        device = self._generator.device
        self._stream = Stream(self._serve, self._lock, device, stops=True, refusal=IN_USE)
        return self._stream

    def _serve(self, put: Callable[[int], None]) -> None:
        error = ServerClosed(CLOSED)
        try:
            with self._open_call():
                self._seed = self._generator.seeds.next()
                self._mix_adapters()
                self._serve_turn(put)
                while self._table.begin_turn():
                    self._serve_turn()
        except BaseException as raised:
            error = ServerClosed(f"the server has ended by {type(raised).__name__}: {raised}")
            error.__cause__ = raised
            raise
        finally:
            self._table.close(error)

    def _mix_adapters(self) -> None:
        """Decode the rows of all adapters together, if that can be done, and if the server's own are one or none."""
        executor, names, own = self._generator.executor, self.adapters, self._adapters
        if not isinstance(own, str):
            own = BASE if own is False else executor.window.named.active()
        # On GPUs mixing adds two kernel launches to each LoRA product: not for a single adapter and the base model.
        is_worth_it = len(names) > 2 or self._generator.device.type == "cpu"
        if own is not None and is_worth_it:
            self._own_adapter, self._mixed = own, executor.mixable_adapters(names, self.max_model_len)

    def _serve_turn(self, put: Callable[[int], None] | None = None) -> None:
        """Serve rows of the turn's adapters until it ends; if it cannot begin, its requests fail alone.

        put: of the first turn: called with the weight version once the server is open.
        """
        table, has_begun = self._table, False
        adapters = self._mixed or (self._adapters if table.turn is None else table.turn)

        def begin(weight_version: int) -> None:
            nonlocal has_begun
            has_begun = True
            if put is not None:
                table.open(weight_version)
                put(weight_version)

        try:
            self._generator.serve(table, self.max_num_seqs, self.max_model_len, adapters, begin)
        except (NotImplementedError, ValueError) as error:
            if has_begun or put is not None:
                raise
            table.end_turn(error)
        else:
            table.end_turn()


def row_of(request_id: str) -> int:
    """Return the row id of a request without a seed, a hash of its id."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big") >> 1
