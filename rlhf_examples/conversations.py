"""Where an assistant's turn ends in the tokens of a conversation, by the tokenizer's chat template."""

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_examples.texts import BadRecord, templated

PROBE = [{"role": "user", "content": "question"}], [{"role": "assistant", "content": "answer"}]


def through_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """An assistant's turn up to its end token, where rollouts end: what a template writes behind that is cut.

    Qwen, Gemma and Zephyr write a newline there, Phi-3 a second end token. The end is the last of the first special
    tokens in a row behind the answer; where there is none, as in Alpaca's form, the tokenizer's end token is added.
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
    """The token that ends an assistant's turn in the chat template; None without a template, or one that refuses a
    question with its answer."""
    if tokenizer.chat_template is None:
        return None
    try:
        (completion,) = templated(PROBE[0], [PROBE[1]], tokenizer).completions
    except BadRecord:
        return None
    return through_end(tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer)[-1]


def end_with_turns(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name `turn_end` among the end tokens of a language model's generation configuration, which is written with it."""
    config, end = getattr(model, "generation_config", None), turn_end(tokenizer)
    if config is None or end is None:
        return
    own = config.eos_token_id
    own = [] if own is None else [own] if isinstance(own, int) else list(own)
    config.eos_token_id = list(dict.fromkeys([*own, end]))
