"""Tasks: what an Executor runs for a call, on this rank or on all ranks of its group."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hybrid.config import RolloutConfig
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.environments.stepping import EnvironmentLoop
from hybrid.execution.group_tasks import Task
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions, InvalidLogitsError, rollout_batch
from hybrid.generation.generate import TimedDecoder, decoded_by
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.input_prefill import InputPrefill
from hybrid.generation.lockstep import FusedForward, NativeForward, Outputs, in_lockstep
from hybrid.generation.native_check import MIN_TOKENS, check_rows
from hybrid.generation.native_scheduler import NativeModel, NativeScheduler, RowTraits
from hybrid.generation.request import GenerateInputs, Request, merge_requests, same_rows
from hybrid.generation.routing import recorded_routing
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.scoring import (
    LayerInputScores,
    Scores,
    packed_last_hidden_states,
    score_natively,
    score_packed,
    score_with_layer_inputs,
)
from hybrid.generation.serving_scheduler import NativeServingScheduler, RowSource, ServingScheduler
from hybrid.generation.speculation import Speculator
from hybrid.models.model_info import ModelInfo
from hybrid.models.model_inputs import RowInputs
from hybrid.models.modules import has_invocation_tokens
from hybrid.rollout import RolloutBatch
from hybrid.runtime.errors import UserCodeError
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import InferenceGroup, raise_together
from hybrid.runtime.profiling import ModelTimes, Profiler
from hybrid.sampling.params import RowParams, SamplingParams

DONE, GOES_ON, INTERRUPTED = 0, 1, 2  # states of a LockstepTask, as ranks send them


class RankState(NamedTuple):
    """The state that a rank of a group sends the others before they run tasks.

    limit_bytes: the maximum size of the KV cache; None: unlimited.  free_bytes: of memory.  num_reusable: blocks of
    earlier calls that hold known tokens.  refresh_s: seconds of refreshing weights.  speculation: what drafts are
    planned by.
    """

    limit_bytes: int | None
    free_bytes: float
    num_reusable: int
    refresh_s: float
    speculation: Hashable


class WorkerState:
    """The model, the KV cache and the settings that a rank computes requests with.

    rollout_settings: of the `rollout` block.
    times: of the forwards of fused decoders, if they are timed.
    info: of the model; see `Generator.attach`.
    row_traits: of the rows of the model's own caches.  has_checked_rows: whether their self-check need not run.
    has_checked_inputs: likewise of rows with images.
    native_group: ranks that run the model's own forward together, each for all of their rows; None: this rank alone.
    """

    info: ModelInfo
    row_traits: RowTraits
    has_checked_rows: bool
    has_checked_inputs: bool
    native_group: InferenceGroup | None

    def __init__(
        self,
        profiler: Profiler,
        block_pool: BlockPool,
        rollout_settings: RolloutConfig,
        times: ModelTimes | None = None,
    ):
        self.profiler, self.block_pool, self.times = profiler, block_pool, times
        self.rollout_settings = rollout_settings
        self.kv_cache = KVCache(rollout_settings.kv_step)
        speculation = rollout_settings.speculation
        self.speculator = None if speculation is None else Speculator(speculation)

    @contextmanager
    def opened(self, decoder: AnyDecoder) -> Iterator[Any]:
        """Inside the block every block of the pool is free at first. Yields the decoder, timed if times are taken."""
        make_states = decoder.states if decoder.spec.is_recurrent else None
        self.block_pool.begin_call(decoder.kv, decoder.kv_weights, make_states)
        try:
            yield TimedDecoder(decoder, self.times) if self.times is not None and self.times.enabled else decoder
        finally:
            pool = self.block_pool
            self.profiler.prefilled(pool.prefilled_tokens, pool.reused_tokens, pool.reused_scored_tokens)
            self.block_pool.end_call()

    def rank_state(self, decoder: AnyDecoder) -> RankState:
        """Return this rank's state, for its group, before tasks run on the decoder."""
        pool = self.block_pool
        num_reusable = pool.num_reusable(decoder.kv_weights)
        speculation = None if self.speculator is None else self.speculator.state()
        return RankState(pool.limit_bytes, pool.free_bytes(), num_reusable, self.profiler.refresh_s(), speculation)

    def agree(self, states: Sequence[RankState]) -> None:
        """Take the smallest limit of the group's ranks, so that every rank's scheduler admits the same rows and finds
        the same blocks cached, and record their seconds.  states: of every rank."""
        pool, limits = self.block_pool, [rank.limit_bytes for rank in states if rank.limit_bytes is not None]
        pool.limit_bytes = min(limits, default=None)
        pool.affordable_bytes = min(rank.free_bytes for rank in states)
        if len({rank.num_reusable for rank in states}) > 1:
            pool.forget_all()
        if (
            self.speculator is not None and len({rank.speculation for rank in states}) > 1
        ):  # a request has failed on some of them
            self.speculator.forget()
        self.profiler.group_refreshed([rank.refresh_s for rank in states])

    def native_model(self, request: Request, calls: list[list[torch.Tensor]] | None = None) -> NativeModel:
        """Return the model's own forward for a request's rows.  calls: of `recorded_routing`, if experts are recorded.

        Hugging Face's `generate()` prepares the caches; the scheduler samples.
        """
        stop = tuple(request.stop_token_ids.tolist())
        sampling = SamplingParams(request.max_new_tokens, temperature=0.0, stop_token_ids=stop)
        model, device = self.info.model, request.prompt_ids.device
        config = sampling.generation_config(model, num_generations=1)
        return NativeModel(model, config, self.kv_cache, device, self.row_traits, self.native_group, calls)

    def prompt_to_check(self, request: Request) -> tuple[torch.Tensor, RowInputs] | None:
        """Return the shortest prompt with placeholders, none of them among its last two tokens, and its inputs, for a
        self-check of a decode step; None if there is none."""
        tokens, checked = self.info.placeholders.tokens, []
        for prompt, inputs in zip(request.prompts(), request.model_inputs, strict=True) if request.model_inputs else ():
            found = torch.isin(prompt, tokens)
            if found.any() and not found[-2:].any():
                checked.append((prompt, inputs))
        return min(checked, key=lambda pair: len(pair[0]), default=None)

    def check_rows(self, native: NativeModel, request: Request) -> None:
        """Run the self-check of native decoding before the first tokens of a model that no family describes, and before
        the first ones that follow an image."""
        if not self.has_checked_inputs and (checked := self.prompt_to_check(request)):
            self.has_checked_inputs = True
            check_rows(native, *checked)
        if not self.has_checked_rows:
            self.check_prompt(native, max(request.prompts(), key=len))

    def check_prompt(self, native: NativeModel, prompt: torch.Tensor) -> None:
        """Run the first one of these self-checks with a prompt of text, int64 [n] on the host, if it is long enough."""
        if not self.has_checked_rows and self.info.layout is None and len(prompt) >= MIN_TOKENS:
            self.has_checked_rows = True
            check_rows(native, prompt)

    def release_kv(self) -> None:
        """Free the KV storage."""
        self.kv_cache.release()
        self.block_pool.release()

    def kv_bytes(self) -> int:
        """Return the bytes of the KV storage."""
        return self.kv_cache.nbytes() + self.block_pool.nbytes()

    def peak_kv_bytes(self) -> int:
        """Return the maximum that `kv_bytes` has been."""
        return self.kv_cache.peak_bytes + self.block_pool.peak_bytes


@dataclass(frozen=True)
class GenerateTask(Task):
    """A request's completions by the scheduler. Requests of several ranks with equal settings are decoded as one.

    request: the rows to decode.  local: this rank's own request, whose rows are among them from `first_row` on; None on
    a rank that decodes the rows for others.  weight_version: of the batches that the user's functions get.
    """

    request: Request
    local: Request | None = None
    first_row: int = 0
    weight_version: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "local": None}

    @property
    def key(self) -> Hashable:
        request = self.request
        settings = request.max_new_tokens, request.pad_token_id, RowParams.of(request.sampling_params).key
        more = request.environment_limits, request.return_router_indices, request.suppressed is None
        return "completions", *settings, *more, *request.stop_token_ids.tolist()

    @property
    def local_rows(self) -> range:
        """This rank's rows of the request."""
        return range(self.first_row, self.first_row + (0 if self.local is None else len(self.local)))

    def run(self, decoder: AnyDecoder | None, state: WorkerState, is_local: bool = True) -> Completions:
        try:
            return self.completions(decoder, state)
        except InvalidLogitsError as error:
            raise error.of_rows(self.local_rows) from None

    def completions(self, decoder: Any, state: WorkerState) -> Completions:
        """Return the completions of all rows."""
        vocab_size = decoder.spec.vocab_size if decoder.vocabulary is None else decoder.vocabulary.size
        with state.opened(decoder) as decoder:
            done = self.scheduled(Scheduler, decoder, state, vocab_size, state.speculator)
        if state.speculator is not None:
            state.profiler.speculated(*state.speculator.taken_counters())
        return done

    def scheduled(
        self, kind: type[Scheduler], decoder: Any, state: WorkerState, vocab_size: int, speculator: Speculator | None
    ) -> Completions:
        """Return the completions by a scheduler over a decoder.  vocab_size: of the model."""
        ranks, request = 1 if decoder.group is None else decoder.group.size, self.request
        on_rows, accept_group = (None, None) if self.local is None else (self.local.on_rows, self.local.accept_group)
        limits, loop = self.request.environment_limits, None
        if limits is not None:
            loop = EnvironmentLoop(limits, vocab_size, self.request.environment, self.local_rows, decoder.group)
        prefill = None
        if any(request.model_inputs) and kind is Scheduler:
            prefill = InputPrefill(state.native_model(request), decoder, state.block_pool).prefill
        with nullcontext() if loop is None else closing(loop):
            scheduler = kind(
                request,
                decoder,
                state.block_pool,
                ranks * state.rollout_settings.max_num_seqs,
                state.profiler.phase,
                environment=loop,
                on_end=None if on_rows is None else partial(self._report_rows, on_rows),
                accept_group=None if accept_group is None else partial(self._report_rows, accept_group),
                speculator=speculator,
                input_prefill=prefill,
            )
            return scheduler.run()

    def _report_rows(self, function: Callable[[RolloutBatch], Any], rows: list[int], done: Completions) -> Any:
        """Call a user function with this rank's finished rows.  done: all rows, so far."""
        rows = [row for row in rows if row in self.local_rows]
        if self.local is None or not rows:
            return None
        local = [row - self.first_row for row in rows]
        batch = rollout_batch(self.local.select(local), done.select(rows).trimmed(), self.weight_version)
        return function(batch.renumbered(local))

    def merged(self, tasks: "list[GenerateTask]") -> "GenerateTask":
        index = next((index for index, task in enumerate(tasks) if task.local is not None), 0)
        requests, task = [task.request for task in tasks], tasks[index]
        if all(same_rows(self.request, request) for request in requests):
            return task
        merged = replace(merge_requests(requests), environment=task.request.environment)
        return replace(task, request=merged, first_row=sum(map(len, requests[:index])))

    def part(self, result: Completions, tasks: "list[GenerateTask]", index: int) -> Completions:
        first, count = sum(len(task.request) for task in tasks[:index]), len(tasks[index].request)
        if len(result.lengths) == count:  # every rank gave the same rows
            return result
        return result.select(list(range(first, first + count)))


@dataclass(frozen=True)
class NativeTask(GenerateTask):
    """A request's completions by the scheduler over the model's own forward."""

    @property
    def key(self) -> Hashable:
        return "native", super().key

    def completions(self, decoder: None, state: WorkerState) -> Completions:
        model, request = state.info.model, self.request
        if has_invocation_tokens(model):
            return self._in_lockstep(state)
        with recorded_routing(model) if request.return_router_indices else nullcontext() as calls:
            native = state.native_model(request, calls)
            state.check_rows(native, request)
            return self.scheduled(NativeScheduler, native, state, state.info.size("vocab_size"), None)

    def _in_lockstep(self, state: WorkerState) -> Completions:
        """Return the completions of all rows together, inside PEFT's `generate()`."""
        request, model = self.request, state.info.model
        given: dict[str, Any] = {"an environment": request.environment_limits, "resume": request.partial}
        given["stop_after"] = request.stop_conditions or None
        if reason := " and ".join(name for name, value in given.items() if value is not None):
            raise NotImplementedError(
                f"rollout: {reason} given with aLoRA, whose rows PEFT decodes together; leave it out"
            )
        stop = tuple(request.stop_token_ids.tolist())
        sampling = replace(request.params_of_rows()[0], max_new_tokens=request.max_new_tokens, stop_token_ids=stop)

        def decode(model: nn.Module, inputs: GenerateInputs) -> Completions:
            forward = NativeForward(model, inputs, state.kv_cache, expands=False)
            outputs, phase = Outputs(inputs.config, None), state.profiler.phase
            temperature = request.logprob_temperature
            return in_lockstep(forward, inputs, request.sampling_keys, outputs, phase, temperature)

        config = sampling.generation_config(model, num_generations=1)
        kwargs = {"attention_mask": request.prompt_mask, "generation_config": config, "use_cache": True}
        done = decoded_by(decode, model, (request.prompt_ids,), kwargs)
        return done.cut(request.limits, request.pad_token_id)


@dataclass(frozen=True)
class ServeTask(Task):
    """Rows that arrive one by one, until the sources of all ranks are closed.

    request: an empty row for each slot.  source: of this rank's rows; None on a rank that serves the rows of others.
    """

    request: Request
    source: RowSource | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    @property
    def key(self) -> Hashable:
        return "serve"

    def run(self, decoder: AnyDecoder, state: WorkerState, is_local: bool = True) -> tuple[int, int]:
        with state.opened(decoder) as decoder:
            arguments = self.request, decoder, state.block_pool, len(self.request), state.profiler.phase
            done = ServingScheduler(*arguments, source=self.source, speculator=state.speculator).serve()
        if state.speculator is not None:
            state.profiler.speculated(*state.speculator.taken_counters())
        return done

    def merged(self, tasks: list["ServeTask"]) -> "ServeTask":
        source = next((task.source for task in tasks if task.source is not None), None)
        longest = max((task.request for task in tasks), key=lambda request: (request.longest, -len(request)))
        return replace(self, request=longest, source=source)


@dataclass(frozen=True)
class NativeServeTask(ServeTask):
    """As ServeTask, by the model's own forward, on one rank."""

    def run(self, decoder: None, state: WorkerState, is_local: bool = True) -> tuple[int, int]:
        native = state.native_model(self.request)
        arguments = self.request, native, state.block_pool, len(self.request), state.profiler.phase
        check = partial(state.check_prompt, native)
        return NativeServingScheduler(*arguments, source=self.source, check=check).serve()


@dataclass(frozen=True)
class ScoreTask(Task):
    """Scores of sequences, by `score_packed`; without a decoder by `score_natively`.

    rows_at_once: maximum rows in the cache, or in a forward of the model's own.
    in_parts: False if each forward of the model's own is a collective of ranks with batches of their own.
    model_inputs: each row's inputs besides token ids, which the model's own forward reads; empty: the rows are text.
    top_k: as in `score_packed`.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    temperature: float
    rows_at_once: int
    in_parts: bool = True
    model_inputs: Sequence[RowInputs] = ()
    top_k: int = 0

    def run(self, decoder: AnyDecoder | None, state: WorkerState, is_local: bool = True) -> Scores:
        batch = self.sequences, self.attention_mask, self.temperature, self.rows_at_once
        if decoder is None:
            return score_natively(state.info.model, *batch, self.in_parts, self.model_inputs, self.top_k)
        with state.opened(decoder) as decoder:
            return score_packed(decoder, state.block_pool, *batch, self.top_k)


@dataclass(frozen=True)
class HiddenStatesTask(Task):
    """The last layer's output of sequences, by `packed_last_hidden_states`."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    rows_at_once: int

    def run(self, decoder: AnyDecoder, state: WorkerState, is_local: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.sequences, self.attention_mask, self.rows_at_once
        with state.opened(decoder) as decoder:
            return packed_last_hidden_states(decoder, state.block_pool, *batch)


@dataclass(frozen=True)
class LayerInputsTask(Task):
    """Scores of sequences with the layers' inputs, by `score_with_layer_inputs`; None on a rank that did not ask."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    temperature: float
    rows_at_once: int
    sampling_mask: torch.Tensor | None = None

    def run(self, decoder: AnyDecoder, state: WorkerState, is_local: bool = True) -> LayerInputScores | None:
        batch = self.sequences, self.attention_mask, self.temperature, self.rows_at_once, self.sampling_mask
        with state.opened(decoder) as decoder:
            return score_with_layer_inputs(decoder, state.block_pool, *batch, keeps_inputs=is_local)


@dataclass(frozen=True)
class LockstepTask(Task):
    """Completions in lockstep, for user code that must see all rows. In a group only the rank that called
    runs this code, and sends the others the tokens of every step.

    prompt_ids: int64 [rows, prompt_len], left padded.  owner: index of that rank in its group.
    decode: runs the loop over a FusedForward; remains on that rank.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: list[int]
    max_new_tokens: int
    owner: int
    decode: Callable[[FusedForward], Completions] = field(repr=False)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "decode": None}

    def run(self, decoder: AnyDecoder, state: WorkerState, is_local: bool = True) -> Completions | None:
        with state.opened(decoder) as decoder:
            forward = FusedForward(decoder, state.block_pool, self.prompt_lengths, self.max_new_tokens)
            if decoder.group is None:
                return self.decode(forward)
            group, no_tokens = decoder.group, self.prompt_ids.new_zeros(len(self.prompt_ids))

            def exchange(state: int, tokens: torch.Tensor = no_tokens) -> torch.Tensor:
                """Return the owner's state and latest tokens, int64 [1 + rows]. Ends all ranks' work if one is
                interrupted."""
                error = INTERRUPTS.taken()
                state = INTERRUPTED if error is not None else state
                received = group.gather(torch.cat([tokens.new_full((1,), state), tokens]))
                if (received[:, 0] == INTERRUPTED).any():
                    forward.is_running = True
                    raise_together(error, group.group)
                return received[self.owner]

            if not is_local:
                forward.prefill(self.prompt_ids)
                while (received := exchange(DONE))[0] != DONE:
                    forward.append(received[1:])
                return None

            forward.before_step = partial(exchange, GOES_ON)
            try:
                return self.decode(forward)
            except BaseException as error:
                if forward.is_running:  # an error of ours, or of all ranks: the others do not wait for tokens
                    raise
                raise UserCodeError from error
            finally:
                if not forward.is_running:
                    exchange(DONE)
