"""Examples: tokenized as rollouts see them, cached, in an order that can be resumed, and padded."""

import itertools
import json
import os

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from rlhf_examples.data import examples as data
from rlhf_examples.data.examples import (
    RowStream,
    collate_preference,
    collate_prompts,
    collate_supervised,
    reward_columns,
    shuffled_order,
    tokenize_records,
)
from rlhf_examples.data.records import load_records
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.data.texts import RecordFormat
from tests.rlhf_examples.data.test_texts import ASK, CHAT, GOOD

PAIR = {"prompt": "anna found a red ball", "chosen": " in the garden .", "rejected": " in the river ."}


@pytest.fixture
def tokenizer():
    return synthetic_tokenizer()


@pytest.fixture
def examples(tmp_path, tokenizer):
    """`examples(records, form, ...)`: the records, written as JSONL, read and tokenized."""

    def make(records: list, form: str, tokenizer=tokenizer, streaming: bool = False, **settings):
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = load_records(str(path), streaming=streaming, cache_dir=tmp_path / "cache")
        return tokenize_records(rows, tokenizer, form, cache_dir=tmp_path / "cache", **settings)

    return make


def texts(count: int) -> list[dict]:
    """Records of distinct lengths."""
    return [{"prompt": "anna " * (i + 1), "answer": i} for i in range(count)]


def number_of(row: dict) -> int:
    return json.loads(row["columns"])["answer"]


def test_completions_have_an_end_token_and_no_start_token(examples, tokenizer):
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    (row,) = examples([PAIR], "preference").rows
    assert row["prompt_ids"] == tokenizer(PAIR["prompt"])["input_ids"]
    for name in ("chosen", "rejected"):
        assert row[f"{name}_ids"] == [*tokenizer(PAIR[name], add_special_tokens=False)["input_ids"], eos]
    (row,) = examples([PAIR], "supervised").rows
    assert (
        tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == "<s> anna found a red ball in the garden . </s>"
    )
    (row,) = examples([{"text": "anna found"}], "supervised").rows
    assert row["prompt_ids"] == [bos] and tokenizer.decode(row["completion_ids"]) == "anna found </s>"


def test_conversations_are_tokenized_as_their_template(examples, tokenizer):
    tokenizer.chat_template = CHAT
    (row,) = examples([{"messages": ASK + GOOD}], "supervised").rows
    expected = tokenizer.apply_chat_template(ASK + GOOD, tokenize=False)
    assert row["prompt_ids"] + row["completion_ids"] == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.bos_token_id not in row["prompt_ids"], "a bos token was added to a template without one"


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and the merge "ab"."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<s>", "</s>", "a", "b", "ab"))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_prompt_and_completion_are_tokenized_separately(examples):
    made = merging_tokenizer()
    assert made("ba" + "bb")["input_ids"] == [4, 5, 4], "the merge crosses the end of the prompt"
    (row,) = examples([{"prompt": "ba", "completion": "bb"}], "supervised", made).rows
    assert (row["prompt_ids"], row["completion_ids"]) == ([4, 3], [4, 4, 2])
    (row,) = examples([{"prompt": "bb", "completion": "ab"}], "supervised", made).rows
    assert (row["prompt_ids"], row["completion_ids"]) == ([4, 4], [5, 2])


@pytest.mark.parametrize("streaming", [False, True])
def test_records_that_are_too_long_are_left_out(streaming, examples):
    records = [PAIR, {**PAIR, "rejected": PAIR["rejected"] + " anna"}, {**PAIR, "chosen": " anna"}]
    longest = 1 + 5 + 4 + 1  # start, prompt, completion, end
    for max_length, kept in ((longest, [0, 2]), (longest + 1, [0, 1, 2]), (longest - 1, None), (0, [0, 1, 2])):
        if kept is None:
            with pytest.raises(ValueError, match=rf"3 × longer than {max_length} tokens"):
                list(examples(records, "preference", streaming=streaming, max_length=max_length).ordered(0))
            continue
        made = examples(records, "preference", streaming=streaming, max_length=max_length)
        rows = list(itertools.islice(made.ordered(0), len(kept)))
        assert sorted(row["number"] - 1 for row in rows) == kept


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_records_are_counted_and_skipped(streaming, examples):
    records = [PAIR, {"prompt": "anna"}, 7, {**PAIR, "rejected": PAIR["chosen"]}, {**PAIR, "chosen": ""}, PAIR]
    all_unknown = {"prompt": "anna", "chosen": "zebra", "rejected": "yak"}  # both <unk>
    made = examples([*records, all_unknown], "preference", streaming=streaming)
    rows = list(itertools.islice(made.ordered(seed=0), 5))  # into the third epoch of two rows
    assert {row["number"] for row in rows} == {1, 6}
    assert made.skipped.total == 7, "records were counted again in later epochs"
    assert made.skipped.counts == {
        "no chosen among the columns prompt; name the column with --chosen_column": 1,
        "not a JSON object": 1,
        "chosen equals rejected": 1,
        "empty chosen": 1,
        "chosen and rejected have the same tokens": 1,
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_of_only_bad_records_raises_with_reasons(streaming, examples):
    with pytest.raises(ValueError, match=r"no record can be used: 2 of 2 records left out; 1 × .*x.jsonl, record 1"):
        next(examples([{"prompt": ""}, {"text": 3}], "prompt", streaming=streaming).ordered(0))


def test_an_unknown_form_raises(examples):
    with pytest.raises(ValueError, match="form: 'sft' given; allowed: supervised, turns, preference, prompt"):
        examples([PAIR], "sft")


@pytest.mark.parametrize("position", [0, 1, 9, 10, 11, 35])
def test_prompt_order_resumes_at_any_position(position):
    order = list(itertools.islice(shuffled_order(10, seed=1), 60))
    assert [sorted(order[i : i + 10]) for i in range(0, 60, 10)] == [list(range(10))] * 6
    assert len({tuple(order[i : i + 10]) for i in range(0, 60, 10)}) == 6, "epochs have the same order"
    assert list(itertools.islice(shuffled_order(10, 1, position), 20)) == order[position : position + 20]
    assert order[:10] != list(itertools.islice(shuffled_order(10, seed=2), 10))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_stream_resumes(streaming, examples):
    dataset = examples(texts(7), "prompt", streaming=streaming)
    expected = [number_of(row) for row in itertools.islice(dataset.ordered(seed=3), 42)]
    assert [sorted(expected[i : i + 7]) for i in range(0, 42, 7)] == [list(range(7))] * 6
    assert len({tuple(expected[i : i + 7]) for i in range(0, 42, 7)}) > 1
    assert expected != [number_of(row) for row in itertools.islice(dataset.ordered(seed=4), 42)]
    assert [number_of(row) for row in itertools.islice(dataset.ordered(3, 10), 20)] == expected[10:30]
    stream = RowStream(dataset, seed=3)
    assert [number_of(row) for count in (6, 0, 1, 5) for row in stream.next(count)] == expected[:12]
    resumed = RowStream(dataset, seed=3)
    resumed.load_state_dict(stream.state_dict())
    assert [number_of(row) for row in resumed.next(20)] == expected[12:32]


def test_a_set_of_one_record_repeats(examples):
    dataset = examples([PAIR], "prompt")
    assert [row["number"] for row in itertools.islice(dataset.ordered(0), 3)] == [1, 1, 1]


def count_calls(monkeypatch) -> list:
    """A list with an entry for every tokenized record."""
    calls, real = [], data.tokenize_texts
    monkeypatch.setattr(data, "tokenize_texts", lambda *request: calls.append(1) or real(*request))
    return calls


def test_tokens_are_cached_by_content(examples, tokenizer, tmp_path, monkeypatch):
    calls = count_calls(monkeypatch)

    def tokenised_now(changes=(), records=(PAIR,), **settings) -> int:
        calls.clear()
        made = examples(list(records), **{"form": "preference", **dict(changes), **settings})
        assert len(made.rows) == len(records)
        return len(calls)

    assert tokenised_now() == 1
    assert tokenised_now() == 0
    os.utime(tmp_path / "x.jsonl", ns=(1, 1))
    assert tokenised_now() == 0, "a changed file time invalidated the cache"
    tokenizer(["anna", "anna found"], padding=True, truncation=True, max_length=1)
    assert tokenised_now() == 0, "padding settings invalidated the cache"
    assert tokenised_now(records=(PAIR, {**PAIR, "chosen": " anna"})) == 2
    assert tokenised_now({"max_length": 50}) == 1
    assert tokenised_now({"form": "prompt"}) == 1
    assert tokenised_now({"form": "prompt", "record_format": RecordFormat(input_template="{}.")}) == 1
    tokenizer.chat_template = CHAT
    assert tokenised_now() == 1
    tokenizer.add_tokens(["garden ."])
    assert tokenised_now() == 1
    tokenizer.eos_token = "<pad>"
    assert tokenised_now() == 1
    assert tokenised_now() == 0


def test_tokenizing_in_several_processes_gives_the_same_rows(examples):
    alone = examples(texts(20), "prompt").rows.to_list()
    shared = examples(texts(21)[:20], "prompt", max_length=1000, num_proc=2).rows.to_list()
    assert shared == alone


def tokenise_on_a_rank(path: str, cache: str) -> tuple[int, list]:
    """The number of records that this rank tokenized, and its rows; both ranks run at the same time."""
    calls, real = [], data.tokenize_texts
    data.tokenize_texts = lambda *request: calls.append(1) or real(*request)
    try:
        dist.barrier()
        made = tokenize_records(load_records(path, cache_dir=cache), synthetic_tokenizer(), "prompt", cache_dir=cache)
    finally:
        data.tokenize_texts = real
    return len(calls), made.rows.to_list()


def test_only_one_rank_tokenizes(ranks, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in texts(300)))
    (first, rows), (second, second_rows) = ranks.run(tokenise_on_a_rank, str(path), str(tmp_path / "cache"))
    assert sorted((first, second)) == [0, 300]
    assert rows == second_rows and len(rows) == 300


def lengths_of(names: tuple[str, ...], *lengths: tuple[int, ...]) -> list[dict]:
    """Rows of random tokens, including 0, which is also the padding token."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randint(0, 3, (n,), generator=generator).tolist() for name, n in zip(names, row, strict=True)}
        for row in lengths
    ]


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


@pytest.mark.parametrize("completion_only_loss", [False, True])
def test_supervised_batches_are_padded_with_labels(completion_only_loss):
    rows = lengths_of(("prompt_ids", "completion_ids"), (3, 4), (1, 1), (6, 2))
    batch = collate_supervised(rows, 0, completion_only_loss)
    wholes = [row["prompt_ids"] + row["completion_ids"] for row in rows]
    hidden = [-100 if completion_only_loss else None] * 6
    labels = [
        [h if h is not None else t for h, t in zip(hidden, row["prompt_ids"], strict=False)] + row["completion_ids"]
        for row in rows
    ]
    assert torch.equal(batch["input_ids"], padded(wholes, 0))
    assert batch["attention_mask"].sum(dim=1).tolist() == [7, 2, 8]
    assert torch.equal(batch["attention_mask"], padded([[1] * len(row) for row in wholes], 0))
    assert torch.equal(batch["labels"], padded(labels, -100))


def test_preference_batches_are_padded():
    rows = lengths_of(("prompt_ids", "chosen_ids", "rejected_ids"), (3, 4, 1), (1, 2, 6))
    rows = [{**row, "margin": number / 2} for number, row in enumerate(rows)]
    batch = collate_preference(rows, 0)
    assert torch.equal(batch.pop("margin"), torch.tensor([0.0, 0.5]))
    pairs = [(row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids") for row in rows]
    assert torch.equal(batch["input_ids"], padded([prompt + completion for prompt, completion in pairs], 0))
    assert batch["attention_mask"].sum(dim=1).tolist() == [7, 3, 4, 7]
    masks = [[0] * len(prompt) + [1] * len(completion) for prompt, completion in pairs]
    assert torch.equal(batch["completion_mask"], padded(masks, 0))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_prompt_batches_are_left_padded():
    rows = lengths_of(("prompt_ids",), (3,), (1,), (5,))
    batch = collate_prompts(rows, 0)
    assert torch.equal(batch["prompt_ids"], padded([row["prompt_ids"][::-1] for row in rows], 0).flip(1))
    assert batch["prompt_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1] * 5]


def test_columns_reach_a_reward_by_name(examples):
    records = [{"prompt": "a", "answer": 7, "completion": "9"}, {"prompt": "b", "tags": ["x"]}]
    rows = sorted(examples(records, "prompt").rows, key=lambda row: row["number"])
    assert reward_columns(rows) == {"answer": [7, None], "tags": [None, ["x"]]}
    assert [row["prompt"] for row in rows] == ["a", "b"]


def test_a_mapped_column_reaches_a_reward_under_its_own_name(examples):
    """Like GSM8K's `answer`, with one settings file for SFT and GRPO."""
    record_format = RecordFormat(prompt_column="question", completion_column="answer")
    (row,) = examples([{"question": "a", "answer": 7}], "prompt", record_format=record_format).rows
    assert row["prompt"] == "a" and reward_columns([row]) == {"answer": [7]}
