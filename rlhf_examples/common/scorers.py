"""Scorers of completions (reward functions, reward servers, reward models) and weighted sums of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid
from rlhf_examples.common.engines import FrozenModel, load_frozen_model
from rlhf_examples.common.forwards import frozen_values
from rlhf_examples.common.losses import last_token_values
from rlhf_examples.common.models import is_reward_model, load_value_model
from rlhf_examples.common.ranks import device, over_ranks, sums_over_ranks
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import reward_columns
from rlhf_examples.rewards import load_reward, reward_name, score_all

TOTAL = "reward"  # metric name of the weighted sum


@dataclass
class Scorer:
    """A reward function, a server, or a reward model in an engine.  name: of its metric."""

    name: str
    function: Callable | None = None
    model: FrozenModel | None = None
    rows: int = 16

    @staticmethod
    def check(*rewards: str) -> None:
        """Raises ValueError if a name, of a kind that `load` takes, names no reward."""
        for name in rewards:
            if not is_reward_model(name):
                load_reward(name)

    @classmethod
    def load(cls, reward: str, dtype: str, rows: int, offload: bool = False, attn_implementation: str = "") -> "Scorer":
        """reward: as in `load_reward`, or the directory or hub name of a reward model with the policy's tokenizer.

        rows: of a reward model's forward.  offload, attn_implementation: as in `load_frozen_model` and `models.load`.
        Raises ValueError if there is no such reward.
        """
        if is_reward_model(reward):
            load = partial(load_value_model, attn_implementation=attn_implementation)
            return cls("reward_model", model=load_frozen_model(load, reward, dtype, offload), rows=rows)
        return cls(reward_name(reward), function=load_reward(reward))

    def by_model(self, batch: hybrid.RolloutBatch) -> Tensor:
        """The reward model's score at the last real token of each row, float32 [rows]; NaN if it is not finite."""
        assert self.model is not None, f"{self.name} is a function"
        values = frozen_values(self.model, batch.sequences, batch.attention_mask, self.rows)
        scores = last_token_values(values, batch.attention_mask)
        return torch.where(scores.isfinite(), scores, torch.nan)

    def destroy(self) -> None:
        """Destroy the engine."""
        if self.model is not None:
            self.model.destroy()


@dataclass
class Rewards:
    """Scorers and their weighted sum.

    weights: of each scorer in the sum.  timeout_s, retries: seconds of an attempt, and attempts after the first, for
        async functions and servers.
    """

    scorers: list[Scorer]
    weights: list[float]
    timeout_s: float = 60.0
    retries: int = 2
    last_scores: dict[str, Tensor] = field(default_factory=dict)  # the latest result of `scores_by_name`

    @classmethod
    def load(
        cls,
        rewards: list[str],
        dtype: str,
        rows: int,
        offload: bool = False,
        weights: list[float] | None = None,
        timeout_s: float = 60.0,
        retries: int = 2,
        attn_implementation: str = "",
    ) -> "Rewards":
        """rewards, dtype, rows, offload, attn_implementation: as in `Scorer.load`.  weights: all 1 if None or empty."""
        scorers: list[Scorer] = []
        for reward in rewards:
            scorer = Scorer.load(reward, dtype, rows, offload, attn_implementation)
            scorers.append(replace(scorer, name=unused_name(scorer.name, [TOTAL, *(other.name for other in scorers)])))
        return cls(scorers, list(weights or [1.0] * len(scorers)), timeout_s, retries)

    @property
    def name(self) -> str:
        """Metric name of the result of `__call__`: the only scorer's name if its weight is 1, else "reward"."""
        return self.scorers[0].name if len(self.scorers) == 1 and self.weights == [1.0] else TOTAL

    def __call__(self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]) -> Tensor:
        """The weighted sum of the scores of each completion, float32 [rows]; NaN where no scorer could score it.

        prompts: one for each completion.
        """
        return self.scores_by_name(batch, prompts, completions)[self.name]

    def scores_by_name(
        self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]
    ) -> dict[str, Tensor]:
        """The result of `__call__` first, then each scorer's scores, by name; float32 [rows] each."""
        return self.with_models(batch, self.function_scores(prompts, completions, reward_columns(prompts)))

    @property
    def functions(self) -> dict[str, Callable]:
        """The reward functions and servers by name."""
        return {scorer.name: scorer.function for scorer in self.scorers if scorer.function is not None}

    @property
    def has_models(self) -> bool:
        """Whether a scorer is a reward model."""
        return any(scorer.model is not None for scorer in self.scorers)

    def function_scores(
        self, prompts: list[Row], completions: list[str], columns: dict[str, list]
    ) -> dict[str, list[float]]:
        """The scores of the reward functions and servers by name, a number for each completion, NaN for no score.

        prompts: one for each completion.  columns: as `reward_columns` gives them.
        """
        texts = [row["prompt"] for row in prompts]
        return score_all(self.functions, texts, completions, columns, self.timeout_s, self.retries)

    def with_models(self, batch: hybrid.RolloutBatch, function_scores: dict[str, list[float]]) -> dict[str, Tensor]:
        """The result of `scores_by_name`, from that of `function_scores`."""
        scores = {
            scorer.name: scorer.by_model(batch)
            if scorer.model is not None
            else torch.tensor(function_scores[scorer.name], dtype=torch.float32, device=device())
            for scorer in self.scorers
        }
        self.last_scores = {self.name: weighted_sum(list(scores.values()), self.weights), **scores}
        return self.last_scores

    def metrics(self) -> Metrics:
        """Mean, standard deviation, minimum and maximum over all ranks of the latest scores, with TRL's names where it
        has them.
        A scorer that could score no completion has none. Every rank takes part.
        """
        metrics: Metrics = {}
        for name, scores in self.last_scores.items():
            scored = scores[~scores.isnan()].double()
            sums = sums_over_ranks({"rows": len(scored), "sum": scored.sum(), "squares": (scored**2).sum()})
            minus_infinity = scored.new_full((1,), -torch.inf)
            extremes = torch.stack([torch.cat([minus_infinity, values]).max() for values in (-scored, scored)])
            negated_min, largest = over_ranks(extremes, dist.ReduceOp.MAX).tolist()
            if not sums["rows"]:
                continue
            mean = sums["sum"] / sums["rows"]
            variance = max(sums["squares"] - sums["rows"] * mean**2, 0.0) / max(sums["rows"] - 1, 1)
            figures = {"mean": mean, "std": variance**0.5, "min": -negated_min, "max": largest}
            metrics |= {f"rewards/{name}/{figure}": value for figure, value in figures.items()}
        return metrics

    def destroy(self) -> None:
        """Destroy the engines."""
        for scorer in self.scorers:
            scorer.destroy()


def unused_name(name: str, used: list[str]) -> str:
    """`name`, with a number appended if it is in use."""
    numbered = (f"{name}_{number}" for number in count(2))
    return next(candidate for candidate in chain([name], numbered) if candidate not in used)


def weighted_sum(scores: list[Tensor], weights: list[float]) -> Tensor:
    """The weighted sum of each row's scores that are not NaN; NaN if all are.  scores: float32 [rows] each"""
    if len(scores) == 1 and weights == [1.0]:
        return scores[0]
    stacked = torch.stack(scores)
    total = (stacked * stacked.new_tensor(weights)[:, None]).nansum(dim=0)
    return torch.where(stacked.isnan().all(dim=0), torch.nan, total)
