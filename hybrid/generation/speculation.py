"""Speculation: what to draft from, where verifying drafts pays, and how long they should be.

Drafts come from a row's own text, from the other completions of its prompt, and from earlier rollouts of it (DAS: arXiv
2511.13841). They change time, never tokens (`hybrid/decoders/drafts.py`). Whether they save time is decided by
measurements: of the time of a forward by its number of tokens, and of the share of drafted tokens that each row
accepts. Plain steps give the latter too, by a replay of the drafts that would have been made.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hybrid.config import RolloutConfig, SpeculationConfig
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
from hybrid.kernels.cpu_library import cpu_library

SCANNED_TOKENS_PER_SECOND = 1e10  # of texts that drafts are searched in; 1.3e10 measured with AVX-512
SCAN_SHARE = 0.05  # of a step's time that the search may take
LEAST_TEXT = 2048  # tokens that are searched for a row in any case
HALF_LIFE = 24  # drafted tokens after which a row's acceptance counts half
REPLAYED_ROWS = 4
REPLAYED_TOKENS = 64  # of a row, at most
LEAST_EVIDENCE = 8  # drafts' tokens, accepted or rejected, before anything is verified
LEAST_GAIN = 1.15  # of the plain steps' speed that verification is expected to have before it starts
MOST_PAUSE = 16  # calls between two replays where drafts do not pay


def history_of(rollout: RolloutConfig) -> "RolloutHistory | None":
    """An engine's history by its settings; None without speculation, or if that has none."""
    settings = rollout.speculation
    return None if settings is None or not settings.history_bytes else RolloutHistory(settings.history_bytes)


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


def size_class(tokens: int) -> int:
    """The largest number of tokens whose forwards are measured together with those of `tokens`: exact up to 16, then
    an eighth of a power of two, so that each class is measured often."""
    width = 1 << max((tokens - 1).bit_length() - 4, 0)
    return -(-tokens // width) * width


class StepCosts:
    """Measured seconds of a forward of running sequences, by its number of tokens.

    agree: makes measurements of several ranks one: seconds to the seconds that all of them use. Ranks that decode one
        batch must give it, so that they decide alike; it is called at the same places on all of them. None: one rank.

    Other processes only ever lengthen a step, so an estimate falls fast and rises slowly. The time of a number of tokens
    is the estimate of its class, together with that of a line through the recent ones, as if of PRIOR_STEPS: classes that
    were measured seldom are near the line.
    """

    FORGETTING = 0.995  # of an estimate's weight, a step
    FALL, RISE = 0.5, 0.1  # of the distance to a measurement below the estimate, and above it
    PRIOR_STEPS = 6.0
    MOST_STEPS = 40.0  # weight of an estimate
    PRIOR_SLOPE = 0.02  # of a plain step's time that a further token takes, before anything else is known

    def __init__(self, agree: Callable[[list[float]], list[float]] | None = None):
        self.agree = agree
        self.estimates: dict[int, tuple[float, float]] = {}  # by class: seconds, and their weight in steps
        self.line = (0.0, 0.0)  # seconds of a forward of no tokens, and of each token

    def __bool__(self) -> bool:
        """Whether anything is measured."""
        return bool(self.estimates)

    def observe(self, tokens: Sequence[int], seconds: Sequence[float], repeated: int = 1) -> list[float]:
        """Add steps: the tokens of each one's forward, and its time. Gives the times that the ranks agree on.

        repeated: how often each of them was done; `seconds` are then their means.
        """
        agreed = list(seconds) if self.agree is None else self.agree(list(seconds))
        keep = self.FORGETTING ** (len(agreed) * repeated)
        self.estimates = {key: (mean, keep * weight) for key, (mean, weight) in self.estimates.items()}
        for count, time in zip(tokens, agreed, strict=True):
            key = size_class(count)
            estimate, weight = self.estimates.get(key, (time, 0.0))
            estimate += (self.FALL if time < estimate else self.RISE) * (time - estimate)
            self.estimates[key] = estimate, min(weight + repeated, self.MOST_STEPS)
        self.line = self._line()
        return agreed

    def _line(self) -> tuple[float, float]:
        """Least squares, towards PRIOR_SLOPE; a forward of no tokens takes time too."""
        total = sum(weight for _, weight in self.estimates.values())
        tokens = sum(weight * key for key, (_, weight) in self.estimates.items()) / total
        seconds = sum(weight * estimate for estimate, weight in self.estimates.values()) / total
        variance = covariance = 0.1
        covariance *= self.PRIOR_SLOPE * seconds
        for key, (estimate, weight) in self.estimates.items():
            variance += weight / total * (key - tokens) ** 2
            covariance += weight / total * (key - tokens) * (estimate - seconds)
        slope = min(max(covariance / variance, 0.0), 0.99 * seconds / tokens)
        return seconds - slope * tokens, slope

    def seconds(self, tokens: int) -> float:
        """The expected time of a forward of so many tokens, after something was measured."""
        base, slope = self.line
        estimate, weight = self.estimates.get(size_class(tokens), (0.0, 0.0))
        return (self.PRIOR_STEPS * (base + slope * tokens) + weight * estimate) / (self.PRIOR_STEPS + weight)


@dataclass
class Acceptance:
    """How drafts did lately: weighted counts of drafted tokens that were accepted, of those that were rejected first in
    their draft, of drafts, and of steps with and without one."""

    accepted: float = 0.0
    rejected: float = 0.0
    drafts: float = 0.0
    steps: float = 0.0

    def add(self, accepted: int, rejected: int, drafts: int, steps: int) -> None:
        """Add counts; earlier ones lose weight, by half in HALF_LIFE tokens that were accepted or rejected."""
        keep = 0.5 ** ((accepted + rejected) / HALF_LIFE)
        self.accepted, self.rejected = keep * self.accepted + accepted, keep * self.rejected + rejected
        keep = 0.5 ** (steps / HALF_LIFE)
        self.drafts, self.steps = keep * self.drafts + drafts, keep * self.steps + steps

    @property
    def evidence(self) -> float:
        """Tokens of drafts that were accepted, or rejected first in their draft."""
        return self.accepted + self.rejected

    def chance(self, others: "Acceptance") -> float:
        """Probability that a drafted token is accepted after accepted ones; `others` count as two tokens."""
        prior = others.accepted / others.evidence if others.evidence else 0.0
        return (self.accepted + 2 * prior) / (self.evidence + 2)

    def frequency(self, others: "Acceptance") -> float:
        """Share of steps that find a draft."""
        prior = others.drafts / others.steps if others.steps else 0.0
        return (self.drafts + 2 * prior) / (self.steps + 2)


@dataclass(frozen=True)
class Plan:
    """The most drafted tokens of each row, and the expected tokens a second, as a share of those of plain steps."""

    most: list[int]
    gain: float


def best_plan(
    chances: Sequence[float], frequencies: Sequence[float], costs: StepCosts, max_draft: int, most_tokens: int
) -> Plan:
    """The drafts with the most expected tokens a second.

    chances: of each row, that a drafted token is accepted, after accepted ones.  frequencies: of each row, that a draft
        is found.  most_tokens: of a forward.

    The k-th token of a draft is one more new token with probability chance^k. Tokens are added in the order of these;
    the time of a forward need not grow evenly, so every number of them is compared.
    """
    rows = len(chances)
    worth = [(chance**k, -k, row) for row, chance in enumerate(chances) for k in range(1, max_draft + 1)]
    worth.sort(reverse=True)
    expected = tokens = float(rows)
    plain = best = rows / costs.seconds(rows)
    most_taken = 0
    for taken, (probability, _, row) in enumerate(worth, 1):
        tokens += frequencies[row]
        if rows + taken > most_tokens or probability < 0.02:
            break
        expected += frequencies[row] * probability
        if (speed := expected / costs.seconds(math.ceil(tokens))) > best:
            best, most_taken = speed, taken
    most = [0] * rows
    for _, _, row in worth[:most_taken]:
        most[row] += 1
    return Plan(most, best / plain)


def could_pay(rows: int, costs: StepCosts, max_draft: int, most_tokens: int) -> bool:
    """Whether drafts of every row pay if nearly all their tokens are accepted; False before anything is measured."""
    if not rows or not costs:
        return False
    plain, expected = costs.seconds(rows), 1.0
    for length in range(1, min(max_draft, most_tokens // rows - 1) + 1):
        expected += 0.95**length
        if expected * plain > 1.1 * costs.seconds(rows * (1 + length)):
            return True
    return False


@dataclass
class SpeculationCounters:
    """What speculation did.

    drafted, accepted: tokens.  steps: verification steps.  saved_steps: plain steps that the same tokens would have
        taken in addition: the tokens that a row accepted, on average over the rows of a call.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    saved_steps: float = 0.0

    def add(self, verified: VerifiedTokens) -> None:
        """Count a call."""
        accepted = sum(verified.counts.accepted)
        self.drafted += sum(verified.counts.drafted)
        self.accepted += accepted
        self.steps += len(verified.step_tokens)
        self.saved_steps += accepted / len(verified.counts.tokens)


@dataclass
class PromptTexts:
    """Texts of one prompt.  ended: the history and this request's ended rows, one after the other, each after the
    prompt's last tokens and before SEPARATOR.  running: rows whose text still grows."""

    prompt: torch.Tensor
    ended: GrowingText
    running: list[int] = field(default_factory=list)

    def add(self, completion: torch.Tensor) -> None:
        """Add an ended row's completion, integers [n]."""
        self.ended.append(self.prompt[-MOST_MATCH:])
        self.ended.append(completion)
        self.ended.append(torch.tensor([SEPARATOR]))


def ended_tokens(lengths: Iterable[int]) -> int:
    """Tokens that completions of at most these lengths take in `PromptTexts.ended`."""
    return sum(length + MOST_MATCH + 1 for length in lengths)


class Speculation:
    """The drafts of one request.

    prompts: of each row, int64 [n].  limits: of each row, the most new tokens.  stop_token_ids: int64 [n].
    vocabulary: tokens that may be drafted are below it.
    read: gives tokens [first, last) of a row's completion, integers, on any device.
    history, costs: the engine's, which outlive the request.  history: None without one.
    most_tokens: of a verification step's forward, which memory is planned for.

    Call `plan` before each call of the decoder, then `observe_plain` or `observe_verified`; `end` for rows that have
    ended; `remember` at the end. On ranks that decode one batch everything but measured times is equal, and `costs`
    makes these equal, so that they plan alike.
    """

    def __init__(
        self,
        settings: SpeculationConfig,
        prompts: Sequence[torch.Tensor],
        limits: Sequence[int],
        stop_token_ids: torch.Tensor,
        vocabulary: int,
        read: Callable[[int, int, int], torch.Tensor],
        costs: StepCosts,
        history: RolloutHistory | None = None,
        most_tokens: int = 256,
    ):
        self.settings, self.limits, self.read, self.costs, self.history = settings, limits, read, costs, history
        self.stop_token_ids, self.vocabulary, self.most_tokens = stop_token_ids.cpu(), vocabulary, most_tokens
        self.given_prompts, self.counters = prompts, SpeculationCounters()
        self.own: dict[int, GrowingText] = {}  # by row
        self.groups: dict[bytes, PromptTexts] = {}
        self.ended: list[tuple[int, int]] = []  # rows and their lengths, before other rows draft from them
        self.by_row = [Acceptance() for _ in prompts]
        self.of_all = Acceptance()
        self.pause, self.wait = 1, 0  # calls between two replays, and until the next one
        self.turn = self.rows_of_replay = 0  # of the rows that are replayed; rows that ran at the latest replay
        self.counted: dict[int, int] = {}  # by row: tokens of its completion that were replayed or verified
        self.verifies = False

    # Before anything is drafted nothing is computed: a request of a batch for which it cannot pay costs nothing.
    @cached_property
    def prompts(self) -> list[torch.Tensor]:
        """The prompts, int32 [n] each, in host memory."""
        return [prompt.to("cpu", torch.int32) for prompt in self.given_prompts]

    @cached_property
    def keys(self) -> list[bytes]:
        """The prompts' keys in the history."""
        return [key_of(prompt) for prompt in self.prompts]

    # -------------------------------------------------------------- planning

    def plan(self, rows: Sequence[int], counts: Sequence[int]) -> Drafting | None:
        """How to draft for running rows in the next call of the decoder; None: plain steps are faster.

        counts: of each row, the tokens of its completion so far.
        """
        if not self.verifies:
            self.wait -= 1
            waits = self.wait >= 0 and 2 * len(rows) > self.rows_of_replay
            if waits or not could_pay(len(rows), self.costs, self.settings.max_draft, self.most_tokens):
                return None
            self.replay(rows, counts)
        if self.of_all.evidence < LEAST_EVIDENCE:
            return self._pause()
        chances = [self.by_row[row].chance(self.of_all) for row in rows]
        frequencies = [self.by_row[row].frequency(self.of_all) for row in rows]
        plan = best_plan(chances, frequencies, self.costs, self.settings.max_draft, self.most_tokens)
        if plan.gain < (1.0 if self.verifies else LEAST_GAIN) or not any(plan.most):
            return self._pause()
        self.verifies = True
        return self.drafting(rows, counts, plan.most)

    def _pause(self) -> None:
        """Plain steps until the next replay: the more, the more often drafts did not pay."""
        self.wait, self.pause, self.verifies = self.pause, min(2 * self.pause, MOST_PAUSE), False

    def replay(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Measure acceptance without a forward: what drafts would have been accepted of a few rows' latest tokens."""
        if cpu_library() is None:
            return
        self.rows_of_replay = len(rows)
        picked = sorted({(self.turn + i) % len(rows) for i in range(min(REPLAYED_ROWS, len(rows)))})
        self.turn += REPLAYED_ROWS
        some, have = [rows[index] for index in picked], [counts[index] for index in picked]
        drafting = self.drafting(some, have, [self.settings.max_draft] * len(some))
        since = [max(self.counted.get(row, 0), count - REPLAYED_TOKENS) for row, count in zip(some, have, strict=True)]
        news = [count - first for first, count in zip(since, have, strict=True)]
        counted, steps = replayed(drafting, news, self.vocabulary, self.stop_token_ids)
        self._add(some, counted, steps)
        self.counted.update(zip(some, have, strict=True))

    def drafting(self, rows: Sequence[int], counts: Sequence[int], most: Sequence[int]) -> Drafting:
        """The texts to draft from for these rows, as many as can be searched in SCAN_SHARE of a step."""
        step = self.costs.seconds(len(rows))
        tokens = max(int(SCAN_SHARE * step * SCANNED_TOKENS_PER_SECOND / len(rows)), LEAST_TEXT)
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
            self._group(row).running.append(row)
        text = self.own[row]
        if (have := text.length - len(prompt)) < count:
            text.append(self.read(row, have, count))
        return text

    def _others(self, row: int, tokens: int) -> list[Span]:
        """The texts of a row's prompt but its own, the latest last; of those that have ended only the last tokens, so
        that they are about `tokens` together."""
        group = self._group(row)
        running = [self.own[other].span() for other in group.running if other != row] if self.settings.ngram else []
        left = tokens - sum(text.last for text in running)
        return [group.ended.span(left), *running] if left > 0 and group.ended.length else running

    def _group(self, row: int) -> PromptTexts:
        key, prompt = self.keys[row], self.prompts[row]
        if key not in self.groups:
            past = [] if self.history is None else self.history.of(prompt)
            limits = [limit for limit, other in zip(self.limits, self.keys, strict=True) if other == key]
            self.groups[key] = PromptTexts(prompt, GrowingText(ended_tokens([*map(len, past), *limits])))
            for completion in past:
                self.groups[key].add(completion)
        return self.groups[key]

    # ------------------------------------------------------------- observing

    def observe_plain(self, rows: int, steps: int, seconds: float) -> None:
        """Plain steps of so many rows took `seconds` together."""
        self.costs.observe([rows], [seconds / steps], steps)

    def observe_verified(self, rows: Sequence[int], verified: VerifiedTokens) -> None:
        """A call of `verify_steps` with the drafts of `plan`."""
        counts, steps = verified.counts, len(verified.step_tokens)
        seconds = sum(self.costs.observe(verified.step_tokens, verified.step_seconds))
        plain_seconds = self.costs.seconds(len(rows)) * sum(counts.tokens) / len(rows)
        self.counters.add(verified)
        self._add(rows, counts, [steps] * len(rows))
        for row in rows:
            self.counted[row] = self.own[row].length - len(self.prompts[row])
        if seconds > plain_seconds:
            self._pause()
        else:
            self.pause = 1

    def _add(self, rows: Sequence[int], counts: DraftCounts, steps: Sequence[int]) -> None:
        for row, *numbers in zip(rows, counts.accepted, counts.rejected, counts.drafts, steps, strict=True):
            self.by_row[row].add(*numbers)
        self.of_all.add(sum(counts.accepted), sum(counts.rejected), sum(counts.drafts), sum(steps))

    def end(self, row: int, length: int) -> None:
        """A row has ended with `length` tokens: other rows of its prompt draft from all of it."""
        if self.settings.ngram:
            self.ended.append((row, length))

    def _add_ended(self, row: int, length: int) -> None:
        group = self._group(row)
        group.add(self.read(row, 0, length))
        if row in self.own:
            group.running.remove(row)
            del self.own[row]

    def remember(self, lengths: Sequence[int]) -> None:
        """Add all completions to the history.  lengths: tokens of each row's."""
        if self.history is None:
            return
        for row, (prompt, length) in enumerate(zip(self.prompts, lengths, strict=True)):
            self.history.add(prompt, self.read(row, 0, length))
