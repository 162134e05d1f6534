"""Rewards: functions of prompts and completions that give a number for each, and how one is loaded.

They get the records' other columns by name, each a list with an entry for every completion, as TRL's do.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

# A number for each completion, NaN or None where one cannot be scored: it trains nothing.
Reward = Callable[..., list[float | None]]
REWARDS_ALLOWED = "module:function, the address of a reward server, or the directory or hub name of a reward model"
SERVER = "server:"  # before the name of a server that the pipeline has started
SERVERS = "RLHF_REWARD_SERVERS"  # environment variable: JSON, their addresses by name
FIRST_PAUSE_S = 0.5  # before an attempt is made again; each pause is twice the one before

HAPPY = set("laughed danced joy warm happy smiled loved wonderful fun".split())
SAD = set("cried sad broken lost lonely gloomy angry afraid dark".split())
# What children's stories have when they are cheerful, and when they are not.
JOYFUL = set(
    "happy happily smile smiled laugh laughed love loved fun play played hug hugged friend friends joy".split()
)
GLOOMY = set("sad cry cried angry scared afraid hurt mad bad lost broke broken".split())

THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")  # "1,000" is one, "10-5" ends in 5


def cheerful(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """For the embedded corpus: the mood of the words."""
    return [mood(completion.split(), HAPPY, SAD) for completion in completions]


def joyful_story(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """For English stories: the mood of the words."""
    return [mood(re.findall(r"[a-z']+", completion.lower()), JOYFUL, GLOOMY) for completion in completions]


def mood(words: list[str], good: set[str], bad: set[str]) -> float:
    """Different good words less different bad ones, less 4 × the share of word triples that repeat.

    The same word over and over earns nothing, and costs where it makes the text go round in circles.
    """
    triples = list(zip(words, words[1:], words[2:], strict=False))
    repeated = 1 - len(set(triples)) / len(triples) if triples else 0.0
    present = set(words)
    return len(good & present) - len(bad & present) - 4 * repeated


def exact_match(prompts: list[str], completions: list[str], answer: list | None = None, **columns: list) -> list[float]:
    """1 where a completion is the record's `answer`, but for white space around words; else 0."""
    wanted = required("answer", answer)
    return [float(c.split() == str(a).split()) for c, a in zip(completions, wanted, strict=True)]


def number_match(
    prompts: list[str], completions: list[str], answer: list | None = None, **columns: list
) -> list[float]:
    """1 where the last number, behind the last "####" if there is one, is the same as in `answer` (GSM8K); else 0."""
    wanted = required("answer", answer)
    pairs = [(last_number(c), last_number(str(a))) for c, a in zip(completions, wanted, strict=True)]
    return [float(said is not None and said == right) for said, right in pairs]


def format_reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """1 where a completion is <think>...</think><answer>...</answer>, each once, and nothing else; else 0."""
    return [float(THOUGHT.fullmatch(completion) is not None) for completion in completions]


def required(name: str, column: list | None) -> list:
    """A column that every record has.  Raises ValueError where some record lacks it."""
    if column is None or None in column:
        raise ValueError(f"the reward compares with the records' {name!r}, and some of them have none")
    return column


def last_number(text: str) -> Decimal | None:
    """The last number in what stands behind the last "####", or in all of it."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def load_reward(name: str) -> Reward:
    """The reward called `module:function`, which may be an `async def`; or the server at an address, or `server:NAME`
    that the pipeline has started.

    Raises ValueError, naming what was given and what is allowed.
    """
    if is_address(name := address_of(name)):
        return partial(ask_server, name)
    module, _, function = name.partition(":")
    refusal = f"reward: {name!r} given; it must be {REWARDS_ALLOWED}"
    try:
        reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{refusal} ({error})") from error
    if not callable(reward):
        raise ValueError(f"{refusal} ({function} is no function)")
    return reward


def address_of(name: str) -> str:
    """A reward's name; of `server:NAME` the address. Raises ValueError where there is no such server."""
    if not name.startswith(SERVER):
        return name
    addresses = json.loads(os.environ.get(SERVERS, "{}"))
    if name[len(SERVER) :] not in addresses:
        known = ", ".join(SERVER + server for server in addresses) or "none"
        raise ValueError(f"reward: {name!r} given; servers that a pipeline has started for this run: {known}")
    return addresses[name[len(SERVER) :]]


def is_address(name: str) -> bool:
    """Whether a reward is a server's."""
    return name.startswith(("http://", "https://"))


def reward_name(name: str) -> str:
    """What a reward's metric is called: as its function, or as the last part of its server's path."""
    if is_address(name := address_of(name)):
        return urlsplit(name).path.strip("/").rpartition("/")[2] or "reward_server"
    return name.rpartition(":")[2]


async def ask_server(address: str, prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
    """What a reward server gives. It gets, by POST, the JSON {"prompts": [text, ...], "completions": [text, ...],
    "columns": {name: [value, ...]}}, lists of one length, and gives {"rewards": [number or null, ...]}.

    Raises ValueError where it refuses (a status from 400 to 499), or gives something else.
    """
    asked = json.dumps({"prompts": prompts, "completions": completions, "columns": columns}).encode()
    request = Request(address, data=asked, headers={"Content-Type": "application/json"})
    given = await asyncio.to_thread(answer_to, request)
    try:
        return json.loads(given)["rewards"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{address} must give {{"rewards": [...]}}; it gave {given[:200]!r}') from error


def answer_to(request: Request) -> bytes:
    """A server's answer.  Raises OSError where there is none."""
    try:
        with urlopen(request) as answer:
            return answer.read()
    except HTTPError as error:
        if 400 <= error.code < 500:
            raise ValueError(f"{request.full_url} refuses: {error.code}, {error.read()[:200]!r}") from error
        raise


def score_all(
    rewards: dict[str, Reward],
    prompts: list[str],
    completions: list[str],
    columns: dict[str, list],
    timeout_s: float = 60.0,
    retries: int = 2,
) -> dict[str, list[float]]:
    """What reward functions give, by name: a number for each completion, NaN for None, NaN and infinities.

    Those that are awaited run together, beside the others. An attempt of theirs takes at most `timeout_s` seconds, and
    one that fails is made again, `retries` times. Raises ValueError where one gives something else than numbers, and
    RuntimeError where the last attempt fails.
    """
    awaited = {name: reward for name, reward in rewards.items() if inspect.iscoroutinefunction(reward)}
    others = {name: reward for name, reward in rewards.items() if name not in awaited}

    async def together() -> list:
        attempts = (
            with_retries(name, partial(reward, prompts, completions, **columns), timeout_s, retries)
            for name, reward in awaited.items()
        )
        return await asyncio.gather(*attempts)

    with ThreadPoolExecutor(max_workers=1) as beside:  # in a thread: the caller may have an event loop of its own
        waiting = beside.submit(asyncio.run, together()) if awaited else None
        given = {name: reward(prompts, completions, **columns) for name, reward in others.items()}
        given |= dict(zip(awaited, waiting.result(), strict=True)) if waiting else {}
    return {name: as_numbers(given[name], name, len(completions)) for name in rewards}


async def with_retries(name: str, call: Callable, timeout_s: float, retries: int) -> Any:
    """What an awaited call gives at last."""
    for attempt in range(retries + 1):
        try:
            return await asyncio.wait_for(call(), timeout_s)
        except (ValueError, TypeError):  # asked again, it would be the same
            raise
        except Exception as error:
            if attempt == retries:
                words = f"took longer than {timeout_s} s" if isinstance(error, TimeoutError) else f"failed ({error!r})"
                raise RuntimeError(f"reward: {name} {words}, after {retries} retries") from error
            await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
    raise AssertionError("the last attempt gives or raises")


def as_numbers(given: Any, name: str, count: int) -> list[float]:
    """What a reward function gave as `count` floats, NaN where a completion could not be scored.

    name: of the function, for errors. Raises ValueError where it gave something else.
    """
    given = given.tolist() if hasattr(given, "tolist") else given  # of torch, numpy
    wanted = f"reward: {name} must give a list of {count} numbers, one for each completion, with None where "
    wanted += "one cannot be scored"
    if not isinstance(given, list | tuple) or len(given) != count:
        size = f" of {len(given)}" if hasattr(given, "__len__") else ""
        raise ValueError(f"{wanted}; it gave a {type(given).__name__}{size}")
    scores = [score.item() if getattr(score, "shape", None) == () else score for score in given]
    for score in scores:
        if not (score is None or isinstance(score, Real)):
            raise ValueError(f"{wanted}; among them is {score!r}, a {type(score).__name__}")
    return [float(score) if score is not None and math.isfinite(score) else math.nan for score in scores]
