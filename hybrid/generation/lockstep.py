"""Decoding in lockstep: every row stays until the last one has ended, as in Hugging Face's `_sample`.

For what must see the whole batch at every step (a processor, criterion or streamer), and for the model's own forward.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import CausalLMOutput

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.decoders.vocabulary import whole_logits
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.completions import Completions
from hybrid.generation.hf_cache import GrowingLayer, KVCache
from hybrid.generation.model_runner import ModelRunner, prefill
from hybrid.generation.request import SUPPORTED, GenerateInputs
from hybrid.generation.sampler import SamplingMetadata, sample_tokens, selective_log_softmax
from hybrid.profiling import Phase


class Outputs:
    """Each step's outputs that the caller asked for, collected as Hugging Face's `_sample` does (transformers 5.23).

    encoder_outputs: of an encoder-decoder; None for a decoder.
    """

    def __init__(self, config: GenerationConfig, encoder_outputs: Any):
        self.as_dict, self.encoder_outputs = config.return_dict_in_generate, encoder_outputs
        decoder = "" if encoder_outputs is None else "decoder_"
        requested = {
            "scores": config.output_scores,
            "logits": config.output_logits,
            f"{decoder}attentions": config.output_attentions,
            "cross_attentions": config.output_attentions and encoder_outputs is not None,
            f"{decoder}hidden_states": config.output_hidden_states,
        }
        self.steps: dict[str, tuple] = {name: () for name, is_on in requested.items() if is_on and self.as_dict}

    def add(self, outputs: Any, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add a step: the model's outputs, the processed scores and the raw logits, both [sequences, vocab]."""
        made = {"scores": scores, "logits": logits}
        for name, steps in self.steps.items():
            self.steps[name] = (*steps, made[name] if name in made else getattr(outputs, name, None))

    def result(self, sequences: Any, cache: Cache | None) -> Any:
        """`sequences`, or Hugging Face's output object if the caller asked for a dict."""
        if not self.as_dict:
            return sequences
        if self.encoder_outputs is None:
            return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=cache, **self.steps)
        encoder = {f"encoder_{name}": self.encoder_outputs.get(name) for name in ("attentions", "hidden_states")}
        return GenerateEncoderDecoderOutput(sequences=sequences, past_key_values=cache, **encoder, **self.steps)


class NativeForward:
    """The model's own forward over Hugging Face's cache, which uses `kv_cache` if the caller does not get it back.

    expands: whether rows of a cache may be repeated and reordered, so that equal prompts are prefilled once. False if
        other ranks hold parts of the cache, or if ranks exchange messages of equal size.
    """

    def __init__(self, model: nn.Module, inputs: GenerateInputs, kv_cache: KVCache, expands: bool):
        self.model, self.config, self.kwargs = model, inputs.config, inputs.model_kwargs
        self.encoder_decoder = model.config.is_encoder_decoder
        cache, config = self.kwargs.get("past_key_values"), inputs.config
        # A cache that the caller keeps must not be in storage that the next call overwrites.
        user_defined = getattr(cache, "_is_user_defined", False) or config.return_dict_in_generate
        ours = isinstance(cache, Cache) and not user_defined
        if ours and not self.encoder_decoder:
            kv_cache.adopt(cache)
        names = {name for name, value in self.kwargs.items() if value is not None}
        plain = names <= SUPPORTED and self.kwargs.get("use_cache") and config.prefill_chunk_size is None
        # Multimodal models keep per-row state outside the cache (Qwen2-VL, transformers 5.23).
        text_alone = model.config.get_text_config() is model.config and not self.encoder_decoder
        self.expands = (
            expands and ours and plain and text_alone and type(cache) is DynamicCache and not cache.get_seq_length()
        ) and {type(layer) for layer in cache.layers} <= {GrowingLayer, DynamicSlidingWindowLayer}

    def prefill(self, input_ids: torch.Tensor) -> Any:
        """The model's outputs for the prompts, logits [sequences, ·, vocab].

        Equal prompts are computed once and their rows of the cache repeated, if the rows of the cache are independent.
        """
        mask = self.kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        by_rows = self.expands and mask.shape == input_ids.shape
        first, source = distinct(input_ids, mask) if by_rows else (input_ids, None)
        if len(first) == len(input_ids):
            return self._updated(self.model._prefill(input_ids, self.config, self.kwargs))
        by_row = {name: self.kwargs.get(name) for name in ("attention_mask", "position_ids")}
        own = {name: value[first] for name, value in by_row.items() if value is not None and len(value) == len(source)}
        outputs = self.model._prefill(input_ids[first], self.config, {**self.kwargs, **own})
        outputs.logits = outputs.logits[:, -1:][source]
        outputs.past_key_values.batch_select_indices(source)
        return self._updated(outputs)

    def step(self, input_ids: torch.Tensor) -> Any:
        """The model's outputs for the latest token of each row."""
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if self.kwargs["use_cache"] else None, **self.kwargs
        )
        return self._updated(self.model(**inputs, return_dict=True))

    def _updated(self, outputs: Any) -> Any:
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


class FusedForward:
    """The fused decoder in lockstep.  max_new_tokens: of every row.

    before_step: called with the latest token of each row, int64 [rows], before a step.
    is_running: no forward has ended yet, one runs, or one has failed.
    """

    cache = None
    is_running = True
    before_step: Callable[[torch.Tensor], None] | None = None

    def __init__(self, decoder: AnyDecoder, block_pool: BlockPool, prompt_lengths: list[int], max_new_tokens: int):
        self.decoder, self.block_pool, self.prompt_lengths = decoder, block_pool, prompt_lengths
        longest = max(prompt_lengths) + max_new_tokens
        block_pool.reserve_call(sum(blocks_for(length + max_new_tokens) for length in prompt_lengths))
        self.runner = ModelRunner(decoder, block_pool, longest)
        decoder.reserve(longest)

    def prefill(self, input_ids: torch.Tensor) -> CausalLMOutput:
        """Logits after the prompts."""
        prompts = [ids[len(ids) - length :] for ids, length in zip(input_ids, self.prompt_lengths, strict=True)]
        blocks, logits = prefill(self.decoder, self.block_pool, prompts)
        self.runner.add(blocks, self.prompt_lengths)
        return self._output(logits)

    def step(self, input_ids: torch.Tensor) -> CausalLMOutput:
        """Logits after the latest token of each row."""
        tokens = input_ids[:, -1].contiguous()
        if self.before_step is not None:
            self.before_step(tokens)
        return self.append(tokens)

    def append(self, tokens: torch.Tensor) -> CausalLMOutput:
        """Append a token, int64 [rows], to each row; logits after it."""
        self.is_running = True
        self.runner.allocate_slots(1)
        return self._output(self.runner.step(tokens))

    def _output(self, logits: torch.Tensor) -> CausalLMOutput:
        output = CausalLMOutput(logits=whole_logits(logits, self.decoder.vocabulary)[:, None])
        self.is_running = False
        return output


def in_lockstep(
    forward: NativeForward | FusedForward,
    inputs: GenerateInputs,
    sampling_keys: torch.Tensor,
    outputs: Outputs,
    phase: Phase,
    logprob_temperature: float | None = None,
) -> Completions:
    """Decode all rows together until the last one ends; ended rows are padded as Hugging Face pads them.

    outputs: collects the steps' outputs.  logprob_temperature: of `Completions.old_logps`; None: no logprobs.
    """
    ids: Any = inputs.input_ids
    pad = inputs.config._pad_token_tensor
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in inputs.stopping_criteria)
    draw, logps = SamplingMetadata() if inputs.config.do_sample else SamplingMetadata(temperature=0), []
    with phase("prefill"):
        step = forward.prefill(ids)
    with phase("decode"):
        unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        lengths = torch.zeros_like(unfinished)
        for position in itertools.count():
            logits = step.logits[:, -1].to(dtype=torch.float32, device=ids.device, copy=True)
            scores = inputs.logits_processor(ids, logits)
            outputs.add(step, scores, logits)
            step = None  # frees the prefill's logits, which may be large
            drawn = sample_tokens(scores, sampling_keys, torch.full_like(sampling_keys, position), draw)
            tokens = drawn.tokens
            if logprob_temperature is not None:
                raw = selective_log_softmax(logits, tokens)
                same = logprob_temperature == 1.0
                old = raw if same else selective_log_softmax(logits / logprob_temperature, tokens)
                logps.append(torch.stack([drawn.sampling_logps, old, raw]))
            lengths += unfinished
            if has_end:
                tokens = tokens * unfinished + pad * (1 - unfinished)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            if inputs.streamer is not None:
                inputs.streamer.put(tokens.cpu())
            unfinished = unfinished & ~inputs.stopping_criteria(ids, outputs.steps.get("scores"))
            if unfinished.max() == 0:
                break
            step = forward.step(ids)
    if inputs.streamer is not None:
        inputs.streamer.end()
    return Completions(ids[:, inputs.input_ids.shape[1] :], lengths, *(torch.stack(logps, dim=-1) if logps else ()))
