"""Rewards of completions that are done, computed in a thread while other completions decode."""

import queue
import time
from concurrent.futures import Future
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.daemon_threads import DaemonThreads
from rlhf_examples.common.ranks import device
from rlhf_examples.common.rollouts import Row, decode_completions
from rlhf_examples.common.run_log import RunLog
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.data.examples import reward_columns

REWARD_MODELS_WAIT = (
    "overlap_rewards: reward models score after the rollout: a partitioned one's forward contains collectives, and "
    "scores would round differently with each batch; reward functions and servers run while others decode"
)


class OverlappedRewards:
    """Scores of a rollout's completions. Reward functions and servers get all completions of a prompt together, in a
    thread, as soon as they are done; one call scores what has been done since the last one.

    prompts: one for each completion; a prompt's `num_generations` completions are adjacent.
    overlaps: whether `on_rows` is to be given to the rollout. Otherwise everything is scored after it, in one call.
    seconds: that calls of functions have taken.  overlapped_s: how many of them nobody waited for.
    """

    def __init__(
        self,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[Row],
        num_generations: int = 1,
        overlaps: bool = True,
    ):
        self.rewards, self.tokenizer, self.prompts, self.num_generations = rewards, tokenizer, prompts, num_generations
        self.on_rows = self.add if overlaps and rewards.functions else None
        self.columns = reward_columns(prompts)
        self.completions: list[Any] = [None] * len(prompts)  # texts; None until they are done
        self.scores: dict[str, list[float]] = {name: [torch.nan] * len(prompts) for name in rewards.functions}
        self.seconds, self.overlapped_s = 0.0, 0.0
        self._missing = [num_generations] * (len(prompts) // num_generations)
        self._groups: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._worker, self._device = DaemonThreads(1), device()
        self._calls: list[Future] = []

    def add(self, batch: hybrid.RolloutBatch) -> None:
        """Take completions that are done; those taken before are left out. Call it from one thread."""
        assert batch.row_index is not None, "the batch of a rollout has it"
        rows = batch.row_index.tolist()
        new = [index for index, row in enumerate(rows) if self.completions[row] is None]
        if not new:
            return
        complete = []
        for index, text in zip(new, decode_completions(self.tokenizer, batch.select_rows(new)), strict=True):
            self.completions[rows[index]], group = text, rows[index] // self.num_generations
            self._missing[group] -= 1
            if not self._missing[group]:
                complete.append(group)
        for group in complete:
            self._groups.put(group)
        if complete and self.scores:
            self._calls.append(self._worker.submit(self._score))

    def _score(self) -> None:
        """Score the groups that wait."""
        groups = [self._groups.get_nowait() for _ in range(self._groups.qsize())]
        rows = [group * self.num_generations + number for group in groups for number in range(self.num_generations)]
        if not rows:
            return
        select_device(self._device)
        start = time.perf_counter()
        scores = self.rewards.function_scores(
            [self.prompts[row] for row in rows],
            [self.completions[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.columns.items()},
        )
        for name, values in scores.items():
            for row, value in zip(rows, values, strict=True):
                self.scores[name][row] = value
        self.seconds += time.perf_counter() - start

    def scores_by_name(self, batch: hybrid.RolloutBatch) -> dict[str, Tensor]:
        """The scores of a whole rollout, as `Rewards.scores_by_name` gives them; waits for missing ones.

        Raises what a reward function has raised; then calls that have not started are cancelled.
        """
        start = time.perf_counter()
        self.add(batch)
        try:
            for call in self._calls:
                call.result()
        finally:
            for call in self._calls:
                call.cancel()
        self.overlapped_s = max(self.seconds - (time.perf_counter() - start), 0.0)
        return self.rewards.with_models(batch, self.scores)

    def metrics(self) -> dict[str, float]:
        """Seconds of reward functions on this rank that passed while the rank did something else."""
        return {"time/reward_overlapped_s": self.overlapped_s}


def select_device(of_rank: torch.device) -> None:
    """Make a rank's device that of the calling thread, which begins on the first one."""
    if of_rank.type != "cpu":
        get_accelerator().set_device(of_rank.index)


def note_reward_models(log: RunLog, rewards: Rewards, overlaps: bool) -> None:
    """Say once that reward models are not computed while others decode."""
    if overlaps and rewards.has_models:
        log.note(REWARD_MODELS_WAIT)
