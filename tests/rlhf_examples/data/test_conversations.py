"""Conversations end where rollouts end, in the forms of the families that write something behind an answer's end."""

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from trl import pack_dataset

from hybrid import SamplingParams
from rlhf_examples import chat, pairs
from rlhf_examples.common import rollouts
from rlhf_examples.common.arguments import ChatArguments, PairsArguments, SFTArguments
from rlhf_examples.data.conversations import stop_at_turn_end, turn_end_token
from rlhf_examples.data.examples import PackedExamples, best_fit, collate_supervised, tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.data.texts import RecordFormat
from rlhf_examples.pairs import as_record
from tests.rlhf_examples.chat_models import FAMILIES, TEMPLATES, chat_model, tokenizer_of
from tests.rlhf_examples.scripts import run_here

ASK = [{"role": "user", "content": "Hi there"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("Well\nhello ", "No"))


@pytest.fixture
def rows_of(tmp_path):
    """`rows_of(record, form, tokenizer)`: the record written as JSONL, and read and tokenised."""

    def make(record: dict, form: str, tokenizer, **settings) -> dict:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(record))
        rows = load_records(str(path), cache_dir=tmp_path / "cache")
        (row,) = tokenize_records(rows, tokenizer, form, cache_dir=tmp_path / "cache", **settings).rows
        return row

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_ends_where_rollouts_end(family, rows_of):
    """The oracle is the template over the whole conversation, up to the token that ends the family's turns."""
    tokenizer, end = tokenizer_of(family), FAMILIES[family][1]
    row = rows_of({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, "preference", tokenizer)
    for name, answer in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
        whole = tokenizer.apply_chat_template(ASK + answer, tokenize=False)
        upto = whole[: whole.rindex(end) + len(end)]
        assert row["prompt_ids"] + row[name] == tokenizer(upto, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(row[name][-1:]) == end
    assert turn_end_token(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_a_template_that_ends_no_turn_gets_the_tokenizers_end(rows_of):
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    row = rows_of({"messages": ASK + BAD}, "supervised", tokenizer)
    assert tokenizer.decode(row["completion_ids"]) == "No\n<|end_of_text|>"
    assert turn_end_token(tokenizer) == tokenizer.eos_token_id


def test_without_a_template_no_turn_ends():
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = None
    assert turn_end_token(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end_token(tokenizer) is None


@pytest.mark.parametrize("family", ["gemma", "llama3"])
def test_pairs_of_a_models_own_answers_have_one_start_token(family, rows_of):
    """As `pairs.py` writes them, and `reward_model.py` and `dpo.py` read them."""
    tokenizer = tokenizer_of(family)
    prompt = rows_of({"prompt": ASK}, "prompt", tokenizer)
    pair = {"prompt": prompt["prompt"], "chosen": "Hello", "rejected": "No"}
    row = rows_of(as_record(pair, prompt), "preference", tokenizer)
    assert row["prompt_ids"] == prompt["prompt_ids"]
    assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(row["chosen_ids"]) == f"Hello{FAMILIES[family][1]}"


def test_pairs_keep_what_the_template_got(rows_of):
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


def test_pairs_of_a_script_are_conversations_that_a_reward_model_reads(ranks, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": ASK}) for _ in range(8)))
    model = chat_model(tmp_path / "model")
    assert ranks.run(make_pairs, model, str(tmp_path))[0]["pairs"] > 0
    rows = load_records(str(tmp_path / "pairs" / "pairs.jsonl"), cache_dir=tmp_path / "cache")
    tokenizer = tokenizer_of("gemma")
    for row in tokenize_records(rows, tokenizer, "preference", cache_dir=tmp_path / "cache").rows:
        assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
        assert row["chosen_ids"][-1] == row["rejected_ids"][-1] == turn_end_token(tokenizer)


def test_pairs_of_texts_stay_texts(rows_of):
    tokenizer = tokenizer_of("llama3")
    pair = {"prompt": "Once", "chosen": " upon", "rejected": " again"}
    assert as_record(pair, rows_of({"prompt": "Once"}, "prompt", tokenizer)) == pair


def test_texts_that_hold_start_and_end_get_no_second_ones(rows_of):
    tokenizer = tokenizer_of("llama3")
    text = "<|begin_of_text|>Once"
    row = rows_of({"prompt": text, "completion": " upon<|end_of_text|>"}, "supervised", tokenizer)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == f"{text} upon<|end_of_text|>"


def test_rollouts_end_with_turns(monkeypatch):
    asked = []
    policy = SimpleNamespace(device="cpu", rollout=lambda ids, mask, params, *_, **__: asked.append(params))
    monkeypatch.setattr(rollouts, "pad_to_common_width", lambda batch, pad_token_id: batch)
    params = SamplingParams(max_new_tokens=4, stop_token_ids=(7,))
    tokenizer = tokenizer_of("gemma")
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        rollouts.roll_out(policy, tokenizer, [{"prompt_ids": [1]}], torch.zeros(1), params)
    assert [one.stop_token_ids for one in asked] == [(7, tokenizer.convert_tokens_to_ids("<end_of_turn>")), (7,)]


def test_an_exported_model_ends_with_its_turns():
    tokenizer = tokenizer_of("gemma")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    stop_at_turn_end(model, tokenizer)
    stop_at_turn_end(model, tokenizer)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn_end_token(tokenizer)]


# Turns of the assistant's

TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Well\nhello"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "So it is"},
]


def learned(row: dict, tokenizer) -> list[str]:
    """The texts of the runs of tokens that are learned."""
    ids, runs = row["prompt_ids"] + row["completion_ids"], []
    for i, one in enumerate(row["assistant_mask"]):
        if one:
            runs += [] if i and row["assistant_mask"][i - 1] else [[]]
            runs[-1].append(ids[i])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_learned_with_its_end(family, rows_of):
    tokenizer, end = tokenizer_of(family), FAMILIES[family][1]
    row = rows_of({"messages": TURNS}, "turns", tokenizer)
    *first, last = learned(row, tokenizer)
    assert [text.strip() for text in first] == [f"Well\nhello{end}"]
    assert last.strip().removeprefix("<think>\n\n</think>\n\n") == f"So it is{end}"
    assert len(row["assistant_mask"]) == len(row["prompt_ids"] + row["completion_ids"])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_turns_are_those_that_trls_templates_mark(family, rows_of):
    """The oracle is the family's training template of TRL's, whose marks Hugging Face turns into a mask.

    Marks have white space around that no rollout writes: Qwen's newline behind the role, Gemma's behind the end; read
    by us they stay what they are. (Qwen3's has thoughts in earlier turns, which its own template has not.)
    """
    tokenizer = tokenizer_of(family)
    ours = rows_of({"messages": TURNS}, "turns", tokenizer)
    tokenizer.chat_template = (TEMPLATES / f"{family}_training.jinja").read_text()
    found = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ids = ours["prompt_ids"] + ours["completion_ids"]
    marked = {**ours, "assistant_mask": found["assistant_masks"][: len(ids)]}
    assert found["input_ids"][: len(ids)] == ids
    stripped = [[text.strip() for text in learned(row, tokenizer)] for row in (ours, marked)]
    assert stripped[0] == stripped[1]
    assert rows_of({"messages": TURNS}, "turns", tokenizer)["assistant_mask"] == marked["assistant_mask"]


def test_marks_of_a_template_go_before_what_we_find(rows_of):
    """A template that marks the first word alone; the end token is learned where what stands before it is."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert learned(rows_of({"messages": TURNS}, "turns", tokenizer), tokenizer) == ["We", "So"]
    short = [*TURNS[:3], {"role": "assistant", "content": "So"}]
    assert learned(rows_of({"messages": short}, "turns", tokenizer), tokenizer) == ["We", "So<|im_end|>"]


def test_a_text_is_a_turn_behind_its_prompt(rows_of):
    row = rows_of({"prompt": "a", "completion": "b"}, "turns", tokenizer_of("llama3"))
    assert row["assistant_mask"] == [0, 0, 1, 1]


def test_labels_are_of_the_turns(rows_of):
    tokenizer = tokenizer_of("gemma")
    row = rows_of({"messages": TURNS}, "turns", tokenizer)
    batch = collate_supervised([row, {**row, "assistant_mask": row["assistant_mask"][:-1] + [0]}], 0, False)
    for labels, last in zip(batch["labels"], (0, 1), strict=True):
        assert (labels != -100).sum() == sum(row["assistant_mask"]) - last
        assert torch.equal(labels[labels != -100], batch["input_ids"][0][labels != -100])


def test_a_template_that_hides_where_turns_begin_is_named(rows_of):
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = (
        "{% if messages | length == 1 %}New: {% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders the assistant's turns differently if other messages follow"):
        rows_of({"messages": TURNS}, "turns", tokenizer)


# Tools, and settings of templates

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
def test_calls_of_tools_are_learned_in_every_form(form, rows_of):
    """As TRL's sets have them, as OpenAI writes them, and as a table does, which has every key in every message. The
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
    whole = tokenizer.apply_chat_template(CALLS, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) + "\n" == whole
    call, answer = learned(row, tokenizer)
    assert json.loads(call.partition("<tool_call>")[2].partition("</tool_call>")[0]) == CALL and call.endswith(end)
    assert answer == f"It is.{end}"
    assert rows_of({**record, "messages": record["messages"][:2]}, "supervised", tokenizer)["completion_ids"]


@pytest.mark.parametrize(
    "calls", [[{"function": {"arguments": {}}}], [{"name": 3}], ["weather"], [{"function": "weather"}], "weather", []]
)
def test_a_call_that_is_none_is_named(calls, rows_of):
    message = {"role": "assistant", "tool_calls": calls}
    with pytest.raises(ValueError, match="messages is neither a text nor a list of messages"):
        rows_of({"messages": [CALLS[0], message]}, "supervised", tokenizer_of("qwen2_5"))


def test_settings_reach_the_template(rows_of):
    """Of the run, and of a record, which go before it."""
    tokenizer = tokenizer_of("qwen3")
    for settings, own, thinking in (("", {}, False), ('{"enable_thinking": false}', {}, True)) + (
        ('{"enable_thinking": false}', {"chat_template_kwargs": {"enable_thinking": True}}, False),
        ("", {"chat_template_kwargs": '{"enable_thinking": false}'}, True),
    ):
        record_format = RecordFormat(chat_template_kwargs=settings)
        row = rows_of({"prompt": ASK, **own}, "prompt", tokenizer, record_format=record_format)
        assert row["prompt"].endswith("<think>\n\n</think>\n\n") == thinking
    with pytest.raises(ValueError, match=r"chat_template_kwargs: '\[1\]' given; it must be a JSON object, such as"):
        RecordFormat(chat_template_kwargs="[1]")


# Packing


def test_packs_are_trls():
    """The oracle is TRL's `pack_dataset`, "bfd": as many packs, as full. (Which of equally full ones takes a row is
    left to each.)"""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (200,), generator=generator).tolist()
    theirs = pack_dataset(Dataset.from_dict({"input_ids": [[0] * n for n in lengths]}), 64, "bfd")["seq_lengths"]
    packs = best_fit(lengths, 64)
    assert sorted(i for pack in packs for i in pack) == list(range(200))
    assert sorted(sum(lengths[i] for i in pack) for pack in packs) == sorted(map(sum, theirs))


def test_packs_hold_every_example_once_a_pass(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * (i + 1)}) + "\n" for i in range(20)))
    rows = load_records(str(path), cache_dir=tmp_path / "cache")
    examples = tokenize_records(rows, tokenizer_of("llama3"), "supervised", cache_dir=tmp_path / "cache")
    packs = PackedExamples.of(examples, 40)
    assert len(packs) < len(examples) == 20
    one_pass = list(islice(packs.ordered(seed=1), len(packs)))
    assert sorted(row["number"] for pack in one_pass for row in pack) == list(range(1, 21))
    assert all(sum(len(row["prompt_ids"] + row["completion_ids"]) for row in pack) <= 40 for pack in one_pass)
    assert list(islice(packs.ordered(1, 3), 2)) == one_pass[3:5]


def packed_losses(folder: str) -> tuple[float, float]:
    """Of an evaluation and a step over the same records, one a sequence and packed."""
    settings = {
        "max_steps": 1,
        "eval_every": 1,
        "max_seq_len": 64,
        "padding_free": True,
        "data_path": [f"{folder}/x.jsonl"],
    }
    settings |= {"eval_data_path": [f"{folder}/x.jsonl"], "per_device_train_batch_size": 4, "eval_rows": 16}
    found = run_here("sft", {**settings, "packing": True, "output_dir": f"{folder}/packed"})
    return found["before_eval_loss"], found["loss"]


def test_packed_records_do_not_see_each_other(ranks, tmp_path):
    """A step on packs of all records has the loss of an evaluation of them, a record a row."""
    lines = (json.dumps({"text": f"anna found a red ball {'anna ' * i}"}) for i in range(16))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    alone, packed = ranks.run(packed_losses, str(tmp_path))[0]
    assert packed == pytest.approx(alone, rel=1e-5)


def test_packing_needs_what_keeps_records_apart():
    for settings in ({}, {"padding_free": True, "streaming": True}):
        with pytest.raises(ValueError, match="packing: true given with padding_free: "):
            SFTArguments(packing=True, **settings)


def test_chat_gives_the_template_its_settings():
    """Qwen3 is told not to think by an empty thought in front of its answer."""
    tokenizer, asked = tokenizer_of("qwen3"), [{"role": "user", "content": "why?"}]

    class Engine:
        def generate(self, ids, **settings):
            prompts.append(tokenizer.decode(ids[0]))
            return ids

    prompts = []
    for settings in ("", '{"enable_thinking": false}'):
        chat.answer(Engine(), tokenizer, asked, ChatArguments(path="x", chat_template_kwargs=settings))
    expected = [
        tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **settings)
        for settings in ({}, {"enable_thinking": False})
    ]
    assert prompts == expected and expected[0] != expected[1]
    with pytest.raises(ValueError, match="chat_template_kwargs: '1' given; it must be a JSON object"):
        ChatArguments(path="x", chat_template_kwargs="1")
