"""How long drafts should be: measured times of a forward by its number of tokens, and measured acceptance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HALF_LIFE = 24  # drafted tokens, and steps, after which counts of acceptance have half of their weight


def size_class(tokens: int) -> int:
    """The largest number of tokens whose forwards are measured together with those of `tokens`: exact up to 16, then
    an eighth of a power of two, so that each class is measured often."""
    width = 1 << max((tokens - 1).bit_length() - 4, 0)
    return -(-tokens // width) * width


@dataclass
class Estimate:
    """Seconds of a step, their weight in steps, and the number of the step that they were measured at."""

    seconds: float
    weight: float
    at: int


class StepCosts:
    """Measured seconds of a forward of running sequences, by its number of tokens.

    agree: makes measurements of several ranks one: seconds to the seconds that all of them use. Ranks that decode one
        batch must give it, so that they decide alike; it is called at the same places on all of them. None: one rank.

    Other processes only ever lengthen a step, so an estimate falls fast and rises slowly. The time of a number of
    tokens is the estimate of its class, together with that of a line through the recent ones, as if of PRIOR_STEPS:
    classes that were measured seldom are near the line.
    """

    FORGETTING = 0.995  # of an estimate's weight, a step
    FALL, RISE = 0.5, 0.1  # of the distance to a measurement below the estimate, and above it
    PRIOR_STEPS = 6.0
    MOST_STEPS = 40.0  # weight of an estimate
    PRIOR_SLOPE = 0.02  # of a plain step's time that a further token takes, before anything else is known

    def __init__(self, agree: Callable[[list[float]], list[float]] | None = None):
        self.agree = agree
        self.steps = 0
        self.estimates: dict[int, Estimate] = {}  # by class
        self.line: tuple[float, float] | None = None  # seconds of a forward of no tokens, and of each token

    def __bool__(self) -> bool:
        """Whether anything is measured."""
        return bool(self.estimates)

    def observe(self, tokens: Sequence[int], seconds: Sequence[float], repeated: int = 1) -> list[float]:
        """Add steps: the tokens of each one's forward, and its time. Gives the times that the ranks agree on.

        repeated: how often each of them was done; `seconds` are then their means.
        """
        agreed = self.agreed(seconds)
        for count, time in zip(tokens, agreed, strict=True):
            self.steps += repeated
            estimate = self.estimates.setdefault(size_class(count), Estimate(time, 0.0, self.steps))
            estimate.seconds += (self.FALL if time < estimate.seconds else self.RISE) * (time - estimate.seconds)
            estimate.weight = min(self._weight(estimate) + repeated, self.MOST_STEPS)
            estimate.at = self.steps
        self.line = None
        return agreed

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """The seconds that all ranks use for these measurements."""
        return list(seconds) if self.agree is None else self.agree(list(seconds))

    def _weight(self, estimate: "Estimate") -> float:
        return estimate.weight * self.FORGETTING ** (self.steps - estimate.at)

    def _line(self) -> tuple[float, float]:
        """Least squares, towards PRIOR_SLOPE; a forward of no tokens takes time too."""
        points = [(key, each.seconds, self._weight(each)) for key, each in self.estimates.items()]
        total = sum(weight for _, _, weight in points)
        tokens = sum(weight * key for key, _, weight in points) / total
        seconds = sum(weight * time for _, time, weight in points) / total
        variance, covariance = 0.1, 0.1 * self.PRIOR_SLOPE * seconds
        for key, time, weight in points:
            variance += weight / total * (key - tokens) ** 2
            covariance += weight / total * (key - tokens) * (time - seconds)
        slope = min(max(covariance / variance, 0.0), 0.99 * seconds / tokens)
        return seconds - slope * tokens, slope

    def seconds(self, tokens: int) -> float:
        """The expected time of a forward of so many tokens, after something was measured."""
        if self.line is None:
            self.line = self._line()
        expected = self.line[0] + self.line[1] * tokens
        estimate = self.estimates.get(size_class(tokens))
        if estimate is None:
            return expected
        weight = self._weight(estimate)
        return (self.PRIOR_STEPS * expected + weight * estimate.seconds) / (self.PRIOR_STEPS + weight)


@dataclass
class Acceptance:
    """How drafts did lately: weighted counts of drafted tokens that were accepted, of those that were rejected first in
    their draft, of drafts, and of steps with and without one."""

    accepted: float = 0.0
    rejected: float = 0.0
    drafts: float = 0.0
    steps: float = 0.0

    def add(self, accepted: int, rejected: int, drafts: int, steps: int) -> None:
        """Add counts; earlier ones lose weight."""
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
