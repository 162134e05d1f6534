"""Gradients at activations that other code computed: the sampler's kernels.

A model runs with each layer replaced by a node of the graph that computes nothing in the forward. In the backward a
node runs the model's own layer at the input that the kernels had there, and differentiates it: gradient checkpointing
with checkpoints from the sampler. What lies around the layers, embeddings and the final norm, runs as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hybrid.weights.module_dicts import patched_attribute


class _LayerAtInput(torch.autograd.Function):
    """A layer whose output is given, and whose backward runs `layer` at an input that is given."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, output: torch.Tensor, layer_input: Callable, layer: Callable
    ) -> torch.Tensor:
        """Return `output`.  hidden: what the model gives the layer; only its gradient counts."""
        ctx.layer_input, ctx.layer = layer_input, layer
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the layer's input; parameters get theirs in a backward inside this one."""
        hidden = ctx.layer_input().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        torch.autograd.backward(output, grad)
        return hidden.grad, None, None, None


@contextmanager
def layers_at_inputs(
    layers: Sequence[nn.Module], inputs: Callable[[int], torch.Tensor], tuple_sizes: Sequence[int]
) -> Iterator[None]:
    """Inside the block, a forward of the model has the given layer inputs, and a backward differentiates its layers
    at these.

    Args:
        layers: the model's layers, in order.
        inputs: returns the input of a layer, [1, tokens, hidden]; the last index has what follows the last layer.
        tuple_sizes: for each layer, the size of its output, a tuple that begins with the hidden states; 0: the output
            is these alone.
    """
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            replaced = ReplacedLayer(layer, index, len(layers), inputs, tuple_sizes[index])
            stack.enter_context(patched_attribute(layer, "forward", replaced))
        yield


class ReplacedLayer:
    """Stands in for a layer's forward.

    Args: as for `layers_at_inputs`; `index`: of the layer, `count`: of all.
    """

    def __init__(
        self, layer: nn.Module, index: int, count: int, inputs: Callable[[int], torch.Tensor], tuple_size: int
    ):
        self.layer, self.index, self.inputs, self.tuple_size = layer, index, inputs, tuple_size
        self.is_last = index == count - 1
        self.forward = layer.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, as a node of the graph."""
        # Nothing reads the output of a layer before the last: the next one has an input of its own.
        output = self.inputs(self.index + 1) if self.is_last else hidden_states.new_zeros(1).expand_as(hidden_states)

        def layer(hidden: torch.Tensor) -> torch.Tensor:
            with ExitStack() as stack:
                stack.enter_context(patched_attribute(self.layer, "forward", self.forward))
                # This is the recomputation already: transformers' layers would run once more.
                stack.enter_context(patched_attribute(self.layer, "gradient_checkpointing", False))
                result = self.layer(hidden, *args, **kwargs)
            return result[0] if isinstance(result, tuple) else result

        if not hidden_states.requires_grad:  # frozen embeddings: the layers' adapters learn all the same
            hidden_states = hidden_states.detach().requires_grad_()
        output = _LayerAtInput.apply(hidden_states, output, lambda: self.inputs(self.index), layer)
        return (output, *[None] * (self.tuple_size - 1)) if self.tuple_size else output


class _ChunkedHead(torch.autograd.Function):
    """A head's scores, which are not computed in the forward, and whose backward computes them in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        score: Callable,
        chunk_size: int,
        outputs: int,
        *parameters: nn.Parameter,
    ) -> tuple[torch.Tensor, ...]:
        """Return zeros: `outputs` tensors [tokens].

        hidden: [tokens, hidden size].  ids: int64 [tokens], or [tokens, 2] with sampling masks.
        score: (hidden, ids) to the scores, `outputs` tensors.  parameters: those of the head that are trained.
        """
        ctx.hidden, ctx.ids, ctx.score, ctx.chunk_size, ctx.parameters = hidden, ids, score, chunk_size, parameters
        return tuple(hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the hidden states and of the parameters."""
        parts = [tensor.split(ctx.chunk_size) for tensor in (ctx.hidden, ctx.ids, *grads)]
        hidden_grads, totals = [], [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for part, ids, *part_grads in zip(*parts, strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                scores = ctx.score(part, ids)
            part_grads = [grad.to(score.dtype) for grad, score in zip(part_grads, scores, strict=True)]
            hidden_grad, *more = torch.autograd.grad(scores, [part, *ctx.parameters], part_grads)
            hidden_grads.append(hidden_grad)
            for total, grad in zip(totals, more, strict=True):
                total += grad
        return torch.cat(hidden_grads), None, None, None, None, *totals


def head_without_forward(
    hidden: torch.Tensor, ids: torch.Tensor, score: Callable, chunk_size: int, outputs: int, head: nn.Module
) -> tuple[torch.Tensor, ...]:
    """Return zeros in place of a head's scores, [tokens] each, whose gradients are those of the scores.

    Args: as for `_ChunkedHead`; `head` has the parameters.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _ChunkedHead.apply(hidden, ids, score, chunk_size, outputs, *trained)
