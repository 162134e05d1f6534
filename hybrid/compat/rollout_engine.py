"""DeepSpeed's rollout interface, `deepspeed.runtime.rollout.RolloutEngine` (0.19.8), based on `engine.rollout`."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.runtime.rollout as deepspeed_rollout
import torch
from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig

from hybrid.config import InvalidSetting, check_settings, unsupported
from hybrid.rollout import RolloutBatch
from hybrid.runtime.parallel import own_row_ids
from hybrid.sampling.params import SamplingParams, end_token_ids, pad_token_id

# Fields of DeepSpeed's HybridEngineRolloutConfig that configure its own decode loop, and why they do not apply here.
NOT_CONFIGURABLE = {
    "use_shared_prefill": "the engine finds equal prompts itself",
    "align_decode_fronts": "the engine lays out its KV cache itself",
    "enable_cache_trimming": "the engine lays out its KV cache itself",
    "continuous_cache_capacity": "the KV cache grows as needed, up to hybrid_engine.max_out_tokens a sequence",
}


@dataclass
class HybridRolloutBatch(deepspeed_rollout.RolloutBatch):
    """DeepSpeed's batch, and in `rollout` the RolloutBatch of the same rows: logprobs, finish reasons, weight version.

    input_ids, attention_mask: int64 [rows, prompt_len + completion_len], completion_len that of the longest completion.
        The mask comes from lengths, so a sampled padding token counts as a token.
    response_start_idx: int64 [rows], prompt_len in every row.
    """

    rollout: RolloutBatch


class HybridRollout(deepspeed_rollout.RolloutEngine):
    """DeepSpeed's rollout interface to a HybridEngine.

    Args:
        tokenizer: its end tokens count in addition to the model's, and its padding token pads completions; None: only
            the model's own.
        cfg: DeepSpeed's RolloutConfig or HybridEngineRolloutConfig. `enable_profiling` records `get_last_profile()`;
            `use_graph_capture` is refused where hybrid_engine.enable_cuda_graph is false.

    Raises:
        ValueError: for another `cfg.engine`, for `use_graph_capture` with enable_cuda_graph=false, and for a tokenizer
            without padding and end tokens; NotImplementedError for fields of `cfg` that the engine does not support.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any = None, cfg: Any = None):
        self.engine = engine
        self.enable_profiling = getattr(cfg, "enable_profiling", False)
        self._last_profile: dict[str, float] | None = None
        ends = getattr(tokenizer, "eos_token_id", None)
        self.end_token_ids = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        self.pad_token_id = getattr(tokenizer, "pad_token_id", None)
        if tokenizer is not None and self.pad_token_id is None:
            if not self.end_token_ids:
                raise ValueError("tokenizer: it has neither pad_token_id nor eos_token_id; give it one, or pass None")
            self.pad_token_id = self.end_token_ids[0]
        check_settings(self._rows(cfg))

    def _rows(self, cfg: Any) -> Iterator[InvalidSetting]:
        kind = getattr(cfg, "engine", self.name)
        yield InvalidSetting(kind != self.name, "RolloutConfig.engine", kind, f"it must be {self.name!r}")
        for field, reason in NOT_CONFIGURABLE.items():
            value = getattr(cfg, field, None)
            yield unsupported(bool(value), f"HybridEngineRolloutConfig.{field}", value, f"{reason}; leave it out")
        graphs = getattr(cfg, "use_graph_capture", False)
        own = (self.engine.config or {}).get("hybrid_engine", {}).get("enable_cuda_graph", "auto")
        instead = "hybrid_engine.enable_cuda_graph is false; leave it out, or set it to true"
        yield InvalidSetting(graphs and not own, "use_graph_capture", graphs, instead)

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> HybridRolloutBatch:
        """Return completions of left-padded prompts; the samples of a prompt are consecutive rows.

        Sampling takes one `engine.next_seed()`; a temperature of 0 or less is greedy. `continuous_batch_size` limits
        the rows decoded at once and changes no token. A rank may have 0 prompts.
        Raises what `engine.rollout` raises; ValueError for `n_samples_per_prompt` below 1 or above
        `continuous_batch_size`; NotImplementedError for `continuous_batch_size` if ranks decode together.
        """
        start = time.perf_counter()
        samples, prompts = sampling.n_samples_per_prompt, request.prompt_ids
        prompts_at_once = self._prompts_at_once(len(prompts), sampling)
        params = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=max(sampling.temperature, 0.0),
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=self.engine.next_seed() if sampling.temperature > 0 else None,
            stop_token_ids=self.end_token_ids,
        )
        inputs = (prompts, request.prompt_attention_mask, own_row_ids(len(prompts)))
        parts = zip(*(tensor.split(prompts_at_once) for tensor in inputs), strict=True)
        sampled = samples if params.temperature > 0 else 1  # greedy samples of a prompt are equal
        with self.engine.inference():
            batch = joined([self.engine.rollout(ids, mask, params, sampled, row_ids=rows) for ids, mask, rows in parts])
        batch = batch.select_rows([row for row in range(len(batch.prompt_ids)) for _ in range(samples // sampled)])
        pad = self.pad_token_id
        if pad is None:
            pad = pad_token_id(self.engine.module, end_token_ids(self.engine.module, params.stop_token_ids))
        batch = replace(batch, completion_ids=batch.completion_ids.masked_fill(batch.completion_mask == 0, pad))
        if self.enable_profiling:
            self._last_profile = profile(batch, samples, time.perf_counter() - start)
        sequences = batch.sequences
        return HybridRolloutBatch(
            input_ids=sequences,
            attention_mask=batch.attention_mask,
            response_start_idx=torch.full((len(sequences),), prompts.shape[1], device=sequences.device),
            rollout=batch,
        )

    def sync_weights(self, step: int) -> None:
        """Do nothing: `generate` always samples from the current weights."""

    def get_last_profile(self) -> dict[str, float] | None:
        """Return measurements of the last `generate`, under DeepSpeed's names, or None without `enable_profiling`.

        `num_generated_tokens` does not count padding.
        """
        return self._last_profile

    def _prompts_at_once(self, prompts: int, sampling: SamplingConfig) -> int:
        """Return the number of prompts that are decoded at once."""
        samples, max_rows = sampling.n_samples_per_prompt, sampling.continuous_batch_size
        key = "SamplingConfig.continuous_batch_size"
        check_settings(
            [InvalidSetting(samples < 1, "SamplingConfig.n_samples_per_prompt", samples, "it must be at least 1")]
        )
        if max_rows is None:
            return max(prompts, 1)
        allowed = f"it must be at least n_samples_per_prompt, {samples}: a prompt's samples are decoded together"
        in_step = (
            "with hybrid_engine.pin_parameters=false or inference_tp_size above 1 ranks decode in step, and must have "
            "as many parts; leave it None, or pin the parameters"
        )
        check_settings(
            [
                InvalidSetting(max_rows < samples, key, max_rows, allowed),
                unsupported(self.engine.in_step, key, max_rows, in_step),
            ]
        )
        return max_rows // samples


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any) -> Any:
    """`deepspeed.runtime.rollout.build_rollout` (0.19.8) that returns a HybridRollout for a HybridEngine.

    For another engine or rollout type, or without a tokenizer, it calls DeepSpeed's own. DeepSpeed's rollout also runs
    on a HybridEngine, through the model's `generate`, but returns no logprobs.
    """
    if rollout_cfg.engine == HybridRollout.name and hasattr(student_engine, "rollout") and tokenizer is not None:
        return HybridRollout(student_engine, tokenizer, rollout_cfg)
    return deepspeed_rollout.build_rollout(rollout_cfg, student_engine, tokenizer, **kwargs)


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the rows of rollouts as one rollout."""
    firsts = itertools.accumulate((len(batch.prompt_ids) for batch in batches), initial=0)
    numbered = [
        batch.renumbered(list(range(first, first + len(batch.prompt_ids))))
        for batch, first in zip(batches, firsts, strict=False)
    ]
    timings = {name: sum(batch.timings[name] for batch in batches) for name in batches[0].timings}
    return replace(RolloutBatch.cat(numbered), timings=timings)


def profile(batch: RolloutBatch, samples: int, total_s: float) -> dict[str, float]:
    """Return this rank's measurements of a rollout under the names of DeepSpeed's HybridEngineRollout.  total_s:
    seconds."""
    tokens = int(batch.completion_mask.sum())
    return {
        "prefill_forward_ms": batch.timings["prefill_s"] * 1000,
        "decode_forward_ms": batch.timings["decode_s"] * 1000,
        "gather_ms": (batch.timings["gather_s"] + batch.timings["merge_s"]) * 1000,
        "total_ms": total_s * 1000,
        "num_generated_tokens": tokens,
        "tokens_per_second": tokens / total_s,
        "batch_size": len(batch.prompt_ids) // samples,
        "num_samples_per_prompt": samples,
        "prompt_length": batch.prompt_ids.shape[1],
        "response_length": batch.completion_ids.shape[1],
    }
