"""Shared by PPO, GRPO and agents in addition to rollouts: the policy with its reference, rewards, evaluation."""

import math
import statistics
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import RolloutArguments
from rlhf_examples.common.controllers import AdaptiveEntropyController
from rlhf_examples.common.engines import FrozenModel, Training, load_policy_and_reference
from rlhf_examples.common.measures import Phases, flops_metrics
from rlhf_examples.common.models import require_model
from rlhf_examples.common.ranks import gather_objects, interleaved, rank_share, sums_over_ranks
from rlhf_examples.common.rollouts import (
    Row,
    decode_completions,
    forward_batch_size,
    rank_row_ids,
    roll_out,
    sampled_logps,
    sampling,
    sampling_seed,
    training_logps,
)
from rlhf_examples.common.run import Evaluated, Evaluator, Trained
from rlhf_examples.common.run_log import RunLog, Transcript
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics


@dataclass
class Actor(Trained):
    """The policy, its reference and its moving average.

    reference: None if the policy without its adapter is the reference, or if none is needed.
    entropy_controller: adapts the weight of the entropy bonus; None: it is `entropy_coef`.
    """

    args: RolloutArguments
    reference: FrozenModel | None = None
    needs_reference: bool = True
    entropy_controller: AdaptiveEntropyController | None = None

    @classmethod
    def load(
        cls,
        args: RolloutArguments,
        total_steps: int,
        needs_reference: bool,
        kind: Any = AutoModelForCausalLM,
        **settings: Any,
    ) -> "Actor":
        """Load everything from `args.actor_model_name_or_path`.  total_steps: optimizer steps of the run.  kind: as in
        `load_policy`.  settings: more keys of the engine's configuration.
        """
        name = args.actor_model_name_or_path
        require_model("actor_model_name_or_path", name)
        training = Training.from_args(args, "actor_", args.per_device_training_batch_size, total_steps)
        blocks = {**rollout_config(args), **settings}
        engine, reference = load_policy_and_reference(name, args, training, needs_reference, kind, **blocks)
        return cls.of(engine, args, reference=reference, needs_reference=needs_reference)

    @property
    def policy(self) -> hybrid.HybridEngine:
        """The engine that trains the policy."""
        return self.engine

    def reference_logps(self, batch: hybrid.RolloutBatch) -> torch.Tensor:
        """The reference's logprobs of completions at the sampling temperature, float32 [rows, completion]."""
        given: dict[str, Any] = {"temperature": self.args.temperature, "model_inputs": batch.model_inputs}
        if self.reference is None:
            scores = self.policy.score(batch.sequences, batch.attention_mask, adapters=False, **given)
        else:
            given["rows_per_forward"] = forward_batch_size(self.args, batch.sequences.shape[1])
            scores = self.reference.score(batch.sequences, batch.attention_mask, **given)
        return scores.per_token_logps[:, -batch.completion_mask.shape[1] :]

    def old_logps(self, batch: hybrid.RolloutBatch) -> torch.Tensor:
        """The policy's logprobs of completions by `logprob_mode`: recomputed in eval mode, or as sampled.
        float32 [rows, completion]

        Also as sampled if training computes the same values, by the exact forward: every ratio is then 1.
        """
        if self.args.logprob_mode == "sampling" or self.trains_as_sampled(batch):
            return sampled_logps(batch, self.args)
        given: dict[str, Any] = {"temperature": self.args.temperature, "model_inputs": batch.model_inputs}
        scores = self.policy.score(batch.sequences, batch.attention_mask, **given)
        return scores.per_token_logps[:, -batch.completion_mask.shape[1] :]

    def trains_as_sampled(self, batch: hybrid.RolloutBatch) -> bool:
        """Whether the training forward returns a rollout's own logprobs, to the bit: by the exact forward, for tokens
        that the present weights sampled, not an int8 copy of them. Equal on all ranks.
        """
        args = self.args
        if args.training_forward != "exact" or args.rollout_weight_dtype == "int8" or self.policy.device.type != "cpu":
            return False
        versions = batch.weight_versions
        stale = versions is not None and (versions < batch.weight_version)[batch.completion_mask.bool()].any()
        return not sums_over_ranks({"stale": int(stale)})["stale"]

    def window_logps(
        self, batch: hybrid.RolloutBatch, phases: Phases
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logprobs that are computed in the window of the rollout: the old ones (None with
        `importance_sampling_correction`, and with `keep_sampling_mask` if they are recomputed) and the reference's
        (None without one), float32 [rows, completion]. The reference's are of the whole vocabulary: with a mask the KL
        is that of the truncated policy to the whole reference.
        """
        masked = self.args.keep_sampling_mask and self.args.logprob_mode == "recompute"
        in_training = self.args.importance_sampling_correction or masked
        old_logps = None if in_training and not self.trains_as_sampled(batch) else self.old_logps(batch)
        phases.end("old_logps")
        ref_logps = self.reference_logps(batch) if self.needs_reference else None
        phases.end("ref_logps")
        return old_logps, ref_logps

    def training_logps(
        self, batch: hybrid.RolloutBatch, old_logps: torch.Tensor | None, ref_logps: torch.Tensor | None, phases: Phases
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of `window_logps`, with the training forward's logprobs where the old ones are None: `score` would
        return the sampler's own. Call it after the window.
        """
        if old_logps is None:
            old_logps = training_logps(self.policy, batch, self.args)
            phases.end("old_logps")
        return old_logps, ref_logps

    def iteration_metrics(self, batch: hybrid.RolloutBatch, phases: Phases, flops: float) -> Metrics:
        """The learning rate, tokens learned from, seconds of the phases on this rank, tokens per second of all ranks,
        the peak memory in bytes, and operations per second.

        batch: this rank's rollout.  phases: the timer of the whole iteration. gather_s to wait_s are parts of the
            rollout; score_s is all between the rollout and training.  flops: of training, on all ranks.
        """
        names = "gather_s", "merge_s", "prefill_s", "decode_s", "wait_s"  # rows of sessions have none
        spent = {f"time/{name}": batch.timings[name] for name in names if name in batch.timings}
        tokens = sums_over_ranks({"tokens": batch.completion_mask.sum()})["tokens"]
        return {
            "lr": self.policy.get_lr()[0],
            **self.tokens.add(batch.attention_mask.sum()),
            **spent,
            **phases.metrics(),
            "time/score_s": sum(s for name, s in phases.seconds.items() if name not in ("rollout", "train")),
            "time/iteration_s": phases.last - phases.start,
            "time/tokens_per_s": tokens / phases.seconds["rollout"],
            "memory/peak_bytes": self.policy.stats()["peak_bytes"],
            **flops_metrics(flops, phases.seconds["train"], self.args.peak_tflops),
        }

    def destroy(self) -> None:
        """Destroy the engines."""
        for engine in (self.policy, self.reference):
            if engine is not None:
                engine.destroy()


def warn_of_truncation(args: RolloutArguments) -> None:
    """Warn once that completions are sampled from a truncated distribution, and logprobs are of the whole one."""
    if args.truncates and not args.keep_sampling_mask and dist.get_rank() == 0:
        warnings.warn(
            f"top_p: {args.top_p:g} and top_k: {args.top_k} truncate the sampled distribution, but the policy's "
            "logprobs are of the whole vocabulary: each ratio of policy and sampler is too small by the probability "
            "that was cut off, and tokens that were cut off still get gradients. Give keep_sampling_mask: true, or "
            "sample with top_p: 1 and top_k: 0",
            stacklevel=2,
        )


def rollout_config(args: RolloutArguments) -> dict[str, dict]:
    """The blocks `hybrid_engine` and `rollout` of the engine's configuration, from DeepSpeed-Chat's flags."""
    return {
        "hybrid_engine": {
            "max_out_tokens": args.max_prompt_seq_len + args.max_answer_seq_len,
            "inference_tp_size": args.inference_tp_size,
            "release_inference_cache": args.release_inference_cache,
            "pin_parameters": not args.unpin_actor_parameters,
            "tp_gather_partition_size": args.tp_gather_partition_size,
        },
        "rollout": {
            "containers": "fused" if args.enable_hybrid_engine else "native",
            "lora": "unmerged" if args.unmerged_lora else "merged",
            "weight_dtype": args.rollout_weight_dtype,
        },
    }


def load_rewards(names: list[str], weights: list[float], args: RolloutArguments, offload: bool = False) -> Rewards:
    """The rewards that score completions.  names, weights, offload: as in `Rewards.load`."""
    rows, waiting = args.per_device_training_batch_size, (args.reward_timeout_s, args.reward_retries)
    return Rewards.load(names, args.dtype, rows, offload, weights, *waiting, args.attn_implementation)


@dataclass
class Evaluation(Evaluator):
    """Evaluates a policy on held-out prompts: always the same prompts and sampling keys, whatever the number of ranks.

    num_generations: completions of a prompt, in adjacent rows.  greedy: the most probable tokens instead of samples.
    pass_at_k, pass_score: as the arguments of these names.
    """

    policy: hybrid.HybridEngine
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Row]
    rewards: list[Rewards]
    args: Any  # RolloutArguments, EvaluateArguments or PairsArguments
    num_generations: int = 1
    greedy: bool = False
    pass_at_k: tuple[int, ...] = ()
    pass_score: float = 1.0

    @classmethod
    def load(
        cls,
        policy: hybrid.HybridEngine,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[Row],
        rewards: list[Rewards],
        args: RolloutArguments,
        **fields: Any,
    ) -> "Evaluation":
        """An evaluation by the training rewards, and by `eval_reward`, which training does not use.  fields: of a
        subclass.
        """
        if args.eval_reward:
            rewards = [*rewards, load_rewards(args.eval_reward, [], args, args.offload_reference_model)]
        options = args.eval_num_generations, args.eval_greedy, tuple(args.pass_at_k), args.pass_score
        return cls(policy, tokenizer, prompts, rewards, args, *options, **fields)

    def __call__(self, draw: int = 0) -> Evaluated:
        """Returns metrics (each scorer's mean and standard error over the completions that it could score, pass@k
        shares), completions of all prompts, and their scores by scorer, the training reward first. All are empty
        without prompts.

        A scorer of `eval_reward` with the name of a training reward gets the prefix `eval_`.  draw: selects the
        sampling keys.
        """
        if not self.prompts:
            return {}, [], {}
        count, n = len(self.prompts), self.num_generations
        padding = self.prompts[:1] * (-count % dist.get_world_size())  # equally many prompts on each rank
        local = rank_share([*self.prompts, *padding])
        params = sampling(self.args, sampling_seed(self.args.seed, draw))
        completions, local_scores = self.scored(local, replace(params, temperature=0.0) if self.greedy else params)
        columns: dict[str, list] = {"": completions, **local_scores}
        from_ranks = gather_objects({name: in_groups(column, n) for name, column in columns.items()})
        groups = {name: interleaved(of_rank[name] for of_rank in from_ranks)[:count] for name in columns}
        texts = [text for group in groups.pop("") for text in group]
        scores = {name: [score for group in of_prompts for score in group] for name, of_prompts in groups.items()}
        metrics = {f"eval_{name}": mean_score(values) for name, values in scores.items()}
        errors = {name: standard_error(of_prompts) for name, of_prompts in groups.items()}
        metrics |= {f"eval_{name}_stderr": error for name, error in errors.items() if not math.isnan(error)}
        for name, of_prompts in groups.items():
            passed = [[score >= self.pass_score for score in group] for group in of_prompts]  # False for NaN
            rates = {k: statistics.fmean(pass_at(k, of_prompt) for of_prompt in passed) for k in self.pass_at_k}
            metrics |= {f"eval_{name}/pass@{k}": rate for k, rate in rates.items()}
        return metrics, texts, scores

    def scored(
        self, local: list[Row], params: hybrid.SamplingParams
    ) -> tuple[list[Transcript], dict[str, list[float]]]:
        """Completions of this rank's prompts, and their scores by scorer."""
        with self.policy.inference():
            row_ids = rank_row_ids(len(local))
            batch = roll_out(self.policy, self.tokenizer, local, row_ids, params, self.num_generations)
        completions = decode_completions(self.tokenizer, batch)
        prompts = [row for row in local for _ in range(self.num_generations)]
        return [*completions], self.scores(batch, prompts, completions)

    def scores(self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]) -> dict[str, list[float]]:
        """The scores of completions by scorer.  prompts: one for each completion."""
        columns: dict[str, list[float]] = {}
        for rewards in self.rewards:
            by_name = rewards.scores_by_name(batch, prompts, completions)
            columns |= {
                f"eval_{name}" if name in columns else name: values.tolist() for name, values in by_name.items()
            }
        return columns

    def log(self, log: RunLog, iteration: int, evaluated: Evaluated, final: bool) -> None:
        """Log every completion, and print some unless `show` will."""
        _, texts, scores = evaluated
        if texts:
            prompts = [row["prompt"] for row in self.prompts for _ in range(self.num_generations)]
            columns = {"prompt": prompts, "completion": texts, **scores}
            log.add_completions(iteration, columns, 0 if final else self.args.num_samples)

    def show(self, log: RunLog, before: Evaluated, after: Evaluated) -> None:
        """Print and save the first `num_samples` prompts' completions before and after training."""
        prompts = [row["prompt"] for row in self.prompts][: self.args.num_samples]
        first_scores = (next(iter(scores.values()), []) for _, _, scores in (before, after))
        columns: list[list] = [before[1], after[1], *first_scores]
        if prompts:
            log.show_samples(prompts, *(column[:: self.num_generations][: len(prompts)] for column in columns))


def in_groups(items: list, size: int) -> list[list]:
    """Consecutive parts of `size` items."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def pass_at(k: int, passed: list[bool]) -> float:
    """The unbiased estimate of the probability that one of k completions of a prompt passes (arXiv:2107.03374,
    section 2.1).
    """
    return 1 - math.comb(passed.count(False), k) / math.comb(len(passed), k)


def mean_score(scores: list[float]) -> float:
    """The mean of the scores that are not NaN; NaN if there are none."""
    kept = [score for score in scores if not math.isnan(score)]
    return statistics.fmean(kept) if kept else math.nan


def standard_error(groups: list[list[float]]) -> float:
    """The standard error of the mean over prompts.  groups: the scores of each prompt's completions, which are
    correlated.
    NaN with fewer than two scored prompts.
    """
    means = [mean for mean in map(mean_score, groups) if not math.isnan(mean)]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
