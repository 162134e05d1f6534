"""Sampling that can be repeated: a token depends on (seed, row, sample, position) and its logits, on nothing else."""

import torch

# splitmix64's constants (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), as int64.
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without the sign, which torch's int64 shift would repeat."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors, whose products wrap as in C."""
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


def stream_keys(seed: int, rows: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """A key for the noise of each (row, sample).  rows, samples int64 [n]; gives int64 [n]."""
    key = mixed(torch.full_like(rows, wrapped(seed)) + GOLDEN)
    key = mixed(key ^ mixed(rows + GOLDEN))
    return mixed(key ^ mixed(samples + GOLDEN))


def wrapped(seed: int) -> int:
    """Any integer as an int64."""
    return (seed + 2**63) % 2**64 - 2**63


def uniform(keys: torch.Tensor, position: int) -> torch.Tensor:
    """A number in [0, 1) for each key at `position`, a pure function of both.  keys int64 [n]; gives float64 [n]."""
    bits = mixed(keys + wrapped(GOLDEN * (position + 1)))
    return shifted(bits, 11).double() * 2.0**-53


def inverse_cdf(scores: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative softmax of `scores` passes u.  scores [n, vocab], u [n] in [0, 1); int64 [n].

    A token of probability 0 is never chosen: `right=True` steps over flat parts, and u·total stays below total.
    """
    cdf = torch.softmax(scores.float(), dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.minimum(u.unsqueeze(1).to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def selective_log_softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log softmax(logits) at `ids`, without keeping it for the whole vocabulary.

    logits [..., vocab] of any floating dtype, ids int64 [...]; gives float32 [...], differentiable.
    """
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).float()
    return chosen - torch.logsumexp(logits.float(), dim=-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of softmax(logits) in nats.  logits [..., vocab]; gives float32 [...]."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return -(log_probs.exp() * log_probs).sum(dim=-1)
