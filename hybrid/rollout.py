"""The request and the result of a rollout, SamplingParams and RolloutBatch, with TRL's names; checks of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GenerationConfig

from hybrid.inputs import is_integer


class WholeGenerationConfig(GenerationConfig):
    """A GenerationConfig that `generate` does not complete from the model's own.

    `generate` (transformers 5.23) fills fields that are None by `update(defaults_only=True)`; here None means off.
    """

    def update(self, defaults_only: bool = False, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Hugging Face's `update`; does nothing with `defaults_only`."""
        return {} if defaults_only else super().update(**kwargs)


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled. Raises ValueError for a value outside the range given below.

    max_new_tokens: maximum tokens of a completion, its end token included; at least 1.
    temperature: divides the logits; 0 is greedy; at least 0.
    top_p, top_k, min_p: truncations as in Hugging Face's `generate`; 1.0, 0 and 0.0 are off. top_p in (0, 1], top_k at
        least 0, min_p in [0, 1).
    min_new_tokens: no end token before this many; at most max_new_tokens.
    repetition_penalty: as in Hugging Face's `generate`; 1.0 is off; above 0.
    seed: of the sampling RNG; None takes `engine.next_seed()`.
    stop_token_ids: end tokens in addition to those of the model's configurations.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        require_rules("SamplingParams", self, rules)

    def generation_config(self, model: Any, num_generations: int) -> GenerationConfig:
        """The equivalent Hugging Face GenerationConfig. Only special tokens come from the model's own: a checkpoint's
        temperature, suppressed tokens or penalties do not apply to the rollout."""
        stop = end_token_ids(model, self.stop_token_ids)
        settings = GenerationConfig._get_default_generation_params()
        for name in ("max_length", "min_length"):  # max_new_tokens and min_new_tokens take precedence, with a warning
            settings.pop(name, None)
        settings |= {
            "do_sample": self.temperature > 0,
            "top_k": None,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens or None,
            "repetition_penalty": float(self.repetition_penalty),
            "num_return_sequences": num_generations,
            "eos_token_id": stop or None,
            "pad_token_id": pad_token_id(model, stop),
            "bos_token_id": model.generation_config.bos_token_id,
        }
        if self.temperature > 0:
            settings |= {"temperature": float(self.temperature), "top_p": self.top_p, "top_k": self.top_k}
            settings["min_p"] = self.min_p or None
        return WholeGenerationConfig(**settings)


@dataclass(frozen=True)
class Observation:
    """What an environment's `step` gives.

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
    """What a row may use of its environment. Raises ValueError for a value outside the range given below.

    max_turns: sampled turns of a row; at least 1.
    max_turn_tokens: sampled tokens of a turn; None: as many as `SamplingParams.max_new_tokens`, which counts the tokens
        of all turns and observations.
    step_timeout_s: seconds that a `reset` or `step` may take; the row ends then. None: no limit.
    max_concurrent_steps: steps of this rank that run at once, each in a thread; at least 1.
    """

    max_turns: int = 16
    max_turn_tokens: int | None = None
    step_timeout_s: float | None = 60.0
    max_concurrent_steps: int = 64

    def __post_init__(self) -> None:
        rules = {
            "max_turns": (self.max_turns >= 1, "at least 1"),
            "max_turn_tokens": (self.max_turn_tokens is None or self.max_turn_tokens >= 1, "at least 1, or None"),
            "step_timeout_s": (self.step_timeout_s is None or self.step_timeout_s > 0, "above 0, or None"),
            "max_concurrent_steps": (self.max_concurrent_steps >= 1, "at least 1"),
        }
        require_rules("EnvironmentLimits", self, rules)


def require_rules(kind: str, values: Any, rules: dict[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first field whose rule does not hold.  rules: by field, with what is allowed."""
    for name, (holds, allowed) in rules.items():
        if not holds:
            raise ValueError(f"{kind}.{name}: {getattr(values, name)!r} given; it must be {allowed}")


def end_token_ids(model: Any, more: tuple[int, ...] = ()) -> list[int]:
    """All end tokens: of the model's generation configuration, of its model configuration, and `more`."""
    ends: list[int] = []
    for ids in (model.generation_config.eos_token_id, getattr(model.config, "eos_token_id", None), list(more)):
        ends += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return list(dict.fromkeys(ends))


def pad_token_id(model: Any, ends: list[int]) -> int:
    """The token that fills the positions after a completion: the model's, else its first end token, else 0."""
    for config in (model.generation_config, model.config):
        if getattr(config, "pad_token_id", None) is not None:
            return config.pad_token_id
    return ends[0] if ends else 0


@dataclass(frozen=True)
class StopAfter:
    """When a rollout ends before all of its rows are done. Give one of the three, at least 1.

    rows: so many rows are done.  groups: all generations of so many prompts are.  rows_per_group: so many generations
        of each prompt are.
    counts: with `groups`, called between decode steps with the rows of each complete group, a RolloutBatch with their
        `row_index`: whether the group counts. So groups that teach nothing make room for the next ones while others
        still decode. None: every group counts.
    """

    rows: int | None = None
    groups: int | None = None
    rows_per_group: int | None = None
    counts: Callable[["RolloutBatch"], bool] | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None and name != "counts"}
        if len(given) != 1 or min(given.values()) < 1:
            raise ValueError(f"StopAfter: {given} given; it must be one of rows, groups, rows_per_group, at least 1")
        if self.counts is not None and (self.groups is None or not callable(self.counts)):
            raise ValueError(
                f"StopAfter: counts {self.counts!r} given with {given}; it must be a function of a RolloutBatch, and "
                "goes with groups alone"
            )


@dataclass(frozen=True)
class UnfinishedRows:
    """Rows of a rollout that were stopped before they were done; `rollout(resume=...)` goes on with them, under the
    weights of that time.

    prompt_ids, prompt_mask: int64 [rows, prompt_len], left padded.
    completion_ids, completion_mask: int64 [rows, n], what was sampled so far, right padded.
    logps: float32 [3, rows, n]: sampling, old, raw, as in RolloutBatch.
    weight_versions: int64 [rows, n], of the weights that sampled each token.
    sampling_keys: int64 [rows], with which they go on: under the same weights, to the tokens without the stop.
    limits: int64 [rows], the most new tokens.  groups: int64 [rows], equal for generations of one prompt.
    row_index: int64 [rows], which row of the stopped call each is.
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

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select_rows(self, rows: list[int]) -> "UnfinishedRows":
        """The given rows."""
        tensors = {name: value[rows] for name, value in vars(self).items() if name != "logps"}
        return replace(self, logps=self.logps[:, rows], **tensors)


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of prompts. Rows are prompts × generations, a prompt's generations next to each other.

    prompt_ids, prompt_mask: int64 [rows, prompt_len], left padded, as given.
    completion_ids, completion_mask: int64 [rows, completion_len], right padded. The completion includes the first end
        token; the mask comes from lengths.
    sampling_per_token_logps: float32 [rows, completion_len], 0 where masked: under the distribution that was sampled
        from, after temperature, repetition_penalty, min_new_tokens and truncation, renormalised; vLLM's
        "processed_logprobs". The denominator in importance sampling. For greedy tokens: at temperature 1.
    old_per_token_logps: the same shape, under softmax(logits / temperature), without penalty or truncation: what TRL's
        trainer computes under this name, the old policy in PPO's ratio. `engine.score` recomputes it; with
        `rollout.weight_dtype: int8` it gives the trainer's, while these are of the int8 policy.
    raw_per_token_logps: the same shape, under softmax(logits), the raw model; vLLM's "raw_logprobs".
    finish_reason: for each row, "stop" if it has an end token, or its environment was done; "length"; "turns" for
        EnvironmentLimits.max_turns; "environment_error" and "environment_timeout" if the environment raised, or did not
        answer in time.
    weight_version: version of the weights, the latest that sampled.
    timings: this rank's seconds by phase and number of tokens.
    row_index: int64 [rows], which row of the call each is: prompts × generations, after those of `resume`. Rows of
        `unfinished` are missing; a row that forked is there once for each fork, in order.
    weight_versions: int64 [rows, completion_len], of the weights that sampled each token; 0 where masked.
    observation_mask: int64 [rows, completion_len], 1 for an environment's tokens, where completion_mask is 0.
    turn_ids: int64 [rows, completion_len], the turn, from 0, of each token, its observation included; -1 for padding.
    turn_rewards, turn_seconds: for each row, the environment's reward after each turn (None without one), and the
        seconds of its step.
    errors: for each row, what its environment raised; "" for nothing.
    unfinished: rows that were stopped by `stop_after`, for `resume`; None without any.
    router_indices: with `rollout.return_router_indices`, the experts that each token of `sequences` was routed to, for
        `replay_routing`: int16 [rows, prompt_len + completion_len, layers with experts, experts per token], in host
        memory, the expert with the largest weight first. -1 at padding and at a row's last token, which sampling does
        not run through the model. Otherwise None. Of tokens before `resume` those of the new weights.
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

    def first_rows(self, count: int) -> "RolloutBatch":
        """A batch of the first `count` rows."""
        return self.select_rows(list(range(len(self.prompt_ids))[:count]))

    def select_rows(self, rows: list[int]) -> "RolloutBatch":
        """A batch of the given rows, repeats allowed."""
        by_row: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list) and value}
        by_row |= {name: [value[row] for row in rows] for name, value in lists.items()}
        return replace(self, **by_row)

    def padded(self, prompt_len: int, completion_len: int, pad_token_id: int = 0) -> "RolloutBatch":
        """The same with prompts padded on the left, and what is of completions on the right, to these widths."""
        fills = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "turn_ids": -1}
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
        """The rows of batches, one after the other, padded to equal widths; what is not of rows is the first one's."""
        prompt_len = max(batch.prompt_ids.shape[1] for batch in batches)
        completion_len = max(batch.completion_ids.shape[1] for batch in batches)
        batches = [batch.padded(prompt_len, completion_len, pad_token_id) for batch in batches]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches]) for name in batches[0].tensors()
        }
        for name in (name for name, value in vars(batches[0]).items() if isinstance(value, list)):
            joined[name] = [item for batch in batches for item in getattr(batch, name)]
        return replace(batches[0], **joined)

    def tensors(self, dim: int | None = None) -> dict[str, torch.Tensor]:
        """The tensors by name, of so many dimensions; the first is that of the rows."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return {name: value for name, value in tensors.items() if dim in (None, value.dim())}

    def renumbered(self, rows: list[int]) -> "RolloutBatch":
        """The batch whose row `i` of the call is row `rows[i]` of another."""
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


def check_prompts(prompt_ids: Any, prompt_mask: Any, name: str = "prompt_ids") -> None:
    """Check prompts, integer [rows, tokens], and their mask, same shape or None.

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
    params: SamplingParams,
    num_generations: int,
    row_ids: Any,
    max_new_tokens: Any = None,
) -> None:
    """Check a rollout's arguments. Raises TypeError for what is no tensor; ValueError for a dtype, a shape or a number
    that is not allowed, a row that is not left padded, and several generations without sampling."""
    check_prompts(prompt_ids, prompt_mask)
    mask = prompt_mask.bool()
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"prompt_mask: rows {wrong} are not left padded; put padding before the prompt, none after it")
    if num_generations < 1:
        raise ValueError(f"num_generations: {num_generations} given; it must be at least 1")
    if num_generations > 1 and params.temperature == 0:
        raise ValueError(
            f"num_generations: {num_generations} given with temperature=0; it must be 1, as all greedy completions "
            "of a prompt are the same"
        )
    if row_ids is not None:
        check_integers("row_ids", row_ids, len(prompt_ids))
    if max_new_tokens is not None:
        check_limits(max_new_tokens, len(prompt_ids), params)


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
