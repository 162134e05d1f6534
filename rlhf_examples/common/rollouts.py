"""The experience of an iteration: completions of all ranks, their per-token data, and the rows of each optimizer step.

The order of rows, and which of them an optimizer step learns from, depends on seed and iteration only, not on the
number of ranks: every rank holds the experience of all ranks, and takes its share of each step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import repeat
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import GenerationArguments, RolloutArguments
from rlhf_examples.common.batches import balanced_batches, grouped_batches
from rlhf_examples.common.forwards import token_logps
from rlhf_examples.common.policy_losses import importance_sampling_weights, loss_denominator
from rlhf_examples.common.ranks import over_ranks
from rlhf_examples.common.trackers import LOGP_DIFFERENCE_EDGES, Histogram, Metrics
from rlhf_examples.data.examples import collate_prompts

Row = dict[str, Any]  # a row of `data.examples.Examples`
MIN_SHARED = 16  # tokens of the shortest prompt that `HybridEngine.logps` computes once


@dataclass(frozen=True)
class Experience:
    """Rows of completions.

    sequences, attention_mask [rows, prompt + completion]; the others [rows, completion], except those of GRPO's
    advantages that are one a row, [rows].
    mask: the learned tokens.  sampling_logps: the sampler's, of the policy at the sampling temperature.
    weights: factors of the tokens' policy loss.
    sampling_mask: which tokens the policy's logprobs are over, as in RolloutBatch; None: over all.
    A field whose metadata have "uncropped" keeps its columns in `take`.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    sampling_logps: torch.Tensor
    old_logps: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    ref_logps: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None

    def select(self, rows: torch.Tensor) -> Self:
        """A selection of the rows."""
        return type(self)(**{name: tensor[rows] for name, tensor in vars(self).items() if tensor is not None})

    def take(self, rows: torch.Tensor) -> Self:
        """A selection of the rows, cropped to the columns in use; at least one completion column stays."""
        tensors = {name: tensor for name, tensor in vars(self.select(rows)).items() if tensor is not None}
        used = tensors["attention_mask"].any(dim=0).nonzero()[[0, -1], 0].tolist()
        width, total = self.mask.shape[1], self.attention_mask.shape[1]
        first, last = min(used[0], total - width - 1), max(used[1] + 1, total - width + 1)
        sequence_tensors = {name: tensors.pop(name)[:, first:last] for name in ("sequences", "attention_mask")}
        columns = slice(0, last - (total - width))
        uncropped = {item.name for item in fields(self) if item.metadata.get("uncropped")}
        completion_tensors = {
            name: tensor if tensor.dim() == 1 or name in uncropped else tensor[:, columns]
            for name, tensor in tensors.items()
        }
        return type(self)(**sequence_tensors, **completion_tensors)

    def all_gather(self, num_generations: int = 1) -> Self:
        """The rows of every rank, ordered by their prompts' numbers. All ranks must have equal shapes."""
        tensors = {name: local for name, local in vars(self).items() if local is not None}
        return type(self)(**{name: gather_rows(local, num_generations) for name, local in tensors.items()})


AnyExperience = TypeVar("AnyExperience", bound=Experience)


@dataclass(frozen=True)
class OptimizerStep:
    """The rows of all ranks that a step learns from, and this rank's micro batches, equally many on every rank.

    micro_batch_rows: this rank's micro batches as indices into `rows`; the last ones may be empty.
    min_rows: the smallest first micro batch of any rank.
    ranks: ranks with micro batches of their own.
    """

    rows: torch.Tensor
    micro_batch_rows: list[list[int]]
    min_rows: int
    ranks: int

    def micro_batches(self, experience: AnyExperience) -> Iterator[AnyExperience]:
        """The rows of each micro batch. An empty one gets one fully masked row: under ZeRO every rank must run
        equally many forwards and backwards.
        """
        for indices in self.micro_batch_rows:
            micro_batch = experience.take(self.rows[indices or [0]])
            yield micro_batch if indices else replace(micro_batch, mask=torch.zeros_like(micro_batch.mask))

    def denominator(self, tokens: int, sequences: int = 0, loss_type: str = "dapo", max_length: int = 0) -> float:
        """The denominator of a micro batch's loss: see `loss_denominator`.  tokens, sequences: of all ranks."""
        return loss_denominator(
            loss_type,
            sequences=sequences,
            tokens=tokens,
            max_completion_length=max_length,
            micro_batches=self.ranks * len(self.micro_batch_rows),
        )


def rank_row_ids(count: int) -> torch.Tensor:
    """The numbers of this rank's `count` prompts among those of all ranks, round-robin.  int64 [count]"""
    return torch.arange(count) * dist.get_world_size() + dist.get_rank()


def gather_rows(local: torch.Tensor, num_generations: int) -> torch.Tensor:
    """The rows of every rank, ordered by their prompts' numbers.  local [prompts · generations, ...], equal on all
    ranks.
    """
    gathered = local.new_empty(dist.get_world_size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous())
    by_rank = gathered.view(dist.get_world_size(), -1, num_generations, *local.shape[1:])
    return by_rank.transpose(0, 1).reshape(gathered.shape)


def sampling(args: RolloutArguments | GenerationArguments, seed: int) -> hybrid.SamplingParams:
    """The sampling parameters of a run."""
    return hybrid.SamplingParams(
        max_new_tokens=args.max_answer_seq_len,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=seed,
        stop_token_ids=tuple(args.stop_token_ids),
    )


def sampling_seed(seed: int, draw: int) -> int:
    """The seed of a run's draw: 1, 2, … for its iterations, 0 for its evaluations. Seeds of different runs differ
    below a million draws.
    """
    return seed * 1_000_003 + draw


def roll_out(
    policy: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Row],
    row_ids: torch.Tensor,
    params: hybrid.SamplingParams,
    num_generations: int = 1,
    on_rows: Callable[[hybrid.RolloutBatch], None] | None = None,
) -> hybrid.RolloutBatch:
    """Completions of this rank's prompts, padded to one width on all ranks. Every rank takes part.

    They also stop at the token that ends a turn in the tokenizer's chat template.
    prompts: with `prompt_ids`, and for prompts with images `model_inputs`, what a processor returns besides them.
    row_ids int64 [prompts]: the prompts' numbers among all ranks', from which the sampling keys are made.
    on_rows: called with completions that are done while others decode, as `HybridEngine.rollout` calls it.
    """
    ids, mask = (tensor.to(policy.device) for tensor in collate_prompts(prompts, tokenizer.pad_token_id).values())
    params = with_turn_end(params, tokenizer)
    images = [row["model_inputs"] for row in prompts if "model_inputs" in row]
    batch = policy.rollout(ids, mask, params, num_generations, row_ids=row_ids, on_rows=on_rows, model_inputs=images)
    return pad_to_common_width(batch, tokenizer.pad_token_id)


def with_turn_end(params: hybrid.SamplingParams, tokenizer: PreTrainedTokenizerBase) -> hybrid.SamplingParams:
    """The parameters with the token that ends a turn in the tokenizer's chat template as an end token."""
    end = hybrid.turn_end_token(tokenizer)
    if end is None or end in params.stop_token_ids:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, end))


def pad_to_common_width(batch: hybrid.RolloutBatch, pad_token_id: int) -> hybrid.RolloutBatch:
    """`batch` with prompts padded on the left and completions on the right to the greatest widths of any rank."""
    widths = torch.tensor([batch.prompt_ids.shape[1], batch.completion_ids.shape[1]], device=batch.prompt_ids.device)
    prompt_len, completion_len = over_ranks(widths, dist.ReduceOp.MAX).tolist()
    return batch.padded(prompt_len, completion_len, pad_token_id)


def decode_completions(tokenizer: PreTrainedTokenizerBase, batch: hybrid.RolloutBatch) -> list[str]:
    """The completions as texts, without special tokens."""
    lengths = batch.completion_mask.sum(dim=1).tolist()
    rows = [ids[:length] for ids, length in zip(batch.completion_ids, lengths, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def optimizer_steps(
    experience: Experience, passes: int, iteration: int, args: RolloutArguments, sequence_parallel_size: int = 1
) -> list[OptimizerStep]:
    """Every optimizer step of an update: `num_mini_batches` for each pass. A step's rows depend on seed and iteration
    only, and the steps of a pass differ by at most one row. Rows with equal prompts come in one step, or in two
    adjacent ones.

    Micro batches have about equally many tokens with `max_tokens_per_batch`, else about equally many rows; rows with
    equal prompts come in one where that does not make it larger than the others.
    sequence_parallel_size: consecutive ranks with the same micro batches.
    Raises ValueError if there are fewer rows than steps, or if a row is longer than `max_tokens_per_batch`.
    """
    ranks, rank = dist.get_world_size() // sequence_parallel_size, dist.get_rank() // sequence_parallel_size
    rows_of_all = RowSizes.of(experience, args)
    count = len(rows_of_all.groups)
    if count < args.num_mini_batches:
        raise ValueError(
            f"num_mini_batches: {args.num_mini_batches} given; an iteration has {count} completions, and an "
            "optimizer step needs one"
        )
    steps = []
    for pass_number in range(passes):
        generator = torch.Generator().manual_seed(sampling_seed(args.seed, iteration) * 1009 + pass_number)
        order = torch.randperm(count, generator=generator).tolist()
        first = {rows_of_all.groups[row]: place for place, row in reversed(list(enumerate(order)))}
        order.sort(key=lambda row: first[rows_of_all.groups[row]])
        for rows in torch.tensor(order).tensor_split(args.num_mini_batches):
            batches = micro_batches(rows_of_all.take(rows.tolist()), ranks, args)
            steps.append(OptimizerStep(rows, batches[rank::ranks], min(map(len, batches[:ranks])), ranks))
    return steps


@dataclass(frozen=True)
class RowSizes:
    """Sizes of rows, from which the tokens of a training forward follow.

    groups: a number for each row, equal where the forward computes the rows' prompt once.  prompts, completions: tokens
        of each row.
    """

    groups: list[int]
    prompts: list[int]
    completions: list[int]

    @classmethod
    def of(cls, experience: Experience, args: RolloutArguments) -> "RowSizes":
        """The sizes of an experience's rows."""
        columns = experience.attention_mask.shape[1] - experience.mask.shape[1]  # of prompts
        mask = experience.attention_mask[:, :columns]
        prompts, completions = mask.sum(dim=1), experience.attention_mask[:, columns:].sum(dim=1)
        _, groups = torch.cat([mask, experience.sequences[:, :columns] * mask], dim=1).unique(
            dim=0, return_inverse=True
        )
        alone = torch.arange(len(groups), device=groups.device) + len(groups)
        shared = (prompts >= MIN_SHARED) & (args.training_forward != "model")
        return cls(torch.where(shared, groups, alone).tolist(), prompts.tolist(), completions.tolist())

    def take(self, rows: list[int]) -> "RowSizes":
        """The sizes of a selection of the rows."""
        return RowSizes(*([sizes[row] for row in rows] for sizes in vars(self).values()))

    def tokens(self, rows: list[int]) -> int:
        """The tokens of a batch of rows, each shared prompt once."""
        prompts = {self.groups[row]: self.prompts[row] for row in rows}
        return sum(prompts.values()) + sum(self.completions[row] for row in rows)


def micro_batches(rows: RowSizes, ranks: int, args: RolloutArguments) -> list[list[int]]:
    """The rows of an optimizer step in batches, equally many for each rank; the last ones may be empty.

    Raises ValueError if a row is longer than `max_tokens_per_batch`.
    """
    count, budget = len(rows.groups), args.max_tokens_per_batch
    if not budget:
        per_rank = -(-count // (ranks * args.per_device_training_batch_size))
        return split_rows(RowSizes(rows.groups, [0] * count, [1] * count), ranks * per_rank)
    longest = max(rows.tokens([row]) for row in range(count))
    if longest > budget:
        raise ValueError(f"max_tokens_per_batch: {budget} given; a sequence has {longest} tokens")
    per_rank = 1
    while True:  # ends at the latest with one row per batch
        batches = split_rows(rows, ranks * per_rank)
        if max(map(rows.tokens, batches)) <= budget:
            return batches
        per_rank += 1


def split_rows(rows: RowSizes, num_batches: int) -> list[list[int]]:
    """Batches of about equal size, of which the last ones may be empty; rows of a group are kept together."""
    lengths = list(map(sum, zip(rows.prompts, rows.completions, strict=True)))
    if len(set(rows.groups)) < len(lengths):
        batches = grouped_batches(rows.groups, rows.prompts, rows.completions, num_batches)
    else:
        batches = balanced_batches(lengths, min(num_batches, len(lengths)))
    return batches + [[]] * (num_batches - len(batches))


def forward_batch_size(args: RolloutArguments, width: int) -> int:
    """Rows of a forward without gradients at `width` tokens: as many as `max_tokens_per_batch` allows."""
    return (
        max(args.max_tokens_per_batch // width, 1) if args.max_tokens_per_batch else args.per_device_training_batch_size
    )


def completion_metrics(batch: hybrid.RolloutBatch) -> Metrics:
    """Metrics of the lengths of all ranks' completions, with TRL's names."""
    lengths = batch.completion_mask.sum(dim=1).double()
    truncated = torch.tensor([reason == "length" for reason in batch.finish_reason], device=lengths.device)
    rows, total, num_truncated = over_ranks(
        torch.stack([torch.ones_like(lengths).sum(), lengths.sum(), truncated.double().sum()])
    ).tolist()
    shortest, longest = over_ranks(torch.stack([-lengths.min(), lengths.max()]), dist.ReduceOp.MAX).tolist()
    return {
        "completions/mean_length": total / rows,
        "completions/min_length": -shortest,
        "completions/max_length": longest,
        "completions/clipped_ratio": num_truncated / rows,
    }


def sampled_logps(batch: hybrid.RolloutBatch, args: RolloutArguments) -> torch.Tensor:
    """The sampler's logprobs of what training computes: of the kept tokens with `keep_sampling_mask`, else of the
    whole vocabulary.  float32 [rows, completion]
    """
    return batch.sampling_per_token_logps if args.keep_sampling_mask else batch.old_per_token_logps


def kept_mask(batch: hybrid.RolloutBatch, args: RolloutArguments) -> torch.Tensor | None:
    """The batch's sampling mask with `keep_sampling_mask`, else None. Raises ValueError if the batch has none."""
    if args.keep_sampling_mask and batch.sampling_mask is None:
        raise ValueError(
            "keep_sampling_mask: true given, but the rollout has no sampling mask; it began before the setting was "
            "given, or samples with more than temperature, top_p and top_k: begin a new run, or leave it out"
        )
    return batch.sampling_mask if args.keep_sampling_mask else None


def loss_weights(
    old_logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, args: RolloutArguments
) -> tuple[torch.Tensor, Metrics]:
    """The tokens' weights in the policy loss, and metrics of them; without a correction all are 1 and there are no
    metrics.

    old_logps, sampling_logps, mask [rows, completion]; weights float32 [rows, completion]. Metrics have TRL's names.
    sampling_logps: logprobs under the distribution that the tokens were drawn from, truncation included: the
        denominator of importance sampling.
    """
    if not args.importance_sampling_correction:
        return torch.ones_like(old_logps), {}
    weights = importance_sampling_weights(
        old_logps,
        sampling_logps,
        mask,
        cap=args.importance_sampling_clip_max,
        mode=args.importance_sampling_mode,
        floor=args.importance_sampling_clip_min,
    )
    completion_weights = weights[mask.bool()].double()
    total, tokens = over_ranks(torch.stack([completion_weights.sum(), mask.sum().double()])).tolist()
    negated_min, largest = over_ranks(
        torch.stack([-completion_weights.min(), completion_weights.max()]), dist.ReduceOp.MAX
    ).tolist()
    name = "sampling/importance_sampling_ratio"
    return weights, {f"{name}/min": -negated_min, f"{name}/mean": total / tokens, f"{name}/max": largest}


@torch.no_grad()
def training_logps(policy: hybrid.HybridEngine, batch: hybrid.RolloutBatch, args: RolloutArguments) -> torch.Tensor:
    """`token_logps` of the training forward itself, in train mode, without gradients.  float32 [rows, completion]"""
    policy.train()
    width, size = batch.completion_mask.shape[1], forward_batch_size(args, batch.sequences.shape[1])
    kept, forward = kept_mask(batch, args), (args.temperature, args.training_forward)
    masks = repeat(None) if kept is None else kept.split(size)
    parts = zip(batch.sequences.split(size), batch.attention_mask.split(size), masks, strict=False)
    logps = (token_logps(policy, ids, mask, width, *forward, sampling_mask=part)[0] for ids, mask, part in parts)
    return torch.cat(list(logps))


@torch.no_grad()
def row_by_row_logps(policy: hybrid.HybridEngine, experience: Experience, args: RolloutArguments) -> torch.Tensor:
    """`token_logps` at another batch shape: each row in its own forward, without padding; no gradients.

    Returns float32 [rows, completion], 0 after a completion's end. Every rank must pass equally many rows.
    """
    alone = torch.zeros(experience.mask.shape, device=experience.mask.device)
    for index in range(len(alone)):
        row = experience.take(torch.tensor([index]))
        width, forward = row.mask.shape[1], (args.temperature, args.training_forward)
        rows = row.sequences, row.attention_mask, width
        alone[index, :width] = token_logps(policy, *rows, *forward, sampling_mask=row.sampling_mask)[0][0]
    return alone


class Numerics:
    """Compares the sampler's logprobs with the trainer's over an update's first optimizer step, and, as a control, the
    trainer's with its own at another batch shape.

    control_rows: rows per rank for the control; 0 is off.
    """

    def __init__(
        self,
        policy: hybrid.HybridEngine,
        experience: Experience,
        step: OptimizerStep,
        control_rows: int,
        args: RolloutArguments,
    ):
        self.logps: list[torch.Tensor] = []
        self.micro_batches = list(step.micro_batches(experience))
        control = step.rows[step.micro_batch_rows[0][: min(control_rows, step.min_rows)]]
        self.control = experience.take(control) if len(control) else None
        if self.control is not None:  # before the first step: the weights are still those that sampled
            self.control_logps = row_by_row_logps(policy, self.control, args)

    def add(self, logps: torch.Tensor) -> None:
        """Record a micro batch's training logprobs [rows, completion]; steps after the first are ignored."""
        if len(self.logps) < len(self.micro_batches):
            self.logps.append(logps.detach())

    def metrics(self) -> Metrics:
        """The metrics of all ranks. Every rank takes part."""
        masks = [batch.mask.bool() for batch in self.micro_batches]
        sampling_logps, old_logps = zip(*((b.sampling_logps, b.old_logps) for b in self.micro_batches), strict=True)
        logps, sampled, old = (
            torch.cat([values[mask] for values, mask in zip(per_batch, masks, strict=True)])[None]
            for per_batch in (self.logps, sampling_logps, old_logps)
        )
        every = torch.ones_like(logps)
        error = torch.cat([((logps - old).exp() - 1).abs().flatten(), logps.new_zeros(1)]).max()
        metrics: Metrics = {"val/first_ratio_error": over_ranks(error, dist.ReduceOp.MAX).item()}
        metrics |= hybrid.sampling_metrics(sampled, logps, every, over_ranks)
        difference = (sampled - logps).abs()
        metrics["sampling/sampling_logp_difference"] = Histogram.of(difference, LOGP_DIFFERENCE_EDGES, over_ranks)
        if self.control is not None:
            rows, width = self.control_logps.shape
            metrics |= hybrid.sampling_metrics(
                self.control_logps, self.logps[0][:rows, :width], self.control.mask, over_ranks, name="control"
            )
        return metrics
