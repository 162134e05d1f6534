"""Drafts: the scan of the C++ library and that of torch against brute force in Python."""

import random

import pytest
import torch

from hybrid.decoders.drafts import MOST_MATCH, SEPARATOR, DraftCounts, Drafting, GrowingText, draft_in_torch, replayed
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
            while length < min(at, len(own), MOST_MATCH) and text[at - length - 1] == own[-length - 1]:
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
        others = [[text_of(text).span() for text in case[1]] for case in some]
        most = [case[3] for case in some]
        for from_own in (True, False):
            drafting = Drafting([text_of(case[0]) for case in some], others, most, least, from_own)
            drafts = drafting.draft(VOCABULARY, torch.tensor(STOPS), most)
            for case, draft in zip(some, drafts, strict=True):
                assert draft == brute_force(*case, from_own), case
                found += len(draft) > 1
    assert found > 600


def test_drafts_without_the_library_equal_brute_force():
    rng = random.Random(1)
    for _ in range(400):
        own, others, least, most = random_case(rng)
        texts = [text_of(text).span() for text in others]
        from_own = rng.random() < 0.5
        draft = draft_in_torch(text_of(own).span(), texts, least, most, VOCABULARY, set(STOPS), from_own)
        assert draft == brute_force(own, others, least, most, from_own), (own, others, least, most)


@library
def test_a_replay_counts_what_verification_steps_would_have_done():
    """Step after step over a text that is there already, by drafts from its beginning alone."""
    rng = random.Random(2)
    for _ in range(200):
        own, others, least, most = random_case(rng)
        news = rng.randrange(len(own))
        drafting = Drafting([text_of(own)], [[text_of(text).span() for text in others]], [most], least)
        counts, taken = replayed(drafting, [news], VOCABULARY, torch.tensor(STOPS))
        at, steps, drafts, rejected, drafted, accepted = len(own) - news, 0, 0, 0, 0, 0
        while at < len(own):
            draft = brute_force(own[:at], others, least, min(most, len(own) - at - 1)) if at else []
            equal = 0
            while equal < len(draft) and draft[equal] == own[at + equal]:
                equal += 1
            at, steps, drafted, accepted = at + equal + 1, steps + 1, drafted + len(draft), accepted + equal
            drafts, rejected = drafts + bool(draft), rejected + (equal < len(draft))
        assert counts == DraftCounts([news], [drafts], [rejected], [drafted], [accepted])
        assert taken == [steps] and news == steps + accepted
