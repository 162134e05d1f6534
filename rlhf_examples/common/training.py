"""The training loop over records that supervised fine-tuning, reward models and DPO share."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import baseline_evaluation, export_trained, last_logged_metrics, start_log
from rlhf_examples.common.arguments import TrainArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints, Stateful
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.engines import backward_and_step
from rlhf_examples.common.files import CHECKPOINTS
from rlhf_examples.common.losses import Loss, mean_metrics
from rlhf_examples.common.measures import Phases, TokenCount, TrainingFlops, flops_metrics
from rlhf_examples.common.ranks import over_ranks, rank_share, sums_over_ranks
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import Examples, RowStream

# LossOf: the loss of rows, divided by a denominator. Count: the number of tokens or pairs that it is a mean over.
LossOf = Callable[[list[Row], float], Loss]
Count = Callable[[list[Row]], int]


def total_steps(examples: Examples, args: TrainArguments) -> int:
    """The optimizer steps of a run. Raises ValueError if `max_steps` is needed for a stream and missing."""
    if args.max_steps:
        return args.max_steps
    if args.streaming:
        raise ValueError(
            "max_steps: 0 given with streaming: true, where the number of records is unknown; give max_steps"
        )
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    return math.ceil(args.num_train_epochs * len(examples) / rows)


def fit(
    engine: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    held_out: list[Row],
    loss_of: LossOf,
    count: Count,
    args: TrainArguments,
    description: str,
    bar_metrics: dict[str, str],
) -> Metrics:
    """Train, evaluate, save checkpoints and logs, and export the model.

    Returns the last metrics, with those of held-out rows, and with those before the first step under `before_`.
    """
    average, best = MovingAverage(engine, args.ema_beta) if args.enable_ema else None, BestModel.from_args(args)
    tokens, flops, between_steps = TokenCount(), TrainingFlops.of(engine.module), Phases()
    stream = RowStream(examples, args.seed)
    parts: dict[str, Stateful | None] = {"rows": stream, "average": average, "tokens": tokens, "best": best}
    checkpoints = Checkpoints(Path(args.output_dir) / CHECKPOINTS, {"model": engine}, parts, args.keep_last)
    done, total = checkpoints.load_latest() if args.resume else 0, total_steps(examples, args)
    log = start_log(args, description, bar_metrics, total, done)
    before = baseline_evaluation(Path(args.output_dir), done > 0, lambda: evaluate(engine, held_out, loss_of, args))
    best.check(before)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    metrics = last_logged_metrics(Path(args.output_dir)) if done == total or best.ends_training else {}
    for step in range(done + 1, total + 1):
        if best.ends_training:
            log.note(best.reason)
            break
        phases, step_rows = Phases(), rank_share(stream.next(rows * dist.get_world_size()))
        phases.end("load")
        metrics = train_step(engine, step_rows, loss_of, count, args)
        phases.end("train")
        lengths = [length for row in step_rows for length in lengths_of(row)]
        metrics |= {"lr": engine.get_lr()[0], **tokens.add(sum(lengths)), **phases.metrics()}
        all_flops = sums_over_ranks({"flops": flops(lengths)})["flops"]
        metrics |= flops_metrics(all_flops, phases.seconds["train"], args.peak_tflops)
        if average is not None:
            average.update()
        eval_metrics, is_best = {}, False
        if step == total or (args.eval_every and step % args.eval_every == 0):
            with between_steps.timed("eval"):
                eval_metrics = evaluate(engine, held_out, loss_of, args)
            is_best = best.update(eval_metrics, step)
        metrics |= eval_metrics
        seconds = {**between_steps.metrics(), "time/iteration_s": time.perf_counter() - phases.start}
        log.add(step, {**metrics, **seconds})
        between_steps = Phases()  # a checkpoint's time is logged with the next step
        if is_best or (args.save_every and step % args.save_every == 0):
            with between_steps.timed("save"):
                checkpoints.save(step, best.iteration)
    if args.load_best_model_at_end and best.iteration:
        checkpoints.load(best.iteration)
        metrics |= evaluate(engine, held_out, loss_of, args)
    export_trained(engine, average, tokenizer, Path(args.output_dir), args.lora_export == "merged")
    log.close()
    return {**{f"before_{name}": value for name, value in before.items()}, **metrics}


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
