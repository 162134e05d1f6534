"""A rank's part of GRPO, in steps that a script puts together; its engines may sleep while others compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch import Tensor

import hybrid
from rlhf_examples.common.actor import load_rewards
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.engines import FrozenModel
from rlhf_examples.common.groups import Groups, next_groups
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.ranks import seed_everything
from rlhf_examples.common.refusals import refused_outside_of_grpo
from rlhf_examples.common.rollouts import decode_completions
from rlhf_examples.common.run_log import engine_output_in
from rlhf_examples.common.scorers import Scorer
from rlhf_examples.common.trackers import Histogram
from rlhf_examples.data.examples import RowStream
from rlhf_examples.data.held_out import load_examples
from rlhf_examples.grpo import EMBEDDED, load_actor, make_experience, update

# Arguments of `grpo.py` that these steps do not follow.
OF_GRPO_ALONE = (
    "dynamic_sampling",
    "partial_rollout",
    "importance_sampling_correction",
    "keep_sampling_mask",
    "soft_punish_cache",
    "save_every",
    "resume",
    "eval_every",
    "metric_for_best_model",
    "log_rollouts",
)


def require_supported(args: GRPOArguments) -> None:
    """Raise ValueError for an argument that only `grpo.py` follows, for no reward, and for one that does not exist."""
    for name in OF_GRPO_ALONE:
        if value := getattr(args, name):
            raise ValueError(f"{name}: {value} given; leave it out here, or run rlhf_examples.grpo")
    for is_wrong, problem in refused_outside_of_grpo(args):
        if is_wrong:
            raise ValueError(problem)
    args.require_inputs()
    Scorer.check(*args.reward)


@dataclass(frozen=True)
class Rollout:
    """This rank's completions, and their logprobs under policy and reference, float32 [rows, completion]."""

    groups: Groups
    old_logps: Tensor
    ref_logps: Tensor | None


class Learner:
    """Policy, reference, rewards and prompts of a rank, and the steps of an iteration. Every rank takes part in each.

    num_rollouts: rollouts of an iteration, each with an update of its own.
    sleeps: an engine is on the device only while it computes.
    """

    def __init__(self, args: GRPOArguments, num_rollouts: int = 1, sleeps: bool = False):
        seed_everything(args.seed)
        require_supported(args)
        self.args, self.num_rollouts, self.sleeps = args, num_rollouts, sleeps
        self.tokenizer = tokenizer_of(args, "actor_model_name_or_path")
        examples, _ = load_examples("grpo", EMBEDDED, "prompt", args.max_prompt_seq_len, self.tokenizer, args)
        self.prompts = RowStream(examples, args.seed)
        self.actor = load_actor(args, num_rollouts)
        self.policy, self.reference = self.actor.policy, self.actor.reference
        self.policy.eval()
        self._leave_device(self.policy, self.reference)
        self.rewards = load_rewards(args.reward, args.reward_weights, args, args.offload_reference_model)
        self.reward_models = [scorer.model for scorer in self.rewards.scorers]
        self._leave_device(*self.reward_models)

    def roll_out(self, iteration: int, number: int = 0) -> Rollout:
        """Completions of the next prompts.  number: of the rollout in its iteration."""
        count = self.args.per_device_generation_batch_size * dist.get_world_size()
        with self.awake(self.policy), self.policy.inference():
            prompts = self.prompts.next(count)
            groups = next_groups(self.policy, self.tokenizer, prompts, number * count, iteration, self.args)
            old_logps = self.actor.old_logps(groups.batch)
            ref_logps = self._reference_logps(groups.batch) if self.reference is None else None
        if self.reference is not None:
            with self.awake(self.reference):
                ref_logps = self._reference_logps(groups.batch)
        return Rollout(groups, old_logps, ref_logps)

    def _reference_logps(self, batch: hybrid.RolloutBatch) -> Tensor | None:
        return self.actor.reference_logps(batch) if self.args.beta else None

    def score(self, rollout: Rollout) -> Tensor:
        """The reward of each completion, float32 [rows]; NaN where none could score it."""
        batch, prompts = rollout.groups.batch, rollout.groups.prompts
        with self.awake(*self.reward_models):
            return self.rewards(batch, prompts, decode_completions(self.tokenizer, batch))

    def update(self, rollout: Rollout, scores: Tensor, iteration: int) -> dict[str, float]:
        """Learn from scored completions; returns metrics of all ranks, without histograms."""
        learned = (rollout.old_logps, rollout.ref_logps, scores, ~scores.isnan())
        with self.awake(self.policy):
            experience, metrics = make_experience(rollout.groups.batch, *learned, self.args)
            self.policy.train()
            metrics |= update(self.actor, experience.all_gather(self.args.num_generations), iteration, self.args)
            with engine_output_in(Path(self.args.output_dir)):
                self.policy.eval()
        return {name: float(value) for name, value in metrics.items() if not isinstance(value, Histogram)}

    def export(self) -> None:
        """Write the policy to `output_dir`, as a directory that Hugging Face loads."""
        with self.awake(self.policy):
            self.actor.export(self.tokenizer, Path(self.args.output_dir))

    def destroy(self) -> None:
        """Destroy the engines."""
        self.actor.destroy()
        self.rewards.destroy()

    @contextmanager
    def awake(self, *engines: FrozenModel | None) -> Iterator[None]:
        """Inside the block the engines are on the device; then they leave it to the others, if they sleep at all.

        After an exception they stay: sleep is a collective, and the other ranks may be in another one.
        """
        for engine in engines:
            if engine is not None and self.sleeps:
                engine.wake()
        yield
        self._leave_device(*engines)

    def _leave_device(self, *engines: FrozenModel | None) -> None:
        for engine in engines:
            if engine is not None and self.sleeps:
                engine.sleep(level=2)


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the rollouts of an iteration."""
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
