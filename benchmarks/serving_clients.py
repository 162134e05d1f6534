"""The clients of the serving benchmark, a process of their own: they share no interpreter with a server.

A line of JSON on stdin names the function below and its arguments; a line on stdout has what it returned. Needs only
the standard library, whose sockets cost less of a core than a client library's.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

USER_TOKENS = 24  # of a turn
TURNS = 3, 8
MAX_LINE = 2**24  # bytes


async def responses(base_url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Send a request of /v1/completions; yield the chunks of a streamed response, or the whole response.

    Raises RuntimeError for an error of the server.
    """
    url, content = urlsplit(f"{base_url}/completions"), json.dumps(body).encode()
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=MAX_LINE)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise RuntimeError(f"{base_url}: {status}{(await reader.read()).decode()}")
        async for line in reader:
            if (text := line.removeprefix(b"data: ")).startswith(b"{"):  # no header, chunk size or [DONE]
                yield json.loads(text)
    finally:
        writer.close()


async def agent(base_url: str, key: str, vocabulary: int, prompt: int, new: int) -> list[list[float]]:
    """Run an agent, each of whose prompts is the whole conversation so far and some tokens of the user.

    key: seeds its tokens and lengths. Returns, for each turn, when it was sent and when each token came.
    """
    draw, turns = random.Random(key), []
    ids = [draw.randrange(10, vocabulary) for _ in range(prompt)]
    for _ in range(draw.randint(*TURNS)):
        times, count = [time.perf_counter()], draw.randint(new // 4, new)
        body = {"prompt": ids, "max_tokens": count, "temperature": 1.0, "stream": True, "return_token_ids": True}
        async for chunk in responses(base_url, body):
            for choice in chunk["choices"]:
                ids = ids + choice["token_ids"]
                times += [time.perf_counter()] * len(choice["token_ids"])
        assert len(times) == 1 + count, f"{len(times) - 1} tokens of {count}"
        turns.append(times)
        ids = ids + [draw.randrange(10, vocabulary) for _ in range(USER_TOKENS)]
    return turns


async def agents(base_url: str, key: str, count: int, rate: float, **sizes: int) -> list[list[float]]:
    """Run `count` agents, of which `rate` arrive in a second, after one that is not timed; return their turns."""
    await agent(base_url, f"{key} first", **sizes)
    draw, tasks = random.Random(0), []
    for number in range(count):
        tasks.append(asyncio.ensure_future(agent(base_url, f"{key} {number}", **sizes)))
        await asyncio.sleep(draw.expovariate(rate))
    return [times for turns in await asyncio.gather(*tasks) for times in turns]


async def batch(base_url: str, prompts: list[list[int]], new: int, seed: int, stream: bool) -> dict[str, Any]:
    """Send prompts at once, each as a client's request; return the seconds, and each completion's tokens."""

    async def tokens(ids: list[int]) -> list[int]:
        body = {"prompt": ids, "max_tokens": new, "temperature": 1.0, "seed": seed, "stream": stream}
        chunks = [chunk async for chunk in responses(base_url, {**body, "return_token_ids": True})]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]

    start = time.perf_counter()
    completions = await asyncio.gather(*map(tokens, prompts))
    return {"seconds": time.perf_counter() - start, "tokens": completions}


def main() -> None:
    """Run what stdin says."""
    call = json.loads(sys.stdin.readline())
    function = {"agents": agents, "batch": batch}[call.pop("function")]
    print(json.dumps(asyncio.run(function(**call))))


if __name__ == "__main__":
    main()
