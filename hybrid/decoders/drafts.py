"""Drafts of the next tokens, and steps that verify them: several tokens of a sequence in one forward.

A draft is what followed the longest earlier occurrence of a sequence's latest tokens, in its own text, in other
completions of its prompt, or in those of earlier rollouts (DAS: arXiv 2511.13841). A token is a function of its key,
position and logits, so a drafted token is accepted exactly if it is the one that is drawn at its place.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from hybrid.decoders.batch import Draws, PackedBatch, PagedKV
from hybrid.kernels import cpu_library as kernels
from hybrid.kernels.cpu_library import address

MOST_MATCH = 16  # tokens of a match, which are compared
SEPARATOR = -1  # between texts in one
TOKEN_BYTES = 4  # of a text


class GrowingText:
    """A sequence's tokens, prompt and completion, in host memory.

    tokens: int32 [capacity], of which the first `length` are there.
    """

    def __init__(self, capacity: int):
        self.tokens, self.length = torch.empty(capacity, dtype=torch.int32), 0
        self.address = address(self.tokens, torch.int32)

    @classmethod
    def of(cls, tokens: torch.Tensor, room: int = 0) -> "GrowingText":
        """A text of these tokens, integers [n], with room for `room` more."""
        text = cls(len(tokens) + room)
        text.append(tokens)
        return text

    def append(self, tokens: torch.Tensor) -> None:
        """Append tokens, integers [n], on any device."""
        end = self.length + len(tokens)
        self.tokens[self.length : end] = tokens
        self.length = end

    def span(self, most: int | None = None) -> "Span":
        """The tokens so far; of more than `most` the last ones."""
        return Span(self, 0 if most is None else max(self.length - most, 0), self.length)


class Span(NamedTuple):
    """Tokens [first, last) of a text."""

    text: GrowingText
    first: int
    last: int

    def tokens(self) -> torch.Tensor:
        """int32 [n]"""
        return self.text.tokens[self.first : self.last]


@dataclass(frozen=True)
class Drafting:
    """Where the drafts of sequences come from.

    own: each sequence's own text, its latest token included, with room for the tokens that it is given, which
        verification appends.
    others: of each sequence, texts to draft from in addition, the oldest first.
    most: of each sequence, the most tokens of a draft; 0: none.
    least_match: tokens of the shortest match, 1 to MOST_MATCH.
    from_own: whether drafts come from the own text too.

    Of several matches the longest is taken (up to MOST_MATCH tokens), and of equally long ones the latest: the last in
    the own text, then in the last of the others. A draft ends before a stop token, a token outside the vocabulary, and
    SEPARATOR; the own text goes on with the draft itself.
    """

    own: Sequence[GrowingText]
    others: Sequence[Sequence[Span]]
    most: Sequence[int]
    least_match: int
    from_own: bool = True

    def __post_init__(self) -> None:
        assert len(self.own) == len(self.others) == len(self.most), "one entry a sequence"
        assert 1 <= self.least_match <= MOST_MATCH, f"matches of at least {self.least_match} tokens"

    def record(self) -> ctypes.Structure:
        """The C++ kernels' record of it, valid as long as it is kept."""
        entries: list[tuple[int, int]] = []
        first = [0]
        for own, others in zip(self.own, self.others, strict=True):
            entries += ((text.address + TOKEN_BYTES * begin, end - begin) for text, begin, end in others)
            entries.append((own.address, own.length))
            first.append(len(entries))
        texts, bounds = torch.tensor(entries), torch.tensor(first)
        most = torch.tensor(self.most, dtype=torch.int64)
        pointers = [address(tensor, torch.int64) for tensor in (texts, bounds, most)]
        record = kernels.Drafting(len(self.own), self.least_match, self.from_own, *pointers)
        record.tensors = texts, bounds, most, self  # keeps alive what it points to
        return record

    def draft(self, vocabulary: int, stop_token_ids: torch.Tensor, most: Sequence[int]) -> list[list[int]]:
        """A draft of each sequence, no longer than `most` of it.  stop_token_ids: int64 [n] in host memory."""
        library = kernels.cpu_library()
        if library is None:
            ends = set(stop_token_ids.tolist())
            return [
                draft_in_torch(own.span(), others, self.least_match, tokens, vocabulary, ends, self.from_own)
                for own, others, tokens in zip(self.own, self.others, most, strict=True)
            ]
        width = max(max(most), 0)
        record = replace(self, most=most).record()
        drafts, counts = torch.empty(len(most), width, dtype=torch.int32), torch.empty(len(most), dtype=torch.int64)
        stops = address(stop_token_ids, torch.int64), len(stop_token_ids)
        outputs = address(drafts, torch.int32), address(counts, torch.int64)
        library.draft_tokens(ctypes.addressof(record), vocabulary, *stops, width, *outputs)
        return [tokens[:count] for tokens, count in zip(drafts.tolist(), counts.tolist(), strict=True)]


def draft_in_torch(
    own: Span,
    others: Sequence[Span],
    least: int,
    most: int,
    vocabulary: int,
    stops: set[int],
    from_own: bool = True,
) -> list[int]:
    """The draft of one sequence, as `Drafting` says, without the C++ library."""
    own_text, other_texts = own.tokens(), [text.tokens() for text in others]
    best, source, next_token = least - 1, None, 0
    for text in (*[own_text] * from_own, *reversed(other_texts)):
        length, end = longest_match(text, own_text)
        if length > best:
            best, source, next_token = length, text, end
    draft: list[int] = []
    while source is not None and len(draft) < most:
        at, behind = next_token + len(draft), next_token + len(draft) - len(source)
        if behind >= 0 and source is not own_text:
            break
        token = int(source[at]) if behind < 0 else draft[behind]
        if not 0 <= token < vocabulary or token in stops:
            break
        draft.append(token)
    return draft


def longest_match(text: torch.Tensor, own: torch.Tensor) -> tuple[int, int]:
    """How many of the last tokens of `own` are found in `text` before another token, up to MOST_MATCH, and the index of
    that token, of the latest match. (0, 0) if there is none.  text, own: int32 [n]."""
    ends = 1 + ((text[:-1] == own[-1]) & (text[1:] >= 0)).nonzero()[:, 0]
    length = 0
    while len(ends):
        length, latest = length + 1, int(ends[-1])
        if length == min(MOST_MATCH, len(own)):
            break
        ends = ends[ends > length]
        ends = ends[text[ends - length - 1] == own[-length - 1]]
    return (length, latest) if length else (0, 0)


@dataclass(frozen=True)
class DraftCounts:
    """Of each sequence: new tokens; drafts, and those of which a token was rejected; drafted and accepted tokens."""

    tokens: list[int]
    drafts: list[int]
    rejected: list[int]
    drafted: list[int]
    accepted: list[int]


def replayed(
    drafting: Drafting, news: Sequence[int], vocabulary: int, stop_token_ids: torch.Tensor
) -> tuple[DraftCounts, list[int]]:
    """What verification steps would have done over the last `news` tokens of each own text, which are there already,
    and how many steps of each sequence they would have been.

    stop_token_ids: int64 [n] in host memory. Needs the C++ library.
    """
    record, given = drafting.record(), torch.tensor(news, dtype=torch.int64)
    by_row = torch.zeros(6, len(news), dtype=torch.int64)
    verified = kernels.Verified(*(address(tensor, torch.int64) for tensor in by_row))
    stops = address(stop_token_ids, torch.int64), len(stop_token_ids)
    kernels.cpu_library().replay_drafts(
        ctypes.addressof(record), address(given, torch.int64), vocabulary, *stops, ctypes.addressof(verified)
    )
    *counts, steps = by_row.tolist()
    return DraftCounts(*counts), steps


@dataclass(frozen=True)
class VerifiedTokens:
    """What verification steps give.

    tokens: int64 [n, sequences], each sequence's new tokens in its column; undefined after `counts.tokens` of them.
    logps: float32 [3, n, sequences], as `decode_steps` gives them; undefined in the same places.
    step_tokens, step_seconds: of each step, tokens of its forward, and the time that it took.
    """

    tokens: torch.Tensor
    logps: torch.Tensor
    counts: DraftCounts
    step_tokens: list[int]
    step_seconds: list[float]


def most_new_tokens(draws: Draws, drafting: Drafting, steps: int) -> tuple[int, int]:
    """The most new tokens of a sequence in so many verification steps, and the most tokens of one forward."""
    left = int((draws.limits - draws.positions).max())
    return min(left, steps * (1 + max(drafting.most))), len(drafting.most) + sum(drafting.most)


class Verifier(Protocol):
    """What verification needs of a decoder."""

    spec: Any
    vocabulary: Any

    @property
    def device(self) -> torch.device:
        """The device of the weights and activations."""

    def verify(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after every token of a batch.  float32 [tokens, vocab]"""


def verify_steps(
    decoder: Verifier, batch: PackedBatch, kv: PagedKV, draws: Draws, drafting: Drafting, steps: int
) -> VerifiedTokens:
    """Decode and sample with up to `steps` forwards over each sequence's latest token and a draft, and stop after a
    step in which a sequence ends, by a stop token or its limit.

    batch: one new token for each sequence; its block tables have room for `most_new_tokens`, where limits allow it.
    steps: 1, if a draw needs the tokens before it.
    Waits for the device at each step.
    """
    assert steps == 1 or not draws.needs_tokens, "draws know the tokens before the first step, and its drafts"
    width, _ = most_new_tokens(draws, drafting, steps)
    rows = Rows(batch, draws, drafting)
    tokens = torch.zeros(width, len(rows.latest), dtype=torch.int64, device=decoder.device)
    logps = torch.zeros(3, *tokens.shape, device=decoder.device)
    vocabulary = decoder.spec.vocab_size if decoder.vocabulary is None else decoder.vocabulary.size
    step_tokens, step_seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        drafts = drafting.draft(vocabulary, rows.stop_token_ids, rows.room())
        packed, owners, offsets = rows.packed(drafts)
        drawn = draws.drawn_at(decoder.verify(packed, kv), owners, offsets, packed.ids)
        indices, ended = rows.accept(drafts, drawn.tokens.tolist())
        kept = torch.tensor(indices, device=decoder.device)
        at, owner = offsets[kept], owners[kept]
        tokens[at, owner], logps[:, at, owner] = drawn.tokens[kept], drawn.logps()[:, kept]
        step_tokens.append(len(owners))
        step_seconds.append(time.perf_counter() - start)
        if ended:
            break
    return VerifiedTokens(tokens, logps, rows.counts, step_tokens, step_seconds)


class Rows:
    """The sequences of `verify_steps`, on the host."""

    def __init__(self, batch: PackedBatch, draws: Draws, drafting: Drafting):
        self.batch, self.drafting, self.device = batch, drafting, batch.ids.device
        self.latest, self.positions = batch.ids.tolist(), batch.positions.tolist()
        self.left = (draws.limits - draws.positions).tolist()
        self.stop_token_ids = draws.stop_token_ids.cpu()
        self.stops = set(self.stop_token_ids.tolist())
        self.counts = DraftCounts(*([0] * len(self.latest) for _ in range(5)))

    def room(self) -> list[int]:
        """The most tokens of each sequence's next draft: one token is drawn after it."""
        return [
            min(most, left - count - 1)
            for most, left, count in zip(self.drafting.most, self.left, self.counts.tokens, strict=True)
        ]

    def packed(self, drafts: list[list[int]]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        """The batch of each sequence's latest token and draft; and of each token the sequence, and how many new tokens
        of the sequence are before the one that is drawn after it, int64 [tokens] each."""
        tokens: list[int] = []
        rows: list[int] = []
        distances: list[int] = []
        bounds = [0]
        for row, draft in enumerate(drafts):
            tokens += [self.latest[row], *draft]
            rows += [row] * (1 + len(draft))
            distances += range(self.counts.tokens[row], self.counts.tokens[row] + 1 + len(draft))
            bounds.append(len(tokens))
        ids, owners, offsets = torch.tensor([tokens, rows, distances], device=self.device)
        positions = self.batch.positions[owners] + offsets.int()
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        lengths = positions[cu_seqlens[1:].long() - 1] + 1
        return PackedBatch(ids, positions, cu_seqlens, lengths, self.batch.block_tables), owners, offsets

    def accept(self, drafts: list[list[int]], drawn: list[int]) -> tuple[list[int], bool]:
        """Count and append each sequence's new tokens: those drawn up to the first one that is not the drafted one.

        drawn: after each token of the packed batch. Gives the indices of the new tokens, and whether a sequence ends.
        """
        kept: list[int] = []
        ended, first = False, 0
        for row, draft in enumerate(drafts):
            own = drawn[first : first + 1 + len(draft)]
            equal = next((i for i, token in enumerate(draft) if token != own[i]), len(draft))
            new = own[: equal + 1]  # stop tokens are not drafted: only the last one can be one
            kept += range(first, first + len(new))
            first += len(own)
            self.latest[row] = new[-1]
            self.counts.tokens[row] += len(new)
            self.counts.drafts[row] += len(draft) > 0
            self.counts.rejected[row] += equal < len(draft)
            self.counts.drafted[row] += len(draft)
            self.counts.accepted[row] += equal
            self.drafting.own[row].append(torch.tensor(new))
            ended |= new[-1] in self.stops or self.counts.tokens[row] == self.left[row]
        return kept, ended
