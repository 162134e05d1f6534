"""GRPO over several turns: conversations with an environment, which answers the turns and gives the rewards.

Sums with a calculator, with the model of `make demo`, on CPUs; one's own environment on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.agent --actor_model_name_or_path runs/demo/moves/model
torchrun --nproc_per_node=8 -m rlhf_examples.agent --actor_model_name_or_path my-model --dtype bfloat16 \\
    --environment my_environments:browser --max_answer_seq_len 4096
"""

from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor, Evaluation, start_log, train_iterations
from rlhf_examples.common.arguments import AgentArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.files import CHECKPOINTS
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.models import load_tokenizer, require_model
from rlhf_examples.common.ranks import rank_share, seed_everything, sums_over_ranks
from rlhf_examples.common.rollouts import Row, pad_to_common_width, rank_row_ids, sampling, sampling_seed
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.run_log import Transcript
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import Examples, RowStream
from rlhf_examples.data.texts import LeftOut
from rlhf_examples.environments import Records, load_environment
from rlhf_examples.grpo import BAR, learn, window_logps, with_training_logps


def main() -> None:
    """Train with the arguments of the command line and export the policy."""
    run_command(AgentArguments, run)


def run(args: AgentArguments) -> Metrics:
    """Train and export a policy; returns the last metrics, and those of the evaluations before and after."""
    seed_everything(args.seed)
    directory = Path(args.output_dir)
    require_model("actor_model_name_or_path", args.actor_model_name_or_path, args.attn_implementation)
    environment = load_environment(args.environment)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.actor_model_name_or_path, args.chat_template)
    games = Games(environment.make(tokenizer), tokenizer, args)
    prompts = RowStream(Examples(Dataset.from_list(rows_of(environment.records("train"))), LeftOut()), args.seed)
    held_out = rows_of(environment.records("test", size=args.eval_rows)) if args.eval_rows else []
    begin_run(args)
    total_steps = args.num_iterations * args.num_grpo_iterations * args.num_mini_batches
    actor = Actor.load(args, total_steps, needs_reference=args.beta > 0)

    best = BestModel.from_args(args)
    parts = {"prompts": prompts, "best": best, **actor.checkpoint_parts()}
    checkpoints = Checkpoints(directory / CHECKPOINTS, {"policy": actor.policy}, parts, args.keep_last)
    done = checkpoints.load_latest() if args.resume else 0
    options = args.eval_num_generations, args.eval_greedy, tuple(args.pass_at_k), args.pass_score
    evaluation = GameEvaluation(actor.policy, tokenizer, held_out, [], args, *options, games=games)
    before = evaluation.before_training(directory, resumed=done > 0)
    best.check(before["metrics"])
    log = start_log(args, "GRPO", BAR, args.num_iterations, done)
    if not done:
        evaluation.evaluate_and_log(log, 0, before)

    def iterate(iteration: int) -> Metrics:
        return agent_iteration(actor, games, prompts, iteration, args)

    metrics, last = train_iterations(iterate, actor, evaluation, checkpoints, best, log, done, args)
    after = evaluation.after_training(log, before, last)
    actor.export(tokenizer, directory)
    log.close()
    actor.destroy()
    return {**metrics, **after}


def agent_iteration(actor: Actor, games: "Games", prompts: RowStream, iteration: int, args: AgentArguments) -> Metrics:
    """One iteration: play groups of conversations of the next prompts, and update the policy; returns metrics.

    Expects the policy in eval mode and leaves it in train mode.
    """
    phases, policy, world_size = Phases(), actor.policy, dist.get_world_size()
    own = rank_share(prompts.next(args.per_device_generation_batch_size * world_size))
    params = sampling(args, sampling_seed(args.seed, iteration))
    with policy.inference():
        batch, episodes = games.play(policy, own, params, args.num_generations)
        phases.end("rollout")
        logps = window_logps(actor, batch, phases, args)
    logps = with_training_logps(policy, batch, *logps, phases, args)
    scores = scores_of(batch, episodes)
    phases.end("rewards")
    metrics = tool_metrics(episodes, len(scores))
    return metrics | learn(actor, batch, *logps, scores, ~scores.isnan(), iteration, phases, args)


@dataclass(frozen=True)
class Games:
    """Plays conversations of a policy with an environment."""

    environment: hybrid.MessageEnvironment
    tokenizer: PreTrainedTokenizerBase
    args: AgentArguments

    def play(
        self, policy: hybrid.HybridEngine, own: list[Row], params: hybrid.SamplingParams, num_generations: int
    ) -> tuple[hybrid.RolloutBatch, hybrid.Episodes]:
        """Conversations from this rank's prompts, padded to one width on all ranks, and the episodes that they were.
        Every rank takes part.

        own: every `world_size`-th row of all ranks' prompts.
        Raises ValueError if a conversation forked: its rows would be no group of `num_generations`.
        """
        episodes = self.environment.episodes([row["record"] for row in own], num_generations)
        if (end := hybrid.turn_end_token(self.tokenizer)) is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        args = self.args
        batch = policy.rollout(
            *episodes.prompts(policy.device),
            params,
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


def scores_of(batch: hybrid.RolloutBatch, episodes: hybrid.Episodes) -> torch.Tensor:
    """The rewards of a rollout's rows, float32 [rows]: 0 where a limit ended the conversation before there was one, NaN
    where the environment failed.
    """
    rewards = [
        nan if error else float(reward or 0.0) for error, reward in zip(batch.errors, episodes.rewards(), strict=True)
    ]
    return torch.tensor(rewards, device=batch.prompt_ids.device)


def tool_metrics(episodes: hybrid.Episodes, rows: int) -> Metrics:
    """Tool calls a conversation, and the share of them that failed, over all ranks, with TRL's names.

    rows: conversations of this rank.
    """
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


if __name__ == "__main__":
    main()
