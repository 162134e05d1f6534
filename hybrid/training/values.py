"""Values of states with gradients, of a module with a value head, within a training engine's `train()`.

The head is a linear `score`, as Hugging Face's sequence and token classifiers have it: its output at a token is the
value after that token. The model's own modules run over packed rows, each shared prefix once, or over padded ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hybrid.generation.scoring import padded_forward
from hybrid.models.modules import hugging_face_model
from hybrid.training.packed_attention import PackedAttention
from hybrid.training.packed_forwards import PackedForwards, PackedTargets, TargetTokens, graph_within
from hybrid.training.sequence_parallel import SequenceParallel

VALUE_FORWARDS = ("model", "packed")


class ValueForwards(PackedForwards):
    """The forwards of one engine whose outputs are values.

    What is compared are the hidden states that the head gets: a new head returns 0 for everything.
    """

    name, compared, difference, change = "values", "hidden states", "of their size", "of their size"

    def __init__(
        self,
        engine: Callable,
        module: nn.Module,
        any_rank: Callable[[bool], bool] = bool,
        modules: Callable[[], list[nn.Module]] | None = None,
        ranks: SequenceParallel | None = None,
    ):
        super().__init__(engine, module, classifier_of(module), any_rank, modules, ranks)

    def values(self, rows: TargetTokens, forward: str) -> torch.Tensor:
        """Return the value of the state before each wanted token, float32 [rows, width], 0 elsewhere.

        Args:
            rows: the tokens.
            forward: one of VALUE_FORWARDS.

        Raises:
            ValueError: without a value head, and for "packed" if a module has dropout.
        """
        require_value_head(self.module)
        compute = {"model": self.padded, "packed": self.packed}[self.available(forward)]
        return compute(rows, head_output)[:, -rows.width :, 0].float()

    def padded(self, rows: TargetTokens, of_head: Callable) -> torch.Tensor:
        """Return what `of_head` takes of the head at the token before each wanted one, [rows, columns, size], 0
        elsewhere; by the model's own forward."""
        with recorded_head(require_value_head(self.module), of_head) as recorded:
            padded_forward(self.module, self.engine, moves_rows=False)(rows.sequences, rows.attention_mask)
        (values,) = recorded
        columns = rows.sequences.shape[1]
        before = F.pad(values[:, -columns:][:, :-1], (0, 0, 1, 0))  # a prompt encoder's virtual tokens come first
        return torch.where(rows.wanted[..., None], before, 0.0)

    def packed(
        self,
        rows: TargetTokens,
        of_head: Callable,
        min_shared: int | None = None,
        reasons: list[str] | None = None,
    ) -> torch.Tensor:
        """Return what `padded` does, by the model's modules over packed rows.

        min_shared: tokens of the shortest prefix that is computed once; None: `self.min_shared`.
        reasons: see `PackedAttention`.
        """
        ranks = self._sharing_ranks(rows, reasons is not None)
        targets = PackedTargets(rows, min_shared or self.min_shared, ranks=ranks)
        head = require_value_head(self.module)

        def run() -> tuple[torch.Tensor]:
            with recorded_head(head, of_head) as recorded:
                self.engine(
                    input_ids=targets.input_ids,
                    position_ids=targets.position_ids,
                    attention_mask=None,
                    use_cache=False,
                )
            return (recorded[0][0, targets.sources],)

        attention = PackedAttention(targets.packed, reasons, ranks)
        (values,) = graph_within(run, partial(self.over, attention))
        return targets.in_rows(values)

    def model_output(self, rows: TargetTokens) -> torch.Tensor:
        """Return the head's inputs by the model's own forward."""
        return self.padded(rows, head_input)

    def packed_output(self, rows: TargetTokens, reasons: list[str]) -> torch.Tensor:
        """Return the head's inputs by packed rows."""
        return self.packed(rows, head_input, 1, reasons)

    def scale(self, output: torch.Tensor) -> float:
        """Return the mean absolute value of the hidden states."""
        return output.abs().mean().item()


def head_input(hidden: torch.Tensor, _output: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that a value head gets, [rows, tokens, hidden size]."""
    return hidden


def head_output(_hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return what a value head returns, [rows, tokens, 1]."""
    return output


@contextmanager
def recorded_head(head: nn.Module, of_head: Callable) -> Iterator[list[torch.Tensor]]:
    """Inside the block, add what `of_head` takes of the head's input and output to the yielded list, at each call."""
    recorded: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda _, args, output: recorded.append(of_head(args[0], output)))
    try:
        yield recorded
    finally:
        handle.remove()


def require_value_head(module: nn.Module) -> nn.Module:
    """Return a module's value head, its linear `score`.

    Raises:
        ValueError: if it has none, or one with several outputs.
    """
    head = getattr(classifier_of(module), "score", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"values: {type(module).__name__} has no value head: a linear `score` over its last hidden states, as "
            "Hugging Face's sequence and token classifiers have it"
        )
    labels = classifier_of(module).config.num_labels
    if labels != 1:
        raise ValueError(f"values: {type(module).__name__} has {labels} labels; a value head has 1")
    return head


def classifier_of(module: nn.Module) -> nn.Module:
    """Return the Hugging Face model with a `score` in a module, without PEFT's wrapper; the module itself if there is
    none."""
    models = (submodule for submodule in module.modules() if hasattr(submodule, "config"))
    return next((model for model in map(hugging_face_model, models) if hasattr(model, "score")), module)
