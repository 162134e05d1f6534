"""What a trainer asks of a rollout and what it gets: names are TRL's, shapes are stated."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig

from hybrid.inputs import is_integer

# `generate` logs a warning where these are set beside max_new_tokens and min_new_tokens, which decide.
DECIDED_BY_NEW_TOKENS = ("max_length", "min_length")


class WholeGenerationConfig(GenerationConfig):
    """A generation configuration that decides every field: `generate` takes nothing from the model's own.

    `generate` fills what is None, here what is off, by `update(defaults_only=True)` (transformers 5.23).
    """

    def update(self, defaults_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """As Hugging Face's; with `defaults_only` nothing changes."""
        return {} if defaults_only else super().update(**kwargs)


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    max_new_tokens: the longest completion, its end token included.
    temperature: logits are divided by it; 0 is greedy.
    top_p, top_k, min_p: truncations; 1.0, 0 and 0.0 are off.
    min_new_tokens: no end token before this many.
    repetition_penalty: as Hugging Face's; 1.0 is off.
    seed: of the noise; None takes `engine.next_seed()`.
    stop_token_ids: end tokens besides those of the model's configurations.
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

    def __post_init__(self):
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"SamplingParams.{name}: {getattr(self, name)!r} given; it must be {allowed}")

    def generation_config(self, model: Any, num_generations: int) -> GenerationConfig:
        """Hugging Face's configuration of the same draw. Of the model's own it has the special tokens alone: a
        checkpoint's temperature, suppressed tokens or penalties are not the rollout's."""
        ends = end_token_ids(model, self.stop_token_ids)
        own = model.generation_config
        pad = own.pad_token_id if own.pad_token_id is not None else getattr(model.config, "pad_token_id", None)
        if pad is None:
            pad = ends[0] if ends else 0
        off = {
            name: value
            for name, value in GenerationConfig._get_default_generation_params().items()
            if name not in DECIDED_BY_NEW_TOKENS
        }
        draw = {"do_sample": False, "top_k": None}
        if self.temperature > 0:
            draw = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            draw["min_p"] = self.min_p or None
        asked = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens or None,
            "repetition_penalty": self.repetition_penalty,
            "num_return_sequences": num_generations,
        }
        special = {"eos_token_id": ends or None, "pad_token_id": pad, "bos_token_id": own.bos_token_id}
        return WholeGenerationConfig(**{**off, **draw, **asked, **special})


def end_token_ids(model: Any, more: tuple[int, ...] = ()) -> list[int]:
    """Every token that ends a completion: of the generation configuration, of the model's, and `more`."""
    found: list[int] = []
    for ids in (model.generation_config.eos_token_id, getattr(model.config, "eos_token_id", None), list(more)):
        found += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of prompts. Rows are prompts × generations, a prompt's generations next to each other.

    prompt_ids, prompt_mask: int64 [rows, prompt_len], left padded, as they were given.
    completion_ids, completion_mask: int64 [rows, completion_len], right padded. The first end token belongs to the
        completion; the mask comes from lengths.
    sampling_per_token_logps: float32 [rows, completion_len], 0 where masked: of the distribution that the token was
        drawn from, after temperature, repetition_penalty, min_new_tokens and truncation, normalised again; what vLLM
        calls "processed_logprobs". Importance sampling divides by these. A greedy token's are at temperature 1.
    old_per_token_logps: the same of softmax(logits / temperature), without penalty or truncation: what TRL's trainer
        computes under this name, the policy in PPO's ratio. `engine.score` gives it again.
    raw_per_token_logps: the same of softmax(logits), the model itself; vLLM's "raw_logprobs".
    finish_reason: "stop" where an end token came, else "length".
    weight_version: of the weights that sampled.
    timings: seconds by phase and the number of tokens, of this rank.
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

    def first_rows(self, count: int) -> "RolloutBatch":
        """The first `count` rows."""
        tensors = {name: value[:count] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, finish_reason=self.finish_reason[:count], **tensors)

    @property
    def sequences(self) -> torch.Tensor:
        """Prompts and completions.  int64 [rows, prompt_len + completion_len]"""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """Of `sequences`, padded on both sides.  int64 [rows, prompt_len + completion_len]"""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)


def check_prompts(prompt_ids: Any, prompt_mask: Any, name: str = "prompt_ids") -> None:
    """Raise TypeError or ValueError, in words, for prompts that cannot be decoded; prompt_mask may be None."""
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
        given = tuple(prompt_mask.shape) if isinstance(prompt_mask, torch.Tensor) else type(prompt_mask).__name__
        raise ValueError(f"attention mask: {given} given; it must have the shape of {name}, {tuple(prompt_ids.shape)}")
    empty = (prompt_mask != 0).any(dim=1).logical_not().nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"attention mask: rows {empty} are empty prompts, all masked; a prompt needs a token")


def check_row_ids(row_ids: Any, rows: int) -> None:
    """Raise TypeError or ValueError where `row_ids` is not an integer tensor [rows]."""
    if not isinstance(row_ids, torch.Tensor):
        raise TypeError(f"row_ids: {type(row_ids).__name__} given; it must be an integer tensor [{rows}]")
    if row_ids.shape != (rows,):
        raise ValueError(f"row_ids: shape {tuple(row_ids.shape)} given; it must be [{rows}]")
    if not is_integer(row_ids):
        raise ValueError(f"row_ids: dtype {row_ids.dtype} given; row numbers are integers, such as torch.int64")


def check_left_padded(prompt_mask: torch.Tensor) -> None:
    """Raise ValueError where a mask [rows, tokens] is not zeros and then ones."""
    mask = prompt_mask.bool()
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"prompt_mask: rows {wrong} are not left padded; put padding before the prompt, none after it")


def lengths_to_first_end(completion_ids: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Length of each completion, its first end token included, and whether it has one.

    completion_ids int64 [rows, completion_len]; gives int64 [rows] and bool [rows].
    """
    width = completion_ids.shape[1]
    is_end = torch.isin(completion_ids, torch.tensor(ends, dtype=completion_ids.dtype, device=completion_ids.device))
    ended = is_end.any(dim=1)
    first = is_end.int().argmax(dim=1) if width else torch.zeros(len(completion_ids), dtype=torch.long)
    return torch.where(ended, first + 1, width), ended


def make_batch(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    sequences: torch.Tensor,
    ends: list[int],
    sampling_logps: torch.Tensor,
    old_logps: torch.Tensor,
    raw_logps: torch.Tensor,
    **about,
) -> RolloutBatch:
    """The batch of what `generate` gave.

    prompt_ids, prompt_mask int64 [rows, prompt_len], rows × generations of them; sequences int64
    [rows, prompt_len + completion_len]; ends: end tokens; the logprobs: float32 [rows, completion_len].
    """
    completions = sequences[:, prompt_ids.shape[1] :]
    lengths, ended = lengths_to_first_end(completions, ends)
    mask = (torch.arange(completions.shape[1], device=lengths.device) < lengths[:, None]).long()
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completions,
        completion_mask=mask,
        sampling_per_token_logps=sampling_logps * mask,
        old_per_token_logps=old_logps * mask,
        raw_per_token_logps=raw_logps * mask,
        finish_reason=["stop" if end else "length" for end in ended.tolist()],
        **about,
    )
