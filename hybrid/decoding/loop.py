"""The decode loop: Hugging Face's `generate()` prepares, and calls this as its decoding method.

Prefill, then one forward for each new token. Rows that have ended are padded, as Hugging Face pads them.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from hybrid.decoding.kv_cache import KVCache
from hybrid.decoding.sampling import inverse_cdf, selective_log_softmax, stream_keys, uniform
from hybrid.profiling import Phase

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class Noise:
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
    """Logprobs of the tokens as they are chosen, for a rollout.  Each list: float32 [sequences] a step.

    sampling: under softmax(logits / temperature).  raw: under softmax(logits).
    """

    temperature: float
    sampling: list[torch.Tensor] = field(default_factory=list)
    raw: list[torch.Tensor] = field(default_factory=list)

    def add(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note a step.  logits float32 [sequences, vocab] as the model gave them, tokens int64 [sequences]."""
        self.raw.append(selective_log_softmax(logits, tokens))
        if self.temperature == 1.0:
            self.sampling.append(self.raw[-1])
        else:
            self.sampling.append(selective_log_softmax(logits / self.temperature, tokens))


@dataclass
class Decoder:
    """What decoding needs of the engine, and `generate()`'s decoding method.

    phase: times a phase.  window: opens the snapshot for the forwards.  cache: KV storage.
    max_out_tokens: the most tokens of a sequence, prompt included.
    noise: called once where sampling needs it.  token_log: filled where a rollout wants logprobs.
    agree: None, or, where forwards are collectives, tells whether every rank is done.
    streamer: gets tokens as they come; Hugging Face does not pass its own to a custom decoding method (5.23).
    produced: told at the end how many sequences and new tokens there are, padding not counted.
    """

    phase: Phase
    window: Callable
    cache: KVCache
    max_out_tokens: int
    noise: Callable[[int], Noise]
    token_log: TokenLog | None = None
    agree: Callable[[bool], bool] | None = None
    streamer: BaseStreamer | None = None
    produced: Callable[[int, int], None] = lambda sequences, tokens: None

    def method(self) -> Callable:
        """The function that Hugging Face's `generate(custom_generate=...)` takes."""

        def decoding_method(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            return decode(
                model, input_ids, logits_processor, stopping_criteria, generation_config, self, **model_kwargs
            )

        return decoding_method


def refuse_what_cannot_run(config: GenerationConfig, prompt_len: int, max_out_tokens: int) -> None:
    """Raise NotImplementedError or ValueError, in words, for a request that the loop cannot do."""
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise NotImplementedError(
            f"generate: {mode.value} (num_beams={config.num_beams}) is not available; "
            "the decode loop does greedy search and sampling (num_beams=1)"
        )
    new_tokens = config.max_length - prompt_len
    if config.max_length > max_out_tokens:
        raise ValueError(
            f"generate: a prompt of {prompt_len} tokens + {new_tokens} new tokens = {config.max_length} is over "
            f"hybrid_engine.max_out_tokens={max_out_tokens}; ask for at most {max(max_out_tokens - prompt_len, 0)} "
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
    decoder: Decoder,
    **model_kwargs,
):
    """Prompts to sequences, as Hugging Face's `_sample` (transformers 5.23), with our cache, sampler and window.

    input_ids int64 [sequences, prompt_len], left padded; gives int64 [sequences, length], or Hugging Face's output
    object where the configuration says so.
    """
    refuse_what_cannot_run(generation_config, input_ids.shape[1], decoder.max_out_tokens)
    encoder_decoder = model.config.is_encoder_decoder
    if encoder_decoder and decoder.agree is not None:
        raise NotImplementedError(
            "generate: hybrid_engine.pin_parameters=false with an encoder-decoder model is not available; use true"
        )
    wanted = Outputs(generation_config, model_kwargs.get("encoder_outputs") if encoder_decoder else None)
    cache = model_kwargs.get("past_key_values")
    # What the caller will hold after the call must not live in storage that the next call overwrites.
    ours = isinstance(cache, Cache) and not getattr(cache, "_is_user_defined", False) and not wanted.as_dict
    if ours and not encoder_decoder:
        decoder.cache.adopt(cache)
    pad = generation_config._pad_token_tensor
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    keys = None
    if generation_config.do_sample:
        noise = decoder.noise(len(input_ids) // generation_config.num_return_sequences)
        keys = noise.keys(len(input_ids), input_ids.device)

    with decoder.window():
        with decoder.phase("prefill"):
            outputs = model._prefill(input_ids, generation_config, model_kwargs)
        with decoder.phase("decode"):
            unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
            tokens_made = torch.zeros_like(unfinished)
            for position in itertools.count():
                model_kwargs = model._update_model_kwargs_for_generation(
                    outputs, model_kwargs, is_encoder_decoder=encoder_decoder
                )
                logits = outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device, copy=True)
                scores = logits_processor(input_ids, logits)
                wanted.add(outputs, scores, logits)
                outputs = None  # freed: the prefill's may be large
                tokens = scores.argmax(dim=-1) if keys is None else inverse_cdf(scores, uniform(keys, position))
                if decoder.token_log is not None:
                    decoder.token_log.add(logits, tokens)
                tokens_made += unfinished
                if has_end:
                    tokens = tokens * unfinished + pad * (1 - unfinished)
                input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
                if decoder.streamer is not None:
                    decoder.streamer.put(tokens.cpu())
                unfinished = unfinished & ~stopping_criteria(input_ids, wanted.steps["scores"])
                done = bool(unfinished.max() == 0)
                if finished(done, decoder, model, input_ids):
                    break
                inputs = model.prepare_inputs_for_generation(
                    input_ids, next_sequence_length=1 if model_kwargs["use_cache"] else None, **model_kwargs
                )
                outputs = model(**inputs, return_dict=True)
    if decoder.streamer is not None:
        decoder.streamer.end()
    decoder.produced(len(input_ids), int(tokens_made.sum()))
    return wanted.result(input_ids, model_kwargs.get("past_key_values"))


def finished(done: bool, decoder: Decoder, model, input_ids: torch.Tensor) -> bool:
    """Whether to stop. Where forwards are collectives, a rank that is done keeps the others company until all are."""
    if decoder.agree is None:
        return done
    with decoder.phase("wait"):
        everywhere = decoder.agree(done)
        while done and not everywhere:
            model(input_ids=input_ids[:1, -1:], use_cache=False)
            everywhere = decoder.agree(True)
    return everywhere
