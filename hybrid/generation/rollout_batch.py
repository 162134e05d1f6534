"""The rows of a rollout: from prompts and unfinished rows to a request, and from its completions to a RolloutBatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.generation.completions import Completions, Fork, RowOutcome
from hybrid.generation.environments import Stepped, reset_rows
from hybrid.generation.request import Begun, Failure, Quota, Request
from hybrid.generation.routing import padded_router_indices
from hybrid.generation.sampler import SamplingMetadata
from hybrid.inputs import as_ids, as_mask
from hybrid.rollout import (
    EnvironmentLimits,
    Observation,
    RolloutBatch,
    SamplingParams,
    StopAfter,
    UnfinishedRows,
    check_rollout,
)


@dataclass(frozen=True)
class RolloutCall:
    """The arguments of `HybridEngine.rollout`; see there.  on_rows: called with rows that are done."""

    prompt_ids: torch.Tensor | None
    prompt_mask: torch.Tensor | None
    params: SamplingParams
    num_generations: int = 1
    row_ids: torch.Tensor | None = None
    max_new_tokens: torch.Tensor | None = None
    environment: Any = None
    environment_limits: EnvironmentLimits | None = None
    stop_after: StopAfter | None = None
    resume: UnfinishedRows | None = None
    on_rows: Callable[[RolloutBatch], None] | None = None

    def checked(self, device: torch.device) -> "RolloutCall":
        """The same with ids, masks and numbers as int64 on the device.

        Raises TypeError or ValueError for what is not allowed, NotImplementedError for what is not supported together.
        """
        ids, mask = self.prompt_ids, self.prompt_mask
        if ids is None and mask is None and self.resume is not None:
            ids = mask = torch.zeros(0, 1, dtype=torch.int64)
        check_rollout(ids, mask, self.params, self.num_generations, self.row_ids, self.max_new_tokens)
        check_environment(self.environment, self.environment_limits)
        if self.environment is not None and (self.resume is not None or self.stop_after is not None):
            raise NotImplementedError(
                "rollout: resume and stop_after with an environment are not available, as its state is the caller's; "
                "bound its rows by EnvironmentLimits"
            )
        check_kind("stop_after", self.stop_after, StopAfter)
        check_kind("resume", self.resume, UnfinishedRows)
        limits = self.environment_limits
        if self.environment is not None and limits is None:
            limits = EnvironmentLimits()
        most = self.max_new_tokens
        return replace(
            self,
            prompt_ids=as_ids(ids, device),
            prompt_mask=as_mask(mask, device),
            max_new_tokens=None if most is None else as_ids(most, device),
            environment_limits=limits,
        )

    @property
    def num_rows(self) -> int:
        """Completions that are asked for."""
        resumed = 0 if self.resume is None else len(self.resume)
        return len(self.prompt_ids) * self.num_generations + resumed

    @property
    def most_new_tokens(self) -> int:
        """The most tokens of any row's completion."""
        resumed = 0 if self.resume is None or not len(self.resume) else int(self.resume.limits.max())
        return max(self.params.max_new_tokens * len(self.prompt_ids[:1]), resumed)

    @property
    def needs_scheduler(self) -> str:
        """The arguments that only the scheduler supports."""
        given = {"an environment": self.environment, "resume": self.resume, "stop_after": self.stop_after}
        return " and ".join(name for name, value in given.items() if value is not None)

    @property
    def asks(self) -> bool:
        """Whether the caller decides which complete groups count."""
        return self.stop_after is not None and self.stop_after.counts is not None

    def dummy(self) -> "RolloutCall":
        """A call of one row and one token."""
        ids = self.prompt_ids.new_zeros(1, max(self.prompt_ids.shape[1], 1))
        params = replace(self.params, max_new_tokens=1, min_new_tokens=0)
        environment = None if self.environment is None else EndsAtOnce()
        limits = self.environment_limits
        return RolloutCall(ids, torch.ones_like(ids), params, environment=environment, environment_limits=limits)


class EndsAtOnce:
    """An environment whose rows have one turn."""

    def reset(self, row: int, prompt_ids: torch.Tensor) -> None:
        """Keep the prompt."""

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        """End the row."""
        return Observation(done=True)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise TypeError if an argument is neither None nor of its type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__} given; it must be a hybrid.{kind.__name__}, or None")


def check_environment(environment: Any, limits: Any) -> None:
    """Raise TypeError for an environment without `reset` or `step`, or limits that are none."""
    check_kind("environment_limits", limits, EnvironmentLimits)
    for name in ("reset", "step") if environment is not None else ():
        if not callable(getattr(environment, name, None)):
            raise TypeError(
                f"environment: {type(environment).__name__} given, which has no method {name}; it must have "
                "reset(row, prompt_ids) and step(row, completion_ids)"
            )


@dataclass(frozen=True)
class RolloutRows:
    """The rows of a rollout.

    prompt_ids, prompt_mask: int64 [rows, prompt_len], left padded.  sampling_keys, limits, groups: int64 [rows], as in
    UnfinishedRows.  begun, begun_versions: what rows already have, and the weights that sampled it, int64 [rows, n].
    failures: of rows whose environment could not begin.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    sampling_keys: torch.Tensor
    limits: torch.Tensor
    groups: torch.Tensor
    begun: Begun | None = None
    begun_versions: torch.Tensor | None = None
    failures: dict[int, Failure] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def after(self, resumed: UnfinishedRows) -> "RolloutRows":
        """Unfinished rows, and then these."""
        device = self.prompt_ids.device
        resumed = replace(resumed, **{name: tensor.to(device) for name, tensor in vars(resumed).items()})
        width = max(self.prompt_ids.shape[1], resumed.prompt_ids.shape[1])
        first_group = int(resumed.groups.max()) + 1 if len(resumed) else 0
        more, new = resumed.completion_ids.shape[1], len(self)
        return RolloutRows(
            prompt_ids=torch.cat([padded_left(own, width) for own in (resumed.prompt_ids, self.prompt_ids)]),
            prompt_mask=torch.cat([padded_left(own, width) for own in (resumed.prompt_mask, self.prompt_mask)]),
            sampling_keys=torch.cat([resumed.sampling_keys, self.sampling_keys]),
            limits=torch.cat([resumed.limits, self.limits]),
            groups=torch.cat([resumed.groups, self.groups + first_group]),
            begun=Begun(
                F.pad(resumed.completion_ids, (0, 0, 0, new)),
                resumed.completion_mask.sum(dim=1).tolist() + [0] * new,
                F.pad(resumed.logps, (0, 0, 0, new)),
            ),
            begun_versions=torch.cat([resumed.weight_versions, resumed.weight_versions.new_zeros(new, more)]),
        )

    def with_environment(self, environment: Any, limits: EnvironmentLimits) -> "RolloutRows":
        """The rows with the prompts that `environment.reset` gives."""
        prompts = self.prompts()
        steps = reset_rows(environment, limits, prompts)
        prompts = [prompt if step.error else step.value for prompt, step in zip(prompts, steps, strict=True)]
        failures = {step.row: failure_of(step) for step in steps if step.error}
        return replace(self.with_prompts(prompts), failures=failures)

    def prompts(self) -> list[torch.Tensor]:
        """The prompts without padding, int64 [n] each, on the host."""
        lengths, ids = self.prompt_mask.sum(dim=1).tolist(), self.prompt_ids.cpu()
        return [own[ids.shape[1] - length :] for own, length in zip(ids, lengths, strict=True)]

    def with_prompts(self, prompts: list[torch.Tensor]) -> "RolloutRows":
        """The rows with other prompts, int64 [n] each."""
        width, device = max(map(len, prompts)), self.prompt_ids.device
        return replace(
            self,
            prompt_ids=torch.stack([padded_left(ids, width) for ids in prompts]).to(device),
            prompt_mask=torch.stack([padded_left(torch.ones_like(ids), width) for ids in prompts]).to(device),
        )

    def select(self, selected: list[int]) -> "RolloutRows":
        """Some rows, without failures."""
        by_row = {name: value[selected] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        begun = None if self.begun is None else self.begun.select(selected)
        return replace(self, **by_row, begun=begun, failures=None)

    def quotas(self, stop_after: StopAfter | None) -> tuple[Quota, ...]:
        """What must finish before the other rows stop."""
        if stop_after is None:
            return ()
        by_group: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups.tolist()):
            by_group.setdefault(group, []).append(row)
        groups = tuple(map(tuple, by_group.values()))
        if stop_after.groups is not None:
            return (Quota(groups, min(stop_after.groups, len(groups)), asks=stop_after.counts is not None),)
        if stop_after.rows is not None:
            return (Quota(single_rows(range(len(self))), min(stop_after.rows, len(self))),)
        return tuple(Quota(single_rows(rows), min(stop_after.rows_per_group, len(rows))) for rows in groups)


def rollout_request(
    params: SamplingParams, rows: RolloutRows, stop_token_ids: list[int], pad_token_id: int, call: RolloutCall
) -> Request:
    """The scheduler's request of a rollout."""
    truncations = (params.top_k, params.top_p, params.min_p) if params.temperature else (0, 1.0, 0.0)
    metadata = SamplingMetadata(
        params.temperature,
        *truncations,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
    )
    return Request(
        prompt_ids=rows.prompt_ids,
        prompt_lengths=rows.prompt_mask.sum(dim=1).tolist(),
        sampling_keys=rows.sampling_keys,
        max_new_tokens=call.most_new_tokens,
        stop_token_ids=torch.tensor(stop_token_ids, dtype=torch.int64, device=rows.prompt_ids.device),
        pad_token_id=pad_token_id,
        sampling_metadata=metadata,
        logprob_temperature=params.temperature or 1.0,
        limits=rows.limits,
        begun=rows.begun,
        quotas=rows.quotas(call.stop_after),
        environment_limits=call.environment_limits,
        failures=rows.failures or {},
    )


def single_rows(rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each row as a group of its own."""
    return tuple((row,) for row in rows)


def failure_of(step: Stepped) -> Failure:
    """Why a row's environment could not begin."""
    return Failure("environment_timeout" if step.timed_out else "environment_error", step.error)


def padded_left(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor [..., n] with zeros before it, [..., width]."""
    return F.pad(tensor, (width - tensor.shape[-1], 0))


def rollout_batch(
    rows: RolloutRows, done: Completions, stop_token_ids: torch.Tensor, weight_version: int, timings: dict[str, float]
) -> RolloutBatch:
    """The RolloutBatch of rows and their completions, with the unfinished rows apart."""
    outcomes = outcomes_of(done, stop_token_ids)
    if any(outcome.forks for outcome in outcomes):
        latest = [outcome.prompt_ids for outcome in outcomes]
        rows = rows.with_prompts([own if new is None else new for own, new in zip(rows.prompts(), latest, strict=True)])
    width, device = done.tokens.shape[1], rows.prompt_ids.device
    mask = (torch.arange(width, device=device) < done.lengths[:, None]).long()
    versions = mask * weight_version
    if rows.begun is not None:
        count = min(rows.begun_versions.shape[1], width)
        is_begun = torch.arange(count, device=device) < torch.tensor(rows.begun.lengths, device=device)[:, None]
        versions[:, :count] = torch.where(is_begun, rows.begun_versions[:, :count], versions[:, :count])
    turn_ids, observed = turns_of(outcomes, mask)
    sampled = mask * ~observed
    batch = RolloutBatch(
        prompt_ids=rows.prompt_ids,
        prompt_mask=rows.prompt_mask,
        completion_ids=done.tokens.contiguous(),
        completion_mask=sampled,
        sampling_per_token_logps=done.sampling_logps * sampled,
        old_per_token_logps=done.old_logps * sampled,
        raw_per_token_logps=done.raw_logps * sampled,
        finish_reason=[outcome.reason for outcome in outcomes],
        weight_version=weight_version,
        timings=timings,
        row_index=torch.arange(len(rows), device=device),
        weight_versions=versions * sampled,
        observation_mask=mask * observed,
        turn_ids=turn_ids,
        turn_rewards=[[turn.reward for turn in outcome.turns] for outcome in outcomes],
        turn_seconds=[[turn.seconds for turn in outcome.turns] for outcome in outcomes],
        errors=[outcome.error for outcome in outcomes],
        router_indices=padded_router_indices(done.router_indices, rows.prompt_mask, done.lengths, width),
    )
    stopped = [row for row, outcome in enumerate(outcomes) if outcome.reason == "unfinished"]
    if stopped:
        finished = [row for row, outcome in enumerate(outcomes) if outcome.reason != "unfinished"]
        return replace(batch.select_rows(finished), unfinished=unfinished_rows(rows, batch, stopped))
    return with_forks(batch, outcomes)


def outcomes_of(done: Completions, stop_token_ids: torch.Tensor) -> list[RowOutcome]:
    """How each row has ended: as its decoder says, or by its last token."""
    if done.outcomes is not None:
        return done.outcomes
    has_stopped = torch.isin(done.tokens.gather(1, done.lengths[:, None] - 1)[:, 0], stop_token_ids)
    return [RowOutcome("stop" if stopped else "length") for stopped in has_stopped.tolist()]


def turns_of(outcomes: list[RowOutcome], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The turn of each token, int64 [rows, width], -1 where masked; and whether it was observed, bool [rows, width]."""
    turn_ids, observed = mask - 1, torch.zeros_like(mask, dtype=torch.bool)
    for row, outcome in enumerate(outcomes):
        if not outcome.turns:
            continue
        length = int(mask[row].sum())
        for number, turn in enumerate(outcome.turns):
            turn_ids[row, turn.begin : turn.observed] = number
            observed[row, turn.end : turn.observed] = True
        last = outcome.turns[-1].observed
        turn_ids[row, last:length] = len(outcome.turns)
    return turn_ids, observed


def unfinished_rows(rows: RolloutRows, batch: RolloutBatch, stopped: list[int]) -> UnfinishedRows:
    """What is needed to go on with rows."""
    return UnfinishedRows(
        prompt_ids=batch.prompt_ids[stopped],
        prompt_mask=batch.prompt_mask[stopped],
        completion_ids=batch.completion_ids[stopped],
        completion_mask=batch.completion_mask[stopped],
        logps=torch.stack([batch.sampling_per_token_logps, batch.old_per_token_logps, batch.raw_per_token_logps])[
            :, stopped
        ],
        weight_versions=batch.weight_versions[stopped],
        sampling_keys=rows.sampling_keys[stopped],
        limits=rows.limits[stopped],
        groups=rows.groups[stopped],
        row_index=batch.row_index[stopped],
    )


def with_forks(batch: RolloutBatch, outcomes: list[RowOutcome]) -> RolloutBatch:
    """The batch with a row for each fork, before the row that it became."""
    if not any(outcome.forks for outcome in outcomes):
        return batch
    forks = [(row, fork) for row, outcome in enumerate(outcomes) for fork in outcome.forks]
    joined = RolloutBatch.cat([fork_batch(batch, forks), batch])
    order = sorted(range(len(joined.prompt_ids)), key=lambda index: (int(joined.row_index[index]), index))
    return joined.select_rows(order)


def fork_batch(batch: RolloutBatch, forks: list[tuple[int, Fork]]) -> RolloutBatch:
    """Forks as rows, with the row of `batch` that each became."""
    rows, device = [row for row, _ in forks], batch.prompt_ids.device
    prompt_len = max(len(fork.prompt_ids) for _, fork in forks)
    width = max(len(fork.tokens) for _, fork in forks)
    lengths = torch.tensor([len(fork.tokens) for _, fork in forks], device=device)
    mask = (torch.arange(width, device=device) < lengths[:, None]).long()
    turn_ids, observed = turns_of([RowOutcome(turns=fork.turns) for _, fork in forks], mask)
    sampled = mask * ~observed
    logps = torch.stack([F.pad(fork.logps, (0, width - len(fork.tokens))) for _, fork in forks], dim=1).to(device)
    masks = [padded_left(torch.ones_like(fork.prompt_ids), prompt_len) for _, fork in forks]
    prompt_mask, routed = torch.stack(masks).to(device), [fork.router_indices for _, fork in forks]
    names = "sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps"
    return replace(
        batch.select_rows(rows),
        prompt_ids=torch.stack([padded_left(fork.prompt_ids, prompt_len) for _, fork in forks]).to(device),
        prompt_mask=prompt_mask,
        completion_ids=torch.stack([F.pad(fork.tokens, (0, width - len(fork.tokens))) for _, fork in forks]).to(device),
        completion_mask=sampled,
        observation_mask=mask * observed,
        turn_ids=turn_ids,
        weight_versions=sampled * batch.weight_version,
        finish_reason=["fork"] * len(forks),
        errors=[""] * len(forks),
        turn_rewards=[[turn.reward for turn in fork.turns] for _, fork in forks],
        turn_seconds=[[turn.seconds for turn in fork.turns] for _, fork in forks],
        **{name: own * sampled for name, own in zip(names, logps, strict=True)},
        router_indices=padded_router_indices(routed, prompt_mask, lengths, width),
    )
