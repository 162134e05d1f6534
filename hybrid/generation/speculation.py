"""Speculation: what rows draft from, and whether the next steps verify drafts.

Drafts come from a row's own text, from the other completions of its prompt, and from earlier rollouts of it (DAS: arXiv
2511.13841). They change time, never tokens (`hybrid/decoders/drafts.py`). Whether they save time is decided by
measurements (`hybrid/generation/draft_lengths.py`). Acceptance is measured during plain steps too, by a replay: what
the drafts would have been, compared with the tokens that were drawn.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from hybrid.config import SpeculationConfig
from hybrid.decoders.drafts import (
    MOST_MATCH,
    SEPARATOR,
    TOKEN_BYTES,
    DraftCounts,
    Drafting,
    GrowingText,
    Span,
    VerifiedTokens,
    replayed,
)
from hybrid.generation.draft_lengths import Acceptance, StepCosts, best_plan, could_pay
from hybrid.kernels.cpu_library import cpu_library

SCANNED_TOKENS_PER_SECOND = 1e10  # of texts that drafts are searched in; 1.3e10 measured with AVX-512
SCAN_SHARE = 0.05  # of a step's time that the search may take
LEAST_TEXT = 2048  # tokens that are searched for a row in any case
REPLAY_SHARE = 0.01  # of the time of plain steps that replays may take
REPLAYED_ROWS = 4
REPLAYED_TOKENS = 48  # of a row, at most
LEAST_EVIDENCE = 8  # tokens of drafts, accepted or rejected, before anything is verified
LEAST_GAIN = 1.15  # of the plain steps' speed that verification is expected to have before it starts
KEPT_GAIN = 1.05  # the same, before it goes on
LEAST_STEP_SECONDS = 3e-4  # of a plain step: planning a call takes 1 to 2 ms, as long as several shorter ones
LEAST_STEPS = 2  # of a call that verifies; twice as many after each one that was faster than plain steps
MOST_PAUSE = 32  # calls with plain steps after verification that was slower than these


class RolloutHistory:
    """Completions of earlier rollouts by prompt. Drafts are guesses in any case, so it outlives weight versions.

    limit_bytes: of tokens. The completions of the prompt that was used least recently are dropped first; of a single
        prompt the oldest ones.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self.texts: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()  # int32 [n] each, the latest one last

    def __len__(self) -> int:
        return len(self.texts)

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
            self._drop()

    def of(self, prompt: torch.Tensor) -> list[torch.Tensor]:
        """The completions of a prompt, int32 [n] each, the latest one last."""
        key = key_of(prompt)
        if key not in self.texts:
            return []
        self.texts.move_to_end(key)
        return list(self.texts[key])

    def _drop(self) -> None:
        """Drop the prompt that was used least recently; of the only one its oldest completion."""
        key, texts = next(iter(self.texts.items()))
        dropped = [texts.pop(0)] if len(self.texts) == 1 and len(texts) > 1 else self.texts.pop(key)
        self.nbytes -= TOKEN_BYTES * sum(map(len, dropped)) + len(key) * (key not in self.texts)


def key_of(prompt: torch.Tensor) -> bytes:
    """A prompt's key in the history.  prompt: integers [n]."""
    return prompt.to("cpu", torch.int32).numpy().tobytes()


class SpeculationCounters(NamedTuple):
    """What speculation did.

    drafted, accepted: tokens.  saved_steps: plain steps that the same tokens would have taken in addition: the tokens
        that a row accepted, on average over the rows of a call.
    """

    drafted: int = 0
    accepted: int = 0
    saved_steps: float = 0.0

    def plus(self, counts: DraftCounts) -> "SpeculationCounters":
        """These, and those of a call."""
        accepted = sum(counts.accepted)
        saved_steps = self.saved_steps + accepted / len(counts.tokens)
        return SpeculationCounters(self.drafted + sum(counts.drafted), self.accepted + accepted, saved_steps)


class Speculator:
    """What an engine keeps for its requests' speculation: measurements, and earlier completions."""

    def __init__(self, settings: SpeculationConfig):
        self.settings, self.counters = settings, SpeculationCounters()
        self.forget()

    def forget(self) -> None:
        """Begin again without measurements and completions."""
        self.costs, self.of_all = StepCosts(), Acceptance()
        self.history = RolloutHistory(self.settings.history_bytes) if self.settings.history_bytes else None
        self.replay_seconds = 3e-4  # of a replay, estimated
        self.pause = 1  # calls with plain steps after the next loss

    def state(self) -> Hashable:
        """Equal on ranks that plan alike."""
        held = (0, 0) if self.history is None else (len(self.history), self.history.nbytes)
        of_all = self.of_all
        return *held, self.costs.steps, of_all.accepted, of_all.rejected, of_all.drafts, of_all.steps, self.pause

    def taken_counters(self) -> SpeculationCounters:
        """The counters since the last call."""
        taken, self.counters = self.counters, SpeculationCounters()
        return taken


def speculator_of(settings: SpeculationConfig | None) -> Speculator | None:
    """An engine's speculator by its settings; None without speculation."""
    return None if settings is None else Speculator(settings)


@dataclass
class PromptTexts:
    """Texts of one prompt.  ended: the history and this request's ended rows, one after the other, each after the
    prompt's last tokens and before SEPARATOR.  running: rows whose text still grows."""

    prompt: torch.Tensor
    ended: GrowingText
    running: list[int] = field(default_factory=list)

    def add(self, completions: Iterable[torch.Tensor]) -> None:
        """Add ended rows' completions, integers [n] each."""
        separator = torch.tensor([SEPARATOR], dtype=torch.int32)
        pieces = [(self.prompt[-MOST_MATCH:], each.to("cpu", torch.int32), separator) for each in completions]
        if pieces:
            self.ended.append(torch.cat([part for piece in pieces for part in piece]))


def ended_tokens(lengths: Iterable[int]) -> int:
    """Tokens that completions of at most these lengths take in `PromptTexts.ended`."""
    return sum(length + MOST_MATCH + 1 for length in lengths)


def latest(texts: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """The last ones of `texts` that have `tokens` tokens together, or all, in their order."""
    first = len(texts)
    while first and tokens > 0:
        first -= 1
        tokens -= len(texts[first])
    return list(texts[first:])


class Speculation:
    """The drafts of one request.

    prompts: of each row, int64 [n].  limits: of each row, the most new tokens.  stop_token_ids: int64 [n].
    vocabulary: tokens that may be drafted are below it.
    read: gives tokens [first, last) of a row's completion, integers, on any device.
    most_tokens: of a verification step's forward, which memory is planned for: it has logits of all of them, as
        scoring has.
    agree: as StepCosts'.

    Call `plan` before each call of the decoder, then `observe`; `end` for rows that have ended; `restart` for rows with
    another prompt; `remember` at the end. On ranks that decode one batch everything but measured times is equal, and
    `agree` makes these equal, so that they plan alike. Where nothing can be gained next to nothing is computed.
    """

    def __init__(
        self,
        speculator: Speculator,
        prompts: Sequence[torch.Tensor],
        limits: Sequence[int],
        stop_token_ids: torch.Tensor,
        vocabulary: int,
        read: Callable[[int, int, int], torch.Tensor],
        most_tokens: int = 256,
        agree: Callable[[list[float]], list[float]] | None = None,
    ):
        self.speculator, self.settings, self.costs = speculator, speculator.settings, speculator.costs
        self.costs.agree = agree
        self.limits, self.read, self.most_tokens = limits, read, most_tokens
        self.stop_token_ids, self.vocabulary = stop_token_ids.cpu(), vocabulary
        self.given_prompts = prompts
        self.own: dict[int, GrowingText] = {}  # by row
        self.groups: dict[bytes, PromptTexts] = {}
        self.ended: list[tuple[int, int]] = []  # rows and their lengths, before other rows draft from them
        self.of_rows = [Acceptance() for _ in prompts]
        self.counted: dict[int, int] = {}  # by row: tokens of its completion that were replayed or verified
        self.turn = 0  # of the rows that are replayed
        self.decoded_seconds = 0.0  # of plain steps since the latest replay
        self.wait = 0  # calls with plain steps from now on
        self.planned_rows = 0  # rows at the latest plan
        self.verifies, self.steps = False, LEAST_STEPS  # of the next call that verifies

    @cached_property
    def prompts(self) -> list[torch.Tensor]:
        """The prompts, int32 [n] each, in host memory."""
        return [prompt.to("cpu", torch.int32) for prompt in self.given_prompts]

    @cached_property
    def keys(self) -> list[bytes]:
        """The keys in the history of the prompts that the rows began with."""
        return [key_of(prompt) for prompt in self.given_prompts]

    # -------------------------------------------------------------- planning

    def plan(self, rows: Sequence[int], counts: Sequence[int]) -> Drafting | None:
        """How to draft for running rows in the next call of the decoder; None: plain steps are faster.

        counts: of each row, the tokens of its completion so far.
        """
        if self.wait:
            self.wait -= 1
            return None
        replays = self.speculator.replay_seconds <= REPLAY_SHARE * self.decoded_seconds
        fewer = 2 * len(rows) <= self.planned_rows or not self.planned_rows
        if not self.verifies and not replays and not fewer:
            return None
        self.planned_rows = len(rows)
        pays = could_pay(len(rows), self.costs, self.settings.max_draft, self.most_tokens)
        if not pays or self.costs.seconds(len(rows)) < LEAST_STEP_SECONDS:
            self.verifies, self.decoded_seconds = False, 0.0
            return None
        if not self.verifies and replays:
            self.replay(rows, counts)
        most = self._lengths(rows)
        self.verifies = most is not None
        return None if most is None else self.drafting(rows, counts, most)

    def _lengths(self, rows: Sequence[int]) -> list[int] | None:
        """The most drafted tokens of each row; None if plain steps are expected to be faster, or nearly as fast."""
        of_all = self.speculator.of_all
        if of_all.evidence < LEAST_EVIDENCE:
            return None
        chances = [self.of_rows[row].chance(of_all) for row in rows]
        frequencies = [self.of_rows[row].frequency(of_all) for row in rows]
        plan = best_plan(chances, frequencies, self.costs, self.settings.max_draft, self.most_tokens)
        return plan.most if plan.gain > (KEPT_GAIN if self.verifies else LEAST_GAIN) else None

    def replay(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Measure acceptance without a forward: how many of a few rows' latest tokens drafts would have given."""
        start = time.perf_counter()
        picked = sorted({(self.turn + i) % len(rows) for i in range(min(REPLAYED_ROWS, len(rows)))})
        self.turn += REPLAYED_ROWS
        some, have = [rows[index] for index in picked], [counts[index] for index in picked]
        first = [max(self.counted.get(row, 0), count - REPLAYED_TOKENS) for row, count in zip(some, have, strict=True)]
        news = [count - begin for begin, count in zip(first, have, strict=True)]
        if cpu_library() is not None:  # without it nothing is verified
            drafting = self.drafting(some, have, [self.settings.max_draft] * len(some))
            self._add(some, *replayed(drafting, news, self.vocabulary, self.stop_token_ids))
        self.counted.update(zip(some, have, strict=True))
        self.decoded_seconds = 0.0
        (seconds,) = self.costs.agreed([time.perf_counter() - start])
        self.speculator.replay_seconds += 0.3 * (seconds - self.speculator.replay_seconds)

    def drafting(self, rows: Sequence[int], counts: Sequence[int], most: Sequence[int]) -> Drafting:
        """The texts to draft from for these rows, as many as can be searched in SCAN_SHARE of a step."""
        step = self.costs.seconds(len(rows))
        tokens = max(int(SCAN_SHARE * step * SCANNED_TOKENS_PER_SECOND / len(rows)), LEAST_TEXT)
        for row in (*(row for row, _ in self.ended), *rows):
            self._read_history(row, tokens)
        for row, length in self.ended:
            self._add_ended(row, length)
        self.ended = []
        for row, count in zip(rows, counts, strict=True):
            self._catch_up(row, count)
        own, others = [self.own[row] for row in rows], [self._others(row, tokens) for row in rows]
        return Drafting(own, others, list(most), self.settings.least_match, bool(self.settings.ngram))

    def _catch_up(self, row: int, count: int) -> GrowingText:
        """The text of a row with `count` tokens of its completion."""
        prompt = self.prompts[row]
        if row not in self.own:
            self.own[row] = GrowingText(len(prompt) + self.limits[row])
            self.own[row].append(prompt)
            self.groups[self.keys[row]].running.append(row)
        text = self.own[row]
        if (have := text.length - len(prompt)) < count:
            text.append(self.read(row, have, count))
        return text

    def _others(self, row: int, tokens: int) -> list[Span]:
        """The texts of a row's prompt but its own, the latest last; of those that have ended only the last tokens, so
        that they are about `tokens` together."""
        group = self.groups[self.keys[row]]
        running = [self.own[other].span() for other in group.running if other != row] if self.settings.ngram else []
        left = tokens - sum(text.last for text in running)
        return [group.ended.span(left), *running] if left > 0 and group.ended.length else running

    def _read_history(self, row: int, tokens: int) -> None:
        """Make the texts of a row's prompt, with about so many of the history's latest tokens, unless they exist."""
        key, prompt = self.keys[row], self.prompts[row]
        if key in self.groups:
            return
        past = [] if self.speculator.history is None else latest(self.speculator.history.of(prompt), tokens)
        limits = [limit for limit, other in zip(self.limits, self.keys, strict=True) if other == key]
        self.groups[key] = PromptTexts(prompt, GrowingText(ended_tokens([*map(len, past), *limits])))
        self.groups[key].add(past)

    # ------------------------------------------------------------- observing

    def observe(self, rows: Sequence[int], steps: int, verified: VerifiedTokens | None, seconds: float) -> None:
        """A call of the decoder over these rows took `seconds`: so many plain steps, or, planning included,
        `verify_steps` with the drafts of `plan`."""
        if verified is None:
            (each,) = self.costs.observe([len(rows)], [seconds / steps], steps)
            self.decoded_seconds += each * steps
        else:
            self._observe_verified(rows, verified, seconds)

    def _observe_verified(self, rows: Sequence[int], verified: VerifiedTokens, seconds: float) -> None:
        """If it was slower than plain steps, these follow. What the call takes besides its steps is part of them."""
        counts, steps = verified.counts, len(verified.step_tokens)
        more = (seconds - sum(verified.step_seconds)) / steps
        seconds = sum(self.costs.observe(verified.step_tokens, [each + more for each in verified.step_seconds]))
        plain_seconds = self.costs.seconds(len(rows)) * sum(counts.tokens) / len(rows)
        self.speculator.counters = self.speculator.counters.plus(counts)
        self._add(rows, counts, [steps] * len(rows))
        for row in rows:
            self.counted[row] = self.own[row].length - len(self.prompts[row])
        if seconds > plain_seconds:
            self.wait, self.verifies, self.steps = self.speculator.pause, False, LEAST_STEPS
            self.speculator.pause = min(2 * self.speculator.pause, MOST_PAUSE)
        else:
            self.steps, self.speculator.pause = 2 * self.steps, max(self.speculator.pause // 2, 1)

    def _add(self, rows: Sequence[int], counts: DraftCounts, steps: Sequence[int]) -> None:
        for row, *numbers in zip(rows, counts.accepted, counts.rejected, counts.drafts, steps, strict=True):
            self.of_rows[row].add(*numbers)
        self.speculator.of_all.add(sum(counts.accepted), sum(counts.rejected), sum(counts.drafts), sum(steps))

    def end(self, row: int, length: int) -> None:
        """A row has ended with `length` tokens: other rows of its prompt draft from all of it."""
        if self.settings.ngram:
            self.ended.append((row, length))

    def _add_ended(self, row: int, length: int) -> None:
        group = self.groups[self.keys[row]]
        group.add([self.read(row, 0, length)])
        if row in self.own:
            group.running.remove(row)
            del self.own[row]

    def restart(self, row: int, prompt: torch.Tensor) -> None:
        """A row goes on from another prompt, int64 [n], without a completion, no longer than its limit was. It drafts
        from the texts of its former prompt."""
        if row in self.own:
            self.groups[self.keys[row]].running.remove(row)
            del self.own[row]
        self.counted.pop(row, None)
        self.prompts[row] = prompt.to("cpu", torch.int32)

    def remember(self, completions: Sequence[torch.Tensor]) -> None:
        """Add the rows' completions to the history, integers [n] each."""
        if self.speculator.history is None:
            return
        for prompt, completion in zip(self.prompts, completions, strict=True):
            if len(completion):
                self.speculator.history.add(prompt, completion)
