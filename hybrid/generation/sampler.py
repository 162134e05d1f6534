"""Reproducible sampling: a token is a function of (seed, row, sample, position) and its logits, and of nothing else."""

import ctypes
from dataclasses import dataclass

import torch
from transformers.generation import logits_process as processes

from hybrid.inputs import as_ids
from hybrid.kernels import has_triton
from hybrid.kernels.cpu_library import Draw as DrawRecord
from hybrid.kernels.cpu_library import address, cpu_library

# splitmix64's constants (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), as int64.
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 `x`; torch's `>>` repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors; products wrap as in C."""
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


def stream_keys(seed: int, rows: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """The RNG key of each (row, sample).  rows, samples int64 [n]; returns int64 [n]."""
    key = mixed(torch.full_like(rows, wrapped(seed)) + GOLDEN)
    key = mixed(key ^ mixed(rows + GOLDEN))
    return mixed(key ^ mixed(samples + GOLDEN))


def wrapped(seed: int) -> int:
    """Any integer wrapped to int64."""
    return (seed + 2**63) % 2**64 - 2**63


class Seeds:
    """Seeds for calls that give none: a function of torch's initial seed and of the number of seeds given before.

    Nothing is drawn from torch's generators, so that a run that samples trains to the same bits as one that does not.
    `torch.manual_seed` with another seed restarts the sequence.
    initial: replaces torch's initial seed until that changes, for ranks that must draw the same tokens.
    """

    def __init__(self, initial: int | None = None):
        self.of_torch = torch.initial_seed()
        self.initial = self.of_torch if initial is None else initial
        self.count = 0

    def next(self) -> int:
        """The next seed."""
        if torch.initial_seed() != self.of_torch:
            self.of_torch = self.initial = torch.initial_seed()
            self.count = 0
        self.count += 1
        return int(stream_keys(self.initial, torch.tensor([self.count]), torch.tensor([0])))


def uniform(keys: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """A number in [0, 1) for each (key, position), a pure function of both.

    keys int64 [n], positions int64 [n] or an int for all keys; returns float64 [n].
    """
    return shifted(mixed(keys + (torch.as_tensor(positions) + 1) * GOLDEN), 11).double() * 2.0**-53


def inverse_cdf(scores: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative softmax of `scores` passes u.  scores [n, vocab], u [n] in [0, 1); returns
    int64 [n].

    A token of probability 0 is never chosen: `right=True` steps over flat parts, and u·total stays below total.
    """
    cdf = torch.softmax(scores.float(), dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.minimum(u.unsqueeze(1).to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def selective_log_softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log softmax(logits) at `ids`, without storing it for the whole vocabulary.

    logits [..., vocab] of any floating dtype, ids [...] of any integer dtype; returns float32 [...], differentiable.
    """
    chosen = logits.gather(-1, as_ids(ids, logits.device).unsqueeze(-1)).squeeze(-1).float()
    return chosen - torch.logsumexp(logits.float(), dim=-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of softmax(logits) in nats.  logits [..., vocab]; returns float32 [...]."""
    log_probs = torch.log_softmax(logits.float(), dim=-1).clamp(min=torch.finfo(torch.float32).min)  # 0 · -inf is NaN
    return -(log_probs.exp() * log_probs).sum(dim=-1)


@dataclass(frozen=True)
class SamplingMetadata:
    """How a token is drawn from logits.

    temperature: divides the logits; 0 is greedy.  top_k, top_p, min_p: truncations as in Hugging Face; 0, 1.0 and 0.0
        turn them off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether the distribution is truncated."""
        return self.temperature > 0 and bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def warpers(self) -> processes.LogitsProcessorList:
        """Hugging Face's processors with the same effect on logits."""
        steps = processes.LogitsProcessorList()
        if self.temperature not in (0, 1.0):
            steps.append(processes.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            steps.append(processes.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            steps.append(processes.TopPLogitsWarper(self.top_p))
        if self.min_p:
            steps.append(processes.MinPLogitsWarper(self.min_p))
        return steps


@dataclass(frozen=True)
class SamplerOutput:
    """Tokens and their logprobs.  tokens: int64 [n].  The logprobs: float32 [n].

    sampling_logps: under the distribution drawn from, softmax(logits / T), truncated and renormalised.
    old_logps: under softmax(logits / T).
    raw_logps: under softmax(logits).
    T is the temperature; 1 if the draw is greedy.
    """

    tokens: torch.Tensor
    sampling_logps: torch.Tensor
    old_logps: torch.Tensor
    raw_logps: torch.Tensor


def sample_tokens(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, metadata: SamplingMetadata
) -> SamplerOutput:
    """Sample a token for each row of logits, float32 [n, vocab].  keys, positions: int64 [n], as in `uniform`."""
    if logits.is_cuda and has_triton() and not metadata.top_k and metadata.top_p == 1.0:
        from hybrid.kernels.triton_sampling import sample  # needs triton, which a CPU install lacks

        settings = (logits.new_full((len(logits),), value) for value in (metadata.temperature, metadata.min_p))
        return SamplerOutput(*sample(logits, keys, positions.int(), *settings))
    library = cpu_library() if logits.device.type == "cpu" else None
    if library is None:
        return sample_tokens_in_torch(logits, keys, positions, metadata)
    rows, vocab = logits.shape
    logits, keys, positions = logits.contiguous(), keys.contiguous(), positions.contiguous()
    drawn = SamplerOutput(torch.empty(rows, dtype=torch.int64), *torch.empty(3, rows))
    record = DrawRecord(
        temperature=metadata.temperature, top_k=metadata.top_k, top_p=metadata.top_p, min_p=metadata.min_p
    )
    library.sample(
        address(logits, torch.float32),
        rows,
        vocab,
        address(keys, torch.int64),
        address(positions, torch.int64),
        ctypes.addressof(record),
        address(drawn.tokens, torch.int64),
        address(drawn.sampling_logps, torch.float32),
        address(drawn.old_logps, torch.float32),
        address(drawn.raw_logps, torch.float32),
        torch.get_num_threads(),
    )
    return drawn


def sample_tokens_in_torch(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, metadata: SamplingMetadata
) -> SamplerOutput:
    """`sample_tokens` in torch operations, on any device, without a synchronisation with it."""
    greedy = metadata.temperature == 0
    scores = logits if greedy else metadata.warpers()(None, logits)
    tokens = logits.argmax(dim=-1) if greedy else inverse_cdf(scores, uniform(keys, positions))
    raw = selective_log_softmax(logits, tokens)
    old = raw if metadata.temperature in (0, 1.0) else selective_log_softmax(logits / metadata.temperature, tokens)
    return SamplerOutput(tokens, selective_log_softmax(scores, tokens) if metadata.truncates else old, old, raw)


def score_tokens(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each row's target, and the entropy, both under softmax(logits / temperature).

    logits float32 [n, vocab], targets int64 [n]; returns float32 [n] twice.
    """
    library = cpu_library() if logits.device.type == "cpu" else None
    if library is None:
        logits = logits / temperature
        return selective_log_softmax(logits, targets), entropy(logits)
    rows, vocab = logits.shape
    logits, targets = logits.contiguous(), targets.contiguous()
    logps, entropies = torch.empty(rows), torch.empty(rows)
    library.score(
        address(logits, torch.float32),
        rows,
        vocab,
        address(targets, torch.int64),
        temperature,
        address(logps, torch.float32),
        address(entropies, torch.float32),
        torch.get_num_threads(),
    )
    return logps, entropies
