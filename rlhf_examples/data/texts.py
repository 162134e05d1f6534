"""A record as the texts that a step learns from: its columns and conversations understood, its defects named."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf_examples.data.messages import Messages, is_message, parsed, plain_message

Part = str | Messages
NAMED = 3  # records that are named for each reason


COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages", "text")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # what a chat template gets of a record besides its messages
# In dialogues as HH-RLHF writes them, the prompt of a pair ends where the assistant begins its last turn in both.
LAST_TURN = re.compile(r".*^Assistant:", re.DOTALL | re.MULTILINE)


class BadRecord(Exception):
    """Why a record cannot be used, in words that all records with the same defect share."""


class MissingColumn(BadRecord):
    """That a record has none of some columns, by the names of COLUMNS."""

    def __init__(self, *names: str):
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class RecordFormat:
    """How records are read: which column of theirs is which of COLUMNS, and what stands around a prompt.

    margin_column: by how much the rewards of a pair should differ.
    input_template: a text prompt stands in it in the place of "{}"; empty: alone.
    chat_template_kwargs: a JSON object of what the chat template takes besides messages and tools; a record's column of
    that name goes before it.
    """

    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    messages_column: str = "messages"
    text_column: str = "text"
    margin_column: str = "margin"
    input_template: str = ""
    chat_template_kwargs: str = ""

    def __post_init__(self):
        if self.input_template and "{}" not in self.input_template:
            raise ValueError(f"input_template: {self.input_template!r} given; it must have {{}} for the prompt")
        if self.chat_template_kwargs and not isinstance(parsed(self.chat_template_kwargs), dict):
            raise ValueError(
                f"chat_template_kwargs: {self.chat_template_kwargs!r} given; it must be a JSON object, such as "
                '{"enable_thinking": false}'
            )

    @classmethod
    def of(cls, args: Any) -> "RecordFormat":
        """From a script's arguments of these names."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def column(self, name: str) -> str:
        """What a column of COLUMNS is called."""
        return getattr(self, f"{name}_column")

    def named(self, record: dict[str, Any]) -> dict[str, Any]:
        """The columns that are not empty, under the names of COLUMNS."""
        return {name: record[self.column(name)] for name in COLUMNS if record.get(self.column(name)) is not None}

    def margin(self, record: dict[str, Any]) -> float:
        """By how much a pair's rewards should differ; 0 where the record says nothing of it."""
        value = record.get(self.margin_column)
        if isinstance(value, bool) or not isinstance(value, int | float | None) or not math.isfinite(value or 0):
            raise BadRecord(f"{self.margin_column} is no finite number")
        return float(value or 0)

    def templated(self, prompt: str) -> str:
        """A text prompt as it stands in `input_template`; what is no prompt, of a text to learn as a whole, alone."""
        return self.input_template.replace("{}", prompt) if self.input_template and prompt else prompt

    def template_settings(self, record: dict[str, Any]) -> dict[str, Any]:
        """What the chat template gets besides a record's messages: `tools`, a list or that as JSON, and settings."""
        tools, own = (parsed(template_columns(record).get(name)) or None for name in TEMPLATE_COLUMNS)
        if not isinstance(tools, list | None) or not isinstance(own, dict | None):
            raise BadRecord("tools are no list, or chat_template_kwargs no object")
        return {**(parsed(self.chat_template_kwargs or "{}")), **(own or {}), **({"tools": tools} if tools else {})}

    def missing(self, names: tuple[str, ...], record: dict[str, Any]) -> BadRecord:
        """That a record has none of some columns, with those that it has and the flags that map them."""
        *most, last = (self.column(name) for name in names)
        flags = ", ".join(f"--{name}_column" for name in names)
        wanted = f"none of {', '.join(most)} and {last}" if most else f"no {last}"
        columns = ", ".join(sorted(record)) or "(none)"
        return BadRecord(f"{wanted} among the columns {columns}; {flags} can name another")


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

    messages: the prompt as a conversation, where a chat template has made the texts and written its special tokens;
    answers: what follows in each completion; settings: what the template has got besides.
    """

    prompt: str
    completions: tuple[str, ...]
    messages: Messages | None = None
    answers: tuple[Messages, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def templated(self) -> bool:
        """Whether a chat template has made the texts."""
        return self.messages is not None


def template_columns(record: dict[str, Any]) -> dict[str, Any]:
    """Those of TEMPLATE_COLUMNS that a record has."""
    return {name: record[name] for name in TEMPLATE_COLUMNS if record.get(name) is not None}


AS_NAMED = RecordFormat()  # columns of the names of COLUMNS


def texts_of(
    row: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase, record_format: RecordFormat = AS_NAMED
) -> Texts:
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
    try:
        prompt, *completions = FORMS[form](record_format.named(record))
    except MissingColumn as error:
        raise record_format.missing(error.names, record) from None
    if len(completions) == 2 and completions[0] == completions[1]:
        raise BadRecord("chosen equals rejected")
    if all(isinstance(part, str) for part in (prompt, *completions)):
        return Texts(record_format.templated(prompt), tuple(completions))
    if any(isinstance(part, str) for part in (prompt, *completions)):
        raise BadRecord("one field is a text and another a conversation")
    return templated(prompt, completions, tokenizer, record_format.template_settings(record))


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
    raise MissingColumn("completion", "chosen", "messages", "text")


def preference(record: dict) -> list[Part]:
    """Prompt, chosen and rejected; without a prompt it is what both begin with (TRL's implicit prompt).

    That of texts ends with the last "Assistant:" where there is one, else between words.
    """
    chosen, rejected = part(record, "chosen"), part(record, "rejected")
    if "prompt" in record and not repeated_prompt(record, chosen):
        return [part(record, "prompt"), chosen, rejected]
    if type(chosen) is not type(rejected):
        raise BadRecord("one field is a text and another a conversation")
    if chosen == rejected:
        raise BadRecord("chosen equals rejected")
    shared = chosen[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))]
    if isinstance(shared, str):  # up to a space, which belongs to the next word
        shared = (LAST_TURN.match(shared) or re.match(r"(.*(?=\s))?", shared, re.DOTALL)).group()
    not_empty(shared, "prompt")
    return [shared, *(not_empty(whole[len(shared) :], "completion") for whole in (chosen, rejected))]


def repeated_prompt(record: dict, whole: Any) -> bool:
    """Whether a record's prompt is a text that a conversation of it begins with, as in UltraFeedback's sets."""
    conversation = isinstance(whole, list) and all(map(is_message, whole[:1])) and whole
    return isinstance(record["prompt"], str) and bool(conversation) and whole[0]["role"] != "assistant"


def prompted(record: dict) -> list[Part]:
    """The prompt: of that name, else `messages` up to the assistant's last, else `text`, else the start of a pair."""
    for name in ("messages", "chosen"):
        if {"prompt", name} <= record.keys() and repeated_prompt(record, record[name]):
            return prompted({key: value for key, value in record.items() if key not in ("prompt", "text")})
    if "prompt" in record:
        return [part(record, "prompt")]
    if "messages" in record:
        messages = part(record, "messages")
        return [not_empty(messages[:-1] if messages[-1]["role"] == "assistant" else messages, "prompt")]
    if "text" in record:
        return [part(record, "text")]
    if "chosen" in record:
        return preference(record)[:1]
    raise MissingColumn("prompt", "messages", "text")


FORMS = {"supervised": supervised, "turns": supervised, "preference": preference, "prompt": prompted}


def part(record: dict, name: str) -> Part:
    """A field that is a text or a conversation, and not empty."""
    if name not in record:
        raise MissingColumn(name)
    value = record[name]
    if isinstance(value, list) and all(map(is_message, value)):
        value = [plain_message(message) for message in value]
        for message in value:
            encodable(json.dumps(message, ensure_ascii=False), name)
        return not_empty(value, name)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is neither a text nor a list of messages")
    encodable(value, name)
    return not_empty(value, name)


def encodable(text: str, name: str) -> None:
    """Refuse half a character: JSON can write one ("\\ud800"), no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{name} is not Unicode") from None


def not_empty(value: Part, name: str) -> Part:
    """The value, which has more than white space, or calls tools."""
    whole = [value] if isinstance(value, str) else value
    texts = [one if isinstance(one, str) else one["content"] + "call" * len(one.get("tool_calls", [])) for one in whole]
    if not any(text.strip() for text in texts):
        raise BadRecord(f"empty {name}")
    return value


def templated(
    prompt: Messages,
    answers: list[Messages],
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any] | None = None,
) -> Texts:
    """A conversation as the tokenizer's chat template writes it; the prompt ends where the assistant begins.

    settings: what the template takes besides messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the set is of conversations, and the tokenizer has no chat template; set one, or give texts")
    settings = settings or {}
    start = rendered(tokenizer, prompt, settings, add_generation_prompt=True)
    wholes = [rendered(tokenizer, prompt + answer, settings) for answer in answers]
    if not all(whole.startswith(start) for whole in wholes):
        raise BadRecord("the chat template writes the prompt in another way where an answer follows")
    return Texts(start, tuple(whole[len(start) :] for whole in wholes), prompt, tuple(answers), settings)


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    settings: dict[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """A conversation as the chat template writes it. Raises BadRecord where the template refuses it."""
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **settings
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise BadRecord(f"the chat template refuses it: {error}") from error
