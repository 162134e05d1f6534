"""Reads the prompt and completions of a record from its columns and conversations, and reports the record's defects."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from rlhf_examples.data.messages import Messages, is_message, parse_json, plain_message

if TYPE_CHECKING:  # `--help` needs this file, and no transformers
    from transformers import PreTrainedTokenizerBase

Part = str | Messages
NAMED = 3  # records that are listed for each reason


COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages", "text")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns that a chat template gets in addition to the messages
# In HH-RLHF's dialogues the prompt of a pair ends where the assistant's last turn begins in both.
LAST_TURN = re.compile(r".*^Assistant:", re.DOTALL | re.MULTILINE)


class BadRecord(Exception):
    """Why a record cannot be used; the message is the same for all records with the same defect."""


class MissingColumn(BadRecord):
    """A record lacks these columns, given by their names in COLUMNS."""

    def __init__(self, *names: str):
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class RecordFormat:
    """The format of records: their names for COLUMNS, and a template for prompts.

    margin_column: by how much the rewards of a pair should differ.
    input_template: a text prompt replaces its "{}"; empty: the prompt is used alone.
    chat_template_kwargs: a JSON object of keyword arguments for the chat template; a record's column of that name takes
        precedence.
    Raises ValueError for a template without "{}", or if chat_template_kwargs is no JSON object.
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

    def __post_init__(self) -> None:
        if self.input_template and "{}" not in self.input_template:
            raise ValueError(f"input_template: {self.input_template!r} given; it must have {{}} for the prompt")
        if self.chat_template_kwargs and not isinstance(parse_json(self.chat_template_kwargs), dict):
            raise ValueError(
                f"chat_template_kwargs: {self.chat_template_kwargs!r} given; it must be a JSON object, such as "
                '{"enable_thinking": false}'
            )

    @classmethod
    def from_args(cls, args: Any) -> RecordFormat:
        """From a script's arguments with the same names."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def column(self, name: str) -> str:
        """The records' name for a column of COLUMNS."""
        return getattr(self, f"{name}_column")

    def named(self, record: dict[str, Any]) -> dict[str, Any]:
        """The columns that are not empty, under their names in COLUMNS."""
        return {name: record[self.column(name)] for name in COLUMNS if record.get(self.column(name)) is not None}

    def margin(self, record: dict[str, Any]) -> float:
        """By how much a pair's rewards should differ; 0 without a margin. Raises BadRecord if it is no finite
        number.
        """
        value = record.get(self.margin_column)
        if isinstance(value, bool) or not isinstance(value, int | float | None) or not math.isfinite(value or 0):
            raise BadRecord(f"{self.margin_column} is not a finite number")
        return float(value or 0)

    def apply_input_template(self, prompt: str) -> str:
        """A text prompt inserted into `input_template`; an empty prompt stays empty."""
        return self.input_template.replace("{}", prompt) if self.input_template and prompt else prompt

    def template_settings(self, record: dict[str, Any]) -> dict[str, Any]:
        """The chat template's arguments for a record: `tools` (a list, or its JSON) and keyword arguments.

        Raises BadRecord if tools are no list or chat_template_kwargs no object.
        """
        tools, record_kwargs = (parse_json(template_columns(record).get(name)) or None for name in TEMPLATE_COLUMNS)
        if not isinstance(tools, list | None) or not isinstance(record_kwargs, dict | None):
            raise BadRecord("tools is not a list, or chat_template_kwargs not an object")
        return {
            **(parse_json(self.chat_template_kwargs or "{}")),
            **(record_kwargs or {}),
            **({"tools": tools} if tools else {}),
        }

    def missing(self, names: tuple[str, ...], record: dict[str, Any]) -> BadRecord:
        """The error for a record without these columns, with the columns that it has and the flags that map them."""
        *first, last = (self.column(name) for name in names)
        flags = ", ".join(f"--{name}_column" for name in names)
        lacking = f"none of {', '.join(first)} and {last}" if first else f"no {last}"
        columns = ", ".join(sorted(record)) or "(none)"
        return BadRecord(f"{lacking} among the columns {columns}; name the column with {flags}")


@dataclass
class SkippedRecords:
    """Counts the records that cannot be used by reason, with the first ones of each reason.

    total: records checked, usable ones included.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)
    total: int = 0

    def usable(self, source: str, number: int, reason: str) -> bool:
        """Count a record; returns whether it can be used, which is when `reason` is empty."""
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
    """A prompt and its completions.

    messages: the prompt as a conversation, if a chat template has made the texts and written their special tokens.
    answers: the messages of each completion.  settings: the template's other arguments.
    """

    prompt: str
    completions: tuple[str, ...]
    messages: Messages | None = None
    answers: tuple[Messages, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def conversation(self) -> Messages:
        """The messages of the prompt and of the first completion."""
        assert self.messages is not None, "these texts are no conversation"
        return self.messages + self.answers[0]

    @property
    def is_conversation(self) -> bool:
        """Whether a chat template has made the texts."""
        return self.messages is not None


def template_columns(record: dict[str, Any]) -> dict[str, Any]:
    """The columns of TEMPLATE_COLUMNS that a record has."""
    return {name: record[name] for name in TEMPLATE_COLUMNS if record.get(name) is not None}


AS_NAMED = RecordFormat()  # the default column names


def texts_of(
    row: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase, record_format: RecordFormat = AS_NAMED
) -> Texts:
    """The texts of a raw row in one of FORMS; conversations are rendered by the tokenizer's chat template.

    Raises BadRecord with the reason, and ValueError for a conversation if the tokenizer has no template.
    """
    try:
        return texts_of_record(record_of(row), form, tokenizer, record_format)
    except RecursionError:  # of the JSON parser, or of the chat template
        raise BadRecord("nested too deeply") from None


def record_of(row: dict[str, Any]) -> dict[str, Any]:
    """The record of a raw row. Raises BadRecord if it could not be read, or is no JSON object."""
    if row["problem"]:
        raise BadRecord(row["problem"])
    try:
        record = json.loads(row["record"])
    except ValueError:
        raise BadRecord("not JSON") from None
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    return record


def texts_of_record(
    record: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase, record_format: RecordFormat
) -> Texts:
    """The result of `texts_of`, from a record."""
    try:
        parts: list[Any] = FORMS[form](record_format.named(record))
        prompt, *completions = parts
    except MissingColumn as error:
        raise record_format.missing(error.names, record) from None
    if len(completions) == 2 and completions[0] == completions[1]:
        raise BadRecord("chosen equals rejected")
    if all(isinstance(part, str) for part in (prompt, *completions)):
        return Texts(record_format.apply_input_template(prompt), tuple(completions))
    if any(isinstance(part, str) for part in (prompt, *completions)):
        raise BadRecord("one field is a text, another a conversation")
    return apply_chat_template(prompt, completions, tokenizer, record_format.template_settings(record))


def supervised(record: dict) -> list[Part]:
    """Prompt and completion: the columns of these names, else `messages` with the assistant's last one as the
    completion, else `text` with an empty prompt.

    A pair's `chosen` is a completion too: DeepSpeed-Chat's first step learns from those. Raises BadRecord.
    """
    if "messages" in record:
        messages = read_field(record, "messages")
        if messages[-1]["role"] != "assistant":
            raise BadRecord("the last message is not the assistant's")
        return [require_not_empty(messages[:-1], "prompt"), messages[-1:]]
    if "completion" in record:
        return [read_field(record, "prompt"), read_field(record, "completion")]
    if "chosen" in record:
        return (
            preference(record)[:2]
            if "rejected" in record
            else [read_field(record, "prompt"), read_field(record, "chosen")]
        )
    if "text" in record:
        return ["", read_field(record, "text")]
    raise MissingColumn("completion", "chosen", "messages", "text")


def preference(record: dict) -> list[Part]:
    """Prompt, chosen and rejected; without a prompt it is their common prefix (TRL's implicit prompt).

    The prefix of texts ends with the last "Assistant:" if there is one, else between words. Raises BadRecord.
    """
    chosen, rejected = read_field(record, "chosen"), read_field(record, "rejected")
    if "prompt" in record and not repeated_prompt(record, chosen):
        return [read_field(record, "prompt"), chosen, rejected]
    if type(chosen) is not type(rejected):
        raise BadRecord("one field is a text, another a conversation")
    if chosen == rejected:
        raise BadRecord("chosen equals rejected")
    shared = chosen[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))]
    if isinstance(shared, str):  # up to a space, which belongs to the next word
        at_word: Any = re.match(r"(.*(?=\s))?", shared, re.DOTALL)  # matches any text
        shared = (LAST_TURN.match(shared) or at_word).group()
    require_not_empty(shared, "prompt")
    return [shared, *(require_not_empty(whole[len(shared) :], "completion") for whole in (chosen, rejected))]


def repeated_prompt(record: dict, completion: Any) -> bool:
    """Whether a record's text prompt repeats the beginning of its conversation, as in UltraFeedback's sets."""
    conversation = isinstance(completion, list) and all(map(is_message, completion[:1])) and completion
    return isinstance(record["prompt"], str) and bool(conversation) and completion[0]["role"] != "assistant"


def prompt_only(record: dict) -> list[Part]:
    """The prompt: the column of that name, else `messages` without a final assistant message, else `text`, else that of
    a pair.

    Raises BadRecord if there is none.
    """
    for name in ("messages", "chosen"):
        if {"prompt", name} <= record.keys() and repeated_prompt(record, record[name]):
            return prompt_only({key: value for key, value in record.items() if key not in ("prompt", "text")})
    if "prompt" in record:
        return [read_field(record, "prompt")]
    if "messages" in record:
        messages = read_field(record, "messages")
        return [require_not_empty(messages[:-1] if messages[-1]["role"] == "assistant" else messages, "prompt")]
    if "text" in record:
        return [read_field(record, "text")]
    if "chosen" in record:
        return preference(record)[:1]
    raise MissingColumn("prompt", "messages", "text")


FORMS = {"supervised": supervised, "turns": supervised, "preference": preference, "prompt": prompt_only}


def read_field(record: dict, name: str) -> Any:
    """A field that is a text or a conversation. Raises BadRecord if it is missing, empty or anything else."""
    if name not in record:
        raise MissingColumn(name)
    value = record[name]
    if isinstance(value, list) and all(map(is_message, value)):
        value = [plain_message(message) for message in value]
        for message in value:
            require_unicode(json.dumps(message, ensure_ascii=False), name)
        return require_not_empty(value, name)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is neither a text nor a list of messages")
    require_unicode(value, name)
    return require_not_empty(value, name)


def require_unicode(text: str, name: str) -> None:
    """Raises BadRecord for an unpaired surrogate: JSON can contain one ("\\ud800"), tokenizers cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{name} is not Unicode") from None


def require_not_empty(value: Part, name: str) -> Part:
    """`value`. Raises BadRecord if it is only white space and has no tool calls."""
    whole = [value] if isinstance(value, str) else value
    texts = [
        item if isinstance(item, str) else item["content"] + "call" * len(item.get("tool_calls", [])) for item in whole
    ]
    if not any(text.strip() for text in texts):
        raise BadRecord(f"empty {name}")
    return value


def apply_chat_template(
    prompt: Messages,
    answers: list[Messages],
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any] | None = None,
) -> Texts:
    """A conversation rendered by the tokenizer's chat template; the prompt ends where the assistant's turn begins.

    settings: the template's other arguments.
    Raises ValueError if the tokenizer has no template, BadRecord if the template rejects the conversation or renders
    the prompt differently with an answer.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the records are conversations, and the tokenizer has no chat template; give chat_template, or text records"
        )
    settings = settings or {}
    start = render(tokenizer, prompt, settings, add_generation_prompt=True)
    wholes = [render(tokenizer, prompt + answer, settings) for answer in answers]
    if not all(whole.startswith(start) for whole in wholes):
        raise BadRecord("the chat template renders the prompt differently with an answer")
    return Texts(start, tuple(whole[len(start) :] for whole in wholes), prompt, tuple(answers), settings)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    settings: dict[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """A conversation rendered by the chat template. Raises BadRecord if the template rejects it."""
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **settings
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise BadRecord(f"the chat template rejects it: {error}") from error
