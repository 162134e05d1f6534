"""Text as tokens arrive: the oracle is the tokenizer's text of all of them."""

import random

import pytest

from hybrid.serving.text_stream import TextStream
from tests.rlhf_examples.chat_models import tokenizer_of

TEXTS = ["plain words, spaces  and\nlines", "é中文 🙂 mixed 𝔘nicode 🧑‍🚀 end", "x" * 300, ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("merged", ["", "plain words words spaces and lines " * 20])
def test_pieces_join_to_the_whole_text(text, merged):
    tokenizer = tokenizer_of("qwen2_5", merged)
    ids = tokenizer(text)["input_ids"]
    draw = random.Random(0)
    for _ in range(5):
        stream, pieces, left = TextStream(tokenizer), [], [*ids, tokenizer.eos_token_id]
        while left:
            size = draw.randrange(1, 5)
            piece, left = left[:size], left[size:]
            pieces.append(stream.push(piece, None if left else "stop"))
        assert "".join(pieces) == stream.text == text
        assert stream.ids == [*ids, tokenizer.eos_token_id]
        assert not any("\ufffd" in piece for piece in pieces), "no half of a character is shown"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(size):
    tokenizer = tokenizer_of("qwen2_5")
    ids = tokenizer("Thought: six\nObservation: 7")["input_ids"]
    stream = TextStream(tokenizer, ["\nObservation:", "never"])
    shown = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert stream.stopped and "".join(shown) == stream.text == "Thought: six"
    assert tokenizer.decode(stream.ids) == "Thought: six\nObservation:", "up to the token that completed it"


def test_the_begin_of_a_stop_string_is_held_back_and_comes_later():
    tokenizer = tokenizer_of("qwen2_5")
    stream = TextStream(tokenizer, ["ENDING"])
    assert [stream.push(tokenizer(text)["input_ids"]) for text in ("aEN", "D", "x")] == ["a", "", "ENDx"]
    assert stream.push(tokenizer("yE")["input_ids"], "length") == "yE", "nothing follows"


def test_of_two_stop_strings_the_first_in_the_text_counts():
    stream = TextStream(tokenizer_of("qwen2_5"), ["bcd", "c"])
    stream.push(tokenizer_of("qwen2_5")("abcd")["input_ids"])
    assert stream.text == "ab"


def test_unfinished_characters_do_not_hold_text_for_ever():
    """A random model writes bytes that are no text; at the end all of them are shown."""
    tokenizer = tokenizer_of("qwen2_5")
    byte = tokenizer("é")["input_ids"][0]
    stream = TextStream(tokenizer)
    shown = [stream.push([byte]) for _ in range(200)]
    assert sum(map(len, shown)) > 100
    stream.push([byte], "length")
    assert stream.text == tokenizer.decode([byte] * 201)
