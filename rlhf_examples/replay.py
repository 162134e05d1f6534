"""Makes completions of a run again, from the checkpoint of their weights, and compares them with the log.

hybrid replay runs/sums --step 3 --row 5 --sample 2
torchrun --nproc_per_node=8 -m rlhf_examples.replay runs/large --step 100

The run needs --log_rollouts true, and a checkpoint after iteration S - 1 (--save_every, --keep_last); step 1 starts
from the initial model. Tools' answers are the log's. Exits with 1 if a token or a logprob differs by a bit.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from rlhf_examples.common.input_errors import input_errors_reported
from rlhf_examples.common.parsing import Parser


def main() -> int:
    """Replay what the command line says on the launcher's ranks; returns the exit status."""
    with input_errors_reported():
        args = read_command_line()
        # after the flags: torch, transformers and DeepSpeed take seconds
        replay: Any = importlib.import_module("rlhf_examples.replay")
        ranks: Any = importlib.import_module("rlhf_examples.common.ranks")
        selected = replay.select(args.run, args.step, args.row, args.sample)
        ranks.start_ranks()
        replayed = replay.replayed(args.run, selected)
    if ranks.is_main_process():
        replay.report(args.run, replayed)
    ranks.end_ranks()
    return int(not all(completion.is_equal for completion in replayed))


def read_command_line() -> argparse.Namespace:
    """The run's directory and the completions' coordinates. Raises ValueError for an unknown flag."""
    name = Path(sys.argv[0]).name
    prog = name if name.startswith("hybrid") else "python -m rlhf_examples.replay"
    parser = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="the iteration, from 1")
    parser.add_argument("--row", type=int, metavar="R", help="the prompt's number in the iteration; default: all")
    parser.add_argument("--sample", type=int, metavar="K", help="the prompt's completion, from 0; default: all")
    return parser.parse_args([text for text in sys.argv[1:] if not text.startswith("--local_rank=")])


if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
from dataclasses import dataclass, fields, replace

import torch
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import RolloutArguments
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.files import CHECKPOINTS, SETTINGS, printable
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.ranks import gather_objects, interleaved, rank_share, seed_everything
from rlhf_examples.common.rollout_log import LoggedCompletion, ranges, read_rollouts, rollout_files
from rlhf_examples.data.examples import pad


@dataclass(frozen=True)
class Replayed:
    """A completion that was sampled again.  token_ids, logps: of its turns, one after the other."""

    logged: LoggedCompletion
    token_ids: list[int]
    logps: list[float]

    @property
    def is_equal(self) -> bool:
        """Whether tokens and logprobs are equal to the log, to the bit."""
        return self.token_ids == self.logged.token_ids() and self.logps == self.logged.logps

    def difference(self) -> str:
        """The first difference to the log, as text; empty without one."""
        old, new = self.logged.token_ids(), self.token_ids
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))
            again = new[at] if at < len(new) else "missing"
            return f"token {at} of the turns is {again}, and {old[at]} in the log"
        largest = max((abs(a - b) for a, b in zip(self.logps, self.logged.logps, strict=True)), default=0.0)
        return f"the tokens are equal, and a logprob differs by {largest:.3g}" if largest else ""


def select(run: Path, step: int, row: int | None = None, sample: int | None = None) -> list[LoggedCompletion]:
    """The logged completions of a step; of one row or one sample if given.

    Raises ValueError if the log does not have them, or if their weights are not there any more.
    """
    if not (run / SETTINGS).is_file():
        raise ValueError(f"RUN: {str(run)!r} given; it has no {SETTINGS}: give the directory of a run")
    completions = read_rollouts(run, step)
    for name, value in (("row", row), ("sample", sample)):
        present = sorted({getattr(each, name) for each in completions})
        if value is not None and value not in present:
            raise ValueError(f"{name}: {value} given; step {step} has {ranges(present)}")
        completions = [each for each in completions if value in (None, getattr(each, name))]
    require_weights(run, step)
    return completions


def require_weights(run: Path, step: int) -> None:
    """Raise ValueError if no checkpoint has the weights of a step, with the steps that can be replayed."""
    whole = {0, *Checkpoints(run / CHECKPOINTS, {}, {}, keep_last=1).whole_iterations()}
    if step - 1 not in whole:
        logged = sorted({number for number, _ in rollout_files(run) if number - 1 in whole})
        raise ValueError(
            f"step: {step} given; its weights are those after iteration {step - 1}, of which there is no whole "
            f"checkpoint in {str(run / CHECKPOINTS)!r}; steps that can be replayed: {ranges(logged) or 'none'}"
        )


def settings_of(run: Path) -> RolloutArguments:
    """The settings of a run, as far as rollouts follow them."""
    saved, names = json.loads((run / SETTINGS).read_text()), {field.name for field in fields(RolloutArguments)}
    args = RolloutArguments(**{name: value for name, value in saved.items() if name in names})
    return replace(args, enable_ema=False)


def replayed(run: Path, completions: list[LoggedCompletion]) -> list[Replayed]:
    """Sample completions of one step again, each rank its share. Every rank takes part, and gets all of them.

    The engine is built as the run's script builds it: with its dtype, ZeRO stage, adapters and rollout settings.
    """
    args, weights = settings_of(run), completions[0].weights
    params = hybrid.SamplingParams(**completions[0].sampling)  # those of the step
    seed_everything(args.seed)
    actor = Actor.load(args, total_steps=1, needs_reference=False)
    if weights:
        Checkpoints(run / CHECKPOINTS, {"policy": actor.policy}, {}, keep_last=1).load(weights)
    actor.policy.eval()
    with actor.policy.inference():
        local = sampled_again(actor.policy, rank_share(completions), params)
    actor.destroy()
    return interleaved(gather_objects(local))


def sampled_again(
    policy: hybrid.HybridEngine, completions: list[LoggedCompletion], params: hybrid.SamplingParams
) -> list[Replayed]:
    """This rank's completions, sampled again by the weights in an engine. Every rank takes part.

    A row for each turn: it goes on from the log's tokens before the turn, tools' answers included, to the turn's end.
    If every turn is equal, so is a conversation that goes on from its own turns.
    """
    turns = [(completion, begin, end) for completion in completions for begin, end in completion.turns]
    batch = policy.rollout(None, None, params, resume=before_turns(turns))
    lengths = batch.completion_mask.sum(dim=1).tolist()
    columns = batch.completion_ids.tolist(), batch.sampling_per_token_logps.tolist(), lengths
    rows, again = zip(*columns, strict=True), []
    for completion in completions:
        token_ids, logps = [], []
        for begin, _ in completion.turns:
            ids_of_row, logps_of_row, length = next(rows)
            token_ids += ids_of_row[begin:length]
            logps += logps_of_row[begin:length]
        again.append(Replayed(completion, token_ids, logps))
    return again


def before_turns(turns: list[tuple[LoggedCompletion, int, int]]) -> hybrid.UnfinishedRows:
    """Rows that are stopped before turns. A turn: its completion, where it begins, and where it ends."""
    prompts = [completion.prompt_ids for completion, _, _ in turns]
    before = [completion.completion_ids[:begin] for completion, begin, _ in turns]
    prompt_ids, prompt_mask = pad(prompts, 0, left=True)
    completion_ids, completion_mask = pad(before, 0, left=False)
    rows = torch.arange(len(turns))
    return hybrid.UnfinishedRows(
        prompt_ids,
        prompt_mask,
        completion_ids,
        completion_mask,
        logps=torch.zeros(3, *completion_ids.shape),
        weight_versions=torch.zeros_like(completion_ids),
        sampling_keys=torch.tensor([completion.sampling_key for completion, _, _ in turns], dtype=torch.int64),
        limits=torch.tensor([end for _, _, end in turns], dtype=torch.int64),
        groups=rows,
        row_index=rows,
    )


def report(run: Path, completions: list[Replayed]) -> None:
    """Print the text, tokens and logprobs of a completion, or a line for each that differs, and how many are equal."""
    if len(completions) == 1:
        show(completions[0], tokenizer_of(settings_of(run), "actor_model_name_or_path"))
    for completion in completions:
        if problem := completion.difference():
            print(f"row {completion.logged.row}, sample {completion.logged.sample}: {problem}")
    equal = sum(completion.is_equal for completion in completions)
    print(f"{equal} of {len(completions)} completions equal the log to the bit")


def show(completion: Replayed, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a completion with its coordinate."""
    logged = completion.logged
    turns = ", ".join(f"{begin} to {end}" for begin, end in logged.turns)
    print(f"step {logged.iteration}, row {logged.row}, sample {logged.sample}, ended by {logged.finish_reason!r}")
    print(f"weights: after {logged.weights} iterations; sampling key: {logged.sampling_key}; turns: tokens {turns}")
    for title, ids in (("prompt", logged.prompt_ids), ("completion", logged.completion_ids)):
        print(f"{title}: {printable(tokenizer.decode(ids))}")
    print(f"tokens: {completion.token_ids}")
    print(f"logprobs: {completion.logps}")
