"""A decoder's operations in torch, on any device: the reference for the faster kernels, and the fallback without them.

They round where Hugging Face's modules round (transformers 5.23), so that in bfloat16 too, a rollout and the training
forward differ only in the order of sums.
"""

import math
from collections.abc import Callable
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
    "relu2": lambda x: F.relu(x).square(),
}

# The matrix or the bias of an expert, by its role ("experts_gate_up" or "experts_down") and index.
OfExpert = Callable[[str, int], torch.Tensor]
# Called with the experts that a router has chosen for each token, int64 [tokens, experts per token].
Record = Callable[[torch.Tensor], None]

# Attention scores per head that exist at once: bounds the memory of attention.
SCORES_AT_A_TIME = 2**22


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation with every step rounded to x's dtype, as in transformers' "gelu_new".  Any shape."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def xielu(x: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv:2411.13010) with beta 0.5, every step rounded to x's dtype, as in transformers.

    positive, negative [1]: the learned parameters, before softplus.  Returns x's shape and dtype.
    """
    above, below = F.softplus(positive), 0.5 + F.softplus(negative)
    curved = (torch.expm1(torch.min(x, x.new_tensor(-1e-6))) - x) * below
    return torch.where(x > 0, above * x * x, curved) + 0.5 * x


mean_of_rows = partial(torch.mean, dim=-1, keepdim=True)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    mean_of: Callable[[torch.Tensor], torch.Tensor] = mean_of_rows,
) -> torch.Tensor:
    """x / rms(x) · (offset + weight), over the last dimension.  x [..., size], weight [size].

    float32: the weight is applied before rounding to x's dtype, not after.  mean_of: mean over the last dimension,
    [..., size] to [..., 1]; another one sums over ranks too.  Returns x's shape and dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(mean_of(wide.pow(2)) + eps)
    if float32:
        return ((weight.float() + offset) * wide).to(x.dtype)
    return (weight + offset) * wide.to(x.dtype) if offset else weight * wide.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """RoPE on the first rotary_dim elements of each head; the rest is copied.  Returns x's shape and dtype.

    x [tokens, heads, head_dim]; cos, sin [tokens, rotary_dim / 2]: in x's dtype to round every product to it, in
    float32 to round only the result. Pairs are (i, i + rotary_dim / 2), or neighbours (2i, 2i + 1) if `interleaved`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated_part = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated_part.to(x.dtype), rest), dim=-1)


def swiglu_clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate), of gate up to `limit` and up between -limit and limit (GPT-OSS)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    local_experts: range,
    matrix: OfExpert,
    bias: OfExpert | None,
    activated: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return a mixture of experts, or the contribution of `local_experts`.  [tokens, hidden], x's dtype

    x [tokens, hidden]; weights, chosen [tokens, per_token]: of the experts of each token. Outputs are summed in
    float32.
    matrix: ("experts_gate_up", expert) to [2 · inner, hidden], gate above up, or [inner, hidden] without a gate;
        ("experts_down", expert) to [hidden, inner].  bias: the same arguments to [out], added after the product is
        rounded; None: no biases.
    activated: the experts' activation, [items, 2 · inner] or [items, inner] to [items, inner].
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def linear(role: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        product = F.linear(rows, matrix(role, expert))
        return product if bias is None else product + bias(role, expert)

    for expert in chosen.unique().tolist():
        if expert not in local_experts:
            continue
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        expert_out = linear("experts_down", expert, activated(linear("experts_gate_up", expert, x[token])))
        out.index_add_(0, token, (expert_out * weights[token, rank, None]).float())
    return out.to(x.dtype)


@dataclass(frozen=True)
class Group:
    """Sequences with the same number of new tokens, for which attention is computed together.

    rows: int64 [sequences, new]: index of each new token in the packed tensors.
    positions: int64 [sequences, new]: position of each new token in its sequence.
    slot_mapping: int64 [sequences, longest]: the cache index of each position of a sequence. Past its end it
        repeats the first position's, so that no other sequence's values are read: they may be NaN.
    fresh: whether every token of every sequence is new.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    fresh: bool


def sequence_groups(
    cu_seqlens: torch.Tensor, lengths: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> tuple[Group, ...]:
    """Return the sequences of a packed batch, in groups. Synchronises with the device.

    cu_seqlens int32 [sequences + 1], lengths int32 [sequences], block_tables int32 [sequences, blocks]: PackedBatch's.
    """
    begins, ends = cu_seqlens.tolist(), lengths.tolist()
    members: dict[int, list[int]] = {}
    for sequence, (begin, end) in enumerate(pairwise(begins)):
        if end > begin:
            members.setdefault(end - begin, []).append(sequence)
    groups = []
    for new, sequences in members.items():
        size = max(1, SCORES_AT_A_TIME // (new * max(ends[sequence] for sequence in sequences)))
        parts = (sequences[start : start + size] for start in range(0, len(sequences), size))
        groups += [make_group(part, new, begins, ends, block_tables, block_size) for part in parts]
    return tuple(groups)


def make_group(
    sequences: list[int], new: int, begins: list[int], ends: list[int], block_tables: torch.Tensor, block_size: int
) -> Group:
    """Return the Group of `sequences`, each of which has `new` new tokens.

    begins: start of each sequence in the packed tensors.  ends: total tokens, by sequence.
    """
    index = partial(torch.tensor, device=block_tables.device)
    longest = max(ends[sequence] for sequence in sequences)
    first, length = index([begins[i] for i in sequences]), index([ends[i] for i in sequences])
    steps = torch.arange(new, device=block_tables.device)
    position_ids = torch.arange(longest, device=block_tables.device)
    position_ids = torch.where(position_ids < length[:, None], position_ids, 0)
    blocks = block_tables[index(sequences)].long().gather(1, position_ids // block_size)
    return Group(
        rows=first[:, None] + steps,
        positions=(length - new)[:, None] + steps,
        slot_mapping=blocks * block_size + position_ids % block_size,
        fresh=all(ends[sequence] == new for sequence in sequences),
    )


def alibi_bias(slopes: torch.Tensor, positions: int, dtype: torch.dtype, product_scale: float = 0.0) -> torch.Tensor:
    """ALiBi's bias of the scores, in `dtype` [heads, positions].  slopes float32 [heads].

    product_scale: if 0, slope · position is rounded to `dtype`. Otherwise slope / product_scale, the position and their
    product are rounded to bfloat16, and the product is multiplied by product_scale in `dtype` (Falcon).
    """
    position_ids = torch.arange(positions, device=slopes.device)
    if not product_scale:
        return (slopes[:, None] * position_ids).to(dtype)
    return ((slopes / product_scale).bfloat16()[:, None] * position_ids.bfloat16()).to(dtype) * product_scale


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of a batch's new tokens, whose keys and values are in the cache already.

    q [tokens, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim], whose values may have another
    number of elements; groups: of `sequence_groups`.
    bias: added to the scores, [heads, positions], or None.
    window: a query sees itself and the `window - 1` tokens before it; 0: all tokens before it; below 0: those of its
    chunk of `-window` tokens.
    eager: scores and probabilities are rounded to q's dtype step by step, as in Hugging Face's "eager" attention; a
    soft cap implies it.
    sinks: for each head, the logit of a key without a value, [heads]; without a soft cap and bias. None: no such key.
    Returns [tokens, heads, elements of a value], in q's dtype.
    """
    out = q.new_empty(*q.shape[:-1], values.shape[-1])
    attend = eager_attention if eager or softcap else sdpa_attention
    if sinks is not None:
        assert attend is sdpa_attention and bias is None, "sinks with a soft cap or bias"
        attend = partial(sink_attention, sinks=sinks)
    for group in groups:
        k = keys.flatten(0, 1)[group.slot_mapping].transpose(1, 2)  # [sequences, kv_heads, longest, head_dim]
        v = values.flatten(0, 1)[group.slot_mapping].transpose(1, 2)
        extra = None if bias is None else bias[:, : k.shape[2]]
        attended = attend(q[group.rows].transpose(1, 2), k, v, visible(group, window), scale, softcap, extra)
        out[group.rows] = attended.transpose(1, 2)
    return out


def visible(group: Group, window: int) -> torch.Tensor | None:
    """Return the attention mask, bool [sequences, 1, new, longest], True where a query sees a position; None if
    causal."""
    longest, query = group.slot_mapping.shape[1], group.positions.unsqueeze(-1)
    if group.fresh and not 0 < abs(window) < longest:
        return None
    position_ids = torch.arange(longest, device=query.device)
    seen = position_ids <= query
    if window:
        first = query // -window * -window if window < 0 else query - window + 1
        seen = seen & (position_ids >= first)
    return seen.unsqueeze(1)


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    _softcap: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention.  Returns q's shape and dtype.

    q [sequences, heads, new, head_dim]; k, v [sequences, kv_heads, longest, head_dim]; seen: of `visible`; bias:
    [heads, longest] or None.
    """
    mask = seen
    if bias is not None:
        seen = causal(q.shape[2], k.shape[2], q.device) if seen is None else seen
        mask = torch.where(seen, bias[:, None].to(q.dtype), -torch.inf)  # [sequences or 1, heads, new, longest]
    return masked_sdpa(q, k, v, mask, scale)


def masked_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's attention with a mask [sequences or 1, heads or 1, new, longest], bool or added to the scores; None:
    causal.  Other shapes as in `sdpa_attention`."""
    sequences, heads, new, head_dim = q.shape
    kv_heads = k.shape[1]
    if new == 1:  # treat the query heads of a KV head as queries, so that keys are not repeated
        q = q.reshape(sequences, kv_heads, -1, head_dim)
        mask = mask if mask is None or mask.shape[1] == 1 else mask.reshape(len(mask), kv_heads, -1, mask.shape[-1])
    out = F.scaled_dot_product_attention(
        q, k, v, mask, scale=scale, is_causal=mask is None and new > 1, enable_gqa=q.shape[1] != kv_heads
    )
    return out.reshape(sequences, heads, new, v.shape[-1])


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float,
    bias: torch.Tensor | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """`sdpa_attention` with a further key of zeros for each head, whose score is its sink and whose value is 0."""
    new, longest = q.shape[2], k.shape[2]
    seen = causal(new, longest, q.device) if seen is None else seen
    scores = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    scores = scores.expand(-1, len(sinks), -1, -1)
    sink = sinks.to(q.dtype)[None, :, None, None].expand(len(scores), -1, new, 1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return masked_sdpa(q, k, v, torch.cat((scores, sink), dim=-1), scale)


def causal(new: int, longest: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of queries that are a sequence's last tokens, bool [1, 1, new, longest]."""
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
    """Attention with every step rounded, for soft caps and BLOOM's bias.  Shapes as in `sdpa_attention`."""
    sequences, heads, new, head_dim = q.shape
    kv_heads, longest = k.shape[1:3]
    q = q.reshape(sequences * kv_heads, -1, head_dim)  # query heads of a KV head, one after the other
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
    probs = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(probs.view(len(q), -1, longest), v).view(sequences, heads, new, head_dim)
