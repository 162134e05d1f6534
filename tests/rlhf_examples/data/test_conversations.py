"""Conversations are trained up to the token at which rollouts end, also for templates that write text after it."""

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from trl import pack_dataset

from hybrid import SamplingParams, turn_end_token
from rlhf_examples import chat, pairs
from rlhf_examples.common import rollouts
from rlhf_examples.common.arguments import ChatArguments, PairsArguments, SFTArguments
from rlhf_examples.data.conversations import stop_at_turn_end
from rlhf_examples.data.examples import PackedExamples, best_fit, collate_supervised, tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.data.texts import RecordFormat
from rlhf_examples.pairs import as_record
from tests.rlhf_examples.chat_models import FAMILIES, TEMPLATES, chat_model, tokenizer_of
from tests.rlhf_examples.scripts import run_in_this_rank

ASK = [{"role": "user", "content": "Hi there"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("Well\nhello ", "No"))


@pytest.fixture
def rows_of(tmp_path):
    """`rows_of(record, form, tokenizer)`: the record, written as JSONL, read and tokenized."""

    def make(record: dict, form: str, tokenizer, **settings) -> dict:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(record))
        rows = load_records(str(path), cache_dir=tmp_path / "cache")
        (row,) = tokenize_records(rows, tokenizer, form, cache_dir=tmp_path / "cache", **settings).rows
        return row

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_tokens_end_where_rollouts_end(family, rows_of):
    """The oracle is the template over the whole conversation, up to the family's turn end token."""
    tokenizer, end = tokenizer_of(family), FAMILIES[family][1]
    row = rows_of({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, "preference", tokenizer)
    for name, answer in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
        text = tokenizer.apply_chat_template(ASK + answer, tokenize=False)
        expected = text[: text.rindex(end) + len(end)]
        assert row["prompt_ids"] + row[name] == tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(row[name][-1:]) == end
    assert turn_end_token(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_a_template_without_an_end_of_turn_uses_the_eos_token(rows_of):
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    row = rows_of({"messages": ASK + BAD}, "supervised", tokenizer)
    assert tokenizer.decode(row["completion_ids"]) == "No\n<|end_of_text|>"
    assert turn_end_token(tokenizer) == tokenizer.eos_token_id


def test_without_a_template_there_is_no_turn_end_token():
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = None
    assert turn_end_token(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end_token(tokenizer) is None


@pytest.mark.parametrize("family", ["gemma", "llama3"])
def test_generated_pairs_have_one_bos_token(family, rows_of):
    """As written by `pairs.py` and read by `reward_model.py` and `dpo.py`."""
    tokenizer = tokenizer_of(family)
    prompt = rows_of({"prompt": ASK}, "prompt", tokenizer)
    pair = {"prompt": prompt["prompt"], "chosen": "Hello", "rejected": "No"}
    row = rows_of(as_record(pair, prompt), "preference", tokenizer)
    assert row["prompt_ids"] == prompt["prompt_ids"]
    assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(row["chosen_ids"]) == f"Hello{FAMILIES[family][1]}"


def test_pairs_keep_template_settings_and_tools(rows_of):
    tokenizer, record = tokenizer_of("qwen2_5"), {"prompt": ASK, "tools": [TOOL], "chat_template_kwargs": {"x": 1}}
    prompt = rows_of(record, "prompt", tokenizer)
    pair = as_record({"prompt": prompt["prompt"], "chosen": "Hello", "rejected": "No"}, prompt)
    assert (
        "weather" in prompt["prompt"] and rows_of(pair, "preference", tokenizer)["prompt_ids"] == prompt["prompt_ids"]
    )


def make_pairs(model: str, folder: str) -> dict:
    names = {"model_name_or_path": model, "output_dir": f"{folder}/pairs", "data_path": [f"{folder}/prompts.jsonl"]}
    reward = "tests.rlhf_examples.scripts:number_of_words"
    return pairs.run(PairsArguments(**names, reward=reward, rounds=2, max_answer_seq_len=12))


def test_pairs_of_conversations_train_a_reward_model(ranks, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": ASK}) for _ in range(8)))
    model = chat_model(tmp_path / "model")
    assert ranks.run(make_pairs, model, str(tmp_path))[0]["pairs"] > 0
    rows = load_records(str(tmp_path / "pairs" / "pairs.jsonl"), cache_dir=tmp_path / "cache")
    tokenizer = tokenizer_of("gemma")
    for row in tokenize_records(rows, tokenizer, "preference", cache_dir=tmp_path / "cache").rows:
        assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
        assert row["chosen_ids"][-1] == row["rejected_ids"][-1] == turn_end_token(tokenizer)


def test_pairs_of_plain_texts_stay_texts(rows_of):
    tokenizer = tokenizer_of("llama3")
    pair = {"prompt": "Once", "chosen": " upon", "rejected": " again"}
    assert as_record(pair, rows_of({"prompt": "Once"}, "prompt", tokenizer)) == pair


def test_bos_and_eos_are_not_added_twice(rows_of):
    tokenizer = tokenizer_of("llama3")
    text = "<|begin_of_text|>Once"
    row = rows_of({"prompt": text, "completion": " upon<|end_of_text|>"}, "supervised", tokenizer)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == f"{text} upon<|end_of_text|>"


def test_rollouts_stop_at_the_turn_end_token(monkeypatch):
    requests = []
    policy = SimpleNamespace(device="cpu", rollout=lambda ids, mask, params, *_, **__: requests.append(params))
    monkeypatch.setattr(rollouts, "pad_to_common_width", lambda batch, pad_token_id: batch)
    params = SamplingParams(max_new_tokens=4, stop_token_ids=(7,))
    tokenizer = tokenizer_of("gemma")
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        rollouts.roll_out(policy, tokenizer, [{"prompt_ids": [1]}], torch.zeros(1), params)
    assert [params.stop_token_ids for params in requests] == [
        (7, tokenizer.convert_tokens_to_ids("<end_of_turn>")),
        (7,),
    ]


def test_an_exported_model_stops_at_the_turn_end_token():
    tokenizer = tokenizer_of("gemma")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    stop_at_turn_end(model, tokenizer)
    stop_at_turn_end(model, tokenizer)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn_end_token(tokenizer)]


# Assistant turns

TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Well\nhello"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "So it is"},
]


def trained_texts(row: dict, tokenizer) -> list[str]:
    """The texts of consecutive trained tokens."""
    ids, runs = row["prompt_ids"] + row["completion_ids"], []
    for i, flag in enumerate(row["assistant_mask"]):
        if flag:
            runs += [] if i and row["assistant_mask"][i - 1] else [[]]
            runs[-1].append(ids[i])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_assistant_turn_is_trained_with_its_end_token(family, rows_of):
    tokenizer, end = tokenizer_of(family), FAMILIES[family][1]
    row = rows_of({"messages": TURNS}, "turns", tokenizer)
    *first, last = trained_texts(row, tokenizer)
    assert [text.strip() for text in first] == [f"Well\nhello{end}"]
    assert last.strip().removeprefix("<think>\n\n</think>\n\n") == f"So it is{end}"
    assert len(row["assistant_mask"]) == len(row["prompt_ids"] + row["completion_ids"])


WITH_TRAINING_TEMPLATE = [family for family in FAMILIES if (TEMPLATES / f"{family}_training.jinja").exists()]


@pytest.mark.parametrize("family", [family for family in WITH_TRAINING_TEMPLATE if family != "qwen3"])
def test_assistant_turns_match_trls_training_templates(family, rows_of):
    """The oracle is the family's training template from TRL, whose generation marks Hugging Face converts to a mask.

    TRL's marks include white space that no rollout generates: Qwen's newline after the role, Gemma's after the end;
    marks of a template are used unchanged. (TRL's template of Qwen3 keeps thoughts of earlier turns; the model's own
    does not.)"""
    tokenizer = tokenizer_of(family)
    row = rows_of({"messages": TURNS}, "turns", tokenizer)
    tokenizer.chat_template = (TEMPLATES / f"{family}_training.jinja").read_text()
    marked_by_trl = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ids = row["prompt_ids"] + row["completion_ids"]
    marked = {**row, "assistant_mask": marked_by_trl["assistant_masks"][: len(ids)]}
    assert marked_by_trl["input_ids"][: len(ids)] == ids
    stripped = [[text.strip() for text in trained_texts(row, tokenizer)] for row in (row, marked)]
    assert stripped[0] == stripped[1]
    assert rows_of({"messages": TURNS}, "turns", tokenizer)["assistant_mask"] == marked["assistant_mask"]


def test_generation_marks_of_a_template_have_priority(rows_of):
    """A template that marks only the first word; the end token is trained if the token before it is."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert trained_texts(rows_of({"messages": TURNS}, "turns", tokenizer), tokenizer) == ["We", "So"]
    short = [*TURNS[:3], {"role": "assistant", "content": "So"}]
    assert trained_texts(rows_of({"messages": short}, "turns", tokenizer), tokenizer) == ["We", "So<|im_end|>"]


def test_a_text_completion_is_one_turn(rows_of):
    row = rows_of({"prompt": "a", "completion": "b"}, "turns", tokenizer_of("llama3"))
    assert row["assistant_mask"] == [0, 1, 1]


def test_labels_cover_only_assistant_turns(rows_of):
    tokenizer = tokenizer_of("gemma")
    row = rows_of({"messages": TURNS}, "turns", tokenizer)
    batch = collate_supervised([row, {**row, "assistant_mask": row["assistant_mask"][:-1] + [0]}], 0, False)
    for labels, last in zip(batch["labels"], (0, 1), strict=True):
        assert (labels != -100).sum() == sum(row["assistant_mask"]) - last
        assert torch.equal(labels[labels != -100], batch["input_ids"][0][labels != -100])


def test_a_template_that_depends_on_later_turns_raises(rows_of):
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = (
        "{% if messages | length == 1 %}New: {% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders the assistant's turns differently if other messages follow"):
        rows_of({"messages": TURNS}, "turns", tokenizer)


# Tools and template settings

CALL = {"name": "weather", "arguments": {"city": "Bonn"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    {"role": "user", "content": "Is it warm in Bonn?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "name": "weather", "content": "20"},
    {"role": "assistant", "content": "It is."},
]


@pytest.mark.parametrize("form", ["objects", "JSON", "table"])
def test_tool_calls_of_every_format_are_trained(form, rows_of):
    """Tool calls as in TRL's sets, as JSON strings of OpenAI, and from a table, with every key in every message. The
    oracle is the template over the first."""
    tokenizer, end = tokenizer_of("qwen2_5"), "<|im_end|>"
    record = {"messages": CALLS, "tools": [TOOL]}
    if form != "objects":
        call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps(CALL["arguments"])}}
        record = {"messages": [CALLS[0], {**CALLS[1], "tool_calls": [call]}, *CALLS[2:]], "tools": json.dumps([TOOL])}
    if form == "table":
        empty = {"content": None, "tool_calls": None, "name": None}
        record["messages"] = [{**empty, **message} for message in record["messages"]]
    row = rows_of(record, "turns", tokenizer)
    expected = tokenizer.apply_chat_template(CALLS, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) + "\n" == expected
    call, answer = trained_texts(row, tokenizer)
    assert json.loads(call.partition("<tool_call>")[2].partition("</tool_call>")[0]) == CALL and call.endswith(end)
    assert answer == f"It is.{end}"
    assert rows_of({**record, "messages": record["messages"][:2]}, "supervised", tokenizer)["completion_ids"]


@pytest.mark.parametrize(
    "calls", [[{"function": {"arguments": {}}}], [{"name": 3}], ["weather"], [{"function": "weather"}], "weather", []]
)
def test_invalid_tool_calls_are_named(calls, rows_of):
    message = {"role": "assistant", "tool_calls": calls}
    with pytest.raises(ValueError, match="messages is neither a text nor a list of messages"):
        rows_of({"messages": [CALLS[0], message]}, "supervised", tokenizer_of("qwen2_5"))


def test_chat_template_kwargs_reach_the_template(rows_of):
    """Settings of the run and of a record; the record's have priority."""
    tokenizer = tokenizer_of("qwen3")
    for settings, of_record, thinking in (("", {}, False), ('{"enable_thinking": false}', {}, True)) + (
        ('{"enable_thinking": false}', {"chat_template_kwargs": {"enable_thinking": True}}, False),
        ("", {"chat_template_kwargs": '{"enable_thinking": false}'}, True),
    ):
        record_format = RecordFormat(chat_template_kwargs=settings)
        row = rows_of({"prompt": ASK, **of_record}, "prompt", tokenizer, record_format=record_format)
        assert row["prompt"].endswith("<think>\n\n</think>\n\n") == thinking
    with pytest.raises(ValueError, match=r"chat_template_kwargs: '\[1\]' given; it must be a JSON object, such as"):
        RecordFormat(chat_template_kwargs="[1]")


# Packing


def test_packing_matches_trl():
    """The oracle is TRL's `pack_dataset` with "bfd": the same number and sizes of packs. (Ties may be broken
    differently.)"""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (200,), generator=generator).tolist()
    expected = pack_dataset(Dataset.from_dict({"input_ids": [[0] * n for n in lengths]}), 64, "bfd")["seq_lengths"]
    packs = best_fit(lengths, 64)
    assert sorted(i for pack in packs for i in pack) == list(range(200))
    assert sorted(sum(lengths[i] for i in pack) for pack in packs) == sorted(map(sum, expected))


def test_packs_contain_every_example_once_per_epoch(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * (i + 1)}) + "\n" for i in range(20)))
    rows = load_records(str(path), cache_dir=tmp_path / "cache")
    examples = tokenize_records(rows, tokenizer_of("llama3"), "supervised", cache_dir=tmp_path / "cache")
    packs = PackedExamples.of(examples, 40)
    assert len(packs) < len(examples) == 20
    epoch = list(islice(packs.ordered(seed=1), len(packs)))
    assert sorted(row["number"] for pack in epoch for row in pack) == list(range(1, 21))
    assert all(sum(len(row["prompt_ids"] + row["completion_ids"]) for row in pack) <= 40 for pack in epoch)
    assert list(islice(packs.ordered(1, 3), 2)) == epoch[3:5]


def packed_losses(folder: str) -> tuple[float, float]:
    """Losses of an evaluation (one record per row) and of a step (packed) over the same records."""
    settings = {
        "max_steps": 1,
        "eval_every": 1,
        "max_seq_len": 64,
        "data_path": [f"{folder}/x.jsonl"],
    }
    settings |= {"eval_data_path": [f"{folder}/x.jsonl"], "per_device_train_batch_size": 4, "eval_rows": 16}
    metrics = run_in_this_rank("sft", {**settings, "packing": True, "output_dir": f"{folder}/packed"})
    return metrics["before_eval_loss"], metrics["loss"]


def test_packed_records_do_not_attend_to_each_other(ranks, tmp_path):
    """A step on packs of all records has the loss of their evaluation with one record per row."""
    lines = (json.dumps({"text": f"anna found a red ball {'anna ' * i}"}) for i in range(16))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    padded_loss, packed_loss = ranks.run(packed_losses, str(tmp_path))[0]
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)


def test_packing_of_streamed_records_raises():
    with pytest.raises(ValueError, match="packing: true given with streaming: true; it needs streaming: false"):
        SFTArguments(packing=True, streaming=True, max_steps=1)


def test_chat_passes_chat_template_kwargs():
    """Qwen3's template disables thinking by an empty thought before the answer."""
    tokenizer, messages = tokenizer_of("qwen3"), [{"role": "user", "content": "why?"}]
    speaker = chat.Speaker("x", None, tokenizer, 4096)
    prompts = []
    for settings in ("", '{"enable_thinking": false}'):
        chatting = chat.Chat([speaker], ChatArguments(path="x", chat_template_kwargs=settings), messages=[])
        chatting.messages = messages
        prompts.append(tokenizer.decode(chatting.prompt(speaker)[0]))
    expected = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
        for settings in ({}, {"enable_thinking": False})
    ]
    assert prompts == expected and expected[0] != expected[1]
    with pytest.raises(ValueError, match="chat_template_kwargs: '1' given; it must be a JSON object"):
        ChatArguments(path="x", chat_template_kwargs="1")
