"""Reward functions of prompts and completions, and loading them by name.

A function returns a number for each completion. It gets the records' other columns as keyword arguments, each a list
with an entry for every completion, as in TRL.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

import httpx2

from rlhf_examples.common.choices import NAMED_REWARDS, named_reward
from rlhf_examples.common.daemon_threads import running
from rlhf_examples.common.http_client import fetch

# Returns a number for each completion; NaN or None for one that cannot be scored, which is masked out of the loss.
Reward = Callable[..., Any]  # gives list[float | None], or a coroutine that does
REWARDS_ALLOWED = (
    "module:function, the address of a reward server, or the directory or hub name of a reward model; or one of "
    f"{', '.join(NAMED_REWARDS)} (also NAME:settings.yaml)"
)
SERVER = "server:"  # prefix of the name of a server that the pipeline has started
SERVERS = "RLHF_REWARD_SERVERS"  # environment variable: a JSON object of the servers' addresses by name
FIRST_RETRY_DELAY_S = 0.5  # before the first retry; each further pause is twice as long, up to the seventh
GRACE_S = 5.0  # seconds for cancelled async functions to end; one that blocks its event loop longer is an error
RETRIED = (408, 429)  # statuses below 500 that ask for a retry: a timeout, too many requests

HAPPY = set("laughed danced joy warm happy smiled loved wonderful fun".split())
SAD = set("cried sad broken lost lonely gloomy angry afraid dark".split())
# Words of cheerful and of gloomy children's stories.
JOYFUL = set(
    "happy happily smile smiled laugh laughed love loved fun play played hug hugged friend friends joy".split()
)
GLOOMY = set("sad cry cried angry scared afraid hurt mad bad lost broke broken".split())

THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")  # "1,000" is one number, "10-5" ends in 5


def cheerful(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The mood of the words, for the synthetic stories."""
    return [mood(completion.split(), HAPPY, SAD) for completion in completions]


def joyful_story(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The mood of the words, for English stories."""
    return [mood(re.findall(r"[a-z']+", completion.lower()), JOYFUL, GLOOMY) for completion in completions]


def mood(words: list[str], good: set[str], bad: set[str]) -> float:
    """The number of different good words minus that of different bad ones, minus 4 × the share of repeated word
    triples.

    Repeating a word earns nothing, and costs if it repeats triples.
    """
    triples = list(zip(words, words[1:], words[2:], strict=False))
    repeated = 1 - len(set(triples)) / len(triples) if triples else 0.0
    present = set(words)
    return len(good & present) - len(bad & present) - 4 * repeated


def exact_match(prompts: list[str], completions: list[str], answer: list | None = None, **columns: list) -> list[float]:
    """1 if a completion equals the record's `answer` up to white space, else 0."""
    answers = required("answer", answer)
    return [float(c.split() == str(a).split()) for c, a in zip(completions, answers, strict=True)]


def number_match(
    prompts: list[str], completions: list[str], answer: list | None = None, **columns: list
) -> list[float]:
    """1 if the last number equals that of `answer`, else 0; numbers are looked for after the last "####" if any
    (GSM8K).
    """
    answers = required("answer", answer)
    pairs = [(last_number(c), last_number(str(a))) for c, a in zip(completions, answers, strict=True)]
    return [float(predicted is not None and predicted == expected) for predicted, expected in pairs]


def format_reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """1 if a completion is <think>...</think><answer>...</answer>, each once, and nothing else; else 0."""
    return [float(THOUGHT.fullmatch(completion) is not None) for completion in completions]


def required(name: str, column: list | None) -> list:
    """`column`, which every record must have. Raises ValueError if a record lacks it."""
    if column is None or None in column:
        raise ValueError(f"the reward needs the column {name!r}, which some records lack")
    return column


def last_number(text: str) -> Decimal | None:
    """The last number after the last "####", or of the whole text if it has none; None without a number."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def load_reward(name: str) -> Reward:
    """The reward `module:function` (also `async def`), a reward server (its address, or `server:NAME` of the pipeline),
    or one of NAMED_REWARDS, as NAME or NAME:settings.yaml.

    Raises ValueError, with the allowed forms, if there is no such function or server.
    """
    invalid = f"reward: {name!r} given; it must be {REWARDS_ALLOWED}"
    if is_address(name := address_of(name)):
        try:
            httpx2.URL(name)
        except httpx2.InvalidURL as error:
            raise ValueError(f"{invalid} ({error})") from error
        return partial(ask_server, name)
    if kind := named_reward(name):
        return importlib.import_module(NAMED_REWARDS[kind]).load(name.partition(":")[2])
    module, _, function = name.partition(":")
    try:
        reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{invalid} ({error})") from error
    if not callable(reward):
        raise ValueError(f"{invalid} ({function} is not a function)")
    return reward


def address_of(name: str) -> str:
    """A reward's name, `server:NAME` replaced by the server's address. Raises ValueError for an unknown server."""
    if not name.startswith(SERVER):
        return name
    addresses = json.loads(os.environ.get(SERVERS, "{}"))
    if name[len(SERVER) :] not in addresses:
        available = ", ".join(SERVER + server for server in addresses) or "none"
        raise ValueError(f"reward: {name!r} given; reward servers of this pipeline: {available}")
    return addresses[name[len(SERVER) :]]


def is_address(name: str) -> bool:
    """Whether a reward's name is the address of a server."""
    return name.startswith(("http://", "https://"))


def reward_name(name: str) -> str:
    """A reward's name in metrics: the function's name, the last part of the path of the server's address, or that
    of NAMED_REWARDS.
    """
    if is_address(name := address_of(name)):
        return httpx2.URL(name).path.strip("/").rpartition("/")[2] or "reward_server"
    return named_reward(name) or name.rpartition(":")[2]


async def ask_server(address: str, prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
    """The rewards that a server returns. It gets, by POST, the JSON {"prompts": [text, ...], "completions": [text,
    ...], "columns": {name: [value, ...]}}, lists of equal length, and returns {"rewards": [number or null, ...]}.

    Raises ValueError if the server rejects the request (status 400 to 499, but for those in `RETRIED`) or returns
    anything else, RuntimeError for any other status of an error, httpx2.HTTPError if there is no response.
    """
    body = json.dumps({"prompts": prompts, "completions": completions, "columns": columns}).encode()
    content = checked_content(address, await fetch(address, body))
    try:
        return json.loads(content)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f'{address} must return {{"rewards": [...]}}; it returned {content[:200]!r}') from error


def checked_content(address: str, response: httpx2.Response) -> bytes:
    """A response's body. Raises ValueError for status 400 to 499, but for those in `RETRIED`, and RuntimeError for any
    other status of an error.
    """
    status, content = response.status_code, response.content
    if 400 <= status < 500 and status not in RETRIED:
        raise ValueError(f"{address} rejected the request: {status}, {content[:200]!r}")
    if not response.is_success:
        raise RuntimeError(f"{address} failed: {status}, {content[:200]!r}")
    return content


def score_all(
    rewards: dict[str, Reward],
    prompts: list[str],
    completions: list[str],
    columns: dict[str, list],
    timeout_s: float = 60.0,
    retries: int = 2,
) -> dict[str, list[float]]:
    """The scores of all reward functions by name: a float for each completion, NaN for None, NaN and infinities.

    Async functions run concurrently, in a thread of their own, while the other functions run. An attempt takes at most
    `timeout_s` seconds; a failed one is repeated up to `retries` times. Whatever is raised cancels the async functions.
    Raises ValueError if a function returns anything but numbers, RuntimeError if the last attempt fails.
    """
    async_rewards = {name: reward for name, reward in rewards.items() if inspect.iscoroutinefunction(reward)}
    sync_rewards = {name: reward for name, reward in rewards.items() if name not in async_rewards}

    async def score_async() -> list:
        attempts = (
            with_retries(name, partial(reward, prompts, completions, **columns), timeout_s, retries)
            for name, reward in async_rewards.items()
        )
        return await asyncio.gather(*attempts)

    with running(score_async()) as async_scores:  # in a thread: the caller may already run an event loop
        scores = {name: reward(prompts, completions, **columns) for name, reward in sync_rewards.items()}
        longest_s = (retries + 1) * (timeout_s + retry_delay_s(retries)) + GRACE_S
        try:
            scores |= zip(async_rewards, async_scores.result(min(longest_s, threading.TIMEOUT_MAX)), strict=True)
        except FutureTimeoutError as error:
            raise RuntimeError(
                f"reward: of {', '.join(async_rewards)}, an async function runs for more than {timeout_s} s and cannot "
                "be cancelled: it must await what takes time (asyncio.to_thread for a function that blocks)"
            ) from error
    return {name: as_numbers(scores[name], name, len(completions)) for name in rewards}


async def with_retries(name: str, call: Callable, timeout_s: float, retries: int) -> Any:
    """The result of an async call's first successful attempt. ValueError and TypeError are raised at once, any other
    error as RuntimeError after the last attempt.
    """
    for attempt in range(retries + 1):
        try:
            return await asyncio.wait_for(call(), timeout_s)
        except (ValueError, TypeError):  # a retry would fail in the same way
            raise
        except Exception as error:
            if attempt == retries:
                timed_out = isinstance(error, asyncio.TimeoutError)
                reason = f"took longer than {timeout_s} s" if timed_out else f"failed ({error!r})"
                raise RuntimeError(f"reward: {name} {reason}, after {retries} retries") from error
            await asyncio.sleep(retry_delay_s(attempt))
    raise AssertionError("the last attempt returns or raises")


def retry_delay_s(attempt: int) -> float:
    """Seconds between an attempt, counted from 0, and the next one."""
    return FIRST_RETRY_DELAY_S * 2 ** min(attempt, 7)


def as_numbers(scores: Any, name: str, count: int) -> list[float]:
    """A reward function's return value as `count` floats, NaN where a completion could not be scored.

    name: the function's, for errors. Raises ValueError for any other return value.
    """
    scores = scores.tolist() if hasattr(scores, "tolist") else scores  # torch tensors, numpy arrays
    expected = f"reward: {name} must return a list of {count} numbers, one per completion, None for a "
    expected += "completion that cannot be scored"
    if not isinstance(scores, list | tuple) or len(scores) != count:
        size = f" of {len(scores)}" if hasattr(scores, "__len__") else ""
        raise ValueError(f"{expected}; it returned a {type(scores).__name__}{size}")
    numbers = [score.item() if getattr(score, "shape", None) == () else score for score in scores]
    for score in numbers:
        if not (score is None or isinstance(score, Real)):
            raise ValueError(f"{expected}; it contains {score!r}, a {type(score).__name__}")
    return [float(score) if score is not None and math.isfinite(score) else math.nan for score in numbers]
