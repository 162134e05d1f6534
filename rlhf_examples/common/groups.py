"""GRPO's groups: completions of the next prompts, or, with DAPO's dynamic sampling, of as many prompts as it takes
until every group has differing rewards.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import DistillArguments, GRPOArguments
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.overlapped_rewards import OverlappedRewards
from rlhf_examples.common.ranks import rank_share
from rlhf_examples.common.rollout_log import log_rollout, numbered
from rlhf_examples.common.rollouts import (
    Row,
    gather_rows,
    roll_out,
    sampling,
    sampling_seed,
    with_turn_end,
)
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream


@dataclass(frozen=True)
class Groups:
    """Completions of prompts; the completions of a prompt are adjacent.

    prompts: a row for each completion.
    scores: by the names of `Rewards.by_name`, the training reward first, float32 [rows] each; empty before scoring.
    overlapped: what scores them, perhaps since before the rollout's end.
    """

    prompts: list[Row]
    batch: hybrid.RolloutBatch
    scores: dict[str, Tensor]
    overlapped: OverlappedRewards | None = None

    def take(self, rows: Tensor) -> "Groups":
        """A selection of the rows, by number or by a bool mask [rows]."""
        indices = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return Groups(
            [self.prompts[index] for index in indices.tolist()],
            self.batch.select_rows(indices.tolist()),
            {name: values[indices] for name, values in self.scores.items()},
        )

    def concatenate(self, other: "Groups", pad_token_id: int) -> "Groups":
        """These rows followed by those of `other`."""
        scores = {name: torch.cat([values, other.scores[name]]) for name, values in self.scores.items()}
        batch = hybrid.RolloutBatch.cat([self.batch, other.batch], pad_token_id)
        return Groups(self.prompts + other.prompts, batch, scores)


def next_groups(
    policy: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Row],
    first_prompt: int,
    iteration: int,
    args: GRPOArguments | DistillArguments,
    rewards: Rewards | None = None,
) -> Groups:
    """This rank's completions of its share of all ranks' `prompts`, not yet scored.

    first_prompt: number of the first prompt within the iteration; the sampling keys depend on it and on the order.
    rewards: score the completions, as `Groups.overlapped`, which begins while they decode with `overlap_rewards`.
    Every rank gets equally many rows; if the prompts do not divide evenly, the first prompt is repeated at the end.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local = rank_share([*prompts, *prompts[:1] * (-len(prompts) % world_size)])
    row_ids = first_prompt + rank + world_size * torch.arange(len(local))
    params = with_turn_end(sampling(args, sampling_seed(args.seed, iteration)), tokenizer)
    each = [row for row in local for _ in range(args.num_generations)]
    overlapped = None
    if rewards is not None:
        overlapped = OverlappedRewards(rewards, tokenizer, each, args.num_generations, args.overlap_rewards)
    on_rows = None if overlapped is None else overlapped.on_rows
    batch = roll_out(policy, tokenizer, local, row_ids, params, args.num_generations, on_rows)
    numbers = numbered(row_ids[row_ids < first_prompt + len(prompts)], args.num_generations)  # without the repeated one
    log_rollout(batch.first_rows(len(numbers)), numbers, params, iteration, args)
    return Groups(each, batch, {}, overlapped)


def dynamic_sampling_groups(
    policy: hybrid.HybridEngine,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    prompts: RowStream,
    iteration: int,
    phases: Phases,
    args: GRPOArguments,
) -> tuple[Groups, Metrics]:
    """This rank's share of an iteration's groups by dynamic sampling (DAPO, arXiv:2503.14476, section 3.2), scored.

    A group whose scored completions all have equal scores is dropped, and the next prompt takes its place, in up to
    `max_num_gen_batches` rollouts; if that is not enough, groups with equal scores stay, masked out of the loss.
    Every rank decides by the scores of all ranks, and the metrics count groups of all ranks.
    """
    num_generations, num_prompts = args.num_generations, args.per_device_generation_batch_size * dist.get_world_size()
    kept: Groups | None = None
    rounds, num_sampled, num_scored, score_sum = 0, 0, 0, 0.0
    timings: Counter[str] = Counter()
    times: Counter[str] = Counter()
    missing = num_prompts
    while kept is None or (missing > 0 and rounds < args.max_num_gen_batches):
        next_prompts = prompts.next(missing)
        local = next_groups(policy, tokenizer, next_prompts, num_sampled, iteration, args, rewards)
        phases.end("rollout")
        timings.update(local.batch.timings)
        assert local.overlapped is not None, "groups are scored as they are sampled"
        scores = local.overlapped.scores_by_name(local.batch)
        times.update(local.overlapped.metrics())
        phases.end("rewards")
        groups = gather_groups(replace(local, scores=scores), next_prompts, num_generations)
        learned_scores = groups.scores[rewards.name]
        differ = rewards_differ(learned_scores, num_generations).repeat_interleave(num_generations)
        newly_kept, dropped = groups.take(differ), groups.take(~differ)
        kept = newly_kept if kept is None else kept.concatenate(newly_kept, tokenizer.pad_token_id)
        missing = num_prompts - len(kept.prompts) // num_generations
        rounds, num_sampled = rounds + 1, num_sampled + len(next_prompts)
        score_sum += learned_scores.nansum().item()
        num_scored += int((~learned_scores.isnan()).sum())
    local = groups_of_rank(kept.concatenate(dropped, tokenizer.pad_token_id) if missing else kept, num_generations)
    rewards.last_scores = local.scores  # so that `Rewards.metrics` covers the kept groups
    return replace(local, batch=replace(local.batch, timings=dict(timings))), {
        "dynamic_sampling/num_gen_batches": rounds,
        "dynamic_sampling/groups_sampled": num_sampled,
        "dynamic_sampling/groups_dropped": num_sampled - num_prompts,
        "dynamic_sampling/groups_without_spread": missing,
        "dynamic_sampling/reward": score_sum / max(num_scored, 1),  # mean over all sampled completions
        **times,
    }


def rewards_differ(rewards: Tensor, num_generations: int) -> Tensor:
    """Whether at least two completions of each group were scored and have different scores.

    rewards float32 [rows], NaN where a completion could not be scored; returns bool [rows / num_generations].
    """
    groups = rewards.view(-1, num_generations)
    lowest, highest = groups.nan_to_num(nan=torch.inf).amin(dim=1), groups.nan_to_num(nan=-torch.inf).amax(dim=1)
    return lowest < highest


def gather_groups(local: Groups, prompts: list[Row], num_generations: int) -> Groups:
    """The groups of every rank, in the order of their prompts, without the repeated prompts at the end.  prompts: of
    all ranks.
    """
    rows = len(prompts) * num_generations
    ended = torch.tensor(
        [reason == "stop" for reason in local.batch.finish_reason], device=local.batch.prompt_ids.device
    )
    local_tensors = local.batch.tensors().items()
    tensors: dict[str, Any] = {name: gather_rows(value, num_generations)[:rows] for name, value in local_tensors}
    reasons = [
        "stop" if stopped else "length" for stopped in gather_rows(ended.byte(), num_generations)[:rows].tolist()
    ]
    scores = {name: gather_rows(values, num_generations)[:rows] for name, values in local.scores.items()}
    of_each = [row for row in prompts for _ in range(num_generations)]
    return Groups(of_each, replace(local.batch, finish_reason=reasons, **tensors, **NO_TURNS), scores)


def groups_of_rank(groups: Groups, num_generations: int) -> Groups:
    """This rank's share of groups that all ranks hold, dealt out round-robin."""
    rows = torch.arange(len(groups.prompts)).view(-1, num_generations)
    return groups.take(rows[dist.get_rank() :: dist.get_world_size()].flatten())


# What a batch has of its rows' environments: nothing, in groups that ranks exchange.
NO_TURNS: dict[str, Any] = {"turn_rewards": [], "turn_seconds": [], "errors": []}
