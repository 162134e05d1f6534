"""The best model of a run by a metric of its evaluations, and early stopping."""

import math
from dataclasses import dataclass
from typing import Any

from rlhf_examples.common.arguments import RunArguments
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.common.trackers import Metrics


@dataclass
class BestModel:
    """The best evaluation so far; saved in checkpoints.

    metric: of an evaluation, "eval_…"; empty turns this off.
    patience: evaluations in a row without an improvement of more than `threshold` that end training; 0 is off.
    value, iteration: of the best evaluation; NaN and 0 before the first.
    waited: evaluations since the last such improvement.
    """

    metric: str
    greater_is_better: bool = True
    patience: int = 0
    threshold: float = 0.0
    value: float = math.nan
    iteration: int = 0
    waited: int = 0

    @classmethod
    def from_args(cls, args: RunArguments) -> "BestModel":
        """From arguments; a name without "eval_" and a missing `greater_is_better` mean the same as in transformers."""
        metric = args.metric_for_best_model
        metric = f"eval_{metric}" if metric and not metric.startswith("eval_") else metric
        greater = args.greater_is_better
        greater = not metric.endswith("loss") if greater is None else greater
        return cls(metric, greater, args.early_stopping_patience, args.early_stopping_threshold)

    def check(self, metrics: Metrics) -> None:
        """Raises ValueError if the metrics of an evaluation lack the metric."""
        if self.metric and self.metric not in metrics:
            available = (
                ", ".join(sorted(metrics))
                or "none, because there are no held-out records (eval_fraction, eval_data_path)"
            )
            raise ValueError(f"metric_for_best_model: {self.metric!r} given; evaluations of this run have: {available}")

    def update(self, metrics: Metrics, iteration: int) -> bool:
        """Record an evaluation after `iteration`; returns whether it is the best so far. Every rank takes part and uses
        rank 0's value.

        Raises ValueError if the metric is missing.
        """
        if not self.metric:
            return False
        self.check(metrics)
        value = gather_objects(float(metrics[self.metric]))[0]
        gain = value - self.value if self.greater_is_better else self.value - value
        better = not math.isnan(value) and (math.isnan(self.value) or gain > 0)
        significant = better and (math.isnan(self.value) or gain > self.threshold)
        self.waited = 0 if significant else self.waited + 1
        if better:
            self.value, self.iteration = value, iteration
        return better

    @property
    def ends_training(self) -> bool:
        """Whether the patience is exhausted."""
        return 0 < self.patience <= self.waited

    @property
    def reason(self) -> str:
        """Why training ended, for the log."""
        return (
            f"early stopping: {self.metric} has not improved on {self.value:.4g} of iteration {self.iteration} in "
            f"{self.waited} evaluations"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"value": self.value, "iteration": self.iteration, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.value, self.iteration, self.waited = state["value"], state["iteration"], state["waited"]
