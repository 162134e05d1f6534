"""Rows packed for one training forward: no padding, and tokens that rows begin with in common stored once.

A packed sequence is a forest of segments in depth-first order: a segment's descendants follow it directly. A token sees
the tokens of its own segment before it, and all tokens of the segments above.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid.generation.shared_prefixes import common_tokens

MIN_SHARED = 16  # tokens of the shortest prefix that is stored once: each one costs an attention call a layer
CHUNK_BITS = 6  # recurrent scans compute chunks of 64 tokens and more: shorter segments cost as much
BLOCK = 256  # queries of a call whose window hides keys, at least: its mask is [queries, queries + window]


class Segment(NamedTuple):
    """Tokens that the same rows contain.

    Packed tokens [start, stop); its descendants are [stop, subtree_stop). The first token is token `position` of its
    rows.
    """

    start: int
    stop: int
    subtree_stop: int
    position: int


class AttentionCall(NamedTuple):
    """One attention call: packed queries, packed keys, and what a query sees.

    mask: bool [queries, keys], on the host, true where it sees the key; None: all keys, or with `is_causal` the keys up
        to its own.
    hidden: bool [queries], queries that see no key of this call; None without any.
    is_first: whether no earlier call has these queries; they all see a key of it.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    mask: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    is_first: bool = False


class ScanBatch(NamedTuple):
    """Segments whose tokens a recurrent layer scans as one batch.

    segments: indices in `PackedRows.segments`.
    parents: of the segment before each of them; empty: they begin rows.
    tokens: int64 [segments, longest], packed tokens; after a shorter segment's end its last one, which nothing reads.
    kept: int64 [n], the segments' tokens in `tokens`, flattened.
    is_continued: whether segments follow each of them.
    """

    segments: list[int]
    parents: list[int]
    tokens: torch.Tensor
    kept: torch.Tensor
    is_continued: bool


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Tokens of several rows as one sequence.

    Args:
        input_ids: int64 [1, tokens].
        position_ids: int64 [1, tokens], from 0 at each row's first token.
        segments: in packed order.
        index: int64 [rows, columns], the packed place of each token; -1 for padding and for tokens that no target
            needs.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[Segment, ...]
    index: torch.Tensor
    _calls: dict[int | None, list[AttentionCall]] = field(default_factory=dict, repr=False)
    _contexts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """The number of packed tokens."""
        return self.input_ids.shape[1]

    def divisible(self, ranks: int) -> "PackedRows":
        """Return the rows with tokens of no row at the end, so that each of `ranks` ranks gets equally many tokens.

        Each rank gets one of them at least, at the greatest position: rotary embeddings that are scaled by it (dynamic,
        LongRoPE) are then the same on every rank.
        """
        start, more = self.num_tokens, ranks + -self.num_tokens % ranks
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, more)),
            position_ids=torch.cat([self.position_ids, self.position_ids.amax().expand(1, more)], dim=1),
            segments=(*self.segments, Segment(start, start + more, start + more, 0)),
            _calls={},
            _contexts={},
        )

    def of_rows(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """Return values of rows' tokens, [rows, columns, ...], for the packed tokens, [1, tokens, ...]; `fill` for a
        token of no row."""
        packed, index = values.new_full((self.num_tokens, *values.shape[2:]), fill), self.index.to(values.device)
        packed[index[index >= 0]] = values[index >= 0]
        return packed[None]

    def attention_calls(self, window: int | None) -> list[AttentionCall]:
        """Return the calls that together are the attention of all tokens, each segment's own keys first.

        Args:
            window: the number of keys that a token sees at most, its own included; None: all.
        """
        if window not in self._calls:
            calls = [call for segment in self.segments for call in own_calls(segment, window)]
            calls += [call for segment in self.segments for call in self._descendant_calls(segment, window)]
            self._calls[window] = calls
        return self._calls[window]

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.input_ids.device

    @cached_property
    def _positions(self) -> torch.Tensor:
        return self.position_ids[0].cpu()

    def _descendant_calls(self, segment: Segment, window: int | None) -> Iterator[AttentionCall]:
        """Yield the call in which the descendants of a segment see its keys."""
        if segment.subtree_stop == segment.stop:
            return
        queries, keys = slice(segment.stop, segment.subtree_stop), slice(segment.start, segment.stop)
        positions = self._positions[queries]
        length = segment.stop - segment.start
        if window is None or int(positions.max()) - segment.position < window:
            yield AttentionCall(queries, keys)
            return
        skipped = max(0, int(positions.min()) - window + 1 - segment.position)  # keys that no descendant sees
        if skipped < length:
            keys = slice(segment.start + skipped, segment.stop)
            mask = self._positions[keys] > positions[:, None] - window
            yield AttentionCall(queries, keys, mask=mask, hidden=~mask.any(dim=1))

    def with_contexts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed tokens, int64 [n], with the `count` tokens before each segment in its rows in front of it, the
        number of packed tokens where rows begin; and the places of the segments' own tokens among these."""
        if count not in self._contexts:
            tails, tokens, kept = list[list[int]](), list[torch.Tensor](), list[torch.Tensor]()
            place = 0
            for segment, parent in zip(self.segments, self._parents, strict=True):
                before = [self.num_tokens] * count if parent is None else tails[parent]
                tail = [*before, *range(max(segment.start, segment.stop - count), segment.stop)]
                tails.append(tail[len(tail) - count :])
                tokens += [torch.tensor(before, dtype=torch.int64), torch.arange(segment.start, segment.stop)]
                kept.append(torch.arange(segment.stop - segment.start) + place + count)
                place += count + segment.stop - segment.start
            self._contexts[count] = torch.cat(tokens).to(self.device), torch.cat(kept).to(self.device)
        return self._contexts[count]

    @cached_property
    def _parents(self) -> list[int | None]:
        """For each segment, the one that its rows have before it; None: rows begin with it."""
        parents, path = list[int | None](), list[int]()
        for index, segment in enumerate(self.segments):
            while path and self.segments[path[-1]].subtree_stop <= segment.start:
                path.pop()
            parents.append(path[-1] if path else None)
            path.append(index)
        return parents

    @cached_property
    def scan_batches(self) -> list[ScanBatch]:
        """Batches of all segments, each after those of the segments before its own.

        Segments that others continue are batched with those of equal length: Mamba 2 decays states at tokens after
        the end too. The others are batched with those of at least half their length.
        """
        groups, depths = dict[tuple[int, bool, int], list[int]](), list[int]()
        for index, (segment, parent) in enumerate(zip(self.segments, self._parents, strict=True)):
            length = segment.stop - segment.start
            depths.append(0 if parent is None else depths[parent] + 1)
            is_continued = segment.subtree_stop > segment.stop
            size = length if is_continued else max((length - 1).bit_length(), CHUNK_BITS)
            groups.setdefault((depths[-1], is_continued, size), []).append(index)
        return [self._scan_batch(groups[key], key[1]) for key in sorted(groups)]

    def _scan_batch(self, indices: list[int], is_continued: bool) -> ScanBatch:
        spans = [self.segments[index] for index in indices]
        start, length = torch.tensor([(span.start, span.stop - span.start) for span in spans]).T[..., None]
        steps = torch.arange(int(length.max()))
        tokens = start + torch.minimum(steps, length - 1)
        kept = (steps < length).flatten().nonzero()[:, 0]
        parents = [parent for index in indices if (parent := self._parents[index]) is not None]
        return ScanBatch(indices, parents, tokens.to(self.device), kept.to(self.device), is_continued)

    @cached_property
    def scan_order(self) -> torch.Tensor:
        """int64 [tokens], the place of each packed token among the batches' own tokens."""
        return torch.cat([batch.tokens.flatten()[batch.kept] for batch in self.scan_batches]).argsort()

    def trees(self) -> list[slice]:
        """Return the packed tokens of each tree; tokens of different trees do not see each other."""
        spans, stop = [], 0
        for segment in self.segments:
            if segment.start == stop:  # after the subtree of the last root
                spans.append(slice(segment.start, segment.subtree_stop))
                stop = segment.subtree_stop
        return spans

    def mask(self, tokens: slice, window: int | None) -> torch.Tensor:
        """Return which tokens of a tree each one sees.  bool [n, n]"""
        stops = torch.cat(
            [torch.full((segment.stop - segment.start,), segment.subtree_stop) for segment in self.segments]
        )
        place, position = torch.arange(self.num_tokens)[tokens], self._positions[tokens]
        seen = (place <= place[:, None]) & (place[:, None] < stops[tokens])
        if window is not None:
            seen &= position > position[:, None] - window
        return seen.to(self.device)


def own_calls(segment: Segment, window: int | None) -> Iterator[AttentionCall]:
    """Yield the calls in which a segment's tokens see each other."""
    start, length = segment.start, segment.stop - segment.start
    if window is None or length <= window:
        yield AttentionCall(slice(start, segment.stop), slice(start, segment.stop), is_causal=True, is_first=True)
        return
    block = max(window, BLOCK)
    for first in range(0, length, block):
        last, begin = min(first + block, length), max(0, first - window + 1)
        query, key = torch.arange(first, last)[:, None], torch.arange(begin, last)
        mask = (key <= query) & (key > query - window)
        queries, keys = slice(start + first, start + last), slice(start + begin, start + last)
        yield AttentionCall(queries, keys, mask=mask, is_first=True)


@dataclass(eq=False)
class _Node:
    """A segment while rows are added: tokens [begin, end) of `row`."""

    row: int
    begin: int
    end: int
    parent: "_Node | None"
    children: list["_Node"] = field(default_factory=list)
    start: int = 0  # in the packed sequence


def pack_rows(
    sequences: torch.Tensor, attention_mask: torch.Tensor, targets: torch.Tensor, min_shared: int = MIN_SHARED
) -> PackedRows:
    """Pack the tokens that targets depend on; a prefix of at least `min_shared` tokens that rows have in common is
    stored once.

    Args:
        sequences: int64 [rows, columns], padded on either or both sides.
        attention_mask: 1 for tokens, [rows, columns].
        targets: bool [rows, columns], tokens whose logprobs are needed: the tokens before them are packed.

    Returns:
        The packed rows, with at least one token.
    """
    kept = attention_mask.bool().cpu()
    wanted = targets.bool().cpu() & kept
    columns = torch.arange(kept.shape[1])
    last = torch.where(wanted, columns, -1).amax(dim=1) if kept.shape[1] else torch.zeros(0)
    needed = kept & (columns < last[:, None])
    ids = sequences.cpu()
    rows = [ids[row][needed[row]] for row in range(len(ids))]
    if not any(map(len, rows)):
        return empty_rows(sequences)
    roots, leaves = prefix_tree(rows, min_shared)
    packed: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    segments: list[Segment] = []

    def place(node: _Node, start: int) -> int:
        node.start, stop = start, start + node.end - node.begin
        packed.append(rows[node.row][node.begin : node.end])
        positions.append(torch.arange(node.begin, node.end))
        at = len(segments)
        segments.append(Segment(start, stop, stop, node.begin))
        for child in node.children:
            stop = place(child, stop)
        segments[at] = segments[at]._replace(subtree_stop=stop)
        return stop

    stop = 0
    for root in roots:
        stop = place(root, stop)
    index = torch.full(kept.shape, -1)
    for row, leaf in leaves.items():
        of_row = torch.empty(len(rows[row]), dtype=torch.int64)
        node: _Node | None = leaf
        while node is not None:
            of_row[node.begin : node.end] = torch.arange(node.start, node.start + node.end - node.begin)
            node = node.parent
        index[row, needed[row]] = of_row
    device = sequences.device
    input_ids, position_ids = (torch.cat(part)[None].to(device) for part in (packed, positions))
    return PackedRows(input_ids, position_ids, tuple(segments), index.to(device))


def empty_rows(sequences: torch.Tensor) -> PackedRows:
    """Return one token that belongs to no row: under ZeRO a rank without targets runs the same collectives."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=sequences.device)
    return PackedRows(token, token, (Segment(0, 1, 1, 0),), torch.full_like(sequences, -1))


def prefix_tree(rows: list[torch.Tensor], min_shared: int) -> tuple[list[_Node], dict[int, _Node]]:
    """Return the roots of the rows' prefix trees, and the node in which each row that has tokens ends.

    rows: int64 [n] each, not negative.
    """
    order = sorted((row for row in range(len(rows)) if len(rows[row])), key=lambda row: rows[row].numpy().tobytes())
    roots: list[_Node] = []
    leaves: dict[int, _Node] = {}
    path: list[_Node] = []  # the nodes of the previous row
    previous: int | None = None
    for row in order:
        shared = 0 if previous is None else common_tokens(rows[previous], rows[row])
        while path and path[-1].begin >= shared:
            path.pop()
        if path and shared < path[-1].end:
            if shared - path[-1].begin < min_shared:  # too short for a node: shared with the nodes above alone
                shared = path.pop().begin
            else:
                split(path[-1], shared, leaves)
        if not path:
            shared = 0
        if shared == len(rows[row]):
            leaves[row] = path[-1]
        else:
            node = _Node(row, shared, len(rows[row]), path[-1] if path else None)
            (path[-1].children if path else roots).append(node)
            path.append(node)
            leaves[row] = node
        previous = row
    return roots, leaves


def split(node: _Node, at: int, leaves: dict[int, _Node]) -> None:
    """Split a node before token `at` of its rows; rows that ended in it end in the second part."""
    rest = _Node(node.row, at, node.end, node, node.children)
    for child in rest.children:
        child.parent = rest
    for row, leaf in leaves.items():
        if leaf is node:
            leaves[row] = rest
    node.end, node.children = at, [rest]
