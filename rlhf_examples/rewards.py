"""Rewards: functions of prompts and completions that give a number for each, and how one is loaded.

They get the records' other columns by name, each a list with an entry for every completion, as TRL's do.
"""

import importlib
import math
import re
from collections.abc import Callable
from decimal import Decimal
from numbers import Real

# A number for each completion, NaN or None where one cannot be judged: it trains nothing.
Reward = Callable[..., list[float | None]]

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
    """The reward called `module:function`.

    Raises ValueError, naming what was given and what is allowed.
    """
    module, _, function = name.partition(":")
    refusal = f"reward: {name!r} given; it must be module:function, or the directory or hub name of a reward model"
    try:
        reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{refusal} ({error})") from error
    if not callable(reward):
        raise ValueError(f"{refusal} ({function} is no function)")
    return reward


def judged(
    reward: Reward, name: str, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list[float]:
    """What a reward function gives: a number for each completion, NaN for None, NaN and infinities.

    name: of the function, for errors. Raises ValueError where it gives something else.
    """
    given = reward(prompts, completions, **columns)
    given = given.tolist() if hasattr(given, "tolist") else given  # of torch, numpy
    wanted = f"reward: {name} must give a list of {len(completions)} numbers, one for each completion, with None where "
    wanted += "one cannot be judged"
    if not isinstance(given, list | tuple) or len(given) != len(completions):
        size = f" of {len(given)}" if hasattr(given, "__len__") else ""
        raise ValueError(f"{wanted}; it gave a {type(given).__name__}{size}")
    scores = [score.item() if getattr(score, "shape", None) == () else score for score in given]
    for score in scores:
        if not (score is None or isinstance(score, Real)):
            raise ValueError(f"{wanted}; among them is {score!r}, a {type(score).__name__}")
    return [float(score) if score is not None and math.isfinite(score) else math.nan for score in scores]
