"""What the decoder computes for a call, as `Calls.compute` runs it: on this rank, or on all ranks of its group."""

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.decoders.group_work import OwnError, Work
from hybrid.decoders.routers import recorded_routing
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.environments import EnvironmentLoop
from hybrid.generation.generate import TimedDecoder, decoded_by
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.lockstep import FusedForward, NativeForward, Outputs, in_lockstep
from hybrid.generation.request import Begun, GenerateInputs, Request
from hybrid.generation.routing import rows_of_calls
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.scoring import Scores, score_natively, score_packed
from hybrid.generation.speculation import Speculator
from hybrid.profiling import ModelTimes, Profiler


class Shared(NamedTuple):
    """What the ranks of a group tell each other before work.

    limit_bytes: the most of the KV cache; None: unlimited.  free_bytes: of memory.  num_reusable: blocks of earlier
    calls that hold known tokens.  refresh_s: seconds of refreshing weights.  speculation: what drafts are planned by.
    """

    limit_bytes: int | None
    free_bytes: float
    num_reusable: int
    refresh_s: float
    speculation: Hashable


@dataclass
class Resources:
    """What a rank computes with.

    model, kv_cache: of the model's own forwards.  expands: as in NativeForward, where all ranks have the same rows.
    max_num_seqs: per rank of a group.  times: of its forwards, if they are timed.
    speculator: of drafts; None: none are drafted.
    """

    model: nn.Module
    kv_cache: KVCache
    expands: bool
    block_pool: BlockPool
    profiler: Profiler
    max_num_seqs: int
    times: ModelTimes | None = None
    speculator: Speculator | None = None

    @contextmanager
    def opened(self, decoder: AnyDecoder) -> Iterator[Any]:
        """Inside the block every block of the pool is free at first. Gives the decoder, timed if times are taken."""
        self.block_pool.begin_call(decoder.kv, decoder.kv_weights)
        try:
            yield TimedDecoder(decoder, self.times) if self.times is not None and self.times.enabled else decoder
        finally:
            pool = self.block_pool
            self.profiler.prefilled(pool.prefilled_tokens, pool.reused_tokens, pool.reused_scored_tokens)
            self.block_pool.end_call()

    def shared(self, decoder: AnyDecoder) -> Shared:
        """What this rank tells its group before work by the decoder."""
        pool = self.block_pool
        num_reusable = pool.num_reusable(decoder.kv_weights)
        speculation = None if self.speculator is None else self.speculator.state()
        return Shared(pool.limit_bytes, pool.free_bytes(), num_reusable, self.profiler.refresh_s(), speculation)

    def agree(self, shared: Sequence[Shared]) -> None:
        """Take the least limit of the group's ranks, so that every rank's scheduler admits the same rows and finds the
        same blocks cached, and record their seconds.  shared: of every rank."""
        pool, limits = self.block_pool, [rank.limit_bytes for rank in shared if rank.limit_bytes is not None]
        pool.limit_bytes = min(limits, default=None)
        pool.affordable_bytes = min(rank.free_bytes for rank in shared)
        if len({rank.num_reusable for rank in shared}) > 1:
            pool.forget_all()
        if len({rank.speculation for rank in shared}) > 1:  # a request has failed on some of them
            self.speculator.forget()
        self.profiler.group_refreshed([rank.refresh_s for rank in shared])


@dataclass(frozen=True)
class CompletionWork(Work):
    """A request's completions by the scheduler.

    environment: of the rows, where the request has limits for one.
    on_end: called with rows that have ended and the results so far, on the rank that asked.
    counts: called with the rows of a complete group and the results so far, where the request's quota asks.
    own: this rank's rows of the request, which is of several ranks once it is joined.
    """

    request: Request
    environment: Any = None
    on_end: Callable[[list[int], Completions], None] | None = None
    counts: Callable[[list[int], Completions], bool] | None = None
    own: range = range(0)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "environment": None, "on_end": None, "counts": None, "own": range(0)}

    @property
    def key(self) -> Hashable:
        request = self.request
        settings = request.max_new_tokens, request.pad_token_id, request.sampling_metadata, request.logprob_temperature
        more = request.environment_limits, request.return_router_indices
        return "completions", *settings, *more, *request.stop_token_ids.tolist()

    def run(self, decoder: AnyDecoder, resources: Resources, is_own: bool = True) -> Completions:
        ranks = 1 if decoder.group is None else decoder.group.size
        with resources.opened(decoder) as decoder:
            most = ranks * resources.max_num_seqs
            with self._environment_loop(decoder) as loop:
                scheduler = Scheduler(
                    self.request,
                    decoder,
                    resources.block_pool,
                    most,
                    resources.profiler.phase,
                    environment=loop,
                    on_end=None if self.on_end is None else self._tell_own_rows,
                    counts=self.counts,
                    speculator=resources.speculator,
                )
                done = scheduler.run()
        if resources.speculator is not None:
            resources.profiler.speculated(*resources.speculator.taken_counters())
        return done

    def _environment_loop(self, decoder: AnyDecoder) -> AbstractContextManager[EnvironmentLoop | None]:
        limits = self.request.environment_limits
        if limits is None:
            return nullcontext()
        return closing(EnvironmentLoop(limits, self.environment, self.own, decoder.group))

    def _tell_own_rows(self, rows: list[int], done: Completions) -> None:
        """Call `on_end` with this rank's rows of those that have ended."""
        own = [row - self.own.start for row in rows if row in self.own]
        if own:
            self.on_end(own, done.rows(self.own.start, len(self.own)))

    def joined(self, works: list["CompletionWork"]) -> "CompletionWork":
        requests = [work.request for work in works]
        index = next((index for index, work in enumerate(works) if len(work.own)), 0)
        if all(same_rows(self.request, request) for request in requests):
            return works[index]
        first = sum(len(request.prompt_ids) for request in requests[:index])
        return replace(works[index], request=joined_request(requests), own=range(first, first + len(works[index].own)))

    def part(self, result: Completions, works: list["CompletionWork"], index: int) -> Completions:
        counts = [len(work.request.prompt_ids) for work in works]
        if len(result.lengths) == counts[index]:  # every rank gave the same rows
            return result
        return result.rows(sum(counts[:index]), counts[index])


def same_rows(request: Request, other: Request) -> bool:
    """Whether two requests of equal settings have equal rows, whose tokens are then equal."""
    if any(r.environment_limits or r.begun or r.quotas for r in (request, other)):
        return False
    equal = torch.equal(request.prompt_ids, other.prompt_ids) and request.prompt_lengths == other.prompt_lengths
    equal = equal and torch.equal(request.sampling_keys, other.sampling_keys)
    equal = equal and torch.equal(request.limits_of_rows(), other.limits_of_rows())
    given: list[Any] = [request.processors, other.processors]  # None, or a partial of `process_rows`
    processors = ([] if of_request is None else of_request.args[0] for of_request in given)
    return equal and all(same_processor(*pair) for pair in itertools.zip_longest(*processors))


def same_processor(processor: Any, other: Any) -> bool:
    """Whether two of Hugging Face's processors have the same type and settings."""

    def same(value: Any, other_value: Any) -> bool:
        if isinstance(value, torch.Tensor) and isinstance(other_value, torch.Tensor):
            return torch.equal(value, other_value)
        return type(value) is type(other_value) and not isinstance(value, torch.Tensor) and value == other_value

    if type(processor) is not type(other):
        return False
    return all(same(value, vars(other).get(name)) for name, value in vars(processor).items())


def joined_request(requests: list[Request]) -> Request:
    """Requests of equal settings as one: their rows, one request after the other, prompts padded to equal length."""
    width = max(request.prompt_ids.shape[1] for request in requests)
    counts = [len(request.prompt_ids) for request in requests]
    firsts = [0, *itertools.accumulate(counts)][:-1]
    processors = None
    if any(request.processors is not None for request in requests):
        processors = JoinedProcessors(requests, width)
    return replace(
        requests[0],
        prompt_ids=torch.cat(
            [F.pad(request.prompt_ids, (width - request.prompt_ids.shape[1], 0)) for request in requests]
        ),
        prompt_lengths=[length for request in requests for length in request.prompt_lengths],
        sampling_keys=torch.cat([request.sampling_keys for request in requests]),
        limits=torch.cat([request.limits_of_rows() for request in requests]),
        processors=processors,
        begun=joined_begun(requests),
        quotas=tuple(
            quota.shifted(first) for request, first in zip(requests, firsts, strict=True) for quota in request.quotas
        ),
        failures={
            first + row: failure
            for request, first in zip(requests, firsts, strict=True)
            for row, failure in request.failures.items()
        },
    )


def joined_begun(requests: list[Request]) -> Begun | None:
    """What the rows of joined requests already have."""
    if all(request.begun is None for request in requests):
        return None
    of_all = [request.begun or Begun.nothing(request.prompt_ids) for request in requests]
    width = max(begun.tokens.shape[1] for begun in of_all)
    tokens, logps = (
        [F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]
        for tensors in zip(*((begun.tokens, begun.logps) for begun in of_all), strict=True)
    )
    lengths = [length for begun in of_all for length in begun.lengths]
    return Begun(torch.cat(tokens), lengths, torch.cat(logps, dim=1))


class JoinedProcessors:
    """The processors of joined requests: each gets its own rows, with the ids that its own request has.

    width: of the joined prompts.
    """

    def __init__(self, requests: list[Request], width: int):
        self.parts, first = [], 0
        for request in requests:
            stop = first + len(request.prompt_ids)
            self.parts.append((first, stop, width - request.prompt_ids.shape[1], request.processors))
            first = stop

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        processed = scores.clone()
        for first, stop, padding, processors in self.parts:
            here = ((rows >= first) & (rows < stop)).nonzero().flatten()
            if processors is not None and len(here):
                processed[here] = processors(ids[here, padding:], scores[here], rows[here] - first)
        return processed


@dataclass(frozen=True)
class NativeWork(Work):
    """A request's completions by the model's own forward: Hugging Face's `generate()` prepares its cache and arguments.

    prompt_ids, prompt_mask: int64 [rows, prompt_len], left padded.  sampling_keys: int64 [rows].
    config: of `generate()`.
    processors: Hugging Face's own, for these rows; None: those that `generate()` makes of `config`.
    logprob_temperature: of `Completions.old_logps`; None: no logprobs.
    return_router_indices: whether completions have the experts of each token; each row's prompt is then computed.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    sampling_keys: torch.Tensor
    config: GenerationConfig
    processors: LogitsProcessorList | None = None
    logprob_temperature: float | None = None
    return_router_indices: bool = False

    @property
    def key(self) -> Hashable:
        if self.processors is not None:
            return None
        # Before transformers 5.23 the repetition penalty counts padding as well: with it, only prompts of equal width.
        width = 0 if self.config.repetition_penalty in (None, 1.0) else self.prompt_ids.shape[1]
        settings = self.logprob_temperature, self.return_router_indices, width
        return "native completions", self.config.to_json_string(use_diff=False), *settings

    def run(self, decoder: None, resources: Resources, is_own: bool = True) -> Completions:
        if not self.return_router_indices:
            return self._completions(resources, resources.expands)
        with recorded_routing(resources.model) as calls:
            done = self._completions(resources, expands=False)
        return replace(done, router_indices=rows_of_calls(calls, self.prompt_mask))

    def _completions(self, resources: Resources, expands: bool) -> Completions:
        def decode(model: nn.Module, inputs: GenerateInputs) -> Completions:
            if self.processors is not None:
                inputs = replace(inputs, logits_processor=self.processors)
            forward = NativeForward(model, inputs, resources.kv_cache, expands)
            outputs, phase = Outputs(inputs.config, None), resources.profiler.phase
            return in_lockstep(forward, inputs, self.sampling_keys, outputs, phase, self.logprob_temperature)

        kwargs = {"attention_mask": self.prompt_mask, "generation_config": self.config, "use_cache": True}
        return decoded_by(decode, resources.model, (self.prompt_ids,), kwargs)

    def joined(self, works: list["NativeWork"]) -> "NativeWork":
        width = max(work.prompt_ids.shape[1] for work in works)
        ids, masks = (
            torch.cat([F.pad(tensor, (width - tensor.shape[1], 0)) for tensor in tensors])
            for tensors in zip(*((work.prompt_ids, work.prompt_mask) for work in works), strict=True)
        )
        keys = torch.cat([work.sampling_keys for work in works])
        return replace(self, prompt_ids=ids, prompt_mask=masks, sampling_keys=keys)

    def part(self, result: Completions, works: list["NativeWork"], index: int) -> Completions:
        counts = [len(work.prompt_ids) for work in works]
        return result.rows(sum(counts[:index]), counts[index]).trimmed()


def native_work(inputs: GenerateInputs, sampling_keys: torch.Tensor) -> NativeWork:
    """The work of a `generate()` call without user code, whose prompts are already repeated for each sample."""
    mask = inputs.model_kwargs.get("attention_mask")
    mask = torch.ones_like(inputs.input_ids) if mask is None else mask
    config = copy.deepcopy(inputs.config)
    config.num_return_sequences = 1
    return NativeWork(inputs.input_ids, mask, sampling_keys, config, inputs.logits_processor)


@dataclass(frozen=True)
class NativeScoreWork(Work):
    """Scores of sequences, as `score_natively` gives them.

    in_parts: False if each forward is a collective of ranks with batches of their own.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    temperature: float
    rows_per_forward: int
    in_parts: bool

    def run(self, decoder: None, resources: Resources, is_own: bool = True) -> Scores:
        batch = self.sequences, self.attention_mask, self.temperature, self.rows_per_forward
        return score_natively(resources.model, *batch, self.in_parts)


@dataclass(frozen=True)
class ScoreWork(Work):
    """Scores of sequences, as `score_packed` gives them."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    temperature: float
    rows_at_once: int

    def run(self, decoder: AnyDecoder, resources: Resources, is_own: bool = True) -> Scores:
        batch = self.sequences, self.attention_mask, self.temperature, self.rows_at_once
        with resources.opened(decoder) as decoder:
            return score_packed(decoder, resources.block_pool, *batch)


@dataclass(frozen=True)
class LockstepWork(Work):
    """Completions in lockstep, for user code that must see all rows. On the ranks of a group only the one that asked
    runs this code, and sends the others the tokens of every step.

    prompt_ids: int64 [rows, prompt_len], left padded.  owner: index of the asking rank in its group.
    decode: runs the loop over a FusedForward; stays on the rank that asked.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: list[int]
    max_new_tokens: int
    owner: int
    decode: Callable[[FusedForward], Completions] | None = field(repr=False)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "decode": None}

    def run(self, decoder: AnyDecoder, resources: Resources, is_own: bool = True) -> Completions | None:
        with resources.opened(decoder) as decoder:
            forward = FusedForward(decoder, resources.block_pool, self.prompt_lengths, self.max_new_tokens)
            if decoder.group is None:
                return self.decode(forward)
            group = decoder.group
            message = self.prompt_ids.new_zeros(1 + len(self.prompt_ids))  # whether to go on, and the latest tokens
            if not is_own:
                forward.prefill(self.prompt_ids)
                while (received := group.gather(message)[self.owner])[0]:
                    forward.append(received[1:])
                return None

            def send(tokens: torch.Tensor) -> None:
                group.gather(torch.cat([message.new_ones(1), tokens]))

            forward.before_step = send
            try:
                return self.decode(forward)
            except Exception as error:
                if forward.is_running:  # an error of ours: the other ranks are not where they wait for tokens
                    raise
                raise OwnError from error
            finally:
                if not forward.is_running:
                    group.gather(message)
