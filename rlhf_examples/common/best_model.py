"""The best model of a run by a metric of its evaluations, and when training ends because there was no better one."""

import math
from dataclasses import dataclass

from rlhf_examples.common.arguments import RunArguments
from rlhf_examples.common.ranks import from_all_ranks
from rlhf_examples.common.trackers import Metrics


@dataclass
class BestModel:
    """The evaluation that was best so far; a checkpoint holds it.

    metric: of an evaluation, "eval_…"; empty: none is looked at.  patience: evaluations in a row that are not better by
    more than `threshold` before training ends; 0: it goes on.
    value, iteration: of the best; NaN and 0 where there was none.  waited: evaluations since one was better enough.
    """

    metric: str
    greater_is_better: bool = True
    patience: int = 0
    threshold: float = 0.0
    value: float = math.nan
    iteration: int = 0
    waited: int = 0

    @classmethod
    def of(cls, args: RunArguments) -> "BestModel":
        """From arguments; transformers' meaning of a name without "eval_", and of no `greater_is_better`."""
        metric = args.metric_for_best_model
        metric = f"eval_{metric}" if metric and not metric.startswith("eval_") else metric
        greater = args.greater_is_better
        greater = not metric.endswith("loss") if greater is None else greater
        return cls(metric, greater, args.early_stopping_patience, args.early_stopping_threshold)

    def check(self, metrics: Metrics) -> None:
        """Raise ValueError where an evaluation that gave `metrics` has not the one that is looked at."""
        if self.metric and self.metric not in metrics:
            there = ", ".join(sorted(metrics)) or "none, without held-out records (eval_fraction, eval_data_path)"
            raise ValueError(f"metric_for_best_model: {self.metric!r} given; an evaluation of this run has: {there}")

    def update(self, metrics: Metrics, iteration: int) -> bool:
        """Look at an evaluation after `iteration`; gives whether it is the best. Every rank takes part, and goes by
        what the first one has found.

        Raises ValueError where the metric is not there.
        """
        if not self.metric:
            return False
        self.check(metrics)
        value = from_all_ranks(float(metrics[self.metric]))[0]
        gain = value - self.value if self.greater_is_better else self.value - value
        better = not math.isnan(value) and (math.isnan(self.value) or gain > 0)
        enough = better and (math.isnan(self.value) or gain > self.threshold)
        self.waited = 0 if enough else self.waited + 1
        if better:
            self.value, self.iteration = value, iteration
        return better

    @property
    def ends_training(self) -> bool:
        """Whether the patience is over."""
        return 0 < self.patience <= self.waited

    @property
    def reason(self) -> str:
        """Why training ended, for people."""
        return (
            f"training ends: {self.metric} was not better than {self.value:.4g} of iteration {self.iteration} in "
            f"{self.waited} evaluations"
        )

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"value": self.value, "iteration": self.iteration, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self.value, self.iteration, self.waited = state["value"], state["iteration"], state["waited"]
