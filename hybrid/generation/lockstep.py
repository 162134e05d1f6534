"""Decoding in lockstep: every row stays until the last one has ended, as in Hugging Face's `_sample`.

For what must see the whole batch at every step (a processor, criterion or streamer), and for the model's own forward.
"""

import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import CausalLMOutput

from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.completions import Completions, InvalidLogitsError
from hybrid.generation.hf_cache import CACHES, KVCache, has_rows, is_empty, is_filled, select_rows
from hybrid.generation.model_runner import ModelRunner, forward_bytes, prefill
from hybrid.generation.request import SUPPORTED, GenerateInputs, given_names
from hybrid.generation.sequence import Sequence
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.profiling import Phase
from hybrid.sampling.params import SamplingParams
from hybrid.sampling.sampler import sample_tokens, selective_log_softmax
from hybrid.sampling.vocabulary import whole_logits


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

    kv_cache: storage of the cache; None: the cache keeps its own.
    expands: whether rows of a cache may be repeated and reordered, so that equal prompts are prefilled once. False if
        other ranks hold parts of the cache, or if ranks exchange messages of equal size.
    model_inputs: inputs of the prefill alone, which are in the cache after it.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: GenerateInputs,
        kv_cache: KVCache | None,
        expands: bool,
        model_inputs: Collection[str] = (),
    ):
        self.model, self.config, self.kwargs = model, inputs.config, inputs.model_kwargs
        self.encoder_decoder = model.config.is_encoder_decoder
        self.prepare_inputs = model.prepare_inputs_for_generation  # PEFT's, as long as its `generate()` runs (0.21)
        config, cache = inputs.config, self.cache
        # A cache that the caller keeps must not be in storage that the next call overwrites.
        user_defined = getattr(cache, "_is_user_defined", False) or config.return_dict_in_generate
        ours = isinstance(cache, Cache) and not user_defined
        plain = (
            given_names(self.kwargs) <= {*SUPPORTED, *model_inputs}
            and self.kwargs.get("use_cache")
            and config.prefill_chunk_size is None
        )
        rows = expands and ours and plain and not self.encoder_decoder and has_rows(cache) and is_empty(cache)
        self.expands, self.model_inputs = bool(rows), model_inputs
        if ours and not self.encoder_decoder and kv_cache is not None:
            kv_cache.adopt(cache)

    def prefill(self, input_ids: torch.Tensor) -> Any:
        """Return the model's outputs for the prompts, logits [sequences, ·, vocab].

        Equal prompts are computed once and their rows of the cache repeated, if the rows of the cache are independent.
        """
        mask = self.kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        by_rows = self.expands and mask.shape == input_ids.shape
        prompts = distinct(input_ids, mask) if by_rows else None
        if prompts is None or len(prompts[0]) == len(input_ids):
            return self._updated(self.model._prefill(input_ids, self.config, self.kwargs))
        first, source = prompts
        outputs = self.model._prefill(input_ids[first], self.config, self.kwargs | self._rows_of(first, len(source)))
        if not is_filled(self.cache, input_ids.shape[1]):  # the model keeps its state elsewhere
            self.expands = False
            return self._updated(self.model._prefill(input_ids, self.config, self.kwargs))
        outputs.logits = outputs.logits[:, -1:][source]
        select_rows(self.cache, source)
        return self._updated(outputs)

    def prefill_rows(self, input_ids: torch.Tensor) -> Any:
        """As `prefill`, of prompts that all differ, with the model inputs."""
        outputs = self._updated(self.model._prefill(input_ids, self.config, self.kwargs))
        self.kwargs = {name: value for name, value in self.kwargs.items() if name not in self.model_inputs}
        return outputs

    def _rows_of(self, rows: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        """Return the mask and the positions of these rows, int64 [n], of `count`, where they are by row."""
        given = {name: self.kwargs.get(name) for name in ("attention_mask", "position_ids")}
        by_row = {name: value for name, value in given.items() if value is not None and value.shape[-2] == count}
        return {name: value.index_select(-2, rows) for name, value in by_row.items()}

    def step(self, input_ids: torch.Tensor, count: int = 1) -> Any:
        """Return the model's outputs for the latest `count` tokens of each row."""
        inputs = self.prepare_inputs(
            input_ids, next_sequence_length=count if self.kwargs.get("use_cache") else None, **self.kwargs
        )
        return self._updated(self.model(**inputs, return_dict=True))

    def _updated(self, outputs: Any) -> Any:
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=self.encoder_decoder
        )
        return outputs

    @property
    def cache(self) -> Any:
        """The cache, for `past_key_values` of the caller's output; None if there is none."""
        return next((self.kwargs[name] for name in CACHES if self.kwargs.get(name) is not None), None)

    @cache.setter
    def cache(self, cache: Cache) -> None:
        name = next(name for name in CACHES if self.kwargs.get(name) is not None)
        self.kwargs = {**self.kwargs, name: cache}


def distinct(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of each distinct prompt, int64 [prompts], and each row's index into these prompts, int64
    [rows].

    ids, mask: int64 [rows, tokens]; masked ids are ignored.
    """
    _, source = torch.cat([ids * mask, mask], dim=1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(rows, len(ids)).scatter_reduce_(0, source, rows, "amin")
    return first[first < len(ids)], source


class FusedForward:
    """The fused decoder in lockstep.  max_new_tokens: of every row.

    before_step: called with the latest token of each row, int64 [rows], before a step.
    is_running: no forward has ended yet, one runs, or one has failed; also if the ranks have agreed to stop.
    """

    cache = None
    is_running = True
    before_step: Callable[[torch.Tensor], Any] | None = None

    def __init__(self, decoder: AnyDecoder, block_pool: BlockPool, prompt_lengths: list[int], max_new_tokens: int):
        self.decoder, self.block_pool, self.prompt_lengths = decoder, block_pool, prompt_lengths
        longest = max(prompt_lengths) + max_new_tokens
        num_blocks = sum(blocks_for(length + max_new_tokens) for length in prompt_lengths)
        forwards = partial(forward_bytes, decoder, len(prompt_lengths), longest)
        if not block_pool.shares_prefixes:
            block_pool.reserve_states(len(prompt_lengths), num_blocks, forwards)
        block_pool.reserve_call(num_blocks, forwards)
        self.runner = ModelRunner(decoder, block_pool, longest)
        decoder.reserve(longest)

    def prefill(self, input_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits after the prompts."""
        prompts = [ids[len(ids) - length :] for ids, length in zip(input_ids, self.prompt_lengths, strict=True)]
        blocks, slots, logits = prefill(self.decoder, self.block_pool, prompts)
        sequences = [Sequence(blocks=of_prompt, state_slot=slot) for of_prompt, slot in zip(blocks, slots, strict=True)]
        self.runner.add(sequences, self.prompt_lengths)
        return self._output(logits)

    def step(self, input_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits after the latest token of each row."""
        INTERRUPTS.raise_pending()
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
    A row with invalid logits ends; InvalidLogitsError is raised once all rows have.
    """
    ids: Any = inputs.input_ids
    pad: Any = inputs.config._pad_token_tensor
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in inputs.stopping_criteria)
    params = SamplingParams(max_new_tokens=1, temperature=1.0 if inputs.config.do_sample else 0.0)  # of a step
    logps: list[torch.Tensor] = []
    with phase("prefill"):
        step: Any = forward.prefill(ids)
    with phase("decode"):
        unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        lengths, invalid_steps = torch.zeros_like(unfinished), torch.full_like(unfinished, -1)
        for position in itertools.count():
            logits = step.logits[:, -1].to(dtype=torch.float32, device=ids.device, copy=True)
            scores = inputs.logits_processor(ids, logits).float()
            outputs.add(step, scores, logits)
            step = None  # frees the prefill's logits, which may be large
            drawn = sample_tokens(scores, sampling_keys, torch.full_like(sampling_keys, position), params)
            tokens, invalid = drawn.tokens, drawn.sampling_logps.isnan() & unfinished.bool()
            if logprob_temperature is not None:
                raw = selective_log_softmax(logits, tokens)
                same = logprob_temperature == 1.0
                old = raw if same else selective_log_softmax(logits / logprob_temperature, tokens)
                logps.append(torch.stack([drawn.sampling_logps, old, raw]))
            lengths += unfinished
            invalid_steps.masked_fill_(invalid, position)
            if has_end:
                tokens = tokens * unfinished + pad * (1 - unfinished)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            if inputs.streamer is not None:
                inputs.streamer.put(tokens.cpu())
            unfinished = unfinished & ~invalid & ~inputs.stopping_criteria(ids, outputs.steps.get("scores"))
            if unfinished.max() == 0:
                break
            step = forward.step(ids)
    if inputs.streamer is not None:
        inputs.streamer.end()
    if (invalid_steps >= 0).any():
        raise InvalidLogitsError({row: step for row, step in enumerate(invalid_steps.tolist()) if step >= 0})
    return Completions(ids[:, inputs.input_ids.shape[1] :], lengths, *(torch.stack(logps, dim=-1) if logps else ()))
