"""The base of forwards over packed rows: their rows, their graph, and whether a model can run them.

A class of forwards computes something of given tokens, logprobs or values, by the model's own forward over padded rows
or by its modules over packed ones. Before the first packed forward the two are compared on a few short rows.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.model_inputs import ModelInputs, RowInputs, split_inputs
from hybrid.models.modules import has_virtual_tokens, hugging_face_model
from hybrid.models.placeholders import Placeholders
from hybrid.rollout import RolloutBatch, check_prompts
from hybrid.runtime.inputs import as_ids, as_mask
from hybrid.sampling.sampler import NOT_TRUNCATED
from hybrid.training.packed_attention import AttentionReplacement, PackedAttention, attention_configs
from hybrid.training.packed_mixers import MixerReplacement
from hybrid.training.packing import MIN_SHARED, pack_rows
from hybrid.training.sequence_parallel import SequenceParallel
from hybrid.weights.module_dicts import Replacement

ROWS_WITH_INPUTS = "rows with model_inputs, such as images, are not packed"
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05  # of logprobs in nats: 16 bits have 3 digits, of logits of 10 and more


@dataclass(frozen=True)
class TargetTokens:
    """Rows, and those of their tokens whose logprobs are wanted.

    Args:
        sequences: int64 [rows, columns], padded on either or both sides.
        attention_mask: int64 [rows, columns], 1 for tokens.
        wanted: bool [rows, columns]; each has a token before it.
        width: the last columns, those of completions.
        router_indices: experts to replay, integers [rows, columns, layers with experts, experts per token]; or None.
        model_inputs: each row's inputs besides token ids; empty: rows of text.
        sampling_mask: int64 [rows, columns], of the tokens' logprobs, as `masked_logits` takes it; or None.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    wanted: torch.Tensor
    width: int
    router_indices: torch.Tensor | None = None
    model_inputs: Sequence[RowInputs] = ()
    sampling_mask: torch.Tensor | None = None


class PackedTargets:
    """Packed rows with their target tokens, each pair of a token and the next one once.

    Args:
        rows: the rows.
        min_shared: tokens of the shortest prefix that is packed once.
        of_rows: a pair for each wanted token of each row, for values that depend on the row too.
        ranks: the ranks that share the packed row; None: this rank computes all tokens and pairs.
    """

    def __init__(
        self, rows: TargetTokens, min_shared: int, of_rows: bool = False, ranks: SequenceParallel | None = None
    ):
        self.packed = pack_rows(rows.sequences, rows.attention_mask, rows.wanted, min_shared)
        if ranks is not None:
            self.packed = self.packed.divisible(ranks.size)
        self.wanted, self.ranks, self.sampling_mask = rows.wanted, ranks, rows.sampling_mask
        self.row, self.column = rows.wanted.nonzero(as_tuple=True)
        pairs = torch.stack([self.packed.index[self.row, self.column - 1], rows.sequences[self.row, self.column]])
        # int64 [pairs]: packed tokens, and the targets after them; and each wanted token's pair
        if of_rows:
            self.pair = torch.arange(pairs.shape[1], device=pairs.device)
        else:
            pairs, self.pair = pairs.unique(dim=1, return_inverse=True)
        (self.sources, self.ids), self.num_pairs = pairs, pairs.shape[1]
        self.input_ids, self.position_ids = self.packed.input_ids, self.packed.position_ids
        if ranks is not None:  # tokens and pairs of this rank alone, and the pairs' places among all
            self.places = (self.sources % ranks.size == ranks.index).nonzero()[:, 0]
            self.sources, self.ids = self.sources[self.places] // ranks.size, self.ids[self.places]
            self.input_ids, self.position_ids = ranks.local(self.input_ids), ranks.local(self.position_ids)

    def own_pairs(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of this rank's pairs, of those of all ranks', [pairs, ...]."""
        return values if self.ranks is None else values[self.places]

    def masks(self) -> torch.Tensor | None:
        """Return the sampling masks of this rank's pairs, int64 [pairs]; None if rows have none. Expects `of_rows`."""
        return None if self.sampling_mask is None else self.own_pairs(self.sampling_mask[self.row, self.column])

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the pairs, [pairs, ...], at the wanted tokens, [rows, columns, ...]; 0 elsewhere."""
        if self.ranks is not None:
            values = self.ranks.joined(values, self.places, self.num_pairs)
        rows = values.new_zeros(*self.wanted.shape, *values.shape[1:])
        return rows.index_put((self.row, self.column), values[self.pair])

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the pairs' values, [pairs], of the wanted tokens', [rows, columns]."""
        return values.new_zeros(len(self.ids)).index_put((self.pair,), values[self.row, self.column])


class PackedForwards(ABC):
    """The forwards of one engine over padded or packed rows.

    Args:
        engine: DeepSpeed's engine: called with the model's arguments, it runs the model with the engine's hooks.
        module: the engine's module.
        model: the Hugging Face model in it, which has the head.
        any_rank: whether a bool is true on any rank that trains this model; a collective.
        modules: returns the module's submodules, the same list as long as none was added or removed: large models have
            thousands; None: lists them each time.
        ranks: the ranks that share packed rows in forwards with gradients; None: each rank computes its own rows.
    """

    name: str  # of the engine's method, in messages
    compared: str  # what the comparison is of
    difference: str  # the unit of a mean difference
    change: str  # the unit of the largest change

    def __init__(
        self,
        engine: Callable,
        module: nn.Module,
        model: nn.Module,
        any_rank: Callable[[bool], bool] = bool,
        modules: Callable[[], list[nn.Module]] | None = None,
        ranks: SequenceParallel | None = None,
    ):
        self.engine, self.module, self.model, self.any_rank = engine, module, model, any_rank
        self.ranks = ranks
        self.modules = modules or (lambda: list(module.modules()))
        self.listed: list[nn.Module] | None = None
        self.configs: list[PretrainedConfig] = []
        self.attention, self.mixers = AttentionReplacement(), MixerReplacement()
        self.mixer_forwards: list[Replacement] = []  # of recurrent mixers, while rows are packed
        self.with_dropout: list[nn.Module] = []
        self.min_shared = MIN_SHARED
        self.warned = False
        self.reason: str | None = None  # why packed rows are not available; "" if they are; None: not known

    @abstractmethod
    def model_output(self, rows: TargetTokens) -> torch.Tensor:
        """Return what is compared, by the model's own forward, [rows, columns, ...]; 0 where it is not wanted."""

    @abstractmethod
    def packed_output(self, rows: TargetTokens, reasons: list[str]) -> torch.Tensor:
        """Return the same by packed rows, each shared prefix once.  reasons: see `PackedAttention`."""

    def scale(self, output: torch.Tensor) -> float:
        """Return what differences are divided by.  output: the compared values of the wanted tokens."""
        return 1.0

    @cached_property
    def reads_media(self) -> bool:
        """Whether the model reads images, videos or sound in place of tokens."""
        return bool(Placeholders(getattr(self.model, "config", None)).settings)

    def available(self, forward: str, own_reason: str = "") -> str:
        """Return the forward that runs for a requested one: itself, or "model", with a warning, in place of "packed".

        own_reason: why these rows need the model's own forward; "" if they do not.

        Raises:
            ValueError: if `forward` is not "model" and a module has dropout.
            NotImplementedError: for "exact" without packed rows, and for all but "packed" with sequence parallelism.
        """
        if self.ranks is not None and forward != "packed":
            raise NotImplementedError(
                f"{self.name}: forward={forward!r} is not available with sequence_parallel_size={self.ranks.size}, "
                "which divides packed rows; give 'packed'"
            )
        if forward == "model":
            return forward
        self._list_modules()
        self._require_no_dropout(forward)
        reason = own_reason or self.packed_reason()
        if not reason:
            return forward
        if forward == "exact":
            raise NotImplementedError(f"{self.name}: forward='exact' is not available: {reason}; give 'model'")
        if self.ranks is not None:
            raise NotImplementedError(
                f"{self.name}: not available with sequence_parallel_size={self.ranks.size}, which divides packed rows: "
                f"{reason}; use 1"
            )
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.name}: forward={forward!r} runs as 'model', the model's own padded forward: {reason}",
                stacklevel=4,  # the caller of the engine's method
            )
        return "model"

    @contextmanager
    def over(self, attention: PackedAttention) -> Iterator[None]:
        """Inside the block the model's modules compute the packed rows of `attention`."""
        rows = attention.packed_rows
        with self.attention.over(self.configs, attention), self.mixers.over(self.mixer_forwards, rows):
            yield

    def _sharing_ranks(self, rows: TargetTokens, compares: bool) -> SequenceParallel | None:
        """Return the ranks that share these packed rows; None without gradients: each rank then computes its own rows.

        compares: whether this is the comparison, which runs as training does.

        Raises:
            ValueError: on all ranks, if the ranks of a group have different rows.
        """
        if self.ranks is None or not (compares or torch.is_grad_enabled()):
            return None
        if not compares:
            optional = rows.router_indices, rows.sampling_mask
            self.ranks.require_same((rows.sequences, rows.attention_mask, rows.wanted, *optional))
        return self.ranks

    def _list_modules(self) -> None:
        """Note the modules with dropout and the attention's configurations, once for each list of modules."""
        modules = self.modules()
        if modules is not self.listed:
            self.listed, self.configs = modules, attention_configs(modules)
            self.mixer_forwards = self.mixers.forwards(modules)
            self.with_dropout = [module for module in modules if dropout_of(module)[0]]

    def _require_no_dropout(self, forward: str) -> None:
        """Raise ValueError for dropout in train mode: tokens that rows share would be dropped together, and the sampler
        drops none."""
        for module in self.with_dropout:
            key, rate = dropout_of(module)
            if module.training and rate > 0:
                name = next(name for name, submodule in self.module.named_modules() if submodule is module)
                raise ValueError(
                    f"forward: {forward!r} given; {name}.{key} is {rate:g}, but rows share tokens in it. Set dropout"
                    " to 0 in the model's config (lora_dropout in the adapter's), or give forward='model'"
                )

    def packed_reason(self) -> str:
        """Return why packed rows are not available, "" if they are: found by a comparison on first use.

        Every rank takes part.
        """
        if self.reason is None:
            self._list_modules()
            self.reason = self.static_reason() or self._compare()
        return self.reason

    def static_reason(self) -> str:
        """Return a reason that needs no forward."""
        if not (has_attention_interface(self.model) or self.mixer_forwards):
            return "the model's attention does not go through transformers' AttentionInterface"
        if any(map(has_virtual_tokens, self.module.modules())):
            return "a prompt encoder puts virtual tokens before each row"
        config = self.model.config.get_text_config()
        if getattr(config, "attn_temperature_tuning", False) or getattr(config, "attention_chunk_size", None):
            return "its chunks of attention and its factors of queries are by a token's place in the packed row"
        return ""

    @torch.no_grad()
    def _compare(self) -> str:
        """Compare packed rows with the model's own forward over padded ones; return how they differ, "" if they do not.

        Four short rows of random tokens, of which two begin with the same ones. Without dropout.
        """
        parameter, vocabulary = next(self.model.parameters()), self.model.config.get_text_config().vocab_size
        ids, mask = (tensor.to(parameter.device) for tensor in example_rows(vocabulary))
        rows = TargetTokens(ids, mask, mask.bool() & (mask.cumsum(dim=1) > 1), ids.shape[1])
        other = replace(rows, sequences=torch.cat([(ids[:1] + 1) % vocabulary, ids[1:]]))
        reasons: list[str] = []
        with evaluating(self.module):
            expected = self.model_output(rows)
            try:
                actual, changed = (self.packed_output(each, reasons) for each in (rows, other))
            except (AttributeError, IndexError, TypeError, ValueError) as failure:
                actual = changed = expected
                reasons.append(f"{type(self.model).__name__} does not run without a mask: {failure}")
        scale = self.scale(expected[rows.wanted])
        error = (expected - actual)[rows.wanted].abs().mean().item() / scale
        mixed = (actual - changed)[1:].abs().max().item() / scale
        limit = HALF_TOLERANCE if parameter.dtype.itemsize == 2 else TOLERANCE
        if self.any_rank(bool(reasons)):
            return reasons[0] if reasons else "another rank's attention does not support it"
        if self.any_rank(not error < limit):
            return f"{self.compared} differ from the model's own by {error:.2g} {self.difference}, above {limit:g}"
        if self.any_rank(not mixed < limit / 10):
            return f"a row's {self.compared} change by {mixed:.2g} {self.change} with another row's tokens"
        return ""


def has_attention_interface(model: nn.Module) -> bool:
    """Whether a model's attention goes through transformers' `AttentionInterface`: it says so, or is in a Python module
    that looks functions up there (recurrent models' are, and do not say so; 5.23)."""
    own = hugging_face_model(model)
    looks_up = hasattr(inspect.getmodule(type(own)), "ALL_ATTENTION_FUNCTIONS")
    return getattr(own, "_supports_attention_backend", False) or looks_up


def target_tokens(
    batch: RolloutBatch | torch.Tensor,
    attention_mask: torch.Tensor | None,
    completion_mask: torch.Tensor | None,
    router_indices: torch.Tensor | None,
    device: torch.device,
    model_inputs: ModelInputs | None = None,
    config: PretrainedConfig | None = None,
    sampling_mask: torch.Tensor | None = None,
) -> TargetTokens:
    """Return the rows of `HybridEngine.logps`.  config: of the model, for model inputs and sampling masks.

    Raises:
        TypeError: if the sequences are neither a RolloutBatch nor a tensor.
        ValueError: for shapes or dtypes that do not fit.
    """
    if isinstance(batch, RolloutBatch):
        if attention_mask is not None:
            raise ValueError("attention_mask: given with a RolloutBatch, which has one; leave it out")
        sequences, attention_mask = batch.sequences, batch.attention_mask
        completion_mask = batch.completion_mask if completion_mask is None else completion_mask
        router_indices = batch.router_indices if router_indices is None else router_indices
        model_inputs = batch.model_inputs if model_inputs is None else model_inputs
    else:
        sequences = batch
    check_prompts(sequences, attention_mask, "sequences", "attention_mask")
    assert attention_mask is not None, "checked above"
    if completion_mask is None:
        completion_mask = attention_mask[:, 1:]
    shape = tuple(getattr(completion_mask, "shape", ()))
    if len(shape) != 2 or shape[0] != len(sequences) or not 0 < shape[1] < sequences.shape[1]:
        raise ValueError(
            f"completion_mask: shape {shape} given; it must be [{len(sequences)}, completion_len], for the last columns"
            f" of sequences, whose shape is {tuple(sequences.shape)}"
        )
    sequences, attention_mask = as_ids(sequences, device), as_mask(attention_mask, device)
    width, kept = shape[1], attention_mask.bool()
    wanted = torch.zeros_like(kept)
    wanted[:, -width:] = as_mask(completion_mask, device).bool() & kept[:, -width:] & kept[:, -width - 1 : -1]
    inputs = split_inputs(model_inputs, config, sequences, attention_mask)
    if sampling_mask is not None:
        assert config is not None, "the vocabulary's size is known"
        sampling_mask = _mask_of_sequences(sampling_mask, wanted, width, config.get_text_config().vocab_size)
    return TargetTokens(sequences, attention_mask, wanted, width, router_indices, inputs, sampling_mask)


def _mask_of_sequences(mask: torch.Tensor, wanted: torch.Tensor, width: int, vocab_size: int) -> torch.Tensor:
    """Return the sampling mask of completions for sequences, int64 [rows, columns], NOT_TRUNCATED where no logprob is
    wanted. Raises ValueError if it does not fit."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64 or mask.shape != (len(wanted), width):
        is_tensor = isinstance(mask, torch.Tensor)
        given = f"{mask.dtype} {[*mask.shape]}" if is_tensor else type(mask).__name__
        raise ValueError(
            f"sampling_mask: {given} given; it must be int64 [{len(wanted)}, {width}], as RolloutBatch.sampling_mask"
        )
    mask = F.pad(mask.to(wanted.device), (wanted.shape[1] - width, 0)).masked_fill(~wanted, NOT_TRUNCATED)
    if mask.numel() and not NOT_TRUNCATED <= int(mask.min()) <= int(mask.max()) < vocab_size:
        raise ValueError(
            f"sampling_mask: ids from {int(mask.min())} to {int(mask.max())} given; they must be token ids below "
            f"{vocab_size}, or {NOT_TRUNCATED} for tokens that were drawn from the whole vocabulary"
        )
    return mask


def dropout_of(module: nn.Module) -> tuple[str, float]:
    """Return the attribute with a module's dropout probability, and the probability; ("", 0.0) without one."""
    name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "attention_dropout"
    rate = getattr(module, name, None)
    return (name, rate) if isinstance(rate, float) else ("", 0.0)


class _InnerGraph(torch.autograd.Function):
    """A graph inside a node: its backward runs in the same context as its forward."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        run: Callable,
        context: Callable[[], AbstractContextManager],
        values: Sequence[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of `run`, without their graph; or `values` in their place."""
        with torch.enable_grad(), context():
            ctx.outputs = tuple(run())
        ctx.context = context
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in (ctx.outputs if values is None else values))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        """Run the backward of the inner graph, which adds to the parameters' gradients."""
        if ctx.outputs is None:
            raise RuntimeError("logps: a second backward through the same logprobs; call engine.logps again")
        outputs, ctx.outputs = ctx.outputs, None
        received = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        with ctx.context():
            torch.autograd.backward([output for output, _ in received], [grad for _, grad in received])
        return None, None, None, None


def graph_within(
    run: Callable[[], Sequence[torch.Tensor]],
    context: Callable[[], AbstractContextManager],
    values: Sequence[torch.Tensor] | None = None,
) -> Sequence[torch.Tensor]:
    """Return `run()`, or `values` with its gradients.

    Forward, backward and what checkpointing recomputes happen inside `context()`. The gradients of parameters are added
    in a backward inside the backward, as in reentrant checkpointing: hooks on parameters and modules fire.
    `torch.autograd.grad` does not see the parameters.
    """
    if not torch.is_grad_enabled():
        with context():
            return run()
    return _InnerGraph.apply(torch.zeros((), requires_grad=True), run, context, values)


def example_rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four short rows of random tokens, padded on the right or not, and their mask, int64 [4, 12].

    The last two begin with the same five tokens. Not padded on the left: there eager attention in float64 is NaN.
    """
    ids = torch.randint(vocabulary, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[1, 7:] = 0, 0
    ids[3, :5] = ids[2, :5]
    return ids, mask


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside the block the module is in eval mode, without dropout; afterwards each submodule's mode is restored."""
    before = {submodule: submodule.training for submodule in module.modules()}
    nn.Module.train(module, False)
    try:
        yield
    finally:
        for submodule, training in before.items():
            submodule.training = training
