"""The choice of each token's experts in a mixture, and their weights: settings, and the computation in torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Router:
    """Settings by which a router chooses each token's experts and their weights.

    scores: "softmax" over all experts; "softmax_chosen": over the logits of the chosen experts (GPT-OSS, GraniteMoE);
        "sigmoid"; "sigmoid_chosen": of the experts with the largest logits (Llama 4); "sparsemixer": two experts, each
        by a softmax over the experts near the best of the remaining ones (PhiMoE).
    float32: logits are products in float32, of float32 weights.
    groups, top_groups: experts are chosen from `top_groups` of `groups` groups of consecutive experts: those with the
        largest sums of their `group_best` best scores.
    normalize: the chosen experts' weights are divided by their sum plus `epsilon`, or by `min_total` if that is larger.
    scale: factor of the weights.
    float32_weights: weights are not rounded to the model's dtype before they scale the experts' outputs.
    scales_inputs: the weight of a token's only expert is a factor of its input, not of its output (Llama 4).
    stepwise: everything behind the logits is rounded to the model's dtype at every step (LFM2-MoE); but scores with
        their correction are not if `float32_choice`.
    jitter: sparsemixer's.

    A correction bias is a weight of its own, with the role `correction`: it is added to the scores for the choice only.
    """

    scores: str = "softmax"
    float32: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    normalize: bool = False
    epsilon: float = 0.0
    min_total: float = 0.0
    scale: float = 1.0
    float32_weights: bool = False
    scales_inputs: bool = False
    stepwise: bool = False
    float32_choice: bool = False
    jitter: float = 0.0


def routed(
    logits: torch.Tensor,
    router: Router,
    per_token: int,
    dtype: torch.dtype,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and indices of the experts of each token, [tokens, per_token].

    logits [tokens, experts], in `dtype` or float32.  per_token: experts per token.  dtype: the model's.
    correction: float32 [experts], or None.  expert_scale: factor of each expert's weights, [experts], or None.
    """
    if router.scores == "sparsemixer":
        return sparsemixer(logits, router.jitter)
    logits = logits.to(dtype) if router.stepwise else logits.float()
    if router.scores in ("softmax_chosen", "sigmoid_chosen"):
        weights, experts = logits.topk(per_token, dim=-1)
        weights = weights.softmax(-1) if router.scores == "softmax_chosen" else weights.sigmoid()
    else:
        scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
        choice = scores if correction is None else scores + correction
        if router.stepwise and not router.float32_choice:
            choice = choice.to(dtype)
        if router.groups > 1:
            choice = in_top_groups(choice, router)
        weights, experts = choice.topk(per_token, dim=-1)
        if choice is not scores:
            weights = scores.gather(1, experts)
    if router.normalize:
        total = weights.sum(-1, keepdim=True)
        if router.epsilon:
            total = total + router.epsilon
        weights = weights / (total.clamp(min=router.min_total) if router.min_total else total)
    if router.scale != 1.0:
        weights = weights * router.scale
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    return weights if router.float32_weights else weights.to(dtype), experts


def in_top_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    """Return `choice` [tokens, experts] with -inf for the experts outside each token's `top_groups` groups."""
    grouped = choice.unflatten(-1, (router.groups, -1))
    best = grouped.topk(router.group_best, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    outside = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter(1, best, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)


def sparsemixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and indices of two experts of each token, [tokens, 2], as PhiMoE in eval mode.

    The first has the largest logit, the second the next one. Each one's weight is its softmax over the experts whose
    logits, relative to their size, are less than 2 · jitter below its own, without the first one for the second.
    """
    weights, experts, left = [], [], logits
    for _ in range(2):
        best, index = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, index))
        experts.append(index)
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)
