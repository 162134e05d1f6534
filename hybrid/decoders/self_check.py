"""The self-check: compares everything that a decoder runs with the model's own modules, on a few random tokens.

It covers prefill with and without a prefix, and decode steps, eager and from graphs, in the dtype in use, over a
context longer than one block and one split of decode attention. Every layer gets the input of the model's own layer, so
that a difference is that layer's; then whole steps are compared by their logits.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV, packed
from hybrid.decoders.comparison import difference, output_difference, spread_apart
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.decoders.vocabulary import whole_logits
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel

STEPS = 3  # decode steps of each sequence
# In tokens: the first one's decode steps cross the end of a block, the second one's prefill is one token.
SHORT = (BLOCK_SIZE + 2, STEPS + 1)

DIFFERS = "of the fused container differs from the model's own"
CheckedDecoder = WholeDecoder | StreamedDecoder


@dataclass(frozen=True)
class Forward:
    """A forward of the check.  rows: int64 [tokens], the indices of its tokens among those of all sequences."""

    rows: torch.Tensor
    batch: PackedBatch


class Sequences:
    """The check's random sequences, the longest first, and the forwards that run over them.

    blocks: of each sequence, in random order.
    prefills: all but the last STEPS tokens, the longest sequence in two pieces.
    steps: decode steps, one token of each sequence; in the second step the longest sequence is alone, because attention
        may divide the contexts of a small batch only.
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
        every = range(len(lengths))
        self.steps = [self.step(every, 0), self.step([0], 1), self.step(every[1:], 1), self.step(every, 2)]
        self.whole = self.forward([(index, 0, length) for index, length in enumerate(lengths)])

    def decode_steps(self, count: int) -> list[Forward]:
        """The decode steps of the first `count` sequences."""
        return [self.step(range(count), step) for step in range(STEPS)]

    def step(self, indices: Iterable[int], step: int) -> Forward:
        """Decode step number `step` of the sequences with these indices."""
        ends = [(index, self.lengths[index] - STEPS + step) for index in indices]
        return self.forward([(index, end, end + 1) for index, end in ends])

    def forward(self, spans: list[tuple[int, int, int]]) -> Forward:
        """The forward over parts of sequences: (index, begin, stop) each."""
        rows = [torch.arange(begin, stop) + self.first_rows[index] for index, begin, stop in spans]
        ids = [self.ids[index][begin:stop] for index, begin, stop in spans]
        blocks = [self.blocks[index] for index, _, _ in spans]
        batch = packed(ids, [begin for _, begin, _ in spans], blocks, self.device)
        return Forward(torch.cat(rows).to(self.device), batch)


@dataclass
class NativeOutputs:
    """The model's own layers' inputs and outputs, and its logits after the last STEPS tokens of each sequence.

    inputs, outputs: [tokens, hidden] of each layer.  logits: float32 [STEPS, sequences, vocabulary].
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    logits: torch.Tensor


def require_equal(decoder: CheckedDecoder, info: ModelInfo) -> None:
    """Raise UnsupportedModel if the embedding, a layer, the head or a whole step of `decoder` differs from the model's.

    Everything runs even after a difference, so that ranks that run a decoder together make the same collectives.
    """
    sequences = Sequences(checked_lengths(decoder), decoder.spec.vocab_size, decoder.device)
    native = native_run(info, sequences)
    decoder.reserve(max(sequences.lengths))
    kv = decoder.kv(1 + sequences.whole.batch.block_tables.numel())
    reasons = [*layer_differences(decoder, sequences, native, kv), *step_differences(decoder, sequences, native, kv)]
    if any(reasons):
        raise UnsupportedModel(next(filter(None, reasons)))


def checked_lengths(decoder: CheckedDecoder) -> list[int]:
    """Tokens of the check's sequences. The first is longer than a block and a context block by more than a block,
    unless the model's positions end before.
    """
    longest = max(decoder.context_block, BLOCK_SIZE) + BLOCK_SIZE + STEPS + 2
    limit = decoder.spec.max_positions or longest
    return [min(length, limit) for length in (longest, *SHORT)]


def layer_differences(
    decoder: CheckedDecoder, sequences: Sequences, native: NativeOutputs, kv: PagedKV
) -> Iterator[str]:
    """Yields what differs in the embedding, in each layer and in the head; "" if nothing does."""
    dtype, whole = decoder.dtype, sequences.whole.batch
    prefilled, decoded = (
        torch.cat([forward.rows for forward in part]) for part in (sequences.prefills, sequences.steps)
    )
    embedded = decoder.embed(whole.ids, whole.positions).float()
    yield difference(f"the embedding {DIFFERS}", embedded, native.inputs[0].float(), dtype)
    for index, layer in enumerate(decoder.spec.layers):
        inputs, expected = native.inputs[index].float(), native.outputs[index].float()
        outputs = layer_run(decoder, index, inputs.to(dtype), sequences, kv)
        for what, rows in ((f"layer {index}", prefilled), (f"layer {index}, in decode steps,", decoded)):
            yield difference(f"{what} {DIFFERS}", outputs[rows], expected[rows], dtype, inputs[rows], layer.experts)
    logits = whole_logits(decoder.logits(native.outputs[-1][decoded].to(dtype)), decoder.vocabulary)
    yield difference(f"the head {DIFFERS}", logits, native.logits.flatten(0, 1), dtype)


def layer_run(
    decoder: CheckedDecoder, index: int, inputs: torch.Tensor, sequences: Sequences, kv: PagedKV
) -> torch.Tensor:
    """A layer's output for `inputs` [tokens, hidden], by prefills, then decode steps, float32. Gathers weights once."""

    def run(layers: Callable, decode_layers: Callable) -> torch.Tensor:
        outputs = torch.full_like(inputs, torch.nan, dtype=torch.float32)
        for run_layers, forwards in ((layers, sequences.prefills), (decode_layers, sequences.steps)):
            for forward in forwards:
                outputs[forward.rows] = run_layers(inputs[forward.rows], forward.batch, kv, index, index + 1).float()
        return outputs

    if isinstance(decoder, StreamedDecoder):  # a streamed decoder's decode steps run `layers`
        layers = decoder.inner.layers
        return decoder.run([index], {index: lambda _: run(layers, layers)})
    return run(decoder.layers, decoder.decode_layers)


def step_differences(
    decoder: CheckedDecoder, sequences: Sequences, native: NativeOutputs, kv: PagedKV
) -> Iterator[str]:
    """Yields what differs in the logits of forwards, over `layer_differences`' keys and values; "" if nothing does."""
    dtype, experts = decoder.dtype, any(layer.experts for layer in decoder.spec.layers)
    max_capture_size = getattr(decoder, "max_capture_size", 0)

    def compared(what: str, logits: torch.Tensor, expected: torch.Tensor, limit: float = torch.inf) -> str:
        excused = len(expected) // 5 if experts else 0  # tokens that may be routed to other experts
        return output_difference(f"{what} {DIFFERS}", logits, expected, dtype, excused, limit)

    decode = getattr(decoder, "eager_decode", decoder.decode)  # of a decoder with graphs
    eager = torch.cat([whole_logits(decode(step.batch, kv), decoder.vocabulary).clone() for step in sequences.steps])
    expected = native.logits.flatten(0, 1)
    yield compared("a decode step", eager, expected)
    if max_capture_size:
        count = min(max_capture_size, len(sequences.lengths))
        steps = sequences.decode_steps(count)
        graphed = torch.cat(
            [whole_logits(decoder.decode(step.batch, kv), decoder.vocabulary).clone() for step in steps]
        )
        # The graph rounds as the eager step does: allow twice the eager step's distance from the model's own.
        limit = 2 * float(spread_apart(eager, expected).mean(dim=1).max())
        yield compared("a decode step from a graph", graphed, native.logits[:, :count].flatten(0, 1), limit)
    # Run the short sequences again, unsplit, from the embedding through all layers.
    again = sequences.forward([(index, 0, sequences.lengths[index]) for index in (1, 2)])
    hidden = decoder.forward(again.batch, kv)
    ends = again.batch.cu_seqlens[1:].long() - 1
    logits = whole_logits(decoder.logits(hidden[ends]), decoder.vocabulary)
    yield compared("a forward", logits, native.logits[-1, 1:])


def native_run(info: ModelInfo, sequences: Sequences) -> NativeOutputs:
    """The model's own forward over the sequences, padded on the right."""
    lengths, device = sequences.lengths, sequences.device
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences.ids):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    real = mask.bool().to(device)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        hidden = (args[0] if args else kwargs["hidden_states"])[real]
        inputs.append(outputs[-1] if outputs and torch.equal(outputs[-1], hidden) else hidden)
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
            handle = layer.register_forward_hook(record, with_kwargs=True)
            hooks.callback(handle.remove)
        logits = info.model(**arguments).logits
    rows = torch.arange(len(lengths)).expand_as(positions)
    return NativeOutputs(inputs, outputs, logits[rows, columns if keeps else positions].float())
