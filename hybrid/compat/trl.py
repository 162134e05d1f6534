"""TRL's `rollout_func` (1.16): `GRPOTrainer(..., rollout_func=hybrid.compat.trl.rollout_func)`.

`hybrid.install()` alone makes TRL generate with this engine. With `rollout_func` the trainer also gets the sampling
logprobs, and only the engine gathers weights, whatever `ds3_gather_for_generation` is. The trainer's `tools` and
`environment_factory` run inside the rollout: while one completion's tool works, the others decode.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.environments.episodes import ConversationEnvironment, ConversationState
from hybrid.environments.message_environment import MessageEnvironment
from hybrid.rollout import EnvironmentLimits, RolloutBatch, SamplingParams
from hybrid.sampling.params import truncates
from hybrid.training.engine import HybridEngine

# Keys of `trainer.generation_kwargs`. End tokens come from `trainer.eos_token_ids`; padding is not needed.
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty")
TOOL_COUNTS = ("tool_calls", "tool_failures")
NOT_NEEDED = ("do_sample", "pad_token_id", "bos_token_id", "eos_token_id")


def rollout_func(prompts: list, trainer: Any) -> dict[str, list]:
    """One completion for each of this rank's prompts; equal prompts, as in a GRPO group, are prefilled once.

    prompts: texts or conversations from the trainer's dataset.  trainer: a GRPOTrainer.
    Returns, for each prompt, lists without padding: `prompt_ids`; `completion_ids`, the first end token included;
    `logprobs` of the completion, float32, under the distribution sampled from (temperature, penalty, truncation), as
    TRL requests from vLLM ("processed_logprobs"); 0 for tools' results, which TRL masks.
    Raises ValueError if the trainer's model is not in a HybridEngine or the trainer has no `generation_kwargs`;
    NotImplementedError for prompts with images and for generation_kwargs that are not supported; what `engine.rollout`
    raises.
    """
    engine, sampling = engine_of(trainer), sampling_of(trainer)
    if truncates(sampling):
        warnings.warn(
            f"rollout_func: top_p={sampling.top_p:g}, top_k={sampling.top_k}, min_p={sampling.min_p:g} truncate the "
            "sampled distribution, but TRL (1.16) has no sampling mask: its loss has logprobs of the whole vocabulary, "
            "and off_policy_mask_threshold compares these with the truncated ones. Use top_p=1.0, top_k=0 and "
            "min_p=None, or engine.logps(..., sampling_mask=) in your own loss",
            stacklevel=2,
        )
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)  # applies the chat template and tools
    if images or fields:
        raise NotImplementedError("rollout_func: prompts with images given; the engine generates from token ids")
    ids, mask = left_padded(prompt_ids, engine.device)
    if getattr(trainer, "tools", None):
        episodes = tool_episodes(trainer, prompts)
        limits = EnvironmentLimits(max_turns=trainer.max_tool_calling_iterations + 1, step_timeout_s=None)
        batch = engine.rollout(ids, mask, sampling, environment=episodes, environment_limits=limits)
        give_tool_results(trainer, tool_results(episodes, batch))
    else:
        batch = engine.rollout(ids, mask, sampling)
    lengths = completion_lengths(batch)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": without_padding(batch.completion_ids, lengths),
        "logprobs": without_padding(batch.sampling_per_token_logps, lengths),
    }


def tool_episodes(trainer: Any, prompts: list[list[dict]]) -> ConversationEnvironment:
    """Return the conversations of the trainer's prompts with its tools.

    The trainer has reset its environments, put what they gave into the prompts, and asks for their rewards itself: here
    they are tools alone.  prompts: conversations.
    """
    names = trainer._batch_environments if trainer.environment_factories else [None] * len(prompts)
    tools = trainer._env_tools if trainer.environment_factories else {None: trainer.tools}
    environments = {name: message_environment(trainer, tools[name]) for name in dict.fromkeys(names)}
    rows = [
        ConversationState(environments[name].kinds[None], {"prompt": prompt}, None, {**functions, **coroutines})
        for name, prompt, functions, coroutines in zip(
            names, prompts, trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True
        )
    ]
    return ConversationEnvironment(rows, environments[names[0]].settings, num_generations=1)


def message_environment(trainer: Any, tools: list) -> MessageEnvironment:
    """Return the trainer's settings as a MessageEnvironment.  tools: functions in the prompt."""
    kwargs = dict(trainer.chat_template_kwargs)
    if trainer.chat_template is not None:  # TRL's own, where the tokenizer's rewrites earlier turns
        kwargs["chat_template"] = trainer.chat_template
    limit = trainer.max_tool_calling_iterations
    return MessageEnvironment(trainer._tokenizer, tools, max_tool_calling_iterations=limit, chat_template_kwargs=kwargs)


def tool_results(episodes: ConversationEnvironment, batch: RolloutBatch) -> "ToolResults":
    """Return the results that the trainer's own loop would return. Raises RuntimeError if a turn was not answered."""
    failed = {row: error for row, error in enumerate(batch.errors) if error}
    if failed:
        raise RuntimeError(f"rollout_func: the turns of completions {failed} could not be answered")
    kept = batch.completion_mask.cpu()
    lengths = completion_lengths(batch)
    completions = [
        with_last_turn(episode, messages, unanswered_ids(batch, row))
        for row, (episode, messages) in enumerate(zip(episodes.rows, episodes.completions, strict=True))
    ]
    calls, failures = (sum(getattr(episode, name) for episode in episodes.rows) for name in TOOL_COUNTS)
    return ToolResults(without_padding(kept, lengths), completions, calls, failures)


def unanswered_ids(batch: RolloutBatch, row: int) -> list[int]:
    """Return the tokens of a row's last turn, if it was cut off by the completion's limit, which `step` does not
    see."""
    assert batch.turn_ids is not None, "the batch of a rollout has it"
    answered = len(batch.turn_rewards[row])
    return batch.completion_ids[row][(batch.turn_ids[row] == answered) & (batch.completion_mask[row] == 1)].tolist()


def with_last_turn(episode: ConversationState, messages: list[dict], ids: list[int]) -> list[dict]:
    """Return the messages of a completion with its cut-off turn; without one, without results that no turn follows:
    there was no room for them.
    """
    if ids:
        return [*messages, episode.parse(ids)[0]]
    turns = list(messages)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return turns


def completion_lengths(batch: RolloutBatch) -> list[int]:
    """Return the tokens of each row after its prompt, tools' results included."""
    return batch.attention_mask[:, batch.prompt_ids.shape[1] :].sum(dim=1).tolist()


@dataclass(frozen=True)
class ToolResults:
    """Results of a trainer's tool loop, next to token ids.

    tool_mask: for each completion, 1 for sampled tokens.  completions: messages of each.  calls, failures: of tools.
    """

    tool_mask: list[list[int]]
    completions: list[list[dict]]
    calls: int
    failures: int


def give_tool_results(trainer: Any, results: ToolResults) -> None:
    """Let the trainer's next `_tool_call_loop`, which follows `rollout_func` (trl 1.16), take these results instead of
    running the tools again."""

    def taken(
        prompts: list,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        completions: list,
        logprobs: list[list[float]],
        images: Any,
        multimodal_fields: Any,
    ) -> tuple:
        del trainer._tool_call_loop  # the trainer's own method is back
        counts = results.calls, results.failures
        no_images: list[list] = [[] for _ in completion_ids]
        return results.tool_mask, results.completions, completion_ids, logprobs, *counts, no_images

    trainer._tool_call_loop = taken


def engine_of(trainer: Any) -> HybridEngine:
    """Return the HybridEngine of the trainer's model. Raises ValueError if the model is in another engine."""
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
    """Return lists of token ids as left-padded prompts and their mask, both int64 [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def without_padding(rows: torch.Tensor, lengths: list[int]) -> list[list]:
    """Each row of a tensor [rows, width] as a list of its first `length` entries."""
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
