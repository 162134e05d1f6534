"""A batch of prompts for the scheduler: from SamplingParams, or from what Hugging Face's `generate()` has prepared."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as processes
from transformers.generation.streamers import BaseStreamer

from hybrid.generation.sampler import SamplingMetadata
from hybrid.rollout import EnvironmentLimits

# Arguments of a decoding method that the fused decoder supports (transformers 5.23).
SUPPORTED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# Processors whose result for a row is a function of that row's ids and scores alone (transformers 5.23). A user's
# processor declares this by an attribute `rowwise = True`.
ROWWISE = (
    processes.MinLengthLogitsProcessor,
    processes.MinNewTokensLengthLogitsProcessor,
    processes.TemperatureLogitsWarper,
    processes.RepetitionPenaltyLogitsProcessor,
    processes.TopPLogitsWarper,
    processes.TopKLogitsWarper,
    processes.TopHLogitsWarper,
    processes.MinPLogitsWarper,
    processes.TypicalLogitsWarper,
    processes.EpsilonLogitsWarper,
    processes.EtaLogitsWarper,
    processes.NoRepeatNGramLogitsProcessor,
    processes.SequenceBiasLogitsProcessor,
    processes.NoBadWordsLogitsProcessor,
    processes.ForcedBOSTokenLogitsProcessor,
    processes.ForcedEOSTokenLogitsProcessor,
    processes.InfNanRemoveLogitsProcessor,
    processes.ExponentialDecayLengthPenalty,
    processes.LogitNormalization,
    processes.SuppressTokensAtBeginLogitsProcessor,
    processes.SuppressTokensLogitsProcessor,
)
# The warpers that `SamplingMetadata` implements, and its field for each, in the order of `generate` (5.23).
WARPERS = {
    processes.TemperatureLogitsWarper: "temperature",
    processes.TopKLogitsWarper: "top_k",
    processes.TopPLogitsWarper: "top_p",
    processes.MinPLogitsWarper: "min_p",
}

Processors = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (ids, scores, rows) -> scores


@dataclass(frozen=True)
class Begun:
    """Tokens that rows' completions begin with, from an earlier call.

    tokens: int64 [rows, n].  lengths: of each row's.  logps: float32 [3, rows, n]: sampling, old, raw.
    """

    tokens: torch.Tensor
    lengths: list[int]
    logps: torch.Tensor

    def select(self, rows: list[int]) -> "Begun":
        """The given rows."""
        return Begun(self.tokens[rows], [self.lengths[row] for row in rows], self.logps[:, rows])

    @classmethod
    def nothing(cls, prompt_ids: torch.Tensor) -> "Begun":
        """No tokens, for each of the prompts [rows, prompt_len]."""
        rows, device = len(prompt_ids), prompt_ids.device
        return cls(prompt_ids.new_zeros(rows, 0), [0] * rows, torch.zeros(3, rows, 0, device=device))


@dataclass(frozen=True)
class Quota:
    """How many of these groups of rows must finish, each with all of its rows; then the other rows stop, unfinished.

    asks: whether the caller decides which groups count.
    """

    groups: tuple[tuple[int, ...], ...]
    count: int
    asks: bool = False

    def shifted(self, first: int) -> "Quota":
        """The same for rows that come `first` rows later."""
        return replace(self, groups=tuple(tuple(row + first for row in group) for group in self.groups))


class Failure(NamedTuple):
    """Why a row's environment could not begin.  reason: as RowOutcome's."""

    reason: str
    error: str


@dataclass(frozen=True)
class Request:
    """A batch of prompts to decode.

    prompt_ids: int64 [rows, prompt_len], left padded.  prompt_lengths: tokens of each prompt, without padding.
    sampling_keys: int64 [rows].
    max_new_tokens: of any row.  limits: int64 [rows], of each row, where they differ.
    stop_token_ids: int64 [n].  pad_token_id: fills the positions after a row's end.
    sampling_metadata: how tokens are drawn.
    processors: change scores [n, vocab] before sampling; their rows, int64 [n], index the request, and have ids [n,
        tokens] of one length. None: no processors.
    logprob_temperature: the temperature of `Completions.old_logps`.
    begun: what rows already have; None: nothing.  quotas: of disjoint rows.
    environment_limits: of rows with an environment; None: they have none.  failures: of rows that cannot begin.
    return_router_indices: whether completions have the experts of each token.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: list[int]
    sampling_keys: torch.Tensor
    max_new_tokens: int
    stop_token_ids: torch.Tensor
    pad_token_id: int
    sampling_metadata: SamplingMetadata
    processors: Processors | None = None
    logprob_temperature: float = 1.0
    limits: torch.Tensor | None = None
    begun: Begun | None = None
    quotas: tuple[Quota, ...] = ()
    environment_limits: EnvironmentLimits | None = None
    failures: dict[int, Failure] = field(default_factory=dict)
    return_router_indices: bool = False

    def limits_of_rows(self) -> torch.Tensor:
        """The most new tokens of each row, int64 [rows]."""
        if self.limits is not None:
            return self.limits
        return torch.full_like(self.sampling_keys, self.max_new_tokens)

    def begun_lengths(self) -> list[int]:
        """The tokens that each row's completion already has."""
        return [0] * len(self.prompt_ids) if self.begun is None else self.begun.lengths

    def padding_lengths(self) -> torch.Tensor:
        """Padding tokens before each prompt, int64 [rows]."""
        lengths = torch.tensor(self.prompt_lengths, dtype=torch.int64, device=self.prompt_ids.device)
        return self.prompt_ids.shape[1] - lengths

    def with_processors(self) -> "Request":
        """The same request, with the repetition penalty and `min_new_tokens` of its metadata as processors instead, for
        decoders that do not sample with them."""
        metadata, width = self.sampling_metadata, self.prompt_ids.shape[1]
        own = processes.LogitsProcessorList()
        if metadata.repetition_penalty != 1.0:
            penalty = float(metadata.repetition_penalty)
            own.append(RowRepetitionPenalty(penalty, self.padding_lengths()))
        if metadata.min_new_tokens and len(self.stop_token_ids):
            shortest = metadata.min_new_tokens
            own.append(processes.MinNewTokensLengthLogitsProcessor(width, shortest, self.stop_token_ids))
        metadata = replace(metadata, repetition_penalty=1.0, min_new_tokens=0)
        if not own:
            return replace(self, sampling_metadata=metadata)
        assert self.processors is None, "processors of `generate()` come without settings of the metadata"
        return replace(self, sampling_metadata=metadata, processors=partial(process_rows, own))

    @property
    def runs_user_code(self) -> bool:
        """Whether processors are the user's: then only the rank that has them can run them."""
        # Those of joined requests are of transformers and ours alone.
        processors = self.processors.args[0] if isinstance(self.processors, partial) else ()
        return any(not type(processor).__module__.startswith(("transformers.", "hybrid.")) for processor in processors)

    @property
    def longest(self) -> int:
        """The most tokens of a row, prompt and completion."""
        return max(self.prompt_lengths, default=0) + self.max_new_tokens


@dataclass(frozen=True)
class GenerateInputs:
    """What Hugging Face's `generate()` (transformers 5.23) prepares for a decoding method.

    input_ids: int64 [sequences, prompt_len], left padded. If the prompts are `inputs_embeds`, these are the ids that
        processors and the caller see, and may have no tokens.
    streamer: receives the tokens of each step; `generate()` does not pass it to a custom decoding method.
    """

    input_ids: torch.Tensor
    logits_processor: processes.LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompts, padding included."""
        embeds = self.model_kwargs.get("inputs_embeds")
        return (self.input_ids if embeds is None else embeds).shape[1]

    @property
    def max_new_tokens(self) -> int:
        """The most new tokens of a sequence."""
        return self.config.max_length - self.input_ids.shape[1]

    def fallback_reason(self, model: nn.Module) -> str:
        """Why the request cannot run fused, and what the user can do about it; "" if it can.

        Fused requests are for a decoder-only model and give token ids (`input_ids` with left padding) and nothing else;
        they start with an empty cache and return sequences alone.
        """
        cache, mask = self.model_kwargs.get("past_key_values"), self.model_kwargs.get("attention_mask")
        unsupported = {name for name, value in self.model_kwargs.items() if value is not None} - SUPPORTED
        if model.config.is_encoder_decoder:
            return "generate: the model is an encoder-decoder (fused are decoders alone)"
        if self.config.return_dict_in_generate:
            return "generate: return_dict_in_generate=True (fused gives sequences; `rollout` gives logprobs with them)"
        if unsupported:
            return f"generate: {', '.join(sorted(unsupported))} given (fused takes input_ids and attention_mask)"
        if self.config.cache_implementation is not None:
            return f"generate: cache_implementation={self.config.cache_implementation!r} (leave it out)"
        if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() > 0):
            return "generate: past_key_values given (leave them out: fused keeps its own blocks)"
        mask = torch.ones_like(self.input_ids) if mask is None else mask
        if (
            mask.shape != self.input_ids.shape
            or not mask[:, -1].all()
            or (mask[:, :-1].bool() & ~mask[:, 1:].bool()).any()
        ):
            return "generate: attention_mask is not zeros and then ones in every row (pad prompts on the left)"
        positions = self.model_kwargs.get("position_ids")
        if positions is not None and not bool(((positions == mask.cumsum(dim=1) - 1) | (mask == 0)).all()):
            return "generate: position_ids do not count from each prompt's first token (leave them out)"
        return ""

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, without padding."""
        mask = self.model_kwargs.get("attention_mask")
        return [self.input_ids.shape[1]] * len(self.input_ids) if mask is None else mask.sum(dim=1).tolist()

    def request(self, sampling_keys: torch.Tensor) -> Request | None:
        """The scheduler's request; None if something must see all rows at every step."""
        criteria, processors = self.stopping_criteria, self.logits_processor
        before, metadata = split_warpers(processors, self.config.do_sample)
        by_row = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
        by_row &= all(type(processor) in ROWWISE or getattr(processor, "rowwise", False) for processor in before)
        if self.streamer is not None or not by_row:
            return None
        if metadata is None:  # warpers in another order than `SamplingMetadata` applies them: run them as processors
            before, metadata = processors, SamplingMetadata()
        stop = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
        max_length = min(criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria)
        pad = self.config._pad_token_tensor
        return Request(
            prompt_ids=self.input_ids,
            prompt_lengths=self.prompt_lengths(),
            sampling_keys=sampling_keys,
            max_new_tokens=max_length - self.input_ids.shape[1],
            stop_token_ids=torch.cat([self.input_ids.new_empty(0), *stop]),
            pad_token_id=0 if pad is None else int(pad),
            sampling_metadata=metadata,
            processors=partial(process_rows, before) if before else None,
        )


class RowRepetitionPenalty(processes.LogitsProcessor):
    """Hugging Face's repetition penalty, of each row's tokens without its padding. Theirs knows rows from transformers
    5.23 on only.

    prompt_ignore_length: padding tokens before each row, int64 [rows].
    """

    def __init__(self, penalty: float, prompt_ignore_length: torch.Tensor):
        self.penalty, self.prompt_ignore_length = penalty, prompt_ignore_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        vocab_size, padding = scores.shape[1], self.prompt_ignore_length.to(input_ids.device)
        is_padding = torch.arange(input_ids.shape[1], device=input_ids.device) < padding[:, None]
        seen = torch.zeros(len(scores), vocab_size + 1, dtype=torch.bool, device=scores.device)
        seen.scatter_(1, input_ids.masked_fill(is_padding, vocab_size), True)
        penalized = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(seen[:, :-1], penalized, scores)


def process_rows(
    processors: processes.LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The batch's processors applied to some of its rows: scores [n, vocab] of rows int64 [n] with ids [n, tokens].

    Hugging Face's repetition penalty keeps each row's padding length (5.23), so it is given those of `rows`.
    """
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = RowRepetitionPenalty(processor.penalty, padding[rows.to(padding.device)])
        scores = processor(ids, scores)
    return scores


def split_warpers(
    processors: processes.LogitsProcessorList, do_sample: bool
) -> tuple[processes.LogitsProcessorList, SamplingMetadata | None]:
    """The processors before the warpers at the end of the list, and the SamplingMetadata that is equal to the warpers.

    Without sampling it is greedy. If the warpers are not the last processors, or are configured in a way that
    `SamplingMetadata` cannot express, all processors are returned, and None.
    """
    if not do_sample:
        return processors, SamplingMetadata(temperature=0)
    split = len(processors)
    while split and type(processors[split - 1]) in WARPERS:
        split -= 1
    tail = list(processors[split:])
    order = [list(WARPERS).index(type(warper)) for warper in tail]
    others = (warper for warper in tail if not isinstance(warper, processes.TopKLogitsWarper))
    keeps_more = any(getattr(warper, "min_tokens_to_keep", 1) > 1 for warper in others)
    fills = any(getattr(warper, "filter_value", -torch.inf) != -torch.inf for warper in tail)
    if order != sorted(set(order)) or keeps_more or fills:
        return processors, None
    settings = {WARPERS[type(warper)]: getattr(warper, WARPERS[type(warper)]) for warper in tail}
    return processes.LogitsProcessorList(processors[:split]), SamplingMetadata(**settings)
