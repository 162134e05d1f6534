"""A rollout without a model: turns come from a script, environments are driven by the protocol of `engine.rollout`."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Script = Callable[[int, int], list[int]]  # (row, turn) → the sampled tokens


@dataclass
class TrainingRow:
    """A prompt, what follows it, and the mask of the tokens that were sampled."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def extend(self, ids: Any, sampled: bool) -> None:
        ids = torch.as_tensor(ids, dtype=torch.int64).tolist()
        self.completion_ids += ids
        self.mask += [int(sampled)] * len(ids)


@dataclass
class ScriptedRow:
    """A completion: its training rows (several if it forked), rewards by turn, and why it ended."""

    training: list[TrainingRow]
    rewards: list[float | None] = field(default_factory=list)
    finish_reason: str = ""


def roll_out(environment: Any, prompts: list[list[int]], script: Script, num_generations: int = 1, max_turns: int = 20):
    """The rows of all prompts, which run at the same time, as a rollout's do."""

    async def run() -> list[ScriptedRow]:
        rows = len(prompts) * num_generations
        return await asyncio.gather(
            *(run_row(environment, row, prompts[row // num_generations], script, max_turns) for row in range(rows))
        )

    return asyncio.run(run())


async def run_row(environment: Any, row: int, prompt: list[int], script: Script, max_turns: int) -> ScriptedRow:
    """One row; an exception of the environment ends it."""
    result = ScriptedRow([])
    try:
        own = await called(environment.reset, row, torch.tensor(prompt))
        result.training.append(TrainingRow(torch.as_tensor(prompt if own is None else own).tolist()))
        for turn in range(max_turns):
            sampled = script(row, turn)
            result.training[-1].extend(sampled, sampled=True)
            observation = await called(environment.step, row, torch.tensor(sampled, dtype=torch.int64))
            result.rewards.append(observation.reward)
            if observation.done:
                result.finish_reason = "done"
                return result
            if observation.prompt_ids is not None:
                result.training.append(TrainingRow(torch.as_tensor(observation.prompt_ids).tolist()))
            result.training[-1].extend(observation.ids, sampled=False)
        result.finish_reason = "turns"
    except Exception as error:  # as a rollout does: the other rows go on
        result.finish_reason = f"{type(error).__name__}: {error}"
    return result


async def called(method: Callable, row: int, ids: torch.Tensor) -> Any:
    """A method of an environment, of either form: a coroutine, or a function that runs in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(row, ids)
    return await asyncio.to_thread(method, row, ids)
