"""Micro batches of about equally many tokens."""

from collections.abc import Sequence

import torch


def balanced_batches(lengths: Sequence[int] | torch.Tensor, num_batches: int) -> list[list[int]]:
    """Row numbers in `num_batches` batches of about equally many tokens; no batch is empty.

    lengths: tokens of each row. The longest row left goes to the batch with the fewest tokens; ties go to the batch
        with the fewest rows, then to the first. Tokens are balanced, not rows, because time and memory grow with
        tokens.
    The number of batches is given, because under ZeRO every rank must run equally many forwards and backwards.
    Raises ValueError if there are fewer rows than batches.
    """
    lengths = torch.as_tensor(lengths).tolist()
    if len(lengths) < num_batches:
        raise ValueError(f"num_batches: {num_batches} given for {len(lengths)} rows; every batch needs a row")
    tokens = [0] * num_batches
    batches: list[list[int]] = [[] for _ in tokens]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fewest = min(range(num_batches), key=lambda batch: (tokens[batch], len(batches[batch]), batch))
        batches[fewest].append(row)
        tokens[fewest] += lengths[row]
    return [sorted(batch) for batch in batches]


def grouped_batches(
    groups: Sequence[int], prompts: Sequence[int], completions: Sequence[int], num_batches: int
) -> list[list[int]]:
    """Row numbers in at most `num_batches` batches that keep groups together; no batch is empty.

    groups: of each row; equal where rows share their prompt.  prompts, completions: what each row's parts cost, as
        integers; a batch pays a group's prompt once.
    Batches are consecutive parts of the rows ordered by group. The most expensive one is as cheap as that order allows:
    a group is divided only where it makes a batch cheaper.
    """
    first: dict[int, int] = {}
    for row, group in enumerate(groups):
        first.setdefault(group, row)
    order = sorted(range(len(groups)), key=lambda row: (first[groups[row]], row))

    def parts(limit: int) -> list[list[int]]:
        """The fewest consecutive parts that cost at most `limit` each."""
        batches: list[list[int]] = []
        total, previous = 0, None
        for row in order:
            added = completions[row] + prompts[row] * (groups[row] != previous)
            if not batches or total + added > limit:
                batches.append([])
                total, added = 0, completions[row] + prompts[row]
            batches[-1].append(row)
            total, previous = total + added, groups[row]
        return batches

    low = max(prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
    high = sum(prompts) + sum(completions)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(parts(middle)) <= num_batches else (middle + 1, high)
    return [sorted(batch) for batch in parts(low)]
