"""The gain of speculation, against the same rollouts without it, in turns: the tail of a batch, and the whole.

    torchrun --nproc_per_node=1 -m benchmarks.speculation --shape 7M
    torchrun --nproc_per_node=1 -m benchmarks.speculation --shape qwen3_5        # recurrent layers

64 rows have natural lengths, of a few tokens to the limit; the tail is the time from the end of the 60th row to that of
the last one.

greedy: greedy text of new prompts, which repeats itself: drafts come from the rows' own texts.
again: greedy text of prompts that come back, as evaluations have it: drafts come from earlier rollouts.
same: four samples of each of 16 prompts that come back in every iteration, with other seeds: drafts come from the
    rows' own texts, the other samples and earlier rollouts.
random: sampled text of new prompts. Drafts cannot help, if the weights are random.
full: the same, and all 64 rows run to the limit.

Prints medians, minimum and maximum, and ratios of medians and of pairs; the tokens of both ways are compared.
"""

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import hybrid
from benchmarks import results, tables
from benchmarks.families import FUSED
from benchmarks.overhead import PLAIN, SHAPES, engine_of
from benchmarks.ranks import print_on_rank_0, start_ranks
from benchmarks.rollout_features import model_of

CASES = ("greedy", "again", "same", "random", "full")
TAIL = 4  # rows


@dataclass
class Way:
    """An engine with or without speculation, and the seconds that its rollouts and their tails took."""

    engine: hybrid.HybridEngine
    whole: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)

    def rollout(self, ids: torch.Tensor, sampling: hybrid.SamplingParams, limits: torch.Tensor) -> hybrid.RolloutBatch:
        """A rollout of prompts, int64 [rows, tokens], timed."""
        ends: list[float] = []

        def on_rows(rows: hybrid.RolloutBatch) -> None:
            ends.extend([time.perf_counter()] * len(rows.completion_ids))

        start = time.perf_counter()
        batch = self.engine.rollout(ids, torch.ones_like(ids), sampling, max_new_tokens=limits, on_rows=on_rows)
        self.whole.append(time.perf_counter() - start)
        self.tail.append(ends[-1] - ends[-TAIL - 1])
        return batch


def make_engine(shape: str, speculation: dict | None) -> hybrid.HybridEngine:
    """An engine over a model of a shape with random weights."""
    torch.manual_seed(0)
    model = model_of(shape)
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # rows end by their limits
    return engine_of(model, {"speculation": speculation}, PLAIN)


def natural_lengths(rows: int, longest: int) -> torch.Tensor:
    """Lognormal lengths around a fifth of `longest`, int64 [rows]; the tail is up to four times as long as others."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(rows).log_normal_(mean=torch.tensor(longest / 5).log().item(), std=0.5, generator=generator)
    lengths = lengths.long().clamp(1, longest // 2)
    lengths[:TAIL] = longest - torch.arange(TAIL) * (longest // 16)
    return lengths


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turns over the same prompts and seeds: seconds of the tail and the whole, and what was drafted."""
    ways = [Way(make_engine(arguments.shape, settings)) for settings in (None, {"max_draft": arguments.max_draft})]
    rows, longest = arguments.rows, arguments.new
    vocabulary = ways[0].engine.module.config.vocab_size
    sampling = {"temperature": 0.0} if case in ("greedy", "again") else {"temperature": arguments.temperature}
    limits = torch.full((rows,), longest) if case == "full" else natural_lengths(rows, longest)
    generator = torch.Generator().manual_seed(0)

    def new_prompts() -> torch.Tensor:
        return torch.randint(10, vocabulary, (rows, arguments.prompt), generator=generator)

    again = new_prompts()
    same = again[: rows // 4].repeat_interleave(4, dim=0)[torch.randperm(rows)]
    prompts = {"again": again, "same": same}
    for seed in range(arguments.warm_up + arguments.repetitions):
        ids = prompts[case] if case in prompts else new_prompts()
        params = hybrid.SamplingParams(max_new_tokens=longest, seed=seed, **sampling)
        turn = ways if seed % 2 else ways[::-1]
        batches = [way.rollout(ids, params, limits) for way in turn]
        assert torch.equal(batches[0].completion_ids, batches[1].completion_ids)
    stats = ways[1].engine.stats()
    print_on_rank_0(
        f"{case}: {arguments.shape}, {rows} rows of up to {longest} tokens; drafted "
        f"{stats['drafted_tokens']}, accepted {stats['accepted_tokens']}, saved {stats['saved_steps']:.0f} steps"
    )
    parts = ("tail", "whole")[case == "full" :]
    measured = {
        name: {part: getattr(way, part)[arguments.warm_up :] for part in parts}
        for name, way in zip(("without", "speculating"), ways, strict=True)
    }
    for way in ways:
        way.engine.destroy()
    counts = {name: stats[name] for name in ("drafted_tokens", "accepted_tokens", "saved_steps")}
    return {**measured, **counts}


def main() -> None:
    """Measure what the command line asks for."""
    parser = results.parser(__doc__, rows=64, max_draft=8, repetitions=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", choices=[*SHAPES, *FUSED], default="7M")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=384, help="maximum tokens of a completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--warm_up", type=int, default=2, help="untimed rollouts of each way at the beginning")
    arguments = parser.parse_args()
    start_ranks()
    about = results.begin("speculation", arguments)
    result = {**about, "cases": {case: measure(case, arguments) for case in arguments.cases}}
    print_on_rank_0("\n".join(tables.speculation(result)))
    results.write(arguments.output, result)


if __name__ == "__main__":
    main()
