"""The decode loop, run by Hugging Face's `generate()` as its decoding method.

There are three paths, and the first that fits is taken: the scheduler, if rows are independent of each other
(`hybrid.generation.scheduler`); the fused decoder in lockstep, if a processor, criterion or streamer needs the whole
batch at every step; the model's own forward.
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, GenerationMode
from transformers.generation import logits_process as processes
from transformers.generation.streamers import BaseStreamer

from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.hf_cache import GrowingLayer, KVCache
from hybrid.generation.model_runner import Decoder, ModelRunner, prefill
from hybrid.generation.sampling import Draw, draw_tokens, selective_log_softmax, split_warpers, stream_keys
from hybrid.generation.scheduler import Completions, Request, complete
from hybrid.profiling import Phase

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Arguments of a decoding method that the fused decoder supports (transformers 5.23).
UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
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


@dataclass(frozen=True)
class SamplingKeys:
    """Seed and row ids that key the sampling RNG.  rows: int64 [prompts].  seed: of the whole call."""

    seed: int
    rows: torch.Tensor

    def keys(self, num_sequences: int, device: torch.device) -> torch.Tensor:
        """A key for each sequence, int64 [num_sequences]. Samples of one prompt are consecutive."""
        repeats = num_sequences // len(self.rows)
        samples = torch.arange(repeats).repeat(len(self.rows))
        return stream_keys(self.seed, self.rows.repeat_interleave(repeats), samples).to(device)


@dataclass
class TokenLog:
    """Logprobs of the chosen tokens, for a rollout; the decode loop fills them in.  float32 [sequences, new tokens]

    sampling: under the distribution drawn from, after processors and truncation.
    old: under softmax(logits / temperature), with the model's logits before processors.
    raw: under softmax(logits), with the same logits.
    """

    temperature: float
    sampling: torch.Tensor | None = None
    old: torch.Tensor | None = None
    raw: torch.Tensor | None = None


@dataclass
class Decoding:
    """What decoding needs of the engine, and `generate()`'s decoding method.

    phase: times a phase.
    request: context manager that opens the window for the forwards. Its arguments are the longest sequence's tokens,
        None if the request cannot run fused, and the reason for that; it gives the fused decoder, or None if the model
        must run natively.
    cache: KV storage of the native path.  block_pool: the fused decoder's block pool.
    block_bytes: gives the most bytes that a block takes; 0 if the model runs natively.
    require_memory: raises if so many rows of so many tokens cannot run natively.
    max_num_seqs: the most sequences that are decoded at once.
    stride: decode steps between two checks for ended sequences.
    max_out_tokens: the most tokens of a sequence, prompt included.  limit: the setting that sets it.
    noise: gives the SamplingKeys for a number of prompts; called once per call that samples.
    expands: whether rows of a native cache may be repeated and reordered, so that equal prompts are prefilled once.
        False if other ranks hold parts of the cache, or if ranks exchange messages of equal size.
    runs_other_methods: whether other methods, such as beam search, run by Hugging Face's own loop. If False they raise
        NotImplementedError.
    token_log: filled in if given.
    streamer: receives the tokens of each step; Hugging Face does not pass it to a custom decoding method (5.23).
    produced: called at the end with the numbers of sequences and new tokens, padding not counted.
    """

    phase: Phase
    request: Callable[[int | None, str], AbstractContextManager[Decoder | None]]
    cache: KVCache
    block_pool: BlockPool
    block_bytes: Callable[[], int]
    require_memory: Callable[[int, int], None]
    max_num_seqs: int
    stride: int
    max_out_tokens: int
    noise: Callable[[int], SamplingKeys]
    expands: bool = True
    runs_other_methods: bool = False
    limit: str = "hybrid_engine.max_out_tokens"
    token_log: TokenLog | None = None
    streamer: BaseStreamer | None = None
    produced: Callable[[int, int], None] = lambda sequences, tokens: None

    def method(self) -> Callable:
        """The function for Hugging Face's `generate(custom_generate=...)`."""

        def decoding_method(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            return decode(
                model, input_ids, logits_processor, stopping_criteria, generation_config, self, **model_kwargs
            )

        return decoding_method


def refuse_what_cannot_run(
    config: GenerationConfig, prompt_len: int, new_tokens: int, max_out_tokens: int, limit: str
) -> None:
    """Raise NotImplementedError for other methods than greedy search and sampling; TooManyTokensError if prompt and
    completion exceed `max_out_tokens`.
    """
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise NotImplementedError(
            f"generate: {mode.value} (num_beams={config.num_beams}) is not available; "
            "the decode loop does greedy search and sampling (num_beams=1)"
        )
    require_room(prompt_len, new_tokens, max_out_tokens, limit)


class TooManyTokensError(ValueError, RuntimeError):
    """A sequence would exceed `max_out_tokens`. Also a RuntimeError, which DeepSpeed's engine raises in this case."""


def require_room(prompt_len: int, new_tokens: int, max_out_tokens: int, limit: str) -> None:
    """Raise TooManyTokensError if prompt and completion exceed `max_out_tokens`, the value of the setting `limit`."""
    if prompt_len + new_tokens > max_out_tokens:
        raise TooManyTokensError(
            f"generate: a prompt of {prompt_len} tokens + {new_tokens} new tokens = {prompt_len + new_tokens} is over "
            f"{limit}={max_out_tokens}; ask for at most {max(max_out_tokens - prompt_len, 0)} "
            "new tokens, or raise max_out_tokens"
        )


def with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`generate`'s arguments with `stop_strings` and `tokenizer` replaced by a stopping criterion: Hugging Face does
    not pass the tokenizer on with a custom decoding method (5.23).

    Raises ValueError if there are stop strings and no tokenizer.
    """
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if not strings:
        return kwargs
    if tokenizer is None:
        raise ValueError(f"generate: stop_strings={strings!r} needs the model's tokenizer; give tokenizer=...")
    if config is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    criterion = StopStringCriteria(tokenizer, strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return kwargs


class Outputs:
    """Each step's outputs that the caller asked for, collected as Hugging Face's `_sample` does (transformers 5.23)."""

    def __init__(self, config: GenerationConfig, encoder_outputs):
        self.as_dict = config.return_dict_in_generate
        self.encoder_outputs = encoder_outputs
        self.steps: dict[str, tuple | None] = {
            "scores": () if self.as_dict and config.output_scores else None,
            "logits": () if self.as_dict and config.output_logits else None,
            "attentions": () if self.as_dict and config.output_attentions else None,
            "cross_attentions": () if self.as_dict and config.output_attentions else None,
            "hidden_states": () if self.as_dict and config.output_hidden_states else None,
        }

    def add(self, outputs, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add a step: the model's outputs, the processed scores and the raw logits, both [sequences, vocab]."""
        decoder = "decoder_" if self.encoder_outputs is not None else ""
        step = {
            "scores": scores,
            "logits": logits,
            "attentions": getattr(outputs, f"{decoder}attentions", None),
            "cross_attentions": getattr(outputs, "cross_attentions", None),
            "hidden_states": getattr(outputs, f"{decoder}hidden_states", None),
        }
        for name, seen in self.steps.items():
            if seen is not None:
                self.steps[name] = (*seen, step[name])

    def result(self, sequences: torch.Tensor, cache: Cache | None):
        """`sequences`, or Hugging Face's output object if the caller asked for a dict."""
        if not self.as_dict:
            return sequences
        steps = dict(self.steps)
        cross = steps.pop("cross_attentions")
        if self.encoder_outputs is None:
            return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=cache, **steps)
        return GenerateEncoderDecoderOutput(
            sequences=sequences,
            scores=steps["scores"],
            logits=steps["logits"],
            encoder_attentions=self.encoder_outputs.get("attentions"),
            encoder_hidden_states=self.encoder_outputs.get("hidden_states"),
            decoder_attentions=steps["attentions"],
            cross_attentions=cross,
            decoder_hidden_states=steps["hidden_states"],
            past_key_values=cache,
        )


def decode(
    model,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    decoding: Decoding,
    **model_kwargs,
):
    """Decode prompts as Hugging Face's `_sample` does (transformers 5.23), with our cache, sampler and window.

    input_ids: int64 [sequences, prompt_len], left padded. If the prompts are `inputs_embeds`, these are the ids that
        processors and the caller see, and may have no tokens.
    Returns int64 [sequences, length], or Hugging Face's output object if `return_dict_in_generate` is set.
    Raises NotImplementedError for methods other than greedy search and sampling; ValueError if a sequence is too long,
    or if the sequences do not fit into `rollout.kv_cache_bytes`.
    """
    embeds, new_tokens = model_kwargs.get("inputs_embeds"), generation_config.max_length - input_ids.shape[1]
    prompt_len = input_ids.shape[1] if embeds is None else embeds.shape[1]
    refuse_what_cannot_run(generation_config, prompt_len, new_tokens, decoding.max_out_tokens, decoding.limit)
    encoder_decoder = model.config.is_encoder_decoder
    wanted = Outputs(generation_config, model_kwargs.get("encoder_outputs") if encoder_decoder else None)
    keys = None
    if generation_config.do_sample:
        noise = decoding.noise(len(input_ids) // generation_config.num_return_sequences)
        keys = noise.keys(len(input_ids), input_ids.device)

    asked = (input_ids, logits_processor, stopping_criteria, generation_config, decoding, keys)
    fallback_reason = native_request(model, input_ids, generation_config, model_kwargs)
    lengths = None if fallback_reason else prompt_lengths(input_ids, model_kwargs.get("attention_mask"))
    request = None if lengths is None else request_for(lengths, *asked)
    if lengths is not None:
        ends = [length + new_tokens for length in lengths]
        decoding.block_pool.require_room(ends if request is None else [max(ends)], decoding.block_bytes())
    if lengths is None or not decoding.block_bytes():
        decoding.require_memory(len(input_ids), prompt_len + new_tokens)
    with decoding.request(None if lengths is None else max(ends), fallback_reason) as decoder:
        if decoder is None:
            forward = NativeForward(model, generation_config, model_kwargs, decoding, keep=wanted.as_dict)
            return in_lockstep(forward, *asked, wanted)
        decoding.block_pool.begin_call(decoder.kv)
        if request is None:
            decoding.block_pool.reserve_call(sum(map(blocks_for, ends)))
            return in_lockstep(FusedForward(decoder, decoding.block_pool, lengths, max(ends)), *asked, wanted)
        done = complete(request, decoder, decoding.block_pool, decoding.max_num_seqs, decoding.stride, decoding.phase)
    return sequences_of(done, input_ids, decoding)


# Choice of the path


def native_request(model, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str:
    """Why a request cannot run fused, and what the user can do about it; "" if it can.

    Fused requests are for a decoder-only model and give token ids (`input_ids` with left padding) and nothing else;
    they start with an empty cache and return sequences alone.
    """
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    beyond = {name for name, value in model_kwargs.items() if value is not None} - UNDERSTOOD
    if model.config.is_encoder_decoder:
        return "generate: the model is an encoder-decoder (fused are decoders alone)"
    if config.return_dict_in_generate:
        return "generate: return_dict_in_generate=True (fused gives sequences; `rollout` gives logprobs with them)"
    if beyond:
        return f"generate: {', '.join(sorted(beyond))} given (fused takes input_ids and attention_mask)"
    if config.cache_implementation is not None:
        return f"generate: cache_implementation={config.cache_implementation!r} (leave it out)"
    if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() > 0):
        return "generate: past_key_values given (leave them out: fused keeps its own blocks)"
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape or not is_left_padded(mask):
        return "generate: attention_mask is not zeros and then ones in every row (pad prompts on the left)"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not bool(((positions == mask.cumsum(dim=1) - 1) | (mask == 0)).all()):
        return "generate: position_ids do not count from each prompt's first token (leave them out)"
    return ""


def prompt_lengths(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Real tokens of each prompt."""
    return [input_ids.shape[1]] * len(input_ids) if mask is None else mask.sum(dim=1).tolist()


def is_left_padded(mask: torch.Tensor) -> bool:
    """Whether every row of a mask [rows, tokens] is zeros followed by at least one 1."""
    mask = mask.bool()
    return bool(mask[:, -1].all()) and not bool((mask[:, :-1] & ~mask[:, 1:]).any())


def request_for(
    lengths: list[int],
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    decoding: Decoding,
    keys: torch.Tensor | None,
) -> Request | None:
    """The scheduler's request; None if something must see all rows at every step."""
    known = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
    before, draw = split_warpers(processors, config.do_sample)
    if decoding.streamer is not None or not known or not all(map(is_rowwise, before)):
        return None
    if draw is None:  # warpers in another order than `Draw` applies them: run them as processors
        before, draw = processors, Draw()
    ends = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
    longest = min(criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria)
    pad = config._pad_token_tensor
    return Request(
        padded=input_ids,
        lengths=lengths,
        keys=torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device) if keys is None else keys,
        max_new_tokens=longest - input_ids.shape[1],
        ends=torch.cat([input_ids.new_empty(0), *ends]),
        pad=0 if pad is None else int(pad),
        draw=draw,
        processors=partial(process_rows, before) if before else None,
        logprob_temperature=decoding.token_log.temperature if decoding.token_log else 1.0,
    )


def is_rowwise(processor: Callable) -> bool:
    """Whether a processor's result for a row depends on that row alone."""
    return type(processor) in ROWWISE or getattr(processor, "rowwise", False)


def process_rows(
    processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The batch's processors applied to some of its rows: scores [n, vocab] of rows int64 [n] with ids [n, tokens].

    Hugging Face's repetition penalty keeps each row's padding length (5.23), so it is given those of `rows`.
    """
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = processes.RepetitionPenaltyLogitsProcessor(processor.penalty, padding[rows.to(padding.device)])
        scores = processor(ids, scores)
    return scores


def sequences_of(done: Completions, input_ids: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Prompts and completions, padded to the longest as Hugging Face pads them, int64 [rows, tokens]. Fills in the
    token log.
    """
    width = int(done.lengths.max())
    if decoding.token_log is not None:
        decoding.token_log.sampling = done.sampling_logps[:, :width]
        decoding.token_log.old = done.old_logps[:, :width]
        decoding.token_log.raw = done.raw_logps[:, :width]
    decoding.produced(len(input_ids), int(done.lengths.sum()))
    return torch.cat([input_ids, done.tokens[:, :width]], dim=1)


# Lockstep: all rows at every step


class NativeForward:
    """The model's own forward over Hugging Face's cache, which uses our storage if the caller does not get the cache
    back.
    """

    def __init__(self, model, config: GenerationConfig, model_kwargs: dict[str, Any], decoding: Decoding, keep: bool):
        self.model, self.config, self.kwargs = model, config, model_kwargs
        self.encoder_decoder = model.config.is_encoder_decoder
        cache = model_kwargs.get("past_key_values")
        # A cache that the caller keeps must not be in storage that the next call overwrites.
        ours = isinstance(cache, Cache) and not getattr(cache, "_is_user_defined", False) and not keep
        if ours and not self.encoder_decoder:
            decoding.cache.adopt(cache)
        given = {name for name, value in model_kwargs.items() if value is not None}
        plain = given <= UNDERSTOOD and model_kwargs.get("use_cache") and config.prefill_chunk_size is None
        # Multimodal models keep per-row state outside the cache (Qwen2-VL, transformers 5.23).
        text_alone = model.config.get_text_config() is model.config and not self.encoder_decoder
        self.expands = decoding.expands and ours and plain and text_alone and can_be_expanded(cache)

    def prefill(self, input_ids: torch.Tensor):
        """The model's outputs for the prompts, logits [sequences, ·, vocab].

        Equal prompts are computed once and their rows of the cache repeated, if the rows of the cache are independent.
        """
        mask = self.kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        by_rows = self.expands and mask.shape == input_ids.shape
        first, source = distinct(input_ids, mask) if by_rows else (input_ids, None)
        if len(first) == len(input_ids):
            return self._noted(self.model._prefill(input_ids, self.config, self.kwargs))
        given = {name: self.kwargs.get(name) for name in ("attention_mask", "position_ids")}
        own = {name: value[first] for name, value in given.items() if value is not None and len(value) == len(source)}
        outputs = self.model._prefill(input_ids[first], self.config, {**self.kwargs, **own})
        outputs.logits = outputs.logits[:, -1:][source]
        outputs.past_key_values.batch_select_indices(source)
        return self._noted(outputs)

    def step(self, input_ids: torch.Tensor):
        """The model's outputs for the latest token of each row."""
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if self.kwargs["use_cache"] else None, **self.kwargs
        )
        return self._noted(self.model(**inputs, return_dict=True))

    def _noted(self, outputs):
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=self.encoder_decoder
        )
        return outputs

    @property
    def cache(self) -> Cache | None:
        """The cache, for `past_key_values` of the caller's output."""
        return self.kwargs.get("past_key_values")


def distinct(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each distinct prompt, int64 [prompts], and each row's index into these prompts, int64 [rows].

    ids, mask: int64 [rows, tokens]; masked ids are ignored.
    """
    _, source = torch.cat([ids * mask, mask], dim=1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(rows, len(ids)).scatter_reduce_(0, source, rows, "amin")
    return first[first < len(ids)], source


def can_be_expanded(cache: Cache) -> bool:
    """Whether a cache is empty and all of its state is keys and values by row."""
    kinds = {type(layer) for layer in cache.layers}
    return (
        type(cache) is DynamicCache
        and kinds <= {GrowingLayer, DynamicSlidingWindowLayer}
        and not cache.get_seq_length()
    )


@dataclass
class StepOutput:
    """The part of a forward's outputs that the loop reads.  logits: float32 [sequences, 1, vocab]."""

    logits: torch.Tensor


class FusedForward:
    """The fused decoder in lockstep: every row stays until the last one has ended."""

    cache = None

    def __init__(self, decoder: Decoder, block_pool: BlockPool, lengths: list[int], longest: int):
        self.decoder, self.block_pool, self.lengths = decoder, block_pool, lengths
        self.runner = ModelRunner(decoder, block_pool, longest)
        decoder.reserve(longest)

    def prefill(self, input_ids: torch.Tensor) -> StepOutput:
        """Logits after the prompts."""
        prompts = [ids[len(ids) - length :] for ids, length in zip(input_ids, self.lengths, strict=True)]
        blocks, logits = prefill(self.decoder, self.block_pool, prompts)
        self.runner.add(blocks, self.lengths)
        return StepOutput(logits[:, None])

    def step(self, input_ids: torch.Tensor) -> StepOutput:
        """Logits after the latest token of each row."""
        self.runner.make_room(1)
        return StepOutput(self.runner.step(input_ids[:, -1].contiguous())[:, None])


def in_lockstep(
    forward: NativeForward | FusedForward,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    decoding: Decoding,
    keys: torch.Tensor | None,
    wanted: Outputs,
):
    """Decode all rows together until the last one ends; ended rows are padded as Hugging Face pads them.

    Returns int64 [sequences, length], or Hugging Face's output object.
    """
    pad = generation_config._pad_token_tensor
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    log, sampling, old, raw = decoding.token_log, [], [], []
    draw, keys = (Draw(temperature=0), input_ids.new_zeros(len(input_ids))) if keys is None else (Draw(), keys)
    with decoding.phase("prefill"):
        outputs = forward.prefill(input_ids)
    with decoding.phase("decode"):
        unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
        tokens_made = torch.zeros_like(unfinished)
        for position in itertools.count():
            logits = outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device, copy=True)
            scores = logits_processor(input_ids, logits)
            wanted.add(outputs, scores, logits)
            outputs = None  # frees the prefill's logits, which may be large
            drawn = draw_tokens(scores, keys, torch.full_like(keys, position), draw)
            tokens = drawn.tokens
            if log is not None:
                sampling.append(drawn.sampling_logps)
                raw.append(selective_log_softmax(logits, tokens))
                same = log.temperature == 1.0
                old.append(raw[-1] if same else selective_log_softmax(logits / log.temperature, tokens))
            tokens_made += unfinished
            if has_end:
                tokens = tokens * unfinished + pad * (1 - unfinished)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            if decoding.streamer is not None:
                decoding.streamer.put(tokens.cpu())
            unfinished = unfinished & ~stopping_criteria(input_ids, wanted.steps["scores"])
            if unfinished.max() == 0:
                break
            outputs = forward.step(input_ids)
    if decoding.streamer is not None:
        decoding.streamer.end()
    if log is not None:
        log.sampling, log.old, log.raw = (torch.stack(steps, dim=1) for steps in (sampling, old, raw))
    decoding.produced(len(input_ids), int(tokens_made.sum()))
    return wanted.result(input_ids, forward.cache)
