"""Micro batches: balancing rows by tokens, rows packed without padding, logits computed in chunks.

B rows of T columns, prompt and completion together; rows may be padded on the left, the right or both.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

import hybrid
from rlhf_examples.common.losses import entropy_of, upcast

CHUNK_SIZE = 1024  # tokens whose logits exist at once: 0.6 GB in float32 with a vocabulary of 150 thousand
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05  # nats, on average; 16 bits have 3 digits, of logits of 10 and more


def balanced_batches(lengths: Sequence[int] | torch.Tensor, num_batches: int) -> list[list[int]]:
    """Row numbers in `num_batches` batches of about equally many tokens; no batch is empty.

    lengths: tokens of each row. The longest row left goes to the batch with the fewest tokens; ties go to the batch
        with the fewest rows, then to the first. Tokens are balanced, not rows, because time and memory grow with
        tokens.
    The number of batches is given, because under ZeRO every rank must run equally many forwards and backwards.
    Raises ValueError if there are fewer rows than batches.
    """
    lengths = torch.as_tensor(lengths).tolist()
    if len(lengths) < num_batches:
        raise ValueError(f"num_batches: {num_batches} given for {len(lengths)} rows; every batch needs a row")
    tokens = [0] * num_batches
    batches: list[list[int]] = [[] for _ in tokens]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fewest = min(range(num_batches), key=lambda batch: (tokens[batch], len(batches[batch]), batch))
        batches[fewest].append(row)
        tokens[fewest] += lengths[row]
    return [sorted(batch) for batch in batches]


def token_budget_batches(
    lengths: torch.Tensor, max_tokens: int, over_ranks_max: Callable[[torch.Tensor], torch.Tensor]
) -> list[list[int]]:
    """`balanced_batches` of at most `max_tokens` tokens: equally many on every rank, and as few as possible.

    lengths int64 [rows], this rank's. over_ranks_max: the maximum of a tensor over all ranks; called once on every
    rank, so that all ranks raise the same error.
    DeepSpeed runs `gradient_accumulation_steps` backwards in an optimizer step. For a number that varies, leave that at
    1, call `engine.set_gradient_accumulation_boundary(last)` before each backward and `engine.step()` after it:
    backwards are then summed, not averaged, so divide a micro batch's loss by the number of all tokens over the number
    of ranks (`loss_denominator` with micro_batches = ranks).
    Raises ValueError if a row is longer than max_tokens, or if a rank has fewer rows than batches are needed.
    """
    own = lengths.tolist()
    needed = max(-(-sum(own) // max_tokens), 1)
    while needed < len(own) and any(
        sum(own[row] for row in rows) > max_tokens for rows in balanced_batches(own, needed)
    ):
        needed += 1
    needed, longest, fewest = over_ranks_max(lengths.new_tensor([needed, max(own, default=0), -len(own)])).tolist()
    if longest > max_tokens:
        raise ValueError(f"max_tokens: {max_tokens} given; the longest row has {longest} tokens")
    if needed > -fewest:
        raise ValueError(f"max_tokens: {max_tokens} given; a rank needs {needed} batches, and one has {-fewest} rows")
    return balanced_batches(own, needed)


def pack_rows(sequences: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' real tokens concatenated, and their positions, which start at 0 in each row.

    sequences, mask [B, T]; returns ids, position_ids int64 [1, total].
    Most of Hugging Face's decoders, called with these, attention_mask=None and use_cache=False, keep the rows apart:
    transformers derives the boundaries from the positions and builds the mask for sdpa or eager attention, but only
    without a mask and a cache (masking_utils.py, 5.23). `require_exact` checks whether a model does.
    """
    kept = mask.bool()
    positions = mask.long().cumsum(dim=1) - 1
    return sequences[kept].unsqueeze(0), positions[kept].unsqueeze(0)


def unpack_rows(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Per-token values of packed rows, back in padded rows; differentiable.

    per_token [1, total, ...], mask [B, T]; returns [B, T, ...], 0 where masked.
    """
    rows = per_token.new_zeros(*mask.shape, *per_token.shape[2:])
    return rows.index_put(tuple(mask.nonzero(as_tuple=True)), per_token[0])


def chunked_logps(
    hidden: torch.Tensor,
    head: nn.Module,
    ids: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    after_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of `ids` and entropies in nats under head(hidden) / temperature; differentiable, logits computed in
    chunks.

    hidden [N, hidden size], ids int64 [N]; N may be 0. Returns two tensors, float32 [N] (float64 if the logits are).
    head: hidden states to logits, such as `model.get_output_embeddings()`. after_head: what the model applies to the
        head's logits, see `logits_after_head`.
    The backward recomputes each chunk's logits, so that only those of `chunk_size` tokens exist at a time.
    Raises ValueError for a head with submodules whose parameters ZeRO-3 partitions.
    """
    head_forward = head.forward

    def score(part: torch.Tensor, part_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = upcast(head_forward(part))
        logits = logits if after_head is None else after_head(logits)
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(-1, part_ids.unsqueeze(-1)).squeeze(-1), entropy_of(log_probs)

    def score_chunks(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(hidden.split(chunk_size), ids.split(chunk_size), strict=True)
        logps, entropies = zip(*(checkpoint(score, *part, use_reentrant=False) for part in parts), strict=True)
        return torch.cat(logps), torch.cat(entropies)

    # The head is called once, with the chunks inside: ZeRO-3's hooks run at the call and gather its weight once for
    # the forward and once for the backward. A call for each chunk gives the same gradients, but gathers each time, and
    # hangs if ranks have different numbers of tokens, and so of chunks (deepspeed 0.19.8).
    inner_parameters = (p for child in head.children() for p in child.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in inner_parameters):
        raise ValueError(
            f"head: {type(head).__name__} has modules inside that ZeRO-3 partitions; take its logits whole"
        )
    with forward_replaced(head, score_chunks):
        return head(hidden)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Inside the block, `module` runs `forward` within its hooks; afterwards its own forward is restored."""
    own = vars(module).get("forward")  # an instance attribute that overrides the class's forward
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def logits_after_head(config: PreTrainedConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a Hugging Face model applies to its head's logits: Gemma's soft cap, Granite's and Cohere's scales."""
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)

    def after_head(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return after_head


def packed_forward(engine: nn.Module, sequences: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> Any:
    """The output of a Hugging Face decoder for rows packed by `pack_rows`; its per-token tensors are [1, total, ...].

    engine: the model, or a DeepSpeed engine with it. sequences, mask [B, T]; kwargs: other arguments of the model's
        forward.
    """
    ids, positions = pack_rows(sequences, mask)
    return engine(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **kwargs)


def per_token_logps_and_entropies(
    engine: nn.Module,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    padding_free: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the wanted tokens and entropies of their distributions; differentiable.

    engine: a Hugging Face decoder, or a DeepSpeed engine with it in train mode. sequences, mask, wanted [B, T]; returns
        two tensors, float32 [B, T], 0 where masked, not wanted, or without a previous token. padding_free: run the
        forward on packed rows. Call `require_exact` once before: it checks whether the model supports this.
    Under ZeRO-3 every rank must take part, also without a wanted token.
    """
    model, kept = getattr(engine, "module", engine), mask.bool()
    options = {"output_hidden_states": True, "logits_to_keep": 1}
    if padding_free:
        hidden = unpack_rows(packed_forward(engine, sequences, mask, **options).hidden_states[-1], mask)
    else:
        call = functools.partial(engine, **options)
        hidden = hybrid.padded_forward(model, call)(sequences, mask).hidden_states[-1]  # [B, T, hidden size]
    rows, columns = (kept[:, 1:] & kept[:, :-1] & targets[:, 1:].bool()).nonzero(as_tuple=True)  # the previous tokens
    per_target = chunked_logps(
        hidden[rows, columns],
        model.get_output_embeddings(),
        sequences[rows, columns + 1],
        temperature,
        chunk_size,
        logits_after_head(model.config),
    )
    logps, entropies = (values.new_zeros(mask.shape).index_put((rows, columns + 1), values) for values in per_target)
    return logps, entropies


@torch.no_grad()
def require_exact(engine: nn.Module, padding_free: bool) -> None:
    """Raises ValueError if `per_token_logps_and_entropies` differs from the logprobs of the model's own logits.

    Compares three short rows of random tokens: a model may mix packed rows (BLOOM, Falcon and OPT do, transformers
    5.23), or transform its logits in a way of its own. Every rank takes part.
    """
    model = getattr(engine, "module", engine)
    was_training, vocabulary = model.training, model.config.get_text_config().vocab_size
    ids, mask = (tensor.to(next(model.parameters()).device) for tensor in padded_example(vocabulary))
    model.eval()  # disables dropout; the module's eval() leaves the engine's training forwards in place
    try:
        logits = hybrid.padded_forward(model, engine)(ids, mask).logits[:, :-1]
        ours, _ = per_token_logps_and_entropies(engine, ids, mask, mask, padding_free=padding_free, chunk_size=4)
        mixed = padding_free and packed_rows_mix(engine, ids, mask, vocabulary)
    finally:
        model.train(was_training)
    compared = (mask[:, 1:] * mask[:, :-1]).bool()
    error = (hybrid.selective_log_softmax(logits, ids[:, 1:]) - ours[:, 1:])[compared].abs().mean().item()
    name = type(model).__name__
    if mixed:
        raise ValueError(f"padding_free: true given; {name} mixes packed rows: one changes with another; give false")
    if not error < (HALF_TOLERANCE if logits.dtype.itemsize == 2 else TOLERANCE):
        raise ValueError(
            f"padding_free: {padding_free} given; {name}'s logprobs with logits in chunks differ from its own by "
            f"{error:.2g} on average; give logit_chunk: 0"
        )


@torch.no_grad()
def require_exact_values(engine: nn.Module) -> None:
    """Raises ValueError if a value model's packed rows differ from the same rows padded: see `require_exact`.

    Compares hidden states, because a new head outputs 0 for everything. Every rank takes part.
    """
    model = getattr(engine, "module", engine)
    was_training, vocabulary = model.training, model.classifier.config.get_text_config().vocab_size
    ids, mask = (tensor.to(next(model.parameters()).device) for tensor in padded_example(vocabulary))
    model.eval()
    try:
        padded, of_packed = (
            engine(input_ids=ids, attention_mask=mask, padding_free=packs, output_hidden_states=True).hidden_states[0]
            for packs in (False, True)
        )
    finally:
        model.train(was_training)
    expected = padded[mask.bool()]
    error = ((of_packed[0] - expected).float().abs().mean() / expected.float().abs().mean()).item()
    if not error < (HALF_TOLERANCE if expected.dtype.itemsize == 2 else TOLERANCE):
        raise ValueError(
            f"padding_free: true given; {type(model.classifier).__name__} mixes packed rows: its hidden states are "
            f"{error:.2g} of their size off those of padded rows; give false"
        )


def padded_example(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three short rows of random tokens, padded left, right and not at all, and their mask, both int64 [3, 9]."""
    ids = torch.randint(vocabulary, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 5:] = 0, 0
    return ids, mask


def packed_rows_mix(engine: nn.Module, ids: torch.Tensor, mask: torch.Tensor, vocabulary: int) -> bool:
    """Whether a change in the first packed row changes the others by more than a few roundings.  ids, mask [B, T]."""
    changed = torch.cat([(ids[:1] + 1) % vocabulary, ids[1:]])
    hidden, changed_hidden = (
        packed_forward(engine, rows, mask, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][0]
        for rows in (ids, changed)
    )
    change = (hidden - changed_hidden)[int(mask[0].sum()) :].abs().max()
    return bool(change > 4 * torch.finfo(hidden.dtype).eps * hidden.abs().max())
