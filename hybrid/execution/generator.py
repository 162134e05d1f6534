"""The Generator: what an engine's calls of `generate`, `rollout` and `score` run on.

There are three ways to decode, and the first that fits is taken: the scheduler, if rows are independent of each other;
the fused decoder in lockstep, if a processor, criterion or streamer needs the whole batch at every step; the model's
own forward in lockstep.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from deepspeed.utils import logger
from torch import nn

from hybrid.config import HybridEngineConfig, InferenceConfig, RolloutConfig
from hybrid.decoders.batch import NO_ADAPTER, is_packable
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.environments.stepping import EndsAtOnce, reset_rows
from hybrid.execution.executor import Executor, GroupExecutor
from hybrid.execution.tasks import (
    GenerateTask,
    HiddenStatesTask,
    LayerInputsTask,
    LockstepTask,
    NativeServeTask,
    NativeTask,
    ScoreTask,
    ServeTask,
    WorkerState,
)
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import InvalidLogitsError, rollout_batch
from hybrid.generation.generate import (
    TooManyTokensError,
    decoded_by,
    hugging_face_generate,
    hugging_face_method,
    prepared_config,
    prompts_of,
    require_sampling,
    require_supported_arguments,
    with_stop_strings,
)
from hybrid.generation.input_prefill import InputPrefill, unsupported
from hybrid.generation.lockstep import NativeForward, Outputs, in_lockstep
from hybrid.generation.native_scheduler import RowTraits
from hybrid.generation.request import ENCODED, Failure, GenerateInputs, Request, model_inputs_of, stop_conditions
from hybrid.generation.scoring import Distributions, LayerInputScores, Scores
from hybrid.generation.serving_scheduler import RowSource
from hybrid.models.model_info import ModelInfo
from hybrid.models.model_inputs import NO_INPUTS, ModelInputs, RowInputs, split_inputs
from hybrid.models.modules import has_invocation_tokens, has_virtual_tokens
from hybrid.rollout import (
    EnvironmentLimits,
    RolloutBatch,
    StopAfter,
    UnfinishedRows,
    check_prompts,
    check_rollout,
)
from hybrid.runtime.inputs import (
    DIVISOR,
    as_ids,
    as_mask,
    as_model_inputs,
    checked_number,
    checked_seed,
    checked_top_logprobs,
    is_divisor,
    require_in_vocabulary,
)
from hybrid.runtime.parallel import InferenceGroup, own_row_ids
from hybrid.runtime.profiling import ModelTimes, Profiler
from hybrid.sampling.params import COUNT, SamplingParams, end_token_ids, pad_token_id
from hybrid.sampling.sampler import Seeds, stream_keys, wrapped
from hybrid.weights.named_adapters import BASE, Adapters, adapters_of, require_name_for_each

WITH_INPUTS = "model_inputs given, such as images (fused takes token ids)"
IN_OWN_LAYERS = "prompts with images run in the model's own layers"
GAP_IN_MASK = "attention_mask has zeros between a row's ones (pad on either side)"


Result = TypeVar("Result")


def adapter_number(name: str, mixed: tuple[str, ...]) -> int:
    """Return the number of a row's adapter in a request of several, as `PackedBatch.adapters`."""
    return NO_ADAPTER if name == BASE else mixed.index(name)


class Generator(WorkerState):
    """Generates and scores with a model. One for each engine: its calls share the KV storage and the seeds.

    settings: of the engine: `max_out_tokens` is read from them.
    rollout_settings, times: as WorkerState's.
    require_memory: raises if so many rows of so many tokens cannot run natively.
    runs_other_methods: whether other decoding methods, such as beam search, run by Hugging Face's own loop. If False
        they raise NotImplementedError.
    key_range: number of the range of row ids of this rank's prompts; None: the rank.
    seed_group: ranks that use the first one's seed.
    """

    executor: Executor
    expands: bool
    model: nn.Module  # that generates
    device: torch.device  # of the model
    inputs_refusal: str  # why no decoder goes on from prompts with images, by its self-check; "" if it may

    def __init__(
        self,
        profiler: Profiler,
        block_pool: BlockPool,
        settings: HybridEngineConfig | InferenceConfig,
        rollout_settings: RolloutConfig,
        *,
        times: ModelTimes | None = None,
        require_memory: Callable[[int, int], None] = lambda rows, tokens: None,
        runs_other_methods: bool = False,
        key_range: int | None = None,
        seed_group: InferenceGroup | None = None,
    ):
        super().__init__(profiler, block_pool, rollout_settings, times)
        self.settings, self.require_memory, self.runs_other_methods = settings, require_memory, runs_other_methods
        self.key_range, self.seed_group = key_range, seed_group
        self.seeds = Seeds()
        self.has_logged_broadcasts = False

    def attach(self, info: ModelInfo, executor: Executor, expands: bool) -> None:
        """Generate with this model from now on.  executor: opens its window.  expands: as in NativeForward."""
        assert executor.window.device is not None, "engines know the device of their model"
        self.info, self.model, self.device = info, info.model, executor.window.device
        mergeable = info.merges_adapters  # if not, adapters run: aLoRA's layers expect the call's rows (PEFT 0.21)
        self.executor, self.expands = executor, expands and mergeable
        # PEFT's virtual tokens come before the padding, which then counts as positions (0.21).
        pads = not has_virtual_tokens(info.model)
        self.row_traits = RowTraits((expands or executor.exchanges_tasks) and mergeable, pads)
        self.has_checked_rows, self.has_checked_inputs, self.inputs_refusal = not pads, False, ""
        self.native_group = executor.native_group
        executor.use(self)

    # -------------------------------------------------------------- generate

    def generate(
        self, args: tuple, kwargs: dict[str, Any], adapters: Adapters | None = None, seed: int | None = None
    ) -> Any:
        """Return the output of the model's own `generate`, with our decode loop as its decoding method.

        Arguments and errors are those of `HybridEngine.generate`.
        """
        seed, prompts = checked_seed(seed), prompts_of(self.model, args, kwargs)
        args, kwargs = as_model_inputs(args, kwargs, self.device)
        self.info.require_generate()
        require_supported_arguments(kwargs, self.runs_other_methods)
        if kwargs.get("inputs_embeds") is None and kwargs.get("past_key_values") is None:
            given = [name for name, value in kwargs.items() if value is not None]
            self.info.placeholders.require_inputs("generate", prompts, kwargs.get("attention_mask"), given)
        inputs_of_prompts = [] if prompts is None else model_inputs_of(kwargs, self.info.config, prompts)
        if "generation_config" not in kwargs and len(args) < 2:
            kwargs.setdefault("use_cache", True)  # gradient checkpointing turns it off in the model's configuration
        if self.runs_other_methods:
            config = prepared_config(self.model, args, kwargs)
            if method := hugging_face_method(config, kwargs):
                prompt_len = 0 if prompts is None or self.info.is_encoder_decoder else prompts.shape[1]
                max_new_tokens = config.max_new_tokens or max((config.max_length or 0) - prompt_len, 0)
                self._require_max_out_tokens(prompt_len, max_new_tokens)
                num_prompts = 1 if prompts is None else len(prompts)
                return self._by_hugging_face(args, kwargs, adapters, seed, method, num_prompts, prompt_len)
        kwargs = with_stop_strings(kwargs)

        def decode(model: nn.Module, inputs: GenerateInputs) -> Any:
            return self._decode(model, inputs, adapters, seed, inputs_of_prompts)

        return decoded_by(decode, self.model, args, kwargs)

    def _decode(
        self,
        model: nn.Module,
        inputs: GenerateInputs,
        adapters: Adapters | None,
        seed: int | None,
        inputs_of_prompts: list[RowInputs],
    ) -> Any:
        """Decode prompts as Hugging Face's `_sample` does (transformers 5.23), with our cache, sampler and window.

        inputs_of_prompts: of each prompt, besides token ids; empty: all are text, or they are not known by prompt.
        Returns int64 [sequences, length], or Hugging Face's output object if `return_dict_in_generate` is set.
        """
        require_sampling(inputs.config)
        self._require_max_out_tokens(inputs.prompt_len, inputs.max_new_tokens)
        keys = inputs.input_ids.new_zeros(len(inputs.input_ids))
        if inputs.config.do_sample:
            if inputs.config.temperature is not None:
                checked_number("temperature", inputs.config.temperature, float, is_divisor, DIVISOR)
            keys = self._sampling_keys(len(keys) // inputs.config.num_return_sequences, len(keys), seed)
        repeats = len(keys) // len(inputs_of_prompts) if inputs_of_prompts else 0
        rows_inputs = [of_prompt for of_prompt in inputs_of_prompts for _ in range(repeats)]
        known = {ENCODED, *(name for row in rows_inputs for name in row)} if rows_inputs else ()
        fallback_reason = inputs.fallback_reason(model, known)
        (block_bytes, slot_bytes), totals = self.executor.fused.bytes_in_cache(), []
        request = None if fallback_reason else inputs.request(keys, rows_inputs)
        if rows_inputs and not fallback_reason:
            needs_all_rows = "generate: model_inputs with a streamer, or criteria or processors of all rows"
            fallback_reason = needs_all_rows if request is None else self._inputs_reason("generate", request)
        if not fallback_reason:
            self._require_token_ids(inputs.input_ids, inputs.model_kwargs.get("attention_mask"))
            if request is not None and request.runs_user_code and self.executor.exchanges_tasks:
                request = None
            totals = [length + inputs.max_new_tokens for length in inputs.prompt_lengths()]
            rows = totals if request is None else [max(totals)]
            self.block_pool.require_room(rows, block_bytes, slot_bytes)
        if fallback_reason or not block_bytes:
            self.require_memory(len(inputs.input_ids), inputs.prompt_len + inputs.max_new_tokens)
        encoder_outputs = inputs.model_kwargs.get("encoder_outputs") if model.config.is_encoder_decoder else None
        outputs, cache = Outputs(inputs.config, encoder_outputs), None
        with self._decoding(adapters, max(totals, default=None), fallback_reason) as decoder:
            decoded = request
            if decoder is not None and request is not None and rows_inputs and self.info.placeholders.settings:
                decoder, decoded = self._behind_inputs("generate", decoder, request)
            uses_cache = inputs.model_kwargs.get("use_cache") or self.executor.exchanges_tasks
            in_peft = has_virtual_tokens(self.model) or has_invocation_tokens(self.model)
            if decoder is None and request is not None and not rows_inputs and uses_cache and not in_peft:
                done = self.executor.compute(None, NativeTask(request, request)).trimmed()
            elif decoder is None:
                forward = NativeForward(model, inputs, self.kv_cache, self.expands)
                done, cache = in_lockstep(forward, inputs, keys, outputs, self.profiler.phase), forward.cache
            elif decoded is not None:
                done = self.executor.compute(decoder, GenerateTask(decoded, request)).trimmed()
            else:
                self._log_broadcasts()
                task = LockstepTask(
                    inputs.input_ids,
                    inputs.prompt_lengths(),
                    inputs.max_new_tokens,
                    0 if decoder.group is None else decoder.group.index,
                    decode=lambda forward: in_lockstep(forward, inputs, keys, outputs, self.profiler.phase),
                )
                done = self.executor.compute(decoder, task)
        self.profiler.generated(len(done.lengths), int(done.lengths.sum()))
        sequences = torch.cat([inputs.input_ids, done.tokens], dim=1)
        if (mask := inputs.model_kwargs.get("attention_mask")) is not None and mask.shape == inputs.input_ids.shape:
            whole = torch.cat([mask, torch.ones_like(done.tokens)], dim=1)
            self.info.placeholders.note_sampled(sequences, whole, inputs.input_ids.shape[1])
        return outputs.result(sequences, cache)

    def _by_hugging_face(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        adapters: Adapters | None,
        seed: int | None,
        method: str,
        num_prompts: int,
        prompt_len: int,
    ) -> Any:
        """Return the output of Hugging Face's `generate` with Hugging Face's decode loop, over the model's own layers.

        Draws come from torch's generators, seeded from the call's sampling keys; the generators' states are restored
        afterwards.
        """
        reason = (
            f"generate: {method} runs by Hugging Face's own loop (fused are greedy search and sampling, num_beams=1)"
        )
        if not self.expands:  # beams reorder a cache's rows, and other ranks hold parts of the cache
            kwargs["use_cache"] = False
        on_device = [] if self.device.type == "cpu" else [self.device]
        with (
            self.executor.request(adapters, None, reason, decodes=True),
            self.profiler.phase("decode"),
            torch.no_grad(),
            torch.random.fork_rng(on_device, device_type=self.device.type),
        ):
            torch.manual_seed(int(self._sampling_keys(num_prompts, num_prompts, seed)[0]))
            output = hugging_face_generate(self.model, args, kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.profiler.generated(len(sequences), len(sequences) * (sequences.shape[1] - prompt_len))
        return output

    # --------------------------------------------------------------- rollout

    def rollout_request(
        self,
        prompt_ids: torch.Tensor | None,
        prompt_mask: torch.Tensor | None,
        sampling: SamplingParams,
        num_generations: int,
        row_ids: torch.Tensor | None,
        max_new_tokens: torch.Tensor | None,
        environment: Any,
        environment_limits: EnvironmentLimits | None,
        stop_after: StopAfter | None,
        resume: UnfinishedRows | None,
        on_rows: Callable[[RolloutBatch], None] | None,
        model_inputs: ModelInputs | None = None,
    ) -> Request:
        """Check the arguments of `HybridEngine.rollout`, and return them as a Request, with a sampling key a row."""
        if prompt_ids is None and prompt_mask is None and resume is not None:
            prompt_ids = prompt_mask = torch.zeros(0, 1, dtype=torch.int64)
        more = environment, environment_limits, stop_after, resume, model_inputs
        check_rollout(prompt_ids, prompt_mask, sampling, num_generations, row_ids, max_new_tokens, *more)
        assert prompt_ids is not None and prompt_mask is not None, "prompts are missing, and were not refused"
        ids, mask = as_ids(prompt_ids, self.device), as_mask(prompt_mask, self.device)
        if environment is not None and environment_limits is None:
            environment_limits = EnvironmentLimits()
        is_dummy = not len(ids) and not (resume is not None and len(resume))
        if is_dummy:  # one token of one row joins the other ranks' collectives, and is dropped
            ids, num_generations = ids.new_zeros(1, ids.shape[1]), 1
            mask, sampling = torch.ones_like(ids), replace(sampling, max_new_tokens=1, min_new_tokens=0)
            environment = None if environment is None else EndsAtOnce()
            row_ids = max_new_tokens = stop_after = resume = on_rows = model_inputs = None
        self.info.require_generate()
        accept_group = None if stop_after is None else stop_after.accept_group
        if accept_group is not None and self.executor.exchanges_tasks:
            raise NotImplementedError(
                "rollout: StopAfter(accept_group=...) is not available where ranks of inference_tp_size decode "
                "together; leave accept_group out, and call again for the groups that are missing"
            )
        num_prompts, repeats = len(ids), int(num_generations)
        inputs = [] if model_inputs is None else split_inputs(model_inputs, self.info.config, ids, mask)
        ids, mask = (tensor.repeat_interleave(repeats, dim=0) for tensor in (ids, mask))
        keys, limits = ids.new_zeros(len(ids)), ids.new_full((len(ids),), sampling.max_new_tokens)
        if sampling.temperature > 0 and num_prompts:
            keys = self._sampling_keys(num_prompts, len(ids), sampling.seed, row_ids)
        if max_new_tokens is not None:
            limits = as_ids(max_new_tokens, self.device).repeat_interleave(repeats)
        resumed_limits = [] if resume is None else resume.limits.tolist()
        stop_token_ids = end_token_ids(self.model, sampling.stop_token_ids)
        request = Request(
            prompt_ids=ids,
            prompt_lengths=mask.sum(dim=1).tolist(),
            sampling_keys=keys,
            max_new_tokens=max([sampling.max_new_tokens] * (num_prompts > 0) + resumed_limits),
            stop_token_ids=torch.tensor(stop_token_ids, dtype=torch.int64, device=self.device),
            pad_token_id=pad_token_id(self.model, stop_token_ids),
            sampling_params=sampling,
            limits=limits,
            groups=torch.arange(num_prompts, device=self.device).repeat_interleave(repeats),
            environment=environment,
            environment_limits=environment_limits,
            on_rows=on_rows,
            accept_group=accept_group,
            return_router_indices=self.rollout_settings.return_router_indices,
            model_inputs=[row for row in inputs for _ in range(repeats)],
            # A drawn placeholder would be an image's when the sequence is scored.
            suppressed=self.info.placeholders.undrawn.to(self.device) if inputs else None,
            is_dummy=is_dummy,
        )
        request = request if resume is None else request.after(resume)
        if stop_after is None:
            return request
        return replace(request, stop_conditions=stop_conditions(request.groups, stop_after))

    @torch.no_grad()
    def rollout(self, request: Request, adapters: Adapters | None) -> RolloutBatch:
        """Decode a request of `rollout_request`, in the window of `HybridEngine.rollout`."""
        before = self.profiler.timings()
        if request.environment is not None and request.environment_limits is not None:
            with self.profiler.phase("environment"):
                request = self._reset(request, request.environment_limits)
        prompts, placeholders = (request.prompt_ids, request.prompt_mask), self.info.placeholders
        if placeholders.settings:
            placeholders.require_inputs("rollout", *prompts, by_row=request.model_inputs)
        self._require_token_ids(*prompts)
        prompt_len = request.prompt_ids.shape[1]
        self._require_max_out_tokens(prompt_len, request.max_new_tokens)
        block_bytes, slot_bytes = self.executor.fused.bytes_in_cache()  # 0: the model runs natively
        self.block_pool.require_room([request.longest], block_bytes, slot_bytes)
        if not block_bytes:
            rows = min(len(request), self.rollout_settings.max_num_seqs)
            self.require_memory(rows, prompt_len + request.max_new_tokens)
        reason = self._inputs_reason("rollout", request) if any(request.model_inputs) else ""
        with self._decoding(adapters, None if reason else request.longest, reason) as decoder:
            decoded = request
            if decoder is not None and request.model_inputs and placeholders.settings:
                decoder, decoded = self._behind_inputs("rollout", decoder, request)
            weight_version = self.executor.window.snapshot.weights.number()
            kind = NativeTask if decoder is None else GenerateTask
            done = self.executor.compute(decoder, kind(decoded, request, weight_version=weight_version)).trimmed()
        resumed = 0 if request.partial is None else sum(request.partial.lengths)
        self.profiler.generated(len(request), int(done.lengths.sum()) - resumed)
        timings = {name: after - before[name] for name, after in self.profiler.timings().items()}
        batch = rollout_batch(request, done, weight_version, timings)
        if placeholders.settings:
            placeholders.note_sampled(batch.sequences, batch.attention_mask, batch.prompt_ids.shape[1])
        return batch.select_rows([]) if request.is_dummy else batch

    def rollout_by_adapter(self, request: Request, adapter_names: Sequence[str]) -> RolloutBatch:
        """`rollout` with an adapter for each prompt: one request where rows of several adapters can be decoded
        together, else a request for each adapter, and the rows in their order."""
        unavailable = {
            "environment": request.environment,
            "stop_after": request.stop_conditions or None,
            "resume": request.partial,
        }
        if given := [name for name, value in unavailable.items() if value is not None]:
            raise NotImplementedError(
                f"rollout: adapter_names is not available with {' and '.join(given)}; call it for each adapter"
            )
        prompts = 0 if request.is_dummy else int(request.groups.max()) + 1
        require_name_for_each(adapter_names, prompts, "prompt_ids")
        of_rows = [] if request.is_dummy else [adapter_names[group] for group in request.groups.tolist()]
        dummy = replace(request.select([0]), limits=torch.ones_like(request.limits[:1]), on_rows=None, is_dummy=True)

        def roll_out(adapters: Adapters | None, rows: list[int]) -> RolloutBatch:
            if not rows:
                return self.rollout(dummy, adapters)
            on_rows = request.on_rows
            report = None if on_rows is None else lambda batch: on_rows(batch.renumbered(rows))
            mixed = adapters if isinstance(adapters, tuple) else ()
            numbers = [adapter_number(of_rows[row], mixed) for row in rows] if mixed else []
            here = replace(request.select(rows), on_rows=report, adapters=numbers)
            return self.rollout(here, adapters).renumbered(rows)

        batches = self._by_adapter(roll_out, of_rows, None if request.model_inputs else request.longest)
        timings = {name: sum(batch.timings[name] for batch in batches) for name in batches[0].timings}
        whole = RolloutBatch.cat([batch for batch in batches if len(batch.prompt_ids)] or batches, request.pad_token_id)
        assert whole.row_index is not None, "`rollout` has set it"
        return replace(whole.select_rows(whole.row_index.argsort().tolist()), timings=timings)

    def _by_adapter(
        self,
        call: Callable[[Adapters | None, list[int]], Result],
        of_rows: Sequence[str],
        tokens: int | None = None,
    ) -> list[Result]:
        """Make one call for each adapter that rows of any rank name, or for all, with this rank's rows of it.
        Return the results.

        tokens: as for `Executor.in_turn`.
        After an error this rank makes the remaining calls without rows, if other ranks make them too.
        """
        results, error = [], None
        for names in self.executor.in_turn(of_rows, tokens) or [()]:
            rows = [row for row, of_row in enumerate(of_rows) if of_row in names and error is None]
            adapters = adapters_of(names)
            try:
                with self.executor.call(adapters):
                    results.append(call(adapters, rows))
            except Exception as raised:
                if not self.executor.is_shared:
                    raise
                error = error or raised
        if error is not None:
            raise error
        return results

    def _inputs_reason(self, call: str, request: Request) -> str:
        """Return why rows with inputs besides token ids run in the model's own layers; "" if they run fused.

        call: that has them.
        """
        if self.info.layout is None:
            return ""
        reasons = {
            "ranks compute together": type(self.executor) is not Executor,
            "weight_dtype is int8": self.executor.int8 is not None,
            "return_router_indices is set": request.return_router_indices,
        }
        reason = self.inputs_refusal or unsupported(self.info.layout.spec)
        reason = reason or next((reason for reason, applies in reasons.items() if applies), "")
        return reason and f"{call}: {IN_OWN_LAYERS}: {reason}"

    def _behind_inputs(self, call: str, decoder: AnyDecoder, request: Request) -> tuple[AnyDecoder | None, Request]:
        """Return the decoder, None if it must not go on from prompts with images, and the request that it decodes.

        Its prompts without placeholders are text, whatever a processor gives for them. A self-check runs once.
        """
        pairs = zip(request.model_inputs, self.info.placeholders.rows(request.prompts()), strict=True)
        decoded = replace(request, model_inputs=[inputs if has_image else NO_INPUTS for inputs, has_image in pairs])
        if self.has_checked_inputs or not any(decoded.model_inputs):
            return decoder, decoded
        refusal = "self-check: no prompt has two tokens of text behind its image"
        if (checked := self.prompt_to_check(request)) is not None:
            with self.opened(decoder) as opened:
                refusal = InputPrefill(self.native_model(request), opened, self.block_pool).refusal(*checked)
            self.has_checked_inputs, self.inputs_refusal = True, refusal
        if not refusal:
            return decoder, decoded
        self.executor.fused.note_fallback(f"{call}: {IN_OWN_LAYERS}: {refusal}")
        return None, request

    def _reset(self, request: Request, limits: EnvironmentLimits) -> Request:
        """Return the request with the prompts that `environment.reset` returns."""
        longest = self.settings.max_out_tokens - request.max_new_tokens
        vocab_size, prompts = self.info.size("vocab_size"), request.prompts()
        steps = reset_rows(request.environment, limits, prompts, vocab_size, longest)
        prompts = [prompt if step.error else step.value for prompt, step in zip(prompts, steps, strict=True)]
        failures = {step.row: Failure(step.reason, step.error) for step in steps if step.error}
        return replace(request.with_prompts(prompts), failures=failures)

    # ----------------------------------------------------------------- serve

    @torch.no_grad()
    def serve(
        self,
        source: RowSource,
        max_num_seqs: int,
        longest: int,
        adapters: Adapters | None,
        begin: Callable[[int], None],
    ) -> None:
        """Decode the source's rows as they arrive, until it is closed, in the window of `HybridEngine.serve`.

        max_num_seqs: of this rank's rows, at once.  longest: the most tokens of a row.  begin: called with the version
        of the weights once rows can be decoded.
        """
        fused, slots = self.executor.decoding, max_num_seqs
        if reason := fused.fallback_reason_now(longest):
            self._require_native_rows(reason)
        else:
            self.block_pool.require_room([longest], *fused.bytes_in_cache())
        slots *= 1 if fused.group is None else fused.group.size
        stop_token_ids = end_token_ids(self.model)
        request = Request(
            prompt_ids=torch.zeros(slots, 0, dtype=torch.int64, device=self.device),
            prompt_lengths=[0] * slots,
            sampling_keys=torch.zeros(slots, dtype=torch.int64, device=self.device),
            groups=torch.arange(slots, device=self.device),
            max_new_tokens=longest,
            limits=torch.full((slots,), longest, device=self.device),
            stop_token_ids=torch.tensor(stop_token_ids, dtype=torch.int64, device=self.device),
            pad_token_id=pad_token_id(self.model, stop_token_ids),
            sampling_params=SamplingParams(longest, temperature=0.0),
        )
        with self._decoding(adapters, longest) as decoder:
            if decoder is None:
                self._require_native_rows(fused.reasons.last)
            begin(self.executor.window.snapshot.weights.number())
            kind = NativeServeTask if decoder is None else ServeTask
            self.profiler.generated(*self.executor.compute(decoder, kind(request, source)))

    def _require_native_rows(self, reason: str) -> None:
        """Raise NotImplementedError unless the model's own forward can serve requests.  reason: why it must."""
        limits = {
            "where ranks compute together": isinstance(self.executor, GroupExecutor),
            "of aLoRA, whose rows PEFT decodes together": has_invocation_tokens(self.model),
        }
        for limit, applies in limits.items():
            if applies:
                raise NotImplementedError(
                    f"serve: the model's own layers serve no requests {limit}; the fused decoder cannot run: {reason}"
                )

    # ----------------------------------------------------------------- score

    @torch.no_grad()
    def score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapters: Adapters | None,
        temperature: float,
        rows_per_forward: int,
        model_inputs: ModelInputs | None = None,
        top_logprobs: int = 0,
    ) -> Scores:
        """`HybridEngine.score`, in its window."""
        if top_logprobs != 0 and self.info.config is not None:
            top_logprobs = checked_top_logprobs(top_logprobs, self.info.config.get_text_config().vocab_size)
        rows = len(sequences)
        inputs = split_inputs(model_inputs if rows else None, self.info.config, sequences, attention_mask)
        batch, longest = self._to_score(sequences, attention_mask, temperature, rows_per_forward, inputs)
        fallback_reason = f"score: {WITH_INPUTS if inputs else GAP_IN_MASK}"
        longest = None if inputs else longest
        in_parts = self.executor.exchanges_tasks or not isinstance(self.executor, GroupExecutor)
        task = ScoreTask(*batch, in_parts, inputs, top_logprobs)
        with self.profiler.phase("prefill"), self.executor.request(adapters, longest, fallback_reason) as decoder:
            scores = self.executor.compute(decoder, task)
        return scores.map(lambda tensor: tensor[:rows])

    def score_by_adapter(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapter_names: Sequence[str],
        temperature: float,
        rows_per_forward: int,
        model_inputs: ModelInputs | None = None,
        top_logprobs: int = 0,
    ) -> Scores:
        """`score` with an adapter for each row: a request for each adapter, and the rows in their order."""
        require_name_for_each(adapter_names, len(sequences), "sequences")
        inputs = split_inputs(model_inputs if len(sequences) else None, self.info.config, sequences, attention_mask)
        order: list[int] = []

        def score(adapters: Adapters | None, rows: list[int]) -> Scores:
            order.extend(rows)
            here, given = (sequences[rows], attention_mask[rows]), [inputs[row] for row in rows] if inputs else None
            return self.score(*here, adapters, temperature, rows_per_forward, given or None, top_logprobs)

        parts = [scores.tensors() for scores in self._by_adapter(score, adapter_names)]
        at = torch.tensor(order, device=self.device).argsort()
        return Scores(*(torch.cat(of_parts)[at] for of_parts in zip(*parts, strict=True)))

    @torch.no_grad()
    def score_distribution(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, temperature: float, rows_per_forward: int
    ) -> Distributions:
        """`InferenceEngine.score_distribution`."""
        rows, key = len(sequences), "score_distribution"
        batch, longest = self._to_score(sequences, attention_mask, temperature, rows_per_forward)
        ids, mask, divisor, rows_at_once = batch
        fused, instead = self.executor.fused, "use score(..., top_logprobs=k)"
        reason = GAP_IN_MASK if longest is None else fused.fallback_reason_now(longest)
        if fused.group is not None:
            reason = "ranks have slices of the vocabulary"
        if longest is None or reason:
            raise NotImplementedError(f"{key}: the fused decoder cannot run: {reason}; {instead}")
        with self.profiler.phase("prefill"), self.executor.request(None, longest) as decoder:
            if decoder is None:
                reason = self.executor.fused.reasons.last
                raise NotImplementedError(f"{key}: the fused decoder cannot run: {reason}; {instead}")
            hidden, index = self.executor.compute(decoder, HiddenStatesTask(ids, mask, rows_at_once))

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), self.executor.call(), self.executor.request(None, longest) as decoder:
                assert decoder is not None, "a frozen model's decoder remains"
                logits = decoder.logits(hidden)
            return logits if divisor == 1 else logits / divisor

        return Distributions(hidden, index[:rows], head)

    @torch.no_grad()
    def score_with_layer_inputs(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapters: Adapters | None,
        temperature: float,
        rows_per_forward: int,
        sampling_mask: torch.Tensor | None = None,
    ) -> LayerInputScores:
        """Return `score` of this rank's rows by the fused decoder, with the inputs of the layers.

        sampling_mask: int64 [rows, tokens], of each token's scores; None: there is none.
        Raises NotImplementedError, with the reason, where the model runs in its own layers.
        """
        rows = len(sequences)
        batch, longest = self._to_score(sequences, attention_mask, temperature, rows_per_forward)
        if longest is None:
            raise NotImplementedError(f"layer inputs: {GAP_IN_MASK}")
        if reason := self.executor.fused.fallback_reason_now(longest):
            raise NotImplementedError(f"layer inputs: the fused decoder keeps them, and cannot run: {reason}")
        with self.profiler.phase("prefill"), self.executor.request(adapters, longest) as decoder:
            if decoder is None:
                reason = self.executor.fused.reasons.last
                raise NotImplementedError(f"layer inputs: the fused decoder keeps them, and cannot run: {reason}")
            kept = self.executor.compute(decoder, LayerInputsTask(*batch, sampling_mask if rows else None))
        return kept if rows else kept.without_rows()

    def _to_score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: float,
        rows_per_forward: int,
        model_inputs: Sequence[RowInputs] = (),
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, float, int], int | None]:
        """Return the arguments of a scoring call, checked, with one row at least, and the longest row's tokens; None if
        a row's ones are not adjacent."""
        check_prompts(sequences, attention_mask, "sequences", "attention_mask")
        temperature = checked_number("temperature", temperature, float, is_divisor, f"above 0, {DIVISOR}")
        rows_per_forward = checked_number("rows_per_forward", rows_per_forward, *COUNT)
        rows = len(sequences)
        sequences, attention_mask = as_ids(sequences, self.device), as_mask(attention_mask, self.device)
        if rows == 0:  # as in `rollout`
            sequences = sequences.new_zeros(1, sequences.shape[1])
            attention_mask = torch.ones_like(sequences)
        self.info.placeholders.require_inputs("score", sequences, attention_mask, by_row=model_inputs)
        self._require_token_ids(sequences, attention_mask)
        longest = int(attention_mask.sum(dim=1).max()) if is_packable(attention_mask) else None
        if longest is not None:
            self.block_pool.require_room([longest], *self.executor.fused.bytes_in_cache())
        return (sequences, attention_mask, temperature, rows_per_forward), longest

    # -------------------------------------------------------------- the parts

    @contextmanager
    def _decoding(
        self, adapters: Adapters | None, tokens: int | None, fallback_reason: str = ""
    ) -> Iterator[AnyDecoder | None]:
        """`Executor.request` for drawing tokens."""
        with self.executor.request(adapters, tokens, fallback_reason, decodes=True) as decoder:
            try:
                yield decoder
            except InvalidLogitsError as error:
                error.weight_version = self.executor.window.snapshot.weights.number()
                raise

    def _require_token_ids(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise IndexError for ids outside the vocabulary, before other ranks compute with them."""
        if self.executor.exchanges_tasks and (vocabulary := self.info.size("vocab_size")):
            require_in_vocabulary(ids, mask, vocabulary)

    def _log_broadcasts(self) -> None:
        """Say once what user code costs where ranks decode together."""
        if self.executor.exchanges_tasks and not self.has_logged_broadcasts:
            self.has_logged_broadcasts = True
            logger.info(
                "hybrid: a processor, criterion or streamer of the user runs on this rank alone, and ranks of "
                "inference_tp_size decode together: it costs a broadcast a step, and its rows run by themselves"
            )

    def _sampling_keys(
        self, num_prompts: int, num_sequences: int, seed: int | None, row_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a key for each sequence, int64 [num_sequences]. Samples of one prompt are consecutive."""
        seed = self.seeds.next() if seed is None else seed
        if self.seed_group is not None:
            seed = int(self.seed_group.share(torch.tensor(wrapped(seed), device=self.device)))
        rows = own_row_ids(num_prompts, self.key_range) if row_ids is None else as_ids(row_ids, torch.device("cpu"))
        repeats = num_sequences // len(rows)
        samples = torch.arange(repeats).repeat(len(rows))
        return stream_keys(seed, rows.repeat_interleave(repeats), samples).to(self.device)

    def _require_max_out_tokens(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise TooManyTokensError if prompt and completion exceed `max_out_tokens`."""
        limit = self.settings.max_out_tokens
        if prompt_len + max_new_tokens > limit:
            name = "hybrid_engine." * isinstance(self.settings, HybridEngineConfig) + "max_out_tokens"
            raise TooManyTokensError(
                f"generate: a prompt of {prompt_len} tokens + {max_new_tokens} new tokens = "
                f"{prompt_len + max_new_tokens} is over {name}={limit}; ask for at most "
                f"{max(limit - prompt_len, 0)} new tokens, or raise max_out_tokens"
            )
