"""A decoder's operations in torch, on any device: the reference for faster ones, and what runs where there are none.

They round where Hugging Face's modules round (transformers 5.23), so that in bfloat16, too, a rollout and the training
forward differ by the order of sums alone.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

# Scores of one head that are computed at a time: bounds what attention allocates.
SCORES_AT_A_TIME = 2**22


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation step by step, each rounded, as transformers' "gelu_new" goes."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def mean_of_rows(x: torch.Tensor) -> torch.Tensor:
    """The mean over the last dimension, which stays."""
    return x.mean(-1, keepdim=True)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    mean_of: Callable[[torch.Tensor], torch.Tensor] = mean_of_rows,
) -> torch.Tensor:
    """x / rms(x) · (offset + weight), over the last dimension.  x [..., size], weight [size].

    float32: the weight is applied before rounding to x's dtype, not after.  mean_of: [..., size] to [..., 1].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(mean_of(wide.pow(2)) + eps)
    if float32:
        return ((weight.float() + offset) * wide).to(x.dtype)
    return (weight + offset) * wide.to(x.dtype) if offset else weight * wide.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The leading elements of each head turned, the others as they are.

    x [tokens, heads, head_dim]; cos, sin [tokens, rotary_dim / 2], in x's dtype where products are rounded to it, and
    in float32 where only the result is. Pairs are (i, i + rotary_dim / 2), or neighbours where `interleaved`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turning, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    one, other = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    pair = one * cos - other * sin, other * cos + one * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    here: range,
    matrix: Callable[[str, int], torch.Tensor],
    per_token: int,
    normalize: bool,
    float32: bool,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A mixture of gated experts, or what those in `here` add to it.

    x [tokens, hidden], router [experts, hidden]. matrix: "experts_gate_up" and an expert's number to
    [2 · inner, hidden], "experts_down" to [hidden, inner].
    What a token's experts make is scaled by their weights, in x's dtype or where `float32` in that, and summed in
    float32.
    """
    weights, chosen = F.linear(x, router).float().softmax(-1).topk(per_token, dim=-1)  # [tokens, per_token]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights if float32 else weights.to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert not in here:
            continue
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], matrix("experts_gate_up", expert)).chunk(2, dim=-1)
        made = F.linear(activation(gate) * up, matrix("experts_down", expert))
        out.index_add_(0, token, (made * weights[token, rank, None]).float())
    return out.to(x.dtype)


@dataclass(frozen=True)
class Group:
    """Sequences with equally many new tokens, which attention computes together.

    rows: int64 [sequences, new]: where their new tokens are in the packed tensors.
    positions: int64 [sequences, new]: those tokens' positions.
    slots: int64 [sequences, longest]: where in the cache each position of a sequence is; behind its last, that of its
        first, so that no other sequence's values are touched, whatever they are.
    fresh: every token of every sequence is new.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    fresh: bool


def sequence_groups(
    cu_seqlens: torch.Tensor, lengths: torch.Tensor, block_tables: torch.Tensor, page_size: int
) -> tuple[Group, ...]:
    """The sequences of a packed batch, in groups. Waits for the device.

    starts int32 [sequences + 1], lengths int32 [sequences], tables int32 [sequences, pages], as a PackedBatch's.
    """
    begins, ends = cu_seqlens.tolist(), lengths.tolist()
    members: dict[int, list[int]] = {}
    for sequence, (begin, end) in enumerate(pairwise(begins)):
        members.setdefault(end - begin, []).append(sequence)
    return tuple(
        one_group(part, new, begins, ends, block_tables, page_size)
        for new, sequences in members.items()
        if new
        for part in parts(sequences, new, ends)
    )


def parts(sequences: list[int], new: int, ends: list[int]) -> Iterator[list[int]]:
    """The sequences, cut into runs whose scores are not too many at a time."""
    at_a_time = max(1, SCORES_AT_A_TIME // (new * max(ends[sequence] for sequence in sequences)))
    for start in range(0, len(sequences), at_a_time):
        yield sequences[start : start + at_a_time]


def one_group(
    sequences: list[int], new: int, begins: list[int], ends: list[int], block_tables: torch.Tensor, page_size: int
) -> Group:
    """The group of these sequences, each of which has `new` new tokens."""
    index = partial(torch.tensor, device=block_tables.device)
    longest = max(ends[sequence] for sequence in sequences)
    first, length = index([begins[i] for i in sequences]), index([ends[i] for i in sequences])
    steps = torch.arange(new, device=block_tables.device)
    place = torch.arange(longest, device=block_tables.device)
    place = torch.where(place < length[:, None], place, 0)
    pages = block_tables[index(sequences)].long().gather(1, place // page_size)
    return Group(
        rows=first[:, None] + steps,
        positions=(length - new)[:, None] + steps,
        slots=pages * page_size + place % page_size,
        fresh=all(ends[sequence] == new for sequence in sequences),
    )


def alibi_bias(slopes: torch.Tensor, positions: int, dtype: torch.dtype, product_scale: float = 0.0) -> torch.Tensor:
    """ALiBi's addend to scores, [heads, positions].  slopes float32 [heads].

    product_scale: 0: slope · position is rounded to `dtype`. Else slope / product_scale, the position, and their
    product are rounded to bfloat16, and the product is scaled in `dtype` (Falcon).
    """
    places = torch.arange(positions, device=slopes.device)
    if not product_scale:
        return (slopes[:, None] * places).to(dtype)
    return ((slopes / product_scale).bfloat16()[:, None] * places.bfloat16()).to(dtype) * product_scale


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: tuple[Group, ...],
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    bias: torch.Tensor | None = None,
    eager: bool = False,
) -> torch.Tensor:
    """Causal attention of a batch's new tokens to their sequences, whose keys and values are all in the cache.

    q [tokens, heads, head_dim]; keys, values [pages, page_size, kv_heads, head_dim]; bias: None, or what is added to
    the scores, [heads, positions]. A query sees itself and the `window - 1` tokens before it; 0: all before it.
    eager: scores and probabilities are rounded to q's dtype one by one, as Hugging Face's "eager" attention does;
    soft caps imply it.
    """
    out = torch.empty_like(q)
    attend = eager_attention if eager or softcap else sdpa_attention
    for group in groups:
        k = keys.flatten(0, 1)[group.slots].transpose(1, 2)  # [sequences, kv_heads, longest, head_dim]
        v = values.flatten(0, 1)[group.slots].transpose(1, 2)
        extra = None if bias is None else bias[:, : k.shape[2]]
        found = attend(q[group.rows].transpose(1, 2), k, v, visible(group, window), scale, softcap, extra)
        out[group.rows] = found.transpose(1, 2)
    return out


def visible(group: Group, window: int) -> torch.Tensor | None:
    """Which positions each query sees, bool [sequences, 1, new, longest]; None where plain causality says it all."""
    longest, query = group.slots.shape[1], group.positions.unsqueeze(-1)
    if group.fresh and not 0 < window < longest:
        return None
    place = torch.arange(longest, device=query.device)
    seen = place <= query
    return (seen & (place > query - window) if window else seen).unsqueeze(1)


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    _softcap: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's own.  q [sequences, heads, new, head_dim], k and v [sequences, kv_heads, longest, head_dim]."""
    sequences, heads, new, head_dim = q.shape
    kv_heads = k.shape[1]
    mask = seen if bias is None else biased(bias, seen, k.shape[2], new, q.dtype)
    if new == 1:  # the query heads of a key head take the place of queries, so that no key is repeated
        q = q.reshape(sequences, kv_heads, -1, head_dim)
        mask = mask if mask is None or mask.shape[1] == 1 else mask.reshape(len(mask), kv_heads, -1, mask.shape[-1])
    out = F.scaled_dot_product_attention(
        q, k, v, mask, scale=scale, is_causal=mask is None and new > 1, enable_gqa=q.shape[1] != kv_heads
    )
    return out.reshape(sequences, heads, new, head_dim)


def biased(bias: torch.Tensor, seen: torch.Tensor | None, longest: int, new: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask that adds `bias` [heads, longest] where a query sees, [sequences or 1, heads, new, longest]."""
    seen = causal(new, longest, bias.device) if seen is None else seen
    return torch.where(seen, bias[:, None].to(dtype), -torch.inf)


def causal(new: int, longest: int, device: torch.device) -> torch.Tensor:
    """What queries see of a sequence whose last tokens they are, bool [1, 1, new, longest]."""
    return torch.ones(new, longest, dtype=torch.bool, device=device).tril(longest - new)[None, None]


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Step by step, rounding each: soft caps, and BLOOM's bias.  Shapes as in `sdpa_attention`."""
    sequences, heads, new, head_dim = q.shape
    kv_heads, longest = k.shape[1:3]
    q = q.reshape(sequences * kv_heads, -1, head_dim)  # the query heads of a key head, one behind the other
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    if bias is None:
        scores = torch.bmm(q, k.transpose(1, 2)) * scale
    else:
        every = bias[None, :, None].expand(sequences, heads, new, longest).reshape(len(q), -1, longest)
        scores = torch.baddbmm(every, q, k.transpose(1, 2), alpha=scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = causal(new, longest, q.device) if seen is None else seen
    scores = scores.view(sequences, heads, new, longest).masked_fill(~seen, -torch.inf)
    chances = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(chances.view(len(q), -1, longest), v).view(sequences, heads, new, head_dim)
