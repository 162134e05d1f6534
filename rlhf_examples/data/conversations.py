"""Tokens of texts and conversations; which of them the assistant wrote, and where its turns end."""

import re
from itertools import takewhile

from torch import nn
from transformers import PreTrainedTokenizerBase

from hybrid import cut_after_turn_end, turn_end_token
from rlhf_examples.data.texts import BadRecord, Texts, render

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the template's mark for the start of the assistant's text


def stop_at_turn_end(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add `turn_end_token` to the end tokens of a language model's generation configuration."""
    config, end = getattr(model, "generation_config", None), turn_end_token(tokenizer)
    if config is None or end is None:
        return
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    config.eos_token_id = list(dict.fromkeys([*ends, end]))


def assistant_mask(texts: Texts, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """1 for the tokens of every assistant turn, its end token included, else 0.

    texts: a conversation with one answer.  ids: its tokens, up to the end of the last turn.
    Uses the template's `{% generation %}` marks if it has them (TRL's training templates do), else the positions where
    the template begins and ends a turn. Raises BadRecord if those cannot be determined.
    """
    if GENERATION.search(tokenizer.chat_template):
        mask_by_marks = marked_tokens(texts, ids, tokenizer)
        if mask_by_marks is not None:
            return mask_by_marks
    messages, whole = texts.conversation, texts.prompt + texts.completions[0]
    mask = [0] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(tokenizer, messages[:index], texts.settings, add_generation_prompt=True)
            if not whole.startswith(before):
                raise BadRecord("the chat template renders the assistant's turns differently if other messages follow")
            begin = shared_length(ids, encode_text(before, tokenizer))
            end = end_of_turn(texts, index, begin, ids, tokenizer)
            mask[begin:end] = [1] * (end - begin)
    return mask


def marked_tokens(texts: Texts, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """`assistant_mask` from the template's own marks; None if the template's tokens differ from `ids`."""
    encoded = tokenizer.apply_chat_template(
        texts.conversation, return_dict=True, return_assistant_tokens_mask=True, **texts.settings
    )
    if encoded["input_ids"][: len(ids)] != ids:
        return None
    mask, end = encoded["assistant_masks"][: len(ids)], turn_end_token(tokenizer)
    return [int(is_assistant or (ids[i] == end and i > 0 and mask[i - 1])) for i, is_assistant in enumerate(mask)]


def end_of_turn(texts: Texts, index: int, begin: int, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in `ids` after the assistant turn of message number `index`, which starts at `begin`.

    Raises BadRecord if the template does not end the turn.
    """
    messages = texts.conversation
    if index == len(messages) - 1:
        return len(ids)
    through_turn = encode_text(render(tokenizer, messages[: index + 1], texts.settings), tokenizer)
    through_turn = cut_after_turn_end(through_turn, tokenizer)
    if ids[: len(through_turn)] == through_turn:
        return len(through_turn)
    end = turn_end_token(tokenizer)  # Qwen3 omits a turn's thoughts if other messages follow
    if end not in ids[begin:]:
        raise BadRecord("the chat template does not end the assistant's turns")
    return ids.index(end, begin) + 1


def encode_plain_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a plain text as `tokenizer(text)` makes them: with a start token only if the tokenizer adds one.

    A text that itself begins with the start token gets no second one.
    """
    ids, start = tokenizer(text)["input_ids"], tokenizer.bos_token_id
    return encode_text(text, tokenizer) if start is not None and ids[:2] == [start, start] else ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a text that already contains its special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def shared_length(left: list[int], right: list[int]) -> int:
    """The length of the longest common prefix of two token lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
