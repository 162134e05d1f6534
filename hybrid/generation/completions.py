"""The completions of a request's rows: as they are decoded, when they are done, and as a RolloutBatch."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.generation.request import Processors, Request, RowRepetitionPenalty
from hybrid.generation.routing import padded_router_indices
from hybrid.generation.sequence import Fork, Sequence, Turn
from hybrid.rollout import RolloutBatch, UnfinishedRows
from hybrid.runtime.errors import SharedError
from hybrid.runtime.messages import shortened
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import NOT_TRUNCATED, PER_TOKEN, key_after_fork


class InvalidLogitsError(SharedError):
    """Rows had logits without a softmax: one of them NaN or +inf, or all of them -inf. Raised once the other rows are
    done. Hugging Face's `generate` raises RuntimeError with the same first words.

    steps: by row of the call, the place in its completion, from 0, of the first token that could not be drawn. Empty if
        the rows are those of another rank that decodes with this one.
    weight_version: as in RolloutBatch.
    """

    def __init__(self, steps: dict[int, int]):
        super().__init__(steps)
        self.steps, self.weight_version = steps, 0

    def of_rows(self, rows: range) -> "InvalidLogitsError":
        """Return the error of a call whose rows are `rows` of these."""
        return InvalidLogitsError({row - rows.start: step for row, step in self.steps.items() if row in rows})

    def __str__(self) -> str:
        rows = shortened(f"row {row} at step {step}" for row, step in sorted(self.steps.items()))
        return (
            "probability tensor contains either `inf`, `nan` or element < 0: "
            f"{rows or 'rows of another rank'}, under weight version {self.weight_version}. Logits of the model, or "
            "scores of a logits processor, are NaN or +inf there, or -inf for every token. Look for NaN in the weights "
            "(a loss or gradient norm that was not finite), go back to an earlier checkpoint, or correct the processor"
        )


@dataclass(frozen=True)
class Completions:
    """The decoded rows.

    tokens: int64 [rows, max_new_tokens], padded after each row's length.
    lengths: int64 [rows], the end token included.
    sampling_logps: float32 [rows, max_new_tokens], 0 after the length: under the distribution drawn from, after
        processors and truncation.
    old_logps, raw_logps: the same under the model's own logits, at the request's temperature and at 1.
    sampling_mask: float32 [rows, max_new_tokens], as SamplerOutput's; of processed scores where there are processors.
    The logprobs and the mask are None if they were not requested.
    sequences: of each row; None where rows end by a stop token or their limit alone.
    router_indices: by row, int16 [tokens, layers with experts, experts per token]; None, or of None, if they were not
        requested.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sampling_logps: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    raw_logps: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None
    sequences: list[Sequence] | None = None
    router_indices: Sequences[torch.Tensor | None] | None = None

    def select(self, rows: list[int]) -> "Completions":
        """Return the given rows."""
        by_row: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                by_row[name] = value[rows]
            elif isinstance(value, list):
                by_row[name] = [value[row] for row in rows]
        return replace(self, **by_row)

    def cut(self, limits: torch.Tensor, pad_token_id: int) -> "Completions":
        """Return these completions, each row cut to its limit, int64 [rows]."""
        lengths = torch.minimum(self.lengths, limits)
        behind = torch.arange(self.tokens.shape[1], device=lengths.device) >= lengths[:, None]
        return replace(self, tokens=self.tokens.masked_fill(behind, pad_token_id), lengths=lengths)

    def trimmed(self) -> "Completions":
        """Return these completions, as wide as the longest row."""
        width = int(self.lengths.max())
        by_position = {name: getattr(self, name) for name in ("tokens", *PER_TOKEN)}
        return replace(self, **{name: t[:, :width] for name, t in by_position.items() if t is not None})


class CompletionBuffers:
    """The tokens and logprobs of all rows so far, on the decoder's device, with columns by row that samplers read.

    slack: positions behind a row's limit that steps may write before its end is seen.
    is_shared: other ranks sample the same tokens: `checksum` tells whether they do.

    ids: int64 [rows, prompt_len + max_new_tokens + slack]: padded prompts and completions, as processors see them.
    logps: float32 [4, rows, max_new_tokens + slack]: sampling, old, raw, sampling mask.
    limits: int64 [rows], the most tokens of each completion as of the end of its turn.
    sampling_keys: int64 [rows].
    checksum: int64 [], of all new tokens, if `is_shared`.
    """

    def __init__(self, request: Request, device: torch.device, slack: int, is_shared: bool):
        count, self.prompt_len = request.prompt_ids.shape
        self.max_new_tokens, self.pad_token_id = request.max_new_tokens, request.pad_token_id
        width = request.max_new_tokens + slack
        self.ids = torch.full((count, self.prompt_len + width), request.pad_token_id, dtype=torch.int64, device=device)
        self.ids[:, : self.prompt_len] = request.prompt_ids
        self.padding = [self.prompt_len - length for length in request.prompt_lengths]
        self.logps = torch.zeros(len(PER_TOKEN), count, width, device=device)
        self.is_shared, self.checksum = is_shared, torch.zeros((), dtype=torch.int64, device=device)
        self.limits, self.sampling_keys = request.limits.clone(), request.sampling_keys
        if request.partial is not None:
            tokens = request.partial.tokens
            self.ids[:, self.prompt_len : self.prompt_len + tokens.shape[1]] = tokens
            self.logps[:, :, : tokens.shape[1]] = request.partial.logps

    def contexts(self, rows: list[int], lengths: list[int]) -> list[torch.Tensor]:
        """Return each row's prompt and the first `length` tokens of its completion, int64 [n] on the host."""
        width = self.prompt_len + max(lengths, default=0)
        ids = self.ids[rows, :width].cpu()
        spans = ((self.padding[row], self.prompt_len + length) for row, length in zip(rows, lengths, strict=True))
        return [tokens[begin:stop] for tokens, (begin, stop) in zip(ids, spans, strict=True)]

    def token_ids(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the tokens before these positions of rows, int64 [n, tokens], and -1 elsewhere."""
        columns, ends = torch.arange(self.ids.shape[1], device=rows.device), self.prompt_len + positions[:, None]
        padding = torch.tensor(self.padding, device=rows.device)
        is_token = (columns >= padding[rows, None]) & (columns < ends)
        return self.ids[rows].masked_fill(~is_token, -1)

    def record(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Write tokens of rows to positions, and their logprobs, float32 [4, ...]; the others are int64 of shapes that
        broadcast."""
        self.ids[rows, self.prompt_len + positions] = tokens
        self.logps[:, rows, positions] = logps
        if self.is_shared:
            self.checksum.mul_(31).add_(((rows + 1) * (positions + 1 + tokens)).sum())

    def whole(self, sequences: list[Sequence]) -> list[torch.Tensor]:
        """Return each row's completion, int64 [n] on the host."""
        ids = self.ids[:, self.prompt_len :].cpu()
        return [tokens[: sequence.length] for tokens, sequence in zip(ids, sequences, strict=True)]

    def tokens_of(self, row: int, begin: int, end: int) -> torch.Tensor:
        """Return the tokens of a row's completion, int64 [end - begin], as a copy on the host."""
        return self.ids[row, self.prompt_len + begin : self.prompt_len + end].cpu().clone()

    def extend(self, row: int, begin: int, token_ids: list[int]) -> None:
        """Write tokens that were not sampled to a row's completion, from position `begin` on."""
        at = self.prompt_len + begin
        self.ids[row, at : at + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64, device=self.ids.device)

    def fork(self, row: int, length: int, turns: list[Turn]) -> Fork:
        """Return a row's prompt and the first `length` tokens of its completion."""
        tokens = self.ids[row, self.padding[row] : self.prompt_len + length].cpu().clone()
        prompt, completion = tokens.split([len(tokens) - length, length])
        return Fork(prompt, completion, self.logps[:, row, :length].cpu().clone(), turns)

    def reserve_prompt(self, prompt_len: int) -> None:
        """Make room for prompts of `prompt_len` tokens."""
        if (more := prompt_len - self.prompt_len) > 0:
            self.ids = F.pad(self.ids, (more, 0), value=self.pad_token_id)
            self.padding, self.prompt_len = [width + more for width in self.padding], self.prompt_len + more

    def restart(self, row: int, prompt_ids: list[int]) -> None:
        """Give a row another prompt and no completion."""
        self.reserve_prompt(len(prompt_ids))
        self.padding[row] = self.prompt_len - len(prompt_ids)
        self.ids[row], self.logps[:, row] = self.pad_token_id, 0.0
        self.extend(row, -len(prompt_ids), prompt_ids)

    def end(self, rows: list[int], lengths: list[int]) -> None:
        """Clear the tokens that steps sampled after the ends of rows."""
        device = self.ids.device
        ended, ends = torch.tensor([rows, lengths], device=device)
        behind = torch.arange(self.logps.shape[2], device=device) >= ends[:, None]
        completions = self.ids[ended, self.prompt_len :]
        self.ids[ended, self.prompt_len :] = completions.masked_fill(behind, self.pad_token_id)
        self.logps[:, ended] = self.logps[:, ended].masked_fill(behind, 0.0)

    def completions(self, sequences: list[Sequence]) -> Completions:
        """Return the completions of all rows."""
        new = self.max_new_tokens
        tokens = self.ids[:, self.prompt_len : self.prompt_len + new]
        sampling, old, raw, sampling_mask = self.logps[:, :, :new]
        lengths = torch.tensor([sequence.length for sequence in sequences], device=tokens.device)
        routed = [sequence.router_indices for sequence in sequences]
        nothing = next((experts[:0] for experts in routed if experts is not None), None)
        router_indices = None if nothing is None else [nothing if experts is None else experts for experts in routed]
        return Completions(tokens, lengths, sampling, old, raw, sampling_mask, sequences, router_indices)


def penalized(
    params: RowParams,
    stop_token_ids: torch.Tensor,
    buffers: CompletionBuffers,
    ids: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return scores after `repetition_penalty` and `min_new_tokens`, where the decoder does not sample with them.

    The last three arguments are those of `Request.processors`.

    params: of the request's rows.  buffers: have the rows' padding.
    """
    position, processed = ids.shape[1] - buffers.prompt_len, torch.empty_like(scores)
    for each, at in params.select(rows).groups():
        of_rows = scores[at]
        if each.repetition_penalty != 1.0:
            padding = torch.tensor(buffers.padding, device=rows.device)[rows[at]]
            of_rows = RowRepetitionPenalty(each.repetition_penalty, padding)(ids[at], of_rows)
        if position < each.min_new_tokens:
            tokens = torch.arange(scores.shape[1], device=scores.device)
            of_rows = of_rows.masked_fill(torch.isin(tokens, stop_token_ids), -torch.inf)
        processed[at] = of_rows
    return processed


def without_tokens(
    suppressed: torch.Tensor,
    processors: Processors | None,
    ids: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return scores after processors, -inf for the suppressed tokens; the last three arguments are those of
    `Request.processors`."""
    processed = scores if processors is None else processors(ids, scores, rows)
    return processed.index_fill(1, suppressed, -torch.inf)


# As a RolloutBatch


def rollout_batch(
    request: Request, done: Completions, weight_version: int, timings: dict[str, float] | None = None
) -> RolloutBatch:
    """Return a request's completions as a batch, with the unfinished rows apart, and a row for each fork before the row
    that it became."""
    sequences = done.sequences
    if sequences is None:
        has_stopped = torch.isin(done.tokens.gather(1, done.lengths[:, None] - 1)[:, 0], request.stop_token_ids)
        sequences = [Sequence("stop" if stopped else "length") for stopped in has_stopped.tolist()]
    forks = [(row, fork) for row, sequence in enumerate(sequences) for fork in sequence.forks]
    if forks:
        fork_keys, keys = [], request.sampling_keys.clone()
        for row, _ in forks:
            fork_keys.append(keys[row].clone())
            keys[row] = key_after_fork(keys[row])
        pairs = zip(sequences, request.prompts(), strict=True)
        request = request.with_prompts([first if row.prompt_ids is None else row.prompt_ids for row, first in pairs])
        request = replace(request, sampling_keys=keys)
    batch = replace(batch_of(request, done, sequences, weight_version), timings=timings or {})
    if forks:
        rows, forked = [row for row, _ in forks], completions_of([fork for _, fork in forks], done.tokens.device)
        of_forks = request.select(rows).with_prompts([fork.prompt_ids for _, fork in forks])
        ended = [Sequence("fork", turns=fork.turns) for _, fork in forks]
        of_forks = replace(of_forks, sampling_keys=torch.stack(fork_keys))
        before = batch_of(of_forks, forked, ended, weight_version).renumbered(rows)
        joined = RolloutBatch.cat([replace(before, timings=batch.timings), batch])
        row_of = [*rows, *range(len(sequences))]
        return joined.select_rows(sorted(range(len(row_of)), key=lambda index: (row_of[index], index)))
    stopped = [row for row, sequence in enumerate(sequences) if sequence.reason == "unfinished"]
    if not stopped:
        return batch
    finished = [row for row, sequence in enumerate(sequences) if sequence.reason != "unfinished"]
    return replace(batch.select_rows(finished), unfinished=unfinished_rows(request, batch, stopped))


def batch_of(request: Request, done: Completions, sequences: list[Sequence], weight_version: int) -> RolloutBatch:
    """Return every row of a request, without its forks.  sequences: of each row."""
    width, device = done.tokens.shape[1], request.prompt_ids.device
    mask = (torch.arange(width, device=device) < done.lengths[:, None]).long()
    versions = mask * weight_version
    if request.partial is not None:
        before = request.partial.weight_versions[:, :width]
        lengths = torch.tensor(request.partial.lengths, device=device)
        is_before = torch.arange(before.shape[1], device=device) < lengths[:, None]
        versions[:, : before.shape[1]] = torch.where(is_before, before, versions[:, : before.shape[1]])
    turn_ids, observed = turns_of(sequences, mask)
    sampled, prompt_mask = mask * ~observed, request.prompt_mask
    routed = [experts for experts in done.router_indices or () if experts is not None]
    is_routed = len(routed) == len(request)
    assert done.sampling_logps is not None and done.old_logps is not None and done.raw_logps is not None, "no logprobs"
    sampling_mask = None
    if done.sampling_mask is not None and request.keeps_sampling_mask:
        edges = done.sampling_mask.masked_fill(sampled == 0, NOT_TRUNCATED)
        is_known = request.partial is None or not edges.isnan().any()
        sampling_mask = edges.long() if is_known else None
    return RolloutBatch(
        prompt_ids=request.prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=done.tokens.contiguous(),
        completion_mask=sampled,
        sampling_per_token_logps=done.sampling_logps * sampled,
        old_per_token_logps=done.old_logps * sampled,
        raw_per_token_logps=done.raw_logps * sampled,
        sampling_mask=sampling_mask,
        finish_reason=[sequence.reason for sequence in sequences],
        weight_version=weight_version,
        row_index=torch.arange(len(request), device=device),
        weight_versions=versions * sampled,
        observation_mask=mask * observed,
        turn_ids=turn_ids,
        turn_rewards=[[turn.reward for turn in sequence.turns] for sequence in sequences],
        turn_seconds=[[turn.seconds for turn in sequence.turns] for sequence in sequences],
        errors=[sequence.error for sequence in sequences],
        model_inputs=request.model_inputs,
        router_indices=padded_router_indices(routed, prompt_mask, done.lengths, width) if is_routed else None,
        sampling_keys=request.sampling_keys,
    )


def turns_of(sequences: list[Sequence], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the turn of each token, int64 [rows, width], -1 where masked; and whether it was observed, bool."""
    turn_ids, observed = mask - 1, torch.zeros_like(mask, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        for number, turn in enumerate(sequence.turns):
            turn_ids[row, turn.begin : turn.observed] = number
            observed[row, turn.end : turn.observed] = True
        if sequence.turns:
            turn_ids[row, sequence.turn_begin : int(mask[row].sum())] = len(sequence.turns)
    return turn_ids, observed


def unfinished_rows(request: Request, batch: RolloutBatch, stopped: list[int]) -> UnfinishedRows:
    """Return the rows `stopped` of a request, to be continued by a later call.  batch: of all its rows."""
    logps = batch.sampling_per_token_logps, batch.old_per_token_logps, batch.raw_per_token_logps
    assert batch.weight_versions is not None, "`batch_of` has set them"
    return UnfinishedRows(
        prompt_ids=batch.prompt_ids[stopped],
        prompt_mask=batch.prompt_mask[stopped],
        completion_ids=batch.completion_ids[stopped],
        completion_mask=batch.completion_mask[stopped],
        logps=torch.stack(logps)[:, stopped],
        weight_versions=batch.weight_versions[stopped],
        sampling_keys=request.sampling_keys[stopped],
        limits=request.limits[stopped],
        groups=request.groups[stopped],
        row_index=torch.tensor(stopped, device=request.groups.device),
        sampling_mask=None if batch.sampling_mask is None else batch.sampling_mask[stopped],
    )


def completions_of(forks: list[Fork], device: torch.device) -> Completions:
    """Return the completions of forks, which rows had before their environments rewrote their history."""
    lengths = [len(fork.tokens) for fork in forks]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, max(lengths) - tensor.shape[-1]))

    tokens = torch.stack([padded(fork.tokens) for fork in forks]).to(device)
    sampling, old, raw, mask = torch.stack([padded(fork.logps) for fork in forks], dim=1).to(device)
    routed = [fork.router_indices for fork in forks]
    of_rows = torch.tensor(lengths, device=device)
    return Completions(tokens, of_rows, sampling, old, raw, mask, router_indices=routed)
