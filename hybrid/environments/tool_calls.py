"""Tool calls in sampled turns: parsed by the tokenizer's response template, run, and answered, errors included."""

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from hybrid.environments.chat_template import PROBE, TURN_MARK, ChatTemplate
from hybrid.runtime.background_loop import call

# A call as families write it: a pattern of the template's rendering of it, and transformers' response template for it.
# "{end}" stands for the turn's end token. By row: JSON between tags (Qwen 2.5, Qwen 3, Hermes), a JSON object alone
# (Llama 3.1 to 3.3), parameters in tags (Qwen 3.5, 3.6 and 3.8), keys and values in tags (GLM-4.5 and later), channels
# (gpt-oss), and JSON with its own marks for texts (Gemma 4).
REASONING = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
# Values as their text: the tool's schema, not a guess, tells "7" from 7.
TEXT_VALUES = {"name": "text"}
NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL_FORMATS: list[tuple[str, dict[str, Any]]] = [
    (
        r'<tool_call>\s*\{"name":',
        {
            "reasoning_content": REASONING,
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    ),
    (
        r'\{"name": "[^"]*", "parameters":',
        {
            "tool_calls": {
                "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"\}{end}\s*",
                "repeats": True,
                "content": "json",
                "transform": NAMED_CALL,
            },
        },
    ),
    (
        r"<tool_call>\s*<function=",
        {
            "reasoning_content": REASONING,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": TEXT_VALUES,
                },
                "transform": NAMED_CALL,
            },
        },
    ),
    (
        rf"<tool_call>{TURN_MARK}\s*<arg_key>",
        {
            "reasoning_content": REASONING,
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                    "value_parser": TEXT_VALUES,
                },
                "transform": NAMED_CALL,
            },
        },
    ),
    (
        rf"to=functions\.{TURN_MARK}",
        {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"(?:<\|end\|>|{end})\s*",
                "content": "text",
            },
            "tool_calls": {  # the name before the channel, as in the template, or in it, as models write it too
                "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?\s*"
                r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                "close_pattern": r"(?:<\|call\|>|{end})\s*",
                "repeats": True,
                "content": "json",
                "transform": NAMED_CALL,
            },
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>",
                "close_pattern": r"(?:<\|return\|>|{end})\s*",
                "content": "text",
            },
        },
    ),
    (
        rf"<\|tool_call>call:{TURN_MARK}\{{",
        {
            "reasoning_content": {
                "open": "<|channel>thought\n",
                "close_pattern": r"<channel\|>\s*",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close_pattern": r"<tool_call\|>\s*",
                "repeats": True,
                "content": "json",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                "transform": NAMED_CALL,
            },
        },
    ),
]
# What a family's turn may follow, other than its generation prompt: Gemma 4 goes on after a tool's result.
TURN_STARTS = {r"<|tool_call>": r"<tool_response\|>"}


class MalformedCall(ValueError):
    """A turn contains a tool call that cannot be parsed; the message says why."""


@dataclass(frozen=True)
class ToolResult:
    """A tool's answer as text, and whether it is an error."""

    name: str
    content: str
    failed: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        return {"role": "tool", "name": self.name, "content": self.content}


class TurnParser:
    """Sampled turns as messages.

    response_template: transformers' description of a turn; None: the tokenizer's own, else the one of CALL_FORMATS that
        fits the chat template.
    Raises ValueError if `has_tools` and there is none of them.
    """

    def __init__(self, template: ChatTemplate, has_tools: bool, response_template: dict | None = None):
        self.template = template
        self.end_text = template.tokenizer.convert_ids_to_tokens(template.turn_end)
        own = response_template or getattr(template.tokenizer, "response_template", None)
        self.response_template = own or (known_response_template(template) if has_tools else None)

    def parse(self, ids: list[int], prompt: str) -> dict[str, Any]:
        """Return the assistant message of a turn's tokens, its end token excluded.

        prompt: the rendered prompt of the turn, of which the response template sees what belongs to the turn.
        Raises MalformedCall with the reason if a tool call cannot be parsed.
        """
        tokenizer = self.template.tokenizer
        if self.response_template is None:
            return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        text = tokenizer.decode(ids) + self.end_text
        try:
            message = tokenizer.parse_response(
                text, self.response_template, prefix=prompt, tools=self.template.settings["tools"]
            )
            message = {"role": "assistant", "content": "", **message}
            if "tool_calls" in message:
                message["tool_calls"] = [checked_call(given) for given in message["tool_calls"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # what content parsers raise
            raise MalformedCall(f"{type(error).__name__}: {error}") from error
        return message

    def plain(self, ids: list[int]) -> dict[str, Any]:
        """Return the assistant message with a turn's text as it is, for turns that cannot be parsed."""
        return {"role": "assistant", "content": self.template.tokenizer.decode(ids, skip_special_tokens=True)}


def known_response_template(template: ChatTemplate) -> dict[str, Any]:
    """Return the response template of CALL_FORMATS for a chat template. Raises ValueError if none fits."""
    tool = {"type": "function", "function": {"name": TURN_MARK, "arguments": {TURN_MARK: 1}}}
    text = template.render([PROBE[0], {"role": "assistant", "content": "", "tool_calls": [tool]}])
    end = re.escape(template.tokenizer.convert_ids_to_tokens(template.turn_end))
    for pattern, fields in CALL_FORMATS:
        if re.search(pattern, text):
            content = {"close_pattern": end + r"\s*", "content": "text"}
            fields = {name: with_end(field, end) for name, field in fields.items()}
            fields.setdefault("content", content)
            return {"defaults": {"role": "assistant"}, **turn_start(template, text), "fields": fields}
    raise ValueError(
        "tokenizer.response_template: None given, and the chat template writes tool calls in no known format; set "
        "tokenizer.response_template (transformers), or call trl.chat_template_utils.add_response_schema(tokenizer)"
    )


def turn_start(template: ChatTemplate, text: str) -> dict[str, str]:
    """Return the response template's entry for the text after which a turn begins: the generation prompt up to where it
    opens the turn's thoughts, which belong to the turn.

    text: a rendered call, which tells families apart.
    """
    prompt, start = template.render(PROBE[:1]), template.render(PROBE[:1], add_generation_prompt=True)
    anchor = start.removeprefix(prompt).partition("<think>")[0]
    others = [pattern for mark, pattern in TURN_STARTS.items() if mark in text]
    if not others:
        return {"start_anchor": anchor}
    return {"start_anchor_pattern": "|".join([re.escape(anchor), *others])}


def with_end(field: dict[str, Any], end: str) -> dict[str, Any]:
    """Return a field of a response template with the turn's end token, as a pattern, for "{end}"."""
    return {**field, "close_pattern": field["close_pattern"].replace("{end}", end)}


def checked_call(given: Any) -> dict[str, Any]:
    """Return a parsed call as {"type": "function", "function": {"name": text, "arguments": object}}; absent arguments
    are {}.

    Raises ValueError if it has another form.
    """
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a name and arguments")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {function['name']} must be an object")
    return {**given, "type": "function", "function": {**function, "arguments": arguments}}


def tool_schemas(tools: Sequence[Callable]) -> list[dict[str, Any]]:
    """Return the JSON schemas of functions, from type hints and Google-style docstrings.

    Raises ValueError for two tools of one name, and what transformers' get_json_schema raises.
    """
    names = [tool.__name__ for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tools: {twice} given more than once; a tool's name must be its own")
    return [get_json_schema(tool) for tool in tools]


async def run_calls(
    calls: Sequence[dict[str, Any]], tools: dict[str, Callable], timeout_s: float | None
) -> list[ToolResult]:
    """Return the results of a turn's calls, in the order of the calls.

    Functions run one after the other: the tools of an environment share its state. Coroutine functions run together,
    after them. An unknown name, a tool that raises and one that takes longer than `timeout_s` give an error.
    """
    results: dict[int, ToolResult] = {}
    functions = [given["function"] for given in calls]
    is_async = [inspect.iscoroutinefunction(tools.get(function["name"])) for function in functions]
    for index, function in enumerate(functions):
        if not is_async[index]:
            results[index] = await run_call(function, tools, timeout_s)
    later = [index for index, waits in enumerate(is_async) if waits]
    together = await asyncio.gather(*(run_call(functions[index], tools, timeout_s) for index in later))
    results |= dict(zip(later, together, strict=True))
    return [results[index] for index in range(len(calls))]


async def run_call(function: dict[str, Any], tools: dict[str, Callable], timeout_s: float | None) -> ToolResult:
    """Return the result of one call; `run_calls` says what gives an error."""
    name = function["name"]
    if name not in tools:
        return ToolResult(name, error_text(f"Tool {name} not found."), True)
    try:
        result = await asyncio.wait_for(call(tools[name], **function["arguments"]), timeout_s)
        return ToolResult(name, unicode_text(str(result)))
    except asyncio.TimeoutError as error:  # of ours, or of the tool's own
        return ToolResult(name, error_text(f"TimeoutError: {str(error) or f'no result within {timeout_s} s'}"), True)
    except Exception as error:  # a tool may raise anything: the model reads it
        return ToolResult(name, error_text(f"{type(error).__name__}: {error}"), True)


def error_text(reason: str) -> str:
    """Return an error as the text of a message to the model, in TRL's form."""
    return unicode_text(str({"error": reason}))


def unicode_text(text: str) -> str:
    """Return a text with "?" for unpaired surrogates, which tokenizers cannot encode."""
    return text.encode("utf-8", "replace").decode()
