"""Reproducible sampling: a token is a function of (seed, row, sample, position) and its logits, and of nothing else."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.kernels import has_triton
from hybrid.kernels.cpu_library import Samples, address, cpu_library
from hybrid.runtime.inputs import as_ids
from hybrid.sampling.params import RowParams, SamplingParams, truncates, warped
from hybrid.sampling.vocabulary import VocabularySlice, own_columns

PER_TOKEN = ("sampling_logps", "old_logps", "raw_logps", "sampling_mask")  # fields of SamplerOutput
NOT_TRUNCATED = -1  # of a sampling mask

# splitmix64's constants (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), as int64.
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return logical right shift of int64 `x`; torch's `>>` repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors; products wrap as in C."""
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


def stream_keys(seed: int, rows: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Return the RNG key of each (row, sample).  rows, samples int64 [n]; returns int64 [n]."""
    key = mixed(torch.full_like(rows, wrapped(seed)) + GOLDEN)
    key = mixed(key ^ mixed(rows + GOLDEN))
    return mixed(key ^ mixed(samples + GOLDEN))


def key_after_fork(key: torch.Tensor) -> torch.Tensor:
    """Return the RNG key with which a row goes on after its environment has rewritten its history.  int64 []"""
    return mixed(key + 1)


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
        """Return the next seed."""
        if torch.initial_seed() != self.of_torch:
            self.of_torch = self.initial = torch.initial_seed()
            self.count = 0
        self.count += 1
        return int(stream_keys(self.initial, torch.tensor([self.count]), torch.tensor([0])))


def uniform(keys: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """Return a number in [0, 1) for each (key, position), a pure function of both.

    keys int64 [n], positions int64 [n] or an int for all keys; returns float64 [n].
    """
    return shifted(mixed(keys + (torch.as_tensor(positions) + 1) * GOLDEN), 11).double() * 2.0**-53


def inverse_cdf(scores: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the token at which the cumulative softmax of `scores` passes u.  scores [n, vocab], u [n] in [0, 1);
    returns int64 [n]. The last token where the softmax is NaN.

    A token of probability 0 is never chosen: `right=True` steps over flat parts, and u·total stays below total.
    """
    cdf = torch.softmax(scores.float(), dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.minimum(u.unsqueeze(1).to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)


def selective_log_softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log softmax(logits) at `ids`, without storing it for the whole vocabulary.

    logits [..., vocab] of any floating dtype, ids [...] of any integer dtype; returns float32 [...], differentiable.
    """
    chosen = logits.gather(-1, as_ids(ids, logits.device).unsqueeze(-1)).squeeze(-1).float()
    return chosen - torch.logsumexp(logits.float(), dim=-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of softmax(logits) in nats.  logits [..., vocab]; returns float32 [...]."""
    log_probs = torch.log_softmax(logits.float(), dim=-1).clamp(min=torch.finfo(torch.float32).min)  # 0 · -inf is NaN
    return -(log_probs.exp() * log_probs).sum(dim=-1)


@dataclass(frozen=True)
class SamplerOutput:
    """Tokens and their logprobs.  tokens: int64 [n].  The others: float32 [n].

    sampling_logps: under the distribution drawn from, softmax(logits / T), truncated and renormalised.
    old_logps: under softmax(logits / T).
    raw_logps: under softmax(logits).
    sampling_mask: the tokens that truncation kept, by the id of the least probable one besides the sampled token: see
        `masked_logits`. float32 has ids below 2**24 exactly.
    T is the temperature; 1 if the draw is greedy.
    All three logprobs are NaN in a row whose logits have no softmax: one of them is NaN or +inf, or all are -inf. Its
    token is any of the vocabulary.
    """

    tokens: torch.Tensor
    sampling_logps: torch.Tensor
    old_logps: torch.Tensor
    raw_logps: torch.Tensor
    sampling_mask: torch.Tensor

    def per_token(self) -> torch.Tensor:
        """Return the three logprobs and the sampling mask, float32 [4, n]."""
        return torch.stack([getattr(self, name) for name in PER_TOKEN])


def runs_triton(logits: torch.Tensor) -> bool:
    """Whether Triton's kernels read these logits."""
    return logits.is_cuda and has_triton()


def sample_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingParams | RowParams,
    vocabulary: VocabularySlice | None = None,
    values: torch.Tensor | None = None,
) -> SamplerOutput:
    """Sample a token for each row of logits.

    Args:
        logits: float32 [n, vocab].
        keys: int64 [n], as in `uniform`.
        positions: int64 [n], as in `uniform`.
        params: of all rows, or by row; without repetition_penalty and min_new_tokens, which need the row's tokens.
        vocabulary: the slice that `logits` [n, width] are of; ranks then exchange sums and candidates, and each gets
            the tokens of the whole vocabulary. None: the whole vocabulary.
        values: these settings on the device, as `values_of_rows` returns them, for Triton's kernels. None: they are
            copied there, which no CUDA graph can contain.
    """
    params = RowParams.of(params) if isinstance(params, SamplingParams) else params
    processed = any(each.repetition_penalty != 1.0 or each.min_new_tokens for each in params.distinct)
    assert not processed, "repetition_penalty and min_new_tokens need the row's tokens"
    if vocabulary is not None:
        return sample_sharded(logits, keys, positions, params, vocabulary, values)
    if values is not None or runs_triton(logits):
        # needs triton, which a CPU install lacks
        from hybrid.kernels.triton_sampling import sample, sampling_features, values_of_rows

        if values is None:
            values = values_of_rows(params.table, params.index, len(logits), logits.device)
        features = sampling_features(params.table)
        return SamplerOutput(*sample(logits, keys.contiguous(), positions.contiguous(), values, features))
    library = cpu_library() if logits.device.type == "cpu" else None
    if library is None:
        return sample_tokens_in_torch(logits, keys, positions, params)
    logits = logits.contiguous()
    record, sampled = samples_record(keys, positions, params)
    at = address(logits, torch.float32)
    library.sample(at, logits.shape[1], ctypes.addressof(record), torch.get_num_threads())
    return sampled


def samples_record(
    keys: torch.Tensor, positions: torch.Tensor, params: RowParams, *steps: int
) -> tuple[ctypes.Structure, SamplerOutput]:
    """Return the C++ kernels' record of the tokens to sample, and the output that they write, [*steps, n].

    The output is valid as long as the record.

    keys, positions: int64 [n].
    """
    keys, positions, shape = keys.contiguous(), positions.contiguous(), (*steps, len(keys))
    sampled = SamplerOutput(torch.empty(shape, dtype=torch.int64), *(torch.empty(shape) for _ in PER_TOKEN))
    record = Samples(
        draws=address(params.table, torch.float64),
        draw_of_row=None if params.index is None else address(params.index, torch.int64),
        rows=len(keys),
        keys=address(keys, torch.int64),
        positions=address(positions, torch.int64),
        tokens=address(sampled.tokens, torch.int64),
        **{name: address(getattr(sampled, name), torch.float32) for name in PER_TOKEN},
    )
    record.tensors = keys, positions, params, sampled  # keeps alive what it points to
    return record, sampled


def sample_by_settings(sample: Callable[[SamplingParams, Any], SamplerOutput], params: RowParams) -> SamplerOutput:
    """Sample rows of equal settings together.  sample: for these settings, and the rows, int64 [n], that have them."""
    if params.index is None:
        return sample(params.distinct[0], slice(None))
    groups: list[tuple[SamplingParams, Any]] = list(params.groups())
    parts = [sample(*group) for group in groups]
    order = torch.cat([rows for _, rows in groups]).argsort()
    return SamplerOutput(*(torch.cat(values)[order] for values in zip(*map(in_fields, parts), strict=True)))


def in_fields(output: SamplerOutput) -> tuple[torch.Tensor, ...]:
    """Return the fields of an output in their order."""
    return output.tokens, *(getattr(output, name) for name in PER_TOKEN)


def sample_sharded(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    params: RowParams,
    vocabulary: VocabularySlice,
    values: torch.Tensor | None = None,
) -> SamplerOutput:
    """`sample_tokens` from a slice of the vocabulary, logits float32 [n, width]. A collective of the group."""
    logits = logits.contiguous()
    if vocabulary.group.shares_memory:
        record, sampled = samples_record(keys, positions, params)
        cpu_library().sample_sharded(
            ctypes.addressof(vocabulary.group.record),
            address(logits, torch.float32),
            vocabulary.width,
            vocabulary.count,
            vocabulary.first,
            vocabulary.size,
            ctypes.addressof(record),
            torch.get_num_threads(),
        )
        vocabulary.group.check()
        return sampled

    def sample(each: SamplingParams, rows: torch.Tensor | slice) -> SamplerOutput:
        of_rows = None if values is None else values[rows]
        return sample_sharded_in_torch(logits[rows], keys[rows], positions[rows], each, vocabulary, of_rows)

    return sample_by_settings(sample, params)


def sample_sharded_in_torch(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingParams,
    vocabulary: VocabularySlice,
    values: torch.Tensor | None = None,
) -> SamplerOutput:
    """`sample_sharded` in torch operations, for rows of equal settings. A collective of the group."""
    if truncates(params):
        local_rows, whole = vocabulary.whole_of_own_rows(logits)
        settings = keys[local_rows], positions[local_rows], params, None
        sampled = sample_tokens(whole, *settings, None if values is None else values[local_rows])
        return of_all_rows(sampled, len(keys), vocabulary)
    local, temperature = own_columns(logits, vocabulary).double(), params.temperature or 1.0
    largest, argmax = local.max(dim=-1)
    weights = ((local - largest[:, None]) / temperature).exp().nan_to_num(0.0)  # NaN in a slice of -inf alone
    raw = (local - largest[:, None]).exp().nan_to_num(0.0).sum(dim=-1)
    # [ranks, rows]: largest logits, their tokens, and sums relative to them.
    tops, tokens, masses, raws = vocabulary.group.gather(
        torch.stack([largest, (argmax + vocabulary.first).double(), weights.sum(dim=-1), raw])
    ).unbind(1)
    top, winner = tops.max(dim=0)
    scales = ((tops - top) / temperature).exp()
    cumulative = (masses * scales).cumsum(dim=0)
    if params.temperature == 0:
        token, logit = tokens.gather(0, winner[None])[0], top
    else:
        target = uniform(keys, positions) * cumulative[-1]
        owner = (cumulative <= target).sum(dim=0).clamp(max=len(cumulative) - 1)
        before = (cumulative - masses * scales).gather(0, owner[None])[0]
        cdf = weights.cumsum(dim=-1)
        local_target = (target - before) / scales[vocabulary.group.index]
        local_target = torch.minimum(local_target, torch.nextafter(cdf[:, -1], torch.zeros_like(local_target)))
        found = torch.searchsorted(cdf, local_target[:, None], right=True).clamp(max=local.shape[1] - 1)
        candidates = torch.stack([(found[:, 0] + vocabulary.first).double(), local.gather(1, found)[:, 0]])
        token, logit = vocabulary.group.gather(candidates).gather(0, owner.expand(1, 2, -1))[0]
    old = ((logit - top) / temperature - cumulative[-1].log()).float()
    raw = (raws * (tops - top).exp()).sum(dim=0)
    return SamplerOutput(token.long(), old, old, (logit - top - raw.log()).float(), not_truncated(old))


def of_all_rows(sampled: SamplerOutput, count: int, vocabulary: VocabularySlice) -> SamplerOutput:
    """Return the output of all `count` rows, from each rank's output for its rows of `divided`. A collective."""
    numbers = torch.cat([sampled.tokens[None].double(), sampled.per_token().double()])
    tokens, *logps = vocabulary.group.gather(numbers).permute(1, 0, 2).flatten(1)[:, :count]
    return SamplerOutput(tokens.long(), *(of_rows.float() for of_rows in logps))


def sample_tokens_in_torch(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, params: SamplingParams | RowParams
) -> SamplerOutput:
    """`sample_tokens` in torch operations, on any device. Waits for it only if rows have different settings."""
    params = RowParams.of(params) if isinstance(params, SamplingParams) else params

    def sample(each: SamplingParams, rows: torch.Tensor | slice) -> SamplerOutput:
        of_rows, temperature = logits[rows], each.temperature
        greedy = temperature == 0
        scores = of_rows if greedy else warped(of_rows, each)
        tokens = of_rows.argmax(dim=-1) if greedy else inverse_cdf(scores, uniform(keys[rows], positions[rows]))
        raw = selective_log_softmax(of_rows, tokens)
        old = raw if temperature in (0, 1.0) else selective_log_softmax(of_rows / temperature, tokens)
        sampling = selective_log_softmax(scores, tokens) if truncates(each) else old
        invalid = ~torch.logsumexp(of_rows, dim=-1).isfinite()
        mask = sampling_mask_of(scores, of_rows, tokens) if truncates(each) else not_truncated(old)
        sampling, old, raw = (logps.masked_fill(invalid, torch.nan) for logps in (sampling, old, raw))
        return SamplerOutput(tokens, sampling, old, raw, mask)

    return sample_by_settings(sample, params)


def sampling_mask_of(scores: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the sampling mask, float32 [n], of tokens, int64 [n].

    scores: [n, vocab], -inf where they were truncated.  logits: float32 [n, vocab], what was truncated.
    """
    others = logits.masked_fill(scores == -torch.inf, torch.inf).scatter(1, tokens[:, None], torch.inf)
    least, edge = others.min(dim=1)  # the first of equal ones
    return torch.where(least == torch.inf, tokens, edge).float()


def not_truncated(like: torch.Tensor) -> torch.Tensor:
    """Return the sampling mask of tokens that were drawn from the whole vocabulary."""
    return torch.full_like(like, NOT_TRUNCATED)


def masked_logits(logits: torch.Tensor, tokens: torch.Tensor, sampling_mask: torch.Tensor) -> torch.Tensor:
    """Return logits with -inf for the tokens that sampling masks leave out; differentiable.

    A sampling mask is the id of the least probable token that truncation kept besides the sampled one (DeepSeek-V3.2
    keeps the list, arXiv:2512.02556, section 3.1; vLLM's and SGLang's `return_sampling_mask`). Top-k, top-p and min-p
    keep the first tokens in the order of logits, of equal ones those with higher ids, so that this id alone gives the
    kept tokens again from the same logits, ties included. From other logits, of a later policy or another forward, it
    gives the tokens that are at least as probable as that one, and the sampled token always. Truncating the later
    logits again, as NeMo-RL does, can leave the sampled token out: its logprob is then -inf, and it drops out of the
    loss. The edge is another token than the sampled one, whose probability an update changes most, and no logprob: the
    logprobs are then 2 to 9 times closer to those over the list after a step (LOG.md).

    logits: [..., vocabulary].  tokens: int64 [...], the sampled ones.
    sampling_mask: int64 [...], such ids; the sampled token itself: it was the only one; NOT_TRUNCATED: no token is left
        out.
    """
    edge, token = sampling_mask.clamp(min=0)[..., None], tokens[..., None]
    values, ids = logits.detach(), torch.arange(logits.shape[-1], device=logits.device)
    least = values.gather(-1, edge)
    kept = (values > least) | ((values == least) & (ids >= edge))
    kept = (kept & (edge != token)) | (sampling_mask == NOT_TRUNCATED)[..., None]
    return logits.masked_fill(~kept.scatter(-1, token, True), -torch.inf)


def score_tokens(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocabulary: VocabularySlice | None = None,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprob of each row's target, and the entropy, both under softmax(logits / temperature).

    logits float32 [n, vocab], targets int64 [n]; returns float32 [n] twice.  vocabulary: as in `sample_tokens`.
    sampling_mask: int64 [n], as `masked_logits` takes it: of the softmax over the tokens that it keeps; None: over all.
        On CPUs the logprob equals `SamplerOutput.sampling_logps` of the same logits, bit for bit.
    """
    if vocabulary is not None and sampling_mask is not None:
        local, whole = vocabulary.whole_of_own_rows(logits)
        scores = torch.stack(score_tokens(whole, targets[local], temperature, None, sampling_mask[local]))
        return vocabulary.group.gather(scores).permute(1, 0, 2).flatten(1)[:, : len(logits)].unbind()  # type: ignore[return-value]
    if vocabulary is not None:
        return score_sharded(logits, targets, temperature, vocabulary)
    logits, targets = logits.contiguous(), targets.contiguous()
    sampling_mask = None if sampling_mask is None else sampling_mask.contiguous()
    if runs_triton(logits):
        from hybrid.kernels.triton_scoring import score  # needs triton, which a CPU install lacks

        return score(logits, targets, temperature, sampling_mask)
    library = cpu_library() if logits.device.type == "cpu" else None
    if library is None:
        logits = logits if sampling_mask is None else masked_logits(logits, targets, sampling_mask)
        logits = logits / temperature
        return selective_log_softmax(logits, targets), entropy(logits)
    rows, vocab = logits.shape
    logps, entropies = torch.empty(rows), torch.empty(rows)
    library.score(
        address(logits, torch.float32),
        rows,
        vocab,
        address(targets, torch.int64),
        None if sampling_mask is None else address(sampling_mask, torch.int64),
        temperature,
        address(logps, torch.float32),
        address(entropies, torch.float32),
        torch.get_num_threads(),
    )
    return logps, entropies


def score_sharded(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocabulary: VocabularySlice
) -> tuple[torch.Tensor, torch.Tensor]:
    """`score_tokens` from a slice of the vocabulary, logits float32 [n, width]. A collective of the group."""
    logits, targets = logits.contiguous(), targets.contiguous()
    if vocabulary.group.shares_memory:
        logps, entropies = torch.empty(2, len(logits)).unbind()
        cpu_library().score_sharded(
            ctypes.addressof(vocabulary.group.record),
            address(logits, torch.float32),
            *logits.shape,
            vocabulary.count,
            vocabulary.first,
            address(targets, torch.int64),
            temperature,
            *(address(result, torch.float32) for result in (logps, entropies)),
            torch.get_num_threads(),
        )
        vocabulary.group.check()
        return logps, entropies
    if runs_triton(logits):
        from hybrid.kernels.triton_scoring import score_sums  # needs triton, which a CPU install lacks

        sums = score_sums(logits, targets, temperature, vocabulary.first, vocabulary.count)
    else:
        sums = score_sums_in_torch(logits, targets, temperature, vocabulary)
    return scores_of_sums(vocabulary.group.gather(sums))


def scores_of_sums(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies, float32 [n] each, from the sums of every slice, float64 [slices, 4, n]."""
    tops, masses, products, logits_of_targets = sums.unbind(1)
    top = tops.max(dim=0).values
    gaps = (tops - top).clamp(min=-1e4)
    total = (masses * gaps.exp()).sum(dim=0)
    product = ((products + gaps * masses) * gaps.exp()).sum(dim=0)
    logps = logits_of_targets.max(dim=0).values - top - total.log()
    return logps.float(), (total.log() - product / total).float()


def score_sums_in_torch(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocabulary: VocabularySlice
) -> torch.Tensor:
    """Return `score_sums` of hybrid/kernels/triton_scoring.py by torch's operations, float64 [4, n]."""
    local = own_columns(logits, vocabulary).double() / temperature
    largest = local.max(dim=-1).values
    gaps = (local - largest[:, None]).nan_to_num(-1e4).clamp(min=-1e4)  # 0 · -inf is NaN
    weights = gaps.exp()
    at = targets - vocabulary.first
    is_local = (at >= 0) & (at < vocabulary.count)
    target = local.gather(1, (at * is_local)[:, None])[:, 0].masked_fill(~is_local, -torch.inf)
    return torch.stack([largest, weights.sum(dim=-1), (weights * gaps).sum(dim=-1), target])
