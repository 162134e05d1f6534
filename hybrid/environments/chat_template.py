"""Chat templates in rollouts of several turns: where a turn ends, what follows it, and what a later turn rewrites."""

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
# Stands in a rendered turn for its text. Plain letters: no template or JSON encoder changes them.
TURN_MARK = "TurnMark7f3a"


class RejectedMessages(ValueError):
    """The chat template cannot render these messages; the message is the template's own."""


def cut_after_turn_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of an assistant's turn up to its end token, where rollouts stop; what a template writes after
    it is cut off.

    Qwen, Gemma and Zephyr write a newline there, Phi-3 a second end token. The end is the last token of the first run
    of special tokens after the answer, or `turn_end_token` if the run has it; if there is none, as in Alpaca's format,
    the tokenizer's end token is appended.
    """
    begin, end = first_special_run(tokens, tokenizer)
    if end - begin > 1:  # Phi-3's tokenizer strips the newline between the two
        turn_end = turn_end_token(tokenizer)
        end = tokens.index(turn_end, begin) + 1 if turn_end in tokens[begin:end] else end
    if end or tokenizer.eos_token_id is None:
        return tokens[: end or len(tokens)]
    return [*tokens, tokenizer.eos_token_id]


def turn_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that ends an assistant's turn in the chat template, also if messages follow it; None without a
    template, or if the template rejects a question with an answer.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        prompt, *wholes = (
            render(tokenizer, PROBE[:1], add_generation_prompt=True),
            render(tokenizer, PROBE),
            render(tokenizer, [*PROBE, PROBE[0]]),
        )
    except RejectedMessages:
        return None
    if not wholes[0].startswith(prompt):
        return None
    last, followed = (encode_text(tokenizer, whole.removeprefix(prompt)) for whole in wholes)
    both = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, followed, strict=False))]
    for tokens in (both, last):  # gpt-oss ends the last turn by another token
        if end := first_special_run(tokens, tokenizer)[1]:
            return tokens[end - 1]
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else last[-1]


def first_special_run(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Where the first run of special tokens after a turn's text begins and ends; (0, 0) if there is none."""
    first = len(tokens)
    while first and not tokenizer.decode(tokens[first - 1 : first], skip_special_tokens=True).strip():
        first -= 1
    special = [index for index in range(first, len(tokens)) if tokenizer.decode([tokens[index]]).strip()]
    run = [index for number, index in enumerate(special) if index == special[0] + number]
    return (run[0], run[-1] + 1) if run else (0, 0)


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **settings: Any) -> str:
    """Return messages as the chat template's text. Raises RejectedMessages if the template cannot render them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except (jinja2.TemplateError, TypeError) as error:
        raise RejectedMessages(f"{type(error).__name__}: {error}") from error


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that already contains its special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class ChatTemplate:
    """A tokenizer's chat template with the tools and settings of one kind of conversation.

    turn_end: the token that ends an assistant's turn; the tokenizer's end token where the template writes none.
    tools: JSON schemas.  settings: the template's other arguments.
    Raises ValueError if the tokenizer has no chat template, or the template rejects a question with an answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = (), settings: dict | None = None
    ):
        self.tokenizer = tokenizer
        # None, not []: Llama 3.1's template writes its text about tools for an empty list, too.
        self.settings = {**(settings or {}), "tools": list(tools) or None}
        turn_end = turn_end_token(tokenizer)
        if turn_end is None:
            given = "none" if tokenizer.chat_template is None else "one that rejects a question with an answer"
            raise ValueError(
                f"tokenizer.chat_template: {given} given; conversations need a template that renders user and "
                "assistant messages, and an end token; set tokenizer.chat_template, or ask for plain completions"
            )
        self.turn_end = turn_end

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises RejectedMessages if the template cannot render it."""
        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **self.settings)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text."""
        return encode_text(self.tokenizer, text)

    def following_ids(
        self, messages: Messages, turn: dict[str, Any], replies: Messages, last_token: int | None
    ) -> list[int]:
        """Return the tokens between a sampled turn and the next one: of `replies` and of the next turn's start.

        messages: the conversation before `turn`, an assistant message.  last_token: the last one that was sampled, None
            if none was.
        The turn's end token comes first if it was not sampled: the turn was cut off at a limit, or ended with an end
        token that the template does not write. Nothing that was sampled is tokenized again: only the text after the
        turn's end is, and tokenizers split at special tokens, so these are the tokens of the whole conversation.
        """
        marked = mark_turn(turn)
        own = self.after_mark(
            [PROBE[0], marked]
        )  # how the turn ends; not over the whole conversation, which takes long
        tail = self.after_mark([*messages, marked, *replies], add_generation_prompt=True)
        own_ids, ids = self.encode(own), self.encode(tail)
        end = cut_after_turn_end(own_ids, self.tokenizer)[-1]
        if end in own_ids and end in ids:
            ids = ids[ids.index(end) + 1 :]
        elif end not in own_ids:  # the template writes no end token: the next turn's start ends this one
            ids = self.encode(tail.removeprefix(own.rstrip()))
        else:  # gpt-oss ends a turn by another token if messages follow it
            first = next((i for i, token in enumerate(ids) if self.is_special(token)), -1)
            ids = ids[first + 1 :]
        if ids[:1] == [last_token] and self.is_special(ids[0]):  # GLM stops at the next turn's start
            return ids[1:]
        return ids if last_token == end else [end, *ids]

    def after_mark(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Return the rendered text after TURN_MARK. Raises RejectedMessages if the template drops the marked
        message."""
        _, mark, tail = self.render(messages, add_generation_prompt).rpartition(TURN_MARK)
        if not mark:
            raise RejectedMessages("the chat template does not render an assistant message's text or tool calls")
        return tail

    def is_rewritten(self, before: str, messages: Messages, turn: dict[str, Any], after: str, sampled: str) -> bool:
        """Whether the template renders the conversation up to the end of `turn` differently once messages follow it.

        before: the rendered prompt of `turn`, the messages before it being `messages`.  after: the rendered prompt of
        the next turn.  sampled: the turn's text without its end token.
        Text is compared, not tokens, and white space does not count: another tokenization of the same text, or a call
        whose JSON has other spaces than the template's, is no rewriting.
        """
        if not after.startswith(before):
            return True
        turn_after = after[len(before) :]
        if without_spaces(turn_after).startswith(without_spaces(sampled)):
            return False
        as_last = self.render([*messages, turn]).removeprefix(before)
        end = self.tokenizer.convert_ids_to_tokens(self.turn_end)
        return not turn_after.startswith(as_last.partition(end)[0].rstrip())

    def without_end(self, ids: list[int]) -> list[int]:
        """Return sampled tokens without the end token that they end with, if they do: any special token."""
        ended = bool(ids) and (ids[-1] == self.turn_end or self.is_special(ids[-1]))
        return ids[:-1] if ended else ids

    def is_special(self, token: int) -> bool:
        """Whether a token is one that `decode(skip_special_tokens=True)` skips."""
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special

    def supports_tools(self) -> bool:
        """Whether the template renders a tool's name, its arguments and its result."""
        name, value, result = (f"{part}{TURN_MARK}" for part in ("name", "value", "result"))
        call = {"type": "function", "function": {"name": name, "arguments": {"argument": value}}}
        replies = [{"role": "tool", "name": name, "content": result}]
        try:
            text = self.render([PROBE[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *replies])
        except RejectedMessages:
            return False
        return all(part in text for part in (name, value, result))

    def error_role(self) -> str:
        """Return the role of a message about a malformed tool call: "tool" if the template takes one after a turn
        without calls, else "user"."""
        try:
            text = self.render([*PROBE, {"role": "tool", "name": "unknown", "content": TURN_MARK}])
        except RejectedMessages:
            return "user"
        return "tool" if TURN_MARK in text else "user"


def without_spaces(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())


def mark_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message whose last rendered part is TURN_MARK: its text, or the arguments of its last tool
    call."""
    if not turn.get("tool_calls"):
        return {**turn, "content": TURN_MARK}
    calls = copy.deepcopy(turn["tool_calls"])
    calls[-1]["function"]["arguments"] = {"mark": TURN_MARK}
    return {**turn, "tool_calls": calls}
