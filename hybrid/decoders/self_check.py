"""The self-check: compares everything that a decoder runs with the model's own modules, on a few random tokens.

It covers prefill with and without a prefix, and decode steps, eager and from graphs, in the dtype in use, over a
context longer than one block and one split of decode attention. Every layer gets the input of the model's own layer, so
that a difference is that layer's; then whole steps are compared by their logits.

The tolerances are by token, and robust to massive activations. A correct layer differs by the order of float32 sums and
by half precision's rounding at every operation; a part that is missing, or added twice, makes a larger difference. Real
Llama, Qwen and Mistral have massive activations: channels near 1000 at some tokens, where others are near 1 (Sun et al.
2024, arXiv:2402.17762). The tolerance is therefore by channel and by medians.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV, packed
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.sampling.vocabulary import whole_logits

STEPS = 3  # decode steps of each sequence
# In tokens: the first one's decode steps cross the end of a block, the second one's prefill is one token.
SHORT = (BLOCK_SIZE + 2, STEPS + 1)

DIFFERS = "of the fused container differs from the model's own"
CheckedDecoder = WholeDecoder | StreamedDecoder

# A layer's tolerance in each channel, in "roundings": this share of what the layer adds in the channel plus its median
# over channels, plus a unit in the last place of the residual stream, which is itself rounded to the dtype.
RELATIVE = {torch.float32: 2**-16, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Limits in these roundings. Seen in bfloat16 (TYPICAL, WORST, AVERAGE): correct decoders of the tests' families 0.9, 8
# and 0.5 (Gemma 2, whose attention scores Hugging Face rounds differently, and OLMo 2; the others 0.5, 4 and 0.3); an
# MLP doubled, dropped or negated at least 2.4, and at most tokens 4 and more.
TYPICAL = 2.0  # limit of the median over a token's channels
WORST = 16.0  # limit of any one channel of a token
# In half precision one token, and one more in OUTLIER_EVERY, may be up to OUTLIER times over both limits. Seen in GLM-4
# with LoRA under ZeRO-3, whose linear layers round before they add the bias: 3.8 and 15, at one of 98 tokens; float64
# is as far from the model there as from the decoder.
OUTLIER, OUTLIER_EVERY = 2.5, 50
# The mean over tokens and channels, with a unit in the last place weighted by OF_ULP. If the residual stream is much
# larger than what a layer adds, a correct layer rounds few channels differently; a layer that lacks a part, most.
AVERAGE, OF_ULP, CLIPPED = 1.5, 1 / 8, 4.0

# Limits for a whole model's output, in units of its spread over a token's channels: the mean over channels. Seen in
# bfloat16: 0.02, with 80 layers 0.03; with int8 weights in an untrained model 0.1.
OF_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25, torch.int8: 0.5}
WORST_OF_SPREAD = 8.0  # limit of any one channel, in multiples of OF_SPREAD
OF_SIZE = 1 / 32  # share of a channel's size added to the spread, for channels that are all large and nearly equal


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

    def __init__(self, lengths: list[int], vocabulary: int, device: torch.device, placeholders: torch.Tensor):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        # A model may read other embeddings in the place of an image's tokens, also without an image (Gemma 4).
        self.ids = [ids.where(~torch.isin(ids, placeholders), first_text_token(placeholders)) for ids in drawn]
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
        """Return the decode steps of the first `count` sequences."""
        return [self.step(range(count), step) for step in range(STEPS)]

    def step(self, indices: Iterable[int], step: int) -> Forward:
        """Decode step number `step` of the sequences with these indices."""
        ends = [(index, self.lengths[index] - STEPS + step) for index in indices]
        return self.forward([(index, end, end + 1) for index, end in ends])

    def forward(self, spans: list[tuple[int, int, int]]) -> Forward:
        """Return the forward over parts of sequences: (index, begin, stop) each."""
        rows = [torch.arange(begin, stop) + self.first_rows[index] for index, begin, stop in spans]
        ids = [self.ids[index][begin:stop] for index, begin, stop in spans]
        blocks = [self.blocks[index] for index, _, _ in spans]
        slots = [index for index, _, _ in spans]  # of recurrent states; not read without any
        batch = packed(ids, [begin for _, begin, _ in spans], blocks, self.device, slots)
        return Forward(torch.cat(rows).to(self.device), batch)


def first_text_token(placeholders: torch.Tensor) -> int:
    """Return the smallest token id that is none of `placeholders`."""
    return next(token for token in itertools.count() if token not in placeholders)


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
    placeholders = info.placeholders.tokens
    sequences = Sequences(checked_lengths(decoder), decoder.spec.vocab_size, decoder.device, placeholders)
    native = native_run(info, sequences)
    decoder.reserve(max(sequences.lengths))
    kv = decoder.kv(1 + sequences.whole.batch.block_tables.numel())
    if decoder.spec.is_recurrent:
        kv = replace(kv, states=decoder.states(len(sequences.lengths)))
    reasons = [*layer_differences(decoder, sequences, native, kv), *step_differences(decoder, sequences, native, kv)]
    if any(reasons):
        raise UnsupportedModel(next(filter(None, reasons)))


def checked_lengths(decoder: CheckedDecoder) -> list[int]:
    """Return the tokens of the check's sequences. The first is longer than a block and a context block by more than a
    block, unless the model's positions end before.
    """
    longest = max(decoder.context_block, BLOCK_SIZE) + BLOCK_SIZE + STEPS + 2
    limit = decoder.spec.max_positions or longest
    return [min(length, limit) for length in (longest, *SHORT)]


def layer_differences(
    decoder: CheckedDecoder, sequences: Sequences, native: NativeOutputs, kv: PagedKV
) -> Iterator[str]:
    """Yield what differs in the embedding, in each layer and in the head; "" if nothing does."""
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
    """Return a layer's output for `inputs` [tokens, hidden], by prefills, then decode steps, float32. Gathers weights
    once. Recurrent states remain as the prefills leave them."""

    def run(layers: Callable, decode_layers: Callable) -> torch.Tensor:
        outputs = torch.full_like(inputs, torch.nan, dtype=torch.float32)
        prefilled: list[torch.Tensor] = []
        for run_layers, forwards in ((layers, sequences.prefills), (decode_layers, sequences.steps)):
            prefilled = [state.clone() for state in kv.states.get(index, ())]
            for forward in forwards:
                outputs[forward.rows] = run_layers(inputs[forward.rows], forward.batch, kv, index, index + 1).float()
        for state, before in zip(kv.states.get(index, ()), prefilled, strict=True):
            state.copy_(before)
        return outputs

    if isinstance(decoder, StreamedDecoder):  # a streamed decoder's decode steps run `layers`
        layers = decoder.inner.layers
        return decoder.run([index], {index: lambda _: run(layers, layers)})
    return run(decoder.layers, decoder.decode_layers)


def step_differences(
    decoder: CheckedDecoder, sequences: Sequences, native: NativeOutputs, kv: PagedKV
) -> Iterator[str]:
    """Yield what differs in the logits of forwards, over `layer_differences`' keys and values; "" if nothing does."""
    dtype, experts = decoder.dtype, any(layer.experts for layer in decoder.spec.layers)
    max_capture_size = getattr(decoder, "max_capture_size", 0)

    def compared(what: str, logits: torch.Tensor, expected: torch.Tensor, limit: float = torch.inf) -> str:
        excused = len(expected) // 5 if experts else 0  # tokens that may be routed to other experts
        return output_difference(f"{what} {DIFFERS}", logits, expected, dtype, excused, limit)

    decode = getattr(decoder, "eager_decode", decoder.decode)  # of a decoder with graphs
    states = [state for of_layer in kv.states.values() for state in of_layer] if max_capture_size else []
    prefilled = [(state, state.clone()) for state in states]
    eager = torch.cat([whole_logits(decode(step.batch, kv), decoder.vocabulary).clone() for step in sequences.steps])
    expected = native.logits.flatten(0, 1)
    yield compared("a decode step", eager, expected)
    if max_capture_size:
        for state, before in prefilled:
            state.copy_(before)
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
    """Return the model's own forward over the sequences, padded on the right."""
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


def difference(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    experts: bool = False,
) -> str:
    """Return why a layer's output `actual` differs from `expected`; "" if it is within the tolerance.

    actual, expected, residual: float32 [tokens, n].  residual: the layer's input, which it adds to; None: zeros.
    experts: the layer is a mixture of experts. Half precision may route a token to other experts if two are nearly as
        likely, so a tenth of the tokens may differ.
    """
    residual = torch.zeros_like(expected) if residual is None else residual
    added, error = (expected - residual).abs(), (actual - expected).abs()
    added = RELATIVE[dtype] * (added.median(dim=1, keepdim=True).values + added)
    exponents = torch.frexp(torch.maximum(residual.abs(), expected.abs()).clamp(min=1e-30)).exponent  # of [0.5, 1)
    ulp = torch.finfo(dtype).eps * torch.exp2(exponents.float() - 1)  # unit in the last place
    units = error / (added + ulp)
    typical, worst = units.median(dim=1).values, units.amax(dim=1)
    over = torch.maximum(typical / TYPICAL, worst / WORST).nan_to_num(nan=torch.inf)
    wrong = over > 1
    average = float((error / (added + OF_ULP * ulp)).clamp(max=CLIPPED).mean())
    is_half = dtype != torch.float32
    other_experts = is_half and experts and wrong.sum() <= len(wrong) // 10 + 1
    outliers = is_half and over.max() <= OUTLIER and wrong.sum() <= len(wrong) // OUTLIER_EVERY + 1
    if (not wrong.any() or other_experts or outliers) and average <= AVERAGE:
        return ""
    allowed = TYPICAL * (added + ulp).median(dim=1).values
    error, token = error.median(dim=1).values, int(over.argmax())
    return (
        f"{what} by {error[token]:.3g}, where {allowed[token]:.3g} is allowed (the median over channels; "
        f"{int(wrong.sum())} of {len(wrong)} tokens differ, a channel by up to {worst[token]:.3g} roundings)"
    )


def output_difference(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    excused: int = 0,
    limit: float = torch.inf,
) -> str:
    """Return why a model's outputs `actual`, logits or hidden states, differ from `expected`; "" if they are within the
    tolerance. [tokens, n] each.

    dtype: the dtype of the computation; int8 if the weights are int8.
    excused: number of tokens that may differ in half precision or int8.
    limit: of the mean over channels of `spread_apart`, clamped to between an eighth of OF_SPREAD and OF_SPREAD.
    """
    apart = spread_apart(actual, expected)
    allowed = max(min(limit, OF_SPREAD[dtype]), OF_SPREAD[dtype] / 8)
    mean, worst = apart.clamp(max=CLIPPED).mean(dim=1), apart.amax(dim=1)
    wrong = int((~((mean <= allowed) & (worst <= WORST_OF_SPREAD * OF_SPREAD[dtype]))).sum())
    if wrong <= (0 if dtype == torch.float32 else excused):
        return ""
    return (
        f"{what} by {mean.max():.3g}, where {allowed:.3g} is allowed (of a token's spread; {wrong} of {len(mean)} "
        f"tokens differ, a channel by up to {worst.max():.3g})"
    )


def spread_apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the outputs' difference in each channel, in units of the spread over the token's channels.  [tokens, n]

    Each token's median over channels is subtracted first: a constant added to logits does not change their meaning.
    """
    actual, expected = actual.float(), expected.float()
    actual, centred = (x - x.median(dim=-1, keepdim=True).values for x in (actual, expected))
    spread = centred.abs().median(dim=-1, keepdim=True).values
    return (actual - centred).abs() / (spread + OF_SIZE * expected.abs())
