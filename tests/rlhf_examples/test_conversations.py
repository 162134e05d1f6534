"""Conversations end where rollouts end, in the forms of the families that write something behind an answer's end."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hybrid import SamplingParams
from rlhf_examples import rollouts
from rlhf_examples.conversations import end_with_turns, turn_end
from rlhf_examples.data import tokenised
from rlhf_examples.pairs import as_record
from rlhf_examples.records import load_records
from tests.rlhf_examples.chat_tokenizers import FAMILIES, tokenizer_of

ASK = [{"role": "user", "content": "Hi there"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("Well\nhello ", "No"))


@pytest.fixture
def rows_of(tmp_path):
    """`rows_of(record, form, tokenizer)`: the record written as JSONL, and read and tokenised."""

    def make(record: dict, form: str, tokenizer, **settings) -> dict:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(record))
        rows = load_records(str(path), cache_dir=tmp_path / "cache")
        (row,) = tokenised(rows, tokenizer, form, cache_dir=tmp_path / "cache", **settings).rows
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
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_a_template_that_ends_no_turn_gets_the_tokenizers_end(rows_of):
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    row = rows_of({"messages": ASK + BAD}, "supervised", tokenizer)
    assert tokenizer.decode(row["completion_ids"]) == "No\n<|end_of_text|>"
    assert turn_end(tokenizer) == tokenizer.eos_token_id


def test_without_a_template_no_turn_ends():
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = None
    assert turn_end(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end(tokenizer) is None


@pytest.mark.parametrize("family", ["gemma", "llama3"])
def test_pairs_of_a_models_own_answers_have_one_start_token(family, rows_of):
    """As `pairs.py` writes them, and `reward_model.py` and `dpo.py` read them."""
    tokenizer = tokenizer_of(family)
    prompt = rows_of({"prompt": ASK}, "prompt", tokenizer)
    pair = {"prompt": prompt["prompt"], "chosen": "Hello", "rejected": "No"}
    row = rows_of(as_record(pair, prompt["messages"]), "preference", tokenizer)
    assert row["prompt_ids"] == prompt["prompt_ids"]
    assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(row["chosen_ids"]) == f"Hello{FAMILIES[family][1]}"


def test_pairs_of_texts_stay_texts(rows_of):
    tokenizer = tokenizer_of("llama3")
    pair = {"prompt": "Once", "chosen": " upon", "rejected": " again"}
    assert as_record(pair, rows_of({"prompt": "Once"}, "prompt", tokenizer)["messages"]) == pair


def test_texts_that_hold_start_and_end_get_no_second_ones(rows_of):
    tokenizer = tokenizer_of("llama3")
    text = "<|begin_of_text|>Once"
    row = rows_of({"prompt": text, "completion": " upon<|end_of_text|>"}, "supervised", tokenizer)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == f"{text} upon<|end_of_text|>"


def test_rollouts_end_with_turns(monkeypatch):
    asked = []
    policy = SimpleNamespace(device="cpu", rollout=lambda ids, mask, params, *_, **__: asked.append(params))
    monkeypatch.setattr(rollouts, "of_one_width", lambda batch, pad_token_id: batch)
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
    end_with_turns(model, tokenizer)
    end_with_turns(model, tokenizer)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn_end(tokenizer)]
