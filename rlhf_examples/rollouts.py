"""What an iteration learns from: completions, and everything that is known of each of their tokens."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.arguments import PPOArguments
from rlhf_examples.data import encode_prompts
from rlhf_examples.losses import (
    advantages_and_returns,
    importance_sampling_weights,
    masked_sum,
    masked_whiten,
    shaped_rewards,
)
from rlhf_examples.models import Models
from rlhf_examples.rewards import Reward


@dataclass(frozen=True)
class Experience:
    """The rows of one rank.  sequences, attention_mask [rows, prompt + completion]; the others [rows, completion].

    weights: factors of the tokens' policy loss.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    sampling_logps: torch.Tensor
    old_logps: torch.Tensor
    weights: torch.Tensor
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def take(self, rows: torch.Tensor) -> "Experience":
        """Some of the rows."""
        return Experience(**{name: tensor[rows] for name, tensor in vars(self).items()})


def over_ranks(values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """A tensor's sum, or what else `op` is, over all ranks."""
    values = values.clone()
    dist.all_reduce(values, op=op)
    return values


def completions_of(per_token: torch.Tensor, width: int) -> torch.Tensor:
    """Of what belongs to tokens 1, 2, … of sequences [rows, tokens - 1], the last `width`: the completions'."""
    return per_token[:, -width:]


def token_values(critic: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """The value of the state before each completion token.  sequences, mask [rows, tokens]; float32 [rows, width]."""
    values = hybrid.padded_forward(critic.module, critic)(sequences, mask).logits[:, :-1, 0].float()
    return completions_of(values, width)


def token_logps(
    policy: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, temperature: float
) -> torch.Tensor:
    """Logprobs of the completion tokens, with gradients.  sequences, mask [rows, tokens]; float32 [rows, width]."""
    logits = hybrid.padded_forward(policy.module, policy)(sequences, mask).logits[:, :-1]
    logits = completions_of(logits, width) / temperature
    return hybrid.selective_log_softmax(logits, sequences[:, -width:])


@torch.no_grad()
def training_logps(
    policy: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, args: PPOArguments
) -> torch.Tensor:
    """`token_logps` of the training forward itself, in train mode, by its micro batches; without gradients.

    sequences, mask [rows, tokens]; float32 [rows, width]. Every rank gives as many rows.
    """
    policy.train()
    size = args.per_device_train_batch_size
    parts = zip(sequences.split(size), mask.split(size), strict=True)
    return torch.cat([token_logps(policy, *part, width, args.temperature) for part in parts])


@torch.no_grad()
def token_logps_alone(
    policy: hybrid.HybridEngine, sequences: torch.Tensor, mask: torch.Tensor, width: int, temperature: float
) -> torch.Tensor:
    """`token_logps` by another batch shape: each row in a forward of its own, without padding; without gradients.

    sequences, mask [rows, tokens]; float32 [rows, width], 0 behind a completion. Every rank gives as many rows.
    """
    alone = torch.zeros(len(sequences), width, device=sequences.device)
    for logps, row, kept in zip(alone, sequences, mask.bool(), strict=True):
        length, ids = int(kept[-width:].sum()), row[kept][None]
        logps[:length] = token_logps(policy, ids, torch.ones_like(ids), length, temperature)[0]
    return alone


def decode_completions(tokenizer: PreTrainedTokenizerBase, batch: hybrid.RolloutBatch) -> list[str]:
    """The completions as text, without special tokens."""
    lengths = batch.completion_mask.sum(dim=1).tolist()
    rows = [ids[:length] for ids, length in zip(batch.completion_ids, lengths, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def sampling(args: PPOArguments, seed: int) -> hybrid.SamplingParams:
    """How the run draws its completions."""
    return hybrid.SamplingParams(
        max_new_tokens=args.response_length,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=seed,
        stop_token_ids=tuple(args.stop_token_ids),
    )


def collect(
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
    texts: list[str],
    iteration: int,
    args: PPOArguments,
) -> tuple[Experience, dict[str, float]]:
    """Roll out this rank's prompts `texts` and judge every token; gives the experience and the metrics of all ranks."""
    ids, prompt_mask = (tensor.to(models.policy.device) for tensor in encode_prompts(tokenizer, texts))
    row_ids = torch.arange(len(texts)) + dist.get_rank() * len(texts)
    with models.policy.inference():
        batch = models.policy.rollout(ids, prompt_mask, sampling(args, args.seed + iteration), row_ids=row_ids)
        sequences, attention_mask, mask = batch.sequences, batch.attention_mask, batch.completion_mask
        width = mask.shape[1]
        old_logps = batch.sampling_per_token_logps
        if args.logprob_mode == "recompute" and not args.importance_sampling_correction:
            recomputed = models.policy.score(sequences, attention_mask, temperature=args.temperature)
            old_logps = completions_of(recomputed.per_token_logps, width)
        reference = models.reference_scores(sequences, attention_mask, args.temperature)
    if args.importance_sampling_correction:  # of the trainer: scores come from where the samples came from
        old_logps = training_logps(models.policy, sequences, attention_mask, width, args) * mask
    ref_logps = completions_of(reference.per_token_logps, width)
    with models.critic.inference():
        values = token_values(models.critic, sequences, attention_mask, width)

    raw_scores = torch.tensor(reward(texts, decode_completions(tokenizer, batch)), device=values.device)
    ended = torch.tensor([reason == "stop" for reason in batch.finish_reason], device=values.device)
    scores = raw_scores.clamp(-args.clip_reward, args.clip_reward) - args.missing_eos_penalty * ~ended
    rewards = shaped_rewards(scores, old_logps, ref_logps, mask, args.kl_coef)
    if args.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, over_ranks=over_ranks)
    advantages, returns = advantages_and_returns(rewards, values, mask, args.gamma, args.lam)
    advantages = masked_whiten(advantages, mask, over_ranks=over_ranks)
    weights, weight_metrics = loss_weights(old_logps, batch.sampling_per_token_logps, mask, args)
    experience = Experience(
        sequences=sequences,
        attention_mask=attention_mask,
        mask=mask,
        sampling_logps=batch.sampling_per_token_logps,
        old_logps=old_logps,
        weights=weights,
        old_values=values,
        advantages=advantages,
        returns=returns,
    )

    kl = masked_sum(old_logps - ref_logps, mask)
    rows, tokens = len(texts) * dist.get_world_size(), over_ranks(mask.sum()).item()
    means = {
        "objective/kl": kl / rows,
        "objective/entropy": -masked_sum(old_logps, mask) / rows,
        "objective/scores": raw_scores.sum() / rows,
        "objective/non_score_reward": -args.kl_coef * kl / rows,
        "objective/rlhf_reward": (scores.sum() - args.kl_coef * kl) / rows,
        "val/num_eos_tokens": ended.sum(),
        "completions/mean_length": mask.sum() / rows,
        "completions/ref_nll": -masked_sum(ref_logps, mask) / tokens,  # of a token; low while text stays language
    }
    summed = over_ranks(torch.stack([value.double() for value in means.values()])).tolist()
    return experience, {**dict(zip(means, summed, strict=True)), **weight_metrics}


def loss_weights(
    old_logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, args: PPOArguments
) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights of the tokens in the policy loss, and their metrics; 1, and none, without a correction.

    old_logps, sampling_logps, mask [rows, completion]; the weights are [rows, completion]. Names are TRL's.
    """
    if not args.importance_sampling_correction:
        return torch.ones_like(old_logps), {}
    weights = importance_sampling_weights(old_logps, sampling_logps, mask, args.importance_sampling_cap)
    kept = weights[mask.bool()].double()
    total, tokens = over_ranks(torch.stack([kept.sum(), mask.sum().double()])).tolist()
    below, most = over_ranks(torch.stack([-kept.min(), kept.max()]), dist.ReduceOp.MAX).tolist()
    name = "sampling/importance_sampling_ratio"
    return weights, {f"{name}/min": -below, f"{name}/mean": total / tokens, f"{name}/max": most}
