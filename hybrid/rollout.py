"""The request and the result of a rollout, SamplingParams and RolloutBatch, with TRL's names; checks of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.models.model_inputs import NO_INPUTS, RowInputs
from hybrid.runtime.inputs import checked_number, is_integer
from hybrid.sampling.params import COUNT, Rule, SamplingParams, check_fields


@dataclass(frozen=True)
class Observation:
    """The result of an environment's `step`.

    Args:
        ids: token ids that follow the turn: a tensor or a sequence. They are not sampled, and are masked in the loss.
        reward: of the turn; None: none.
        done: whether the row ends here.
        prompt_ids: instead of `ids`, tokens that the row goes on from, where a chat template rewrites what came before:
            what the row has so far becomes a training row of its own (a fork). None: no fork.
    """

    ids: Sequence[int] | torch.Tensor = ()
    reward: float | None = None
    done: bool = False
    prompt_ids: Sequence[int] | torch.Tensor | None = None


@dataclass(frozen=True)
class EnvironmentLimits:
    """Limits of a row with an environment. Raises ValueError for a value outside the range given below.

    Args:
        max_turns: sampled turns of a row; at least 1.
        max_turn_tokens: sampled tokens of a turn; None: as many as `SamplingParams.max_new_tokens`, which counts the
            tokens of all turns and observations.
        step_timeout_s: seconds that a `reset` or `step` may take; the row ends then. None: no limit.
        max_concurrent_steps: steps of this rank that run at once, each in a thread; at least 1.
    """

    max_turns: int = 16
    max_turn_tokens: int | None = None
    step_timeout_s: float | None = 60.0
    max_concurrent_steps: int = 64

    def __post_init__(self) -> None:
        seconds: Rule = (float, lambda value: 0 < value < 1e9, "above 0 and below 1e9, or None")
        check_fields(self, {"max_turns": COUNT, "max_concurrent_steps": COUNT})
        check_fields(self, {"max_turn_tokens": COUNT, "step_timeout_s": seconds}, optional=True)


@dataclass(frozen=True)
class StopAfter:
    """When a rollout stops before all of its rows have finished. Set one of the three numbers, at least 1.

    Args:
        rows: stop once this many rows have finished.
        groups: stop once all generations of this many prompts have finished.
        rows_per_group: stop once this many generations of each prompt have finished.
        accept_group: with `groups`, called between decode steps with the rows of each finished group, a RolloutBatch
            with their `row_index`. Returns whether the group counts, so that groups without a learning signal make
            room for the next ones while others still decode. None: every group counts.
    """

    rows: int | None = None
    groups: int | None = None
    rows_per_group: int | None = None
    accept_group: Callable[["RolloutBatch"], bool] | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None and name != "accept_group"}
        if len(given) != 1:
            raise ValueError(f"StopAfter: {given} given; it must be one of rows, groups, rows_per_group, at least 1")
        check_fields(self, dict.fromkeys(given, COUNT))
        if self.accept_group is not None and (self.groups is None or not callable(self.accept_group)):
            raise ValueError(
                f"StopAfter: accept_group {self.accept_group!r} given with {given}; it must be a function of a "
                "RolloutBatch, and goes with groups alone"
            )


@dataclass(frozen=True)
class UnfinishedRows:
    """Rows of a rollout that were stopped before they were done; `rollout(resume=...)` goes on with them, under the
    weights of that time.

    Args:
        prompt_ids: int64 [rows, prompt_len], left padded.
        prompt_mask: int64, of the same shape, 1 for tokens.
        completion_ids: int64 [rows, n], what was sampled so far, right padded.
        completion_mask: int64, of the same shape, 1 for tokens.
        logps: float32 [3, rows, n]: sampling, old, raw, as in RolloutBatch.
        weight_versions: int64 [rows, n], of the weights that sampled each token.
        sampling_keys: int64 [rows], with which they go on: under the same weights, to the tokens without the stop.
        limits: int64 [rows], the most new tokens.
        groups: int64 [rows], equal for generations of one prompt.
        row_index: int64 [rows], which row of the stopped call each is.
        sampling_mask: int64 [rows, n], as in RolloutBatch; None: not known, and the resumed call's batch has none.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    logps: torch.Tensor
    weight_versions: torch.Tensor
    sampling_keys: torch.Tensor
    limits: torch.Tensor
    groups: torch.Tensor
    row_index: torch.Tensor
    sampling_mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select_rows(self, rows: list[int]) -> "UnfinishedRows":
        """Return the given rows."""
        by_row = {name: value for name, value in vars(self).items() if name != "logps" and value is not None}
        tensors = {name: value[rows] for name, value in by_row.items()}
        return replace(self, logps=self.logps[:, rows], **tensors)


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of prompts. Rows are prompts × generations, a prompt's generations next to each other.

    Args:
        prompt_ids: int64 [rows, prompt_len], left padded, as given.
        prompt_mask: int64, of the same shape, 1 for tokens.
        completion_ids: int64 [rows, completion_len], right padded. The completion includes the first
            end token; the mask comes from lengths.
        completion_mask: int64, of the same shape, 1 for tokens.
        sampling_per_token_logps: float32 [rows, completion_len], 0 where masked: under the distribution that was
            sampled from, after temperature, repetition_penalty, min_new_tokens and truncation, renormalised; vLLM's
            "processed_logprobs". The denominator in importance sampling. For greedy tokens: at temperature 1.
        old_per_token_logps: the same shape, under softmax(logits / temperature), without penalty or truncation: what
            TRL's trainer computes under this name, the old policy in PPO's ratio. `engine.score` recomputes it; with
            `rollout.weight_dtype: int8` it gives the trainer's, while these are of the int8 policy.
        raw_per_token_logps: the same shape, under softmax(logits), the raw model; vLLM's "raw_logprobs".
        finish_reason: for each row, "stop" if it has an end token, or its environment was done; "length"; "turns" for
            EnvironmentLimits.max_turns; "environment_error" and "environment_timeout" if the environment raised, or did
            not answer in time.
        weight_version: version of the weights, the latest that sampled.
        timings: this rank's seconds by phase and number of tokens.
        row_index: int64 [rows], which row of the call each is: prompts × generations, after those of `resume`. Rows of
            `unfinished` are missing; a row that forked is there once for each fork, in order.
        weight_versions: int64 [rows, completion_len], of the weights that sampled each token; 0 where masked.
        observation_mask: int64 [rows, completion_len], 1 for an environment's tokens, where completion_mask is 0.
        turn_ids: int64 [rows, completion_len], the turn, from 0, of each token, its observation included; -1 for
            padding.
        turn_rewards: for each row, the environment's reward after each turn; None without one.
        turn_seconds: for each row, the seconds of the environment's step after each turn.
        errors: for each row, what its environment raised; "" for nothing.
        unfinished: rows that were stopped by `stop_after`, for `resume`; None without any.
        model_inputs: for each row, its inputs besides token ids, such as images, as `rollout` got them; rows of one
            prompt share them. Empty for prompts of text.
        router_indices: with `rollout.return_router_indices`, the experts that each token of `sequences` was routed to,
            for `replay_routing`: int16 [rows, prompt_len + completion_len, layers with experts, experts per token], in
            host memory, the expert with the largest weight first. -1 at padding and at a row's last token, which
            sampling does not run through the model. Otherwise None. Of tokens before `resume` those of the new weights.
        sampling_keys: int64 [rows], of seed, prompt and sample. By its key, prompt, weights and settings a row can be
            drawn again with `rollout(resume=...)`, from any of its tokens on. None in rows of sessions.
        sampling_mask: int64 [rows, completion_len], which tokens top_k, top_p and min_p kept, for `engine.logps`: the
            id of the least probable one besides the sampled token; the sampled token's own id: it was the only one; -1:
            all of the vocabulary, or masked. None if nothing was truncated, in rows of sessions, and where the scores
            that were truncated are not the model's: repetition_penalty, min_new_tokens, tokens that are not drawn.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    sampling_per_token_logps: torch.Tensor
    old_per_token_logps: torch.Tensor
    raw_per_token_logps: torch.Tensor
    finish_reason: list[str]
    weight_version: int
    timings: dict[str, float] = field(default_factory=dict)
    row_index: torch.Tensor | None = None
    weight_versions: torch.Tensor | None = None
    observation_mask: torch.Tensor | None = None
    turn_ids: torch.Tensor | None = None
    turn_rewards: list[list[float | None]] = field(default_factory=list)
    turn_seconds: list[list[float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unfinished: "UnfinishedRows | None" = None
    router_indices: torch.Tensor | None = None
    model_inputs: list[RowInputs] = field(default_factory=list)
    sampling_keys: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None

    def first_rows(self, count: int) -> "RolloutBatch":
        """Return a batch of the first `count` rows."""
        return self.select_rows(list(range(len(self.prompt_ids))[:count]))

    def select_rows(self, rows: list[int]) -> "RolloutBatch":
        """Return a batch of the given rows, repeats allowed."""
        by_row: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list) and value}
        by_row |= {name: [value[row] for row in rows] for name, value in lists.items()}
        return replace(self, **by_row)

    def padded(self, prompt_len: int, completion_len: int, pad_token_id: int = 0) -> "RolloutBatch":
        """Return a copy with prompts left-padded and completion tensors right-padded to these widths."""
        fills = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "turn_ids": -1, "sampling_mask": -1}
        wider: dict[str, Any] = {}
        if self.router_indices is not None:
            left, right = prompt_len - self.prompt_ids.shape[1], completion_len - self.completion_ids.shape[1]
            wider["router_indices"] = F.pad(self.router_indices, (0, 0, 0, 0, left, right), value=-1)
        for name, tensor in self.tensors(2).items():
            of_prompt = name.startswith("prompt_")
            more = (prompt_len if of_prompt else completion_len) - tensor.shape[1]
            wider[name] = F.pad(tensor, (more, 0) if of_prompt else (0, more), value=fills.get(name, 0))
        return replace(self, **wider)

    @staticmethod
    def cat(batches: "Sequence[RolloutBatch]", pad_token_id: int = 0) -> "RolloutBatch":
        """Return the rows of all batches, one batch after the other, padded to equal widths.

        Fields that are not per row come from the first batch. There is a sampling mask if every batch has one.
        """
        prompt_len = max(batch.prompt_ids.shape[1] for batch in batches)
        completion_len = max(batch.completion_ids.shape[1] for batch in batches)
        batches = [batch.padded(prompt_len, completion_len, pad_token_id) for batch in batches]
        if any(batch.model_inputs for batch in batches):
            rows_of = [batch.model_inputs or [NO_INPUTS] * len(batch.prompt_ids) for batch in batches]
            batches = [replace(batch, model_inputs=rows) for batch, rows in zip(batches, rows_of, strict=True)]
        if any(batch.sampling_mask is None for batch in batches):
            batches = [replace(batch, sampling_mask=None) for batch in batches]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches]) for name in batches[0].tensors()
        }
        for name in (name for name, value in vars(batches[0]).items() if isinstance(value, list)):
            joined[name] = [item for batch in batches for item in getattr(batch, name)]
        return replace(batches[0], **joined)

    def tensors(self, dim: int | None = None) -> dict[str, torch.Tensor]:
        """Return all tensors by name; if `dim` is given, only those with that many dimensions."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return {name: value for name, value in tensors.items() if dim in (None, value.dim())}

    def renumbered(self, rows: list[int]) -> "RolloutBatch":
        """Return the batch whose row `i` of the call is row `rows[i]` of another."""
        assert self.row_index is not None, "the batch of a rollout has it"
        return replace(self, row_index=torch.tensor(rows, device=self.row_index.device)[self.row_index])

    @property
    def sequences(self) -> torch.Tensor:
        """Prompts and completions.  int64 [rows, prompt_len + completion_len]"""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """The mask of `sequences`, padded on both sides; 1 for observations.  int64 [rows, prompt_len +
        completion_len]"""
        completion = self.completion_mask
        if self.observation_mask is not None:
            completion = completion | self.observation_mask
        return torch.cat([self.prompt_mask, completion], dim=1)


def check_prompts(prompt_ids: Any, prompt_mask: Any, name: str = "prompt_ids", mask_name: str = "") -> None:
    """Check prompts, integer [rows, tokens], and their mask, of the same shape; None is allowed without a `mask_name`.

    Raises TypeError if the prompts are no tensor; ValueError for wrong dtype or shape, width 0, or a fully masked row.
    """
    if not isinstance(prompt_ids, torch.Tensor):
        raise TypeError(f"{name}: {type(prompt_ids).__name__} given; it must be an integer tensor [rows, tokens]")
    if not is_integer(prompt_ids):
        raise ValueError(f"{name}: dtype {prompt_ids.dtype} given; token ids are integers, such as torch.int64")
    if prompt_ids.dim() != 2:
        raise ValueError(f"{name}: shape {tuple(prompt_ids.shape)} given; it must be [rows, tokens]")
    if prompt_ids.shape[1] == 0:
        raise ValueError(f"{name}: the prompts are empty, shape {tuple(prompt_ids.shape)}; a prompt needs a token")
    if prompt_mask is None and mask_name:
        raise ValueError(f"{mask_name}: None given; it must have the shape of {name}, {tuple(prompt_ids.shape)}")
    if prompt_mask is None:
        return
    if not isinstance(prompt_mask, torch.Tensor) or prompt_mask.shape != prompt_ids.shape:
        shape = tuple(prompt_mask.shape) if isinstance(prompt_mask, torch.Tensor) else type(prompt_mask).__name__
        raise ValueError(f"attention mask: {shape} given; it must have the shape of {name}, {tuple(prompt_ids.shape)}")
    empty = (prompt_mask != 0).any(dim=1).logical_not().nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"attention mask: rows {empty} are empty prompts, all masked; a prompt needs a token")


def check_rollout(
    prompt_ids: Any,
    prompt_mask: Any,
    sampling: Any,
    num_generations: Any,
    row_ids: Any,
    max_new_tokens: Any,
    environment: Any,
    environment_limits: Any,
    stop_after: Any,
    resume: Any,
    model_inputs: Any,
) -> None:
    """Check the arguments of `HybridEngine.rollout`.

    Raises:
        TypeError: for an argument of another type than it must have.
        ValueError: for a dtype, a shape or a number that is not allowed, a row that is not left padded, and several
            generations without sampling.
        NotImplementedError: for an environment with `resume` or `stop_after`, and for any of the three with
            `model_inputs`.
    """
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling: {type(sampling).__name__} given; it must be a hybrid.SamplingParams")
    check_prompts(prompt_ids, prompt_mask, mask_name="prompt_mask")
    mask = prompt_mask.bool()
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"prompt_mask: rows {wrong} are not left padded; put padding before the prompt, none after it")
    checked_number("num_generations", num_generations, *COUNT)
    if num_generations > 1 and sampling.temperature == 0:
        raise ValueError(
            f"num_generations: {num_generations} given with temperature=0; it must be 1, as all greedy completions "
            "of a prompt are the same"
        )
    if row_ids is not None:
        check_integers("row_ids", row_ids, len(prompt_ids))
        ids, counts = row_ids.unique(return_counts=True)
        if len(ids) < len(row_ids):
            raise ValueError(f"row_ids: {ids[counts > 1].tolist()} given more than once; each prompt needs its own")
    if max_new_tokens is not None:
        check_limits(max_new_tokens, len(prompt_ids), sampling)
    check_kind("environment_limits", environment_limits, EnvironmentLimits)
    if environment is None and environment_limits is not None:
        raise ValueError("environment_limits: given without an environment; leave it out, or give the environment too")
    if environment is not None:
        check_environment(environment)
        if resume is not None or stop_after is not None:
            raise NotImplementedError(
                "rollout: resume and stop_after with an environment are not available, as its state is the caller's; "
                "bound its rows by EnvironmentLimits"
            )
    later = {"environment": environment, "stop_after": stop_after, "resume": resume}
    if model_inputs is not None and (given := [name for name, value in later.items() if value is not None]):
        raise NotImplementedError(
            f"rollout: model_inputs with {', '.join(given)} is not available; prompts with images have one turn, and "
            "run to their end"
        )
    check_kind("stop_after", stop_after, StopAfter)
    check_kind("resume", resume, UnfinishedRows)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise TypeError if an argument is neither None nor of its type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__} given; it must be a hybrid.{kind.__name__}, or None")


def check_environment(environment: Any) -> None:
    """Raise TypeError for an environment without `reset` or `step`."""
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            raise TypeError(
                f"environment: {type(environment).__name__} given, which has no method {name}; it must have "
                "reset(row, prompt_ids) and step(row, completion_ids)"
            )


def check_limits(max_new_tokens: Any, rows: int, params: SamplingParams) -> None:
    """Raise TypeError if `max_new_tokens` is not a tensor, ValueError if it is not of integers [rows] in the range that
    `params` allows."""
    check_integers("max_new_tokens", max_new_tokens, rows)
    least, most = max(params.min_new_tokens, 1), params.max_new_tokens
    wrong = ((max_new_tokens < least) | (max_new_tokens > most)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"max_new_tokens: {max_new_tokens[wrong].tolist()} given for prompts {wrong}; it must be between {least} "
            f"and {most}, SamplingParams' min_new_tokens (or 1) and max_new_tokens"
        )


def check_integers(name: str, values: Any, rows: int) -> None:
    """Raise TypeError if the argument `name` is not a tensor, ValueError if it is not of integers [rows]."""
    allowed = f"it must be [{rows}], an integer such as torch.int64 for each prompt"
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name}: {type(values).__name__} given; it must be an integer tensor [{rows}]")
    if values.shape != (rows,):
        raise ValueError(f"{name}: shape {tuple(values.shape)} given; {allowed}")
    if not is_integer(values):
        raise ValueError(f"{name}: dtype {values.dtype} given; {allowed}")
