"""Training sees the tokens that a user of the exported model gives it: those of `tokenizer(prompt)`."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import BertProcessing, TemplateProcessing
from transformers import (
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_python import PythonBackend

from rlhf_examples import evaluate
from rlhf_examples.chat import encode_prompt
from rlhf_examples.common.arguments import EvaluateArguments
from rlhf_examples.common.models import load_tokenizer, small_model
from rlhf_examples.common.run_log import read_completions
from rlhf_examples.data.examples import tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.environments import environment_tokenizer
from tests.rlhf_examples.chat_models import tokenizer_of
from tests.rlhf_examples.scripts import TINY, run_in_this_rank

STORIES = Path("../shared/models/stories260K")
SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
WORDS = "anna found a red ball in the garden .".split()


def words(processor=None, special: dict[str, str] | None = None, **settings) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a start and an end token.  processor: what it adds to a text."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        inner.post_processor = processor
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **(special or names), **settings)


def template(single: str) -> TemplateProcessing:
    return TemplateProcessing(single, f"{single} $B:1", list(SPECIAL.items()))


def llama() -> LlamaTokenizer:
    """Llama's own class, with `add_eos_token`."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", *sorted(set("".join(WORDS)))])}
    return LlamaTokenizer(vocab=vocabulary, merges=[], add_eos_token=True)


def with_template(family: str) -> PreTrainedTokenizerFast:
    """A family's tokenizer, which adds the start token to texts, as its template does to conversations."""
    tokenizer = tokenizer_of(family)
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{start[0]} $A", f"{start[0]} $A $B", [start])
    return tokenizer


# Kind → the tokenizer, and the tokens that it adds before and after a text.
KINDS = {
    "GPT-2: has a start token and adds none": (words, [], []),
    "GPT-2: one token starts and ends texts": (
        lambda: words(special=dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "</s>")),
        [],
        [],
    ),
    "OPT: the end token starts texts": (
        lambda: words(template("</s> $A"), dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")),
        [2],
        [],
    ),
    "Llama: adds a start token": (lambda: words(add_bos_token=True), [1], []),
    "Llama with add_eos_token": (lambda: words(add_bos_token=True, add_eos_token=True), [1], [2]),
    "Llama's class with add_eos_token": (llama, [], [2]),
    "T5: adds an end token": (lambda: words(template("$A </s>")), [], [2]),
    "BERT: a token before, another after": (lambda: words(BertProcessing(("<pad>", 0), ("<unk>", 3))), [3], [0]),
    "Llama 3: the template writes the start token": (lambda: with_template("llama3"), None, []),
    "the demo's": (synthetic_tokenizer, [1], []),
    "the environments'": (environment_tokenizer, [], []),
}


@pytest.fixture(params=KINDS)
def kind(request) -> tuple[PreTrainedTokenizerBase, list[int] | None, list[int]]:
    make, before, after = KINDS[request.param]
    tokenizer = make()
    return tokenizer, [tokenizer.bos_token_id] if before is None else before, after


def tokenized(record: dict, form: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict:
    """The record as training reads it."""
    (folder / "x.jsonl").write_text(json.dumps(record))
    rows = load_records(str(folder / "x.jsonl"), cache_dir=folder / "cache")
    (row,) = tokenize_records(rows, tokenizer, form, cache_dir=folder / "cache").rows
    return row


def reloaded(tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedTokenizerBase:
    """What users of an exported tokenizer load."""
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_prompts_have_the_tokens_of_the_tokenizer(kind, tmp_path):
    """In rollouts, preference pairs, supervised records and the chat. What tokenizers add after a text is removed, from
    the exported one too."""
    given, before, after = kind
    plain, prompt = given("anna found a", add_special_tokens=False)["input_ids"], {"prompt": "anna found a"}
    assert given("anna found a")["input_ids"] == before + plain + after
    given.save_pretrained(tmp_path / "given")
    tokenizer = load_tokenizer(str(tmp_path / "given"))
    exported = reloaded(tokenizer, tmp_path / "exported")
    assert exported("anna found a")["input_ids"] == before + plain
    assert tokenized(prompt, "prompt", tokenizer, tmp_path)["prompt_ids"] == before + plain
    whole = given("anna found a red ball", add_special_tokens=False)["input_ids"] + [given.eos_token_id]
    row = tokenized({**prompt, "completion": " red ball"}, "supervised", tokenizer, tmp_path)
    assert row["prompt_ids"] == before + plain and row["prompt_ids"] + row["completion_ids"] == before + whole
    pair = {**prompt, "chosen": " red ball", "rejected": " ball"}
    row = tokenized(pair, "preference", tokenizer, tmp_path)
    assert row["prompt_ids"] + row["chosen_ids"] == before + whole
    row = tokenized({"text": "anna found a red ball"}, "supervised", tokenizer, tmp_path)
    assert row["prompt_ids"] + row["completion_ids"] == before + whole
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, [{"role": "user", "content": "anna found a"}]).tolist() == [before + plain]


@pytest.mark.parametrize("family", ["gemma", "llama3", "qwen2_5"])
def test_conversations_have_the_tokens_of_their_template(family, tmp_path):
    """The oracle is transformers' own: a start token only where the template writes one, never two."""
    given = tokenizer_of(family) if family == "qwen2_5" else with_template(family)
    exported, messages = reloaded(given, tmp_path / "exported"), [{"role": "user", "content": "Hi there"}]
    expected = exported.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    row = tokenized({"prompt": messages}, "prompt", load_tokenizer(str(tmp_path / "exported")), tmp_path)
    assert row["prompt_ids"] == expected
    assert expected.count(given.bos_token_id) == (family != "qwen2_5")
    assert encode_prompt(given, messages).tolist() == [expected]


def test_a_text_with_a_start_token_gets_no_second_one(tmp_path):
    tokenizer = words(add_bos_token=True)
    row = tokenized({"prompt": "<s> anna", "completion": "found"}, "supervised", tokenizer, tmp_path)
    assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == "<s> anna found </s>"
    twice = words()  # which adds none
    assert tokenized({"prompt": "<s> <s> anna"}, "prompt", twice, tmp_path)["prompt_ids"] == [1, 1, 4]


def test_a_prompt_without_tokens_is_left_out(tmp_path):
    inner = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    for record, form in (
        ({"prompt": "xyz"}, "prompt"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "preference"),
    ):
        with pytest.raises(ValueError, match=r"1 × the prompt has no tokens"):
            tokenized(record, form, tokenizer, tmp_path)


def test_the_start_token_is_part_of_the_cache_key(tmp_path):
    for before in ([], [1], []):
        tokenizer = words(add_bos_token=bool(before))
        assert tokenized({"prompt": "anna"}, "prompt", tokenizer, tmp_path)["prompt_ids"] == [*before, 4]


def test_an_end_token_that_cannot_be_removed_is_refused(tmp_path, monkeypatch):
    class Slow(PythonBackend):
        """Characters, in Python."""

        def __init__(self, **settings):
            super().__init__(special_tokens_pattern="eos", eos_token="</s>", **settings)

        vocab_size = property(lambda self: 128)

        def get_vocab(self):
            return {chr(i): i for i in range(127)} | {"</s>": 127}

        def _tokenize(self, text, **settings):
            return list(text)

        def _convert_token_to_id(self, token):
            return self.get_vocab()[token]

        def _convert_id_to_token(self, index):
            return "</s>" if index == 127 else chr(index)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: Slow())
    with pytest.raises(ValueError, match="tokenizer: 'x' given, which ends every text with '</s>', prompts too"):
        load_tokenizer("x")


@pytest.mark.skipif(not STORIES.exists(), reason="../shared/models is not there")
def test_the_pretrained_stories_model(tmp_path):
    given, text = AutoTokenizer.from_pretrained(STORIES), "Once upon a time"
    row = tokenized({"prompt": text}, "prompt", load_tokenizer(str(STORIES)), tmp_path)
    exported = reloaded(load_tokenizer(str(STORIES)), tmp_path / "exported")
    assert row["prompt_ids"] == given(text)["input_ids"] == exported(text)["input_ids"]
    assert row["prompt_ids"][0] == given.bos_token_id


def trained_and_used(model: str, records: str, folder: str) -> list[list[str]]:
    """Greedy completions of a policy at the end of its training, and of what it exported, called as users call it."""
    run = f"{folder}/run"
    settings = {"actor_model_name_or_path": model, "data_path": [records], "eval_data_path": [records]}
    run_in_this_rank("grpo", {**settings, "num_iterations": 2, "eval_greedy": True, "output_dir": run})
    args = EvaluateArguments(
        model_name_or_path=[f"{run}/model"],
        data_path=[records],
        reward="tests.rlhf_examples.scripts:number_of_words",
        max_answer_seq_len=TINY["grpo"]["max_answer_seq_len"],
        eval_rows=TINY["grpo"]["eval_rows"],
        temperature=0.0,
        hf_generate=True,
    )
    (result,) = evaluate.run(args)
    completions = read_completions(Path(run))
    used = {sample["prompt"]: sample["completion"] for sample in result["samples"]}
    last = completions[completions["iteration"] == 2]
    trained = dict(zip(last["prompt"], last["completion"], strict=True))
    return [[trained[prompt], used[prompt]] for prompt in trained]


@pytest.mark.parametrize("name", ["GPT-2: has a start token and adds none", "T5: adds an end token", "gemma"])
def test_an_exported_model_answers_its_users_as_in_training(name, ranks, tmp_path):
    """The oracle is transformers' `generate(**tokenizer(prompt))`, or its chat template, over what was exported."""
    is_chat = name == "gemma"
    tokenizer = with_template(name) if is_chat else KINDS[name][0]()
    torch.manual_seed(0)
    model = small_model(16, 2, tokenizer)
    for weight in filter(lambda weight: weight.dim() == 2, model.parameters()):
        torch.nn.init.normal_(weight, std=0.5)  # completions that depend on every token
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [" ".join(WORDS[i : i + 3]) for i in range(6)]
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in texts]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    for pairs in ranks.run(trained_and_used, str(tmp_path / "model"), str(tmp_path / "x.jsonl"), str(tmp_path)):
        assert len(pairs) == 5 and len({trained for trained, _ in pairs}) > 1
        assert [trained for trained, _ in pairs] == [used for _, used in pairs]
