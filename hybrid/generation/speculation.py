"""Speculation: the texts that rows draft from, and whether the next steps verify drafts.

Drafts come from a row's own text, from the other completions of its prompt, and from earlier rollouts of it (DAS: arXiv
2511.13841). They change time, never tokens (`hybrid/decoders/drafts.py`). Whether they save time is measured: `Pace`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from hybrid.config import SpeculationConfig
from hybrid.decoders.drafts import MAX_MATCH, SEPARATOR, TOKEN_BYTES, Drafting, GrowingText, VerifiedTokens

SEARCHED_TOKENS = 1 << 15  # of other texts, for a row at each step; about 1e9 a second
VERIFIED_TOKENS = 256  # of one forward, which memory is planned for: it has logits of all of them, as scoring has
FIRST_LENGTH = 2  # of a row's first draft
PROBE_STEPS = 2  # that verify drafts while plain steps are faster
PROBE_SHARE = 0.03  # of the time that calls of the slower kind may take
MIN_GAIN = 1.05  # in speed, for steps to verify drafts


class RolloutHistory:
    """Completions of earlier rollouts by prompt. Drafts are guesses in any case, so it outlives weight versions.

    limit_bytes: of tokens. The oldest completions of the prompt that was used least recently are dropped first.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self.texts: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()  # int32 [n] each, the latest one last

    def add(self, prompt: torch.Tensor, completion: torch.Tensor) -> None:
        """Add a completion of a prompt.  prompt, completion: integers [n], on any device."""
        key = key_of(prompt)
        if key not in self.texts:
            self.texts[key] = []
            self.nbytes += len(key)
        self.texts.move_to_end(key)
        self.texts[key].append(completion.to("cpu", torch.int32, copy=True))
        self.nbytes += TOKEN_BYTES * len(completion)
        while self.nbytes > self.limit_bytes:
            key, texts = next(iter(self.texts.items()))
            self.nbytes -= TOKEN_BYTES * len(texts.pop(0))
            if not texts:
                del self.texts[key]
                self.nbytes -= len(key)

    def of(self, prompt: torch.Tensor) -> list[torch.Tensor]:
        """Return the completions of a prompt, int32 [n] each, the latest one last."""
        key = key_of(prompt)
        if key in self.texts:
            self.texts.move_to_end(key)
        return list(self.texts.get(key, ()))


def key_of(prompt: torch.Tensor) -> bytes:
    """Return a prompt's key in the history.  prompt: integers [n]."""
    return prompt.to("cpu", torch.int32).numpy().tobytes()


@dataclass
class Pace:
    """Measured speed of plain steps and of steps that verify drafts, with about the same number of rows.

    plain_s: seconds of a plain step, a moving average; 0: not measured.
    gain: tokens per second of steps that verify drafts, as a multiple of those of plain steps, a moving average.
    wait_s: seconds of decoding until the slower kind of steps is tried again.
    """

    plain_s: float = 0.0
    gain: float = 1.0
    wait_s: float = 0.0

    @property
    def verifies(self) -> bool:
        """Whether steps that verify drafts are the faster kind."""
        return self.gain > MIN_GAIN

    def verifies_next(self) -> bool:
        """Return whether the next call verifies drafts: because that is faster, or as a probe."""
        return self.verifies != (self.wait_s <= 0 and self.plain_s > 0)

    def observe(self, verified: bool, seconds: float, steps: int, tokens: float) -> None:
        """Add a call of `steps` steps of one kind, which took `seconds` for `tokens` tokens of each row."""
        each, is_probe = seconds / steps, verified != self.verifies
        self.wait_s = seconds / PROBE_SHARE if is_probe else self.wait_s - seconds
        if verified:  # if it seems faster than a plain step, that one's measurement was disturbed
            gain = tokens / steps * min(self.plain_s / each, 1.0)
            self.gain = gain if is_probe else (self.gain + gain) / 2
        elif not self.plain_s or (is_probe and each < self.plain_s):
            self.plain_s = each
        else:  # other processes only ever lengthen a step
            self.plain_s += (0.5 if each < self.plain_s else 0.2) * (each - self.plain_s)


class Speculator:
    """State of speculation that an engine keeps between requests: measurements, and earlier completions.

    drafted, accepted: tokens.  saved_steps: plain steps that the same tokens would have taken in addition: the tokens
        that a row accepted, on average over the rows of a call.
    """

    def __init__(self, settings: SpeculationConfig):
        self.settings = settings
        self.drafted, self.accepted, self.saved_steps = 0, 0, 0.0
        self.forget()

    def forget(self) -> None:
        """Drop all measurements and completions."""
        self.paces: dict[int, Pace] = defaultdict(Pace)  # by the number of bits of the number of rows
        self.history = RolloutHistory(self.settings.history_bytes) if self.settings.history_bytes else None

    def state(self) -> Hashable:
        """Equal on ranks that plan alike."""
        return repr(sorted(self.paces.items())), 0 if self.history is None else self.history.nbytes

    def taken_counters(self) -> tuple[int, int, float]:
        """Return the counters since the last call."""
        taken = self.drafted, self.accepted, self.saved_steps
        self.drafted, self.accepted, self.saved_steps = 0, 0, 0.0
        return taken


class Speculation:
    """The drafts of one request.

    prompts: of each row, int64 [n].  limits: of each row, the most new tokens.
    read: gives tokens [first, last) of a row's completion, integers, on any device.
    agree: gives the seconds that all ranks use for a measurement. Ranks that decode one batch must give it, so that
        they plan alike; it is called at the same places on all of them. None: one rank.

    Call `plan` before each call of the decoder, then `observe`; `end` for rows that have ended; `restart` for rows with
    another prompt; `remember` at the end.
    """

    def __init__(
        self,
        speculator: Speculator,
        prompts: Sequence[torch.Tensor],
        limits: list[int],
        read: Callable[[int, int, int], torch.Tensor],
        agree: Callable[[float], float] | None = None,
    ):
        self.speculator, self.settings = speculator, speculator.settings
        self.prompts, self.limits = [prompt.to("cpu", torch.int32) for prompt in prompts], limits
        self.read, self.agree = read, agree
        self.keys = [key_of(prompt) for prompt in prompts]  # in the history, of the prompts that the rows began with
        self.rows_of: dict[bytes, list[int]] = defaultdict(list)  # by key
        for row, key in enumerate(self.keys):
            self.rows_of[key].append(row)
        self.texts: dict[int, GrowingText] = {}  # by row
        self.past: dict[bytes, torch.Tensor] = {}  # by key: `_past`
        self.ended: dict[int, int] = {}  # by row: its length
        self.lengths: dict[int, int] = {}  # by row: of its next draft, at most

    # -------------------------------------------------------------- planning

    def plan(self, rows: Sequence[int], counts: Sequence[int]) -> Drafting | None:
        """Return the drafting of running rows for the next call of the decoder; None: plain steps.

        counts: of each row, the tokens of its completion so far.
        """
        max_length = min(self.settings.max_draft, VERIFIED_TOKENS // len(rows) - 1)
        if max_length < 1 or not self.pace(len(rows)).verifies_next():
            return None
        return self.drafting(rows, counts, max_length)

    def pace(self, num_rows: int) -> Pace:
        """Return the measurements for so many rows."""
        return self.speculator.paces[num_rows.bit_length()]

    def max_steps(self, num_rows: int, limit: int) -> int:
        """Return the most steps of the next call that verifies drafts, at most `limit`."""
        return limit if self.pace(num_rows).verifies else min(limit, PROBE_STEPS)

    def drafting(self, rows: Sequence[int], counts: Sequence[int], max_length: int) -> Drafting:
        """Return the texts to draft from for these rows, and the drafts' lengths.  counts: as `plan`'s."""
        count_of = {**self.ended, **dict(zip(rows, counts, strict=True))}
        for key in {self.keys[row] for row in rows}:
            for row in self.rows_of[key]:
                if row in count_of:
                    self._catch_up(row, count_of[row])
        texts, others = [self.texts[row] for row in rows], [self._others(row) for row in rows]
        lengths = [min(self.lengths.get(row, FIRST_LENGTH), max_length) for row in rows]
        return Drafting(texts, others, lengths, max_length, self.settings.least_match, bool(self.settings.ngram))

    def _catch_up(self, row: int, count: int) -> None:
        """Bring the text of a row to `count` tokens of its completion."""
        prompt = self.prompts[row]
        if row not in self.texts:
            self.texts[row] = GrowingText.of(prompt, self.limits[row])
        if (have := self.texts[row].length - len(prompt)) < count:
            self.texts[row].append(self.read(row, have, count))

    def _others(self, row: int) -> list[torch.Tensor]:
        """Return the texts of a row's prompt but its own, the latest last: the history's, then those of other rows; of
        all together about the last SEARCHED_TOKENS tokens."""
        key, left = self.keys[row], SEARCHED_TOKENS
        texts: list[torch.Tensor] = []
        for other in reversed(self.rows_of[key]) if self.settings.ngram else ():
            if other != row and other in self.texts and left > 0:
                # A row's completion is like the others' after the prompt's last tokens.
                texts.append(self.texts[other].since(len(self.prompts[other]) - MAX_MATCH))
                left -= len(texts[-1])
        past = self._past(row)
        if left > 0 and len(past):
            texts.append(past[-left:])
        return texts[::-1]

    def _past(self, row: int) -> torch.Tensor:
        """Return the history of a row's prompt as one text, int32 [n]: each completion after the prompt's last
        tokens."""
        key, prompt, history = self.keys[row], self.prompts[row], self.speculator.history
        if key not in self.past:
            completions = [] if history is None else history.of(prompt)
            separator = torch.tensor([SEPARATOR], dtype=torch.int32)
            pieces = [part for each in completions for part in (prompt[-MAX_MATCH:], each, separator)]
            self.past[key] = torch.cat(pieces) if pieces else separator[:0]
        return self.past[key]

    # ------------------------------------------------------------- observing

    def observe(self, rows: Sequence[int], steps: int, verified: VerifiedTokens | None, seconds: float) -> None:
        """Measure a call of the decoder over these rows, which took `seconds`: `steps` plain steps, or, planning
        included, `verify_steps` with the drafts of `plan`."""
        tokens = float(steps)
        if verified is not None:
            tokens = sum(verified.counts) / len(rows)
            self.lengths.update(zip(rows, verified.lengths, strict=True))
            self.speculator.drafted += verified.drafted
            self.speculator.accepted += verified.accepted
            self.speculator.saved_steps += tokens - steps
        seconds = seconds if self.agree is None else self.agree(seconds)
        self.pace(len(rows)).observe(verified is not None, seconds, steps, tokens)

    def end(self, row: int, length: int) -> None:
        """End a row with `length` tokens: other rows of its prompt draft from all of it."""
        self.ended[row] = length

    def restart(self, row: int, prompt: torch.Tensor) -> None:
        """Start a row again from another prompt, int64 [n], without a completion, no longer than its limit was. It
        drafts from the texts of its former prompt."""
        self.texts.pop(row, None)
        self.prompts[row] = prompt.to("cpu", torch.int32)

    def occupy(self, row: int, prompt: torch.Tensor, limit: int) -> None:
        """Give a row another prompt, int64 [n], and limit, as one that has nothing to do with its former ones."""
        key = self.keys[row]
        self.rows_of[key].remove(row)
        if not self.rows_of[key]:
            del self.rows_of[key]
            self.past.pop(key, None)
        for of_rows in (self.texts, self.ended, self.lengths):
            of_rows.pop(row, None)
        self.prompts[row], self.keys[row], self.limits[row] = prompt.to("cpu", torch.int32), key_of(prompt), limit
        self.rows_of[self.keys[row]].append(row)

    def remember(self, completions: Sequence[torch.Tensor]) -> None:
        """Add the rows' completions to the history, integers [n] each."""
        for row, completion in enumerate(completions):
            self.remember_row(row, completion)

    def remember_row(self, row: int, completion: torch.Tensor) -> None:
        """Add a row's completion to the history, integers [n]."""
        if self.speculator.history is not None and len(completion):
            self.speculator.history.add(self.prompts[row], completion)
