"""The reward `judge`: the score that a language model behind an OpenAI URL gives a completion.

`--reward judge:my_judge.yaml`, with the settings of `JudgeSettings`:

    url: https://api.example.org/v1
    model: a-judge
    api_key_env: JUDGE_API_KEY
    prompt: |
      Question: {prompt}
      Reference: {answer}
      Answer: {completion}
      Rate the answer from 0 to 10. End with "Score: N".
    score: 'Score:\\s*(\\d+)'
    divide_by: 10
"""

import asyncio
import json
import math
import os
import re
import string
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rlhf_examples.common.daemon_threads import running
from rlhf_examples.common.http_client import fetch
from rlhf_examples.common.parsing import ScriptArguments, Within, arg, arguments_of, read_yaml
from rlhf_examples.rewards import Reward, checked_content, required, retry_delay_s, with_retries


@dataclass
class JudgeSettings(ScriptArguments):
    """A judge and its question."""

    url: str = arg("", "base URL of an OpenAI endpoint, such as http://127.0.0.1:8000/v1")
    model: str = arg("", "the model's name at the endpoint")
    prompt: str = arg("", "template with {prompt}, {completion} and names of columns; {{ and }} are braces")
    score: str = arg(
        r"(-?\d+(?:\.\d+)?)\D*\Z", "regular expression; the last match's first group is the score; default: last number"
    )
    divide_by: float = arg(1.0, "the score is divided by this")
    system: str = arg("", "system message; empty: none")
    api_key_env: str = arg("", "environment variable with the endpoint's key; empty: no key")
    temperature: Annotated[float, Within(0)] = arg(0.0, "sampling temperature")
    max_tokens: Annotated[int, Within(1)] = arg(512, "maximum tokens of an answer")
    request: str = arg("", 'JSON object of further fields of the request, such as {"reasoning_effort": "low"}')
    timeout_s: Annotated[float, Within(0.001)] = arg(60.0, "seconds of an attempt of a request")
    retries: Annotated[int, Within(0)] = arg(2, "retries of a request after a failed attempt")
    concurrency: Annotated[int, Within(1)] = arg(16, "requests of a rank at once")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("url", "model", "prompt"):
            if not getattr(self, name):
                raise ValueError(f"{name}: none given; a judge needs url, model and prompt")
        try:
            groups = re.compile(self.score).groups
        except re.error as error:
            raise ValueError(f"score: {self.score!r} given; it must be a regular expression ({error})") from error
        if not groups:
            raise ValueError(f"score: {self.score!r} given; it must have a group, which is the number")
        if not self.divide_by:
            raise ValueError("divide_by: 0 given; it must be another number")
        if "completion" not in self.columns:
            raise ValueError(f"prompt: {self.prompt!r} given; it must contain {{completion}}")
        if self.api_key_env and self.api_key_env not in os.environ:
            raise ValueError(f"api_key_env: {self.api_key_env!r} given; there is no such environment variable")
        try:
            fields = json.loads(self.request or "{}")
        except ValueError as error:
            raise ValueError(f"request: {self.request!r} given; it must be a JSON object ({error})") from error
        if not isinstance(fields, dict):
            raise ValueError(f"request: {self.request!r} given; it must be a JSON object")

    @property
    def columns(self) -> list[str]:
        """The names in the prompt's template. Raises ValueError if it is none."""
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]
        except ValueError as error:
            raise ValueError(f"prompt: {self.prompt!r} given; {error}; write braces as {{{{ and }}}}") from error
        if invalid := [name for name in names if not name.isidentifier()]:
            raise ValueError(f"prompt: {{{invalid[0]}}} given; it must be a column's name, and braces {{{{ and }}}}")
        return names


def load(file: str = "") -> Reward:
    """The reward with the settings of a YAML file. Raises ValueError for wrong ones, or without a file."""
    if not file:
        raise ValueError("reward: 'judge' given; it must be judge:FILE.yaml, with url, model and prompt")
    try:
        return partial(judge, arguments_of(JudgeSettings, read_yaml(Path(file))))
    except ValueError as error:
        raise ValueError(f"reward: 'judge:{file}' given; {error}") from error


def judge(
    settings: JudgeSettings, prompts: list[str], completions: list[str], /, **columns: list
) -> list[float | None]:
    """The judge's score of each completion; None where its answer has none.

    Each request has its timeout and retries, so that one that fails repeats no other. Raises ValueError if the endpoint
    rejects a request or answers in another form, RuntimeError if the last attempt fails.
    """
    values = {"prompt": prompts, "completion": completions}
    values |= {name: required(name, columns.get(name)) for name in settings.columns if name not in values}
    questions = [
        settings.prompt.format(**{name: column[index] for name, column in values.items()})
        for index in range(len(completions))
    ]

    async def ask_all() -> list[float | None]:
        free = asyncio.Semaphore(settings.concurrency)

        async def ask_one(question: str) -> float | None:
            async with free:
                return await with_retries(
                    "judge", partial(ask, settings, question), settings.timeout_s, settings.retries
                )

        return await asyncio.gather(*map(ask_one, questions))

    rounds = math.ceil(len(questions) / settings.concurrency) + 1
    longest_s = rounds * (settings.retries + 1) * (settings.timeout_s + retry_delay_s(settings.retries))
    with running(ask_all()) as scores:
        try:
            return scores.result(min(longest_s, threading.TIMEOUT_MAX))
        except FutureTimeoutError as error:
            raise RuntimeError(f"reward: judge at {settings.url} has not answered within {longest_s:.0f} s") from error


async def ask(settings: JudgeSettings, question: str) -> float | None:
    """The score in the endpoint's answer to one question; None if it has none."""
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    body = {
        "model": settings.model,
        "messages": [*system, {"role": "user", "content": question}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        **json.loads(settings.request or "{}"),
    }
    headers = {"Authorization": f"Bearer {os.environ[settings.api_key_env]}"} if settings.api_key_env else {}
    address = f"{settings.url.rstrip('/')}/chat/completions"
    content = checked_content(address, await fetch(address, json.dumps(body).encode(), headers))
    try:
        text = json.loads(content)["choices"][0]["message"]["content"] or ""
        return score_of(text, settings)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{address} must return OpenAI's chat completion; it returned {content[:200]!r}") from error


def score_of(text: Any, settings: JudgeSettings) -> float | None:
    """The first group of the last match of `settings.score`, divided by `settings.divide_by`; None for no number."""
    matches = [*re.finditer(settings.score, text)]
    try:
        return float(matches[-1].group(1)) / settings.divide_by if matches else None
    except (TypeError, ValueError):  # a group that took no part, or a text that is no number
        return None
