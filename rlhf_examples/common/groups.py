"""GRPO's groups: completions of the next prompts, or, with DAPO's dynamic sampling, of as many prompts as it takes
until every group has differing rewards.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.ranks import own_share
from rlhf_examples.common.rollouts import Row, decode_completions, in_order, padded, roll_out, sampling, sampling_seed
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream


@dataclass(frozen=True)
class Groups:
    """Completions of prompts; the completions of a prompt are adjacent.

    prompts: a row for each completion.
    scores: by the names of `Rewards.by_name`, the training reward first, float32 [rows] each; empty before scoring.
    """

    prompts: list[Row]
    batch: hybrid.RolloutBatch
    scores: dict[str, Tensor]

    def take(self, rows: Tensor) -> "Groups":
        """A selection of the rows, by number or by a bool mask [rows]."""
        numbers = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        tensors = {name: value[numbers] for name, value in vars(self.batch).items() if isinstance(value, Tensor)}
        reasons = [self.batch.finish_reason[number] for number in numbers.tolist()]
        return Groups(
            [self.prompts[number] for number in numbers.tolist()],
            replace(self.batch, finish_reason=reasons, **tensors),
            {name: values[numbers] for name, values in self.scores.items()},
        )

    def joined(self, other: "Groups", pad_token_id: int) -> "Groups":
        """These rows followed by those of `other`."""
        widths = [max(getattr(one.batch, name).shape[1] for one in (self, other)) for name in WIDTHS]
        one, behind = (padded(of.batch, *widths, pad_token_id) for of in (self, other))
        tensors = {
            name: torch.cat([value, getattr(behind, name)]) for name, value in vars(one).items() if name in TENSORS
        }
        reasons = one.finish_reason + behind.finish_reason
        scores = {name: torch.cat([values, other.scores[name]]) for name, values in self.scores.items()}
        batch = replace(one, finish_reason=reasons, **tensors)
        return Groups(self.prompts + other.prompts, batch, scores)


def next_groups(
    policy: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Row],
    first: int,
    iteration: int,
    args: GRPOArguments,
) -> Groups:
    """This rank's completions of its share of all ranks' `prompts`, not yet scored.

    first: number of the first prompt within the iteration; the sampling keys depend on it and on the prompts' order.
    Every rank gets equally many rows; if the prompts do not divide evenly, the first prompt is repeated at the end.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    own = own_share([*prompts, *prompts[:1] * (-len(prompts) % world_size)])
    numbers = first + rank + world_size * torch.arange(len(own))
    params = sampling(args, sampling_seed(args.seed, iteration))
    batch = roll_out(policy, tokenizer, own, numbers, params, args.num_generations)
    return Groups([row for row in own for _ in range(args.num_generations)], batch, {})


def groups_with_spread(
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
    `max_num_gen_batches` rollouts; groups that are then still without a spread stay and are masked out of the loss.
    Every rank decides by the scores of all ranks, and the metrics count groups of all ranks.
    """
    each, wanted = args.num_generations, args.per_device_generation_batch_size * dist.get_world_size()
    kept, without, first, rounds, total, scored, timings = None, None, 0, 0, 0.0, 0, Counter()
    while kept is None or (len(kept.prompts) < wanted * each and rounds < args.max_num_gen_batches):
        drawn = prompts.next(wanted - (len(kept.prompts) // each if kept else 0))
        own = next_groups(policy, tokenizer, drawn, first, iteration, args)
        phases.end("rollout")
        timings.update(own.batch.timings)
        scores = rewards.by_name(own.batch, own.prompts, decode_completions(tokenizer, own.batch))
        phases.end("rewards")
        found = of_all_ranks(replace(own, scores=scores), drawn, each)
        learned = found.scores[rewards.name]
        spread = has_spread(learned, each).repeat_interleave(each)
        more, without = found.take(spread), found.take(~spread)
        kept = more if kept is None else kept.joined(more, tokenizer.pad_token_id)
        first, rounds = first + len(drawn), rounds + 1
        total, scored = total + learned.nansum().item(), scored + int((~learned.isnan()).sum())
    left = wanted - len(kept.prompts) // each
    own = own_groups(kept.joined(without, tokenizer.pad_token_id) if left else kept, each)
    rewards.last = own.scores  # so that `Rewards.metrics` covers the kept groups
    return replace(own, batch=replace(own.batch, timings=dict(timings))), {
        "dynamic_sampling/num_gen_batches": rounds,
        "dynamic_sampling/groups_sampled": first,
        "dynamic_sampling/groups_dropped": first - wanted,
        "dynamic_sampling/groups_without_spread": left,
        "dynamic_sampling/reward": total / max(scored, 1),  # mean over all sampled completions
    }


def has_spread(rewards: Tensor, num_generations: int) -> Tensor:
    """Whether at least two completions of each group were scored and have different scores.

    rewards float32 [rows], NaN where a completion could not be scored; returns bool [rows / num_generations].
    """
    groups = rewards.view(-1, num_generations)
    least, most = groups.nan_to_num(nan=torch.inf).amin(dim=1), groups.nan_to_num(nan=-torch.inf).amax(dim=1)
    return least < most


def of_all_ranks(own: Groups, prompts: list[Row], num_generations: int) -> Groups:
    """The groups of every rank, in the order of their prompts, without the repeated prompts at the end.  prompts: of
    all ranks.
    """
    rows = len(prompts) * num_generations
    ended = torch.tensor([reason == "stop" for reason in own.batch.finish_reason], device=own.batch.prompt_ids.device)
    tensors = {name: in_order(getattr(own.batch, name), num_generations)[:rows] for name in TENSORS}
    reasons = ["stop" if one else "length" for one in in_order(ended.byte(), num_generations)[:rows].tolist()]
    scores = {name: in_order(values, num_generations)[:rows] for name, values in own.scores.items()}
    of_each = [row for row in prompts for _ in range(num_generations)]
    return Groups(of_each, replace(own.batch, finish_reason=reasons, **tensors), scores)


def own_groups(groups: Groups, num_generations: int) -> Groups:
    """This rank's share of groups that all ranks hold, dealt out round-robin."""
    rows = torch.arange(len(groups.prompts)).view(-1, num_generations)
    return groups.take(rows[dist.get_rank() :: dist.get_world_size()].flatten())


WIDTHS = ("prompt_ids", "completion_ids")
TENSORS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "sampling_per_token_logps",
    "old_per_token_logps",
    "raw_per_token_logps",
)
