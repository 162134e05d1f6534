"""OpenAI's chat messages to token ids and back: chat template, response parser, and a session's earlier turns."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.environments.chat_template import ChatTemplate, Messages, RejectedMessages
from hybrid.environments.episodes import ChatFormat
from hybrid.environments.message_environment import HISTORIES, conversation_kind
from hybrid.serving.protocol import ApiError, ChatRequest, shortened
from hybrid.serving.sessions import Session, digests

MAX_FORMATS = 64  # tools and template settings whose templates are kept


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation before the next turn.

    text: as the template renders it.  ids: its tokens, or a session's tokens and what follows them.
    messages: as templates take them.  context: what else they are rendered with.
    """

    format: ChatFormat
    messages: Messages
    text: str
    ids: list[int]
    context: tuple[Any, ...]
    parses_calls: bool

    def message_of(self, ids: list[int], finish_reason: str, cut_text: str | None) -> dict[str, Any]:
        """Return the assistant message of sampled tokens.

        cut_text: the text before a stop string, if there was one; calls are then not looked for.
        """
        if cut_text is not None:
            return {"role": "assistant", "content": cut_text}
        text_ids = self.format.template.without_end(ids) if finish_reason == "stop" else ids
        message, _ = self.format.turn_of(text_ids, self.text, self.parses_calls)
        calls = [{"id": f"call_{uuid.uuid4().hex[:24]}", **call} for call in message.get("tool_calls") or []]
        return {**message, "tool_calls": calls} if calls else message

    def digest(self, message: dict[str, Any]) -> str:
        """Return the digest of the conversation with the next turn."""
        return digests([*self.messages, message], *self.context)[-1]


class Chats:
    """Makes prompts of chat requests.

    history: as `MessageEnvironment` takes it, for sessions whose template rewrites earlier turns.
    Raises ValueError for another history.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, history: str):
        if history not in HISTORIES:
            raise ValueError(f"history: {history!r} given; it must be one of {', '.join(map(repr, HISTORIES))}")
        self.tokenizer, self.history = tokenizer, history
        self.formats: dict[str, ChatFormat] = {}

    def prompt(self, request: ChatRequest, session: Session | None) -> ChatPrompt:
        """Return the prompt of a request. Raises ApiError for what the chat template refuses."""
        messages = template_messages(request.messages)
        context = (request.tools, request.chat_template_kwargs)
        chat_format = self.format_of(*context)
        try:
            text = chat_format.template.render(messages, add_generation_prompt=True)
            ids = self.continued(chat_format, messages, text, session, context) if session else None
        except RejectedMessages as error:
            raise ApiError(f"messages: the chat template refuses them: {error}", param="messages") from error
        if ids is None:
            ids = chat_format.template.encode(text)
        parses_calls = bool(request.tools) and request.tool_choice == "auto"
        return ChatPrompt(chat_format, messages, text, ids, context, parses_calls)

    def continued(
        self, chat_format: ChatFormat, messages: Messages, text: str, session: Session, context: tuple[Any, ...]
    ) -> list[int] | None:
        """Return the tokens of the latest recorded turn in a conversation, as sampled, and of what follows it.

        None if no turn of the conversation was recorded, or the template rewrites it and history is "template".
        """
        chain = digests(messages, *context)
        for index in reversed(range(len(messages))):
            message = messages[index]
            turn = session.turn_of(chain[index], message) if message["role"] == "assistant" else None
            if turn is None:
                continue
            template, before = chat_format.template, messages[:index]
            if self.history == "template":
                sampled = self.tokenizer.decode(template.without_end(turn.token_ids))
                if template.is_rewritten(turn.prompt, before, turn.message, text, sampled):
                    return None
            following = template.following_ids(before, turn.message, messages[index + 1 :], turn.token_ids[-1])
            return [*turn.prompt_ids, *turn.token_ids, *following]
        return None

    def format_of(self, tools: list[dict[str, Any]], settings: dict[str, Any]) -> ChatFormat:
        """Return the template and the parser for tools and template settings. Raises ApiError if there are none."""
        key = json.dumps([tools, settings], sort_keys=True)
        if key not in self.formats:
            if len(self.formats) >= MAX_FORMATS:
                self.formats.pop(next(iter(self.formats)))
            try:
                template = ChatTemplate(self.tokenizer, checked_tools(tools), settings)
                self.formats[key] = conversation_kind(template, None)
            except ValueError as error:
                raise ApiError(str(error), param="tools" if tools else "messages") from error
        return self.formats[key]


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools. Raises ApiError for one that is no function with a name."""
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                f'tools: {shortened(tool)} given; it must be {{"type": "function", "function": {{"name": ...}}}}',
                param="tools",
            )
    return tools


def template_messages(messages: Sequence[dict[str, Any]]) -> Messages:
    """Return OpenAI's messages as chat templates take them: texts, and objects as the arguments of calls. Tool messages
    get the names of their calls. Raises ApiError for a message of another form."""
    names: dict[str, str] = {}
    results = []
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(f"{place}.role: {role!r} given; it must be a text, such as 'user'", param=place)
        kept = {name: value for name, value in message.items() if value is not None and name != "refusal"}
        kept |= {"role": "system" if role == "developer" else role, "content": text_of(message.get("content"), place)}
        if calls := kept.pop("tool_calls", None):
            kept["tool_calls"] = [call_of(call, place) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in kept["tool_calls"] if "id" in call}
        if role == "tool" and "name" not in kept and (name := names.get(str(message.get("tool_call_id")))):
            kept["name"] = name
        results.append(kept)
    return results


def text_of(content: Any, place: str) -> str:
    """Return a message's content, a text or a list of parts, as text. Raises ApiError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"{place}.content: {shortened(part)} given; it must be a text, or text parts", param=place)
    return "".join(part["text"] for part in parts)


def call_of(call: Any, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. Raises ApiError for one of another form."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(function["name"], str):
            raise TypeError
        return {**call, "type": "function", "function": {**function, "arguments": arguments}}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ApiError(
            f"{place}.tool_calls: {shortened(call)} given; it must have a function's name, and its arguments as JSON",
            param=place,
        ) from error
