"""What scores completions: reward functions, of which some are awaited, reward servers and reward models; and sums of
several, with weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid
from rlhf_examples.common.engines import FrozenModel, frozen_model
from rlhf_examples.common.forwards import frozen_values
from rlhf_examples.common.losses import last_token_values
from rlhf_examples.common.models import is_reward_model, load_value_model
from rlhf_examples.common.ranks import device, over_ranks, sums_over_ranks
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import reward_columns
from rlhf_examples.rewards import load_reward, reward_name, score_all

TOTAL = "reward"  # the name of a sum's metric


@dataclass
class Scorer:
    """A function, a server, or a reward model in an engine.  name: of its metric."""

    name: str
    function: Callable | None = None
    model: FrozenModel | None = None
    rows: int = 16

    @staticmethod
    def check(*rewards: str) -> None:
        """Raise ValueError for a name, as `load` takes them, of nothing."""
        for name in rewards:
            if not is_reward_model(name):
                load_reward(name)

    @classmethod
    def load(cls, reward: str, dtype: str, rows: int, offload: bool = False, attn_implementation: str = "") -> "Scorer":
        """reward: module:function, the address of a server, or the directory or hub name of a reward model that shares
        the policy's tokens.

        rows: of a reward model's forward.  offload: as `frozen_model`.  attn_implementation: as `models.load`.
        """
        if is_reward_model(reward):
            load = partial(load_value_model, attn_implementation=attn_implementation)
            return cls("reward_model", model=frozen_model(load, reward, dtype, offload), rows=rows)
        return cls(reward_name(reward), function=load_reward(reward))

    def by_model(self, batch: hybrid.RolloutBatch) -> Tensor:
        """A reward model's score of the last real token of each row, float32 [rows]; NaN where it is not finite."""
        values = frozen_values(self.model, batch.sequences, batch.attention_mask, self.rows)
        scores = last_token_values(values, batch.attention_mask)
        return torch.where(scores.isfinite(), scores, torch.nan)

    def destroy(self) -> None:
        """Free the engine."""
        if self.model is not None:
            self.model.destroy()


@dataclass
class Rewards:
    """Scorers and their sum.

    weights: of each scorer in the sum.  timeout_s, retries: of a function that is awaited, and of a server: seconds of
    an attempt, and attempts after the first.
    """

    scorers: list[Scorer]
    weights: list[float]
    timeout_s: float = 60.0
    retries: int = 2
    last: dict[str, Tensor] = field(default_factory=dict)  # what `by_name` gave last

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
        """rewards, dtype, rows, offload, attn_implementation: as `Scorer.load`.  weights: 1 where there are none."""
        scorers: list[Scorer] = []
        for reward in rewards:
            scorer = Scorer.load(reward, dtype, rows, offload, attn_implementation)
            scorers.append(replace(scorer, name=unused_name(scorer.name, [TOTAL, *(other.name for other in scorers)])))
        return cls(scorers, list(weights or [1.0] * len(scorers)), timeout_s, retries)

    @property
    def name(self) -> str:
        """Of the metric of what `__call__` gives: the only scorer's, where its score is not weighted."""
        return self.scorers[0].name if len(self.scorers) == 1 and self.weights == [1.0] else TOTAL

    def __call__(self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]) -> Tensor:
        """The weighted sum of what the scorers give each completion, float32 [rows]; NaN where none could score it.

        prompts: of each completion.
        """
        return self.by_name(batch, prompts, completions)[self.name]

    def by_name(self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]) -> dict[str, Tensor]:
        """What `__call__` gives, first, and each scorer's scores."""
        functions = {scorer.name: scorer.function for scorer in self.scorers if scorer.function is not None}
        texts, columns = [row["prompt"] for row in prompts], reward_columns(prompts)
        given = score_all(functions, texts, completions, columns, self.timeout_s, self.retries)
        scores = {
            scorer.name: scorer.by_model(batch)
            if scorer.model is not None
            else torch.tensor(given[scorer.name], dtype=torch.float32, device=device())
            for scorer in self.scorers
        }
        self.last = {self.name: weighted_sum(list(scores.values()), self.weights), **scores}
        return self.last

    def metrics(self) -> Metrics:
        """Mean, standard deviation, minimum and maximum over all ranks of what `by_name` gave last; TRL's names where
        it has one. None of a scorer that could score no completion."""
        found = {}
        for name, scores in self.last.items():
            known = scores[~scores.isnan()].double()
            sums = sums_over_ranks({"rows": len(known), "sum": known.sum(), "squares": (known**2).sum()})
            nothing = known.new_full((1,), -torch.inf)
            edges = torch.stack([torch.cat([nothing, values]).max() for values in (-known, known)])
            below, most = over_ranks(edges, dist.ReduceOp.MAX).tolist()
            if not sums["rows"]:
                continue
            mean = sums["sum"] / sums["rows"]
            variance = max(sums["squares"] - sums["rows"] * mean**2, 0.0) / max(sums["rows"] - 1, 1)
            figures = {"mean": mean, "std": variance**0.5, "min": -below, "max": most}
            found |= {f"rewards/{name}/{figure}": value for figure, value in figures.items()}
        return found

    def destroy(self) -> None:
        """Free the engines."""
        for scorer in self.scorers:
            scorer.destroy()


def unused_name(name: str, used: list[str]) -> str:
    """`name`, or with the first number that makes it differ from the names in use."""
    numbered = (f"{name}_{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in used)


def weighted_sum(scores: list[Tensor], weights: list[float]) -> Tensor:
    """The sum of what is known of each row, weighted; NaN where nothing is.  scores: [rows] each"""
    if len(scores) == 1 and weights == [1.0]:
        return scores[0]
    stacked = torch.stack(scores)
    total = (stacked * stacked.new_tensor(weights)[:, None]).nansum(dim=0)
    return torch.where(stacked.isnan().all(dim=0), torch.nan, total)
