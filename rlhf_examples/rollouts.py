"""What an iteration learns from: completions, and everything that is known of each of their tokens."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.arguments import PPOArguments
from rlhf_examples.data import encode_prompts
from rlhf_examples.losses import advantages_and_returns, masked_sum, masked_whiten, shaped_rewards
from rlhf_examples.models import Models
from rlhf_examples.rewards import Reward


@dataclass(frozen=True)
class Experience:
    """The rows of one rank.  sequences, attention_mask [rows, prompt + completion]; the others [rows, completion]."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    old_logps: torch.Tensor
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def take(self, rows: torch.Tensor) -> "Experience":
        """Some of the rows."""
        return Experience(**{name: tensor[rows] for name, tensor in vars(self).items()})


def over_ranks(sums: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks."""
    sums = sums.clone()
    dist.all_reduce(sums)
    return sums


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
        recomputed = completions_of(
            models.policy.score(sequences, attention_mask, temperature=args.temperature).per_token_logps, width
        )
        reference = models.reference_scores(sequences, attention_mask, args.temperature)
    old_logps = batch.sampling_per_token_logps if args.logprob_mode == "sampling" else recomputed
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
    experience = Experience(sequences, attention_mask, mask, old_logps, values, advantages, returns)

    difference = (recomputed - batch.sampling_per_token_logps).abs()
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
        "sampling/sampling_logp_difference/mean": masked_sum(difference, mask) / tokens,
        "completions/ref_nll": -masked_sum(ref_logps, mask) / tokens,  # of a token; low while text stays language
    }
    summed = over_ranks(torch.stack([value.double() for value in means.values()])).tolist()
    largest = difference.max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    metrics = dict(zip(means, summed, strict=True))
    return experience, {**metrics, "sampling/sampling_logp_difference/max": largest.item()}
