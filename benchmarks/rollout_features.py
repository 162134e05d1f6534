"""The gain of prefix caching and of partial rollouts, each against the same rollout without, in turns.

    torchrun --nproc_per_node=1 -m benchmarks.rollout_features turns
    torchrun --nproc_per_node=1 -m benchmarks.rollout_features system --shape qwen3_5
    torchrun --nproc_per_node=1 -m benchmarks.rollout_features partial --shape 134M

turns: the time to the first token of a conversation's second turn, and the share of its tokens that are computed.
system: the same of prompts that differ in their last tokens alone; without prefix caching each is computed whole.
partial: tokens of finished rows per second in the steady state, where a rollout stops once a share of its rows is done
and the rest goes on in the next one; the lengths are lognormal, and the longest is eight times the median.
Prints medians, minimum and maximum, and the ratio of the last way to the first; times of other machines cannot be
compared with these.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybrid
from benchmarks import results, tables
from benchmarks.cases import read_config
from benchmarks.families import FUSED
from benchmarks.overhead import PLAIN, SHAPES, engine_of, llama
from benchmarks.ranks import print_on_rank_0, start_ranks

NEW_TOKENS = 32  # of the user, in the second turn


def model_of(shape: str) -> PreTrainedModel:
    """A model with random weights."""
    if shape in FUSED:
        return AutoModelForCausalLM.from_config(read_config(shape))
    return llama(*SHAPES[shape])


def make_engine(shape: str, **rollout: bool) -> hybrid.HybridEngine:
    """An engine under ZeRO-3.  rollout: settings of its block."""
    torch.manual_seed(0)
    return engine_of(model_of(shape), rollout, PLAIN)


def tokens(rows: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Random tokens, int64 [rows, length], without the end token."""
    return torch.randint(10, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_turns(ways: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """The measurements of each way, one after the other, `repetitions` times."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            measured[name].append(way())
    return measured


def measure_system(shape: str, rows: int, prompt: int, repetitions: int) -> dict[str, Any]:
    """The prefill of `rows` prompts that begin with the same `prompt` tokens, and have NEW_TOKENS of their own."""
    seeds = iter(range(10**6))

    def prompts(engine: hybrid.HybridEngine) -> torch.Tensor:
        vocabulary = engine.module.config.vocab_size
        system = tokens(1, prompt, vocabulary, next(seeds)).expand(rows, -1)
        return torch.cat([system, tokens(rows, NEW_TOKENS, vocabulary, next(seeds))], dim=1)

    title = f"system: {shape}, {rows} rows, {prompt} tokens of a system prompt + {NEW_TOKENS}, to the first token"
    return measure_prefill(shape, title, prompts, repetitions)


def measure_turns(shape: str, rows: int, prompt: int, new: int, repetitions: int) -> dict[str, Any]:
    """The second turn of `rows` conversations of `prompt` + `new` tokens."""
    seeds = iter(range(10**6))
    first = hybrid.SamplingParams(max_new_tokens=new, min_new_tokens=new)

    def second_turns(engine: hybrid.HybridEngine) -> torch.Tensor:
        vocabulary = engine.module.config.vocab_size
        ids = tokens(rows, prompt, vocabulary, next(seeds))
        batch = engine.rollout(ids, torch.ones_like(ids), first)
        return torch.cat([batch.sequences, tokens(rows, NEW_TOKENS, vocabulary, next(seeds))], dim=1)

    title = f"turns: {shape}, {rows} rows of {prompt} + {new} + {NEW_TOKENS} tokens, to the second turn's first token"
    return measure_prefill(shape, title, second_turns, repetitions)


def measure_prefill(
    shape: str, title: str, prompts_of: Callable[[hybrid.HybridEngine], torch.Tensor], repetitions: int
) -> dict[str, Any]:
    """The time to the first token of prompts, with and without prefix caching, and the share of tokens computed.

    prompts_of: returns new prompts, int64 [rows, tokens]; what it does with the engine is not timed.
    """
    plain, caching = (make_engine(shape, enable_prefix_caching=on) for on in (False, True))
    one = hybrid.SamplingParams(max_new_tokens=1)
    shares: dict[str, list[float]] = {"computed again": [], "from the KV cache": []}

    def prefill(engine: hybrid.HybridEngine) -> float:
        ids = prompts_of(engine)
        before, start = engine.stats(), time.perf_counter()
        engine.rollout(ids, torch.ones_like(ids), one)
        seconds = time.perf_counter() - start
        computed = engine.stats()["prefilled_tokens"] - before["prefilled_tokens"]
        shares["from the KV cache" if engine is caching else "computed again"].append(computed / ids.numel())
        return seconds

    ways = {"computed again": lambda: prefill(plain), "from the KV cache": lambda: prefill(caching)}
    in_turns(ways, 1)  # the self-check, and memory
    measured = in_turns(ways, repetitions)
    for engine in (plain, caching):
        engine.destroy()
    return {
        "title": title,
        "unit": "s",
        "more_is_better": False,
        "measured": measured,
        "share_of": "of its tokens computed",
        "shares": shares,
    }


class LogNormalRows:
    """Rollouts of `rows` rows with natural lengths: lognormal, `new` / 8 in the median and `new` at most.

    share: of the rows; a rollout stops once it is done, and the rest goes on in the next one. None: whole rollouts.
    """

    def __init__(
        self, engine: hybrid.HybridEngine, vocabulary: int, rows: int, prompt: int, new: int, share: float | None
    ):
        self.engine, self.vocabulary, self.rows, self.prompt, self.new = engine, vocabulary, rows, prompt, new
        self.stop_after = None if share is None else hybrid.StopAfter(rows=int(share * rows))
        self.generator, self.unfinished = torch.Generator().manual_seed(1), None
        self.prefill_s, self.decode_s = 0.0, 0.0

    def iteration(self) -> int:
        """Roll out once; returns the tokens of the rows that are done, those of earlier rollouts included."""
        count = self.rows - (0 if self.unfinished is None else len(self.unfinished))
        ids = torch.randint(10, self.vocabulary, (count, self.prompt), generator=self.generator)
        median = torch.tensor(self.new / 8)
        lengths = torch.empty(count).log_normal_(mean=median.log().item(), std=1.0, generator=self.generator)
        batch = self.engine.rollout(
            ids,
            torch.ones_like(ids),
            hybrid.SamplingParams(max_new_tokens=self.new),
            max_new_tokens=lengths.long().clamp(1, self.new),
            stop_after=self.stop_after,
            resume=self.unfinished,
        )
        self.unfinished = batch.unfinished
        self.prefill_s += batch.timings["prefill_s"]
        self.decode_s += batch.timings["decode_s"]
        self.engine.mark_weights_changed()  # as a step would
        return int(batch.completion_mask.sum())

    def rate(self, iterations: int) -> float:
        """Tokens of finished rows per second; goes on from the iterations before."""
        start = time.perf_counter()
        finished = sum(self.iteration() for _ in range(iterations))
        return finished / (time.perf_counter() - start)


def measure_partial(
    shape: str, rows: int, prompt: int, new: int, repetitions: int, share: float, iterations: int
) -> dict[str, Any]:
    """Tokens a second of rollouts that stop once `share` of `rows` rows are done, and go on with the rest in the next;
    against whole ones. After `iterations` rollouts of each, the shares of new and old rows are steady."""
    engine = make_engine(shape)
    vocabulary = engine.module.config.vocab_size
    of_ways = {
        name: LogNormalRows(engine, vocabulary, rows, prompt, new, stops)
        for name, stops in {"whole rollouts": None, f"stop at {share:.0%}": share}.items()
    }
    ways = {name: partial(of_way.rate, iterations) for name, of_way in of_ways.items()}
    in_turns(ways, 1)
    measured = in_turns(ways, repetitions)
    engine.destroy()
    return {
        "title": f"partial: {shape}, {rows} rows, up to {new} tokens",
        "unit": "tokens/s",
        "more_is_better": True,
        "measured": measured,
        "share_of": "of the model's time in prefill",
        "shares": {name: [of_way.prefill_s / (of_way.prefill_s + of_way.decode_s)] for name, of_way in of_ways.items()},
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = results.parser(__doc__, rows=64, repetitions=3)
    parser.add_argument("what", choices=["turns", "system", "partial"])
    parser.add_argument("--shape", choices=[*SHAPES, *FUSED], default="7M")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt; default: 32 for partial, else 1024")
    parser.add_argument("--new", type=int, help="tokens of a completion; default: 512 for partial, else 64")
    parser.add_argument("--share", type=float, default=0.75, help="of the rows, after which a partial rollout stops")
    parser.add_argument("--iterations", type=int, default=8, help="rollouts of a measurement, for partial")
    arguments = parser.parse_args()
    start_ranks()
    about = results.begin("rollout_features", arguments)
    is_partial = arguments.what == "partial"
    prompt = arguments.prompt or (32 if is_partial else 1024)
    new = arguments.new or (512 if is_partial else 64)
    sizes = arguments.shape, arguments.rows, prompt
    if is_partial:
        figures = measure_partial(*sizes, new, arguments.repetitions, arguments.share, arguments.iterations)
    elif arguments.what == "turns":
        figures = measure_turns(*sizes, new, arguments.repetitions)
    else:
        figures = measure_system(*sizes, arguments.repetitions)
    result = {**about, **figures}
    print_on_rank_0("\n".join(tables.rollout_features(result)))
    results.write(arguments.output, result)


if __name__ == "__main__":
    main()
