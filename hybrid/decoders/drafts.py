"""Drafts of the next tokens, and steps that verify them: several tokens of a sequence in one forward.

A draft is what followed the longest earlier occurrence of a sequence's latest tokens, in its own text, in other
completions of its prompt, or in those of earlier rollouts (DAS: arXiv 2511.13841). A token is a function of its key,
position and logits, so a drafted token is accepted exactly if it is the one that is drawn at its place.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hybrid.decoders.batch import PackedBatch, PagedKV
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.kernels import cpu_library as kernels
from hybrid.kernels.cpu_library import address
from hybrid.sampling.state import SamplingState

MAX_MATCH = 16  # tokens of a match that are compared; drafts.h has it too
SEPARATOR = -1  # between texts in one
TOKEN_BYTES = 4  # of a text


class GrowingText:
    """A sequence's tokens, prompt and completion, in host memory.

    tokens: int32 [capacity], of which the first `length` are there.
    """

    def __init__(self, capacity: int):
        self.tokens, self.length = torch.empty(capacity, dtype=torch.int32), 0

    @classmethod
    def of(cls, tokens: torch.Tensor, room: int = 0) -> "GrowingText":
        """Return a text of these tokens, integers [n], with room for `room` more."""
        text = cls(len(tokens) + room)
        text.append(tokens)
        return text

    def append(self, tokens: torch.Tensor) -> None:
        """Append tokens, integers [n], on any device."""
        end = self.length + len(tokens)
        self.tokens[self.length : end] = tokens
        self.length = end

    def since(self, first: int = 0) -> torch.Tensor:
        """Return the tokens so far, from `first` on: a view, int32 [n]."""
        return self.tokens[max(first, 0) : self.length]


class Drafting:
    """Texts that the drafts of sequences come from, and the drafts' lengths.

    own_texts: each sequence's own text, its latest token included, with room for the tokens that verification appends.
    others: of each sequence, texts to draft from in addition, int32 [n] each, the oldest first.
    lengths: of each sequence, the most tokens of its next draft: twice as many as were accepted of the latest one, from
        1 to `max_length`.
    min_match: tokens of the shortest match, 1 to MAX_MATCH.
    from_own: whether drafts come from the own text too.

    Of several matches the longest is taken (up to MAX_MATCH tokens), and of equally long ones the latest: the last in
    the own text, then in the last of the others. A draft ends before a stop token, a token outside the vocabulary, and
    SEPARATOR; the own text goes on with the draft itself.
    """

    def __init__(
        self,
        own_texts: Sequence[GrowingText],
        others: Sequence[Sequence[torch.Tensor]],
        lengths: Sequence[int],
        max_length: int,
        min_match: int,
        from_own: bool = True,
    ):
        assert len(own_texts) == len(others) == len(lengths), "one entry a sequence"
        assert 1 <= min_match <= MAX_MATCH, f"matches of at least {min_match} tokens"
        self.own_texts, self.others, self.lengths, self.max_length = own_texts, others, list(lengths), max_length
        self.min_match, self.from_own = min_match, from_own
        entries: list[tuple[int, int]] = []
        bounds = [0]
        for text, more in zip(own_texts, others, strict=True):
            entries += ((address(tokens, torch.int32), len(tokens)) for tokens in more)
            entries.append((address(text.tokens, torch.int32), text.length))
            bounds.append(len(entries))
        self.texts, self.bounds = torch.tensor(entries), torch.tensor(bounds)  # as in records.h

    def draft(self, limits: Sequence[int], vocabulary: int, stop_token_ids: torch.Tensor) -> list[list[int]]:
        """Draft for each sequence; without the C++ library all drafts are empty.

        Args:
            limits: the maximum draft length of each sequence, in addition to `lengths`.
            vocabulary: drafted tokens are below it.
            stop_token_ids: int64 [n], in host memory.

        Returns:
            The drafted tokens of each sequence.
        """
        library, count = kernels.cpu_library(), len(self.own_texts)
        if library is None:
            return [[] for _ in self.own_texts]
        maximum = torch.tensor([min(pair) for pair in zip(self.lengths, limits, strict=True)])
        self.texts[self.bounds[1:] - 1, 1] = torch.tensor([text.length for text in self.own_texts])
        width = int(maximum.max())
        drafts, lengths = torch.empty(count, width, dtype=torch.int32), torch.empty(count, dtype=torch.int64)
        pointers = (address(tensor, torch.int64) for tensor in (self.texts, self.bounds, maximum, stop_token_ids))
        record = kernels.Drafting(count, self.min_match, self.from_own, vocabulary, len(stop_token_ids), *pointers)
        outputs = address(drafts, torch.int32), address(lengths, torch.int64)
        library.draft_tokens(ctypes.addressof(record), width, *outputs)
        return [tokens[:length] for tokens, length in zip(drafts.tolist(), lengths.tolist(), strict=True)]

    def accept(self, index: int, drafted: int, new: list[int]) -> None:
        """Append a sequence's new tokens to its text: the accepted ones of its draft, and one more."""
        self.own_texts[index].append(torch.tensor(new))
        if drafted:
            self.lengths[index] = min(max(2 * (len(new) - 1), 1), self.max_length)


@dataclass(frozen=True)
class VerifiedTokens:
    """New tokens of verification steps, step by step.

    tokens: int64 [n].  logps: float32 [4, n], as `decode_steps` gives them.
    sequences: int64 [n], the sequence of each token.  offsets: int64 [n], the new tokens of the sequence before it.
    counts: new tokens of each sequence.  lengths: the same of `Drafting` afterwards.
    drafted: tokens of all sequences together.  steps: forwards.
    """

    tokens: torch.Tensor
    logps: torch.Tensor
    sequences: torch.Tensor
    offsets: torch.Tensor
    counts: list[int]
    lengths: list[int]
    drafted: int
    steps: int

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted, of all sequences: each step gives a sequence one more."""
        return sum(self.counts) - self.steps * len(self.counts)


class StateCopies:
    """Copies of recurrent states from before drafts: a state that has read a refused token does not go back by itself.

    batch, kv: the sequences, and their states; a model may have none.
    spare_slots: of each sequence, the slot for its copy; not read without recurrent states.

    unread: of each sequence, accepted tokens that its states have not read. They come first in its next forward.
    """

    def __init__(self, batch: PackedBatch, kv: PagedKV, spare_slots: Sequence[int]):
        self.unread: list[list[int]] = [[] for _ in range(len(batch.ids))]
        self.states = [tensor for tensors in kv.states.values() for tensor in tensors]
        if self.states:
            assert batch.state_slots is not None, "sequences of a recurrent model have states"
            self.slots = batch.state_slots.long()
            self.spare_slots = torch.tensor(spare_slots, device=self.slots.device)

    def save(self, drafts: list[list[int]]) -> None:
        """Copy the states of the sequences that have a draft."""
        if self.states:
            self._copy(self.slots, self.spare_slots, [index for index, draft in enumerate(drafts) if draft])

    def settle(self, runs: list[list[int]], refused: list[int]) -> None:
        """After a forward over each sequence's run of tokens, restore the states of those with refused tokens.

        refused: the number of each run's last tokens that were refused.
        """
        if self.states:
            self.unread = [run[:-count] if count else [] for run, count in zip(runs, refused, strict=True)]
            self._copy(self.spare_slots, self.slots, [index for index, count in enumerate(refused) if count])

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor, sequences: list[int]) -> None:
        at = torch.tensor(sequences, dtype=torch.int64, device=sources.device)
        for state in self.states if sequences else ():
            state.index_copy_(0, targets[at], state.index_select(0, sources[at]))


def verify_steps(
    decoder: AnyDecoder,
    batch: PackedBatch,
    kv: PagedKV,
    sampling: SamplingState,
    drafting: Drafting,
    steps: int,
    spare_slots: Sequence[int] = (),
) -> VerifiedTokens:
    """Decode and sample with up to `steps` forwards over each sequence's latest token and a draft.

    Accepts the tokens of a draft before the first that is not the one drawn at its place: the tokens are those of
    single steps, to the bit where a row's logits do not depend on its batch. Stops after a step in which a sequence
    ends, by a stop token or its limit. Waits for the device at each step.

    Where a token is refused, recurrent states become those of before the forward. The tokens that were accepted in it
    are read again in the sequence's next forward, or in one more after the last step.

    Args:
        batch: one new token for each sequence; its block tables have room for `steps` drafts, as far as limits allow.
        sampling: of the next tokens; it does not depend on the tokens before them but by the logits.
        drafting: of the same sequences. New tokens are appended to the own texts.
        spare_slots: as `StateCopies`'s.
    """
    assert sampling.token_ids is None, "penalties do not know the tokens of drafts"
    device, latest = batch.ids.device, batch.ids.tolist()
    left, stop_token_ids = (sampling.limits - sampling.positions).tolist(), sampling.stop_token_ids.cpu()
    stops = set(stop_token_ids.tolist())
    vocabulary = decoder.spec.vocab_size if decoder.vocabulary is None else decoder.vocabulary.size
    copies = StateCopies(batch, kv, spare_slots)
    counts, drafted = [0] * len(latest), 0
    parts: list[tuple[torch.Tensor, ...]] = []  # of each step: tokens, logprobs, sequences, offsets
    ended = False
    while len(parts) < steps and not ended:
        # After a draft one more token is drawn. Tokens that are read again take the place of drafted ones.
        rooms = [limit - count - 1 for limit, count in zip(left, counts, strict=True)]
        rooms = [min(room, drafting.max_length - len(read)) for room, read in zip(rooms, copies.unread, strict=True)]
        drafts = drafting.draft(rooms, vocabulary, stop_token_ids)
        copies.save(drafts)
        runs = [[*read, token, *draft] for read, token, draft in zip(copies.unread, latest, drafts, strict=True)]
        packed, sequences, offsets = packed_runs(batch, runs, first_offsets(counts, copies.unread))
        logits = decoder.verify(packed, kv)
        if any(copies.unread):
            is_new = offsets >= torch.tensor(counts, device=device)[sequences]
            logits, sequences, offsets = logits[is_new], sequences[is_new], offsets[is_new]
        drawn = sampling.sample_at(logits, sequences, offsets)
        tokens, first = drawn.tokens.tolist(), 0
        kept: list[int] = []
        refused: list[int] = []
        drafted += sum(map(len, drafts))
        for index, draft in enumerate(drafts):
            after = tokens[first : first + 1 + len(draft)]
            equal = next((i for i, token in enumerate(draft) if token != after[i]), len(draft))
            new = after[: equal + 1]  # stop tokens are not drafted: only the last one can be one
            kept += range(first, first + len(new))
            refused.append(len(draft) - equal)
            first += len(after)
            latest[index] = new[-1]
            counts[index] += len(new)
            drafting.accept(index, len(draft), new)
            ended |= new[-1] in stops or counts[index] == left[index]
        copies.settle(runs, refused)
        at = torch.tensor(kept, device=device)
        parts.append((drawn.tokens[at], drawn.per_token()[:, at], sequences[at], offsets[at]))
    if any(copies.unread):
        decoder.forward(packed_runs(batch, copies.unread, first_offsets(counts, copies.unread))[0], kv)
    new_tokens, logps, owners, distances = (torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True))
    return VerifiedTokens(new_tokens, logps, owners, distances, counts, drafting.lengths, drafted, len(parts))


def first_offsets(counts: list[int], unread: list[list[int]]) -> list[int]:
    """Return where each sequence's unread tokens begin.  counts: its tokens before its latest one, as offsets are."""
    return [count - len(read) for count, read in zip(counts, unread, strict=True)]


def packed_runs(
    batch: PackedBatch, runs: list[list[int]], offsets: list[int]
) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """Pack a run of tokens of each sequence; sequences with an empty run are left out.

    offsets: the number of a sequence's tokens from `batch`'s on to its run's first token; negative before it.

    Returns the batch, and of each of its tokens the sequence and the offset, int64 [tokens] each.
    """
    device, running = batch.ids.device, [index for index, run in enumerate(runs) if run]
    owners = [index for index in running for _ in runs[index]]
    distances = [offsets[index] + place for index in running for place in range(len(runs[index]))]
    tokens = [token for run in runs for token in run]
    ids, of_token, places = torch.tensor([tokens, owners, distances], device=device)
    positions = batch.positions[of_token] + places.int()
    bounds = list(accumulate((len(runs[index]) for index in running), initial=0))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    lengths = positions[cu_seqlens[1:].long() - 1] + 1
    tables, slots = batch.block_tables, batch.state_slots
    if len(running) < len(runs):
        kept = torch.tensor(running, device=device)
        tables, slots = tables[kept], None if slots is None else slots[kept]
    adapters = None if batch.adapters is None else batch.adapters[of_token]
    return PackedBatch(ids, positions, cu_seqlens, lengths, tables, slots, adapters), of_token, places
