"""GRPO's groups by partial rollouts: more prompts than needed are in flight, a rollout stops once enough groups are
done, and the other completions go on in the next rollout, under its weights.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.groups import NO_TURNS, Groups, rewards_differ
from rlhf_examples.common.measures import Phases
from rlhf_examples.common.ranks import device, gather_objects, over_ranks, rank_share, sums_over_ranks
from rlhf_examples.common.rollout_log import log_rollout
from rlhf_examples.common.rollouts import (
    Row,
    decode_completions,
    pad_to_common_width,
    sampling,
    sampling_seed,
    with_turn_end,
)
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import RowStream, collate_prompts


@dataclass
class Group:
    """A prompt and its completions that are done.

    scores: of `Rewards.scores_by_name`, float32 [rows] each; empty until it is complete and scored.
    """

    prompt: Row
    parts: list[hybrid.RolloutBatch] = field(default_factory=list)
    scores: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(part.prompt_ids) for part in self.parts)


@dataclass
class PartialRollouts:
    """The groups that this rank has started and not yet learned from; saved in checkpoints.

    open: groups of which completions are missing, by number, the oldest first.  ready: complete ones, not yet used.
    unfinished: the missing completions, as far as they are.  numbers, samples: the group of each of them, and its
        number among the group's completions.
    restart: prompts whose completions another number of ranks had started; they start again.
    """

    open: dict[int, Group] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    unfinished: hybrid.UnfinishedRows | None = None
    numbers: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    restart: list[Row] = field(default_factory=list)
    num_started: int = 0
    timings: Counter = field(default_factory=Counter)
    weight_version: int = 0

    def next_groups(
        self,
        policy: hybrid.HybridEngine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        prompts: RowStream,
        iteration: int,
        phases: Phases,
        args: GRPOArguments,
    ) -> tuple[Groups, Metrics]:
        """This rank's groups of an iteration, scored, and metrics of all ranks. Every rank takes part.

        With `dynamic_sampling` a group whose scores are all equal is dropped, and the rollout goes on until another one
        is done: in the same call where reward functions can be asked while others decode, and in up to
        `max_num_gen_batches` calls; if that is not enough, dropped groups stay, masked out of the loss.
        """
        wanted, rounds, started = args.per_device_generation_batch_size, 0, 0
        kept: list[Group] = []
        dropped: list[Group] = []
        self.timings = Counter()
        while rounds == 0 or (rounds < args.max_num_gen_batches and self._any_rank_needs(wanted - len(kept))):
            missing = wanted - len(kept)
            useful = sum(not group.scores or differs(group, rewards) for group in self.ready)
            needed = max(missing - (useful if args.dynamic_sampling else len(self.ready)), 0)
            started += self._roll_out(policy, rewards, tokenizer, prompts, needed, iteration, started, args)
            phases.end("rollout")
            newly_kept, newly_dropped = self._take_ready(missing, rewards, tokenizer, args)
            kept, dropped = kept + newly_kept, dropped + newly_dropped
            phases.end("rewards")
            rounds += 1
        missing = wanted - len(kept)
        groups = self._joined(kept + dropped[len(dropped) - missing :], tokenizer.pad_token_id)
        rewards.last_scores = groups.scores
        metrics = self._metrics(groups.batch)
        if args.dynamic_sampling:
            metrics |= dynamic_sampling_metrics(kept + dropped, missing, rounds, rewards.name)
        return groups, metrics

    def _take_ready(
        self, count: int, rewards: Rewards, tokenizer: PreTrainedTokenizerBase, args: GRPOArguments
    ) -> tuple[list[Group], list[Group]]:
        """Take complete groups, the oldest first, until `count` are kept; returns those, and the dropped ones."""
        kept: list[Group] = []
        dropped: list[Group] = []
        while self.ready and len(kept) < count:
            candidates = self.ready[: count - len(kept)]
            self.ready = self.ready[len(candidates) :]
            score([group for group in candidates if not group.scores], rewards, tokenizer)
            for group in candidates:
                (kept if not args.dynamic_sampling or differs(group, rewards) else dropped).append(group)
        return kept, dropped

    def _any_rank_needs(self, groups: int) -> bool:
        return over_ranks(torch.tensor(groups, device=device()), dist.ReduceOp.MAX).item() > 0

    def _roll_out(
        self,
        policy: hybrid.HybridEngine,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        prompts: RowStream,
        needed: int,
        iteration: int,
        started: int,
        args: GRPOArguments,
    ) -> int:
        """Roll out until `needed` more groups are complete, with unequal scores if they can be asked for while others
        decode; returns how many prompts all ranks began.

        started: prompts that all ranks have started in this iteration; the sampling keys depend on it.
        """
        room = args.over_sampling_batch_size - len(self.open) - len(self.ready) if needed else 0
        rows, first, total = self._new_prompts(prompts, max(room, 0))
        numbers = [self.num_started + index for index in range(len(rows))]
        self.num_started += len(rows)
        self.open |= {number: Group(row) for number, row in zip(numbers, rows, strict=True)}
        resume = self.unfinished if needed else None
        ids = mask = torch.zeros(0, 1, dtype=torch.int64)
        if rows:
            ids, mask = collate_prompts(rows, tokenizer.pad_token_id).values()
        of_rows, samples = (self.numbers, self.samples) if resume is not None else ([], [])
        of_rows = of_rows + [n for n in numbers for _ in range(args.num_generations)]
        samples = samples + [*range(args.num_generations)] * len(numbers)
        accept_group = None
        if needed and scores_while_decoding(rewards, args):
            accept_group = partial(self._score_and_compare, of_rows, rewards, tokenizer)
        params = with_turn_end(sampling(args, sampling_seed(args.seed, iteration)), tokenizer)
        batch = policy.rollout(
            ids,
            mask,
            params,
            args.num_generations,
            row_ids=started + first + torch.arange(len(rows)),
            stop_after=hybrid.StopAfter(groups=max(needed, 1), accept_group=accept_group),
            resume=resume,
        )
        self.timings.update(batch.timings)
        self.weight_version = batch.weight_version
        if needed:
            of_all_ranks = [number * dist.get_world_size() + dist.get_rank() for number in of_rows]
            log_rollout(batch, list(zip(of_all_ranks, samples, strict=True)), params, iteration, args, resume)
            self._take(batch, of_rows, samples, args.num_generations)
        return total

    def _score_and_compare(
        self, numbers: list[int], rewards: Rewards, tokenizer: PreTrainedTokenizerBase, batch: hybrid.RolloutBatch
    ) -> bool:
        """Score a group whose last rows have just ended; returns whether its scores differ.

        numbers: the group of each row of the call.
        """
        assert batch.row_index is not None, "the batch of a rollout has it"
        group = self.open[numbers[int(batch.row_index[0])]]
        whole = Group(group.prompt, [*group.parts, batch])
        score([whole], rewards, tokenizer)
        group.scores = whole.scores
        return differs(whole, rewards)

    def _new_prompts(self, prompts: RowStream, count: int) -> tuple[list[Row], int, int]:
        """The next `count` prompts of this rank, the number of the first among those of all ranks, and their number."""
        again, self.restart = self.restart[:count], self.restart[count:]
        counts = gather_objects((count, count - len(again)))
        rank = dist.get_rank()
        from_stream = prompts.next(sum(new for _, new in counts))
        first = sum(new for _, new in counts[:rank])
        local = again + from_stream[first : first + counts[rank][1]]
        return local, sum(all_of_rank for all_of_rank, _ in counts[:rank]), sum(of_rank for of_rank, _ in counts)

    def _take(self, batch: hybrid.RolloutBatch, numbers: list[int], samples: list[int], num_generations: int) -> None:
        """Sort a rollout's rows into their groups.  numbers, samples: of each row of the call."""
        left = [] if batch.unfinished is None else batch.unfinished.row_index.tolist()
        self.unfinished, self.numbers = batch.unfinished, [numbers[row] for row in left]
        self.samples = [samples[row] for row in left]
        batch = replace(batch, unfinished=None, timings={}, sampling_keys=None, **NO_TURNS)
        assert batch.row_index is not None, "the batch of a rollout has it"
        of_group: dict[int, list[int]] = {}
        for index, row in enumerate(batch.row_index.tolist()):
            of_group.setdefault(numbers[row], []).append(index)
        for number, rows in of_group.items():
            self.open[number].parts.append(batch.select_rows(rows))
        for number in [number for number, group in self.open.items() if len(group) == num_generations]:
            self.ready.append(self.open.pop(number))

    def _joined(self, groups: list[Group], pad_token_id: int) -> Groups:
        """Scored groups as one batch, padded to one width on all ranks."""
        batch = hybrid.RolloutBatch.cat([part for group in groups for part in group.parts], pad_token_id)
        batch = replace(
            pad_to_common_width(batch, pad_token_id),
            row_index=torch.arange(len(batch.prompt_ids), device=batch.prompt_ids.device),
            weight_version=self.weight_version,
            timings=dict(self.timings),
        )
        scores = {name: torch.cat([group.scores[name] for group in groups]) for name in groups[0].scores}
        return Groups([group.prompt for group in groups for _ in range(len(group))], batch, scores)

    def _metrics(self, batch: hybrid.RolloutBatch) -> Metrics:
        """Metrics of all ranks, of a batch and of what is left."""
        learned = batch.completion_mask.bool()
        stale = learned & (batch.weight_versions != batch.weight_version)
        sums = sums_over_ranks({"tokens": learned.sum(), "stale": stale.sum(), "unfinished": len(self.numbers)})
        return {
            "partial_rollout/unfinished_rows": sums["unfinished"],
            "partial_rollout/stale_tokens": sums["stale"] / sums["tokens"],
        }

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, on the host."""
        return {
            "open": {number: plain(moved(group, torch.device("cpu"))) for number, group in self.open.items()},
            "ready": [plain(moved(group, torch.device("cpu"))) for group in self.ready],
            "unfinished": None if self.unfinished is None else {k: v.cpu() for k, v in vars(self.unfinished).items()},
            "numbers": self.numbers,
            "samples": self.samples,
            "restart": self.restart,
            "begun": self.num_started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        unfinished = state["unfinished"]
        self.open = {number: moved(from_plain(group), device()) for number, group in state["open"].items()}
        self.ready = [moved(from_plain(group), device()) for group in state["ready"]]
        self.unfinished = None if unfinished is None else hybrid.UnfinishedRows(**unfinished)
        self.numbers, self.restart, self.num_started = list(state["numbers"]), list(state["restart"]), state["begun"]
        self.samples = list(state.get("samples", [0] * len(self.numbers)))  # older checkpoints lack them

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of another number of ranks: the prompts of their groups begin again, with new completions
        by the present weights.
        """
        prompts = [
            row
            for state in states
            for row in [group["prompt"] for group in [*state["ready"], *state["open"].values()]] + state["restart"]
        ]
        self.open, self.ready, self.unfinished, self.numbers, self.samples = {}, [], None, [], []
        self.restart, self.num_started = rank_share(prompts), 0


def score(groups: list[Group], rewards: Rewards, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the scores of complete groups."""
    if not groups:
        return
    batch = hybrid.RolloutBatch.cat([part for group in groups for part in group.parts], tokenizer.pad_token_id)
    prompts = [group.prompt for group in groups for _ in range(len(group))]
    scores = rewards.scores_by_name(batch, prompts, decode_completions(tokenizer, batch))
    for number, group in enumerate(groups):
        rows = slice(number * len(group), (number + 1) * len(group))
        group.scores = {name: values[rows] for name, values in scores.items()}


def scores_while_decoding(rewards: Rewards, args: GRPOArguments) -> bool:
    """Whether dynamic sampling asks for a group's scores while others decode: reward functions only, as reward models
    and the ranks of tensor parallelism have collectives of their own.
    """
    return args.dynamic_sampling and not rewards.has_models and args.inference_tp_size == 1


def differs(group: Group, rewards: Rewards) -> bool:
    """Whether a scored group's scores differ."""
    return bool(rewards_differ(group.scores[rewards.name], len(group)).item())


def dynamic_sampling_metrics(scored: list[Group], missing: int, rounds: int, name: str) -> Metrics:
    """Metrics of dynamic sampling, over all ranks.

    scored: all scored groups.  missing: how many of the iteration's groups have equal scores.  name: of the reward.
    """
    scores = torch.cat([group.scores[name] for group in scored])
    sums = sums_over_ranks(
        {
            "groups": len(scored),
            "missing": missing,
            "scored": (~scores.isnan()).sum(),
            "scores": scores.nansum(),
            "dropped": sum(not rewards_differ(group.scores[name], len(group)).item() for group in scored) - missing,
        }
    )
    return {
        "dynamic_sampling/num_gen_batches": rounds,
        "dynamic_sampling/groups_sampled": sums["groups"],
        "dynamic_sampling/groups_dropped": sums["dropped"],
        "dynamic_sampling/groups_without_spread": sums["missing"],
        "dynamic_sampling/reward": sums["scores"] / max(sums["scored"], 1),
    }


def plain(group: Group) -> dict[str, Any]:
    """A group as tensors and plain values."""
    parts = [{name: value for name, value in vars(part).items() if name != "unfinished"} for part in group.parts]
    return {"prompt": group.prompt, "parts": parts, "scores": group.scores}


def from_plain(state: dict[str, Any]) -> Group:
    """The inverse of `plain`."""
    return Group(**{**state, "parts": [hybrid.RolloutBatch(**part) for part in state["parts"]]})


def moved(group: Group, to: torch.device) -> Group:
    """A group whose completions and scores are on a device."""
    parts = []
    for part in group.parts:
        tensors = part.tensors().items()
        on_device: dict[str, Any] = {name: value.to(to) for name, value in tensors if name != "router_indices"}
        parts.append(replace(part, **on_device))
    return replace(group, parts=parts, scores={name: values.to(to) for name, values in group.scores.items()})
