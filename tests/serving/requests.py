"""Requests for a server, each with settings of its own, and what of their completions must be equal to the bit."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import hybrid
from hybrid import Completion, SamplingParams
from tests.tiny_models import VOCABULARY

Call = tuple[list[int], SamplingParams, dict[str, Any]]


def mixed_calls(count: int, seed: int = 0) -> list[Call]:
    """Arguments of `Server.generate`: prompts that share prefixes, and every setting."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 17, 30)]
    calls: list[Call] = []
    for index in range(count):
        prompt = draw.choice(stems) + [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(4))]
        kind = index % 10
        params = SamplingParams(
            max_new_tokens=draw.choice([1, 5, 20, 33]),
            temperature=draw.choice([0.0, 0.7, 1.0, 1.3]),
            top_p=0.9 if kind == 1 else 1.0,
            top_k=20 if kind == 2 else 0,
            min_p=0.02 if kind == 3 else 0.0,
            repetition_penalty=1.2 if kind == 4 else 1.0,
            min_new_tokens=1 if kind == 5 else 0,
            stop_token_ids=tuple(draw.sample(range(3, VOCABULARY), 6)) if kind in (5, 6) else (),
            seed=None if kind == 7 else 11,
        )
        more: dict[str, Any] = {"request_id": f"call {index}", "client": f"client {index % 3}", "priority": index % 2}
        if kind != 7:
            more["row_id"] = index
        if kind == 8:
            more |= {"logit_bias": {7: 4.0, 11: -3.0, 2: float("-inf")}, "response_prefix": [5, 6, 7]}
        if kind == 9:
            more["n"] = 3
        calls.append((prompt, params, more))
    return calls


def values(completions: Sequence[Completion]) -> list[tuple]:
    """The fields of completions that depend on the request alone."""
    return [
        (each.token_ids, each.logps, each.old_logps, each.raw_logps, each.finish_reason, each.sampling_key)
        for each in completions
    ]


async def results(
    server: hybrid.Server, calls: Sequence[Call], gap_s: float | None = None, at_once: int = 10**6
) -> dict[str, list[tuple]]:
    """Completions by request id: at most `at_once` requests run, and one is sent every `gap_s` seconds."""
    free = asyncio.Semaphore(at_once)

    async def send(call: Call) -> tuple[str, list[tuple]]:
        prompt, params, more = call
        async with free:
            return more["request_id"], values(await server.generate(prompt, params, **more))

    tasks = []
    for call in calls:
        tasks.append(asyncio.ensure_future(send(call)))
        await asyncio.sleep(0 if gap_s is None else gap_s)
    return dict(await asyncio.gather(*tasks))


def served(engine: Any, calls: Sequence[Call], max_num_seqs: int, **arrivals: Any) -> dict[str, list[tuple]]:
    """Completions by a server of the engine."""

    async def main() -> dict[str, list[tuple]]:
        async with engine.serve(max_num_seqs=max_num_seqs) as server:
            server._seed = 5  # of requests without one: by default the engine's next
            return await results(server, calls, **arrivals)

    return asyncio.run(main())
