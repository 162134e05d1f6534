"""The Generator: what an engine's calls of `generate`, `rollout` and `score` run on.

There are three ways to decode, and the first that fits is taken: the scheduler, if rows are independent of each other;
the fused decoder in lockstep, if a processor, criterion or streamer needs the whole batch at every step; the model's
own forward in lockstep.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from hybrid.decoders.batch import is_packable
from hybrid.decoders.calls import Calls, SharedCalls
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.generate import (
    TooManyTokensError,
    decoded_by,
    hugging_face_generate,
    hugging_face_method,
    prepared_config,
    prompts_of,
    require_generate,
    require_sampling,
    require_supported_arguments,
    with_stop_strings,
)
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.lockstep import NativeForward, Outputs, in_lockstep
from hybrid.generation.request import GenerateInputs, Request
from hybrid.generation.rollout_batch import RolloutCall, RolloutRows, rollout_batch, rollout_request
from hybrid.generation.sampler import Seeds, stream_keys, wrapped
from hybrid.generation.scoring import Scores
from hybrid.generation.speculation import Speculator
from hybrid.generation.work import (
    CompletionWork,
    LockstepWork,
    NativeScoreWork,
    NativeWork,
    Resources,
    ScoreWork,
    native_work,
)
from hybrid.inputs import as_ids, as_mask, as_model_inputs, require_in_vocabulary
from hybrid.models.model_info import ModelInfo
from hybrid.parallel import InferenceGroup, own_row_ids
from hybrid.profiling import ModelTimes, Profiler
from hybrid.rollout import RolloutBatch, check_prompts, end_token_ids, pad_token_id

ROLLOUT_TIMINGS = ("gather_s", "merge_s", "prefill_s", "decode_s", "environment_s", "wait_s", "tokens")


@dataclass
class Generator:
    """Generates and scores with a model. One for each engine: its calls share the KV storage and the seeds.

    max_num_seqs: sequences that the scheduler decodes at once.
    max_out_tokens: the most tokens of a sequence, prompt included.  limit_name: the setting that sets it.
    require_memory: raises if so many rows of so many tokens cannot run natively.
    runs_other_methods: whether other decoding methods, such as beam search, run by Hugging Face's own loop. If False
        they raise NotImplementedError.
    key_range: number of the range of row ids of this rank's prompts; None: the rank.
    seed_group: ranks that use the first one's seed.
    times: times the forwards of fused decoders if it is enabled.
    return_router_indices: whether rollouts give the experts of each token.
    speculator: what drafts of tokens are planned by; None: there are none.
    info, model, calls, expands: see `attach`.
    """

    device: torch.device
    profiler: Profiler
    kv_cache: KVCache
    block_pool: BlockPool
    seeds: Seeds
    max_num_seqs: int
    max_out_tokens: int
    limit_name: str = "hybrid_engine.max_out_tokens"
    require_memory: Callable[[int, int], None] = lambda rows, tokens: None
    runs_other_methods: bool = False
    key_range: int | None = None
    seed_group: InferenceGroup | None = None
    times: ModelTimes | None = None
    return_router_indices: bool = False
    speculator: Speculator | None = None
    info: ModelInfo = field(init=False)
    model: nn.Module = field(init=False)
    calls: Calls = field(init=False)
    expands: bool = field(init=False)
    has_logged_broadcasts: bool = field(default=False, init=False)

    def attach(self, info: ModelInfo, calls: Calls, expands: bool) -> None:
        """Generate with this model from now on.  calls: open its window.  expands: as in NativeForward."""
        self.info, self.model, self.calls, self.expands = info, info.model, calls, expands
        calls.use(
            Resources(
                model=self.model,
                kv_cache=self.kv_cache,
                expands=expands or calls.exchanges_work,
                block_pool=self.block_pool,
                profiler=self.profiler,
                max_num_seqs=self.max_num_seqs,
                times=self.times,
                speculator=self.speculator,
            )
        )

    # -------------------------------------------------------------- generate

    def generate(
        self, args: tuple, kwargs: dict[str, Any], adapters: bool | None = None, seed: int | None = None
    ) -> Any:
        """The output of the model's own `generate`, with our decode loop as its decoding method.

        Arguments and errors are those of `HybridEngine.generate`.
        """
        prompts = prompts_of(self.model, args, kwargs)
        args, kwargs = as_model_inputs(args, kwargs, self.device)
        require_generate(self.info)
        require_supported_arguments(kwargs, self.runs_other_methods)
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

        return decoded_by(lambda model, inputs: self._decode(model, inputs, adapters, seed), self.model, args, kwargs)

    def _decode(self, model: nn.Module, inputs: GenerateInputs, adapters: bool | None, seed: int | None) -> Any:
        """Decode prompts as Hugging Face's `_sample` does (transformers 5.23), with our cache, sampler and window.

        Returns int64 [sequences, length], or Hugging Face's output object if `return_dict_in_generate` is set.
        """
        require_sampling(inputs.config)
        self._require_max_out_tokens(inputs.prompt_len, inputs.max_new_tokens)
        keys = inputs.input_ids.new_zeros(len(inputs.input_ids))
        if inputs.config.do_sample:
            keys = self._sampling_keys(len(keys) // inputs.config.num_return_sequences, len(keys), seed)
        fallback_reason = inputs.fallback_reason(model)
        request, totals = None, []
        if not fallback_reason:
            self._require_token_ids(inputs.input_ids, inputs.model_kwargs.get("attention_mask"))
            request = inputs.request(keys)
            if request is not None and request.runs_user_code and self.calls.exchanges_work:
                request = None
            totals = [length + inputs.max_new_tokens for length in inputs.prompt_lengths()]
            self.block_pool.require_room(totals if request is None else [max(totals)], self._block_bytes())
        if fallback_reason or not self._block_bytes():
            self.require_memory(len(inputs.input_ids), inputs.prompt_len + inputs.max_new_tokens)
        encoder_outputs = inputs.model_kwargs.get("encoder_outputs") if model.config.is_encoder_decoder else None
        outputs, cache = Outputs(inputs.config, encoder_outputs), None
        with self.calls.request(adapters, max(totals, default=None), fallback_reason, decodes=True) as decoder:
            if decoder is None and request is not None and self.calls.exchanges_work:
                done = self.calls.compute(None, native_work(inputs, keys))
            elif decoder is None:
                forward = NativeForward(model, inputs, self.kv_cache, self.expands)
                done, cache = in_lockstep(forward, inputs, keys, outputs, self.profiler.phase), forward.cache
            elif request is not None:
                done = self._complete(request, decoder)
            else:
                self._log_broadcasts()
                work = LockstepWork(
                    inputs.input_ids,
                    inputs.prompt_lengths(),
                    inputs.max_new_tokens,
                    0 if decoder.group is None else decoder.group.index,
                    decode=lambda forward: in_lockstep(forward, inputs, keys, outputs, self.profiler.phase),
                )
                done = self.calls.compute(decoder, work)
        self.profiler.generated(len(done.lengths), int(done.lengths.sum()))
        return outputs.result(torch.cat([inputs.input_ids, done.tokens], dim=1), cache)

    def _by_hugging_face(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        adapters: bool | None,
        seed: int | None,
        method: str,
        num_prompts: int,
        prompt_len: int,
    ) -> Any:
        """The output of Hugging Face's `generate` with Hugging Face's decode loop, over the model's own layers.

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
            self.calls.request(adapters, None, reason, decodes=True),
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

    @torch.no_grad()
    def rollout(self, call: RolloutCall, adapters: bool | None, weight_version: int) -> RolloutBatch:
        """`HybridEngine.rollout`, in its window."""
        call = call.checked(self.device)
        if not call.num_rows:  # join the other ranks' collectives: draw one token and discard it
            return self.rollout(call.dummy(), adapters, weight_version).select_rows([])
        require_generate(self.info)
        if call.asks and self.calls.exchanges_work:
            raise NotImplementedError(
                "rollout: StopAfter(counts=...) is not available where ranks of inference_tp_size decode "
                "together; leave counts out, and call again for the groups that are missing"
            )
        rows, params = self._rows(call), call.params
        before = self.profiler.stats()
        if call.environment is not None:
            with self.profiler.phase("environment"):
                rows = rows.with_environment(call.environment, call.environment_limits)
        self._require_token_ids(rows.prompt_ids, rows.prompt_mask)
        self._require_max_out_tokens(rows.prompt_ids.shape[1], call.most_new_tokens)
        stop_token_ids = end_token_ids(self.model, params.stop_token_ids)
        request = rollout_request(params, rows, stop_token_ids, pad_token_id(self.model, stop_token_ids), call)
        request = replace(request, return_router_indices=self.return_router_indices)
        self.block_pool.require_room([request.longest], self._block_bytes())
        if not self._block_bytes():
            self.require_memory(len(rows), request.prompt_ids.shape[1] + request.max_new_tokens)
        with self.calls.request(adapters, request.longest, decodes=True) as decoder:
            if decoder is None:
                done = self._complete_natively(request, rows, call)
            else:
                tell = partial(give_rows, rows=rows, request=request, weight_version=weight_version)
                on_end = None if call.on_rows is None else partial(tell, call.on_rows)
                counts = partial(tell, call.stop_after.counts) if call.asks else None
                work = CompletionWork(request, call.environment, on_end, counts, range(len(rows)))
                done = self.calls.compute(decoder, work).trimmed()
        sampled = int(done.lengths.sum()) - sum(request.begun_lengths())
        self.profiler.generated(len(rows), sampled)
        after = self.profiler.stats()
        timings = {name: after[name] - before[name] for name in ROLLOUT_TIMINGS}
        return rollout_batch(rows, done, request.stop_token_ids, weight_version, timings)

    def _rows(self, call: RolloutCall) -> RolloutRows:
        """The rows of a rollout, with a sampling key each."""
        count, num_prompts = len(call.prompt_ids) * call.num_generations, len(call.prompt_ids)
        ids, mask = (
            tensor.repeat_interleave(call.num_generations, dim=0) for tensor in (call.prompt_ids, call.prompt_mask)
        )
        keys, limits = ids.new_zeros(count), ids.new_full((count,), call.params.max_new_tokens)
        if call.params.temperature > 0 and num_prompts:
            keys = self._sampling_keys(num_prompts, count, call.params.seed, call.row_ids)
        if call.max_new_tokens is not None:
            limits = call.max_new_tokens.repeat_interleave(call.num_generations)
        groups = torch.arange(num_prompts, device=ids.device).repeat_interleave(call.num_generations)
        rows = RolloutRows(ids, mask, keys, limits, groups)
        return rows if call.resume is None else rows.after(call.resume)

    def _complete_natively(self, request: Request, rows: RolloutRows, call: RolloutCall) -> Completions:
        """A rollout's completions by the model's own forward."""
        if reason := call.needs_scheduler:
            raise NotImplementedError(
                f"rollout: {reason} needs the fused decoder, and the model runs in its own layers: "
                f"{self.calls.fused.reasons.last}"
            )
        config = call.params.generation_config(self.model, num_generations=1)
        work = NativeWork(
            rows.prompt_ids,
            rows.prompt_mask,
            rows.sampling_keys,
            config,
            logprob_temperature=request.logprob_temperature,
            return_router_indices=request.return_router_indices,
        )
        return self.calls.compute(None, work).cut(rows.limits, request.pad_token_id)

    # ----------------------------------------------------------------- score

    @torch.no_grad()
    def score(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        adapters: bool | None,
        temperature: float,
        rows_per_forward: int,
    ) -> Scores:
        """`HybridEngine.score`, in its window."""
        check_prompts(sequences, attention_mask, "sequences")
        if temperature <= 0:
            raise ValueError(f"temperature: {temperature} given; it must be above 0")
        rows = len(sequences)
        sequences, attention_mask = as_ids(sequences, self.device), as_mask(attention_mask, self.device)
        if rows == 0:  # as in `rollout`
            sequences = sequences.new_zeros(1, sequences.shape[1])
            attention_mask = torch.ones_like(sequences)
        self._require_token_ids(sequences, attention_mask)
        longest = int(attention_mask.sum(dim=1).max()) if is_packable(attention_mask) else None
        if longest is not None:
            self.block_pool.require_room([longest], self._block_bytes())
        fallback_reason = "score: attention_mask has zeros between a row's ones (pad on either side)"
        batch = (sequences, attention_mask, temperature, rows_per_forward)
        with self.profiler.phase("prefill"), self.calls.request(adapters, longest, fallback_reason) as decoder:
            if decoder is None:
                in_parts = self.calls.exchanges_work or not isinstance(self.calls, SharedCalls)
                scores = self.calls.compute(None, NativeScoreWork(*batch, in_parts))
            else:
                scores = self.calls.compute(decoder, ScoreWork(*batch))
        return Scores(scores.per_token_logps[:rows], scores.entropies[:rows])

    # -------------------------------------------------------------- the parts

    def _complete(self, request: Request, decoder: AnyDecoder) -> Completions:
        """A request's completions by the scheduler, as wide as the longest."""
        return self.calls.compute(decoder, CompletionWork(request, own=range(len(request.prompt_ids)))).trimmed()

    def _require_token_ids(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise IndexError for ids outside the vocabulary, before other ranks compute with them."""
        if self.calls.exchanges_work and (vocabulary := self.info.size("vocab_size")):
            require_in_vocabulary(ids, mask, vocabulary)

    def _log_broadcasts(self) -> None:
        """Say once what user code costs where ranks decode together."""
        if self.calls.exchanges_work and not self.has_logged_broadcasts:
            self.has_logged_broadcasts = True
            logger.info(
                "hybrid: a processor, criterion or streamer of the user runs on this rank alone, and ranks of "
                "inference_tp_size decode together: it costs a broadcast a step, and its rows run by themselves"
            )

    def _block_bytes(self) -> int:
        """The most bytes that a block takes; 0 if the model runs natively."""
        return self.calls.fused.block_bytes()

    def _sampling_keys(
        self, num_prompts: int, num_sequences: int, seed: int | None, row_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A key for each sequence, int64 [num_sequences]. Samples of one prompt are consecutive."""
        seed = self.seeds.next() if seed is None else seed
        if self.seed_group is not None:
            seed = int(self.seed_group.share(torch.tensor(wrapped(seed), device=self.device)))
        rows = own_row_ids(num_prompts, self.key_range) if row_ids is None else as_ids(row_ids, torch.device("cpu"))
        repeats = num_sequences // len(rows)
        samples = torch.arange(repeats).repeat(len(rows))
        return stream_keys(seed, rows.repeat_interleave(repeats), samples).to(self.device)

    def _require_max_out_tokens(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise TooManyTokensError if prompt and completion exceed `max_out_tokens`."""
        if prompt_len + max_new_tokens > self.max_out_tokens:
            raise TooManyTokensError(
                f"generate: a prompt of {prompt_len} tokens + {max_new_tokens} new tokens = "
                f"{prompt_len + max_new_tokens} is over {self.limit_name}={self.max_out_tokens}; ask for at most "
                f"{max(self.max_out_tokens - prompt_len, 0)} new tokens, or raise max_out_tokens"
            )

    # ---------------------------------------------------------- the KV cache

    def release_kv(self) -> None:
        """Free the KV storage."""
        self.kv_cache.release()
        self.block_pool.release()

    def kv_bytes(self) -> int:
        """Bytes of the KV storage."""
        return self.kv_cache.nbytes() + self.block_pool.nbytes()

    def peak_kv_bytes(self) -> int:
        """The most bytes that the KV storage has had."""
        return self.kv_cache.peak_bytes + self.block_pool.peak_bytes


def give_rows(
    function: Callable[[RolloutBatch], Any],
    ended: list[int],
    done: Completions,
    rows: RolloutRows,
    request: Request,
    weight_version: int,
) -> Any:
    """The result of the caller's function of rows that have ended.  done: of all rows, so far."""
    done = done.select(ended).trimmed()
    batch = rollout_batch(rows.select(ended), done, request.stop_token_ids, weight_version, {})
    return function(batch.renumbered(ended))
