"""Which tokens of a conversation the assistant wrote, and where its turns end, by the tokenizer's chat template."""

import re
from itertools import takewhile

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_examples.data.texts import BadRecord, Texts, rendered, templated

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the template's mark for the start of the assistant's text
PROBE = [{"role": "user", "content": "question"}], [{"role": "assistant", "content": "answer"}]


def through_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of an assistant's turn up to its end token, where rollouts stop; what a template writes after it is
    cut off.

    Qwen, Gemma and Zephyr write a newline there, Phi-3 a second end token. The end is the last token of the first run
    of special tokens after the answer; if there is none, as in Alpaca's format, the tokenizer's end token is appended.
    """
    first = len(tokens)
    while first and not tokenizer.decode(tokens[first - 1 : first], skip_special_tokens=True).strip():
        first -= 1
    end = 0
    for place, token in enumerate(tokens[first:], start=first + 1):
        if tokenizer.decode([token]).strip():
            end = place
        elif end:
            break
    if end or tokenizer.eos_token_id is None:
        return tokens[: end or len(tokens)]
    return [*tokens, tokenizer.eos_token_id]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an assistant's turn in the chat template; None without a template, or if the template
    rejects a question with an answer.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        (completion,) = templated(PROBE[0], [PROBE[1]], tokenizer).completions
    except BadRecord:
        return None
    return through_end(tokens_of_text(completion, tokenizer), tokenizer)[-1]


def end_with_turns(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add `turn_end` to the end tokens of a language model's generation configuration."""
    config, end = getattr(model, "generation_config", None), turn_end(tokenizer)
    if config is None or end is None:
        return
    own = config.eos_token_id
    own = [] if own is None else [own] if isinstance(own, int) else list(own)
    config.eos_token_id = list(dict.fromkeys([*own, end]))


def assistant_mask(known: Texts, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """1 for the tokens of every assistant turn, its end token included, else 0.

    known: a conversation with one answer.  ids: its tokens, up to the end of the last turn.
    Uses the template's `{% generation %}` marks if it has them (TRL's training templates do), else the positions where
    the template begins and ends a turn. Raises BadRecord if those cannot be determined.
    """
    if GENERATION.search(tokenizer.chat_template):
        marked = marked_tokens(known, ids, tokenizer)
        if marked is not None:
            return marked
    messages, whole = known.messages + known.answers[0], known.prompt + known.completions[0]
    mask = [0] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = rendered(tokenizer, messages[:place], known.settings, add_generation_prompt=True)
            if not whole.startswith(before):
                raise BadRecord("the chat template writes the assistant's turns in another way where others follow")
            begin = shared_length(ids, tokens_of_text(before, tokenizer))
            end = end_of_turn(known, place, begin, ids, tokenizer)
            mask[begin:end] = [1] * (end - begin)
    return mask


def marked_tokens(known: Texts, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """`assistant_mask` from the template's own marks; None if the template's tokens differ from `ids`."""
    found = tokenizer.apply_chat_template(
        known.messages + known.answers[0], return_dict=True, return_assistant_tokens_mask=True, **known.settings
    )
    if found["input_ids"][: len(ids)] != ids:
        return None
    mask, end = found["assistant_masks"][: len(ids)], turn_end(tokenizer)
    return [int(one or (ids[i] == end and i > 0 and mask[i - 1])) for i, one in enumerate(mask)]


def end_of_turn(known: Texts, place: int, begin: int, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in `ids` after the assistant turn of message number `place`, which starts at `begin`.

    Raises BadRecord if the template does not end the turn.
    """
    messages = known.messages + known.answers[0]
    if place == len(messages) - 1:
        return len(ids)
    upto = tokens_of_text(rendered(tokenizer, messages[: place + 1], known.settings), tokenizer)
    upto = through_end(upto, tokenizer)
    if ids[: len(upto)] == upto:
        return len(upto)
    end = turn_end(tokenizer)  # Qwen3 omits a turn's thoughts if other messages follow
    if end not in ids[begin:]:
        raise BadRecord("the chat template does not end the assistant's turns")
    return ids.index(end, begin) + 1


def tokens_of_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a text that already contains its special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def shared_length(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix of two token lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
