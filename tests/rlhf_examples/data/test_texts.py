"""A record's columns and conversations as texts, and the reason for every bad record."""

import json

import pytest

from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.data.texts import BadRecord, RecordFormat, SkippedRecords, texts_of

CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Grüß dich 🙂"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("hello", "go"))
NONE_OF_PROMPTS = (
    "none of prompt, messages and text among the columns {}; name the column with --prompt_column, "
    "--messages_column, --text_column"
)
NO_OTHER = "no {0} among the columns {1}; name the column with --{0}_column"
DIALOGUE = "\n\nHuman: Is it so?\n\nAssistant: It is: Assistant: is me.\n\nHuman: And?\n\nAssistant:"


@pytest.fixture
def tokenizer():
    made = synthetic_tokenizer()
    made.chat_template = CHAT
    return made


def row(record) -> dict:
    return {"source": "x", "number": 1, "record": json.dumps(record), "problem": ""}


def raw(text: str, problem: str = "") -> dict:
    return {"source": "x", "number": 1, "record": text, "problem": problem}


@pytest.mark.parametrize(
    ("form", "record", "prompt", "completions"),
    [
        ("supervised", {"prompt": "p", "completion": " c"}, "p", (" c",)),
        ("supervised", {"prompt": "p", "chosen": " c"}, "p", (" c",)),
        ("supervised", {"prompt": "p", "chosen": " c", "rejected": " r"}, "p", (" c",)),
        ("supervised", {"chosen": "H: hi\n\nA: yes", "rejected": "H: hi\n\nA: no"}, "H: hi\n\nA:", (" yes",)),
        ("supervised", {"chosen": f"{DIALOGUE} I am", "rejected": f"{DIALOGUE} I can"}, DIALOGUE, (" I am",)),
        ("supervised", {"text": "t"}, "", ("t",)),
        ("supervised", {"text": "t", "completion": None}, "", ("t",)),
        ("preference", {"prompt": "p", "chosen": "c", "rejected": "r", "score": 3}, "p", ("c", "r")),
        ("preference", {"chosen": "say gold", "rejected": "say good"}, "say", (" gold", " good")),
        ("preference", {"chosen": "a b", "rejected": "a b c"}, "a", (" b", " b c")),
        ("preference", {"chosen": f"{DIALOGUE} I", "rejected": f"{DIALOGUE} I do"}, DIALOGUE, (" I", " I do")),
        ("prompt", {"prompt": "p", "answer": "7"}, "p", ()),
        ("prompt", {"chosen": f"{DIALOGUE} I am", "rejected": f"{DIALOGUE} I can"}, DIALOGUE, ()),
        ("prompt", {"text": "t"}, "t", ()),
        ("prompt", {"chosen": "say gold", "rejected": "say good"}, "say", ()),
    ],
)
def test_prompt_and_completions_of_text_columns(form, record, prompt, completions, tokenizer):
    texts = texts_of(row(record), form, tokenizer)
    assert (texts.prompt, texts.completions, texts.is_conversation) == (prompt, completions, False)


@pytest.mark.parametrize(
    ("form", "record", "conversations"),
    [
        ("supervised", {"messages": ASK + GOOD}, [ASK + GOOD]),
        ("supervised", {"messages": ASK + BAD + ASK + GOOD}, [ASK + BAD + ASK + GOOD]),
        ("supervised", {"prompt": ASK, "completion": GOOD}, [ASK + GOOD]),
        ("preference", {"prompt": ASK, "chosen": GOOD, "rejected": BAD}, [ASK + GOOD, ASK + BAD]),
        ("preference", {"chosen": ASK + GOOD, "rejected": ASK + BAD}, [ASK + GOOD, ASK + BAD]),
        ("prompt", {"prompt": ASK}, []),
        ("prompt", {"messages": ASK}, []),
        ("prompt", {"messages": ASK + GOOD}, []),
        ("prompt", {"chosen": ASK + GOOD, "rejected": ASK + BAD}, []),
        ("preference", {"prompt": "Hi", "chosen": ASK + GOOD, "rejected": ASK + BAD}, [ASK + GOOD, ASK + BAD]),
        ("prompt", {"prompt": "Hi", "messages": ASK + GOOD, "chosen": ASK + GOOD, "rejected": ASK + BAD}, []),
        ("prompt", {"prompt": "Hi", "chosen": ASK + GOOD, "rejected": ASK + BAD}, []),
    ],
)
def test_conversations_are_rendered_by_the_template(form, record, conversations, tokenizer):
    """The oracle is the template itself, over the whole conversation."""
    texts = texts_of(row(record), form, tokenizer)
    prompt_messages = (conversations or [ASK + GOOD])[0][:-1]
    assert texts.is_conversation
    assert texts.prompt == tokenizer.apply_chat_template(prompt_messages, tokenize=False, add_generation_prompt=True)
    expected = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    assert [texts.prompt + completion for completion in texts.completions] == expected


@pytest.mark.parametrize(
    ("form", "broken", "reason"),
    [
        ("prompt", raw("{bad"), "not JSON"),
        ("prompt", raw(""), "not JSON"),
        ("prompt", raw('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deeply"),
        ("prompt", raw("", "not UTF-8"), "not UTF-8"),
        ("prompt", row([1]), "not a JSON object"),
        ("prompt", row("text"), "not a JSON object"),
        ("prompt", row({}), NONE_OF_PROMPTS.format(r"\(none\)")),
        ("prompt", row({"prompt": None}), NONE_OF_PROMPTS.format("prompt")),
        ("prompt", row({"prompt": " \n"}), "empty prompt"),
        ("prompt", row({"prompt": []}), "empty prompt"),
        ("prompt", row({"prompt": 3}), "prompt is neither a text nor a list of messages"),
        ("prompt", row({"prompt": {"type": "bytes"}}), "prompt is neither a text nor a list of messages"),
        ("prompt", row({"prompt": [{"role": "user"}]}), "prompt is neither a text nor a list of messages"),
        (
            "prompt",
            row({"prompt": [{"role": "user", "content": [1]}]}),
            "prompt is neither a text nor a list of messages",
        ),
        ("prompt", row({"prompt": [{"role": "user", "content": " "}]}), "empty prompt"),
        ("prompt", row({"prompt": "half \ud83d"}), "prompt is not Unicode"),
        ("prompt", row({"prompt": [{"role": "user", "content": "\ud83d"}]}), "prompt is not Unicode"),
        ("prompt", row({"prompt": [{"role": "tool", "content": "x"}]}), "the chat template rejects it: no tools"),
        ("prompt", row({"messages": GOOD}), "empty prompt"),
        ("prompt", row({"messages": []}), "empty messages"),
        (
            "supervised",
            row({"prompt": "p", "answer": "a"}),
            "none of completion, chosen, messages and text among the columns answer, prompt; name the column "
            "with --completion_column, --chosen_column, --messages_column, --text_column",
        ),
        (
            "supervised",
            row({"completion": "c"}),
            "no prompt among the columns completion; name the column with --prompt_column",
        ),
        ("supervised", row({"prompt": "p", "completion": ""}), "empty completion"),
        ("supervised", row({"prompt": "p", "completion": GOOD}), "one field is a text, another a conversation"),
        ("supervised", row({"messages": ASK}), "the last message is not the assistant's"),
        ("preference", row({"prompt": "p", "chosen": "c"}), NO_OTHER.format("rejected", "chosen, prompt")),
        ("preference", row({"prompt": "p", "rejected": "c"}), NO_OTHER.format("chosen", "prompt, rejected")),
        ("preference", row({"prompt": "p", "chosen": "c", "rejected": "c"}), "chosen equals rejected"),
        ("preference", row({"chosen": "p c", "rejected": "p c"}), "chosen equals rejected"),
        ("preference", row({"chosen": "a", "rejected": "b"}), "empty prompt"),
        ("preference", row({"chosen": ASK, "rejected": ASK + BAD}), "empty completion"),
        ("preference", row({"chosen": "a", "rejected": BAD}), "one field is a text, another a conversation"),
    ],
)
def test_bad_records_raise_with_a_reason(form, broken, reason, tokenizer):
    with pytest.raises(BadRecord, match=f"^{reason}$"):
        texts_of(broken, form, tokenizer)


@pytest.mark.parametrize(
    ("form", "columns", "record", "prompt", "completions"),
    [
        ("supervised", {"prompt": "question", "completion": "answer"}, {"question": "q", "answer": "a"}, "q", ("a",)),
        ("preference", {"chosen": "good", "rejected": "bad"}, {"good": "a b", "bad": "a c"}, "a", (" b", " c")),
        ("prompt", {"prompt": "question"}, {"question": "q", "prompt": "another", "text": "t"}, "q", ()),
        ("supervised", {"text": "content"}, {"content": "t"}, "", ("t",)),
        ("supervised", {"messages": "turns"}, {"turns": ASK + GOOD, "text": "t"}, None, ("hello</s>",)),
    ],
)
def test_renamed_columns(form, columns, record, prompt, completions, tokenizer):
    record_format = RecordFormat(**{f"{name}_column": other for name, other in columns.items()})
    texts = texts_of(row(record), form, tokenizer, record_format)
    assert prompt is None or texts.prompt == prompt
    assert texts.completions == completions


def test_the_error_names_the_columns_and_flags(tokenizer):
    with pytest.raises(
        BadRecord, match="^no ask among the columns a, completion; name the column with --prompt_column$"
    ):
        texts_of(row({"completion": "c", "a": "b"}), "supervised", tokenizer, RecordFormat(prompt_column="ask"))


def test_input_template_wraps_text_prompts(tokenizer):
    record_format = RecordFormat(input_template="Q: {}\nA:")
    assert texts_of(row({"prompt": "{p}"}), "prompt", tokenizer, record_format).prompt == "Q: {p}\nA:"
    assert texts_of(row({"text": "t"}), "supervised", tokenizer, record_format).prompt == ""
    with pytest.raises(ValueError, match="input_template: 'Q:' given; it must have {} for the prompt"):
        RecordFormat(input_template="Q:")


def test_a_template_that_changes_the_prompt_raises(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(BadRecord, match="the chat template renders the prompt differently with an answer"):
        texts_of(row({"prompt": ASK, "completion": GOOD}), "supervised", tokenizer)


def test_conversations_without_a_template_raise():
    with pytest.raises(ValueError, match="the records are conversations, and the tokenizer has no chat template"):
        texts_of(row({"prompt": ASK}), "prompt", synthetic_tokenizer())


def test_left_out_records_are_counted_and_the_first_named():
    skipped = SkippedRecords()
    reasons = ["", "empty prompt", "not JSON", "empty prompt", "", "empty prompt", "empty prompt"]
    usable = [skipped.usable("x.jsonl", number, reason) for number, reason in enumerate(reasons, start=1)]
    assert usable == [not reason for reason in reasons]
    assert str(skipped) == (
        "5 of 7 records left out; 4 × empty prompt (x.jsonl, record 2, x.jsonl, record 4, x.jsonl, record 6); "
        "1 × not JSON (x.jsonl, record 3)"
    )
