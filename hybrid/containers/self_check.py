"""The self-check: a decoder's embedding, layers and head, compared with the model's own on a few random tokens."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hybrid.architectures.spec import DecoderSpec, Unreadable
from hybrid.containers.batch import PAGE, PackedBatch, PagedKV, packed

CHECKED_TOKENS = (PAGE + 5, 7)  # tokens of its sequences: one that is longer than a page, and a short one


class Checked(Protocol):
    """What the self-check asks of a decoder; one that ranks share is its lockstep form."""

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device

    def reserve(self, tokens: int) -> None:
        """Make tables for so many positions."""

    def kv(self, pages: int) -> PagedKV:
        """New pages."""

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer."""

    def layers(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV, first: int, last: int) -> torch.Tensor:
        """Layers `first` to `last`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after the last layer's output."""


@dataclass
class Seen:
    """What the model's own layers were given and gave, on one padded batch.  [rows, tokens, hidden] each."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    logits: torch.Tensor


def require_equal(decoder: Checked, model: nn.Module, layers: list[nn.Module]) -> None:
    """Raises Unreadable where the embedding, a layer or the logits of `decoder` differ from the model's own.

    Every layer is given what the model's layer is given, for a whole sequence and for its last token over a cache.
    """
    spec, device = decoder.spec, decoder.device
    longest = min(max(CHECKED_TOKENS), spec.max_positions or max(CHECKED_TOKENS))
    lengths = [min(length, longest) for length in CHECKED_TOKENS]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(spec.vocab_size, (length,), generator=generator) for length in lengths]
    seen = native_run(model, layers, sequences, longest, device)
    real = torch.cat([torch.arange(n * longest, n * longest + length) for n, length in enumerate(lengths)]).to(device)

    def flat(padded: torch.Tensor) -> torch.Tensor:
        return padded.flatten(0, 1)[real].float()

    decoder.reserve(longest)
    whole = own_pages_batch(sequences, device)
    compare("the embedding", decoder.embed(whole.ids, whole.positions), flat(seen.inputs[0]), decoder.dtype)
    kv = decoder.kv(1 + whole.tables.numel())
    shortened = own_pages_batch([ids[:-1] for ids in sequences], device, longest=longest)
    last = own_pages_batch([ids[-1:] for ids in sequences], device, [length - 1 for length in lengths], longest)
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    not_ends = torch.ones(len(real), dtype=torch.bool, device=device)
    not_ends[ends] = False
    for index, layer in enumerate(spec.layers):
        given, expected = flat(seen.inputs[index]), flat(seen.outputs[index])
        exact = given.to(decoder.dtype)
        found = decoder.layers(exact, whole, kv, index, index + 1)
        compare(f"layer {index}", found, expected, decoder.dtype, given, layer.experts)
        decoder.layers(exact[not_ends], shortened, kv, index, index + 1)
        found = decoder.layers(exact[ends], last, kv, index, index + 1)
        compare(f"layer {index}, over a cache,", found, expected[ends], decoder.dtype, given[ends], layer.experts)
    found = decoder.logits(flat(seen.outputs[-1]).to(decoder.dtype))
    compare("the head", found, flat(seen.logits), decoder.dtype)


def native_run(
    model: nn.Module, layers: list[nn.Module], sequences: list[torch.Tensor], width: int, device: torch.device
) -> Seen:
    """The model's own forward over sequences, padded on the right."""
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    inputs, outputs = [], []

    def note(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"]).clone())
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.register_forward_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    return Seen(inputs, outputs, logits)


def own_pages_batch(
    pieces: list[torch.Tensor], device: torch.device, begins: list[int] | None = None, longest: int = 0
) -> PackedBatch:
    """Pieces of sequences, from given positions on, each with pages of its own for `longest` tokens or its length."""
    each = -(-max(longest, *map(len, pieces)) // PAGE)
    pages = [list(range(1 + n * each, 1 + (n + 1) * each)) for n in range(len(pieces))]
    return packed(pieces, begins or [0] * len(pieces), pages, device)


# Of what a layer adds, and of the size of what it adds to: sums in another order, and rounding at every operation.
TOLERANCES = {torch.float32: (1e-4, 4e-6), torch.bfloat16: (0.05, 0.016), torch.float16: (0.01, 0.002)}


def compare(
    what: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    given: torch.Tensor | None = None,
    experts: bool = False,
) -> None:
    """Raises Unreadable where `found` is not `expected` [tokens, n]; `given`: what a layer adds to.

    Half precision may send a token to other experts, where two of them are nearly as likely: a tenth of the tokens of
    a mixture may differ then.
    """
    found = found.float()
    added = expected if given is None else expected - given
    of_added, of_size = TOLERANCES[dtype]
    allowed = of_added * added.abs().max() + of_size * expected.abs().max()
    error = (found - expected).abs().amax(dim=1)
    wrong = ~(error <= allowed)
    excused = len(error) // 10 + 1 if experts and dtype != torch.float32 else 0
    if wrong.sum() > excused:
        raise Unreadable(
            f"{what} of the fused container differs from the model's own by {error.max():.3g}, where {allowed:.3g} is "
            f"allowed ({int(wrong.sum())} of {len(wrong)} tokens)"
        )
