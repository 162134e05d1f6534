"""The settings of sampling: SamplingParams, and those of a batch's rows as a table that kernels read."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processes

from hybrid.runtime.inputs import DIVISOR, checked_number, checked_seed, is_divisor

MAX_COUNT = 2**31 - 1  # of a number of tokens, rows or turns
Rule = tuple[type, Callable[[Any], bool], str]  # of a number: int or float, what holds, the same as text
COUNT: Rule = (int, lambda value: 1 <= value <= MAX_COUNT, f"at least 1, an integer up to {MAX_COUNT}")


class WholeGenerationConfig(GenerationConfig):
    """A GenerationConfig that `generate` does not complete from the model's own.

    `generate` (transformers 5.23) fills fields that are None by `update(defaults_only=True)`; here None means off.
    """

    def update(self, defaults_only: bool = False, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Hugging Face's `update`; does nothing with `defaults_only`."""
        return {} if defaults_only else super().update(**kwargs)


@dataclass(frozen=True)
class SamplingParams:
    """The settings of sampling. Raises ValueError for a value outside the range given below.

    Numbers may be Python's, numpy's, or tensors without dimensions; bools are none.

    Args:
        max_new_tokens: maximum tokens of a completion, its end token included; at least 1.
        temperature: divides the logits; 0 is greedy; otherwise in float32's normal range.
        top_p: truncation as in Hugging Face's `generate`, in (0, 1]; 1.0 is off.
        top_k: truncation as in Hugging Face's `generate`, at least 0; 0 is off.
        min_p: truncation as in Hugging Face's `generate`, in [0, 1); 0.0 is off.
        min_new_tokens: no end token before this many; at most max_new_tokens.
        repetition_penalty: as in Hugging Face's `generate`; 1.0 is off; above 0, in float32's normal range.
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
        rules: dict[str, Rule] = {
            "max_new_tokens": COUNT,
            "temperature": (float, lambda value: value == 0 or is_divisor(value), f"0 (greedy), or {DIVISOR}"),
            "top_p": (float, lambda value: 0 < value <= 1, "in (0, 1]"),
            "top_k": (int, lambda value: 0 <= value <= MAX_COUNT, f"0 (off) or more, an integer up to {MAX_COUNT}"),
            "min_p": (float, lambda value: 0 <= value < 1, "in [0, 1)"),
            "min_new_tokens": (
                int,
                lambda value: 0 <= value <= self.max_new_tokens,
                "between 0 and max_new_tokens, an integer",
            ),
            "repetition_penalty": (float, is_divisor, f"above 0, {DIVISOR}"),
        }
        check_fields(self, rules)
        object.__setattr__(self, "seed", checked_seed(self.seed, "SamplingParams.seed"))
        if not isinstance(self.stop_token_ids, tuple | list):
            raise ValueError(
                f"SamplingParams.stop_token_ids: {self.stop_token_ids!r} given; it must be a tuple of token ids"
            )
        token: Rule = (int, lambda value: 0 <= value <= MAX_COUNT, "a tuple of token ids, integers from 0")
        ids = tuple(checked_number("SamplingParams.stop_token_ids", value, *token) for value in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    def generation_config(self, model: Any, num_generations: int) -> GenerationConfig:
        """Return the equivalent Hugging Face GenerationConfig. Only special tokens come from the model's own: a
        checkpoint's temperature, suppressed tokens or penalties do not apply to the rollout."""
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
class RowParams:
    """The SamplingParams of a batch's rows, as samplers read them.

    distinct: the different settings.
    table: their values as the kernels read them, float64 [distinct, 6], in host memory: temperature, top_k, top_p,
        min_p, repetition_penalty, min_new_tokens.
    index: int64 [rows], the entry of each row, on the sampler's device; None: all rows have the first one.
    """

    distinct: tuple[SamplingParams, ...]
    table: torch.Tensor
    index: torch.Tensor | None = None

    @classmethod
    def of(cls, params: SamplingParams | Sequence[SamplingParams], device: torch.device | str = "cpu") -> "RowParams":
        """Collect the settings of rows.

        Args:
            params: of all rows, or of each.
            device: of the index.
        """
        by_row = [params] if isinstance(params, SamplingParams) else list(params)
        values = [sampling_values(each) for each in by_row]
        distinct = dict(zip(values, by_row, strict=True))
        table = torch.tensor(list(distinct), dtype=torch.float64)
        if len(distinct) == 1:
            return cls(tuple(distinct.values()), table)
        order = {of_row: number for number, of_row in enumerate(distinct)}
        index = torch.tensor([order[of_row] for of_row in values], device=device)
        return cls(tuple(distinct.values()), table, index)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same settings."""
        return self.index is None

    @property
    def key(self) -> Hashable:
        """The values of the different settings: equal for batches that a graph may sample alike if both are uniform."""
        return tuple(map(sampling_values, self.distinct))

    @property
    def penalizes(self) -> bool:
        """Whether a row has a repetition penalty: its draws then depend on the tokens before them."""
        return any(each.repetition_penalty != 1.0 for each in self.distinct)

    def has_penalties(self, can_stop: bool) -> bool:
        """Whether scores of a row are changed before sampling.  can_stop: whether there are stop tokens."""
        return self.penalizes or (can_stop and any(each.min_new_tokens for each in self.distinct))

    def select(self, rows: torch.Tensor) -> "RowParams":
        """Return the settings of some rows, int64 [n]."""
        return self if self.index is None else replace(self, index=self.index[rows])

    def without_penalties(self) -> "RowParams":
        """Return the settings without repetition penalty and min_new_tokens."""
        table = self.table.clone()
        table[:, 4], table[:, 5] = 1.0, 0.0
        distinct = tuple(replace(each, repetition_penalty=1.0, min_new_tokens=0) for each in self.distinct)
        return RowParams(distinct, table, self.index)

    def groups(self) -> Iterator[tuple[SamplingParams, torch.Tensor | slice]]:
        """Yield each of the different settings with its rows, int64 [n]. Waits for the device unless all are equal."""
        if self.index is None:
            yield self.distinct[0], slice(None)
            return
        for number, each in enumerate(self.distinct):
            if len(rows := (self.index == number).nonzero().flatten()):
                yield each, rows

    def temperatures(self) -> float | torch.Tensor:
        """Return the divisor of the logits, 1 for greedy rows: a number if all rows have the same, else float32
        [rows, 1]."""
        divisors = [each.temperature or 1.0 for each in self.distinct]
        if self.index is None or len(set(divisors)) == 1:
            return divisors[0]
        return torch.tensor(divisors, dtype=torch.float32, device=self.index.device)[self.index, None]


def sampling_values(params: SamplingParams) -> tuple[float, ...]:
    """Return a row of `RowParams.table`."""
    truncations = params.temperature, params.top_k, params.top_p, params.min_p
    return *truncations, params.repetition_penalty, params.min_new_tokens


def truncates(params: SamplingParams) -> bool:
    """Whether the distribution is truncated."""
    return params.temperature > 0 and bool(params.top_k or params.top_p < 1.0 or params.min_p)


def warpers_of(params: SamplingParams) -> processes.LogitsProcessorList:
    """Hugging Face's processors with the same effect on logits as temperature and truncations."""
    steps = processes.LogitsProcessorList()
    if params.temperature not in (0, 1.0):
        steps.append(processes.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(processes.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(processes.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(processes.MinPLogitsWarper(params.min_p))
    return steps


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return logits [n, vocab] after `warpers_of`. At the edge of top-p the higher ids of equal logits are kept, as by
    all samplers: Hugging Face's sort is not stable (5.23), and keeps any of them."""
    no_ids: Any = None  # warpers do not read them
    for warper in warpers_of(params):
        if isinstance(warper, processes.TopPLogitsWarper):
            ascending, order = logits.sort(stable=True)
            removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - warper.top_p
            removed[:, -1] = False
            logits = logits.masked_fill(removed.scatter(1, order, removed), -torch.inf)
        else:
            logits = warper(no_ids, logits)
    return logits


def check_fields(values: Any, rules: dict[str, Rule], optional: bool = False) -> None:
    """Replace the fields of a frozen dataclass by Python numbers. Raises ValueError for one whose rule does not hold.

    rules: by field.  optional: whether None is allowed.
    """
    for name, rule in rules.items():
        value = getattr(values, name)
        if value is not None or not optional:
            object.__setattr__(values, name, checked_number(f"{type(values).__name__}.{name}", value, *rule))


def end_token_ids(model: Any, more: tuple[int, ...] = ()) -> list[int]:
    """All end tokens: of the model's generation configuration, of its model configuration, and `more`."""
    ends: list[int] = []
    for ids in (model.generation_config.eos_token_id, getattr(model.config, "eos_token_id", None), list(more)):
        ends += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return list(dict.fromkeys(ends))


def pad_token_id(model: Any, ends: list[int]) -> int:
    """Return the token that fills the positions after a completion: the model's, else its first end token, else 0."""
    for config in (model.generation_config, model.config):
        if getattr(config, "pad_token_id", None) is not None:
            return config.pad_token_id
    return ends[0] if ends else 0
