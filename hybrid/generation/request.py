"""Request: a call's rows and settings on their way to the scheduler; and the inputs that `generate()` prepares."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as processes
from transformers.generation.streamers import BaseStreamer

from hybrid.generation.hf_cache import CACHES, is_empty
from hybrid.models.model_inputs import NO_INPUTS, RowInputs, is_model_input, split_inputs
from hybrid.models.placeholders import Placeholders
from hybrid.rollout import EnvironmentLimits, RolloutBatch, StopAfter, UnfinishedRows
from hybrid.sampling.params import RowParams, SamplingParams, truncates
from hybrid.sampling.sampler import PER_TOKEN

ENCODED = "mm_encoder_outputs"  # of images, by `generate()` (transformers 5.23)
# Arguments of a decoding method that the fused decoder supports (transformers 5.23).
SUPPORTED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHES}
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
# The warpers that the sampler implements, and the field of SamplingParams for each, in the order of `generate` (5.23).
WARPERS = {
    processes.TemperatureLogitsWarper: "temperature",
    processes.TopKLogitsWarper: "top_k",
    processes.TopPLogitsWarper: "top_p",
    processes.MinPLogitsWarper: "min_p",
}

Processors = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (ids, scores, rows) -> scores


@dataclass(frozen=True)
class PartialCompletion:
    """The tokens that rows' completions begin with, from an earlier call.

    tokens: int64 [rows, n].  lengths: of each row's.  logps: float32 [4, rows, n]: sampling, old, raw, sampling mask.
    weight_versions: int64 [rows, n], of the weights that sampled each token.
    """

    tokens: torch.Tensor
    lengths: list[int]
    logps: torch.Tensor
    weight_versions: torch.Tensor

    def select(self, rows: list[int]) -> "PartialCompletion":
        """Return the given rows."""
        lengths = [self.lengths[row] for row in rows]
        return PartialCompletion(self.tokens[rows], lengths, self.logps[:, rows], self.weight_versions[rows])

    @classmethod
    def none(cls, prompt_ids: torch.Tensor) -> "PartialCompletion":
        """Return no tokens, for each of the prompts [rows, prompt_len]."""
        rows, tokens = len(prompt_ids), prompt_ids.new_zeros(len(prompt_ids), 0)
        return cls(tokens, [0] * rows, torch.zeros(len(PER_TOKEN), rows, 0, device=prompt_ids.device), tokens)

    @staticmethod
    def cat(parts: "Sequence[PartialCompletion]") -> "PartialCompletion":
        """Return the rows of all parts, one part after the other."""
        width = max(part.tokens.shape[1] for part in parts)

        def whole(tensors: Iterable[torch.Tensor], dim: int = 0) -> torch.Tensor:
            return torch.cat([F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors], dim)

        return PartialCompletion(
            tokens=whole(part.tokens for part in parts),
            lengths=[length for part in parts for length in part.lengths],
            logps=whole((part.logps for part in parts), dim=1),
            weight_versions=whole(part.weight_versions for part in parts),
        )


@dataclass(frozen=True)
class StopCondition:
    """The number of groups of rows that must finish, each with all of its rows; then the other rows stop, unfinished.

    asks: whether `Request.accept_group` decides which groups count.
    """

    groups: tuple[tuple[int, ...], ...]
    count: int
    asks: bool = False

    def shifted(self, first: int) -> "StopCondition":
        """Return the condition for rows that come `first` rows later."""
        return replace(self, groups=tuple(tuple(row + first for row in group) for group in self.groups))


class Failure(NamedTuple):
    """The error of a row whose environment could not begin.  reason: as Sequence's."""

    reason: str
    error: str


@dataclass(frozen=True)
class Request:
    """A batch of prompts to decode: the rows, how they are sampled, and the user's functions.

    The one record from `engine.rollout` or `engine.generate` to the scheduler, hence its many fields. A copy that is
    sent to other ranks, which decode the rows as well, has no functions of the user.

    prompt_ids: int64 [rows, prompt_len], left padded.  prompt_lengths: tokens of each prompt, without padding.
    sampling_keys: int64 [rows].
    groups: int64 [rows], equal for generations of one prompt.
    max_new_tokens: of any row.  limits: int64 [rows], of each row.
    stop_token_ids: int64 [n].  pad_token_id: fills the positions after a row's end.
    sampling_params: of all rows, or of each; their max_new_tokens, seed and stop_token_ids are not read.
    processors: change scores [n, vocab] before sampling; their rows, int64 [n], index the request, and have ids [n,
        tokens] of one length. None: no processors.
    partial: the tokens that completions begin with; None: none.  stop_conditions: of disjoint rows.
    environment: answers the rows' turns; see `HybridEngine.rollout`. None: no environment, or on another rank.
    environment_limits: of rows with an environment; None: they have none.  failures: of rows that cannot begin.
    on_rows: called with rows that have finished, as a RolloutBatch.  accept_group: as StopAfter's.
    return_router_indices: whether completions have the experts of each token.
    model_inputs: each row's inputs besides token ids, the same object for rows of one prompt; empty: all are text.
    suppressed: int64 [n], tokens that are not drawn; None: all are.
    adapters: the number of each row's, as `PackedBatch.adapters`; empty: all rows have those of the call.
    is_dummy: the rank has no rows: this one joins the other ranks' collectives, and is dropped.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: list[int]
    sampling_keys: torch.Tensor
    groups: torch.Tensor
    max_new_tokens: int
    limits: torch.Tensor
    stop_token_ids: torch.Tensor
    pad_token_id: int
    sampling_params: SamplingParams | tuple[SamplingParams, ...]
    processors: Processors | None = None
    partial: PartialCompletion | None = None
    stop_conditions: tuple[StopCondition, ...] = ()
    environment: Any = None
    environment_limits: EnvironmentLimits | None = None
    failures: dict[int, Failure] = field(default_factory=dict)
    on_rows: Callable[[RolloutBatch], None] | None = None
    accept_group: Callable[[RolloutBatch], bool] | None = None
    return_router_indices: bool = False
    model_inputs: list[RowInputs] = field(default_factory=list)
    suppressed: torch.Tensor | None = None
    adapters: list[int] = field(default_factory=list)
    is_dummy: bool = False

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "environment": None, "on_rows": None, "accept_group": None}

    @property
    def prompt_mask(self) -> torch.Tensor:
        """The mask of `prompt_ids`, int64 [rows, prompt_len]."""
        rows, width = self.prompt_ids.shape
        device = self.prompt_ids.device
        begins = width - torch.tensor(self.prompt_lengths, dtype=torch.int64, device=device).view(rows, 1)
        return (torch.arange(width, device=device) >= begins).long()

    @property
    def logprob_temperature(self) -> float:
        """The temperature of `Completions.old_logps`: that of sampling, and 1 for greedy search."""
        return self.params_of_rows()[0].temperature or 1.0

    @property
    def runs_user_code(self) -> bool:
        """Whether processors are the user's: then only the rank that has them can run them."""
        # Those of merged requests are of transformers and ours alone.
        processors = self.processors.args[0] if isinstance(self.processors, partial) else ()
        return any(not type(processor).__module__.startswith(("transformers.", "hybrid.")) for processor in processors)

    @property
    def keeps_sampling_mask(self) -> bool:
        """Whether rows are truncated, and by the model's logits alone: scores that were processed do not come back."""
        params = RowParams.of(self.sampling_params)
        processed = self.processors is not None or params.has_penalties(can_stop=len(self.stop_token_ids) > 0)
        processed |= self.suppressed is not None and len(self.suppressed) > 0
        return not processed and any(map(truncates, params.distinct))

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a row, prompt and completion."""
        return max(self.prompt_lengths, default=0) + self.max_new_tokens

    def inputs_of(self, row: int) -> RowInputs:
        """Return a row's inputs besides token ids."""
        return self.model_inputs[row] if self.model_inputs else NO_INPUTS

    def prompts(self) -> list[torch.Tensor]:
        """Return the prompts without padding, int64 [n] each, on the host."""
        ids = self.prompt_ids.cpu()
        return [prompt[len(prompt) - length :] for prompt, length in zip(ids, self.prompt_lengths, strict=True)]

    def with_prompts(self, prompts: list[torch.Tensor]) -> "Request":
        """Return the request with other prompts, int64 [n] each."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.stack([padded_left(prompt, max(lengths)) for prompt in prompts])
        return replace(self, prompt_ids=ids.to(self.prompt_ids.device), prompt_lengths=lengths)

    def select(self, rows: list[int]) -> "Request":
        """Return the given rows, without stop conditions, failures and processors, which are of all rows."""
        return replace(
            self,
            prompt_ids=self.prompt_ids[rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            sampling_keys=self.sampling_keys[rows],
            processors=None,
            groups=self.groups[rows],
            limits=self.limits[rows],
            partial=None if self.partial is None else self.partial.select(rows),
            model_inputs=[self.model_inputs[row] for row in rows] if self.model_inputs else [],
            adapters=[self.adapters[row] for row in rows] if self.adapters else [],
            stop_conditions=(),
            failures={},
        )

    def after(self, resumed: UnfinishedRows) -> "Request":
        """Return unfinished rows of an earlier call, and then the rows of this request."""
        device, lengths = self.prompt_ids.device, resumed.prompt_mask.sum(dim=1).tolist()
        given = {name: tensor.to(device) for name, tensor in vars(resumed).items() if tensor is not None}
        resumed = replace(resumed, **given)
        width = max(self.prompt_ids.shape[1], resumed.prompt_ids.shape[1])
        first_group = int(resumed.groups.max()) + 1 if len(resumed) else 0
        sampled = resumed.completion_mask.sum(dim=1).tolist()
        mask = torch.full_like(resumed.logps[:1], torch.nan)
        if resumed.sampling_mask is not None:
            mask = resumed.sampling_mask[None].to(mask)
        logps = torch.cat([resumed.logps, mask])
        partial = PartialCompletion(resumed.completion_ids, sampled, logps, resumed.weight_versions)
        return replace(
            self,
            prompt_ids=torch.cat([padded_left(ids, width) for ids in (resumed.prompt_ids, self.prompt_ids)]),
            prompt_lengths=lengths + self.prompt_lengths,
            sampling_keys=torch.cat([resumed.sampling_keys, self.sampling_keys]),
            limits=torch.cat([resumed.limits, self.limits]),
            groups=torch.cat([resumed.groups, self.groups + first_group]),
            partial=PartialCompletion.cat([partial, PartialCompletion.none(self.prompt_ids)]),
        )

    def params_of_rows(self) -> Sequence[SamplingParams]:
        """Return the sampling parameters of each row."""
        params = self.sampling_params
        return [params] * len(self.prompt_ids) if isinstance(params, SamplingParams) else params


def padded_left(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return a tensor [..., n] with zeros before it, [..., width]."""
    return F.pad(tensor, (width - tensor.shape[-1], 0))


def stop_conditions(groups: torch.Tensor, stop_after: StopAfter) -> tuple[StopCondition, ...]:
    """Return what must finish before the other rows stop.  groups: as Request's."""
    by_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        by_group.setdefault(group, []).append(row)
    rows_of_groups = tuple(map(tuple, by_group.values()))
    if stop_after.groups is not None:
        count = min(stop_after.groups, len(rows_of_groups))
        return (StopCondition(rows_of_groups, count, asks=stop_after.accept_group is not None),)
    if stop_after.rows is not None:
        return (StopCondition(single_rows(range(len(groups))), min(stop_after.rows, len(groups))),)
    assert stop_after.rows_per_group is not None, "one of the three numbers is given"
    per_group = stop_after.rows_per_group
    return tuple(StopCondition(single_rows(rows), min(per_group, len(rows))) for rows in rows_of_groups)


def single_rows(rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return each row as a group of its own."""
    return tuple((row,) for row in rows)


# Requests of several ranks as one


def same_rows(request: Request, other: Request) -> bool:
    """Return whether two requests of equal settings have equal rows, whose tokens are then equal."""
    if any(r.environment_limits or r.partial or r.stop_conditions or r.model_inputs for r in (request, other)):
        return False
    equal = torch.equal(request.prompt_ids, other.prompt_ids) and request.prompt_lengths == other.prompt_lengths
    equal = equal and torch.equal(request.sampling_keys, other.sampling_keys)
    equal = equal and torch.equal(request.limits, other.limits)
    given: list[Any] = [request.processors, other.processors]  # None, or a partial of `process_rows`
    processors = ([] if of_request is None else of_request.args[0] for of_request in given)
    return equal and all(same_processor(*pair) for pair in zip_longest(*processors))


def same_processor(processor: Any, other: Any) -> bool:
    """Return whether two of Hugging Face's processors have the same type and settings."""

    def same(value: Any, other_value: Any) -> bool:
        if isinstance(value, torch.Tensor) and isinstance(other_value, torch.Tensor):
            return torch.equal(value, other_value)
        return type(value) is type(other_value) and not isinstance(value, torch.Tensor) and value == other_value

    if type(processor) is not type(other):
        return False
    return all(same(value, vars(other).get(name)) for name, value in vars(processor).items())


def merge_requests(requests: list[Request]) -> Request:
    """Return requests of equal settings as one: their rows, one request after the other, prompts of equal width."""
    width = max(request.prompt_ids.shape[1] for request in requests)
    firsts = [0, *accumulate(map(len, requests))][:-1]
    numbered = list(zip(firsts, requests, strict=True))
    prefixes = None
    if any(request.partial is not None for request in requests):
        parts = [request.partial or PartialCompletion.none(request.prompt_ids) for request in requests]
        prefixes = PartialCompletion.cat(parts)
    params = requests[0].sampling_params
    if not all(isinstance(request.sampling_params, SamplingParams) for request in requests):
        params = tuple(each for request in requests for each in request.params_of_rows())
    return replace(
        requests[0],
        prompt_ids=torch.cat([padded_left(request.prompt_ids, width) for request in requests]),
        prompt_lengths=[length for request in requests for length in request.prompt_lengths],
        sampling_keys=torch.cat([request.sampling_keys for request in requests]),
        sampling_params=params,
        groups=torch.cat([request.groups + first for first, request in numbered]),
        limits=torch.cat([request.limits for request in requests]),
        model_inputs=[
            request.inputs_of(row)
            for request in requests
            for row in range(len(request))
            if any(each.model_inputs for each in requests)
        ],
        processors=MergedProcessors(numbered, width) if any(request.processors for request in requests) else None,
        partial=prefixes,
        stop_conditions=tuple(one.shifted(first) for first, request in numbered for one in request.stop_conditions),
        failures={first + row: failure for first, request in numbered for row, failure in request.failures.items()},
    )


class MergedProcessors:
    """The processors of merged requests: each gets its own rows, with the ids that its own request has.

    requests: with the first row of each.  width: of the merged prompts.
    """

    def __init__(self, requests: list[tuple[int, Request]], width: int):
        self.parts = [
            (first, first + len(request), width - request.prompt_ids.shape[1], request.processors)
            for first, request in requests
        ]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        processed = scores.clone()
        for first, stop, padding, processors in self.parts:
            here = ((rows >= first) & (rows < stop)).nonzero().flatten()
            if processors is not None and len(here):
                processed[here] = processors(ids[here, padding:], scores[here], rows[here] - first)
        return processed


@dataclass(frozen=True)
class GenerateInputs:
    """The inputs that Hugging Face's `generate()` (transformers 5.23) prepares for a decoding method.

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

    def fallback_reason(self, model: nn.Module, model_inputs: Collection[str] = ()) -> str:
        """Return why the request cannot run fused, and what the user can do about it; "" if it can.

        Fused requests are for a decoder-only model and give token ids (`input_ids` with left padding) and inputs that
        are known row by row; they start with an empty cache and return sequences alone.

        model_inputs: names of these inputs; their positions are the model's.
        """
        caches = {name: self.model_kwargs[name] for name in CACHES if self.model_kwargs.get(name) is not None}
        mask = self.model_kwargs.get("attention_mask")
        unsupported = given_names(self.model_kwargs) - SUPPORTED - set(model_inputs)
        if model.config.is_encoder_decoder:
            return "generate: the model is an encoder-decoder (fused are decoders alone)"
        if self.config.return_dict_in_generate:
            return "generate: return_dict_in_generate=True (fused gives sequences; `rollout` gives logprobs with them)"
        if unsupported:
            return f"generate: {', '.join(sorted(unsupported))} given (fused takes input_ids and attention_mask)"
        if self.config.cache_implementation is not None:
            return f"generate: cache_implementation={self.config.cache_implementation!r} (leave it out)"
        if any(type(cache) is not DynamicCache or not is_empty(cache) for cache in caches.values()):
            return f"generate: {', '.join(caches)} given (leave them out: fused keeps its own blocks)"
        mask = torch.ones_like(self.input_ids) if mask is None else mask
        if (
            mask.shape != self.input_ids.shape
            or not mask[:, -1].all()
            or (mask[:, :-1].bool() & ~mask[:, 1:].bool()).any()
        ):
            return "generate: attention_mask is not zeros and then ones in every row (pad prompts on the left)"
        positions = None if model_inputs else self.model_kwargs.get("position_ids")
        if positions is not None and not bool(((positions == mask.cumsum(dim=1) - 1) | (mask == 0)).all()):
            return "generate: position_ids do not count from each prompt's first token (leave them out)"
        return ""

    def prompt_lengths(self) -> list[int]:
        """Return the tokens of each prompt, without padding."""
        mask = self.model_kwargs.get("attention_mask")
        return [self.input_ids.shape[1]] * len(self.input_ids) if mask is None else mask.sum(dim=1).tolist()

    def request(self, sampling_keys: torch.Tensor, model_inputs: list[RowInputs] | None = None) -> Request | None:
        """Return the scheduler's request; None if something must see all rows at every step.

        model_inputs: each row's, as `Request.model_inputs`; None: all rows are text.
        """
        criteria, processors = self.stopping_criteria, self.logits_processor
        before, params = split_warpers(processors, self.config.do_sample, self.max_new_tokens)
        by_row = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
        by_row &= all(type(processor) in ROWWISE or getattr(processor, "rowwise", False) for processor in before)
        if self.streamer is not None or not by_row:
            return None
        if params is None:  # warpers in another order than the sampler applies them: run them as processors
            before, params = processors, SamplingParams(self.max_new_tokens)
        stop = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
        max_length = min(criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria)
        pad = self.config._pad_token_tensor
        max_new_tokens = max_length - self.input_ids.shape[1]
        return Request(
            prompt_ids=self.input_ids,
            prompt_lengths=self.prompt_lengths(),
            sampling_keys=sampling_keys,
            groups=torch.arange(len(sampling_keys), device=sampling_keys.device),
            max_new_tokens=max_new_tokens,
            limits=torch.full_like(sampling_keys, max_new_tokens),
            stop_token_ids=torch.cat([self.input_ids.new_empty(0), *stop]),
            pad_token_id=0 if pad is None else int(pad),
            sampling_params=params,
            processors=partial(process_rows, before) if before else None,
            model_inputs=model_inputs or [],
        )


def model_inputs_of(kwargs: Mapping[str, Any], config: Any, ids: torch.Tensor) -> list[RowInputs]:
    """Return the images, videos and sound that a call of `generate` gives each prompt, the same object for equal
    prompts; an empty list if it gives none, or if they cannot be split into rows.

    kwargs: of the call; its positions would not be the model's.  config: of the model.  ids: int64 [prompts, tokens].
    """
    given = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    inputs = {name: value for name, value in given.items() if is_model_input(name)}
    others = given.keys() - inputs.keys() - SUPPORTED - {"input_ids", "inputs"}
    mask = given.get("attention_mask", torch.ones_like(ids))
    if not inputs or others or "position_ids" in given or mask.shape != ids.shape:
        return []
    if not Placeholders(config).settings:  # token types of a text model are part of every forward
        return []
    try:
        rows = split_inputs(inputs, config, ids, mask)
    except (TypeError, ValueError):
        return []
    return shared_inputs(rows, [prompt[kept] for prompt, kept in zip(ids, mask.bool(), strict=True)])


def shared_inputs(rows: list[RowInputs], prompts: list[torch.Tensor]) -> list[RowInputs]:
    """Return each row's inputs, the same object for rows with equal inputs and equal prompts, int64 [n] each."""
    first: dict[bytes, list[RowInputs]] = {}
    shared = []
    for row, prompt in zip(rows, prompts, strict=True):
        known = first.setdefault(prompt.cpu().numpy().tobytes(), [])
        same = (each for each in known if each.keys() == row.keys() and all(torch.equal(each[n], row[n]) for n in row))
        if (found := next(same, None)) is None:
            known.append(found := row)
        shared.append(found)
    return shared


def given_names(model_kwargs: dict[str, Any]) -> set[str]:
    """Return the arguments that have a value: `generate()` makes an empty dictionary of what a vision tower gave
    (transformers 5.23)."""
    return {
        name
        for name, value in model_kwargs.items()
        if value is not None and not (isinstance(value, dict) and not value)
    }


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
    """Return the batch's processors applied to some of its rows: scores [n, vocab] of rows int64 [n] with ids [n,
    tokens].

    Hugging Face's repetition penalty keeps each row's padding length (5.23), so it is given those of `rows`.
    """
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = RowRepetitionPenalty(processor.penalty, padding[rows.to(padding.device)])
        scores = processor(ids, scores)
    return scores


def split_warpers(
    processors: processes.LogitsProcessorList, do_sample: bool, max_new_tokens: int
) -> tuple[processes.LogitsProcessorList, SamplingParams | None]:
    """Split the warpers at the end of the list off, and return the other processors and the warpers as SamplingParams.

    Without sampling these are greedy. If the warpers are not the last processors, or have settings that SamplingParams
    cannot express, all processors are returned, and None.
    """
    if not do_sample:
        return processors, SamplingParams(max_new_tokens, temperature=0)
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
    try:
        params = SamplingParams(max_new_tokens, **settings)
    except ValueError:  # a value that Hugging Face's warper allows, such as top_p=0
        return processors, None
    return processes.LogitsProcessorList(processors[:split]), params
