"""Agents that send requests to an OpenAI endpoint, this engine's or that of `vllm serve`; and the endpoint's cost.

    make .venv-vllm/.installed
    python -m benchmarks.serving --shape 120M --rates 0.5 4 --contenders hybrid vllm
    python -m benchmarks.serving --shape 10M --what overhead

agents: they arrive by a Poisson process, each has 3 to 8 turns, and a turn's prompt is the whole conversation so far.
Prints tokens per second, and the seconds to a turn's first token and between two tokens, as median and 99th percentile.
While not all that arrives can be served, tokens per second are the server's; otherwise they are those of the arrivals.
overhead: `--rows` prompts at once, as a rollout, as requests of `engine.serve`, and as clients of the endpoint.

Servers take turns on the same cores, with equal weights, prompts and lengths; clients are a process of their own.
Times of other machines cannot be compared with these.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import hybrid
from benchmarks import results, tables
from benchmarks.cases import DTYPES, SHAPES, make_model
from benchmarks.contenders import zero3_engine
from benchmarks.machine import hardware
from benchmarks.ranks import print_on_rank_0, start_ranks
from benchmarks.results import ROOT
from benchmarks.rollout import VLLM_DIRECTORY, use_cores
from benchmarks.serving_clients import TURNS, USER_TOKENS
from benchmarks.vllm_contender import VLLMServer, VLLMSettings


@dataclass(frozen=True)
class Contender:
    """A server.  served: opens its endpoint, with the base URL.  close: ends its process.  about: its version."""

    name: str
    served: Callable[[], AbstractContextManager[str]]
    close: Callable[[], None] = lambda: None
    about: str = ""


def main(arguments: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    start_ranks()
    use_cores(args.threads)
    report = {**results.begin("serving", args, arguments), "contenders": {}, "agents": [], "overhead": {}}
    print_on_rank_0(hardware())
    model, tokenizer = make_model(args.shape, args.dtype, "cpu"), number_tokenizer(SHAPES[args.shape]["vocab"])
    contenders = [each for each in (vllm(args, model, tokenizer),) if each]  # before ZeRO partitions the weights
    longest = context_of(args)
    settings = {"max_num_seqs": args.max_num_seqs, "enable_prefix_caching": True}
    engine = zero3_engine(model, longest, rollout=settings)
    try:
        contenders = [Contender("hybrid", lambda: served(engine, tokenizer)), *contenders]
        report["contenders"] = {each.name: each.about for each in contenders if each.about}
        if "agents" in args.what:
            report["agents"] = measure_agents(contenders, args)
            print_on_rank_0("\n".join(["", *tables.serving(report)]))
        if "overhead" in args.what:
            report["overhead"] = measure_overhead(engine, tokenizer, args)
            print_on_rank_0("\n".join(["", *tables.endpoint_overhead(report)]))
    finally:
        for contender in contenders:
            contender.close()
    engine.destroy()
    results.write(args.output, report)


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers, without an end token: no completion ends before its limit."""
    words = {str(number): number for number in range(vocabulary)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0")), unk_token="0")


def context_of(args: argparse.Namespace) -> int:
    """The tokens of the longest conversation or rollout."""
    return max(args.prompt + TURNS[1] * (args.new + USER_TOKENS), args.prompt + args.new)


@contextmanager
def served(engine: hybrid.HybridEngine, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Inside the block the engine serves; yields its endpoint's base URL."""
    with engine.serve() as server, hybrid.openai_server(server, tokenizer) as endpoint:
        yield endpoint.base_url


def vllm(args: argparse.Namespace, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> Contender | None:
    """`vllm serve` over the same weights, which waits while the other server runs; None if it is not asked for."""
    if "vllm" not in args.contenders or "agents" not in args.what:
        return None
    settings = VLLMSettings(args.vllm_python.absolute(), VLLM_DIRECTORY.absolute(), args.threads)
    server = VLLMServer(settings, model, tokenizer, args.max_num_seqs, context_of(args))
    return Contender("vllm", lambda: nullcontext(server.base_url), server.close, server.about)


def clients(function: str, **arguments: Any) -> Any:
    """Run a function of `benchmarks.serving_clients` in a process of its own; returns what it returns."""
    command, call = [sys.executable, "-m", "benchmarks.serving_clients"], json.dumps({"function": function} | arguments)
    done = subprocess.run(command, input=f"{call}\n", cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure_agents(contenders: list[Contender], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of each contender at each rate, a value for each round. Each round has prompts of its own, which no
    cache holds."""
    cases: list[dict[str, Any]] = [{"rate": rate, "results": {c.name: {} for c in contenders}} for rate in args.rates]
    sizes = {"vocabulary": SHAPES[args.shape]["vocab"], "prompt": args.prompt, "new": args.new}
    for number in range(args.rounds):
        for case in cases:
            for contender in contenders:
                load = {"key": f"{case['rate']} {number}", "count": args.agents, "rate": case["rate"], **sizes}
                with contender.served() as url:
                    turns = clients("agents", base_url=url, **load)
                for name, value in figures_of(turns).items():
                    case["results"][contender.name].setdefault(name, []).append(value)
    return cases


def figures_of(turns: list[list[float]]) -> dict[str, float]:
    """The figures of a round.  turns: for each, when it was sent and when each of its tokens came."""
    first = sorted(times[1] - times[0] for times in turns)
    token = sorted((times[-1] - times[1]) / (len(times) - 2) for times in turns if len(times) > 2)
    seconds = max(times[-1] for times in turns) - min(times[0] for times in turns)
    rate = sum(len(times) - 1 for times in turns) / seconds
    figures = {"tokens_per_s": rate, "turns": float(len(turns))}
    for name, values in (("first_token", first), ("token", token)):
        last = values[min(int(0.99 * len(values)), len(values) - 1)]
        figures |= {f"{name}_p50_s": statistics.median(values), f"{name}_p99_s": last}
    return figures


def measure_overhead(
    engine: hybrid.HybridEngine, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of a rollout, and of the same prompts as requests and as clients, in turns."""
    seconds: dict[str, list[float]] = {}
    for repetition in range(args.repetitions + 1):
        draw = torch.Generator().manual_seed(repetition)
        ids = torch.randint(10, SHAPES[args.shape]["vocab"], (args.rows, args.prompt), generator=draw)
        params = hybrid.SamplingParams(args.new, seed=repetition)
        rows = {"prompts": ids.tolist(), "new": args.new, "seed": repetition}

        def rollout(ids: torch.Tensor = ids, params: hybrid.SamplingParams = params) -> tuple[float, Any]:
            with engine.inference():
                start = time.perf_counter()
                batch = engine.rollout(ids, torch.ones_like(ids), params)
                return time.perf_counter() - start, batch.completion_ids.tolist()

        def requests(ids: torch.Tensor = ids, params: hybrid.SamplingParams = params) -> tuple[float, Any]:
            async def send() -> tuple[float, Any]:
                async with engine.serve() as server:
                    start = time.perf_counter()
                    completions = await asyncio.gather(*(server.generate(row, params) for row in ids.tolist()))
                    return time.perf_counter() - start, [each.token_ids for (each,) in completions]

            return asyncio.run(send())

        def endpoint(stream: bool, rows: dict[str, Any] = rows) -> tuple[float, Any]:
            with served(engine, tokenizer) as url:
                answer = clients("batch", base_url=url, stream=stream, **rows)
            return answer["seconds"], answer["tokens"]

        ways = {"rollout": rollout, "requests": requests}
        ways |= {"endpoint": lambda: endpoint(False), "endpoint, streamed": lambda: endpoint(True)}
        tokens = {}
        for name, way in ways.items():
            engine.mark_weights_changed()  # the keys and values of the way before must not be found
            with engine.inference():  # their gather is not timed
                pass
            taken, tokens[name] = way()
            if repetition:
                seconds.setdefault(name, []).append(taken)
        # A request's seed keys its own noise, a rollout's that of all rows.
        assert tokens["requests"] == tokens["endpoint"] == tokens["endpoint, streamed"], "clients got other tokens"
        assert all(len(row) == args.new for rows in tokens.values() for row in rows), "a row has ended early"
    return {name: [args.rows * args.new / each for each in values] for name, values in seconds.items()}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    flags = results.parser(__doc__, agents=40, rounds=3, rows=32, prompt=64, new=128, repetitions=5, max_num_seqs=64)
    flags.add_argument("--threads", type=int, default=2, help="of each server; default: 2")
    flags.add_argument("--what", nargs="+", choices=["agents", "overhead"], default=["agents", "overhead"])
    flags.add_argument("--shape", choices=SHAPES, default="10M")
    flags.add_argument("--dtype", choices=DTYPES, default="bf16")
    flags.add_argument("--rates", type=float, nargs="+", default=[4.0], help="agents that arrive in a second")
    flags.add_argument("--contenders", nargs="+", choices=["hybrid", "vllm"], default=["hybrid"])
    flags.add_argument("--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"))
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
