"""TRL's `rollout_func` (1.16): `GRPOTrainer(..., rollout_func=hybrid.compat.trl.rollout_func)`.

`hybrid.install()` alone makes TRL generate with this engine. Through `rollout_func` the trainer also gets the logprobs
that its completions were drawn with, and nothing is gathered but what the engine needs, whatever
`ds3_gather_for_generation` says.
"""

from typing import Any

import torch

from hybrid.engine import HybridEngine
from hybrid.rollout import SamplingParams

# Of what TRL puts into `trainer.generation_kwargs`. Ends and padding are the trainer's own.
DRAWS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty")
NOT_OF_THE_DRAW = ("do_sample", "pad_token_id", "bos_token_id", "eos_token_id")


def rollout_func(prompts: list, trainer: Any) -> dict[str, list]:
    """A completion for each of this rank's prompts; an equal prompt, as in a GRPO group, is prefilled once.

    prompts: texts or conversations, as the trainer's dataset has them.  trainer: a GRPOTrainer.
    Gives, for each prompt, lists without padding: `prompt_ids`; `completion_ids`, the first end token included;
    `logprobs` of these, in float32, in the distribution that they were drawn from (temperature, penalty, truncation),
    as TRL asks of vLLM ("processed_logprobs").
    Raises ValueError and NotImplementedError, in words, for what cannot be followed.
    """
    engine, sampling = engine_of(trainer), sampling_of(trainer)
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)  # its chat template, its tools
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
    """The engine that the trainer's model is in."""
    engine = trainer.model_wrapped
    if not isinstance(engine, HybridEngine):
        raise ValueError(
            f"rollout_func: the trainer's model is in a {type(engine).__name__}, which cannot generate; call "
            'hybrid.install() before the trainer trains, and give its DeepSpeed configuration "hybrid_engine": '
            '{"enabled": true}'
        )
    return engine


def sampling_of(trainer: Any) -> SamplingParams:
    """How the trainer wants completions drawn."""
    wanted = getattr(trainer, "generation_kwargs", None)
    if wanted is None:
        raise ValueError(
            "rollout_func: the trainer has no generation_kwargs, so it generates by vLLM or transformers' continuous "
            "batching; use use_vllm=False and use_transformers_continuous_batching=False"
        )
    wanted = {name: value for name, value in wanted.items() if value is not None}
    for name, value in wanted.items():
        if name not in DRAWS + NOT_OF_THE_DRAW:
            raise NotImplementedError(
                f"rollout_func: generation_kwargs {name}={value!r} is not available; leave rollout_func out, and the "
                "trainer's own generate() follows it, through the engine too"
            )
    draw = {name: wanted[name] for name in DRAWS if name in wanted}
    if not wanted.get("do_sample", True):
        draw["temperature"] = 0.0
    return SamplingParams(**draw, stop_token_ids=tuple(trainer.eos_token_ids))


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of different lengths as prompts and their mask, both int64 [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def without_padding(rows: torch.Tensor, lengths: list[int]) -> list[list]:
    """The first entries of each row [rows, width], as many as said."""
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
