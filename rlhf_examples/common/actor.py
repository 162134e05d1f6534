"""Shared by PPO and GRPO in addition to rollouts: the policy with its reference, rewards, evaluation, the
iterations.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import RolloutArguments, RunArguments
from rlhf_examples.common.best_model import BestModel
from rlhf_examples.common.checkpoint import Checkpoints, Stateful
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.engines import FrozenModel, Training, export, load_frozen_model, make_policy_engine
from rlhf_examples.common.files import AVERAGE, BEFORE, MODEL, write_atomically
from rlhf_examples.common.forwards import frozen_logps
from rlhf_examples.common.measures import Phases, TokenCount, TrainingFlops
from rlhf_examples.common.models import load_policy, require_model
from rlhf_examples.common.ranks import gather_objects, interleaved, is_main_process, rank_share, sums_over_ranks
from rlhf_examples.common.rollouts import (
    Row,
    decode_completions,
    forward_batch_size,
    rank_row_ids,
    roll_out,
    sampling,
    sampling_seed,
)
from rlhf_examples.common.run_log import RunLog, Transcript, read_metrics
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics


@dataclass
class Actor:
    """The policy, its reference and its moving average.

    reference: None if the policy without its adapter is the reference, or if none is needed.
    flops: floating-point operations of training the policy.
    """

    policy: hybrid.HybridEngine
    reference: FrozenModel | None
    average: MovingAverage | None
    args: RolloutArguments
    flops: TrainingFlops
    tokens: TokenCount = field(default_factory=TokenCount)

    @classmethod
    def load(cls, args: RolloutArguments, total_steps: int, needs_reference: bool) -> "Actor":
        """Load everything from `args.actor_model_name_or_path`.  total_steps: optimizer steps of the run."""
        name = args.actor_model_name_or_path
        require_model("actor_model_name_or_path", name)
        training = Training.from_args(args, "actor_", args.per_device_training_batch_size, total_steps)
        load, reference = partial(load_policy, attn_implementation=args.attn_implementation), None
        if needs_reference and not args.actor_lora_dim:
            reference = load_frozen_model(load, name, args.dtype, args.offload_reference_model)
        loading = training.lora, training.gradient_checkpointing
        model = load(name, training.config(args), *loading, disable_dropout=args.disable_dropout)
        policy = make_policy_engine(model, args, training, **rollout_config(args))
        average = MovingAverage(policy, args.ema_beta) if args.enable_ema else None
        return cls(policy, reference, average, args, TrainingFlops.of(policy.module))

    def reference_logps(self, batch: hybrid.RolloutBatch) -> torch.Tensor:
        """The reference's logprobs of completions at the sampling temperature, float32 [rows, completion]."""
        temperature, width = self.args.temperature, batch.completion_mask.shape[1]
        if self.reference is None:
            scores = self.policy.score(batch.sequences, batch.attention_mask, adapters=False, temperature=temperature)
            return scores.per_token_logps[:, -width:]
        rows = forward_batch_size(self.args, batch.sequences.shape[1])
        return frozen_logps(self.reference, batch.sequences, batch.attention_mask, width, temperature, rows)

    def old_logps(self, batch: hybrid.RolloutBatch) -> torch.Tensor:
        """The policy's logprobs of completions by `logprob_mode`: recomputed in eval mode, or as sampled.
        float32 [rows, completion]
        """
        if self.args.logprob_mode == "sampling":
            return batch.old_per_token_logps
        scores = self.policy.score(batch.sequences, batch.attention_mask, temperature=self.args.temperature)
        return scores.per_token_logps[:, -batch.completion_mask.shape[1] :]

    def checkpoint_parts(self) -> dict[str, Stateful | None]:
        """What checkpoints save in addition to the policy."""
        return {"average": self.average, "tokens": self.tokens}

    def update_average(self) -> None:
        """Update the moving average; call it after every optimizer step."""
        if self.average is not None:
            self.average.update()

    def export(self, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
        """Write the policy as `model`, and its average as `model_ema`. Every rank takes part."""
        export_trained(self.policy, self.average, tokenizer, directory, self.args.lora_export == "merged")

    def destroy(self) -> None:
        """Destroy the engines."""
        for engine in (self.policy, self.reference):
            if engine is not None:
                engine.destroy()


def train_iterations(
    iterate: Callable[[int], Metrics],
    actor: Actor,
    evaluation: "Evaluation",
    checkpoints: Checkpoints,
    best: BestModel,
    log: RunLog,
    done: int,
    args: RolloutArguments,
) -> tuple[Metrics, int]:
    """Run the remaining iterations, with the evaluations, log lines and checkpoints that are due.

    Returns the last iteration's metrics, and the iteration whose policy is left in the engine: the best one with
    `load_best_model_at_end`.
    iterate: trains one iteration, by its number from 1, and returns its metrics.
    """
    metrics = last_logged_metrics(Path(args.output_dir)) if done == args.num_iterations or best.ends_training else {}
    between_iterations, last = Phases(), done
    for iteration in range(done + 1, args.num_iterations + 1):
        if best.ends_training:
            log.note(best.reason)
            break
        with log.engine_output():
            actor.policy.eval()  # prints DeepSpeed's line about the previous iteration
        metrics, last, is_best = iterate(iteration), iteration, False
        is_last = bool(best.metric) and iteration == args.num_iterations  # the last model may be the best
        if args.eval_every and (iteration % args.eval_every == 0 or is_last):
            with between_iterations.timed("eval"):
                eval_metrics = evaluation.evaluate_and_log(log, iteration)
            is_best = best.update(eval_metrics, iteration)
            metrics |= eval_metrics
        log.add(iteration, metrics | between_iterations.metrics())
        between_iterations = Phases()  # a checkpoint's time is logged with the next iteration
        if is_best or (args.save_every and iteration % args.save_every == 0):
            with between_iterations.timed("save"):
                checkpoints.save(iteration, best.iteration)
    if args.load_best_model_at_end and best.iteration:
        checkpoints.load(best.iteration)
        last = best.iteration
    return metrics, last


def export_trained(
    engine: hybrid.HybridEngine,
    average: MovingAverage | None,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    merged: bool,
) -> None:
    """Write a trained model as `model` in `directory`, and its average, if there is one, as `model_ema`."""
    export(engine, tokenizer, directory / MODEL, merged)
    if average is not None:
        export(engine, tokenizer, directory / AVERAGE, merged, average)


def baseline_evaluation(directory: Path, resumed: bool, evaluate: Callable[[], dict]) -> dict:
    """The result of `evaluate` before the first update, saved in `directory`; a resumed run reads it there."""
    path = directory / BEFORE
    if resumed and path.is_file():
        return json.loads(path.read_text())
    result = evaluate()
    if is_main_process():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result))
    return result


def last_logged_metrics(directory: Path) -> Metrics:
    """The metrics of the last iteration that a run has logged; empty without a log."""
    rows = read_metrics(directory)
    return rows[-1] if rows else {}


def start_log(args: RunArguments, description: str, bar_metrics: dict[str, str], total: int, done: int) -> RunLog:
    """The log of a run in its output_dir.  done: iterations that a resumed run has already done."""
    return RunLog(
        Path(args.output_dir),
        total=total,
        start=done,
        description=description,
        bar_metrics=bar_metrics,
        print_every=args.print_every,
        report_to=args.report_to,
        settings=asdict(args),
    )


def time_metrics(policy: hybrid.HybridEngine, batch: hybrid.RolloutBatch, phases: Phases) -> Metrics:
    """Seconds of an iteration's phases on this rank, tokens per second of all ranks, and the peak memory in bytes.

    phases: the timer of the whole iteration. gather_s to wait_s are parts of the rollout; score_s is all between the
        rollout and training.
    """
    spent = {f"time/{name}": batch.timings[name] for name in ("gather_s", "merge_s", "prefill_s", "decode_s", "wait_s")}
    tokens, stats = sums_over_ranks({"tokens": batch.completion_mask.sum()})["tokens"], policy.stats()
    return {
        **spent,
        **phases.metrics(),
        "time/score_s": sum(s for name, s in phases.seconds.items() if name not in ("rollout", "train")),
        "time/iteration_s": phases.last - phases.start,
        "time/tokens_per_s": tokens / phases.seconds["rollout"],
        "memory/peak_bytes": stats["peak_bytes"],
    }


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
class Evaluation:
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
        rewards: Rewards,
        args: RolloutArguments,
    ) -> "Evaluation":
        """An evaluation by the training rewards, and by `eval_reward`, which training does not use."""
        all_rewards = [rewards]
        if args.eval_reward:
            all_rewards.append(load_rewards(args.eval_reward, [], args, args.offload_reference_model))
        options = args.eval_num_generations, args.eval_greedy, tuple(args.pass_at_k), args.pass_score
        return cls(policy, tokenizer, prompts, all_rewards, args, *options)

    def __call__(self, draw: int = 0) -> tuple[Metrics, list[Transcript], dict[str, list[float]]]:
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
        own = rank_share([*self.prompts, *padding])
        params = sampling(self.args, sampling_seed(self.args.seed, draw))
        completions, own_scores = self.scored(own, replace(params, temperature=0.0) if self.greedy else params)
        columns: dict[str, list] = {"": completions, **own_scores}
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

    def scored(self, own: list[Row], params: hybrid.SamplingParams) -> tuple[list[Transcript], dict[str, list[float]]]:
        """Completions of this rank's prompts, and their scores by scorer."""
        with self.policy.inference():
            row_ids = rank_row_ids(len(own))
            batch = roll_out(self.policy, self.tokenizer, own, row_ids, params, self.num_generations)
        completions = decode_completions(self.tokenizer, batch)
        prompts = [row for row in own for _ in range(self.num_generations)]
        columns: dict[str, list[float]] = {}
        for rewards in self.rewards:
            by_name = rewards.scores_by_name(batch, prompts, completions)
            columns |= {
                f"eval_{name}" if name in columns else name: values.tolist() for name, values in by_name.items()
            }
        return [*completions], columns

    def before_training(self, directory: Path, resumed: bool) -> dict:
        """The evaluation before the first update; a resumed run reads the saved one."""
        return baseline_evaluation(
            directory, resumed, lambda: dict(zip(("metrics", "texts", "scores"), self(), strict=True))
        )

    def evaluate_and_log(self, log: RunLog, iteration: int, result: dict | None = None) -> Metrics:
        """Evaluate, and log every completion.  result: the result of `before_training`, which is logged instead."""
        metrics, texts, scores = self() if result is None else result.values()
        self._log(log, iteration, texts, scores, self.args.num_samples)
        return metrics

    def _log(
        self, log: RunLog, iteration: int, texts: list[Transcript], scores: dict[str, list[float]], shown: int
    ) -> None:
        if texts:
            prompts = [row["prompt"] for row in self.prompts for _ in range(self.num_generations)]
            log.add_completions(iteration, {"prompt": prompts, "completion": texts, **scores}, shown)

    def after_training(self, log: RunLog, before: dict, iteration: int) -> Metrics:
        """Evaluate after the last iteration, and show samples before and after training. Returns the metrics, those
        before training with the prefix `before_`.
        """
        metrics, texts, scores = self()
        self._log(log, iteration, texts, scores, shown=0)
        shown = slice(0, self.args.num_samples)
        prompts = [row["prompt"] for row in self.prompts]
        if prompts[shown]:
            first_scores = (next(iter(by_name.values())) for by_name in (before["scores"], scores))
            columns = before["texts"], texts, *first_scores
            log.show_samples(prompts[shown], *(column[:: self.num_generations][shown] for column in columns))
        return {**{f"before_{name}": value for name, value in before["metrics"].items()}, **metrics}


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
