"""Sequences that are being decoded: prompts packed into pages, then a token for each row at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid.containers.batch import PAGE, PackedBatch, PagedKV, packed, table_of
from hybrid.decoding.pages import PageStore, pages_for

PREFILL_TOKENS = 2048  # prompt tokens in one forward; bounds what activations need


class Decoder(Protocol):
    """What decoding asks of a decoder: `hybrid.containers` has one for each kind of machine."""

    device: torch.device

    def kv(self, pages: int) -> PagedKV:
        """New pages."""

    def reserve(self, tokens: int) -> None:
        """Say how long sequences may become: tables are made for so many positions."""

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output.  [tokens, hidden]"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after the last layer's output [n, hidden].  float32 [n, vocab]"""

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence.  float32 [sequences, vocab]"""


@dataclass(frozen=True)
class Piece:
    """A part of a sequence in a forward.  sequence: its number.  begin, stop: positions.  row: where its hidden states
    begin."""

    sequence: int
    begin: int
    stop: int
    row: int


def hidden_states(
    decoder: Decoder, store: PageStore, sequences: list[torch.Tensor], pages: list[list[int]]
) -> Iterator[tuple[list[Piece], torch.Tensor]]:
    """Sequences, int64 [n] each, put into their pages: for each forward its pieces and the last layer's output,
    [tokens, hidden]. They are packed without padding, PREFILL_TOKENS in a forward; a longer one is split."""
    for pieces in forwards([len(sequence) for sequence in sequences]):
        ids = [sequences[piece.sequence][piece.begin : piece.stop] for piece in pieces]
        tables = [pages[piece.sequence] for piece in pieces]
        yield pieces, decoder.forward(packed(ids, [piece.begin for piece in pieces], tables, decoder.device), store.kv)


def prefill(decoder: Decoder, store: PageStore, prompts: list[torch.Tensor]) -> tuple[list[list[int]], torch.Tensor]:
    """Put prompts, int64 [n] each, into pages; gives the pages of each, and the logits after its last token, float32
    [prompts, vocab]."""
    pages = [store.take(pages_for(len(prompt))) for prompt in prompts]
    found = []
    for pieces, hidden in hidden_states(decoder, store, prompts, pages):
        ends = [p.row + p.stop - p.begin - 1 for p in pieces if p.stop == len(prompts[p.sequence])]
        if ends:
            found.append(decoder.logits(hidden[torch.tensor(ends, device=decoder.device)]))
    return pages, torch.cat(found)


def forwards(lengths: list[int]) -> list[list[Piece]]:
    """How sequences of given lengths are split over forwards of at most PREFILL_TOKENS."""
    found: list[list[Piece]] = []
    used = PREFILL_TOKENS
    for sequence, length in enumerate(lengths):
        begin = 0
        while begin < length:
            if used == PREFILL_TOKENS:
                found.append([])
                used = 0
            stop = min(begin + PREFILL_TOKENS - used, length)
            found[-1].append(Piece(sequence, begin, stop, used))
            begin, used = stop, used + stop - begin
    return found


class Rows:
    """Rows that get a token at each step. A row's place changes when others leave."""

    def __init__(self, decoder: Decoder, store: PageStore):
        self.decoder, self.store, self.device = decoder, store, decoder.device
        self.pages: list[list[int]] = []
        self.lengths = torch.zeros(0, dtype=torch.int32, device=self.device)  # tokens in the cache, by row
        self.room = 0  # tokens that every row has pages for, beyond its length
        self.tables: torch.Tensor | None = None  # made anew where pages have changed

    def __len__(self) -> int:
        return len(self.pages)

    def add(self, pages: list[list[int]], lengths: list[int]) -> None:
        """New rows behind the others, with what is in their pages; the pages are theirs from now on."""
        self.pages += pages
        more = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.lengths = torch.cat([self.lengths, more])
        self._look()

    def make_room(self, tokens: int) -> None:
        """See to it that every row's pages have room for `tokens` more."""
        if self.room >= tokens:
            return
        for pages, length in zip(self.pages, self.lengths.tolist(), strict=True):
            pages += self.store.take(pages_for(length + tokens) - len(pages))
        self._look()

    def _look(self) -> None:
        """Note what pages the rows have now."""
        spare = (len(own) * PAGE - n for own, n in zip(self.pages, self.lengths.tolist(), strict=True))
        self.room = min(spare, default=0)
        self.tables = table_of(self.pages, self.device) if self.pages else None
        self.starts = torch.arange(len(self) + 1, dtype=torch.int32, device=self.device)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token, int64 [rows], to each row; gives the logits after it, float32 [rows, vocab]."""
        positions, self.lengths = self.lengths, self.lengths + 1
        self.room -= 1
        return self.decoder.decode(
            PackedBatch(tokens, positions, self.starts, self.lengths, self.tables), self.store.kv
        )

    def leave(self, stay: torch.Tensor) -> None:
        """Let go of the rows that do not stay, bool [rows], and of their pages."""
        staying = stay.tolist()
        for kept, pages in zip(staying, self.pages, strict=True):
            if not kept:
                self.store.give_back(pages)
        self.pages = [pages for kept, pages in zip(staying, self.pages, strict=True) if kept]
        self.lengths = self.lengths[stay]
        self._look()
