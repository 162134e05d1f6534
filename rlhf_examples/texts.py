"""A record as the texts that a step learns from: its columns and conversations understood, its defects named."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]
Part = str | Messages
NAMED = 3  # records that are named for each reason


class BadRecord(Exception):
    """Why a record cannot be used, in words that all records with the same defect share."""


@dataclass
class LeftOut:
    """The records that cannot be used: how many for which reason, and where the first ones stand.

    total: records looked at, good ones too.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)
    total: int = 0

    def usable(self, source: str, number: int, reason: str) -> bool:
        """Count a record; gives whether there is no reason against it."""
        self.total += 1
        if not reason:
            return True
        self.counts[reason] += 1
        if len(named := self.first.setdefault(reason, [])) < NAMED:
            named.append(f"{source}, record {number}")
        return False

    def __str__(self) -> str:
        head = f"{self.counts.total()} of {self.total} records left out"
        reasons = self.counts.most_common()
        return "; ".join([head, *(f"{count} × {text} ({', '.join(self.first[text])})" for text, count in reasons)])


@dataclass(frozen=True)
class Texts:
    """A prompt and what may follow it.

    messages: the prompt as a conversation, where a chat template has made the texts and written its special tokens.
    """

    prompt: str
    completions: tuple[str, ...]
    messages: Messages | None = None

    @property
    def templated(self) -> bool:
        """Whether a chat template has made the texts."""
        return self.messages is not None


def texts_of(row: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """The texts of a raw row in one of FORMS; conversations by the tokenizer's chat template.

    Raises BadRecord with the reason, ValueError for a conversation where the tokenizer has no template.
    """
    if row["problem"]:
        raise BadRecord(row["problem"])
    try:
        record = json.loads(row["record"])
    except ValueError:
        raise BadRecord("not JSON") from None
    if not isinstance(record, dict):
        raise BadRecord("not an object with named fields")
    prompt, *completions = FORMS[form]({name: value for name, value in record.items() if value is not None})
    if len(completions) == 2 and completions[0] == completions[1]:
        raise BadRecord("chosen equals rejected")
    if all(isinstance(part, str) for part in (prompt, *completions)):
        return Texts(prompt, tuple(completions))
    if any(isinstance(part, str) for part in (prompt, *completions)):
        raise BadRecord("one field is a text and another a conversation")
    return templated(prompt, completions, tokenizer)


def supervised(record: dict) -> list[Part]:
    """Prompt and completion: of those names, else `messages` up to the assistant's last, else all of `text`.

    A pair's `chosen` is a completion too: DeepSpeed-Chat's first step learns from those.
    """
    if "messages" in record:
        messages = part(record, "messages")
        if messages[-1]["role"] != "assistant":
            raise BadRecord("the last message is not the assistant's")
        return [not_empty(messages[:-1], "prompt"), messages[-1:]]
    if "completion" in record:
        return [part(record, "prompt"), part(record, "completion")]
    if "chosen" in record:
        return preference(record)[:2] if "rejected" in record else [part(record, "prompt"), part(record, "chosen")]
    if "text" in record:
        return ["", part(record, "text")]
    raise BadRecord("none of completion, chosen, messages and text")


def preference(record: dict) -> list[Part]:
    """Prompt, chosen and rejected; without a prompt it is what both begin with (TRL's implicit prompt)."""
    chosen, rejected = part(record, "chosen"), part(record, "rejected")
    if "prompt" in record:
        return [part(record, "prompt"), chosen, rejected]
    if type(chosen) is not type(rejected):
        raise BadRecord("one field is a text and another a conversation")
    if chosen == rejected:
        raise BadRecord("chosen equals rejected")
    shared = chosen[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))]
    if isinstance(shared, str):  # up to a space, which belongs to the next word
        shared = re.match(r"(.*(?=\s))?", shared, re.DOTALL).group()
    not_empty(shared, "prompt")
    return [shared, *(not_empty(whole[len(shared) :], "completion") for whole in (chosen, rejected))]


def prompted(record: dict) -> list[Part]:
    """The prompt: of that name, else `messages` up to the assistant's last, else `text`, else the start of a pair."""
    if "prompt" in record:
        return [part(record, "prompt")]
    if "messages" in record:
        messages = part(record, "messages")
        return [not_empty(messages[:-1] if messages[-1]["role"] == "assistant" else messages, "prompt")]
    if "text" in record:
        return [part(record, "text")]
    if "chosen" in record:
        return preference(record)[:1]
    raise BadRecord("none of prompt, messages and text")


FORMS = {"supervised": supervised, "preference": preference, "prompt": prompted}


def part(record: dict, name: str) -> Part:
    """A field that is a text or a conversation, and not empty."""
    if name not in record:
        raise BadRecord(f"no {name}")
    value = record[name]
    if isinstance(value, list) and all(is_message(message) for message in value):
        for message in value:
            encodable(message["content"], name)
        return not_empty(value, name)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is neither a text nor a list of messages")
    encodable(value, name)
    return not_empty(value, name)


def is_message(value: Any) -> bool:
    """Whether something is {"role": text, "content": text, ...}."""
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def encodable(text: str, name: str) -> None:
    """Refuse half a character: JSON can write one ("\\ud800"), no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{name} is not Unicode") from None


def not_empty(value: Part, name: str) -> Part:
    """The value, which has more than white space."""
    texts = [value] if isinstance(value, str) else [message["content"] for message in value]
    if not any(text.strip() for text in texts):
        raise BadRecord(f"empty {name}")
    return value


def templated(prompt: Messages, completions: list[Messages], tokenizer: PreTrainedTokenizerBase) -> Texts:
    """A conversation as the tokenizer's chat template writes it; the prompt ends where the assistant begins."""
    if tokenizer.chat_template is None:
        raise ValueError("the set is of conversations, and the tokenizer has no chat template; set one, or give texts")
    try:
        start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        wholes = [tokenizer.apply_chat_template(prompt + messages, tokenize=False) for messages in completions]
    except jinja2.TemplateError as error:
        raise BadRecord(f"the chat template refuses it: {error}") from error
    if not all(whole.startswith(start) for whole in wholes):
        raise BadRecord("the chat template writes the prompt in another way where an answer follows")
    return Texts(start, tuple(whole[len(start) :] for whole in wholes), prompt)
