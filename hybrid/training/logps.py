"""Logprobs of tokens with gradients, within a training engine's `train()`.

Three forwards compute them: `model`, the model's own over padded rows; `packed`, the model's own modules over packed
rows, each shared prefix once; `exact`, the decoder's kernels, with the backward through the model's own modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from hybrid.generation.routing import NOT_ROUTED, replay_routing
from hybrid.generation.scoring import LayerInputScores, padded_forward
from hybrid.models.modules import text_config
from hybrid.sampling.sampler import masked_logits
from hybrid.training.exact import head_without_forward, layers_at_inputs
from hybrid.training.packed_attention import PackedAttention
from hybrid.training.packed_forwards import (
    ROWS_WITH_INPUTS,
    PackedForwards,
    PackedTargets,
    TargetTokens,
    graph_within,
)
from hybrid.training.sequence_parallel import SequenceParallel
from hybrid.weights.module_dicts import patched_attribute

FORWARDS = ("model", "packed", "exact")
HEAD_TOKENS = 1024  # tokens whose logits exist at once: 0.6 GB in float32 with a vocabulary of 150 thousand


class Logps(NamedTuple):
    """Logprobs of completion tokens, with gradients.  float32 [rows, completion_len] each, 0 where masked.

    Args:
        per_token_logps: at the requested temperature.
        entropies: in nats, of the distribution that the logprob is of; None if they were not requested.
    """

    per_token_logps: torch.Tensor
    entropies: torch.Tensor | None = None


class TokenLosses(NamedTuple):
    """Losses of completion tokens, with gradients.  float32 [rows, completion_len] each, 0 where masked.

    Attributes:
        token_losses: what the loss of the tokens' logits returned.
        per_token_logps: the tokens' logprobs at the requested temperature.
    """

    token_losses: torch.Tensor
    per_token_logps: torch.Tensor


class TokenLogits(NamedTuple):
    """The logits that some completion tokens were drawn from.

    Attributes:
        logits: float32 [n, vocabulary], divided by the temperature, with gradients.
        rows: int64 [n], the tokens' rows.
        columns: int64 [n], the tokens' columns among those of completions.
        head: the policy's own head: hidden states, [n, hidden], as `HybridEngine.last_hidden_states` returns them, to
            logits divided by the temperature, float32 [n, vocabulary], without gradients.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]


TokenLoss = Callable[[TokenLogits], torch.Tensor]


class TrainingForwards(PackedForwards):
    """The forwards of one engine whose outputs are logprobs.

    Args:
        engine: as in PackedForwards.
        module: likewise.
        model: the Hugging Face model in the module.
        layers: its transformer layers.
        any_rank: as in PackedForwards.
        modules: likewise.
        ranks: likewise.
        score_with_layer_inputs: the decoder's scores of (sequences, attention_mask, temperature, sampling_mask), with
            its layer inputs; None: "exact" is not available.
    """

    name, compared, difference, change = "logps", "logprobs", "nats on average", "nats"

    def __init__(
        self,
        engine: Callable,
        module: nn.Module,
        model: nn.Module,
        layers: Sequence[nn.Module] = (),
        any_rank: Callable[[bool], bool] = bool,
        modules: Callable[[], list[nn.Module]] | None = None,
        score_with_layer_inputs: Callable[..., LayerInputScores] | None = None,
        ranks: SequenceParallel | None = None,
    ):
        super().__init__(engine, module, model, any_rank, modules, ranks)
        self.layers, self.score_with_layer_inputs = layers, score_with_layer_inputs
        self.tuple_sizes = [0 for _ in layers]  # as for `layers_at_inputs`

    def logps(self, rows: TargetTokens, temperature: float, entropy: bool, forward: str) -> Logps:
        """Return logprobs and entropies, [rows, width], 0 where they are not wanted.

        Args:
            rows: the tokens.
            temperature: divides the logits.
            entropy: whether to return entropies.
            forward: one of FORWARDS.

        Raises:
            ValueError: if `forward` is not "model" and a module has dropout.
            NotImplementedError: for "exact" without packed rows, or without a fused decoder.
        """
        forwards: dict[str, Callable] = {"model": self.model_logps, "packed": self.packed_logps}
        compute = {**forwards, "exact": self.exact_logps}[self._available_for(rows, forward)]
        return Logps(*(values[:, -rows.width :] for values in compute(rows, temperature, entropy)))

    def token_losses(self, rows: TargetTokens, temperature: float, token_loss: TokenLoss, forward: str) -> TokenLosses:
        """Return losses and logprobs, [rows, width], 0 where they are not wanted.

        Args:
            rows: the tokens.
            temperature: divides the logits.
            token_loss: of some tokens' logits.
            forward: "model" or "packed".

        Raises:
            ValueError: if `forward` is not "model" and a module has dropout.
        """
        packed = self._available_for(rows, forward) == "packed"
        compute = self.packed_logps if packed else self.model_logps
        logps, losses = (
            values[:, -rows.width :] for values in compute(rows, temperature, False, token_loss=token_loss)
        )
        return TokenLosses(losses, logps)

    def _available_for(self, rows: TargetTokens, forward: str) -> str:
        """Return the forward that runs for these rows, as `available` does."""
        has_inputs = bool(rows.model_inputs)
        own = self.any_rank(has_inputs) if self.reads_media else has_inputs
        return self.available(forward, ROWS_WITH_INPUTS if own else "")

    def model_logps(
        self, rows: TargetTokens, temperature: float, entropy: bool, token_loss: TokenLoss | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield logprobs, entropies and losses, [rows, columns], by the model's own forward and its whole logits."""
        ids, wanted = rows.sequences, rows.wanted
        with self._replayed(rows.router_indices):
            run = padded_forward(self.model, self.engine)
            logits = run(ids, rows.attention_mask, rows.model_inputs).logits
        logits = logits[:, -ids.shape[1] :][:, :-1]  # a prompt encoder's virtual tokens come first
        sampling_mask = None if rows.sampling_mask is None else rows.sampling_mask[:, 1:]
        for values in logps_and_entropies(logits, ids[:, 1:], temperature, entropy, sampling_mask):
            yield torch.where(wanted, F.pad(values, (1, 0)), 0.0)
        if token_loss is not None:
            row, column = wanted.nonzero(as_tuple=True)
            begin, losses = ids.shape[1] - rows.width, []
            for row_part, column_part in zip(row.split(HEAD_TOKENS), column.split(HEAD_TOKENS), strict=True):
                part = at_temperature(logits[row_part, column_part - 1], temperature)
                losses.append(token_loss(TokenLogits(part, row_part, column_part - begin, _no_head)))
            values = torch.cat(losses)
            yield values.new_zeros(ids.shape).index_put((row, column), values)

    def packed_logps(
        self,
        rows: TargetTokens,
        temperature: float,
        entropy: bool,
        min_shared: int | None = None,
        reasons: list[str] | None = None,
        token_loss: TokenLoss | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield logprobs, entropies and losses, [rows, columns], by the model's modules over packed rows, logits in
        chunks.

        min_shared: tokens of the shortest prefix that is computed once; None: `self.min_shared`.
        reasons: see `PackedAttention`.
        """
        loss, ranks = None, self._sharing_ranks(rows, reasons is not None)
        by_row = token_loss is not None or rows.sampling_mask is not None
        targets = PackedTargets(rows, min_shared or self.min_shared, by_row, ranks)
        if token_loss is not None:
            columns = targets.column - rows.sequences.shape[1] + rows.width
            loss = token_loss, targets.own_pairs(targets.row), targets.own_pairs(columns)
        attention = PackedAttention(targets.packed, reasons, ranks)
        experts = None if rows.router_indices is None else targets.packed.of_rows(rows.router_indices, NOT_ROUTED)
        if experts is not None and ranks is not None:
            experts = ranks.local(experts)

        @contextmanager
        def as_packed() -> Iterator[None]:
            with self.over(attention), self._replayed(experts):
                yield

        sampling_mask = targets.masks()
        head = partial(chunked_logps, temperature=temperature, entropy=entropy, loss=loss, sampling_mask=sampling_mask)
        yield from map(targets.in_rows, graph_within(partial(self._scores, targets, head), as_packed))

    def last_hidden_states(self, rows: TargetTokens) -> torch.Tensor:
        """Return the head's inputs before the wanted tokens, [rows, width, hidden], 0 where they are not wanted.

        Raises NotImplementedError without packed rows.
        """
        self._list_modules()
        self._require_no_dropout("packed")
        if reason := self.packed_reason():
            raise NotImplementedError(f"last_hidden_states: not available: {reason}; use score(..., top_logprobs=k)")
        targets = PackedTargets(rows, self.min_shared)
        with self.over(PackedAttention(targets.packed)):
            (hidden,) = self._scores(targets, lambda hidden, *_: (hidden,))
        return targets.in_rows(hidden)[:, -rows.width :]

    def exact_logps(self, rows: TargetTokens, temperature: float, entropy: bool) -> Iterator[torch.Tensor]:
        """Yield logprobs and entropies, [rows, columns], by the decoder's kernels; their gradients are those of the
        model's modules at the layer inputs that the kernels had."""
        assert self.score_with_layer_inputs is not None, "an engine has it"
        if any(map(z3_leaf_module, self.layers)):
            # Their gradients are reduced by a backward hook of the layer (deepspeed 0.19.8), which runs twice here.
            raise NotImplementedError(
                "logps: forward='exact' is not available with layers that are leaf modules of ZeRO-3; give 'packed', "
                "or use stage 0, 1 or 2"
            )
        with torch.no_grad():
            kept = self.score_with_layer_inputs(rows.sequences, rows.attention_mask, temperature, rows.sampling_mask)
        scores = kept.scores.per_token_logps, kept.scores.entropies
        values = [F.pad(value, (1, 0)) for value in (scores if entropy else scores[:1])]
        if not torch.is_grad_enabled():
            yield from (torch.where(rows.wanted, value, 0.0) for value in values)
            return
        targets = PackedTargets(rows, self.min_shared, of_rows=rows.sampling_mask is not None)
        attention, place = PackedAttention(targets.packed), targets.packed.of_rows(kept.index, 0)[0]
        experts = None if kept.router_indices is None else kept.router_indices[place][None]

        def layer_input(layer: int) -> torch.Tensor:
            if not kept.layer_inputs.shape[1]:  # no rows: the token that belongs to none
                return kept.layer_inputs.new_zeros(1, len(place), kept.layer_inputs.shape[2])
            return kept.layer_inputs[layer, place][None]

        @contextmanager
        def as_sampled() -> Iterator[None]:
            with (
                self.over(attention),
                layers_at_inputs(self.layers, layer_input, self.tuple_sizes),
                self._replayed(experts),
            ):
                yield

        head = partial(exact_head, temperature=temperature, entropy=entropy, sampling_mask=targets.masks())
        run = partial(self._scores, targets, head)
        known = [targets.of_rows(value) for value in values]
        yield from map(targets.in_rows, graph_within(run, as_sampled, known))

    def _scores(self, targets: PackedTargets, head: Callable) -> tuple[torch.Tensor, ...]:
        """Return what `head`, such as `chunked_logps` or `exact_head`, makes of the last hidden states.

        It runs inside the engine's forward, so that the engine's hooks are on the scores, whose gradients come back.
        """
        forward, output = self.module.forward, self.model.get_output_embeddings()

        def scores(**inputs: Any) -> tuple[torch.Tensor, ...]:
            with head_inputs(output) as received:
                forward(**inputs)
            return head(received[0][0][targets.sources], output, targets.ids, self.model.config)

        with patched_attribute(self.module, "forward", scores):
            ids, positions = targets.input_ids, targets.position_ids
            return self.engine(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)

    def _replayed(self, experts: torch.Tensor | None) -> AbstractContextManager:
        return nullcontext() if experts is None else replay_routing(self.module, experts)

    def model_output(self, rows: TargetTokens) -> torch.Tensor:
        """Return logprobs by the model's own forward, and note which of its layers return tuples."""

        def record(index: int, _layer: nn.Module, _args: tuple, output: Any) -> None:
            self.tuple_sizes[index] = len(output) if isinstance(output, tuple) else 0

        handles = [layer.register_forward_hook(partial(record, index)) for index, layer in enumerate(self.layers)]
        try:
            return next(self.model_logps(rows, 1.0, False))
        finally:
            for handle in handles:
                handle.remove()

    def packed_output(self, rows: TargetTokens, reasons: list[str]) -> torch.Tensor:
        """Return logprobs by packed rows."""
        return next(self.packed_logps(rows, 1.0, False, 1, reasons))

    def static_reason(self) -> str:
        """Return a reason that needs no forward."""
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        if head is None:
            return "the model has no head of its own"
        if reason := super().static_reason():
            return reason
        if any(hasattr(parameter, "ds_id") for child in head.children() for parameter in child.parameters()):
            return "the head has an adapter, which ZeRO-3 partitions"
        return ""


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits in at least float32, divided by the temperature."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def logps_and_entropies(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    entropy: bool,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return logprobs of `ids` under softmax(logits / temperature) and, with `entropy`, entropies in nats;
    differentiable.

    Args:
        logits: [..., vocabulary].
        ids: int64 [...].
        sampling_mask: int64 [...], as `masked_logits` takes it: the softmax is over the tokens that it keeps. None:
            over all.

    Returns:
        One or two tensors [...], float32, or float64 if the logits are.
    """
    if sampling_mask is not None:
        logits = masked_logits(logits, ids, sampling_mask)
    logits = at_temperature(logits, temperature)
    if not entropy:
        chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (chosen - torch.logsumexp(logits, dim=-1),)
    log_probs = torch.log_softmax(logits, dim=-1)
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 · -inf is NaN
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * finite).sum(dim=-1)


def chunked_logps(
    hidden: torch.Tensor,
    head: nn.Module,
    ids: torch.Tensor,
    config: PretrainedConfig,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_size: int = HEAD_TOKENS,
    loss: tuple[TokenLoss, torch.Tensor, torch.Tensor] | None = None,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return logprobs of `ids` under a model's head and, with `entropy`, entropies in nats; differentiable.

    The backward computes each chunk's logits again, so that those of `chunk_size` tokens exist at a time.

    Args:
        hidden: [tokens, hidden size]; may have no token.
        head: hidden states to logits, such as `model.get_output_embeddings()`. Without submodules whose parameters
            ZeRO-3 partitions.
        ids: int64 [tokens].
        config: the model's.
        temperature: divides the logits.
        loss: a loss of each token's logits, and the tokens' rows and columns for it, int64 [tokens].
        sampling_mask: int64 [tokens], as in `logps_and_entropies`.

    Returns:
        One to three tensors [tokens], float32, or float64 if the logits are: logprobs, entropies, losses.
    """
    token_loss, *at = loss or (None,)
    score = partial(head_scores, head.forward, config, temperature, entropy, token_loss)
    targets = ids if sampling_mask is None else torch.stack([ids, sampling_mask], dim=1)

    def score_chunks(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = zip(*(tensor.split(chunk_size) for tensor in (hidden, targets, *at)), strict=True)
        scores = (checkpoint(score, *part, use_reentrant=False) for part in parts)
        return tuple(map(torch.cat, zip(*scores, strict=True)))

    # The head is called once, with the chunks inside: ZeRO-3's hooks run at the call and gather its weight once for
    # the forward and once for the backward. A call for each chunk gives the same gradients, but gathers each time, and
    # hangs if ranks have different numbers of tokens, and so of chunks (deepspeed 0.19.8).
    with patched_attribute(head, "forward", score_chunks):
        return head(hidden)


def exact_head(
    hidden: torch.Tensor,
    head: nn.Module,
    ids: torch.Tensor,
    config: PretrainedConfig,
    temperature: float,
    entropy: bool,
    sampling_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return zeros with the gradients of `chunked_logps`, whose arguments these are."""
    score = partial(head_scores, head.forward, config, temperature, entropy, None)
    targets = ids if sampling_mask is None else torch.stack([ids, sampling_mask], dim=1)

    def without_forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return head_without_forward(hidden, targets, score, HEAD_TOKENS, 1 + entropy, head)

    with patched_attribute(head, "forward", without_forward):
        return head(hidden)


@contextmanager
def head_inputs(head: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside the block the head computes no logits, and the list gets what it is called with, [1, tokens, hidden].

    Not transformers' `output_hidden_states`, which leaves hooks on every layer (5.23).
    """
    received: list[torch.Tensor] = []
    # Before ZeRO-3's hook, whose node in the graph expects a backward of this call.
    handle = head.register_forward_pre_hook(lambda _head, inputs: received.append(inputs[0]), prepend=True)
    try:
        with patched_attribute(head, "forward", lambda hidden: hidden[..., :1]):
            yield received
    finally:
        handle.remove()


def head_scores(
    head_forward: Callable,
    config: PretrainedConfig,
    temperature: float,
    entropy: bool,
    token_loss: TokenLoss | None,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *at: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return `logps_and_entropies` of the model's logits, and `token_loss` of the same logits if it is not None.

    Args:
        hidden: [tokens, hidden size].
        targets: token ids, int64 [tokens]; or with sampling masks, int64 [tokens, 2].
        at: the tokens' rows and columns, int64 [tokens] each; without a `token_loss` nothing.
    """

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        return at_temperature(scaled_logits(head_forward(hidden), config), temperature)

    logits = logits_of(hidden)
    ids, *sampling_mask = targets.unbind(1) if targets.dim() == 2 else (targets,)
    scores = logps_and_entropies(logits, ids, 1.0, entropy, *sampling_mask)
    if token_loss is None:
        return scores
    rows, columns = at
    return *scores, token_loss(TokenLogits(logits, rows, columns, torch.no_grad()(logits_of)))


def _no_head(hidden: torch.Tensor) -> torch.Tensor:
    """Raise NotImplementedError: the model's own forward has computed its logits, and its head is partitioned."""
    raise NotImplementedError("token_loss: head is not available with forward='model'; give forward='packed'")


def scaled_logits(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Return the model's logits, of its head's: Gemma's soft cap, Granite's, Cohere's and Falcon-H1's scales."""
    config = text_config(config)
    settings = vars(config)  # MiniCPM3 has a property `logits_scaling`, of the head's input
    cap, scaling = settings.get("final_logit_softcapping"), settings.get("logits_scaling") or 1.0
    if config.model_type == "hyperclovax":  # it multiplies by what Granite divides by
        scaling = 1.0 / scaling
    scale = (settings.get("logit_scale") or settings.get("lm_head_multiplier") or 1.0) / scaling
    logits = logits if scale == 1 else logits * scale
    return logits if cap is None else torch.tanh(logits / cap) * cap
