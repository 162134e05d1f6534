"""Messages of conversations and their tool calls, in the forms in which data sets have them."""

import json
from typing import Any

Messages = list[dict[str, Any]]


def is_message(value: Any) -> bool:
    """Whether a value is {"role": text, "content": text, ...}; a message with tool calls may lack the content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls") or []
    return isinstance(value.get("content"), str | None if calls else str) and all(map(is_tool_call, calls))


def is_tool_call(value: Any) -> bool:
    """Whether a value is {"function": {"name": text, "arguments": ...}, ...}, or such a function by itself."""
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: with content, without the empty keys that tables add, and with the
    arguments of tool calls as objects (OpenAI's form has JSON text).
    """
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    if "tool_calls" in kept:
        kept["tool_calls"] = [plain_call(call) for call in kept["tool_calls"]]
    return {"role": kept.pop("role"), "content": "", **kept}


def plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    if "function" in call:
        return {**call, "function": plain_call(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": {} if arguments in (None, "") else parse_json(arguments) or arguments}


def parse_json(value: Any) -> Any:
    """A text parsed as JSON, None if it is no JSON; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
