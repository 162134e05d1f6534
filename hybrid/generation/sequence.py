"""The state of one row of a request."""

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybrid.decoders.batch import NO_ADAPTER


class Turn(NamedTuple):
    """A turn of a row: sampled tokens from `begin` to `end` in the completion, and the observation up to `observed`.

    reward: of the environment, None without one.  seconds: of its step.
    """

    begin: int
    end: int
    observed: int
    reward: float | None
    seconds: float


@dataclass(frozen=True)
class Fork:
    """The part of a row before its environment rewrote its history.

    prompt_ids: int64 [n].  tokens: int64 [m].  logps: float32 [4, m]: sampling, old, raw, sampling mask. On
    the host.
    """

    prompt_ids: torch.Tensor
    tokens: torch.Tensor
    logps: torch.Tensor
    turns: list[Turn]
    router_indices: torch.Tensor | None = None


@dataclass
class Sequence:
    """A row of a request, from its prompt to its end. The scheduler owns it; every other part asks it.

    The tensors by row or by running sequence (CompletionBuffers, RunningBatch, ModelRunner) are columns that the
    scheduler keeps in step with the sequences, so that a decode step runs no Python for each of them. More than 15
    fields, as it is the only record of a row.

    reason: "stop", "length", "turns" (EnvironmentLimits.max_turns), "environment_error", "environment_timeout", or
        "unfinished": it still runs or waits, or enough other rows had finished.
    error: of the environment.
    prompt_ids: int64 [n] on the host, of the latest fork; None: the row's own.
    turns: with the environment, since the latest fork.
    forks: the parts before each rewritten history.
    row: of the request.
    limit: the most tokens of the completion.
    length: tokens of the completion, as of the last check of a running sequence.
    is_done: as of the last check: it has a stop token, has reached its limit, or is invalid.
    has_stopped: it has a stop token.
    is_invalid: a token could not be sampled from its logits.
    left: tokens until its limit or the end of its turn, as of the last check.
    blocks: KV blocks, while it runs.
    max_blocks: the most blocks that it may need.
    state_slot: of its recurrent states, while it runs, if the model has any.
    adapter: the number of its adapter, as `PackedBatch.adapters`.
    router_indices: int16 [tokens, layers with experts, experts per token], in host memory, once it has run: hundreds of
        bytes a token for a real model. None: it never ran, or they are not recorded.
    """

    reason: str = "unfinished"
    error: str = ""
    prompt_ids: torch.Tensor | None = None
    turns: list[Turn] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    row: int = field(default=0, compare=False)
    limit: int = field(default=0, compare=False)
    length: int = field(default=0, compare=False)
    is_done: bool = field(default=False, compare=False)
    has_stopped: bool = field(default=False, compare=False)
    is_invalid: bool = field(default=False, compare=False)
    left: int = field(default=0, compare=False)
    blocks: list[int] = field(default_factory=list, compare=False)
    max_blocks: int = field(default=sys.maxsize, compare=False)
    state_slot: int = field(default=0, compare=False)
    router_indices: torch.Tensor | None = field(default=None, compare=False)
    adapter: int = field(default=NO_ADAPTER, compare=False)

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return len(self.turns) + sum(len(fork.turns) for fork in self.forks)

    @property
    def turn_begin(self) -> int:
        """The position in the completion at which the current turn begins."""
        return self.turns[-1].observed if self.turns else 0
