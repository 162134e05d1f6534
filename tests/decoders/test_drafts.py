"""Drafts: the scan of the C++ library against brute force in Python."""

import random

import pytest
import torch

from hybrid.decoders.drafts import MAX_MATCH, SEPARATOR, Drafting, GrowingText
from hybrid.kernels.cpu_library import cpu_library

VOCABULARY, STOPS = 6, (5,)
library = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")


def brute_force(own: list[int], others: list[list[int]], least: int, most: int, from_own: bool = True) -> list[int]:
    """Every position of every text; the sequence's own text repeats without an end."""
    matches = []
    for order, text in enumerate([*others, *[own] * from_own]):
        for at in range(1, len(text)):
            if text[at] == SEPARATOR:
                continue
            length = 0
            while length < min(at, len(own), MAX_MATCH) and text[at - length - 1] == own[-length - 1]:
                length += 1
            if length >= least:
                matches.append((length, order, at))
    if not matches:
        return []
    _, order, at = max(matches)
    following = ([*others, own][order])[at:]
    if order == len(others):
        following = following * (most + 1)
    draft = []
    for token in following[: max(most, 0)]:
        if not 0 <= token < VOCABULARY or token in STOPS:
            break
        draft.append(token)
    return draft


def text_of(tokens: list[int]) -> GrowingText:
    return GrowingText.of(torch.tensor(tokens))


def random_text(rng: random.Random, longest: int, symbols: int) -> list[int]:
    """Random tokens, or few ones over and over; a stop token, a separator or an unknown token here and there."""
    period = rng.choice([1, 2, 3, 7, longest])
    cycle = [rng.randrange(symbols) for _ in range(period)]
    text = [cycle[i % period] for i in range(rng.randrange(1, longest))]
    for _ in range(rng.randrange(3)):
        text[rng.randrange(len(text))] = rng.choice([SEPARATOR, VOCABULARY, 2**31 - 1, *STOPS, 0])
    return text


def random_case(rng: random.Random) -> tuple[list[int], list[list[int]], int, int]:
    """Own text, other texts, least match, most tokens; texts are longer and shorter than what is searched at once."""
    longest, symbols = rng.choice([6, 40, 300]), rng.choice([1, 2, 5])
    own = [abs(token) % VOCABULARY for token in random_text(rng, longest, symbols)]
    others = [random_text(rng, longest, symbols) for _ in range(rng.randrange(4))]
    return own, others, rng.randrange(1, 5), rng.randrange(0, 10)


@library
def test_drafts_equal_brute_force():
    """In one call for many sequences."""
    rng = random.Random(0)
    cases = [random_case(rng) for _ in range(1500)]
    found = 0
    for least in range(1, 5):
        some = [case for case in cases if case[2] == least]
        others = [[torch.tensor(text, dtype=torch.int32) for text in case[1]] for case in some]
        most = [case[3] for case in some]
        for from_own in (True, False):
            drafting = Drafting([text_of(case[0]) for case in some], others, [9] * len(some), 9, least, from_own)
            drafts = drafting.draft(most, VOCABULARY, torch.tensor(STOPS))
            for case, draft in zip(some, drafts, strict=True):
                assert draft == brute_force(*case, from_own), case
                found += len(draft) > 1
    assert found > 600


@library
def test_drafts_follow_the_text_that_was_appended_and_are_twice_as_long_as_what_was_accepted():
    text = GrowingText.of(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 1]), room=20)
    drafting, stops = Drafting([text], [[]], [2], 8, 2), torch.tensor(STOPS)
    assert drafting.draft([9], VOCABULARY, stops) == [[2, 3]]
    drafting.accept(0, 2, [2, 3, 4])  # all, and one more
    assert drafting.lengths == [4]
    assert drafting.draft([9], VOCABULARY, stops) == [[1, 2, 3, 4]]
    drafting.accept(0, 4, [1, 2, 3, 4, 1])
    assert drafting.lengths == [8]
    assert drafting.draft([9], VOCABULARY, stops) == [[2, 3, 4, 1, 2, 3, 4, 1]]
    assert drafting.draft([3], VOCABULARY, stops) == [[2, 3, 4]]
    drafting.accept(0, 8, [2, 3, 4, 4])
    assert drafting.lengths == [6]
    drafting.accept(0, 2, [3])
    assert drafting.lengths == [1]
    drafting.accept(0, 0, [3])  # nothing was drafted
    assert drafting.lengths == [1]
    assert text.tokens[: text.length].tolist()[9:] == [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 4, 3, 3]


def test_without_the_library_nothing_is_drafted(monkeypatch):
    monkeypatch.setattr("hybrid.kernels.cpu_library.cpu_library", lambda: None)
    drafting = Drafting([text_of([1, 2, 1, 2, 1])], [[]], [4], 4, 2)
    assert drafting.draft([4], VOCABULARY, torch.tensor(STOPS)) == [[]]
