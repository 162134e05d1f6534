"""What prefix caching and partial rollouts save, each against the same rollout without, in turns.

    torchrun --nproc_per_node=1 -m benchmarks.rollout_features turns
    torchrun --nproc_per_node=1 -m benchmarks.rollout_features partial --shape 125M

turns: the time to the first token of a conversation's second turn, and the share of its tokens that are computed.
partial: tokens of finished rows per second of decoding, where a rollout stops once a share of its rows is done and the
rest goes on in the next one; the lengths are natural ones, of a few tokens to the limit.
Prints medians, the least and the most, and ratios; times of other machines cannot be compared with these.
"""

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch

import hybrid
from benchmarks.modes import start_ranks
from benchmarks.overhead import SHAPES, llama, print_on_rank_0

NEW_TOKENS = 32  # of the user, in the second turn


def engine_of(shape: str, **rollout: bool) -> hybrid.HybridEngine:
    """An engine under ZeRO-3.  rollout: settings of its block."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 4096},
        "rollout": rollout,
    }
    model = llama(*SHAPES[shape])
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def tokens(rows: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Random tokens, int64 [rows, length], without the end token."""
    return torch.randint(10, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_turns(ways: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """What each way measures, one after the other, `repetitions` times."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            measured[name].append(way())
    return measured


def report(title: str, unit: str, measured: dict[str, list[float]], more_is_better: bool) -> None:
    """Print each way's median and range, and the ratio of the last way to the first."""
    print_on_rank_0(title)
    for name, values in measured.items():
        low, high = min(values), max(values)
        print_on_rank_0(f"  {name:24} {statistics.median(values):9.3f} {unit}  ({low:.3f}-{high:.3f})")
    first, *_, last = map(statistics.median, measured.values())
    print_on_rank_0(f"  ratio: {last / first if more_is_better else first / last:.2f}")


def measure_turns(shape: str, rows: int, prompt: int, new: int, repetitions: int) -> None:
    """The second turn of `rows` conversations of `prompt` + `new` tokens, with and without prefix caching."""
    vocabulary = SHAPES[shape][-1]
    plain, caching = (engine_of(shape, enable_prefix_caching=on) for on in (False, True))
    first = hybrid.SamplingParams(max_new_tokens=new, min_new_tokens=new)
    one = hybrid.SamplingParams(max_new_tokens=1)
    shares: list[float] = []
    seeds = iter(range(10**6))

    def second_turn(engine: hybrid.HybridEngine) -> float:
        ids = tokens(rows, prompt, vocabulary, next(seeds))
        batch = engine.rollout(ids, torch.ones_like(ids), first)
        longer = torch.cat([batch.sequences, tokens(rows, NEW_TOKENS, vocabulary, next(seeds))], dim=1)
        before, start = engine.stats(), time.perf_counter()
        engine.rollout(longer, torch.ones_like(longer), one)
        seconds = time.perf_counter() - start
        computed = engine.stats()["prefilled_tokens"] - before["prefilled_tokens"]
        if engine is caching:
            shares.append(computed / longer.numel())
        return seconds

    ways = {"computed again": lambda: second_turn(plain), "from the KV cache": lambda: second_turn(caching)}
    in_turns(ways, 1)  # the self-check, and memory
    measured = in_turns(ways, repetitions)
    title = f"turns: {shape}, {rows} rows of {prompt} + {new} + {NEW_TOKENS} tokens, to the second turn's first token"
    report(title, "s", measured, more_is_better=False)
    print_on_rank_0(f"  computed: {100 * statistics.median(shares):.1f} % of the second turn's tokens")
    for engine in (plain, caching):
        engine.destroy()


def measure_partial(shape: str, rows: int, prompt: int, new: int, repetitions: int, share: float) -> None:
    """Rollouts that stop once `share` of `rows` rows are done, and go on with the rest in the next; against whole
    ones. Lengths are lognormal, around an eighth of `new`."""
    vocabulary = SHAPES[shape][-1]
    engine = engine_of(shape)
    sampling = hybrid.SamplingParams(max_new_tokens=new)
    generator = torch.Generator().manual_seed(1)

    def prompts(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.randint(10, vocabulary, (count, prompt), generator=generator)
        lengths = torch.empty(count).log_normal_(mean=torch.tensor(new / 8).log().item(), std=1.0, generator=generator)
        return ids, torch.ones_like(ids), lengths.long().clamp(1, new)

    def rate(partial: bool, iterations: int = 6) -> float:
        """Tokens of finished rows per second."""
        unfinished, finished = None, 0
        start = time.perf_counter()
        for _ in range(iterations):
            ids, mask, limits = prompts(rows - (0 if unfinished is None else len(unfinished)))
            stop = hybrid.StopAfter(rows=int(share * rows)) if partial else None
            batch = engine.rollout(ids, mask, sampling, max_new_tokens=limits, stop_after=stop, resume=unfinished)
            finished += int(batch.completion_mask.sum())
            unfinished = batch.unfinished
            engine.mark_weights_changed()  # as a step would
        return finished / (time.perf_counter() - start)

    ways = {"whole rollouts": lambda: rate(False), f"stop at {share:.0%}": lambda: rate(True)}
    in_turns(ways, 1)
    measured = in_turns(ways, repetitions)
    report(f"partial: {shape}, {rows} rows, up to {new} tokens", "tokens/s", measured, more_is_better=True)
    engine.destroy()


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["turns", "partial"])
    parser.add_argument("--shape", choices=SHAPES, default="7M")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, help="tokens of a prompt; default: 1024 for turns, 32 for partial")
    parser.add_argument("--new", type=int, help="tokens of a completion; default: 64 for turns, 512 for partial")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.75, help="of the rows, after which a partial rollout stops")
    arguments = parser.parse_args()
    start_ranks()
    turns = arguments.what == "turns"
    prompt = arguments.prompt or (1024 if turns else 32)
    new = arguments.new or (64 if turns else 512)
    sizes = arguments.shape, arguments.rows, prompt, new, arguments.repetitions
    if turns:
        measure_turns(*sizes)
    else:
        measure_partial(*sizes, arguments.share)


if __name__ == "__main__":
    main()
