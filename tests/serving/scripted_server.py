"""A server without a model: completions come from a script, by the interface of `engine.serve`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from hybrid import SamplingParams
from hybrid.serving.server import Chunk, Completion, ServerBusy, ServerClosed, ServerStats, TokenScores

Script = Callable[[list[int], int], list[int]]  # (prompt, sample) → the sampled tokens


class ScriptedServer:
    """Gives a script's tokens, `step` at a time; logprobs are -0.5, -1 and -2 for each token's place from 1.

    requests: the arguments of each request, as they came.  adapters: that they may name.  held: requests wait until it
    is set.
    """

    max_model_len = 4096

    def __init__(self, script: Script, step: int = 1, max_queue: int = 64):
        self.script, self.step, self.max_queue = script, step, max_queue
        self.adapters: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.scored: list[tuple[list[int], int, int, str, str | None]] = []
        self.running: dict[str, int] = {}
        self.closed = False
        self.held: asyncio.Event | None = None

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **settings: Any) -> list[Completion]:
        samples: dict[int, list[Chunk]] = {}
        async for chunk in self.stream(prompt_ids, params, **settings):
            samples.setdefault(chunk.index, []).append(chunk)
        return [
            Completion(
                chunks[0].request_id,
                index,
                list(prompt_ids),
                *(
                    [value for chunk in chunks for value in getattr(chunk, name)]
                    for name in ("token_ids", "logps", "old_logps", "raw_logps")
                ),
                chunks[-1].finish_reason or "",
                chunks[-1].weight_version,
                chunks[-1].sampling_key,
            )
            for index, chunks in sorted(samples.items())
        ]

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        n: int = 1,
        priority: int = 0,
        client: str = "",
        logit_bias: Mapping[int, float] | None = None,
        row_id: int | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[Chunk]:
        if self.closed:
            raise ServerClosed("the server has been closed")
        if len(self.running) >= self.max_queue:
            raise ServerBusy(f"max_queue={self.max_queue}")
        if max(prompt_ids) >= 1000:
            raise ValueError(f"prompt_ids: {max(prompt_ids)} given")
        request_id = request_id or str(len(self.requests))
        self.requests.append({"prompt_ids": list(prompt_ids), "params": params, "n": n, "client": client})
        self.requests[-1] |= {"logit_bias": logit_bias, "priority": priority, "row_id": row_id, "adapter": adapter}
        self.running[request_id] = n
        try:
            left = {}
            for index in range(n):
                tokens = self.script(list(prompt_ids), index)[: params.max_new_tokens]
                left[index] = (tokens, 0)
            while left:
                if self.held is not None:
                    waiter = asyncio.ensure_future(self.held.wait())
                    while not waiter.done() and not self.is_aborted(request_id, 0):
                        await asyncio.sleep(0.001)
                    waiter.cancel()
                for index, (tokens, begin) in list(left.items()):
                    await asyncio.sleep(0)
                    piece = tokens[begin : begin + self.step]
                    left[index] = (tokens, begin + len(piece))
                    places = range(begin + 1, begin + len(piece) + 1)
                    reason = None
                    if self.is_aborted(request_id, index):
                        piece, places, reason = [], range(0), "abort"
                    elif begin + len(piece) == len(tokens):
                        reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
                    if reason:
                        del left[index]
                    logps = [[factor * place for place in places] for factor in (-0.5, -1.0, -2.0)]
                    key = (params.seed or 0, 0, index)
                    yield Chunk(request_id, index, piece, *logps, reason, 3, key)
        finally:
            self.running.pop(request_id, None)

    async def score(
        self,
        token_ids: Sequence[int],
        top_logprobs: int = 0,
        *,
        priority: int = 0,
        client: str = "",
        adapter: str | None = None,
    ) -> TokenScores:
        """Logprobs are -1, -2, ... for each token but the first; the top tokens 10, 11, ... have -0.1, -0.2, ..."""
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"a prompt of {len(token_ids)} tokens is over max_model_len={self.max_model_len}")
        self.scored.append((list(token_ids), top_logprobs, priority, client, adapter))
        places = range(1, len(token_ids))
        top_ids = [list(range(10, 10 + top_logprobs)) for _ in places]
        top_logps = [[-0.1 * (rank + 1) for rank in range(top_logprobs)] for _ in places]
        return TokenScores("", list(token_ids), [-float(place) for place in places], top_ids, top_logps, 3)

    def is_aborted(self, request_id: str, index: int) -> bool:
        return (request_id, None) in self.aborted or (request_id, index) in self.aborted

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def stats(self) -> ServerStats:
        if self.closed:
            raise ServerClosed("the server has been closed")
        return ServerStats(len(self.running), 0, len(self.requests), 0, 11, 0, 7, 0.25, 3)
