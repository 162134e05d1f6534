"""The decode loop: Hugging Face's `generate()` prepares, and calls this as its decoding method.

Three ways, the first that fits: slots, where rows are independent of each other (`hybrid.generation.scheduler`); the
fused decoder in lockstep, where something looks at the whole batch at every step; the model's own forward.
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

from hybrid.generation.block_pool import BlockPool, pages_for
from hybrid.generation.hf_cache import GrowingLayer, KVCache
from hybrid.generation.model_runner import Decoder, ModelRunner, prefill
from hybrid.generation.sampling import Draw, draw_tokens, selective_log_softmax, split_warpers, stream_keys
from hybrid.generation.scheduler import Completions, Request, complete
from hybrid.profiling import Phase

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What `generate()` hands to a decoding method that a fused decoder understands (transformers 5.23).
UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# Processors that treat each row by itself, as a function of its ids and scores alone (transformers 5.23). One's own may
# say so with an attribute `rowwise = True`.
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
    """Who draws which noise.  rows int64 [prompts]: the prompts' row numbers; seed: of the whole call."""

    seed: int
    rows: torch.Tensor

    def keys(self, num_sequences: int, device: torch.device) -> torch.Tensor:
        """A key for each sequence, where prompts are repeated in place.  int64 [num_sequences]"""
        repeats = num_sequences // len(self.rows)
        samples = torch.arange(repeats).repeat(len(self.rows))
        return stream_keys(self.seed, self.rows.repeat_interleave(repeats), samples).to(device)


@dataclass
class TokenLog:
    """Logprobs of the tokens that were chosen, for a rollout; the loop fills them in.  float32 [sequences, new tokens]

    sampling: in the distribution drawn from, after processors and truncation.  old: under softmax(logits /
    temperature).  raw: under softmax(logits). These logits are the model's, before processors.
    """

    temperature: float
    sampling: torch.Tensor | None = None
    old: torch.Tensor | None = None
    raw: torch.Tensor | None = None


@dataclass
class Decoding:
    """What decoding needs of the engine, and `generate()`'s decoding method.

    phase: times a phase.  cache: KV storage of the native container.
    request: opens the window for the forwards; gives the fused decoder for sequences of so many tokens, or None where
        the model must run natively: for None tokens always, and then for which reason.
    store: its pages.  page_bytes: the most that one takes, 0 where the model runs natively.
    require_memory: raises where so many rows of so many tokens cannot run natively.
    expands: whether rows of a native cache may be repeated and moved, so that equal prompts are computed once: not
        where other ranks have a part of each cache, or count on messages of one size.
    runs_other_methods: whether beam search and the like run by Hugging Face's own loop; they are refused where not.
    max_slots, stride: of `hybrid.generation.scheduler`.
    max_out_tokens: the most tokens of a sequence, prompt included.  limit: the setting that says so.
    noise: called once where sampling needs it.  token_log: filled where a rollout wants logprobs.
    streamer: gets tokens as they come; Hugging Face does not pass its own to a custom decoding method (5.23).
    produced: told at the end how many sequences and new tokens there are, padding not counted.
    """

    phase: Phase
    request: Callable[[int | None, str], AbstractContextManager[Decoder | None]]
    cache: KVCache
    store: BlockPool
    page_bytes: Callable[[], int]
    require_memory: Callable[[int, int], None]
    max_slots: int
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
        """The function that Hugging Face's `generate(custom_generate=...)` takes."""

        def decoding_method(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            return decode(
                model, input_ids, logits_processor, stopping_criteria, generation_config, self, **model_kwargs
            )

        return decoding_method


def refuse_what_cannot_run(
    config: GenerationConfig, prompt_len: int, new_tokens: int, max_out_tokens: int, limit: str
) -> None:
    """Raise NotImplementedError or ValueError, in words, for a request that the loop cannot do."""
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise NotImplementedError(
            f"generate: {mode.value} (num_beams={config.num_beams}) is not available; "
            "the decode loop does greedy search and sampling (num_beams=1)"
        )
    require_room(prompt_len, new_tokens, max_out_tokens, limit)


class TooManyTokensError(ValueError, RuntimeError):
    """A sequence is longer than the settings allow. DeepSpeed's engine raises RuntimeError for it."""


def require_room(prompt_len: int, new_tokens: int, max_out_tokens: int, limit: str) -> None:
    """Raise TooManyTokensError where a prompt and its completion are longer than the setting `limit` allows."""
    if prompt_len + new_tokens > max_out_tokens:
        raise TooManyTokensError(
            f"generate: a prompt of {prompt_len} tokens + {new_tokens} new tokens = {prompt_len + new_tokens} is over "
            f"{limit}={max_out_tokens}; ask for at most {max(max_out_tokens - prompt_len, 0)} "
            "new tokens, or raise max_out_tokens"
        )


def with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`generate`'s arguments with `stop_strings` and `tokenizer` as a stopping criterion: Hugging Face does not find
    the tokenizer where the decoding method is a custom one (5.23)."""
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
    """What the caller wants back of each step, gathered as Hugging Face's `_sample` does (transformers 5.23)."""

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
        """Note a step: the model's outputs, its processed scores and raw logits, both [sequences, vocab]."""
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
        """`sequences`, or Hugging Face's output object around them."""
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
    """Prompts to sequences, as Hugging Face's `_sample` (transformers 5.23), with our cache, sampler and window.

    input_ids int64 [sequences, prompt_len], left padded; gives int64 [sequences, length], or Hugging Face's output
    object where the configuration says so. Where `inputs_embeds` are the prompts, input_ids are what processors and the
    caller see of them, and may have no tokens.
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
    why_native = native_request(model, input_ids, generation_config, model_kwargs)
    lengths = None if why_native else prompt_lengths(input_ids, model_kwargs.get("attention_mask"))
    request = None if lengths is None else request_for(lengths, *asked)
    if lengths is not None:
        ends = [length + new_tokens for length in lengths]
        decoding.store.require_room(ends if request is None else [max(ends)], decoding.page_bytes())
    if lengths is None or not decoding.page_bytes():
        decoding.require_memory(len(input_ids), prompt_len + new_tokens)
    with decoding.request(None if lengths is None else max(ends), why_native) as decoder:
        if decoder is None:
            forward = NativeForward(model, generation_config, model_kwargs, decoding, keep=wanted.as_dict)
            return in_lockstep(forward, *asked, wanted)
        decoding.store.begin(decoder.kv)
        if request is None:
            decoding.store.expect(sum(map(pages_for, ends)))
            return in_lockstep(FusedForward(decoder, decoding.store, lengths, max(ends)), *asked, wanted)
        done = complete(request, decoder, decoding.store, decoding.max_slots, decoding.stride, decoding.phase)
    return sequences_of(done, input_ids, decoding)


# Which way


def native_request(model, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str:
    """Why a request is not one that a fused decoder computes, and what the user can do about it; "" where it is: a
    decoder's, for sequences alone, from token ids alone, from the beginning, padded on the left."""
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
        return "generate: past_key_values given (leave them out: fused keeps its own pages)"
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
    """Whether every row of a mask [rows, tokens] is zeros, then at least one one."""
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
    """The request in slots; None where something must see all rows at every step."""
    known = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
    before, draw = split_warpers(processors, config.do_sample)
    if decoding.streamer is not None or not known or not all(map(is_rowwise, before)):
        return None
    if draw is None:  # warpers in an order of their own: they are processors like the others
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
    """Whether a processor treats each row by itself."""
    return type(processor) in ROWWISE or getattr(processor, "rowwise", False)


def process_rows(
    processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Scores [n, vocab] of some rows of a batch, int64 [n], after the batch's processors.

    Hugging Face's repetition penalty holds, for each row, how much of it is padding (5.23).
    """
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = processes.RepetitionPenaltyLogitsProcessor(processor.penalty, padding[rows.to(padding.device)])
        scores = processor(ids, scores)
    return scores


def sequences_of(done: Completions, input_ids: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Prompts and completions, as wide as the longest, as Hugging Face pads them.  int64 [rows, tokens]"""
    width = int(done.lengths.max())
    if decoding.token_log is not None:
        decoding.token_log.sampling = done.sampling_logps[:, :width]
        decoding.token_log.old = done.old_logps[:, :width]
        decoding.token_log.raw = done.raw_logps[:, :width]
    decoding.produced(len(input_ids), int(done.lengths.sum()))
    return torch.cat([input_ids, done.tokens[:, :width]], dim=1)


# All rows at every step


class NativeForward:
    """The model's own forward over Hugging Face's cache, with our storage in it where nobody else will hold it."""

    def __init__(self, model, config: GenerationConfig, model_kwargs: dict[str, Any], decoding: Decoding, keep: bool):
        self.model, self.config, self.kwargs = model, config, model_kwargs
        self.encoder_decoder = model.config.is_encoder_decoder
        cache = model_kwargs.get("past_key_values")
        # What the caller will hold after the call must not live in storage that the next call overwrites.
        ours = isinstance(cache, Cache) and not getattr(cache, "_is_user_defined", False) and not keep
        if ours and not self.encoder_decoder:
            decoding.cache.adopt(cache)
        given = {name for name, value in model_kwargs.items() if value is not None}
        plain = given <= UNDERSTOOD and model_kwargs.get("use_cache") and config.prefill_chunk_size is None
        # What sees images too keeps numbers of each row beside the cache (Qwen2-VL, transformers 5.23).
        text_alone = model.config.get_text_config() is model.config and not self.encoder_decoder
        self.expands = decoding.expands and ours and plain and text_alone and can_be_expanded(cache)

    def prefill(self, input_ids: torch.Tensor):
        """The model's outputs for the prompts; logits [sequences, ·, vocab]. Equal prompts are computed once, and their
        part of the cache repeated, where the cache is one whose rows are independent of each other."""
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
        """The model's outputs for the newest token of each row."""
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
        """What the caller gets as `past_key_values`."""
        return self.kwargs.get("past_key_values")


def distinct(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each distinct prompt the first row that has it, and for each row the number of its prompt.  int64 each

    ids, mask: int64 [rows, tokens]; what is masked does not count.
    """
    _, source = torch.cat([ids * mask, mask], dim=1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(rows, len(ids)).scatter_reduce_(0, source, rows, "amin")
    return first[first < len(ids)], source


def can_be_expanded(cache: Cache) -> bool:
    """Whether a cache is empty, and holds keys and values by row and nothing else."""
    kinds = {type(layer) for layer in cache.layers}
    return (
        type(cache) is DynamicCache
        and kinds <= {GrowingLayer, DynamicSlidingWindowLayer}
        and not cache.get_seq_length()
    )


@dataclass
class StepOutput:
    """What the loop reads of a forward.  logits: float32 [sequences, 1, vocab]."""

    logits: torch.Tensor


class FusedForward:
    """The fused decoder, every row in it to the end."""

    cache = None

    def __init__(self, decoder: Decoder, store: BlockPool, lengths: list[int], longest: int):
        self.decoder, self.store, self.lengths = decoder, store, lengths
        self.rows = ModelRunner(decoder, store, longest)
        decoder.reserve(longest)

    def prefill(self, input_ids: torch.Tensor) -> StepOutput:
        """Logits after the prompts."""
        prompts = [ids[len(ids) - length :] for ids, length in zip(input_ids, self.lengths, strict=True)]
        pages, logits = prefill(self.decoder, self.store, prompts)
        self.rows.add(pages, self.lengths)
        return StepOutput(logits[:, None])

    def step(self, input_ids: torch.Tensor) -> StepOutput:
        """Logits after the newest token of each row."""
        self.rows.make_room(1)
        return StepOutput(self.rows.step(input_ids[:, -1].contiguous())[:, None])


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
    """Every row at every step, to the end of the last; rows that have ended are padded, as Hugging Face pads them."""
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
            outputs = None  # freed: the prefill's may be large
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
