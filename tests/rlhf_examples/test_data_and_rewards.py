"""The embedded corpus is what it says, padding comes from lengths, rewards prefer what they should."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_examples.data import corpus, corpus_tokenizer, encode_prompts, encode_stories, load_prompts, prompt_order
from rlhf_examples.rewards import cheerful, joyful_story, load_reward


def test_the_corpus_is_a_function_of_its_seed_and_wholly_known():
    stories, tokenizer = corpus(300, seed=4), corpus_tokenizer()
    assert stories == corpus(300, seed=4) != corpus(300, seed=5)
    assert len(set(stories)) > 290
    for story in stories:
        ids = tokenizer(story)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == story


def test_prompts_are_left_padded_and_stories_right_padded():
    tokenizer = corpus_tokenizer()
    ids, mask = encode_prompts(tokenizer, ["anna found", "ben found a red ball"])
    assert mask.tolist() == [[0, 0, 0, 1, 1, 1], [1] * 6]
    assert ids[0, 3] == tokenizer.bos_token_id
    ids, mask = encode_stories(tokenizer, ["anna found", "ben found a red ball"])
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1] * 7]
    assert ids[0, 3] == tokenizer.eos_token_id


def test_every_prompt_comes_once_in_a_pass():
    order = list(itertools.islice(prompt_order(10, seed=1), 30))
    assert [sorted(order[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert order[:10] != order[10:20]


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n")
    assert load_prompts(str(path), embedded=False) == ["one", "two"]
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        load_prompts(str(path), embedded=True)
    with pytest.raises(ValueError, match="no file at 'nowhere.txt'"):
        load_prompts("nowhere.txt", embedded=True)


def test_rewards_prefer_cheer_and_not_repetition():
    good, bad, plain, mad = cheerful(
        [""] * 4,
        [
            "anna laughed and danced with joy . the sun was warm and anna felt happy .",
            "anna cried and felt very sad . it was a lonely and gloomy day .",
            "anna put the ball on the table .",
            "laughed and danced laughed and danced laughed and danced laughed and danced",
        ],
    )
    assert good > plain > bad
    assert good > mad
    happy, gloomy = joyful_story([""] * 2, ["They smiled. Tom was happy and had fun!", "Tom was sad. He cried."])
    assert happy == 3.0 and gloomy == -2.0
    assert joyful_story([""], [""]) == [0.0]


def test_a_reward_that_is_not_there():
    for name in ("rlhf_examples.rewards:nothing", "no.such.module:f", "nothing"):
        with pytest.raises(ValueError, match="it must be module:function, or the directory of a sequence classifier"):
            load_reward(name)
    assert load_reward("rlhf_examples.rewards:cheerful") is cheerful


def test_a_sequence_classifier_is_a_reward(tmp_path):
    torch.manual_seed(0)
    tokenizer = corpus_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [("anna found", " a red ball"), ("ben", " cried")]
    found = load_reward(str(tmp_path))([prompt for prompt, _ in texts], [completion for _, completion in texts])
    for (prompt, completion), score in zip(texts, found, strict=True):
        with torch.no_grad():
            alone = model(**tokenizer(prompt + completion, return_tensors="pt", return_token_type_ids=False)).logits
        assert score == pytest.approx(alone.item(), abs=1e-5)
