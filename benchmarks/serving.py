"""Requests one by one: agents that arrive by a Poisson process, and the cost of requests against a rollout of them.

    torchrun --nproc_per_node=1 -m benchmarks.serving agents --shape 134M --rate 1
    torchrun --nproc_per_node=1 -m benchmarks.serving overhead

agents: each has 3 to 8 turns; a turn's prompt is the whole conversation so far and some tokens of the user. Prints
tokens per second, and the seconds to a turn's first token and between two tokens, as median and 99th percentile.
overhead: `--rows` prompts at once, as a rollout and as requests, in turns.
Times of other machines cannot be compared with these.
"""

import asyncio
import random
import statistics
import time
from typing import Any

import torch

import hybrid
from benchmarks import results
from benchmarks.overhead import PLAIN, SHAPES, engine_of, llama
from benchmarks.ranks import print_on_rank_0, start_ranks

USER_TOKENS = 24  # of a turn
TURNS = 3, 8


def percentiles(values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    values = sorted(values)
    return {"p50": statistics.median(values), "p99": values[min(int(0.99 * len(values)), len(values) - 1)]}


async def agent(server: hybrid.Server, number: int, vocabulary: int, prompt: int, new: int) -> list[list[float]]:
    """Run an agent; return, for each turn, when it was sent and when each token came."""
    draw, turns = random.Random(number), []
    ids = [draw.randrange(10, vocabulary) for _ in range(prompt)]
    for turn in range(draw.randint(*TURNS)):
        count = draw.randint(new // 4, new)
        params = hybrid.SamplingParams(count, seed=number, stop_token_ids=())
        times = [time.perf_counter()]
        async for chunk in server.stream(ids, params, row_id=turn, client=str(number)):
            times += [time.perf_counter()] * len(chunk.token_ids)
            ids = ids + chunk.token_ids
        turns.append(times)
        ids = ids + [draw.randrange(10, vocabulary) for _ in range(USER_TOKENS)]
    return turns


async def serve_agents(
    engine: hybrid.HybridEngine, count: int, rate: float, vocabulary: int, prompt: int, new: int
) -> dict[str, Any]:
    """Serve `count` agents, of which `rate` arrive in a second."""
    draw, tasks = random.Random(0), []
    async with engine.serve() as server:
        await agent(server, count, vocabulary, prompt, new)  # memory, and the self-check
        before, start = server.stats(), time.perf_counter()
        for number in range(count):
            tasks.append(asyncio.ensure_future(agent(server, number, vocabulary, prompt, new)))
            await asyncio.sleep(draw.expovariate(rate))
        turns = [times for of_agent in await asyncio.gather(*tasks) for times in of_agent]
        seconds, after = time.perf_counter() - start, server.stats()
    prompts = after.prompt_tokens - before.prompt_tokens
    return {
        "tokens_per_s": (after.generation_tokens - before.generation_tokens) / seconds,
        "first_token_s": percentiles([times[1] - times[0] for times in turns]),
        "token_s": percentiles([(times[-1] - times[1]) / (len(times) - 2) for times in turns if len(times) > 2]),
        "cached_share": (after.cached_tokens - before.cached_tokens) / prompts,
        "turns": len(turns),
    }


def measure_overhead(
    engine: hybrid.HybridEngine, rows: int, vocabulary: int, prompt: int, new: int, repetitions: int
) -> dict[str, list[float]]:
    """Return tokens per second of rollouts, and of the same prompts and keys as requests of as many tasks, in turns."""
    rates: dict[str, list[float]] = {"rollout": [], "requests": []}
    for repetition in range(repetitions + 1):
        ids = torch.randint(10, vocabulary, (rows, prompt), generator=torch.Generator().manual_seed(repetition))
        params = hybrid.SamplingParams(new, seed=repetition)
        start = time.perf_counter()
        batch = engine.rollout(ids, torch.ones_like(ids), params, row_ids=torch.arange(rows))
        rates["rollout"].append(int(batch.completion_mask.sum()) / (time.perf_counter() - start))

        async def send(
            ids: torch.Tensor = ids, params: hybrid.SamplingParams = params
        ) -> tuple[float, list[list[int]]]:
            async with engine.serve(max_num_seqs=rows) as server:
                start = time.perf_counter()
                requests = (server.generate(of_row, params, row_id=row) for row, of_row in enumerate(ids))
                tokens = [each[0].token_ids for each in await asyncio.gather(*requests)]
                return time.perf_counter() - start, tokens

        engine.mark_weights_changed()  # the rollout's keys and values must not be found
        seconds, tokens = asyncio.run(send())
        rates["requests"].append(sum(map(len, tokens)) / seconds)
        expected = [
            row[mask.bool()].tolist() for row, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)
        ]
        assert tokens == expected, "requests and rollout give different tokens"
    return {name: values[1:] for name, values in rates.items()}


def main() -> None:
    """Measure what the command line asks for."""
    parser = results.parser(__doc__, rows=32, prompt=64, new=128, repetitions=5, agents=40)
    parser.add_argument("what", choices=["agents", "overhead"])
    parser.add_argument("--shape", choices=SHAPES, default="7M")
    parser.add_argument("--rate", type=float, default=4.0, help="agents that arrive in a second")
    arguments = parser.parse_args()
    start_ranks()
    about = results.begin("serving", arguments)
    torch.manual_seed(0)
    vocabulary = SHAPES[arguments.shape][-1]
    engine = engine_of(llama(*SHAPES[arguments.shape]), {}, PLAIN)
    sizes = vocabulary, arguments.prompt, arguments.new
    if arguments.what == "agents":
        figures = asyncio.run(serve_agents(engine, arguments.agents, arguments.rate, *sizes))
        first, each = figures["first_token_s"], figures["token_s"]
        print_on_rank_0(
            f"{figures['tokens_per_s']:.0f} tokens/s, {figures['turns']} turns, {figures['cached_share']:.0%} of "
            f"prompts' tokens from the KV cache; first token {first['p50'] * 1e3:.0f} ms "
            f"(p99 {first['p99'] * 1e3:.0f}), each token {each['p50'] * 1e3:.1f} ms (p99 {each['p99'] * 1e3:.1f})"
        )
    else:
        rates = measure_overhead(engine, arguments.rows, *sizes, arguments.repetitions)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratio = medians["requests"] / medians["rollout"]
        print_on_rank_0(
            f"tokens/s: rollout {medians['rollout']:.0f}, requests {medians['requests']:.0f}, ratio {ratio:.3f}"
        )
        figures = {"tokens_per_s": rates}
    engine.destroy()
    results.write(arguments.output, {**about, **figures})


if __name__ == "__main__":
    main()
