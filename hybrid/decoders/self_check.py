"""The self-check: compares everything that a decoder runs with the model's own modules, on a few random tokens.

It covers prefill with and without a prefix, and decode steps, eager and from graphs, in the dtype in use, over a
context longer than one block and one split of decode attention. Every layer gets the input of the model's own layer, so
that a difference is that layer's; then whole steps are compared by their logits.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV, packed
from hybrid.decoders.comparison import difference, output_difference, spread_apart
from hybrid.decoders.streamed_decoder import Passes
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import DecoderLayout, DecoderSpec, UnsupportedModel

STEPS = 3  # decode steps of each sequence
# In tokens: the first one's decode steps cross the end of a block, the second one's prefill is one token.
SHORT = (BLOCK_SIZE + 2, STEPS + 1)

DIFFERS = "of the fused container differs from the model's own"


class Checked(Protocol):
    """What the self-check needs of a decoder; of one that ranks share, its lockstep form."""

    spec: DecoderSpec
    layout: DecoderLayout
    dtype: torch.dtype
    device: torch.device
    context_block: int  # tokens of context that one program, or pass, of decode attention reads

    def reserve(self, tokens: int) -> None:
        """Prepare for sequences of up to `tokens` tokens."""

    def kv(self, num_blocks: int) -> PagedKV:
        """Allocate blocks."""

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first layer's input."""

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Run layers `first` to `last` (exclusive)."""

    def decode_layers(
        self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int
    ) -> torch.Tensor:
        """The same for one new token of each sequence, as `decode` runs them."""

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """The last layer's output."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's output."""

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Logits after one new token for each sequence."""


@dataclass(frozen=True)
class Forward:
    """A forward of the check.  rows: int64 [tokens], the indices of its tokens among those of all sequences."""

    rows: torch.Tensor
    batch: PackedBatch


class Sequences:
    """The check's random sequences, the longest first, and the forwards that run over them.

    blocks: of each sequence, in random order.
    prefills: all but the last STEPS tokens, the longest sequence in two pieces.
    steps: decode steps, one token of each sequence.
    """

    def __init__(self, lengths: list[int], vocabulary: int, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        self.lengths, self.device = lengths, device
        self.first_rows = [sum(lengths[:index]) for index in range(len(lengths))]
        each = -(-max(lengths) // BLOCK_SIZE)  # every sequence has as many blocks as the longest; block 0 is reserved
        self.blocks = (1 + torch.randperm(each * len(lengths), generator=generator)).view(-1, each).tolist()
        ends = [length - STEPS for length in lengths]
        half = ends[0] // 2
        pieces = [[(0, 0, half), (1, 0, ends[1])], [(0, half, ends[0]), (2, 0, ends[2])]]
        self.prefills = [self.forward(spans) for spans in pieces]
        self.steps = [
            self.forward([(index, end + step, end + step + 1) for index, end in enumerate(ends)])
            for step in range(STEPS)
        ]
        self.whole = self.forward([(index, 0, length) for index, length in enumerate(lengths)])

    def forward(self, spans: list[tuple[int, int, int]]) -> Forward:
        """The forward over parts of sequences: (index, begin, stop) each."""
        rows = [torch.arange(begin, stop) + self.first_rows[index] for index, begin, stop in spans]
        ids = [self.ids[index][begin:stop] for index, begin, stop in spans]
        blocks = [self.blocks[index] for index, _, _ in spans]
        batch = packed(ids, [begin for _, begin, _ in spans], blocks, self.device)
        return Forward(torch.cat(rows).to(self.device), batch)


@dataclass
class Seen:
    """The model's own layers' inputs and outputs, and its logits after the last STEPS tokens of each sequence.

    inputs, outputs: [tokens, hidden] of each layer.  logits: float32 [STEPS, sequences, vocabulary].
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    logits: torch.Tensor


def require_equal(decoder: Checked, info: ModelInfo) -> None:
    """Raise UnsupportedModel if the embedding, a layer, the head or a whole step of `decoder` differs from the model's.

    Everything runs even after a difference, so that ranks that run a decoder together make the same collectives.
    """
    sequences = Sequences(checked_lengths(decoder), decoder.spec.vocab_size, decoder.device)
    seen = native_run(info, sequences)
    decoder.reserve(max(sequences.lengths))
    kv = decoder.kv(1 + sequences.whole.batch.block_tables.numel())
    reasons = [*layer_differences(decoder, sequences, seen, kv), *step_differences(decoder, sequences, seen, kv)]
    if any(reasons):
        raise UnsupportedModel(next(filter(None, reasons)))


def checked_lengths(decoder: Checked) -> list[int]:
    """Tokens of the check's sequences. The first is longer than a block and a context block by more than a block,
    unless the model's positions end before.
    """
    longest = max(decoder.context_block, BLOCK_SIZE) + BLOCK_SIZE + STEPS + 2
    limit = decoder.spec.max_positions or longest
    return [min(length, limit) for length in (longest, *SHORT)]


def layer_differences(decoder: Checked, sequences: Sequences, seen: Seen, kv: PagedKV) -> Iterator[str]:
    """Yields what differs in the embedding, in each layer and in the head; "" if nothing does."""
    dtype, whole = decoder.dtype, sequences.whole.batch
    prefilled, steps = (torch.cat([one.rows for one in part]) for part in (sequences.prefills, sequences.steps))
    found = decoder.embed(whole.ids, whole.positions).float()
    yield difference(f"the embedding {DIFFERS}", found, seen.inputs[0].float(), dtype)
    for index, layer in enumerate(decoder.spec.layers):
        given, expected = seen.inputs[index].float(), seen.outputs[index].float()
        found = layer_run(decoder, index, given.to(dtype), sequences, kv)
        for what, rows in ((f"layer {index}", prefilled), (f"layer {index}, in decode steps,", steps)):
            yield difference(f"{what} {DIFFERS}", found[rows], expected[rows], dtype, given[rows], layer.experts)
    found = decoder.logits(seen.outputs[-1][steps].to(dtype))
    yield difference(f"the head {DIFFERS}", found, seen.logits.flatten(0, 1), dtype)


def layer_run(decoder: Checked, index: int, given: torch.Tensor, sequences: Sequences, kv: PagedKV) -> torch.Tensor:
    """A layer's output for `given` [tokens, hidden], by prefills and then decode steps, float32. Streamed weights
    are gathered once for all of them.
    """

    def run(layers: Callable, decode_layers: Callable) -> torch.Tensor:
        found = torch.full_like(given, torch.nan, dtype=torch.float32)
        for one in sequences.prefills:
            found[one.rows] = layers(given[one.rows], one.batch, kv, index, index + 1).float()
        for one in sequences.steps:
            found[one.rows] = decode_layers(given[one.rows], one.batch, kv, index, index + 1).float()
        return found

    if isinstance(decoder, Passes):  # a streamed decoder's decode steps run `layers`
        layers = decoder.inner.layers
        return decoder.run([index], {index: lambda _: run(layers, layers)})
    return run(decoder.layers, decoder.decode_layers)


def step_differences(decoder: Checked, sequences: Sequences, seen: Seen, kv: PagedKV) -> Iterator[str]:
    """Yields what differs in the logits of whole forwards, over the keys and values that `layer_differences` wrote;
    "" if nothing does.
    """
    dtype, experts = decoder.dtype, any(layer.experts for layer in decoder.spec.layers)
    max_capture_size = getattr(decoder, "max_capture_size", 0)

    def compared(what: str, found: torch.Tensor, expected: torch.Tensor, limit: float = torch.inf) -> str:
        excused = len(expected) // 5 if experts else 0  # tokens that may be routed to other experts
        return output_difference(f"{what} {DIFFERS}", found, expected, dtype, excused, limit)

    decode = decoder.eager_decode if max_capture_size else decoder.decode
    eager = torch.cat([decode(step.batch, kv).clone() for step in sequences.steps])
    expected = seen.logits.flatten(0, 1)
    yield compared("a decode step", eager, expected)
    if max_capture_size:
        count = min(max_capture_size, len(sequences.lengths))
        graphed = torch.cat([decoder.decode(first_of(step.batch, count), kv).clone() for step in sequences.steps])
        # The graph rounds as the eager step does: allow twice the eager step's distance from the model's own.
        limit = 2 * float(spread_apart(eager, expected).mean(dim=1).max())
        yield compared("a decode step from a graph", graphed, seen.logits[:, :count].flatten(0, 1), limit)
    # Run the short sequences again, unsplit, from the embedding through all layers.
    again = sequences.forward([(index, 0, sequences.lengths[index]) for index in (1, 2)])
    hidden = decoder.forward(again.batch, kv)
    ends = again.batch.cu_seqlens[1:].long() - 1
    yield compared("a forward", decoder.logits(hidden[ends]), seen.logits[-1, 1:])


def first_of(batch: PackedBatch, count: int) -> PackedBatch:
    """The first `count` sequences of a decode step's batch."""
    rows = (tensor[:count] for tensor in (batch.ids, batch.positions))
    return PackedBatch(*rows, batch.cu_seqlens[: count + 1], batch.lengths[:count], batch.block_tables[:count])


def native_run(info: ModelInfo, sequences: Sequences) -> Seen:
    """The model's own forward over the sequences, padded on the right."""
    lengths, device = sequences.lengths, sequences.device
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences.ids):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    real, inputs, outputs = mask.bool().to(device), [], []

    def note(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        given = (args[0] if args else kwargs["hidden_states"])[real]
        inputs.append(outputs[-1] if outputs and torch.equal(outputs[-1], given) else given)
        outputs.append((output[0] if isinstance(output, tuple) else output)[real])

    # Logits of a few positions only: all of them would be [tokens, vocabulary], gigabytes for a real model.
    positions = torch.tensor([[length - STEPS + step for length in lengths] for step in range(STEPS)])
    kept, columns = positions.unique(return_inverse=True)
    arguments = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
    keeps = "logits_to_keep" in inspect.signature(type(info.base).forward).parameters
    if keeps:
        arguments["logits_to_keep"] = kept.to(device)
    with ExitStack() as hooks:
        for layer in info.layers:
            handle = layer.register_forward_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        logits = info.model(**arguments).logits
    rows = torch.arange(len(lengths)).expand_as(positions)
    return Seen(inputs, outputs, logits[rows, columns if keeps else positions].float())


def own_blocks_batch(
    pieces: list[torch.Tensor], device: torch.device, begins: list[int] | None = None, longest: int = 0
) -> PackedBatch:
    """A batch of pieces of sequences, each sequence with its own blocks.

    pieces: int64 [n] each.  begins: their first tokens' positions; None: 0.  longest: blocks are for the longer of this
        many tokens and the longest piece.
    """
    each = -(-max(longest, *map(len, pieces)) // BLOCK_SIZE)
    blocks = [list(range(1 + n * each, 1 + (n + 1) * each)) for n in range(len(pieces))]
    return packed(pieces, begins or [0] * len(pieces), blocks, device)
