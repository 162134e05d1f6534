"""TRL's `rollout_func` (1.16): `GRPOTrainer(..., rollout_func=hybrid.compat.trl.rollout_func)`.

`hybrid.install()` alone makes TRL generate with this engine. With `rollout_func` the trainer also gets the sampling
logprobs, and only the engine gathers weights, whatever `ds3_gather_for_generation` is. The trainer's `tools` and
`environment_factory` run inside the rollout: while one completion's tool works, the others decode.
"""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.chat_template_utils import parse_response

from hybrid.engine import HybridEngine
from hybrid.rollout import EnvironmentLimits, Observation, RolloutBatch, SamplingParams

# Keys of `trainer.generation_kwargs`. End tokens come from `trainer.eos_token_ids`; padding is not needed.
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty")
NOT_NEEDED = ("do_sample", "pad_token_id", "bos_token_id", "eos_token_id")


def rollout_func(prompts: list, trainer: Any) -> dict[str, list]:
    """One completion for each of this rank's prompts; equal prompts, as in a GRPO group, are prefilled once.

    prompts: texts or conversations from the trainer's dataset.  trainer: a GRPOTrainer.
    Gives, for each prompt, lists without padding: `prompt_ids`; `completion_ids`, the first end token included;
    `logprobs` of the completion, float32, under the distribution sampled from (temperature, penalty, truncation), as
    TRL requests from vLLM ("processed_logprobs"); 0 for tools' results, which TRL masks.
    Raises ValueError if the trainer's model is not in a HybridEngine or the trainer has no `generation_kwargs`;
    NotImplementedError for prompts with images and for generation_kwargs that are not supported; what `engine.rollout`
    raises.
    """
    engine, sampling = engine_of(trainer), sampling_of(trainer)
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)  # applies the chat template and tools
    if images or fields:
        raise NotImplementedError("rollout_func: prompts with images given; the engine generates from token ids")
    ids, mask = left_padded(prompt_ids, engine.device)
    if getattr(trainer, "tools", None):
        turns = trainer.max_tool_calling_iterations
        environment = ToolTurns(trainer, prompt_ids, turns)
        limits = EnvironmentLimits(max_turns=turns + 1, step_timeout_s=None)
        batch = engine.rollout(ids, mask, sampling, environment=environment, environment_limits=limits)
        give_tool_results(trainer, environment.results(batch))
    else:
        batch = engine.rollout(ids, mask, sampling)
    lengths = batch.attention_mask[:, ids.shape[1] :].sum(dim=1).tolist()
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": without_padding(batch.completion_ids, lengths),
        "logprobs": without_padding(batch.sampling_per_token_logps, lengths),
    }


@dataclass
class ToolTurns:
    """An environment of `engine.rollout` that runs the tools of a GRPOTrainer, as its `_tool_call_loop` does (trl
    1.16): calls parsed by the tokenizer's response template, errors as results, results in the template's own tokens.

    prompt_ids: of each row.  max_calls: turns of a row whose tool calls run.
    """

    trainer: Any
    prompt_ids: list[list[int]]
    max_calls: int
    messages: dict[int, list[list[dict]]] = field(default_factory=dict)  # by row: of each turn, the tools' after it
    context: dict[int, list[int]] = field(default_factory=dict)  # by row: its tokens so far
    calls: int = 0
    failures: int = 0

    def __post_init__(self):
        self.lock = threading.Lock()  # the tokenizer's calls change its settings, and are not for several threads

    def reset(self, row: int, prompt_ids: torch.Tensor) -> None:
        """Begin a row; the trainer has reset its environment."""
        self.messages[row], self.context[row] = [], list(self.prompt_ids[row])

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        """Run the tools that a turn calls. Without a call the row is done."""
        ids = completion_ids.tolist()
        with self.lock:
            turn = parse_response(
                self.trainer._tokenizer, ids, prefix=self.context[row], tools=self._tools_in_prompt(row)
            )
        calls = turn.get("tool_calls") or []
        self.messages[row].append([turn])
        if not calls or len(self.messages[row]) > self.max_calls:
            return Observation(done=True)
        results = [self._result(row, call) for call in calls]
        self.messages[row].append(results)
        with self.lock:
            suffix = self.trainer._get_tool_suffix_ids(results)
        self.context[row] += ids + suffix
        return Observation(suffix)

    def _tools_in_prompt(self, row: int) -> list:
        """The tools that the row's prompt was rendered with."""
        trainer = self.trainer
        if trainer.environment_factories is None:
            return trainer.tools
        return trainer._env_tools[trainer._batch_environments[row]]

    def _result(self, row: int, call: dict[str, Any]) -> dict[str, Any]:
        """The message of a tool's result, or of its error."""
        name, arguments = call.get("name", "unknown"), {}
        try:
            if call["type"] != "function":
                raise ValueError(f"Unsupported tool call type: {call['type']}")
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            value = self._called(row, name, arguments)
        except Exception as error:  # the model sees a tool's error, as in TRL
            value = {"error": str(error)}
            with self.lock:
                self.failures += 1
        with self.lock:
            self.calls += 1
        return {"role": "tool", "name": name, "content": value if isinstance(value, list) else str(value)}

    def _called(self, row: int, name: str, arguments: dict[str, Any]) -> Any:
        if name in (tools := self.trainer._sync_tool_dicts[row]):
            return tools[name](**arguments)
        if name not in (tools := self.trainer._async_tool_dicts[row]):
            raise ValueError(f"Tool {name} not found.")
        return asyncio.run_coroutine_threadsafe(tools[name](**arguments), self.trainer.async_loop).result()

    def results(self, batch: RolloutBatch) -> "ToolResults":
        """What the trainer's loop would have given. Raises RuntimeError if a row's environment failed."""
        failed = {row: error for row, error in enumerate(batch.errors) if error}
        if failed:
            raise RuntimeError(f"rollout_func: the tool calls of completions {failed} could not be run")
        completions = []
        for row in range(len(batch.prompt_ids)):
            turns = [message for group in self.messages[row] for message in group]
            # Results after which there was no room, or no turn, are not part of the completion.
            while turns and turns[-1]["role"] == "tool":
                turns.pop()
            completions.append(turns + self._unparsed_turn(row, batch))
        kept = batch.completion_mask.cpu()
        present = (batch.completion_mask | batch.observation_mask).sum(dim=1).tolist()
        tool_mask = [own[:length].tolist() for own, length in zip(kept, present, strict=True)]
        return ToolResults(tool_mask, completions, self.calls, self.failures)

    def _unparsed_turn(self, row: int, batch: RolloutBatch) -> list[dict]:
        """The last turn, if it was cut off by the completion's limit, which `step` does not see."""
        stepped = len(batch.turn_rewards[row])
        rest = batch.completion_ids[row][(batch.turn_ids[row] == stepped) & (batch.completion_mask[row] == 1)].tolist()
        if not rest:
            return []
        tools = self._tools_in_prompt(row)
        return [parse_response(self.trainer._tokenizer, rest, prefix=self.context[row], tools=tools)]


@dataclass(frozen=True)
class ToolResults:
    """What a trainer's tool loop gives beside token ids.

    tool_mask: for each completion, 1 for sampled tokens.  completions: messages of each.  calls, failures: of tools.
    """

    tool_mask: list[list[int]]
    completions: list[list[dict]]
    calls: int
    failures: int


def give_tool_results(trainer: Any, results: ToolResults) -> None:
    """Let the trainer's next `_tool_call_loop`, which follows `rollout_func` (trl 1.16), take these results instead of
    running the tools again."""

    def taken(prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields):
        del trainer._tool_call_loop  # the trainer's own method is back
        counts = results.calls, results.failures
        no_images = [[] for _ in completion_ids]
        return results.tool_mask, results.completions, completion_ids, logprobs, *counts, no_images

    trainer._tool_call_loop = taken


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
