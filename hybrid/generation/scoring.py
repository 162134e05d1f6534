"""Logprobs of given sequences: by a fused decoder, or by a model's own forward over rows of similar length."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE, LayerActivations, on_device
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import LOGIT_ROWS, hidden_states, prefill_chunks, reserve_memory
from hybrid.generation.shared_prefixes import PackedSequences, packed_hidden_states
from hybrid.models.model_inputs import RowInputs, joined_inputs
from hybrid.models.modules import has_virtual_tokens, hugging_face_model
from hybrid.runtime.inputs import as_ids, as_mask
from hybrid.sampling.sampler import NOT_TRUNCATED, score_tokens
from hybrid.sampling.vocabulary import VocabularySlice, whole_logits

FORWARD_TOKENS = 4096  # tokens of a model's own forward, padding included; a longer row gets its own forward
WHOLE_LOGIT_TOKENS = 1024  # the same, for forwards that compute the logits of all their tokens


@dataclass(frozen=True)
class Scores:
    """A model's scores of given sequences, for each token but the first.  float32 [rows, tokens - 1] each.

    All are 0 if the token is masked or has no token before it.

    Args:
        per_token_logps: the token's logprob at the requested temperature.
        entropies: in nats, of the distribution that the logprob is of.
        top_ids: int64 [rows, tokens - 1, k], the most probable tokens of that distribution, in falling order; None if
            they were not requested.
        top_logprobs: float32 [rows, tokens - 1, k], their logprobs; likewise.
    """

    per_token_logps: torch.Tensor
    entropies: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], top_k: int, device: torch.device) -> "Scores":
        """Return zeros of a shape, with `top_k` top tokens if it is above 0."""
        logps, entropies = torch.zeros(2, *shape, device=device).unbind()
        if not top_k:
            return cls(logps, entropies)
        top_ids = torch.zeros(*shape, top_k, dtype=torch.int64, device=device)
        return cls(logps, entropies, top_ids, torch.zeros(*shape, top_k, device=device))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are there, in the order of the fields."""
        return [tensor for tensor in vars(self).values() if tensor is not None]

    def put(self, at: tuple[torch.Tensor, ...], values: Sequence[torch.Tensor]) -> None:
        """Write `values`, in the order of `tensors()`, at these indices."""
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor[at] = value

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Scores":
        """Return the scores with each tensor changed."""
        return Scores(*map(change, self.tensors()))


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocabulary: VocabularySlice | None,
    top_k: int,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return `score_tokens`, and with `top_k` the ids and logprobs of the most probable tokens, [n, top_k] each."""
    scores = score_tokens(logits, targets, temperature, vocabulary, sampling_mask)
    if not top_k:
        return scores
    logits = whole_logits(logits, vocabulary)
    values, ids = logits.topk(top_k, dim=-1)  # before the division, which takes another copy
    scaled = logits if temperature == 1 else logits / temperature
    return *scores, ids, values / temperature - torch.logsumexp(scaled, dim=-1, keepdim=True)


def score_packed(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_at_once: int,
    top_k: int = 0,
) -> Scores:
    """Return the scores of `sequences` by a fused decoder, at most `rows_at_once` rows in the cache at once.

    A token that several rows begin with is computed once; with `rollout.cache_hidden_states`, instead, tokens of
    earlier requests are not computed again.

    sequences, attention_mask: int64 [rows, tokens], each row's ones adjacent. Logits exist for LOGIT_ROWS tokens at a
        time.
    top_k: the most probable tokens of each distribution to return; 0: none.
    """
    if not (decoder.keeps_hidden_states and block_pool.shares_prefixes):
        arguments = decoder, block_pool, sequences, attention_mask, temperature, rows_at_once
        return shared_scores(*arguments, top_k=top_k)[0]
    scores = Scores.zeros((len(sequences), sequences.shape[1] - 1), top_k, decoder.device)
    sequences = sequences.cpu()
    first, length = attention_mask.argmax(dim=1).tolist(), attention_mask.sum(dim=1).tolist()
    decoder.reserve(max(length))
    needed = (sum(blocks_for(length[row]) for row in rows) for rows in together(length, rows_at_once, block_pool.limit))
    num_seqs = min(rows_at_once, len(length))
    reserve_memory(decoder, block_pool, num_seqs, max(needed), max(length), decodes=False)
    for rows in together(length, rows_at_once, block_pool.limit):
        real = [sequences[row, first[row] : first[row] + length[row]] for row in rows]
        blocks, begins = known_blocks(block_pool, real)
        for own, ids in zip(blocks, real, strict=True):
            own += block_pool.allocate(blocks_for(len(ids)) - len(own))
        computed = hidden_states(decoder, block_pool, [ids[:-1] for ids in real], blocks, begins)
        columns = [first[row] for row in rows]
        kept = kept_hidden_states(block_pool, blocks, begins, decoder.prefill_tokens)
        for chunks, hidden in itertools.chain(kept, computed):
            put_scores(scores, decoder, chunks, hidden, real, rows, columns, temperature, top_k)
        for own in blocks:
            block_pool.free(own)
    return scores


def put_scores(
    scores: Scores,
    decoder: AnyDecoder,
    chunks: dict[int, range],
    hidden: torch.Tensor,
    sequences: Sequence[torch.Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    temperature: float,
    top_k: int,
) -> None:
    """Write the scores of the tokens that follow those of a forward; logits exist for LOGIT_ROWS tokens at a time.

    chunks, hidden: as `hidden_states` gives them.  sequences: int64 [n] each, on the host.
    rows, columns: where `scores` has each sequence's second token.
    """
    # Every token's logits score the next token: its index in `hidden`, the target, and the output's index.
    sources, targets, row_of, column_of = [torch.arange(len(hidden))], [], [], []
    for index, chunk in chunks.items():
        positions = torch.arange(chunk.start, chunk.stop)
        targets.append(sequences[index][positions + 1])
        row_of.append(torch.full_like(positions, rows[index]))
        column_of.append(columns[index] + positions)
    on_host = [torch.cat(part) for part in (sources, targets, row_of, column_of)]
    parts = (part.split(LOGIT_ROWS) for part in on_device(on_host, decoder.device))
    for source, target, row, column in zip(*parts, strict=True):
        if len(source):
            # Without a name for the logits, so that they are freed before the next ones are computed.
            values = score_logits(decoder.logits(hidden[source]), target, temperature, decoder.vocabulary, top_k)
            scores.put((row, column), values)


def scores_beside_rows(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: Sequence[torch.Tensor],
    top_k: int,
    adapters: list[int] | None = None,
) -> Scores:
    """Return the scores of sequences, int64 [n] each on the host, while other rows are decoded in the same call.

    The blocks are new ones, which the call must have reserved, and are free again at the end. Rows are padded with 0 on
    the right. The arguments are otherwise `score_packed`'s, and the values too, at temperature 1.

    adapters: of each sequence, as for `hidden_states`.
    """
    scores = Scores.zeros((len(sequences), max(map(len, sequences)) - 1), top_k, decoder.device)
    inputs = [ids[:-1] for ids in sequences]
    blocks = [block_pool.allocate(blocks_for(len(ids))) for ids in inputs]
    slots = None if block_pool.shares_prefixes else block_pool.allocate_states(len(inputs))
    more = [0] * len(inputs), None, slots, adapters
    for chunks, hidden in hidden_states(decoder, block_pool, inputs, blocks, *more):
        put_scores(scores, decoder, chunks, hidden, sequences, range(len(inputs)), [0] * len(inputs), 1.0, top_k)
    block_pool.free_states(slots or [])
    for own in blocks:
        block_pool.free(own)
    return scores


@dataclass(frozen=True)
class LayerInputScores:
    """Scores of given sequences, and what the layers received while they were computed, for packed tokens.

    A token that several rows begin with is packed once, wherever the rows part: the tokens of the first row come first,
    then those of the second row that it does not share with the first one, and so on. Left out is each row's last
    token, which no token follows.

    Args:
        scores: as `score_packed` gives them.
        index: int64 [rows, tokens], each token's index among the packed ones; -1 at padding and at a row's last token.
        layer_inputs: [layers + 1, packed tokens, hidden], in the decoder's dtype. Index l has the `hidden_states` that
            the model's own layer l receives; the last index has the input of the final norm.
        router_indices: int16 [packed tokens, layers with experts, experts per token], the experts of each token, the
            one with the largest weight first; None for a model without experts.
    """

    scores: Scores
    index: torch.Tensor
    layer_inputs: torch.Tensor
    router_indices: torch.Tensor | None

    def without_rows(self) -> "LayerInputScores":
        """Return the same of no rows, and so of no packed tokens."""
        scores = self.scores.map(lambda tensor: tensor[:0])
        experts = None if self.router_indices is None else self.router_indices[:0].clone()
        return LayerInputScores(scores, self.index[:0], self.layer_inputs[:, :0].clone(), experts)


def score_with_layer_inputs(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_at_once: int,
    sampling_mask: torch.Tensor | None = None,
    keeps_inputs: bool = True,
) -> LayerInputScores | None:
    """Return the scores of `sequences` by a fused decoder, as `score_packed` does, and the inputs of the layers.

    A token that several rows begin with runs through the layers once, whole blocks or not, and its logits are computed
    once for each token that follows it. It runs again only if the block pool's limit leaves no room to keep its block.

    sequences, attention_mask: int64 [rows, tokens], each row's ones adjacent.
    sampling_mask: int64 [rows, tokens], of each token's scores; see `score_tokens`.
    keeps_inputs: False on a rank that only runs a group's forwards for another one: they are the same, and None is
        returned.
    """
    arguments = decoder, block_pool, sequences, attention_mask, temperature, rows_at_once
    scores, index, activations = shared_scores(*arguments, keeps_inputs, sampling_mask=sampling_mask)
    if activations is None:
        return None
    return LayerInputScores(scores, index.to(decoder.device), activations.layer_inputs, activations.router_indices)


def shared_scores(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_at_once: int,
    keeps_inputs: bool = False,
    top_k: int = 0,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[Scores, torch.Tensor, LayerActivations | None]:
    """Return scores, the index of LayerInputScores on the host, and the layers' inputs if `keeps_inputs`, of rows whose
    common prefixes are computed once. Logits exist for LOGIT_ROWS tokens at a time."""
    on_host = sequences.cpu()
    packed, index = pack_sequences(on_host, attention_mask, decoder.spec.is_recurrent)
    targets = FollowingTokens.of(index, on_host, packed.count, sampling_mask)
    masks = None if targets.masks is None else targets.masks.to(decoder.device)
    decoder.reserve(int(attention_mask.sum(dim=1).max()))
    activations = layer_activations(decoder, packed.count) if keeps_inputs else None
    of_pairs = Scores.zeros((len(targets.ids),), top_k, decoder.device)
    for places, hidden in packed_hidden_states(decoder, block_pool, packed, rows_at_once, activations):
        parts = (part.split(LOGIT_ROWS) for part in on_device(targets.after(places), decoder.device))
        for source, target, pair in zip(*parts, strict=True):
            if len(source):
                # Without a name for the logits, so that they are freed before the next ones are computed.
                settings = temperature, decoder.vocabulary, top_k, None if masks is None else masks[pair]
                of_pairs.put((pair,), score_logits(decoder.logits(hidden[source]), target, *settings))
    return of_pairs.map(lambda values: targets.of_rows(values, index)), index, activations


def pack_sequences(
    sequences: torch.Tensor, attention_mask: torch.Tensor, is_recurrent: bool
) -> tuple[PackedSequences, torch.Tensor]:
    """Return the rows packed without each one's last token, and the index of LayerInputScores, on the host.

    sequences: int64 [rows, tokens], on the host.  is_recurrent: as in `PackedSequences.of`.
    """
    first, length = attention_mask.argmax(dim=1).tolist(), attention_mask.sum(dim=1).tolist()
    packed = PackedSequences.of(
        [ids[begin : begin + count - 1] for ids, begin, count in zip(sequences, first, length, strict=True)],
        is_recurrent,
    )
    index = torch.full(sequences.shape, -1)
    for row, begin, own in zip(index, first, [packed.index[row] for row in packed.rows], strict=True):
        row[begin : begin + len(own)] = own
    return packed, index


@dataclass(frozen=True)
class Distributions:
    """A model's distributions of the next token after tokens of given sequences, whose logits are computed on request,
    for some tokens at a time: those of all tokens would be [rows, tokens, vocabulary].

    Args:
        hidden_states: [packed tokens, hidden], what the model's head is computed from.
        index: int64 [rows, tokens - 1], for each token but the first, the packed token before it; -1: there is none.
        head: hidden states, [n, hidden], to logits divided by the requested temperature, float32 [n, vocabulary].
    """

    hidden_states: torch.Tensor
    index: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]

    def logits(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the logits of the distributions that tokens were drawn from, float32 [n, vocabulary]: those of the
        first packed token where there is none.

        Args:
            rows: int64 [n].
            columns: int64 [n], of Scores: the token's own column, minus 1. Negative ones count from the end.
        """
        return self.head(self.hidden_states[self.index[rows, columns].clamp(min=0)])


def packed_last_hidden_states(
    decoder: AnyDecoder,
    block_pool: BlockPool,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    rows_at_once: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last layer's output of packed tokens, [packed tokens, hidden], and the index of `Distributions`."""
    packed, index = pack_sequences(sequences.cpu(), attention_mask, decoder.spec.is_recurrent)
    decoder.reserve(int(attention_mask.sum(dim=1).max()))
    size = max(packed.count, 1), decoder.spec.hidden_size
    outputs = torch.zeros(size, dtype=decoder.dtype, device=decoder.device)
    for places, hidden in packed_hidden_states(decoder, block_pool, packed, rows_at_once):
        outputs[places.to(decoder.device)] = hidden.to(decoder.dtype)
    return outputs, index[:, :-1].to(decoder.device)


def layer_activations(decoder: AnyDecoder, tokens: int) -> LayerActivations:
    """Return memory for the layers' inputs of `tokens` tokens, its content undefined."""
    spec, device = decoder.spec, decoder.device
    shape = len(spec.layers) + 1, tokens, spec.hidden_size
    router_indices = None
    if spec.moe_layers:
        experts = tokens, len(spec.moe_layers), spec.experts_per_token
        router_indices = torch.empty(experts, dtype=torch.int16, device=device)
    rows = torch.zeros(0, dtype=torch.int64, device=device)
    layer_inputs = torch.empty(shape, dtype=decoder.dtype, device=device)
    return LayerActivations(layer_inputs, router_indices, rows)  # type: ignore[arg-type]  # decoders: not strict yet


@dataclass(frozen=True)
class FollowingTokens:
    """The different tokens that follow each packed token, all on the host: pairs of a packed token and a target.

    Targets with different sampling masks are different.

    ids: int64 [pairs], the targets, in the order of the packed tokens.
    starts: int64 [packed tokens + 1], each packed token's first pair, and the number of pairs.
    pair_of: int64 [scored], the pair of each scored token of the rows, row by row.
    masks: int64 [pairs], the targets' sampling masks; None: they have none.
    """

    ids: torch.Tensor
    starts: torch.Tensor
    pair_of: torch.Tensor
    masks: torch.Tensor | None = None

    @classmethod
    def of(
        cls, index: torch.Tensor, sequences: torch.Tensor, count: int, sampling_mask: torch.Tensor | None = None
    ) -> "FollowingTokens":
        """index, sequences: int64 [rows, tokens], on the host.  count: of packed tokens.  sampling_mask: None, or int64
        [rows, tokens]."""
        scored = index[:, :-1] >= 0
        vocabulary = int(sequences.max()) + 1
        keys = index[:, :-1][scored] * vocabulary + sequences[:, 1:][scored]
        if sampling_mask is not None:
            of_targets = sampling_mask.cpu()[:, 1:][scored] - NOT_TRUNCATED  # from 0
            vocabulary *= (edges := int(sampling_mask.max()) - NOT_TRUNCATED + 1)
            keys = keys * edges + of_targets
        pairs, pair_of = keys.unique(return_inverse=True)
        starts, pairs = torch.searchsorted(pairs, torch.arange(count + 1) * vocabulary), pairs % vocabulary
        if sampling_mask is None:
            return cls(pairs, starts, pair_of)
        return cls(pairs // edges, starts, pair_of, pairs % edges + NOT_TRUNCATED)

    def after(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pairs of packed tokens, int64 [tokens]: for each pair the token's index in `places`, the target,
        and the pair's index."""
        counts = self.starts[places + 1] - self.starts[places]
        source = torch.arange(len(places)).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts)[source]
        pair = self.starts[places][source] + torch.arange(len(source)) - before
        return source, self.ids[pair], pair

    def of_rows(self, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the pairs' values, [pairs, ...], for the rows: [rows, tokens - 1, ...], 0 where no token is scored."""
        scored = (index[:, :-1] >= 0).to(values.device)
        whole = values.new_zeros(*scored.shape, *values.shape[1:])
        whole[scored] = values[self.pair_of.to(values.device)]
        return whole


def known_blocks(block_pool: BlockPool, sequences: list[torch.Tensor]) -> tuple[list[list[int]], list[int]]:
    """Return the cached blocks that sequences, int64 [n] each, begin with, with a reference to each, and of how many
    tokens they have the last layer's output."""
    known = [block_pool.reuse(ids, is_prompt=False) for ids in sequences]
    return [own for own, _ in known], [begin for _, begin in known]


def kept_hidden_states(
    block_pool: BlockPool, blocks: list[list[int]], counts: list[int], max_tokens: int
) -> Iterator[tuple[dict[int, range], torch.Tensor]]:
    """Yield the last layer's output of the first `counts` tokens of each sequence, in its blocks, as `hidden_states`
    gives it, `max_tokens` at a time."""
    assert block_pool.kv.hidden_states is not None, "the decoder keeps them"
    kept = block_pool.kv.hidden_states.flatten(0, 1)
    for chunks in prefill_chunks([0] * len(counts), counts, max_tokens):
        slots = [
            torch.tensor(blocks[index])[(positions := torch.arange(chunk.start, chunk.stop)) // BLOCK_SIZE] * BLOCK_SIZE
            + positions % BLOCK_SIZE
            for index, chunk in chunks.items()
        ]
        yield chunks, kept[torch.cat(slots).to(kept.device)]


def together(lengths: list[int], most: int, limit: int | None) -> Iterator[range]:
    """Split rows of the given lengths into runs of at most `most` rows and `limit` blocks, but at least one row."""
    start = blocks = 0
    for row, needed in enumerate(map(blocks_for, lengths)):
        if row > start and (row - start == most or (limit is not None and blocks + needed > limit)):
            yield range(start, row)
            start, blocks = row, 0
        blocks += needed
    yield range(start, len(lengths))


def padded_forward(model: nn.Module, call: Callable | None = None, moves_rows: bool = True) -> Callable:
    """Return a forward that takes (ids, mask), [rows, tokens], for rows padded on the left, the right or both; and as
    a third argument each row's other inputs.

    Positions start at each row's first real token, as they do in generation. A model without a `position_ids` argument
    counts columns instead: it gets rows that are padded on the right, and its logits or last hidden states are moved
    back.

    Args:
        model: the Hugging Face model.
        call: what is called with the model's keyword arguments, such as an engine; None: the model.
        moves_rows: False: a model without `position_ids` gets its rows as they are, for other outputs.
    """
    call = model if call is None else call
    owner = hugging_face_model(model)
    takes_positions = "position_ids" in inspect.signature(owner.forward).parameters

    def forward(ids: torch.Tensor, mask: torch.Tensor, model_inputs: Sequence[RowInputs] = ()) -> Any:
        ids, mask = as_ids(ids), as_mask(mask)
        if model_inputs:
            more: dict[str, Any] = joined_inputs(model_inputs, mask)
            if takes_positions:  # the model's own count: images may have several dimensions
                given = {**more, "attention_mask": mask}
                more["position_ids"] = owner._prepare_position_ids_for_generation(ids, given)
            return call(input_ids=ids, attention_mask=mask, use_cache=False, **more)
        if takes_positions:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            return call(input_ids=ids, attention_mask=mask, use_cache=False, position_ids=positions)
        if not moves_rows or mask[:, 0].all():
            return call(input_ids=ids, attention_mask=mask, use_cache=False)
        columns, first = torch.arange(ids.shape[1], device=ids.device), mask.argmax(dim=1, keepdim=True)
        source, width = columns + first, ids.shape[1]
        moved = (tensor.gather(1, source % width) * (source < width) for tensor in (ids, mask))
        outputs = call(**dict(zip(("input_ids", "attention_mask"), moved, strict=True)), use_cache=False)
        back = (columns - first).clamp(min=0)[..., None]
        for name in ("logits", "last_hidden_state"):
            if (values := getattr(outputs, name, None)) is not None:
                setattr(outputs, name, values.gather(1, back.expand(-1, -1, values.shape[2])))
        return outputs

    return forward


# By the model's own forward


@dataclass(frozen=True)
class PaddedBatch:
    """The rows of one forward, padded on the right.

    ids, mask: int64 [rows, width].  row: int64 [rows], each row's index in the input.  first: int64 [rows], the input
        column of each row's first token.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    first: torch.Tensor


def score_natively(
    model: nn.Module,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float,
    rows_per_forward: int,
    in_parts: bool = True,
    model_inputs: Sequence[RowInputs] = (),
    top_k: int = 0,
) -> Scores:
    """Return the scores of `sequences` by the model's own forward, at most `rows_per_forward` rows and FORWARD_TOKENS
    tokens at once.

    sequences, attention_mask: int64 [rows, tokens], at least one row.
    in_parts: False if each forward is a collective.
    model_inputs: of each row; empty: the rows are text.
    top_k: as in `score_packed`.

    If `in_parts` and the model takes `logits_to_keep`, logits exist for LOGIT_ROWS tokens at a time: the head runs for
    each part, the decoder under it once. Otherwise a forward computes the logits of all its tokens, and has at most
    WHOLE_LOGIT_TOKENS.
    """
    in_parts = in_parts and takes_few_logits(model)
    lengths = [last - first for first, last in zip(*spans(attention_mask), strict=True)]
    most_tokens = FORWARD_TOKENS if in_parts else WHOLE_LOGIT_TOKENS
    scores = Scores.zeros((len(sequences), sequences.shape[1] - 1), top_k, sequences.device)
    for together in similar(lengths, rows_per_forward, most_tokens):
        batch = padded(sequences, attention_mask, together)
        inputs = [model_inputs[row] for row in together] if model_inputs else []
        for columns, logits in logits_of(model, batch, in_parts, inputs):
            scored = (batch.mask[:, columns] * batch.mask[:, columns + 1]).bool()
            rows, kept_columns = scored.nonzero(as_tuple=True)
            at = columns[kept_columns]
            targets = batch.ids[rows, at + 1]
            values = score_logits(logits[rows, kept_columns].float(), targets, temperature, None, top_k)
            scores.put((batch.row[rows], batch.first[rows] + at), values)
    return scores


def logits_of(
    model: nn.Module, batch: PaddedBatch, in_parts: bool, model_inputs: Sequence[RowInputs] = ()
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield columns of a batch, int64 [columns], and the logits after them [rows, columns, vocab], for at most
    LOGIT_ROWS tokens at a time.

    in_parts: run the head once for each part of the columns; else run the model once.
    """
    rows, width = batch.ids.shape
    columns = torch.arange(width - 1, device=batch.ids.device).split(max(1, LOGIT_ROWS // rows))
    if in_parts:
        # The decoder under the head runs in the first forward only. The model's own forward computes the logits each
        # time, so scaling and soft caps around the head apply.
        outputs: dict[nn.Module, Any] = {}
        with ExitStack() as stack:
            for decoder in decoders(hugging_face_model(model)):
                stack.enter_context(forward_once(decoder, outputs))
            for part in columns:
                call = functools.partial(model, logits_to_keep=part)
                logits = padded_forward(model, call)(batch.ids, batch.mask, model_inputs).logits
                require_vocabulary(model, logits, batch.ids)
                if not outputs:  # no decoder where Hugging Face's models have it: it would run for each part
                    break
                yield part, logits
            else:
                return
    logits = padded_forward(model)(batch.ids, batch.mask, model_inputs).logits
    require_vocabulary(model, logits, batch.ids)
    logits = logits[:, -width:]  # PEFT's virtual tokens come first
    for part in columns:
        yield part, logits[:, part]


def require_vocabulary(model: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise ValueError if a model's output is no logits of the tokens that are scored: it is a classifier."""
    if logits.dim() != 3 or logits.shape[-1] <= int(ids.max()):
        raise ValueError(
            f"score: {type(model).__name__} returns logits of shape {tuple(logits.shape)} for token ids up to "
            f"{int(ids.max())}; it needs a language-modelling head, with logits of [rows, tokens, vocabulary]"
        )


def takes_few_logits(model: nn.Module) -> bool:
    """Whether the model's forward can compute the logits of selected tokens alone, by `logits_to_keep`."""
    owner = hugging_face_model(model)
    if has_virtual_tokens(model):  # which shift the positions of logits
        return False
    return "logits_to_keep" in inspect.signature(owner.forward).parameters and bool(decoders(owner))


def decoders(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a Hugging Face model may call for hidden states: its base model, or the decoder in that
    (OPT)."""
    candidates = [getattr(model, "base_model", model)]
    if hasattr(model, "get_decoder"):
        candidates.append(model.get_decoder())
    return [module for module in dict.fromkeys(candidates) if isinstance(module, nn.Module) and module is not model]


@contextmanager
def forward_once(module: nn.Module, outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Inside the block, the module's forward runs at its first call only; `outputs` keeps and gives its output."""
    own, before = module.forward, {name: value for name, value in module.__dict__.items() if name == "forward"}

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if module not in outputs:
            outputs[module] = own(*args, **kwargs)
        return outputs[module]

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        module.__dict__.update(before)


def spans(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the first unmasked column of each row, and the column after the last one.  mask [rows, tokens]"""
    first = mask.argmax(dim=1)
    last = mask.shape[1] - mask.flip(1).argmax(dim=1)
    return first.tolist(), last.tolist()


def similar(lengths: list[int], most_rows: int, most_tokens: int) -> list[list[int]]:
    """Return batches of rows, longest first, of at most `most_rows` rows and `most_tokens` tokens with padding, but at
    least one row."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        last = batches[-1] if batches else []
        if last and len(last) < most_rows and (len(last) + 1) * lengths[last[0]] <= most_tokens:
            last.append(row)
        else:
            batches.append([row])
    return batches


def padded(sequences: torch.Tensor, mask: torch.Tensor, rows: list[int]) -> PaddedBatch:
    """Return a batch of some rows, without columns that are padding in all of them; at least two columns wide."""
    first, last = spans(mask[rows])
    width = max(2, *(end - begin for begin, end in zip(first, last, strict=True)))
    ids, kept = (tensor.new_zeros(len(rows), width) for tensor in (sequences, mask))
    for index, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
        ids[index, : end - begin], kept[index, : end - begin] = sequences[row, begin:end], mask[row, begin:end]
    return PaddedBatch(ids, kept, torch.tensor(rows, device=ids.device), torch.tensor(first, device=ids.device))
