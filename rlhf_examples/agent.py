"""GRPO over several turns: conversations with an environment, which answers the turns and gives the rewards.

Sums with a calculator, with the model of `make demo`, on CPUs; one's own environment on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.agent --actor_model_name_or_path runs/demo/moves/model
torchrun --nproc_per_node=8 -m rlhf_examples.agent --actor_model_name_or_path my-model --dtype bfloat16 \\
    --environment my_environments:browser --max_answer_seq_len 4096
A program that calls OpenAI's API plays instead of the environment, whose records it gets:
torchrun --nproc_per_node=2 -m rlhf_examples.agent --actor_model_name_or_path runs/demo/moves/model \\
    --harness rlhf_examples.harnesses:calculator
"""

from rlhf_examples.common.arguments import AgentArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.agent", AgentArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor, Evaluation
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.ranks import rank_share, sums_over_ranks
from rlhf_examples.common.rollout_log import log_rollout, numbered
from rlhf_examples.common.rollouts import (
    Row,
    pad_to_common_width,
    rank_row_ids,
    sampling,
    sampling_seed,
    with_turn_end,
)
from rlhf_examples.common.run import Run
from rlhf_examples.common.run_log import Transcript
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import Examples, RowStream
from rlhf_examples.data.held_out import warn_if_larger
from rlhf_examples.data.texts import SkippedRecords
from rlhf_examples.environments import Records, load_environment
from rlhf_examples.grpo import BAR, learn, load_actor

Harness = Callable[[str, dict[str, Any]], float | None]


def run(args: AgentArguments) -> Metrics:
    """Train and export a policy; returns the last metrics, and those of the evaluations before and after."""
    environment = load_environment(args.environment)
    tokenizer = tokenizer_of(args, "actor_model_name_or_path")
    if args.harness:
        games: Games = HarnessGames(None, tokenizer, args, load_harness(args.harness))
    else:
        games = Games(environment.make(tokenizer), tokenizer, args)
    prompts = RowStream(Examples(Dataset.from_list(rows_of(environment.records("train"))), SkippedRecords()), args.seed)
    held_out = rows_of(environment.records("test", size=args.eval_rows)) if args.eval_rows else []
    warn_if_larger(held_out, len(prompts.examples))
    with Run(args, "GRPO", BAR, args.num_iterations) as run:
        actor = load_actor(args)
        evaluation = GameEvaluation.load(actor.policy, tokenizer, held_out, [], args, games=games)
        parts = {"prompts": prompts, "entropy": actor.entropy_controller}
        run.start(actor, tokenizer, evaluation, {"policy": actor.policy}, parts)
        for iteration in run.iterations():
            with run.log.engine_output():
                actor.policy.eval()  # prints DeepSpeed's line about the previous iteration
            run.add(iteration, agent_iteration(actor, games, prompts, iteration, args))
    actor.destroy()
    return run.metrics


def agent_iteration(actor: Actor, games: "Games", prompts: RowStream, iteration: int, args: AgentArguments) -> Metrics:
    """One iteration: play groups of conversations of the next prompts, and update the policy; returns metrics.

    Expects the policy in eval mode and leaves it in train mode.
    """
    phases, policy, world_size = Phases(), actor.policy, dist.get_world_size()
    own = rank_share(prompts.next(args.per_device_generation_batch_size * world_size))
    params = sampling(args, sampling_seed(args.seed, iteration))
    with policy.inference():
        batch, episodes = games.play(policy, own, params, args.num_generations)
        numbers = numbered(rank_row_ids(len(own)), args.num_generations)
        log_rollout(batch, numbers, with_turn_end(params, games.tokenizer), iteration, args)
        phases.end("rollout")
        logps = actor.window_logps(batch, phases)
    logps = actor.training_logps(batch, *logps, phases)
    scores = scores_of(batch, episodes)
    phases.end("rewards")
    metrics = tool_metrics(episodes, len(scores))
    return metrics | learn(actor, batch, *logps, scores, ~scores.isnan(), iteration, phases, args)


@dataclass(frozen=True)
class Games:
    """Plays conversations of a policy with an environment."""

    environment: hybrid.MessageEnvironment | None
    tokenizer: PreTrainedTokenizerBase
    args: AgentArguments

    def play(
        self, policy: hybrid.HybridEngine, own: list[Row], params: hybrid.SamplingParams, num_generations: int
    ) -> tuple[hybrid.RolloutBatch, "hybrid.ConversationEnvironment | HarnessEpisodes"]:
        """Conversations from this rank's prompts, padded to one width on all ranks, and the episodes that they were.
        Every rank takes part.

        own: every `world_size`-th row of all ranks' prompts.
        Raises ValueError if a conversation forked: its rows would be no group of `num_generations`.
        """
        assert self.environment is not None
        episodes = self.environment.episodes([row["record"] for row in own], num_generations)
        args = self.args
        batch = policy.rollout(
            *episodes.prompts(policy.device),
            with_turn_end(params, self.tokenizer),
            num_generations,
            row_ids=rank_row_ids(len(own)),
            environment=episodes,
            environment_limits=hybrid.EnvironmentLimits(
                args.max_turns, args.max_turn_tokens or None, args.step_timeout_s
            ),
        )
        if len(batch.prompt_ids) != len(own) * num_generations:
            raise ValueError("environment: a conversation forked; its make() must use history='append'")
        return pad_to_common_width(batch, self.tokenizer.pad_token_id), episodes


@dataclass(frozen=True)
class HarnessEpisodes:
    """The conversations that programs had.  completions: each row's messages, the program's with the role "user"."""

    row_rewards: list[float | None]
    completions: list[list[dict[str, Any]]]

    def rewards(self) -> list[float | None]:
        """Each row's reward, None without one."""
        return self.row_rewards


@dataclass(frozen=True)
class HarnessGames(Games):
    """Lets programs play that call the policy by OpenAI's API.  harness: plays a record, and returns its reward."""

    harness: Harness

    def play(
        self, policy: hybrid.HybridEngine, own: list[Row], params: hybrid.SamplingParams, num_generations: int
    ) -> tuple[hybrid.RolloutBatch, HarnessEpisodes]:
        """As `Games.play`, for programs. One that raises ends its row: its reward is None."""
        records = [row["record"] for row in own for _ in range(num_generations)]
        sessions = [f"{row} {sample}" for row in range(len(own)) for sample in range(num_generations)]
        with (
            policy.serve() as server,
            hybrid.openai_server(server, self.tokenizer, model_name="policy", defaults=params) as endpoint,
            ThreadPoolExecutor(max(len(sessions), 1)) as threads,
        ):
            played = list(threads.map(self.outcome, map(endpoint.session_url, sessions), records))
            try:
                batch = endpoint.rollouts(sessions)
            except ValueError as error:  # a session without a completion has no row
                reason = next((text for _, text in played if text), "it sent no request to its base_url")
                raise ValueError(f"harness: a program ended before its first completion: {reason}") from error
        if len(batch.prompt_ids) != len(sessions):
            raise ValueError("harness: a conversation forked; a program must not change earlier messages")
        on_device: dict[str, Any] = {name: tensor.to(policy.device) for name, tensor in batch.tensors().items()}
        batch = replace(batch, errors=[error for _, error in played], **on_device)
        episodes = HarnessEpisodes([reward for reward, _ in played], self.messages(batch))
        return pad_to_common_width(batch, self.tokenizer.pad_token_id), episodes

    def outcome(self, base_url: str, record: dict[str, Any]) -> tuple[float | None, str]:
        """The reward of a program, and what it raised, as text."""
        try:
            return self.harness(base_url, record), ""
        except Exception as error:  # a program may raise anything: its row ends
            return None, f"{type(error).__name__}: {error}"

    def messages(self, batch: hybrid.RolloutBatch) -> list[list[dict[str, Any]]]:
        """Each row's turns, and the program's text between them."""
        assert batch.turn_ids is not None and batch.observation_mask is not None
        rows = []
        for ids, turns, sampled, observed in zip(
            batch.completion_ids, batch.turn_ids, batch.completion_mask, batch.observation_mask, strict=True
        ):
            messages = []
            for turn in range(int(turns.max()) + 1):
                for role, mask in (("assistant", sampled), ("user", observed)):
                    if len(part := ids[(turns == turn) & mask.bool()]):
                        text = self.tokenizer.decode(part, skip_special_tokens=True)
                        messages.append({"role": role, "content": text})
            rows.append(messages)
        return rows


def load_harness(name: str) -> Harness:
    """A program by `module:name`. Raises ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"harness: {name!r} given; it must be module:name of a function (base_url, record)") from error


@dataclass
class GameEvaluation(Evaluation):
    """An evaluation by the environment's reward; completions are conversations."""

    games: Games | None = None

    def scored(self, own: list[Row], params: hybrid.SamplingParams) -> tuple[list[Transcript], dict[str, list[float]]]:
        """Conversations from this rank's prompts, and their rewards."""
        with self.policy.inference():
            assert self.games is not None, "an evaluation of conversations has its games"
            batch, episodes = self.games.play(self.policy, own, params, self.num_generations)
        return [*map(transcript, episodes.completions)], {"reward": scores_of(batch, episodes).tolist()}


def rows_of(records: Records) -> list[Row]:
    """A row for each record of an environment: its prompt's last message as the text that logs show, and the record."""
    return [{"prompt": record["prompt"][-1]["content"], "record": record} for record in records]


def scores_of(batch: hybrid.RolloutBatch, episodes: "hybrid.ConversationEnvironment | HarnessEpisodes") -> torch.Tensor:
    """The rewards of a rollout's rows, float32 [rows]: 0 where a limit ended the conversation before there was one, NaN
    where the environment failed.
    """
    rewards = [
        nan if error else float(reward or 0.0) for error, reward in zip(batch.errors, episodes.rewards(), strict=True)
    ]
    return torch.tensor(rewards, device=batch.prompt_ids.device)


def tool_metrics(episodes: "hybrid.ConversationEnvironment | HarnessEpisodes", rows: int) -> Metrics:
    """Tool calls a conversation, and the share of them that failed, over all ranks, with TRL's names; nothing of
    programs, whose tools are their own.

    rows: conversations of this rank.
    """
    if isinstance(episodes, HarnessEpisodes):
        return {}
    own = episodes.metrics()
    calls = own["tools/call_frequency"] * rows
    sums = sums_over_ranks({"rows": rows, "calls": calls, "failed": calls * own["tools/failure_frequency"]})
    return {
        "tools/call_frequency": sums["calls"] / sums["rows"],
        "tools/failure_frequency": sums["failed"] / max(sums["calls"], 1),
    }


def transcript(messages: list[dict[str, Any]]) -> Transcript:
    """Roles and texts of messages, tool calls included."""
    return [{"role": message["role"], "text": text_of(message)} for message in messages]


def text_of(message: dict[str, Any]) -> str:
    """A message's content, and its tool calls as `name(argument=value)`."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    shown = [f"{call['name']}({', '.join(f'{k}={v}' for k, v in call['arguments'].items())})" for call in calls]
    return "\n".join(filter(None, [str(message.get("content") or ""), *shown]))
