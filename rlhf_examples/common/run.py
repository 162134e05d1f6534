"""A training script's run, from seeded generators to the exported model."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin

import hybrid
from rlhf_examples.common.arguments import RunArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints, Stateful
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.engines import export
from rlhf_examples.common.files import AVERAGE, BEFORE, CHECKPOINTS, MODEL, write_atomically
from rlhf_examples.common.measures import Phases, TokenCount, TrainingFlops
from rlhf_examples.common.ranks import is_main_process, seed_everything
from rlhf_examples.common.rollout_log import drop_rollouts
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.run_log import RunLog, Transcript, read_metrics
from rlhf_examples.common.trackers import Metrics

# Metrics, completions of all held-out prompts, and their scores by scorer; the last two are empty without completions.
Evaluated = tuple[Metrics, list[Transcript], dict[str, list[float]]]
Kind = TypeVar("Kind", bound="Trained")


@dataclass
class Trained:
    """A model that is trained and exported, its moving average and the tokens that it has learned from.

    flops: floating-point operations of training it.
    """

    engine: hybrid.HybridEngine
    average: MovingAverage | None
    args: RunArguments
    flops: TrainingFlops
    tokens: TokenCount = field(default_factory=TokenCount)

    @classmethod
    def of(cls: type[Kind], engine: hybrid.HybridEngine, args: RunArguments, **fields: Any) -> Kind:
        """The model of an engine, with a moving average if `enable_ema`.  fields: of a subclass."""
        average = MovingAverage(engine, args.ema_beta) if args.enable_ema else None
        return cls(engine, average, args, TrainingFlops.of(engine.module), **fields)

    def update_average(self) -> None:
        """Update the moving average; call it after every optimizer step."""
        if self.average is not None:
            self.average.update()

    def export(self, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, directory: Path) -> None:
        """Write the model as `model` in a directory, and its average as `model_ema`, each with the tokenizer or
        processor. Every rank takes part."""
        merged = self.args.lora_export == "merged"
        export(self.engine, tokenizer, directory / MODEL, merged)
        if self.average is not None:
            export(self.engine, tokenizer, directory / AVERAGE, merged, self.average)


class Evaluator:
    """Evaluates the model on held-out records, always in the same way. Every rank takes part."""

    def __call__(self) -> Evaluated:
        """Evaluate the weights in the engine; the metrics are empty without held-out records."""
        raise NotImplementedError

    def log(self, log: RunLog, iteration: int, evaluated: Evaluated, final: bool) -> None:
        """Log the completions, if there are any.  final: `show` will show them."""

    def show(self, log: RunLog, before: Evaluated, after: Evaluated) -> None:
        """Show completions before and after training, if there are any."""


class Run:
    """The frame around a script's iterations.

        with Run(args, "PPO", BAR, args.num_iterations) as run:
            actor = Actor.load(...)
            run.start(actor, tokenizer, evaluator, {"policy": actor.engine}, {"prompts": prompts})
            for iteration in run.iterations():
                run.add(iteration, train(iteration))
        return run.metrics

    The block begins in a directory that holds no other run's results, with seeded generators. At its end the model, or
    the best one, is evaluated and exported; after an exception nothing more is written.

    Args:
        title: names the run in its output.
        bar_metrics: shown after the progress bar, label → name of a metric.
        total: iterations of the whole run.

    Attributes:
        metrics: of the last iteration; after the block also those of the evaluations before and after training, the
            first with the prefix `before_`.
    """

    def __init__(self, args: RunArguments, title: str, bar_metrics: dict[str, str], total: int):
        self.args, self.title, self.bar_metrics, self.total = args, title, bar_metrics, total
        self.directory, self.best = Path(args.output_dir), BestModel.from_args(args)
        self.metrics: Metrics = {}
        self._between = Phases()  # seconds of evaluations and checkpoints

    def __enter__(self) -> "Run":
        begin_run(self.args)
        seed_everything(self.args.seed)
        return self

    def start(
        self,
        trained: Trained,
        tokenizer: PreTrainedTokenizerBase,
        evaluator: Evaluator,
        engines: dict[str, hybrid.HybridEngine],
        parts: Mapping[str, Stateful | None],
    ) -> None:
        """Restore the latest checkpoint with `resume`, evaluate the model before training, and open the log.

        Args:
            trained: the model that is evaluated and exported.
            engines: in checkpoints, by name.
            parts: what checkpoints save too, by name.
        """
        self.trained, self.tokenizer, self.evaluator = trained, tokenizer, evaluator
        saved = {**parts, "best": self.best, "average": trained.average, "tokens": trained.tokens}
        self.checkpoints = Checkpoints(self.directory / CHECKPOINTS, engines, saved, self.args.keep_last)
        self.done = self.last = self.checkpoints.load_latest() if self.args.resume else 0
        if self.args.resume:
            drop_rollouts(self.directory, self.done)
        self.before = self._before_training()
        self.best.check(self.before[0])
        self.log = RunLog(
            self.directory,
            total=self.total,
            start=self.done,
            description=self.title,
            bar_metrics=self.bar_metrics,
            print_every=self.args.print_every,
            report_to=self.args.report_to,
            settings=asdict(self.args),
        )
        self.latest = (-1, self.before) if self.done else (0, self.before)  # iteration and result of an evaluation
        if not self.done:
            if self.before[0]:
                self.log.add(0, self.before[0])
            self.evaluator.log(self.log, 0, self.before, final=self.total == 0)

    def _before_training(self) -> Evaluated:
        """The evaluation before the first update; a resumed run reads the saved one."""
        path = self.directory / BEFORE
        if self.done and path.is_file():
            saved = json.loads(path.read_text())
            return saved["metrics"], saved["texts"], saved["scores"]
        evaluated = self.evaluator()
        if is_main_process():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(zip(("metrics", "texts", "scores"), evaluated, strict=True))))
        return evaluated

    def iterations(self) -> Iterator[int]:
        """The numbers of the iterations that are left, from 1, until early stopping. `add` ends each."""
        if self.done == self.total or self.best.ends_training:
            self.metrics = next(reversed(read_metrics(self.directory)), {})
        for iteration in range(self.done + 1, self.total + 1):
            if self.best.ends_training:
                self.log.note(self.best.reason)
                return
            yield iteration

    def add(self, iteration: int, metrics: Metrics) -> None:
        """End an iteration: evaluate if that is due, log the metrics, and save a checkpoint if that is due. The last
        iteration is always evaluated.
        """
        self.last, is_best = iteration, False
        if iteration == self.total or is_due(iteration, self.args.eval_every):
            with self._between.timed("eval"):
                self.latest = iteration, self.evaluator()
                self.evaluator.log(self.log, *self.latest, final=iteration == self.total)
            is_best = self.best.update(self.latest[1][0], iteration)
            metrics = metrics | self.latest[1][0]
        self.log.add(iteration, metrics | self._between.metrics())
        self.metrics, self._between = metrics, Phases()  # a checkpoint's time is logged with the next iteration
        if is_best or is_due(iteration, self.args.save_every):
            with self._between.timed("save"):
                self.checkpoints.save(iteration, self.best.iteration)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        if self.args.load_best_model_at_end and self.best.iteration:
            self.checkpoints.load(self.best.iteration)
            self.last = self.best.iteration
        iteration, evaluated = self.latest
        after = evaluated if iteration == self.last else self.evaluator()
        self.log.set_held_out(self.before[0], after[0])
        self.evaluator.log(self.log, self.last, after, final=True)
        self.evaluator.show(self.log, self.before, after)
        self.trained.export(self.tokenizer, self.directory)
        self.log.close()
        self.metrics |= {f"before_{name}": value for name, value in self.before[0].items()} | after[0]


def is_due(iteration: int, every: int) -> bool:
    """Whether something that is done `every` so many iterations is due; 0: never."""
    return every > 0 and iteration % every == 0
