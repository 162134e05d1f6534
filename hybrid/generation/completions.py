"""The completions of a request's rows: as they are decoded, and when they are done."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hybrid.generation.request import Request


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
    """What a row had before its environment rewrote its history.

    prompt_ids: int64 [n].  tokens: int64 [m].  logps: float32 [3, m]: sampling, old, raw. On the host.
    """

    prompt_ids: torch.Tensor
    tokens: torch.Tensor
    logps: torch.Tensor
    turns: list[Turn]
    router_indices: torch.Tensor | None = None


@dataclass
class RowOutcome:
    """How a row ended, and its turns with an environment.

    reason: "stop", "length", "turns" (EnvironmentLimits.max_turns), "environment_error", "environment_timeout", or
        "unfinished": enough other rows had finished.  error: what the environment raised.
    turns: since the latest fork.  prompt_ids: int64 [n] on the host, of the latest fork; None: the row's own.
    """

    reason: str = "unfinished"
    error: str = ""
    prompt_ids: torch.Tensor | None = None
    turns: list[Turn] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return len(self.turns) + sum(len(fork.turns) for fork in self.forks)


@dataclass(frozen=True)
class Completions:
    """The decoded rows.

    tokens: int64 [rows, max_new_tokens], padded after each row's length.
    lengths: int64 [rows], the end token included.
    sampling_logps: float32 [rows, max_new_tokens], 0 after the length: under the distribution drawn from, after
        processors and truncation.
    old_logps, raw_logps: the same under the model's own logits, at the request's temperature and at 1.
    The logprobs are None if they were not asked for.
    outcomes: of each row; None where rows end by a stop token or their limit alone.
    router_indices: by row, as RoutedRows gives them; None if they were not asked for.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sampling_logps: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    raw_logps: torch.Tensor | None = None
    outcomes: list[RowOutcome] | None = None
    router_indices: list[torch.Tensor] | None = None

    def rows(self, first: int, count: int) -> "Completions":
        """`count` rows from `first` on."""
        by_row = {own.name: getattr(self, own.name) for own in fields(self)}
        return replace(self, **{name: t[first : first + count] for name, t in by_row.items() if t is not None})

    def select(self, rows: list[int]) -> "Completions":
        """The given rows."""
        by_row: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                by_row[name] = value[rows]
            elif isinstance(value, list):
                by_row[name] = [value[row] for row in rows]
        return replace(self, **by_row)

    def cut(self, limits: torch.Tensor, pad_token_id: int) -> "Completions":
        """The same, each row no longer than its limit, int64 [rows]."""
        lengths = torch.minimum(self.lengths, limits)
        behind = torch.arange(self.tokens.shape[1], device=lengths.device) >= lengths[:, None]
        return replace(self, tokens=self.tokens.masked_fill(behind, pad_token_id), lengths=lengths)

    def trimmed(self) -> "Completions":
        """The same, as wide as the longest row."""
        width = int(self.lengths.max())
        by_position = {name: getattr(self, name) for name in ("tokens", "sampling_logps", "old_logps", "raw_logps")}
        return replace(self, **{name: t[:, :width] for name, t in by_position.items() if t is not None})


class CompletionBuffers:
    """What has been decoded so far, on the decoder's device.

    slack: positions behind a row's limit that steps may write before its end is seen.

    ids: int64 [rows, prompt_len + max_new_tokens + slack]: padded prompts and completions, as processors see them.
    logps: float32 [3, rows, max_new_tokens + slack]: sampling, old, raw.
    lengths: int64 [rows], of rows that do not run, on the host.
    """

    def __init__(self, request: Request, device: torch.device, slack: int):
        count, self.prompt_len = request.prompt_ids.shape
        self.max_new_tokens, self.pad_token_id = request.max_new_tokens, request.pad_token_id
        width = request.max_new_tokens + slack
        self.ids = torch.full((count, self.prompt_len + width), request.pad_token_id, dtype=torch.int64, device=device)
        self.ids[:, : self.prompt_len] = request.prompt_ids
        self.padding = [self.prompt_len - length for length in request.prompt_lengths]
        self.logps = torch.zeros(3, count, width, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64)
        if request.begun is not None:
            begun = request.begun
            self.ids[:, self.prompt_len : self.prompt_len + begun.tokens.shape[1]] = begun.tokens
            self.logps[:, :, : begun.tokens.shape[1]] = begun.logps

    def contexts(self, rows: list[int], lengths: list[int]) -> list[torch.Tensor]:
        """Each row's prompt and the first `length` tokens of its completion, int64 [n] on the host."""
        width = self.prompt_len + max(lengths, default=0)
        ids = self.ids[rows, :width].cpu()
        spans = ((self.padding[row], self.prompt_len + length) for row, length in zip(rows, lengths, strict=True))
        return [own[begin:stop] for own, (begin, stop) in zip(ids, spans, strict=True)]

    def token_ids(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens before these positions of rows, int64 [n, tokens], and -1 elsewhere."""
        columns, ends = torch.arange(self.ids.shape[1], device=rows.device), self.prompt_len + positions[:, None]
        padding = torch.tensor(self.padding, device=rows.device)
        is_token = (columns >= padding[rows, None]) & (columns < ends)
        return self.ids[rows].masked_fill(~is_token, -1)

    def record(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Write tokens of rows to positions, and their logprobs, float32 [3, ...]; the others are int64 of shapes that
        broadcast."""
        self.ids[rows, self.prompt_len + positions] = tokens
        self.logps[:, rows, positions] = logps

    def whole(self) -> list[torch.Tensor]:
        """Each row's completion as of its end, int64 [n] on the host."""
        ids = self.ids[:, self.prompt_len :].cpu()
        return [own[:length] for own, length in zip(ids, self.lengths.tolist(), strict=True)]

    def tokens_of(self, row: int, begin: int, end: int) -> torch.Tensor:
        """Tokens of a row's completion, int64 [end - begin], as a copy on the host."""
        return self.ids[row, self.prompt_len + begin : self.prompt_len + end].cpu().clone()

    def extend(self, row: int, begin: int, token_ids: list[int]) -> None:
        """Write tokens that were not sampled to a row's completion, from position `begin` on."""
        at = self.prompt_len + begin
        self.ids[row, at : at + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64, device=self.ids.device)

    def fork(self, row: int, length: int, turns: list[Turn]) -> Fork:
        """What a row has, up to `length` tokens of its completion."""
        tokens = self.ids[row, self.padding[row] : self.prompt_len + length].cpu().clone()
        prompt, completion = tokens.split([len(tokens) - length, length])
        return Fork(prompt, completion, self.logps[:, row, :length].cpu().clone(), turns)

    def restart(self, row: int, prompt_ids: list[int]) -> None:
        """Give a row another prompt and no completion."""
        if (more := len(prompt_ids) - self.prompt_len) > 0:
            self.ids = F.pad(self.ids, (more, 0), value=self.pad_token_id)
            self.padding, self.prompt_len = [width + more for width in self.padding], self.prompt_len + more
        self.padding[row] = self.prompt_len - len(prompt_ids)
        self.ids[row], self.logps[:, row] = self.pad_token_id, 0.0
        self.extend(row, -len(prompt_ids), prompt_ids)

    def end(self, rows: list[int], lengths: list[int], steps: int) -> None:
        """Record the lengths of rows, and clear the tokens that the last `steps` steps drew after their ends."""
        self.lengths[rows] = torch.tensor(lengths)
        if steps == 1:
            return
        device = self.ids.device
        ended, ends = torch.tensor([rows, lengths], device=device)
        behind = torch.arange(self.logps.shape[2], device=device) >= ends[:, None]
        completions = self.ids[ended, self.prompt_len :]
        self.ids[ended, self.prompt_len :] = completions.masked_fill(behind, self.pad_token_id)
        self.logps[:, ended] = self.logps[:, ended].masked_fill(behind, 0.0)

    def completions(self, outcomes: list[RowOutcome] | None = None) -> Completions:
        """All rows."""
        new = self.max_new_tokens
        tokens = self.ids[:, self.prompt_len : self.prompt_len + new]
        sampling, old, raw = self.logps[:, :, :new]
        return Completions(tokens, self.lengths.to(tokens.device), sampling, old, raw, outcomes)
