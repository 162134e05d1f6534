"""TRL's `rollout_func` (1.16): `GRPOTrainer(..., rollout_func=hybrid.compat.trl.rollout_func)`.

`hybrid.install()` alone makes TRL generate with this engine. With `rollout_func` the trainer also gets the sampling
logprobs, and only the engine gathers weights, whatever `ds3_gather_for_generation` is.
"""

from typing import Any

import torch

from hybrid.engine import HybridEngine
from hybrid.rollout import SamplingParams

# Keys of `trainer.generation_kwargs`. End tokens come from `trainer.eos_token_ids`; padding is not needed.
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty")
NOT_NEEDED = ("do_sample", "pad_token_id", "bos_token_id", "eos_token_id")


def rollout_func(prompts: list, trainer: Any) -> dict[str, list]:
    """One completion for each of this rank's prompts; equal prompts, as in a GRPO group, are prefilled once.

    prompts: texts or conversations from the trainer's dataset.  trainer: a GRPOTrainer.
    Gives, for each prompt, lists without padding: `prompt_ids`; `completion_ids`, the first end token included;
    `logprobs` of the completion, float32, under the distribution sampled from (temperature, penalty, truncation), as
    TRL requests from vLLM ("processed_logprobs").
    Raises ValueError if the trainer's model is not in a HybridEngine or the trainer has no `generation_kwargs`;
    NotImplementedError for prompts with images and for generation_kwargs that are not supported; what `engine.rollout`
    raises.
    """
    engine, sampling = engine_of(trainer), sampling_of(trainer)
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)  # applies the chat template and tools
    if images or fields:
        raise NotImplementedError("rollout_func: prompts with images given; the engine generates from token ids")
    ids, mask = left_padded(prompt_ids, engine.device)
    batch = engine.rollout(ids, mask, sampling)
    lengths = batch.completion_mask.sum(dim=1).tolist()
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": without_padding(batch.completion_ids, lengths),
        "logprobs": without_padding(batch.sampling_per_token_logps, lengths),
    }


def engine_of(trainer: Any) -> HybridEngine:
    """The HybridEngine of the trainer's model. Raises ValueError if the model is in another engine."""
    engine = trainer.model_wrapped
    if not isinstance(engine, HybridEngine):
        raise ValueError(
            f"rollout_func: the trainer's model is in a {type(engine).__name__}, which cannot generate; call "
            'hybrid.install() before the trainer trains, and give its DeepSpeed configuration "hybrid_engine": '
            '{"enabled": true}'
        )
    return engine


def sampling_of(trainer: Any) -> SamplingParams:
    """SamplingParams from the trainer's `generation_kwargs` and `eos_token_ids`.

    Raises ValueError if the trainer has no `generation_kwargs`, NotImplementedError for a key that is not supported.
    """
    kwargs = getattr(trainer, "generation_kwargs", None)
    if kwargs is None:
        raise ValueError(
            "rollout_func: the trainer has no generation_kwargs, so it generates by vLLM or transformers' continuous "
            "batching; use use_vllm=False and use_transformers_continuous_batching=False"
        )
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    for name, value in kwargs.items():
        if name not in SAMPLING + NOT_NEEDED:
            raise NotImplementedError(
                f"rollout_func: generation_kwargs {name}={value!r} is not available; leave rollout_func out: the "
                "trainer's own generate() supports it, and also runs through the engine"
            )
    params = {name: kwargs[name] for name in SAMPLING if name in kwargs}
    if not kwargs.get("do_sample", True):
        params["temperature"] = 0.0
    return SamplingParams(**params, stop_token_ids=tuple(trainer.eos_token_ids))


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of token ids as left-padded prompts and their mask, both int64 [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def without_padding(rows: torch.Tensor, lengths: list[int]) -> list[list]:
    """Each row of a tensor [rows, width] as a list of its first `length` entries."""
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
