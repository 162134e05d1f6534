"""The log of a run's rollouts: the tokens and logprobs of every completion, and what it takes to sample them again.

A file for each iteration and rank in `rollouts/`, a line of JSON for each completion. A token depends on its row's
sampling key, its position, the settings and the weights, and not on the batch around it or on the number of ranks.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hybrid
from rlhf_examples.common.arguments import RolloutArguments
from rlhf_examples.common.files import ROLLOUTS, append, write_errors_named
from rlhf_examples.common.ranks import barrier, is_main_process


@dataclass(frozen=True)
class LoggedCompletion:
    """The tokens that a rollout sampled in one row, and their coordinate. Fields are the keys of a line.

    iteration: of the rollout.  weights: the iteration after which the weights are those that sampled; 0: the initial
        model's.
    row, sample: the prompt's number among those of all ranks, and the completion's among the prompt's.
    sampling_key: made from the seed, row and sample of the rollout that began the row.
    sampling: fields of `hybrid.SamplingParams`.
    completion_ids: with the tokens of environments, and in a partial rollout with those of earlier iterations.
    turns: for each turn where its tokens begin and end in `completion_ids`; only what this rollout sampled.
    logps: of the turns' tokens, under the distribution that they were drawn from.
    finish_reason: as in `hybrid.RolloutBatch`; "unfinished" for a row that a later rollout goes on with.
    """

    iteration: int
    weights: int
    row: int
    sample: int
    sampling_key: int
    sampling: dict[str, Any]
    finish_reason: str
    prompt_ids: list[int]
    completion_ids: list[int]
    turns: list[list[int]]
    logps: list[float]

    def token_ids(self) -> list[int]:
        """The tokens of the turns, one after the other."""
        return [token for begin, end in self.turns for token in self.completion_ids[begin:end]]


def numbered(row_ids: torch.Tensor, num_generations: int = 1) -> list[tuple[int, int]]:
    """Row and sample of each row of a rollout.  row_ids: int64 [prompts]."""
    return [(row, sample) for row in row_ids.tolist() for sample in range(num_generations)]


def log_rollout(
    batch: hybrid.RolloutBatch,
    numbers: Sequence[tuple[int, int]],
    params: hybrid.SamplingParams,
    iteration: int,
    args: RolloutArguments,
    resumed: hybrid.UnfinishedRows | None = None,
) -> None:
    """Log this rank's rollout if `log_rollouts`.

    numbers: row and sample of each row of the call.  resumed: rows of an earlier rollout, which come first.
    Raises OSError with the file's name.
    """
    if not args.log_rollouts:
        return
    begins = [] if resumed is None else resumed.completion_mask.sum(dim=1).tolist()
    begins += [0] * (len(numbers) - len(begins))
    coordinate = {"iteration": iteration, "weights": iteration - 1, "sampling": asdict(params)}
    parts = [batch] if batch.unfinished is None else [batch, as_batch(batch.unfinished)]
    completions = [row for part in parts for row in completions_of(part, numbers, begins, coordinate)]
    directory = Path(args.output_dir) / ROLLOUTS
    with write_errors_named(directory):
        directory.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(vars(completion), allow_nan=False) + "\n" for completion in completions)
    append(directory / f"{iteration:06d}-rank{dist.get_rank()}.jsonl", "".join(lines))


def as_batch(rows: hybrid.UnfinishedRows) -> hybrid.RolloutBatch:
    """Unfinished rows as a batch."""
    return hybrid.RolloutBatch(
        prompt_ids=rows.prompt_ids,
        prompt_mask=rows.prompt_mask,
        completion_ids=rows.completion_ids,
        completion_mask=rows.completion_mask,
        sampling_per_token_logps=rows.logps[0],
        old_per_token_logps=rows.logps[1],
        raw_per_token_logps=rows.logps[2],
        finish_reason=["unfinished"] * len(rows),
        weight_version=0,
        row_index=rows.row_index,
        turn_ids=rows.completion_mask - 1,
        sampling_keys=rows.sampling_keys,
    )


def completions_of(
    batch: hybrid.RolloutBatch, numbers: Sequence[tuple[int, int]], begins: Sequence[int], coordinate: dict[str, Any]
) -> Iterable[LoggedCompletion]:
    """The completions of a batch; none of a row in which this rollout sampled nothing.

    numbers, begins: of each row of the call, row and sample, and how many tokens it had before.
    coordinate: iteration, weights and sampling.
    """
    host = {name: tensor.cpu().numpy() for name, tensor in batch.tensors().items()}
    sampled, of_call = host["completion_mask"].astype(bool), host["row_index"].tolist()
    new = sampled & (np.arange(sampled.shape[1]) >= np.array([begins[row] for row in of_call], dtype=int)[:, None])
    turns = spans(np.where(new, host["turn_ids"] + 1, 0))
    prompt_lengths = host["prompt_mask"].sum(axis=1).tolist()
    lengths = (sampled | host.get("observation_mask", np.zeros_like(sampled)).astype(bool)).sum(axis=1).tolist()
    keys = host["sampling_keys"].tolist()
    for index, turns_of_row in enumerate(turns):
        if not turns_of_row:
            continue
        row, sample = numbers[of_call[index]]
        prompt_begin = host["prompt_ids"].shape[1] - prompt_lengths[index]
        yield LoggedCompletion(
            **coordinate,
            row=row,
            sample=sample,
            sampling_key=keys[index],
            finish_reason=batch.finish_reason[index],
            prompt_ids=host["prompt_ids"][index, prompt_begin:].tolist(),
            completion_ids=host["completion_ids"][index, : lengths[index]].tolist(),
            turns=turns_of_row,
            logps=host["sampling_per_token_logps"][index][new[index]].tolist(),
        )


def spans(labels: np.ndarray) -> list[list[list[int]]]:
    """Begin and end of each run of equal labels above 0 in each row.  labels: integers [rows, n]."""
    edges = np.diff(labels, axis=1, prepend=0, append=0).nonzero()
    by_row: list[list[list[int]]] = [[] for _ in labels]
    for (row, begin), (_, end) in pairwise(zip(*(of_axis.tolist() for of_axis in edges), strict=True)):
        if begin < labels.shape[1] and labels[row, begin]:
            by_row[row].append([begin, end])
    return by_row


def drop_rollouts(directory: Path, last: int) -> None:
    """Delete the log of iterations after `last`, which a resumed run makes again. Every rank takes part."""
    if is_main_process():
        for iteration, path in rollout_files(directory):
            if iteration > last:
                path.unlink()
    barrier()


def rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """The files of a run's log with their iterations, in order."""
    paths = sorted((directory / ROLLOUTS).glob("*-rank*.jsonl"))
    return [(int(path.name.partition("-")[0]), path) for path in paths]


def read_rollouts(directory: Path, iteration: int) -> list[LoggedCompletion]:
    """The completions that a run has logged in an iteration, of all ranks, by row and sample. A line that a kill has
    truncated is left out.

    Raises ValueError without any, and for a line that is not what `log_rollout` writes.
    """
    files = rollout_files(directory)
    logged = sorted({number for number, _ in files})
    if iteration not in logged:
        allowed = f"logged are {ranges(logged)}" if logged else "none are logged; the run needs --log_rollouts true"
        raise ValueError(f"step: {iteration} given; {str(directory / ROLLOUTS)!r} does not have it: {allowed}")
    completions = []
    for path in (path for number, path in files if number == iteration):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
            if line.endswith("\n"):
                completions.append(parsed(line, f"{path}:{number}"))
    return sorted(completions, key=lambda each: (each.row, each.sample))


def parsed(line: str, where: str) -> LoggedCompletion:
    """The completion of a line.  where: file and line, for the error."""
    try:
        return LoggedCompletion(**json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is no line of `log_rollouts` ({error}); delete this line or the file") from error


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text, such as "1, 3 to 5"."""
    begins = [i for i in range(len(numbers)) if not i or numbers[i] != numbers[i - 1] + 1]
    parts = [(numbers[begin], numbers[end - 1]) for begin, end in pairwise([*begins, len(numbers)])]
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)
