"""The training loop over records that supervised fine-tuning, reward models and DPO share."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import TrainArguments
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.losses import Loss, mean_metrics
from rlhf_examples.common.measures import Phases, flops_metrics
from rlhf_examples.common.ranks import over_ranks, rank_share, sums_over_ranks
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run import Evaluated, Evaluator, Run, Trained
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import Examples, RowStream

# LossOf: the loss of rows, divided by a denominator. Count: the number of tokens or pairs that it is a mean over.
LossOf = Callable[[list[Row], float], Loss]
Count = Callable[[list[Row]], int]


def total_steps(examples: Examples, args: TrainArguments) -> int:
    """The optimizer steps of a run."""
    if args.max_steps:
        return args.max_steps
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    return math.ceil(args.num_train_epochs * len(examples) / rows)


def fit(
    run: Run,
    engine: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    held_out: list[Row],
    loss_of: LossOf,
    count: Count,
    args: TrainArguments,
) -> None:
    """Run the optimizer steps that are left on the examples; `run` evaluates on the held-out rows."""
    trained, stream = Trained.of(engine, args), RowStream(examples, args.seed)
    run.start(trained, tokenizer, RecordEvaluator(engine, held_out, loss_of, args), {"model": engine}, {"rows": stream})
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    for step in run.iterations():
        phases, step_rows = Phases(), rank_share(stream.next(rows))
        phases.end("load")
        metrics = train_step(engine, step_rows, loss_of, count, args)
        phases.end("train")
        trained.update_average()
        lengths = [length for row in step_rows for length in lengths_of(row)]
        flops = sums_over_ranks({"flops": trained.flops(lengths)})["flops"]
        metrics |= {"lr": engine.get_lr()[0], **trained.tokens.add(sum(lengths)), **phases.metrics()}
        metrics |= flops_metrics(flops, phases.seconds["train"], args.peak_tflops)
        run.add(step, metrics | {"time/iteration_s": phases.last - phases.start})


def train_step(
    engine: hybrid.HybridEngine, rows: list[Row], loss_of: LossOf, count: Count, args: TrainArguments
) -> Metrics:
    """An optimizer step on this rank's rows; returns metrics of all ranks."""
    size = args.per_device_train_batch_size
    batches = [rows[first : first + size] for first in range(0, len(rows), size)]
    denominator = sums_over_ranks({"count": count(rows)})["count"] / (dist.get_world_size() * len(batches))
    losses, grad_norms = [], []
    for index, batch in enumerate(batches):
        losses.append(loss_of(batch, denominator))
        grad_norms += backward_and_step(engine, losses[-1].loss, index, len(batches))
    return {**mean_metrics(losses, over_ranks), "grad_norm": grad_norms[-1]}


def lengths_of(row: Row | list[Row]) -> list[int]:
    """The lengths in tokens of the sequences of a row: two for a pair, each with the prompt, and one for each row of
    a pack.
    """
    if isinstance(row, list):
        return [length for row_of_pack in row for length in lengths_of(row_of_pack)]
    return [
        len(row["prompt_ids"]) + len(ids) for name, ids in row.items() if name.endswith("_ids") and name != "prompt_ids"
    ]


@dataclass(frozen=True)
class RecordEvaluator(Evaluator):
    """`evaluate`, as a run calls it."""

    engine: hybrid.HybridEngine
    rows: list[Row]
    loss_of: LossOf
    args: TrainArguments

    def __call__(self) -> Evaluated:
        return evaluate(self.engine, self.rows, self.loss_of, self.args), [], {}


def evaluate(engine: hybrid.HybridEngine, rows: list[Row], loss_of: LossOf, args: TrainArguments) -> Metrics:
    """The metrics of held-out rows of all ranks, with the prefix `eval_`; empty without rows."""
    if not rows:
        return {}
    own, size = rank_share(rows), args.per_device_eval_batch_size
    forwards = -(-len(rows) // (size * dist.get_world_size()))  # equally many on each rank, for ZeRO-3's collectives
    losses = []
    with eval_mode(engine.module), torch.no_grad():
        for first in range(0, forwards * size, size):
            batch = own[first : first + size]
            loss = loss_of(batch or rows[:1], 1.0)
            losses.append(loss if batch else with_zero_weight(loss))
    return {f"eval_{name}": value for name, value in mean_metrics(losses, over_ranks).items()}


@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block the module is in eval mode, without dropout; afterwards in train mode."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def with_zero_weight(loss: Loss) -> Loss:
    """A loss whose metrics have sums and counts of 0."""
    zero = {name: torch.zeros_like(value) for name, value in loss.sums.items()}
    return replace(loss, sums=zero, counts=dict.fromkeys(loss.counts, 0))
